"""The head drafts what its description says, round by round, alone and behind another drafter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import llama
from specjax.drafters import base, eagle, first_of
from specjax.train.eagle import unrolled
from support.loop import CAPACITY, GENERATE, prepare, result, run
from support.models import OracleParams, full_aux_hidden, oracle, recording, tiny, tiny_head

TARGET = tiny(6, num_layers=3)
HEADS = {
    "EAGLE-1": dict(aux_layers=(2,)),
    "EAGLE-3": dict(aux_layers=(0, 1, 2)),
    "reduced vocabulary": dict(aux_layers=(0, 1, 2), num_draft_tokens=14),
}
PROMPTS = [
    np.random.default_rng(row).integers(0, 32, length).tolist()
    for row, length in enumerate([1, 2, 3, 6, 11])
]
K = 3


@functools.cache
def head(name):
    """A head that fuses more than the last layer."""
    config, params = tiny_head(TARGET, **HEADS[name])
    if "fuse_DI" in params:
        noise = jax.random.normal(jax.random.key(1), params["fuse_DI"].shape)
        params = params | {"fuse_DI": params["fuse_DI"] + 0.2 * noise}
    return eagle.make(K, TARGET.config, config), config, params


@functools.partial(jax.jit, static_argnums=0)
def whole_pass(config, params, text, aux_layers):
    """Logits of the K steps from every token of a text on."""
    hidden = unrolled(params, config, TARGET.config, TARGET.params, aux_layers, text, K)
    head_UD = params.get("lm_head_UD", TARGET.params["lm_head_VD"])
    return jnp.stack([h_BND[0] @ head_UD.T for h_BND in hidden])


def expected_drafts(config, params, tokens, drafts):
    """Greedy drafts after `tokens` if the text continues with `drafts`, from one pass over all."""
    text = np.zeros((1, CAPACITY + K), np.int32)
    text[0, : len(tokens) + K] = [*tokens, *drafts]
    chain = len(tokens) - 2  # the last token with features of the target
    logits = whole_pass(config, params, text, full_aux_hidden(TARGET, text, config.aux_layers))[
        :, chain
    ]
    ids = params.get("draft_ids_U", jnp.arange(32))
    return ids[logits.argmax(-1)].tolist()


@pytest.mark.parametrize("name", HEADS)
def test_every_draft_is_that_of_a_pass_over_the_whole_text(name):
    """After every round, whatever was accepted in it: features, positions and rollback."""
    drafter, config, params = head(name)
    arguments = prepare(
        TARGET, PROMPTS, drafter=recording(drafter), draft_params=params, max_new=14
    )
    state, checked, accepted = arguments[-1], 0, set()
    while state.active_B.any():
        before = result(state)
        lengths, active = np.asarray(state.length_B), np.asarray(state.active_B)
        texts = np.asarray(state.tokens_BS)
        state = GENERATE(*arguments[:-1], state, jnp.int32(1))
        for row in np.flatnonzero(active):
            tokens, drafts = (
                texts[row, : lengths[row]].tolist(),
                np.asarray(state.drafter[1][row]).tolist(),
            )
            if len(tokens) > 1:  # without features the first guess is anybody's
                assert drafts == expected_drafts(config, params, tokens, drafts), (row, before)
                checked += 1
        accepted |= set(np.diff(np.asarray(state.length_B) - lengths).tolist())
    assert checked > 20


def test_a_drafter_that_no_row_needs_is_not_run_and_catches_up():
    """The first drafter knows the text and says it, but for a stretch in the middle: there the head
    is asked, and drafts as if it had been there all along."""
    _, config, params = head("EAGLE-3")
    resting = eagle.make(K, TARGET.config, config).resting()
    both = first_of.FirstOf(num_tokens=K, drafters=(oracle(K), recording(resting)))
    plain = run(TARGET, PROMPTS, max_new=24)
    start = np.array([len(prompt) for prompt in PROMPTS])
    position = np.arange(plain.state.tokens_BS.shape[1])
    silent_BS = (position >= start[:, None] + 12) & (position < start[:, None] + 18)
    first = OracleParams(plain.state.tokens_BS, jnp.asarray(silent_BS))
    arguments = prepare(TARGET, PROMPTS, drafter=both, draft_params=(first, params), max_new=24)
    state, checked = arguments[-1], 0
    while state.active_B.any():
        lengths, active, read = (
            np.asarray(x) for x in (state.length_B, state.active_B, state.drafter[1][0].read_B)
        )
        silent = active & silent_BS[np.arange(len(PROMPTS)), lengths]
        texts = np.asarray(state.tokens_BS)
        state = GENERATE(*arguments[:-1], state, jnp.int32(1))
        if not silent.any():
            np.testing.assert_array_equal(state.drafter[1][0].read_B, read)
        for row in np.flatnonzero(silent):
            tokens, drafts = (
                texts[row, : lengths[row]].tolist(),
                np.asarray(state.drafter[1][1][row]).tolist(),
            )
            assert drafts == expected_drafts(config, params, tokens, drafts)
            checked += 1
    assert checked >= len(PROMPTS)
    assert result(state).emitted == plain.emitted
    assert (
        np.asarray(state.log.accepted_BS)[:, :3] == K
    ).all()  # what the first one says comes first


def test_tokens_outside_the_reduced_vocabulary_are_never_guessed():
    drafter, _, params = head("reduced vocabulary")
    got = run(
        TARGET,
        PROMPTS,
        drafter=recording(drafter),
        draft_params=params,
        max_new=12,
        temperature=3.0,
        seed=list(range(len(PROMPTS))),
    )
    assert set(np.asarray(got.state.drafter[1]).ravel().tolist()) <= set(
        np.asarray(params["draft_ids_U"]).tolist()
    )


def test_a_head_that_cannot_be_is_refused():
    config = head("EAGLE-3")[1]
    for change, message in (
        (dict(aux_layers=(1, 0, 2)), "rising layers"),
        (dict(aux_layers=(0, 3)), "0 to 2, got 0, 3"),
        (dict(aux_layers=()), "got none"),
        (dict(num_draft_tokens=33), "in 1 to 32, got 33"),
        (dict(layer=TARGET.config), "one decoder layer, got 3"),
    ):
        with pytest.raises(base.SpecJAXError, match=message):
            dataclasses.replace(config, **change)


def test_the_whole_vocabulary_goes_through_the_targets_own_matrix():
    params = head("EAGLE-1")[2]
    assert "lm_head_UD" not in params
    reduced = head("reduced vocabulary")[2]
    np.testing.assert_array_equal(
        reduced["lm_head_UD"], TARGET.params["lm_head_VD"][reduced["draft_ids_U"]]
    )
    assert llama.abstract_params(TARGET.config)["lm_head_VD"].shape == (32, 16)
