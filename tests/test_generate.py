"""`specjax.generate` on small models: arguments, results, and errors."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors

import specjax
from specjax import Draft, Drafter, SpecJAXError, decode, parallel, sampling
from specjax.config import Runtime
from specjax.drafters import registry
from specjax.engine import batch
from specjax.engine import generate as generation
from specjax.engine.request import SamplingOptions
from specjax.errors import SpecJAXWarning
from specjax.kernels import dispatch
from specjax.tokenizer import Tokenizer
from support import folders
from support.loop import compilations

CHAT = [{"role": "user", "content": "hello hello"}]
PROMPTS = ["hello world hello", [5, 9, 7, 5, 9], CHAT]  # ragged: a text, ids, a chat
OTHER_PROMPTS = ["other", [80, 81, 82, 83, 84, 85, 86], [{"role": "user", "content": "or"}]]
DRAFT_MODEL = {"drafter": "draft_model", "num_speculative_tokens": 2}


def arrays(noise: float = 0.0) -> dict:
    """Weights of one layer; with noise, those of a draft model.

    The text soon repeats itself: attention has little weight, and two dozen tokens are far more
    probable than all others.
    """
    result, other = (folders.tensors({"num_hidden_layers": 1}, seed=seed) for seed in (0, 1))
    result["model.layers.0.self_attn.o_proj.weight"] *= 0.02
    result["lm_head.weight"][[*range(4), *range(25, 288)]] *= 0.2  # special tokens, and most others
    return {name: array + np.float32(noise) * other[name] for name, array in result.items()}


def load(path, noise=0.0, **config):
    config = {"num_hidden_layers": 1} | config
    return specjax.load(folders.write_folder(path, config, arrays(noise)))


def with_followers(model, followers: dict[int, int], tokenizer):
    """A model whose greedy token depends on the last token alone, by `followers`."""
    V, D = model.config.vocab_size, model.config.hidden_size
    embed_VD = np.random.default_rng(0).standard_normal((V, D), np.float32)
    embed_VD /= np.linalg.norm(embed_VD, axis=1, keepdims=True)
    lm_head_VD = np.zeros((V, D), np.float32)
    for token, follower in followers.items():
        lm_head_VD[follower] += embed_VD[token]
    params = jax.tree.map(jnp.zeros_like, model.params)  # layers that add nothing
    params |= {
        "embed_VD": jnp.asarray(embed_VD),
        "lm_head_VD": jnp.asarray(lm_head_VD),
        "final_norm_D": jnp.ones(D),
    }
    return dataclasses.replace(model, params=params, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return load(tmp_path_factory.mktemp("draft") / "model", noise=0.03)


@pytest.fixture(scope="module")
def plain(target):
    """Greedy completions without speculation, of 40 tokens each."""
    return specjax.generate(target, "none", PROMPTS, max_new_tokens=40).completions


def tokens(result) -> list[tuple[int, ...]]:
    return [c.tokens for c in result.completions]


def test_default_k_on_a_cpu_depends_on_the_cost_of_drafts(target, draft):
    for drafter, model, k in (("ngram", None, 7), ("draft_model", draft, 2)):
        run = specjax.generate(target, drafter, [[5] * 20], draft=model, max_new_tokens=16)
        assert max(run.completions[0].drafted) == k
    ks = map(
        generation.default_num_speculative_tokens, ("ngram", "draft_model", "eagle", "ngram,eagle")
    )
    assert list(ks) == [7, 2, 2, 2]


def test_a_completion_has_prompt_text_and_reason(target, plain):
    text, chat = (
        target.tokenizer.encode("hello world hello"),
        target.tokenizer.apply_chat_template(CHAT),
    )
    assert [c.prompt_tokens for c in plain] == [tuple(text), (5, 9, 7, 5, 9), tuple(chat)]
    assert plain[0].prompt_tokens[0] == target.tokenizer.bos_id
    for completion in plain:
        assert completion.text == target.tokenizer.decode(completion.tokens)
        assert completion.finish_reason == "length"
        assert len(completion.tokens) == 40
        assert max(completion.tokens) < target.num_valid_tokens < target.config.vocab_size
        assert (completion.drafted, completion.accepted, completion.emitted) == (
            (0,) * 40,
            (0,) * 40,
            (1,) * 40,
        )
        assert completion.from_draft == [False] * 40


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"drafter": "ngram", "verify": "rejection"}, marks=pytest.mark.slow),
        DRAFT_MODEL | {"verify": "coupled"},
    ],
)
def test_a_batch_equals_its_prompts_alone(target, draft, arguments):
    """Every option differs between rows, so that a mix-up of rows shows."""
    arguments = arguments | ({"draft": draft} if arguments["drafter"] == "draft_model" else {})
    options = {
        "temperature": [0.0, 3.0, 2.0],
        "top_k": [3, 0, 20],
        "top_p": [0.9, 1.0, 0.8],
        "min_p": [0.1, 0.01, 0.0],
        "seed": [7, 7, 2**32 - 1],
        "max_new_tokens": [30, 9, 20],
    }
    together = specjax.generate(target, prompts=PROMPTS, **arguments, **options)
    assert sum(sum(c.accepted) for c in together.completions) > 0
    assert [len(c.tokens) for c in together.completions] == [30, 9, 20]
    assert together.rounds == max(len(c.emitted) for c in together.completions)
    for i, prompt in enumerate(PROMPTS):
        alone = specjax.generate(
            target, prompts=[prompt], **arguments, **{name: v[i] for name, v in options.items()}
        )
        assert alone.completions[0] == together.completions[i]


@pytest.mark.parametrize("arguments", [{"drafter": "ngram"}, DRAFT_MODEL])
def test_greedy_text_is_that_of_plain_decoding(target, draft, plain, arguments):
    arguments = arguments | ({"draft": draft} if arguments["drafter"] == "draft_model" else {})
    result = specjax.generate(target, prompts=PROMPTS, max_new_tokens=40, **arguments)
    assert tokens(result) == [c.tokens for c in plain]
    assert sum(sum(c.accepted) for c in result.completions) > 10
    for completion in result.completions:
        assert sum(completion.emitted) == len(completion.tokens) == len(completion.from_draft)
        assert sum(completion.accepted) == sum(completion.from_draft)


def test_coupled_text_is_that_of_plain_sampling(target, draft):
    options = {"prompts": PROMPTS, "max_new_tokens": 30, "temperature": [1.0, 2.0, 1.5], "seed": 4}
    result = specjax.generate(target, draft=draft, verify="coupled", **DRAFT_MODEL, **options)
    assert tokens(result) == tokens(specjax.generate(target, "none", **options))
    assert sum(sum(c.accepted) for c in result.completions) > 3


def test_the_same_seed_gives_the_same_text(target):
    def texts(seed, prompts=("hello",) * 3):
        return tokens(
            specjax.generate(target, prompts=prompts, temperature=3.0, max_new_tokens=12, seed=seed)
        )

    assert len(set(texts(5))) == 1
    first = texts([1, 2, 3])
    assert len(set(first)) == 3
    assert first == texts(np.array([1, 2, 3])) == texts([3, 2, 1])[::-1]


@pytest.mark.parametrize("arguments", [{"drafter": "none"}, {"drafter": "ngram"}, DRAFT_MODEL])
def test_on_tokens_gets_every_token_once(target, draft, plain, arguments):
    arguments = arguments | ({"draft": draft} if arguments["drafter"] == "draft_model" else {})
    calls = collections.defaultdict(list)
    result = specjax.generate(
        target,
        prompts=PROMPTS,
        max_new_tokens=[40, 3, 1],
        **arguments,
        on_tokens=lambda index, *rest: calls[index].append(rest),
    )
    assert sorted(calls) == [0, 1, 2]
    assert len(calls[0]) > 2, "the text did not come piece by piece"
    for i, completion in enumerate(result.completions):
        assert completion.tokens == plain[i].tokens[: len(completion.tokens)]
        assert [token for ids, _, _ in calls[i] for token in ids] == list(completion.tokens)
        assert [
            flag for _, from_draft, _ in calls[i] for flag in from_draft
        ] == completion.from_draft
        assert [finished for _, _, finished in calls[i]] == [False] * (len(calls[i]) - 1) + [True]
        assert all(len(ids) == len(from_draft) > 0 for ids, from_draft, _ in calls[i])
    if arguments["drafter"] != "none":
        assert any(result.completions[0].from_draft)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_on_completion_gets_every_completion_once(target, is_streaming, monkeypatch):
    """Calls are made as completions finish: the short one comes before the long one."""
    monkeypatch.setattr(generation, "SECONDS_PER_CALL", 0)  # a round per call
    calls = []
    options = {"on_tokens": lambda *args: None} if is_streaming else {}
    result = specjax.generate(
        target,
        "none",
        PROMPTS,
        max_new_tokens=[40, 3, 20],
        on_completion=lambda index, completion: calls.append((index, completion)),
        **options,
    )
    assert [index for index, _ in calls] == [1, 2, 0]
    assert dict(calls) == dict(enumerate(result.completions))


class TestEnd:
    """End-of-sequence tokens."""

    @staticmethod
    def cut(completion, ids):
        """The plain text up to and including the first of `ids`."""
        end = next(
            (i + 1 for i, token in enumerate(completion.tokens) if token in ids),
            len(completion.tokens),
        )
        return completion.tokens[:end]

    def test_one_set_for_all_prompts(self, target, plain):
        ids = (plain[0].tokens[6], plain[1].tokens[9])
        result = specjax.generate(target, prompts=PROMPTS, max_new_tokens=40, eos_ids=ids)
        assert tokens(result) == [self.cut(c, ids) for c in plain]
        for completion in result.completions:
            assert completion.finish_reason == (
                "stop" if completion.tokens[-1] in ids else "length"
            )
            assert sum(completion.emitted) == len(completion.tokens)
        assert [c.finish_reason for c in result.completions[:2]] == ["stop", "stop"]

    def test_a_set_for_each_prompt(self, target, plain):
        sets = [(), (plain[1].tokens[4],), (200, 201, 202)]
        result = specjax.generate(target, prompts=PROMPTS, max_new_tokens=40, eos_ids=sets)
        assert tokens(result) == [self.cut(c, ids) for c, ids in zip(plain, sets, strict=True)]
        assert [c.finish_reason for c in result.completions][:2] == ["length", "stop"]

    def test_the_models_own_by_default(self, target, plain):
        own = plain[0].tokens[6]
        model = dataclasses.replace(target, eos_ids=(own,))
        result = specjax.generate(model, prompts=PROMPTS, max_new_tokens=40)
        assert tokens(result) == [self.cut(c, [own]) for c in plain]
        assert result.completions[0].finish_reason == "stop"
        ignored = specjax.generate(model, prompts=PROMPTS, max_new_tokens=40, eos_ids=())
        assert tokens(ignored) == [c.tokens for c in plain]

    def test_the_last_token_of_the_budget_may_be_the_end(self, target, plain):
        token = plain[0].tokens[6]
        assert token not in plain[0].tokens[:6]
        for budget, reason in ((6, "length"), (7, "stop"), (8, "stop")):
            result = specjax.generate(
                target, prompts=PROMPTS, max_new_tokens=[budget, 1, 1], eos_ids=[(token,), (), ()]
            )
            assert result.completions[0].tokens == plain[0].tokens[: min(budget, 7)]
            assert result.completions[0].finish_reason == reason


class TestContextLimit:
    """Prompt and output together have at most `max_position_embeddings` tokens: 64 here."""

    def test_output_is_clipped(self, target, plain):
        prompts = [[9] * 60, [9] * 63, [5, 9, 7, 5, 9]]
        result = specjax.generate(target, "ngram", prompts, max_new_tokens=2**31 - 1)
        assert [len(c.tokens) for c in result.completions] == [4, 1, 59]
        assert {c.finish_reason for c in result.completions} == {"length"}
        assert result.completions[2].tokens[:40] == plain[1].tokens

    @pytest.mark.parametrize("length", [64, 65])
    def test_a_prompt_that_fills_the_context_is_rejected(self, target, length):
        message = f"prompt 1 has {length} tokens, but at most 63 fit: prompt and output share"
        with pytest.raises(SpecJAXError, match=message):
            specjax.generate(target, "ngram", [[1], [9] * length])

    def test_a_draft_model_with_a_shorter_context_changes_nothing(self, target, draft, plain):
        small = dataclasses.replace(
            draft, config=dataclasses.replace(draft.config, max_position_embeddings=8)
        )
        result = specjax.generate(
            target, prompts=PROMPTS, draft=small, max_new_tokens=40, eos_ids=(), **DRAFT_MODEL
        )
        assert tokens(result) == [c.tokens for c in plain]

    def test_2047_2048_and_2049_tokens(self, tmp_path):
        model = load(tmp_path / "model", max_position_embeddings=2048)
        prompt = np.random.default_rng(0).integers(4, 260, 2049).tolist()
        completion = specjax.generate(model, "none", [prompt[:2047]]).completions[0]
        assert (
            len(completion.prompt_tokens),
            len(completion.tokens),
            completion.finish_reason,
        ) == (2047, 1, "length")
        for length in (2048, 2049):
            with pytest.raises(
                SpecJAXError, match=f"prompt 0 has {length} tokens, but at most 2047 fit"
            ):
                specjax.generate(model, "none", [prompt[:length]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigrams(Drafter):
    """A custom drafter; its parameters [V] are the token that follows each token."""

    def propose(self, next_V, state, context, sample):
        token_B1 = jnp.take_along_axis(context.tokens_BS, context.length_B[:, None] - 1, axis=1)
        drafts = []
        for _ in range(self.num_tokens):
            token_B1 = next_V[token_B1]
            drafts.append(token_B1)
        return Draft(jnp.concatenate(drafts, axis=1)), state


def test_a_custom_drafter(target, plain):
    drafter = Bigrams(num_tokens=4)
    for followers, least in (
        (dict(zip(plain[0].tokens, plain[0].tokens[1:], strict=False)), 10),
        ({}, 0),
    ):
        table = np.zeros(target.config.vocab_size, np.int32)
        table[list(followers)] = list(followers.values())
        result = specjax.generate(
            target, drafter, PROMPTS, drafter_params=jnp.asarray(table), max_new_tokens=40
        )
        assert tokens(result) == [c.tokens for c in plain]
        assert sum(result.completions[0].accepted) >= least
        assert max(result.completions[0].drafted) == 4
    assert sum(result.completions[0].accepted) < 5, "the parameters made no difference"


def test_a_second_call_compiles_nothing(target):
    with compilations() as compiled:
        specjax.generate(
            target,
            "ngram",
            PROMPTS,
            max_new_tokens=10,
            page_size=32,
            temperature=1,
            top_k=9,
            top_p=0.5,
            min_p=0.1,
        )
    assert compiled, "compilation goes unseen: this test would prove nothing"
    with compilations() as compiled:
        result = specjax.generate(
            target,
            "ngram",
            OTHER_PROMPTS,
            max_new_tokens=[3, 11, 40],
            page_size=32,
            temperature=[0, 1, 2],
            top_k=5,
            top_p=0.9,
            min_p=0.01,
            seed=[3, 4, 5],
            eos_ids=[(1,), (1, 2, 3), ()],
        )
    assert not compiled
    assert [c.prompt_tokens for c in result.completions] == [
        batch.encode(target, prompt, "") for prompt in OTHER_PROMPTS
    ]


def test_the_loop_is_not_compiled_again_for_longer_prompts(target):
    """The chunk size of the prefill depends on the prompt length; the loop does not."""
    specjax.generate(target, "ngram", [[9] * 10], max_new_tokens=5)
    before = decode.generate_jit._cache_size()
    specjax.generate(target, "ngram", [[9] * 50], max_new_tokens=5)
    assert batch.prefill_chunk(10) != batch.prefill_chunk(50)
    assert decode.generate_jit._cache_size() == before


def test_a_model_without_tokenizer_takes_and_gives_ids(target, plain):
    model = dataclasses.replace(target, tokenizer=None)
    prompts = [c.prompt_tokens for c in plain]
    result = specjax.generate(model, "none", [*map(np.array, prompts)], max_new_tokens=5)
    assert [c.text for c in result.completions] == [None] * 3
    assert [c.prompt_tokens for c in result.completions] == prompts


GOOD = {"prompts": ["hello"], "drafter": "ngram"}
NO_PROMPT = "must be text, token ids or the messages of a chat, got"
NO_LIST = "prompts must be a list of prompts, got"
REJECTED = [
    # prompts
    ({"prompts": []}, "prompts is empty; at least one prompt is required"),
    ({"prompts": ["a", ""]}, "prompt 1 is empty"),
    ({"prompts": [[]]}, "prompt 0 is empty"),
    ({"prompts": "hello"}, f"{NO_LIST} 'hello'"),
    ({"prompts": b"hello"}, f"{NO_LIST} b'hello'"),
    ({"prompts": None}, f"{NO_LIST} None"),
    ({"prompts": {"role": "user", "content": "a"}}, NO_LIST + " {'role'"),
    ({"prompts": [1, 2]}, f"prompt 0 {NO_PROMPT} 1"),
    ({"prompts": CHAT}, f"prompt 0 {NO_PROMPT} {{'role'"),
    ({"prompts": [b"a"]}, f"prompt 0 {NO_PROMPT} b'a'"),
    ({"prompts": [[1.5]]}, f"prompt 0 {NO_PROMPT} [1.5]"),
    ({"prompts": [["a"]]}, f"prompt 0 {NO_PROMPT} ['a']"),
    ({"prompts": [[1, 267]]}, "prompt 0 has token id 267, but ids range from 0 to 266"),
    ({"prompts": ["a", [-1, 3]]}, "prompt 1 has token id -1, but ids range from 0 to 266"),
    ({"prompts": ["a\ud800"]}, "prompt 0 is not valid Unicode: "),
    ({"prompts": ["a", [{"role": "judge", "content": "a"}]]}, "prompt 1: "),
    ({"prompts": [[{"role": "judge", "content": "a"}]]}, "no role judge"),
    # options
    ({"max_new_tokens": 0}, "max_new_tokens must be in [1, 2**31), got 0"),
    ({"max_new_tokens": 2**63}, f"max_new_tokens must be in [1, 2**31), got {2**63}"),
    ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer, got 1.5"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
    ({"temperature": -0.1}, "temperature must be in [0, 1e+27], got -0.1"),
    ({"temperature": float("nan")}, "temperature must be in [0, 1e+27], got nan"),
    ({"temperature": 1e28}, "temperature must be in [0, 1e+27], got 1e+28"),
    ({"temperature": 1e39}, "temperature must be in [0, 1e+27], got inf"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"temperature": [1.0, -1.0], "prompts": ["a", "b"]}, "in [0, 1e+27], got -1.0"),
    ({"temperature": [1.0, 1.0]}, "temperature has 2 values for 1 prompts"),
    ({"top_k": -1}, "top_k must be in [0, 2**31), got -1"),
    ({"top_k": 2**31}, f"top_k must be in [0, 2**31), got {2**31}"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0"),
    ({"top_p": 1e-50}, "top_p must be in (0, 1], got 0.0"),
    ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
    ({"min_p": -0.5}, "min_p must be in [0, 1], got -0.5"),
    ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5"),
    ({"seed": -1}, "seed must be in [0, 2**32), got -1"),
    ({"seed": 2**32}, f"seed must be in [0, 2**32), got {2**32}"),
    ({"seed": [1, 2, 3], "prompts": ["a", "b"]}, "seed has 3 values for 2 prompts"),
    ({"seed": 0.5}, "seed must be an integer, got 0.5"),
    ({"eos_ids": 1}, "eos_ids must be a list of token ids, or one list per prompt, got 1"),
    ({"eos_ids": [288]}, "eos_ids has 288, but ids range from 0 to 266"),
    ({"eos_ids": [267]}, "eos_ids has 267, but ids range from 0 to 266"),  # padding
    ({"eos_ids": [[1], [-1]], "prompts": ["a", "b"]}, "eos_ids has -1, but ids range from 0"),
    ({"eos_ids": ["</s>"]}, "eos_ids has '</s>', but ids range from 0 to 266"),
    ({"eos_ids": [[1], [2]]}, "eos_ids has 2 sets for 1 prompts"),
    ({"eos_ids": [[1], 2], "prompts": ["a", "b"]}, "eos_ids must be a list of token ids, or one"),
    ({"top_k": [[1, 2], 3], "prompts": ["a", "b"]}, "top_k must be one value or one per prompt"),
    ({"page_size": 0}, "page_size must be an integer of at least 1, got 0"),
    ({"page_size": 1.5}, "page_size must be an integer of at least 1, got 1.5"),
    ({"verify": "foo"}, "verify must be one of rejection, coupled, got 'foo'"),
    # drafters
    ({"drafter": "foo"}, "unknown drafter 'foo'; choose from none, "),
    ({"drafter": "base"}, "unknown drafter 'base'"),
    ({"drafter": 3}, "drafter must be a name or a Drafter, got 3"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
    ({"num_speculative_tokens": 129}, "num_speculative_tokens must be at most 128, got 129"),
    ({"num_speculative_tokens": 20_000}, "must be at most 128, got 20000"),
    ({"num_speculative_tokens": "7"}, "num_speculative_tokens must be an integer, got '7'"),
    ({"drafter_options": {"n": 2}}, "drafter 'ngram' has no option 'n'; choose from: max_n, min_n"),
    ({"drafter_options": {"min_n": 0}}, "the drafter 'ngram' requires 1 <= min_n <= max_n <= 64"),
    ({"drafter_params": 1}, "drafter_params applies to a Drafter, but 'ngram' is given by name"),
    ({"drafter": "draft_model"}, "the drafter 'draft_model' requires "),
    ({"draft": "folder"}, "draft must come from specjax.load_drafter, got 'folder'"),
    ({"drafter": "none", "num_speculative_tokens": 2}, "'none' decodes without speculation"),
    ({"drafter": "none", "drafter_options": {"min_n": 2}}, "'none' decodes without speculation"),
    ({"drafter": Bigrams(num_tokens=2), "num_speculative_tokens": 2}, "apply to a drafter given"),
    ({"drafter": Bigrams(num_tokens=0)}, "must propose at least 1 token, got num_tokens=0"),
]


@pytest.mark.parametrize(("changes", "message"), REJECTED)
def test_invalid_arguments(target, changes, message):
    with pytest.raises(SpecJAXError, match=re.escape(message)) as raised:
        specjax.generate(target, **GOOD | changes)
    assert "\n" not in str(raised.value)


def test_a_target_must_be_loaded():
    with pytest.raises(SpecJAXError, match=r"must be a model from specjax\.load, got 'folder'"):
        specjax.generate("folder", **GOOD)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("ngram", "the drafter 'ngram' uses no draft model, but one was given"),
        ("none", "the drafter 'none' decodes without speculation; it takes no draft"),
        (
            Bigrams(num_tokens=2),
            "draft, num_speculative_tokens and drafter_options apply to a drafter given by name",
        ),
    ],
)
def test_an_unused_draft_model_is_rejected(target, draft, drafter, message):
    with pytest.raises(SpecJAXError, match=message):
        specjax.generate(target, drafter, ["hello"], draft=draft)


def test_text_needs_a_tokenizer(target):
    model = dataclasses.replace(target, tokenizer=None)
    message = f"prompt 0 is text, but {target.path} has no tokenizer; use token ids instead"
    for prompt in ("hello", CHAT):
        with pytest.raises(SpecJAXError, match=re.escape(message)):
            specjax.generate(model, "none", [prompt])
    with pytest.raises(
        SpecJAXError, match="prompt 0 has token id 288, but ids range from 0 to 287"
    ):
        specjax.generate(model, "none", [[287, 288]])


def test_a_chat_needs_a_template(target):
    tokenizer = dataclasses.replace(target.tokenizer, chat_template=None)
    with pytest.raises(SpecJAXError, match="no chat template"):
        specjax.generate(dataclasses.replace(target, tokenizer=tokenizer), "none", [CHAT])


def test_different_vocabularies_are_rejected(target, draft, tmp_path):
    config = {"num_hidden_layers": 1, "vocab_size": 300}
    larger = specjax.load(folders.write_folder(tmp_path / "larger", config))
    with pytest.raises(SpecJAXError, match="different vocabularies: target 288, draft 300 tokens"):
        specjax.generate(target, prompts=["hello"], draft=larger, **DRAFT_MODEL)
    backend = folders.backend()
    backend.add_tokens(["extra"])
    other = dataclasses.replace(
        draft, tokenizer=dataclasses.replace(draft.tokenizer, backend=backend)
    )
    with pytest.raises(
        SpecJAXError,
        match=r"target 288, draft 288 tokens; tokenizers 267 and 268.*'extra' is absent",
    ):
        specjax.generate(target, prompts=["hello"], draft=other, **DRAFT_MODEL)


class TestIncompleteCharacters:
    """Models whose greedy text after "a" is "€€€...", three tokens each: E2 82 AC."""

    @pytest.fixture(params=["byte-level", "byte-fallback"])
    def euro(self, request, target):
        """The model, and the ids of "a" and of the three bytes."""
        tokenizer = target.tokenizer
        if request.param == "byte-fallback":
            tokenizer = Tokenizer(folders.byte_fallback_backend())
            names = ["a", "<0xE2>", "<0x82>", "<0xAC>"]
        else:
            names = ["a", *tokenizer.backend.encode("€", add_special_tokens=False).tokens]
        a, *bytes_ = [tokenizer.token_ids[name] for name in names]
        followers = {a: bytes_[0], **dict(zip(bytes_, bytes_[1:] + bytes_[:1], strict=True))}
        return with_followers(target, followers, tokenizer), [a], bytes_

    @staticmethod
    def check_texts(model, prompt, options, expected):
        """Checks that final and streamed texts are equal, with one token per call and with one
        call."""
        stream, pieces, ids = model.tokenizer.stream(), [], []

        def on_tokens(index, new, from_draft, is_last):
            ids.extend(new)
            pieces.extend(stream.push([token]) for token in new)
            if is_last:
                pieces.append(stream.flush())

        options |= {"num_speculative_tokens": 2, "on_tokens": on_tokens}
        result = specjax.generate(model, "ngram", [prompt], **options)
        completion = result.completions[0]
        assert completion.text == "".join(pieces) == expected
        assert list(completion.tokens) == ids
        return ids

    @pytest.mark.parametrize("budget", range(1, 8))
    def test_a_budget_that_ends_inside_one(self, euro, budget):
        model, prompt, bytes_ = euro
        ids = self.check_texts(model, prompt, {"max_new_tokens": budget}, "€" * (budget // 3))
        assert ids == (bytes_ * 3)[:budget]

    def test_an_end_of_sequence_token_inside_one(self, euro):
        model, prompt, bytes_ = euro
        ids = self.check_texts(model, prompt, {"eos_ids": [bytes_[1]]}, "")
        assert ids == bytes_[:2]


class TestNumSpeculativeTokens:
    """At most as many drafts as can be emitted."""

    @pytest.fixture
    def configs(self, monkeypatch):
        """Records the configuration of every engine."""
        found, make = [], generation.Engine

        def recorded(*arguments, **options):
            engine = make(*arguments, **options)
            found.append(engine.config)
            return engine

        monkeypatch.setattr(generation, "Engine", recorded)
        return found

    @pytest.mark.parametrize(
        ("prompts", "max_new_tokens", "expected"),
        [
            (PROMPTS, 5, 4),
            (PROMPTS, [5, 9, 1], 8),
            (PROMPTS, 1, 1),
            ([[9] * 60], 128, 3),  # a context of 64
        ],
    )
    def test_they_are_cut_to_what_can_be_emitted(
        self, target, configs, prompts, max_new_tokens, expected
    ):
        options = {"max_new_tokens": max_new_tokens, "num_speculative_tokens": 128}
        result = specjax.generate(target, "ngram", prompts, **options)
        assert [config.drafter.num_tokens for config in configs] == [expected]
        assert max(max(c.drafted) for c in result.completions) <= expected

    def test_a_number_that_can_be_emitted_is_not_cut(self, target, configs):
        specjax.generate(target, "ngram", PROMPTS, max_new_tokens=9, num_speculative_tokens=8)
        assert [config.drafter.num_tokens for config in configs] == [8]

    def test_texts_do_not_change(self, target, draft, configs):
        """A `Drafter` keeps its K; its texts, drafts and acceptance equal those of the smaller
        K."""
        options = {
            "prompts": PROMPTS * 2,
            "max_new_tokens": [3, 2, 1, 3, 2, 3],
            "temperature": [0.0, 0.0, 0.0, 2.0, 2.0, 2.0],
        }
        whole = registry.make("draft_model", 4, target.config, draft.config)
        expected = specjax.generate(target, whole, drafter_params=draft.params, **options)
        cut = specjax.generate(
            target, "draft_model", draft=draft, num_speculative_tokens=4, **options
        )
        assert [config.drafter.num_tokens for config in configs] == [4, 2]
        assert cut.completions == expected.completions


def test_penalties_and_stop_strings(target):
    """They change the text as they do in an engine."""
    options = dict(prompts=PROMPTS[:1], max_new_tokens=24)
    (free,) = specjax.generate(target, "ngram", **options).completions
    (penalised,) = specjax.generate(
        target, "ngram", repetition_penalty=[50.0], **options
    ).completions
    assert len(set(penalised.tokens)) > len(set(free.tokens))
    stop = free.text[len(free.text) // 2 :][:2]
    (stopped,) = specjax.generate(target, "ngram", stop=["never", stop], **options).completions
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop" and len(stopped.tokens) < len(free.tokens)
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert sum(stopped.emitted) == len(stopped.tokens)
    with pytest.raises(SpecJAXError, match="prompt 0: min_tokens must be at most the 24 tokens"):
        specjax.generate(target, "ngram", min_tokens=25, **options)


class TestDuplicateBos:
    """Texts that begin with the BOS token, with a tokenizer that adds one."""

    @pytest.mark.parametrize(
        ("text", "num_bos"), [("<s>hello", 1), ("<s><s>hello", 2), ("<s>", 1), ("<s> hello", 1)]
    )
    def test_one_is_dropped_with_a_warning(self, target, text, num_bos):
        with pytest.warns(SpecJAXWarning, match="^prompt 1 begins with '<s>', which the tokenizer"):
            result = specjax.generate(target, "none", ["a", text], max_new_tokens=1)
        expected = target.tokenizer.encode(text, add_special_tokens=False)
        assert list(result.completions[1].prompt_tokens) == expected
        assert expected.count(target.tokenizer.bos_id) == num_bos

    @pytest.mark.parametrize("text", ["hello", "hello<s>", " <s>hello"])
    def test_other_texts_do_not_change(self, target, text):
        assert list(batch.encode(target, text, "it")) == target.tokenizer.encode(text)

    def test_a_chat_has_the_bos_token_of_its_template(self, target):
        ids = batch.encode(target, CHAT, "it")
        assert ids.count(target.tokenizer.bos_id) == 1

    def test_a_tokenizer_without_a_bos_token(self, target):
        backend = folders.backend()
        backend.post_processor = processors.TemplateProcessing(single="$A")
        tokenizer = dataclasses.replace(target.tokenizer, backend=backend)
        for text in ("<s>hello", "<s><s>hello"):
            assert batch.encode_text(tokenizer, text, "it") == tokenizer.encode(text)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_valid_temperatures_never_sample_a_token_of_probability_0(top_p):
    """A larger temperature would: the passes over the vocabulary represent -inf as -1e30."""
    num_rows, V = 512, 8
    logits_BTV = jnp.where(jnp.arange(V) < 4, 0.0, -jnp.inf) * jnp.ones((num_rows, 1, 1))

    def sampled(temperature):
        params = SamplingOptions(temperature, top_p=top_p, seed=np.arange(num_rows))
        arrays = jax.device_put(batch.sampling_arrays(params, num_rows))
        position_BT = jnp.zeros((num_rows, 1), jnp.int32)
        stream = sampling.Stream.TARGET
        token_BT, _ = sampling.sample(Runtime(), logits_BTV, arrays, position_BT, stream)
        return set(np.unique(token_BT))

    kept = {0, 1, 2, 3}
    for temperature in (1.0, 1e6, 1e20, batch.MAX_TEMPERATURE):
        assert sampled(temperature) == kept
    with pytest.MonkeyPatch.context() as patch:
        unbounded = batch.RANGES["temperature"]._replace(high=np.inf)
        patch.setitem(batch.RANGES, "temperature", unbounded)
        assert sampled(1e32) > kept


class TestArrays:
    """`batch`: prompts to arrays."""

    def test_lengths_padding_and_sets(self):
        tokens_BS, request = batch.arrays(
            [[5, 6, 7], [8]], max_length=[10, 20], eos_ids=[[1], [2, 3]], max_seq_len=24
        )
        assert tokens_BS.tolist() == [[5, 6, 7] + [0] * 21, [8] + [0] * 23]
        assert request.prompt_length_B.tolist() == [3, 1]
        assert request.max_length_B.tolist() == [10, 20]
        assert request.eos_BE.tolist() == [[1] + [-1] * 7, [2, 3] + [-1] * 6]
        assert request.sampling.temperature_B is None
        assert {x.dtype for x in (tokens_BS, *jax.tree.leaves(request))} == {
            np.dtype(np.int32),
            np.dtype(np.uint32),  # of the seeds
        }

    def test_padding_rows_emit_nothing(self):
        sampled = SamplingOptions(temperature=[0.5, 1.0], seed=[3, 4])
        tokens_BS, request = batch.arrays(
            [[5], [6]], max_length=9, sampling=sampled, num_rows=4, max_seq_len=9
        )
        assert tokens_BS[:, 0].tolist() == [5, 6, 6, 6]
        assert request.max_length_B.tolist() == [9, 9, 0, 0]
        assert request.sampling.temperature_B.tolist() == [0.5, 1.0, 1.0, 1.0]
        assert request.sampling.seed_B.tolist() == [3, 4, 4, 4]

    def test_the_size_is_a_bucket_by_default(self):
        assert batch.arrays([[5]], max_length=[129]).tokens_BS.shape == (1, batch.bucket(129))

    def test_a_prompt_that_is_too_long(self):
        with pytest.raises(SpecJAXError, match="a prompt has 5 tokens, but max_seq_len is 4"):
            batch.arrays([[1] * 5], max_length=4, max_seq_len=4)


def test_buckets_are_large_enough_and_few():
    sizes = [batch.bucket(n) for n in range(1, 20_000)]
    assert all(n <= size <= max(1.25 * n, n + 127) for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 40
    assert all(batch.bucket(size) == size for size in set(sizes))


def test_prompts_are_read_in_chunks_of_few_sizes():
    chunks = [batch.prefill_chunk(n) for n in range(1, 3000)]
    assert chunks == sorted(chunks)
    assert set(chunks) == {16, 32, 64, 128, 256}
    assert all(chunk >= n for n, chunk in enumerate(chunks[:256], 1))


@pytest.mark.parametrize(("name", "dtype"), [("top_k", np.int64), ("temperature", np.float32)])
def test_per_prompt_gives_one_value_for_each(name, dtype):
    for value in (2, [2, 2, 2], (2, 2, 2), np.int32(2), jnp.full(3, 2)):
        array = batch.per_prompt(name, value, 3)
        assert (array.tolist(), array.dtype) == ([2, 2, 2], dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drafter": "none"}, "bfloat16 or float16, got float32"),
        ({"drafter": "none", "page_size": 48}, "bfloat16 or float16"),
    ],
)
def test_kernels_that_cannot_run_a_model_are_rejected_with_the_reason(target, options, reason):
    refused = pytest.raises(SpecJAXError, match=f"'mosaic_gpu' cannot run here.*{reason}")
    with dispatch.compiling_for(dispatch.HOPPER), refused:
        specjax.generate(target, prompts=[[1, 2]], implementation="mosaic_gpu", **options)


@pytest.mark.parametrize("option", ["implementation", "target", "name"])
def test_parameters_of_a_drafter_are_rejected_as_options(target, option):
    with pytest.raises(SpecJAXError, match=f"has no option '{option}'"):
        specjax.generate(target, "ngram", [[1, 2]], drafter_options={option: 1})


def test_nan_logits_of_the_target_are_an_error_with_the_position(target):
    embed_VD = target.params["embed_VD"].at[97].set(jnp.nan)
    damaged = dataclasses.replace(target, params={**target.params, "embed_VD": embed_VD})
    with pytest.raises(
        SpecJAXError, match="prompt 1: the target's logits at position 3 are NaN or all -inf"
    ):
        specjax.generate(damaged, "none", [[5, 9, 7], [5, 97, 7]], max_new_tokens=4)


def test_nan_logits_of_a_draft_model_are_counted_and_change_nothing(target, draft, plain):
    embed_VD = draft.params["embed_VD"].at[:].set(jnp.nan)
    damaged = dataclasses.replace(draft, params={**draft.params, "embed_VD": embed_VD})
    result = specjax.generate(
        target, **DRAFT_MODEL, prompts=PROMPTS, draft=damaged, max_new_tokens=12
    )
    assert tokens(result) == [c.tokens[:12] for c in plain]
    for completion in result.completions:
        assert completion.unusable_drafts == sum(completion.drafted) > 0


def test_loading_and_generating_work_under_strict_settings(target, tmp_path):
    """No promotion of dtypes or ranks and no implicit transfer, on one device and on a mesh."""
    texts = []
    for mesh in (None, parallel.make_mesh(2, 1, 1)):
        with (
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("raise"),
            jax.transfer_guard("disallow"),
        ):
            model = specjax.load(target.path, mesh=mesh)
            result = specjax.generate(
                model, "ngram", [[5, 9, 7, 5, 9]], max_new_tokens=6, temperature=0.9, top_p=0.9
            )
        texts.append(tokens(result))
    assert texts[0] == texts[1]
