"""`specjax.generate` on small models: what people give it, what they get back, and what they are
told."""

import collections
import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Draft, Drafter, SpecJAXError, decode
from specjax.engine import batch
from specjax.engine import generate as generation
from specjax.kernels import dispatch
from support import folders
from support.loop import compilations

CHAT = [{"role": "user", "content": "hello hello"}]
PROMPTS = ["hello world hello", [5, 9, 7, 5, 9], CHAT]  # ragged: a text, ids, a chat
OTHER_PROMPTS = ["other", [80, 81, 82, 83, 84, 85, 86], [{"role": "user", "content": "or"}]]
DRAFT_MODEL = {"drafter": "draft_model", "num_speculative_tokens": 2}


def arrays(noise: float = 0.0) -> dict:
    """Weights of one layer; noise makes those of a draft. The text soon repeats itself, since
    attention counts for little and two dozen tokens are likelier than all the others."""
    result, other = (folders.tensors({"num_hidden_layers": 1}, seed=seed) for seed in (0, 1))
    result["model.layers.0.self_attn.o_proj.weight"] *= 0.02
    result["lm_head.weight"][[*range(4), *range(25, 288)]] *= 0.2  # special tokens, and most others
    return {name: array + np.float32(noise) * other[name] for name, array in result.items()}


def load(path, noise=0.0, **config):
    config = {"num_hidden_layers": 1} | config
    return specjax.load(folders.write_folder(path, config, arrays(noise)))


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


def test_k_on_a_cpu_depends_on_whether_drafts_cost_anything(target, draft):
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
    "arguments", [{"drafter": "ngram", "verify": "rejection"}, DRAFT_MODEL | {"verify": "coupled"}]
)
def test_a_batch_equals_its_prompts_alone(target, draft, arguments):
    """Every option differs from row to row, so that a value of one row that reaches another shows."""
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
    def test_a_prompt_that_leaves_no_room_is_refused(self, target, length):
        message = f"prompt 1 has {length} tokens; it may have at most 63, since prompt and output together may have 64"
        with pytest.raises(SpecJAXError, match=message):
            specjax.generate(target, "ngram", [[1], [9] * length])

    def test_a_draft_model_of_shorter_context_changes_nothing(self, target, draft, plain):
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
                SpecJAXError, match=f"prompt 0 has {length} tokens; it may have at most 2047"
            ):
                specjax.generate(model, "none", [prompt[:length]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigrams(Drafter):
    """A user's own drafter: its parameters [V] are the token that follows each token."""

    def propose(self, next_V, state, context, sample):
        token_B1 = jnp.take_along_axis(context.tokens_BS, context.length_B[:, None] - 1, axis=1)
        drafts = []
        for _ in range(self.num_tokens):
            token_B1 = next_V[token_B1]
            drafts.append(token_B1)
        return Draft(jnp.concatenate(drafts, axis=1)), state


def test_a_drafter_of_ones_own(target, plain):
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


def test_the_length_of_a_prompt_decides_nothing_in_the_loop(target):
    """Prompts are read in chunks of a size that follows their length; the loop has nothing to do
    with it."""
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # prompts
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": ["a", ""]}, "prompt 1 is empty"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": "hello"}, "prompts must be a list, if only of one prompt; got 'hello'"),
        (
            {"prompts": {"role": "user", "content": "a"}},
            "prompts must be a list, if only of one prompt; got {'role'",
        ),
        (
            {"prompts": [1, 2]},
            "prompt 0 must be a text, token ids or the messages of a chat, got 1",
        ),
        (
            {"prompts": CHAT},
            "prompt 0 must be a text, token ids or the messages of a chat, got {'role'",
        ),
        (
            {"prompts": [b"a"]},
            "prompt 0 must be a text, token ids or the messages of a chat, got b'a'",
        ),
        (
            {"prompts": [[1.5]]},
            "prompt 0 must be a text, token ids or the messages of a chat, got [1.5]",
        ),
        (
            {"prompts": [["a"]]},
            "prompt 0 must be a text, token ids or the messages of a chat, got ['a']",
        ),
        ({"prompts": [[1, 267]]}, "prompt 0 has the token id 267; ids go from 0 to 266"),
        ({"prompts": ["a", [-1, 3]]}, "prompt 1 has the token id -1; ids go from 0 to 266"),
        ({"prompts": ["a\ud800"]}, "prompt 0 is not valid Unicode: "),
        (
            {"prompts": [[{"role": "judge", "content": "a"}]]},
            "the chat template refused the messages: no role judge",
        ),
        # options
        ({"max_new_tokens": 0}, "max_new_tokens must be in [1, 2**31), got 0"),
        ({"max_new_tokens": 2**63}, f"max_new_tokens must be in [1, 2**31), got {2**63}"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number, got 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number, got True"),
        ({"temperature": -0.1}, "temperature must be at least 0 and finite, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": 1e39}, "temperature must be at least 0 and finite, got inf"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        (
            {"temperature": [1.0, -1.0], "prompts": ["a", "b"]},
            "temperature must be at least 0 and finite, got -1.0",
        ),
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
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"eos_ids": [288]}, "eos_ids has 288; ids go from 0 to 287"),
        ({"eos_ids": [[1], [-1]], "prompts": ["a", "b"]}, "eos_ids has -1; ids go from 0 to 287"),
        ({"eos_ids": [[1], [2]]}, "eos_ids has 2 sets for 1 prompts"),
        ({"page_size": 0}, "page_size must be a whole number of at least 1, got 0"),
        # drafters
        ({"drafter": "foo"}, "drafter 'foo' does not exist; there is: none, "),
        ({"drafter": "base"}, "drafter 'base' does not exist"),
        ({"verify": "foo"}, "verify must be one of rejection, coupled, got 'foo'"),
        (
            {"num_speculative_tokens": 0},
            "the number of speculative tokens must be at least 1, got 0",
        ),
        ({"drafter_options": {"n": 2}}, "drafter 'ngram' has no option 'n'; it has: max_n, min_n"),
        (
            {"drafter_options": {"min_n": 0}},
            "the drafter 'ngram' needs 1 <= min_n <= max_n <= 64, got min_n=0 and max_n=4",
        ),
        (
            {"drafter_params": 1},
            "drafter_params is for a Drafter of your own; the drafter 'ngram' takes none",
        ),
        (
            {"drafter": "draft_model"},
            "the drafter 'draft_model' needs a draft model, and none was given",
        ),
        (
            {"drafter": "none", "num_speculative_tokens": 2},
            "the drafter 'none' decodes without speculation",
        ),
        (
            {"drafter": "none", "drafter_options": {"min_n": 2}},
            "the drafter 'none' decodes without speculation",
        ),
        (
            {"drafter": Bigrams(num_tokens=2), "num_speculative_tokens": 2},
            "drafter_options are for a drafter given by name",
        ),
        (
            {"drafter": Bigrams(num_tokens=0)},
            "a drafter must propose at least 1 token, got num_tokens=0",
        ),
    ],
)
def test_what_cannot_be_used_is_named(target, changes, message):
    with pytest.raises(SpecJAXError, match=re.escape(message)) as raised:
        specjax.generate(target, **GOOD | changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("ngram", "the drafter 'ngram' uses no draft model, but one was given"),
        ("none", "the drafter 'none' decodes without speculation: it takes no draft model"),
        (
            Bigrams(num_tokens=2),
            "draft, num_speculative_tokens and drafter_options are for a drafter given by name",
        ),
    ],
)
def test_a_draft_model_that_is_not_wanted_is_refused(target, draft, drafter, message):
    with pytest.raises(SpecJAXError, match=message):
        specjax.generate(target, drafter, ["hello"], draft=draft)


def test_text_needs_a_tokenizer(target):
    model = dataclasses.replace(target, tokenizer=None)
    message = f"prompt 0 is text, and {target.path} has no tokenizer: give token ids"
    for prompt in ("hello", CHAT):
        with pytest.raises(SpecJAXError, match=re.escape(message)):
            specjax.generate(model, "none", [prompt])
    with pytest.raises(SpecJAXError, match="prompt 0 has the token id 288; ids go from 0 to 287"):
        specjax.generate(model, "none", [[287, 288]])


def test_a_chat_needs_a_template(target):
    tokenizer = dataclasses.replace(target.tokenizer, chat_template=None)
    with pytest.raises(SpecJAXError, match="no chat template"):
        specjax.generate(dataclasses.replace(target, tokenizer=tokenizer), "none", [CHAT])


def test_different_vocabularies_are_refused(target, draft, tmp_path):
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


def test_buckets_hold_and_are_few():
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


def test_per_prompt_gives_one_value_for_each():
    for value in (2, [2, 2, 2], (2, 2, 2), np.int32(2), jnp.full(3, 2)):
        for kind, dtype in ((int, np.int64), (float, np.float32)):
            array = generation.per_prompt("x", value, 3, kind, lambda x: x > 0, "positive")
            assert (array.tolist(), array.dtype) == ([2, 2, 2], dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drafter": "none"}, "bfloat16 or float16, and these are float32"),
        ({"drafter": "none", "page_size": 48}, "bfloat16 or float16"),
    ],
)
def test_kernels_that_cannot_run_a_model_are_refused_with_the_reason(target, options, reason):
    refused = pytest.raises(SpecJAXError, match=f"'mosaic_gpu' cannot run here.*{reason}")
    with dispatch.compiling_for(dispatch.HOPPER), refused:
        specjax.generate(target, prompts=[[1, 2]], implementation="mosaic_gpu", **options)


@pytest.mark.parametrize("option", ["implementation", "target", "name"])
def test_parameters_of_a_drafter_are_not_its_options(target, option):
    with pytest.raises(SpecJAXError, match=f"has no option '{option}'"):
        specjax.generate(target, "ngram", [[1, 2]], drafter_options={option: 1})


def test_a_target_whose_logits_are_not_numbers_is_an_error_that_says_where(target):
    embed_VD = target.params["embed_VD"].at[97].set(jnp.nan)
    damaged = dataclasses.replace(target, params={**target.params, "embed_VD": embed_VD})
    with pytest.raises(
        SpecJAXError, match="prompt 1: the target's logits at position 3 are NaN or all -inf"
    ):
        specjax.generate(damaged, "none", [[5, 9, 7], [5, 97, 7]], max_new_tokens=4)


def test_drafts_of_a_damaged_draft_model_are_counted_and_change_nothing(target, draft, plain):
    embed_VD = draft.params["embed_VD"].at[:].set(jnp.nan)
    damaged = dataclasses.replace(draft, params={**draft.params, "embed_VD": embed_VD})
    result = specjax.generate(
        target, **DRAFT_MODEL, prompts=PROMPTS, draft=damaged, max_new_tokens=12
    )
    assert tokens(result) == [c.tokens[:12] for c in plain]
    for completion in result.completions:
        assert completion.unusable_drafts == sum(completion.drafted) > 0
