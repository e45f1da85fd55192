"""Owns the way of the likeliest tokens from a step to the requests that want to know of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jpaged.device.adjusted_sampler import Told
from jpaged.host.decode_rows import Row
from jpaged.host.request import RequestStatus


def take_tops(rows: Sequence[Row], told: Told) -> None:
    """Gives each request that wants to know of the likeliest tokens those in the place of the token that it is about to
    take; before the token itself, so that no token is without them."""
    wanted = [
        (index, request)
        for index, (request, start, num_tokens) in enumerate(rows)
        if request.sampling.num_top_logprobs
        and request.status is RequestStatus.RUNNING
        and request.num_computed_tokens == start
        and start + num_tokens >= request.num_tokens
    ]
    if not wanted:
        return
    ids, logprobs = jax.device_get((told.ids, told.logprobs))
    vocab = told.all_logprobs.shape[1]
    whole: np.ndarray | None = None
    for index, request in wanted:
        number = request.sampling.num_top_logprobs
        number = vocab if number < 0 else number
        if number <= ids.shape[1]:
            tops = ids[index, :number].copy(), logprobs[index, :number].copy()
        else:
            whole = jax.device_get(told.all_logprobs) if whole is None else whole
            order = np.argsort(-whole[index], kind="stable")[:number]
            tops = order, whole[index][order]
        possible = tops[1] > -np.inf  # of processed ones, the others cannot be drawn
        tops = tops[0][possible], tops[1][possible]
        del request.output_tops[len(request.output_token_ids) :]  # of a step that was interrupted
        request.output_tops.append(tops)


def take_prompt_tops(rows: Sequence[Row], tops: tuple[jax.Array, jax.Array]) -> None:
    """Gives each request that wants to know of the likeliest tokens in the places of its prompt those that this step
    has found; before the scores of the prompt's own tokens. After a preemption they come again."""
    fetched: tuple[np.ndarray, np.ndarray] | None = None
    first = 0
    for request, start, num_tokens in rows:
        number = request.sampling.prompt_logprobs
        scored = request.scored(start, start + num_tokens)
        is_current = request.status is RequestStatus.RUNNING and request.num_computed_tokens == start
        if number and scored and is_current and request.score_from is not None:
            fetched = jax.device_get(tops) if fetched is None else fetched
            at = first + scored.start - start
            del request.prompt_tops[scored.start - (request.score_from - 1) :]
            for ids, logprobs in zip(*(part[at : at + len(scored), :number].copy() for part in fetched), strict=True):
                request.prompt_tops.append((ids, logprobs))
        first += num_tokens
