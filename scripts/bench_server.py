"""Measures what the server adds to the engine: `python scripts/bench_server.py [--streams 64] [--rounds 5]`.

A tiny random model, so that a step is short and what HTTP takes shows (or another, --model). The same requests are run
by the engine alone and as streams of `jpaged bench serve` over HTTP, in turn: for the throughput with so many under way
at any time, their lengths spread so that they end and begin one by one; for the time to the first token as they come by
lot, half as many as the engine alone could do, for one that comes at the end of another meets the engine always at the
same moment. The client has the last processor for itself; engine and server have the others, in both.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jpaged
from jpaged import Engine, SamplingParams
from jpaged.bench_serve.calls import Call, arrival_times, drawn_calls
from jpaged.device.params import Params, weight_shapes
from jpaged.models.config import ModelConfig
from jpaged.server.config import ServerConfig
from jpaged.server.serve import HttpServer, listening
from jpaged.server.service import Service
from jpaged.small_model import small_model_path

SPREAD = 0.5  # of the lengths


def tiny_params(d_model: int) -> Params:
    """Random weights under the tokenizer of the small model."""
    from jpaged.checkpoint.gguf import read_gguf
    from jpaged.host.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(read_gguf(small_model_path())[0])
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size,
        d_model=d_model,
        d_ff=2 * d_model,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=2048,
        eos_token_ids=(2,),
    )
    rng = np.random.default_rng(0)

    def filled(shape: Any) -> Any:
        if isinstance(shape, dict):
            return {name: filled(one) for name, one in shape.items()}
        if shape and isinstance(shape[0], dict):
            return tuple(filled(one) for one in shape)
        return jnp.asarray(rng.normal(size=shape).astype(np.float32) / 8)

    return Params(filled(weight_shapes(config)), config, tokenizer)


class Figures(NamedTuple):
    tokens_per_second: float
    ttft: float  # the median, in seconds


def alone(engine: Engine, calls: Sequence[Call], streams: int, times: Sequence[float] | None = None) -> Figures:
    """Requests that come at their times, or so many of them under way."""
    began = time.perf_counter()
    coming = collections.deque(zip(calls, times or [0.0] * len(calls), strict=True))
    arrivals: dict[str, float] = {}
    first: dict[str, float] = {}
    num_going = 0
    while coming or num_going:
        now = time.perf_counter() - began
        while coming and (num_going < streams if times is None else coming[0][1] <= now):
            call, due = coming.popleft()
            sampling = SamplingParams(temperature=0, max_tokens=call.max_tokens, ignore_eos=True)
            arrivals[engine.add_request(call.prompt, sampling)] = now if times is None else due
            num_going += 1
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - began - arrivals[output.request_id])
            assert output.outputs[0].text is not None
            num_going -= output.finished
    seconds = time.perf_counter() - began
    return Figures(sum(call.max_tokens for call in calls) / seconds, statistics.median(first.values()))


def over_http(port: int, args: argparse.Namespace, cpu: int, load: Sequence[str]) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["--url", f"http://127.0.0.1:{port}", "--json", str(file), *load]
        words += ["--num-requests", str(args.requests), "--length-spread", str(SPREAD)]
        words += ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
        found = subprocess.run(
            ["taskset", "-c", str(cpu), sys.executable, "-m", "jpaged.cli", "bench", "serve", *words],
            capture_output=True,
            text=True,
        )
        if found.returncode:
            raise SystemExit(found.stderr)
        figures = json.loads(file.read_text())
    return Figures(figures["output_throughput"], figures["ttft"]["p50"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256, help="in a round")
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=200)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--d-model", type=int, default=64, help="of the tiny model")
    which.add_argument("--model", help="another one in its place: smollm2, or the path of one")
    args = parser.parse_args()
    *ours, clients = sorted(os.sched_getaffinity(0))
    if not ours:
        raise SystemExit("this needs two processors: one is the client's")
    os.sched_setaffinity(0, ours)  # before JAX has threads
    if args.model is None:
        params = tiny_params(args.d_model)
    else:
        params = jpaged.load(small_model_path() if args.model == "smollm2" else args.model)
    engine = Engine(
        params,
        max_num_seqs=args.streams,
        max_num_batched_tokens=512,
        max_model_len=1024,
        kv_cache_memory="1GiB",
        warm_up=True,
        prompt_logprobs=True,
    )
    config = ServerConfig(model="tiny", port=0, log_level="warning")
    service = Service(config, lambda: engine)
    vocab_size = engine.model_config.vocab_size
    calls = drawn_calls(args.requests, args.input_len, args.output_len, SPREAD, 0, vocab_size)
    with listening(config) as listener:
        server = HttpServer(service)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        while not service.is_ready:
            time.sleep(0.01)

        def by_engine(times: Sequence[float] | None = None) -> Figures:
            engine.reset_prefix_cache()
            asked = service.thread.run(lambda engine: alone(engine, calls, args.streams, times))
            return asyncio.run_coroutine_threadsafe(asked, service.thread.loop).result()

        def by_server(*load: str) -> Figures:
            engine.reset_prefix_cache()
            return over_http(listener.getsockname()[1], args, clients, load)

        closed = "--concurrency", str(args.streams)
        by_engine(), by_server(*closed)  # warms up
        ratios, added = [], []
        for _ in range(args.rounds):
            own, http = by_engine(), by_server(*closed)
            rate = round(own.tokens_per_second / args.output_len / 2, 2)
            slow = by_engine(arrival_times(args.requests, rate, "poisson", 0))
            slow_http = by_server("--rate", str(rate))
            ratios.append(http.tokens_per_second / own.tokens_per_second)
            added.append(slow_http.ttft - slow.ttft)
            print(
                f"{own.tokens_per_second:7.0f} tokens/s alone, {http.tokens_per_second:7.0f} over HTTP "
                f"({ratios[-1] - 1:+.1%}); TTFT at {rate:g} requests/s {slow.ttft * 1000:.1f} ms and "
                f"{slow_http.ttft * 1000:.1f} ms",
                flush=True,
            )
        server.should_exit = True
        thread.join()
    ratio, more = statistics.median(ratios), statistics.median(added)
    print(f"median: {ratio - 1:+.1%} of throughput with {args.streams} streams, {more * 1000:+.1f} ms of TTFT")


if __name__ == "__main__":
    main()
