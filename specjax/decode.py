"""The decode loop: draft, verify in one pass of the target, accept, repeat, inside one
`lax.while_loop`.

Invariant: `length_B` tokens of a row are committed. The target's cache holds keys and values of the
first `length - 1` of them; the last one is *pending*, and is the first token of the next block. A
round

  1. lets the drafter propose K tokens after the pending one;
  2. runs the target once on the block [pending, d1 ... dK] in positions length - 1 ... length - 1 + K;
  3. accepts n <= K drafts and adds one token of the target's own: n + 1 tokens are emitted, fewer
     where an end-of-sequence token comes first;
  4. adds what was emitted to the length. Keys and values of rejected drafts simply lie beyond it.

`step` is one round. `generate` runs rounds until every row is done, or up to a given number: a
caller that wants to see text early calls it repeatedly, with the same compiled program and the same
result.

On a mesh every device runs all of this on its own shards (`parallel.on_mesh`), and exchanges with
the others what `llama.forward` and verification say. The devices of a sequence see the same drafts,
noise and reduced numbers, and so come to the same decisions; those of other sequences do not wait
for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from specjax import kv_cache, lax_utils, llama, parallel
from specjax import sampling as sampling_lib
from specjax.config import LlamaConfig
from specjax.drafters.base import Context, Draft, Drafter, Draw, Prefill
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.kernels.sampling import Distribution, usable
from specjax.kv_cache import PagedKVCache
from specjax.parallel import DATA, MODEL_AXES, split_over
from specjax.sampling import SamplingArrays, Stream
from specjax.verify import MODES, Verified, verify


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What is fixed when the loop is compiled. Hashable: a static argument of `jax.jit`.

    Attributes:
      target: the target model.
      drafter: from `drafters.base.make`, or your own; None for plain decoding.
      verify: "rejection" or "coupled", see `verify`.
      num_valid_tokens: token ids at or above it are never emitted (rows that pad the embedding);
        None for all.
      page_size: Z, positions per page of the key/value caches.
      implementation: of attention and verification, see `kernels.dispatch.choose`; None for the
        best one here.
      mesh: from `parallel.make_mesh`; None for one device. Arrays have their whole shapes on both
        sides of `init` and `generate`; the names of a drafter's parameters and state say how they
        are split, see `sharding`. What has no letters in its name is whole on every device if it is
        a parameter, and split by rows if it is of the state.

    Raises:
      SpecJAXError: a value that is none of these, or a mesh that the target cannot be split over.
    """

    target: LlamaConfig
    drafter: Drafter | None = None
    verify: str = "rejection"
    num_valid_tokens: int | None = None
    page_size: int = 64
    implementation: str | None = None
    mesh: Mesh | None = None

    def __post_init__(self):
        if self.verify not in MODES:
            raise SpecJAXError(f"verify must be one of {', '.join(MODES)}, got {self.verify!r}")
        if not isinstance(self.page_size, int) or self.page_size < 1:
            raise SpecJAXError(
                f"page_size must be a whole number of at least 1, got {self.page_size!r}"
            )
        if self.implementation not in (None, *dispatch.IMPLEMENTATIONS):
            raise SpecJAXError(
                f"implementation must be one of {', '.join(dispatch.IMPLEMENTATIONS)} or None, "
                f"got {self.implementation!r}"
            )
        if self.drafter is not None and self.drafter.num_tokens < 1:
            raise SpecJAXError(
                f"a drafter must propose at least 1 token, got num_tokens={self.drafter.num_tokens}"
            )
        parallel.check(self.target, parallel.degree(self.mesh, "target"), "target")


@struct.dataclass
class DecodeState:
    """Carry of the loop, a plain pytree. B rows of at most S tokens.

    Attributes:
      tokens_BS: int32, prompt and output.
      length_B: int32, committed tokens of each row.
      prompt_length_B: int32.
      max_length_B: int32, at this length a row is done.
      eos_BE: int32, tokens that end a row; -1 fills up.
      active_B: bool, rows that still generate.
      failed_B: bool, rows that ended because the target's logits at position `length_B` were NaN,
        or all -inf.
      sampling: per-row temperature, filters and seed.
      cache: the target's keys and values.
      drafter: the drafter's own state.
      rounds_B: int32, rounds that each row took part in.
      drafted_BS: int32, for each of these rounds the number of drafts that the target checked,
      accepted_BS: of those that were emitted,
      emitted_BS: and of all tokens that were emitted: its sum is `length_B - prompt_length_B`.
      unusable_drafts_B: int32, drafts whose own logits were NaN, or all -inf. None of them is
        accepted by `rejection`.
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    prompt_length_B: jax.Array
    max_length_B: jax.Array
    eos_BE: jax.Array
    active_B: jax.Array
    failed_B: jax.Array
    sampling: SamplingArrays
    cache: PagedKVCache
    drafter: Any
    rounds_B: jax.Array
    drafted_BS: jax.Array
    accepted_BS: jax.Array
    emitted_BS: jax.Array
    unusable_drafts_B: jax.Array

    def context(self, params) -> Context:
        """What drafters may see, the target's parameters among it."""
        return Context(self.tokens_BS, self.length_B, self.active_B, params)


def init(
    params,
    drafter_params,
    cfg: DecodeConfig,
    tokens_BS: jax.Array,
    prompt_length_B: jax.Array,
    max_length_B: jax.Array,
    eos_BE: jax.Array,
    sampling: SamplingArrays,
    prefill_chunk: int = 256,
) -> DecodeState:
    """Reads the prompts and returns the state from which `generate` starts.

    Args:
      params: the target's parameters, see `llama.abstract_params`.
      drafter_params: the drafter's, in whatever form it wants; None where it has none.
      cfg: static.
      tokens_BS: int32 prompts, padded on the right with anything to S, the most tokens that a row
        can come to hold.
      prompt_length_B: int32, at least 1.
      max_length_B: int32 most tokens, prompt and output; at most S. A row whose prompt reaches it
        emits nothing.
      eos_BE: int32 ids that end a row, filled up with -1.
      sampling: see `SamplingArrays`.
      prefill_chunk: tokens of a prompt that are read at a time (static).

    Raises:
      SpecJAXError: a chunk below 1; rows that the mesh does not divide; an implementation that
        cannot run these models here; or JAX's 64-bit mode, in which the state would not keep its
        dtypes.
    """
    if jax.config.jax_enable_x64:
        raise SpecJAXError("jax_enable_x64 is on; SpecJAX needs JAX's default 32-bit mode")
    if prefill_chunk < 1:
        raise SpecJAXError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
    B, dp_size = len(tokens_BS), parallel.dp_size(cfg.mesh)
    if B % dp_size:
        raise SpecJAXError(
            f"{B} rows cannot be split over data_parallel={dp_size}: add rows that emit nothing"
        )
    prompts = (tokens_BS, prompt_length_B, max_length_B, eos_BE, sampling)
    run = parallel.on_mesh(
        lambda params, drafter_params, prompts: _init(
            params, drafter_params, cfg, *prompts, prefill_chunk
        ),
        cfg.mesh,
        *_param_specs(params, drafter_params),
        parallel.specs(prompts, "target", PartitionSpec(DATA)),
        out_specs=_state_specs,
    )
    return run(params, drafter_params, prompts)


def _init(
    params,
    drafter_params,
    cfg: DecodeConfig,
    tokens_BS,
    prompt_length_B,
    max_length_B,
    eos_BE,
    sampling,
    prefill_chunk: int,
) -> DecodeState:
    B, S = tokens_BS.shape
    max_length_B = jnp.minimum(max_length_B, S)
    cache = llama.init_cache(params, cfg.target, B, S, cfg.page_size)
    aux_layers = cfg.drafter.aux_layers if cfg.drafter else ()
    cache, aux_hidden_BSD = llama.prefill(
        params,
        cfg.target,
        tokens_BS,
        prompt_length_B - 1,
        cache,
        prefill_chunk,
        aux_layers=aux_layers,
        implementation=cfg.implementation,
    )
    drafter_state = ()
    if cfg.drafter:
        prefill = Prefill(
            tokens_BS, prompt_length_B, aux_hidden_BSD, params, cfg.page_size, prefill_chunk
        )
        drafter_state = cfg.drafter.init(drafter_params, prefill)

    def no_rounds_BS():  # each field has a buffer of its own: the state will be donated
        return jnp.zeros((B, S), jnp.int32)

    return DecodeState(
        tokens_BS=tokens_BS,
        length_B=prompt_length_B,
        prompt_length_B=jnp.copy(prompt_length_B),
        max_length_B=max_length_B,
        eos_BE=eos_BE,
        active_B=prompt_length_B < max_length_B,
        failed_B=jnp.zeros(B, bool),
        sampling=sampling,
        cache=cache,
        drafter=drafter_state,
        rounds_B=jnp.zeros(B, jnp.int32),
        drafted_BS=no_rounds_BS(),
        accepted_BS=no_rounds_BS(),
        emitted_BS=no_rounds_BS(),
        unusable_drafts_B=jnp.zeros(B, jnp.int32),
    )


def generate(
    params,
    drafter_params,
    cfg: DecodeConfig,
    state: DecodeState,
    max_rounds: jax.Array | None = None,
) -> DecodeState:
    """Runs rounds until every row is done, in one `lax.while_loop`.

    Donate `state` when you jit it: the key/value pools are then updated where they are.

    Args:
      params: the target's parameters.
      drafter_params: the drafter's.
      cfg: the one that `init` had (static).
      state: from `init`, or from an earlier call that `max_rounds` ended.
      max_rounds: most rounds to run, int32 scalar; None for no limit. Where a run is cut does not
        change its result.

    Returns:
      The state, of the same shapes and dtypes.

    Raises:
      SpecJAXError: a drafter whose proposal does not have the shape `[B, K]`.
    """

    def loop(params, drafter_params, max_rounds, state):
        def unfinished(carry):
            state, rounds = carry
            more = jnp.any(state.active_B)
            return more if max_rounds is None else more & (rounds < max_rounds)

        def one_round(carry):
            state, rounds = carry
            return _step(params, drafter_params, cfg, state), rounds + 1

        return jax.lax.while_loop(unfinished, one_round, (state, jnp.int32(0)))[0]

    specs = (
        *_param_specs(params, drafter_params),
        parallel.specs(max_rounds, "target"),
        _state_specs(state),
    )
    return parallel.on_mesh(loop, cfg.mesh, *specs)(params, drafter_params, max_rounds, state)


def step(params, drafter_params, cfg: DecodeConfig, state: DecodeState) -> DecodeState:
    """One round: every active row gets between 1 and K + 1 new tokens. Arguments and errors as for
    `generate`."""
    specs = (*_param_specs(params, drafter_params), _state_specs(state))
    run = parallel.on_mesh(
        lambda params, drafter_params, state: _step(params, drafter_params, cfg, state),
        cfg.mesh,
        *specs,
    )
    return run(params, drafter_params, state)


def _param_specs(params, drafter_params):
    return parallel.specs(params, "target"), parallel.specs(drafter_params, "draft")


def _state_specs(state: DecodeState):
    own, drafters = (
        parallel.specs(part, role, PartitionSpec(DATA))
        for part, role in ((state.replace(drafter=()), "target"), (state.drafter, "draft"))
    )
    return own.replace(drafter=drafters)


def _step(params, drafter_params, cfg: DecodeConfig, state: DecodeState) -> DecodeState:
    B, S = state.tokens_BS.shape
    draft, drafter_state = _propose(params, drafter_params, cfg, state)
    drafts_BM = draft.tokens_BM
    K = drafts_BM.shape[1]
    always_drafts = draft.count_B is None
    # A draft in the place of the last token that a row may emit would be checked for nothing.
    count_B = jnp.full(B, K) if always_drafts else draft.count_B
    count_B = jnp.minimum(count_B, state.max_length_B - state.length_B - 1)
    count_B = jnp.where(state.active_B, count_B, 0)
    cache = kv_cache.reserve(state.cache, jnp.where(state.active_B, state.length_B + count_B, 0))
    pending_B1 = jnp.take_along_axis(state.tokens_BS, state.length_B[:, None] - 1, axis=1)
    block_BT = jnp.concatenate([pending_B1, drafts_BM], axis=1)
    aux_layers = cfg.drafter.aux_layers if cfg.drafter else ()

    def check(k: int, cache):
        """Runs the target on the pending token and k drafts; the result has the shapes of k = K."""
        output = llama.forward(
            params,
            cfg.target,
            block_BT[:, : k + 1],
            state.length_B - 1,
            cache,
            aux_layers=aux_layers,
            implementation=cfg.implementation,
        )
        logits_BTV = llama.logits(params, output.hidden_BTD)
        verified = verify(
            cfg.verify,
            logits_BTV,
            drafts_BM[:, :k],
            count_B,
            draft.distribution,
            state.sampling,
            state.length_B,
            num_valid=cfg.num_valid_tokens,
            axis_name=split_over(logits_BTV.shape[2], cfg.target.vocab_size, "target") or None,
            implementation=cfg.implementation,
        )
        pad = lambda x: jnp.pad(x, ((0, 0), (0, K - k)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
        verified = Verified(pad(verified.tokens_BT), verified.accepted_B, pad(verified.usable_BT))
        return output.cache, verified, tuple(map(pad, output.aux_layers))

    if always_drafts:
        cache, verified, aux_hidden_BTD = check(K, cache)
    else:
        # A drafter with nothing to say must cost nothing.
        none = Verified(
            jnp.zeros((B, K + 1), jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros((B, K + 1), bool)
        )
        no_aux_hidden = tuple(
            jnp.zeros((B, K + 1, cfg.target.hidden_size), params["embed_VD"].dtype)
            for _ in aux_layers
        )
        has_drafts = jnp.any(count_B > 0)
        checked = lax_utils.cond_in_place(
            has_drafts, lambda cache, *_: check(K, cache), (cache, none, no_aux_hidden)
        )
        cache, verified, aux_hidden_BTD = lax_utils.cond_in_place(
            ~has_drafts, lambda cache, *_: check(0, cache), checked
        )

    # Emission stops behind the first end-of-sequence token, which may be an accepted draft.
    index_T = jnp.arange(K + 1)
    is_eos_BT = (verified.tokens_BT[..., None] == state.eos_BE[:, None]).any(-1)
    is_eos_BT &= index_T <= verified.accepted_B[:, None]
    stopped_B = is_eos_BT.any(axis=1)
    emitted_B = jnp.where(stopped_B, jnp.argmax(is_eos_BT, axis=1), verified.accepted_B) + 1
    # What is not a number ends a row in front of it.
    failed_BT = ~verified.usable_BT & (index_T < emitted_B[:, None])
    failed_B = state.active_B & failed_BT.any(axis=1)
    emitted_B = jnp.where(failed_B, jnp.argmax(failed_BT, axis=1), emitted_B)
    emitted_B = jnp.where(state.active_B, emitted_B, 0)

    row_B1 = jnp.arange(B)[:, None]
    place_BT = jnp.where(index_T < emitted_B[:, None], state.length_B[:, None] + index_T, S)
    length_B = state.length_B + emitted_B
    active_B = state.active_B & ~stopped_B & ~failed_B & (length_B < state.max_length_B)
    round_B1 = jnp.where(state.active_B, state.rounds_B, S)[:, None]

    def log(table_BS, value_B):
        return table_BS.at[row_B1, round_B1].set(value_B[:, None], mode="drop")

    accepted_B = jnp.minimum(verified.accepted_B, emitted_B)
    unusable_drafts_B = state.unusable_drafts_B
    for k, distribution in enumerate(draft.distribution or ()):
        unusable_drafts_B += (k < count_B) & ~usable(distribution.largest_BT)
    state = state.replace(
        tokens_BS=state.tokens_BS.at[row_B1, place_BT].set(verified.tokens_BT, mode="drop"),
        length_B=length_B,
        active_B=active_B,
        failed_B=state.failed_B | failed_B,
        cache=kv_cache.release(cache, ~active_B),
        rounds_B=state.rounds_B + state.active_B,
        drafted_BS=log(state.drafted_BS, count_B),
        accepted_BS=log(state.accepted_BS, accepted_B),
        emitted_BS=log(state.emitted_BS, emitted_B),
        unusable_drafts_B=unusable_drafts_B,
    )
    if cfg.drafter:
        drafter_state = cfg.drafter.update(
            drafter_params, drafter_state, state.context(params), verified, aux_hidden_BTD
        )
    return state.replace(drafter=drafter_state)


def _propose(params, drafter_params, cfg: DecodeConfig, state: DecodeState) -> tuple[Draft, Any]:
    """The drafter's proposal and its new state; no tokens at all in plain decoding."""
    B = state.length_B.shape[0]
    if cfg.drafter is None:
        return Draft(jnp.zeros((B, 0), jnp.int32)), state.drafter
    coupled = cfg.verify == "coupled"

    V, whole, degree = (
        cfg.target.vocab_size,
        parallel.degree(cfg.mesh, "target"),
        parallel.degree(cfg.mesh, "draft"),
    )

    def draw(logits_BV, position_B):
        size = logits_BV.shape[1]
        if size not in (V, V // degree, V // whole):
            raise SpecJAXError(
                f"a drafter's logits must have {V} columns, or those of a shard of the draft model, "
                f"{V // degree}, or of the target, {V // whole}; they have {size}"
            )
        split = split_over(size, V, "draft" if size == V // degree else "target")
        stream = Stream.TARGET if coupled else Stream.DRAFT
        token_B1, distribution = sampling_lib.draw(
            logits_BV[:, None],
            state.sampling,
            position_B[:, None],
            stream,
            num_valid=cfg.num_valid_tokens,
            axis_name=split or None,
            implementation=cfg.implementation,
        )
        distribution = jax.tree.map(lambda x: x[:, 0], distribution)
        # Verification needs of the draft's distribution what this device has of the target's vocabulary.
        if size > V // whole:
            shard = jax.lax.axis_index(
                tuple(axis for axis in MODEL_AXES["target"] if axis not in split)
            )
            own_BV = jax.lax.dynamic_slice_in_dim(
                distribution.logits_BTV, shard * (V // whole), V // whole, axis=1
            )
            distribution = distribution._replace(logits_BTV=own_BV)
        return _agreed(token_B1[:, 0], cfg, split), distribution

    def certain(token_B):
        axes = MODEL_AXES["target"] if whole > 1 else ()
        token_V = jnp.arange(V // whole) + (jax.lax.axis_index(axes) * (V // whole) if axes else 0)
        one_B = jnp.ones(B, jnp.float32)
        return Distribution(
            jnp.where(token_V == token_B[:, None], 0.0, -jnp.inf),
            0 * one_B,
            0 * one_B,
            None if state.sampling.temperature_B is None else one_B,
        )

    draft, drafter_state = cfg.drafter.propose(
        drafter_params, state.drafter, state.context(params), Draw(draw, certain)
    )
    if draft.tokens_BM.shape != (B, cfg.drafter.num_tokens):
        expected = (B, cfg.drafter.num_tokens)
        raise SpecJAXError(
            f"the drafter proposed tokens of shape {draft.tokens_BM.shape}, not {expected}"
        )
    if draft.distribution is None:  # what was drawn is agreed on already
        draft = draft._replace(
            **_agreed(dict(tokens_BM=draft.tokens_BM, count_B=draft.count_B), cfg)
        )
    return draft, drafter_state


def _agreed(tree, cfg: DecodeConfig, split: tuple[str, ...] = ()):
    """The same integers on all devices that have computed them from copies: those of the first,
    should they ever round differently. `split` are axes over whose devices they are the same
    already."""
    copies = tuple(axis for axis in MODEL_AXES["target"] if axis not in split)
    if cfg.mesh is None or all(cfg.mesh.shape[axis] == 1 for axis in copies):
        return tree
    is_first = jax.lax.axis_index(copies) == 0
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_first, x, 0), copies), tree)


# What callers outside a jit of their own use: one compiled program for all of them.
init_jit = jax.jit(init, static_argnums=(2, 8))
generate_jit = jax.jit(generate, static_argnums=2, donate_argnums=3)
