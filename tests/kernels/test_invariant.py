"""`ragged_paged_attention(invariant=True)`: the bits of a query depend on the tokens of its row alone."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

NUM_TOKENS = 150
# How the queries of the sequence are cut, beside how many other rows, with which pages.
WAYS = [
    ([3] * 50, 5, 16),
    ([1] * NUM_TOKENS, 0, 16),
    ([7, 1, 1, 64, 70, 7], 2, 8),
    ([100, 50], 1, 24),
    ([149, 1], 0, 256),
]


class Sequence:
    """A sequence of tokens, whose queries are computed in chunks beside other rows of the same context."""

    def __init__(self, heads, kv_heads, head_dim, dtype, **options):
        draw = np.random.default_rng(1)
        self.q = draw.standard_normal((NUM_TOKENS, heads, head_dim))
        self.kv = draw.standard_normal((2, NUM_TOKENS, kv_heads, head_dim))
        self.dtype = dtype
        self.options = {"scale": head_dim**-0.5, "invariant": True, **options}

    def results(self, chunks, num_others, page_size, seed=0) -> np.ndarray:
        draw = np.random.default_rng(seed)
        num_pages = -(-NUM_TOKENS // page_size)
        page_ids = draw.permutation(3 * num_pages)[:num_pages] + 1
        at = np.arange(NUM_TOKENS)
        pools = np.full((2, 3 * num_pages + 1, self.kv.shape[2], page_size, self.kv.shape[3]), np.nan)
        for pool, values in zip(pools, self.kv, strict=True):
            pool[page_ids[at // page_size], :, at % page_size] = values
        pools = [jnp.asarray(pool, self.dtype) for pool in pools]
        attend = jax.jit(partial(ragged_paged_attention, **self.options))
        steps, done = [], 0
        for chunk in chunks:
            rows = [(self.q[done : done + chunk], done + chunk)]
            for _ in range(num_others):
                number = int(draw.integers(1, 40))
                queries = draw.standard_normal((number, *self.q.shape[1:]))
                rows.append((queries, int(draw.integers(number, NUM_TOKENS + 1))))
            order = draw.permutation(len(rows))
            starts = np.cumsum([0, *(len(rows[i][0]) for i in order)]).astype(np.int32)
            queries = np.concatenate([rows[i][0] for i in order])
            tables = np.zeros((len(rows), num_pages + 3 * num_others), np.int32)
            tables[:, :num_pages] = page_ids
            lens = np.array([rows[i][1] for i in order], np.int32)
            steps.append((queries, (tables, lens, starts), starts[list(order).index(0)]))
            done += chunk
        size = max(len(queries) for queries, _, _ in steps)  # one shape to compile for each way
        out = []
        for chunk, (queries, batch, begin) in zip(chunks, steps, strict=False):
            queries = jnp.asarray(np.pad(queries, [(0, size - len(queries)), (0, 0), (0, 0)]), self.dtype)
            out.append(np.asarray(attend(queries, *pools, *batch))[begin : begin + chunk])
        return np.concatenate(out)

    def check(self, ways, first=(16, NUM_TOKENS)) -> None:
        page_size, size = first
        whole = self.results([size] * (NUM_TOKENS // size), 0, page_size)
        for number, (chunks, num_others, page_size) in enumerate(ways):
            found = self.results(chunks, num_others, page_size, seed=number)
            differ = np.flatnonzero((found != whole).any((1, 2)))
            assert not len(differ), f"way {number}: queries {differ[:9]} differ"


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((6, 2, 24, jnp.bfloat16), {}),
        ((1, 1, 80, jnp.float32), {"sliding_window": 37, "soft_cap": 2.0}),
    ],
    ids=str,
)
def test_the_reference_gives_a_query_the_same_bits_in_any_chunk_batch_and_page(heads, options):
    Sequence(*heads, implementation="xla", **options).check(WAYS)


@pytest.mark.parametrize("few", ["single queries", "chunks"])
def test_the_triton_kernel_does_too(few):
    ways = [([1] * 9 + [141], 3, 16)] if few == "single queries" else [([100, 50], 1, 32), ([140, 10], 12, 8)]
    options = {"implementation": "triton", "interpret": True, "sliding_window": 50, "soft_cap": 3.0}
    Sequence(3, 1, 80, jnp.float16, **options).check(ways)


def test_the_mosaic_kernel_does_too():
    kernel = Sequence(4, 1, 64, jnp.bfloat16, implementation="mosaic_gpu", interpret=True)
    kernel.check([([130, 1, 19], 1, 32)])


def test_without_it_bits_depend_on_the_chunks():
    with pytest.raises(AssertionError, match="differ"):
        Sequence(9, 3, 64, jnp.float32, implementation="xla", invariant=False).check(WAYS[:2])
