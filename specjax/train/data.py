"""Training sequences, optionally with the target's hidden states, in safetensors shards."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy

from specjax import files
from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer

SKIPPED = 8  # tokens at the start of a row that have no weight: they cannot be predicted
MIN_TOKENS = 3  # shorter rows are left out
ABOUT = "rows.json"  # describes the shards of a folder
HIDDEN_DTYPE = np.float16
HIDDEN_LIMIT = 65000.0  # residual streams are clipped to what float16 can represent
# Attributes of `Rows`, and their names in files.
TENSORS = {
    "tokens_BS": "tokens_RS",
    "length_B": "length_R",
    "start_B": "start_R",
    "temperature_B": "temperature_R",
}
HIDDEN_PREFIXES = ("hidden_", "taps_")  # the second one before 0.1.0
# For each kind of line in a JSONL file, the keys that it may have.
LINE_KEYS = {
    "text": {"text"},
    "prompt": {"prompt", "completion"},
    "messages": {"messages"},
}


class Batch(NamedTuple):
    """Rows to train on.

    Attributes:
      tokens_BS: int32.
      weight_BS: float32, weight of the prediction of each token; 0 after the end of a row and for
        its first tokens.
      aux_hidden: the target's residual streams after the layers that the objective needs, each
        `[B, S, D]`; () if they are not stored.
    """

    tokens_BS: jax.Array
    weight_BS: jax.Array
    aux_hidden: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """B texts of at most S tokens each.

    Attributes:
      tokens_BS: int32, padded with 0 on the right.
      length_B: int32, number of tokens of each text.
      start_B: int32, number of tokens of its prompt; a drafter predicts the tokens after it.
      temperature_B: float32, temperature at which the target generated the text; NaN for other
        texts.
      domains: kind of each text; "" if unknown.
      aux_hidden: for each stored target layer its residual stream at every token but the last,
        float16 `[B, S, D]`; empty if the target has to be run.
    """

    tokens_BS: np.ndarray
    length_B: np.ndarray
    start_B: np.ndarray
    temperature_B: np.ndarray
    domains: Sequence[str]
    aux_hidden: dict[int, np.ndarray]

    def __len__(self) -> int:
        return len(self.length_B)

    @property
    def loss_mask_BS(self) -> np.ndarray:
        """Whether each token comes after the prompt."""
        position_S = np.arange(self.tokens_BS.shape[1])
        is_after = position_S >= self.start_B[:, None]
        return is_after & (position_S < self.length_B[:, None])


# --- Shards ---------------------------------------------------------------------------------------


def write_shard(path: pathlib.Path, rows: Rows) -> None:
    """Writes rows as a safetensors file, which appears when it is complete."""
    arrays = {name: getattr(rows, field) for field, name in TENSORS.items()}
    for layer, hidden_BSD in rows.aux_hidden.items():
        arrays[f"hidden_{layer}_RSD"] = np.ascontiguousarray(hidden_BSD)
    metadata = {"domains": json.dumps(list(rows.domains))}
    with files.new_file(path) as partial, files.writing():
        safetensors.numpy.save_file(arrays, partial, metadata=metadata)


def read_shard(path: pathlib.Path) -> Rows:
    """Returns the rows of a shard. Hidden states stay on disk until a batch needs them.

    Raises:
      SpecJAXError: the file is no shard.
    """
    with files.parsing(path):
        file = safetensors.safe_open(path, framework="numpy")
        arrays = {field: file.get_tensor(name) for field, name in TENSORS.items()}
        aux_hidden = {}
        for name in sorted(file.keys()):
            if name.startswith(HIDDEN_PREFIXES):
                layer = int(name.split("_")[1])
                aux_hidden[layer] = file.get_slice(name)
        domains = json.loads(file.metadata()["domains"])
        return Rows(**arrays, domains=domains, aux_hidden=aux_hidden)


def read_folder(folder: str | os.PathLike, target_config: LlamaConfig) -> list[Rows]:
    """Returns the shards that `self_generate` has written to a folder.

    Raises:
      SpecJAXError: there are none, or they are of another target.
    """
    folder = files.expand(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths or not (folder / ABOUT).exists():
        raise SpecJAXError(
            f"{folder} has no rows (*.safetensors, {ABOUT}): not a folder that specjax train wrote "
            "rows to"
        )
    expected = json.loads(json.dumps(target_config.to_dict()))
    if files.read_json(folder / ABOUT).get("target") != expected:
        raise SpecJAXError(f"{folder} has rows of another target")
    return [read_shard(path) for path in paths]


# --- Texts ----------------------------------------------------------------------------------------


class _Text(NamedTuple):
    """A row before it becomes an array; `start` is the number of tokens of its prompt."""

    ids: list[int]
    start: int
    domain: str


def read_texts(paths: Sequence[str | os.PathLike], tokenizer: Tokenizer, max_seq_len: int) -> Rows:
    """Returns the rows of text files and JSONL files.

    A text file (.txt) is cut into pieces of `max_seq_len` tokens. A line of a JSONL file (.jsonl)
    is a text: a string, or an object with "text", with "prompt" and "completion", or with
    "messages" (a chat that ends with a message of the assistant), and optionally a "domain". The
    drafter learns to predict the completion or the last message. Texts are cut off after
    `max_seq_len` tokens.

    Raises:
      SpecJAXError: a file that cannot be read or has another suffix, a line (by its number) that is
        none of these, or no text at all.
    """
    texts: list[_Text] = []
    for path in map(files.expand, paths):
        if path.exists() and path.suffix not in (".txt", ".jsonl"):
            raise SpecJAXError(f"{path}: texts must be in files named .txt or .jsonl")
        if path.suffix == ".jsonl":
            for where, value in files.json_lines(path):
                texts.append(_read_line(value, where, tokenizer))
            continue
        with files.parsing(path):
            ids = tokenizer.encode(files.read_text(path))
        for i in range(0, len(ids), max_seq_len):
            texts.append(_Text(ids[i : i + max_seq_len], 1, ""))
    texts = [text for text in texts if len(text.ids) >= MIN_TOKENS]
    if not texts:
        names = ", ".join(map(str, paths)) or "no files"
        raise SpecJAXError(f"there is no text to train on in {names}")
    return _rows_of_texts(texts, max_seq_len)


def _rows_of_texts(texts: list[_Text], max_seq_len: int) -> Rows:
    tokens_BS = np.zeros((len(texts), max_seq_len), np.int32)
    length_B = np.zeros(len(texts), np.int32)
    start_B = np.zeros(len(texts), np.int32)
    for i, text in enumerate(texts):
        ids = text.ids[:max_seq_len]
        tokens_BS[i, : len(ids)] = ids
        length_B[i] = len(ids)
        start_B[i] = min(text.start, max_seq_len)
    temperature_B = np.full(len(texts), np.nan, np.float32)
    domains = [text.domain for text in texts]
    return Rows(tokens_BS, length_B, start_B, temperature_B, domains, {})


def _read_line(value: Any, where: str, tokenizer: Tokenizer) -> _Text:
    fields = {"text": value} if isinstance(value, str) else value
    found = []
    if isinstance(fields, dict):
        found = [kind for kind in LINE_KEYS if kind in fields]
    if len(found) != 1:
        raise SpecJAXError(
            f"{where}: must be a string, or an object with one of 'text', 'prompt' and 'messages'"
        )
    (kind,) = found
    unknown = sorted(fields.keys() - LINE_KEYS[kind] - {"domain", "name"})
    if unknown:
        raise SpecJAXError(f"{where}: unknown key {unknown[0]!r} beside {kind!r}")
    domain = fields.get("domain", "")
    if not isinstance(domain, str):
        raise SpecJAXError(f"{where}: 'domain' must be a string, got {domain!r}")
    with files.parsing(where):
        if kind == "messages":
            ids, start = _encode_chat(fields["messages"], tokenizer)
        elif kind == "prompt":
            ids, start = _encode_completion(fields, tokenizer)
        else:
            ids, start = tokenizer.encode(_string(fields, "text")), 1
    return _Text(ids, start, domain)


def _string(fields: dict[str, Any], name: str) -> str:
    if not isinstance(fields[name], str):
        raise SpecJAXError(f"{name!r} must be a string, got {fields[name]!r}")
    return fields[name]


def _encode_completion(fields: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[int], int]:
    if not fields.get("completion"):
        raise SpecJAXError(
            "a prompt requires a 'completion' (prompts alone are for --self_generate)"
        )
    prompt = _string(fields, "prompt")
    text = prompt + _string(fields, "completion")
    return _encode_split(text, len(prompt), tokenizer, add_special_tokens=True)


def _encode_chat(messages: Any, tokenizer: Tokenizer) -> tuple[list[int], int]:
    is_chat = isinstance(messages, list) and bool(messages)
    last = messages[-1] if is_chat else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise SpecJAXError("the last of 'messages' must be the assistant's")
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    if len(messages) == 1:
        return tokenizer.encode(text, add_special_tokens=False), 1
    start = _answer_start(text, messages, tokenizer)
    return _encode_split(text, start, tokenizer, add_special_tokens=False)


def _answer_start(text: str, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> int:
    """Returns where the last message starts in `text`, the rendered chat.

    Usually the rendered prompt is the beginning of the chat. Some templates end the prompt with
    something that they do not render in a complete chat, such as an opening tag for reasoning. Then
    the answer starts where the chat begins to differ from chats with other answers.
    """
    prompt = tokenizer.render_chat(messages[:-1])
    if text.startswith(prompt):
        return len(prompt)
    starts = []
    for other in ("0", "1"):  # an answer can begin like one of them, not like both
        changed = [*messages[:-1], messages[-1] | {"content": other}]
        rendered = tokenizer.render_chat(changed, add_generation_prompt=False)
        starts.append(_common_length(text, rendered))
    if min(starts) >= len(text):
        raise SpecJAXError("the chat template does not render the assistant's last message")
    return min(starts)


def _common_length(a: str, b: str) -> int:
    """Returns the length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _encode_split(
    text: str, start: int, tokenizer: Tokenizer, add_special_tokens: bool
) -> tuple[list[int], int]:
    """Returns the tokens of a text, and the number of tokens before its character `start`.

    A token on both sides of `start` counts as after it.
    """
    encoding = tokenizer.backend.encode(text, add_special_tokens=add_special_tokens)
    for i, (_, end) in enumerate(encoding.offsets):
        if end > start:
            return encoding.ids, max(i, 1)
    return encoding.ids, len(encoding.ids)


# --- Several shards -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows of several shards, in one order.

    Attributes:
      shards: their rows; all have the same S.
    """

    shards: tuple[Rows, ...]

    def __post_init__(self):
        widths = {rows.tokens_BS.shape[1] for rows in self.shards}
        if len(widths) > 1:
            widths = ", ".join(map(str, sorted(widths)))
            raise SpecJAXError(f"rows of different lengths cannot be mixed: {widths} positions")

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those of prompts included."""
        return int(sum(rows.length_B.sum() for rows in self.shards))

    @property
    def checksum(self) -> int:
        """Checksum of everything but the hidden states."""
        crc = 0
        for rows in self.shards:
            for name in TENSORS:
                crc = zlib.crc32(np.ascontiguousarray(getattr(rows, name)), crc)
            crc = zlib.crc32(json.dumps(list(rows.domains)).encode(), crc)
        return crc

    def fields(self, name: str) -> np.ndarray:
        """Returns an attribute of all rows as one array."""
        return np.concatenate([np.asarray(getattr(rows, name)) for rows in self.shards])

    def batch(
        self, indices: Sequence[int], aux_layers: tuple[int, ...], prompt_weight: float
    ) -> Batch:
        """Returns some rows, with their hidden states if these are stored.

        Args:
          indices: indices of the rows.
          aux_layers: target layers whose hidden states are needed.
          prompt_weight: weight of tokens of prompts; those after prompts have 1, and the first
            `SKIPPED` of a row 0.
        """
        starts = np.cumsum([0, *map(len, self.shards)])
        stored = []  # shard and row in it, for each index
        for index in indices:
            shard = int(np.searchsorted(starts, index, side="right")) - 1
            stored.append((self.shards[shard], int(index - starts[shard])))

        def take(name: str) -> np.ndarray:
            return np.stack([getattr(shard, name)[row] for shard, row in stored])

        tokens_BS, length_B, start_B = take("tokens_BS"), take("length_B"), take("start_B")
        position_S = np.arange(tokens_BS.shape[1])
        is_prompt_BS = position_S < start_B[:, None]
        is_text_BS = position_S < length_B[:, None]
        weight_BS = np.where(is_prompt_BS, prompt_weight, 1.0) * is_text_BS
        weight_BS[:, :SKIPPED] = 0
        aux_hidden = []
        if all(set(aux_layers) <= set(shard.aux_hidden) for shard, _ in stored):
            for layer in aux_layers:
                hidden = [shard.aux_hidden[layer][row] for shard, row in stored]
                aux_hidden.append(np.stack(hidden))
        return Batch(tokens_BS, weight_BS.astype(np.float32), tuple(aux_hidden))
