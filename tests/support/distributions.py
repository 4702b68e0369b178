"""Reference distributions in float64."""

from __future__ import annotations

import numpy as np
import scipy.stats

from specjax.engine.request import SamplingOptions


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


def reference_logits(logits_V, prompt, output, eos=(), **features) -> np.ndarray:
    """What `processors.process` makes of one vector after a prompt and an output: one token of the
    vocabulary after the other, in float32. Features are fields of `SamplingOptions`."""
    params = SamplingOptions(**features)
    x_V = np.array(logits_V, np.float32)
    prompt, output = list(prompt), list(output)
    for token, bias in (params.logit_bias or {}).items():
        x_V[token] += np.float32(bias)
    for token in range(len(x_V)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x_V[token] = -np.inf
    for *before, last in params.bad_words or ():
        if len(before) <= len(output) and output[len(output) - len(before) :] == list(before):
            x_V[last] = -np.inf
    for token in eos:
        if len(output) < params.min_tokens:
            x_V[token] = -np.inf
    repetition = np.float32(params.repetition_penalty)
    for token in set(prompt + output):
        x_V[token] = x_V[token] / repetition if x_V[token] > 0 else x_V[token] * repetition
    for token in set(output):
        x_V[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        x_V[token] -= np.float32(params.presence_penalty)
    return x_V


def chi_square_p(counts, distribution, trials) -> float:
    """Probability of a worse fit than this one under the distribution; cells that expect less than
    5 are pooled."""
    order = np.argsort(distribution.ravel())
    counts, expected = counts.ravel()[order], distribution.ravel()[order] * trials
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return scipy.stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)
