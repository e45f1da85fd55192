"""Sums and products whose bits don't depend on how many rows there are."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.layers import linear, rms_norm
from jpaged.device.tiles import COMPILER_OPTIONS, LEAST_COLUMNS, TILES, Tiles, in_tiles, ordered_product, ordered_sum

CPU = TILES["cpu"]
ROWS = (1, 2, 7, 8, 9, 40, 64, 300, 512, 513, 1200)


def compiled(function, *arguments):
    """As the engine compiles."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=COMPILER_OPTIONS["cpu"])(*arguments)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 100, 576])
def test_an_ordered_sum_adds_halves_to_halves(length):
    x = normal(5, length)
    expected = np.pad(x, [(0, 0), (0, (1 << (length - 1).bit_length()) - length)])
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    np.testing.assert_array_equal(jax.jit(ordered_sum)(x), expected[:, 0])


# 127 and 254 = 2 * 127: not to be cut into parts of equal length that are not very short.
@pytest.mark.parametrize(("terms", "columns"), [(8, 5), (127, 70), (131, 64), (254, 64), (576, 192), (1536, 100)])
def test_an_ordered_product_is_a_product(terms, columns):
    x, w = normal(9, terms), normal(terms, columns, seed=1)
    out = compiled(partial(ordered_product, depth=64), x, w)
    np.testing.assert_allclose(out, x.astype(np.float64) @ w.astype(np.float64), atol=1e-4)


PRODUCTS = [
    pytest.param(576, 1536, jnp.float32, marks=pytest.mark.slow),
    pytest.param(1536, 192, jnp.float32, marks=pytest.mark.slow),
    (48, LEAST_COLUMNS, jnp.float32),
]


@pytest.mark.parametrize(("terms", "columns", "dtype"), [*PRODUCTS, (300, 24, jnp.bfloat16), (300, 72, jnp.float16)])
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(terms, columns, dtype):
    x, w = jnp.asarray(normal(1200, terms), dtype), jnp.asarray(normal(terms, columns, seed=1), dtype)
    function = CPU.over(lambda x: linear(x, w, tiles=CPU))
    whole = np.asarray(compiled(function, x), np.float32)
    assert np.abs(whole - x.astype(jnp.float32) @ w.astype(jnp.float32)).max() < (1e-3 if dtype == jnp.float32 else 1)
    for rows in ROWS:
        for begin in {0, (1200 - rows) // 2}:
            part = np.asarray(compiled(function, x[begin : begin + rows]), np.float32)
            np.testing.assert_array_equal(part, whole[begin : begin + rows], err_msg=f"{rows} rows")


@pytest.mark.parametrize("width", [24, 64, 576])
def test_a_row_of_a_norm_has_the_same_bits_among_any_number_of_rows(width):
    x, weight = normal(1200, width), normal(width, seed=1)
    function = CPU.over(lambda x: rms_norm(x, weight, 1e-5, CPU))
    whole = np.asarray(compiled(function, x))
    np.testing.assert_allclose(whole, jax.jit(rms_norm, static_argnums=2)(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    for rows in ROWS:
        np.testing.assert_array_equal(compiled(function, x[:rows]), whole[:rows], err_msg=f"{rows} rows")


def test_tiles_are_the_smallest_that_hold_all_rows_or_the_largest():
    seen = []

    def function(x):
        seen.append(len(x))
        return x + 1, {"twice": 2 * x}

    for length, size in ((1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, 8), (30, 8)):
        x = np.arange(2.0 * length).reshape(length, 2)
        more, rest = Tiles((1, 4, 8), 4, None).over(function)(x)
        assert set(seen) == {size}
        np.testing.assert_array_equal(more, x + 1)
        np.testing.assert_array_equal(rest["twice"], 2 * x)
        seen.clear()


def test_arguments_may_be_of_any_type_and_shape_behind_their_rows():
    arguments = (np.arange(5), np.ones((5, 2, 3), bool), {"x": np.ones((5, 1), np.float32)})
    many, flags, named = in_tiles(lambda *x: x, 3)(*arguments)
    for found, given in zip((many, flags, named["x"]), (*arguments[:2], arguments[2]["x"]), strict=True):
        np.testing.assert_array_equal(found, given)
        assert found.dtype == given.dtype or given.dtype == np.int64
    assert in_tiles(len, None) is len
