"""The cases that every implementation of the attention kernels must pass, and the check that decides it.

Memory is poisoned: page 0, every page that no row refers to, and every slot that no token was written to hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import oracle

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SCALE = 0.3  # not the usual head_dim ** -0.5, so that a kernel which ignores its argument is found out
TYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
EIGHT_BITS = ("e4m3", "e5m2", "int8")
# Of the sum of weights times |v|, by the types of q and of the pool. In bfloat16 the weights and the result are each
# rounded to 8 bits; where q and the pool have different types, only the result is. A pool of eight bits is exact in the
# type of q, and the oracle is given what the pool holds.
BOUNDS = {("f32", "f32"): 5e-6, ("bf16", "bf16"): 2**-7, ("f16", "f16"): 2**-10}
BOUNDS |= {("bf16", kind): 2**-7 for kind in EIGHT_BITS} | {("f32", kind): 5e-6 for kind in EIGHT_BITS}
MIXED_TYPES = [("f32", "bf16"), ("f32", "f16"), ("bf16", "f32"), ("f16", "f32"), ("bf16", "f16"), ("f16", "bf16")]
BOUNDS |= {types: {"f32": 5e-6, "bf16": 2**-8, "f16": 2**-11}[types[0]] for types in MIXED_TYPES}


@dataclass(frozen=True)
class Case:
    """`rows`: (tokens of the context, queries) of each row."""

    name: str
    rows: tuple[tuple[int, int], ...]
    page_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    sliding_window: int | None = None
    soft_cap: float | None = None
    q_type: str = "f32"
    kv_type: str = "f32"
    shared_pages: int = 0  # leading pages that all rows with as many tokens share
    free_before_window: bool = False  # pages that no query sees are gone, their places in the table point to page 0
    sinks: bool = False
    padding_tokens: int = 0
    padding_pages: int = 1  # columns of the block table that no row uses

    @property
    def options(self) -> dict:
        """The keyword arguments that are no arrays."""
        return {"scale": SCALE, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap}

    @property
    def head_arrays(self) -> dict[str, np.ndarray]:
        """The keyword arguments that are arrays with a number a head. A pool of eight bits has scales."""
        arrays = {}
        if self.sinks:
            arrays["sinks"] = np.linspace(-1, 4, self.num_kv_heads * self.group, dtype=np.float32)
        if self.kv_type in EIGHT_BITS:
            unit = 0.03 if self.kv_type == "int8" else 0.7
            arrays["k_scale"] = np.linspace(unit, 1.5 * unit, self.num_kv_heads, dtype=np.float32)
            arrays["v_scale"] = np.linspace(2 * unit, unit, self.num_kv_heads, dtype=np.float32)
        return arrays


class Inputs(NamedTuple):
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray


def decode_case(name: str, *context_lens: int, **options) -> Case:
    return Case(name, tuple((length, min(length, 1)) for length in context_lens), **options)


LENS = (17, 1, 16, 130, 15, 0, 33, 40, 128, 2, 129, 31, 32, 1, 0, 64, 65)
# Sizes of pages, each with numbers of heads: group, head_dim, num_kv_heads.
SIZES = {1: (1, 8, 3), 4: (3, 64, 1), 48: (4, 80, 2), 64: (7, 8, 2), 256: (8, 64, 1)}


def sized(page_size: int) -> dict:
    """The name of a case with pages of this size, and its numbers."""
    group, head_dim, num_kv_heads = SIZES[page_size]
    name = f"pages of {page_size}, {group} queries a KV head, head_dim {head_dim}"
    return dict(name=name, page_size=page_size, group=group, head_dim=head_dim, num_kv_heads=num_kv_heads)


# Cases of mixed types whose bound is tight have windows, too.
WINDOWS_OF_TYPES = {("f32", "bf16"): 3, ("f32", "f16"): 130}
DECODE_CASES = [
    *(decode_case(f"{rows} rows", *LENS[:rows]) for rows in (1, 3, 17)),
    decode_case("only padding rows", 0, 0),
    decode_case("many pages", 1000, 3, 517, padding_pages=3),
    decode_case("a table without padding", 32, 16, padding_pages=0),
    *(
        Case(rows=tuple((length, min(length, 1)) for length in lens), **sized(page_size))
        for page_size, lens in {
            1: (1, 2, 130, 127),
            4: (1, 4, 5, 128, 129, 0),
            48: (47, 48, 49, 100),
            64: (64, 63, 1, 65, 200),
            256: (255, 257, 1),
        }.items()
    ),
    *(decode_case(f"window {w}", 1, 16, 17, 0, 40, 300, sliding_window=w) for w in (1, 20, 1000)),
    decode_case("pages before the window are gone", 17, 300, 0, 36, sliding_window=20, free_before_window=True),
    decode_case("soft cap", 17, 33, 130, soft_cap=1.5),
    decode_case("shared pages", 40, 33, 16, 130, 32, 47, 2, shared_pages=2),
    decode_case("bfloat16", *LENS[:9], q_type="bf16", kv_type="bf16", head_dim=64),
    *(
        decode_case(
            f"{q} over {kv}",
            *LENS[:9],
            q_type=q,
            kv_type=kv,
            head_dim=64,
            sliding_window=WINDOWS_OF_TYPES.get((q, kv)),
        )
        for q, kv in MIXED_TYPES
    ),
    decode_case("float16", *LENS[:9], q_type="f16", kv_type="f16", head_dim=64),
    *(decode_case(f"{kind} pool", *LENS[:9], q_type="bf16", kv_type=kind, head_dim=64) for kind in EIGHT_BITS),
    decode_case("e4m3 pool, float32 queries", *LENS[:9], kv_type="e4m3", head_dim=64),
    decode_case("sinks", *LENS[:9], sinks=True),
    decode_case("sinks, soft cap and window", *LENS[:9], sinks=True, soft_cap=1.5, sliding_window=5),
]

MIXED = ((50, 1), (40, 13), (7, 1), (17, 17), (5, 0), (130, 1), (129, 2), (0, 0), (21, 5), (1, 1), (16, 16))
RAGGED_CASES = [
    Case("one row, its whole prompt", ((37, 37),)),
    Case("one row, one query", ((37, 1),)),
    Case("single queries between long rows", MIXED, padding_tokens=7),
    Case("single queries only", ((17, 1), (1, 1), (130, 1), (0, 0), (16, 1)), padding_tokens=3),
    Case("no queries at all", ((0, 0), (0, 0)), padding_tokens=4),
    Case("17 rows", tuple((n, n if i % 3 else min(n, 1)) for i, n in enumerate(LENS))),
    Case("chunks that begin inside a page", ((40, 13), (64, 16), (300, 20), (33, 31), (18, 2)), padding_tokens=6),
    Case(
        "more queries than a block",
        ((300, 300), (127, 127), (3, 1), (128, 128), (129, 129), (400, 140)),
        num_kv_heads=1,
        padding_tokens=11,
    ),
    *(Case(rows=((65, 9), (4, 4), (130, 1), (131, 3)), padding_tokens=1, **sized(page_size)) for page_size in SIZES),
    *(Case(f"window {w}", (*MIXED, (300, 30)), sliding_window=w) for w in (1, 20, 1000)),
    Case(
        "short rows behind a long one, to the end of the array", ((300, 300), (40, 5), (7, 1), (33, 3)), num_kv_heads=1
    ),
    Case("a window over many blocks", ((300, 300), (400, 140)), num_kv_heads=1, sliding_window=20),
    Case(
        "pages before the window are gone",
        ((300, 30), (17, 17), (300, 1), (100, 2)),
        sliding_window=20,
        free_before_window=True,
    ),
    Case("soft cap", MIXED, soft_cap=1.5),
    Case("shared pages", ((40, 8), (33, 1), (130, 9), (32, 0), (47, 15), (2, 2)), shared_pages=2),
    Case("bfloat16", MIXED, q_type="bf16", kv_type="bf16", head_dim=64),
    *(
        Case(
            f"{q} over {kv}",
            MIXED,
            q_type=q,
            kv_type=kv,
            head_dim=64,
            sliding_window=WINDOWS_OF_TYPES.get((q, kv)),
        )
        for q, kv in MIXED_TYPES
    ),
    Case("float16", MIXED, q_type="f16", kv_type="f16", head_dim=64),
    *(Case(f"{kind} pool", MIXED, q_type="bf16", kv_type=kind, head_dim=64) for kind in EIGHT_BITS),
    Case("e4m3 pool, float32 queries", MIXED, kv_type="e4m3", head_dim=64),
    Case("sinks", MIXED, sinks=True),
    Case("sinks, soft cap and window", MIXED, sinks=True, soft_cap=1.5, sliding_window=5),
]


@cache
def contexts(case: Case) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """The queries [num_tokens, ...], and each row's keys and values [context, num_kv_heads, head_dim], as stored."""
    rng = np.random.default_rng(len(case.name))
    scales = case.head_arrays

    def normal(tokens: int, heads: int, kind: str, scale: np.ndarray | None = None) -> np.ndarray:
        numbers = rng.standard_normal((tokens, heads, case.head_dim))
        if scale is not None:
            numbers /= scale[:, None]
        return (numbers.round() if kind == "int8" else numbers).astype(TYPES[kind])

    q = normal(sum(n for _, n in case.rows) + case.padding_tokens, case.num_kv_heads * case.group, case.q_type)
    keys = [normal(length, case.num_kv_heads, case.kv_type, scales.get("k_scale")) for length, _ in case.rows]
    values = [normal(length, case.num_kv_heads, case.kv_type, scales.get("v_scale")) for length, _ in case.rows]
    shared = case.shared_pages * case.page_size
    if shared:
        first = next(i for i, (length, _) in enumerate(case.rows) if length >= shared)
        for row, (length, _) in enumerate(case.rows):
            if length >= shared:
                keys[row][:shared], values[row][:shared] = keys[first][:shared], values[first][:shared]
    return q, keys, values


@cache
def make_inputs(case: Case) -> Inputs:
    """The case's contexts spread over pages in a random order, and poison everywhere else."""
    q, keys, values = contexts(case)
    lens = np.array([length for length, _ in case.rows], np.int32)
    counts = -(-lens // case.page_size)
    pages_per_seq = max(counts.max() + case.padding_pages, 1)
    num_pages = counts.sum() + 4
    free = list(1 + np.random.default_rng(1).permutation(num_pages - 1))
    shape = (num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    # The poison of whole numbers, which have no NaN, is the largest.
    poison = 127 if case.kv_type == "int8" else np.nan
    k_pages, v_pages = (np.full(shape, poison, TYPES[case.kv_type]) for _ in range(2))
    block_tables = np.zeros((len(lens), pages_per_seq), np.int32)
    shared_ids: list[int] = []
    for row, (length, queries) in enumerate(case.rows):
        page_ids = [free.pop() for _ in range(counts[row])]
        if case.shared_pages and length >= case.shared_pages * case.page_size:
            shared_ids = shared_ids or page_ids[: case.shared_pages]
            page_ids[: case.shared_pages] = shared_ids
        block_tables[row, : len(page_ids)] = page_ids
        unseen = max(0, length - queries + 1 - (case.sliding_window or length)) if case.free_before_window else 0
        block_tables[row, : unseen // case.page_size] = 0
        for at in range(unseen // case.page_size * case.page_size, length):
            page, offset = page_ids[at // case.page_size], at % case.page_size
            k_pages[page, :, offset], v_pages[page, :, offset] = keys[row][at], values[row][at]
    query_starts = np.cumsum([0, *(queries for _, queries in case.rows)]).astype(np.int32)
    return Inputs(q, k_pages, v_pages, block_tables, lens, query_starts)


@cache
def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """What `oracle.attention` says for every token that is not padding."""
    q, keys, values = contexts(case)
    starts = make_inputs(case).query_starts
    arrays = case.head_arrays
    options = case.options | {"sinks": arrays.get("sinks")}

    def meant(stored: np.ndarray, scale: str) -> np.ndarray:
        return stored.astype(np.float64) * arrays[scale][:, None] if scale in arrays else stored

    rows = [
        oracle.attention(q[a:b], meant(k, "k_scale"), meant(v, "v_scale"), **options)
        for a, b, k, v in zip(starts, starts[1:], keys, values)
        if b > a
    ]
    if not rows:
        return (np.zeros((0, *q.shape[1:])),) * 2
    return tuple(np.concatenate(parts) for parts in zip(*rows))


@cache
def jitted(kernel, **options):
    # What is interpreted is run once: to compile it less well saves a third of the time.
    interpreted = getattr(kernel, "keywords", {}).get("interpret")
    return jit_quickly(partial(kernel, **options)) if interpreted else jax.jit(partial(kernel, **options))


def jit_quickly(function):
    """For what is interpreted."""
    return jax.jit(function, compiler_options=QUICKLY)


def unchanged(arguments: dict) -> dict:
    return {}


def call(kernel, case: Case, arrays: dict, change) -> np.ndarray:
    """The kernel's results for the case, or for arguments of which some were changed: a planted bug."""
    arguments = arrays | case.head_arrays | case.options
    arguments |= change(arguments)
    options = {name: arguments.pop(name) for name in case.options}
    return np.asarray(jitted(kernel, **options)(**arguments))


def check_decode(kernel, case: Case, change=unchanged) -> None:
    """Raise AssertionError unless `kernel` gives the oracle's results, and zeros for padding rows."""
    arrays = make_inputs(case)._asdict()
    del arrays["query_starts"]
    seen = arrays["context_lens"] > 0
    q = np.zeros((len(case.rows), *arrays["q"].shape[1:]), arrays["q"].dtype)
    q[seen] = arrays["q"]
    out = call(kernel, case, arrays | {"q": q}, change)
    assert out.dtype == q.dtype and out.shape == q.shape
    out = out.astype(np.float64)
    assert not out[~seen].any(), "padding rows must give zeros"
    assert_close(out[seen], case)


def check_ragged(kernel, case: Case, change=unchanged) -> None:
    """Raise AssertionError unless `kernel` gives the oracle's results."""
    inputs = make_inputs(case)
    out = call(kernel, case, inputs._asdict(), change)
    assert out.dtype == inputs.q.dtype and out.shape == inputs.q.shape
    assert_close(out[: inputs.query_starts[-1]].astype(np.float64), case)


def caught(check, kernel, cases: list[Case], change=unchanged) -> bool:
    """Whether one of the cases fails."""
    for case in cases:
        try:
            check(kernel, case, change)
        except AssertionError:
            return True
    return False


def assert_close(out: np.ndarray, case: Case) -> None:
    wanted, magnitude = expected(case)
    assert np.isfinite(out).all(), f"{case.name}: {np.count_nonzero(~np.isfinite(out))} results are not finite"
    worst = np.max(np.abs(out - wanted) / np.maximum(magnitude, 1e-9), initial=0)
    bound = BOUNDS[case.q_type, case.kv_type]
    assert worst <= bound, f"{case.name}: off by {worst:.2g} of the size of the values, allowed is {bound:.2g}"
