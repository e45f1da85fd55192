"""Owns `Tiles`: how rows are computed so that the bits of each are the same whatever others stand beside it.

XLA chooses by the shapes of arrays in which order the terms of a sum or a product are added, and by what stands beside
an operation whether a product and a sum are rounded once or twice. Here both are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.reference import sum_of_halves


class Tiles(NamedTuple):
    """Rows are computed in tiles of one of these sizes (ascending): the smallest that holds all, or the largest."""

    sizes: tuple[int, ...]
    sampler_rows: int  # the one size where tokens are drawn, with sums over the vocabulary
    depth: int | None  # so many terms of a product are added up at once; None: all

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which works row by row on the first axis of its arguments, applied to tiles of rows."""

        def tiled(*arguments):
            length = jax.tree.leaves(arguments)[0].shape[0]
            return in_tiles(function, next((size for size in self.sizes if size >= length), self.sizes[-1]))(*arguments)

        return tiled


TILES = {
    # A CPU's products are matrix-vector ones or those of Eigen. Both add up few terms one after the other; where there
    # are more, or only 2 to 7 rows, or few columns, Eigen may have each thread add up a part of the terms.
    "cpu": Tiles((1, *range(8, 512 + 1, 8)), 8, 128),
    # How a GPU's products are made depends on their shapes: so there is one, which takes about as long as to read the
    # weights.
    "gpu": Tiles((128,), 128, None),
}
LEAST_COLUMNS = 64

# For XLA: products that keep an order, and are chosen by their shapes, not by how fast they were in a trial.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": "",
        # Whatever JAX is told: without, products of spread weights have other bits in other shapes.
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    },
    "gpu": {"xla_gpu_autotune_level": 0},
}


def over(tiles: Tiles | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` over tiles; at once, where there are none."""
    return function if tiles is None else tiles.over(function)


def in_tiles(function: Callable[..., Any], rows: int | None) -> Callable[..., Any]:
    """`function`, which works row by row on the first axis of its arguments, applied to tiles of `rows` rows; at once,
    with None."""
    if rows is None:
        return function

    def tile(arguments):
        return lax.optimization_barrier(function(*lax.optimization_barrier(arguments)))

    def tiled(*arguments):
        length = jax.tree.leaves(arguments)[0].shape[0]
        count = -(-length // rows)

        def cut(x):
            x = jnp.pad(x, [(0, count * rows - length)] + [(0, 0)] * (x.ndim - 1))
            return x.reshape(count, rows, *x.shape[1:])

        results = lax.map(tile, jax.tree.map(cut, arguments))
        return jax.tree.map(lambda x: x.reshape(count * rows, *x.shape[2:])[:length], results)

    return tiled


def ordered_sum(x: Float[Array, "... terms"]) -> Float[Array, "..."]:
    """The sum over the last axis, in an order that follows from its length alone."""
    padding = (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]
    # Or a product among the terms would be rounded in one place and not in another.
    return sum_of_halves(jnp.pad(lax.optimization_barrier(x), [(0, 0)] * (x.ndim - 1) + [(0, padding)]))


def ordered_product(x: Float[Array, "rows terms"], w: Float[Array, "terms d_out"], depth: int | None):
    """`x @ w` as the sum, part after part, of products of at most `depth` terms (None: in one), fused with nothing."""
    x = lax.optimization_barrier(x)
    if depth is None:
        return lax.optimization_barrier(x @ w)
    terms = x.shape[1]
    size = next(size for size in range(min(depth, terms), 0, -1) if terms % size == 0)
    if size < min(depth, terms) // 4:  # many parts: padding, which copies the weight, is the lesser evil
        size = depth
        x, w = jnp.pad(x, [(0, 0), (0, -terms % size)]), jnp.pad(w, [(0, -terms % size), (0, 0)])
    columns = w.shape[1]
    if columns < LEAST_COLUMNS:
        w = jnp.pad(w, [(0, 0), (0, LEAST_COLUMNS - columns)])
    x, w = x.reshape(len(x), -1, size), w.reshape(-1, size, w.shape[1])  # not slices of w, which would be copies
    products = lax.optimization_barrier(jnp.einsum("rpt,ptd->prd", x, w, preferred_element_type=jnp.float32))
    return sum(products[1:], start=products[0]).astype(x.dtype)[:, :columns]
