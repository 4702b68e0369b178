"""What our kernels take of a Hopper GPU: registers, spills and shared memory of every configuration
that matters.

    make resources          compiles them all for an absent H100 and writes kernels/RESOURCES.md
    python -m specjax.kernels.gpu.resources --check         only compiles and checks; see `aot` for what
    it needs

The exit code is 1 where a kernel spills registers or wants more shared memory than there is.

What decides about a kernel's code is the shape of its tiles, not how many there are. Of the number
of kv heads, and of how many sequences there are, attention only makes its grid, except that a small
grid is split further. So a quarter of Llama-3 70B stands for all of it, and where one row differs
from another in its grid alone, one of them is enough.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from specjax.kernels import dispatch
from specjax.kernels import sampling as verify
from specjax.kernels.gpu import aot
from specjax.kernels.paged_attention import paged_attention

TABLE = pathlib.Path(__file__).parents[1] / "RESOURCES.md"
MAX_SLOTS = 8192
HEADS = {
    "Llama-3 8B": (32, 8, 128),
    "Llama-3 70B, a quarter": (16, 2, 128),
    "SmolLM2 135M": (9, 3, 64),
    "own kv heads": (8, 8, 128),
    "16 heads per kv head": (32, 2, 128),
}
WORK = {
    "one token": (1, False),
    "chain of 6": (6, False),
    "tree of 32": (32, True),
    "tree of 64": (64, True),
    "prompt chunk of 256": (256, False),
}


class Configuration(NamedTuple):
    """One way to call a kernel.

    Attributes:
      kernel: name of the kernel that is to be compiled.
      description: what distinguishes this call from the others.
      function: to compile, of
      args: abstract arguments.
    """

    kernel: str
    description: str
    function: object
    args: tuple


def configurations() -> Iterator[Configuration]:
    """Of every way to compile every kernel, a representative."""
    # How pages are read is the same code in all of these, so that each size of page meets each kind
    # of work once only.
    for page_size in (16, 32, 64, 128):
        yield _attention("Llama-3 8B", "chain of 6", page_size)
    for work, page_size in (
        ("tree of 32", 16),
        ("tree of 32", 64),
        ("tree of 64", 64),
        ("one token", 64),
        ("prompt chunk of 256", 64),
    ):
        yield _attention("Llama-3 8B", work, page_size)
    # One token of it, and its prompts, are the 8B's but for a division by the number of query heads
    # per kv head.
    for work, page_size in (("chain of 6", 64), ("tree of 64", 16)):
        yield _attention("Llama-3 70B, a quarter", work, page_size)
    for work, page_size in (
        ("chain of 6", 64),
        ("tree of 32", 64),
        ("tree of 64", 16),
        ("one token", 64),
        ("prompt chunk of 256", 64),
    ):
        yield _attention("SmolLM2 135M", work, page_size)
    yield _attention("own kv heads", "chain of 6", 64)
    yield _attention("16 heads per kv head", "tree of 64", 128)
    yield _attention("Llama-3 8B", "chain of 6", 64, batch=64)  # enough blocks without a split
    yield _attention("Llama-3 8B", "chain of 6", 64, dtype=jnp.float16)
    yield _attention("SmolLM2 135M", "tree of 32", 32, dtype=jnp.float16)
    for mode in ("greedy", "normalize"):
        yield _scan(128256, jnp.float32, mode)
    yield _residual(128256, jnp.float32, None)
    # How wide a load may be follows from the vocabulary: as wide as can be, of one number for the
    # odd ones; that of 40 is padded.
    for V, dtype in (
        (128256, jnp.float32),
        (128256, jnp.bfloat16),
        (32003, jnp.float32),
        (32003, jnp.bfloat16),
        (1001, jnp.float16),
        (40, jnp.float32),
    ):
        yield _scan(V, dtype, "draw")
        yield _residual(V, dtype, dtype)
    yield _residual(49152, jnp.float32, jnp.float32)  # SmolLM2's: no tile overlaps another
    yield _residual(128256, jnp.float32, jnp.bfloat16)


def _attention(
    heads: str, work: str, page_size: int, batch: int = 4, dtype=jnp.bfloat16
) -> Configuration:
    N, K, H = HEADS[heads]
    T, tree = WORK[work]
    X = MAX_SLOTS // page_size
    pool = Shape((batch * X, K, page_size, H), dtype)
    args = [
        Shape((batch, T, N, H), dtype),
        pool,
        pool,
        Shape((batch, X), jnp.int32),
        Shape((batch,), jnp.int32),
    ]

    def call(q_BTNH, k_pool, v_pool, block_table_BX, start_B, ancestors_BT2=None):
        return paged_attention(
            q_BTNH,
            k_pool,
            v_pool,
            block_table_BX,
            start_B,
            ancestors_BT2=ancestors_BT2,
            implementation="mosaic_gpu",
        )

    args += [Shape((batch, T, 2), jnp.int32)] if tree else []
    description = f"{heads}: N={N} K={K} H={H}, {work}, pages of {page_size}, B={batch}, {jnp.dtype(dtype).name}"
    return Configuration("paged_attention", description, call, tuple(args))


def _scan(V: int, dtype, mode: str) -> Configuration:
    B, T = 4, 6
    call = functools.partial(verify.draw, implementation="mosaic_gpu")
    temperature_B = None if mode == "greedy" else Shape((B,), jnp.float32)
    key_BT2 = Shape((B, T, 2), jnp.int32) if mode == "draw" else None
    args = (Shape((B, T, V), dtype), temperature_B, None, key_BT2)
    return Configuration("verify_scan", f"V={V}, {mode}, {jnp.dtype(dtype).name}", call, args)


def _residual(V: int, dtype, draft_dtype) -> Configuration:
    """With drafts that have distributions over logits of this dtype, or guesses where it is None."""
    B, K = 4, 5
    call = functools.partial(verify.reject, implementation="mosaic_gpu")

    def distribution(dtype, *T):
        return verify.Distribution(Shape((B, *T, V), dtype), *[Shape((B, *T), jnp.float32)] * 3)

    ids_BT, ids_BM = (Shape((B, T), jnp.int32) for T in (K + 1, K))
    draft_distribution = None if draft_dtype is None else (distribution(draft_dtype),) * K
    args = (
        distribution(dtype, K + 1),
        ids_BT,
        ids_BM,
        Shape((B,), jnp.int32),
        draft_distribution,
        Shape((B,), jnp.float32),
        Shape((B, K), jnp.float32),
        Shape((B, K + 1, 2), jnp.int32),
    )
    drafts = "guesses" if draft_distribution is None else "drafts with distributions"
    dtypes = " and ".join(
        jnp.dtype(name).name for name in dict.fromkeys((dtype, draft_dtype or dtype))
    )
    return Configuration("verify_residual", f"V={V}, {drafts}, {dtypes}", call, args)


def measure(configuration: Configuration, mesh: jax.sharding.Mesh) -> aot.Resources:
    """Compiles one configuration.

    Raises:
      RuntimeError: not exactly one kernel, of the right name, was compiled for it.
    """
    with dispatch.compiling_for(dispatch.HOPPER), aot.recorded_resources() as recorded:
        # The kernels have a compiler of their own. What is around them, which nobody runs, need not
        # be fast.
        aot.compile_(
            jax.jit(configuration.function),
            aot.abstract(configuration.args, mesh),
            {"xla_backend_optimization_level": 0},
        )
    if [found.name for found in recorded] != [configuration.kernel]:
        raise RuntimeError(
            f"{configuration.kernel}, {configuration.description}: not one kernel of that name but "
            f"{[found.name for found in recorded]} was compiled; a kernel that equals an earlier one "
            "is not compiled again, and does not belong into the list"
        )
    return recorded[0]


def problems(found: aot.Resources, limit: int) -> list[str]:
    """What is wrong with a kernel, in words."""
    wrong = [f"{found.spill_bytes} bytes of registers are spilled"] if found.spill_bytes else []
    if found.shared_memory > limit:
        wrong.append(
            f"{found.shared_memory} bytes of shared memory are wanted, and there are {limit}"
        )
    return wrong


def main(argv: list[str]) -> int:
    """Measures everything, prints the table, and writes it unless `--check` is given. Returns the
    exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m specjax.kernels.gpu.resources", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    start, mesh, limit = time.monotonic(), aot.mesh("h100"), aot.shared_memory_limit("h100")
    lines = [
        "| kernel | configuration | threads | registers | spilled bytes | shared memory |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    print("\n".join(lines))
    failures = 0
    for configuration in configurations():
        found = measure(configuration, mesh)
        lines.append(
            f"| {found.name} | {configuration.description} | {found.threads} | {found.registers} | "
            f"{found.spill_bytes} | {found.shared_memory} |"
        )
        print(lines[-1], flush=True)
        for problem in problems(found, limit):
            failures += 1
            print(
                f"resources: {found.name}, {configuration.description}: {problem}", file=sys.stderr
            )
    print(
        f"{len(lines) - 2} configurations in {time.monotonic() - start:.0f} s, {failures} problems"
    )
    if not check:
        TABLE.write_text(
            f"""# What the kernels take

Compiled for an H100 (sm_90a) by jax {jax.__version__}; written by `make resources`. A block may have {limit} bytes of
shared memory, and nothing may be spilled. `make test` compiles all of this anew and checks it.

"""
            + "\n".join(lines)
            + "\n"
        )
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
