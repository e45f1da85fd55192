"""Text generation from language models with a paged KV cache, in pure JAX.

The public names are looked up on first use, so that `jpaged.host` can be imported without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jpaged.checkpoint import load as load
    from jpaged.device.params import Params as Params
    from jpaged.engine.api import generate as generate
    from jpaged.engine.api import stream as stream
    from jpaged.engine.engine import Engine as Engine
    from jpaged.engine.llm import LLM as LLM
    from jpaged.engine.outputs import CompletionOutput as CompletionOutput
    from jpaged.engine.outputs import RequestOutput as RequestOutput
    from jpaged.engine.session import Session as Session
    from jpaged.host.config import EngineConfig as EngineConfig
    from jpaged.host.metrics import EngineStats as EngineStats
    from jpaged.host.sampling_params import SamplingParams as SamplingParams
    from jpaged.host.structured import Structured as Structured
    from jpaged.models.config import ModelConfig as ModelConfig
    from jpaged.models.decoder import forward as forward

_HOMES = {
    "CompletionOutput": "jpaged.engine.outputs",
    "Engine": "jpaged.engine.engine",
    "EngineConfig": "jpaged.host.config",
    "EngineStats": "jpaged.host.metrics",
    "LLM": "jpaged.engine.llm",
    "ModelConfig": "jpaged.models.config",
    "Params": "jpaged.device.params",
    "RequestOutput": "jpaged.engine.outputs",
    "SamplingParams": "jpaged.host.sampling_params",
    "Session": "jpaged.engine.session",
    "Structured": "jpaged.host.structured",
    "forward": "jpaged.models.decoder",
    "generate": "jpaged.engine.api",
    "load": "jpaged.checkpoint",
    "stream": "jpaged.engine.api",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ModelConfig",
    "Params",
    "RequestOutput",
    "SamplingParams",
    "Session",
    "Structured",
    "forward",
    "generate",
    "load",
    "stream",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
