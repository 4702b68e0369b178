"""The ways in which tests drive the decode loop: always the product's own code."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, llama
from specjax.config import Runtime
from specjax.decode import DecodeConfig, DecodeState
from specjax.engine import batch
from specjax.engine.request import SamplingOptions
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
    verify="rejection",
    prefill_chunk=8,
    logprobs=None,
    **options,
):
    """Reads prompts, and returns the arguments of `GENERATE`.

    `max_new`, `eos` and the fields of `SamplingOptions` among the options have one value for all
    rows or one per row. `capacity` is S. Other options are fields of `Runtime`.
    """
    capacity = options.pop("capacity", CAPACITY)
    fields = [field.name for field in dataclasses.fields(SamplingOptions)]
    sampling = {name: options.pop(name) for name in fields if name in options}
    rows = batch.arrays(
        prompts,
        max_length=[len(prompt) for prompt in prompts] + np.asarray(max_new),
        eos_ids=eos,
        sampling=SamplingOptions(**sampling),
        max_seq_len=capacity,
        vocab_size=target.config.vocab_size,
        num_valid_tokens=options.get("num_valid_tokens"),
    )
    tokens_BS, request = jax.tree.map(jnp.asarray, rows)
    dtype = llama.params_dtype(target.params)
    runtime = Runtime(**{"page_size": 4, "dtype": dtype, **options})
    config = DecodeConfig(target.config, drafter, verify, runtime, logprobs)
    state = INIT(target.params, draft_params, config, tokens_BS, request, prefill_chunk)
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
