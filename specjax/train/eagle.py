"""The training objective of EAGLE heads: unrolled over several steps, as in decoding.

A new head passes the target's last residual stream on to a copy of the target's last layer.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import llama, parallel
from specjax.checkpoints_convert import eagle as eagle_format
from specjax.config import LlamaConfig, Runtime
from specjax.drafters import eagle
from specjax.drafters.eagle import EagleConfig
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.train import losses
from specjax.train.data import Dataset
from specjax.train.losses import Projection, Start

MASKED = -1e30
MIN_LAYERS = 8  # targets with fewer layers get a head that reads the last one alone
# Scales of the random parts of a new head, relative to what keeps their sums at about 1.
EMBED_SCALE = 0.5
FUSE_SCALE = 0.2
NUM_SAMPLE_ROWS = 2  # per replica, to measure the target's residual stream


def make_config(
    target_config: LlamaConfig,
    aux_layers: tuple[int, ...] = (),
    num_draft_tokens: int | None = None,
) -> EagleConfig:
    """Returns the shape of a head whose decoder layer has the shape of the target's.

    Args:
      target_config: configuration of the target.
      aux_layers: layers that the head reads; by default the third, the middle one and the fourth
        from the end, as in EAGLE-3, or the last alone for targets with fewer than 8 layers.
      num_draft_tokens: number of tokens that it can draft, None for all.
    """
    L = target_config.num_layers
    if not aux_layers:
        aux_layers = (2, L // 2 - 1, L - 4) if L >= MIN_LAYERS else (L - 1,)
    layer = dataclasses.replace(target_config, num_layers=1, tie_word_embeddings=True)
    return EagleConfig(layer, aux_layers, L, num_draft_tokens)


def initial_params(
    config: EagleConfig, target_params, rng: jax.Array, residual_size: float = 1.0
) -> dict:
    """Returns float32 parameters of a new head.

    Args:
      config: configuration of the head; its layer has the shape of the target's.
      target_params: parameters of the target.
      rng: key of the random parameters.
      residual_size: root mean square of the target's residual stream after the head's last aux
        layer, the scale that the copied layer expects; norms scale everything to about 1.
    """
    D = config.layer.hidden_size
    num_layers = len(config.aux_layers)
    fuse_key, join_key = jax.random.split(rng)
    eye_DD = np.eye(D, dtype=np.float32)
    embed_DD = EMBED_SCALE * D**-0.5 * _normal(join_key, D, D)
    params = {
        "tap_norms_ID": jnp.ones((num_layers, D)),
        "embed_norm_D": jnp.ones(D),
        "feature_norm_D": jnp.ones(D),
        "join_DI": residual_size * jnp.concatenate([embed_DD, eye_DD], axis=1),
        "layers": [jax.tree.map(_copy, target_params["layers"][-1])],
        "final_norm_D": _copy(target_params["final_norm_D"]),
    }
    if num_layers > 1:
        width = (num_layers - 1) * D
        others = FUSE_SCALE * width**-0.5 * _normal(fuse_key, D, width)
        params["fuse_DI"] = jnp.concatenate([others, eye_DD], axis=1)
    return params


def _normal(key, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32)


def _copy(x) -> jax.Array:
    """Returns a float32 copy: training donates the buffers of its parameters."""
    return jnp.array(x, jnp.float32)


def frequent_tokens(rows: Dataset, config: EagleConfig) -> jax.Array | None:
    """Returns the tokens that a head of this shape can draft: the most frequent after prompts.

    Returns:
      int32 [U] in rising order; None for the whole vocabulary.
    """
    if config.num_draft_tokens is None:
        return None
    counts_V = np.zeros(config.layer.vocab_size, np.int64)
    for shard in rows.shards:
        tokens = shard.tokens_BS[shard.loss_mask_BS]
        counts_V += np.bincount(tokens, minlength=config.layer.vocab_size)
    order_V = np.argsort(-counts_V, kind="stable")
    chosen_U = np.sort(order_V[: config.num_draft_tokens])
    return jnp.asarray(chosen_U, jnp.int32)


def unrolled(
    params,
    config: EagleConfig,
    target_config: LlamaConfig,
    target_params,
    aux_hidden_BSD: tuple[jax.Array, ...],
    tokens_BS,
    num_steps: int,
) -> list[jax.Array]:
    """Returns a head's hidden states for `num_steps` consecutive tokens, from every token on.

    Chain j starts with the target's features of token j: step i reads the embedding of token
    j + 1 + i and predicts token j + 2 + i. As in decoding, it attends to positions up to j with the
    target's features, and to positions j + 1 ... j + i with the head's own.

    Args:
      params: parameters of the head, see `drafters.eagle.abstract_params`.
      config: configuration of the head.
      target_config: configuration of the target.
      target_params: parameters of the target, for its embedding.
      aux_hidden_BSD: the target's residual streams after the head's aux layers.
      tokens_BS: the rows.
      num_steps: number of steps.

    Returns:
      For each step `[B, T, D]`, T = S - 1 - num_steps chains.
    """
    T = tokens_BS.shape[1] - 1 - num_steps
    starts = tuple(hidden_BSD[:, :T] for hidden_BSD in aux_hidden_BSD)
    feature_BTD = eagle.fuse(params, config, starts)
    attention, mlp = params["layers"][0]["attention"], params["layers"][0]["mlp"]
    seen, outputs = [], []  # keys and values of the steps so far
    for i in range(num_steps):
        next_BT = tokens_BS[:, 1 + i : 1 + i + T]
        embed_BTD = llama.embed(target_params, Runtime(), next_BT)
        x_BTD = eagle.join(params, config, feature_BTD, embed_BTD)
        rotation = llama.rotary(config.layer, i + jnp.arange(T)[None])
        q_BTNH, k_BTKH, v_BTKH = llama.qkv(attention, config.layer, x_BTD, rotation)
        seen.append((k_BTKH, v_BTKH))
        a_BTNH = _attend(q_BTNH, seen)
        x_BTD = llama.out_residual(attention, a_BTNH, x_BTD)
        h_BTF = llama.gate_up(mlp, config.layer, x_BTD)
        feature_BTD = llama.down_residual(mlp, h_BTF, x_BTD)
        outputs.append(eagle.hidden(params, config, feature_BTD))
    return outputs


def _attend(q_BTNH, seen):
    """Attention of T chains to the first position of every chain up to their own, and to all later
    positions of their own."""
    (k_BTKH, v_BTKH), *own = seen
    B, T, N, H = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(B, T, k_BTKH.shape[2], -1, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32)
    all_scores = [jnp.where(jnp.tri(T, dtype=bool), scores, MASKED)]
    for own_BTKH, _ in own:
        score_BKGT = jnp.einsum(
            "btkgh,btkh->bkgt", q_BTKGH, own_BTKH, preferred_element_type=jnp.float32
        )
        all_scores.append(score_BKGT[..., None])
    scaled = jnp.concatenate(all_scores, axis=-1) * H**-0.5
    weights = jax.nn.softmax(scaled, axis=-1).astype(q_BTKGH.dtype)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights[..., :T], v_BTKH)
    for i, (_, own_BTKH) in enumerate(own):
        out_BTKGH += jnp.einsum("bkgt,btkh->btkgh", weights[..., T + i], own_BTKH)
    return out_BTKGH.reshape(B, T, N, H)


@dataclasses.dataclass(frozen=True)
class EagleObjective(losses.Objective):
    """Trains an EAGLE head, whose configuration is an `EagleConfig`."""

    ttt_steps: int = 3

    OPTIONS = ("aux_layers", "num_draft_tokens", "ttt_steps", "unroll_from")
    FIRST_POSITION = 1  # features of token j and the embedding of j + 1 predict j + 2
    TRAINS_OUTPUT = False

    @classmethod
    def make_config(cls, start: Start, target_config: LlamaConfig) -> EagleConfig:
        if start.draft is None:
            return make_config(target_config, start.aux_layers, start.num_draft_tokens)
        if start.aux_layers or start.num_draft_tokens is not None:
            raise SpecJAXError(
                f"the EAGLE head {start.draft} fixes aux_layers and num_draft_tokens; give either "
                "these or the head"
            )
        return eagle_format.check(start.draft, target_config)

    @property
    def draft_aux_layers(self) -> tuple[int, ...]:
        return self.draft_config.aux_layers

    def check_shardable(self) -> None:
        degree = parallel.degree(self.mesh, "draft")
        parallel.check_shardable(self.draft_config.layer, degree, "EAGLE head")

    def with_steps(self, num_steps: int) -> EagleObjective:
        return dataclasses.replace(self, ttt_steps=num_steps)

    def initial(self, target: Model, rows: Dataset, start: Start, seed: int):
        if start.draft is not None:
            _, params, draft_ids_U = eagle_format.read(start.draft)
            params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        else:
            rng = jax.random.key(seed)
            residual_size = self._residual_size(target, rows)
            params = initial_params(self.draft_config, target.params, rng, residual_size)
            draft_ids_U = frequent_tokens(rows, self.draft_config)
        return parallel.place(params, target.mesh, "draft"), draft_ids_U

    def _residual_size(self, target: Model, rows: Dataset) -> float:
        """Root mean square of the target's residual stream after the head's last aux layer, over
        the longest rows."""
        longest = np.argsort(-rows.fields("length_B"), kind="stable")[:NUM_SAMPLE_ROWS]
        num_rows = NUM_SAMPLE_ROWS * parallel.dp_size(target.mesh)
        batch = rows.batch(np.resize(longest, num_rows), self.aux_layers, 1.0)
        aux_hidden = self.aux_hidden(target.params, batch)
        index = self.aux_layers.index(self.draft_config.aux_layers[-1])
        last_BSD = aux_hidden[index].astype(jnp.float32)
        counts_BS1 = (batch.weight_BS > 0)[..., None]
        return float(jnp.sqrt(jnp.mean(last_BSD**2, where=counts_BS1)))

    def save(self, folder, target: Model, params, draft_ids_U) -> None:
        eagle_format.save(folder, self.draft_config, params, draft_ids_U)

    def student(self, params, target_params, draft_ids_U, batch, aux_hidden, num_steps):
        read = [aux_hidden[self.aux_layers.index(layer)] for layer in self.draft_aux_layers]
        output_UD = llama.output_rows(target_params, draft_ids_U)
        hidden = unrolled(
            params,
            self.draft_config,
            self.target_config,
            target_params,
            tuple(read),
            batch.tokens_BS,
            num_steps,
        )
        return [Projection(hidden_BTD, output_UD) for hidden_BTD in hidden]


OBJECTIVE = EagleObjective
