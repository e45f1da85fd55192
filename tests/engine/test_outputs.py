from __future__ import annotations

import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.engine.outputs import CompletionOutput
from jpaged.host.request import Request


def sample_of(num_tokens: int, num_tops: int) -> tuple[CompletionOutput, Request]:
    request = Request("a", [1, 2], SamplingParams(logprobs=num_tops), seed=0, eos_token_ids=frozenset(), max_tokens=99)
    for token_id in range(num_tokens):
        request.output_token_ids.append(token_id)
        request.output_logprobs.append(-float(token_id))
        request.output_tops.append((np.arange(num_tops), -np.arange(num_tops, dtype=np.float32)))
    return CompletionOutput(0, request, None), request


@pytest.mark.parametrize("num_tops", [None, 0, 3])
def test_parts_join_to_the_whole(num_tops):
    sample, _ = sample_of(6, num_tops or 0)
    if num_tops is None:
        sample._request.sampling = SamplingParams()
    part = sample.part(0, 0)
    for cut in range(7):
        early = CompletionOutput(0, sample._request, None)
        early._num_tokens = cut
        joined = early.part(0, 0).then(sample.part(cut, 0))
        assert joined == part
    assert (part.token_ids, part.logprobs, part.top_logprobs) == (
        sample.token_ids,
        sample.logprobs,
        sample.top_logprobs,
    )
    assert (part.logprobs is None, part.top_logprobs is None) == (num_tops is None, not num_tops)


def test_a_part_does_not_look_at_what_came_before():
    """So that a token of a stream costs the same, however long it has grown."""
    sample, request = sample_of(6, 2)
    request.output_tops[:5] = [None] * 5  # whoever looked at them would fail
    assert sample.part(5, 0).top_logprobs == [{0: 0.0, 1: -1.0}]
