"""Owns the table of block sizes, `block_sizes.toml`: data that measurements change, not code."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from pallas_kernels.target import Target

KEYS = {"capability", "device", "head_dim", "kv_bits", "blocks"}


@cache
def table() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """kernel -> implementation -> entries, the first that matches being the one to take."""
    return tomllib.loads(files("pallas_kernels").joinpath("block_sizes.toml").read_text())


def block_sizes(
    kernel: str, implementation: str, target: Target, *, head_dim: int = 0, kv_bits: int = 0
) -> dict[str, int]:
    """The keyword arguments by which `implementation` of `kernel` is told its blocks."""
    capability = ".".join(map(str, target.capability or ()))
    # A kernel of Triton itself is the same algorithm, in the same tiles.
    for entry in table()[kernel][implementation.removeprefix("jax_")]:
        if (
            entry.get("capability", capability) == capability
            and entry.get("device", "").lower() in target.device_kind.lower()
            and head_dim <= entry.get("head_dim", head_dim)
            and kv_bits == entry.get("kv_bits", kv_bits)
        ):
            return entry["blocks"]
    raise AssertionError(f"block_sizes.toml has no entry for every case of {kernel}.{implementation}")
