"""What threads write into shared memory is committed before the tensor cores or a copy engine read it.

Those read by a path of their own, past what `commit_smem` has not yet made visible to it. Neither the interpreter nor a
compiler misses a commit, so the kernels' jaxprs are walked in the order in which they run.
"""

from __future__ import annotations

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src import core
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import implementation
from pallas_kernels.target import INTERPRETED

WRITES = {"swap", "store", "inline_mgpu", "inline_mgpu_p"}  # the last two (a name a version) write results
READS_PAST_THREADS = {"wgmma_ref", "copy_smem_to_gmem"}
# After these, a copy engine may fill the memory again, or another group of warps read it.
HANDS_OVER = {"barrier_arrive"}
INNOCENT = {"get", "load", "copy_gmem_to_smem", "barrier_wait"}  # what else may name shared memory

KERNELS = {
    "decode": ("paged_attention", {}, {}),
    "decode of windows, capped, with sinks": (
        "paged_attention",
        {"sliding_window": 100, "soft_cap": 30.0},
        {"sinks": ((8,), "float32")},
    ),
    "decode in splits": ("paged_attention", {"split_size": 128}, {}),
    "decode of an 8-bit pool": ("paged_attention", {}, {"k_scale": ((2,), "float32"), "v_scale": ((2,), "float32")}),
    "ragged": ("ragged_paged_attention", {}, {"query_starts": ((5,), "int32")}),
    "ragged, windowed": ("ragged_paged_attention", {"sliding_window": 100}, {"query_starts": ((5,), "int32")}),
}

# Weights are committed once more with the widened values after them.
TWICE = {("decode of an 8-bit pool", 1)}


def uncommitted(jaxpr, written: bool = False) -> tuple[list[str], bool]:
    """The primitives that come upon uncommitted writes, and whether some are left at the end."""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inside = list(core.jaxprs_in_params(eqn.params))
        if inside:
            ends = []
            for _ in range(2 if name in ("while", "scan") else 1):  # what one turn leaves, the next comes upon
                for sub in inside:
                    more, end = uncommitted(sub, written)
                    found += more
                    ends.append(end)
                written = any(ends) if name == "cond" else ends[-1]
            continue
        shared = any(getattr(v.aval, "memory_space", None) == plgpu.SMEM for v in eqn.invars)
        if name == "commit_smem":
            written = False
        elif written and (name in HANDS_OVER or (shared and name in READS_PAST_THREADS)):
            found.append(name)
        elif shared and name in WRITES:
            written = True
        else:
            known = WRITES | READS_PAST_THREADS | HANDS_OVER | INNOCENT
            assert not shared or name in known, f"{name} does something with shared memory: what?"
    return found, written


def traced(kernel: str, options: dict, arrays: dict):
    like = jax.ShapeDtypeStruct
    pool = like((64, 2, 64, 64), jnp.int8 if "k_scale" in arrays else jnp.bfloat16)
    shapes = {
        "q": like((4, 8, 64), jnp.bfloat16),
        "k_pages": pool,
        "v_pages": pool,
        "block_tables": like((4, 8), jnp.int32),
        "context_lens": like((4,), jnp.int32),
    }
    shapes |= {name: like(*shape) for name, shape in arrays.items()}
    call = partial(getattr(pallas_kernels, kernel), implementation="mosaic_gpu", scale=0.1, **options)
    return jax.make_jaxpr(lambda shapes: call(**shapes))(shapes).jaxpr


@pytest.fixture(autouse=True)
def on_a_hopper(monkeypatch):
    ragged = importlib.import_module("pallas_kernels.ragged_paged_attention.mosaic_gpu")
    for module in (implementation, ragged):
        monkeypatch.setattr(module, "current_target", lambda: INTERPRETED)


def calls_of_commit(monkeypatch, dropped: int | None = None) -> list[int]:
    """Counts the commits that are traced from here on, and leaves out the one with the number `dropped`."""
    calls = [0]
    commit = plgpu.commit_smem

    def counted():
        calls[0] += 1
        if calls[0] - 1 != dropped:
            commit()

    monkeypatch.setattr(plgpu, "commit_smem", counted)
    return calls


@pytest.mark.parametrize("name", KERNELS)
def test_every_write_is_committed_and_no_commit_can_be_dropped(name, monkeypatch):
    with monkeypatch.context() as patch:
        calls = calls_of_commit(patch)
        assert uncommitted(traced(*KERNELS[name])) == ([], False)
    assert calls[0] > 0
    for dropped in range(calls[0]):
        if (name, dropped) in TWICE:
            continue
        with monkeypatch.context() as patch:
            calls_of_commit(patch, dropped)
            assert uncommitted(traced(*KERNELS[name]))[0], f"without commit {dropped}, nothing is found"
