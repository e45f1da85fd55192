"""Lets the tests of the engine import what lies beside them, and lends them engines that are built once."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("host", "device"))]
support = importlib.import_module("engine_support")
stored_tokenizers = importlib.import_module("stored_tokenizers")


@pytest.fixture(scope="session")
def llama_engine():
    """Random weights of the Llama kind, no tokenizer, 16 pages of 4 tokens for each of its 4 rows."""
    return support.build(support.tiny("llama"))


@pytest.fixture(scope="session")
def parrot_engine():
    """Says what `support.teach` tells it; SmolLM2's tokenizer (byte-level)."""
    return support.build(support.parrot(stored_tokenizers.smollm2(), [1000]))


@pytest.fixture
def engine(llama_engine):
    yield llama_engine
    support.assert_idle(llama_engine)


@pytest.fixture
def parrot(parrot_engine):
    yield parrot_engine
    support.assert_idle(parrot_engine)
