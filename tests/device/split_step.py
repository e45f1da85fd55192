"""Run by test_sharding.py in a process with several CPU devices: a step on one device and spread over four."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[2]))

from jpaged.device.kv_pages import make_kv_pages
from jpaged.device.params import weight_shapes
from jpaged.device.sharding import KV_PAGES, TP, weight_specs
from jpaged.device.step import Kernels, next_logits, step
from jpaged.host.batch import Batch, SamplingBatch
from jpaged.host.sampling_params import MAX_BANNED_IDS
from jpaged.models.config import ModelConfig

BIASES = dict(attention_bias=True, output_bias=True, mlp_bias=True)
CONFIG = ModelConfig("Tiny", 64, 32, 48, 2, 8, 4, 8, 128, **BIASES)
PAGE_SIZE = 4


def batch(lens: list[int], queries: list[int] | None) -> Batch:
    rows = len(lens)
    tables = 1 + np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
    counts = queries or [1] * rows
    positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lens, counts)]).astype(np.int32)
    row = np.repeat(np.arange(rows), counts)
    slots = tables[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    ids = np.random.default_rng(len(positions)).integers(0, CONFIG.vocab_size, len(positions)).astype(np.int32)
    zeros = np.zeros(rows, np.float32)
    banned = np.full((rows, MAX_BANNED_IDS), CONFIG.vocab_size, np.int32)
    seeds = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)
    sampling = SamplingBatch(zeros + 1, np.zeros(rows, np.int32), zeros + 0.9, zeros, seeds, banned)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32) if queries else None
    return Batch(ids, positions, slots.astype(np.int32), tables, np.array(lens, np.int32), starts, sampling)


def main() -> None:
    config = CONFIG
    leaves, tree = jax.tree.flatten(
        weight_shapes(config), is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int)
    )
    rng = np.random.default_rng(0)
    weights = jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0, 0.3, s), jnp.float32) for s in leaves])
    batches = [batch([5, 3, 7], [5, 3, 7]), batch([6, 4, 8], None), batch([8, 7, 9], [2, 3, 1])]
    run = jax.jit(partial(next_logits, config, kernels=Kernels("xla")), donate_argnums=1)
    draw = jax.jit(partial(step, config, kernels=Kernels("xla")))

    def outcome(weights, pool):
        found = []
        for b in batches:
            if b.query_starts is None:
                _, (ids, logprobs, *_) = draw(weights, pool, b)
                found += [np.asarray(ids), np.asarray(logprobs)]
            pool, logits = run(weights, pool, b)
            found.append(np.asarray(logits))
        return found, pool

    whole, _ = outcome(weights, make_kv_pages(config, 11, PAGE_SIZE, jnp.float32))
    mesh = jax.make_mesh((4,), (TP,), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        specs = weight_specs(weights)
        spread = jax.tree.map(lambda w, s: jax.device_put(w, NamedSharding(mesh, s)), weights, specs)
        pool = make_kv_pages(config, 11, PAGE_SIZE, jnp.float32)
        pool = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, KV_PAGES)), pool)
        text = draw.lower(spread, pool, batches[1]).compile().as_text()
        split, pool = outcome(spread, pool)
    for a, b in zip(whole, split, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    for pages in jax.tree.leaves(pool):
        assert pages.sharding.spec == P(None, TP), pages.sharding
        assert {shard.data.shape for shard in pages.addressable_shards} == {(11, 1, PAGE_SIZE, 8)}
    counts = {name: len(re.findall(rf"= [^=]*\b{name}\(", text)) for name in ("all-reduce", "all-gather")}
    assert counts == {"all-reduce": 2 * config.num_layers, "all-gather": 1}, counts
    print("the same")


if __name__ == "__main__":
    main()
