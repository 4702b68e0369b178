"""Tables of figures for terminals and files."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from specjax.engine import metrics
from specjax.engine.request import Generation


def wide_console() -> Console:
    """A console for wide tables: 170 columns when stdout is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 170)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_texts: int = 1,
    no_wrap: bool = False,
    caption: str | None = None,
) -> Table:
    """A table whose first columns are text and whose other columns are numbers.

    Args:
      title: line above the table.
      columns: headings.
      rows: cells, one text per column.
      num_texts: number of text columns; they are left-justified.
      no_wrap: keeps numbers on one line.
      caption: line below the table.
    """
    result = Table(title=title, caption=caption, title_justify="left", show_edge=False)
    for i, column in enumerate(columns):
        is_number = i >= num_texts
        justify = "right" if is_number else "left"
        result.add_column(column, justify=justify, no_wrap=no_wrap and is_number)
    for row in rows:
        result.add_row(*row)
    return result


def number(value: float, digits: int = 2) -> str:
    """A number for a table; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def speed_table(title: str, runs: dict[str, list[Generation]], ks: dict[str, int]) -> Table:
    """Speed and acceptance of runs over the same prompts, one column per run.

    Args:
      title: line above the table.
      runs: by name, the batches of a run. A run named "plain" is the baseline of the others.
      ks: K of every other run.
    """
    plain = runs.get("plain")
    columns = {}
    for name, batches in runs.items():
        k = 0 if name == "plain" else ks[name]
        columns[name] = _figures(batches, k, plain)
    names_of_figures = list(columns.values())[-1]
    rows = []
    for figure in names_of_figures:
        cells = [figures.get(figure, "") for figures in columns.values()]
        rows.append([figure, *cells])
    return table(title, ["", *columns], rows)


def tokens_per_second(batches: list[Generation]) -> float:
    """Generated tokens of all completions over the time of all decode loops."""
    tokens = sum(len(c.tokens) for batch in batches for c in batch.completions)
    return tokens / sum(batch.decode_seconds for batch in batches)


def milliseconds_per_round(batches: list[Generation]) -> float:
    """Mean wall time of a round of the decode loop."""
    seconds = sum(batch.decode_seconds for batch in batches)
    return 1e3 * seconds / sum(batch.rounds for batch in batches)


def _figures(batches: list[Generation], k: int, plain: list[Generation] | None) -> dict[str, str]:
    completions = [completion for batch in batches for completion in batch.completions]
    stats = metrics.acceptance(completions, k)
    figures = {
        "tokens": f"{stats.num_tokens}",
        "tokens/s": f"{tokens_per_second(batches):.1f}",
        "rounds": f"{stats.num_rounds}",
        "tokens per round": f"{stats.tokens_per_round:.2f}",
        "time per round": f"{milliseconds_per_round(batches):.1f} ms",
    }
    if k == 0:
        return figures
    expected = metrics.expected_tokens(stats.rate, k)
    by_position = [number(rate) for rate in stats.by_position]
    figures |= {
        "K, most drafts per round": f"{k}",
        "rounds with drafts": f"{stats.rounds_with_drafts}",
        "acceptance α of drafts tested": number(stats.rate, 3),
        "tokens per round with drafts": number(stats.tokens_per_drafted_round),
        "  E = (1-α^(K+1))/(1-α) predicts": number(expected),
        "accepted at draft position 1, 2, ...": " ".join(by_position),
    }
    if plain:
        cost = milliseconds_per_round(batches) / milliseconds_per_round(plain)
        speedup = tokens_per_second(batches) / tokens_per_second(plain)
        figures |= {
            "cost of a round, in plain steps": f"{cost:.2f}",
            "speedup": f"{speedup:.2f}x",
        }
    return figures


def same_tokens(*groups: dict[str, list[Generation]]) -> bool:
    """Whether the runs within each group generated the same tokens."""
    for runs in groups:
        texts = []
        for batches in runs.values():
            texts.append([c.tokens for batch in batches for c in batch.completions])
        if any(text != texts[0] for text in texts):
            return False
    return True


def equality_line(same: bool) -> str:
    """The sentence that reports `same_tokens`."""
    return f"The texts with and without speculation are {'identical' if same else 'NOT identical'}."
