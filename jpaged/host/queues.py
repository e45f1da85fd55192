"""Owns `Queues`: which of the unfinished requests run and which wait, each in their order."""

from __future__ import annotations

from bisect import insort
from itertools import takewhile

from .accounts import BY_ORDER
from .decode_rows import DecodeRows
from .request import Request, RequestStatus

PRIORITY_PLACES = 1000  # that a request moves back in the order of arrival for each number of its priority


class Queues:
    """The order is that of arrival, a request of priority p being taken for one that came so many places later (a
    negative one: earlier). So the urgent come first, and none waits for ever: only so many can overtake it. A waiting
    request takes the place of running ones of a higher number.
    """

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.requests: dict[str, Request] = {}  # all of them
        self.running: list[Request] = []
        self.decode_rows = DecodeRows()  # those of the running that are not to be looked at one by one
        self.waiting: list[Request] = []  # without the forks of those whose prompt is not computed yet
        self.num_beams = 0  # beams among all
        self.num_led = 0  # those that the host must see a token of before they draw the next
        self._num_arrivals = 0

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self.max_num_seqs

    def add(self, request: Request, order: int | None) -> None:
        """Queues a request as the last one, or at a place in the order of arrival that was kept for it: a beam search
        has as many places as it may have beams, from that of the first on."""
        self.requests[request.request_id] = request
        self.num_beams += request.is_beam
        self.num_led += request.sampling.follows_tokens
        if order is None:
            order = self._num_arrivals + PRIORITY_PLACES * request.priority
            self._num_arrivals += request.sampling.num_beams
        request.order = order
        parent = request.parent
        if parent is not None and parent.request_id in self.requests and not parent.has_computed_prompt:
            parent.forks.append(request)
        else:
            insort(self.waiting, request, key=BY_ORDER)

    def start(self, request: Request) -> None:
        """Has a waiting request run."""
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=BY_ORDER)

    def stop(self, request: Request) -> None:
        """Has a running request wait, in its row's place."""
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=BY_ORDER)

    def leave(self, request: Request) -> None:
        """Takes an unfinished request out of where it runs or waits."""
        parent = request.parent
        if request.status is RequestStatus.RUNNING:
            place = self.running
        else:
            place = parent.forks if parent is not None and request in parent.forks else self.waiting
        if request in place:  # or it was interrupted on its way there
            place.remove(request)

    def forget(self, request: Request) -> None:
        """Lets go of a request that has ended."""
        self.num_beams -= request.is_beam
        self.num_led -= request.sampling.follows_tokens
        del self.requests[request.request_id]

    def wait_all(self) -> None:
        """Has all unfinished requests wait, whatever the other accounts say."""
        self.running, self.waiting = [], sorted(self.requests.values(), key=BY_ORDER)
        self.num_beams = sum(request.is_beam for request in self.waiting)
        self.num_led = sum(request.sampling.follows_tokens for request in self.waiting)

    def release_forks(self, request: Request) -> None:
        """Has the forks that waited for a request's prompt wait for their turn, if it is computed or never will be."""
        if not (request.has_computed_prompt or request.status is RequestStatus.FINISHED):
            return
        for fork in request.forks:
            insort(self.waiting, fork, key=BY_ORDER)
        request.forks = []

    def gives_way(self) -> bool:
        """Whether the last of the running is stopped if the first of the waiting ones finds no room."""
        if not self.running:
            return False
        first, last = self.waiting[0], self.running[-1]
        return first.priority < last.priority and first.order < last.order

    def finds_rows(self, request: Request) -> bool:
        """Whether a request may start beside beam searches, which each keep as many rows as they may have beams: or
        they would wait for each other's."""
        if not self.num_beams or not self.running:
            return True
        widths = {one.family: one.sampling.num_beams for one in self.running if one.is_beam}
        if request.family in widths:
            return True
        taken = sum(not one.is_beam for one in self.running) + sum(widths.values())
        return taken + request.sampling.num_beams <= self.max_num_seqs

    def family_to_start(self, request: Request) -> list[Request]:
        """All that wait of the family of the first of the waiting ones, where they are to start together: they were
        preempted, and none of them runs."""
        if not request.num_preemptions or any(one.family == request.family for one in self.running):
            return [request]
        return list(takewhile(lambda one: one.family == request.family, self.waiting))

    def family_to_stop(self) -> list[Request]:
        """The running requests of the family of the last, which are stopped together. Of the first family, and of one
        that runs alone, only the last."""
        last = self.running[-1]
        if self.running[0].family == last.family:
            return [last]
        return [request for request in self.running if request.family == last.family]
