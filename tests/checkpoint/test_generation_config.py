"""The sampling defaults of a published model: read, kept, written, and what can't be served of them left out."""

from __future__ import annotations

import json
import logging

import pytest

from jpaged.checkpoint import load, save
from jpaged.host.sampling_params import SamplingParams


@pytest.fixture
def load_with(make_checkpoint):
    """Params of a small checkpoint with a generation_config.json of these fields."""

    def load_it(fields):
        directory = make_checkpoint()
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **fields}))
        return load(directory)

    return load_it


LLAMA3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
QWEN = LLAMA3 | {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 512, "min_p": 0.01}
QWEN_DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("fields", "defaults"),
    [
        ({}, {}),
        (LLAMA3, {"temperature": 0.6, "top_p": 0.9}),
        (QWEN, QWEN_DEFAULTS | {"max_tokens": 512}),
        ({"temperature": 1, "top_k": 0}, {"temperature": 1, "top_k": 0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        (LLAMA3 | {"do_sample": False}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": None, "temperature": None, "top_k": None}, {}),
        ({"num_beams": 4, "typical_p": 0.9, "max_length": 20, "use_cache": True, "n": 3}, {}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_sampling_defaults_are_read_and_survive_a_save(load_with, fields, defaults, tmp_path, caplog):
    params = load_with(fields)
    assert dict(params.config.sampling_defaults) == defaults
    assert params.default_sampling() == SamplingParams(**defaults)
    save(params, tmp_path / "copy")
    assert load(tmp_path / "copy").config == params.config
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", "0.6"),
        ("temperature", float("nan")),
        ("top_k", 20.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", [0.9]),
        ("min_p", 2),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", -1),
    ],
)
def test_a_value_that_cannot_be_served_is_left_out_with_a_warning(load_with, name, value, caplog):
    with caplog.at_level(logging.WARNING, "jpaged"):
        params = load_with({"min_p": 0.5, "top_k": 7, name: value})
    expected = {"top_k": 7, "min_p": 0.5}
    expected.pop(name, None)
    assert dict(params.config.sampling_defaults) == expected
    (record,) = caplog.records
    assert f"generation_config.json: {name} is left out" in record.getMessage() and repr(value) in record.getMessage()


def test_what_is_saved_is_how_transformers_writes_it(load_with, tmp_path):
    for fields in (QWEN, {"do_sample": False, "top_k": 3}, {"repetition_penalty": 1.2}):
        save(load_with(fields), tmp_path / str(len(fields)))
        written = json.loads((tmp_path / str(len(fields)) / "generation_config.json").read_text())
        assert written == {"bos_token_id": 1, "eos_token_id": [2], **fields}
