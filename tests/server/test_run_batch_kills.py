"""`jpaged run-batch` killed at ten random moments of its life: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

CHILD = Path(__file__).parent / "killable_batch.py"
NUM_KILLS = 10
NUM_EARLY = 2  # of them, before the process has written a line of its own
IN_FLIGHT = 8
PATIENCE = 120  # seconds


class Moment(NamedTuple):
    """So long after OUTPUT has this size. Without a size: so long after the start of the process, or when OUTPUT has
    grown."""

    size: int | None  # bytes
    seconds: float

    def has_come(self, size: int, size_before: int, begun: float) -> bool:
        if self.size is not None:
            return size >= self.size
        return size > size_before or time.monotonic() >= begun + self.seconds


def random_moments(rng: random.Random, size: int, startup: float) -> list[Moment]:
    """Spread over the whole of a run's output, and some before its first line; one of those kills comes first."""
    parts = NUM_KILLS - NUM_EARLY
    moments = [Moment(int((part + rng.random()) / parts * size) + 1, rng.uniform(0, 0.02)) for part in range(parts)]
    early = [Moment(None, (part + rng.random()) / NUM_EARLY * startup) for part in range(NUM_EARLY)]
    rng.shuffle(early)
    moments.insert(0, early[0])
    for moment in early[1:]:
        moments.insert(rng.randrange(1, len(moments)), moment)
    return moments


def fake_requests():
    for n in range(300):
        yield "/v1/completions", {"prompt": f"say r{n} " + "x" * (n * 37 % 2500)}


def model_requests():
    for n in range(60):
        ending = {"max_tokens": 4 + n % 13, "ignore_eos": True}
        if n % 3:
            yield "/v1/completions", {"prompt": [5, 6, 7 + n], "temperature": n % 2, "seed": n} | ending
        else:
            messages = [{"role": "user", "content": f"hello {n}"}]
            yield "/v1/chat/completions", {"messages": messages, "temperature": 0} | ending


def whole_lines(path: Path) -> bytes:
    raw = path.read_bytes() if path.exists() else b""
    return raw[: raw.rfind(b"\n") + 1]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def ids_in(lines: bytes) -> list[str]:
    return [json.loads(line)["id"] for line in lines.splitlines()]


def answers_in(path: Path) -> dict[str, dict]:
    """Each custom_id's line, without what differs from run to run."""
    assert path.read_bytes().endswith(b"\n")
    found = {}
    for raw in path.read_bytes().splitlines():
        line = json.loads(raw)
        assert line["custom_id"] not in found, "it is answered twice"
        assert line["response"]["status_code"] == 200
        body = line["response"]["body"]
        for name in ("id", "created"):
            body.pop(name, None)
        body["usage"].pop("prompt_tokens_details", None)  # a new process has nothing in its cache
        found[line["custom_id"]] = line
    return found


@pytest.mark.parametrize(
    ("kind", "requests", "piece", "seed"),
    [("fake", fake_requests, 200, 0), pytest.param("model", model_requests, 20, 1, marks=pytest.mark.rehearsal)],
)
def test_ten_kills_at_random_moments_lose_nothing_and_repeat_nothing(tmp_path, kind, requests, piece, seed):
    folder, log, other_log = tmp_path / "run", tmp_path / "log", tmp_path / "other_log"
    source, output, unkilled = folder / "in.jsonl", folder / "out.jsonl", tmp_path / "unkilled.jsonl"
    folder.mkdir()
    asks = [
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": body} for n, (url, body) in enumerate(requests())
    ]
    source.write_text("".join(json.dumps(ask) + "\n" for ask in asks))
    log.touch()
    # What it leaves behind would be seen in `folder`; what it compiles is no other test's, as a kill may tear it.
    own = {"TMPDIR": str(folder), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}

    @contextlib.contextmanager
    def started(log: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
        words = [CHILD, kind, log, len(asks), piece, "run-batch", source, output, "--in-flight", IN_FLIGHT]
        command = [sys.executable, *map(str, words)]
        with subprocess.Popen(command, cwd=folder, env=os.environ | own, stderr=subprocess.PIPE) as process:
            try:
                yield process
            finally:
                process.kill()

    for _ in ("compiles", "is timed"):
        unkilled.unlink(missing_ok=True)
        with started(other_log, unkilled) as process:
            begun = time.monotonic()
            while process.poll() is None and not size_of(unkilled):
                time.sleep(0.002)
            startup = time.monotonic() - begun
            told = process.stderr.read().decode()
            assert process.wait(PATIENCE) == 0, told
    last_line = max(map(len, unkilled.read_bytes().splitlines(keepends=True)))
    moments = random_moments(random.Random(seed), unkilled.stat().st_size - last_line, startup)
    print(f"seed {seed}: {moments}")

    kept, num_asked = b"", 0
    done_at_kills, num_early, num_torn = [], 0, 0
    for moment in [*moments, None]:
        with started(log, output) as process:
            before, begun = size_of(output), time.monotonic()
            while process.poll() is None and not (moment and moment.has_come(size_of(output), before, begun)):
                assert size_of(output) >= len(kept), "what was there goes, if only for a while"
                assert time.monotonic() < begun + PATIENCE
                time.sleep(0.001)
            if moment:
                if moment.size is not None:
                    time.sleep(moment.seconds)
                assert process.poll() is None, process.stderr.read().decode()
                os.kill(process.pid, signal.SIGKILL)
            told = process.stderr.read().decode()
            assert process.wait(PATIENCE) == (-signal.SIGKILL if moment else 0), told
        asked = log.read_text().splitlines()
        asked_now, num_asked = asked[num_asked:], len(asked)
        assert len(asked_now) == len(set(asked_now)), "one run asks twice"
        assert not set(asked_now) & set(ids_in(kept)), "what was answered before a kill is asked again"
        whole = whole_lines(output)
        assert whole.startswith(kept), "what was there stays as it was"
        assert [path.name for path in sorted(folder.iterdir())] in (["in.jsonl"], ["in.jsonl", "out.jsonl"])
        has_new, kept = len(whole) > len(kept), whole
        if moment:
            done_at_kills.append(kept.count(b"\n"))
            num_early += not has_new
            num_torn += size_of(output) > len(kept)
    print(f"lines at the kills: {done_at_kills}; {num_early} came before a line of their process, {num_torn} tore one")

    answers = answers_in(output)
    assert answers.keys() == {ask["custom_id"] for ask in asks}
    assert answers == answers_in(unkilled)
    times_asked = collections.Counter(log.read_text().splitlines())
    assert times_asked.keys() == set(ids_in(kept))
    assert sum(times_asked.values()) - len(asks) <= NUM_KILLS * IN_FLIGHT, "only what was under way is asked again"

    assert len(done_at_kills) == NUM_KILLS and num_early > 0
    assert sum(0 < done < len(asks) for done in done_at_kills) >= NUM_KILLS - NUM_EARLY - 1
    assert done_at_kills[-1] >= len(asks) * 0.8, "some kills are near the end"
    assert num_torn > 0, "some kills are in the middle of a write"
