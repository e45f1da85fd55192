"""Owns the timing of the attention kernels, beside cuDNN on dense keys and values, JAX's own kernel and XLA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import pallas_kernels
from gpu_check_parts import arithmetic
from gpu_check_parts.tasks import JAX_TRITON, OWN, TYPES, Built, Setup, Skipped, Task, kernel_options, like, noise
from gpu_check_parts.timing import FAST, calls_a_program, figures, num_sets

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
PAGE_SIZE = 16  # the engine's
CUDNN, JAX_OWN = "cuDNN, dense", "JAX's paged_attention"
OTHERS = (CUDNN, JAX_OWN)
JAX_OWN_ELEMENTS = 1 << 30  # of a pool: it counts them in 32 bits, and past 2^31 reads what is not its own


class Decode(NamedTuple):
    """`context` tokens for each of `num_seqs` rows; `mixed`: in the mean, the longest a hundred times the shortest."""

    num_seqs: int
    context: int
    kv_type: str = "bf16"
    page_size: int = PAGE_SIZE
    split_size: int | None = None
    mixed: bool = False

    @property
    def name(self) -> str:
        extras = [] if self.kv_type == "bf16" else [f"{self.kv_type} pool"]
        extras += [] if self.page_size == PAGE_SIZE else [f"pages of {self.page_size}"]
        extras += [] if self.split_size is None else [f"split_size {self.split_size}"]
        return ", ".join([f"decode {self.num_seqs} × {self.context}{' mixed' if self.mixed else ''}", *extras])

    def shrunk(self) -> Decode:
        return self._replace(
            num_seqs=2,
            context=64 if self.mixed else 32,
            split_size=self.split_size and 64,
            page_size=min(self.page_size, 32),
        )

    @property
    def lens(self) -> np.ndarray:
        if not self.mixed:
            return np.full(self.num_seqs, self.context, np.int32)
        spread = np.geomspace(self.context / 32, 4 * self.context, self.num_seqs)
        return np.clip(spread * self.context / spread.mean(), 1, 4 * self.context).astype(np.int32)

    @property
    def pages_per_seq(self) -> int:
        return -(-int(self.lens.max()) // self.page_size)

    @property
    def bytes(self) -> int:
        size = TYPES[self.kv_type].itemsize
        return arithmetic.decode_bytes(self.num_seqs, int(self.lens.sum()), HEADS, KV_HEADS, HEAD_DIM, size)

    def calls(self, setup: Setup) -> int:
        return 2 if setup.rehearse else calls_a_program(self.bytes / FAST)


class Prefill(NamedTuple):
    """The last `queries` of `context` tokens of one row, behind `decodes` rows of one query each."""

    queries: int
    context: int
    kv_type: str = "bf16"
    decodes: int = 0
    decode_context: int = 0

    @property
    def name(self) -> str:
        start = "" if self.queries == self.context else f" at the end of {self.context}"
        beside = f", beside decode {self.decodes} × {self.decode_context}" if self.decodes else ""
        pool = "" if self.kv_type == "bf16" else f", {self.kv_type} pool"
        return f"prefill {self.queries}{start}{beside}{pool}"

    def shrunk(self) -> Prefill:
        context = 32 if self.context > self.queries else 16
        return self._replace(queries=16, context=context, decodes=min(self.decodes, 2), decode_context=32)

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [(1, self.decode_context)] * self.decodes + [(self.queries, self.context)]

    @property
    def pages_per_seq(self) -> int:
        return max(context for _, context in self.rows) // PAGE_SIZE

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.queries

    @property
    def flops(self) -> int:
        return arithmetic.attention_flops(self.rows, HEADS, HEAD_DIM)


# What the targets are about comes first: the time may run out.
AIMED = [Decode(64, 4096), Decode(64, 32768), Decode(256, 4096), Decode(256, 32768)]
SMALLER = [(16, 4096), (16, 32768), (1, 4096), (1, 32768), (256, 512), (64, 512), (16, 512), (1, 512)]
DECODES = AIMED + [Decode(*batch) for batch in SMALLER]
VARIANTS = [
    Decode(64, 4096, page_size=64),
    Decode(64, 4096, split_size=1024),
    Decode(64, 4096, mixed=True),
]
EIGHT_BIT = [decode._replace(kv_type="e4m3") for decode in DECODES if decode.context > 512]
SLOW = [decode for decode in DECODES if decode.num_seqs * decode.context <= 1 << 18 and decode.context <= 4096]
PREFILLS = [Prefill(8192, 8192), Prefill(32768, 32768), Prefill(2048, 2048), Prefill(2048, 32768)]
MIXED = Prefill(2048, 8192, decodes=64, decode_context=4096)  # a chunk, as the engine has it
DENSE = [prefill for prefill in PREFILLS if prefill.queries == prefill.context]  # what cuDNN's causal mask means


def tasks() -> list[Task]:
    def decode(size: Decode, group: str, implementation: str) -> Task:
        build, run = partial(build_decode, size, implementation), partial(run_decode, size, implementation)
        return Task("attention", group, (size.name,), implementation, run, build, ours=implementation not in OTHERS)

    def prefill(size: Prefill, group: str, implementation: str) -> Task:
        build, run = partial(build_prefill, size, implementation), partial(run_prefill, size, implementation)
        return Task("attention", group, (size.name,), implementation, run, build, ours=implementation not in OTHERS)

    return [
        *(decode(size, "targets", name) for size in AIMED for name in OWN),
        *(prefill(PREFILLS[0], "targets", name) for name in OWN),
        *(decode(size, "decode", name) for size in DECODES[len(AIMED) :] for name in OWN),
        *(prefill(size, "prefill", name) for size in [*PREFILLS[1:], MIXED] for name in OWN),
        *(prefill(size, "prefill", CUDNN) for size in DENSE),
        *(decode(size, "decode, cuDNN", CUDNN) for size in DECODES),
        *(decode(size, "decode, 8 bits", name) for size in EIGHT_BIT for name in OWN),
        *(prefill(PREFILLS[0]._replace(kv_type="e4m3"), "decode, 8 bits", name) for name in OWN),
        *(decode(size, "others", name) for size in VARIANTS for name in OWN),
        *(decode(size, "others", name) for size in SLOW for name in (JAX_OWN, *JAX_TRITON, "xla")),
        prefill(Prefill(2048, 2048), "others", "xla"),
    ]


# Decode


def num_pages(setup: Setup, kind: str) -> int:
    """Of the one pool for all sizes, or for those that fit into half of the memory. A multiple of 64."""
    if setup.rehearse:
        return 64
    most = max(size.num_seqs * size.context for size in DECODES) // PAGE_SIZE + 64
    page = 2 * KV_HEADS * PAGE_SIZE * HEAD_DIM * TYPES[kind].itemsize
    return min(most, setup.memory // 2 // page) // 64 * 64


def pool_shape(setup: Setup, size: Decode | Prefill, implementation: str) -> tuple[int, int, int, int]:
    pages = num_pages(setup, size.kv_type)
    if implementation == JAX_OWN:
        pages = min(pages, JAX_OWN_ELEMENTS // (KV_HEADS * PAGE_SIZE * HEAD_DIM)) // 64 * 64
    return (pages, KV_HEADS, PAGE_SIZE, HEAD_DIM)


def build_decode(size: Decode, implementation: str, setup: Setup) -> Built:
    size = size.shrunk() if setup.rehearse else size
    if implementation == CUDNN:
        return _build_dense(size.num_seqs, 1, size.context, size.calls(setup), setup)
    pool = pool_shape(setup, size, implementation)
    if size.num_seqs * size.pages_per_seq * size.page_size > (pool[0] - 1) * PAGE_SIZE:
        raise Skipped(f"{size.name} does not fit into a pool of {pool[0]} pages, all that may be taken here")
    attend = _jax_own(setup) if implementation == JAX_OWN else _own_decode(size, implementation, setup)

    def program(q, k_pages, v_pages, scales, lens, *tables):
        k_pages, v_pages = (x.reshape(-1, KV_HEADS, size.page_size, HEAD_DIM) for x in (k_pages, v_pages))
        attend_once = jax.jit(attend)  # traced once for all calls
        for table in tables:
            q = attend_once(q, k_pages, v_pages, scales, table, lens)
        return q

    pages = like(pool, TYPES[size.kv_type])
    shapes = (
        like((size.num_seqs, HEADS, HEAD_DIM), TYPES["bf16"]),
        pages,
        pages,
        None if size.kv_type == "bf16" else (like((KV_HEADS,), np.float32),) * 2,
        like((size.num_seqs,), np.int32),
        *[like((size.num_seqs, size.pages_per_seq), np.int32)] * size.calls(setup),
    )
    return Built((implementation, size), jax.jit(program), shapes)


def _own_decode(size: Decode, implementation: str, setup: Setup) -> Any:
    options = kernel_options(setup, "paged_attention", implementation)

    def attend(q, k_pages, v_pages, scales, tables, lens):
        k_scale, v_scale = scales or (None, None)
        return pallas_kernels.paged_attention(
            q,
            k_pages,
            v_pages,
            tables,
            lens,
            scale=SCALE,
            k_scale=k_scale,
            v_scale=v_scale,
            split_size=size.split_size,
            **options,
        )

    return attend


def _jax_own(setup: Setup) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def attend(q, k_pages, v_pages, scales, tables, lens):
        # It has the heads in front. What lies where means nothing here, so the same memory will do.
        k_pages, v_pages = (x.reshape(KV_HEADS, -1, PAGE_SIZE, HEAD_DIM) for x in (k_pages, v_pages))
        splits = min(16, tables.shape[1])
        return paged_attention(q, k_pages, v_pages, tables, lens, k_splits=splits, interpret=setup.rehearse)

    return attend


def pool(setup: Setup, kind: str, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return setup.keep(("pool", kind, shape), lambda: (noise(setup, "k", shape, kind), noise(setup, "v", shape, kind)))


def table_sets(setup: Setup, shape: tuple[int, int], pages: int, bytes_a_call: int, calls: int) -> list[tuple]:
    """Block tables of calls that take turns: pages in a random order, each call others, as far as there are others."""
    order = setup.keep(("order", pages), lambda: 1 + setup.rng("order").permutation(pages - 1).astype(np.int32))
    size = shape[0] * shape[1]
    programs = max(1, min(num_sets(bytes_a_call), -(-pages // size)) // calls)
    tables = np.resize(order, (programs, calls, *shape))
    return [tuple(jax.device_put(list(group))) for group in tables]


def run_decode(size: Decode, implementation: str, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    full, size = size, size.shrunk() if setup.rehearse else size
    q, calls = noise(setup, "q", (size.num_seqs, HEADS, HEAD_DIM), "bf16"), size.calls(setup)
    if implementation == CUDNN:
        shape = (size.num_seqs, size.context, KV_HEADS, HEAD_DIM)
        sets = _dense_sets(setup, shape, size.bytes, calls)
        row, out = figures(setup, program, q[:, None], sets, calls)
    else:
        shape = pool_shape(setup, size, implementation)
        k_pages, v_pages = pool(setup, size.kv_type, shape)
        scales = None if size.kv_type == "bf16" else (np.ones(KV_HEADS, np.float32),) * 2
        fixed = jax.device_put((k_pages, v_pages, scales, size.lens))
        pages = shape[0] * PAGE_SIZE // size.page_size
        sets = table_sets(setup, (size.num_seqs, size.pages_per_seq), pages, size.bytes, calls)
        row, out = figures(setup, program, q, [(*fixed, *tables) for tables in sets], calls)
    must_be_finite(out)
    yield {"name": full.name, "bytes": full.bytes, **row}


# Prefill


def build_prefill(size: Prefill, implementation: str, setup: Setup) -> Built:
    size = size.shrunk() if setup.rehearse else size
    if implementation == CUDNN:
        return _build_dense(1, size.queries, size.context, 1, setup)
    options = kernel_options(setup, "ragged_paged_attention", implementation)

    def program(q, k_pages, v_pages, scales, lens, starts, table):
        k_scale, v_scale = scales or (None, None)
        return pallas_kernels.ragged_paged_attention(
            q, k_pages, v_pages, table, lens, starts, scale=SCALE, k_scale=k_scale, v_scale=v_scale, **options
        )

    pages = like(pool_shape(setup, size, implementation), TYPES[size.kv_type])
    shapes = (
        like((size.num_tokens, HEADS, HEAD_DIM), TYPES["bf16"]),
        pages,
        pages,
        None if size.kv_type == "bf16" else (like((KV_HEADS,), np.float32),) * 2,
        like((len(size.rows),), np.int32),
        like((len(size.rows) + 1,), np.int32),
        like((len(size.rows), size.pages_per_seq), np.int32),
    )
    return Built((implementation, size), jax.jit(program), shapes)


def run_prefill(size: Prefill, implementation: str, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    full, size = size, size.shrunk() if setup.rehearse else size
    q = noise(setup, "q", (size.num_tokens, HEADS, HEAD_DIM), "bf16")
    context = sum(context for _, context in size.rows)
    kv_bytes = arithmetic.decode_bytes(size.num_tokens, context, HEADS, KV_HEADS, HEAD_DIM, 2)
    if implementation == CUDNN:
        sets = _dense_sets(setup, (1, size.context, KV_HEADS, HEAD_DIM), kv_bytes, 1)
        row, out = figures(setup, program, q[None], sets)
    else:
        shape = pool_shape(setup, size, implementation)
        scales = None if size.kv_type == "bf16" else (np.ones(KV_HEADS, np.float32),) * 2
        lens = np.array([context for _, context in size.rows], np.int32)
        starts = np.cumsum([0, *(queries for queries, _ in size.rows)]).astype(np.int32)
        fixed = jax.device_put((*pool(setup, size.kv_type, shape), scales, lens, starts))
        sets = table_sets(setup, (len(size.rows), size.pages_per_seq), shape[0], kv_bytes, 1)
        row, out = figures(setup, program, q, [(*fixed, *tables) for tables in sets])
    must_be_finite(out)
    yield {"name": full.name, "flops": full.flops, **row}


# cuDNN


def _build_dense(num_seqs: int, queries: int, context: int, calls: int, setup: Setup) -> Built:
    implementation = "xla" if setup.rehearse else "cudnn"

    def program(q, *pairs):
        for k, v in zip(pairs[::2], pairs[1::2]):
            # A single query at the end of its row sees everything: only prefill needs a mask.
            q = jax.nn.dot_product_attention(q, k, v, scale=SCALE, is_causal=queries > 1, implementation=implementation)
        return q

    dense = like((num_seqs, context, KV_HEADS, HEAD_DIM), TYPES["bf16"])
    shapes = (like((num_seqs, queries, HEADS, HEAD_DIM), TYPES["bf16"]), *[dense] * (2 * calls))
    return Built((CUDNN, num_seqs, queries, context), jax.jit(program), shapes)


def _dense_sets(setup: Setup, shape: tuple[int, ...], bytes_a_call: int, calls: int) -> list[tuple]:
    """Keys and values of calls that take turns."""
    size = 2 * 2 * int(np.prod(shape))
    pairs = max(num_sets(bytes_a_call), calls) // calls * calls
    in_use = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    if size * pairs > 0.95 * (setup.memory - in_use):
        raise Skipped(f"dense keys and values of {size * pairs / 1e9:.0f} GB do not fit")
    make = partial(noise, setup, shape=shape, kind="bf16")
    sets = [
        [make(f"k{i % 8}") if j % 2 == 0 else make(f"v{i % 8}") for j in range(2 * calls)]
        for i in range(pairs // calls)
    ]
    return [tuple(one) for one in sets]


def must_be_finite(out: Any) -> None:
    assert np.isfinite(np.asarray(out).astype(np.float32)).all(), "the result of the timed calls is not finite"
