"""Shared by all tests: JAX on the CPU, one cache of compiled programs, deterministic hypothesis, the small model."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# Set before anything imports JAX. The workers of one run, and the runs after it, share what was compiled.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# What tests compile they run for milliseconds: without LLVM's optimizations, compiling takes two thirds of the time.
# XLA's own passes stay, with what they fuse, copy and share. `optimized` is for tests of what LLVM's could change.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import hypothesis
import jax
import pytest

from jpaged.small_model import small_model_path

hypothesis.settings.register_profile(
    "jpaged",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jpaged")

REPO = Path(__file__).parents[1]
collect_ignore = ["clients"]  # run by `bash scripts/clients.sh`, in an environment of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: each goes to one worker as a whole, and so all workers end at about the same
    time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


MANY_MAPS = 20_000  # of the 65,530 areas of memory that Linux gives a process; each compiled program takes a few


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Forgets compiled programs when there are many: at the system's limit, the compiler aborts the process."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimized():
    """Programs are compiled as users compile them: for tests of bits, and of real models."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the repository."""
    return REPO


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The path of the small real model (GGUF)."""
    try:
        return small_model_path(download="CI" in os.environ)
    except OSError as error:
        if "CI" in os.environ:
            pytest.fail(f"the small model is needed in CI: {error}")
        pytest.skip(str(error))
