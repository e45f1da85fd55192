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
        del request.output_tops[len(request.output_token_ids) :]  # of a step that was interrupted
        request.output_tops.append(tops)
