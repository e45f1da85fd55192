"""Measures what the server adds to the engine: `python scripts/bench_server.py [--streams 64] [--rounds 5]`.

A tiny random model, so that a step is short and what HTTP takes shows. In each round the same requests are run twice:
by the engine alone, and as streams of `jpaged bench serve` over HTTP. The client runs beside the server on the same
processors: what it takes of them counts as the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpaged import Engine, SamplingParams
from jpaged.device.params import Params, weight_shapes
from jpaged.models.config import ModelConfig
from jpaged.server.config import ServerConfig
from jpaged.server.serve import HttpServer, listening
from jpaged.server.service import Service
from jpaged.small_model import small_model_path


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


def alone(engine: Engine, streams: int, input_len: int, output_len: int) -> tuple[float, float]:
    """Tokens a second, and the median of the times to the first token."""
    began = time.perf_counter()
    arrivals, first = {}, {}
    for i in range(streams):
        sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        arrivals[engine.add_request([5 + i, *range(5, 4 + input_len)], sampling)] = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - arrivals[output.request_id])
            assert output.outputs[0].text is not None
    return streams * output_len / (time.perf_counter() - began), statistics.median(first.values())


def over_http(port: int, streams: int, input_len: int, output_len: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["--url", f"http://127.0.0.1:{port}", "--concurrency", str(streams), "--num-requests", str(streams)]
        words += ["--input-len", str(input_len), "--output-len", str(output_len), "--json", str(file)]
        found = subprocess.run(
            [sys.executable, "-m", "jpaged.cli", "bench", "serve", *words], capture_output=True, text=True
        )
        if found.returncode:
            raise SystemExit(found.stderr)
        figures = json.loads(file.read_text())
    return figures["output_throughput"], figures["ttft"]["p50"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--d-model", type=int, default=64)
    args = parser.parse_args()
    engine = Engine(
        tiny_params(args.d_model),
        max_num_seqs=args.streams,
        max_num_batched_tokens=512,
        max_model_len=1024,
        kv_cache_memory="256MiB",
        warm_up=True,
        prompt_logprobs=True,
    )
    config = ServerConfig(model="tiny", port=0, log_level="warning")
    service = Service(config, lambda: engine)
    sizes = args.streams, args.input_len, args.output_len
    with listening(config) as listener:
        server = HttpServer(service)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        while not service.is_ready:
            time.sleep(0.01)
        rounds = []
        for number in range(args.rounds + 1):
            pair = []
            for way in ("alone", "http"):
                engine.reset_prefix_cache()
                if way == "alone":
                    asked = service.thread.run(lambda engine: alone(engine, *sizes))
                    pair.append(asyncio.run_coroutine_threadsafe(asked, service.thread.loop).result())
                else:
                    pair.append(over_http(listener.getsockname()[1], *sizes))
            if number:  # the first warms up
                rounds.append(pair)
                (rate, ttft), (http_rate, http_ttft) = pair
                print(
                    f"{rate:7.0f} tokens/s alone, {http_rate:7.0f} over HTTP ({http_rate / rate - 1:+.1%}); "
                    f"TTFT {ttft * 1000:.1f} ms and {http_ttft * 1000:.1f} ms",
                    flush=True,
                )
        server.should_exit = True
        thread.join()
    ratio = statistics.median(http[0] / own[0] for own, http in rounds)
    added = statistics.median(http[1] - own[1] for own, http in rounds)
    print(f"median: {ratio - 1:+.1%} of throughput, {added * 1000:+.1f} ms of TTFT, {args.streams} streams")


if __name__ == "__main__":
    main()
