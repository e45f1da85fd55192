"""Owns generation_config.json: how those who published a model draw from it, read and written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.host.sampling_params import SamplingParams
from jpaged.models.config import ModelConfig

log = logging.getLogger("jpaged")

# The published names, and those of `SamplingParams`. Beams are no default: an engine must be built for them.
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
ONLY_WHEN_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}


def sampling_defaults(fields: Mapping[str, Any], file: Path) -> tuple[tuple[str, float], ...]:
    """`ModelConfig.sampling_defaults` of a file's fields. A value that cannot be served is left out, with a warning."""
    if fields.get("do_sample") is False:
        fields = {**fields, "temperature": 0}
    found = []
    for published, name in NAMES.items():
        value = fields.get(published)
        if value is None:
            continue
        try:
            found.append((name, getattr(SamplingParams(**{name: value}), name)))
        except ValueError as error:
            log.warning("%s: %s is left out of the model's sampling defaults: %s", file, published, error)
    return tuple(found)


def generation_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that `load` reads back as those of `config`."""
    ours = dict(config.sampling_defaults)
    fields: dict[str, Any] = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}
    if ours.keys() & ONLY_WHEN_SAMPLING:
        fields["do_sample"] = ours.get("temperature") != 0
    if ours.get("temperature") == 0:
        del ours["temperature"]  # transformers refuses it: do_sample says it
    fields |= {published: ours.get(name) for published, name in NAMES.items()}
    return {name: value for name, value in fields.items() if value is not None}
