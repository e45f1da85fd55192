"""Owns reading Hugging Face directories: JSON files, the index of shards, where tensors lie in safetensors files.

The header of a safetensors file is one JSON object. It is read here because the package maps the whole file and gives
bfloat16 to NumPy in no form.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.checkpoint.tensors import CheckpointError, StoredTensor, check_extent

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing: a checkpoint directory needs it, copy it beside the weights") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): download it again") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}: download it again")
    return value


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory by name. An index decides which files count; without one, it is `model.safetensors`,
    or the only safetensors file there is."""
    if (directory / INDEX).exists():
        return _read_shards(directory)
    files = [directory / SINGLE] if (directory / SINGLE).exists() else sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_safetensors(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{directory}: several weight files ({names}) and no {INDEX}: copy the index there")
    old = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if old:
        raise CheckpointError(
            f"{directory}: the weights are PyTorch pickles ({old[0]}), which can run code when opened: save them as "
            "safetensors (model.save_pretrained(path) of transformers does)"
        )
    raise CheckpointError(f"{directory}: no weights (*.safetensors, or one .gguf file) in it: check the path")


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index}: has no weight_map of tensor names to file names: download it again")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(names.values())):
        listed = [name for name in names if names[name] == file]
        if not (directory / file).exists():
            raise CheckpointError(
                f"{directory / file}: missing, {index.name} says it holds {len(listed)} tensors ({listed[0]}, ...): "
                "download it again"
            )
        shard = read_safetensors(directory / file)
        for name in listed:
            if name not in shard:
                raise CheckpointError(f"{directory / file}: tensor {name} is missing, which {index.name} says is in it")
            tensors[name] = shard[name]
    return tensors


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name. Format: github.com/huggingface/safetensors, README.md."""
    try:
        file = open(path, "rb")
    except OSError as error:  # a link into a cache that was cleared
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): download it again") from None
    with file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise CheckpointError(f"{path}: truncated, its header does not fit in {size} bytes: download it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [(name, *_entry(**fields)) for name, fields in header.items()]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: corrupt header ({error!r}): download it again") from None
    return {entry[0]: _stored(path, size, 8 + length, *entry) for entry in entries}


def _entry(dtype: str, shape: list[int], data_offsets: list[int]) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = data_offsets
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"dtype {dtype!r}, shape {shape!r}, data_offsets {data_offsets!r}")
    return dtype, tuple(shape), begin, end


def _stored(
    path: Path, size: int, start: int, name: str, stored_as: str, shape: tuple[int, ...], begin: int, end: int
) -> StoredTensor:
    dtype = DTYPES.get(stored_as)
    item = dtype.itemsize if dtype else 0
    if dtype and math.prod(shape) * item != end - begin:
        raise CheckpointError(
            f"{path}: corrupt, tensor {name} of {stored_as} {shape} has {end - begin} bytes: download it again"
        )
    row_bytes = shape[-1] * item if shape else item
    decode = functools.partial(np.ndarray.view, dtype=dtype) if dtype else None
    return check_extent(StoredTensor(name, path, start + begin, shape, row_bytes, stored_as, decode), size)
