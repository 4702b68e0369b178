"""Text to token ids and back: a `tokenizers.Tokenizer`, special tokens and the chat template."""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from specjax import files
from specjax.errors import SpecJAXError

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
# Names of a message's reasoning; templates read the first, those of gpt-oss the second.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# What a template gets of the tokenizer, and what transformers does not take for its variables.
RESERVED_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "return_dict",
    "return_tensors",
)
# Marks where an unfinished message ends. A template that trims contents drops the space.
END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE "
REPLACEMENT = "\ufffd"
NUM_PREVIOUS_IDS = 8  # enough of a prompt to decode what follows it
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer.

    Attributes:
      backend: the tokenizer, with its normaliser, pre-tokeniser and post-processor.
      special_tokens: text of the special tokens by role ("bos_token", ...), as chat templates see
        them.
      chat_template: Jinja source, None if the model has none.
      template_path: file that the template was read from, for error messages.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None
    template_path: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        texts = dict(self.special_tokens)
        if self.chat_template is not None:
            texts["chat_template"] = self.chat_template
        for role, text in texts.items():
            if not isinstance(text, str):
                raise SpecJAXError(f"{role} must be a string, got {text!r}")

    def save(self, folder: pathlib.Path) -> None:
        """Writes tokenizer.json and chat_template.jinja.

        Each checkpoint format stores `special_tokens` in its own way.
        """
        with files.writing():
            self.backend.save(str(folder / "tokenizer.json"))
            if self.chat_template is not None:
                path = folder / "chat_template.jinja"
                path.write_text(self.chat_template, encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        Args:
          text: any text.
          add_special_tokens: add the special tokens that the model expects around a text, such as a
            BOS token.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`.

        Bytes that are not UTF-8 become U+FFFD. An incomplete character at the end is left out.
        """
        ids = list(map(int, ids))  # numpy's integers too
        if "ByteFallback" in self._decoder_types:
            tokens = self._tokens(ids, skip_special_tokens)
            return self.backend.decoder.decode(_replace_invalid_bytes(tokens))
        text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if text.endswith(REPLACEMENT) and "ByteLevel" in self._decoder_types:
            tokens = self._tokens(ids, skip_special_tokens)
            if _ends_inside_character(tokens):
                return text.removesuffix(REPLACEMENT)
        return text

    def _tokens(self, ids: list[int], skip_special_tokens: bool) -> list[str]:
        """The tokens that the backend decodes for `ids`."""
        tokens = []
        for id_ in ids:
            token = self.backend.id_to_token(id_)
            is_skipped = skip_special_tokens and token in self._special
            if token is not None and not is_skipped:
                tokens.append(token)
        return tokens

    @functools.cached_property
    def _special(self) -> frozenset[str]:
        special = set()
        for token in self.backend.get_added_tokens_decoder().values():
            if token.special:
                special.add(token.content)
        return frozenset(special)

    @functools.cached_property
    def _decoder_types(self) -> frozenset[str]:
        """The types of the backend's decoder and of the steps of a sequence of decoders."""
        if self.backend.decoder is None:
            return frozenset()
        state = json.loads(self.backend.decoder.__getstate__())
        steps = [state, *state.get("decoders", [])]
        return frozenset(step["type"] for step in steps)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's `vocab_size` may be larger (padding)."""
        return max(self.token_ids.values(), default=-1) + 1

    @functools.cached_property
    def token_ids(self) -> dict[str, int]:
        """Every token and its id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, None if there is none."""
        return self.backend.token_to_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """Id of the tokenizer's end-of-sequence token, None if there is none.

        A model may have more of them, see `Model.eos_ids`.
        """
        return self.backend.token_to_id(self.special_tokens.get("eos_token", ""))

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text that the model's chat template produces for `messages`.

        The template sees the variables that transformers passes. Content that is a list of text
        parts is passed as a list if the template renders lists, else joined by newlines.

        Args:
          messages: each {"role": ..., "content": ...}; see `check_messages`.
          add_generation_prompt: end with the header of the assistant's answer.
          continue_final_message: end with the content of the last message, to be continued.
          variables: further variables of the template.

        Raises:
          SpecJAXError: the model has no chat template, the messages are malformed, the template
            fails, options exclude each other, or a variable has a name that the template gets
            anyway.
        """
        if self.chat_template is None:
            raise SpecJAXError("the model has no chat template; use a plain prompt")
        check_messages(messages)
        variables = variables or {}
        for name in variables:
            if name in RESERVED_VARIABLES or name in self.special_tokens:
                raise SpecJAXError(f"the chat template's variable {name!r} cannot be set")
        if continue_final_message:
            if add_generation_prompt:
                raise SpecJAXError(
                    "add_generation_prompt and continue_final_message exclude each other: set one "
                    "of them to False"
                )
            return self._render_unfinished(messages, variables)
        return self._render_messages(messages, add_generation_prompt, variables)

    def _render_unfinished(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Renders messages up to the end of the last content, as transformers does."""
        if not messages:
            raise SpecJAXError("continue_final_message requires a message to continue, got none")
        *others, last = messages
        content = last["content"]
        if isinstance(content, str):
            marked = content + END_MARK
        else:
            *parts, part = content
            marked = [*parts, part | {"text": part["text"] + END_MARK}]
        text = self._render_messages([*others, last | {"content": marked}], False, variables)
        before, mark, after = text.rpartition(END_MARK.strip())
        if not mark:
            raise SpecJAXError(
                "the chat template does not render the content of the last message, which "
                "continue_final_message asks for"
            )
        return before if after.startswith(" ") else before.rstrip()  # it trims contents

    def _render_messages(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        given = [_template_message(message) for message in messages]
        joined = []
        for message in given:
            joined.append(message | {"content": content_text(message["content"])})
        if joined == given:
            return self._render(given, add_generation_prompt, variables)
        try:
            text = self._render(given, add_generation_prompt, variables)
        except SpecJAXError:
            return self._render(joined, add_generation_prompt, variables)
        if _renders_parts(text, given):
            return text
        return self._render(joined, add_generation_prompt, variables)

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        try:
            template = _compile(self.chat_template)
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **variables,
            )
        except Exception as error:  # a template's expressions can raise anything
            reason = files.one_line(error)
            if not isinstance(error, jinja2.TemplateError):
                reason = f"{type(error).__name__}: {reason}"
            where = f"{self.template_path}: " if self.template_path else ""
            raise SpecJAXError(f"{where}the chat template failed: {reason}") from error

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the token ids of `render_chat`.

        No special tokens are added: the template writes them.
        """
        text = self.render_chat(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def stream(
        self, skip_special_tokens: bool = True, previous_ids: Sequence[int] = ()
    ) -> StreamDecoder:
        """Returns a new incremental decoder.

        Args:
          skip_special_tokens: whether special tokens have no text.
          previous_ids: ids before the first one. They have no text, but the next ones may depend on
            them.
        """
        return StreamDecoder(self, skip_special_tokens, previous_ids)


class StreamDecoder:
    """Decodes ids as they arrive. The pieces, joined, equal `Tokenizer.decode` of all ids.

    With ids before the first one, they are what the text of all ids has behind that of these.

    A token's text may depend on the token before it (a leading space, a character split over
    tokens). The ids of the last piece are therefore decoded again as context, and only the text
    that follows theirs is returned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        previous_ids: Sequence[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Ids whose text has been returned.
        self._context = list(previous_ids[-NUM_PREVIOUS_IDS:])
        self._waiting: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that `ids` complete, "" in the middle of a character."""
        self._waiting += ids
        seen = self._decode(self._context)
        text = self._decode(self._context + self._waiting)
        if len(text) == len(seen):
            return ""
        self._context = self._waiting
        self._waiting = []
        return text[len(seen) :]

    def flush(self) -> str:
        """Returns the rest of the text at the end of the sequence.

        As in `Tokenizer.decode`, an incomplete character is left out.
        """
        return self.push([])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _replace_invalid_bytes(tokens: list[str]) -> list[str]:
    """Replaces byte tokens that are not UTF-8 by U+FFFD; drops an incomplete character at the end.

    The ByteFallback decoder would replace a whole run of byte tokens, complete characters included.
    """
    result: list[str] = []
    decoder = _utf8_decoder()
    for token in tokens:
        match = BYTE_TOKEN.fullmatch(token)
        if match:
            text = decoder.decode(bytes.fromhex(match[1]))
            result.extend(_byte_tokens(text))
        else:
            text = decoder.decode(b"", final=True)
            result.extend(_byte_tokens(text))
            result.append(token)
    return result


def _byte_tokens(text: str) -> Iterator[str]:
    """Yields the byte tokens of `text`; U+FFFD as itself."""
    for character in text:
        if character == REPLACEMENT:
            yield character
        else:
            for byte in character.encode():
                yield f"<0x{byte:02X}>"


def _ends_inside_character(tokens: list[str]) -> bool:
    """Whether the bytes of byte-level tokens end with an incomplete UTF-8 character."""
    tail = b""
    for token in reversed(tokens):
        tail = _byte_level_bytes(token) + tail
        if len(tail) >= 4:  # no character is longer
            break
    decoder = _utf8_decoder()
    decoder.decode(tail)
    pending, _ = decoder.getstate()
    return bool(pending)


def _byte_level_bytes(token: str) -> bytes:
    data = [_byte_level_alphabet().get(character) for character in token]
    if None in data:  # an added token
        return token.encode()
    return bytes(data)


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    for byte in range(0x100):
        if chr(byte) not in alphabet:
            alphabet[chr(0x100 + len(alphabet) - len(printable))] = byte
    return alphabet


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Checks that every message has a role and a content of text.

    Content is a string or a list of parts {"type": "text", "text": ...}.

    Raises:
      SpecJAXError: naming the message by its number, from 1.
    """
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise SpecJAXError(f"{where} must be an object with a 'role' and a 'content'")
        content = message.get("content")
        if isinstance(content, str):
            continue
        if not isinstance(content, list) or not content:
            shown = "null" if content is None else repr(content)
            raise SpecJAXError(
                f"{where}: 'content' must be a string or a list of text parts, got {shown}"
            )
        for part in content:
            _check_text_part(part, where)


def _check_text_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise SpecJAXError(f"{where}: a part of 'content' must be an object, got {part!r}")
    if part.get("type") != "text":
        raise SpecJAXError(
            f"{where}: parts of type {part.get('type')!r} are not supported; supported: 'text'"
        )
    if not isinstance(part.get("text"), str):
        raise SpecJAXError(f"{where}: 'text' of a part must be a string, got {part.get('text')!r}")


def content_text(content: str | list[dict[str, str]]) -> str:
    """Returns the content of a message as one text; parts of a list are joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as transformers passes it: without null values, reasoning under both its names."""
    fields = {name: value for name, value in message.items() if value is not None}
    for name in REASONING_NAMES:
        if name in fields:
            reasoning = fields[name]
            return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _renders_parts(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether `text` has the texts of all parts, and no part as Python or JSON would print it."""
    for message in messages:
        if isinstance(message["content"], str):
            continue
        for part in message["content"]:
            is_printed = repr(part) in text or json.dumps(part, ensure_ascii=False) in text
            if is_printed or part["text"].strip() not in text:
                return False
    return True


def from_folder(folder: pathlib.Path) -> Tokenizer | None:
    """Returns the tokenizer of a Hugging Face folder, None if the folder has none.

    Reads tokenizer.json, and the added tokens, special tokens and chat template beside it, with the
    ids that transformers gives them.

    Raises:
      SpecJAXError: a file cannot be read, or there is only a SentencePiece `tokenizer.model`.
    """
    path = folder / "tokenizer.json"
    if not files.exists(path):
        if files.exists(folder / "tokenizer.model"):
            raise SpecJAXError(
                f"{folder} has only a SentencePiece tokenizer.model; a tokenizer.json is needed "
                "(transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        return None
    config_path = folder / "tokenizer_config.json"
    template_path = folder / "chat_template.jinja"
    config = _read_optional(config_path)
    special = dict(config)
    legacy_ids = {}
    if "added_tokens_decoder" not in config:  # then transformers reads the older files
        special |= _read_optional(folder / "special_tokens_map.json")
        legacy_ids = _read_optional(folder / "added_tokens.json")
    backend = load_backend(path)
    with files.parsing(f"{folder}: tokenizer_config.json or the files of special or added tokens"):
        named = _named_tokens(special)
        texts = {name: token.content for name, token in named.items()}
        _add_tokens(backend, special, list(named.values()), legacy_ids)
        template = config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        tokenizer = Tokenizer(backend, texts, template, str(config_path))
    if files.exists(template_path):
        template = files.read_text(template_path)
        return Tokenizer(backend, texts, template, str(template_path))
    return tokenizer


def _read_optional(path: pathlib.Path) -> dict[str, Any]:
    return files.read_json(path) if files.exists(path) else {}


def _added_token(value: Any, **defaults: bool) -> tokenizers.AddedToken:
    """The token that a string, or an object with a "content" and flags, describes."""
    if not isinstance(value, dict):
        return tokenizers.AddedToken(value, **defaults)
    fields = {name: flag for name, flag in value.items() if name not in ("__type", "id")}
    content = fields.pop("content")
    return tokenizers.AddedToken(content, **(defaults | fields))


def _named_tokens(special: dict[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """The special tokens by role: the common ones, then those that a model names itself."""
    values = {name: special.get(name) for name in SPECIAL_NAMES}
    for name, value in special.items():
        if name.endswith("_token") and isinstance(value, str):
            values[name] = value
    extra = special.get("extra_special_tokens")
    if isinstance(extra, dict):
        values |= extra
    tokens = {}
    for name, value in values.items():
        if value is not None:
            tokens[name] = _added_token(value, special=True, normalized=False)
    return tokens


def _add_tokens(
    backend: tokenizers.Tokenizer,
    special: dict[str, Any],
    named: list[tokenizers.AddedToken],
    legacy_ids: dict[str, int],
) -> None:
    """Adds the tokens that are not in tokenizer.json, in the order in which transformers does.

    Args:
      backend: the tokenizer of tokenizer.json; changed in place.
      special: fields of tokenizer_config.json, and of special_tokens_map.json if it applies.
      named: the special tokens that have a role.
      legacy_ids: ids by token, from added_tokens.json.
    """
    special_tokens = list(named)
    extra = special.get("extra_special_tokens") or special.get("additional_special_tokens") or []
    if not isinstance(extra, dict):  # an object gives roles: see `_named_tokens`
        for value in extra:
            special_tokens.append(_added_token(value, special=True, normalized=False))
    special_texts = {token.content for token in special_tokens}

    by_id = {}
    for id_, value in (special.get("added_tokens_decoder") or {}).items():
        by_id[int(id_)] = _added_token(value)
    for text, id_ in legacy_ids.items():
        is_special = text in special_texts
        by_id[id_] = _added_token(text, special=is_special, normalized=not is_special)

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {token.content for token in by_id.values()}
    added = [by_id[id_] for id_ in sorted(by_id)]
    for token in special_tokens:
        if token.content not in known:
            known.add(token.content)
            added.append(token)
    for token in added:
        token.special = token.special or token.content in special_texts
    backend.add_tokens(added)


def load_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a tokenizer.json, without truncation and padding."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise SpecJAXError(f"cannot read {path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


@functools.lru_cache
def _compile(source: str) -> jinja2.Template:
    """Compiles a chat template for Jinja's sandbox: templates come with downloaded models.

    Templates may use what transformers offers (`utils/chat_template_utils.py`,
    `_cached_compile_jinja_template`).
    """

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
