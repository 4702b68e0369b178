"""Text to token ids and back: a `tokenizers.Tokenizer`, its special tokens, and the model's chat
template."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from specjax.errors import SpecJAXError
from specjax.files import parsing, read_json, read_text, writing

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer.

    Attributes:
      backend: the tokenizer itself, with its normaliser, pre-tokeniser and post-processor.
      special_tokens: text of the special tokens by role ("bos_token", ...), as chat templates see
        them.
      chat_template: Jinja source, None where the model has none.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None

    def __post_init__(self):
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        for role, text in (self.special_tokens | template).items():
            if not isinstance(text, str):
                raise SpecJAXError(f"{role} must be a text, got {text!r}")

    def save(self, folder: pathlib.Path) -> None:
        """Writes tokenizer.json and chat_template.jinja, but not `special_tokens`, of which formats
        differ."""
        with writing():
            self.backend.save(str(folder / "tokenizer.json"))
            if self.chat_template is not None:
                (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the model wants around it (such as a first BOS) unless
        told otherwise."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; the model's own `vocab_size` may be larger (padding)."""
        return max(self.token_ids.values(), default=-1) + 1

    @functools.cached_property
    def token_ids(self) -> dict[str, int]:
        """Every token and its id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, None where there is none."""
        return self.backend.token_to_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """Id of the tokenizer's own end-of-sequence token; a model may have more (see
        `Model.eos_ids`)."""
        return self.backend.token_to_id(self.special_tokens.get("eos_token", ""))

    def render_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text that the model's chat template makes of `messages`, each {"role": ...,
        "content": ...}.

        Raises SpecJAXError where the model has no chat template, or where the template refuses the
        messages.
        """
        if self.chat_template is None:
            raise SpecJAXError("this model has no chat template: give it a plain prompt")
        try:
            return _compile(self.chat_template).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise SpecJAXError(f"the chat template refused the messages: {error}") from error

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of `render_chat`; the template itself writes whatever special tokens there are
        to be."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt), add_special_tokens=False
        )

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A fresh incremental decoder."""
        return StreamDecoder(self, skip_special_tokens)


class StreamDecoder:
    """Decodes ids as they arrive. Never gives half a character; all pieces joined equal `decode` of
    all ids.

    A token's text may depend on its left neighbour (a leading space, a character split over
    tokens), so the ids of the last piece are decoded again as context, and only what comes after
    their text is given out. A run of SentencePiece's byte tokens waits for its end: one bad byte
    turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # ids whose text has been given out already
        self._waiting: list[int] = []
        backend = tokenizer.backend
        self._bytes = {backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        self._silent = {
            id_
            for id_, token in backend.get_added_tokens_decoder().items()
            if token.special and skip_special_tokens
        }

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with `ids`; often one token's, "" in the middle of a
        character."""
        self._waiting += map(int, ids)
        return self._take(final=False)

    def flush(self) -> str:
        """The rest, at the end of the sequence: half a character comes out as U+FFFD, as it does
        from `decode`."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        last = next((id_ for id_ in reversed(self._waiting) if id_ not in self._silent), None)
        if last in self._bytes and not final:
            return ""
        seen = self._decode(self._context)
        text = self._decode(self._context + self._waiting)
        if len(text) == len(seen) or (text.endswith("\ufffd") and not final):
            return ""
        self._context, self._waiting = self._waiting, []
        return text[len(seen) :]


def from_folder(folder: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder: tokenizer.json, and the special tokens and chat
    template beside it.

    None where there is no tokenizer at all. Raises SpecJAXError for files that cannot be read, and
    for a folder that has only a SentencePiece `tokenizer.model`.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists():
            raise SpecJAXError(
                f"{folder} has only a SentencePiece tokenizer.model; a tokenizer.json is needed "
                "(transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        return None
    config, special = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    special |= config
    backend = load_backend(path)
    with parsing(f"{folder}: tokenizer_config.json or special_tokens_map.json"):
        # A special token is a string, or a dictionary that says how it is matched beside its
        # "content".
        texts = {
            name: value["content"] if isinstance(value, dict) else value
            for name in SPECIAL_NAMES
            if (value := special.get(name)) is not None
        }
        template = config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        tokenizer = Tokenizer(backend, texts, template)
    if (folder / "chat_template.jinja").exists():
        return dataclasses.replace(
            tokenizer, chat_template=read_text(folder / "chat_template.jinja")
        )
    return tokenizer


def load_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
    """A tokenizer.json, free of the truncation and padding that some carry."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise SpecJAXError(f"cannot read {path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


@functools.lru_cache
def _compile(source: str) -> jinja2.Template:
    """Templates come with downloaded models, so they run in Jinja's sandbox; the names they may use
    are those of transformers (`utils/chat_template_utils.py`, `_cached_compile_jinja_template`)."""

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

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; when rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
