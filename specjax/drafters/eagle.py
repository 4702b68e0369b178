"""A shallow head on the target's own features guesses one token after the other (Li et al.,
"EAGLE").

EAGLE-1 and 2 (2024, arXiv 2401.15077 and 2406.16858) give the head the target's final hidden state
at a token and the embedding of the next one; EAGLE-3 (2025, arXiv 2503.01840) fuses hidden states
after three of the target's layers. In both the head is one decoder layer, and what it returns
stands in for the target's features at the tokens that it has guessed itself. The output matrix is
the target's own, or some of its rows: tokens without a row are never guessed.

Position j of the head's cache belongs to the features of token j and the embedding of token j + 1; its
output guesses token j + 2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import kv_cache, llama
from specjax.config import LlamaConfig
from specjax.drafters.base import Context, Drafter, chain
from specjax.errors import SpecJAXError
from specjax.kv_cache import PagedKVCache
from specjax.parallel import split_over


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape and constants of a head.

    Attributes:
      layer: its decoder layer, as a Llama of one layer whose width and vocabulary are the target's.
      aux_layers: layers of the target whose hidden states it gets: the last one alone (EAGLE-1 and 2), or
        three (EAGLE-3).
      target_layers: how many layers the target has.
      num_draft_tokens: U, how many tokens it can guess; None for the whole vocabulary.
    """

    layer: LlamaConfig
    aux_layers: tuple[int, ...]
    target_layers: int
    num_draft_tokens: int | None = None

    def __post_init__(self):
        if self.layer.num_layers != 1:
            raise SpecJAXError(
                f"a head has one decoder layer, and this one {self.layer.num_layers}"
            )
        in_order = all(a < b for a, b in zip(self.aux_layers, self.aux_layers[1:], strict=False))
        if (
            not self.aux_layers
            or not in_order
            or self.aux_layers[0] < 0
            or self.aux_layers[-1] >= self.target_layers
        ):
            raise SpecJAXError(
                f"aux_layers must be rising layers of the target, 0 to {self.target_layers - 1}, got "
                f"{', '.join(map(str, self.aux_layers)) or 'none'}"
            )
        if (
            self.num_draft_tokens is not None
            and not 0 < self.num_draft_tokens <= self.layer.vocab_size
        ):
            raise SpecJAXError(
                f"num_draft_tokens must be in 1 to {self.layer.vocab_size}, got {self.num_draft_tokens}"
            )

    def check(self, target: LlamaConfig) -> None:
        """Raises SpecJAXError, naming what differs, for a head that was made for another target."""
        for name, own, other in (
            ("width", self.layer.hidden_size, target.hidden_size),
            ("vocabulary", self.layer.vocab_size, target.vocab_size),
            ("number of layers", self.target_layers, target.num_layers),
        ):
            if own != other:
                raise SpecJAXError(
                    f"the head is for another target: its {name} is {own}, the target's {other}"
                )


def abstract_params(cfg: EagleConfig, dtype=jnp.float32):
    """The parameters of a head as `jax.ShapeDtypeStruct`s: what is trained, and stored.

    One decoder layer as in `llama.abstract_params`; matrices are `[out, in]`, I is what they read.
    """
    D, n = cfg.layer.hidden_size, len(cfg.aux_layers)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    model = llama.abstract_params(cfg.layer, dtype)
    params = {
        "tap_norms_ID": array(n, D),
        "embed_norm_D": array(D),
        "feature_norm_D": array(D),
        "join_DI": array(D, 2 * D),
        "layers": model["layers"],
        "final_norm_D": model["final_norm_D"],
    }
    return params | ({"fuse_DI": array(D, n * D)} if n > 1 else {})


def for_decoding(params, draft_ids_U: jax.Array | None, target_params):
    """A head's parameters as the drafter wants them: with the output rows of the tokens that it can
    guess.

    Args:
      params: see `abstract_params`.
      draft_ids_U: int32 ids of these tokens; None for all, for which the target's own matrix
        serves.
      target_params: of the target.
    """
    if draft_ids_U is None:
        return params
    return params | {
        "draft_ids_U": draft_ids_U,
        "lm_head_UD": llama.output_rows(target_params, draft_ids_U),
    }


def fuse(params, cfg: EagleConfig, aux_hidden_BTD: tuple[jax.Array, ...]) -> jax.Array:
    """The target's features `[B, T, D]`, of its residual streams after the layers `cfg.aux_layers`."""
    eps = cfg.layer.rms_norm_eps
    normed = [
        llama.rms_norm(hidden_BTD, norm_D, eps)
        for hidden_BTD, norm_D in zip(aux_hidden_BTD, params["tap_norms_ID"], strict=True)
    ]
    return (
        llama.linear(jnp.concatenate(normed, axis=-1), params["fuse_DI"])
        if len(normed) > 1
        else normed[0]
    )


def join(params, cfg: EagleConfig, feature_BTD: jax.Array, embed_BTD: jax.Array) -> jax.Array:
    """What goes into the decoder layer: features of tokens and the embeddings of the next ones."""
    eps = cfg.layer.rms_norm_eps
    pair = (
        llama.rms_norm(embed_BTD, params["embed_norm_D"], eps),
        llama.rms_norm(feature_BTD, params["feature_norm_D"], eps),
    )
    return llama.linear(jnp.concatenate(pair, axis=-1), params["join_DI"])


def hidden(params, cfg: EagleConfig, feature_BTD: jax.Array) -> jax.Array:
    """What the output matrix reads, of what the decoder layer returned."""
    return llama.rms_norm(feature_BTD, params["final_norm_D"], cfg.layer.rms_norm_eps)


@struct.dataclass
class State:
    """What the head remembers.

    Attributes:
      features_BSD: the target's fused features of committed tokens,
      known_B: int32, of how many: all but the pending one.
      read_B: int32, how many of the first positions of the cache come from the target's features; -1
        before there are any.
      cache: keys and values of the head's layer.
    """

    features_BSD: jax.Array
    known_B: jax.Array
    read_B: jax.Array
    cache: PagedKVCache


DRAFT = EagleConfig
CATCH_UP = 32  # tokens of missed rounds that are read at a time


@functools.lru_cache
def make(
    num_speculative_tokens: int,
    target: LlamaConfig,
    draft: EagleConfig,
    *,
    implementation: str | None = None,
    skippable: bool = False,
) -> Drafter:
    """Drafts with the head `draft`; the params that the loop passes come from `for_decoding`.

    The first pass of a round reads the up to K + 1 tokens that the round before has committed, with
    the target's features of them, over whatever the head wrote there for its own guesses. With
    `skippable` it may miss rounds, and catches up when it is asked again.

    Raises:
      SpecJAXError: the head is for another target.
    """
    draft.check(target)
    K, cfg = num_speculative_tokens, draft.layer

    def pass_(params, target_params, cache, tokens_BT, feature_BTD, start_B):
        """The head on T positions from `start_B` on."""
        positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])
        page_BT, offset_BT = kv_cache.locate(cache, positions_BT)
        x_BTD = join(params, draft, feature_BTD, llama.embed(target_params, target, tokens_BT))
        layer = params["layers"][0]
        axes = split_over(layer["attention"]["qkv_KGHD"].shape[0], cfg.num_kv_heads, "draft")
        x_BTD, k_pool, v_pool = llama.paged_layer(
            layer,
            cfg,
            x_BTD,
            cache.k_PKZH[0],
            cache.v_PKZH[0],
            page_BT,
            offset_BT,
            llama.rotary(cfg, positions_BT),
            cache.block_table_BX,
            start_B,
            implementation,
            axes,
        )
        return x_BTD, cache.replace(k_PKZH=[k_pool], v_PKZH=[v_pool])

    def read(params, target_params, state: State, tokens_BS, T: int):
        """The head on the next T positions of each row with the target's features; what is beyond them
        means nothing."""
        index_BT = jnp.maximum(state.read_B, 0)[:, None] + jnp.arange(T)
        take = lambda x, index: jnp.take_along_axis(x, index, axis=1, mode="clip")  # noqa: E731
        first_B1 = (state.read_B < 0)[:, None]
        tokens_BT = take(tokens_BS, jnp.where(first_B1, 0, index_BT + 1))
        feature_BTD = take(state.features_BSD, index_BT[..., None])
        feature_BTD = jnp.where(first_B1[..., None], 0, feature_BTD)
        x_BTD, cache = pass_(
            params, target_params, state.cache, tokens_BT, feature_BTD, state.read_B
        )
        return x_BTD, state.replace(cache=cache)

    def catch_up(params, target_params, state: State, tokens_BS, last_B, missing: int, T: int):
        """Reads T positions at a time until no row lacks more than `missing` of those before `last_B`."""

        def read_chunk(state):
            _, state = read(params, target_params, state, tokens_BS, T)
            return state.replace(
                read_B=jnp.where(
                    state.read_B < last_B, jnp.minimum(state.read_B + T, last_B), state.read_B
                )
            )

        return jax.lax.while_loop(
            lambda state: jnp.any(last_B - state.read_B > missing), read_chunk, state
        )

    def init(params, prefill):
        B, S = prefill.tokens_BS.shape
        cache = llama.init_cache(params, cfg, B, S, prefill.page_size)
        last_B = prefill.length_B - 2
        cache = kv_cache.reserve(cache, jnp.maximum(last_B, 0))
        features_BSD = fuse(params, draft, prefill.aux_hidden_BSD)
        state = State(features_BSD, prefill.length_B - 1, jnp.minimum(last_B, 0), cache)
        return catch_up(
            params, prefill.target, state, prefill.tokens_BS, last_B, 0, prefill.chunk_size
        )

    def propose(params, state, context, draw):
        length_B, last_B = context.length_B, context.length_B - 2
        # What this pass writes for positions that the row has no page for is dropped.
        positions_B = jnp.where(context.active_B, length_B + K - 2, 0)
        state = state.replace(
            cache=kv_cache.reserve(state.cache, positions_B),
            read_B=jnp.where(last_B < 0, -1, jnp.maximum(state.read_B, 0)),
        )
        if skippable:
            wanted_B = jnp.where(context.active_B, last_B, 0)
            state = catch_up(
                params, context.target, state, context.tokens_BS, wanted_B, K, max(K + 1, CATCH_UP)
            )
        x_BTD, state = read(params, context.target, state, context.tokens_BS, K + 1)
        index_B = jnp.clip(last_B - state.read_B, 0, K)
        feature_B1D = jnp.take_along_axis(x_BTD, index_B[:, None, None], axis=1)
        cache, tokens, distributions = state.cache, [], []
        for i in range(K):
            if i:
                feature_B1D, cache = pass_(
                    params, context.target, cache, tokens[-1][:, None], feature_B1D, last_B + i
                )
            token_B, distribution = draw(logits(params, context.target, feature_B1D), length_B + i)
            tokens.append(token_B)
            distributions.append(distribution)
        return chain(tokens, distributions), state.replace(cache=cache, read_B=length_B - 1)

    def logits(params, target_params, feature_B1D):
        """For the whole vocabulary, `[B, V]`, or this device's part of it."""
        h_B1D = hidden(params, draft, feature_B1D)
        if draft.num_draft_tokens is None:
            return llama.logits(target_params, h_B1D)[:, 0]
        logits_BU = llama.linear(h_B1D, params["lm_head_UD"], dtype=jnp.float32)[:, 0]
        none_BV = jnp.full((len(logits_BU), target.vocab_size), -jnp.inf)
        return none_BV.at[:, params["draft_ids_U"]].set(logits_BU)

    def update(params, state, context: Context, verified: Any, aux_hidden_BTD):
        feature_BTD = fuse(params, draft, aux_hidden_BTD)
        # Those of drafts that were rejected are overwritten in the next round, and nobody looks at
        # them before.
        place_BT = state.known_B[:, None] + jnp.arange(K + 1)
        row_B1 = jnp.arange(len(place_BT))[:, None]
        return state.replace(
            features_BSD=state.features_BSD.at[row_B1, place_BT].set(feature_BTD, mode="drop"),
            known_B=context.length_B - 1,
            cache=kv_cache.release(state.cache, ~context.active_B),
        )

    return Drafter(K, propose, draft.aux_layers, init, update)
