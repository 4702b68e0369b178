"""specjax bench gpu: a GPU's figures without real weights.

The target is large and random, and its agreement with the draft model can be chosen: the target
repeats the draft model's layers and has further layers, whose outputs are scaled by ε. At 0 the two
are the same model, and the larger ε the less they agree. ε is searched for a wanted acceptance,
which is then measured.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from specjax import llama
from specjax.bench import costs, timing
from specjax.bench.costs import Costs
from specjax.config import LlamaConfig
from specjax.engine import metrics
from specjax.engine.load import Model
from specjax.engine.request import Generation
from specjax.engine.setup import Setup, Speculation
from specjax.errors import SpecJAXError
from specjax.report import tables

SIZE = 0.5  # of random weights, in units of one over the root of the number of their inputs
SPREAD = 3.5  # the same of the output matrix: distributions are about as far from flat as real ones
CLOSE = 0.015  # tolerance of the acceptance
FIRST_EPSILON = 0.1
LOWEST_EPSILON, HIGHEST_EPSILON = 1e-4, 100.0


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of the benchmark.

    Attributes:
      num_draft_layers: first layers of the target, which form the draft model.
      acceptance: the wanted α, at temperature 1.
      num_speculative_tokens: K.
      max_speculative_tokens: v is measured for K = 1 up to this.
      batch_size: rows.
      prompt_length: tokens of every prompt.
      max_new_tokens: generated tokens of every row.
      dtype: dtype of weights and caches.
      repeats: number of runs of each measurement.
      searches: most steps of the search for ε.
      copy_bytes: size of the array whose copy shows the bandwidth.
      implementation: implementation of attention and verification; None for the default.
      page_size: positions per page of the KV caches.
      seed: seed of all random numbers.
    """

    num_draft_layers: int
    acceptance: float
    num_speculative_tokens: int
    max_speculative_tokens: int
    batch_size: int
    prompt_length: int
    max_new_tokens: int
    dtype: Any
    repeats: int
    searches: int
    copy_bytes: int
    implementation: str | None = None
    page_size: int = 64
    seed: int = 0

    def check(self, config: LlamaConfig) -> None:
        """Raises SpecJAXError for options that do not suit a target of this shape."""
        if not 0 < self.acceptance < 1:
            raise SpecJAXError(
                f"the wanted acceptance must be between 0 and 1, got {self.acceptance}"
            )
        if self.prompt_length + self.max_new_tokens > config.max_position_embeddings:
            raise SpecJAXError(
                f"prompts of {self.prompt_length} tokens and {self.max_new_tokens} new tokens are "
                f"beyond the context of the target, {config.max_position_embeddings}"
            )


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures.

    Attributes:
      epsilon: scale of the target's further layers.
      acceptance: α, measured at the K below.
      plain, speculative: tokens per second of all rows.
      tokens_per_round: with speculation.
      draft, verify: c and v at the K below, in plain steps.
      predicted: speedup by the formula.
      verify_by_k: v for each measured K.
      copy_bandwidth: bytes per second that a copy reads and writes.
      weights_bandwidth: bytes of weights per second in plain decoding.
      seconds_per_round: time of speculative decoding, in a call of many rounds.
      seconds_per_call: host overhead of a call, besides its rounds.
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

    @property
    def speedup(self) -> float:
        """Speedup over plain decoding."""
        return self.speculative / self.plain

    @property
    def bandwidth_share(self) -> float:
        """Share of the bandwidth of a copy that plain decoding reaches."""
        return self.weights_bandwidth / self.copy_bandwidth


def make_pair(
    config: LlamaConfig, num_draft_layers: int, seed: int, dtype, epsilon: float
) -> tuple[Model, Model]:
    """A random target, and a draft model that is its first layers; they share the arrays.

    Raises:
      SpecJAXError: a draft model without layers, or with all of the target's.
    """
    if not 0 < num_draft_layers < config.num_layers:
        raise SpecJAXError(
            f"the draft model must have 1 to {config.num_layers - 1} of the target's layers, got "
            f"{num_draft_layers}"
        )
    output_name = "embed_VD" if config.tie_word_embeddings else "lm_head_VD"
    # One array at a time: all of them in float32 would not fit together.
    abstract = llama.abstract_params(config, dtype)
    shapes, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = []
    for i, (path, leaf) in enumerate(shapes):
        name = path[-1].key
        if "norm" in name:
            leaves.append(jnp.ones(leaf.shape, dtype))
            continue
        fan_in = config.num_heads * config.head_dim if "out" in name else leaf.shape[-1]
        size = SPREAD if name == output_name else SIZE
        key = jax.random.key(seed + i)
        leaves.append(_random(key, leaf.shape, dtype, size * fan_in**-0.5))
    params = treedef.unflatten(leaves)
    params = scale_tail(params, num_draft_layers, jnp.asarray(epsilon, dtype))
    draft_params = params | {"layers": params["layers"][:num_draft_layers]}
    draft_config = dataclasses.replace(config, num_layers=num_draft_layers)
    target = Model(config, params, None, (), "random target")
    return target, Model(draft_config, draft_params, None, (), "its first layers")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key, shape, dtype, scale):
    values = jax.random.normal(key, shape, dtype)
    return (scale * values).astype(dtype)


def scale_tail(params, num_draft_layers: int, factor) -> Any:
    """Scales, in place, what the target's further layers add to the residual stream."""
    for layer in params["layers"][num_draft_layers:]:
        for part, name in (("attention", "out"), ("mlp", "down")):
            for key in list(layer[part]):
                if key.startswith(name):  # weights, and biases where there are any
                    layer[part][key] = _scale(layer[part][key], factor)
    return params


@functools.partial(jax.jit, donate_argnums=0)
def _scale(x, factor):
    return x * factor


def measure(config: LlamaConfig, options: Options) -> Result:
    """Builds the pair, finds ε and measures.

    Args:
      config: shape of the target.
      options: what to measure.
    """
    options.check(config)
    K, batch_size = options.num_speculative_tokens, options.batch_size
    target, draft = make_pair(
        config, options.num_draft_layers, options.seed, options.dtype, FIRST_EPSILON
    )
    setup = Setup(target, page_size=options.page_size, implementation=options.implementation)
    speculation = Speculation("draft_model", draft, K, {})
    rng = np.random.default_rng(options.seed)
    prompts = rng.integers(0, config.vocab_size, (batch_size, options.prompt_length)).tolist()

    def generate(speculation: Speculation | None) -> Generation:
        return setup.generate(
            speculation,
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=1.0,
            seed=list(range(batch_size)),
        )

    epsilon = _search(lambda: generate(speculation), target, options)
    plain, drafted = [], []
    for _ in range(options.repeats + 1):
        plain.append(generate(None))
        drafted.append(generate(speculation))
    plain, drafted_counted = plain[1:], drafted[1:]
    completions = [completion for run in drafted for completion in run.completions]
    stats = metrics.acceptance(completions, K)
    by_k = _costs(setup, speculation, options)
    plain_rate = _median_rate(plain)
    return Result(
        epsilon=epsilon,
        acceptance=stats.rate,
        plain=plain_rate,
        speculative=_median_rate(drafted_counted),
        tokens_per_round=stats.tokens_per_round,
        draft=by_k[K].draft,
        verify=by_k[K].verify,
        predicted=costs.predicted_speedup(stats, by_k[K], K),
        verify_by_k={k: cost.verify for k, cost in by_k.items()},
        copy_bandwidth=_copy_bandwidth(options),
        weights_bandwidth=_bytes_read(target) * plain_rate / batch_size,
        seconds_per_round=_median_seconds_per_round(drafted_counted),
        seconds_per_call=by_k[K].call_seconds,
    )


def _search(generate, target: Model, options: Options) -> float:
    """Scales the target's further layers until `generate` shows the wanted acceptance."""
    epsilon, low, high = FIRST_EPSILON, LOWEST_EPSILON, HIGHEST_EPSILON
    for _ in range(options.searches):
        completions = generate().completions
        found = metrics.acceptance(completions, options.num_speculative_tokens).rate
        if abs(found - options.acceptance) < CLOSE:
            break
        if found > options.acceptance:
            low = epsilon
        else:
            high = epsilon
        factor = (low * high) ** 0.5 / epsilon
        epsilon *= factor
        scale_tail(target.params, options.num_draft_layers, jnp.asarray(factor, options.dtype))
    return epsilon


def _costs(setup: Setup, speculation: Speculation, options: Options) -> dict[int, Costs]:
    """Costs for each K; those of drafting for the K of the drafter only."""
    measure_costs = functools.partial(
        costs.measure,
        setup,
        batch_size=options.batch_size,
        length=options.prompt_length,
        temperature=1.0,
        repeats=3 * options.repeats,
    )
    by_k = {k: measure_costs(k, ()) for k in range(1, options.max_speculative_tokens + 1)}
    K = speculation.num_speculative_tokens
    by_k[K] = measure_costs(K, setup.make_drafters(speculation))
    return by_k


def _median_rate(runs: list[Generation]) -> float:
    return float(np.median([tables.tokens_per_second([run]) for run in runs]))


def _median_seconds_per_round(runs: list[Generation]) -> float:
    rounds = float(np.median([run.rounds for run in runs]))
    seconds = float(np.median([run.decode_seconds for run in runs]))
    return seconds / rounds


def _copy_bandwidth(options: Options) -> float:
    """Bytes per second that a copy of one array reads and writes."""
    array = jnp.zeros(options.copy_bytes // 4, jnp.float32)

    def prepare():
        return lambda: jnp.copy(array)

    seconds = timing.interleaved({"copy": prepare}, 10 * options.repeats)["copy"]
    return 2 * options.copy_bytes / seconds


def _bytes_read(target: Model) -> int:
    """Bytes of weights that a pass reads: all but an embedding that is only looked up."""
    size = sum(x.nbytes for x in jax.tree.leaves(target.params))
    return size if target.config.tie_word_embeddings else size - target.params["embed_VD"].nbytes


def table(result: Result, wanted_acceptance: float, title: str) -> Table:
    """One line per figure."""
    weights, copy = result.weights_bandwidth / 1e9, result.copy_bandwidth / 1e9
    lines = {
        "plain tokens/s": f"{result.plain:.1f}",
        "weights read, of the bandwidth of a copy": f"{weights:.0f} of {copy:.0f} GB/s "
        f"({result.bandwidth_share:.0%})",
        "tokens/s with drafts": f"{result.speculative:.1f}",
        "speedup": f"{result.speedup:.2f}x",
        "acceptance α (wanted)": f"{result.acceptance:.3f} ({wanted_acceptance:g})",
        "tokens per round": f"{result.tokens_per_round:.2f}",
        "c": f"{result.draft:.3f}",
    }
    for k, v in result.verify_by_k.items():
        lines[f"v({k})"] = f"{v:.3f}"
    lines |= {
        "predicted speedup": f"{result.predicted:.2f}x",
        "realised / predicted": f"{result.speedup / result.predicted:.2f}",
        "host overhead of a call": f"{1e3 * result.seconds_per_call:.2f} ms",
    }
    return tables.table(title, ("", ""), lines.items())
