"""Owns the calls of functions on the host that process the logits of a request."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jpaged.device.sampler import NEVER, Scores
from jpaged.host.decode_rows import Row
from jpaged.host.request import Request, RequestFailed


def process(rows: Sequence[Row], scores: Scores, banned_ids: np.ndarray) -> Scores:
    """The scores with those rows replaced that have a `SamplingParams.logits_processor`.

    Raises RequestFailed, from what the function raised.
    """
    called = [
        (index, request)
        for index, (request, start, num_tokens) in enumerate(rows)
        if request.sampling.logits_processor is not None and start + num_tokens >= request.num_tokens
    ]
    if not called:
        return scores
    allowed, taken = (np.array(part) for part in jax.device_get(scores))
    vocab = allowed.shape[1]
    for index, request in called:
        logits, banned = allowed[index].copy(), banned_ids[index][banned_ids[index] < vocab]
        logits[banned] = taken[index, : len(banned)]
        processed = _call(request, logits)
        allowed[index] = processed
        taken[index, : len(banned)] = processed[banned]
        allowed[index, banned] = NEVER
    return Scores(*(jax.device_put(new, old.sharding) for new, old in zip((allowed, taken), scores, strict=True)))


def _call(request: Request, logits: np.ndarray) -> np.ndarray:
    vocab = len(logits)
    assert request.sampling.logits_processor is not None
    try:
        processed = np.asarray(request.sampling.logits_processor(request.tokens(0, request.num_tokens), logits))
    except Exception as error:
        raise _failed(request, f"raised {type(error).__name__}: {error}") from error
    if processed.shape != (vocab,) or processed.dtype.kind not in "fiu":
        kind = f"{processed.dtype} of shape {processed.shape}"
        raise _failed(request, f"must return {vocab} numbers, got {kind}")
    if np.isnan(processed).any() or not (processed > -np.inf).any():
        raise _failed(request, "must return numbers, none of them NaN and not all of them -inf")
    return processed


def _failed(request: Request, complaint: str) -> RequestFailed:
    return RequestFailed(request.request_id, f"the logits_processor of request {request.request_id!r} {complaint}")
