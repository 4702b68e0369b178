"""Prompts from a JSONL file, completions to one; figures to a JSON file."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from specjax import files
from specjax.engine.generate import Generation, Prompt
from specjax.errors import SpecJAXError

ROW_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")


def read_prompts(path: str, options: tuple[str, ...] = ()) -> list[dict]:
    """Lines of a prompts file as dictionaries with "prompt" (text or messages), perhaps a "name" of
    its own, the "domain" that its text is of, and some of `options`, which are of `ROW_OPTIONS`.

    Raises:
      SpecJAXError: naming the file and the line.
    """
    rows = [_row(value, where, options) for where, value in files.json_lines(pathlib.Path(path))]
    if not rows:
        raise SpecJAXError(f"{path} has no prompts")
    return rows


def _row(value: Any, where: str, options: tuple[str, ...]) -> dict:
    row = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise SpecJAXError(
            f"{where}: must be a string, or an object with either 'prompt' or 'messages'"
        )
    known = ("prompt", "messages", "name", "domain", *options)
    unknown = sorted(set(row) - set(known))
    if unknown:
        raise SpecJAXError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    for name in ("name", "domain"):
        if not isinstance(row.get(name, ""), str):
            raise SpecJAXError(f"{where}: {name!r} must be a string")
    for option in options:
        if option in row and (
            isinstance(row[option], bool) or not isinstance(row[option], int | float)
        ):
            raise SpecJAXError(f"{where}: {option!r} must be a number, got {row[option]!r}")
    if "messages" not in row:
        if not isinstance(row["prompt"], str):
            raise SpecJAXError(f"{where}: 'prompt' must be a string")
        return row
    messages = row.pop("messages")
    is_chat = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(message, dict) and {"role", "content"} <= message.keys()
            for message in messages
        )
    )
    if not is_chat:
        raise SpecJAXError(
            f"{where}: 'messages' must be a list of objects with 'role' and 'content'"
        )
    return {"prompt": messages, **row}


def headline(prompt: Prompt) -> str:
    """The first line of a prompt, to show above its completion."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    first, _, rest = text.strip().partition("\n")
    return f"> {first[:100]}{' ...' if rest or len(first) > 100 else ''}"


def refuse_existing(path: str, flag: str = "output") -> None:
    """Raises SpecJAXError where `path`, which is that of a flag, exists already, or its folder does
    not."""
    if os.path.lexists(path):
        raise SpecJAXError(f"--{flag}: {path} exists already")
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise SpecJAXError(f"--{flag}: the folder of {path} does not exist")


def write_completions(path: str, prompts: Sequence[Prompt], generation: Generation) -> None:
    """One line per prompt."""
    lines = []
    for prompt, c in zip(prompts, generation.completions, strict=True):
        rounds = [
            {"drafted": drafted, "accepted": accepted, "emitted": emitted}
            for drafted, accepted, emitted in zip(c.drafted, c.accepted, c.emitted, strict=True)
        ]
        lines.append(
            json.dumps(
                {
                    "prompt": prompt,
                    "prompt_tokens": c.prompt_tokens,
                    "tokens": c.tokens,
                    "text": c.text,
                    "finish_reason": c.finish_reason,
                    "rounds": rounds,
                },
                ensure_ascii=False,
            )
        )
    write_text(path, "\n".join(lines) + "\n")


def write_figures(path: str, figures: dict) -> None:
    """Writes figures of a benchmark as a JSON file, with null for NaN and infinity, which JSON does
    not have."""
    write_text(path, json.dumps(_finite(figures), indent=2, allow_nan=False) + "\n")


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: str, text: str) -> None:
    """Writes a new file, which appears when it is complete. Raises SpecJAXError where that cannot
    be done."""
    with files.new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
