"""The text of a growing completion: each rule alone, and random texts against a slow reference."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from specjax.engine.detokenize import TextBuilder
from specjax.engine.request import SamplingParams
from specjax.tokenizer import Tokenizer
from support import folders

BYTE_LEVEL = Tokenizer(folders.backend(), {"bos_token": "<s>", "eos_token": "</s>"})
BYTE_FALLBACK = Tokenizer(folders.byte_fallback_backend())
EOS_ID = BYTE_LEVEL.eos_id


def encode(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text, add_special_tokens=False)


def pushed(text: str, **fields) -> tuple[TextBuilder, list[str]]:
    """The state after all tokens of a text, and the piece that each of them added."""
    builder = TextBuilder(BYTE_LEVEL, SamplingParams(**fields))
    return builder, [builder.push([token_id]) for token_id in encode(text)]


def test_a_character_is_emitted_when_it_is_complete():
    builder, pieces = pushed("a🎉b")
    assert pieces == ["a", "", "", "", "🎉", "b"]
    assert (builder.text, builder.num_tokens, builder.stop_reason) == ("a🎉b", 6, None)
    assert builder.finish() == ""


def test_an_incomplete_character_at_the_end_is_left_out():
    builder = TextBuilder(BYTE_LEVEL, SamplingParams())
    builder.push(encode("a🎉")[:-1])
    builder.finish()
    assert builder.text == "a"


def test_text_ends_before_a_stop_string_that_straddles_tokens():
    builder, pieces = pushed("hello world", stop="lo w")  # tokens: hello, Ġw, or, l, d
    assert pieces == ["hel", "", "", "", ""]
    assert (builder.text, builder.num_tokens, builder.stop_reason) == ("hel", 2, "lo w")
    assert builder.push(encode("more")) == builder.finish() == ""
    assert (builder.text, builder.num_tokens) == ("hel", 2), "ids behind the end do not count"


def test_the_stop_string_can_be_part_of_the_text():
    builder, pieces = pushed("hello world", stop="lo w", include_stop_str_in_output=True)
    assert pieces[:2] == ["hello", " w"], "nothing is held back"
    assert (builder.text, builder.num_tokens, builder.stop_reason) == ("hello w", 2, "lo w")
    builder, _ = pushed("hello", stop="he", include_stop_str_in_output=True)
    assert builder.text == "he", "the token's other characters are cut"


def test_only_text_that_may_begin_a_stop_string_is_held_back():
    builder, pieces = pushed("abcabd", stop=["abd", "x" * 20])
    assert pieces == ["", "", "abc", "", "", ""]
    assert builder.text == "abc"
    builder, pieces = pushed("abca", stop="abd")
    assert builder.text == "abc"
    assert builder.finish() == "a"
    assert builder.text == "abca"
    assert builder.stop_reason is None


def test_a_stop_string_that_came_too_early_is_not_held_back():
    builder, pieces = pushed("abc", stop=["ab", "xyz"], min_tokens=2)
    assert pieces == ["", "ab", "c"]
    assert builder.stop_reason is None


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which of several stop strings ends a text."""

    stop: list[str]
    text: str
    reason: str
    left: str


@pytest.mark.parametrize(
    "case",
    [
        Choice(["cd", "b"], "abcd", "b", "a"),  # the first one to be complete, not the first given
        Choice(["hello", "el"], "hello", "el", "h"),  # also within one token
        Choice(["c", "bc"], "abcd", "bc", "a"),  # of those that end together, the longest
        Choice(["abcx", "bc"], "abcd", "bc", "a"),
        Choice(["aab"], "aaab", "aab", "a"),
    ],
    ids=str,
)
def test_which_stop_string_ends_the_text(case):
    builder, _ = pushed(case.text, stop=case.stop)
    assert (builder.stop_reason, builder.text) == (case.reason, case.left)


@pytest.mark.parametrize(
    ("min_tokens", "num_tokens", "text"),
    [
        (0, 2, ""),
        (1, 2, ""),  # token 2 completes it
        (2, 4, "ab"),  # "ab" is complete too early; then the next one counts
        (3, 4, "ab"),
        (4, None, "abab"),
    ],
)
def test_no_token_up_to_min_tokens_completes_a_stop_string(min_tokens, num_tokens, text):
    builder, _ = pushed("abab", stop="ab", min_tokens=min_tokens)
    builder.finish()
    assert builder.text == text
    assert (builder.num_tokens if builder.stop_reason else None) == num_tokens


def test_a_stop_string_may_begin_in_the_first_tokens():
    builder, pieces = pushed("abc", stop="bc", min_tokens=2)
    assert (pieces, builder.text, builder.num_tokens) == (["a", "", ""], "a", 3)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "a"),
        ({"skip_special_tokens": False}, "a</s>b"),
        ({"detokenize": False}, ""),
        ({"detokenize": False, "ignore_eos": True}, ""),
    ],
)
def test_special_tokens(fields, text):
    ids = [*encode("a"), EOS_ID, *encode("b")]
    builder = TextBuilder(BYTE_LEVEL, SamplingParams(**fields))
    builder.push(ids)
    assert builder.text == (text if fields else "ab")
    assert builder.num_tokens == 3


def test_without_a_tokenizer_there_is_no_text():
    builder = TextBuilder(None, SamplingParams())
    assert builder.push([1, 2]) == builder.finish() == builder.text == ""
    assert builder.num_tokens == 2


def test_a_stop_token_has_no_text():
    ids = encode("abc")
    for include, text in ((False, "ab"), (True, "abc")):
        params = SamplingParams(
            include_stop_str_in_output=include, skip_special_tokens=False, stop="xy"
        )
        builder = TextBuilder(BYTE_LEVEL, params, stop_ids=(EOS_ID, ids[2]))
        builder.push(ids)
        assert (builder.text, builder.num_tokens) == (text, 3)


def test_the_first_token_keeps_its_space_behind_a_prompt():
    """A SentencePiece tokenizer removes the space at the beginning of a text."""
    backend = folders.sentencepiece_backend()
    tokenizer = Tokenizer(backend)
    prompt, world = tokenizer.encode("a"), tokenizer.encode("b")
    for prompt_ids, text in (((), "b"), (prompt, " b"), (prompt * 20, " b")):
        builder = TextBuilder(tokenizer, SamplingParams(), prompt_ids=prompt_ids)
        builder.push(world)
        assert builder.text == text


# --- Random texts ---------------------------------------------------------------------------------


def expected(tokenizer: Tokenizer, ids: list[int], params: SamplingParams):
    """Text, tokens and stop string of a completion, from the texts of all its beginnings."""
    texts = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    for count in range(params.min_tokens + 1, len(ids) + 1):
        matches = []
        for stop in params.stop:
            for start in range(len(texts[count])):
                end = start + len(stop)
                if texts[count][start:end] == stop and end > len(texts[count - 1]):
                    matches.append((end, start, stop))
        if matches:
            end, start, stop = min(matches)
            kept = end if params.include_stop_str_in_output else start
            return texts[count][:kept], count, stop
    return texts[-1], len(ids), None


def ids_of(tokenizer: Tokenizer, alphabet: str):
    """Token ids: of the alphabet's bytes, of longer tokens, and special ones."""
    tokens = [*"abc", "<s>", "he", "ll", "hello", "Ġw"]
    ids = [tokenizer.token_ids[token] for token in tokens if token in tokenizer.token_ids]
    if tokenizer is BYTE_LEVEL:
        ids += encode(alphabet)
    else:
        ids += [tokenizer.token_ids[f"<0x{byte:02X}>"] for byte in alphabet.encode()]
    return st.lists(st.sampled_from(ids), max_size=24)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_random_texts_in_random_blocks(tokenizer, data):
    ids = data.draw(ids_of(tokenizer, "aé日"), label="ids")
    stop = st.lists(st.text("abché日 w\ufffd", min_size=1, max_size=4), max_size=3)
    params = SamplingParams(
        stop=data.draw(stop, label="stop"),
        min_tokens=data.draw(st.integers(0, 5), label="min_tokens"),
        include_stop_str_in_output=data.draw(st.booleans(), label="include"),
    )
    text, num_tokens, reason = expected(tokenizer, ids, params)
    builder = TextBuilder(tokenizer, params)
    emitted = ""
    num_left = len(ids)
    while num_left:
        size = data.draw(st.integers(1, num_left), label="size")
        emitted += builder.push(ids[len(ids) - num_left :][:size])
        assert builder.text == emitted
        assert text.startswith(emitted), "text was emitted that is none"
        num_left -= size
        if builder.stop_reason is None:
            whole = tokenizer.decode(ids[: len(ids) - num_left])
            held = whole.removeprefix(emitted)
            may_begin = [stop for stop in params.stop if stop != held and stop.startswith(held)]
            assert may_begin or not held
    emitted += builder.finish()
    assert (emitted, builder.num_tokens, builder.stop_reason) == (text, num_tokens, reason)
    assert builder.text == text
