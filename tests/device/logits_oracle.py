"""What becomes of a model's logits before a token is drawn, in float64, from the definitions in `SamplingParams`.

Settings have the names of `SamplingParams`. `bad_words` are sequences of ids here, and `ending_ids` those that end a
text, which `min_tokens` holds back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from sampling_oracle import distribution

FILTERS = ("top_k", "top_p", "min_p")
EDGE = 1e-4


def adjusted(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], **settings: Any) -> np.ndarray:
    """Penalties, then bias, then masks; what may not be drawn is -inf."""
    scores = np.array(logits, np.float64)
    repetition = settings.get("repetition_penalty", 1.0)
    for i in {*prompt, *output}:
        scores[i] = scores[i] / repetition if scores[i] > 0 else scores[i] * repetition
    for i in set(output):
        scores[i] -= settings.get("frequency_penalty", 0.0) * list(output).count(i)
        scores[i] -= settings.get("presence_penalty", 0.0)
    for i, number in (settings.get("logit_bias") or {}).items():
        scores[int(i)] += number
    left = drawable(len(scores), output, **settings)
    return np.where([i in left for i in range(len(scores))], scores, -np.inf)


def drawable(
    vocab: int,
    output: Sequence[int],
    *,
    allowed_token_ids: Collection[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    ending_ids: Collection[int] = (),
    min_tokens: int = 0,
    **others: Any,
) -> set[int]:
    """The ids that may be drawn after an output. A rule that would leave nothing gives way to those before it."""
    left = set(range(vocab)) if allowed_token_ids is None else set(allowed_token_ids)
    # A word is completed by its last id if the output ends with all the others.
    ended = [(list(output[len(output) - len(word) + 1 :]), word) for word in bad_words if len(word) <= len(output) + 1]
    left = left - {word[-1] for end, word in ended if end == list(word[:-1])} or left
    if len(output) < min_tokens:
        left = left - set(ending_ids) or left
    return left


def log_softmax(scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    largest = scores.max()
    return scores - largest - np.log(np.exp(scores - largest).sum())


def probabilities(scores: np.ndarray, **settings: Any) -> np.ndarray:
    """What adjusted logits are drawn with."""
    given = {name: settings[name] for name in ("temperature", *FILTERS) if name in settings}
    return distribution(scores, **{**given, "top_k": max(given.get("top_k", 0), 0)})


def logprobs(logits: np.ndarray, scores: np.ndarray, **settings: Any) -> np.ndarray:
    """The log-probabilities that are told, `scores` being the adjusted `logits`."""
    if settings.get("logprobs_mode", "raw") == "raw":
        return log_softmax(logits)
    if settings.get("temperature", 1.0) == 0:
        return log_softmax(scores)
    with np.errstate(divide="ignore"):
        return np.log(probabilities(scores, **settings))


def likeliest(values: np.ndarray, number: int) -> list[int]:
    """The ids of the largest values, best first and of equal ones the lowest; -1: all."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return order if number < 0 else order[:number]


def is_close(scores: np.ndarray, **settings: Any) -> bool:
    """Whether rounding could change which ids the filters keep."""
    kept = probabilities(scores, **settings) > 0
    for name, off in (("top_p", 1.0), ("min_p", 0.0)):
        for factor in (1 - EDGE, 1 + EDGE):
            if settings.get(name, off) != off:
                moved = settings | {name: min(settings[name] * factor, 1.0)}
                if (kept != (probabilities(scores, **moved) > 0)).any():
                    return True
    # One that is kept and one that is not, which differ by a little: equal ones stay equal.
    if kept.all() or settings.get("temperature", 1.0) == 0:
        return False
    gap = scores[kept].min() - scores[~kept].max()
    return bool(0 < gap < EDGE)
