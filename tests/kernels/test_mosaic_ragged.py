"""The Mosaic GPU kernel for chunks and mixed batches in its interpreter, which knows shared memory, threads, barriers.

The interpreter does not see the tensor cores read shared memory: a missing wait for K or V is found by the results.
"""

from __future__ import annotations

from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from cases import SCALE, Case, check_ragged, jitted, make_inputs
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_tiles, ragged_paged_attention
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_warpgroups
from pallas_kernels.ragged_paged_attention.query_tiles import Tile, tile_table
from pallas_kernels.target import INTERPRETED

pytestmark = pytest.mark.slow

# A race raises an exception.
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
BF16 = dict(q_type="bf16", kv_type="bf16", num_kv_heads=1, head_dim=64)
F16 = dict(q_type="f16", kv_type="f16", num_kv_heads=1, head_dim=64)
CHUNKS = ((70, 9), (130, 17))

# A block has 128 tokens, or 64 for a head_dim above 128.
CASES = [
    Case("single queries between chunks", ((50, 1), (140, 13), (5, 0), (130, 1), (0, 0), (1, 1)), group=4, **BF16),
    Case("many tiles and two heads", ((150, 70),), group=8, **(BF16 | {"num_kv_heads": 2})),
    Case("7 query heads, head_dim 80", CHUNKS, group=7, page_size=32, **(F16 | {"head_dim": 80})),
    Case("1 query head, head_dim 96", CHUNKS, group=1, page_size=64, **(BF16 | {"head_dim": 96})),
    Case("16 query heads, head_dim 128", CHUNKS, group=16, page_size=128, **(BF16 | {"head_dim": 128})),
    Case(
        "pages before the window are gone",
        ((400, 30), (17, 17), (300, 1)),
        group=2,
        sliding_window=150,
        free_before_window=True,
        **F16,
    ),
    Case("soft cap, sinks and window", CHUNKS, group=4, soft_cap=1.5, sinks=True, sliding_window=5, **BF16),
    Case("pages of 8", ((70, 20), (9, 9)), group=4, page_size=8, **BF16),
    Case("no queries at all", ((0, 0), (0, 0)), group=4, padding_tokens=4, **BF16),
]
# More blocks than slots, and for each of two programs more tiles than one.
LONG = Case("long", ((700, 30), (70, 1), (50, 1), (40, 1)), group=4, page_size=64, **BF16)

interpreted = partial(ragged_paged_attention, implementation="mosaic_gpu", interpret=INTERPRETER)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_query_attends_to_the_tokens_before_it_in_its_row_without_a_race(case: Case):
    check_ragged(interpreted, case)
    assert not gpu_callbacks.get_races().races_found


def test_scales_apply_to_keys_and_to_values():
    case = Case("scaled", CHUNKS, group=4, **(BF16 | {"num_kv_heads": 2}))
    inputs = make_inputs(case)
    k_scale, v_scale = np.float32([0.25, 2]), np.float32([3, 0.5])
    plain = np.asarray(jitted(interpreted, scale=SCALE)(*inputs), np.float32)
    q = (inputs.q.reshape(-1, 2, 4, 64) / k_scale[:, None, None].astype(inputs.q.dtype)).reshape(inputs.q.shape)
    scaled = jitted(interpreted, scale=SCALE)(q, *inputs[1:], k_scale=k_scale, v_scale=v_scale)
    wanted = plain * np.repeat(v_scale, 4)[:, None]
    np.testing.assert_allclose(np.asarray(scaled, np.float32), wanted, rtol=2**-7, atol=1e-6)


def test_a_query_gets_the_same_bits_in_one_chunk_and_in_another_and_whatever_is_in_the_padding():
    case = Case("in one chunk", ((200, 90), (40, 1)), group=4, padding_tokens=3, **BF16)
    q, k_pages, v_pages, tables, lens, starts = make_inputs(case)
    kernel = jitted(interpreted, **case.options)
    q[91:] = np.nan
    whole = np.asarray(kernel(q, k_pages, v_pages, tables, lens, starts))
    begun = np.asarray(kernel(q[:41], k_pages, v_pages, tables[:1], lens[:1] - 49, np.int32([0, 41])))
    ended = np.asarray(kernel(q[41:90], k_pages, v_pages, tables[:1, :-1], lens[:1], np.int32([0, 49])))
    np.testing.assert_array_equal(np.concatenate([begun, ended]), whole[:90])


def without(name: str, monkeypatch) -> None:
    """Drop all waits for one kind of barrier from the kernels that are traced from now on."""
    memories = []
    memory, wait = mosaic_gpu.Memory, mosaic_warpgroups.wait
    monkeypatch.setattr(
        mosaic_gpu, "Memory", lambda *refs, **names: memories.append(memory(*refs, **names)) or memories[-1]
    )

    def wait_unless_dropped(barriers, index):
        if barriers is not getattr(memories[-1], name, None):
            wait(barriers, index)

    monkeypatch.setattr(mosaic_warpgroups, "wait", wait_unless_dropped)


@pytest.mark.parametrize("name", ["q_ready", "q_free", "k_ready", "v_ready", "k_free", "v_free", "turn"])
def test_a_missing_wait_is_reported_or_shows_in_the_results(name, monkeypatch):
    without(name, monkeypatch)
    try:
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as failure:
            check_ragged(partial(interpreted), LONG)
        print(name, str(failure.value)[-2000:])
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def test_nothing_is_reported_with_all_waits(monkeypatch):
    without("", monkeypatch)
    check_ragged(partial(interpreted), LONG)
    assert not gpu_callbacks.get_races().races_found


def test_values_that_are_not_zeroed_show_in_the_results(monkeypatch):
    monkeypatch.setattr(mosaic_tiles, "zero_unseen", lambda *_: None)
    with pytest.raises(AssertionError, match="not finite"):
        check_ragged(partial(interpreted), LONG)


def test_tiles_cover_each_query_once_and_the_longest_come_first():
    lens, queries = np.int32([300, 5, 64, 0, 129]), np.int32([70, 5, 0, 0, 1])
    starts = np.int32([0, *np.cumsum(queries)])
    table, used = tile_table(starts, lens, 90, tile_tokens=32, block_tokens=64, sliding_window=None)
    tiles = [Tile(*numbers[:7]) for numbers in np.asarray(table)]
    assert used[0] == 5 and all(tile.count == 0 for tile in tiles[5:])
    covered = sorted(at for tile in tiles[:5] for at in range(tile.begin, tile.begin + tile.queries))
    assert covered == list(range(76))
    assert [tile.count for tile in tiles] == sorted((tile.count for tile in tiles), reverse=True)
    for tile in tiles[:5]:
        assert tile.position == lens[tile.row] - queries[tile.row] + tile.begin - starts[tile.row]
        assert tile.last == (tile.position + tile.queries - 1) // 64 and tile.count == tile.last + 1


def test_a_context_shorter_than_its_queries_has_no_tiles():
    table, _ = tile_table(np.int32([0, 9]), np.int32([3]), 9, tile_tokens=32, block_tokens=64, sliding_window=None)
    assert (np.asarray(table)[:, Tile._fields.index("count")] == 0).all()


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": (8, 0)}, ("8.0", "9.0")),
        ({"capability": (10, 0)}, ("10.0", "9.0")),
        ({"q_type": np.dtype(np.float32)}, ("q", "float32", "bfloat16")),
        ({"kv_type": np.dtype(ml_dtypes.float8_e4m3fn)}, ("pool", "float8_e4m3fn", "bfloat16")),
        ({"head_dim": 72}, ("head_dim 72", "multiples of 16")),
        ({"head_dim": 320}, ("head_dim 320", "256")),
        ({"head_dim": 256}, ("head_dim 256", "128")),
        ({"page_size": 48}, ("48", "8, 16, 32")),
        ({"page_size": 4}, ("4 tokens", "8, 16, 32")),
        ({"group": 33}, ("33", "32")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_it_cannot_serve_is_refused_with_the_reason(change, words):
    given = dict(capability=(9, 0), q_type=BFLOAT16, kv_type=BFLOAT16, head_dim=128, page_size=64, group=8) | change
    q = jax.ShapeDtypeStruct((3, 2 * given["group"], given["head_dim"]), given["q_type"])
    k_pages = jax.ShapeDtypeStruct((9, 2, given["page_size"], given["head_dim"]), given["kv_type"])
    reason = mosaic_gpu.unsupported(INTERPRETED._replace(capability=given["capability"]), q, k_pages, None)
    assert reason and all(word in reason for word in words), reason


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_the_usual_shapes_are_served(head_dim, group):
    for page_size in (16, 32, 64, 128):
        for dtype in (BFLOAT16, np.dtype(np.float16)):
            q = jax.ShapeDtypeStruct((3, 2 * group, head_dim), dtype)
            k_pages = jax.ShapeDtypeStruct((9, 2, page_size, head_dim), dtype)
            assert mosaic_gpu.unsupported(INTERPRETED, q, k_pages, None) is None
