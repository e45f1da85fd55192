"""Lets the tests of the server import what lies beside them, and the tokenizers of the tests of the host."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "host")]
