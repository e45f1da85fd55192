"""The meaning of `write_kv`, in plain XLA: a scatter of rows."""

from __future__ import annotations

import jax.numpy as jnp


def write_kv(k_pages, v_pages, k, v, slot_mapping, *, k_scale, v_scale):
    page_size = k_pages.shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size

    def write(pages, new, scale):
        return pages.at[page, :, offset].set(to_pool(new, scale, pages.dtype), mode="promise_in_bounds")

    return write(k_pages, k, k_scale), write(v_pages, v, v_scale)


def to_pool(new, scale, dtype):
    """Keys or values [num_tokens, num_kv_heads, head_dim] as a pool of `dtype` stores them."""
    if scale is not None:
        new = new.astype(jnp.float32) / scale[:, None]
    if dtype.itemsize > 1:
        return new.astype(dtype)
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(new.astype(jnp.float32)), -127, 127).astype(dtype)
    # A cast alone makes NaN or infinity of what is too large.
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(new.astype(jnp.float32), -largest, largest).astype(dtype)
