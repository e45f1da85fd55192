"""Owns `load`: from a path or hub id to `Params`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.checkpoint import assembly
from jpaged.checkpoint.generation_config import sampling_defaults
from jpaged.checkpoint.hub import resolve
from jpaged.checkpoint.safetensors import read_json, read_tensors
from jpaged.checkpoint.tensors import CheckpointError, StoredTensor, read_rows
from jpaged.device.params import Params
from jpaged.models import llama
from jpaged.models.config import ModelConfig

FAMILIES = {"LlamaForCausalLM": llama, "MistralForCausalLM": llama}
GGUF_FAMILIES = {"llama": llama}
DTYPES = ("float32", "bfloat16", "float16")


def load(
    path_or_id: str | os.PathLike, *, dtype: Any = None, sharding: Any = None, revision: str | None = None
) -> Params:
    """Load a checkpoint: a Hugging Face directory (safetensors), a GGUF file or a directory with one, or a hub id.

    Args:
        path_or_id: A path on this machine, or "org/name" on the Hugging Face hub, downloaded or taken from its cache.
        dtype: Of the weights: float32, bfloat16 or float16. None: float32 on the CPU, bfloat16 elsewhere.
        sharding: Where weights are made: None (the default device), a `jax.sharding.Sharding` for all, a function
            `(path, shape) -> Sharding or None` with paths like "layers.0.q", or a tree like `Params.weights`, where a
            sharding may stand for all that is below it.
        revision: Of the hub repository: a branch, tag or commit.

    Returns: `Params`, whose tokenizer is None if the checkpoint has none.
    Raises: ValueError (`CheckpointError`) that names the file, the tensor and the cure. Nothing stays half loaded.

    Weights go to their devices one after the other, so that the host holds little more than the largest of them.
    """
    if dtype is not None and str(_as_dtype(dtype)) not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}")
    path = resolve(path_or_id, revision)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not any(path.glob("*.safetensors*")):
            if len(ggufs) > 1:
                names = ", ".join(file.name for file in ggufs)
                raise CheckpointError(f"{path}: holds several GGUF files ({names}): pass the path of one")
            path = ggufs[0]
    return (_load_directory if path.is_dir() else _load_gguf)(path, dtype, sharding)


def _load_directory(path: Path, dtype: Any, sharding: Any) -> Params:
    if not any(path.iterdir()):
        raise CheckpointError(f"{path}: the directory is empty: check the path")
    fields = read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    architecture = _architecture(fields, path / "config.json")
    if fields.get("quantization_config"):
        raise CheckpointError(
            f"{path / 'config.json'}: has a quantization_config, and quantised checkpoints are not yet supported: "
            "load the unquantised one, or a GGUF file"
        )
    family = FAMILIES[architecture]
    try:
        config = family.config_from_hf(architecture, fields, generation)
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    config = dataclasses.replace(config, sampling_defaults=sampling_defaults(generation, generation_file))
    tensors = read_tensors(path)

    def tokenizer() -> Any:
        from jpaged.host.tokenizer import Tokenizer

        return Tokenizer.from_directory(path)

    return _assemble(path, config, family, tensors, tokenizer, dtype, sharding, gguf=False)


def _architecture(fields: dict[str, Any], file: Path) -> str:
    names = fields.get("architectures") or []
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{file}: names no architectures: add one of {known}")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise CheckpointError(f"{file}: architecture {names[0]} is not supported; supported are {known}")
    return names[0]


def _load_gguf(path: Path, dtype: Any, sharding: Any) -> Params:
    from jpaged.checkpoint.gguf import read_gguf  # here: slow to import, and only these files need it

    fields, tensors = read_gguf(path)
    architecture = fields.get("general.architecture")
    if architecture not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise CheckpointError(f"{path}: GGUF architecture {architecture!r} is not supported; supported are {known}")
    if fields.get("split.count", 1) > 1:
        raise CheckpointError(f"{path}: one of {fields['split.count']} split files: merge them (gguf-split --merge)")
    family = GGUF_FAMILIES[architecture]
    rope_freqs = read_rows(tensors["rope_freqs.weight"])[0] if "rope_freqs.weight" in tensors else None
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        config = family.config_from_gguf(fields, shapes, rope_freqs)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error

    def tokenizer() -> Any:
        if "tokenizer.ggml.tokens" not in fields:
            return None
        from jpaged.host.tokenizer import Tokenizer

        return Tokenizer.from_gguf(fields)

    return _assemble(path, config, family, tensors, tokenizer, dtype, sharding, gguf=True)


def _assemble(
    origin: Path,
    config: ModelConfig,
    family: Any,
    tensors: dict[str, StoredTensor],
    tokenizer: Any,
    dtype: Any,
    sharding: Any,
    *,
    gguf: bool,
) -> Params:
    planned = assembly.plan(config, family, tensors, origin, gguf=gguf, sharding=sharding)
    made_tokenizer = tokenizer()  # before the weights: it fails sooner
    weights = assembly.make(planned, _as_dtype(dtype or _default_dtype(planned)), gguf=gguf)
    return Params(weights, config, made_tokenizer)


def _as_dtype(dtype: Any) -> np.dtype:
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}") from None


def _default_dtype(planned: list[assembly.Planned]) -> str:
    shardings = [item.sharding for item in planned if item.sharding is not None]
    devices = shardings[0].device_set if shardings else jax.device_put(np.zeros(())).devices()
    return "float32" if next(iter(devices)).platform == "cpu" else "bfloat16"
