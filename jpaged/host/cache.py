"""Owns where jpaged keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder that jpaged keeps things in: $JPAGED_CACHE, else jpaged under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("JPAGED_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jpaged"
