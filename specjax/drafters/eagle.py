"""A shallow EAGLE head on the target's own features drafts one token after the other (Li et al.).

EAGLE-1 and 2 (2024, arXiv 2401.15077 and 2406.16858) give the head the target's final hidden state
at a token and the embedding of the next one. EAGLE-3 (2025, arXiv 2503.01840) fuses hidden states
after three of the target's layers. In both the head is one decoder layer, and its output stands in
for the target's features at the tokens that it has drafted itself. The output matrix is the
target's own, or some of its rows: tokens without a row are never drafted.

Position j + 1 of the head's cache belongs to the features of token j and the embedding of token
j + 1, and its output predicts token j + 2: what a page holds depends on tokens up to its end alone,
so that sequences with the same beginning can share it. (Rotary embeddings see differences of
positions only, so a head does not notice.) Position 0 has no features before it. It is written like
the others, with features of zero, and no other position attends to it; its output is the guess
where there is nothing to guess from.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from specjax import kv_cache, llama
from specjax.config import LlamaConfig
from specjax.drafters.base import Context, Drafter, chain
from specjax.errors import SpecJAXError
from specjax.kv_cache import PagedKVCache
from specjax.linear import linear


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape and constants of an EAGLE head.

    Attributes:
      layer: its decoder layer, as a Llama of one layer whose width and vocabulary are the target's.
      aux_layers: layers of the target whose hidden states it reads, in rising order: the last one
        alone (EAGLE-1 and 2), or three (EAGLE-3).
      target_layers: number of layers of the target.
      num_draft_tokens: U, how many tokens it can draft; None for the whole vocabulary.

    Raises:
      SpecJAXError: for a value out of range.
    """

    layer: LlamaConfig
    aux_layers: tuple[int, ...]
    target_layers: int
    num_draft_tokens: int | None = None

    KIND = "an EAGLE head"  # in error messages

    def __post_init__(self):
        if self.layer.num_layers != 1:
            raise SpecJAXError(f"an EAGLE head has one decoder layer, got {self.layer.num_layers}")
        last, V, U = self.target_layers - 1, self.layer.vocab_size, self.num_draft_tokens
        is_rising = list(self.aux_layers) == sorted(set(self.aux_layers))
        is_inside = all(0 <= layer <= last for layer in self.aux_layers)
        if not self.aux_layers or not is_rising or not is_inside:
            got = ", ".join(map(str, self.aux_layers)) or "none"
            raise SpecJAXError(
                f"aux_layers must be rising layers of the target, 0 to {last}, got {got}"
            )
        if U is not None and not 0 < U <= V:
            raise SpecJAXError(f"num_draft_tokens must be in 1 to {V}, got {U}")

    def check_target(self, target_config: LlamaConfig) -> None:
        """Checks that the head was made for a target of this shape.

        Raises:
          SpecJAXError: for another target; the message names what differs.
        """
        sizes = (
            ("width", self.layer.hidden_size, target_config.hidden_size),
            ("vocabulary", self.layer.vocab_size, target_config.vocab_size),
            ("number of layers", self.target_layers, target_config.num_layers),
        )
        for name, expected, got in sizes:
            if expected != got:
                raise SpecJAXError(
                    f"the EAGLE head is for another target: its {name} is {expected}, the "
                    f"target's {got}"
                )


DRAFT_CONFIG = EagleConfig
FORMAT = "specjax.checkpoints_convert.eagle"
VLLM_METHODS = ("eagle3",)
OBJECTIVE = "specjax.train.eagle"
CATCH_UP = 32  # tokens of skipped rounds that are read at a time


# --- The head's parameters and layers -------------------------------------------------------------


def abstract_params(config: EagleConfig, dtype=jnp.float32):
    """Returns a head's trained and stored parameters as `jax.ShapeDtypeStruct`s.

    One decoder layer as in `llama.abstract_params`. Matrices are `[out, in]`; I is the width of
    several inputs side by side.
    """
    D, num_layers = config.layer.hidden_size, len(config.aux_layers)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    model = llama.abstract_params(config.layer, dtype)
    params = {
        "tap_norms_ID": array(num_layers, D),  # of `aux_layers`; checkpoints have this name
        "embed_norm_D": array(D),
        "feature_norm_D": array(D),
        "join_DI": array(D, 2 * D),
        "layers": model["layers"],
        "final_norm_D": model["final_norm_D"],
    }
    if num_layers > 1:
        params["fuse_DI"] = array(D, num_layers * D)
    return params


def for_decoding(params, draft_ids_U: jax.Array | None, target_params):
    """Returns the drafter's parameters, with the output rows of the tokens it can draft.

    Args:
      params: see `abstract_params`.
      draft_ids_U: int32 ids of these tokens; None for all, which use the target's own matrix.
      target_params: parameters of the target.
    """
    if draft_ids_U is None:
        return params
    rows_UD = llama.output_rows(target_params, draft_ids_U)
    return params | {"draft_ids_U": draft_ids_U, "lm_head_UD": rows_UD}


def fuse(params, config: EagleConfig, aux_hidden_BTD: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the target's features `[B, T, D]`, of its residual streams after `aux_layers`."""
    normed = []
    for hidden_BTD, norm_D in zip(aux_hidden_BTD, params["tap_norms_ID"], strict=True):
        normed.append(llama.rms_norm(hidden_BTD, norm_D, config.layer.rms_norm_eps))
    if len(normed) == 1:
        return normed[0]
    return linear(jnp.concatenate(normed, axis=-1), params["fuse_DI"])


def join(params, config: EagleConfig, feature_BTD: jax.Array, embed_BTD: jax.Array) -> jax.Array:
    """Returns the decoder layer's input: features of tokens and embeddings of the next ones."""
    eps = config.layer.rms_norm_eps
    embed_BTD = llama.rms_norm(embed_BTD, params["embed_norm_D"], eps)
    feature_BTD = llama.rms_norm(feature_BTD, params["feature_norm_D"], eps)
    return linear(jnp.concatenate([embed_BTD, feature_BTD], axis=-1), params["join_DI"])


def hidden(params, config: EagleConfig, feature_BTD: jax.Array) -> jax.Array:
    """Returns the input of the output matrix, from the output of the decoder layer."""
    return llama.rms_norm(feature_BTD, params["final_norm_D"], config.layer.rms_norm_eps)


# --- The drafter ----------------------------------------------------------------------------------


@struct.dataclass
class EagleState:
    """State of the head between rounds.

    Attributes:
      features_PZD: pool of the target's fused features of committed tokens.
      known_B: int32, number of tokens with features: all but the pending one.
      read_B: int32, how many of the first positions of the cache come from the target's features.
      cache: keys and values of the head's layer.
    """

    features_PZD: jax.Array
    known_B: jax.Array
    read_B: jax.Array
    cache: PagedKVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleDrafter(Drafter):
    """Drafts with the head `config`, whose parameters come from `for_decoding`.

    The first pass of a round reads the up to `num_tokens` + 1 tokens that the last round committed,
    with the target's features, over what the head wrote there for its own drafts. With `may_rest`
    it may rest, and catches up when it runs again.
    """

    config: EagleConfig
    may_rest: bool = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    def resting(self) -> EagleDrafter:
        return dataclasses.replace(self, may_rest=True)

    def init(self, params, context):
        runtime = context.runtime
        cache = llama.init_cache(self.config.layer, runtime, context.num_pages, role="draft")
        pool_shape = (context.num_pages, runtime.page_size, self.config.layer.hidden_size)
        return EagleState(
            features_PZD=jnp.zeros(pool_shape, runtime.dtype),
            known_B=jnp.zeros_like(context.length_B),
            read_B=jnp.zeros_like(context.length_B),
            cache=cache,
        )

    def begin(self, state, is_new_B, start_B):
        return state.replace(
            known_B=jnp.where(is_new_B, start_B, state.known_B),
            read_B=jnp.where(is_new_B, start_B, state.read_B),
        )

    def complete_B(self, state):
        return jnp.minimum(state.known_B, state.read_B)

    def prefill(self, params, state, context, chunk):
        feature_BTD = fuse(params, self.config, chunk.aux_hidden_BTD)
        state = self._store(state, context, chunk.start_B, feature_BTD, chunk.end_B)
        T = chunk.tokens_BT.shape[1]
        _, cache = self._read(params, state, context, chunk.start_B, T)
        read_B = jnp.where(context.active_B, chunk.end_B, state.read_B)
        return state.replace(read_B=read_B, cache=cache)

    def propose(self, params, state, context, sample):
        M, length_B = self.num_tokens, context.length_B
        if self.may_rest:
            state = self._catch_up(params, state, context, missing=M + 1)
        x_BTD, cache = self._read(params, state, context, state.read_B, M + 1)
        index_B = jnp.clip(length_B - 1 - state.read_B, 0, M)
        feature_B1D = jnp.take_along_axis(x_BTD, index_B[:, None, None], axis=1)
        tokens, distributions = [], []
        for i in range(M):
            if i:
                token_B1, start_B = tokens[-1][:, None], length_B - 1 + i
                feature_B1D, cache = self._forward(
                    params, context, cache, token_B1, feature_B1D, start_B
                )
            logits_BV = self._logits(params, context, feature_B1D)
            token_B, distribution = sample(logits_BV, length_B + i)
            tokens.append(token_B)
            distributions.append(distribution)
        read_B = jnp.where(context.active_B, length_B, state.read_B)
        return chain(tokens, distributions), state.replace(cache=cache, read_B=read_B)

    def update(self, params, state, context, verified, aux_hidden_BTD):
        feature_BTD = fuse(params, self.config, aux_hidden_BTD)
        # Features of rejected drafts are overwritten in the next round, and not read before.
        return self._store(state, context, state.known_B, feature_BTD, context.length_B - 1)

    def _store(self, state: EagleState, context: Context, start_B, feature_BTD, known_B):
        """Writes features of T tokens of each row; those of the first `known_B` are right."""
        positions_BT = start_B[:, None] + jnp.arange(feature_BTD.shape[1])
        locations = self._locate(context, positions_BT)
        return state.replace(
            features_PZD=kv_cache.write(state.features_PZD, *locations, feature_BTD),
            known_B=jnp.where(context.active_B, known_B, state.known_B),
        )

    def _locate(self, context: Context, positions_BT):
        Z = context.runtime.page_size
        return kv_cache.locate(context.block_table_BX, positions_BT, Z, context.num_pages)

    def _forward(self, params, context: Context, cache, tokens_BT, feature_BTD, start_B):
        """Runs the head on T positions from `start_B` on. Returns its features, and the cache.

        Position p reads token p and the features of the token before it.
        """
        config, runtime = self.config.layer, context.runtime
        table_BX, T = context.block_table_BX, tokens_BT.shape[1]
        locations = llama.locate(config, cache, table_BX, start_B, T)
        embed_BTD = llama.embed(context.target_params, runtime, tokens_BT)
        x_BTD = join(params, self.config, feature_BTD, embed_BTD)
        x_BTD, k_pool, v_pool = llama.decoder_layer(
            params["layers"][0],
            config,
            runtime,
            "draft",
            x_BTD,
            cache.k_PKZH[0],
            cache.v_PKZH[0],
            locations,
            first_position=1,
        )
        return x_BTD, cache.replace(k_PKZH=[k_pool], v_PKZH=[v_pool])

    def _read(self, params, state: EagleState, context: Context, start_B, T: int):
        """Runs the head on T positions from `start_B` on, with the target's features.

        The output beyond the known features is undefined. Features before position 0 are zero.
        """
        positions_BT = start_B[:, None] + jnp.arange(T)
        tokens_BT = jnp.take_along_axis(context.tokens_BS, positions_BT, axis=1, mode="clip")
        feature_BTD = kv_cache.read(state.features_PZD, *self._locate(context, positions_BT - 1))
        return self._forward(params, context, state.cache, tokens_BT, feature_BTD, start_B)

    def _catch_up(self, params, state: EagleState, context: Context, missing: int):
        """Reads chunks until no row that takes part lacks more than `missing` positions."""
        T = max(missing, CATCH_UP)

        def is_behind_B(state):
            return context.active_B & (context.length_B - state.read_B > missing)

        def read_chunk(state):
            _, cache = self._read(params, state, context, state.read_B, T)
            next_B = jnp.minimum(state.read_B + T, context.length_B - 1)
            read_B = jnp.where(is_behind_B(state), next_B, state.read_B)
            return state.replace(read_B=read_B, cache=cache)

        return jax.lax.while_loop(lambda state: jnp.any(is_behind_B(state)), read_chunk, state)

    def _logits(self, params, context: Context, feature_B1D):
        """Returns logits over the whole vocabulary, `[B, V]`, or this device's part of it."""
        h_B1D = hidden(params, self.config, feature_B1D)
        if self.config.num_draft_tokens is None:
            return llama.logits(context.target_params, h_B1D)[:, 0]
        logits_BU = linear(h_B1D, params["lm_head_UD"], dtype=jnp.float32)[:, 0]
        V = context.target_config.vocab_size
        logits_BV = jnp.full((len(logits_BU), V), -jnp.inf)
        return logits_BV.at[:, params["draft_ids_U"]].set(logits_BU)


def make(num_tokens: int, target_config: LlamaConfig, draft_config: EagleConfig) -> EagleDrafter:
    """Returns the drafter; see `EagleDrafter`.

    Raises:
      SpecJAXError: for a head made for another target.
    """
    draft_config.check_target(target_config)
    return EagleDrafter(num_tokens=num_tokens, config=draft_config)
