"""The choice of an implementation, and what the attention kernels refuse."""

from __future__ import annotations

import subprocess
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pallas_kernels
from pallas_kernels import (
    IMPLEMENTATIONS,
    copy_pages,
    default_implementation,
    implementation,
    paged_attention,
    ragged_paged_attention,
    write_kv,
)
from pallas_kernels.block_sizes import KEYS, block_sizes, table
from pallas_kernels.implementation import AVAILABLE
from pallas_kernels.target import Target, current_target

KERNELS = {
    "paged_attention": paged_attention,
    "ragged_paged_attention": ragged_paged_attention,
    "write_kv": write_kv,
    "copy_pages": copy_pages,
}


def arguments(kernel: str) -> dict:
    pool = np.zeros((5, 2, 4, 8), np.float32)
    if kernel == "write_kv":
        new = np.zeros((3, 2, 8), np.float32)
        return dict(k_pages=pool, v_pages=pool, k=new, v=new, slot_mapping=np.zeros(3, np.int32))
    if kernel == "copy_pages":
        return dict(k_pages=pool, v_pages=pool, sources=np.zeros(2, np.int32), targets=np.zeros(2, np.int32))
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
    if name == "xla":
        call(kernel, name)
        return
    with pytest.raises(NotImplementedError) as caught:
        call(kernel, name)
    for word in (kernel, repr(name), "cpu" if name in AVAILABLE[kernel] else "xla"):
        assert word in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_none_is_xla_on_a_cpu(kernel):
    assert default_implementation(kernel) == "xla"
    call(kernel, None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_xla_is_not_interpreted(kernel):
    refused(kernel, {"implementation": "xla", "interpret": True}, ("interpret", "xla"))


def test_nothing_asks_for_devices_at_import():
    code = "import pallas_kernels, jax._src.xla_bridge as bridge; assert not bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True)


HOPPER, AMPERE, BLACKWELL = (Target("cuda", c, "card", 132) for c in ((9, 0), (8, 0), (10, 0)))


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "chosen"),
    [
        (HOPPER, "bfloat16", 128, "mosaic_gpu"),
        (HOPPER, "float16", 64, "mosaic_gpu"),
        (HOPPER, "float32", 128, "triton"),
        (HOPPER, "int8", 128, "triton"),
        (AMPERE, "bfloat16", 128, "triton"),
        (BLACKWELL, "bfloat16", 128, "triton"),
        (Target("cuda", (7, 5), "card", 40), "float16", 128, "xla"),
        (Target("tpu", None, "card", 0), "bfloat16", 128, "xla"),
        (Target("cpu", None, "cpu", 0), "bfloat16", 128, "xla"),
    ],
)
@pytest.mark.parametrize("kernel", ["paged_attention", "ragged_paged_attention"])
def test_none_picks_the_best_that_can_serve(monkeypatch, kernel, target, dtype, head_dim, chosen):
    monkeypatch.setattr(implementation, "current_target", lambda: target)
    q = jax.ShapeDtypeStruct((4, 8, head_dim), dtype if "float" in dtype else "bfloat16")
    pages = jax.ShapeDtypeStruct((9, 2, 16, head_dim), dtype)
    tables = jax.ShapeDtypeStruct((4, 3), "int32")
    assert default_implementation(kernel, q, pages, tables) == chosen


@pytest.mark.parametrize(
    ("attributes", "target"),
    [
        (
            dict(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132),
            ("cuda", (9, 0), 132),
        ),
        (
            dict(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0", core_count=148),
            ("cuda", (10, 0), 148),
        ),
        (dict(platform="gpu", device_kind="MI300X", compute_capability="gfx942", core_count=304), ("gpu", None, 304)),
        (dict(platform="tpu", device_kind="TPU v6e"), ("tpu", None, 0)),
    ],
)
def test_the_target_is_read_from_the_default_device(monkeypatch, attributes, target):
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(**attributes)])
    found = current_target()
    assert (found.platform, found.capability, found.num_cores) == target
    assert found.device_kind == attributes["device_kind"]


def test_the_target_follows_the_default_device():
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_target().platform == "cpu"


def test_the_table_of_block_sizes_serves_every_gpu_kernel():
    assert {(k, i) for k, entries in table().items() for i in entries} == {
        (k, i)
        for k, names in AVAILABLE.items()
        for i in names
        if i != "jax_triton"  # has the tiles of "triton"
    }
    for entries in (entries for kernel in table().values() for entries in kernel.values()):
        assert all(entry.keys() <= KEYS for entry in entries)
        assert entries[-1].keys() == {"blocks"}, "the last entry is for all that came to no other"


def test_the_first_entry_that_matches_is_taken(monkeypatch):
    entries = [
        {"capability": "8.0", "head_dim": 64, "blocks": {"n": 1}},
        {"device": "H200", "kv_bits": 8, "blocks": {"n": 2}},
        {"head_dim": 128, "blocks": {"n": 3}},
        {"blocks": {"n": 4}},
    ]
    monkeypatch.setattr("pallas_kernels.block_sizes.table", lambda: {"kernel": {"triton": entries}})

    def chosen(capability, device, head_dim, kv_bits):
        target = Target("cuda", capability, device, 1)
        return block_sizes("kernel", "triton", target, head_dim=head_dim, kv_bits=kv_bits)["n"]

    assert chosen((8, 0), "NVIDIA A100", 64, 16) == 1
    assert chosen((8, 0), "NVIDIA A100", 80, 16) == 3
    assert chosen((9, 0), "NVIDIA H200", 64, 8) == 2
    assert chosen((9, 0), "NVIDIA H200", 256, 16) == 4


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
    ({"q": np.zeros((3, 4, 8), np.int32)}, ("q must", "int32")),
    ({"k_pages": POOL.astype(np.float64), "v_pages": POOL.astype(np.float64)}, ("k_pages", "float64", "bfloat16")),
    ({"k_pages": POOL.astype(np.int8), "v_pages": POOL.astype(np.int8)}, ("int8", "k_scale")),
    ({"sinks": np.zeros(2, np.float32)}, ("sinks", "(2,)", "(4,)")),
    ({"sinks": np.zeros(4, np.float64)}, ("sinks", "float64")),
    ({"k_scale": np.ones(2, np.float32)}, ("k_scale", "v_scale", "both")),
    ({"k_scale": np.ones(4, np.float32), "v_scale": np.ones(2, np.float32)}, ("k_scale", "(4,)", "(2,)")),
    ({"block_tables": np.array([[0, 1], [5, 0], [0, 0]], np.int32)}, ("block_tables", "[5]", "5 pages", "0 to 4")),
    ({"block_tables": np.full((3, 2), -1, np.int32)}, ("block_tables", "[-1]", "0 to 4")),
    ({"context_lens": np.array([8, 9, 1], np.int32)}, ("context_lens", "[9]", "8 tokens")),
    ({"context_lens": np.array([1, 1, -2], np.int32)}, ("context_lens", "[-2]")),
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


@pytest.mark.parametrize(
    ("starts", "words"),
    [([0, 1, 2, 4], ("[4]", "3 tokens")), ([1, 2, 2, 3], ("begin at 0",)), ([0, 2, 1, 3], ("fall",))],
)
def test_query_starts_that_cut_no_rows_are_refused(starts, words):
    refused("ragged_paged_attention", {"query_starts": np.array(starts, np.int32)}, ("query_starts", *words))


@pytest.mark.parametrize("split_size", [0, -64, 32, 100])
def test_a_split_size_that_cuts_blocks_is_refused(split_size):
    refused("paged_attention", {"split_size": split_size}, ("split_size", str(split_size), "64"))


def test_slots_beyond_the_pool_are_refused():
    refused("write_kv", {"slot_mapping": np.array([0, 20, 1], np.int32)}, ("slot_mapping", "[20]", "20 slots"))


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("paged_attention", {"block_tables": np.full((3, 2), 5, np.int32)}),
        ("ragged_paged_attention", {"context_lens": np.full(3, 9, np.int32)}),
        ("ragged_paged_attention", {"query_starts": np.full(4, 4, np.int32)}),
        ("write_kv", {"slot_mapping": np.full(3, -1, np.int32)}),
    ],
)
def test_ids_that_lie_on_the_device_are_checked_there_in_a_debug_mode(kernel, change):
    def call(**changed):
        options = {"scale": 1.0} if "attention" in kernel else {}
        arrays = {k: v for k, v in arguments(kernel).items() if k != "scale"} | changed
        checked = checkify.checkify(jax.jit(partial(KERNELS[kernel], **options)))
        return checked(**jax.tree.map(jnp.asarray, arrays))[0].get()

    assert call() is None
    (name,) = change
    assert name in (call(**change) or "")


def test_the_public_names_are_there():
    assert all(hasattr(pallas_kernels, name) for name in pallas_kernels.__all__)
