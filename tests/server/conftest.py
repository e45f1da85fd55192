"""Lets the tests of the server import what lies beside them, and what the engine's tests use."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
