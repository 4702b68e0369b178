"""Compiles the decode loop for an absent H100, and what is wrong on purpose: `python decode_step.py
FOLDER NAMES`.

Run by `gate.py` in a process of its own. Every program gets a folder, with its optimized HLO, its
thunks, and the figures that the tests need.
"""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from specjax import decode, llama
from specjax.config import LlamaConfig, Runtime
from specjax.decode import DecodeConfig, RequestArrays
from specjax.drafters import eagle, registry
from specjax.engine import batch, programs, runner
from specjax.kernels import dispatch
from specjax.kernels.gpu import aot
from specjax.sampling import SamplingArrays
from specjax.train import eagle as eagle_training

# A Llama-3 8B and a Llama-3 1B that have few layers; all layers are alike. No activation is as
# large as the smallest weight, and no weight as large as the smallest pool.
TARGET = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
DRAFT = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
)
HEAD = eagle_training.make_config(TARGET, aux_layers=(0, 1))
B, S, K = 4, 16384, 2  # the steps of a draft are alike, and each takes seconds to compile

# name: drafter, way of verifying, whether rows have filters, kernels of ours in a round
PROGRAMS = {
    "plain": (None, "rejection", True, TARGET.num_layers + 1),
    "rejection": (
        "draft_model",
        "rejection",
        True,
        TARGET.num_layers + K * (DRAFT.num_layers + 1) + 2,
    ),
    "coupled": (
        "draft_model",
        "coupled",
        False,
        TARGET.num_layers + K * (DRAFT.num_layers + 1) + 1,
    ),
    "eagle": ("eagle", "rejection", True, TARGET.num_layers + K * (1 + 1) + 2),
    "ngram": (
        "ngram",
        "rejection",
        False,
        2 * TARGET.num_layers + 3,
    ),  # a round with guesses, and one without
}


# Programs of an engine with the drafter of "rejection", and its numbers of rows and pages.
ENGINE_PROGRAMS = ("engine_rounds", "engine_prefill")
ROWS, PAGES, CHUNK = 16, 1024, 16


def main(folder: pathlib.Path, names: list[str]) -> None:
    """Compiles the programs of these names; "broken" stands for those that are wrong on purpose."""
    mesh = aot.mesh("h100")
    for name in names:
        if name == "broken":
            compile_broken(folder, mesh)
        elif name in ENGINE_PROGRAMS:
            compile_engine(folder / name, name, mesh)
        else:
            compile_loop(folder / name, name, mesh)


def compile_loop(folder: pathlib.Path, name: str, mesh) -> None:
    start = time.monotonic()
    config, args, kernels = arguments(name)
    function = jax.jit(decode.generate, static_argnums=2, donate_argnums=3)
    params, draft_params, state = aot.abstract(args, mesh)
    caches = jax.tree.leaves((state.cache, state.drafter))
    leaves = jax.tree.leaves_with_path((params, draft_params))
    save(
        folder,
        function,
        (params, draft_params, config, state),
        jax.tree.leaves(state),
        [x for x in caches if len(x.shape) > 2],  # and a head's features
        [x for path, x in leaves if "norm" not in path[-1].key],
        start,
        kernels=kernels,
        filters=PROGRAMS[name][2],
        logits_bytes=logits_bytes(name),
    )


def compile_engine(folder: pathlib.Path, name: str, mesh) -> None:
    """Compiles a program of an engine with the draft model, for B of its ROWS rows."""
    start = time.monotonic()
    config, (params, draft_params, _), kernels = arguments("rejection")
    state = jax.eval_shape(
        lambda params, draft_params: programs.init(
            params, draft_params, config, ROWS, S, PAGES, batch.MAX_STOP_IDS
        ),
        params,
        draft_params,
    )
    ids = lambda *shape: Shape(shape, jnp.int32)  # noqa: E731
    pages = programs.Pages(ids(B), ids(B, S // config.runtime.page_size + 1), ids(B))
    if name == "engine_rounds":
        function = jax.jit(programs.rounds, static_argnums=(2, 7, 8), donate_argnums=3)
        rest = (pages, None, ids(2))
        static = (runner.MAX_ROUNDS, False)
    else:
        function = jax.jit(programs.prefill, static_argnums=(2, 7), donate_argnums=3)
        rest, static = (pages, ids(B), ids(B)), (CHUNK,)
        # Attention of the last layer only leads to logits, which a prompt does not need.
        kernels = TARGET.num_layers - 1 + DRAFT.num_layers - 1
    params, draft_params, state, *rest = aot.abstract((params, draft_params, state, *rest), mesh)
    leaves = jax.tree.leaves_with_path((params, draft_params))
    save(
        folder,
        function,
        (params, draft_params, config, state, *rest, *static),
        jax.tree.leaves(state),
        [x for x in jax.tree.leaves((state.cache, state.drafter)) if len(x.shape) > 2],
        [x for path, x in leaves if "norm" not in path[-1].key],
        start,
        kernels=kernels,
        filters=True,
        logits_bytes=logits_bytes("rejection"),
    )


def compile_broken(folder: pathlib.Path, mesh) -> None:
    for name, (function, args, donate) in broken().items():
        args = aot.abstract(args, mesh)
        pool, weight, _ = args
        function = jax.jit(function, donate_argnums=donate)
        save(folder / name, function, args, [pool], [pool], [weight], time.monotonic())
    x, weight = Shape((B, 4096), jnp.bfloat16), Shape((4096, TARGET.vocab_size), jnp.bfloat16)
    compile_(
        folder / "logits_stacked",
        jax.jit(stack_logits),
        aot.abstract((x, weight), mesh),
        time.monotonic(),
        pools=[],
        smallest_logits=B * TARGET.vocab_size,
    )


def arguments(name: str):
    """The static configuration of `decode.generate`, its abstract arguments, and the kernels of
    ours in a round."""
    drafter, mode, filters, kernels = PROGRAMS[name]
    draft_params = None
    if drafter == "draft_model":
        drafter = registry.make(drafter, K, TARGET, DRAFT)
        draft_params = llama.abstract_params(DRAFT, jnp.bfloat16)
    elif drafter == "eagle":
        drafter = registry.make(drafter, K, TARGET, HEAD)
        draft_params = eagle.abstract_params(HEAD, jnp.bfloat16)
    elif drafter:
        drafter = registry.make(drafter, K, TARGET)
    runtime = Runtime(jnp.bfloat16, implementation="mosaic_gpu")
    config = DecodeConfig(TARGET, drafter, verify=mode, runtime=runtime)
    params = llama.abstract_params(TARGET, jnp.bfloat16)
    ids = lambda *shape: Shape(shape, jnp.int32)  # noqa: E731
    rows = Shape((B,), jnp.float32)
    sampling = SamplingArrays(
        seed_B=Shape((B,), jnp.uint32),
        temperature_B=rows,
        **(dict(top_k_B=ids(B), top_p_B=rows, min_p_B=rows) if filters else {}),
    )
    state = jax.eval_shape(
        lambda params, draft_params, *args: decode.init(params, draft_params, config, *args),
        params,
        draft_params,
        ids(B, S),
        RequestArrays(ids(B), ids(B), ids(B, 3), sampling),
    )
    return config, (params, draft_params, state), kernels


def logits_bytes(name: str) -> int:
    """Of the logits that must be there at once: the target's, two more for filters to search in,
    and the drafts' where their distributions are needed after those."""
    drafter, mode, filters, _ = PROGRAMS[name]
    rows = (K + 1 if drafter else 1) * (3 if filters else 1)
    distributions = K if drafter in ("draft_model", "eagle") and mode == "rejection" else 0
    return 4 * B * TARGET.vocab_size * (rows + distributions)


def stack_logits(x_BD, weight_DV):
    """What must not happen."""
    logits = [
        jnp.dot(x_BD, weight_DV, preferred_element_type=jnp.float32)
        for x_BD in (x_BD, jnp.tanh(x_BD))
    ]
    return jax.lax.optimization_barrier(jnp.stack(logits, axis=1)).argmax(axis=2)


def broken():
    """Loops that look like ours and each break one rule; name: function, abstract arguments,
    donated arguments."""

    def loop(more):
        def body(carry):
            i, pool, weight, x = carry
            pool, x = more(
                i, pool, weight, pool.at[i % 512, :, i % 64].set(x[:8, :128]), jnp.tanh(x @ weight)
            )
            return i + 1, pool, weight, x

        def function(pool, weight, x):
            return jax.lax.while_loop(lambda carry: carry[0] < 100, body, (0, pool, weight, x))[
                1::2
            ]

        return function

    args = (
        Shape((512, 8, 64, 128), jnp.bfloat16),
        Shape((4096, 4096), jnp.bfloat16),
        Shape((16, 4096), jnp.bfloat16),
    )

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
    return {
        "right": (loop(right), args, 0),
        "not_donated": (loop(right), args, ()),
        "through_host": (loop(through_host), args, 0),
        "weight_converted": (loop(convert), args, 0),
        "pool_rebuilt": (loop(keep_both), args, 0),
        "loop_inside": (loop(loop_inside), args, 0),
    }


def save(
    folder: pathlib.Path, function, args, donated, pools, weights, start: float, **facts
) -> None:
    """Compiles one program of the loop and writes down what there is to know about it."""
    size = lambda x: x.size * x.dtype.itemsize  # noqa: E731
    compile_(
        folder,
        function,
        args,
        start,
        pools=sorted({x.shape for x in pools}),
        pool_bytes=sum(map(size, pools)),
        smallest_pool_bytes=min(map(size, pools)),
        smallest_weight=min(x.size for x in weights),
        state_bytes=sum(map(size, donated)),
        smallest_logits=B * TARGET.vocab_size,
        **facts,
    )


def compile_(folder: pathlib.Path, function, args, start: float, **facts) -> None:
    """Compiles one program and saves it, with these facts and some about its memory."""
    program = aot.compile_(function, args, {"xla_dump_to": str(folder / "dump")})
    folder.joinpath("hlo.txt").write_text(program.as_text())
    # Where no pass over the thunks runs, which is where command buffers are made, there is only the
    # shorter name.
    thunks = sorted(folder.glob("dump/*.thunk_sequence*.txt"), key=lambda path: len(path.name))[-1]
    thunks.rename(folder / "thunks.txt")
    memory = program.memory_analysis()
    facts |= dict(
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        seconds=time.monotonic() - start,
    )
    folder.joinpath("facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    with dispatch.compiling_for(dispatch.HOPPER):
        main(pathlib.Path(sys.argv[1]), sys.argv[2:])
