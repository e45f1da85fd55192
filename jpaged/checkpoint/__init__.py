"""Owns checkpoints: from published weights, in safetensors or GGUF, to `Params`, and back to safetensors."""

from jpaged.checkpoint.loader import load
from jpaged.checkpoint.saver import save
from jpaged.checkpoint.tensors import CheckpointError

__all__ = ["CheckpointError", "load", "save"]
