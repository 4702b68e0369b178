"""The tokenizer in a GGUF file's metadata, rebuilt as a `tokenizers.Tokenizer`."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
SPACE = "\u2581"  # what SentencePiece writes for a space
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
GPT2_NAMES = ("gpt-2", "gpt2", "default")
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build(metadata: dict[str, Any]) -> Tokenizer | None:
    """A file's metadata -> Tokenizer, None where it has none.

    Raises:
      SpecJAXError: a tokenizer model or pre-tokeniser that is not known: guessing would give other
        tokens.
      KeyError: something is missing.
    """

    def get(key, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind = get("model")
    if kind is None or kind == "none":
        return None
    tokens, pre = metadata["tokenizer.ggml.tokens"], get("pre")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, pre)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise SpecJAXError(f"tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    types = get("token_type") or [1] * len(tokens)
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == CONTROL
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == USER_DEFINED
        ]
    )
    special = {
        role: tokens[get(key)] for role, key in ROLES.items() if 0 <= get(key, -1) < len(tokens)
    }
    # Where the file does not say, llama.cpp puts a BOS before SentencePiece and Llama 3 text, and
    # no EOS after any.
    before = ["bos_token"] if get("add_bos_token", kind == "llama" or pre in LLAMA3_NAMES) else []
    after = ["eos_token"] if get("add_eos_token", False) else []
    ids = {role: metadata[f"tokenizer.ggml.{ROLES[role]}"] for role in before + after}
    if ids:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(special[role] for role in before), "$A", *(special[role] for role in after)],
            special_tokens=[(special[role], id_) for role, id_ in ids.items()],
        )
    return Tokenizer(backend, special, metadata.get("tokenizer.chat_template"))


def _byte_level(
    metadata: dict[str, Any], tokens: list[str], pre: str | None
) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, without looking for the merges that would lead
    # to it.
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=pre in LLAMA3_NAMES)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    elif pre in LLAMA3_NAMES:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in GPT2_NAMES:
        backend.pre_tokenizer = byte_level
    else:
        names = ("smollm", *LLAMA3_NAMES, *GPT2_NAMES)
        raise SpecJAXError(f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(names)}")
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece joins the neighbours whose joint piece scores highest: BPE with merges in order
    of the scores."""
    scores = metadata["tokenizer.ggml.scores"]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    merges = [
        (-score, id_, token[:cut], token[cut:])
        for id_, (token, score) in enumerate(zip(tokens, scores, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, _, left, right in sorted(merges)],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
