"""Owns the clock: seconds of device time a call, with nothing left in the cache by the call before."""

from __future__ import annotations

import glob
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gpu_check_parts.tasks import Setup

# The inputs that calls take turns with are so many bytes together, about eight times the largest L2 (60 MB). A cache
# that replaces lines at random would still hold exp(-8) of what a call reads.
ROTATED_BYTES = 1 << 29
# One program makes so many calls that the host, which takes some 50 us to start a program, is ahead of the device.
PROGRAM_SECONDS = 200e-6
MAX_CALLS = 16
HOST_SECONDS = 150e-6  # of a program that may have waited for the host
PROFILED_PROGRAMS = 8
FAST = 4e12  # bytes a second, to guess a time before it is measured

SAMPLES = 5
SAMPLE_SECONDS = 0.015


def num_sets(bytes_a_call: int, most: int = 512) -> int:
    """How many inputs to take turns with."""
    return max(1, min(most, -(-ROTATED_BYTES // max(bytes_a_call, 1))))


def calls_a_program(least_seconds: float) -> int:
    """How many calls to put into one program. From five on, XLA makes them one CUDA graph: no gap between kernels."""
    return max(1, min(MAX_CALLS, int(-(-PROGRAM_SECONDS // least_seconds))))


def seconds_a_call(
    setup: Setup, program: Callable[..., Any], carry: Any, sets: Sequence[tuple[Any, ...]], calls: int = 1
) -> tuple[float | None, Any]:
    """The median time of one of the `calls` that `program(carry, *set)` makes, and its last result.

    Each program takes the result of the one before: none can be left out, none can overlap. Programs are started
    without waiting, and one wait ends the series. Two series, of n and of 3 n programs, differ by 2 n programs and
    nothing else: the start of the first and the wait for the last cancel out. In a rehearsal there is one program, and
    no figure.
    """
    turn = 0

    def series(length: int) -> float:
        nonlocal carry, turn
        began = time.perf_counter()
        for _ in range(length):
            carry = program(carry, *sets[turn % len(sets)])
            turn += 1
        jax.block_until_ready(carry)
        return time.perf_counter() - began

    series(1)
    if setup.rehearse:
        return None, carry
    series(2)
    length = int(np.clip(SAMPLE_SECONDS / series(1), 1, 100))
    series(length)
    slopes = [(series(3 * length) - series(length)) / (2 * length * calls) for _ in range(SAMPLES)]
    return float(np.median(slopes)), carry


def figures(
    setup: Setup, program: Callable[..., Any], carry: Any, sets: Sequence[tuple[Any, ...]], calls: int = 1
) -> tuple[dict[str, Any], Any]:
    """`seconds_a_call` as a row has it. Where the host may have been what took so long, the profiler is asked too."""
    seconds, carry = seconds_a_call(setup, program, carry, sets, calls)
    if seconds is None or seconds * calls > HOST_SECONDS:
        return {"seconds": seconds}, carry

    def some() -> Any:
        nonlocal carry
        for i in range(PROFILED_PROGRAMS):
            carry = program(carry, *sets[i % len(sets)])
        return carry

    note = f"a program of {calls} calls took {seconds * calls * 1e6:.0f} us: the host may have been the limit"
    busy = sum(spent for _, _, spent in kernels_of(some)) / (PROFILED_PROGRAMS * calls)
    if not busy:
        return {"seconds": seconds, "note": note}, carry
    note += f"; by the profiler, a call is {busy * 1e6:.3g} us in kernels"
    return {"seconds": seconds, "kernel_seconds": busy, "note": note}, carry


def kernels_of(run: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """What the device ran during `run`, by the profiler: (kernel, how often, seconds together), the longest first.

    Nothing where there is no such profiler.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                jax.block_until_ready(run())
            files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            return kernels_in([jax.profiler.ProfileData.from_file(path) for path in files])
        except Exception:  # a diagnosis alone: no reason to lose what was measured
            traceback.print_exc()
            return []


def kernels_in(profiles: Sequence[Any]) -> list[tuple[str, int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for profile in profiles:
        for plane in profile.planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                # Other lines of the plane show the same time once more, by operations and by modules.
                for event in line.events if line.name.startswith("Stream") else ():
                    count, seconds = found.get(event.name, (0, 0.0))
                    found[event.name] = count + 1, seconds + event.duration_ns * 1e-9
    return sorted(((name, *sums) for name, sums in found.items()), key=lambda item: -item[2])
