"""The device programs of an engine: `admit`, `prefill` and `rounds`.

An `EngineState` has a row for each request that may run, and pools of pages for all of them. A
program takes the numbers of the rows that it works on. It gathers these rows, which are small, into
a `DecodeState`, runs the decode loop's own functions, and puts the rows back. Pools never move:
they are donated and updated in place.

The host decides which page belongs to which row. Block tables are therefore arguments of each call,
and no part of the state.

On a mesh each data-parallel replica has rows and pools of its own. Row numbers and pages count
those of one replica, and the arguments of a call have the same number of rows for each replica, one
replica after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from specjax import decode, llama, parallel
from specjax.decode import DecodeConfig, DecodeState, RequestArrays, RoundLog
from specjax.kv_cache import PagedKVCache
from specjax.lax_utils import with_standard_promotion
from specjax.processors import ProcessorArrays
from specjax.sampling import Logprobs, SamplingArrays


@struct.dataclass
class EngineState:
    """Rows of requests, and pools of pages. For the fields see `decode.DecodeState`.

    `request.sampling` has all of its fields. `request.processors` is None: processors are an
    argument of `rounds`, since most requests have none.
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    active_B: jax.Array
    failed_B: jax.Array
    cache: PagedKVCache
    drafter: Any
    request: RequestArrays


@struct.dataclass
class Pages:
    """Which rows a call works on, and their pages.

    Attributes:
      row_B: int32, numbers of rows of the replica; the replica's number of rows stands for none.
      block_table_BX: int32, pages of each row, see `kv_cache`.
      capacity_B: int32, how many of the first positions of each row have pages.
    """

    row_B: jax.Array
    block_table_BX: jax.Array
    capacity_B: jax.Array


@struct.dataclass
class Admission:
    """New contents of some rows.

    Attributes:
      row_B: int32, see `Pages`.
      tokens_BS: int32, the prompt, and what an earlier run of the request had generated.
      length_B: int32, their number.
      start_B: int32, how many of the first positions are complete in the pages of the row.
      request: constants of the request; its processors are admitted by `admit_processors`.
    """

    row_B: jax.Array
    tokens_BS: jax.Array
    length_B: jax.Array
    start_B: jax.Array
    request: RequestArrays


@struct.dataclass
class Report:
    """What a call of `rounds` did, row by row, in the order of its arguments.

    Attributes:
      tokens_BS: int32, the new tokens of each row, padded on the right; S = R (M + 1) for at most R
        rounds in a call.
      length_B: int32, committed tokens.
      active_B: bool, rows that still generate.
      failed_B: bool, rows that ended because of unusable logits, see `DecodeState`.
      complete_B: int32, how many of the first positions are complete in all pools. Pages up to
        there may be shared.
      log: statistics of the rounds of this call, in tables of R columns.
      logprobs: of the new tokens; None unless asked for.
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    active_B: jax.Array
    failed_B: jax.Array
    complete_B: jax.Array
    log: RoundLog
    logprobs: Logprobs | None = None


def init(
    params,
    drafter_params,
    config: DecodeConfig,
    num_rows: int,
    max_seq_len: int,
    num_pages: int,
    num_eos_ids: int,
) -> EngineState:
    """Returns the state without requests.

    Args:
      params: the target's parameters.
      drafter_params: the drafter's.
      config: static.
      num_rows: rows of a replica (static).
      max_seq_len: S, the largest length of a row (static).
      num_pages: P, pages of a replica's pools (static).
      num_eos_ids: E, most end-of-sequence ids of a request (static).
    """

    def run(params, drafter_params):
        zeros_B = functools.partial(jnp.zeros, num_rows)
        state = EngineState(
            tokens_BS=jnp.zeros((num_rows, max_seq_len), jnp.int32),
            length_B=zeros_B(jnp.int32),
            active_B=zeros_B(bool),
            failed_B=zeros_B(bool),
            cache=llama.init_cache(config.target, config.runtime, num_pages),
            drafter=(),
            request=RequestArrays(
                prompt_length_B=zeros_B(jnp.int32),
                max_length_B=zeros_B(jnp.int32),
                eos_BE=jnp.full((num_rows, num_eos_ids), -1, jnp.int32),
                sampling=SamplingArrays(
                    seed_B=zeros_B(jnp.uint32),
                    temperature_B=zeros_B(jnp.float32),
                    top_k_B=zeros_B(jnp.int32),
                    top_p_B=jnp.ones(num_rows, jnp.float32),
                    min_p_B=zeros_B(jnp.float32),
                ),
            ),
        )
        if config.drafter is None:
            return state
        pages = Pages(
            row_B=jnp.arange(num_rows),
            block_table_BX=jnp.full((num_rows, 1), num_pages, jnp.int32),
            capacity_B=zeros_B(jnp.int32),
        )
        context = decode.drafter_context(params, config, _gather(config, state, pages))
        return state.replace(drafter=config.drafter.init(drafter_params, context))

    def in_specs(params, drafter_params):
        return decode.param_specs(params, drafter_params)

    run = parallel.on_mesh(run, config.runtime.mesh, in_specs, decode.state_specs)
    return run(params, drafter_params)


def admit(config: DecodeConfig, state: EngineState, admission: Admission) -> EngineState:
    """Gives rows to requests. Rows that go on with a prompt are read by `prefill` afterwards."""

    def run(admission, state):
        row_B = admission.row_B

        def set_rows(x, new):
            return x.at[row_B].set(new.astype(x.dtype), mode="drop")

        is_new_B = jnp.zeros_like(state.active_B).at[row_B].set(True, mode="drop")
        drafter_state = state.drafter
        if config.drafter:
            start_B = set_rows(jnp.zeros_like(state.length_B), admission.start_B)
            drafter_state = config.drafter.begin(drafter_state, is_new_B, start_B)
        return state.replace(
            tokens_BS=set_rows(state.tokens_BS, admission.tokens_BS),
            length_B=set_rows(state.length_B, admission.length_B),
            active_B=state.active_B | is_new_B,
            failed_B=state.failed_B & ~is_new_B,
            drafter=drafter_state,
            request=jax.tree.map(set_rows, state.request, admission.request),
        )

    def in_specs(admission, state):
        return parallel.specs(admission, "target"), decode.state_specs(state)

    return parallel.on_mesh(run, config.runtime.mesh, in_specs)(admission, state)


def admit_processors(
    config: DecodeConfig, processors: ProcessorArrays, row_B: jax.Array, new: ProcessorArrays
) -> ProcessorArrays:
    """Returns the processors of all rows after some rows were given to requests."""

    def run(row_B, new, processors):
        def set_rows(x, y):
            return x.at[row_B].set(y.astype(x.dtype), mode="drop")

        return jax.tree.map(set_rows, processors, new)

    def in_specs(row_B, new, processors):
        return parallel.ROWS, parallel.specs(new, "target"), parallel.specs(processors, "target")

    return parallel.on_mesh(run, config.runtime.mesh, in_specs)(row_B, new, processors)


@with_standard_promotion
def prefill(
    params,
    drafter_params,
    config: DecodeConfig,
    state: EngineState,
    pages: Pages,
    start_B: jax.Array,
    count_B: jax.Array,
    chunk_size: int,
) -> EngineState:
    """Reads `count_B` tokens of some rows from `start_B` on, at most `chunk_size` (static)."""

    def run(params, drafter_params, pages, start_B, count_B, state):
        rows = _gather(config, state, pages)
        takes_part_B = pages.row_B < state.length_B.shape[0]
        rows = decode.prefill(
            params, drafter_params, config, rows, takes_part_B, start_B, count_B, chunk_size
        )
        return _scatter(state, pages.row_B, rows)

    def in_specs(params, drafter_params, pages, start_B, count_B, state):
        return (
            *decode.param_specs(params, drafter_params),
            parallel.specs(pages, "target"),
            parallel.ROWS,
            parallel.ROWS,
            decode.state_specs(state),
        )

    run = parallel.on_mesh(run, config.runtime.mesh, in_specs)
    return run(params, drafter_params, pages, start_B, count_B, state)


@with_standard_promotion
def score(
    params,
    drafter_params,
    config: DecodeConfig,
    state: EngineState,
    pages: Pages,
    start_B: jax.Array,
    count_B: jax.Array,
    chunk_size: int,
) -> tuple[EngineState, Logprobs]:
    """`prefill` that also returns log-probabilities of the prompt, see `decode.score`."""

    def run(params, drafter_params, pages, start_B, count_B, state):
        rows = _gather(config, state, pages)
        takes_part_B = pages.row_B < state.length_B.shape[0]
        rows, logprobs = decode.score(
            params, drafter_params, config, rows, takes_part_B, start_B, count_B, chunk_size
        )
        return logprobs, _scatter(state, pages.row_B, rows)

    def in_specs(params, drafter_params, pages, start_B, count_B, state):
        return (
            *decode.param_specs(params, drafter_params),
            parallel.specs(pages, "target"),
            parallel.ROWS,
            parallel.ROWS,
            decode.state_specs(state),
        )

    def out_specs(outputs):
        logprobs, state = outputs
        return parallel.specs(logprobs, "target"), decode.state_specs(state)

    run = parallel.on_mesh(run, config.runtime.mesh, in_specs, out_specs)
    logprobs, state = run(params, drafter_params, pages, start_B, count_B, state)
    return state, logprobs


@with_standard_promotion
def rounds(
    params,
    drafter_params,
    config: DecodeConfig,
    state: EngineState,
    pages: Pages,
    processors: ProcessorArrays | None,
    limits: jax.Array,
    max_rounds: int,
    is_greedy: bool,
) -> tuple[EngineState, Report]:
    """Runs rounds of some rows, in one `lax.while_loop`.

    Args:
      params: the target's parameters.
      drafter_params: the drafter's.
      config: static.
      state: donate it.
      pages: rows and their pages.
      processors: those of all rows of the state; None where no row of this call has any.
      limits: int32 [2]: how many rounds to run at most, and whether to stop after a round in which
        a row is done.
      max_rounds: R, the largest number of rounds (static).
      is_greedy: whether all rows of this call are greedy (static). Nothing of sampling is compiled
        then.
    """

    def run(params, drafter_params, pages, processors, limits, state):
        start = _gather(config, state, pages, processors, is_greedy, max_rounds)
        end = decode.run_rounds(
            params,
            drafter_params,
            config,
            start,
            jnp.minimum(limits[0], max_rounds),
            limits[1] > 0,
        )
        return _report(config, start, end, max_rounds), _scatter(state, pages.row_B, end)

    def in_specs(params, drafter_params, pages, processors, limits, state):
        return (
            *decode.param_specs(params, drafter_params),
            parallel.specs(pages, "target"),
            parallel.specs(processors, "target"),
            PartitionSpec(),
            decode.state_specs(state),
        )

    def out_specs(outputs):
        report, state = outputs
        return parallel.specs(report, "target"), decode.state_specs(state)

    run = parallel.on_mesh(run, config.runtime.mesh, in_specs, out_specs)
    report, state = run(params, drafter_params, pages, processors, limits, state)
    return state, report


# --- Rows of the state ----------------------------------------------------------------------------


def _gather(
    config: DecodeConfig,
    state: EngineState,
    pages: Pages,
    processors: ProcessorArrays | None = None,
    is_greedy: bool = False,
    max_rounds: int = 0,
) -> DecodeState:
    """Returns some rows of the state. A row without number is not active."""
    row_B = pages.row_B

    def take(x):
        return x.at[row_B].get(mode="fill", fill_value=0)

    request = jax.tree.map(take, state.request.replace(processors=processors))
    if is_greedy:
        request = request.replace(sampling=SamplingArrays(request.sampling.seed_B))
    tokens_BS = take(state.tokens_BS)
    return DecodeState(
        tokens_BS=tokens_BS,
        length_B=jnp.maximum(take(state.length_B), 1),
        active_B=take(state.active_B),
        block_table_BX=pages.block_table_BX,
        capacity_B=pages.capacity_B,
        failed_B=take(state.failed_B),
        cache=state.cache,
        drafter=jax.tree.map_with_path(
            lambda path, x: take(x) if _is_row(path, x) else x, state.drafter
        ),
        request=request,
        log=decode.empty_log(len(row_B), max_rounds),
        logprobs=decode.empty_logprobs(config, *tokens_BS.shape),
    )


def _scatter(state: EngineState, row_B: jax.Array, rows: DecodeState) -> EngineState:
    """Returns the state with these rows, and with their pools."""

    def set_rows(x, new):
        return x.at[row_B].set(new, mode="drop")

    def set_or_replace(path, x, new):
        return set_rows(x, new) if _is_row(path, x) else new

    return state.replace(
        tokens_BS=set_rows(state.tokens_BS, rows.tokens_BS),
        length_B=set_rows(state.length_B, rows.length_B),
        active_B=set_rows(state.active_B, rows.active_B),
        failed_B=set_rows(state.failed_B, rows.failed_B),
        cache=rows.cache,
        drafter=jax.tree.map_with_path(set_or_replace, state.drafter, rows.drafter),
    )


def _is_row(path, x) -> bool:
    """Returns whether an array of a drafter's state has a first axis of rows."""
    return parallel.axis_letters(path, x).startswith("B")


def _report(config: DecodeConfig, start: DecodeState, end: DecodeState, max_rounds: int) -> Report:
    num_tokens = max_rounds * (config.num_tokens + 1)
    position_BS = start.length_B[:, None] + jnp.arange(num_tokens)

    def new_tokens(x):
        index = position_BS.reshape(*position_BS.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1, mode="clip")

    complete_B = end.length_B - 1
    if config.drafter:
        drafter_complete_B = config.drafter.complete_B(end.drafter)
        if drafter_complete_B is not None:
            complete_B = jnp.minimum(complete_B, drafter_complete_B)
    return Report(
        tokens_BS=new_tokens(end.tokens_BS),
        length_B=end.length_B,
        active_B=end.active_B,
        failed_B=end.failed_B,
        complete_B=complete_B,
        log=end.log,
        logprobs=jax.tree.map(new_tokens, end.logprobs),
    )


init_jit = jax.jit(init, static_argnums=(2, 3, 4, 5, 6))
admit_jit = jax.jit(admit, static_argnums=0, donate_argnums=1)
admit_processors_jit = jax.jit(admit_processors, static_argnums=0, donate_argnums=1)
prefill_jit = jax.jit(prefill, static_argnums=(2, 7), donate_argnums=3)
score_jit = jax.jit(score, static_argnums=(2, 7), donate_argnums=3)
rounds_jit = jax.jit(rounds, static_argnums=(2, 7, 8), donate_argnums=3)
