"""Owns how published checkpoints are described: the tensors that make up a weight of ours, shared config fields."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jpaged.models.config import RopeScaling

WHOLE = (...,)


class Part(NamedTuple):
    """A published tensor, by its name in safetensors and in GGUF files, and which part of our weight it holds."""

    hf: str
    gguf: str
    at: tuple = WHOLE  # indexes trailing axes only, so that `Weight.columns` holds for the part too
    rotary: bool = False  # rows are rotated by position: GGUF interleaves the two halves of each head


class Weight(NamedTuple):
    """One of our weights. `columns`: its axes that run along a row of the published matrices; (): these are vectors."""

    parts: tuple[Part, ...]
    columns: tuple[int, ...] = ()


def published_view(array: np.ndarray, weight: Weight, part: Part, *, gguf: bool) -> np.ndarray:
    """The elements of `part` inside `array` (one of our weights), in published order: row axes, then column axes.

    It is a view, never a copy, so it serves to read and to write. Its rows in C order are the rows of the tensor.
    """
    view = array[part.at]
    rows = [axis for axis in range(view.ndim) if axis not in weight.columns]
    view = view.transpose(*rows, *weight.columns)
    if part.rotary and gguf:
        head = len(rows) - 1  # the last row axis is head_dim: published pairs (i, i + head_dim / 2) lie side by side
        size = view.shape[head] // 2
        view = view.reshape(*view.shape[:head], 2, size, *view.shape[head + 1 :]).swapaxes(head, head + 1)
    assert np.may_share_memory(view, array) or not array.size
    return view


def published_shape(shape: tuple[int, ...], weight: Weight, part: Part) -> tuple[int, ...]:
    """The shape of the published tensor for `part` of a weight of ours with `shape`."""
    view = published_view(np.broadcast_to(np.int8(0), shape), weight, part, gguf=False)
    rows = view.ndim - len(weight.columns)
    return (math.prod(view.shape[:rows]), *([math.prod(view.shape[rows:])] if weight.columns else []))


def number(fields: Mapping[str, Any], name: str, kind: type = int, default: Any = None) -> Any:
    """A config field that must be a positive number of `kind` (int, or float, which takes ints too). Absent or null it
    is `default`, or an error when that is None."""
    if fields.get(name) is None:
        if default is not None:
            return default
        near = difflib.get_close_matches(name, fields, 1)
        raise ValueError(f"{name} is missing{f' (is it {near[0]}?)' if near else ''}: add it to the config")
    value = fields[name]
    least = "an integer of at least 1" if kind is int else "a positive number"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)) or not value > 0:
        raise ValueError(f"{name} must be {least}, got {value!r}")
    return kind(value)


def rope_from_hf(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None, int]:
    """(theta, scaling, longest sequence) out of a config.json, in the form of transformers 5 or an older one.

    transformers 5 writes `rope_parameters` with everything in it; before, `rope_theta` stood beside `rope_scaling`,
    whose kind was called `rope_type` or, older still, `type`.
    """
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name) or {}, Mapping):
            raise ValueError(f"{name} must be an object, got {fields[name]!r}")
        rope |= fields.get(name) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters per layer type are not supported for this architecture: {rope}")
    theta = number(rope, "rope_theta", float, number(fields, "rope_theta", float, 10_000.0))
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor must be 1 for this architecture, got {partial!r}")
    longest = number(fields, "max_position_embeddings")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None, longest

    original = number(rope, "original_max_position_embeddings", int, longest)
    if kind == "linear":  # for these two kinds max_position_embeddings stays what it was before stretching
        scaling = RopeScaling("linear", number(rope, "factor", float))
        return theta, scaling, int(longest * scaling.factor)
    if kind == "dynamic":
        scaling = RopeScaling("dynamic", number(rope, "factor", float), original_max_position=longest)
        return theta, scaling, int(longest * scaling.factor)
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            number(rope, "factor", float),
            original,
            low_freq_factor=number(rope, "low_freq_factor", float),
            high_freq_factor=number(rope, "high_freq_factor", float),
        )
        return theta, scaling, longest
    if kind == "yarn":
        given = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(name)]
        scaling = RopeScaling(
            "yarn",
            number(rope, "factor", float, longest / original),
            original,
            beta_fast=number(rope, "beta_fast", float, 32.0),
            beta_slow=number(rope, "beta_slow", float, 1.0),
            truncate=rope.get("truncate", True),
            **{name: number(rope, name, float) for name in given},
        )
        return theta, scaling, max(longest, int(original * scaling.factor))
    raise ValueError(f"rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3 and yarn")


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes them."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"):
            if getattr(scaling, name) is not None:
                fields[name] = getattr(scaling, name)
    return fields


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """The ids of a field that holds none, one or several."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)
