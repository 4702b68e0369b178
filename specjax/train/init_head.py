"""A head to begin with: its decoder layer and final norm are the target's last."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import parallel
from specjax.config import LlamaConfig
from specjax.drafters.eagle import EagleConfig
from specjax.engine.load import Model
from specjax.train.data import Dataset
from specjax.train.objective import Objective


def config(
    target: LlamaConfig, aux_layers: tuple[int, ...] = (), num_draft_tokens: int | None = None
) -> EagleConfig:
    """A head whose decoder layer has the shape of the target's.

    Args:
      target: the model that it drafts for.
      aux_layers: layers that it reads; by default the third, the middle one and the fourth from the end,
        as EAGLE-3 does, or of a target with fewer than eight layers the last.
      num_draft_tokens: how many tokens it can guess, None for all.
    """
    L = target.num_layers
    aux_layers = aux_layers or ((2, L // 2 - 1, L - 4) if L >= 8 else (L - 1,))
    return EagleConfig(
        dataclasses.replace(target, num_layers=1, tie_word_embeddings=True),
        aux_layers,
        L,
        num_draft_tokens,
    )


def initial_params(
    cfg: EagleConfig, target_params, rng: jax.Array, residual_size: float = 1.0
) -> dict:
    """float32 parameters of a head that passes its last layer on to a copy of the target's last
    layer.

    Args:
      cfg: the head; its layer has the shape of the target's.
      target_params: the target's.
      rng: key of what is random.
      residual_size: root mean square of the target's residual stream after the last layer, which is
        what its last layer expects; norms make everything about 1 in size.
    """
    D, n = cfg.layer.hidden_size, len(cfg.aux_layers)
    noise = lambda key, width: jax.random.normal(key, (D, width), jnp.float32)  # noqa: E731
    fuse_key, join_key = jax.random.split(rng)
    copy = lambda x: jnp.array(x, jnp.float32)  # noqa: E731  a copy of its own: training gives its buffer away
    eye_DD = np.eye(D, dtype=np.float32)
    params = {
        "tap_norms_ID": jnp.ones((n, D)),
        "embed_norm_D": jnp.ones(D),
        "feature_norm_D": jnp.ones(D),
        "join_DI": residual_size
        * jnp.concatenate([0.5 * D**-0.5 * noise(join_key, D), eye_DD], axis=1),
        "layers": [jax.tree.map(copy, target_params["layers"][-1])],
        "final_norm_D": copy(target_params["final_norm_D"]),
    }
    if n > 1:
        others = 0.2 * ((n - 1) * D) ** -0.5 * noise(fuse_key, (n - 1) * D)
        params["fuse_DI"] = jnp.concatenate([others, eye_DD], axis=1)
    return params


def likely_tokens(rows: Dataset, cfg: EagleConfig) -> jax.Array | None:
    """The tokens that a head of this shape will guess, int32 `[U]`, rising: those that the rows
    have most often behind prompts. None for all."""
    if cfg.num_draft_tokens is None:
        return None
    counts_V = sum(
        np.bincount(shard.tokens_RS[shard.said_RS], minlength=cfg.layer.vocab_size)
        for shard in rows.shards
    )
    return jnp.asarray(
        np.sort(np.argsort(-counts_V, kind="stable")[: cfg.num_draft_tokens]), jnp.int32
    )


def residual_size(objective: Objective, target: Model, rows: Dataset) -> float:
    """Root mean square of the target's residual stream after the head's last layer, over a few rows."""
    longest = np.argsort(-rows.fields("length_R"), kind="stable")[:2]
    few = rows.batch(
        np.resize(longest, 2 * parallel.dp_size(target.mesh)), objective.aux_layers, 1.0
    )
    last_BSD = objective.features(target.params, few)[
        objective.aux_layers.index(objective.drafter.aux_layers[-1])
    ]
    counts_BS1 = (few.weight_BS > 0)[..., None]
    return float(jnp.sqrt(jnp.mean(last_BSD.astype(jnp.float32) ** 2, where=counts_BS1)))
