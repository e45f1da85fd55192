"""Writing new keys and values into their slots of the pool."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.checks import check_write, jax_arrays
from pallas_kernels.implementation import choose, in_32_bits
from pallas_kernels.write_kv import reference


@in_32_bits
def write_kv(
    k_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    v_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int32[Array, " num_tokens"],
    *,
    k_scale: Float[Array, " num_kv_heads"] | None = None,
    v_scale: Float[Array, " num_kv_heads"] | None = None,
    implementation: str | None = None,
    interpret: Any = False,
):
    """The pools with token i's key and value in slot `slot_mapping[i]` = `page_id * page_size + offset`.

    Donate the pools to the surrounding `jit` and the write is in place. Padding tokens carry slots of page 0, where
    several may fall on one slot: what page 0 holds means nothing. Values are divided by their head's `k_scale` or
    `v_scale` (float32 above 0) and converted to the pools' dtype; those too large for eight bits become the largest
    there is.

    Raises ValueError for arguments that do not fit, NotImplementedError for an implementation that cannot serve them.
    """
    check_write(k_pages, v_pages, k, v, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    name, module, target = choose("write_kv", implementation, interpret, k_pages, k)
    if not slot_mapping.size:
        return jnp.asarray(k_pages), jnp.asarray(v_pages)
    *arrays, k_scale, v_scale = jax_arrays("write_kv", k_pages, v_pages, k, v, slot_mapping, k_scale, v_scale)
    if module is None:
        return reference.write_kv(*arrays, k_scale=k_scale, v_scale=v_scale)
    blocks = block_sizes("write_kv", name, target, head_dim=k.shape[2], kv_bits=8 * k_pages.dtype.itemsize)
    return module.write_kv(*arrays, k_scale=k_scale, v_scale=v_scale, interpret=interpret, **blocks)
