"""Owns `Target`: the kind of device that a kernel is traced for."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
from jax.sharding import get_abstract_mesh


class Target(NamedTuple):
    """What the choice of a kernel and of its block sizes depends on."""

    platform: str  # "cpu", "cuda", ...
    capability: tuple[int, int] | None  # of an NVIDIA GPU
    device_kind: str
    num_cores: int  # streaming multiprocessors


# What an interpreted kernel takes itself to run on: a Hopper.
INTERPRETED = Target("cuda", (9, 0), "interpreted", 132)


def current_target() -> Target:
    """The device that the function being traced will run on.

    That of the abstract mesh in force, which tells of devices that are not there, else `jax.default_device`, else the
    first device of the default backend.
    """
    device = get_abstract_mesh().abstract_device
    if device is None or device.platform is None:
        device = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
    platform, capability = device.platform, None
    if platform in ("gpu", "cuda"):
        # GPUs of other makers are "gpu" too, and have names for capabilities.
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        platform = "cuda" if found else "gpu"
        capability = (int(found[1]), int(found[2])) if found else None
    return Target(platform, capability, device.device_kind, getattr(device, "core_count", 0) or 0)
