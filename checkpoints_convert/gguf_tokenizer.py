"""The tokenizer in a GGUF file's metadata, rebuilt as a `tokenizers.Tokenizer`."""

from __future__ import annotations

import pathlib
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of tokenizer.ggml.token_type
SPACE = "\u2581"  # SentencePiece's character for a space
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
GPT2_NAMES = ("gpt-2", "gpt2", "default")
PRE_TOKENIZERS = ("smollm", *LLAMA3_NAMES, *GPT2_NAMES)
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files often name one end-of-sequence token although a turn ends with another. llama.cpp therefore
# recognises tokens that end a generation by their text, regardless of their type in the file, and
# so do we: src/llama-vocab.cpp, `special_eog_ids` (commit 00ad355e). Of the tokens for code
# infilling (the last two rows), llama.cpp takes one of each kind.
END_OF_GENERATION = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)


def end_of_generation_ids(metadata: dict[str, Any]) -> set[int]:
    """Returns the ids that end a generation, named by the file or recognised by text."""
    ids = set()
    for key in END_KEYS:
        id_ = metadata.get(PREFIX + key)
        if id_ is not None:
            ids.add(int(id_))
    tokens = metadata.get(PREFIX + "tokens", [])
    return _with_known_ends(ids, tokens)


def _with_known_ends(ids: set[int], tokens: list[str]) -> set[int]:
    by_text = {}
    for id_, token in enumerate(tokens):
        if token in END_OF_GENERATION or id_ in ids:
            by_text[token] = id_
    # Exceptions of llama.cpp: with these tokens, "<|end|>" ends a message and not the turn, and
    # "</s>" is an ordinary token.
    has_call = "<|call|>" in by_text or "<|calls|>" in by_text
    if has_call and ("<|return|>" in by_text or "<|flush|>" in by_text):
        ids = ids - {by_text.pop("<|end|>", None)}
    if "<|tool_response>" in by_text:
        ids = ids - {by_text.pop("</s>", None)}
    return ids | set(by_text.values())


def build(metadata: dict[str, Any], path: pathlib.Path) -> Tokenizer | None:
    """Returns the tokenizer of a GGUF file, None if the file has none.

    Args:
      metadata: the file's metadata.
      path: the file, for error messages of the chat template.

    Raises:
      SpecJAXError: an unknown tokenizer model or pre-tokenizer; guessing would give other tokens.
      KeyError: a field is missing.
    """
    fields = {}
    for key, value in metadata.items():
        if key.startswith(PREFIX):
            fields[key.removeprefix(PREFIX)] = value
    model = fields.get("model")
    if model is None or model == "none":
        return None
    tokens = metadata[PREFIX + "tokens"]
    pre = fields.get("pre")
    if model == "gpt2":
        backend = _byte_level(tokens, metadata[PREFIX + "merges"], pre)
    elif model == "llama":
        backend = _sentencepiece(fields, tokens, metadata[PREFIX + "scores"])
    else:
        raise SpecJAXError(f"tokenizer model {model!r} is not supported; supported: gpt2, llama")
    types = fields.get("token_type") or [NORMAL] * len(tokens)
    _add_tokens(backend, tokens, types)
    special = {}
    for role, key in ROLES.items():
        if 0 <= fields.get(key, -1) < len(tokens):
            special[role] = tokens[fields[key]]
    # By default, llama.cpp adds a BOS to SentencePiece and Llama 3 texts, and an EOS to none.
    adds_bos = fields.get("add_bos_token", model == "llama" or pre in LLAMA3_NAMES)
    before = [special["bos_token"]] if adds_bos else []
    after = [special["eos_token"]] if fields.get("add_eos_token", False) else []
    if before or after:
        ids = [(token, backend.token_to_id(token)) for token in before + after]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=ids
        )
    return Tokenizer(backend, special, metadata.get("tokenizer.chat_template"), str(path))


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Adds the tokens that are matched as a whole; those that are special are not part of texts."""
    end_ids = _with_known_ends(set(), tokens)
    special = []
    user_defined = []
    for id_, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ in (CONTROL, UNKNOWN) or id_ in end_ids:
            special.append(AddedToken(token, normalized=False, special=True))
        elif type_ == USER_DEFINED:
            user_defined.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(user_defined)


def _byte_level(tokens: list[str], merges: list[str], pre: str | None) -> tokenizers.Tokenizer:
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    # Llama 3 takes a word that is a token as it is, even if no merges lead to it.
    model = models.BPE(vocabulary, pairs, ignore_merges=pre in LLAMA3_NAMES)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(pre: str | None) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if pre in LLAMA3_NAMES:
        split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, bytes_only])
    if pre in GPT2_NAMES:
        return byte_level
    raise SpecJAXError(
        f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
    )


def _sentencepiece(
    fields: dict[str, Any], tokens: list[str], scores: list[float]
) -> tokenizers.Tokenizer:
    """SentencePiece joins the neighbours whose union scores highest: BPE with merges by score."""
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    merges = []
    for id_, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, id_, left, right))
    merges.sort()
    model = models.BPE(
        vocabulary,
        [(left, right) for _, _, left, right in merges],
        unk_token=tokens[fields.get("unknown_token_id", 0)],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(steps)
    return backend
