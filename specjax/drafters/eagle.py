"""A shallow EAGLE head on the target's own features drafts one token after the other (Li et al.).

EAGLE-1 and 2 (2024, arXiv 2401.15077 and 2406.16858) give the head the target's final hidden state
at a token and the embedding of the next one. EAGLE-3 (2025, arXiv 2503.01840) fuses hidden states
after three of the target's layers. In both the head is one decoder layer, and its output stands in
for the target's features at the tokens that it has drafted itself. The output matrix is the
target's own, or some of its rows: tokens without a row are never drafted.

Position j of the head's cache belongs to the features of token j and the embedding of token j + 1;
its output predicts token j + 2.
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
      features_BSD: the target's fused features of committed tokens.
      known_B: int32, number of tokens with features: all but the pending one.
      read_B: int32, how many of the first positions of the cache come from the target's features;
        -1 before there are any.
      cache: keys and values of the head's layer.
    """

    features_BSD: jax.Array
    known_B: jax.Array
    read_B: jax.Array
    cache: PagedKVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleDrafter(Drafter):
    """Drafts with the head `config`, whose parameters come from `for_decoding`.

    The first pass of a round reads the up to `num_tokens` + 1 tokens that the last round committed,
    with the target's features, over what the head wrote there for its own drafts. With `may_rest`
    it may skip rounds, and catches up when it runs again.
    """

    config: EagleConfig
    may_rest: bool = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    def resting(self) -> EagleDrafter:
        return dataclasses.replace(self, may_rest=True)

    def init(self, params, context, aux_hidden_BSD, chunk_size):
        llama.check_implementation(self.config.layer, context.runtime)
        B, S = context.tokens_BS.shape
        cache = llama.init_cache(self.config.layer, context.runtime, B, S, role="draft")
        last_B = context.length_B - 2
        cache = kv_cache.reserve(cache, jnp.maximum(last_B, 0))
        features_BSD = fuse(params, self.config, aux_hidden_BSD)
        read_B = jnp.minimum(last_B, 0)
        state = EagleState(features_BSD, context.length_B - 1, read_B, cache)
        return self._catch_up(params, state, context, last_B, missing=0, T=chunk_size)

    def propose(self, params, state, context, sample):
        M = self.num_tokens
        length_B, last_B = context.length_B, context.length_B - 2
        # Writes of the first pass to positions without a page are dropped.
        written_B = jnp.where(context.active_B, length_B + M - 2, 0)
        state = state.replace(
            cache=kv_cache.reserve(state.cache, written_B),
            read_B=jnp.where(last_B < 0, -1, jnp.maximum(state.read_B, 0)),
        )
        if self.may_rest:
            wanted_B = jnp.where(context.active_B, last_B, 0)
            chunk = max(M + 1, CATCH_UP)
            state = self._catch_up(params, state, context, wanted_B, missing=M, T=chunk)
        x_BTD, state = self._read(params, state, context, M + 1)
        index_B = jnp.clip(last_B - state.read_B, 0, M)
        feature_B1D = jnp.take_along_axis(x_BTD, index_B[:, None, None], axis=1)
        cache, tokens, distributions = state.cache, [], []
        for i in range(M):
            if i:
                token_B1 = tokens[-1][:, None]
                feature_B1D, cache = self._forward(
                    params, context, cache, token_B1, feature_B1D, last_B + i
                )
            logits_BV = self._logits(params, context, feature_B1D)
            token_B, distribution = sample(logits_BV, length_B + i)
            tokens.append(token_B)
            distributions.append(distribution)
        return chain(tokens, distributions), state.replace(cache=cache, read_B=length_B - 1)

    def update(self, params, state, context, verified, aux_hidden_BTD):
        feature_BTD = fuse(params, self.config, aux_hidden_BTD)
        # Features of rejected drafts are overwritten in the next round, and not read before.
        position_BT = state.known_B[:, None] + jnp.arange(self.num_tokens + 1)
        row_B1 = jnp.arange(len(position_BT))[:, None]
        features_BSD = state.features_BSD.at[row_B1, position_BT].set(feature_BTD, mode="drop")
        return state.replace(
            features_BSD=features_BSD,
            known_B=context.length_B - 1,
            cache=kv_cache.release(state.cache, ~context.active_B),
        )

    def _forward(self, params, context: Context, cache, tokens_BT, feature_BTD, start_B):
        """Runs the head on T positions from `start_B` on. Returns its features, and the cache."""
        config, runtime = self.config.layer, context.runtime
        locations = llama.locate(config, cache, start_B, tokens_BT.shape[1])
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
        )
        return x_BTD, cache.replace(k_PKZH=[k_pool], v_PKZH=[v_pool])

    def _read(self, params, state: EagleState, context: Context, T: int):
        """Runs the head on the next T positions of each row, with the target's features.

        The output beyond the known features is undefined.
        """
        index_BT = jnp.maximum(state.read_B, 0)[:, None] + jnp.arange(T)
        is_first_B1 = (state.read_B < 0)[:, None]
        token_index_BT = jnp.where(is_first_B1, 0, index_BT + 1)
        tokens_BT = jnp.take_along_axis(context.tokens_BS, token_index_BT, axis=1, mode="clip")
        feature_BTD = jnp.take_along_axis(
            state.features_BSD, index_BT[..., None], axis=1, mode="clip"
        )
        feature_BTD = jnp.where(is_first_B1[..., None], 0, feature_BTD)
        x_BTD, cache = self._forward(
            params, context, state.cache, tokens_BT, feature_BTD, state.read_B
        )
        return x_BTD, state.replace(cache=cache)

    def _catch_up(self, params, state: EagleState, context, last_B, *, missing: int, T: int):
        """Reads T positions at a time until no row lacks more than `missing` before `last_B`."""

        def read_chunk(state):
            _, state = self._read(params, state, context, T)
            next_B = jnp.minimum(state.read_B + T, last_B)
            is_behind_B = state.read_B < last_B
            return state.replace(read_B=jnp.where(is_behind_B, next_B, state.read_B))

        def is_behind(state):
            return jnp.any(last_B - state.read_B > missing)

        return jax.lax.while_loop(is_behind, read_chunk, state)

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
