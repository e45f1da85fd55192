"""Copying whole pages."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import jitted

from pallas_kernels import copy_pages

SHAPE = (9, 3, 4, 10)  # 120 numbers a page: no power of two


def pools(dtype=np.float32, shape=SHAPE):
    rng = np.random.default_rng(0)
    return [rng.integers(-100, 100, shape).astype(dtype) for _ in range(2)]


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, jnp.bfloat16, np.int8, jnp.float8_e4m3fn, jnp.float8_e5m2],
    ids=lambda d: np.dtype(d).name,
)
def test_pages_are_copied_and_no_others_change(dtype, implementation):
    sources, targets = np.array([3, 8, 3, 0, 0], np.int32), np.array([1, 2, 7, 0, 0], np.int32)
    before = pools(dtype)
    after = jitted(partial(copy_pages, **implementation))(*before, sources, targets)
    for old, new in zip(before, after):
        assert new.dtype == dtype
        expected = old.copy()
        expected[targets] = old[sources]
        np.testing.assert_array_equal(np.asarray(new).view(np.uint8), expected.view(np.uint8))


def test_what_a_page_holds_is_copied_bit_by_bit(implementation):
    k_pages, v_pages = pools()
    k_pages[2].view(np.uint32)[:] = 0x7FA00001 + np.arange(120, dtype=np.uint32).reshape(
        3, 4, 10
    )  # NaNs with a payload
    copied, _ = copy_pages(
        *(jnp.asarray(p) for p in (k_pages, v_pages)),
        np.array([2], np.int32),
        np.array([5], np.int32),
        **implementation,
    )
    np.testing.assert_array_equal(np.asarray(copied)[5].view(np.uint32), k_pages[2].view(np.uint32))


def test_a_page_of_more_numbers_than_a_block_is_copied_whole(implementation):
    before = pools(shape=(4, 5, 16, 80))
    after = copy_pages(*before, np.array([1], np.int32), np.array([3], np.int32), **implementation)
    for old, new in zip(before, after):
        np.testing.assert_array_equal(new, old[[0, 1, 2, 1]])


@pytest.mark.parametrize("dtype", [np.int8, jnp.float8_e4m3fn], ids=lambda d: np.dtype(d).name)
def test_eight_bits_with_an_odd_head_dim_are_copied(dtype, implementation):
    before = pools(dtype, shape=(4, 3, 4, 5))
    after = copy_pages(*before, np.array([1, 0], np.int32), np.array([3, 0], np.int32), **implementation)
    for old, new in zip(before, after):
        assert new.dtype == dtype
        np.testing.assert_array_equal(np.asarray(new).view(np.uint8), old[[0, 1, 2, 1]].view(np.uint8))


def test_donated_pools_are_written_where_they_lie(implementation):
    arrays = [jnp.asarray(pages) for pages in pools()]
    where = [pages.unsafe_buffer_pointer() for pages in arrays]
    ids = np.array([1, 0], np.int32), np.array([2, 0], np.int32)
    copy = jax.jit(partial(copy_pages, **implementation), donate_argnums=(0, 1))
    assert [pages.unsafe_buffer_pointer() for pages in copy(*arrays, *ids)] == where


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ([1, 2], [3], ("2 sources", "1 targets")),
        ([9], [1], ("sources", "[9]", "9 pages")),
        ([1], [-1], ("targets", "[-1]")),
        ([1, 2], [3, 3], ("targets", "[3]", "twice")),
        ([1, 2], [2, 3], ("[2]", "source and a target")),
    ],
)
def test_copies_that_get_in_each_others_way_are_refused(sources, targets, words):
    with pytest.raises(ValueError) as caught:
        copy_pages(*pools(), np.array(sources, np.int32), np.array(targets, np.int32))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["sources", "targets"])
def test_ids_of_another_kind_are_refused(name):
    ids = {"sources": np.array([1], np.int32), "targets": np.array([2], np.int32)}
    for wrong in (np.array([1], np.int64), np.array([[1]], np.int32)):
        with pytest.raises(ValueError, match=f"{name} must be int32"):
            copy_pages(*pools(), **(ids | {name: wrong}))
