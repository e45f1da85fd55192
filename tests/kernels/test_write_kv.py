"""Writing keys and values into their slots."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import jitted

from pallas_kernels import write_kv

NUM_PAGES, HEADS, PAGE_SIZE, HEAD_DIM = 9, 3, 4, 8
SHAPE = (NUM_PAGES, HEADS, PAGE_SIZE, HEAD_DIM)
SLOTS = np.array([4, 7, 8, 35, 13, 21, 20, 6], np.int32)


def arrays(pool_type=np.float32, new_type=np.float32):
    rng = np.random.default_rng(0)
    pools = [rng.standard_normal(SHAPE).astype(pool_type) for _ in range(2)]
    new = [rng.standard_normal((len(SLOTS), HEADS, HEAD_DIM)).astype(new_type) for _ in range(2)]
    return *pools, *new


def written(pages: np.ndarray, new: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The definition: token by token, head by head."""
    pages = pages.copy()
    for token, slot in enumerate(slots):
        for head in range(HEADS):
            pages[slot // PAGE_SIZE, head, slot % PAGE_SIZE] = new[token, head].astype(pages.dtype)
    return pages


@pytest.mark.parametrize(
    ("pool_type", "new_type"),
    [(np.float32, np.float32), (jnp.bfloat16, np.float32), (np.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16)],
)
def test_values_land_in_their_slots_converted_and_nothing_else_changes(pool_type, new_type, implementation):
    k_pages, v_pages, k, v = arrays(pool_type, new_type)
    out_k, out_v = jitted(partial(write_kv, **implementation))(k_pages, v_pages, k, v, SLOTS)
    assert out_k.dtype == out_v.dtype == pool_type
    np.testing.assert_array_equal(out_k, written(k_pages, k, SLOTS))
    np.testing.assert_array_equal(out_v, written(v_pages, v, SLOTS))


@pytest.mark.parametrize("pool_type", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("new_type", [np.float32, jnp.bfloat16])
def test_eight_bits_hold_the_nearest_multiple_of_the_scale_and_at_most_the_largest(pool_type, new_type, implementation):
    """Against every number that the pool can hold, on both sides of the middle between neighbours."""
    numbers = np.arange(256, dtype=np.uint8).view(pool_type).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers) & (np.abs(numbers) < 128.5 if pool_type == jnp.int8 else True)])
    if pool_type == jnp.int8:
        numbers = numbers[numbers > -128]  # scales are symmetric
    middles = (numbers[1:] + numbers[:-1]) / 2
    wanted = np.concatenate([numbers, middles * (1 - 2**-6), middles * (1 + 2**-6), [1e6, -1e6, 0]])
    k_scale = np.array([0.5, 1, 4], np.float32)  # powers of two: the division is exact
    slots = np.arange(4, NUM_PAGES * PAGE_SIZE, dtype=np.int32)
    values = np.zeros(len(slots) * HEADS * HEAD_DIM)
    values[: len(wanted)] = wanted
    values = values.reshape(len(slots), HEADS, HEAD_DIM)
    new = (values * k_scale[:, None]).astype(new_type)
    pools = [np.zeros(SHAPE, pool_type)] * 2
    write = jitted(partial(write_kv, **implementation))
    out_k, out_v = write(*pools, new, new[::-1], slots, k_scale=k_scale, v_scale=2 * k_scale)

    def nearest(values):
        clipped = np.clip(values, numbers[0], numbers[-1])
        return np.abs(clipped[..., None] - numbers).min(-1), clipped

    def stored(pages):
        return np.asarray(pages).astype(np.float64).transpose(0, 2, 1, 3).reshape(-1, HEADS, HEAD_DIM)[4:]

    for pages, scale, rows in ((out_k, k_scale, new), (out_v, 2 * k_scale, new[::-1])):
        distance, clipped = nearest(rows.astype(np.float64) / scale[:, None])
        np.testing.assert_array_equal(np.abs(stored(pages) - clipped), distance)


@pytest.mark.parametrize("pool_type", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_value_in_the_middle_goes_to_the_even_neighbour(pool_type, implementation):
    """As NumPy rounds, and the types of `ml_dtypes`."""
    numbers = np.arange(126, dtype=np.uint8).view(pool_type).astype(np.float32)  # rising, all finite
    numbers = numbers[np.isfinite(numbers)]
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = np.resize(np.concatenate([middles, -middles]), (len(SLOTS), HEADS, 32)).astype(np.float32)
    pool = np.zeros((NUM_PAGES, HEADS, PAGE_SIZE, 32), pool_type)
    ones = np.ones(HEADS, np.float32)
    write = jitted(partial(write_kv, **implementation))
    out, _ = write(pool, pool, values, values, SLOTS, k_scale=ones, v_scale=ones)
    rounded = np.rint(values) if pool_type == jnp.int8 else values
    expected = written(pool, rounded, SLOTS)
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("pool_type", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_nan_stays_nan_in_eight_bits_and_infinity_becomes_the_largest(pool_type, implementation):
    pool = np.zeros(SHAPE, pool_type)
    new = np.full((len(SLOTS), HEADS, HEAD_DIM), np.nan, np.float32)
    new[..., 1], new[..., 2] = np.inf, -np.inf
    write = jitted(partial(write_kv, **implementation))
    out = np.asarray(write(pool, pool, new, new, SLOTS)[0]).astype(np.float32)[1, :, 0]
    largest = float(jnp.finfo(pool_type).max)
    assert np.isnan(out[:, 0]).all() and np.isnan(out[:, 3:]).all()
    np.testing.assert_array_equal(out[:, 1:3], [[largest, -largest]] * HEADS)


@pytest.mark.parametrize("pool_type", [np.float32, jnp.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [5, 8])
def test_heads_that_a_program_shares_with_others_and_odd_ones(monkeypatch, pool_type, head_dim, implementation):
    monkeypatch.setattr(
        import_module("pallas_kernels.write_kv.triton"), "BLOCK_NUMBERS", 16
    )  # two heads of 8, of three; four of pairs
    rng = np.random.default_rng(1)
    pools = [rng.standard_normal((NUM_PAGES, HEADS, PAGE_SIZE, head_dim)).astype(pool_type) for _ in range(2)]
    new = [rng.standard_normal((len(SLOTS), HEADS, head_dim)).astype(np.float32) for _ in range(2)]
    out = jitted(partial(write_kv, **implementation))(*pools, *new, SLOTS)
    for pages, old, values in zip(out, pools, new):
        np.testing.assert_array_equal(
            np.asarray(pages).astype(np.float32), written(old, values, SLOTS).astype(np.float32)
        )


def test_padding_that_falls_on_the_same_slots_of_page_0_harms_no_other_page(implementation):
    slots = np.array([0, 9, 0, 0, 30, 0, 1, 0], np.int32)
    k_pages, v_pages, k, v = arrays()
    k[slots < PAGE_SIZE], v[slots < PAGE_SIZE] = np.nan, np.nan
    out_k, out_v = jitted(partial(write_kv, **implementation))(k_pages, v_pages, k, v, slots)
    np.testing.assert_array_equal(out_k[1:], written(k_pages, k, slots)[1:])
    np.testing.assert_array_equal(out_v[1:], written(v_pages, v, slots)[1:])


def compiled(implementation, donate: bool):
    pool = jax.ShapeDtypeStruct((4096, HEADS, 16, 64), jnp.float32)
    new = jax.ShapeDtypeStruct((32, HEADS, 64), jnp.float32)
    write = jax.jit(partial(write_kv, **implementation), donate_argnums=(0, 1) if donate else ())
    memory = write.lower(pool, pool, new, new, jax.ShapeDtypeStruct((32,), jnp.int32)).compile().memory_analysis()
    return memory, 2 * pool.size * pool.dtype.itemsize


def test_donated_pools_are_written_where_they_lie(implementation):
    memory, pool_bytes = compiled(implementation, donate=True)
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 100
    k_pages, v_pages, k, v = (jnp.asarray(x) for x in arrays())
    where = [pages.unsafe_buffer_pointer() for pages in (k_pages, v_pages)]
    out = jax.jit(partial(write_kv, **implementation), donate_argnums=(0, 1))(k_pages, v_pages, k, v, SLOTS)
    assert [pages.unsafe_buffer_pointer() for pages in out] == where


def test_pools_that_are_not_donated_are_copied_as_the_analysis_shows(implementation):
    memory, _ = compiled(implementation, donate=False)
    assert memory.alias_size_in_bytes == 0


NO_FLOATS = ("complex64", "bool", "int8", "int32")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("k_pages", np.zeros(SHAPE[1:], np.float32), ("k_pages", "(3, 4, 8)")),
        ("v_pages", np.zeros((9, 3, 5, 8), np.float32), ("v_pages", "(9, 3, 5, 8)", "k_pages", "(9, 3, 4, 8)")),
        ("k", np.zeros((1, HEADS, HEAD_DIM), np.float32), ("k must", "(1, 3, 8)", "(8, 3, 8)")),
        ("v", np.zeros((8, HEADS, 1), np.float32), ("v must", "(8, 3, 1)", "(8, 3, 8)")),
        *((name, np.ones((8, HEADS, HEAD_DIM), kind), (name, kind)) for name in "kv" for kind in NO_FLOATS),
        ("slot_mapping", SLOTS.astype(np.int64), ("slot_mapping", "int32", "int64")),
        ("slot_mapping", SLOTS[None], ("slot_mapping", "(1, 8)")),
        ("implementation", "cuda", ("implementation", "'cuda'", "xla")),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name, value, words):
    k_pages, v_pages, k, v = arrays()
    args = dict(k_pages=k_pages, v_pages=v_pages, k=k, v=v, slot_mapping=SLOTS) | {name: value}
    with pytest.raises(ValueError) as caught:
        write_kv(**args)
    for word in words:
        assert word in str(caught.value), caught.value
