"""Owns the two ceilings (how fast memory is copied, bfloat16 multiplied) and the timing of what moves pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu_check_parts import arithmetic
from gpu_check_parts.attention import HEAD_DIM, KV_HEADS, PAGE_SIZE
from gpu_check_parts.tasks import TYPES, Built, Setup, Task, kernel_options, like, noise, public_kernel
from gpu_check_parts.timing import FAST, calls_a_program, figures, num_sets

COPY, READ, MATMUL = "copy", "read", "bfloat16 product"  # the names of the ceilings' rows
MOVED_BYTES = 1 << 32
MATRIX = 8192


class Move(NamedTuple):
    """Tokens to write, or pages to copy."""

    kernel: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.number} {'tokens' if self.kernel == 'write_kv' else 'pages'}"

    @property
    def bytes(self) -> int:
        if self.kernel == "write_kv":
            return arithmetic.write_bytes(self.number, KV_HEADS, HEAD_DIM, 2, 2)
        return arithmetic.copy_pages_bytes(self.number, KV_HEADS, PAGE_SIZE, HEAD_DIM, 2)

    @property
    def calls(self) -> int:
        return calls_a_program(self.bytes / FAST)


MOVES = [Move("write_kv", n) for n in (256, 2048, 8192)] + [Move("copy_pages", n) for n in (64, 1024, 8192)]


def tasks() -> list[Task]:
    ceilings = [
        Task("ceilings", "ceilings", (name,), how, partial(run_ceiling, name), partial(build_ceiling, name, how))
        for name, how in ((COPY, "a kernel"), (COPY, "the copy engine"), (READ, "a kernel"), (MATMUL, "xla"))
    ]
    moves = [
        Task("memory", "memory", (move.name,), how, partial(run_move, move), partial(build_move, move, how))
        for move in MOVES
        for how in ("triton", "xla")
    ]
    return [*ceilings, *moves]


def build_ceiling(name: str, how: str, setup: Setup) -> Built:
    if name == MATMUL:
        size = 64 if setup.rehearse else MATRIX
        shapes = (like((size, size), TYPES["bf16"]),) * 2
        return Built((name, how), jax.jit(jnp.matmul), shapes)
    functions = {
        (COPY, "a kernel"): lambda x: x + jnp.uint32(1),
        (COPY, "the copy engine"): jnp.copy,
        (READ, "a kernel"): lambda x: jnp.sum(x, dtype=jnp.uint32),
    }
    return Built((name, how), jax.jit(functions[name, how]), (like((_moved_bytes(setup) // 4,), np.uint32),))


def _moved_bytes(setup: Setup) -> int:
    return 4096 if setup.rehearse else min(MOVED_BYTES, setup.memory // 8)


def run_ceiling(name: str, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    if name == MATMUL:
        size = 64 if setup.rehearse else MATRIX
        a = noise(setup, "a", (size, size), "bf16")
        b = noise(setup, "b", (size, size), "bf16") * TYPES["bf16"].type(size**-0.5)  # the numbers keep their size
        row, _ = figures(setup, program, a, [(b,)])
        yield {"name": name, "flops": arithmetic.matmul_flops(MATRIX), **row}
        return
    size = _moved_bytes(setup)
    data = jax.jit(lambda: jax.lax.iota(np.uint32, size // 4) * np.uint32(2654435761))()
    if name == READ:
        row, _ = figures(setup, lambda _, x: program(x), None, [(data,)])
        yield {"name": name, "bytes": size, **row}
    else:
        row, _ = figures(setup, program, data, [()])
        yield {"name": name, "bytes": arithmetic.copy_bytes(size), **row}


# Each call writes other slots, or copies other pages, of one pool that it is given and gives back.


def _num_pages(setup: Setup) -> int:
    page = 4 * KV_HEADS * PAGE_SIZE * HEAD_DIM
    return 64 if setup.rehearse else min(1 << 16, setup.memory // 4 // page)


def build_move(move: Move, implementation: str, setup: Setup) -> Built:
    options = kernel_options(setup, move.kernel, implementation)
    kernel = jax.jit(partial(public_kernel(move.kernel), **options))
    calls, number = (1, 8) if setup.rehearse else (move.calls, move.number)

    def program(pools, *calls):
        for arrays in calls:
            pools = kernel(*pools, *arrays)
        return pools

    pages = like((_num_pages(setup), KV_HEADS, PAGE_SIZE, HEAD_DIM), TYPES["bf16"])
    if move.kernel == "write_kv":
        new = like((number, KV_HEADS, HEAD_DIM), TYPES["bf16"])
        one = (new, new, like((number,), np.int32))
    else:
        one = (like((number,), np.int32),) * 2
    key = (move.kernel, implementation, number)
    return Built(key, jax.jit(program, donate_argnums=0), ((pages, pages), *[one] * calls))


def run_move(move: Move, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    calls, number = (1, 8) if setup.rehearse else (move.calls, move.number)
    shape = (_num_pages(setup), KV_HEADS, PAGE_SIZE, HEAD_DIM)
    programs = 1 if setup.rehearse else max(1, num_sets(move.bytes, 128) // calls)
    first, last = (1, shape[0]) if move.kernel == "copy_pages" else (PAGE_SIZE, shape[0] * PAGE_SIZE)
    order = first + setup.rng(move.name).permutation(last - first).astype(np.int32)
    places = np.resize(order, (programs, calls, 2, number))

    def arrays(i: int, j: int) -> tuple[Any, ...]:
        if move.kernel == "copy_pages":
            return tuple(places[i, j])
        new = [noise(setup, f"{name}{(i + j) % 4}", (number, KV_HEADS, HEAD_DIM), "bf16") for name in "kv"]
        return *new, places[i, j, 0]

    sets = [tuple(jax.device_put(arrays(i, j)) for j in range(calls)) for i in range(programs)]
    pools = noise(setup, "k", shape, "bf16"), noise(setup, "v", shape, "bf16")
    row, _ = figures(setup, program, pools, sets, calls)
    yield {"name": move.name, "bytes": move.bytes, **row}
