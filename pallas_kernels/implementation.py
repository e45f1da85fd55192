"""Owns the choice between the implementations of a kernel, and the checks that kernels share."""

from __future__ import annotations

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")


def default_implementation() -> str:
    """The implementation that `implementation=None` stands for. Asks no device."""
    return "xla"


def resolve_implementation(kernel: str, implementation: str | None, available: tuple[str, ...] = ("xla",)) -> str:
    """The implementation to run. Raises ValueError for an unknown name, NotImplementedError for one not there."""
    if implementation is None:
        return default_implementation()
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation not in available:
        raise NotImplementedError(f"{kernel} has no {implementation!r} implementation; it has {available}")
    return implementation


def need(fits: bool, message: str) -> None:
    if not fits:
        raise ValueError(message)


def check_pages(k_pages, v_pages) -> None:
    """Raise ValueError unless the two arrays are a pool."""
    need(k_pages.ndim == 4, f"k_pages must be [num_pages, num_kv_heads, page_size, head_dim], got {k_pages.shape}")
    need(v_pages.shape == k_pages.shape, f"v_pages {v_pages.shape} must have the shape of k_pages {k_pages.shape}")
    need(v_pages.dtype == k_pages.dtype, f"v_pages ({v_pages.dtype}) must have the dtype of k_pages ({k_pages.dtype})")


def check_pool(q, k_pages, v_pages, block_tables, context_lens) -> None:
    """Raise ValueError unless the shapes and dtypes of an attention kernel's arguments fit each other."""
    need(q.ndim == 3, f"q must be [tokens, num_q_heads, head_dim], got shape {q.shape}")
    check_pages(k_pages, v_pages)
    need(q.shape[2] == k_pages.shape[3], f"head_dim of q ({q.shape[2]}) and of the pages ({k_pages.shape[3]}) differ")
    need(
        q.shape[1] % k_pages.shape[1] == 0,
        f"num_q_heads ({q.shape[1]}) must be a multiple of num_kv_heads ({k_pages.shape[1]})",
    )
    need(block_tables.ndim == 2, f"block_tables must be [num_seqs, pages_per_seq], got shape {block_tables.shape}")
    need(
        context_lens.shape == block_tables.shape[:1],
        f"context_lens {context_lens.shape} must be [num_seqs] as block_tables {block_tables.shape} says",
    )
    for name, array in (("block_tables", block_tables), ("context_lens", context_lens)):
        need(array.dtype == "int32", f"{name} must be int32, got {array.dtype}")


def check_scores(sliding_window: int | None, soft_cap: float | None) -> None:
    """Raise ValueError for a window or cap that means nothing."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be None or at least 1, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be None or above 0, got {soft_cap}")


def check_write(k_pages, v_pages, k, v, slot_mapping) -> None:
    """Raise ValueError unless there is one key and one value of every head for each slot."""
    check_pages(k_pages, v_pages)
    need(
        slot_mapping.ndim == 1 and slot_mapping.dtype == "int32",
        f"slot_mapping must be int32 [num_tokens], got {slot_mapping.dtype} {slot_mapping.shape}",
    )
    # A shape that could be broadcast would fill many slots with one value.
    shape = (slot_mapping.shape[0], k_pages.shape[1], k_pages.shape[3])
    for name, array in (("k", k), ("v", v)):
        need(array.shape == shape, f"{name} must be [num_tokens, num_kv_heads, head_dim] {shape}, got {array.shape}")
