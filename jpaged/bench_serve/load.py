"""Owns the load on a server: who is sent when, and how late the client itself is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from jpaged.bench_serve.answer import Answer

HEARTBEAT = 0.01  # seconds between two looks at how late this client's event loop is

Send = Callable[[int, float | None, Callable[[], float]], Awaitable[Answer]]  # index, due, clock


class Run(NamedTuple):
    """What came of a load: answers in the order of the requests, and how late the client's own clock beats were."""

    answers: list[Answer]
    seconds: float
    delays: list[float]


async def run_load(
    num_requests: int,
    send: Send,
    times: Sequence[float] | None = None,
    concurrency: int | None = None,
    tell: Callable[[int, int], None] = lambda running, ended: None,
) -> Run:
    """Sends each request at its time, whatever has come back (open loop); or, with `concurrency`, keeps that many
    under way (closed loop). `tell` is called ten times a second with how many are running and have ended."""
    assert (times is None) != (concurrency is None)
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    answers: dict[int, Answer] = {}
    num_sent = 0

    async def one(index: int, due: float | None) -> None:
        nonlocal num_sent
        num_sent += 1
        answers[index] = await send(index, due, clock)

    delays: list[float] = []

    async def watch() -> None:
        for beat in range(10**12):
            before = clock()
            await asyncio.sleep(HEARTBEAT)
            delays.append(max(0.0, clock() - before - HEARTBEAT))
            if beat % 10 == 0:
                tell(num_sent - len(answers), len(answers))

    watching = asyncio.create_task(watch())
    try:
        if times is not None:
            await _open_loop(times, one, clock)
        else:
            await _closed_loop(iter(range(num_requests)), concurrency or 1, one)
    finally:
        watching.cancel()
    seconds = max((answer.ended or 0.0 for answer in answers.values()), default=0.0)
    return Run([answers[index] for index in range(num_requests)], seconds, delays)


async def _open_loop(
    times: Sequence[float], one: Callable[[int, float], Coroutine[Any, Any, None]], clock: Callable[[], float]
) -> None:
    async with asyncio.TaskGroup() as group:
        for index, due in enumerate(times):
            await asyncio.sleep(max(0.0, due - clock()))  # 0 lets those begin that were sent before
            group.create_task(one(index, due))


async def _closed_loop(indices: Iterator[int], concurrency: int, one: Callable[[int, None], Awaitable[None]]) -> None:
    async def worker() -> None:
        for index in indices:
            await one(index, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
