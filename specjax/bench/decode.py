"""specjax bench decode: speedup by kind of text, drafter and temperature, and its prediction."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.table import Table

from specjax import parallel
from specjax.bench import costs
from specjax.bench.costs import Costs
from specjax.engine import metrics
from specjax.engine.request import Generation
from specjax.engine.setup import Setup, Speculation
from specjax.errors import SpecJAXError
from specjax.report import tables

PROMPTS = importlib.resources.files("specjax") / "data" / "bench_prompts.jsonl"
COST_REPEATS = 9

# Published for Llama 70B with an 8B draft model on four A100s: acceptance and speedup.
PUBLIC = {
    "code": (0.784, 2.58),
    "json": (0.862, 2.83),
    "docs": (0.719, 2.24),
    "prose": (0.541, 1.62),
}
EXPLANATION = """\
plain, drafts: tokens/s. Predicted: (1-α^(K+1))/(1-α) tokens over K c + v plain steps. Rounds
without drafts count as plain steps; an EAGLE head after another drafter counts as if it ran in
every round. The last two columns are published for Llama 70B with an 8B draft model on 4 x A100."""

# Runs of one prompt each, by temperature, domain and drafter ("none" for plain decoding): all
# repeats of the first prompt, then of the second, ...
Runs = dict[tuple[float, str, str], list[Generation]]


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one domain, drafter and temperature.

    Rates are tokens per second of the decode loops, medians over repeats.

    Attributes:
      domain: domain of the prompts.
      drafter: its name.
      num_speculative_tokens: K.
      temperature: temperature of the prompts.
      prompts: number of prompts.
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
        """Speedup of the drafter over plain decoding."""
        return self.speculative / self.plain


def measure(
    setup: Setup,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    speculations: dict[str, Speculation],
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    seed: int = 0,
    on_run: Callable[[], None] | None = None,
) -> list[Row]:
    """Decodes every prompt alone, plainly and with each drafter in turn.

    Args:
      setup: the target and how it is run.
      prompts: (domain, token ids).
      speculations: drafters by name.
      temperatures: sampling temperatures.
      max_new_tokens: per prompt; end-of-sequence tokens end a text, as they do for users.
      repeats: number of runs.
      seed: seed of the first prompt; the others follow.
      on_run: called after every decoding.

    Raises:
      SpecJAXError: a drafter that cannot be used; or speculation changed a greedy text, in float32.
    """
    drafters = {name: setup.make_drafters(each) for name, each in speculations.items()}
    runs: Runs = {}
    for temperature in temperatures:
        for number, (domain, ids) in enumerate(prompts):
            options = {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": seed + number,
            }
            for _ in range(repeats):
                for name, run in _decode_once(setup, ids, speculations, domain, options, on_run):
                    runs.setdefault((temperature, domain, name), []).append(run)
    length = max(len(ids) for _, ids in prompts) + max_new_tokens // 2
    domains = sorted({domain for domain, _ in prompts})
    rows = []
    for temperature in temperatures:
        for name, speculation in speculations.items():
            cost = costs.measure(
                setup,
                speculation.num_speculative_tokens,
                drafters[name],
                batch_size=parallel.dp_size(setup.target.mesh),
                length=length,
                temperature=temperature,
                repeats=COST_REPEATS,
            )
            for domain in domains:
                plain = runs[temperature, domain, "none"]
                drafted = runs[temperature, domain, name]
                rows.append(_row(domain, speculation, temperature, plain, drafted, cost, repeats))
    return rows


def _decode_once(
    setup: Setup,
    ids: tuple[int, ...],
    speculations: dict[str, Speculation],
    domain: str,
    options: dict,
    on_run: Callable[[], None] | None,
) -> Iterator[tuple[str, Generation]]:
    """Decodes one prompt plainly, called "none", and with each drafter."""
    plain = None
    for name, speculation in {"none": None, **speculations}.items():
        run = setup.generate(speculation, [ids], **options)
        if name == "none":
            plain = run
        if options["temperature"] == 0 and setup.is_exact:
            _check_equal(plain, run, name, domain)
        yield name, run
        if on_run:
            on_run()


def _check_equal(plain: Generation, run: Generation, name: str, domain: str) -> None:
    if run.completions[0].tokens != plain.completions[0].tokens:
        raise SpecJAXError(f"a prompt of {domain}: speculation with {name} changed the greedy text")


def _row(
    domain: str,
    speculation: Speculation,
    temperature: float,
    plain: list[Generation],
    drafted: list[Generation],
    cost: Costs,
    repeats: int,
) -> Row:
    """The figures of all runs of a domain, drafter and temperature: repeats of each prompt."""
    K = speculation.num_speculative_tokens
    stats = metrics.acceptance([run.completions[0] for run in drafted], K)
    return Row(
        domain=domain,
        drafter=speculation.drafter,
        num_speculative_tokens=K,
        temperature=temperature,
        prompts=len(drafted) // repeats,
        tokens=stats.num_tokens // repeats,
        acceptance=stats.rate,
        by_position=stats.by_position,
        tokens_per_round=stats.tokens_per_round,
        plain=_median_rate(plain, repeats),
        speculative=_median_rate(drafted, repeats),
        draft=cost.draft,
        verify=cost.verify,
        predicted=costs.predicted_speedup(stats, cost, K),
    )


def _median_rate(runs: list[Generation], repeats: int) -> float:
    """The median over repeats of the rate over all prompts."""
    rates = [tables.tokens_per_second(runs[repeat::repeats]) for repeat in range(repeats)]
    return float(np.median(rates))


def table(rows: list[Row]) -> Table:
    """One line per domain, drafter and temperature."""
    columns = (
        "domain",
        "drafter",
        "T",
        "K",
        "α",
        "at 1 2 3",
        "tok/round",
        "plain",
        "drafts",
        "speedup",
        "c",
        "v",
        "predicted",
        "real/pred",
        "public α",
        "speedup",
    )
    lines = [_line(row) for row in rows]
    return tables.table("Decoding by domain", columns, lines, num_texts=2, no_wrap=True)


def _line(row: Row) -> tuple[str, ...]:
    alpha, speedup = PUBLIC.get(row.domain, (None, None))
    first_positions = [tables.number(rate) for rate in row.by_position[:3]]
    return (
        row.domain,
        row.drafter,
        f"{row.temperature:g}",
        f"{row.num_speculative_tokens}",
        tables.number(row.acceptance, 3),
        " ".join(first_positions),
        f"{row.tokens_per_round:.2f}",
        f"{row.plain:.1f}",
        f"{row.speculative:.1f}",
        f"{row.speedup:.2f}x",
        f"{row.draft:.3f}",
        f"{row.verify:.2f}",
        f"{row.predicted:.2f}x",
        f"{row.speedup / row.predicted:.2f}",
        "" if alpha is None else f"{alpha:.3f}",
        "" if speedup is None else f"{speedup:.2f}x",
    )
