"""Log-probabilities, and what they must be."""

from __future__ import annotations

import jax
import numpy as np

from specjax.sampling import Logprobs
from support.loop import result
from support.models import Model, full_logits


def log_softmax(logits_SV) -> np.ndarray:
    """In float64."""
    logits_SV = np.asarray(logits_SV, np.float64)
    logits_SV = logits_SV - logits_SV.max(axis=-1, keepdims=True)
    return logits_SV - np.log(np.exp(logits_SV).sum(axis=-1, keepdims=True))


def check(found: Logprobs, logits_SV, tokens_S, num_top: int, atol: float = 1e-5) -> None:
    """Those of S tokens, given the logits that a reference has in their places.

    Order and rank are checked up to tokens that the tolerance does not tell apart.
    """
    assert found.top_ids_BSJ.shape == found.top_BSJ.shape == (len(tokens_S), num_top)
    expected_SV = log_softmax(logits_SV)
    tokens_S1 = np.asarray(tokens_S, np.int32)[:, None]
    token_S1 = np.take_along_axis(expected_SV, tokens_S1, axis=1)
    np.testing.assert_allclose(found.token_BS, token_S1[:, 0], rtol=0, atol=atol)
    assert ((expected_SV > token_S1 + atol).sum(axis=1) < found.rank_BS).all()
    assert ((expected_SV >= token_S1 - atol).sum(axis=1) >= found.rank_BS).all()
    falling_SV = -np.sort(-expected_SV, axis=1)
    np.testing.assert_allclose(found.top_BSJ, falling_SV[:, :num_top], rtol=0, atol=atol)
    of_ids_SJ = np.take_along_axis(expected_SV, np.asarray(found.top_ids_BSJ), axis=1)
    np.testing.assert_allclose(found.top_BSJ, of_ids_SJ, rtol=0, atol=atol)
    assert all(len(set(ids.tolist())) == num_top for ids in found.top_ids_BSJ)


def of_positions(logprobs: Logprobs, row: int, positions) -> Logprobs:
    return jax.tree.map(lambda x: np.asarray(x)[row, positions], logprobs)


def check_outputs(state, target: Model, num_top: int) -> None:
    """Those of every token of the output, from one pass over the whole text; 0 everywhere else."""
    logits_BSV = full_logits(target, np.asarray(state.tokens_BS))
    for row, tokens in enumerate(result(state).emitted):
        start, end = int(state.request.prompt_length_B[row]), int(state.length_B[row])
        found = of_positions(state.logprobs, row, slice(start, end))
        check(found, logits_BSV[row, start - 1 : end - 1], tokens, num_top)
        for others in (slice(0, start), slice(end, None)):
            rest = of_positions(state.logprobs, row, others)
            assert not any(x.any() for x in jax.tree.leaves(rest))
