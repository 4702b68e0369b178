"""Compiles the decode loop for an absent H100, and loops that are wrong on purpose: `python decode_step.py FOLDER`.

Run by `gate.py` in a process of its own. Every program gets a folder, with its optimized HLO, its thunks, and the
figures that the tests need.
"""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from specjax import decode, llama
from specjax.config import LlamaConfig
from specjax.decode import DecodeConfig
from specjax.drafters import base
from specjax.kernels import aot, dispatch
from specjax.sampling import SamplingParams

# A Llama-3 8B and a Llama-3 1B that have few layers; all layers are alike. No activation is as large as the smallest
# weight, and no weight as large as the smallest pool.
TARGET = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=2, num_heads=32,
                     num_kv_heads=8, head_dim=128)
DRAFT = LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=1, num_heads=32,
                    num_kv_heads=8, head_dim=64, tie_word_embeddings=True)
B, S, K = 4, 16384, 2  # the steps of a draft are alike, and each takes seconds to compile

# name: drafter, way of verifying, whether rows have filters, kernels of ours in a round
PROGRAMS = {
    "plain": (None, "rejection", True, TARGET.num_layers + 1),
    "rejection": ("draft_model", "rejection", False, TARGET.num_layers + K * (DRAFT.num_layers + 1) + 2),
    "coupled": ("draft_model", "coupled", False, TARGET.num_layers + K * (DRAFT.num_layers + 1) + 1),
    "ngram": ("ngram", "rejection", False, 2 * TARGET.num_layers + 3),  # a round with guesses, and one without
}


def main(folder: pathlib.Path) -> None:
    mesh = aot.mesh("h100")
    for name in PROGRAMS:
        start = time.monotonic()
        config, args, kernels = arguments(name)
        function = jax.jit(decode.generate, static_argnums=2, donate_argnums=3)
        params, draft_params, state = aot.abstract(args, mesh)
        pools = [x for x in jax.tree.leaves((state.cache, state.drafter)) if len(x.shape) == 4]
        weights = [x for x in jax.tree.leaves((params, draft_params)) if len(x.shape) > 1]
        save(folder / name, function, (params, draft_params, config, state), jax.tree.leaves(state), pools, weights,
             kernels, start)
    for name, (function, args, donate) in broken().items():
        args = aot.abstract(args, mesh)
        pool, weight, _ = args
        function = jax.jit(function, donate_argnums=donate)
        save(folder / name, function, args, [pool], [pool], [weight], 0, time.monotonic())


def arguments(name: str):
    """The static configuration of `decode.generate`, its abstract arguments, and the kernels of ours in a round."""
    drafter, mode, filters, kernels = PROGRAMS[name]
    draft_params = None
    if drafter == "draft_model":
        drafter = base.make(drafter, K, TARGET, DRAFT, implementation="mosaic_gpu")
        draft_params = llama.abstract_params(DRAFT, jnp.bfloat16)
    elif drafter:
        drafter = base.make(drafter, K, TARGET)
    config = DecodeConfig(TARGET, drafter, verify=mode, implementation="mosaic_gpu")
    params = llama.abstract_params(TARGET, jnp.bfloat16)
    ids = lambda *shape: Shape(shape, jnp.int32)  # noqa: E731
    rows = Shape((B,), jnp.float32)
    sampling = SamplingParams(seed_B=Shape((B,), jnp.uint32), temperature_B=rows,
                              **(dict(top_k_B=ids(B), top_p_B=rows, min_p_B=rows) if filters else {}))
    state = jax.eval_shape(lambda params, draft_params, *args: decode.init(params, draft_params, config, *args),
                           params, draft_params, ids(B, S), ids(B), ids(B), ids(B, 3), sampling)
    return config, (params, draft_params, state), kernels


def broken():
    """Loops that look like ours and each break one rule; name: function, abstract arguments, donated arguments."""

    def loop(more):
        def body(carry):
            i, pool, weight, x = carry
            pool, x = more(i, pool, weight, pool.at[i % 512, :, i % 64].set(x[:8, :128]), jnp.tanh(x @ weight))
            return i + 1, pool, weight, x

        def function(pool, weight, x):
            return jax.lax.while_loop(lambda carry: carry[0] < 100, body, (0, pool, weight, x))[1::2]

        return function

    args = (Shape((512, 8, 64, 128), jnp.bfloat16), Shape((4096, 4096), jnp.bfloat16), Shape((16, 4096), jnp.bfloat16))

    def through_host(i, pool, weight, new, x):
        there = jax.lax.optimization_barrier(jax.device_put(x, jax.memory.Space.Host))
        return new, jax.device_put(there, jax.memory.Space.Device)

    def convert(i, pool, weight, new, x):
        wide = jax.lax.optimization_barrier((weight + i.astype(jnp.bfloat16)).astype(jnp.float32))
        return new, x + (x @ wide).astype(x.dtype)

    def keep_both(i, pool, weight, new, x):
        return jnp.where(x[0, 0] > 0, new, pool[::-1]), x

    def loop_inside(i, pool, weight, new, x):
        return new, jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)

    right = lambda i, pool, weight, new, x: (new, x)  # noqa: E731
    return {"right": (loop(right), args, 0), "not_donated": (loop(right), args, ()),
            "through_host": (loop(through_host), args, 0), "weight_converted": (loop(convert), args, 0),
            "pool_rebuilt": (loop(keep_both), args, 0), "loop_inside": (loop(loop_inside), args, 0)}  # fmt: skip


def save(folder: pathlib.Path, function, args, donated, pools, weights, kernels: int, start: float) -> None:
    """Compiles one program and writes down what there is to know about it."""
    program = aot.compile_(function, args, {"xla_dump_to": str(folder / "dump")})
    size = lambda x: x.size * x.dtype.itemsize  # noqa: E731
    folder.joinpath("hlo.txt").write_text(program.as_text())
    # Where no pass over the thunks runs, which is where command buffers are made, there is only the shorter name.
    thunks = sorted(folder.glob("dump/*.thunk_sequence*.txt"), key=lambda path: len(path.name))[-1]
    thunks.rename(folder / "thunks.txt")
    memory = program.memory_analysis()
    folder.joinpath("facts.json").write_text(json.dumps(dict(
        pools=sorted({x.shape for x in pools}), pool_bytes=sum(map(size, pools)),
        smallest_pool_bytes=min(map(size, pools)), smallest_weight=min(x.size for x in weights),
        temporary_bytes=memory.temp_size_in_bytes, aliased_bytes=memory.alias_size_in_bytes,
        state_bytes=sum(map(size, donated)), logits_bytes=4 * B * (2 * K + 1) * TARGET.vocab_size,
        kernels=kernels, seconds=time.monotonic() - start)))  # fmt: skip


if __name__ == "__main__":
    with dispatch.compiling_for(dispatch.HOPPER):
        main(pathlib.Path(sys.argv[1]))
