"""Owns the check of the kernels that write and copy pages: what they write is right, and nothing else has changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_check_parts import oracle
from gpu_check_parts.correctness import HUGE
from gpu_check_parts.tasks import EIGHT_BITS, TYPES, Built, Setup, Skipped, Task, kernel_options, like, public_kernel


@dataclass(frozen=True)
class MoveCase:
    """Tokens to write, or pages to copy."""

    name: str
    number: int
    page_size: int = 16
    head_dim: int = 128
    new_type: str = "bf16"
    kv_type: str = "bf16"
    num_pages: int = 300

    def shrunk(self) -> MoveCase:
        return replace(self, number=min(self.number, 9), page_size=16, head_dim=16, num_pages=32)

    def pool(self, setup: Setup) -> tuple[int, int, int, int]:
        shape = (self.num_pages, 2 if setup.rehearse else 8, self.page_size, self.head_dim)
        size = int(np.prod(shape)) * TYPES[self.kv_type].itemsize
        if size > 1 << 30 and 2.5 * size > setup.memory:
            raise Skipped(f"a pool of {2 * size / 1e9:.0f} GB does not fit")
        return shape


WRITES = [
    MoveCase("bfloat16", 777),
    MoveCase("one token", 1),
    MoveCase("float32 into bfloat16, head_dim 80", 100, head_dim=80, new_type="f32"),
    MoveCase("float32", 100, new_type="f32", kv_type="f32"),
    MoveCase("float16, pages of 64", 100, page_size=64, new_type="f16", kv_type="f16"),
    *(MoveCase(f"bfloat16 into {kind}", 300, kv_type=kind) for kind in EIGHT_BITS),
    MoveCase("more than 2^31 numbers", 300, num_pages=HUGE),
]
COPIES = [
    MoveCase("bfloat16", 100),
    MoveCase("pages of 64, head_dim 96", 33, page_size=64, head_dim=96),
    MoveCase("int8", 100, kv_type="int8"),
    MoveCase("more than 2^31 numbers", 100, num_pages=HUGE),
]


def tasks() -> list[Task]:
    kernels = (("write_kv", WRITES, build_write, run_write), ("copy_pages", COPIES, build_copy, run_copy))
    return [
        Task("correctness", "moving", (f"{kernel}: {case.name}",), how, partial(run, case), partial(build, case, how))
        for kernel, cases, build, run in kernels
        for how in ("triton", "xla")
        for case in cases
    ]


def build_write(case: MoveCase, implementation: str, setup: Setup) -> Built:
    case = case.shrunk() if setup.rehearse else case
    options = kernel_options(setup, "write_kv", implementation)

    def program(pools, k, v, slots, scales):
        k_scale, v_scale = scales or (None, None)
        return public_kernel("write_kv")(*pools, k, v, slots, k_scale=k_scale, v_scale=v_scale, **options)

    pages = like(case.pool(setup), TYPES[case.kv_type])
    heads = pages.shape[1]
    new = like((case.number, heads, case.head_dim), TYPES[case.new_type])
    scales = (like((heads,), np.float32),) * 2 if case.kv_type in EIGHT_BITS else None
    shapes = ((pages, pages), new, new, like((case.number,), np.int32), scales)
    return Built(("write", *options.items(), *shapes), jax.jit(program, donate_argnums=0), shapes)


def run_write(case: MoveCase, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    full, case = case, case.shrunk() if setup.rehearse else case
    rng, shape = setup.rng(f"write {case.name}"), case.pool(setup)
    num_pages, heads, page_size, head_dim = shape
    # Distinct slots, of the first and of the last pages; all else must stay as it is. Some of the tokens are padding.
    ends = np.r_[
        page_size : num_pages // 3 * page_size, (num_pages - num_pages // 3) * page_size : num_pages * page_size
    ]
    slots = rng.choice(ends, case.number, replace=False)
    slots[1::7] = rng.integers(0, page_size, len(slots[1::7]))  # of page 0, where they may meet
    slots = slots.astype(np.int32)
    new = [oracle.normal(rng, (case.number, heads, head_dim), case.new_type) for _ in range(2)]
    scales = oracle.scales(case.kv_type, heads)
    touched = np.unique(slots // page_size)
    before = [oracle.normal(rng, (len(touched), heads, page_size, head_dim), case.kv_type) for _ in range(2)]
    pools = oracle.Pool(touched, *before, num_pages).on_device()
    pools = program(pools, *new, slots, scales)
    worst = 0.0
    for after, old, values, scale in zip(pools, before, new, scales or (None, None)):
        wanted = _stored(values, scale, case.kv_type)
        expected = old.astype(np.float64)
        at = np.searchsorted(touched, slots // page_size)
        expected[at, :, slots % page_size] = wanted
        got = np.asarray(_pages(after, touched)).astype(np.float64)
        real = touched > 0  # page 0 may hold anything
        step = 1.0 if case.kv_type == "int8" else np.abs(expected[real]) * SPACING[case.kv_type] + TINY[case.kv_type]
        worst = max(worst, float(np.max(np.abs(got[real] - expected[real]) / step, initial=0)))
        assert np.isfinite(got[real]).all(), "what is not finite was written"
        assert _all_poison_but(touched, after), "other pages were written"
    # A whole number may be rounded to the neighbour by one that divides in another order.
    bound = 1.0 if case.kv_type in EIGHT_BITS else 0.5
    assert worst <= bound, f"off by {worst:.2g} steps of {case.kv_type}, allowed is {bound}"
    yield {"name": f"write_kv: {full.name}", "error": worst, "bound": bound}


def _stored(values: np.ndarray, scale: np.ndarray | None, kind: str) -> np.ndarray:
    numbers = values.astype(np.float64)
    if scale is not None:
        numbers /= scale.astype(np.float64)[:, None]
    if kind == "int8":
        return np.clip(np.round(numbers), -127, 127)
    return numbers.astype(TYPES[kind]).astype(np.float64)


# The largest step between two neighbours, relative to them; and the smallest there is.
SPACING = {"f32": 2**-23, "f16": 2**-10, "bf16": 2**-7, "e4m3": 2**-3, "e5m2": 2**-2}
TINY = {"f32": 2**-149, "f16": 2**-24, "bf16": 2**-133, "e4m3": 2**-9, "e5m2": 2**-16}


@jax.jit
def _pages(pool, page_ids):
    return pool[page_ids]


def _all_poison_but(page_ids: np.ndarray, pool: jax.Array) -> bool:
    whole = np.array(_are_poison(pool))
    whole[page_ids] = True
    return bool(whole.all())


@jax.jit
def _are_poison(pool):
    """Which pages hold nothing else."""
    return (pool == 127 if pool.dtype == jnp.int8 else jnp.isnan(pool)).all(axis=(1, 2, 3))


def build_copy(case: MoveCase, implementation: str, setup: Setup) -> Built:
    case = case.shrunk() if setup.rehearse else case
    options = kernel_options(setup, "copy_pages", implementation)
    copy_pages = public_kernel("copy_pages")

    def program(pools, sources, targets):
        return copy_pages(*pools, sources, targets, **options)

    pages, ids = like(case.pool(setup), TYPES[case.kv_type]), like((case.number,), np.int32)
    key = ("copy", *options.items(), pages, ids)
    return Built(key, jax.jit(program, donate_argnums=0), ((pages, pages), ids, ids))


def run_copy(case: MoveCase, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    full, case = case, case.shrunk() if setup.rehearse else case
    rng, shape = setup.rng(f"copy {case.name}"), case.pool(setup)
    num_pages = shape[0]
    ids = rng.choice(np.r_[1 : num_pages // 2, num_pages - num_pages // 2 + 1 : num_pages], 2 * case.number, False)
    sources, targets = np.split(ids.astype(np.int32), 2)
    sources[1::5], targets[1::5] = 0, 0  # padding
    held = np.unique(sources[sources > 0])
    content = [oracle.normal(rng, (len(held), *shape[1:]), case.kv_type) for _ in range(2)]
    pools = program(oracle.Pool(held, *content, num_pages).on_device(), sources, targets)
    real = sources > 0
    for after, pages in zip(pools, content):
        wanted = pages[np.searchsorted(held, sources[real])]
        assert np.asarray(_pages(after, targets[real])).tobytes() == wanted.tobytes(), "a copy differs from its source"
        assert np.asarray(_pages(after, held)).tobytes() == pages.tobytes(), "a source has changed"
        assert _all_poison_but(np.r_[0, held, targets[real]], after), "other pages were written"
    yield {"name": f"copy_pages: {full.name}", "error": 0.0, "bound": 0.0}
