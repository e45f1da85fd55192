"""The distribution that a row is drawn from, in float64, from the definitions in `SamplingParams`."""

from __future__ import annotations

import numpy as np


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, banned_ids=()) -> np.ndarray:
    """The probability of every id. Each filter applies to the distribution that the one before it left."""
    logits = np.asarray(logits, np.float64).copy()
    logits[[i for i in banned_ids if i < len(logits)]] = -np.inf
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))  # most likely first, equal ones by id
    probabilities = np.exp((logits[order] - logits.max()) / temperature)
    probabilities /= probabilities.sum()
    if top_k > 0:
        probabilities[top_k:] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:
        reached = np.cumsum(probabilities) >= top_p
        probabilities[np.argmax(reached) + 1 :] = 0
        probabilities /= probabilities.sum()
    probabilities[probabilities < min_p * probabilities[0] * (1 - 1e-9)] = 0
    probabilities /= probabilities.sum()
    out = np.zeros(len(logits))
    out[order] = probabilities
    return out


def assert_drawn_from(draws: np.ndarray, probabilities: np.ndarray, what: str = "") -> None:
    """Raise AssertionError if an id without probability was drawn, or if chi-squared is too large to be chance."""
    counts = np.bincount(draws, minlength=len(probabilities))
    assert len(counts) == len(probabilities), f"{what}: id {draws.max()} is outside of the vocabulary"
    assert not counts[probabilities == 0].any(), f"{what}: ids {np.flatnonzero(counts * (probabilities == 0))} drawn"
    expected = len(draws) * probabilities
    often = expected >= 8
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    freedom = often.sum() - 1 + (expected[-1] >= 8)
    if expected[-1] < 8:
        assert counts[-1] < 30, f"{what}: rare ids drawn {counts[-1]} times, expected {expected[-1]:.1f}"
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Wilson and Hilferty's normal approximation; 4.5 deviations are one chance in 300,000.
    limit = freedom * (1 - 2 / (9 * max(freedom, 1)) + 4.5 * (2 / (9 * max(freedom, 1))) ** 0.5) ** 3
    assert statistic <= limit, f"{what}: chi-squared {statistic:.1f} over {freedom} degrees of freedom"
