"""Owns `jpaged run-batch`: a file of requests to a file of answers, by the server's app in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

from jpaged.cli.options import spinner

GO_ON = "the same command goes on from here"
TELL_SECONDS = 10.0  # between two lines of progress where standard error is no terminal


class Served(NamedTuple):
    """An app that is ready, what each request to it needs, and how many of them fill it."""

    app: Any
    headers: dict[str, str]
    num_in_flight: int


Serving = Callable[[asyncio.Event], AbstractAsyncContextManager[Served | None]]  # None if the event is set before


def run_batch(input_file: str | Path, output_file: str | Path, in_flight: int | None, serving: Serving) -> int:
    """Answers what OUTPUT has no answer to yet; returns the exit status. `serving` is entered only if there is
    anything to do. Raises ValueError and OSError for files that can't be used.
    """
    from jpaged.run_batch.batch_input import BatchIndex
    from jpaged.run_batch.batch_output import BatchOutput
    from jpaged.run_batch.run import EngineStopped

    if Path(output_file).exists() and Path(output_file).samefile(input_file):
        raise ValueError(f"{output_file} is the file of requests: give another for the answers")
    if not Path(input_file).is_file():
        raise ValueError(f"{input_file} is not a regular file: it is read more than once")
    begun = time.perf_counter()
    with spinner(f"Reading {input_file}"):
        index = BatchIndex(input_file)
    output = BatchOutput(output_file)
    try:
        with spinner(f"Reading {output_file}"):
            tally = output.resume(index)
        before, tokens_before = index.num_done, tally.num_output_tokens
        if before:
            _say(f"{before} of {index.num_lines} requests are answered already")
        left = index.num_lines - before
        has_ended, number = True, 0
        if left:
            has_ended, number = asyncio.run(_answer(index, output, tally, in_flight, serving))
    except EngineStopped as error:
        _say(f"{error}; {GO_ON}")
        return 1
    finally:
        output.close()
    _say(summary(tally, index.num_lines, time.perf_counter() - begun, tally.num_output_tokens - tokens_before))
    if not has_ended:
        _say(f"stopped; {GO_ON}")
        return 128 + number
    return 1 if tally.num_bad else 0


async def _answer(index: Any, output: Any, tally: Any, in_flight: int | None, serving: Serving) -> tuple[bool, int]:
    """Whether all was answered, and the signal that ended it if not."""
    from jpaged.run_batch.run import BatchRun

    stop, signals = asyncio.Event(), [0]

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        signals[0] = number
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with serving(stop) as served:
            if served is None:
                return False, signals[0]
            with spinner("Answering") as status:
                run = BatchRun(served.app, index, output, tally, served.headers, _Progress(index.num_lines, status))
                has_ended = await run.run(in_flight or served.num_in_flight, stop)
        return has_ended, signals[0]
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _Progress:
    """Tells how far a run is: on a terminal all the time, else in a line now and then."""

    def __init__(self, num_lines: int, status: Any):
        self._num_lines, self._status = num_lines, status
        self._told = time.perf_counter()

    def __call__(self, tally: Any, running: int) -> None:
        text = f"{tally.num_answered + tally.num_bad} of {self._num_lines} requests, {running} under way"
        if tally.num_failed or tally.num_bad:
            text += f", {tally.num_failed + tally.num_bad} failed"
        if self._status:
            self._status.update(text)
        elif time.perf_counter() - self._told >= TELL_SECONDS:
            self._told = time.perf_counter()
            _say(text)


def summary(tally: Any, num_lines: int, seconds: float, num_new_tokens: int) -> str:
    """The run in a sentence."""
    parts = [f"{tally.num_answered} of {num_lines} requests are answered"]
    if tally.num_failed:
        kinds = ", ".join(
            f"{count} x status {status}" for status, count in sorted(tally.statuses.items()) if not 200 <= status < 300
        )
        parts.append(f"{tally.num_failed} of them with an error ({kinds})")
    if tally.num_bad:
        parts.append(f"{tally.num_bad} lines are no requests (the output has a line for each)")
    parts.append(f"{num_new_tokens} output tokens in {seconds:.1f} s")
    return "; ".join(parts)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
