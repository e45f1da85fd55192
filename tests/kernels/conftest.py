"""Lets the kernel tests import what lies beside them, and runs them on every implementation that can run here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# As keyword arguments of a kernel. Mosaic kernels have cases of their own: their interpreter takes seconds for each.
IMPLEMENTATIONS = [{"implementation": "xla"}, {"implementation": "triton", "interpret": True}]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda options: options["implementation"])
def implementation(request) -> dict:
    return request.param
