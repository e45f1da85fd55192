"""Owns the checks of whole steps, compiled for GPUs that are not there.

No copy of the pool, every weight read once, little temporary memory, our kernels in place, and over several devices
only the collectives that tensor parallelism needs.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from compiled.card import compile_for, devices
from compiled.hlo import bytes_of, copies_of, instructions, pages_read, product, weights_read
from compiled.limits import CARDS, Card
from jpaged.device.kv_pages import kv_shape
from jpaged.device.params import weight_shapes
from jpaged.device.sharding import KV_PAGES, TP, check_split, weight_specs
from jpaged.device.step import BEST, Kernels, jitted_step
from jpaged.device.tiles import COMPILER_OPTIONS, TILES
from jpaged.engine.compile import batch_like
from jpaged.host.batch import Buckets
from jpaged.models.config import ModelConfig, RopeScaling

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    d_model=4096,
    d_ff=14336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", factor=8.0, original_max_position=8192),
)
LLAMA_70B = replace(LLAMA_8B, d_model=8192, d_ff=28672, num_layers=80, num_q_heads=64)

PRODUCT = re.compile(r"= (\S+) dot\(.*?\), (lhs_.*?}(?=, (?:metadata|frontend|backend)|$))", re.MULTILINE)


@dataclass(frozen=True)
class StepCase:
    """A step to compile. `tokens` None: a decode batch."""

    name: str
    config: ModelConfig
    rows: int
    tokens: int | None = None
    devices: int = 1
    num_pages: int = 8192
    page_size: int = 16
    pages_per_seq: int = 256
    deterministic: bool = False  # then compared with the decode step

    def __str__(self) -> str:
        return self.name


SMALL = replace(LLAMA_8B, d_model=1024, d_ff=3072, num_layers=28, num_q_heads=16)

STEPS = [
    StepCase("Llama-3.1-8B, decode of 64 rows", LLAMA_8B, 64),
    StepCase("Llama-3.1-8B, decode of 256 rows", LLAMA_8B, 256),
    StepCase("Llama-3.1-8B, 2,048 tokens of 64 rows", LLAMA_8B, 64, tokens=2048),
    StepCase("0.5B, decode of 64 rows", SMALL, 64),
    StepCase(
        "Llama-3.1-70B, 4 layers on 8 devices, decode of 64 rows", replace(LLAMA_70B, num_layers=4), 64, devices=8
    ),
    StepCase(
        "0.5B, 4 layers, 2,048 tokens of 64 rows, deterministic",
        replace(SMALL, num_layers=4),
        64,
        tokens=2048,
        deterministic=True,
    ),
]


class StepFacts(NamedTuple):
    """Bytes are per device."""

    temporary: int  # beside arguments and results
    aliased: int  # of the pool, written where it lies
    pool: int
    weights: int  # without the embedding, of which a few rows are read
    weights_read: int
    pages_read: int  # of the pool, that instructions are given to read
    pool_copies: list[str]  # instructions that make another array as large as a layer's keys
    logits_copies: list[str]
    gpu_kernels: int  # of ours
    collectives: dict[str, int]
    products: list[str]  # of matrices, in the forms that they are compiled in


def compile_step(card: Card, case: StepCase, kernels: Kernels = BEST) -> tuple[Any, StepFacts]:
    """The compiled program, and what was found in it."""
    on = devices(card, TP, case.devices)
    config = case.config
    check_split(config, case.devices)
    buckets = Buckets((case.rows,), (), (), case.pages_per_seq, case.page_size)
    batch = batch_like((case.tokens or case.rows, case.rows, case.tokens is None), buckets, False)
    shapes = weight_shapes(config)
    weights = jax.tree.map(
        lambda spec, shape: on.like(shape, jnp.bfloat16, spec),
        weight_specs(shapes),
        shapes,
        is_leaf=lambda x: isinstance(x, P),
    )
    page = on.like(kv_shape(config, case.num_pages, case.page_size), jnp.bfloat16, KV_PAGES)
    pool = ((page, page),) * config.num_layers
    batch = jax.tree.map(lambda a: on.like(a.shape, a.dtype), batch)
    with without_random_numbers():
        if case.deterministic:
            kernels = kernels._replace(tiles=TILES["gpu"])
        options = COMPILER_OPTIONS["gpu"] if case.deterministic else None
        compiled = compile_for(on, jitted_step, config, weights, pool, batch, kernels, compiler_options=options)
    return compiled, find_facts(compiled, weights, pool, 4 * case.rows * config.vocab_size)


def without_random_numbers() -> Any:
    """JAX 0.11 cannot lower its random numbers under an abstract mesh with a device: there, zeros stand for them."""
    if jax.__version_info__ >= (0, 12):
        return nullcontext()
    return mock.patch("jpaged.device.sampler.uniform", lambda seed, positions: jnp.zeros(positions.shape, jnp.float32))


def find_facts(compiled: Any, weights: Any, pool: Any, logits: int) -> StepFacts:
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    entry = instructions(text[text.index("\nENTRY ") :])
    flat = jax.tree.leaves((weights, pool))
    local = [leaf.sharding.shard_shape(leaf.shape) for leaf in flat]
    sizes = [leaf.dtype.itemsize * product(shape) for leaf, shape in zip(flat, local)]
    num_weights = len(jax.tree.leaves(weights))
    return StepFacts(
        temporary=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        pool=sum(sizes[num_weights:]),
        weights=sum(sizes[:num_weights]) - (sizes[0] if "embed" in weights else 0),  # the first in order
        weights_read=weights_read(entry, num_weights),
        pages_read=pages_read(entry, range(num_weights, len(flat))),
        pool_copies=copies_of(entry, local[-1]),
        logits_copies=[n for n, i in entry.items() if i.opcode == "copy" and bytes_of(i.shape) == logits],
        gpu_kernels=sum(
            bool(re.search(r"custom_call_target=\"(?:__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)\"", i.rest))
            for i in entry.values()
        ),
        collectives={
            name: len(re.findall(rf"= [^=]*\b{name}(?:-start)?\(", text))
            for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
        },
        products=sorted({f"{shape} {axes}" for shape, axes in PRODUCT.findall(text)}),
    )


def broken(case: StepCase, facts: StepFacts) -> list[str]:
    """What the step should have and has not."""
    problems = []
    if facts.pool_copies:
        problems.append(f"the pool is copied: {facts.pool_copies[:3]}")
    if facts.logits_copies:
        problems.append(f"the logits are copied: {facts.logits_copies}")
    if facts.aliased < facts.pool:
        problems.append(f"{facts.aliased} of {facts.pool} bytes of the pool are written in place")
    if facts.temporary > 256 * 2**20:
        problems.append(f"{facts.temporary / 2**20:.0f} MiB of temporary memory")
    if case.deterministic:  # in loops, which have the weights as their own
        return problems
    if facts.weights_read > 1.1 * facts.weights:
        problems.append(f"weights are read {facts.weights_read / facts.weights:.2f} times")
    if facts.pages_read != facts.pool:
        problems.append(f"the pool is read {facts.pages_read / facts.pool:.2f} times")
    if facts.gpu_kernels < 2 * case.config.num_layers:
        problems.append(f"{facts.gpu_kernels} kernels of ours in {case.config.num_layers} layers")
    sums = 2 * case.config.num_layers if case.devices > 1 else 0
    wanted = {"all-reduce": sums, "all-gather": int(case.devices > 1)}
    for name, number in facts.collectives.items():
        if number != wanted.get(name, 0):
            problems.append(f"{number} {name} instead of {wanted.get(name, 0)}")
    return problems


def check_step(case: StepCase, card: Card = CARDS["h200"]) -> dict[str, Any]:
    """Compile a step; returns its row of the table, with what is wrong with it in `broken`."""
    try:
        _, facts = compile_step(card, case)
        problems = broken(case, facts)
        if case.deterministic:
            _, decode = compile_step(card, replace(case, tokens=None))
            if decode.products != facts.products or not facts.products:
                problems.append(f"products are {facts.products}, and of a decode step {decode.products}")
    except Exception as error:
        return {"jax": jax.__version__, "broken": [f"it does not compile: {str(error).strip()[:500]}"]}
    return facts._asdict() | {"jax": jax.__version__, "broken": problems}
