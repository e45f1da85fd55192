"""Bugs planted in the GPU kernels, each of which the cases must catch."""

from __future__ import annotations

import importlib
import inspect
import types
from functools import partial

import numpy as np
import pytest
from cases import Case, caught, check_decode, check_ragged, decode_case, jitted

from pallas_kernels import copy_pages, implementation, mosaic_tiles, paged_attention, ragged_paged_attention, write_kv
from pallas_kernels.paged_attention import mosaic_gpu

pytestmark = [pytest.mark.slow, pytest.mark.planted]

DECODE_CASES = [
    decode_case("plain", 130, 17, 33, head_dim=16),
    decode_case("windowed, with sinks", 130, 17, 33, head_dim=16, sliding_window=21, sinks=True),
]
CHUNKS = ((150, 150), (40, 3), (170, 60), (33, 1))
RAGGED_CASES = [
    Case("plain", CHUNKS, head_dim=16, q_type="bf16", kv_type="bf16"),
    Case("windowed", CHUNKS, head_dim=16, q_type="bf16", kv_type="bf16", sliding_window=21),
]
CASES = {"paged_attention": DECODE_CASES, "ragged_paged_attention": RAGGED_CASES}
KERNELS = {"paged_attention": paged_attention, "ragged_paged_attention": ragged_paged_attention}
CHECKS = {"paged_attention": check_decode, "ragged_paged_attention": check_ragged}

# What is wrong, the text of the kernel, and what it is replaced by.
BUGS = {
    "paged_attention": {
        "a window one too long": ("length - plan.sliding_window, 0)", "length - plan.sliding_window - 1, 0)"),
        "the page before": ("next_ids = load_page_ids(block + 1)", "next_ids = load_page_ids(block)"),
        "scores without a mask": ("scores = jnp.where(seen[None, :], scores, MASKED)", "pass"),
        "unwritten values": ("plt.load(v_ref.at[slots], mask=mask, other=nothing)", "plt.load(v_ref.at[slots])"),
        "a sum that keeps its old scale": ("total = total * keep + weights.sum(1)", "total = total + weights.sum(1)"),
        "splits added up as they are": ("weights = jnp.exp2(tops - new_top)", "weights = jnp.ones_like(tops)"),
        "no sinks": ("    if sink is not None:", "    if False:"),
        "another head's keys": ("slots = (pages, kv_head,", "slots = (pages, 0,"),
    },
    "ragged_paged_attention": {
        "a window one too long": ("[None, :] > last - window", "[None, :] >= last - window"),
        "the token after": ("[None, :] <= last\n", "[None, :] <= last + 1\n"),
        "the page before": ("next_ids = load_page_ids(block + 1)", "next_ids = load_page_ids(block)"),
        "unwritten values": ("mask = (at >= first_seen) & (at < end) if border else None", "mask = None"),
        "a sum that keeps its old scale": ("total = total * keep + weights.sum(1)", "total = total + weights.sum(1)"),
        "another row's queries": ("+ seqs <= tile)", "+ seqs < tile)"),
        "a border taken for clear": ("div(position + 1, tokens), begin", "cdiv(position + 1, tokens), begin"),
    },
}


def with_bug(monkeypatch, kernel: str, bug: tuple[str, str] | None) -> None:
    """Has the kernel's Triton implementation run with a piece of its text replaced."""
    module = importlib.import_module(f"pallas_kernels.{kernel}.triton")
    source = inspect.getsource(module)
    if bug is not None:
        assert source.count(bug[0]) == 1, f"{bug[0]!r} is {source.count(bug[0])} times in the kernel"
        source = source.replace(*bug)
    changed = types.ModuleType(module.__name__)
    exec(compile(source, f"{module.__file__} with a bug", "exec"), changed.__dict__)
    monkeypatch.setattr(implementation, "_module", lambda *_: changed)


def is_caught(kernel: str, name: str = "triton", cases: list[Case] | None = None) -> bool:
    interpreted = partial(KERNELS[kernel], implementation=name, interpret=True)
    found = caught(CHECKS[kernel], interpreted, cases or CASES[kernel])
    if kernel == "paged_attention" and name == "triton":  # splits of one block each, so far
        found = found or caught(check_decode, partial(interpreted, split_size=192), DECODE_CASES[:1])
    return found


@pytest.mark.parametrize(("kernel", "bug"), [(kernel, bug) for kernel, bugs in BUGS.items() for bug in bugs])
def test_a_bug_in_a_triton_kernel_is_caught(kernel, bug, monkeypatch):
    with_bug(monkeypatch, kernel, BUGS[kernel][bug])
    assert is_caught(kernel)


@pytest.mark.parametrize("kernel", BUGS)
def test_the_triton_kernels_pass_as_they_are(kernel, monkeypatch):
    with_bug(monkeypatch, kernel, None)
    assert not is_caught(kernel)


@pytest.mark.parametrize(
    ("kernel", "bug"),
    [
        ("write_kv", ("lax.rem(slot, page_size)", "lax.rem(slot + 1, page_size)")),
        ("write_kv", ("lax.div(slot, page_size)", "lax.div(slot, page_size) ^ 1")),
        ("copy_pages", ("pool.at[target, at]", "pool.at[source, at]")),
        ("copy_pages", ("sources_ref[pl.program_id(0)]", "sources_ref[0]")),
        ("write_kv", None),
        ("copy_pages", None),
    ],
)
def test_a_bug_in_moving_tokens_and_pages_is_caught(kernel, bug, monkeypatch):
    with_bug(monkeypatch, kernel, bug)
    rng = np.random.default_rng(0)
    pools = [rng.standard_normal((7, 2, 4, 16)).astype(np.float32) for _ in range(2)]
    new = [rng.standard_normal((3, 2, 16)).astype(np.float32) for _ in range(2)]
    ids = [np.array(x, np.int32) for x in ([5, 10, 26], [1, 2], [4, 6])]
    results = []
    for options in ({"implementation": "xla"}, {"implementation": "triton", "interpret": True}):
        if kernel == "write_kv":
            results.append(jitted(partial(write_kv, **options))(*pools, *new, ids[0]))
        else:
            results.append(jitted(partial(copy_pages, **options))(*pools, *ids[1:]))
    same = all(np.array_equal(a, b) for a, b in zip(*results))
    assert same == (bug is None)


BF16 = {"q_type": "bf16", "kv_type": "bf16", "head_dim": 64, "num_kv_heads": 1, "group": 2}
MOSAIC_CASES = {
    "paged_attention": [decode_case("windowed", 70, **BF16, page_size=16, sliding_window=21)],
    "ragged_paged_attention": [Case("windowed", ((70, 7),), **BF16, page_size=64, sliding_window=21)],
}


def other_page(*args):
    return [page ^ 1 for page in PAGES_OF_BLOCK(*args)]


PAGES_OF_BLOCK = mosaic_tiles.pages_of_block
MOSAIC_BUGS = {
    "values that nobody wrote": (mosaic_tiles, "zero_unseen", lambda *_: None),
    "the neighbouring page": (mosaic_tiles, "pages_of_block", other_page),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bug", MOSAIC_BUGS)
def test_a_bug_in_a_mosaic_kernel_is_caught(kernel, bug, monkeypatch):
    monkeypatch.setattr(*MOSAIC_BUGS[bug])
    assert is_caught(kernel, "mosaic_gpu", MOSAIC_CASES[kernel])


def test_a_window_too_long_in_the_mosaic_decode_kernel_is_caught(monkeypatch):
    seen = mosaic_gpu.Cut.seen
    monkeypatch.setattr(mosaic_gpu.Cut, "seen", lambda cut, n: seen(cut._replace(sliding_window=22), n))
    assert is_caught("paged_attention", "mosaic_gpu", MOSAIC_CASES["paged_attention"])


@pytest.mark.parametrize("change", [{"sliding_window": 22}, {"sliding_window": None}])
def test_a_wrong_window_in_the_mosaic_chunk_kernel_is_caught(change, monkeypatch):
    chunks = importlib.import_module("pallas_kernels.ragged_paged_attention.mosaic_gpu")
    shape = chunks.Shape
    monkeypatch.setattr(chunks, "Shape", lambda *args: shape(*args)._replace(**change))
    assert is_caught("ragged_paged_attention", "mosaic_gpu", MOSAIC_CASES["ragged_paged_attention"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_mosaic_kernels_pass_as_they_are(kernel):
    assert not is_caught(kernel, "mosaic_gpu", MOSAIC_CASES[kernel])
