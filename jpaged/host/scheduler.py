"""Owns `Scheduler`: which tokens of which requests are computed in the next step, and what their results lead to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from .page_pool import PagePool
from .request import Request, RequestStatus


class Row(NamedTuple):
    """One request's share of a step: its tokens at positions start .. start + num_tokens - 1."""

    request: Request
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the request's last token, so that what it draws is the next one."""
        return self.start + self.num_tokens == self.request.num_tokens


class BatchPlan(NamedTuple):
    rows: list[Row]
    num_tokens: int


class Scheduler:
    """First come, first served, over one pool of pages; no prefill phase and no decode phase.

    Running requests followed by waiting ones are always in the order of arrival: whoever is preempted came last among
    the running and goes to the front of the waiting. As the pool holds a request of `max_model_len` tokens, the oldest
    request is never preempted for want of pages and advances in each step; so every request ends.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        step_size: Callable[[int], int] | None = None,
    ):
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._pages_per_seq = pool.pages_for(max_model_len)
        if self._pages_per_seq > pool.num_pages - 1:
            raise ValueError(
                f"max_model_len ({max_model_len}) takes {self._pages_per_seq} pages of {pool.page_size} tokens, but "
                f"the pool has {pool.num_pages - 1}: lower max_model_len to {(pool.num_pages - 1) * pool.page_size} "
                "or give the KV cache more memory"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._step_size = step_size  # how many of the tokens that could be computed are worth it, by `Buckets`
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}  # the unfinished ones

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is held, of all requests together."""
        return sum(request.num_computed_tokens for request in self.running)

    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is in use: give each unfinished request its own")
        if request.num_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {request.num_tokens} tokens and leaves no room to generate within max_model_len "
                f"({self.max_model_len}): shorten the prompt or raise max_model_len"
            )
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request now, between any two calls; None if there is no such unfinished request."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def schedule(self) -> BatchPlan | None:
        """Shares out a step's tokens; None if there is nothing to do."""
        rows, budget, preemptions_before = [], self.max_num_batched_tokens, self.num_preemptions

        # Every running request, oldest first, gets its missing tokens as far as the budget goes: a whole prompt, a
        # chunk of one, or the one token drawn last. Where pages run out, the last come makes room, maybe for itself.
        for request in list(self.running):
            if not budget or request.status is not RequestStatus.RUNNING:
                break  # once preempted, as are all that came after it
            start = request.num_computed_tokens
            num_tokens = min(request.num_tokens - start, budget)
            if not self._make_room(request, start + num_tokens):
                break
            rows.append(Row(request, start, num_tokens))
            budget -= num_tokens

        # Then the waiting ones, strictly in order. All its present tokens must find free pages, or a request would
        # start only to be preempted; they are not reserved, so nothing is held for tokens that don't exist yet.
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self.num_preemptions > preemptions_before or not self._fits(request):
                break
            num_tokens = min(request.num_tokens, budget)
            self._start(self.waiting.popleft(), num_tokens)
            rows.append(Row(request, 0, num_tokens))
            budget -= num_tokens

        num_tokens = self.max_num_batched_tokens - budget
        if self._step_size is not None and num_tokens > len(rows):
            rows, num_tokens = self._cut(rows, num_tokens)
        return BatchPlan(rows, num_tokens) if rows else None

    def ahead(self, plan: BatchPlan) -> BatchPlan | None:
        """The step after a decode step whose results are not known yet: one more token for each of its rows, in its
        order. None where the next step may look otherwise: a request ends with this one's token or was aborted, another
        one may start, or pages are short. (A request that ends unforeseen, at a stop token, wastes its row of it.)"""
        if len(plan.rows) != len(self.running) or (self.waiting and len(self.running) < self.max_num_seqs):
            return None
        missing = 0
        for request, start, _ in plan.rows:
            if request.status is not RequestStatus.RUNNING or request.num_computed_tokens != start:
                return None
            if request.num_left(self.max_model_len) < 2:
                return None
            missing += start + 2 > len(request.page_ids) * self.pool.page_size
        if missing > self.pool.num_free:
            return None
        for request, start, _ in plan.rows:
            self._hold(request, start + 2)
        return BatchPlan([Row(request, start + 1, 1) for request, start, _ in plan.rows], len(plan.rows))

    def update(self, plan: BatchPlan, sampled_tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Takes in a step's results, one for each row of `plan` in its order; returns who gained a token.

        Rows of requests that were aborted since, or lost their pages, are skipped: `sampled_tokens` may be longer than
        the plan (padding), and holds nothing of use for rows that did not reach their request's last token.
        """
        now, gained = perf_counter(), []
        tokens, logprobs = np.asarray(sampled_tokens).tolist(), np.asarray(logprobs).tolist()
        assert len(tokens) >= len(plan.rows), f"{len(tokens)} sampled tokens for {len(plan.rows)} rows"
        for row, token_id, logprob in zip(plan.rows, tokens, logprobs, strict=False):
            request, start, num_tokens = row
            if request.status is not RequestStatus.RUNNING or request.num_computed_tokens != start:
                continue
            samples = row.samples
            request.num_computed_tokens = start + num_tokens
            if samples:
                request.append(token_id, logprob, now)
                gained.append(request)
                if end := request.end(self.max_model_len):
                    self.finish(request, *end)
        return gained

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request and frees its pages. Of one that has ended, only the reasons change: where the last token
        allowed also completes a stop string, the engine says so here."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.status is RequestStatus.FINISHED:
            return
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        del self._requests[request.request_id]
        self.pool.release(request.drop_pages())
        request.status = RequestStatus.FINISHED
        request.finish_time = perf_counter()

    def start_over(self) -> None:
        """Every running request gives back its pages and waits to compute its tokens again. Trusts no account but the
        list of unfinished requests: the others may have been left half written by an interruption."""
        self.pool.clear()
        for request in self._requests.values():
            if request.status is RequestStatus.RUNNING:
                request.num_preemptions += 1
                self.num_preemptions += 1
            request.status = RequestStatus.WAITING
            request.drop_pages()
        self.running, self.waiting = [], deque(self._requests.values())

    def check(self) -> None:
        """Asserts that the pool and the requests agree about every page. Slow: for tests and `check_integrity`."""
        self.pool.check(request.page_ids for request in self.running)
        for request in self.running:
            num_pages, num_computed = len(request.page_ids), request.num_computed_tokens
            assert request.status is RequestStatus.RUNNING, f"{request.request_id} runs as {request.status}"
            assert num_computed <= num_pages * self.pool.page_size, f"{request.request_id} has outgrown its pages"
            assert request.block_table is not None
            assert request.block_table.tolist() == request.page_ids + [0] * (self._pages_per_seq - num_pages)
        for request in self.waiting:
            assert request.status is RequestStatus.WAITING, f"{request.request_id} waits as {request.status}"
            assert not request.page_ids, f"{request.request_id} holds pages while it waits"
            assert request.num_computed_tokens == 0, f"{request.request_id} has computed tokens without pages"
        assert list(self._requests.values()) == [*self.running, *self.waiting], "not in the order of arrival"

    def _cut(self, rows: list[Row], num_tokens: int) -> tuple[list[Row], int]:
        """Leaves the last of the prompts' tokens to the next step where that fills the step's shape better. Every row
        keeps a token."""
        assert self._step_size is not None
        excess = num_tokens - self._step_size(num_tokens)
        if excess > num_tokens - len(rows):
            return rows, num_tokens
        num_tokens -= excess
        for i in reversed(range(len(rows))):
            less = min(excess, rows[i].num_tokens - 1)
            rows[i] = rows[i]._replace(num_tokens=rows[i].num_tokens - less)
            excess -= less
            if not excess:
                break
        return rows, num_tokens

    def _fits(self, request: Request) -> bool:
        return self.pool.pages_for(request.num_tokens) <= self.pool.num_free

    def _hold(self, request: Request, num_tokens: int) -> bool:
        """Gives a request the pages that its first `num_tokens` tokens lack; False if so many are not free."""
        missing = num_tokens - len(request.page_ids) * self.pool.page_size
        if missing <= 0:
            return True
        page_ids = self.pool.acquire(self.pool.pages_for(missing))
        if page_ids is None:
            return False
        request.add_pages(page_ids, self._pages_per_seq)
        return True

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """As `_hold`, at the cost of those that came last; False if it was the last itself and is preempted now."""
        while not self._hold(request, num_tokens):
            if self._preempt_last() is request:
                return False
        return True

    def _start(self, request: Request, num_tokens: int) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        held = self._hold(request, num_tokens)
        assert held, f"{request.request_id} was started without pages for it"

    def _preempt_last(self) -> Request:
        """Stops the request that came last; it will compute its prompt and its output so far again."""
        request = self.running.pop()
        self.pool.release(request.drop_pages())
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        return request
