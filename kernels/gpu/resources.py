"""Registers, spills and shared memory of every kernel configuration on a Hopper GPU.

    make resources          compiles all for an absent H100 and writes kernels/RESOURCES.md
    python -m specjax.kernels.gpu.resources --check         compiles and checks only; needs `aot`

The exit code is 1 if a kernel spills registers or needs more shared memory than is available.

The code of a kernel depends on the shape of its tiles, not on their number. The number of sequences
and of kv heads only sets the grid of attention, except that a small grid is split further. So a
quarter of Llama-3 70B represents all of it, and of configurations that differ in their grids alone,
one is enough.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from specjax.kernels import dispatch
from specjax.kernels.gpu import aot
from specjax.kernels.paged_attention import paged_attention
from specjax.kernels.sampling import Distribution, residual_pass, sample_pass

HEADER = (
    "| kernel | configuration | threads | registers | spilled bytes | shared memory |",
    "| --- | --- | ---: | ---: | ---: | ---: |",
)
TABLE = pathlib.Path(__file__).parents[1] / "RESOURCES.md"
MAX_SEQ_LEN = 8192
HEADS = {
    "Llama-3 8B": (32, 8, 128),
    "Llama-3 70B, a quarter": (16, 2, 128),
    "SmolLM2 135M": (9, 3, 64),
    "multi-head attention": (8, 8, 128),
    "16 heads per kv head": (32, 2, 128),
}
WORK = {
    "one token": (1, False),
    "chain of 6": (6, False),
    "tree of 32": (32, True),
    "tree of 64": (64, True),
    "prompt chunk of 256": (256, False),
}


# Page sizes and kinds of work of one set of heads. How pages are read is the same code in all of
# these, so each page size meets each kind of work only once.
ATTENTION = (
    ("Llama-3 8B", "chain of 6", 16),
    ("Llama-3 8B", "chain of 6", 32),
    ("Llama-3 8B", "chain of 6", 64),
    ("Llama-3 8B", "chain of 6", 128),
    ("Llama-3 8B", "tree of 32", 16),
    ("Llama-3 8B", "tree of 32", 64),
    ("Llama-3 8B", "tree of 64", 64),
    ("Llama-3 8B", "one token", 64),
    ("Llama-3 8B", "prompt chunk of 256", 64),
    # One token of it, and its prompts, equal the 8B's but for a division by the number of query
    # heads per kv head.
    ("Llama-3 70B, a quarter", "chain of 6", 64),
    ("Llama-3 70B, a quarter", "tree of 64", 16),
    ("SmolLM2 135M", "chain of 6", 64),
    ("SmolLM2 135M", "tree of 32", 64),
    ("SmolLM2 135M", "tree of 64", 16),
    ("SmolLM2 135M", "one token", 64),
    ("SmolLM2 135M", "prompt chunk of 256", 64),
    ("multi-head attention", "chain of 6", 64),
    ("16 heads per kv head", "tree of 64", 128),
)
# The vocabulary decides how wide a load may be: as wide as possible, or of one number for odd
# sizes. The vocabulary of 40 is padded.
VOCABULARIES = (
    (128256, jnp.float32),
    (128256, jnp.bfloat16),
    (32003, jnp.float32),
    (32003, jnp.bfloat16),
    (1001, jnp.float16),
    (40, jnp.float32),
)


class Configuration(NamedTuple):
    """One way to call a kernel.

    Attributes:
      kernel: name of the kernel to compile.
      description: what distinguishes this call from the others.
      function: the function to compile.
      args: its abstract arguments.
    """

    kernel: str
    description: str
    function: Callable
    args: tuple


def configurations() -> Iterator[Configuration]:
    """Yields one representative of every way to compile every kernel."""
    for heads, work, page_size in ATTENTION:
        yield _attention(heads, work, page_size)
    yield _attention("Llama-3 8B", "chain of 6", 64, batch=64)  # enough blocks without a split
    yield _attention("Llama-3 8B", "chain of 6", 64, dtype=jnp.float16)
    yield _attention("SmolLM2 135M", "tree of 32", 32, dtype=jnp.float16)
    yield _sample(128256, jnp.float32, "greedy")
    yield _sample(128256, jnp.float32, "without noise")
    yield _residual(128256, jnp.float32, "one-hot drafts")
    yield _residual(128256, jnp.float32, "mixed drafts", jnp.float32)
    for V, dtype in VOCABULARIES:
        yield _sample(V, dtype, "with noise")
        yield _residual(V, dtype, "sampled drafts", dtype)
    # SmolLM2's vocabulary: no tile overlaps another.
    yield _residual(49152, jnp.float32, "sampled drafts", jnp.float32)
    yield _residual(128256, jnp.float32, "sampled drafts", jnp.bfloat16)


def _attention(
    heads: str, work: str, page_size: int, batch: int = 4, dtype=jnp.bfloat16
) -> Configuration:
    N, K, H = HEADS[heads]
    T, is_tree = WORK[work]
    X = MAX_SEQ_LEN // page_size
    pool = Shape((batch * X, K, page_size, H), dtype)
    args = [
        Shape((batch, T, N, H), dtype),
        pool,
        pool,
        Shape((batch, X), jnp.int32),
        Shape((batch,), jnp.int32),
    ]
    if is_tree:
        args.append(Shape((batch, T, 2), jnp.int32))

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

    shape = f"N={N} K={K} H={H}, {work}, pages of {page_size}, B={batch}"
    description = f"{heads}: {shape}, {jnp.dtype(dtype).name}"
    return Configuration("paged_attention", description, call, tuple(args))


def _sample(V: int, dtype, mode: str) -> Configuration:
    B, T = 4, 6
    call = functools.partial(sample_pass, implementation="mosaic_gpu")
    temperature_B = None if mode == "greedy" else Shape((B,), jnp.float32)
    key_BT2 = Shape((B, T, 2), jnp.int32) if mode == "with noise" else None
    args = (Shape((B, T, V), dtype), temperature_B, None, key_BT2)
    return Configuration("sample_pass", f"V={V}, {mode}, {jnp.dtype(dtype).name}", call, args)


def _residual(V: int, dtype, drafts: str, draft_dtype=None) -> Configuration:
    """Drafts are one-hot where `draft_dtype` is None; mixed drafts are one-hot in some rows."""
    B, M = 4, 5
    call = functools.partial(residual_pass, implementation="mosaic_gpu")
    q = None
    if draft_dtype is not None:
        q = (_distribution((B,), V, draft_dtype),) * M
    args = (
        _distribution((B, M + 1), V, dtype),
        Shape((B, M), jnp.int32),
        q,
        Shape((B,), jnp.bool_) if drafts == "mixed drafts" else None,
        Shape((B,), jnp.int32),
        Shape((B,), jnp.bool_),
        Shape((B,), jnp.float32),
        Shape((B, 2), jnp.int32),
    )
    dtypes = dict.fromkeys((dtype, draft_dtype or dtype))
    names = " and ".join(jnp.dtype(name).name for name in dtypes)
    return Configuration("residual_pass", f"V={V}, {drafts}, {names}", call, args)


def _distribution(shape: tuple[int, ...], V: int, dtype) -> Distribution:
    statistic = Shape(shape, jnp.float32)
    return Distribution(Shape((*shape, V), dtype), statistic, statistic, statistic)


def measure(configuration: Configuration, mesh: jax.sharding.Mesh) -> aot.Resources:
    """Returns the resources of one configuration, which it compiles.

    Raises:
      RuntimeError: if anything but one kernel of the right name was compiled.
    """
    with dispatch.compiling_for(dispatch.HOPPER), aot.recorded_resources() as recorded:
        # The kernels have their own compiler. The code around them is never run, and need not be
        # fast.
        aot.compile_(
            jax.jit(configuration.function),
            aot.abstract(configuration.args, mesh),
            {"xla_backend_optimization_level": 0},
        )
    names = [found.name for found in recorded]
    if names != [configuration.kernel]:
        raise RuntimeError(
            f"{configuration.kernel}, {configuration.description}: expected one kernel of this "
            f"name, compiled {names}; a kernel equal to an earlier one is not compiled again and "
            "does not belong in the list"
        )
    return recorded[0]


def problems(found: aot.Resources, limit: int) -> list[str]:
    """Returns descriptions of a kernel's problems. `limit` is of shared memory, in bytes."""
    wrong = []
    if found.spill_bytes:
        wrong.append(f"{found.spill_bytes} bytes of registers are spilled")
    if found.shared_memory > limit:
        wrong.append(f"requires {found.shared_memory} bytes of shared memory, got {limit}")
    return wrong


def main(argv: list[str]) -> int:
    """Measures everything, prints the table, and writes it unless `--check` is given.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m specjax.kernels.gpu.resources", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--every", type=int, default=1, help="with --check: only each N-th configuration"
    )
    flags = parser.parse_args(argv)
    is_check = flags.check
    if flags.every < 1 or (flags.every > 1 and not is_check):
        parser.error("--every must be at least 1, and applies to --check only")
    start, mesh, limit = time.monotonic(), aot.mesh("h100"), aot.shared_memory_limit("h100")
    lines = [*HEADER]
    print("\n".join(lines))
    failures = 0
    for configuration in itertools.islice(configurations(), 0, None, flags.every):
        found = measure(configuration, mesh)
        lines.append(_line(configuration, found))
        print(lines[-1], flush=True)
        for problem in problems(found, limit):
            failures += 1
            name = f"{found.name}, {configuration.description}"
            print(f"resources: {name}: {problem}", file=sys.stderr)
    count = len(lines) - len(HEADER)
    seconds = time.monotonic() - start
    print(f"{count} configurations in {seconds:.0f} s, {failures} problems")
    if not is_check:
        TABLE.write_text(_document(lines, limit))
    return min(failures, 1)


def _line(configuration: Configuration, found: aot.Resources) -> str:
    cells = (
        found.name,
        configuration.description,
        found.threads,
        found.registers,
        found.spill_bytes,
        found.shared_memory,
    )
    return f"| {' | '.join(map(str, cells))} |"


def _document(lines: list[str], limit: int) -> str:
    introduction = f"""# Resources of the kernels

Compiled for an H100 (sm_90a) by jax {jax.__version__}; written by `make resources`. The limit
is {limit} bytes of shared memory per block, and no register may be spilled. `make test` compiles
every configuration again and checks it.

"""
    return introduction + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
