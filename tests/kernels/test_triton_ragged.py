"""The Triton-lowered kernel for chunks and mixed batches: what the cases of all implementations leave out."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BOUNDS, Case, assert_close, check_ragged, jitted, make_inputs

from pallas_kernels.ragged_paged_attention import triton
from pallas_kernels.target import Target

pytestmark = pytest.mark.slow

BLOCKS = dict(block_rows=64, block_tokens=16, num_warps=4, num_stages=2, few_tokens=32, few_stages=2)
BOUNDS.setdefault(("f16", "e4m3"), 2**-10)


def kernel(
    q,
    k_pages,
    v_pages,
    block_tables,
    context_lens,
    query_starts,
    *,
    sinks=None,
    k_scale=None,
    v_scale=None,
    num_cores=0,
    interpret,
    **options,
):
    return triton.ragged_paged_attention(
        q,
        k_pages,
        v_pages,
        block_tables,
        context_lens,
        query_starts,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        invariant=False,
        interpret=interpret,
        num_cores=num_cores,
        **options,
        **BLOCKS,
    )


def large_tiles(monkeypatch) -> None:
    """Small cases run what large batches do: tiles of both sizes, for float32 too."""
    monkeypatch.setattr(triton, "FEW_QUERIES", 0)
    monkeypatch.setattr(triton, "FEW_TOKENS", 0)
    blocks = triton.Blocks(BLOCKS["block_rows"], triton.FEW_ROWS, BLOCKS["block_tokens"], 4, 2, 1)
    monkeypatch.setattr(triton, "float32_blocks", lambda group, head_dim: blocks)


def check(case: Case, num_cores: int = 0) -> None:
    # A new partial: nothing is taken from a cache.
    check_ragged(partial(kernel, num_cores=num_cores, interpret=True), case)


MIXED = ((70, 1), (90, 65), (7, 3), (33, 33), (0, 0), (5, 0), (100, 20))
LARGE = [
    Case("plain", MIXED, padding_tokens=5),
    Case("pages gone, capped, sinks", MIXED, sliding_window=21, free_before_window=True, soft_cap=1.5, sinks=True),
    Case("7 heads a group, head_dim 80", MIXED, group=7, head_dim=80, num_kv_heads=1, page_size=64),
    Case("int8", MIXED, q_type="bf16", kv_type="int8", head_dim=96, sinks=True, page_size=32),
    Case("e4m3", MIXED, q_type="f16", kv_type="e4m3", head_dim=64, num_kv_heads=1, group=4, soft_cap=4.0),
    Case("float16, head_dim 256", MIXED[2:], q_type="f16", kv_type="f16", head_dim=256, num_kv_heads=1, page_size=128),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_tiles_of_both_sizes_in_one_batch(monkeypatch, case):
    large_tiles(monkeypatch)
    check(case)


SPECULATIVE = ((300, 5), (260, 2), (17, 8), (8, 8), (0, 0), (129, 3))
FEW = [
    Case("speculative rows", SPECULATIVE, padding_tokens=3, group=4),
    Case("speculative rows, windowed", SPECULATIVE, sliding_window=70, sinks=True, soft_cap=2.0),
    Case("speculative rows, bfloat16", SPECULATIVE, q_type="bf16", kv_type="bf16", head_dim=64, group=4, sinks=True),
    Case("speculative rows, e5m2", SPECULATIVE, q_type="bf16", kv_type="e5m2", head_dim=128, group=7, num_kv_heads=1),
]


@pytest.mark.parametrize(
    ("case", "num_cores"),
    [(FEW[0], 0), *((case, 132) for case in FEW), (FEW[3], 0)],
    ids=lambda x: x.name if isinstance(x, Case) else {0: "whole", 132: "split"}[x],
)
def test_few_queries_with_long_contexts(monkeypatch, case, num_cores):
    monkeypatch.setattr(triton, "SPLIT_BLOCKS", 1)
    check(case, num_cores)


def test_splits_of_chunks(monkeypatch):
    large_tiles(monkeypatch)
    monkeypatch.setattr(triton, "SPLIT_BLOCKS", 1)
    check(LARGE[1], num_cores=200)


def test_a_scale_of_0_means_keys_and_values_of_0():
    case = Case("zeros", ((40, 3), (20, 20)), q_type="bf16", kv_type="int8", head_dim=16)
    arrays = make_inputs(case)
    zeros = np.zeros(2, np.float32)
    attend = jitted(partial(kernel, interpret=True), scale=1.0, sliding_window=None, soft_cap=None)
    out = attend(*arrays, k_scale=zeros, v_scale=np.ones(2, np.float32))
    even = attend(*arrays._replace(k_pages=np.zeros_like(arrays.k_pages)), v_scale=np.ones(2, np.float32))
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(even, np.float32))
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("queries", [1, 7, 18, 64])
def test_there_are_tiles_enough_and_each_query_has_one(queries):
    rng = np.random.default_rng(0)
    for _ in range(50):
        lens = rng.integers(0, 3 * queries + 2, rng.integers(1, 9)) * rng.integers(0, 2)
        starts = np.cumsum([0, *lens])
        served = []
        for tile in range(starts[-1] // queries + len(lens)):
            row = np.count_nonzero(starts[:-1] // queries + np.arange(len(lens)) <= tile) - 1
            block = -(-lens[row] // queries) - 1 - (tile - starts[row] // queries - row)
            if block >= 0:
                served += range(
                    starts[row] + block * queries, min(starts[row] + (block + 1) * queries, starts[row + 1])
                )
        assert sorted(served) == list(range(starts[-1]))


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [(8, [16]), (64, [64]), (72, [64, 16]), (80, [64, 16]), (96, [64, 32]), (128, [128]), (256, [256])],
)
def test_a_head_is_cut_into_powers_of_two(head_dim, widths):
    parts = triton.column_parts(head_dim, 256)
    assert [width for _, width in parts] == widths
    assert [first for first, _ in parts] == [sum(widths[:i]) for i in range(len(widths))]


HOPPER, TURING = (Target("cuda", capability, "card", 132) for capability in ((9, 0), (7, 5)))


def reason(target=HOPPER, q="bfloat16", pool="bfloat16", head_dim=128, group=4, pages=100):
    return triton.unsupported(
        target,
        jax.ShapeDtypeStruct((8, 8 * group, head_dim), q),
        jax.ShapeDtypeStruct((pages, 8, 16, head_dim), pool),
        jax.ShapeDtypeStruct((4, 4), jnp.int32),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": TURING}, ("7.5", "8.0")),
        ({"q": "float64"}, ("float64", "bfloat16")),
        ({"pool": "int16"}, ("int16", "int8")),
        ({"head_dim": 512}, ("512", "256")),
        ({"head_dim": 65, "pool": "int8"}, ("65", "int8")),
        ({"group": 33}, ("33", "32")),
        ({"pages": 2**24 + 1}, ("2**31",)),
    ],
)
def test_what_it_cannot_serve_it_says(change, words):
    assert reason() is None
    for word in words:
        assert word in reason(**change)


def test_the_check_is_not_vacuous():
    case = LARGE[0]
    attend = jitted(partial(kernel, interpret=True), **case.options)
    out = np.asarray(attend(*make_inputs(case)), np.float64)[: make_inputs(case).query_starts[-1]]
    assert_close(out, case)
    with pytest.raises(AssertionError):
        assert_close(out * 1.001, case)
