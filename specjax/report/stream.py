"""Generated text on a terminal, while it grows."""

from __future__ import annotations

import unicodedata

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from specjax.engine.load import Model

DRAFT_STYLE, TARGET_STYLE = "green", "cyan"


class TextStream:
    """Prints completions as they grow, in the order of the prompts.

    The first unfinished completion is printed live, the others after it. Accepted drafts have one
    colour and the target's bonus tokens another; the first line is the legend.
    """

    def __init__(self, console: Console, model: Model, headers: list[str], legend: bool = True):
        self._console, self._headers, self._legend = console, headers, legend
        self._decoders = [model.tokenizer.stream() for _ in headers]
        self._pieces: list[list[tuple[str, str]]] = [[] for _ in headers]
        self._finished = [False] * len(headers)
        self._current = -1  # nothing is printed before the first tokens arrive

    def on_tokens(
        self, index: int, tokens: list[int], from_draft: list[bool], finished: bool
    ) -> None:
        """Callback for `specjax.generate`."""
        pieces, decoder = self._pieces[index], self._decoders[index]
        for token, is_draft in zip(tokens, from_draft, strict=True):
            style = DRAFT_STYLE if is_draft else TARGET_STYLE
            pieces.append((decoder.push([token]), style))
        if finished:
            pieces.append((decoder.flush(), TARGET_STYLE))
        self._finished[index] = finished
        if self._current < 0:
            if self._legend:
                self._console.print(legend(), end="\n\n")
            self._next()
        self._print()

    def _print(self) -> None:
        """Prints the current completion, and the finished ones that directly follow it."""
        while self._current < len(self._headers):
            for text, style in self._pieces[self._current]:
                print_text(self._console, text, style)
            self._pieces[self._current] = []
            if not self._finished[self._current]:
                return
            self._console.print("\n")
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current < len(self._headers):
            print_text(self._console, self._headers[self._current], "bold")
            print_text(self._console, "\n")


def legend() -> Text:
    """The colours of `TextStream` and what they stand for."""
    return Text.assemble(
        ("accepted drafts", DRAFT_STYLE), "  ", ("the target's bonus tokens", TARGET_STYLE)
    )


def print_text(console: Console, text: str, style: str | None = None) -> None:
    """Prints text as it is, without a line end: raw into files, see `visible`, on terminals."""
    if console.is_terminal:
        text = visible(text)
    # A Segment is neither wrapped nor changed; a Text would have its tabs expanded.
    segment = Segment(text, Style.parse(style) if style else None)
    console.print(Segments([segment]), end="", soft_wrap=True)


def visible(text: str) -> str:
    r"""The text with control characters escaped, such as `\x1b`; tabs and newlines stay."""
    characters = []
    for character in text:
        is_control = unicodedata.category(character) == "Cc" and character not in "\t\n"
        characters.append(f"\\x{ord(character):02x}" if is_control else character)
    return "".join(characters)
