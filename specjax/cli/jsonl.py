"""Prompts from a JSONL file."""

from __future__ import annotations

import importlib.resources
import pathlib
from typing import Any

from specjax import files, tokenizer
from specjax.engine.request import Prompt
from specjax.errors import SpecJAXError

DEMO_PROMPTS = importlib.resources.files("specjax") / "data" / "demo_prompts.jsonl"
ROW_OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
HEADLINE_LENGTH = 100


def read_prompts(path: str, options: tuple[str, ...] = ()) -> list[dict]:
    """Reads the lines of a prompts file.

    Args:
      path: path of the file.
      options: the sampling options that lines may have, of `ROW_OPTIONS`.

    Returns:
      A dictionary for each line, with "prompt" (text or messages) and "where" (file and line, for
      errors); perhaps with "name", "domain" and options.

    Raises:
      SpecJAXError: naming the file and the line.
    """
    rows = []
    for where, value in files.json_lines(pathlib.Path(path)):
        rows.append(_read_row(value, where, options))
    if not rows:
        raise SpecJAXError(f"{path} has no prompts")
    return rows


def _read_row(value: Any, where: str, options: tuple[str, ...]) -> dict:
    row = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise SpecJAXError(
            f"{where}: must be a string, or an object with either 'prompt' or 'messages'"
        )
    known = ("prompt", "messages", "name", "domain", *options)
    unknown = sorted(set(row) - set(known))
    if unknown:
        raise SpecJAXError(f"{where}: unknown key {unknown[0]!r}; choose from {', '.join(known)}")
    for name in ("name", "domain"):
        if not isinstance(row.get(name, ""), str):
            raise SpecJAXError(f"{where}: {name!r} must be a string")
    for option in options:
        value = row.get(option, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecJAXError(f"{where}: {option!r} must be a number, got {value!r}")
    row["where"] = where
    if "messages" in row:
        row["prompt"] = row.pop("messages")
        _check_messages(row["prompt"], where)
    elif not isinstance(row["prompt"], str):
        raise SpecJAXError(f"{where}: 'prompt' must be a string")
    elif not row["prompt"]:
        raise SpecJAXError(f"{where}: the prompt is empty")
    return row


def _check_messages(messages: Any, where: str) -> None:
    """Raises SpecJAXError unless these are the messages of a chat, with texts or parts of texts."""
    if not isinstance(messages, list) or not messages:
        raise SpecJAXError(
            f"{where}: 'messages' must be a list of objects with 'role' and 'content'"
        )
    try:
        tokenizer.check_messages(messages)
    except SpecJAXError as error:
        raise SpecJAXError(f"{where}: {error}") from error


def headline(prompt: Prompt) -> str:
    """The first line of a prompt, to show above its completion."""
    is_text = isinstance(prompt, str)
    text = prompt if is_text else tokenizer.content_text(prompt[-1]["content"])
    first, _, rest = text.strip().partition("\n")
    is_cut = bool(rest) or len(first) > HEADLINE_LENGTH
    return f"> {first[:HEADLINE_LENGTH]}{' ...' if is_cut else ''}"
