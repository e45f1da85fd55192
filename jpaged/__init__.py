"""Text generation from language models with a paged KV cache, in pure JAX.

The public names are looked up on first use, so that `jpaged.host` can be imported without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jpaged.checkpoint import load, save
    from jpaged.device.params import Params
    from jpaged.engine.engine import Engine
    from jpaged.engine.outputs import RequestOutput
    from jpaged.host.config import EngineConfig
    from jpaged.host.sampling_params import SamplingParams
    from jpaged.models.config import ModelConfig
    from jpaged.models.decoder import forward

_HOMES = {
    "Engine": "jpaged.engine.engine",
    "EngineConfig": "jpaged.host.config",
    "ModelConfig": "jpaged.models.config",
    "Params": "jpaged.device.params",
    "RequestOutput": "jpaged.engine.outputs",
    "SamplingParams": "jpaged.host.sampling_params",
    "forward": "jpaged.models.decoder",
    "load": "jpaged.checkpoint",
    "save": "jpaged.checkpoint",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "Params",
    "RequestOutput",
    "SamplingParams",
    "forward",
    "load",
    "save",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
