"""Owns the workers as their parent sees them: one that dies or hangs is replaced, and costs the task it had begun."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

START_SECONDS = 120.0  # until a worker has found its device
COMPILE_SECONDS = 120.0  # until the next of several programs is compiled
GRACE_SECONDS = 20.0  # for what is under way when the time is up
MOST_DEATHS = 2  # of workers at the tasks of one group and implementation: each takes half a minute
DEVICE_LOST = 3  # the exit code of a worker that can do no more on its device

Message = dict[str, Any]


class Job(NamedTuple):
    """What the parent knows of a task. The programs of a `group`, whose tasks are neighbours, are compiled together."""

    part: str
    group: str
    names: tuple[str, ...]
    implementation: str
    seconds: float  # without a word for so long, it hangs

    @property
    def like(self) -> tuple[str, str]:
        return self.group, self.implementation


# spawn(numbers of the jobs, in order; the group to compile one by one) -> the process, and the pipe on which it speaks
Spawn = Callable[[list[int], str | None], tuple[subprocess.Popen, int]]


def supervise(
    jobs: Sequence[Job], spawn: Spawn, hear: Callable[[Message], None], *, until: float, patience: float = 1.0
) -> bool:
    """Have all jobs done by workers; `hear` gets every message, and a row for every name of every job.

    False if a worker says that there is no device. `until`: when time is up, by `time.time`. `patience`: a factor on
    how long a silence may last.
    """
    left: dict[int, list[str]] = {number: list(job.names) for number, job in enumerate(jobs)}
    deaths: Counter[tuple[str, str]] = Counter()
    one_by_one: str | None = None

    def give_up(number: int, status: str, note: str) -> None:
        job = jobs[number]
        for name in left.pop(number):
            row = {"part": job.part, "name": name, "implementation": job.implementation, "status": status, "note": note}
            hear({"row": row})

    while left:
        first = next(iter(left))
        process, pipe = spawn(list(left), one_by_one)
        current: int | None = None
        ended: int | None = None
        finished = False
        limit, reason = START_SECONDS, ""
        try:
            listening = messages(pipe)
            while not finished:
                message = listening(min(time.time() + limit * patience, until + GRACE_SECONDS))
                if message is None:
                    late = time.time() >= until + GRACE_SECONDS
                    reason = "out of time" if late else f"no word for {limit * patience:.0f} s: it hangs"
                    process.kill()
                    break
                if not message:
                    break  # it is dead
                hear(message)
                if "no_device" in message:
                    return False
                limit = COMPILE_SECONDS
                if "start" in message:
                    current = message["start"]
                elif "end" in message:
                    ended, current = message["end"], None
                    left.pop(ended, None)
                elif "row" in message and message["task"] in left:
                    left[message["task"]].remove(message["row"]["name"])
                    if not left[message["task"]]:
                        del left[message["task"]]
                finished = "done" in message
                if current is not None:
                    limit = jobs[current].seconds
        finally:
            os.close(pipe)
        code = process.wait()
        if finished:
            break
        if reason == "out of time":
            for number in list(left):
                give_up(number, "skipped", reason)
            break
        reason = reason or f"the process died with code {code}"
        if current in left:
            give_up(current, "failed", reason)
        blamed = ended if code == DEVICE_LOST else current
        if blamed is not None:
            like = jobs[blamed].like
            deaths[like] += 1
            if deaths[like] == MOST_DEATHS:
                for number in [number for number in left if jobs[number].like == like]:
                    give_up(number, "failed", f"not tried, after {MOST_DEATHS} of its like that died or hung")
        elif left:
            # Before or between tasks, so while the programs of the next one's group were compiled.
            upcoming = next(iter(left))
            group = jobs[upcoming].group
            if one_by_one == group and upcoming == first:
                give_up(upcoming, "failed", f"{reason} before it began")
            one_by_one = group
    for number in list(left):
        give_up(number, "failed", "no row came for it")
    return True


def messages(pipe: int) -> Callable[[float], Message | None]:
    """A function that returns the next message; {} at the end of the pipe, None if none comes until a time."""
    waiting = bytearray()

    def read(until: float) -> Message | None:
        while b"\n" not in waiting:
            ready, _, _ = select.select([pipe], [], [], max(0, until - time.time()))
            if not ready:
                return None
            data = os.read(pipe, 1 << 16)
            if not data:
                return {}
            waiting.extend(data)
        line, _, rest = waiting.partition(b"\n")
        waiting[:] = rest
        return json.loads(line)

    return read


def speaker(pipe: int) -> Callable[[Message], None]:
    """For a worker: a function that sends a message."""

    lock = threading.Lock()

    def send(message: Message) -> None:
        with lock:
            os.write(pipe, json.dumps(message).encode() + b"\n")

    return send
