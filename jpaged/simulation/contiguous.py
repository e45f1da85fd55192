"""Owns the allocation policies that paging is compared with: a request's whole memory in one piece, from its start."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from .trace import MAX_LEN, Lengths
from .usage import MemoryUse, Tally

# What each policy reserves for a request. Those of Kwon et al. 2023, section 6.1: Orca with the greatest length that
# there may be, with outputs guessed within a factor of two, and with lengths known beforehand, which nobody does.
RESERVATIONS: dict[str, Callable[[Lengths], int]] = {
    "maximum": lambda lengths: MAX_LEN,
    "power of two": lambda lengths: min(lengths.prompt + (1 << (lengths.output - 1).bit_length()), MAX_LEN),
    "oracle": lambda lengths: lengths.num_slots,
}


class FirstFit:
    """Hands out pieces of `num_slots` slots, each from the first hole that is large enough."""

    def __init__(self, num_slots: int):
        self.holes = [(0, num_slots)]  # (start, size), in order; no two touch

    def acquire(self, size: int) -> int | None:
        """The start of a piece of `size` slots; None if no hole is so large."""
        for index, (start, free) in enumerate(self.holes):
            if free >= size:
                self.holes[index : index + 1] = [(start + size, free - size)] if free > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        insort(self.holes, (start, size))
        index = self.holes.index((start, size))
        if index + 1 < len(self.holes) and start + size == self.holes[index + 1][0]:
            size += self.holes.pop(index + 1)[1]
            self.holes[index] = (start, size)
        if index and sum(self.holes[index - 1]) == start:
            self.holes[index - 1 : index + 1] = [(self.holes[index - 1][0], self.holes[index - 1][1] + size)]


def simulate_contiguous(policy: str, trace: list[Lengths], num_slots: int) -> MemoryUse:
    """Serves a trace, first come, first served, a token a step for each request that has got its piece."""
    reservation = RESERVATIONS[policy]
    memory, tally = FirstFit(num_slots), Tally(num_slots, len(trace))
    waiting = deque(trace)
    running: list[tuple[int, int, int, Lengths]] = []  # (last step, start of the piece, its size, ...), a heap
    step = held = to_fill = kept = 0
    while waiting or running:
        held += len(running)  # those that ran before write one token more, the new ones their prompt
        while waiting:
            lengths, size = waiting[0], reservation(waiting[0])
            start = memory.acquire(size)
            if start is None:
                break
            waiting.popleft()
            heappush(running, (step + lengths.output - 1, start, size, lengths))
            held, to_fill, kept = held + lengths.prompt, to_fill + lengths.num_slots, kept + size
        if tally.is_saturated(len(running), len(waiting)):
            tally.add(held, to_fill - held, kept, len(running))
        while running and running[0][0] == step:
            _, start, size, lengths = heappop(running)
            memory.release(start, size)
            held, to_fill, kept = held - lengths.num_slots, to_fill - lengths.num_slots, kept - size
        step += 1
    return tally.result(policy)
