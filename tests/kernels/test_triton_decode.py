"""The decode kernel in Pallas' Triton lowering, interpreted: what the cases for every implementation leave out."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import TYPES, Case, call, decode_case, expected, jit_quickly, jitted, make_inputs, unchanged

from pallas_kernels.paged_attention import triton
from pallas_kernels.target import Target

pytestmark = pytest.mark.slow

# Of the sum of weights times |v|: of the rounding of weights and results to q's type.
BOUNDS = {"f32": 1e-5, "f16": 2**-10, "bf16": 2**-7}
H200, A100 = (Target("cuda", capability, "", cores) for capability, cores in (((9, 0), 132), ((8, 0), 108)))


def kernel(q, k_pages, v_pages, block_tables, context_lens, *, num_cores=1, block_tokens=32, interpret, **options):
    options = dict(sinks=None, k_scale=None, v_scale=None, split_size=None) | options
    blocks = dict(block_tokens=block_tokens, num_warps=4, num_stages=3)
    return triton.paged_attention(
        q, k_pages, v_pages, block_tables, context_lens, **options, num_cores=num_cores, interpret=interpret, **blocks
    )


def run(case: Case, **options) -> np.ndarray:
    """The kernel's results for the case's rows, all of which have a query."""
    arrays = make_inputs(case)._asdict()
    del arrays["query_starts"]
    return call(chosen(**options), case, arrays, unchanged)


@cache
def chosen(**options):
    return partial(kernel, interpret=True, **options)


def check(case: Case, **options) -> None:
    out = run(case, **options)
    wanted, magnitude = expected(case)
    assert out.dtype == TYPES[case.q_type]
    assert np.isfinite(out.astype(np.float32)).all()
    worst = np.max(np.abs(out.astype(np.float64) - wanted) / np.maximum(magnitude, 1e-9))
    assert worst <= BOUNDS[case.q_type], f"off by {worst:.2g} of the size of the values"


LENS = (130, 1, 64, 257)
MANY = 200  # cores: a split for every block of the longest row
CASES = [
    (decode_case("head_dim 64, pages of 128", *LENS, head_dim=64, page_size=128, group=1), {}),
    (decode_case("head_dim 80", *LENS, head_dim=80, group=7), {}),
    (decode_case("head_dim 96, pages of 32", *LENS, head_dim=96, page_size=32, group=8, soft_cap=1.5), {}),
    (decode_case("head_dim 128, pages of 64", *LENS, head_dim=128, page_size=64, group=4, sinks=True), {}),
    (decode_case("head_dim 256", *LENS, head_dim=256, group=2, sliding_window=70), {"block_tokens": 16}),
    (decode_case("17 queries a KV head", *LENS, group=17, num_kv_heads=1), {}),
    (decode_case("a window shorter than a block", *LENS, sliding_window=7, free_before_window=True), {}),
    (decode_case("a window in two splits", *LENS, sliding_window=90, sinks=True), {"split_size": 64}),
    (decode_case("all at once", *LENS, sliding_window=90, sinks=True, soft_cap=2.0), {"split_size": 32}),
    (decode_case("e4m3", *LENS, head_dim=96, group=4, q_type="f16", kv_type="e4m3", sinks=True), {}),
    (decode_case("e5m2", *LENS, head_dim=80, page_size=64, q_type="bf16", kv_type="e5m2"), {"split_size": 64}),
    (decode_case("int8", *LENS, head_dim=128, group=7, q_type="bf16", kv_type="int8", sliding_window=70), {}),
    (decode_case("int8, float32 queries", *LENS, head_dim=64, kv_type="int8", soft_cap=9.0), {}),
    (decode_case("bfloat16 pool, float32 queries", *LENS, head_dim=64, kv_type="bf16"), {}),
]


@pytest.mark.parametrize(("case", "options"), CASES, ids=lambda x: x.name if isinstance(x, Case) else "")
def test_many_splits_agree_with_the_oracle(case: Case, options):
    check(case, num_cores=MANY, **options)


@pytest.mark.parametrize("scales", [("k_scale", "v_scale"), ("k_scale",)])
def test_scales_serve_pools_of_any_type(scales):
    case = decode_case("scaled", 130, 33, kv_type="f32", num_kv_heads=3)
    q, k_pages, v_pages, tables, lens, _ = make_inputs(case)
    factors = {"k_scale": np.array([0.5, 2, 1], np.float32), "v_scale": np.array([3, 1, 0.25], np.float32)}
    given = {name: factors[name] for name in scales}
    pools = [
        pages * given.get(name, np.ones(3, np.float32))[:, None, None]
        for name, pages in (("k_scale", k_pages), ("v_scale", v_pages))
    ]
    attend = jitted(chosen(), **case.options)
    scaled = attend(q, k_pages, v_pages, tables, lens, **given)
    np.testing.assert_allclose(scaled, attend(q, *pools, tables, lens), rtol=2e-5, atol=1e-6)


def test_any_number_of_splits_gives_about_the_same():
    case = decode_case("splits", 300, 33, 1, num_kv_heads=1, head_dim=16)
    one = run(case, block_tokens=16)
    for num_cores in (2, 5, 1000):
        np.testing.assert_allclose(run(case, num_cores=num_cores, block_tokens=16), one, rtol=1e-5, atol=1e-6)


INVARIANT = [
    (decode_case("plain", 130, 1, 64, 257, 33, head_dim=64), 320),
    (decode_case("sinks and cap", 130, 1, 64, 257, 33, sinks=True, soft_cap=1.5, page_size=32), 64),
    (decode_case("window", 130, 1, 64, 257, 33, sinks=True, sliding_window=100, q_type="bf16", kv_type="bf16"), 64),
    (decode_case("e4m3", 130, 1, 64, 257, 33, q_type="bf16", kv_type="e4m3", head_dim=64), 64),
]


@pytest.mark.parametrize(("case", "split_size"), INVARIANT, ids=lambda x: x.name if isinstance(x, Case) else str(x))
def test_with_a_split_size_a_row_has_the_same_bits_in_any_batch(case: Case, split_size):
    q, k_pages, v_pages, tables, lens, _ = make_inputs(case)
    attend = jit_quickly(partial(chosen(split_size=split_size), **case.options, **case.head_arrays))

    def rows(order, pages_per_seq, num_padding) -> np.ndarray:
        pad = [(0, num_padding), (0, 0)]
        table = (
            np.pad(tables[order], [(0, 0), (0, pages_per_seq - tables.shape[1])]) if pages_per_seq else tables[order]
        )
        queries = np.pad(q[order], [*pad, (0, 0)], constant_values=7)
        out = np.asarray(attend(queries, k_pages, v_pages, np.pad(table, pad), np.pad(lens[order], pad[0])))
        assert not out[len(order) :].any(), "padding rows must give zeros"
        return out[: len(order)].view(np.uint16 if out.itemsize == 2 else np.uint32)

    together = rows([0, 1, 2, 3, 4], tables.shape[1], 0)
    np.testing.assert_array_equal(rows([3, 1, 0], 64, 5), together[[3, 1, 0]])
    np.testing.assert_array_equal(rows([2], 40, 0), together[[2]])
    # A table so short that there is one split.
    short = np.array([1, 4])
    narrow = np.asarray(attend(q[short], k_pages, v_pages, tables[short, : -(-33 // case.page_size)], lens[short]))
    np.testing.assert_array_equal(narrow.view(together.dtype), together[short])


def test_splits_are_whole_blocks_that_cover_what_is_seen_once_and_are_never_empty():
    for window in (None, 1, 50, 64, 100):
        for split_size in (None, 32, 96):
            plan = triton.make_plan(1, 400, sliding_window=window, split_size=split_size, num_cores=3, block_tokens=32)
            for length in (0, 1, 31, 32, 33, 97, 128, 250, 400):
                count = int(triton.count_splits(plan, jnp.int32(length)))
                assert 0 <= count <= plan.num_splits and (count > 0) == (length > 0)
                cuts = [tuple(map(int, triton.split_blocks(plan, jnp.int32(length), i, count))) for i in range(count)]
                first = max(length - (window or length), 0)
                covered = [block for begin, end in cuts for block in range(begin, end)]
                assert covered == (list(range(first // 32, -(-length // 32))) if length else [])
                assert all(begin < end for begin, end in cuts)
                if split_size:
                    assert all(begin * 32 // split_size == (end * 32 - 1) // split_size for begin, end in cuts)


def test_a_small_batch_fills_the_device_and_a_large_one_is_not_split():
    def splits(rows, max_tokens=8192, window=None):
        return triton.make_plan(
            rows * 8, max_tokens, sliding_window=window, split_size=None, num_cores=132, block_tokens=64
        ).num_splits

    assert splits(1) * 8 >= 2 * 132 and splits(4) * 32 >= 2 * 132 and splits(64) == 1
    assert splits(1, max_tokens=200) == 4  # no more than there are blocks
    assert splits(1, window=128) == 3  # a window of 128 tokens lies in three blocks of 64 at most


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int8", np.int8), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn), ("float8_e5m2", ml_dtypes.float8_e5m2)],
)
def test_every_pair_of_eight_bit_numbers_is_unpacked_exactly(kind, dtype):
    pairs = np.arange(-(2**15), 2**15, dtype=np.int16)
    low, high = triton.unpack(jnp.asarray(pairs), kind)
    assert low.dtype == high.dtype == jnp.float16
    wanted = pairs.view(dtype).reshape(-1, 2).astype(np.float32)
    with np.errstate(invalid="ignore"):
        got = np.stack([low, high], 1).astype(np.float32) * triton.UNPACK[kind][1]
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(got[number], wanted[number])
    nan = {"float8_e4m3fn": np.abs(got[~number]) == 480, "float8_e5m2": np.isnan(got[~number])}
    assert nan.get(kind, np.array(True)).all()


@pytest.mark.parametrize(("dtype", "count", "precision"), [("bfloat16", 3, 2**-23), ("float16", 2, 2**-21)])
def test_a_sum_of_short_numbers_has_the_precision_of_a_long_one(dtype, count, precision):
    x = np.random.default_rng(0).uniform(-2, 2, 10_000).astype(np.float32)
    terms = jax.jit(lambda x: triton.as_sum(x, jnp.dtype(dtype), count))(x)
    assert len(terms) == count and all(term.dtype == dtype for term in terms)
    error = np.abs(sum(np.asarray(term).astype(np.float64) for term in terms) - x)
    assert (error <= precision * np.maximum(np.abs(x), 2**-3)).all()


def test_queries_out_of_the_range_of_float16_meet_an_eight_bit_pool():
    case = decode_case("range", 40, 17, q_type="bf16", kv_type="e4m3", head_dim=64)
    q, k_pages, v_pages, tables, lens, _ = make_inputs(case)
    q = q.copy()
    q[:, 0], q[:, 1], q[:, 2] = q[:, 0] * 2.0**40, q[:, 1] * 2.0**-40, 0

    def attend(q, scale):
        options = case.options | {"scale": scale}
        return jitted(chosen(), **options)(q, k_pages, v_pages, tables, lens, **case.head_arrays)

    small, large = attend(q, 2.0**-40), attend(q, 2.0**40)
    assert all(np.isfinite(np.asarray(out, np.float32)).all() for out in (small, large))
    np.testing.assert_array_equal(small[:, 0], attend(make_inputs(case).q, 1.0)[:, 0])


def test_what_it_cannot_serve_is_refused_with_the_reason():
    def reason(target, q_type="bfloat16", kv_type="bfloat16", head_dim=128):
        q = jax.ShapeDtypeStruct((4, 8, head_dim), q_type)
        pool = jax.ShapeDtypeStruct((9, 2, 16, head_dim), kv_type)
        return triton.unsupported(target, q, pool, jax.ShapeDtypeStruct((4, 7), "int32"))

    for target in (H200, A100):
        for head_dim in (64, 80, 96, 128, 256):
            for kv_type in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"):
                assert reason(target, kv_type=kv_type, head_dim=head_dim) is None
    assert "7.5" in reason(A100._replace(capability=(7, 5))) and "8.0" in reason(A100._replace(capability=(7, 5)))
    assert "257" in reason(H200, head_dim=257) and "256" in reason(H200, head_dim=257)
    assert "71" in reason(H200, kv_type="int8", head_dim=71) and reason(H200, head_dim=71) is None
    assert "float64" in reason(H200, q_type="float64")
    assert "uint8" in reason(H200, kv_type="uint8")
