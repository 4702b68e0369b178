"""The decode loop: draft, verify in one pass of the target, accept, repeat.

All of it runs inside one `lax.while_loop`.

Invariant: `length_B` tokens of a row are committed. The target's cache holds keys and values of the
first `length - 1` of them; the last one is *pending*, and is the first token of the next block. A
round

  1. lets the drafter propose M tokens after the pending one;
  2. runs the target once on the block [pending, d1 ... dM], at positions length - 1 to
     length - 1 + M;
  3. accepts n <= M drafts and adds one token of the target: n + 1 tokens are emitted, fewer where
     an end-of-sequence token comes first;
  4. adds what was emitted to the length. Keys and values of rejected drafts simply lie beyond it.

`step` is one round. `generate` runs rounds until every row is done, or up to a given number: a
caller that streams text calls it repeatedly, with the same compiled program and the same result.

The device never allocates. A round writes positions length - 1 to length - 1 + M. A row whose pages
do not hold them is *paused*: it takes no part and stays active, and it goes on, with the same text,
when the host has given it pages between two calls:

    state = state.replace(block_table_BX=..., capacity_B=...)

`init` gives each row all pages that it can need, so that no row is ever paused.

On a mesh every device runs all of this on its own shards (`parallel.on_mesh`), and communicates in
`llama.forward`, sampling and verification. The devices of a sequence see the same drafts, noise and
reduced numbers, and so make the same decisions; those of other sequences do not wait for them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import kv_cache, lax_utils, llama, parallel, sampling
from specjax.config import LlamaConfig, Runtime
from specjax.drafters.base import Chunk, Context, Draft, Drafter
from specjax.errors import SpecJAXError
from specjax.kv_cache import PagedKVCache
from specjax.lax_utils import with_standard_promotion
from specjax.processors import ProcessorArrays, process
from specjax.sampling import Logprobs, SamplingArrays, Stream
from specjax.verify import METHODS, Verified, unusable_drafts, verify


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Static configuration of the loop. Hashable: a static argument of `jax.jit`.

    Attributes:
      target: the target model's configuration.
      drafter: from `drafters.registry.make`, or your own; None for plain decoding.
      verify: "rejection" or "coupled", see `verify`.
      runtime: dtype, page size, valid tokens, implementation and mesh. With a mesh, arrays have
        their whole shapes on both sides of `init` and `generate`.
      logprobs: J, for how many of the most likely tokens log-probabilities are kept beside those of
        the output, see `DecodeState`; None for no log-probabilities at all.

    Raises:
      SpecJAXError: for an unknown verification method, a drafter that proposes nothing, a mesh that
        the target cannot be split over, or an invalid number of log-probabilities.
    """

    target: LlamaConfig
    drafter: Drafter | None = None
    verify: str = "rejection"
    runtime: Runtime = dataclasses.field(default_factory=Runtime)
    logprobs: int | None = None

    def __post_init__(self):
        if self.verify not in METHODS:
            raise SpecJAXError(f"verify must be one of {', '.join(METHODS)}, got {self.verify!r}")
        if self.drafter is not None and self.drafter.num_tokens < 1:
            raise SpecJAXError(
                f"a drafter must propose at least 1 token, got num_tokens={self.drafter.num_tokens}"
            )
        if self.logprobs is not None:
            is_integer = isinstance(self.logprobs, int) and not isinstance(self.logprobs, bool)
            if not is_integer or self.logprobs < 0:
                raise SpecJAXError(
                    f"logprobs must be None or an integer of at least 0, got {self.logprobs!r}"
                )
        last = self.target.num_layers - 1
        for layer in self.aux_layers:
            if not 0 <= layer <= last:
                raise SpecJAXError(
                    f"the drafter reads layer {layer} of the target, whose layers are 0 to {last}"
                )
        num_shards = parallel.degree(self.runtime.mesh, "target")
        parallel.check_shardable(self.target, num_shards, "target")

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose residual streams the drafter reads."""
        return self.drafter.aux_layers if self.drafter else ()

    @property
    def num_tokens(self) -> int:
        """M, drafts in a round; 0 without a drafter."""
        return self.drafter.num_tokens if self.drafter else 0


@struct.dataclass
class RequestArrays:
    """Constants of the request of each row.

    Attributes:
      prompt_length_B: int32, at least 1.
      max_length_B: int32, prompt and output; a row that reaches it is done.
      eos_BE: int32, tokens that end a row; -1 fills unused entries.
      sampling: temperatures, filters and seeds.
      processors: changes of the target's logits; None for none.
    """

    prompt_length_B: jax.Array
    max_length_B: jax.Array
    eos_BE: jax.Array
    sampling: SamplingArrays
    processors: ProcessorArrays | None = None


@struct.dataclass
class RoundLog:
    """Statistics of the rounds of each row. Column i of the tables is round i of the row.

    Rounds for which the tables have no column are not in them. Those of `init` have S columns, and
    a row takes part in fewer rounds.

    Attributes:
      rounds_B: int32, rounds that the row took part in.
      drafted_BS: int32, drafts that the target verified.
      accepted_BS: int32, accepted drafts that were emitted.
      emitted_BS: int32, emitted tokens; its sum is `length_B - prompt_length_B`.
      unusable_drafts_B: int32, drafts in all rounds whose own logits were NaN, or all -inf.
    """

    rounds_B: jax.Array
    drafted_BS: jax.Array
    accepted_BS: jax.Array
    emitted_BS: jax.Array
    unusable_drafts_B: jax.Array


@struct.dataclass
class DecodeState:
    """Carry of the loop, a plain pytree. B rows of at most S tokens.

    Attributes:
      tokens_BS: int32, prompt and output.
      length_B: int32, committed tokens of each row.
      active_B: bool, rows that still generate.
      block_table_BX: int32, pages of each row, in all pools of the state, see `kv_cache`.
      capacity_B: int32, how many of the first positions of each row have pages. Both may be
        replaced between calls. Rows may share pages that lie before the pending token.
      failed_B: bool, rows that ended because the target's logits at position `length_B` were NaN,
        or all -inf.
      cache: the target's keys and values.
      drafter: the drafter's own state.
      request: constants of the request of each row.
      log: statistics.
      logprobs: for each token of the output, log-probabilities under the target alone, before
        processors, temperature and filters; 0 elsewhere. None unless `DecodeConfig.logprobs` is
        set.
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    active_B: jax.Array
    block_table_BX: jax.Array
    capacity_B: jax.Array
    failed_B: jax.Array
    cache: PagedKVCache
    drafter: Any
    request: RequestArrays
    log: RoundLog
    logprobs: Logprobs | None = None


@with_standard_promotion
def init(
    params,
    drafter_params,
    config: DecodeConfig,
    tokens_BS: jax.Array,
    request: RequestArrays,
    prefill_chunk: int = 256,
) -> DecodeState:
    """Reads the prompts and returns the state from which `generate` starts.

    Args:
      params: the target's parameters, see `llama.abstract_params`.
      drafter_params: the drafter's parameters, a pytree of its own form; None if it has none.
      config: static.
      tokens_BS: int32 prompts, padded on the right with anything to S, the largest length that a
        row can reach.
      request: lengths, end-of-sequence tokens and sampling. A row whose prompt reaches its
        `max_length_B` emits nothing; lengths beyond S are cut to S.
      prefill_chunk: tokens of a prompt that are read at a time (static).

    Raises:
      SpecJAXError: for a chunk below 1, rows that the mesh does not divide, parameters of another
        dtype than `config.runtime`, an implementation that cannot run these models here, or JAX's
        64-bit mode, in which the state would not keep its dtypes.
    """
    _check_init(params, config, len(tokens_BS), prefill_chunk)

    def run(params, drafter_params, tokens_BS, request):
        return _init(params, drafter_params, config, tokens_BS, request, prefill_chunk)

    def in_specs(params, drafter_params, tokens_BS, request):
        return (
            *param_specs(params, drafter_params),
            parallel.ROWS,
            parallel.specs(request, "target"),
        )

    run = parallel.on_mesh(run, config.runtime.mesh, in_specs, state_specs)
    return run(params, drafter_params, tokens_BS, request)


@with_standard_promotion
def generate(
    params,
    drafter_params,
    config: DecodeConfig,
    state: DecodeState,
    max_rounds: jax.Array | None = None,
) -> DecodeState:
    """Runs rounds until every row is done or paused, in one `lax.while_loop`.

    Donate `state` when you jit it: the key/value pools are then updated in place.

    Args:
      params: the target's parameters.
      drafter_params: the drafter's.
      config: the one that `init` had (static).
      state: from `init`, or from an earlier call that `max_rounds` ended.
      max_rounds: most rounds to run, int32 scalar; None for no limit. Splitting a run into calls
        does not change its result.

    Returns:
      The state, of the same shapes and dtypes.

    Raises:
      SpecJAXError: for a drafter whose proposal does not have the shape `[B, M]`.
    """

    def loop(params, drafter_params, max_rounds, state):
        return run_rounds(params, drafter_params, config, state, max_rounds)

    def in_specs(params, drafter_params, max_rounds, state):
        max_rounds_spec = parallel.specs(max_rounds, "target")
        return *param_specs(params, drafter_params), max_rounds_spec, state_specs(state)

    run = parallel.on_mesh(loop, config.runtime.mesh, in_specs)
    return run(params, drafter_params, max_rounds, state)


@with_standard_promotion
def step(params, drafter_params, config: DecodeConfig, state: DecodeState) -> DecodeState:
    """Runs one round: every active row that is not paused gets between 1 and M + 1 new tokens.

    Arguments and errors as for `generate`.
    """

    def run(params, drafter_params, state):
        return _step(params, drafter_params, config, state)

    def in_specs(params, drafter_params, state):
        return *param_specs(params, drafter_params), state_specs(state)

    run = parallel.on_mesh(run, config.runtime.mesh, in_specs)
    return run(params, drafter_params, state)


# --- The state ------------------------------------------------------------------------------------


def _check_init(params, config: DecodeConfig, batch_size: int, prefill_chunk: int) -> None:
    runtime = config.runtime
    check_params(params, config)
    if prefill_chunk < 1:
        raise SpecJAXError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
    replicas = parallel.dp_size(runtime.mesh)
    if batch_size % replicas:
        raise SpecJAXError(
            f"{batch_size} rows cannot be split over data_parallel={replicas}; add rows that emit "
            "nothing"
        )


def check_params(params, config: DecodeConfig) -> None:
    """Checks that the loop can run with these parameters.

    Raises:
      SpecJAXError: for another dtype than `config.runtime`, or JAX's 64-bit mode.
    """
    if jax.config.jax_enable_x64:
        raise SpecJAXError("jax_enable_x64 is on; SpecJAX needs JAX's default 32-bit mode")
    dtype = llama.params_dtype(params)
    if dtype != config.runtime.dtype:
        raise SpecJAXError(
            f"the target's parameters are {dtype}, but runtime.dtype={config.runtime.dtype}"
        )


def _init(params, drafter_params, config, tokens_BS, request, prefill_chunk: int) -> DecodeState:
    B, S = tokens_BS.shape
    runtime, length_B = config.runtime, request.prompt_length_B
    request = request.replace(
        # A buffer of its own for each field: the state will be donated.
        prompt_length_B=jnp.copy(length_B),
        max_length_B=jnp.minimum(request.max_length_B, S),
    )
    block_table_BX = kv_cache.in_order(B, S + config.num_tokens, runtime.page_size)
    X = block_table_BX.shape[1]
    state = DecodeState(
        tokens_BS=tokens_BS,
        length_B=length_B,
        active_B=length_B < request.max_length_B,
        block_table_BX=block_table_BX,
        capacity_B=jnp.full(B, X * runtime.page_size, jnp.int32),
        failed_B=jnp.zeros(B, bool),
        cache=llama.init_cache(config.target, runtime, B * X),
        drafter=(),
        request=request,
        log=empty_log(B, S),
        logprobs=empty_logprobs(config, B, S),
    )
    if config.drafter:
        context = drafter_context(params, config, state)
        state = state.replace(drafter=config.drafter.init(drafter_params, context))
    return _read_prompts(params, drafter_params, config, state, prefill_chunk)


def empty_logprobs(config: DecodeConfig, num_rows: int, num_columns: int) -> Logprobs | None:
    """Returns zeros for the log-probabilities of `num_columns` tokens; None if none are kept."""
    if config.logprobs is None:
        return None
    return sampling.empty_logprobs(num_rows, num_columns, config.logprobs)


def empty_log(num_rows: int, num_columns: int) -> RoundLog:
    """Returns a log without rounds, for `num_columns` rounds of each row."""
    # A buffer of its own for each field: the state will be donated.
    return RoundLog(
        rounds_B=jnp.zeros(num_rows, jnp.int32),
        drafted_BS=jnp.zeros((num_rows, num_columns), jnp.int32),
        accepted_BS=jnp.zeros((num_rows, num_columns), jnp.int32),
        emitted_BS=jnp.zeros((num_rows, num_columns), jnp.int32),
        unusable_drafts_B=jnp.zeros(num_rows, jnp.int32),
    )


def _read_prompts(
    params, drafter_params, config: DecodeConfig, state: DecodeState, chunk_size: int
) -> DecodeState:
    """Reads the prompts up to the last token but one, `chunk_size` tokens at a time.

    One loop serves every prompt length, so that only S and the chunk decide what is compiled.
    """
    count_B = state.length_B - 1
    num_chunks = -(-jnp.max(count_B) // chunk_size)

    def read_chunk(i, caches):
        cache, drafter_state = caches
        start_B = jnp.full_like(count_B, i * chunk_size)
        chunk_count_B = jnp.clip(count_B - start_B, 0, chunk_size)
        read = prefill(
            params,
            drafter_params,
            config,
            state.replace(cache=cache, drafter=drafter_state),
            chunk_count_B > 0,
            start_B,
            chunk_count_B,
            chunk_size,
        )
        return read.cache, read.drafter

    caches = jax.lax.fori_loop(0, num_chunks, read_chunk, (state.cache, state.drafter))
    return state.replace(cache=caches[0], drafter=caches[1])


def prefill(
    params,
    drafter_params,
    config: DecodeConfig,
    state: DecodeState,
    takes_part_B,
    start_B,
    count_B,
    T: int,
) -> DecodeState:
    """Reads the `count_B` tokens of some rows from `start_B` on, at most T of them.

    Target and drafter read them one after the other, so that hidden states of one chunk at most are
    in memory. No logits are computed: the last token of a prompt is left to the decode loop. After
    it, the caches of a row that takes part are those of a row that has read `start_B + count_B`
    tokens, whatever the row did before.
    """
    chunk = (takes_part_B, start_B, count_B, T)
    return _read_chunk(params, drafter_params, config, state, *chunk)[0]


def score(
    params,
    drafter_params,
    config: DecodeConfig,
    state: DecodeState,
    takes_part_B,
    start_B,
    count_B,
    T: int,
) -> tuple[DecodeState, Logprobs]:
    """Reads a chunk like `prefill`, and returns log-probabilities of the T tokens that follow it.

    That is, of the next token after each token of the chunk; beyond the prompt they are undefined.
    The logits of the chunk are in memory at once, float32 `[B, T, V]`, so T should be at most 64.
    """
    chunk = (takes_part_B, start_B, count_B, T)
    state, hidden_BTD = _read_chunk(params, drafter_params, config, state, *chunk)
    next_BT = start_B[:, None] + jnp.arange(1, T + 1)
    token_BT = jnp.take_along_axis(state.tokens_BS, next_BT, axis=1, mode="clip")
    return state, _logprobs(config, llama.logits(params, hidden_BTD), token_BT)


def _read_chunk(
    params, drafter_params, config: DecodeConfig, state, takes_part_B, start_B, count_B, T: int
):
    """Returns the state after a chunk, and the target's hidden states of it."""
    state_of_chunk = _with_rows(state, takes_part_B)
    context = drafter_context(params, config, state_of_chunk)
    position_BT = start_B[:, None] + jnp.arange(T)
    tokens_BT = jnp.take_along_axis(state.tokens_BS, position_BT, axis=1, mode="clip")
    # Rows that end earlier write undefined values beyond their length, or nowhere.
    output = llama.forward(
        params,
        config.target,
        config.runtime,
        tokens_BT,
        start_B,
        context.block_table_BX,
        state.cache,
        aux_layers=config.aux_layers,
    )
    drafter_state = state.drafter
    if config.drafter:
        chunk = Chunk(tokens_BT, start_B, count_B, output.aux_hidden)
        drafter_state = config.drafter.prefill(drafter_params, drafter_state, context, chunk)
    return state.replace(cache=output.cache, drafter=drafter_state), output.hidden_BTD


def param_specs(params, drafter_params):
    return parallel.specs(params, "target"), parallel.specs(drafter_params, "draft")


def state_specs(state: DecodeState):
    drafter_specs = parallel.specs(state.drafter, "draft")
    return parallel.specs(state.replace(drafter=()), "target").replace(drafter=drafter_specs)


# --- A round --------------------------------------------------------------------------------------


def run_rounds(
    params,
    drafter_params,
    config: DecodeConfig,
    state: DecodeState,
    max_rounds: jax.Array | None = None,
    until_a_row_ends: jax.Array | None = None,
) -> DecodeState:
    """The loop of `generate`, on the shards of one device.

    Args:
      params, drafter_params, config, state, max_rounds: see `generate`.
      until_a_row_ends: whether to stop after a round in which a row is done, bool scalar; None for
        never.
    """
    num_active = jnp.sum(state.active_B)

    def goes_on(carry):
        state, rounds = carry
        go_on = jnp.any(_is_runnable(config, state))
        if max_rounds is not None:
            go_on &= rounds < max_rounds
        if until_a_row_ends is not None:
            go_on &= ~until_a_row_ends | (jnp.sum(state.active_B) == num_active)
        return go_on

    def run_round(carry):
        state, rounds = carry
        return _step(params, drafter_params, config, state), rounds + 1

    state, _ = jax.lax.while_loop(goes_on, run_round, (state, jnp.int32(0)))
    return state


class Checked(NamedTuple):
    """Result of the target's pass over one block, and of its verification.

    Attributes:
      cache: with keys and values of the block.
      verified: outcome, for T = M + 1 tokens.
      aux_hidden_BTD: residual streams for the drafter.
      logprobs: of the tokens of `verified`; None unless asked for.
    """

    cache: PagedKVCache
    verified: Verified
    aux_hidden_BTD: tuple[jax.Array, ...]
    logprobs: Logprobs | None


def _step(params, drafter_params, config: DecodeConfig, state: DecodeState) -> DecodeState:
    before, takes_part_B = state, _is_runnable(config, state)
    state = _with_rows(state, takes_part_B)
    draft, always_drafts, state = _propose(params, drafter_params, config, state)
    checked = _forward_and_verify(params, config, state, draft, always_drafts)
    committed = _commit(state, draft, checked)
    # The drafter of a row that ends here sees the outcome too: its pages may outlive the row.
    state = committed.replace(active_B=takes_part_B)
    state = _update(params, drafter_params, config, state, checked)
    is_paused_B = before.active_B & ~takes_part_B
    return state.replace(
        active_B=committed.active_B | is_paused_B, block_table_BX=before.block_table_BX
    )


def _is_runnable(config: DecodeConfig, state: DecodeState) -> jax.Array:
    """Returns which rows are active and have pages for all that a round may write."""
    return state.active_B & (state.length_B + config.num_tokens <= state.capacity_B)


def _with_rows(state: DecodeState, takes_part_B: jax.Array) -> DecodeState:
    """Returns the state in which the other rows are inactive and have no pages.

    Nothing is then written for them, wherever their pages are, and attention costs them nothing.
    """
    table_BX = jnp.where(takes_part_B[:, None], state.block_table_BX, state.cache.num_pages)
    return state.replace(active_B=takes_part_B, block_table_BX=table_BX)


def _propose(
    params, drafter_params, config: DecodeConfig, state: DecodeState
) -> tuple[Draft, bool, DecodeState]:
    """Returns the draft, whether all rows always have drafts, and the state.

    The second value is static; where it is true, no choice needs to be compiled.
    """
    B = state.length_B.shape[0]
    draft, drafter_state = Draft(jnp.zeros((B, 0), jnp.int32)), state.drafter
    if config.drafter:
        sample = functools.partial(_sample_draft, config, state.request.sampling)
        draft, drafter_state = config.drafter.propose(
            drafter_params, state.drafter, drafter_context(params, config, state), sample
        )
        _check_draft(config.drafter, draft, B)
    if draft.distributions is None:  # sampled drafts already agree
        agreed = parallel.agree((draft.tokens_BM, draft.count_B), config.runtime.mesh)
        draft = draft._replace(tokens_BM=agreed[0], count_B=agreed[1])
    always_drafts = draft.count_B is None
    draft = draft._replace(count_B=_num_to_verify(state, draft))
    return draft, always_drafts, state.replace(drafter=drafter_state)


def _sample_draft(config: DecodeConfig, arrays: SamplingArrays, logits_BV, position_B):
    """Samples a draft token: with the target's noise under `coupled`, else with its own."""
    stream = Stream.TARGET if config.verify == "coupled" else Stream.DRAFT
    V = config.target.vocab_size
    return sampling.sample_draft(config.runtime, V, logits_BV, arrays, position_B, stream)


def _check_draft(drafter: Drafter, draft: Draft, B: int) -> None:
    M = drafter.num_tokens
    shapes = {"tokens": (draft.tokens_BM, (B, M))}
    shapes |= {"count_B": (draft.count_B, (B,)), "sampled_B": (draft.sampled_B, (B,))}
    for name, (array, expected) in shapes.items():
        if array is not None and array.shape != expected:
            raise SpecJAXError(
                f"the drafter proposed {name} of shape {array.shape}, expected {expected}"
            )
    if draft.distributions is not None and len(draft.distributions) != M:
        raise SpecJAXError(
            f"the drafter proposed {len(draft.distributions)} distributions for {M} tokens"
        )


def _num_to_verify(state: DecodeState, draft: Draft):
    """Returns how many drafts of each row are verified.

    A draft at the position of the last token that a row may emit is not worth verifying.
    """
    B, M = draft.tokens_BM.shape
    count_B = jnp.full(B, M) if draft.count_B is None else draft.count_B
    room_B = state.request.max_length_B - state.length_B - 1
    return jnp.where(state.active_B, jnp.minimum(count_B, room_B), 0)


def _forward_and_verify(
    params, config: DecodeConfig, state: DecodeState, draft: Draft, always_drafts: bool
) -> Checked:
    """Runs the target on the block and verifies it; on one token where no row has a draft."""
    B, M = draft.tokens_BM.shape

    def check(num_drafts: int, cache: PagedKVCache) -> Checked:
        """Verifies the first drafts; the result has the shapes of all of them."""
        pending_B1 = jnp.take_along_axis(state.tokens_BS, state.length_B[:, None] - 1, axis=1)
        first_BM = draft.tokens_BM[:, :num_drafts]
        output = llama.forward(
            params,
            config.target,
            config.runtime,
            jnp.concatenate([pending_B1, first_BM], axis=1),
            state.length_B - 1,
            state.block_table_BX,
            cache,
            aux_layers=config.aux_layers,
        )
        logits_BTV = llama.logits(params, output.hidden_BTD)
        verified = verify(
            config.verify,
            config.runtime,
            _processed(config, state, logits_BTV, first_BM),
            draft._replace(tokens_BM=first_BM),
            state.request.sampling,
            state.length_B,
        )
        logprobs = _logprobs(config, logits_BTV, verified.tokens_BT)
        padded = functools.partial(_pad_tokens, padding=M - num_drafts)
        tokens_BT, usable_BT = padded(verified.tokens_BT), padded(verified.usable_BT)
        verified = Verified(tokens_BT, verified.accepted_B, usable_BT)
        aux_hidden_BTD = tuple(map(padded, output.aux_hidden))
        return Checked(output.cache, verified, aux_hidden_BTD, jax.tree.map(padded, logprobs))

    if always_drafts:
        return check(M, state.cache)
    # A drafter that proposes nothing must cost nothing.
    hidden_shape = (B, M + 1, config.target.hidden_size)
    nothing = Checked(
        state.cache,
        Verified(
            jnp.zeros((B, M + 1), jnp.int32),
            jnp.zeros(B, jnp.int32),
            jnp.zeros((B, M + 1), bool),
        ),
        tuple(jnp.zeros(hidden_shape, config.runtime.dtype) for _ in config.aux_layers),
        empty_logprobs(config, B, M + 1),
    )
    has_drafts = jnp.any(draft.count_B > 0)
    checked = lax_utils.cond_in_place(has_drafts, lambda cache, *_: check(M, cache), nothing)
    checked = lax_utils.cond_in_place(~has_drafts, lambda cache, *_: check(0, cache), checked)
    return Checked(*checked)


def _processed(config: DecodeConfig, state: DecodeState, logits_BTV, drafts_BM):
    """Returns the target's logits as each row's processors change them, after its own drafts."""
    request = state.request
    return process(
        request.processors,
        logits_BTV,
        state.tokens_BS,
        request.prompt_length_B,
        state.length_B,
        drafts_BM,
        request.eos_BE,
        parallel.model_axes(config.runtime.mesh, "target"),
    )


def _logprobs(config: DecodeConfig, logits_BTV, tokens_BT) -> Logprobs | None:
    """Returns log-probabilities of tokens under the target's own logits; None unless asked for."""
    if config.logprobs is None:
        return None
    axes = parallel.model_axes(config.runtime.mesh, "target")
    return sampling.logprobs(config.runtime, logits_BTV, tokens_BT, config.logprobs, axes)


def _pad_tokens(x_BT, padding: int):
    return jnp.pad(x_BT, ((0, 0), (0, padding)) + ((0, 0),) * (x_BT.ndim - 2))


def _commit(state: DecodeState, draft: Draft, checked: Checked) -> DecodeState:
    """Returns the state with the emitted tokens."""
    verified = checked.verified
    emitted_B, is_stop_B, is_failure_B = _num_emitted(state, verified)
    B, S = state.tokens_BS.shape
    row_B1, index_T = jnp.arange(B)[:, None], jnp.arange(verified.tokens_BT.shape[1])
    is_emitted_BT = index_T < emitted_B[:, None]
    position_BT = jnp.where(is_emitted_BT, state.length_B[:, None] + index_T, S)
    tokens_BS = state.tokens_BS.at[row_B1, position_BT].set(verified.tokens_BT, mode="drop")
    logprobs = jax.tree.map(
        lambda table, new: table.at[row_B1, position_BT].set(new, mode="drop"),
        state.logprobs,
        checked.logprobs,
    )
    length_B = state.length_B + emitted_B
    has_room_B = length_B < state.request.max_length_B
    active_B = state.active_B & ~is_stop_B & ~is_failure_B & has_room_B
    return state.replace(
        tokens_BS=tokens_BS,
        length_B=length_B,
        active_B=active_B,
        failed_B=state.failed_B | is_failure_B,
        cache=checked.cache,
        log=_logged(state, draft, verified, emitted_B),
        logprobs=logprobs,
    )


def _num_emitted(state: DecodeState, verified: Verified):
    """Returns how many tokens each row emits, and whether it stops or fails after them."""
    index_T = jnp.arange(verified.tokens_BT.shape[1])
    # Emission stops after the first end-of-sequence token, which may be an accepted draft.
    is_eos_BT = (verified.tokens_BT[..., None] == state.request.eos_BE[:, None]).any(-1)
    is_eos_BT &= index_T <= verified.accepted_B[:, None]
    is_stop_B = is_eos_BT.any(axis=1)
    emitted_B = jnp.where(is_stop_B, jnp.argmax(is_eos_BT, axis=1), verified.accepted_B) + 1
    # A row ends before a token that could not be sampled.
    is_failure_BT = ~verified.usable_BT & (index_T < emitted_B[:, None])
    is_failure_B = state.active_B & is_failure_BT.any(axis=1)
    emitted_B = jnp.where(is_failure_B, jnp.argmax(is_failure_BT, axis=1), emitted_B)
    return jnp.where(state.active_B, emitted_B, 0), is_stop_B, is_failure_B


def _logged(state: DecodeState, draft: Draft, verified: Verified, emitted_B) -> RoundLog:
    log = state.log
    row_B1, num_columns = jnp.arange(len(emitted_B))[:, None], log.emitted_BS.shape[1]
    round_B1 = jnp.where(state.active_B, log.rounds_B, num_columns)[:, None]

    def set_round(table_BS, value_B):
        return table_BS.at[row_B1, round_B1].set(value_B[:, None], mode="drop")

    accepted_B = jnp.minimum(verified.accepted_B, emitted_B)
    return RoundLog(
        rounds_B=log.rounds_B + state.active_B,
        drafted_BS=set_round(log.drafted_BS, draft.count_B),
        accepted_BS=set_round(log.accepted_BS, accepted_B),
        emitted_BS=set_round(log.emitted_BS, emitted_B),
        unusable_drafts_B=log.unusable_drafts_B + unusable_drafts(draft),
    )


def _update(
    params, drafter_params, config: DecodeConfig, state: DecodeState, checked: Checked
) -> DecodeState:
    """Returns the state after the drafter has seen the outcome."""
    if config.drafter is None:
        return state
    context = drafter_context(params, config, state)
    drafter_state = config.drafter.update(
        drafter_params, state.drafter, context, checked.verified, checked.aux_hidden_BTD
    )
    return state.replace(drafter=drafter_state)


def drafter_context(params, config: DecodeConfig, state: DecodeState) -> Context:
    return Context(
        tokens_BS=state.tokens_BS,
        length_B=state.length_B,
        active_B=state.active_B,
        block_table_BX=state.block_table_BX,
        target_params=params,
        num_pages=state.cache.num_pages,
        target_config=config.target,
        runtime=config.runtime,
    )


# For callers outside `jax.jit`: one compiled program for all of them.
init_jit = jax.jit(init, static_argnums=(2, 5))
generate_jit = jax.jit(generate, static_argnums=2, donate_argnums=3)
