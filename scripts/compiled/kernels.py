"""Owns the cases by which every kernel is compiled, with its configured block sizes, and the bounds they must keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from compiled.card import compile_for, devices, used
from compiled.limits import CARDS, broken_bounds
from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.implementation import AVAILABLE
from pallas_kernels.target import current_target

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
GROUPS = (1, 4, 7, 8)
VOCAB = 151_936
# Kernels that do little more than move bytes.
BOUND_BY_MEMORY = ("paged_attention", "copy_pages")


@dataclass(frozen=True)
class KernelCase:
    """One kernel to compile for one card."""

    kernel: str
    implementation: str
    card: str
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: str = "bfloat16"
    group: int = 4
    options: tuple[tuple[str, Any], ...] = ()  # that are no arrays; "sinks" stands for the array
    num_seqs: int = 64

    @property
    def q_dtype(self) -> str:
        return self.kv_dtype if self.kv_dtype in ("float16", "float32") else "bfloat16"

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options)
        return (
            f"{self.kernel} {self.implementation} {self.card} head_dim={self.head_dim} page_size={self.page_size} "
            f"{self.kv_dtype} group={self.group}{options}"
        )


ALL_OPTIONS = {"sliding_window": 1000, "soft_cap": 30.0, "sinks": True}


def cases(kernel: str, implementation: str, card: str) -> Iterator[KernelCase]:
    """All shapes that the kernel is for."""
    case = partial(KernelCase, kernel, implementation, card)
    if kernel == "keep_top":  # of whose case only the number of rows counts
        for rows in (1, 64, 256):
            yield case(kv_dtype="float32", num_seqs=rows)
        return
    for d in HEAD_DIMS:
        for p in PAGE_SIZES:
            for kind in KV_DTYPES:
                yield case(d, p, kind)
    if "attention" not in kernel:
        return
    for group in GROUPS:
        for d in HEAD_DIMS:
            yield case(d, group=group)
    variants: list[dict[str, Any]] = [{name: value} for name, value in ALL_OPTIONS.items()] + [ALL_OPTIONS]
    if kernel == "paged_attention":
        variants += [{"split_size": 512}]
    for options in variants:
        for d in HEAD_DIMS:
            yield case(d, options=tuple(options.items()))
    more = (1, 16, 256) if implementation != "jax_triton" else (1, 16)  # it keeps what it compiled for 64
    for rows in more:
        yield case(num_seqs=rows)


def quick_cases(kernel: str, implementation: str, card: str) -> Iterator[KernelCase]:
    """Few shapes, in which each value of each axis occurs, served wherever the kernel serves it at all."""
    case = partial(KernelCase, kernel, implementation, card)
    if kernel == "keep_top":
        for rows in (1, 256):
            yield case(kv_dtype="float32", num_seqs=rows)
        return
    if "attention" not in kernel:
        for d, p, kind in zip((*HEAD_DIMS, 128), (*PAGE_SIZES, 16, 16), KV_DTYPES):
            yield case(d, p, kind)
        return
    yield case(64, 16, group=1)
    yield case(80, 32, "float16", group=7)
    yield case(96, 64, group=8, num_seqs=1)
    yield case(128, 128, options=tuple(ALL_OPTIONS.items()))
    yield case(256, 16)
    if kernel == "paged_attention":
        yield case(options=(("split_size", 512),))
    for kind in KV_DTYPES[2:]:  # which not every implementation serves
        yield case(kv_dtype=kind)


def arguments(case: KernelCase, on: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call's arrays as shapes, and its other keyword arguments."""
    if case.kernel == "keep_top":
        rows = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32"}
        arrays = {name: on.like((case.num_seqs,), dtype) for name, dtype in rows.items()}
        return arrays | {"logits": on.like((case.num_seqs, VOCAB), "float32")}, {}
    heads = 8
    pool = on.like((4096, heads, case.page_size, case.head_dim), case.kv_dtype)
    arrays = {"k_pages": pool, "v_pages": pool}
    options = dict(case.options)
    if case.kernel == "copy_pages":
        return arrays | {"sources": on.like((64,), "int32"), "targets": on.like((64,), "int32")}, options
    if jnp.dtype(case.kv_dtype).itemsize == 1:
        arrays |= {name: on.like((heads,), "float32") for name in ("k_scale", "v_scale")}
    if case.kernel == "write_kv":
        new = on.like((case.num_seqs, heads, case.head_dim), case.q_dtype)
        return arrays | {"k": new, "v": new, "slot_mapping": on.like((case.num_seqs,), "int32")}, options
    tokens = case.num_seqs if case.kernel == "paged_attention" else 2048
    arrays |= {
        "q": on.like((tokens, heads * case.group, case.head_dim), case.q_dtype),
        "block_tables": on.like((case.num_seqs, 8192 // case.page_size), "int32"),
        "context_lens": on.like((case.num_seqs,), "int32"),
    }
    if case.kernel == "ragged_paged_attention":
        arrays["query_starts"] = on.like((case.num_seqs + 1,), "int32")
    if options.pop("sinks", False):
        arrays["sinks"] = on.like((heads * case.group,), "float32")
    return arrays, options | {"scale": case.head_dim**-0.5}


def may_refuse(case: KernelCase) -> bool:
    """Whether the kernel says that it does not serve such a call, so that another one does."""
    if case.implementation == "jax_triton":
        return False
    if case.implementation == "mosaic_gpu":
        sixteen_bits = case.kv_dtype in ("bfloat16", "float16")
        if case.kernel == "ragged_paged_attention":
            return not sixteen_bits or case.head_dim > 128
        return case.kv_dtype == "float32"
    return False


def check(case: KernelCase) -> dict[str, Any]:
    """Compile a case; returns its row of the table, what is wrong with it in `broken`, a refusal in `refused`."""
    card = CARDS[case.card]
    on = devices(card)
    row: dict[str, Any] = asdict(case) | {"options": dict(case.options), "jax": jax.__version__, "broken": []}
    arrays, options = arguments(case, on)
    function = partial(getattr(pallas_kernels, case.kernel), implementation=case.implementation, **options)
    try:
        compile_for(on, jax.jit(lambda arrays: function(**arrays)), arrays)
    except NotImplementedError as error:
        return row | {"refused": str(error), "broken": [] if may_refuse(case) else [str(error)]}
    except Exception as error:
        return row | {"broken": [f"it does not compile: {str(error).strip()[:500]}"]}
    uses = [use for use in used() if use.kernel.startswith((case.kernel, "mosaic", "split_kernel"))]
    if not uses:
        return row | {"broken": ["no kernel of ours is in the program"]}
    # A combine may follow: the kernel itself is the one that takes most.
    use = max(uses, key=lambda use: (use.shared_memory, use.registers * use.threads))
    blocks = card.blocks_per_core(use.registers, use.threads, use.shared_memory)
    row |= {
        "registers": use.registers,
        "spilled_bytes": sum(use.spilled_bytes for use in uses),
        "threads": use.threads,
        "shared_memory": use.shared_memory,
        "blocks_per_core": blocks,
        "in_flight": None,
    }
    if case.kernel in BOUND_BY_MEMORY:
        row["in_flight"] = blocks * in_flight(case, on)
    return row | {"broken": broken_bounds(row, card)}


def in_flight(case: KernelCase, on: Any) -> int:
    """Bytes that one thread block has under way from memory at once."""
    itemsize = jnp.dtype(case.kv_dtype).itemsize
    with jax.sharding.use_abstract_mesh(on.abstract):
        target = current_target()
    blocks = block_sizes(case.kernel, case.implementation, target, head_dim=case.head_dim, kv_bits=8 * itemsize)
    module = import_module(f"pallas_kernels.{case.kernel}.{case.implementation.removeprefix('jax_')}")
    return module.bytes_in_flight(case.head_dim, itemsize, **blocks)


def all_cases(cards: list[str], kernels: list[str], quick: bool) -> list[KernelCase]:
    """The cases of every kernel and implementation; what is meant for Hopper alone is tried on no other card."""
    return [
        case
        for kernel in kernels
        for implementation in AVAILABLE[kernel]
        if implementation != "jax_triton" or find_spec("jax_triton")
        for card in cards
        if implementation != "mosaic_gpu" or card == "h200"
        for case in dict.fromkeys((quick_cases if quick else cases)(kernel, implementation, card))
    ]
