"""What cannot be loaded: each error names the file, the tensor and the cure, before any weight is made."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import jpaged.checkpoint.assembly as assembly
from jpaged.checkpoint import CheckpointError, load

DATA = Path(__file__).parents[1] / "data"
LLAMA = DATA / "checkpoints" / "llama"
SHARD = "model-00002-of-00010.safetensors"


@pytest.fixture(autouse=True)
def no_weight_is_made(monkeypatch):
    def make(*_, **__):
        raise AssertionError("weights were made of a broken checkpoint")

    monkeypatch.setattr(assembly, "make", make)


def refused(path, *words: str, **options) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(path, **options)
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.fixture
def sharded(tmp_path) -> Path:
    shutil.copytree(LLAMA, tmp_path / "model")
    return tmp_path / "model"


def test_a_missing_shard_is_named(sharded):
    (sharded / SHARD).unlink()
    refused(sharded, SHARD, "missing", "model.layers.0.", "download")


def test_a_truncated_shard_is_named_with_the_tensor(sharded):
    file = sharded / SHARD
    file.write_bytes(file.read_bytes()[:-1])
    refused(sharded, SHARD, "truncated", "model.layers.0.", "download")


@pytest.mark.parametrize("size", [0, 7, 100])
def test_a_file_cut_inside_its_header_is_refused(sharded, size):
    (sharded / SHARD).write_bytes((sharded / SHARD).read_bytes()[:size])
    refused(sharded, SHARD, "truncated", "download")


@pytest.mark.parametrize("header", [b"not JSON", b"[]", b'{"x": {"dtype": "F32"}}', b'{"x": 1}', b"\xff"])
def test_a_corrupt_header_is_refused(sharded, header):
    (sharded / SHARD).write_bytes(len(header).to_bytes(8, "little") + header)
    refused(sharded, SHARD, "corrupt", "download")


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_refused(sharded):
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (sharded / SHARD).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    refused(sharded, SHARD, "tensor x", "corrupt")


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.norm.weight"] = SHARD
    index.write_text(json.dumps(value))
    refused(sharded, SHARD, "model.norm.weight", "missing")
    index.write_text("{}")
    refused(sharded, index.name, "weight_map")


def test_a_missing_tensor_is_named(make_checkpoint):
    directory = make_checkpoint(tensors={"model.layers.1.mlp.up_proj.weight": ...})
    refused(directory, str(directory), "tensor model.layers.1.mlp.up_proj.weight is missing")


def test_many_missing_tensors_are_counted_and_some_named(make_checkpoint):
    directory = make_checkpoint(config={"num_hidden_layers": 5})
    refused(directory, "18 tensors", "model.layers.3.input_layernorm.weight", "...", "missing")


def test_a_head_that_is_neither_stored_nor_tied_is_missing(make_checkpoint):
    refused(make_checkpoint(tensors={"lm_head.weight": ...}), "lm_head.weight", "missing")


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(make_checkpoint):
    directory = make_checkpoint(tensors={"model.norm.weight": np.ones(65, np.float32)})
    refused(directory, "model.safetensors", "model.norm.weight", "(65,)", "(64,)")
    # As many numbers as expected, but the other way round:
    turned = {"model.layers.0.mlp.down_proj.weight": np.ones((96, 64), np.float32)}
    refused(make_checkpoint(tensors=turned), "down_proj.weight", "(96, 64)", "(64, 96)")


def test_a_config_that_does_not_fit_the_weights_is_refused(make_checkpoint):
    refused(make_checkpoint(config={"num_key_value_heads": 4}), "k_proj.weight", "(32, 64)", "(64, 64)", "more like it")


def test_unexpected_tensors_are_listed(make_checkpoint):
    extra = np.ones(64, np.float32)
    refused(make_checkpoint(tensors={"model.layers.0.q_norm.weight": extra}), "model.layers.0.q_norm.weight")
    refused(make_checkpoint("llama_bias", config={"mlp_bias": False}), "9 tensors", "gate_proj.bias", "unexpected")


def test_a_tied_head_that_differs_from_the_embedding_is_refused(make_checkpoint):
    directory = make_checkpoint("llama_tied", tensors={"lm_head.weight": np.ones((320, 64), np.float32)})
    refused(directory, "lm_head.weight", "tie_word_embeddings")


def test_weights_that_are_not_floats_are_refused(make_checkpoint):
    directory = make_checkpoint(tensors={"model.norm.weight": np.ones(64, np.int8)})
    refused(directory, "model.norm.weight", "I8")


def test_an_unsupported_architecture_lists_the_supported_ones(make_checkpoint):
    refused(DATA / "checkpoints" / "weights_bfloat16", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
    refused(make_checkpoint(config={"architectures": ...}), "config.json", "architectures", "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}, "rope_parameters": ...}, ["'longrope'", "yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["per layer type"]),
        ({"rope_parameters": 7}, ["rope_parameters", "7"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "at least 1"]),
        ({"num_key_value_heads": 3}, ["num_q_heads (4)", "multiple"]),
        ({"head_dim": None, "hidden_size": 66}, ["66", "4 heads"]),
        ({"hidden_act": "relu2"}, ["relu2", "silu"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "not yet supported"]),
    ],
)
def test_a_config_that_cannot_be_served_names_the_field_and_the_value(make_checkpoint, config, words):
    refused(make_checkpoint(config=config), "config.json", *words)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{", "[1]"])
def test_corrupt_json_is_named(sharded, name, text):
    (sharded / name).write_text(text)
    refused(sharded, str(sharded / name), "JSON", "download")


def test_directories_without_a_checkpoint_say_what_is_missing(tmp_path):
    refused(tmp_path, str(tmp_path), "empty")
    shutil.copy(LLAMA / "config.json", tmp_path)
    refused(tmp_path, "no weights", "safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "pytorch_model.bin", "save_pretrained")
    shutil.copy(LLAMA / SHARD, tmp_path)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "config.json", "missing")


def test_several_weight_files_without_an_index_are_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, SHARD, "index.json")


def test_several_gguf_files_in_a_directory_are_refused(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(DATA / "gguf" / "llama_legacy.gguf", tmp_path / name)
    refused(tmp_path, "a.gguf, b.gguf", "pass the path of one")


def test_every_cut_of_a_gguf_file_is_refused(tmp_path):
    whole = (DATA / "gguf" / "llama_legacy.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for size in [0, 3, 10, 23, 24, *range(30, len(whole), 997), len(whole) - 33]:
        file.write_bytes(whole[:size])
        refused(file, "cut.gguf", "truncated", "download")


def test_files_that_are_no_gguf_of_a_known_version_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\3\4" * 9)
    refused(file, "model.gguf", "not a GGUF file")
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    refused(file, "version 1")
    file.write_bytes(b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"x", 99))
    refused(file, "corrupt")
    refused(LLAMA / SHARD, "not a GGUF file", "directory")


FIELDS = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture
def make_gguf(tmp_path):
    def make(fields: dict | None = None, tensors: dict | None = None, architecture: str = "llama") -> Path:
        path = tmp_path / "made.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for name, value in (FIELDS | (fields or {})).items():
            if isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)
            elif value is not ...:
                writer.add_uint32(name, value)
        square = np.ones((32, 32), np.float32)
        made = {f"blk.0.{name}.weight": square for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        made |= {f"blk.0.ffn_{name}.weight": square for name in ("gate", "up", "down")}
        made |= {f"{name}.weight": square[0] for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
        made |= {"token_embd.weight": np.ones((50, 32), np.float32)}
        for name, value in (made | (tensors or {})).items():
            if value is not ...:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.embedding_length": ...}, ["embedding_length", "missing"]),
        ({"llama.attention.head_count_kv": [1, 2]}, ["head_count_kv", "[1, 2]"]),
        ({"llama.expert_count": 8}, ["expert_count", "8", "mixtures"]),
        ({"llama.rope.dimension_count": 8}, ["rope.dimension_count", "8", "16"]),
        ({"llama.rope.scaling.type": "longrope"}, ["longrope", "yarn"]),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, ["attn_factor", "2.0"]),
        ({"split.count": 2}, ["split", "merge"]),
    ],
)
def test_gguf_metadata_that_cannot_be_served_names_the_field(make_gguf, fields, words):
    refused(make_gguf(fields), "made.gguf", *words)


def test_gguf_files_with_wrong_tensors_name_them(make_gguf):
    refused(make_gguf(tensors={"token_embd.weight": ...}), "made.gguf", "token_embd.weight", "missing")
    refused(make_gguf(tensors={"blk.0.attn_q.weight": ...}), "made.gguf", "blk.0.attn_q.weight", "missing")
    refused(make_gguf(tensors={"blk.0.attn_q.weight": np.ones((8, 8), np.float32)}), "made.gguf", "(8, 8)", "(32, 32)")
    refused(make_gguf(tensors={"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}), "attn_q_norm", "unexpected")
    refused(make_gguf(tensors={"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}), "rope_freqs.weight", "Llama 3")
    refused(make_gguf(tensors={"output_norm.weight": np.ones(32, np.int8)}), "output_norm.weight", "I8", "quantisation")


def test_a_gguf_of_another_architecture_lists_the_supported_ones(make_gguf):
    refused(make_gguf(architecture="gemma"), "'gemma'", "llama")


def test_what_is_neither_a_path_nor_a_hub_id_is_refused(tmp_path):
    for path in (str(tmp_path / "nowhere"), "nowhere", "a/b/c", tmp_path / "x", "org/na me"):
        refused(path, str(path), "neither an existing path nor a hub id")
    refused("", "path_or_id")
    refused(None, "path_or_id", "None")


def test_a_revision_of_a_local_path_is_refused():
    refused(LLAMA, "revision", "'main'", revision="main")


@pytest.mark.parametrize("dtype", ["int8", "float8", np.float64, 7])
def test_a_dtype_that_is_no_dtype_of_weights_is_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype must be one of float32, bfloat16, float16"):
        load(LLAMA, dtype=dtype)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0]},
        {"data_offsets": ["a", "b"]},
        {"data_offsets": [-4, 0]},  # would read the header as a weight
        {"shape": "ab"},
        {"shape": [1.0]},
        {"dtype": ["F32"]},
    ],
)
def test_an_entry_of_a_header_that_makes_no_sense_is_refused(sharded, change):
    header = json.dumps({"x": ENTRY | change}).encode()
    (sharded / SHARD).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(sharded, SHARD, "corrupt header", "download")


def test_a_header_nested_without_end_is_refused(sharded):
    (sharded / SHARD).write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)
    refused(sharded, SHARD, "corrupt header")


def test_a_link_to_a_weight_file_that_is_gone_is_named(tmp_path):
    shutil.copy(LLAMA / "config.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to("gone")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "."}}')
    refused(tmp_path, "cannot be read", "Is a directory")
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "model.safetensors", "cannot be read", "No such file")


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "trunc'])
def test_a_broken_tokenizer_is_named(sharded, content):
    (sharded / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json cannot be read.*download"):
        load(sharded)


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "x" * 5000])
def test_a_name_that_can_be_no_path_is_refused(name):
    refused(name, name[:200], "cannot be looked up")
