"""The loop as a whole: where it stops, what it counts, what rows see of each other, and that its
caches are right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, kv_cache, llama
from specjax.config import LlamaConfig, Runtime
from specjax.decode import DecodeConfig
from specjax.drafters import registry
from specjax.drafters.base import Draft, Drafter
from specjax.errors import SpecJAXError
from specjax.verify import METHODS
from support.loop import CAPACITY, GENERATE, prepare, result, run
from support.models import (
    Model,
    OracleParams,
    full_aux_hidden,
    full_logits,
    make_drafter,
    oracle,
    similar,
    tiny,
)

TARGET, DRAFT = tiny(6), similar(6)
B = 12
PROMPTS = [
    np.random.default_rng(row).integers(0, 32, length).tolist()
    for row, length in enumerate([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17])
]
# Every row samples in its own way; some are greedy.
SAMPLING = dict(
    temperature=[0, 1, 0.7, 0, 1.5, 1, 0.3, 0, 2, 1, 1, 0],
    top_k=[0, 0, 5, 3, 9, 0, 0, 0, 2, 0, 4, 0],
    top_p=[1, 1, 1, 0.5, 0.8, 0.9, 1, 1, 1, 1, 0.95, 0.1],
    min_p=[0, 0, 0, 0, 0, 0, 0.1, 0, 0, 0.2, 0.05, 0],
    seed=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2**32 - 1],
)
MAX_NEW = [16, 24, 9, 30, 20, 17, 25, 28, 12, 1, 22, 30]


def oracle_params(plain, *, wrong=(), empty=()):
    """An oracle that knows what will come, but for the positions that are `wrong`, and says nothing
    at `empty` ones."""
    tokens_BS = np.array(plain.state.tokens_BS)
    tokens_BS[:, list(wrong)] = (tokens_BS[:, list(wrong)] + 1) % 32
    empty_BS = np.zeros(tokens_BS.shape, bool)
    empty_BS[:, list(empty)] = True
    return OracleParams(jnp.asarray(tokens_BS), jnp.asarray(empty_BS))


@pytest.fixture(scope="module")
def greedy():
    return run(TARGET, PROMPTS, max_new=30)


@pytest.fixture(scope="module")
def sampled():
    return run(TARGET, PROMPTS, max_new=MAX_NEW, **SAMPLING)


def test_plain_decoding_takes_the_most_likely_token(greedy):
    """Against one forward pass over the finished text: this ties the loop to the model, whatever
    the cache does."""
    logits_BSV = full_logits(TARGET, greedy.state.tokens_BS)
    for row, (prompt, emitted) in enumerate(zip(PROMPTS, greedy.emitted, strict=True)):
        expected = logits_BSV[row, len(prompt) - 1 : len(prompt) + 29].argmax(-1)
        assert emitted == expected.tolist() and len(set(emitted)) > 1


def test_plain_decoding_is_the_same_in_both_modes(sampled):
    assert (
        run(TARGET, PROMPTS, max_new=MAX_NEW, verify="coupled", **SAMPLING).emitted
        == sampled.emitted
    )


def test_the_budget_is_met_exactly(sampled):
    assert [len(emitted) for emitted in sampled.emitted] == MAX_NEW
    assert (np.asarray(sampled.state.length_B) <= CAPACITY).all()


@pytest.mark.parametrize(("K", "page_size"), [(1, 4), (2, 3), (5, 16), (8, 48)])
def test_a_draft_that_is_the_target_is_always_accepted(K, page_size, greedy):
    """A draft cache that is off by one anywhere would cost an acceptance."""
    drafter, params = make_drafter("draft_model", K, TARGET, TARGET)
    got = run(
        TARGET, PROMPTS, drafter=drafter, draft_params=params, max_new=30, page_size=page_size
    )
    assert got.emitted == greedy.emitted
    np.testing.assert_array_equal(got.state.log.accepted_BS, got.state.log.drafted_BS)
    assert (got.state.log.rounds_B == -(-30 // (K + 1))).all()


# --- End of sequence and budget -------------------------------------------------------------------


def until_eos(emitted, eos):
    """What is left of a text when it ends behind the first of some tokens."""
    return next((emitted[: i + 1] for i, token in enumerate(emitted) if token in eos), emitted)


def test_nothing_is_emitted_past_an_end_of_sequence_token(greedy):
    """The oracle has whole blocks accepted: the end comes at every place in a block, and at the
    edge of budgets."""
    eos = [
        (emitted[row + 1], 31 - emitted[0]) if row % 2 else (99, emitted[row + 1], emitted[-1])
        for row, emitted in enumerate(greedy.emitted)
    ]
    for max_new in (30, [3 + row % 7 for row in range(B)]):
        expected = [
            until_eos(emitted[:n], ids)
            for emitted, ids, n in zip(
                greedy.emitted, eos, np.broadcast_to(max_new, B), strict=True
            )
        ]
        got = run(
            TARGET,
            PROMPTS,
            drafter=oracle(5),
            draft_params=oracle_params(greedy),
            max_new=max_new,
            eos=eos,
        )
        assert got.emitted == expected
        assert not got.state.active_B.any()
        np.testing.assert_array_equal(
            got.state.log.emitted_BS.sum(axis=1), [len(emitted) for emitted in expected]
        )
    assert (
        len(
            {
                len(until_eos(emitted, ids)) % 6
                for emitted, ids in zip(greedy.emitted, eos, strict=True)
            }
        )
        > 3
    )


def test_a_stop_inside_a_block_that_the_budget_cuts_is_still_a_stop(greedy):
    """The third token ends the text; the block has six, the budget five: three come out, and the
    third is the stop."""
    row = next(row for row, emitted in enumerate(greedy.emitted) if emitted[2] not in emitted[:2])
    stop = greedy.emitted[row][2]
    got = run(
        TARGET,
        PROMPTS,
        drafter=oracle(5),
        draft_params=oracle_params(greedy),
        max_new=5,
        eos=(stop,),
    )
    assert got.emitted[row] == greedy.emitted[row][:3] and got.emitted[row][-1] == stop
    counts = (
        got.state.log.rounds_B[row],
        got.state.log.accepted_BS[row, 0],
        got.state.log.emitted_BS[row, 0],
    )
    assert tuple(map(int, counts)) == (1, 3, 3)


def test_a_prompt_that_leaves_no_budget_emits_nothing(greedy):
    max_new = [0, 5] * (B // 2)
    got = run(
        TARGET, PROMPTS, drafter=oracle(5), draft_params=oracle_params(greedy), max_new=max_new
    )
    assert got.emitted == [emitted[:n] for emitted, n in zip(greedy.emitted, max_new, strict=True)]
    assert got.state.log.rounds_B.tolist() == [0, 1] * (B // 2)


# --- Counts ---------------------------------------------------------------------------------------


def test_rounds_count_what_was_drafted_accepted_and_emitted(greedy):
    """Guesses of one token in three are wrong, and at some places there are none: every count is
    known in advance."""
    wrong = range(2, CAPACITY, 3)
    empty = range(0, CAPACITY, 7)
    got = run(
        TARGET,
        PROMPTS,
        drafter=oracle(5),
        max_new=[30 - row for row in range(B)],
        draft_params=oracle_params(greedy, wrong=wrong, empty=empty),
    )
    assert got.emitted == [emitted[: 30 - row] for row, emitted in enumerate(greedy.emitted)]
    for row in range(B):
        position, end, expected = len(PROMPTS[row]), len(PROMPTS[row]) + 30 - row, []
        while position < end:
            drafted = 0 if position in empty else min(5, end - position - 1)
            accepted = next((i for i in range(drafted) if position + i in wrong), drafted)
            expected.append((drafted, accepted, accepted + 1))
            position += accepted + 1
        rounds = int(got.state.log.rounds_B[row])
        counts = np.stack(
            [
                got.state.log.drafted_BS[row],
                got.state.log.accepted_BS[row],
                got.state.log.emitted_BS[row],
            ],
            axis=1,
        )
        assert (
            counts[:rounds].tolist() == [list(count) for count in expected]
            and not counts[rounds:].any()
        )


def test_a_round_without_proposals_runs_the_target_on_one_token(greedy):
    """Seen from the aux_layers: columns beyond those that the target read are zero. Only where no
    row proposes is it one."""
    target, K = tiny(3, num_layers=2), 2
    prompts = [PROMPTS[4]] * B
    # What an oracle says before it knows anything changes nothing either.
    plain = run(
        target, prompts, drafter=oracle(K, (0, 1)), draft_params=oracle_params(greedy), max_new=20
    )
    params = oracle_params(plain, wrong=range(CAPACITY), empty=range(0, CAPACITY, 2))
    got = run(target, prompts, drafter=oracle(K, (0, 1)), draft_params=params, max_new=20)
    assert got.emitted == plain.emitted
    width_BS = np.asarray(got.state.drafter[2])[:, len(prompts[0]) :][:, :19]
    assert (width_BS == np.where(np.arange(5, 24) % 2, K + 1, 1)).all()


def test_a_drafter_gets_the_targets_residual_stream(greedy):
    """At every committed token that the target has read, after rejections and acceptances of all
    kinds."""
    target = tiny(3, num_layers=2)
    plain = run(
        target, PROMPTS, drafter=oracle(2, (0, 1)), draft_params=oracle_params(greedy), max_new=20
    )
    got = run(
        target,
        PROMPTS,
        drafter=oracle(2, (0, 1)),
        max_new=20,
        draft_params=oracle_params(plain, wrong=range(0, CAPACITY, 5), empty=range(0, CAPACITY, 4)),
    )
    assert got.emitted == plain.emitted
    expected = full_aux_hidden(target, got.state.tokens_BS, (0, 1))
    read_BS = np.arange(CAPACITY) < np.asarray(got.state.length_B)[:, None] - 1
    for hidden_BSD, expected_BSD in zip(got.state.drafter[1], expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(hidden_BSD)[read_BS], np.asarray(expected_BSD)[read_BS], atol=1e-4
        )


# --- Rows -----------------------------------------------------------------------------------------


@functools.cache
def speculative(mode: str):
    drafter, params = make_drafter("draft_model", 3, TARGET, DRAFT)
    return dict(drafter=drafter, draft_params=params, verify=mode)


def test_a_row_depends_neither_on_its_neighbours_nor_on_its_place():
    options = speculative("rejection")
    together = run(TARGET, PROMPTS, max_new=MAX_NEW, **SAMPLING, **options)
    order = np.random.default_rng(0).permutation(B)

    def reorder(values, rows):
        return [values[row] for row in rows]

    moved = run(
        TARGET,
        reorder(PROMPTS, order),
        max_new=reorder(MAX_NEW, order),
        **options,
        **{name: reorder(values, order) for name, values in SAMPLING.items()},
    )
    assert moved.emitted == reorder(together.emitted, order)
    for row in (
        0,
        4,
        11,
    ):  # greedy, filtered, and greedy with filters; neighbours are as different as can be
        others = [row if i == row else (i + 5) % B for i in range(B)]
        mixed = dict(SAMPLING, seed=[seed + 100 * (i != row) for i, seed in enumerate(range(B))])
        mixed = {name: reorder(values, others) for name, values in mixed.items()}
        mixed["seed"][row] = SAMPLING["seed"][row]
        got = run(
            TARGET, reorder(PROMPTS, others), max_new=reorder(MAX_NEW, others), **options, **mixed
        )
        assert got.emitted[row] == together.emitted[row]
    for row in (1, 7):
        alone = run(
            TARGET,
            [PROMPTS[row]],
            max_new=MAX_NEW[row],
            **options,
            **{name: values[row] for name, values in SAMPLING.items()},
        )
        assert alone.emitted == [together.emitted[row]]


def test_cutting_the_loop_into_calls_changes_nothing():
    options = speculative("rejection")
    whole = run(TARGET, PROMPTS, max_new=MAX_NEW, **SAMPLING, **options)
    params, draft_params, config, state = prepare(
        TARGET, PROMPTS, max_new=MAX_NEW, **SAMPLING, **options
    )
    calls = 0
    while state.active_B.any():
        state = GENERATE(params, draft_params, config, state, jnp.int32(1 + calls % 2))
        calls += 1
    assert calls > 8
    jax.tree.map(np.testing.assert_array_equal, state, whole.state)


# --- Caches ---------------------------------------------------------------------------------------


NEXT_LOGITS = jax.jit(
    lambda params, config, tokens_BT, start_B, table_BX, cache: llama.logits(
        params,
        llama.forward(
            params, config, Runtime(page_size=4), tokens_BT, start_B, table_BX, cache
        ).hidden_BTD,
    )[:, -1],
    static_argnums=1,
)


def test_both_caches_equal_a_fresh_computation_after_every_round():
    """Next-token logits from the caches as the round left them, against one pass over the committed
    text."""
    options = speculative("rejection")
    params, draft_params, config, state = prepare(
        TARGET, PROMPTS, max_new=24, **SAMPLING, **options
    )
    rejections = 0
    while state.active_B.any():
        row_B, round_B = np.arange(B), np.array(state.log.rounds_B)
        state = GENERATE(params, draft_params, config, state, jnp.int32(1))
        rejections += np.asarray(state.log.accepted_BS < state.log.drafted_BS)[row_B, round_B].sum()
        alive = np.asarray(state.active_B)
        length_B = np.asarray(state.length_B)
        last_B2 = np.take_along_axis(
            np.asarray(state.tokens_BS), np.maximum(length_B[:, None] + [-2, -1], 0), axis=1
        )
        read_B = np.asarray(state.drafter.read_B)[alive]
        assert ((length_B[alive] - 2 <= read_B) & (read_B < length_B[alive])).all()
        # What drafters read again is two tokens; what the target reads, one.
        for model, cache, again in ((TARGET, state.cache, 1), (DRAFT, state.drafter.cache, 2)):
            logits_BV = NEXT_LOGITS(
                model.params,
                model.config,
                last_B2[:, 2 - again :],
                state.length_B - again,
                state.block_table_BX,
                cache,
            )
            expected_BV = full_logits(model, state.tokens_BS)[row_B, length_B - 1]
            np.testing.assert_allclose(np.asarray(logits_BV)[alive], expected_BV[alive], atol=2e-5)
    assert rejections > 20


def poisoned(cache, table_BX, length_B):
    """NaN in every position but those of the tokens that are committed and read."""
    page_size = cache.page_size
    read = np.zeros((cache.num_pages, page_size), bool)
    for pages, length in zip(np.asarray(table_BX), np.asarray(length_B), strict=True):
        for position in range(length):
            read[pages[position // page_size], position % page_size] = True
    keep = jnp.asarray(read)[:, None, :, None]
    poison = lambda pools: [jnp.where(keep, pool, jnp.nan) for pool in pools]  # noqa: E731
    return cache.replace(k_PKZH=poison(cache.k_PKZH), v_PKZH=poison(cache.v_PKZH))


def test_nothing_of_unused_pages_and_stale_positions_comes_out():
    options = speculative("rejection")
    whole = run(TARGET, PROMPTS, max_new=MAX_NEW, **SAMPLING, **options)
    params, draft_params, config, state = prepare(
        TARGET, PROMPTS, max_new=MAX_NEW, **SAMPLING, **options
    )
    while state.active_B.any():
        # The target has read all but the last committed token; the draft model says what it has.
        table_BX, drafter = state.block_table_BX, state.drafter
        state = state.replace(
            cache=poisoned(state.cache, table_BX, state.length_B - 1),
            drafter=drafter.replace(cache=poisoned(drafter.cache, table_BX, drafter.read_B)),
        )
        state = GENERATE(params, draft_params, config, state, jnp.int32(1))
    assert result(state).emitted == whole.emitted


def test_prompts_are_read_as_one_pass_reads_them():
    """Every cached key and value, for prompts that end before, on and after the edges of pages and
    chunks, with nothing lost between chunks."""
    prompts = [np.random.default_rng(n).integers(0, 32, n).tolist() for n in range(1, 21)]
    options = speculative("rejection")
    states = []
    for chunk in (8, CAPACITY):
        states.append(prepare(TARGET, prompts, prefill_chunk=chunk, **options)[-1])
    read_BS = np.arange(CAPACITY) < np.array([len(prompt) - 1 for prompt in prompts])[:, None]
    positions_BS = jnp.tile(jnp.arange(CAPACITY), (len(prompts), 1))
    table_BX, cache = states[0].block_table_BX, states[0].cache
    located = kv_cache.locate(table_BX, positions_BS, cache.page_size, cache.num_pages)
    page, offset = (np.asarray(x)[read_BS] for x in located)
    for find in (lambda state: state.cache, lambda state: state.drafter.cache):
        for a, b in zip(*(jax.tree.leaves(find(state)) for state in states), strict=True):
            a, b = np.asarray(a)[page, :, offset], np.asarray(b)[page, :, offset]
            assert (a != 0).any(-1).all()
            np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_array_equal(states[0].drafter.read_B, read_BS.sum(1))


@pytest.mark.parametrize(("page_size", "prefill_chunk"), [(8, 8), (3, 5)])
def test_page_size_and_chunk_change_nothing(page_size, prefill_chunk):
    """Prompts of every length modulo the page and the chunk. One page for all positions is an
    unpaged cache."""
    prompts = [
        np.random.default_rng(length).integers(0, 32, length).tolist() for length in range(5, 5 + B)
    ]
    # `coupled`, so that every token of the text depends on the target's logits alone.
    options = dict(max_new=16, temperature=1.0, seed=list(range(len(prompts))))
    got = run(
        TARGET,
        prompts,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        **options,
        **speculative("coupled"),
    )
    assert got.emitted == run(TARGET, prompts, page_size=CAPACITY, **options).emitted


def test_positions_may_reach_and_pass_the_models_own_limit():
    """Prompts of 2047, 2048 and 2049 tokens for a model that says 2048; no table of positions may
    run out silently."""
    target = tiny(4)
    assert target.config.max_position_embeddings == 2048
    prompts = [
        np.random.default_rng(length).integers(0, 32, length).tolist()
        for length in (2047, 2048, 2049)
    ]
    drafter, _ = make_drafter("ngram", 2, target, target, min_n=1)
    got = run(
        target, prompts, max_new=6, capacity=2056, page_size=16, prefill_chunk=100, drafter=drafter
    )
    logits_BSV = full_logits(target, got.state.tokens_BS)
    for row, prompt in enumerate(prompts):
        assert (
            got.emitted[row]
            == logits_BSV[row, len(prompt) - 1 : len(prompt) + 5].argmax(-1).tolist()
        )


# --- Ids that must not come out -------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", *registry.names()])
def test_ids_beyond_the_valid_ones_are_never_emitted(drafter):
    """Though they have the largest logits of all, in target and draft model, and the prompts are
    full of them."""
    valid = 28

    def loud(model):
        head_VD = model.params["lm_head_VD"]
        return Model(model.config, {**model.params, "lm_head_VD": head_VD.at[valid:].multiply(8)})

    target, draft = loud(TARGET), loud(DRAFT)
    prompts = [[*prompt, 30, 31, 29, 30, 31] for prompt in PROMPTS]
    options = dict(
        max_new=16, temperature=[0, 1, 2] * (B // 3), seed=list(range(B)), num_valid_tokens=valid
    )
    plain = run(target, prompts, **options)
    assert (full_logits(target, plain.state.tokens_BS).argmax(-1) >= valid).mean() > 0.5
    assert max(map(max, plain.emitted)) < valid
    if drafter != "none":
        K_drafter, params = make_drafter(drafter, 3, target, draft)
        got = run(target, prompts, drafter=K_drafter, draft_params=params, **options)
        assert max(map(max, got.emitted)) < valid
        assert got.emitted[::3] == plain.emitted[::3]


# --- Logits that are not numbers ------------------------------------------------------------------


def damaged(model, name, value):
    return Model(model.config, {**model.params, name: model.params[name].at[3].set(value)})


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize(
    ("name", "value"), [("final_norm_D", jnp.nan), ("lm_head_VD", jnp.nan), ("embed_VD", jnp.inf)]
)
def test_a_drafter_whose_logits_are_not_numbers_leaves_the_plain_text(sampled, mode, name, value):
    """A rejected draft without a distribution is replaced by a token of the target's distribution:
    with the same noise, the plain one."""
    drafter, params = make_drafter("draft_model", 3, TARGET, damaged(DRAFT, name, value))
    got = run(
        TARGET,
        PROMPTS,
        drafter=drafter,
        draft_params=params,
        max_new=MAX_NEW,
        verify=mode,
        **SAMPLING,
    )
    drafted_B = np.asarray(got.state.log.drafted_BS).sum(axis=1)
    if name == "embed_VD":  # only texts that have had the token
        assert 0 < int(got.state.log.unusable_drafts_B.sum()) < drafted_B.sum()
    else:
        np.testing.assert_array_equal(got.state.log.unusable_drafts_B, drafted_B)
    if mode == "coupled" or name != "embed_VD":
        assert got.emitted == sampled.emitted
    assert not got.state.failed_B.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", METHODS)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_row_ends_where_the_targets_logits_are_not_numbers(drafter, mode, temperature):
    """One token's embedding is NaN: a row ends behind its first, and the others do not see it.
    (With a draft model it may end sooner: 0 times NaN is NaN, and the value of a draft that is not
    taken is multiplied by a weight of 0.)"""
    prompts = [[token for token in prompt if token != 3] or [1] for prompt in PROMPTS]
    lookup, params = (None, None) if drafter == "none" else make_drafter(drafter, 3, TARGET, DRAFT)
    options = dict(
        drafter=lookup,
        draft_params=params,
        verify=mode,
        max_new=24,
        temperature=temperature,
        seed=list(range(B)),
    )
    healthy = run(TARGET, prompts, **options)
    expected = [until_eos(emitted, [3]) for emitted in healthy.emitted]
    ends = [len(emitted) < 24 for emitted in expected]
    assert any(ends) and not all(ends)
    got = run(damaged(TARGET, "embed_VD", jnp.nan), prompts, **options)
    assert got.emitted == expected
    np.testing.assert_array_equal(got.state.failed_B, ends)
    np.testing.assert_array_equal(
        got.state.log.emitted_BS.sum(axis=1), [len(emitted) for emitted in expected]
    )


def test_a_head_behind_a_lookup_whose_logits_are_not_numbers_leaves_the_plain_text(sampled):
    """Only rows without a match have unusable drafts; lookups are never counted as such."""
    drafter, (_, head_params) = make_drafter("ngram,eagle", 3, TARGET, DRAFT)
    norm_D = head_params["final_norm_D"].at[:].set(jnp.nan)
    params = (None, head_params | {"final_norm_D": norm_D})
    for mode in METHODS:
        got = run(
            TARGET,
            PROMPTS,
            drafter=drafter,
            draft_params=params,
            max_new=MAX_NEW,
            verify=mode,
            **SAMPLING,
        )
        drafted, unusable = got.state.log.drafted_BS.sum(), got.state.log.unusable_drafts_B.sum()
        assert 0 < int(unusable) < int(drafted)
        greedy_rows = [row for row in range(B) if SAMPLING["temperature"][row] == 0]
        rows = range(B) if mode == "coupled" else greedy_rows
        assert [got.emitted[row] for row in rows] == [sampled.emitted[row] for row in rows]


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_a_target_that_can_emit_nothing_fails_at_once(value):
    target = Model(
        TARGET.config,
        {**TARGET.params, "lm_head_VD": jnp.full_like(TARGET.params["lm_head_VD"], value)},
    )
    if value == -jnp.inf:  # of hidden states of either sign
        target.params["final_norm_D"] = jnp.zeros(16)
    got = run(target, PROMPTS, max_new=MAX_NEW, **SAMPLING)
    assert got.emitted == [[]] * B and got.state.failed_B.all() and not got.state.active_B.any()


# --- Streams --------------------------------------------------------------------------------------


def constant(distribution) -> Model:
    """A Llama whose next token has the same distribution after every text."""
    config = LlamaConfig(
        vocab_size=len(distribution),
        hidden_size=2,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
    )
    params = jax.tree.map(jnp.zeros_like, llama.init(jax.random.key(0), config))
    params |= {"embed_VD": jnp.ones_like(params["embed_VD"]), "final_norm_D": jnp.ones(2)}
    return Model(
        config,
        params | {"lm_head_VD": jnp.log(jnp.array(distribution))[:, None] * jnp.array([1.0, 0.0])},
    )


def test_noise_of_drafts_acceptance_and_replacement_is_independent():
    """The distribution 10 / 60 / 30 at depth 3 with 131,072 trials, within five standard
    deviations: 0.7 percent at most."""
    trials, probs_V = 131_072, np.array([0.1, 0.6, 0.3])
    target, draft = constant(probs_V), constant([0.3, 0.3, 0.4])
    drafter, params = make_drafter("draft_model", 3, target, draft)
    got = run(
        target,
        [[0]] * trials,
        drafter=drafter,
        draft_params=params,
        max_new=4,
        temperature=1.0,
        seed=np.arange(trials),
        capacity=8,
    )
    tokens = np.array(got.emitted)
    for depth in range(4):
        share_V = np.bincount(tokens[:, depth], minlength=3) / trials
        assert (np.abs(share_V - probs_V) < 5 * np.sqrt(probs_V * (1 - probs_V) / trials)).all(), (
            depth,
            share_V,
        )
    pairs = np.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9) / trials
    expected = np.outer(probs_V, probs_V).ravel()
    assert (np.abs(pairs - expected) < 5 * np.sqrt(expected * (1 - expected) / trials)).all(), pairs


# --- A caller's own settings of JAX ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["draft_model", pytest.param("ngram,eagle", marks=pytest.mark.slow)]
)
def test_the_functional_api_works_under_strict_settings(name):
    """No promotion of dtypes or ranks, no implicit transfer, under a jit of the caller's."""
    drafter, draft_params = (None, None)
    if name != "none":
        drafter, draft_params = make_drafter(name, 2, TARGET, DRAFT)
    params, draft_params, config, state = prepare(
        TARGET, PROMPTS, drafter=drafter, draft_params=draft_params, max_new=6, **SAMPLING
    )

    @jax.jit
    def complete(params, draft_params, tokens_BS, request):
        state = decode.init(params, draft_params, config, tokens_BS, request, 8)
        state = decode.step(params, draft_params, config, state)
        state = decode.generate(params, draft_params, config, state)
        table_BX = kv_cache.in_order(B, CAPACITY + 2, config.runtime.page_size)
        cache = llama.init_cache(config.target, config.runtime, table_BX.size)
        output = llama.forward(
            params, config.target, config.runtime, tokens_BS[:, :2], state.length_B, table_BX, cache
        )
        return state, llama.logits(params, output.hidden_BTD)

    arguments = params, draft_params, state.tokens_BS, state.request
    expected = complete(*arguments)
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.transfer_guard("disallow"),
    ):
        got = jax.block_until_ready(complete(*arguments))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(verify="hope"), "verify must be one of rejection, coupled, got 'hope'"),
        (dict(drafter=oracle(0)), "at least 1 token, got num_tokens=0"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes, message):
    with pytest.raises(SpecJAXError, match=message):
        DecodeConfig(TARGET.config, **changes)


def test_a_runtime_that_cannot_be_is_refused():
    with pytest.raises(SpecJAXError, match=r"page_size must be an integer of at least 1, got 0"):
        Runtime(page_size=0)
    with pytest.raises(SpecJAXError, match=r"num_valid_tokens must be an integer of at least 1"):
        Runtime(num_valid_tokens=-1)
    with pytest.raises(SpecJAXError, match=r"unsupported dtype 'float31'"):
        Runtime(dtype="float31")
    with pytest.raises(SpecJAXError, match=r"mesh must come from make_mesh, got 3"):
        Runtime(mesh=3)
    with pytest.raises(SpecJAXError, match=r"implementation must be one of .*, got 'magic'"):
        Runtime(implementation="magic")


def test_parameters_of_another_dtype_than_the_runtime_are_refused():
    with pytest.raises(SpecJAXError, match=r"parameters are float32, but runtime.dtype=bfloat16"):
        run(TARGET, PROMPTS, dtype="bfloat16")


def test_a_prefill_chunk_below_one_is_refused():
    with pytest.raises(SpecJAXError, match="prefill_chunk must be at least 1, got -1"):
        run(TARGET, PROMPTS, prefill_chunk=-1)


def test_64_bit_mode_is_refused():
    with jax.enable_x64(True), pytest.raises(SpecJAXError, match="jax_enable_x64 is on"):
        run(TARGET, PROMPTS)


def test_a_drafter_that_breaks_its_promise_is_named(greedy):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OneMore(Drafter):
        def propose(self, params, state, context, sample):
            return Draft(jnp.zeros((B, self.num_tokens + 1), jnp.int32)), state

    message = r"proposed tokens of shape \(12, 5\), expected \(12, 4\)"
    with pytest.raises(SpecJAXError, match=message):
        run(TARGET, PROMPTS, drafter=OneMore(num_tokens=4))


def test_a_state_made_without_jit_can_be_donated(greedy):
    """No buffer may stand for two of its fields."""
    config = DecodeConfig(TARGET.config, runtime=Runtime(page_size=4))
    old = jax.tree.map(jnp.copy, greedy.state)
    state = decode.init(
        TARGET.params,
        None,
        config,
        old.tokens_BS,
        old.request,
    )
    state = GENERATE(TARGET.params, None, config, state)
    assert result(state).emitted == greedy.emitted
