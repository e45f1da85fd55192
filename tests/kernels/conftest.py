"""Lets the kernel tests import what lies beside them, and runs them on every implementation that can run here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

IMPLEMENTATIONS = ["xla"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    return request.param
