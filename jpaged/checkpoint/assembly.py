"""Owns making our weights out of published tensors: all checked first, then each put on its device in turn."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jpaged.checkpoint.tensors import CheckpointError, StoredTensor, read_rows
from jpaged.device.params import weight_shapes
from jpaged.models.config import ModelConfig
from jpaged.models.published import Part, Weight, published_shape, published_view

BLOCK_BYTES = 2 << 20  # of float32 that are decoded at a time: small beside any weight, and stays in cache
MAX_THREADS = 4
ALIGNMENT = 64


class Planned(NamedTuple):
    """A weight to be made."""

    path: str  # "layers.0.q"
    shape: tuple[int, ...]
    weight: Weight
    sources: tuple[StoredTensor, ...]  # one for each part
    sharding: jax.sharding.Sharding | None


def plan(
    config: ModelConfig, family: Any, tensors: Mapping[str, StoredTensor], origin: Any, *, gguf: bool, sharding: Any
) -> list[Planned]:
    """Every weight with its sources, or an error that lists what is missing, misshapen or left over."""
    planned, used, missing, wrong = [], set(), [], []
    for path, shape in paths(weight_shapes(config)):
        weight = weight_for(path, config, family)
        names = [published_name(path, part, gguf=gguf) for part in weight.parts]
        for name, part in zip(names, weight.parts, strict=True):
            if name not in tensors:
                missing.append(name)
                continue
            expected = published_shape(shape, weight, part)
            tensor = tensors[name]
            if tensor.shape != expected:
                wrong.append(f"{tensor.file}: tensor {name} has shape {tensor.shape}, expected {expected}")
            elif tensor.decode is None:
                wrong.append(f"{tensor.file}: tensor {name} is stored as {tensor.stored_as}, not as floats")
        used.update(names)
        if not missing and not wrong:
            sources = tuple(tensors[name] for name in names)
            planned.append(Planned(path, shape, weight, sources, sharding_for(sharding, path, shape)))
    if missing:
        raise CheckpointError(
            f"{origin}: {_some(missing)} missing, which the config asks for: download the rest, or fix the config"
        )
    if wrong:
        more = f" (and {len(wrong) - 1} more like it)" if wrong[1:] else ""
        raise CheckpointError(f"{wrong[0]}{more}: config and weights don't match, take both from one checkpoint")
    head = family.WEIGHTS["head"].parts[0].hf
    if config.tie_embeddings and head in tensors:  # many exporters write the tied head out all the same
        _check_same(tensors[head], tensors[family.TIED_HEAD.parts[0].hf])
        used.add(head)
    extra = sorted(name for name in tensors if name not in used and not name.endswith(family.IGNORED_SUFFIXES))
    if extra:
        raise CheckpointError(
            f"{origin}: {_some(extra)} unexpected, a {config.architecture} with this config has no such weights: "
            "fix the config, or remove them"
        )
    return planned


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]} is"
    return f"{len(names)} tensors ({', '.join(names[:8])}{', ...' if names[8:] else ''}) are"


def _check_same(head: StoredTensor, embed: StoredTensor) -> None:
    same = head.shape == embed.shape and head.decode is not None
    step = max(1, BLOCK_BYTES // embed.row_bytes)
    for start in range(0, embed.num_rows, step):
        stop = min(start + step, embed.num_rows)
        same = same and np.array_equal(read_rows(head, start, stop), read_rows(embed, start, stop), equal_nan=True)
    if not same:
        raise CheckpointError(
            f"{head.file}: tensor {head.name} differs from the embedding, yet the config ties them: "
            "set tie_word_embeddings to false in config.json, or remove the tensor"
        )


def published_name(path: str, part: Part, *, gguf: bool) -> str:
    """The name of `part` of the weight at `path`, a layer's index filled in."""
    index = re.search(r"\d+", path)
    return (part.gguf if gguf else part.hf).format(i=index and index[0])


def weight_for(path: str, config: ModelConfig, family: Any) -> Weight:
    if path == "head" and config.tie_embeddings:
        return family.TIED_HEAD
    return family.WEIGHTS[re.sub(r"\d+", "{i}", path)]


def paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of weights (or of their shapes) by dotted path."""
    for key, value in tree.items():
        if key == "layers":
            for i, layer in enumerate(value):
                yield from paths(layer, f"{prefix}layers.{i}.")
        else:
            yield prefix + key, value


def sharding_for(sharding: Any, path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
    """What the `sharding` given to `load` says for one weight."""
    if callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
        sharding = sharding(path, shape)
    for key in path.split("."):
        if not isinstance(sharding, (Mapping, tuple, list)):
            break
        try:
            index: Any = key if isinstance(sharding, Mapping) else int(key)
            sharding = sharding[index]
        except (KeyError, IndexError, ValueError):
            raise ValueError(
                f"sharding has nothing for weight {path}: add it, or None for the default device"
            ) from None
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise ValueError(f"sharding for weight {path} must be a jax Sharding or None, got {sharding!r}")
    if sharding is not None:
        try:
            sharding.shard_shape(shape)
        except (ValueError, IndexError) as error:  # IndexError: its spec has more axes than the weight
            raise ValueError(f"{sharding} does not fit weight {path} of shape {shape}: {error}") from None
    return sharding


def make(planned: list[Planned], dtype: np.dtype, *, gguf: bool) -> dict[str, Any]:
    """The tree of weights, on their devices. The host holds one weight at a time, and a few blocks of its sources."""
    tree: dict[str, Any] = {}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for item in planned:
            array = _aligned(item.shape, dtype)
            jobs = []
            for part, source in zip(item.weight.parts, item.sources, strict=True):
                view = published_view(array, item.weight, part, gguf=gguf)
                jobs += [(source, *block) for block in blocks(view, len(item.weight.columns))]
            list(pool.map(_fill, jobs))
            _insert(tree, item.path, _to_device(array, item.sharding))
    tree["layers"] = tuple(tree["layers"][i] for i in range(len(tree["layers"])))
    return tree


def blocks(view: np.ndarray, num_columns: int, start: int = 0) -> Iterator[tuple[np.ndarray, int, int]]:
    """`view` (row axes, then `num_columns` column axes) in pieces of about BLOCK_BYTES: (piece, first row, end row)."""
    row_axes = view.ndim - num_columns
    num_rows = math.prod(view.shape[:row_axes]) if num_columns else 1  # a vector is one row
    if not num_columns or row_axes == 0 or view.size * 4 <= BLOCK_BYTES:
        yield view, start, start + num_rows
        return
    rows_each = num_rows // view.shape[0]
    step = BLOCK_BYTES * view.shape[0] // (view.size * 4)
    for first in range(0, view.shape[0], max(step, 1)):
        piece, at = view[first : first + max(step, 1)], start + first * rows_each
        if step == 0 and row_axes > 1:
            yield from blocks(piece[0], num_columns, at)
        else:
            yield piece, at, at + len(piece) * rows_each


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at the alignment from which the CPU backend adopts memory instead of copying it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _fill(job: tuple[StoredTensor, np.ndarray, int, int]) -> None:
    source, view, start, stop = job
    view[...] = read_rows(source, start, stop).reshape(view.shape)


def _to_device(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        placed = jax.device_put(array)
    else:  # each device takes its own piece
        placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    # `array` is dropped now: what a device adopted belongs to it alone.
    return placed.block_until_ready()  # else copies under way pile up on the host


def _insert(tree: dict[Any, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        tree = tree.setdefault(int(key) if key.isdigit() else key, {})
    tree[last] = value
