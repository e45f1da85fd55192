"""Owns `Task`, one thing to check or to measure, and `Setup`, what every task is told."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import pallas_kernels

TYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
# What serves a card beside XLA; of the last one there is a decode kernel alone.
OWN = ("mosaic_gpu", "triton")
JAX_TRITON = ("jax_triton",) if importlib.util.find_spec("jax_triton") else ()
EIGHT_BITS = ("e4m3", "e5m2", "int8")


@dataclass
class Setup:
    """`rehearse`: on any device, tiny shapes, every kernel once and no figures. `memory`: bytes the device may hold."""

    rehearse: bool
    seed: int
    memory: int
    kept: dict[Hashable, Any] = field(default_factory=dict)  # shared by the tasks of one group

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def rng(self, name: str) -> np.random.Generator:
        """Numbers that are fresh in every run, and the same in all processes of one."""
        return np.random.default_rng([self.seed, *name.encode()])


class Built(NamedTuple):
    """A function to compile, before the arrays exist. Tasks with one `key` share the program."""

    key: Hashable
    function: Any  # jitted
    shapes: tuple[Any, ...]

    def compile(self) -> Any:
        return self.function.lower(*self.shapes).compile()


class Task(NamedTuple):
    """`run` yields a dict for each of `names`, as it comes. After one with `failed`, a note, there may be others.

    The programs of a `group`, whose tasks are neighbours, are compiled together before, and what `Setup.keep` holds is
    kept for them.
    """

    part: str
    group: str
    names: tuple[str, ...]
    implementation: str
    run: Callable[[Setup, Any], Iterator[dict[str, Any]]]
    build: Callable[[Setup], Built] | None = None
    seconds: float = 30.0  # without a word for so long, it hangs
    ours: bool = True  # or something to compare with, whose faults are no failures


class Skipped(Exception):
    """Raised by a task that cannot run here, though nothing is wrong."""


def kernel_options(setup: Setup, kernel: str, implementation: str, *, interpret: bool = True) -> dict[str, Any]:
    """The keyword arguments that name an implementation, or in a rehearsal what stands for it.

    There, Triton kernels are interpreted if `interpret`. The interpreter of Mosaic kernels takes seconds for a tiny
    case: XLA stands for them.
    """
    if not setup.rehearse:
        return {"implementation": implementation}
    if interpret and implementation == "triton" and importlib.util.find_spec(f"pallas_kernels.{kernel}.triton"):
        return {"implementation": "triton", "interpret": True}
    return {"implementation": "xla"}


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:300]


def public_kernel(name: str) -> Callable[..., Any]:
    """The function of that name, of the package or of its own module."""
    kernel = getattr(pallas_kernels, name, None)
    return kernel if callable(kernel) else getattr(import_module(f"pallas_kernels.{name}"), name)


def like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def noise(setup: Setup, name: str, shape: tuple[int, ...], kind: str) -> jax.Array:
    """Normal numbers, the same few over and over: how fast a kernel is may depend on how random its input looks."""
    size = int(np.prod(shape))
    few = setup.keep((name, kind), lambda: setup.rng(name).standard_normal(1 << 18).astype(TYPES[kind]))
    if size <= 1 << 24:
        return jnp.asarray(np.resize(few, shape))
    return repeated(size, shape)(few)


def repeated(size: int, shape: tuple[int, ...]) -> Any:
    def fill(few):
        rows = jnp.broadcast_to(few, (-(-size // few.size), few.size))
        return lax.slice(rows.reshape(-1), (0,), (size,)).reshape(shape)

    return jax.jit(fill)
