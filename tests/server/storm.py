"""A storm of clients, of whom many leave and some send rubbish: `python tests/server/storm.py 300 120`."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests / name) for name in ("server", "host", "device", "engine")]

from server_support import Live, build, random_params

FRESH = {"prompt": "Water boils at", "max_tokens": 24, "temperature": 0, "logprobs": 1}


async def storm(port: int, num_clients: int, seconds: float, seed: int = 0) -> collections.Counter[str]:
    """What became of the requests of so many clients at a time."""
    outcomes: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + seconds
    await asyncio.gather(*(_client(port, end, random.Random(seed * 10_000 + i), outcomes) for i in range(num_clients)))
    return outcomes


async def _client(port: int, end: float, rng: random.Random, outcomes: collections.Counter[str]) -> None:
    while time.monotonic() < end:
        raw, is_good = (_rubbish(rng), False) if rng.random() < 0.1 else (_request(rng), True)
        patience = rng.expovariate(5) if rng.random() < 1 / 3 else 120
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            outcomes["no connection"] += 1
            continue
        try:
            writer.write(raw)
            async with asyncio.timeout(patience):
                outcomes[_outcome(await reader.read(), is_good)] += 1
        except TimeoutError:
            outcomes["left" if patience < 120 else "hung"] += 1
        except OSError:
            outcomes["cut off" if is_good else "rubbish cut off"] += 1
        finally:
            writer.transport.abort() if rng.random() < 0.5 else writer.close()


def _outcome(answer: bytes, is_good: bool) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode()
    if not is_good:
        return f"rubbish {status}"
    if b"text/event-stream" in head:
        return "stream" if b"data: [DONE]" in body and answer.endswith(b"0\r\n\r\n") else "broken stream"
    if status == "200":
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        return "plain" if len(body) == length and json.loads(body) else "broken answer"
    return status


def _request(rng: random.Random) -> bytes:
    sampled = {"max_tokens": rng.randint(1, 60), "n": rng.choice([1, 1, 1, 2, 3]), "stream": rng.random() < 0.6}
    sampled |= {"temperature": rng.choice([0, 1.0]), "ignore_eos": rng.random() < 0.5}
    kind = rng.random()
    if kind < 0.4:
        prompt = rng.choice(["Once upon a time", ["a b", "c"], [5, 6, 7] * rng.randint(1, 30)])
        body = sampled | {"prompt": prompt, "echo": rng.random() < 0.3, "logprobs": rng.choice([None, 2])}
        return _http("/v1/completions", body)
    if kind < 0.8:
        body = sampled | {"messages": [{"role": "user", "content": "Hi " * rng.randint(1, 20)}]}
        if rng.random() < 0.2:
            body |= {"response_format": {"type": "json_object"}, "ignore_eos": False}
        if rng.random() < 0.2:
            body |= {"stop": ["e", "the"], "logprobs": True, "top_logprobs": 2}
        return _http("/v1/chat/completions", body)
    params = {"max_tokens": sampled["max_tokens"], "n": sampled["n"]}
    return _http("/v1/generate", {"token_ids": [5, 6], "sampling_params": params, "stream": sampled["stream"]})


def _http(path: str, body: object) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def _rubbish(rng: random.Random) -> bytes:
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/generate", "/tokenize", "/detokenize"])
    return rng.choice(
        [
            lambda: rng.randbytes(rng.randint(1, 500)) + b"\r\n\r\n",
            lambda: _http(path, rng.randbytes(200)),
            lambda: _http(path, b"[" * 50_000),
            lambda: _http(path, {"prompt": rng.choice([[], "", [-1], [2**70], 5]), "messages": 5}),
            lambda: _http(path, {"prompt": "a", "messages": [{}], "token_ids": [5], "n": 10**6, "sampling_params": 1}),
            lambda: _http(path, {"prompt": "a" * 200_000, "messages": [{"role": "x", "content": "a" * 200_000}]}),
            lambda: b"POST " + path.encode() + b" HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
            lambda: _http("/absent", {}),
        ]
    )()


def weather(live: Live, num_clients: int, seconds: float) -> collections.Counter[str]:
    """A storm, and that nothing of it is left behind."""
    before = live.post("/v1/completions", FRESH)["choices"]
    live.assert_idle()
    counts = threading.active_count(), _num_descriptors()
    outcomes = asyncio.run(storm(live.port, num_clients, seconds))
    live.assert_idle()
    assert live.engine.stats.num_used_pages == live.engine.stats.num_running == live.engine.stats.num_waiting == 0
    live.engine.reset_prefix_cache()
    assert live.post("/v1/completions", FRESH)["choices"] == before
    deadline = time.monotonic() + 10
    while (threading.active_count(), _num_descriptors()) > counts and time.monotonic() < deadline:
        time.sleep(0.1)
    found = threading.active_count(), _num_descriptors()
    # The pool of threads that long texts are worked on in grows to its size once, and stays.
    assert found[0] <= counts[0] + 8 and found[1] <= counts[1] + 4, (counts, found)
    bad = {"no connection", "hung", "cut off", "broken stream", "broken answer", "400", "500", "rubbish 500", "rubbish 200"}
    assert not bad & outcomes.keys(), outcomes
    return outcomes


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    engine = build(random_params(), max_num_seqs=16, num_pages=600, max_num_batched_tokens=128, warm_up=True)
    with Live(engine, max_waiting=200) as live:
        began = time.monotonic()
        print(weather(live, int(sys.argv[1]), float(sys.argv[2])))
        print(f"{time.monotonic() - began:.0f} s, {engine.stats}")
