"""A card's figures without real weights: a large random target, and a draft model that agrees with
it as often as wished.

The target repeats the draft model's layers and has further layers, whose outputs are scaled by ε:
at 0 the two are the same model, and the larger ε the less they agree. ε is searched for a wanted
acceptance, which is then measured.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import llama
from specjax.bench import costs, timing
from specjax.config import LlamaConfig
from specjax.drafters import registry
from specjax.engine import generate as generation
from specjax.engine import metrics
from specjax.engine.load import Model
from specjax.errors import SpecJAXError

SIZE = 0.5  # of random weights, in terms of one over the root of their inputs' number
SPREAD = 3.5  # the same of the output matrix, and so of logits: distributions are about as far from flat as real ones
CLOSE = 0.015  # to the wanted acceptance: near enough


@dataclasses.dataclass(frozen=True)
class Result:
    """What was found.

    Attributes:
      epsilon: scale of the target's further layers.
      acceptance: α, measured at the K below.
      plain, speculative: tokens per second of all rows.
      tokens_per_round: with speculation.
      draft, verify: c and v at the K below, in plain steps.
      predicted: speedup by the formula.
      verify_by_k: v for each K that was tried.
      copy_bandwidth: bytes per second that a copy reads and writes.
      weights_bandwidth: bytes of weights per second in plain decoding.
      seconds_per_round: of speculative decoding, in a call of many rounds.
      seconds_per_call: what a call costs besides its rounds: the host's part.
    """

    epsilon: float
    acceptance: float
    plain: float
    speculative: float
    tokens_per_round: float
    draft: float
    verify: float
    predicted: float
    verify_by_k: dict[int, float]
    copy_bandwidth: float
    weights_bandwidth: float
    seconds_per_round: float
    seconds_per_call: float


def make_pair(
    cfg: LlamaConfig, num_draft_layers: int, seed: int, dtype, epsilon: float
) -> tuple[Model, Model]:
    """A random target, and a draft model that is its first layers; they share the arrays.

    Raises:
      SpecJAXError: a draft model without layers, or with all of the target's.
    """
    if not 0 < num_draft_layers < cfg.num_layers:
        raise SpecJAXError(
            f"the draft model must have 1 to {cfg.num_layers - 1} of the target's layers, got "
            f"{num_draft_layers}"
        )
    # One array at a time: all of them in float32 would not fit beside each other.
    shapes, treedef = jax.tree_util.tree_flatten_with_path(llama.abstract_params(cfg, dtype))
    draw = jax.jit(
        lambda key, shape, scale: (scale * jax.random.normal(key, shape, dtype)).astype(dtype),
        static_argnums=1,
    )
    leaves = []
    for i, (path, leaf) in enumerate(shapes):
        if "norm" in path[-1].key:
            leaves.append(jnp.ones(leaf.shape, dtype))
            continue
        fan_in = cfg.num_heads * cfg.head_dim if "out" in path[-1].key else leaf.shape[-1]
        size = (
            SPREAD
            if path[-1].key == ("embed_VD" if cfg.tie_word_embeddings else "lm_head_VD")
            else SIZE
        )
        leaves.append(draw(jax.random.key(seed + i), leaf.shape, size * fan_in**-0.5))
    params = treedef.unflatten(leaves)
    params = scale_tail(params, num_draft_layers, jnp.asarray(epsilon, dtype))
    draft_params = params | {"layers": params["layers"][:num_draft_layers]}
    draft_cfg = dataclasses.replace(cfg, num_layers=num_draft_layers)
    return Model(cfg, params, None, (), "random target"), Model(
        draft_cfg, draft_params, None, (), "its first layers"
    )


def scale_tail(params, num_draft_layers: int, factor) -> Any:
    """The parameters with what the layers behind the first ones add to the residual stream scaled,
    in place."""
    for layer in params["layers"][num_draft_layers:]:
        for part, name in (("attention", "out"), ("mlp", "down")):
            for key in [
                key for key in layer[part] if key.startswith(name)
            ]:  # a bias too, where there is one
                layer[part][key] = _scale(layer[part][key], factor)
    return params


_scale = jax.jit(lambda x, factor: x * factor, donate_argnums=0)


def run(
    cfg: LlamaConfig,
    *,
    num_draft_layers: int,
    acceptance: float,
    num_speculative_tokens: int,
    max_speculative_tokens: int,
    batch_size: int,
    prompt_length: int,
    max_new_tokens: int,
    dtype,
    repeats: int,
    searches: int,
    copy_bytes: int,
    implementation: str | None,
    page_size: int,
    seed: int = 0,
) -> Result:
    """Builds the pair, finds ε and measures.

    Args:
      cfg: shape of the target.
      num_draft_layers: of its layers that the draft model has.
      acceptance: the wanted α, at temperature 1.
      num_speculative_tokens: K.
      max_speculative_tokens: v is measured for K = 1 up to this.
      batch_size, prompt_length, max_new_tokens: of the runs.
      dtype: of weights and caches.
      repeats: of each measurement.
      searches: steps of the search for ε.
      copy_bytes: size of the array whose copy shows the bandwidth.
      implementation, page_size: see `DecodeConfig`.
      seed: of everything random.
    """
    if not 0 < acceptance < 1:
        raise SpecJAXError(f"the wanted acceptance must be between 0 and 1, got {acceptance}")
    if prompt_length + max_new_tokens > cfg.max_position_embeddings:
        raise SpecJAXError(
            f"prompts of {prompt_length} tokens and {max_new_tokens} more are beyond the context of the "
            f"target, {cfg.max_position_embeddings}"
        )
    epsilon = 0.1
    target, draft = make_pair(cfg, num_draft_layers, seed, dtype, epsilon)
    prompts = (
        np.random.default_rng(seed)
        .integers(0, cfg.vocab_size, (batch_size, prompt_length))
        .tolist()
    )
    options = dict(
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        seed=list(range(batch_size)),
        implementation=implementation,
        page_size=page_size,
    )
    K = num_speculative_tokens
    speculate = functools.partial(
        generation.generate, target, "draft_model", draft=draft, num_speculative_tokens=K, **options
    )
    low, high = 1e-4, 100.0
    for _ in range(searches):
        found = metrics.acceptance(speculate().completions, K).rate
        if abs(found - acceptance) < CLOSE:
            break
        low, high = (epsilon, high) if found > acceptance else (low, epsilon)
        factor = (low * high) ** 0.5 / epsilon
        epsilon *= factor
        scale_tail(target.params, num_draft_layers, jnp.asarray(factor, dtype))

    plain, speculative = [], []
    for _ in range(repeats + 1):
        plain.append(generation.generate(target, "none", **options))
        speculative.append(speculate())
    rates = [
        float(np.median([batch_size * max_new_tokens / each.decode_seconds for each in runs[1:]]))
        for runs in (plain, speculative)
    ]
    stats = metrics.acceptance([c for each in speculative for c in each.completions], K)

    measure = functools.partial(
        costs.measure,
        target,
        batch_size=batch_size,
        length=prompt_length,
        temperature=1.0,
        verify="rejection",
        page_size=page_size,
        implementation=implementation,
        repeats=3 * repeats,
    )
    by_k = {k: measure(k, ()) for k in range(1, max_speculative_tokens + 1)}
    by_k[K] = measure(
        K,
        [
            (
                registry.make("draft_model", K, target.config, draft.config),
                draft.params,
            )
        ],
    )
    array = jnp.zeros(copy_bytes // 4, jnp.float32)
    copy = timing.interleaved({"copy": lambda: lambda: jnp.copy(array)}, 10 * repeats)["copy"]
    weights = (
        sum(x.nbytes for x in jax.tree.leaves(target.params)) - target.params["embed_VD"].nbytes
    )
    if cfg.tie_word_embeddings:
        weights += target.params["embed_VD"].nbytes
    rounds = float(np.median([each.rounds for each in speculative[1:]]))
    seconds = float(np.median([each.decode_seconds for each in speculative[1:]]))
    return Result(
        epsilon,
        stats.rate,
        *rates,
        stats.tokens_per_round,
        by_k[K].draft,
        by_k[K].verify,
        costs.predicted_speedup(stats, by_k[K], K),
        {k: cost.verify for k, cost in by_k.items()},
        2 * copy_bytes / copy,
        weights * rates[0] / batch_size,
        seconds / rounds,
        by_k[K].call_seconds,
    )
