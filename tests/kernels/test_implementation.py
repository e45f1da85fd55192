"""The choice of an implementation, and what the attention kernels refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import IMPLEMENTATIONS, default_implementation, paged_attention, ragged_paged_attention, write_kv

KERNELS = {"paged_attention": paged_attention, "ragged_paged_attention": ragged_paged_attention, "write_kv": write_kv}


def arguments(kernel: str) -> dict:
    pool = np.zeros((5, 2, 4, 8), np.float32)
    if kernel == "write_kv":
        new = np.zeros((3, 2, 8), np.float32)
        return dict(k_pages=pool, v_pages=pool, k=new, v=new, slot_mapping=np.zeros(3, np.int32))
    args = dict(q=np.zeros((3, 4, 8), np.float32), k_pages=pool, v_pages=pool, scale=1.0)
    args |= dict(block_tables=np.zeros((3, 2), np.int32), context_lens=np.zeros(3, np.int32))
    if kernel == "ragged_paged_attention":
        args["query_starts"] = np.zeros(4, np.int32)
    return args


def call(kernel: str, implementation: str | None):
    return KERNELS[kernel](**jax.tree.map(jnp.asarray, arguments(kernel)), implementation=implementation)


def refused(kernel: str, change: dict, words: tuple[str, ...], error=ValueError) -> None:
    with pytest.raises(error) as caught:
        KERNELS[kernel](**(arguments(kernel) | change))
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_named_implementation_serves_or_says_that_it_cannot(kernel, name):
    try:
        call(kernel, name)
    except NotImplementedError as error:
        assert name != "xla" and kernel in str(error) and name in str(error) and "xla" in str(error)


@pytest.mark.parametrize("kernel", KERNELS)
def test_none_stands_for_the_default(kernel):
    assert default_implementation() in IMPLEMENTATIONS
    for implementation in (None, default_implementation()):
        call(kernel, implementation)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["cuda", "XLA", ""])
def test_an_unknown_implementation_is_refused(kernel, name):
    refused(kernel, {"implementation": name}, ("implementation", repr(name), "xla"))


POOL = np.zeros((5, 2, 4, 8), np.float32)
CHANGES = [
    ({"q": np.zeros((3, 32), np.float32)}, ("q must", "(3, 32)")),
    ({"q": np.zeros((3, 4, 16), np.float32)}, ("head_dim", "16", "8")),
    ({"q": np.zeros((3, 3, 8), np.float32)}, ("num_q_heads", "3", "num_kv_heads", "2")),
    ({"k_pages": POOL[0]}, ("k_pages", "(2, 4, 8)")),
    ({"v_pages": POOL[1:]}, ("v_pages", "(4, 2, 4, 8)", "k_pages", "(5, 2, 4, 8)")),
    ({"v_pages": POOL.astype(jnp.bfloat16)}, ("v_pages", "bfloat16", "k_pages", "float32")),
    ({"block_tables": np.zeros(3, np.int32)}, ("block_tables", "(3,)")),
    ({"block_tables": np.zeros((3, 2), np.int64)}, ("block_tables", "int64")),
    ({"context_lens": np.zeros(2, np.int32)}, ("context_lens", "(2,)", "(3, 2)")),
    ({"context_lens": np.zeros((3, 1), np.int32)}, ("context_lens", "(3, 1)")),
    ({"context_lens": np.zeros(3, np.uint32)}, ("context_lens", "uint32")),
    ({"sliding_window": 0}, ("sliding_window", "0")),
    ({"sliding_window": -3}, ("sliding_window", "-3")),
    ({"soft_cap": 0.0}, ("soft_cap", "0.0")),
    ({"soft_cap": -1.5}, ("soft_cap", "-1.5")),
    ({"soft_cap": float("nan")}, ("soft_cap", "nan")),
]


@pytest.mark.parametrize("kernel", ["paged_attention", "ragged_paged_attention"])
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_arguments_that_do_not_fit_are_refused(kernel, change, words):
    refused(kernel, change, words)


def test_decode_takes_one_query_a_row():
    refused("paged_attention", {"q": np.zeros((4, 4, 8), np.float32)}, ("4 rows", "3", "one query a row"))


@pytest.mark.parametrize(
    "starts", [np.zeros(3, np.int32), np.zeros(5, np.int32), np.zeros((4, 1), np.int32), np.zeros(4, np.int64)]
)
def test_query_starts_that_do_not_fit_are_refused(starts):
    refused("ragged_paged_attention", {"query_starts": starts}, ("query_starts", str(starts.dtype), str(starts.shape)))


def test_the_public_names_are_there():
    assert all(hasattr(pallas_kernels, name) for name in pallas_kernels.__all__)
