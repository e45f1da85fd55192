"""Owns `DecodeRows`: the running requests of which each step computes one token, as vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, repeat
from typing import NamedTuple

import numpy as np

from .request import Request, RequestStatus

# One request's share of a step: (request, start, num_tokens) for its tokens at start .. start + num_tokens - 1. A plain
# tuple: a decode step makes one for each request, and a named one takes six times as long to make.
Row = tuple[Request, int, int]


class DecodeStep(NamedTuple):
    """The first rows of a plan: one token of each of the `DecodeRows`, in their order."""

    version: int  # of the `DecodeRows`: whether they are still the same
    in_table: np.ndarray  # intp [N]: rows of the `RowTable`
    starts: np.ndarray  # int32 [N]: the positions of their tokens
    token_ids: np.ndarray | None  # int32 [N]; None where the step before draws them


class DecodeRows:
    """Most requests of most steps only draw the next token. What a step asks of them is answered here by a few vector
    operations, so that its cost hardly grows with their number; only those at the end of a page, or of their text, are
    looked at one by one. A request says by `decodes` that it is among them, and keeps its own account of its tokens:
    from that these vectors can be made again at any time.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.version = 0
        self._left: list[int] = []  # rows of the table
        self.in_table: np.ndarray
        self.starts: np.ndarray
        self.token_ids: np.ndarray
        self.num_left: np.ndarray  # of output tokens
        self.clear()

    def __len__(self) -> int:
        return len(self.requests) - len(self._left)

    def __bool__(self) -> bool:
        return len(self) > 0

    def clear(self) -> None:
        """Has none left; they are to be looked at one by one."""
        for request in self.requests:
            request.decodes = False
        self._make([])

    def add(self, requests: Sequence[Request]) -> None:
        """Takes in more of them, each with a token that it has drawn and not yet computed."""
        if not requests:
            return
        self.settle()
        for request in requests:
            request.decodes = True
        known = len(self.requests)
        self.requests = self.requests + list(requests)
        new = _vectors(requests)
        old = self.in_table, self.starts, self.token_ids, self.num_left
        self.in_table, self.starts, self.token_ids, self.num_left = (np.concatenate(pair) for pair in zip(old, new))
        self._add_endings(self.requests[known:])
        self.version += 1

    def remove(self, request: Request) -> None:
        """Lets go of a request, if it is among them, before it gives back its row of the table."""
        if request.decodes:
            request.decodes = False
            self._left.append(request.row)
            self.version += 1

    def settle(self) -> None:
        """Closes the gaps of those that have left."""
        if self._left:
            kept = ~np.isin(self.in_table, self._left)
            self.requests = list(compress(self.requests, kept.tolist()))
            self.in_table, self.starts = self.in_table[kept], self.starts[kept]
            self.token_ids, self.num_left = self.token_ids[kept], self.num_left[kept]
            self._left = []

    def rows(self, ahead: int = 0) -> list[Row]:
        """Their rows of a plan: for the next token of each, or for the one so many after it."""
        return list(zip(self.requests, (self.starts + ahead).tolist(), repeat(1)))

    def step(self, ahead: int = 0) -> DecodeStep:
        return DecodeStep(self.version, self.in_table, self.starts + ahead, None if ahead else self.token_ids)

    def at_page_start(self, page_size: int, ahead: int = 0) -> list[int]:
        """Which of them write the first token of a page."""
        return ((self.starts + ahead) % page_size == 0).nonzero()[0].tolist()

    def take(
        self, step: DecodeStep, rows: Sequence[Row], token_ids: np.ndarray, logprobs: Sequence[float], now: float
    ) -> tuple[list[Request], np.ndarray, list[int]]:
        """Takes in what a step's rows have drawn, but those of requests that have left since; returns the others, how
        many of their tokens are computed now, and the indices of those that the token may end."""
        num_rows, ends, gained, running = len(step.starts), step.starts + 1, [], RequestStatus.RUNNING
        for (request, start, _), token_id, logprob in zip(rows[:num_rows], token_ids.tolist(), logprobs, strict=False):
            if request.status is running and request.num_computed_tokens == start:
                request.num_computed_tokens = start + 1
                request.output_token_ids.append(token_id)
                request.output_logprobs.append(logprob)
                request.token_times.append(now)
                gained.append(request)
        if len(gained) == num_rows:
            token_ids = token_ids[:num_rows]
        else:
            kept = set(gained)
            at = [index for index, (request, _, _) in enumerate(rows[:num_rows]) if request in kept]
            token_ids, ends = token_ids[at], ends[at]
        self.settle()
        if self.requests != gained:
            self.renew()
            return gained, ends, list(range(len(gained)))
        may_end = ((self.num_left <= 1) | np.isin(token_ids, self._endings)).nonzero()[0].tolist()
        self.advance(token_ids)
        return gained, ends, may_end

    def advance(self, token_ids: np.ndarray) -> None:
        """Takes in the tokens that all of them have drawn."""
        self.starts, self.num_left, self.token_ids = self.starts + 1, self.num_left - 1, token_ids

    def renew(self) -> None:
        """Makes the vectors again, from what the requests say."""
        self.settle()
        self._make(self.requests)

    def check(self, running: Sequence[Request]) -> None:
        """Asserts that the vectors say what the requests do."""
        self.settle()
        assert self.requests == [request for request in self.requests if request.decodes and request in running]
        assert sum(request.decodes for request in running) == len(self.requests), "a request decodes, but not here"
        vectors = self.in_table, self.starts, self.token_ids, self.num_left
        assert all(map(np.array_equal, vectors, _vectors(self.requests))), "the rows that decode are others than these"
        assert all(request.ending_ids <= set(self._endings.tolist()) for request in self.requests)
        assert not any(request.shares_tail or request.is_beam for request in self.requests)

    def _make(self, requests: list[Request]) -> None:
        self.requests, self._left = requests, []
        self.in_table, self.starts, self.token_ids, self.num_left = _vectors(requests)
        self._seen_endings: set[frozenset[int]] = set()
        self._endings = np.zeros(0, np.int64)
        self._add_endings(requests)
        self.version += 1

    def _add_endings(self, requests: Sequence[Request]) -> None:
        """Notes the ids that end the text of any of them."""
        new = {request.ending_ids for request in requests} - self._seen_endings
        if new:
            self._seen_endings |= new
            self._endings = np.array(sorted(frozenset().union(*self._seen_endings)), np.int64)


def _vectors(requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([request.row for request in requests], np.intp),
        np.array([request.num_computed_tokens for request in requests], np.int32),
        np.array([request.output_token_ids[-1] for request in requests], np.int32),
        np.array([request.most_outputs - len(request.output_token_ids) for request in requests], np.int64),
    )
