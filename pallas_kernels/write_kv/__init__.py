"""Writing new keys and values into their slots of the pool."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels.implementation import check_write, resolve_implementation


def write_kv(
    k_pages: Float[Array, "num_pages num_kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_pages num_kv_heads page_size head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int32[Array, " num_tokens"],
    *,
    implementation: str | None = None,
):
    """The pools with token i's key and value in slot `slot_mapping[i]` = `page_id * page_size + offset`.

    Donate the pools to the surrounding `jit` and the write is in place. Padding tokens carry slots of page 0, where
    several may fall on one slot: what page 0 holds means nothing. Values are converted to the pools' dtype.

    Raises ValueError for shapes that do not fit, NotImplementedError for an implementation that cannot serve them.
    """
    check_write(k_pages, v_pages, k, v, slot_mapping)
    resolve_implementation("write_kv", implementation)
    page_size = k_pages.shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    return (
        k_pages.at[page, :, offset].set(k.astype(k_pages.dtype), mode="promise_in_bounds"),
        v_pages.at[page, :, offset].set(v.astype(v_pages.dtype), mode="promise_in_bounds"),
    )
