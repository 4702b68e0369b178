"""The ways in which tests drive the decode loop: always the product's own code."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, llama
from specjax import sampling as sampling_lib
from specjax.config import Runtime
from specjax.decode import DecodeConfig, DecodeState
from support.models import Model

INIT = decode.init_jit


GENERATE = decode.generate_jit


# One shape for most runs, so that they share compiled programs.
CAPACITY = 48


class Result(NamedTuple):
    """What a run emitted, row by row, and the state it ended in."""

    emitted: list[list[int]]
    state: DecodeState


def prepare(
    target: Model,
    prompts,
    *,
    drafter=None,
    draft_params=None,
    max_new=16,
    eos=(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    capacity: int = CAPACITY,
    **config,
):
    """Reads prompts; every keyword but `drafter`, `draft_params` and `capacity` is one value for
    all rows or a list.

    Returns the arguments of `GENERATE`.
    """
    B = len(prompts)
    tokens_BS = np.zeros((B, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = prompt
    length_B = np.array([len(prompt) for prompt in prompts], np.int32)
    eos_BE = np.full((B, 3), -1, np.int32)
    for row, ids in enumerate(eos if isinstance(eos, list) else [eos] * B):
        eos_BE[row, : len(ids)] = ids

    def rows(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (B,)))

    sampling = sampling_lib.arrays(
        rows(seed, np.uint32),
        rows(temperature, np.float32),
        rows(top_k, np.int32),
        rows(top_p, np.float32),
        rows(min_p, np.float32),
    )
    prefill_chunk = config.pop("prefill_chunk", 8)
    loop_options = {name: config.pop(name) for name in ("verify",) if name in config}
    runtime = Runtime(**{"page_size": 4, "dtype": llama.params_dtype(target.params), **config})
    config = DecodeConfig(target.config, drafter, runtime=runtime, **loop_options)
    request = decode.RequestArrays(
        prompt_length_B=jnp.asarray(length_B),
        max_length_B=jnp.asarray(length_B + np.asarray(max_new, np.int32)),
        eos_BE=jnp.asarray(eos_BE),
        sampling=sampling,
    )
    state = INIT(
        target.params, draft_params, config, jnp.asarray(tokens_BS), request, prefill_chunk
    )
    return target.params, draft_params, config, state


def result(state: DecodeState) -> Result:
    """The text after the prompts."""
    tokens_BS, start_B, end_B = map(
        np.asarray, (state.tokens_BS, state.request.prompt_length_B, state.length_B)
    )
    rows = zip(tokens_BS, start_B, end_B, strict=True)
    return Result([tokens_S[start:end].tolist() for tokens_S, start, end in rows], state)


def run(target: Model, prompts, **options) -> Result:
    """Runs the loop to its end; for the options see `prepare`."""
    return result(GENERATE(*prepare(target, prompts, **options)))


@contextlib.contextmanager
def compilations():
    """A list to which an entry is added for every program that XLA compiles meanwhile."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
