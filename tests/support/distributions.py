"""Reference distributions in float64."""

from __future__ import annotations

import numpy as np


def reference_distribution(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The probabilities that `sampling.sample` samples from, for one vector, step by step."""
    logits_V = np.asarray(logits_V, np.float64)
    if temperature == 0:
        return np.eye(len(logits_V))[np.argmax(logits_V)]
    probs_V = np.exp((logits_V - logits_V.max()) / temperature)
    probs_V /= probs_V.sum()
    if top_k:
        probs_V[probs_V < np.sort(probs_V)[::-1][min(top_k, len(probs_V)) - 1]] = 0
        probs_V /= probs_V.sum()
    if top_p < 1:
        falling = np.sort(probs_V)[::-1]
        probs_V = np.where(
            probs_V < falling[(np.cumsum(falling) - falling < top_p).sum() - 1], 0, probs_V
        )
    probs_V[probs_V < min_p * probs_V.max()] = 0
    return probs_V / probs_V.sum()
