"""The Mosaic GPU decode kernel in its interpreter, which knows shared memory, threads and barriers, and finds races.

The interpreter does not see the tensor cores read shared memory. It does see the ordinary reads by which a pool of 8
bits is widened, hence the tests of missing waits with one.
"""

from __future__ import annotations

from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from cases import Case, check_decode, decode_case, jitted, make_inputs
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_tiles, paged_attention
from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.target import INTERPRETED

pytestmark = pytest.mark.slow

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
BF16 = dict(q_type="bf16", kv_type="bf16", num_kv_heads=1)
F16 = dict(q_type="f16", kv_type="f16", num_kv_heads=1)
E4M3 = dict(q_type="bf16", kv_type="e4m3", num_kv_heads=1)

CASES = [
    decode_case("lengths about a block", 1, 0, 64, 130, 65, page_size=16, head_dim=64, group=8, **BF16),
    decode_case("only padding rows", 0, 0, page_size=64, head_dim=64, **BF16),
    decode_case("pages of 8", 9, 77, page_size=8, head_dim=64, group=1, **BF16),
    decode_case("pages of 32, head_dim 80", 100, 31, page_size=32, head_dim=80, group=7, **F16),
    decode_case("pages of 64, head_dim 96", 200, 63, page_size=64, head_dim=96, group=4, **BF16),
    decode_case("pages of 128, 16 query heads", 300, 129, page_size=128, head_dim=128, group=16, **BF16),
    decode_case("head_dim 256, two KV heads", 70, page_size=64, head_dim=256, group=1, **BF16 | {"num_kv_heads": 2}),
    decode_case(
        "pages before the window are gone",
        *(0, 100, 300, 17),
        **(dict(page_size=16, head_dim=64, group=2, sliding_window=70, free_before_window=True) | F16),
    ),
    decode_case("soft cap and sinks", 0, 100, 3, page_size=64, head_dim=64, group=4, soft_cap=1.5, sinks=True, **BF16),
    decode_case("e4m3 pool", 1, 130, page_size=16, head_dim=80, group=4, **E4M3),
    decode_case("e5m2 pool", 1, 130, page_size=64, head_dim=64, group=4, **E4M3 | {"kv_type": "e5m2"}),
    decode_case("int8 pool", 1, 130, page_size=64, head_dim=64, group=4, **E4M3 | {"kv_type": "int8"}),
]
# More blocks, in one split, than are under way at once, so that slots are filled again, and an end inside a page.
ONE_SPLIT = 1024
LONG = decode_case("long", 500, 70, page_size=64, head_dim=64, group=2, **BF16)
LONG_E4M3 = decode_case("long, e4m3 pool", 500, 70, page_size=64, head_dim=64, group=2, **E4M3)


@pytest.fixture(autouse=True)
def races(monkeypatch) -> list:
    """What the interpreter found, a state a kernel: its `get_races` knows those of the last kernel alone."""
    states = []
    new = gpu_callbacks.GPURaceDetectionState
    record = lambda *args, **options: states.append(new(*args, **options)) or states[-1]  # noqa: E731
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", record)
    return states


def none_found(races: list) -> bool:
    assert races, "no kernel was interpreted"
    return not any(state.races_found for state in races)


def interpreted(**options):
    return partial(paged_attention, implementation="mosaic_gpu", interpret=INTERPRETER, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_row_attends_to_its_own_context_without_a_race(case: Case, races):
    check_decode(interpreted(), case)
    assert none_found(races)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (decode_case("dealt out", 600, 70, 0, page_size=64, head_dim=64, padding_pages=4, sinks=True, **BF16), {}),
        (
            decode_case("cut", 400, 63, 0, page_size=16, head_dim=80, sliding_window=200, soft_cap=1.5, **F16),
            {"split_size": 64},
        ),
    ],
    ids=["dealt out evenly", "cut at multiples of split_size"],
)
def test_the_splits_of_a_context_are_combined_without_a_race(case: Case, options, races, monkeypatch):
    combined = []
    divide = mosaic_gpu.Cut.splits
    monkeypatch.setattr(mosaic_gpu.Cut, "splits", lambda cut, n: combined.append(cut.num_splits) or divide(cut, n))
    check_decode(interpreted(**options), case)
    assert combined and combined[0] > 1
    assert none_found(races)


def test_with_a_split_size_a_row_gets_the_same_bits_in_any_batch():
    case = decode_case("a batch", 300, 70, 0, 129, page_size=64, head_dim=64, group=2, sinks=True, **BF16)
    q, k_pages, v_pages, tables, lens, _ = make_inputs(case)
    q = np.concatenate([q[:2], q[:1], q[2:]])
    kernel = jitted(interpreted(split_size=128, sinks=case.head_arrays["sinks"]), **case.options)
    together = np.asarray(kernel(q, k_pages, v_pages, tables, lens))
    longer = np.asarray(kernel(q, k_pages, v_pages, np.pad(tables, [(0, 0), (0, 7)]), lens))
    np.testing.assert_array_equal(longer, together)
    # One split, hence no second kernel.
    alone = np.asarray(kernel(q[1:2], k_pages, v_pages, tables[1:2, :2], lens[1:2]))
    np.testing.assert_array_equal(alone[0], together[1])


WAITS = ("K's slot is free", "V's slot is free", "q is there", "K is there", "V is there")  # in the order of tracing


def trace_without(wait: str, monkeypatch):
    """Drop one wait for a barrier from the kernel that is traced next. Returns the waits that it has not come to."""
    waits = iter(WAITS)
    original = plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(waits) == wait else original(barrier))
    return waits


@pytest.mark.parametrize("case", [LONG, LONG_E4M3], ids=lambda case: case.name)
@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_reported(wait, case, races, monkeypatch):
    trace_without(wait, monkeypatch)
    report = ""
    try:
        check_decode(interpreted(split_size=ONE_SPLIT), case)
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
        report = str(error)
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    # A race raises an exception since jax 0.12. Where one thread runs far ahead, it is the barrier that complains.
    assert "RACE DETECTED" in report or "Barrier completed phase" in report or not none_found(races), report


@pytest.mark.parametrize("case", [LONG, LONG_E4M3], ids=lambda case: case.name)
def test_nothing_is_reported_with_all_waits(case, races, monkeypatch):
    waits = trace_without("none", monkeypatch)
    check_decode(interpreted(split_size=ONE_SPLIT), case)
    assert none_found(races) and not list(waits)


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": (8, 0)}, ("8.0", "9.0")),
        ({"capability": (10, 0)}, ("10.0", "9.0")),
        ({"q_type": np.dtype(np.float32)}, ("q", "float32", "bfloat16")),
        ({"kv_type": np.dtype(np.float32)}, ("pool", "float32", "bfloat16")),
        ({"head_dim": 72}, ("head_dim 72", "multiples of 16")),
        ({"head_dim": 320}, ("head_dim 320", "256")),
        ({"page_size": 48}, ("48", "8, 16, 32")),
        ({"page_size": 4}, ("4 tokens", "8, 16, 32")),
        ({"group": 17}, ("17", "16")),
        ({"head_dim": 144, "kv_type": np.dtype(np.int8)}, ("144", "8 bits")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_it_cannot_serve_is_refused_with_the_reason(change, words):
    given = dict(capability=(9, 0), q_type=BFLOAT16, kv_type=BFLOAT16, head_dim=128, page_size=64, group=8) | change
    q = jax.ShapeDtypeStruct((3, 2 * given["group"], given["head_dim"]), given["q_type"])
    k_pages = jax.ShapeDtypeStruct((9, 2, given["page_size"], given["head_dim"]), given["kv_type"])
    tables = jax.ShapeDtypeStruct((3, 4), np.int32)
    target = INTERPRETED._replace(capability=given["capability"])
    reason = mosaic_gpu.unsupported(target, q, k_pages, tables)
    assert reason and all(word in reason for word in words), reason


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
def test_the_usual_shapes_are_served(head_dim, group):
    for page_size in (8, 16, 32, 64, 128, 256):
        for kv_type in (BFLOAT16, np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)):
            q = jax.ShapeDtypeStruct((3, 2 * group, head_dim), BFLOAT16)
            k_pages = jax.ShapeDtypeStruct((9, 2, page_size, head_dim), kv_type)
            assert mosaic_gpu.unsupported(INTERPRETED, q, k_pages, None) is None


def test_short_rows_are_padded_to_whole_products():
    assert [mosaic_tiles.padded(d) for d in (16, 64, 80, 96, 128, 256)] == [64, 64, 128, 128, 128, 256]
    assert [mosaic_tiles.swizzle_bytes(d) for d in (16, 64, 80, 96, 128, 256)] == [32, 128, 32, 64, 128, 128]
