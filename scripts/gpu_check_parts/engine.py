"""Owns the timing of the engine: a model's start, its prefill, and its decode steps against their roofline."""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from gpu_check_parts import arithmetic
from gpu_check_parts.tasks import Setup, Task, first_line
from gpu_check_parts.timing import kernels_of, seconds_a_call
from jpaged.device.params import Params, weight_shapes
from jpaged.engine.engine import Engine
from jpaged.host.batch import Buckets
from jpaged.host.config import EngineConfig
from jpaged.host.sampling_params import SamplingParams
from jpaged.models.config import ModelConfig, RopeScaling

RUNNING = (1, 16, 64, 256)
PROMPT = 1024
PREFILLS = 16  # prompts
STEPS = 48
STEP_TOKENS = 2048
PROFILED = 64  # requests of the step whose kernels are listed
KERNELS_SHOWN = 15

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    d_model=4096,
    d_ff=14_336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131_072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", factor=8.0, original_max_position=8192),
)
QWEN_0_6B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=151_936,
    d_model=1024,
    d_ff=3072,
    num_layers=28,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position=40_960,
    rope_theta=1_000_000.0,
    tie_embeddings=True,
)
MODELS = {"8B": LLAMA_8B, "0.6B": QWEN_0_6B}
TINY = dict(vocab_size=256, d_model=64, d_ff=64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)


class Scale(NamedTuple):
    """What is run. In a rehearsal, numbers of requests are not what the names of the rows say."""

    running: tuple[int, ...]
    prompt: int
    prefills: int
    steps: int
    step_tokens: int
    room: int  # tokens a request can have


FULL = Scale(RUNNING, PROMPT, PREFILLS, STEPS, STEP_TOKENS, PROMPT + 12 * STEPS)
SMALL = Scale((1, 2, 2, 2), 16, 2, 2, 32, 64)


def tasks() -> list[Task]:
    return [Task("engine", name, names(name), "best", partial(run, name), seconds=120.0) for name in MODELS]


def names(model: str) -> tuple[str, ...]:
    decodes = (name for running in RUNNING for name in decode_names(model, running))
    return f"{model}: start, nothing compiled", prefill_name(model), *decodes, f"{model}: start, programs kept"


def prefill_name(model: str) -> str:
    return f"{model}: prefill {PREFILLS} × {PROMPT}"


def decode_names(model: str, running: int) -> tuple[str, ...]:
    names = f"{model}: decode, {running} running", f"{model}: step's program, {running} running"
    return (*names, f"{model}: kernels of a step, {running} running") if running == PROFILED else names


def guarded(promised: Iterable[str], rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, and one that failed for each name that did not come: what follows is tried all the same."""
    left = list(promised)
    try:
        for row in rows:
            left.remove(row["name"])
            yield row
    except Exception as error:
        traceback.print_exc()
        for name in left:
            yield {"name": name, "failed": f"{type(error).__name__}: {first_line(error)}"}


def random_params(config: ModelConfig, setup: Setup) -> Params:
    """bfloat16 weights, made on the device: the numbers keep their size from layer to layer."""
    make = jax.jit(lambda key, shape, size: jax.random.normal(key, shape, jnp.bfloat16) * size, static_argnums=(1, 2))
    keys = iter(range(1 << 30))

    def weight(path: Any, shape: tuple[int, ...]) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.bfloat16)
        inputs = {"embed": 1, "out": config.num_q_heads * config.head_dim}.get(name, shape[0])
        return make(jax.random.key((setup.seed + next(keys)) % 2**31, impl="rbg"), shape, inputs**-0.5)

    def is_shape(node: Any) -> bool:
        return isinstance(node, tuple) and isinstance(node[0], int)

    return Params(jax.tree_util.tree_map_with_path(weight, weight_shapes(config), is_leaf=is_shape), config)


def read_bytes(params: Params) -> int:
    """Of the weights that a decode step reads: all but a table of embeddings."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves({k: v for k, v in params.weights.items() if k != "embed"}))


def layer_numbers(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params.weights["layers"]) if leaf.ndim > 1)


def few_buckets(scale: Scale) -> Any:
    """A patch: only the shapes that are run here, so that compiling them leaves time to run them."""

    def make(cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int) -> Buckets:
        return cls(
            decode=tuple(sorted(set(scale.running))),
            mixed=((max_num_batched_tokens, max_num_seqs),),
            mixed_tokens=(max_num_batched_tokens,),
            pages_per_seq=-(-max_model_len // page_size),
            page_size=page_size,
        )

    return patch.object(Buckets, "make", classmethod(make))


def start(params: Params, scale: Scale, folder: str) -> Engine:
    most, page_size = scale.running[-1], EngineConfig().page_size
    compilation_cache.reset_cache()  # or it goes on with the folder that it had
    with few_buckets(scale):
        return Engine(
            params,
            max_num_seqs=most,
            max_num_batched_tokens=scale.step_tokens,
            max_model_len=scale.room,
            num_pages=1 + most * -(-scale.room // page_size),
            warm_up=True,
            late_compile="error",
            compilation_cache_dir=folder,
        )


class Bench(NamedTuple):
    """A model that is measured."""

    model: str
    params: Params
    scale: Scale
    setup: Setup

    def seconds(self, measured: float) -> float | None:
        return None if self.setup.rehearse else measured


def run(model: str, setup: Setup, _: Any) -> Iterator[dict[str, Any]]:
    config = replace(MODELS[model], **TINY) if setup.rehearse else MODELS[model]
    params = jax.block_until_ready(random_params(config, setup))
    bench = Bench(model, params, SMALL if setup.rehearse else FULL, setup)
    kept = jax.config.jax_compilation_cache_dir
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield from _measure(bench, folder)
        finally:
            jax.config.update("jax_compilation_cache_dir", kept)
            compilation_cache.reset_cache()


def _measure(bench: Bench, folder: str) -> Iterator[dict[str, Any]]:
    def started(engine: Engine, how: str) -> dict[str, Any]:
        note = f"{len(set(bench.scale.running)) + 1} programs, {engine.warm_up_compiles} compiled"
        return {"name": f"{bench.model}: start, {how}", "seconds": bench.seconds(engine.warm_up_seconds), "note": note}

    engine = start(bench.params, bench.scale, folder)
    yield started(engine, "nothing compiled")
    yield from guarded((prefill_name(bench.model),), _prefill(bench, engine))
    rng = bench.setup.rng(bench.model)
    for shown, number in zip(RUNNING, bench.scale.running):
        yield from guarded(decode_names(bench.model, shown), _decode(bench, engine, rng, shown, number))
    del engine
    gc.collect()
    # As in a new process: nothing is left but what lies in the folder.
    jax.clear_caches()
    yield started(start(bench.params, bench.scale, folder), "programs kept")


def _add(engine: Engine, scale: Scale, number: int, rng: np.random.Generator, max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for _ in range(number):
        engine.add_request(rng.integers(0, engine.model_config.vocab_size, scale.prompt).tolist(), sampling)


def _prefill(bench: Bench, engine: Engine) -> Iterator[dict[str, Any]]:
    scale, config = bench.scale, bench.params.config
    took = []
    for i in range(3):
        _add(engine, scale, scale.prefills, np.random.default_rng(i), 1)
        began = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        took.append(time.perf_counter() - began)
    rows = [(scale.prompt, scale.prompt)] * scale.prefills
    numbers = layer_numbers(bench.params)
    yield {
        "name": prefill_name(bench.model),
        "seconds": bench.seconds(float(np.median(took))),
        "flops": arithmetic.prefill_flops(numbers, rows, config.num_layers, config.num_q_heads, config.head_dim),
        "tokens": scale.prompt * scale.prefills,
    }


def _decode(
    bench: Bench, engine: Engine, rng: np.random.Generator, shown: int, number: int
) -> Iterator[dict[str, Any]]:
    """`number` requests run; `shown` is what the rows call them."""
    scale, config = bench.scale, bench.params.config
    whole, alone, kernels = (*decode_names(bench.model, shown), None)[:3]
    running: dict[str, int] = {}  # tokens of each request

    def step() -> None:
        for output in engine.step():
            running[output.request_id] = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)

    _add(engine, scale, number - len(engine._samples), rng, scale.room - scale.prompt)
    while len(running) < number:
        step()
    for _ in range(3):
        step()
    times, before = [time.perf_counter()], sum(running.values())
    for _ in range(scale.steps):
        step()
        times.append(time.perf_counter())
    assert len(running) == number == len(engine._samples), "the number of requests has changed"
    context = (before + sum(running.values())) // 2
    size = arithmetic.step_bytes(
        read_bytes(bench.params), context, config.num_layers, config.num_kv_heads, config.head_dim, 2
    )
    wall = float(np.median(np.diff(times)))
    note = f"{context} tokens of context together"
    yield {"name": whole, "seconds": bench.seconds(wall), "bytes": size, "tokens": number, "note": note}

    flight = engine._in_flight
    assert flight is not None and flight.batch.query_starts is None
    batch = jax.device_put(flight.batch)

    def program(kv_pages: Any) -> Any:
        return engine._steps(engine.weights, kv_pages, batch)[0]

    # The same step again and again: it writes the same numbers into the same slots.
    busy, engine._kv_pages = seconds_a_call(bench.setup, program, engine._kv_pages, [()])
    gap = None if busy is None else wall - busy
    note = None if gap is None else f"the engine takes {gap * 1e6:.0f} us a step more"
    yield {"name": alone, "seconds": busy, "bytes": size, "gap": gap, "note": note}
    if kernels is not None:
        yield {"name": kernels, **_kernels(engine, program, bench.setup)}


def _kernels(engine: Engine, program: Any, setup: Setup) -> dict[str, Any]:
    repeats = 1 if setup.rehearse else 4

    def some() -> Any:
        for _ in range(repeats):
            engine._kv_pages = program(engine._kv_pages)
        return engine._kv_pages

    found = kernels_of(some)
    busy = sum(seconds for _, _, seconds in found)
    if not busy:
        return {"note": "the profiler saw nothing on the device"}
    top = [
        {"kernel": name[:80], "count": count / repeats, "seconds": seconds / repeats, "share": seconds / busy}
        for name, count, seconds in found[:KERNELS_SHOWN]
    ]
    return {"seconds": busy / repeats, "kernels": top, "note": "time in kernels, by the profiler"}
