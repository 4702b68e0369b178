"""What every drafter must keep to: found by its name, it changes nothing of the text or its
distribution, and compiles once."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, kv_cache
from specjax.config import Runtime
from specjax.drafters import registry
from specjax.drafters.base import Context
from specjax.errors import SpecJAXError
from specjax.verify import METHODS
from support.distributions import chi_square_p, reference_distribution
from support.loop import GENERATE, compilations, prepare, run
from support.models import full_logits, make_drafter, similar, tiny, tiny_head

TARGET, DRAFT = tiny(6), similar(6)
B = 12
# Half of them repeat themselves, so that prompt lookup has something to say.
PROMPTS = [
    (np.random.default_rng(row).integers(0, 32, length).tolist() * 3)[:17][
        : None if row % 2 else length
    ]
    for row, length in enumerate([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17])
]
MAX_NEW = [30, 24, 9, 30, 20, 17, 25, 28, 12, 1, 22, 30]
TEMPERATURE = [0, 1, 0.7, 0, 0.5, 1, 0.3, 0, 2, 1, 0.1, 0]
SAMPLING = dict(
    temperature=TEMPERATURE,
    seed=list(range(B)),
    top_k=[0, 0, 5, 3, 9, 0, 0, 0, 2, 0, 4, 0],
    top_p=[1, 1, 1, 0.5, 0.8, 0.9, 1, 1, 1, 1, 0.95, 0.1],
    min_p=[0, 0, 0, 0, 0, 0, 0.1, 0, 0, 0.2, 0.05, 0],
)


@functools.cache
def plain():
    return run(TARGET, PROMPTS, max_new=MAX_NEW, page_size=48, **SAMPLING)


NAMES = [*registry.names(), "ngram,eagle", "ngram,draft_model"]
SIZES = [(3, 4), (2, 3)]  # K and page size


def text_cases():
    """Drafter, way of verifying, K and page size: each drafter both ways and at both sizes. All
    sizes both ways for a draft model, whose own cache has pages too, are slow."""
    cases = []
    for index, name in enumerate(NAMES):
        for offset, (K, page_size) in enumerate(SIZES):
            mode = METHODS[(index + offset) % len(METHODS)]
            cases.append((name, mode, K, page_size))
    slow = [("draft_model", mode, K, page) for mode in METHODS for K, page in [*SIZES, (5, 48)]]
    marked = [pytest.param(*case, marks=pytest.mark.slow) for case in slow if case not in cases]
    return cases + marked


def wait_cases():
    """Each drafter, and none, in one way of verifying; the other one is slow."""
    cases = []
    for index, name in enumerate(["none", *NAMES]):
        for offset, mode in enumerate(METHODS):
            marks = [pytest.mark.slow] if (index + offset) % 2 else []
            cases.append(pytest.param(name, mode, marks=marks))
    return cases


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def is_pool(x, num_pages):
    return x.ndim > 2 and x.shape[0] == num_pages


def check_unchanged(before, after, rows_B):
    """Everything that a state has of some rows is as it was, bit for bit."""
    P, pages = before.cache.num_pages, before.block_table_BX[rows_B]
    pages = pages[pages < P]

    def check(a, b):
        chosen = pages if is_pool(a, P) else rows_B
        np.testing.assert_array_equal(a[chosen], np.asarray(b)[chosen])

    jax.tree.map(check, before, after)


PREFILL = jax.jit(decode.prefill, static_argnums=(2, 7))


class TestEveryDrafter:
    @pytest.mark.parametrize(("name", "mode", "K", "page_size"), text_cases())
    def test_the_text_is_that_of_plain_decoding(self, name, mode, K, page_size):
        """Of greedy rows in both modes; of all rows, however they sample, where drafts are coupled
        to the target."""
        drafter, params = make_drafter(name, K, TARGET, DRAFT)
        got = run(
            TARGET,
            PROMPTS,
            drafter=drafter,
            draft_params=params,
            max_new=MAX_NEW,
            verify=mode,
            page_size=page_size,
            **SAMPLING,
        )
        same = [row for row in range(B) if mode == "coupled" or TEMPERATURE[row] == 0]
        assert [got.emitted[row] for row in same] == [plain().emitted[row] for row in same]
        assert [len(emitted) for emitted in got.emitted] == MAX_NEW
        self.check_counts(got.state, K)
        assert (
            got.state.log.accepted_BS.sum() > 0
            and (got.state.log.accepted_BS < got.state.log.drafted_BS).any()
        )

    def check_counts(self, state, K):
        rounds = np.arange(state.tokens_BS.shape[1]) < np.asarray(state.log.rounds_B)[:, None]
        drafted_BS, accepted_BS, emitted_BS = map(
            np.asarray, (state.log.drafted_BS, state.log.accepted_BS, state.log.emitted_BS)
        )
        assert (accepted_BS <= drafted_BS).all() and (drafted_BS <= K).all()
        np.testing.assert_array_equal(emitted_BS, np.where(rounds, accepted_BS + 1, 0))
        np.testing.assert_array_equal(
            emitted_BS.sum(axis=1), state.length_B - state.request.prompt_length_B
        )

    @pytest.mark.parametrize(("name", "mode"), wait_cases())
    def test_rows_that_wait_for_pages_lose_nothing(self, name, mode):
        """The host grants pages bit by bit, at random. A row without room for a round waits, and
        nothing of it changes meanwhile. In the end texts and counts are those of a run that had
        all pages from the start."""
        K = 0 if name == "none" else 3
        drafter, params = make_drafter(name, K, TARGET, DRAFT) if K else (None, None)
        options = dict(drafter=drafter, draft_params=params, max_new=MAX_NEW, verify=mode)
        whole = run(TARGET, PROMPTS, **options, **SAMPLING).state
        *arguments, state = prepare(TARGET, PROMPTS, **options, **SAMPLING)
        rng, Z, P = np.random.default_rng(0), state.cache.page_size, state.cache.num_pages
        table_BX = np.asarray(state.block_table_BX)
        pages_B = -(-np.asarray(state.length_B) // Z)  # of the prompts
        waits = 0
        while state.active_B.any():
            pages_B = np.minimum(pages_B + rng.integers(0, 2, B), table_BX.shape[1])
            held_BX = np.arange(table_BX.shape[1]) < pages_B[:, None]
            state = state.replace(
                block_table_BX=jnp.asarray(np.where(held_BX, table_BX, P), jnp.int32),
                capacity_B=jnp.asarray(pages_B * Z, jnp.int32),
            )
            before = jax.tree.map(np.array, state)
            state = GENERATE(*arguments, state)
            paused_B = before.active_B & (before.length_B + K > pages_B * Z)
            waits += (paused_B & (state.log.rounds_B > before.log.rounds_B).any()).sum()
            check_unchanged(before, state, paused_B)
            fits_B = np.asarray(state.length_B) + K <= pages_B * Z
            assert not (state.active_B & fits_B).any()
        assert waits > 20
        np.testing.assert_array_equal(state.tokens_BS, whole.tokens_BS)
        jax.tree.map(np.testing.assert_array_equal, state.log, whole.log)

    def test_rows_may_share_pages_in_any_order_of_a_larger_pool(self, name):
        """Prompts with the same beginning, whose full pages are held once. All rows but the first
        read their prompts from there on, whatever they did before; all other pages are NaN."""
        beginning = np.random.default_rng(1).integers(0, 32, 9).tolist()
        prompts = [beginning + prompt for prompt in PROMPTS[:6]] * 2
        drafter, params = make_drafter(name, 3, TARGET, DRAFT)
        options = dict(drafter=drafter, draft_params=params, max_new=22, **SAMPLING)
        whole = run(TARGET, prompts, **options)
        *arguments, state = prepare(TARGET, prompts, **options)
        P, spare = state.cache.num_pages, 7
        order_P = np.random.default_rng(2).permutation(P + spare)[:P]
        table_BX = order_P[np.asarray(state.block_table_BX)]
        own = table_BX[1:].copy()
        table_BX[1:, : 8 // state.cache.page_size] = table_BX[0, : 8 // state.cache.page_size]

        def move(pool):
            moved = np.full((P + spare, *pool.shape[1:]), np.nan, pool.dtype)
            moved[order_P] = pool
            moved[own] = np.nan
            return jnp.asarray(moved)

        def change(x):
            return move(x) if is_pool(x, P) else x.at[1:].set(41)

        state = state.replace(
            block_table_BX=jnp.asarray(table_BX, jnp.int32),
            cache=jax.tree.map(change, state.cache),
            drafter=jax.tree.map(change, state.drafter),
        )
        is_new_B = np.arange(len(prompts)) > 0
        start_B = jnp.full(len(prompts), 8)
        state = PREFILL(*arguments, state, is_new_B, start_B, state.length_B - 1 - start_B, 20)
        state = GENERATE(*arguments, state)
        np.testing.assert_array_equal(state.tokens_BS, whole.state.tokens_BS)
        jax.tree.map(np.testing.assert_array_equal, state.log, whole.state.log)

    def test_a_second_call_compiles_nothing_and_the_same_seed_gives_the_same_text(self, name):
        drafter, params = make_drafter(name, 3, TARGET, DRAFT)
        options = dict(draft_params=params, max_new=MAX_NEW, **SAMPLING)
        first = run(TARGET, PROMPTS, drafter=drafter, **options)
        again = make_drafter(name, 3, TARGET, DRAFT)[0]
        with compilations() as compiled:
            run(TARGET, [prompt[::-1] for prompt in PROMPTS], drafter=again, **options)
            assert run(TARGET, PROMPTS, drafter=again, **options).emitted == first.emitted
        assert not compiled

    def test_coupled_samples_equal_those_of_plain_decoding(self, name):
        """Token for token, for 2,048 seeds with filters and 2,048 without."""
        got = run_small(name, "coupled", 2_048)
        check_acceptance(got.state)
        assert got.emitted == run_small("none", "rejection", 2_048).emitted

    @pytest.mark.parametrize(
        "name",
        [
            "draft_model",
            "eagle",
            "ngram,eagle",
            pytest.param("ngram", marks=pytest.mark.slow),
            pytest.param("ngram,draft_model", marks=pytest.mark.slow),
        ],
    )
    def test_rejection_samples_from_the_targets_distribution(self, name):
        """Behind "ngram,eagle" there is a lookup, too."""
        check_small_distribution(run_small(name, "rejection", 20_480), 20_480)


def test_plain_decoding_samples_from_the_targets_distribution():
    check_small_distribution(run_small("none", "rejection", 20_480), 20_480)


# --- A small vocabulary, whose texts can be enumerated --------------------------------------------

SMALL_V, SMALL_PROMPT = 5, [0, 1, 2, 1]
SMALL_TARGET, SMALL_DRAFT = tiny(10, vocab_size=SMALL_V), tiny(11, vocab_size=SMALL_V)
SMALL_SAMPLING = [dict(temperature=2.5), dict(temperature=2.0, top_k=4, top_p=0.9, min_p=0.02)]


@functools.cache
def run_small(name, mode, trials):
    """Four tokens after the small prompt: `trials` rows for each entry of SMALL_SAMPLING."""
    drafter, params = None, None
    if name != "none":
        options = {"min_n": 1} if name == "ngram" else {}
        drafter, params = make_drafter(name, 3, SMALL_TARGET, SMALL_DRAFT, **options)
    columns = {}
    for key, default in dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0).items():
        columns[key] = np.repeat([part.get(key, default) for part in SMALL_SAMPLING], trials)
    return run(
        SMALL_TARGET,
        [SMALL_PROMPT] * (2 * trials),
        drafter=drafter,
        draft_params=params,
        max_new=4,
        verify=mode,
        seed=np.arange(2 * trials),
        capacity=8,
        **columns,
    )


def check_acceptance(state):
    """Some drafts were accepted and some were not."""
    accepted = np.asarray(state.log.accepted_BS).sum() / np.asarray(state.log.drafted_BS).sum()
    assert 0.1 < accepted < 0.95


@functools.cache
def small_distributions(depth):
    """For each entry of SMALL_SAMPLING, the probability of every text of `depth` tokens."""
    texts = np.array(list(itertools.product(range(SMALL_V), repeat=depth)))
    prompts = np.tile(SMALL_PROMPT, (len(texts), 1))
    logits = full_logits(SMALL_TARGET, np.concatenate([prompts, texts], axis=1))
    logits = logits[:, len(SMALL_PROMPT) - 1 :]
    distributions = []
    for sampling in SMALL_SAMPLING:
        probability = np.ones(len(texts))
        for i, text in enumerate(texts):
            for t, token in enumerate(text):
                probability[i] *= reference_distribution(logits[i, t], **sampling)[token]
        distributions.append(probability)
    return distributions


def check_small_distribution(got, trials, depth=3):
    """Chi-square over the joint distribution of three tokens, with and without filters; nothing
    outside a filter is emitted."""
    if got.state.log.drafted_BS.any():
        check_acceptance(got.state)
    tokens = np.array(got.emitted)[:, :depth].reshape(len(SMALL_SAMPLING), trials, depth)
    codes = tokens @ SMALL_V ** np.arange(depth)[::-1]
    for code, distribution in zip(codes, small_distributions(depth), strict=True):
        counts = np.bincount(code, minlength=SMALL_V**depth)
        assert counts[distribution == 0].sum() == 0
        assert (distribution > 0.002).sum() > 20
        assert chi_square_p(counts, distribution, trials) > 1e-3


def test_drafters_are_found_by_name_and_named_when_they_are_not():
    assert {"draft_model", "ngram"} <= set(registry.names())
    message = "unknown drafter 'crystal_ball'; choose from none, draft_model, eagle, ngram"
    with pytest.raises(SpecJAXError, match=message):
        registry.make("crystal_ball", 3, TARGET.config)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("ngram", 0, TARGET.config), {}, "num_speculative_tokens must be at least 1, got 0"),
        (("ngram", 3, TARGET.config), {"min_n": 3, "max_n": 2}, "min_n=3 and max_n=2"),
        (("ngram", 3, TARGET.config), {"min_n": 0}, "min_n=0"),
        (
            ("ngram", 3, TARGET.config),
            {"max_n": 4.5},
            "'max_n' of the drafter 'ngram' must be of type int, got 4.5",
        ),
        (
            ("ngram", 3, TARGET.config),
            {"window": 5},
            "'ngram' has no option 'window'; choose from: max_n, min_n",
        ),
        (("ngram", 3, TARGET.config, DRAFT.config), {}, "'ngram' uses no draft model"),
        (("draft_model", 3, TARGET.config), {}, "'draft_model' requires a draft model, got none"),
        (
            ("draft_model", 3, TARGET.config, DRAFT.config),
            {"min_n": 2},
            "'draft_model' has no option 'min_n'",
        ),
        (
            ("draft_model", 3, TARGET.config, tiny_head(TARGET)[0]),
            {},
            "requires a draft model, got an EAGLE head",
        ),
        (("eagle", 3, TARGET.config), {}, "'eagle' requires an EAGLE head, got none"),
        (
            ("ngram,eagle", 3, TARGET.config, DRAFT.config),
            {},
            "requires an EAGLE head, got a draft model",
        ),
        (
            ("eagle", 3, tiny(6, vocab_size=5).config, tiny_head(TARGET)[0]),
            {},
            "its vocabulary is 32, the target's 5",
        ),
        (
            ("eagle", 3, tiny(6, num_layers=2).config, tiny_head(TARGET)[0]),
            {},
            "its number of layers is 1, the target's 2",
        ),
        (
            ("eagle,ngram", 3, TARGET.config, tiny_head(TARGET)[0]),
            {},
            "'ngram' cannot follow another drafter",
        ),
        (("ngram,ngram", 3, TARGET.config), {}, "the same drafter twice"),
        (
            ("ngram,eagle", 3, TARGET.config, tiny_head(TARGET)[0]),
            {"may_rest": 1},
            "has no option 'may_rest'",
        ),
    ],
)
def test_drafters_that_cannot_be_are_refused(arguments, options, message):
    with pytest.raises(SpecJAXError, match=message):
        registry.make(*arguments, options=options)


def test_options_are_of_the_type_of_their_defaults(monkeypatch):
    module = types.SimpleNamespace(
        DRAFT_CONFIG=None, make=lambda k, target, draft, *, scale=1.0, word="a": (k, scale, word)
    )
    monkeypatch.setattr(registry, "modules", lambda name: [module])
    assert registry.make("own", 2, TARGET.config, options={"scale": 2, "word": "b"}) == (2, 2, "b")
    with pytest.raises(
        SpecJAXError, match="'scale' of the drafter 'own' must be of type float, got 'b'"
    ):
        registry.make("own", 2, TARGET.config, options={"scale": "b"})


def looked_up(text, K, min_n, max_n):
    """Prompt lookup as one would write it down: longest suffix first, latest occurrence first, then
    periodic."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                continuation = list(text)
                for i in range(K):
                    continuation.append(continuation[end + i])
                return continuation[len(text) :]
    return []


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("alphabet", [2, 4, 20])
def test_prompt_lookup_equals_its_description(alphabet, min_n, max_n):
    K, S, rows = 5, 24, 400
    drafter = registry.make("ngram", K, TARGET.config, options=dict(min_n=min_n, max_n=max_n))
    rng = np.random.default_rng(alphabet)
    tokens_BS = rng.integers(0, alphabet, (rows, S), np.int32)
    length_B = rng.integers(1, S + 1, rows, np.int32)
    context = Context(
        tokens_BS=jnp.asarray(tokens_BS),
        length_B=jnp.asarray(length_B),
        active_B=jnp.ones(rows, bool),
        block_table_BX=kv_cache.in_order(rows, S, Runtime().page_size),
        target_params=None,
        num_pages=rows,
        target_config=TARGET.config,
        runtime=Runtime(),
    )
    draft = jax.jit(lambda context: drafter.propose(None, (), context, None)[0])(context)
    found = 0
    for row in range(rows):
        expected = looked_up(tokens_BS[row, : length_B[row]].tolist(), K, min_n, max_n)
        assert draft.count_B[row] == len(expected)
        assert np.asarray(draft.tokens_BM[row]).tolist()[: len(expected)] == expected
        found += bool(expected)
    assert 0 < found < rows
    assert draft.distributions is None


def test_prompt_lookup_without_a_match_decodes_one_token_a_round():
    prompts = [list(range(row, 2 * row + 1)) for row in range(B)]
    got = run(TARGET, prompts, drafter=registry.make("ngram", 3, TARGET.config), max_new=2)
    assert not got.state.log.drafted_BS.any() and (got.state.log.rounds_B == 2).all()
    assert got.emitted == run(TARGET, prompts, max_new=2).emitted
