"""Owns the choice between the implementations of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.target import INTERPRETED, Target, current_target

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "jax_triton", "xla")

# The GPU implementations of each kernel, best first. `implementation=None` takes the first that can serve and is not
# only for who names it, and otherwise XLA, which every kernel has.
AVAILABLE: dict[str, tuple[str, ...]] = {
    "paged_attention": ("mosaic_gpu", "triton", "jax_triton"),
    "ragged_paged_attention": ("mosaic_gpu", "triton"),
    "write_kv": ("triton",),
    "copy_pages": ("triton",),
    "keep_top": ("triton",),
}


def in_32_bits[**P, R](kernel: Callable[P, R]) -> Callable[P, R]:
    """The kernel without numbers of 64 bits, which the GPU kernels do not know, whatever `jax_enable_x64` says."""

    @wraps(kernel)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(False):
            return kernel(*args, **kwargs)

    return traced


def choose(
    kernel: str, implementation: str | None, interpret: Any, *arrays: Any
) -> tuple[str, ModuleType | None, Target]:
    """The implementation to run, its module (None for XLA) and the device it is for.

    `arrays` are those of the call that decide whether a kernel can serve it: each module's `unsupported(target,
    *arrays)` gives its reason against it, or None. With `interpret` the device is taken to be a Hopper.
    Raises ValueError for an unknown name, NotImplementedError for one that cannot serve the call.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    target = INTERPRETED if interpret else current_target()
    if implementation == "xla":
        if interpret:
            raise ValueError(f"interpret={interpret!r} is for GPU kernels, and implementation='xla' is none")
        return "xla", None, target
    if implementation is not None:
        reason = _reason_against(kernel, implementation, target, arrays)
        if reason:
            raise NotImplementedError(f"{kernel} cannot be served by implementation={implementation!r}: {reason}")
        return implementation, _module(kernel, implementation), target
    for name in AVAILABLE[kernel]:
        if not _is_named_only(name, arrays) and not _reason_against(kernel, name, target, arrays):
            return name, _module(kernel, name), target
    return "xla", None, target


def default_implementation(kernel: str, *arrays: Any) -> str:
    """What `implementation=None` stands for on the current device, for a call with these arrays (or their shapes)."""
    return choose(kernel, None, False, *arrays)[0]


def _is_named_only(implementation: str, arrays: tuple[Any, ...]) -> bool:
    """Whether another implementation is thought to be faster, or is there in any case."""
    # Mosaic converts eight bits on their way through shared memory, with one thread block an SM: Triton's kernels do it
    # in registers and keep three times as many bytes under way.
    eight_bits = any(array.dtype.itemsize == 1 for array in arrays)
    return implementation == "jax_triton" or (implementation == "mosaic_gpu" and eight_bits)


def _reason_against(kernel: str, implementation: str, target: Target, arrays: tuple[Any, ...]) -> str | None:
    if implementation not in AVAILABLE[kernel]:
        return f"there is no such kernel, only {(*AVAILABLE[kernel], 'xla')}"
    if target.platform != "cuda":
        return f"it runs on NVIDIA GPUs and not on a {target.platform}, where interpret=True is for tests"
    return _module(kernel, implementation).unsupported(target, *arrays)


def _module(kernel: str, implementation: str) -> ModuleType:
    # Not before it is needed: Pallas takes a while to import.
    return import_module(f"pallas_kernels.{kernel}.{implementation}")
