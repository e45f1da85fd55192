"""Owns `Scheduler`: which tokens of which requests are computed in the next step, and what their results lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from .accounts import check_accounts, num_held_tokens
from .batch_plan import BatchPlan
from .beam_search import Branch
from .decode_rows import DecodeStep, Row
from .page_pool import PagePool
from .page_tables import Found, PageTables
from .queues import Queues
from .request import Request, RequestStatus
from .row_table import RowTable
from .swap_space import NO_MOVES


class Scheduler:
    """First come, first served, over one pool of pages; no prefill phase and no decode phase.

    Running requests are in order, and so are waiting ones: whoever is preempted is the last among the running, and the
    first of the waiting is started before all others. As the pool holds a request of `max_model_len` tokens, the first
    of the running is never preempted for want of pages and advances in each step; so every request ends.

    The samples of a request, or its beams, are a family: preempted and started again together, unless they are the
    first family or run alone.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        step_size: Callable[[int], int] | None = None,
        prefix_caching: bool = True,
        sliding_window: int | None = None,
        reserve: float = 0.02,
    ):
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        pages_per_seq = pool.pages_for(max_model_len)
        if pages_per_seq > pool.num_pages - 1:
            raise ValueError(
                f"max_model_len ({max_model_len}) takes {pages_per_seq} pages of {pool.page_size} tokens, but "
                f"the pool has {pool.num_pages - 1}: lower max_model_len to {(pool.num_pages - 1) * pool.page_size} "
                "or give the KV cache more memory"
            )
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        # Pages kept free for those that run when another is started, which would soon be stopped again otherwise.
        self._num_reserved = int(reserve * (pool.num_pages - 1))
        self._step_size = step_size  # how many of the tokens that could be computed are worth it, by `Buckets`
        self.rows = RowTable(max_num_seqs, pages_per_seq)
        self._tables = PageTables(pool, self.rows, prefix_caching, sliding_window)
        self._queues = Queues(max_num_seqs)
        self.num_preemptions = 0

    @property
    def running(self) -> list[Request]:
        return self._queues.running

    @property
    def waiting(self) -> list[Request]:
        """Without the forks of those whose prompt is not computed yet."""
        return self._queues.waiting

    @property
    def max_num_seqs(self) -> int:
        return self._queues.max_num_seqs

    @property
    def has_unfinished(self) -> bool:
        return bool(self._queues.requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.requests) - len(self.running)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were not computed, as their KV was there."""
        return self._tables.num_cached_tokens

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose KV is held, those that requests share counted once."""
        return num_held_tokens(self.pool, self.running)

    def add(self, request: Request, *, order: int | None = None) -> None:
        """Queues a request as the last one, or at a place in the order of arrival that was kept for it: a beam search
        has as many places as it may have beams, from that of the first on."""
        if request.request_id in self._queues.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use: give each unfinished request its own")
        if request.num_tokens + (not request.only_scores) > self.max_model_len:
            raise ValueError(
                f"the prompt has {request.num_tokens} tokens and leaves no room to generate within max_model_len "
                f"({self.max_model_len}): shorten the prompt or raise max_model_len"
            )
        request.most_outputs = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        self._queues.add(request, order)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request now, between any two calls; None if there is no such unfinished request."""
        request = self._queues.requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def schedule(self) -> BatchPlan | None:
        """Shares out a step's tokens; None if there is nothing to do."""
        if self.waiting:
            self._make_way()
        preemptions_before, page_size = self.num_preemptions, self.pool.page_size
        rows, decoding = self._decode()
        budget = self.max_num_batched_tokens - len(rows)

        # Every other running request, oldest first, gets its missing tokens as far as the budget goes: a whole prompt,
        # a chunk of one, or the one token drawn last. Where pages run out, the last come makes room, maybe for itself.
        running = RequestStatus.RUNNING
        for request in self._others(len(rows)):
            if not budget or request.status is not running:
                break  # once preempted, as are all that came after it
            start = request.num_computed_tokens
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids) - start
            if num_tokens != 1:
                if not num_tokens:
                    continue  # a beam that waits for the others
                if num_tokens >= page_size and self._tables.find_more(request):
                    self._queues.release_forks(request)
                    start = request.num_computed_tokens
                    num_tokens = request.num_tokens - start
                num_tokens = min(num_tokens, budget)
            if request.shares_tail or start + num_tokens > len(request.page_ids) * page_size:
                if not self._make_room(request, start, start + num_tokens):
                    break
            rows.append((request, start, num_tokens))
            budget -= num_tokens
        if self.num_preemptions > preemptions_before:  # with the last, those of its family that had rows
            rows, decoding = [row for row in rows if row[0].status is running], None
            budget = self.max_num_batched_tokens - sum(num_tokens for _, _, num_tokens in rows)

        # Then the waiting ones, strictly in order. All its present tokens must find free pages, with some to spare for
        # those that run, or a request would start only to be preempted. Nothing is held for its tokens to come. One
        # whose prompt is just being computed for another waits until it can be found.
        copies_to_come = 0
        computing: set[bytes | None] = set()
        if self.waiting:
            computing = {self._tables.prompt_key(request) for request, _, _ in rows if not request.has_computed_prompt}
        while self.waiting and budget and not self._queues.is_full:
            request = self.waiting[0]
            if not self._queues.finds_rows(request):
                break
            found = self._tables.inheritance(request)
            copies_to_come += found.num_tokens % page_size > 0  # now, or with the first token that it draws
            missing = self._num_missing(request, found) + copies_to_come
            if rows:
                missing += self._num_reserved
            if self.num_preemptions > preemptions_before or missing > self.pool.num_free:
                break
            if self.running and not self._family_fits(request, missing):
                break
            is_found = found.num_tokens // page_size >= request.num_prompt_tokens // page_size
            key = None if is_found else self._tables.prompt_key(request)
            if key is not None and key in computing:
                break
            computing.add(key)
            start = self._start(request, found)
            num_tokens = min(request.num_tokens - start, budget)
            if not self._tables.hold(request, start, start + num_tokens):
                self._stop(request)  # the free pages are being copied
                break
            request.parent = None
            rows.append((request, start, num_tokens))
            budget -= num_tokens

        if not rows and self.waiting and self.running:
            # All that run are beams that wait for one which finds no room: the last of them makes some.
            self._preempt_last()
            return self.schedule()

        num_tokens = self.max_num_batched_tokens - budget
        if self._step_size is not None and num_tokens > len(rows):
            rows, num_tokens = self._cut(rows, num_tokens)
        return self._plan(rows, num_tokens, decoding) if rows else None

    def ahead(self, plan: BatchPlan) -> BatchPlan | None:
        """The step after a decode step whose results are not known yet: one more token for each of its rows, in its
        order. None where the next step may look otherwise: a request ends with this one's token or was aborted, another
        one may start, or pages are short. (A request that ends unforeseen, at a stop token, wastes its row of it.)"""
        decode_rows = self._queues.decode_rows
        if plan.decoding is None or plan.decoding.version != decode_rows.version:
            return None
        if not len(plan.rows) == len(decode_rows) == len(self.running) or self._queues.num_led:
            return None
        if self.waiting and (not self._queues.is_full or self._queues.gives_way()):
            return None
        if decode_rows.num_left.min() < 2:
            return None
        grows = decode_rows.at_page_start(self.pool.page_size, ahead=1)
        if len(grows) > self.pool.num_free:
            return None
        rows = decode_rows.rows(ahead=1)
        for index in grows:
            request, start, _ = rows[index]
            self._tables.hold(request, start, start + 1)
        return self._plan(rows, len(rows), decode_rows.step(ahead=1))

    def update(
        self,
        plan: BatchPlan,
        sampled_tokens: Sequence[int],
        logprobs: Sequence[float],
        candidates: tuple[np.ndarray, np.ndarray] | None = None,
        prompt_logprobs: np.ndarray | None = None,
    ) -> list[Request]:
        """Takes in a step's results, one for each row of `plan` in its order, but `prompt_logprobs` for each token;
        returns who gained a token, or if it is a beam, candidates for one, or the last of its scores.

        Rows of requests that were aborted since, or lost their pages, are skipped: `sampled_tokens` may be longer than
        the plan (padding), and holds nothing of use for rows that did not reach their request's last token.
        """
        now, page_size = perf_counter(), self.pool.page_size
        token_ids, values = np.asarray(sampled_tokens), np.asarray(logprobs).tolist()
        assert len(token_ids) >= len(plan.rows), f"{len(token_ids)} sampled tokens for {len(plan.rows)} rows"
        gained = self._take_tokens(plan, token_ids, values, now)
        tokens, first = token_ids.tolist(), 0 if plan.decoding is None else len(plan.decoding.starts)
        running, windows = RequestStatus.RUNNING, self._tables.has_windows
        begin_to_decode = []
        for index in range(first, len(plan.rows)):
            request, start, num_tokens = plan.rows[index]
            if request.status is not running or request.num_computed_tokens != start:
                continue
            request.num_computed_tokens = end = start + num_tokens
            if end >= (request.num_published_pages + 1) * page_size:
                self._tables.publish(request)
            if windows:
                self._tables.drop_unseen(request)
            if request.forks:
                self._queues.release_forks(request)
            if request.lacks_scores or request.only_scores:
                assert prompt_logprobs is not None, "scores need steps that return the log-probabilities of prompts"
                before = sum(length for _, _, length in plan.rows[:index])
                is_scored = request.take_scores(start, prompt_logprobs[before : before + num_tokens].tolist())
                if request.only_scores:
                    if is_scored:
                        gained.append(request)
                        self.finish(request, "stop")
                    continue
            if end < request.num_tokens:
                continue  # what was drawn is not behind its last token
            gained.append(request)
            if request.is_beam:
                assert candidates is not None, "a beam search needs steps that return candidates"
                request.candidates = candidates[0][index], candidates[1][index]
                continue
            request.append(tokens[index], values[index], now)
            if reasons := request.end(self.max_model_len):
                self.finish(request, *reasons)
            elif not request.shares_tail:
                begin_to_decode.append(request)
        if plan.decoding is None and self._queues.decode_rows:
            self._queues.decode_rows.renew()  # they were looked at one by one this time
        self._queues.decode_rows.add([request for request in begin_to_decode if not request.decodes])
        return gained

    def _take_tokens(self, plan: BatchPlan, token_ids: np.ndarray, logprobs: list[float], now: float) -> list[Request]:
        """The part of `update` for the rows that `plan.decoding` tells of."""
        if plan.decoding is None:
            return []
        gained, ends, may_end = self._queues.decode_rows.take(plan.decoding, plan.rows, token_ids, logprobs, now)
        for index in (ends % self.pool.page_size == 0).nonzero()[0].tolist():
            self._tables.publish(gained[index])
        if self._tables.has_windows:
            for index in self._tables.goes_out_of_sight(ends):
                self._tables.drop_unseen(gained[index])
        for index in may_end:
            if reasons := gained[index].end(self.max_model_len):
                self.finish(gained[index], *reasons)
        return gained

    def branch(self, beams: list[Request], branches: Sequence[Branch]) -> list[Request]:
        """Has beams go on as branches of themselves, the requests among them trading tokens and pages; returns them in
        the order of the branches. Those that no branch is left for are ended."""
        now = perf_counter()
        took: dict[int, Request] = {}  # the request of each branch that stays in its parent's
        for at, branch in enumerate(branches):
            if all(branch.parent != branches[other].parent for other in took):
                took[at] = beams[branch.parent]
        idle = [beam for beam in beams if all(beam is not stays for stays in took.values())]
        lengths = [beam.num_tokens for beam in beams]
        for at, branch in enumerate(branches):
            if at not in took:
                took[at] = idle.pop()
                self._follow(took[at], beams[branch.parent])
        outputs = [(list(beam.output_token_ids), list(beam.output_logprobs)) for beam in beams]
        for at, branch in enumerate(branches):
            request, (token_ids, logprobs) = took[at], outputs[branch.parent]
            request.output_token_ids, request.output_logprobs = list(token_ids), list(logprobs)
            request.num_inherited_tokens = lengths[branch.parent]
            request.append(branch.token_id, branch.logprob, now)
            request.candidates = None
        for beam in idle:
            self.finish(beam, "abort")
        return [took[at] for at in range(len(branches))]

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request and frees its pages. Of one that has ended, only the reasons change: where the last token
        allowed also completes a stop string, the engine says so here."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.status is RequestStatus.FINISHED:
            return
        self._queues.decode_rows.remove(request)
        self._queues.leave(request)
        self._tables.give_back(request)
        request.status = RequestStatus.FINISHED
        self._queues.release_forks(request)  # they begin on their own
        request.finish_time = perf_counter()
        self._queues.forget(request)  # last: `start_over` ends what an interruption left here

    def start_over(self) -> None:
        """Every running request gives back its pages and waits to compute its tokens again. Trusts no account but the
        list of unfinished requests: the others may have been left half written by an interruption."""
        self._queues.decode_rows.clear()
        self._tables.clear()
        for request in list(self._queues.requests.values()):
            if request.status is RequestStatus.RUNNING:
                request.num_preemptions += 1
                self.num_preemptions += 1
            request.status = RequestStatus.WAITING
            request.drop_pages()
            request.block_table, request.decodes = None, False
            request.parent, request.forks = None, []
            if not request.is_beam and request.finish_reason is None and request.output_token_ids:
                request.drop_half_token()
                if request.output_token_ids:
                    request.finish_reason, request.stop_reason = request.end(self.max_model_len) or (None, None)
            if request.finish_reason is not None:  # it was about to end
                request.status, request.finish_time = RequestStatus.FINISHED, perf_counter()
                del self._queues.requests[request.request_id]
        self._queues.wait_all()

    def end_family(self, family: str | None) -> None:
        """Aborts whatever is unfinished of a family."""
        for request in [one for one in self._queues.requests.values() if one.family == family]:
            self.finish(request, "abort")

    def forget(self) -> None:
        """Empties the prefix cache, as the weights are others now. What is running goes on with the KV it has."""
        self.pool.forget()
        for request in self.running:
            request.is_stale = True

    def check(self) -> None:
        """Asserts that the pool and the requests agree about every page. Slow: for tests and `check_integrity`."""
        check_accounts(self.pool, self.running, self.waiting, self._queues.requests, self._queues.decode_rows)

    def _cut(self, rows: list[Row], num_tokens: int) -> tuple[list[Row], int]:
        """Leaves the last of the prompts' tokens to the next step where that fills the step's shape better. Every row
        keeps a token."""
        assert self._step_size is not None
        excess = num_tokens - self._step_size(num_tokens)
        if excess > num_tokens - len(rows):
            return rows, num_tokens
        num_tokens -= excess
        for i in reversed(range(len(rows))):
            request, start, length = rows[i]
            less = min(excess, length - 1)
            rows[i] = request, start, length - less
            excess -= less
            if not excess:
                break
        return rows, num_tokens

    def _decode(self) -> tuple[list[Row], DecodeStep | None]:
        """The rows of the requests that decode, with the pages for them. None, and they decode no more, where there is
        not enough for all of them and one token of another."""
        decode_rows = self._queues.decode_rows
        decode_rows.settle()
        num_rows = len(decode_rows)
        if not num_rows:
            return [], None
        grows = decode_rows.at_page_start(self.pool.page_size)
        has_others = num_rows < len(self.running)
        if num_rows + has_others > self.max_num_batched_tokens or len(grows) > self.pool.num_free:
            decode_rows.clear()
            return [], None
        rows = decode_rows.rows()
        for index in grows:
            request, start, _ = rows[index]
            self._tables.hold(request, start, start + 1)
        return rows, decode_rows.step()

    def _others(self, num_decoding: int) -> list[Request]:
        """The running requests that are to be looked at one by one."""
        if num_decoding == len(self.running):
            return []
        return [request for request in self.running if not request.decodes]

    def _plan(self, rows: list[Row], num_tokens: int, decoding: DecodeStep | None) -> BatchPlan:
        swap_space = self.pool.swap_space
        moves = NO_MOVES if swap_space is None else swap_space.take_moves()
        return BatchPlan(rows, num_tokens, self._tables.take_copies(), moves, decoding)

    def _num_missing(self, request: Request, found: Found) -> int:
        """How many free pages a request takes that is to start with what was found."""
        needed = self.pool.pages_for(request.num_tokens) - len(found.page_ids)
        return needed + self.pool.num_idle(found.page_ids)

    def _family_fits(self, request: Request, missing: int) -> bool:
        """Whether a waiting request that takes `missing` pages can start, together with those that are to start with
        it: what it has of the prompt, they share."""
        family = self._queues.family_to_start(request)
        for other in family[1:]:
            missing += self.pool.pages_for(other.num_tokens) - self._tables.num_shareable_pages(other)
        return missing <= self.pool.num_free and len(self.running) + len(family) <= self._queues.max_num_seqs

    def _make_way(self) -> None:
        """Stops running requests for more urgent ones."""
        queues = self._queues
        while queues.gives_way():
            first = self.waiting[0]
            has_room = self._num_missing(first, self._tables.inheritance(first)) <= self.pool.num_free
            if has_room and not queues.is_full and queues.finds_rows(first):
                return
            self._preempt_last()

    def _start(self, request: Request, found: Found) -> int:
        """Has a request run with what was found of its tokens; returns where it goes on."""
        self._queues.start(request)
        if request.parent is not None and found.page_ids:
            request.is_stale = request.parent.is_stale
            if found.num_tokens % self.pool.page_size:
                request.shares_tail = request.parent.shares_tail = True
                self._queues.decode_rows.remove(request.parent)
        self._tables.share(request, found)
        self._queues.release_forks(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_shared_tokens
            request.start_time = perf_counter()
        return request.num_computed_tokens

    def _follow(self, request: Request, parent: Request) -> None:
        """Has a request go on from the tokens of another."""
        if request.status is parent.status is RequestStatus.RUNNING:
            self._tables.follow(request, parent)
        else:
            if request.status is RequestStatus.RUNNING:
                self._stop(request)
            request.parent = parent
        request.page_keys = list(parent.page_keys)

    def _make_room(self, request: Request, start: int, end: int) -> bool:
        """As `_hold`, at the cost of those that came last; False if it was the last itself and is preempted now."""
        while not self._tables.hold(request, start, end):
            self._preempt_last()
            if request.status is not RequestStatus.RUNNING:
                return False
        return True

    def _preempt_last(self) -> Request:
        """Stops the last request, with its family; they will need the KV of their prompt and their output so far again.
        Returns the last."""
        family = self._queues.family_to_stop()
        for request in reversed(family):
            self._stop(request)
            request.num_preemptions += 1
            self.num_preemptions += 1
        return family[-1]

    def _stop(self, request: Request) -> None:
        """Has a running request wait, without its pages."""
        self._queues.decode_rows.remove(request)
        self._tables.give_back(request)
        self._queues.stop(request)
