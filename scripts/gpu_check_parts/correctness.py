"""Owns the check of the attention kernels against float64: random inputs, memory poisoned where nothing may read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu_check_parts import oracle
from gpu_check_parts.tasks import (
    EIGHT_BITS,
    JAX_TRITON,
    OWN,
    TYPES,
    Built,
    Setup,
    Skipped,
    Task,
    kernel_options,
    like,
    public_kernel,
)

# The largest error, relative to the sum of weights times |v|, by the types of q and of the pool. In bfloat16 the
# weights and the result are each rounded to 8 bits. A pool of eight bits is exact in q's type: the oracle is given what
# it holds.
BOUNDS = {("f32", "f32"): 2e-5, ("bf16", "bf16"): 2**-7, ("f32", "bf16"): 2**-6, ("f16", "f16"): 2**-10}
BOUNDS |= {("bf16", kind): 2**-7 for kind in EIGHT_BITS} | {("f32", kind): 2e-5 for kind in EIGHT_BITS}
INTERPRETED = ("bfloat16", "e4m3 pool", "window 300", "soft cap and sinks")  # in a rehearsal, which has to be short
SCALE = 0.11  # not the usual one over the root, so that a kernel which ignores it is found out
HUGE = (1 << 31) // (8 * 16 * 128) + 4096  # pages of 8 heads, 16 tokens, 128 numbers: more than 2^31 numbers


@dataclass(frozen=True)
class Case:
    """`rows`: (tokens of the context, queries); `random` more are drawn, up to `longest` tokens."""

    name: str
    rows: tuple[tuple[int, int], ...]
    random: int = 5
    longest: int = 1500
    page_size: int = 16
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    q_type: str = "bf16"
    kv_type: str = "bf16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    split_size: int | None = None
    num_pages: int | None = None

    def shrunk(self) -> Case:
        """Few shapes, as each is compiled; what the shapes are is for a GPU to check."""

        def less(n: int) -> int:
            return n if n <= 24 else 24 + n % 17

        return replace(
            self,
            rows=tuple((less(context), min(less(queries), less(context))) for context, queries in self.rows[:6]),
            random=0,
            page_size=16,
            num_kv_heads=2,
            group=2,
            head_dim=16,
            sliding_window=self.sliding_window and 11,
            split_size=self.split_size and 64,
            num_pages=64,
        )


EDGES = ((0, 0), (1, 1), (16, 1), (17, 1), (64, 1), (1025, 1), (1500, 1))
MIXED = ((0, 0), (1, 1), (200, 130), (1500, 150), (33, 33), (64, 0), (1025, 1), (129, 129))
VARIANTS: list[dict[str, Any]] = [
    dict(name="pages of 64, 8 queries a KV head", page_size=64, group=8, num_kv_heads=4),
    dict(name="pages of 128, float16", page_size=128, q_type="f16", kv_type="f16"),
    dict(name="head_dim 64, 7 queries a KV head", head_dim=64, group=7, num_kv_heads=4, page_size=32),
    dict(name="head_dim 80", head_dim=80, num_kv_heads=4),
    dict(name="head_dim 96, a head each", head_dim=96, group=1),
    dict(name="head_dim 256", head_dim=256, num_kv_heads=4, page_size=64),
    dict(name="float32", q_type="f32", kv_type="f32", num_kv_heads=4),
    dict(name="float32 queries, bfloat16 pool", q_type="f32", num_kv_heads=4),
    *(dict(name=f"{kind} pool", kv_type=kind) for kind in EIGHT_BITS),
    dict(name="window 300", sliding_window=300),
    dict(name="soft cap and sinks", soft_cap=3.0, sinks=True),
    dict(name="more than 2^31 numbers", num_pages=HUGE),
]
DECODE = [
    Case("bfloat16", EDGES),
    *(Case(rows=EDGES, **variant) for variant in VARIANTS),
    Case("split_size 256", EDGES, split_size=256),
    Case("200 rows", EDGES, random=193, longest=600),
    Case("one row of 20,000 tokens", ((20_000, 1),), random=0),
]
RAGGED = [
    Case("bfloat16", MIXED, random=3),
    *(Case(rows=MIXED, random=3, **variant) for variant in VARIANTS),
    Case("one prompt of 2,000 tokens", ((2000, 2000),), random=0, num_kv_heads=2),
]


def tasks() -> list[Task]:
    def attention(kernel: str, case: Case, implementation: str) -> Task:
        build, run = partial(build_case, kernel, case, implementation), partial(run_case, kernel, case, implementation)
        return Task("correctness", kernel, (f"{kernel}: {case.name}",), implementation, run, build)

    return [
        *(attention("paged_attention", case, name) for name in OWN for case in DECODE),
        *(attention("ragged_paged_attention", case, name) for name in OWN for case in RAGGED),
        *(attention("paged_attention", case, name) for name in JAX_TRITON for case in DECODE),
    ]


def rows_of(case: Case, setup: Setup) -> list[tuple[int, int]]:
    rng = setup.rng(case.name)
    rows = list(case.rows)
    for _ in range(case.random):
        context = int(rng.integers(1, case.longest + 1))
        rows.append((context, int(rng.integers(1, min(context, 100) + 1))))
    return rows


def build_case(kernel: str, case: Case, implementation: str, setup: Setup) -> Built:
    case = case.shrunk() if setup.rehearse else case
    options = kernel_options(setup, kernel, implementation, interpret=case.name in INTERPRETED)
    if kernel == "paged_attention":
        options["split_size"] = case.split_size

    # The result takes the place of `poisoned`, which is donated: what the kernel does not write stays poison.
    def program(poisoned, arrays):
        return public_kernel(kernel)(
            **arrays, scale=SCALE, sliding_window=case.sliding_window, soft_cap=case.soft_cap, **options
        )

    arrays = jax.tree.map(lambda x: like(x.shape, x.dtype), inputs_of(kernel, case, setup).arrays)
    pages = like((_num_pages(case, setup), case.num_kv_heads, case.page_size, case.head_dim), TYPES[case.kv_type])
    arrays |= {"k_pages": pages, "v_pages": pages}
    function = jax.jit(program, donate_argnums=0, keep_unused=True)
    key = (kernel, case.sliding_window, case.soft_cap, *options.items(), *arrays.items())
    return Built(key, function, (arrays["q"], arrays))


def _num_pages(case: Case, setup: Setup) -> int:
    used = sum(-(-context // case.page_size) for context, _ in rows_of(case, setup))
    needed = (case.num_pages or 0) * case.num_kv_heads * case.page_size * case.head_dim * 2
    if 2.5 * needed > setup.memory:
        raise Skipped(f"a pool of {2 * needed / 1e9:.0f} GB does not fit")
    return max(used + 5, case.num_pages or 0)


class Inputs(NamedTuple):
    """`wanted`: for each row what `oracle.attention` says."""

    arrays: dict[str, Any]  # of the call, without the pool
    pool: oracle.Pool
    lens: list[int]
    wanted: list[tuple[np.ndarray, np.ndarray]]


def inputs_of(kernel: str, case: Case, setup: Setup) -> Inputs:
    return setup.keep((kernel, case), lambda: _make_inputs(kernel, case, setup))


def _make_inputs(kernel: str, case: Case, setup: Setup) -> Inputs:
    rng, rows, is_decode = setup.rng(f"{kernel} {case.name}"), rows_of(case, setup), kernel == "paged_attention"
    num_heads, num_pages = case.num_kv_heads * case.group, _num_pages(case, setup)
    scales = oracle.scales(case.kv_type, case.num_kv_heads)
    lens = np.array([context for context, _ in rows], np.int32)
    counts = -(-lens // case.page_size)
    # Pages at both ends of the pool: the last are those that a short index would miss.
    half = counts.sum() // 2
    free = rng.permutation(np.r_[1 : half + 1, num_pages - counts.sum() + half : num_pages])
    tables = np.zeros((len(rows), max(counts.max(), 3) + 1), np.int32)
    queries, kv, pages = [], [], {"id": [], "k": [], "v": []}
    for row, (context, num_queries) in enumerate(rows):
        num_queries = min(context, 1) if is_decode else num_queries
        shape = (context, case.num_kv_heads, case.head_dim)
        kv.append([oracle.normal(rng, shape, case.kv_type, scales and scales[i]) for i in range(2)])
        queries.append(oracle.normal(rng, (num_queries, num_heads, case.head_dim), case.q_type))
        ids, free = free[: counts[row]], free[counts[row] :]
        tables[row, : len(ids)] = ids
        # Pages before the window belong to nobody any more: their content is poison, their place in the table 0.
        gone = 0
        if case.sliding_window and num_queries:
            gone = max(0, context - num_queries + 1 - case.sliding_window) // case.page_size
            tables[row, :gone] = 0
        for name, tokens in zip("kv", kv[-1]):
            pages[name].append(oracle.to_pages(tokens, case.page_size)[gone:])
        pages["id"].append(ids[gone:])
    pool = oracle.Pool(*(np.concatenate(pages[name]) for name in ("id", "k", "v")), num_pages)
    arrays: dict[str, Any] = {"block_tables": tables, "context_lens": lens}
    if is_decode:
        nothing = np.zeros((1, num_heads, case.head_dim), TYPES[case.q_type])
        arrays["q"] = np.concatenate([q if len(q) else nothing for q in queries])
    else:
        padding = np.full((7, num_heads, case.head_dim), np.nan, TYPES[case.q_type])
        arrays["q"] = np.concatenate([*queries, padding])
        arrays["query_starts"] = np.cumsum([0, *map(len, queries)]).astype(np.int32)
    if scales:
        arrays |= {"k_scale": scales[0], "v_scale": scales[1]}
    if case.sinks:
        arrays["sinks"] = rng.uniform(-1, 4, num_heads).astype(np.float32)
    wanted = [_wanted(case, arrays, q, k, v) for q, (k, v) in zip(queries, kv)]
    return Inputs(arrays, pool, lens.tolist(), wanted)


def _wanted(case: Case, arrays: dict[str, Any], q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    if not len(q):
        return np.zeros((2, 0))

    def meant(stored: np.ndarray, scale: str) -> np.ndarray:
        return stored.astype(np.float64) * (arrays[scale][:, None] if scale in arrays else 1)

    options = dict(sliding_window=case.sliding_window, soft_cap=case.soft_cap, sinks=arrays.get("sinks"))
    return oracle.attention(q.astype(np.float64), meant(k, "k_scale"), meant(v, "v_scale"), scale=SCALE, **options)


def run_case(kernel: str, case: Case, implementation: str, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    full, case = case, case.shrunk() if setup.rehearse else case
    arrays, pool, lens, wanted = inputs_of(kernel, case, setup)
    k_pages, v_pages = pool.on_device()
    on_device = jax.device_put(arrays) | {"k_pages": k_pages, "v_pages": v_pages}

    def call(arrays: dict[str, Any]) -> np.ndarray:
        oracle.poison_free_memory(setup.rehearse)
        poisoned = jnp.asarray(np.full(arrays["q"].shape, np.nan, arrays["q"].dtype))
        return np.asarray(program(poisoned, arrays))

    out = call(on_device)
    again = call(on_device)
    parts = list(out) if kernel == "paged_attention" else np.split(out, arrays["query_starts"][1:])
    worst = 0.0
    for row, (result, (right, size)) in enumerate(zip(parts, wanted)):
        result = result.reshape(-1, *result.shape[-2:]).astype(np.float64)
        if not len(right):
            assert kernel != "paged_attention" or not result.any(), f"row {row} is padding, and not all zeros"
            continue
        where = f"row {row} of {lens[row]} tokens and {len(right)} queries"
        assert np.isfinite(result).all(), f"{where}: {np.count_nonzero(~np.isfinite(result))} are not finite"
        worst = max(worst, float(np.max(np.abs(result - right) / np.maximum(size, 1e-9))))
    bound = BOUNDS[case.q_type, case.kv_type]
    assert worst <= bound, f"off by {worst:.2g} of the size of the values, allowed is {bound:.2g}"
    used = slice(None) if kernel == "paged_attention" else slice(arrays["query_starts"][-1])
    assert out[used].tobytes() == again[used].tobytes(), "a second run on the same inputs gave other bits: a race"
    if case.split_size:
        _check_neighbours(call, on_device, arrays, out)
    yield {"name": f"{kernel}: {full.name}", "error": worst, "bound": bound}


def _check_neighbours(call: Any, on_device: dict[str, Any], arrays: dict[str, Any], out: np.ndarray) -> None:
    """With `split_size`, a row is the same to the last bit in another place and without its neighbours."""
    order = np.roll(np.arange(len(out)), 3)
    alone = np.arange(len(out)) % 2 == 0
    moved = {name: arrays[name][order] for name in ("q", "block_tables", "context_lens")}
    moved["context_lens"] = np.where(alone, moved["context_lens"], 0).astype(np.int32)
    other = call(on_device | jax.device_put(moved))
    assert other[alone].tobytes() == out[order][alone].tobytes(), "a row's bits depend on the rows beside it"
