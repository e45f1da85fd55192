"""Lets the device tests import what lies beside them, and gives them small models."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

DATA = Path(__file__).parents[1] / "data"


@cache
def _load(name: str, dtype: str):
    from jpaged.checkpoint import load

    return load(DATA / name, dtype=dtype)


@pytest.fixture
def load_tiny():
    """Loads a small checkpoint by its path in tests/data, once a session: (name, dtype="float32") -> Params."""
    return lambda name, dtype="float32": _load(name, dtype)
