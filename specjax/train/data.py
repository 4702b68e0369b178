"""Rows of tokens to train on, perhaps with what the target's layers said to them, in shards on
disk."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from specjax import files
from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer
from specjax.train.objective import Batch

SKIPPED = 8  # tokens at the start of a row
ABOUT = "rows.json"  # says of a folder of shards what they are of
TAP_DTYPE = np.float16
TAP_LIMIT = 65000.0  # residual streams are clipped to what float16 can hold


@dataclasses.dataclass(frozen=True)
class Rows:
    """R texts of at most S tokens each.

    Attributes:
      tokens_RS: int32, filled up with 0 on the right.
      length_R: int32, tokens of each text.
      start_R: int32, tokens of its prompt: those behind it are what a drafter will have to guess.
      temperature_R: float32, at which the text was drawn from the target; NaN where it was not.
      domains: for each text, what kind it is; "" where nobody said.
      aux_layers: target layer -> its residual stream at each token but the last, float16 `[R, S, D]`;
        empty where the target has to be asked.
    """

    tokens_RS: np.ndarray
    length_R: np.ndarray
    start_R: np.ndarray
    temperature_R: np.ndarray
    domains: Sequence[str]
    aux_layers: dict[int, np.ndarray]

    def __len__(self) -> int:
        return len(self.length_R)

    @property
    def said_RS(self) -> np.ndarray:
        """Which tokens stand behind the prompt."""
        position_S = np.arange(self.tokens_RS.shape[1])
        return (position_S >= self.start_R[:, None]) & (position_S < self.length_R[:, None])


def write_shard(path: pathlib.Path, rows: Rows) -> None:
    """Writes rows as a safetensors file, which appears when it is complete."""
    arrays = {
        name: getattr(rows, name) for name in ("tokens_RS", "length_R", "start_R", "temperature_R")
    }
    arrays |= {
        f"hidden_{layer}_RSD": np.ascontiguousarray(hidden_RSD)
        for layer, hidden_RSD in rows.aux_layers.items()
    }
    with files.new_file(path) as partial, files.writing():
        safetensors.numpy.save_file(
            arrays, partial, metadata={"domains": json.dumps(list(rows.domains))}
        )


def read_shard(path: pathlib.Path) -> Rows:
    """Reverses `write_shard`; aux_layers stay on disk until rows of them are asked for.

    Raises:
      SpecJAXError: a file that is something else.
    """
    with files.parsing(path):
        file = safetensors.safe_open(path, framework="numpy")
        names = set(file.keys())
        arrays = [
            file.get_tensor(name) for name in ("tokens_RS", "length_R", "start_R", "temperature_R")
        ]
        aux_layers = {
            int(name.split("_")[1]): file.get_slice(name)
            for name in sorted(names)
            if name.startswith(("hidden_", "taps_"))  # the name before 0.1.0
        }
        return Rows(*arrays, json.loads(file.metadata()["domains"]), aux_layers)


def read_folder(folder: pathlib.Path, target: LlamaConfig) -> list[Rows]:
    """The shards that `self_generate` has written.

    Raises:
      SpecJAXError: there are none, or they are of another target.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths or not (folder / ABOUT).exists():
        raise SpecJAXError(
            f"{folder} has no rows (*.safetensors, {ABOUT}): not a folder that specjax train wrote them "
            "to"
        )
    if files.read_json(folder / ABOUT).get("target") != json.loads(json.dumps(target.to_dict())):
        raise SpecJAXError(f"{folder} has rows of another target")
    return list(map(read_shard, paths))


def read_texts(paths: Sequence[str | os.PathLike], tokenizer: Tokenizer, max_seq_len: int) -> Rows:
    """Rows from text files and JSONL files.

    A text file (.txt) is cut into pieces of `max_seq_len` tokens. A line of a JSONL file (.jsonl) is
    a text: a string, or an object with "text", with "prompt" and "completion", or with "messages"
    (a chat that the assistant ends); and perhaps a "domain". The completion or the last message is
    what is to be guessed. What is longer than `max_seq_len` tokens is cut off.

    Raises:
      SpecJAXError: a file that cannot be read or is called otherwise, a line (by its number) that
        is none of these, or no text at all.
    """
    rows: list[tuple[list[int], int, str]] = []
    for path in map(pathlib.Path, paths):
        if path.exists() and path.suffix not in (".txt", ".jsonl"):
            raise SpecJAXError(f"{path}: texts are in files named .txt or .jsonl")
        if path.suffix != ".jsonl":
            ids = tokenizer.encode(files.read_text(path))
            rows += [(ids[i : i + max_seq_len], 1, "") for i in range(0, len(ids), max_seq_len)]
            continue
        rows += [
            _row(value, where, tokenizer, max_seq_len) for where, value in files.json_lines(path)
        ]
    rows = [row for row in rows if len(row[0]) > 2]
    if not rows:
        raise SpecJAXError(
            f"there is no text to train on in {', '.join(map(str, paths)) or 'no files'}"
        )
    tokens_RS = np.zeros((len(rows), max_seq_len), np.int32)
    for i, (ids, _, _) in enumerate(rows):
        tokens_RS[i, : len(ids)] = ids
    length_R = np.array([len(ids) for ids, _, _ in rows], np.int32)
    start_R = np.array([start for _, start, _ in rows], np.int32)
    return Rows(
        tokens_RS,
        length_R,
        start_R,
        np.full(len(rows), np.nan, np.float32),
        [row[2] for row in rows],
        {},
    )


def _row(
    value: Any, where: str, tokenizer: Tokenizer, max_seq_len: int
) -> tuple[list[int], int, str]:
    fields = {"text": value} if isinstance(value, str) else value
    kinds = [
        kind
        for kind in ("text", "prompt", "messages")
        if isinstance(fields, dict) and kind in fields
    ]
    if len(kinds) != 1:
        raise SpecJAXError(
            f"{where}: must be a string, or an object with one of 'text', 'prompt' and 'messages'"
        )
    domain = fields.get("domain", "")
    known = {"text": {"text"}, "prompt": {"prompt", "completion"}, "messages": {"messages"}}[
        kinds[0]
    ]
    if unknown := sorted(set(fields) - known - {"domain", "name"}):
        raise SpecJAXError(f"{where}: unknown key {unknown[0]!r} beside {kinds[0]!r}")
    if not isinstance(domain, str):
        raise SpecJAXError(f"{where}: texts and the domain must be strings")
    if kinds == ["prompt"] and not fields.get("completion"):
        raise SpecJAXError(
            f"{where}: a prompt without a 'completion' (prompts alone are for --self_generate)"
        )
    with files.parsing(where):
        if kinds == ["messages"]:
            if not fields["messages"] or fields["messages"][-1]["role"] != "assistant":
                raise SpecJAXError("the last of 'messages' must be the assistant's")
            prompt = fields["messages"][:-1]
            start = len(tokenizer.apply_chat_template(prompt)) if prompt else 1
            ids = tokenizer.apply_chat_template(fields["messages"], add_generation_prompt=False)
        else:
            first, rest = fields.get("text", fields.get("prompt")), fields.get("completion", "")
            if not all(isinstance(text, str) for text in (first, rest)):
                raise SpecJAXError(f"{where}: texts and the domain must be strings")
            ids = tokenizer.encode(first)
            start = len(ids) if rest else 1
            ids = ids + tokenizer.encode(rest, add_special_tokens=False) if rest else ids
    return ids[:max_seq_len], min(start, max_seq_len), domain


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows of several shards, in one order.

    Attributes:
      shards: their rows; all have the same S.
    """

    shards: tuple[Rows, ...]

    def __post_init__(self):
        widths = {rows.tokens_RS.shape[1] for rows in self.shards}
        if len(widths) > 1:
            widths = ", ".join(map(str, sorted(widths)))
            raise SpecJAXError(f"rows of different lengths cannot be mixed: {widths} positions")

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    @property
    def num_tokens(self) -> int:
        """All tokens, those of prompts included."""
        return int(sum(rows.length_R.sum() for rows in self.shards))

    @property
    def checksum(self) -> int:
        """Of everything but the residual streams."""
        crc = 0
        for rows in self.shards:
            for array in (rows.tokens_RS, rows.length_R, rows.start_R, rows.temperature_R):
                crc = zlib.crc32(np.ascontiguousarray(array), crc)
            crc = zlib.crc32(json.dumps(list(rows.domains)).encode(), crc)
        return crc

    def fields(self, name: str) -> np.ndarray:
        """One of the arrays of all rows, or the domains."""
        return np.concatenate([np.asarray(getattr(rows, name)) for rows in self.shards])

    def batch(
        self, indices: Sequence[int], aux_layers: tuple[int, ...], prompt_weight: float
    ) -> Batch:
        """Some rows, with the residual streams if they were kept. The first tokens of a row do not
          count: nobody could
        guess them."""
        starts = np.cumsum([0, *map(len, self.shards)])
        shards = np.searchsorted(starts, indices, side="right") - 1
        places = [(int(s), int(i - starts[s])) for s, i in zip(shards, indices, strict=True)]
        take = lambda name: np.stack([getattr(self.shards[s], name)[r] for s, r in places])  # noqa: E731
        tokens_BS, length_B, start_B = take("tokens_RS"), take("length_R"), take("start_R")
        position_S = np.arange(tokens_BS.shape[1])
        weight_BS = np.where(position_S < start_B[:, None], prompt_weight, 1.0) * (
            position_S < length_B[:, None]
        )
        weight_BS[:, :SKIPPED] = 0
        kept = all(set(aux_layers) <= set(self.shards[s].aux_layers) for s, _ in places)
        found = (
            tuple(
                np.stack([self.shards[s].aux_layers[layer][r] for s, r in places])
                for layer in aux_layers
            )
            if kept
            else ()
        )
        return Batch(tokens_BS, weight_BS.astype(np.float32), found)
