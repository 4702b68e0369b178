"""What speculation brings, by kind of text, drafter and temperature, and what the formula says it
should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax import parallel
from specjax.bench import costs
from specjax.bench.costs import Costs
from specjax.drafters import registry
from specjax.engine import generate as generation
from specjax.engine import metrics
from specjax.engine.load import Model
from specjax.errors import SpecJAXError


@dataclasses.dataclass(frozen=True)
class Row:
    """One domain, drafter and temperature. Rates are tokens per second of the decode loops, medians
    over repeats.

    Attributes:
      domain: of the prompts.
      drafter: its name.
      num_speculative_tokens: K.
      temperature: of the prompts.
      prompts: how many.
      tokens: generated per repeat with the drafter.
      acceptance: α, see `metrics.Acceptance`.
      by_position: the same for each draft position.
      tokens_per_round: with the drafter.
      plain, speculative: rates.
      draft, verify: c and v, see `Costs`.
      predicted: speedup by the formula.
    """

    domain: str
    drafter: str
    num_speculative_tokens: int
    temperature: float
    prompts: int
    tokens: int
    acceptance: float
    by_position: tuple[float, ...]
    tokens_per_round: float
    plain: float
    speculative: float
    draft: float
    verify: float
    predicted: float

    @property
    def speedup(self) -> float:
        """Of the drafter over plain decoding."""
        return self.speculative / self.plain


def by_domain(
    target: Model,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    drafters: dict[str, dict[str, Any]],
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    common: dict[str, Any],
    seed: int = 0,
    on_run: Callable[[], None] | None = None,
) -> list[Row]:
    """Every prompt alone, plainly and with each drafter in turn.

    Args:
      target: the model.
      prompts: (domain, token ids).
      drafters: by name, the arguments "drafter", "draft", "num_speculative_tokens" and
        "drafter_options" of `generation.generate`.
      temperatures: to decode at.
      max_new_tokens: per prompt; end-of-sequence tokens end a text, as they do for users.
      repeats: runs of everything.
      common: "verify", "page_size" and "implementation" of `generation.generate`.
      seed: of the first prompt; each has its own.
      on_run: called after every decoding.

    Raises:
      SpecJAXError: speculation that changed a greedy text, in float32.
    """

    def named(name, arguments):
        options = {
            option: value
            for option, value in (arguments.get("drafter_options") or {}).items()
            if name == arguments["drafter"] or option in registry.option_types(name)
        }
        return generation.named_drafter(
            name,
            target,
            arguments.get("draft") if any(registry.draft_config_types(name)) else None,
            arguments["num_speculative_tokens"],
            common["implementation"],
            options,
        )

    for arguments in drafters.values():
        named(arguments["drafter"], arguments)  # or an error, before anything is decoded
    domains = sorted({domain for domain, _ in prompts})
    found: dict[tuple, list] = {}
    for temperature in temperatures:
        for number, (domain, ids) in enumerate(prompts):
            options = dict(
                prompts=[ids],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed + number,
                **common,
            )
            for repeat in range(repeats):
                runs = {"none": generation.generate(target, "none", **options)}
                for name, arguments in drafters.items():
                    runs[name] = generation.generate(target, **arguments, **options)
                    _check_equal(target, runs, name, temperature, domain)
                for name, run in runs.items():
                    found.setdefault((temperature, domain, name), [[] for _ in range(repeats)])[
                        repeat
                    ].append(run)
                    if on_run:
                        on_run()
    length = max(len(ids) for _, ids in prompts) + max_new_tokens // 2
    rows = []
    for temperature in temperatures:
        for name, arguments in drafters.items():
            k = arguments["num_speculative_tokens"]
            parts = [named(part, arguments) for part in arguments["drafter"].split(",")]
            cost = costs.measure(
                target,
                k,
                parts,
                batch_size=parallel.dp_size(target.mesh),
                length=length,
                temperature=temperature,
                repeats=9,
                **common,
            )
            rows += [_row(domain, name, temperature, found, cost, k) for domain in domains]
    return rows


def _check_equal(target: Model, runs, name: str, temperature: float, domain: str) -> None:
    plain, other = (runs[key].completions[0].tokens for key in ("none", name))
    if temperature == 0 and plain != other and target.dtype == np.float32:
        raise SpecJAXError(f"a prompt of {domain}: speculation with {name} changed the greedy text")


def _row(domain: str, name: str, temperature: float, found, cost: Costs, K: int) -> Row:
    repeats = len(found[temperature, domain, name])

    def rate(key):
        """The median over repeats of the rate over all prompts."""
        return float(
            np.median(
                [
                    sum(len(run.completions[0].tokens) for run in runs)
                    / sum(run.decode_seconds for run in runs)
                    for runs in found[temperature, domain, key]
                ]
            )
        )

    completions = [run.completions[0] for runs in found[temperature, domain, name] for run in runs]
    stats = metrics.acceptance(completions, K)
    return Row(
        domain,
        name,
        K,
        temperature,
        len(completions) // repeats,
        stats.num_tokens // repeats,
        stats.rate,
        stats.by_position,
        stats.tokens_per_round,
        rate("none"),
        rate(name),
        cost.draft,
        cost.verify,
        costs.predicted_speedup(stats, cost, K),
    )
