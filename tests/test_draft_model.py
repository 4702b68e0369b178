"""A draft model behind another drafter drafts as if it had been asked in every round."""

import jax.numpy as jnp
import numpy as np

from specjax.drafters import draft_model, first_of
from support.loop import GENERATE, prepare, result, run
from support.models import OracleParams, full_logits, oracle, recording, similar, tiny

TARGET, DRAFT = tiny(6), similar(6)
PROMPTS = [
    np.random.default_rng(row).integers(0, 32, length).tolist()
    for row, length in enumerate([1, 2, 3, 6, 11])
]
K = 4  # of no other test: the size of a chunk is read when a program is traced


def expected_drafts(tokens):
    """Greedy continuation by the draft model, each token from a pass over the whole text."""
    text = np.zeros((1, 64), np.int32)
    for i in range(K):
        text[0, : len(tokens) + i] = [*tokens, *text[0, len(tokens) : len(tokens) + i]]
        text[0, len(tokens) + i] = full_logits(DRAFT, text)[0, len(tokens) + i - 1].argmax()
    return text[0, len(tokens) : len(tokens) + K].tolist()


def test_it_catches_up_after_any_number_of_rounds(monkeypatch):
    """The first drafter knows the text, but for single places and a stretch in the middle, where
    the draft model is asked; in chunks of fewer tokens than it has missed."""
    monkeypatch.setattr(draft_model, "CATCH_UP", K + 1)
    resting = draft_model.make(K, TARGET.config, DRAFT.config).resting()
    both = first_of.FirstOf(num_tokens=K, drafters=(oracle(K), recording(resting)))
    plain = run(TARGET, PROMPTS, max_new=30)
    position = np.arange(plain.state.tokens_BS.shape[1])
    after = position - np.array([[len(prompt)] for prompt in PROMPTS])
    silent_BS = (after == 5) | ((after >= 20) & (after < 26))
    first = OracleParams(plain.state.tokens_BS, jnp.asarray(silent_BS))
    params = (first, DRAFT.params)
    arguments = prepare(TARGET, PROMPTS, drafter=both, draft_params=params, max_new=30)
    state, checked, missed = arguments[-1], 0, []
    while state.active_B.any():
        lengths, active = np.asarray(state.length_B), np.asarray(state.active_B)
        read, texts = np.asarray(state.drafter[1][0].read_B), np.asarray(state.tokens_BS)
        silent = active & silent_BS[np.arange(len(PROMPTS)), lengths]
        state = GENERATE(*arguments[:-1], state, jnp.int32(1))
        after_B = np.asarray(state.drafter[1][0].read_B)
        expected_B = np.where(active, lengths, read) if silent.any() else read
        np.testing.assert_array_equal(after_B, expected_B)
        for row in np.flatnonzero(silent):
            tokens = texts[row, : lengths[row]].tolist()
            drafts = np.asarray(state.drafter[1][1][row]).tolist()
            assert drafts == expected_drafts(tokens)
            checked += 1
            missed.append(lengths[row] - read[row])
    assert checked >= 2 * len(PROMPTS)
    assert max(missed) > 2 * (K + 1) and min(missed) <= 2
    assert result(state).emitted == plain.emitted
