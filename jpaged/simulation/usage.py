"""Owns what the memory study measures of a policy: where the slots of the KV memory went while requests waited."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryUse:
    """A policy's figures, means over the steps of the saturated phase. The first four shares add up to 1.

    utilization: slots that hold a token. reserved: slots kept for a request's tokens to come. internal: slots kept for
    a request that will never hold a token. external: all others. They are free, but the next request does not fit into
    them, or they are no use to anybody: what is left over from a whole number of pages, and the null page.
    filled: slots that hold a token, of those that are kept for requests: utilization / (1 - external).
    """

    policy: str
    page_size: int | None  # None: contiguous
    utilization: float
    reserved: float
    internal: float
    external: float
    filled: float
    concurrent: float  # requests that run in a step
    num_steps: int
    num_preemptions: int  # over the whole trace, not only the saturated phase
    recomputed: float  # tokens computed more than once, because of them, to all tokens of the trace


class Tally:
    """Sums over the saturated phase: the steps in which requests wait for memory, from when as many have ended as run.
    (The first ones all began at once and are no sample of what runs later.)"""

    def __init__(self, num_slots: int, num_requests: int):
        self.num_slots = num_slots
        self.num_requests = num_requests
        self.num_steps = 0
        self._held = self._reserved = self._kept = self._running = 0

    def is_saturated(self, num_running: int, num_waiting: int) -> bool:
        return num_waiting > 0 and self.num_requests - num_running - num_waiting >= num_running

    def add(self, held: int, reserved: int, kept: int, num_running: int) -> None:
        """A step's slots: that hold a token, that will, and that are kept for requests, these two and others."""
        self.num_steps += 1
        self._held += held
        self._reserved += reserved
        self._kept += kept
        self._running += num_running

    def result(
        self, policy: str, page_size: int | None = None, num_preemptions: int = 0, recomputed: float = 0.0
    ) -> MemoryUse:
        self.check()
        whole = self.num_slots * self.num_steps
        return MemoryUse(
            policy,
            page_size,
            utilization=self._held / whole,
            reserved=self._reserved / whole,
            internal=(self._kept - self._held - self._reserved) / whole,
            external=1 - self._kept / whole,
            filled=self._held / self._kept,
            concurrent=self._running / self.num_steps,
            num_steps=self.num_steps,
            num_preemptions=num_preemptions,
            recomputed=recomputed,
        )

    def check(self) -> None:
        """Raises ValueError if the trace was too short to keep requests waiting."""
        if not self.num_steps:
            raise ValueError(
                f"the trace is too short to keep the memory full, it has {self.num_requests} sequences: "
                "give more tokens, or fewer slots"
            )
