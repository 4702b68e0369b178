"""Progress bars on the standard error output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows how many of `total` are done; yields a function that counts one more.

    Nothing is shown where the standard error output is no terminal.
    """
    console = Console(stderr=True)
    columns = (
        progress.TextColumn(title),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task(title, total=total)
        yield lambda: shown.advance(task)
