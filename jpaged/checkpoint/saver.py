"""Owns `save`: from `Params` to a directory that Hugging Face tools and `load` read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.assembly import paths, published_name, weight_for
from jpaged.checkpoint.generation_config import generation_fields
from jpaged.checkpoint.loader import FAMILIES
from jpaged.checkpoint.safetensors import DTYPES, INDEX, SINGLE
from jpaged.device.params import Params, weight_shapes
from jpaged.models.config import ModelConfig
from jpaged.models.published import Weight, published_shape, published_view

SHARD_BYTES = 4 << 30  # a file holds at least one weight, and no more bytes than this if it holds several


def save(params: Params, path: str | os.PathLike) -> None:
    """Write `params` as a Hugging Face directory: safetensors, config.json and generation_config.json.

    The dtype of each weight stays. The tokenizer is not written: copy its files from where the model came from.
    `path` must not exist, or be an empty directory. It appears complete or not at all.

    Raises: ValueError for a path in use, or weights that don't have the shapes of `params.config`.
    """
    path, config = Path(path), params.config
    if config.architecture not in FAMILIES:
        raise ValueError(f"architecture {config.architecture} has no published form; known are {', '.join(FAMILIES)}")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists already: save to a new path, or remove it first")
    fields = FAMILIES[config.architecture].config_to_hf(config)
    leaves = dict(paths(params.weights))
    _check(leaves, config)
    fields["dtype"] = str(leaves["head"].dtype)

    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        _write_json(unfinished / "config.json", fields)
        _write_json(unfinished / "generation_config.json", generation_fields(config))
        _write_weights(unfinished, leaves, config)
        os.rename(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _check(leaves: dict[str, Any], config: ModelConfig) -> None:
    shapes = dict(paths(weight_shapes(config)))
    if leaves.keys() != shapes.keys():
        raise ValueError(
            f"weights and config differ in {sorted(leaves.keys() ^ shapes.keys())}: pass the model's config"
        )
    for path, leaf in leaves.items():
        if getattr(leaf, "shape", None) != shapes[path] or leaf.dtype not in DTYPES.values():
            raise ValueError(f"weight {path} must be an array of floats of shape {shapes[path]}, got {leaf!r:.80}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _write_weights(directory: Path, leaves: dict[str, Any], config: ModelConfig) -> None:
    family = FAMILIES[config.architecture]
    shards: list[dict[str, tuple[Weight, Any]]] = []
    for path, leaf in leaves.items():
        if not shards or sum(other.nbytes for _, other in shards[-1].values()) + leaf.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][path] = weight_for(path, config, family), leaf
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(_write_safetensors(directory / name, shard), name)
    if len(shards) > 1:
        total = sum(leaf.nbytes for leaf in leaves.values())
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _write_safetensors(file: Path, weights: dict[str, tuple[Weight, Any]]) -> list[str]:
    """Write one file, a weight at a time, and return the names in it."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    offset = 0
    for path, (weight, leaf) in weights.items():
        for part in weight.parts:
            shape = published_shape(leaf.shape, weight, part)
            end = offset + int(np.prod(shape)) * leaf.dtype.itemsize
            name = published_name(path, part, gguf=False)
            header[name] = {"dtype": names[leaf.dtype], "shape": shape, "data_offsets": (offset, end)}
            offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(file, "wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for piece in _pieces(weights):
            out.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
    return list(header)[1:]


def _pieces(weights: dict[str, tuple[Weight, Any]]) -> Iterator[np.ndarray]:
    for weight, leaf in weights.values():
        array = np.asarray(leaf)
        for part in weight.parts:
            yield published_view(array, weight, part, gguf=False)
