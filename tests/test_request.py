"""Parameters and outputs of requests: every check, and what is stored."""

from __future__ import annotations

import dataclasses
import re
import warnings

import numpy as np
import pytest

from specjax.engine import batch, request
from specjax.engine.request import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    bad_word_ids,
    fresh_seed,
    sampler_seed,
)
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.tokenizer import Tokenizer
from support import folders

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be an integer in [1, 16384], got 0"),
        ({"n": 16385}, "n must be an integer in [1, 16384], got 16385"),
        ({"n": 1.0}, "n must be an integer in [1, 16384], got 1.0"),
        ({"n": True}, "n must be an integer in [1, 16384], got True"),
        ({"n": None}, "n must be an integer in [1, 16384], got None"),
        ({"n": 2, "temperature": 0}, "n must be 1 at temperature 0, where all completions"),
        ({"n": 2, "temperature": 9e-6}, "n must be 1 at temperature 0"),
        ({"temperature": -0.1}, "temperature must be a number in [0, 2], got -0.1"),
        ({"temperature": 2.1}, "temperature must be a number in [0, 2], got 2.1"),
        ({"temperature": NAN}, "temperature must be a number in [0, 2], got nan"),
        ({"temperature": INF}, "temperature must be a number in [0, 2], got inf"),
        ({"temperature": 10**400}, "temperature must be a number in [0, 2], got 1000"),
        ({"temperature": "1"}, "temperature must be a number in [0, 2], got '1'"),
        ({"temperature": None}, "temperature must be a number in [0, 2], got None"),
        ({"top_p": 0}, "top_p must be a number in (0, 1], got 0"),
        ({"top_p": 1e-50}, "top_p must be a number in (0, 1], got 1e-50"),
        ({"top_p": 1.1}, "top_p must be a number in (0, 1], got 1.1"),
        ({"top_p": 1.1, "temperature": 0}, "top_p must be a number in (0, 1], got 1.1"),
        ({"top_k": -2}, "top_k must be an integer of at least -1 (0 and -1 are off), got -2"),
        ({"top_k": 2**31}, "top_k must be an integer of at least -1"),
        ({"min_p": -0.1}, "min_p must be a number in [0, 1], got -0.1"),
        ({"min_p": 1.1}, "min_p must be a number in [0, 1], got 1.1"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number in [-2, 2], got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be a number in [-2, 2], got -2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number in [1.2e-38, 3.4e38]"),
        ({"repetition_penalty": INF}, "repetition_penalty must be a number in"),
        ({"seed": 2**63}, "seed must be None or an integer in [-2**63, 2**63), got 9223"),
        ({"seed": -(2**63) - 1}, "seed must be None or an integer in"),
        ({"seed": True}, "seed must be None or an integer in [-2**63, 2**63), got True"),
        ({"seed": 1.5}, "seed must be None or an integer in [-2**63, 2**63), got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be None or an integer of at least 1, got 0"),
        ({"max_tokens": 2**31}, "max_tokens must be None or an integer of at least 1"),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens=16, got 17"),
        ({"stop": ""}, "stop must not contain an empty string, got ('',)"),
        ({"stop": ["a", ""]}, "stop must not contain an empty string, got ['a', '']"),
        ({"stop": ["a", 1]}, "stop must be a list of strings, got ['a', 1]"),
        ({"stop": b"a"}, "stop must be a list of strings, got b'a'"),
        ({"stop": "\ud800"}, "stop must be valid Unicode, got '\\ud800'"),
        ({"stop": "a", "detokenize": False}, "detokenize must be True, got detokenize=False and"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids, got [-1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids, got [True]"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, got 3"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be True or False"),
        ({"detokenize": "no"}, "detokenize must be True or False, got 'no'"),
        ({"skip_special_tokens": 0}, "skip_special_tokens must be True or False, got 0"),
        ({"logprobs": -1}, "logprobs must be None or an integer in [0, 20] (-1, all of them, is"),
        ({"logprobs": 21}, "logprobs must be None or an integer in [0, 20]"),
        ({"logprobs": True}, "logprobs must be None or an integer in [0, 20]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be None or an integer in [0, 20] (-1, all"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, got [1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers, got the id 'a'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias must map token ids to numbers, got the id '-1'"),
        ({"logit_bias": {" 1": 1}}, "logit_bias must map token ids to numbers, got the id ' 1'"),
        ({"logit_bias": {"١": 1}}, "logit_bias must map token ids to numbers, got the id '١'"),
        (
            {"logit_bias": {"9" * 10: 1}},
            "logit_bias must map token ids to numbers, got the id '9999999999'",
        ),
        (
            {"logit_bias": {"9" * 5000: 1}},
            "logit_bias must map token ids to numbers, got the id '999",
        ),
        ({"logit_bias": {True: 1}}, "logit_bias must map token ids to numbers, got the id True"),
        ({"logit_bias": {1: 1, "01": 2}}, "logit_bias must have each token id once, got 1 twice"),
        ({"logit_bias": {-1: 1}}, "logit_bias must map token ids to numbers, got the id -1"),
        ({"logit_bias": {1: NAN}}, "logit_bias must map token ids to numbers, got nan for token 1"),
        ({"logit_bias": {1: "2"}}, "logit_bias must map token ids to numbers, got '2' for token 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids must have at least one id, or be None"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be a list of token ids, got ['a']"),
        ({"bad_words": "abc"}, "bad_words must be a list of strings, got 'abc'"),
        ({"bad_words": [""]}, "bad_words must not contain an empty string, got ['']"),
        ({"bad_words": ["a"] * 129}, "bad_words must be at most 128 texts, got 129"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens must be True"),
        ({"output_kind": "delta"}, "output_kind must be one of RequestOutputKind.CUMULATIVE, "),
        ({"output_kind": 1}, "output_kind must be one of RequestOutputKind.CUMULATIVE, "),
        ({"structured_outputs": {"json": {}}}, "structured_outputs is not supported and must be"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(fields, message):
    with pytest.raises(SpecJAXError, match=re.escape(message)) as caught:
        SamplingParams(**fields)
    assert "\n" not in str(caught.value)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "structured_outputs": None,
    }


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": 0.01}, {"temperature": 0.01}),
        (
            {"temperature": 9.9e-6, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
            {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        ),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": np.int64(7), "top_p": np.float32(0.5)}, {"seed": 7, "top_p": 0.5}),
        ({"max_tokens": None, "min_tokens": 99}, {"max_tokens": None, "min_tokens": 99}),
        ({"stop": "ab"}, {"stop": ("ab",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None, "stop_token_ids": None}, {"stop": (), "stop_token_ids": ()}),
        ({"stop_token_ids": np.array([3, 4])}, {"stop_token_ids": (3, 4)}),
        ({"logprobs": 0, "prompt_logprobs": 20}, {"logprobs": 0, "prompt_logprobs": 20}),
        (
            {"logit_bias": {1: 200, np.int32(2): -INF, 3: 5, 4: 10**400}},
            {"logit_bias": {1: 100.0, 2: -100.0, 3: 5.0, 4: 100.0}},
        ),
        ({"logit_bias": {"7": -200, "0": 1}}, {"logit_bias": {7: -100.0, 0: 1.0}}),
        ({"logit_bias": {}, "bad_words": []}, {"logit_bias": None, "bad_words": None}),
        ({"allowed_token_ids": range(3)}, {"allowed_token_ids": (0, 1, 2)}),
        ({"bad_words": ["a"]}, {"bad_words": ("a",)}),
    ],
)
def test_what_is_stored(given, stored):
    params = SamplingParams(**given)
    for name, value in stored.items():
        assert getattr(params, name) == value
        assert type(getattr(params, name)) is type(value)
    # The engine replaces `max_tokens`: a copy passes the checks again, and is equal.
    assert dataclasses.replace(params) == params


def test_a_very_low_temperature_is_raised_with_a_warning():
    with pytest.warns(SpecJAXWarning, match=r"temperature 0.002 is too low .* becomes 0.01") as all:
        params = SamplingParams(temperature=0.002)
    assert all[0].filename == __file__
    assert params.temperature == 0.01
    assert not params.is_greedy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataclasses.replace(params, max_tokens=3)


def test_params_that_are_assigned_are_checked():
    params = SamplingParams(top_p=0.5)
    copied = params.clone()
    params.max_tokens = 3
    params.temperature = 0
    assert params == SamplingParams(temperature=0, max_tokens=3)  # with all filters off
    assert copied == SamplingParams(top_p=0.5)
    with pytest.raises(SpecJAXError, match="n must be"):
        params.n = 0
    with pytest.raises(SpecJAXError, match="SamplingParams has no parameter 'best_of'"):
        params.best_of = 2
    assert params == SamplingParams(temperature=0, max_tokens=3)


def test_params_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_ranges_are_within_those_of_the_arrays():
    ranges = request.INTEGERS | request.NUMBERS
    names = (ranges.keys() & batch.RANGES.keys()) - {"seed"}  # seeds are hashed
    assert len(names) == 8
    for name in names:
        low, high, _ = ranges[name]
        assert batch.RANGES[name].low <= (0 if name == "top_k" else low)  # -1 is stored as 0
        assert high <= batch.RANGES[name].high


# --- Seeds ----------------------------------------------------------------------------------------


def test_seeds_of_32_bits_stay():
    assert [sampler_seed(seed) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]


def test_other_seeds_are_hashed():
    """The values are part of what a seed means: they must not change."""
    seeds = [-1, -(2**63), 2**32, 2**63 - 1, 2**63 + 9]
    hashed = [sampler_seed(seed) for seed in seeds]
    assert all(0 <= seed < 2**32 for seed in hashed)
    assert len(set(hashed)) == len(seeds)
    assert hashed[2] == 3165086659


def test_fresh_seeds_differ_and_stay():
    seeds = {fresh_seed() for _ in range(64)}
    assert len(seeds) > 60
    assert all(sampler_seed(seed) == seed for seed in seeds)


# --- Bad words ------------------------------------------------------------------------------------


def test_bad_words_are_forbidden_at_the_beginning_and_behind_a_space():
    tokenizer = Tokenizer(folders.backend())
    ids = tokenizer.token_ids
    w, space_w, space = ids["w"], ids["Ġw"], ids["Ġ"]
    rest = (ids["or"], ids["l"], ids["d"])
    hello = (ids["hello"],)
    found = bad_word_ids(tokenizer, ["world", "  world", "hello"])
    # "Ġ" and "hello" are two tokens: the second is forbidden already.
    assert found == ((w, *rest), (space_w, *rest), hello)
    assert tokenizer.encode(" hello", add_special_tokens=False) == [space, *hello]


def test_white_space_can_be_a_bad_word():
    tokenizer = Tokenizer(folders.backend())
    newline, space = tokenizer.token_ids["Ċ"], tokenizer.token_ids["Ġ"]
    assert bad_word_ids(tokenizer, ["\n", " "]) == ((newline,), (space,))


# --- Outputs --------------------------------------------------------------------------------------


def test_from_draft_is_that_of_the_tokens_of_an_output():
    rounds = dict(drafted=(2, 0, 2), accepted=(2, 0, 1), emitted=(3, 1, 2))
    flags = [True, True, False, False, True, False]
    whole = CompletionOutput(0, "", (1, 2, 3, 4, 5, 6), **rounds)
    delta = CompletionOutput(0, "", (5, 6), **rounds)
    assert (whole.from_draft, delta.from_draft) == (flags, flags[-2:])
    assert CompletionOutput(0, "", (), **rounds).from_draft == []
    assert not whole.finished
    assert dataclasses.replace(whole, finish_reason="stop").finished


def test_text_is_that_of_the_first_completion():
    outputs = (CompletionOutput(0, "a", (1,)), CompletionOutput(1, "b", (2,)))
    assert RequestOutput("1", "p", (3,), None, outputs, True).text == "a"
