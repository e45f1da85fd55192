"""Owns the comparison of continuous batching with static batches: steps for the same requests in as many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .paged import PAGE_SIZE, serve
from .trace import MAX_LEN, Lengths


@dataclass(frozen=True)
class Batching:
    """Steps that a workload takes on a device of `num_rows` rows. Each step offers that many slots for new tokens.

    static: batches in the order of arrival; the next one begins when the longest output of this one has ended.
    continuous: a request begins when a row is free. Either computes a prompt in the step of its first token.
    """

    workload: str
    num_rows: int
    num_requests: int
    num_output_tokens: int
    static_steps: int
    continuous_steps: int
    ratio: float  # of static to continuous steps
    static_busy: float  # the share of the slots that made an output token
    continuous_busy: float


def compare_batching(workload: str, trace: Sequence[Lengths], num_rows: int) -> Batching:
    batches = [trace[start : start + num_rows] for start in range(0, len(trace), num_rows)]
    static_steps = sum(max(lengths.output for lengths in batch) for batch in batches)
    ample = (num_rows + 1) * MAX_LEN
    continuous_steps = sum(1 for _ in serve(trace, num_slots=ample, page_size=PAGE_SIZE, max_num_seqs=num_rows))
    num_output_tokens = sum(lengths.output for lengths in trace)
    return Batching(
        workload,
        num_rows,
        len(trace),
        num_output_tokens,
        static_steps,
        continuous_steps,
        ratio=static_steps / continuous_steps,
        static_busy=num_output_tokens / (num_rows * static_steps),
        continuous_busy=num_output_tokens / (num_rows * continuous_steps),
    )
