"""Loading published checkpoints: every config field and every weight, against the files read by other means."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jpaged.checkpoint.assembly as assembly
from jpaged.checkpoint import load, save
from jpaged.device.params import Params, weight_shapes
from jpaged.models.config import ModelConfig, RopeScaling

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = DATA / "checkpoints"
TINY = dict(
    architecture="LlamaForCausalLM",
    vocab_size=320,
    d_model=64,
    d_ff=96,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=256,
    norm_eps=1e-6,
    bos_token_id=1,
    eos_token_ids=(2,),
)
SMALL = TINY | dict(d_model=32, d_ff=48, num_layers=2, head_dim=8)
LLAMA3 = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
CONFIGS = {
    "llama": TINY,
    "llama_bias": TINY | dict(attention_bias=True, output_bias=True, mlp_bias=True),
    "llama_mqa": TINY | dict(num_kv_heads=1),
    "llama_tied": TINY | dict(tie_embeddings=True),
    "llama_rope_linear": TINY | dict(rope_scaling=RopeScaling("linear", 4.0), max_position=1024),
    "llama_rope_llama3": TINY | dict(rope_scaling=LLAMA3),
    "v4_style_rope_scaling": TINY | dict(rope_scaling=LLAMA3),
    "mistral": TINY | dict(architecture="MistralForCausalLM"),
    "mistral_sw8": TINY | dict(architecture="MistralForCausalLM", sliding_window=8),
    "llama_rope_dynamic": SMALL
    | dict(rope_scaling=RopeScaling("dynamic", 4.0, original_max_position=16), max_position=64),
    "llama_rope_yarn": SMALL
    | dict(rope_scaling=RopeScaling("yarn", 4.0, 32), num_q_heads=2, num_kv_heads=1, head_dim=32, max_position=128),
    "llama_head_dim": SMALL | dict(head_dim=24),
    "llama_tied_bias": SMALL | dict(tie_embeddings=True, attention_bias=True, output_bias=True, mlp_bias=True),
    "llama_multi_eos": SMALL | dict(eos_token_ids=(2, 80, 112)),
}


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def check_against_published(params: Params, published: dict[str, np.ndarray]) -> None:
    """Every weight of `params`, spelled out head by head: slow, and nothing like the code under test."""
    c, weights = params.config, jax.tree.map(np.asarray, params.weights)
    assert jax.tree.map(np.shape, weights) == weight_shapes(c)
    same = np.testing.assert_array_equal
    embed = published["model.embed_tokens.weight"]
    same(weights["head"], (embed if c.tie_embeddings else published["lm_head.weight"]).T)
    same(weights["final_norm"], published["model.norm.weight"])
    if not c.tie_embeddings:
        same(weights["embed"], embed)
    hd = c.head_dim
    for i, ours in enumerate(weights["layers"]):
        theirs = {k.removeprefix(f"model.layers.{i}."): v for k, v in published.items() if f"layers.{i}." in k}
        same(ours["attn_norm"], theirs["input_layernorm.weight"])
        same(ours["mlp_norm"], theirs["post_attention_layernorm.weight"])
        same(ours["down"], theirs["mlp.down_proj.weight"].T)
        for name in ("gate", "up"):
            same(ours[name], theirs[f"mlp.{name}_proj.weight"].T)
        if c.mlp_bias:
            for name in ("gate", "up", "down"):
                same(ours[f"{name}_bias"], theirs[f"mlp.{name}_proj.bias"])
        if c.output_bias:
            same(ours["out_bias"], theirs["self_attn.o_proj.bias"])
        for name, num_heads in (("q", c.num_q_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            for head in range(num_heads):
                rows = slice(head * hd, (head + 1) * hd)
                same(ours[name][:, head], theirs[f"self_attn.{name}_proj.weight"][rows].T)
                if c.attention_bias:
                    same(ours[f"{name}_bias"][head], theirs[f"self_attn.{name}_proj.bias"][rows])
        for head in range(c.num_q_heads):
            columns = slice(head * hd, (head + 1) * hd)
            same(ours["out"][head], theirs["self_attn.o_proj.weight"][:, columns].T)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_loads_with_its_config_and_every_weight_in_place(name):
    params = load(CHECKPOINTS / name)
    assert params.config == ModelConfig(**CONFIGS[name])
    assert params.tokenizer is None
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    check_against_published(params, tensors_of(CHECKPOINTS / name))


def test_every_llama_and_mistral_checkpoint_at_hand_is_tested():
    families = ("LlamaForCausalLM", "MistralForCausalLM")
    found = {
        config.parent.name
        for config in CHECKPOINTS.glob("*/config.json")
        if json.loads(config.read_text())["architectures"][0] in families
    }
    assert found == set(CONFIGS)


@pytest.mark.parametrize("name", ["llama", "llama_mqa", "llama_bias"])
def test_reading_in_small_pieces_gives_the_same_weights(name, monkeypatch):
    monkeypatch.setattr(assembly, "BLOCK_BYTES", 1000)  # a few rows: less than a head, less than a matrix
    check_against_published(load(CHECKPOINTS / name), tensors_of(CHECKPOINTS / name))


def test_the_index_decides_and_stray_files_are_ignored(tmp_path):
    shutil.copytree(CHECKPOINTS / "llama", tmp_path / "model")
    stray = {name: np.zeros_like(value) for name, value in tensors_of(CHECKPOINTS / "llama").items()}
    save_file(stray, tmp_path / "model" / "consolidated.safetensors")
    save_file(stray, tmp_path / "model" / "model.safetensors")
    check_against_published(load(tmp_path / "model"), tensors_of(CHECKPOINTS / "llama"))


def test_harmless_tensors_of_old_exporters_are_ignored(make_checkpoint):
    directory = make_checkpoint(tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    check_against_published(load(directory), tensors_of(directory))


def test_a_tied_head_that_is_written_out_all_the_same_is_the_embedding(make_checkpoint):
    embed = tensors_of(CHECKPOINTS / "llama_tied")["model.embed_tokens.weight"]
    params = load(make_checkpoint("llama_tied", tensors={"lm_head.weight": embed}))
    assert "embed" not in params.weights


def test_older_spellings_of_a_config_mean_the_same(make_checkpoint):
    old = dict(rope_parameters=None, rope_theta=500_000.0, rope_scaling={"type": "linear", "factor": 2.0})
    config = load(make_checkpoint(config=old)).config
    assert (config.rope_theta, config.rope_scaling) == (500_000.0, RopeScaling("linear", 2.0))
    config = load(make_checkpoint(config=dict(head_dim=None, rms_norm_eps=None, rope_parameters=None))).config
    assert (config.head_dim, config.norm_eps, config.rope_theta) == (16, 1e-6, 10_000.0)


def test_a_mistral_config_without_a_window_means_4096_and_null_means_none(make_checkpoint):
    assert load(make_checkpoint("mistral", config={"sliding_window": ...})).config.sliding_window == 4096
    assert load(make_checkpoint("mistral", config={"sliding_window": None})).config.sliding_window is None


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, [7, 9], (7, 9, 2)),
        ([2, 3], None, (2, 3)),
        (2, 7, (7, 2)),
        (None, [7, 7], (7,)),
        (None, None, ()),
    ],
)
def test_all_ends_of_text_of_both_files_count(make_checkpoint, config, generation, expected):
    directory = make_checkpoint(config={"eos_token_id": config})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(directory).config.eos_token_ids == expected


def test_a_directory_without_generation_config_loads(make_checkpoint):
    directory = make_checkpoint()
    (directory / "generation_config.json").unlink()
    assert load(directory).config == ModelConfig(**TINY)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64", "float32"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", jnp.float16, np.float32])
def test_weights_are_converted_once_from_what_is_stored(make_checkpoint, stored, dtype):
    published = {k: v.astype(jnp.dtype(stored)) for k, v in tensors_of(CHECKPOINTS / "llama").items()}
    # bfloat16 files are written by hand, for the package cannot write them from NumPy.
    params = load(make_checkpoint(tensors=published, by_hand=stored == "bfloat16"), dtype=dtype)
    wanted = jnp.dtype(dtype or "float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {wanted}
    check_against_published(params, {k: v.astype(wanted) for k, v in published.items()})


def test_weights_do_not_change_when_the_file_does(make_checkpoint):
    directory = make_checkpoint()
    params = load(directory)
    expected = jax.tree.map(np.array, params.weights)
    file = directory / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    jax.tree.map(np.testing.assert_array_equal, params.weights, expected)


def test_the_same_weights_load_with_every_kind_of_sharding():
    done = subprocess.run([sys.executable, "-c", SHARDED, CHECKPOINTS / "llama"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SHARDED = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jpaged.checkpoint import load

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
spread, whole = NamedSharding(mesh, P(("a", "b"))), NamedSharding(mesh, P())
third = SingleDeviceSharding(jax.devices()[2])
heads, too_many = NamedSharding(mesh, P(None, "a")), NamedSharding(mesh, P(None, ("a", "b")))
expected = load(sys.argv[1])

def by_path(path, shape):
    seen[path] = shape
    return heads if path.endswith(".k") else None

seen = {}
layer = {name: whole for name in expected.weights["layers"][0]}
tree = {"embed": spread, "head": third, "final_norm": None, "layers": (layer, whole, {**layer, "k": heads})}
for sharding, check in [
    (None, lambda w: w["embed"].devices() == {jax.devices()[0]}),
    (whole, lambda w: w["layers"][1]["out"].sharding == whole),
    (third, lambda w: w["layers"][2]["k"].devices() == {jax.devices()[2]}),
    (by_path, lambda w: w["layers"][1]["k"].sharding == heads and w["head"].devices() == {jax.devices()[0]}),
    (tree, lambda w: w["layers"][2]["k"].sharding == heads and w["layers"][0]["k"].sharding == whole
        and w["embed"].sharding == spread and w["head"].devices() == {jax.devices()[2]}),
]:
    weights = load(sys.argv[1], sharding=sharding).weights
    assert check(weights), sharding
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), weights, expected.weights)
assert seen["layers.2.k"] == (64, 2, 16) and len(seen) == 30
assert weights["embed"].addressable_shards[3].data.shape == (80, 64)

for sharding, words in [
    (lambda path, _: too_many if path.endswith(".k") else None, "layers.0.k"),  # 2 KV heads over 4 devices
    (heads, "final_norm"),  # one axis only
    ({"head": whole}, "nothing for weight final_norm"),
    (lambda path, shape: "gpu:0", "gpu:0"),
]:
    try:
        load(sys.argv[1], sharding=sharding)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(sharding)
"""


@pytest.mark.parametrize("name", ["llama_legacy", "llama_kquant", "llama_rope_freqs"])
def test_a_gguf_file_loads_as_the_published_weights_it_was_made_from(name):
    path = DATA / "gguf" / f"{name}.gguf"
    params = load(path)
    reader = gguf.GGUFReader(path)
    check_against_published(params, published_from_gguf(reader, params.config))
    assert params.tokenizer is not None
    assert params.config.norm_eps == 1e-5
    assert params.config.tie_embeddings == (name == "llama_kquant")
    assert params.config.eos_token_ids == (2,)
    assert params.config.rope_scaling == (LLAMA3 if name == "llama_rope_freqs" else None)


def published_from_gguf(reader: gguf.GGUFReader, config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors under their Hugging Face names, by the package's own reader, rows put back pair by pair."""
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {f"ffn_{x}": f"mlp.{x}_proj" for x in names}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    outside = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
    published = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        *block, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            half = config.head_dim // 2
            heads = value.reshape(-1, config.head_dim, value.shape[1])
            value = np.concatenate([np.concatenate([h[0::2], h[1::2]]) for h in heads])
            assert half * 2 * len(heads) == len(value)
        name = f"model.layers.{block[1]}.{names[kind]}" if block else outside[kind]
        published[f"{name}.weight"] = value
    return published


def test_a_directory_with_one_gguf_file_loads_like_the_file(tmp_path):
    shutil.copy(DATA / "gguf" / "llama_legacy.gguf", tmp_path)
    params, expected = load(tmp_path), load(DATA / "gguf" / "llama_legacy.gguf")
    assert params.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, params.weights, expected.weights)


@pytest.mark.model
def test_the_small_real_model_loads_with_its_exact_epsilon_and_the_whole_vocabulary(small_model):
    params = load(small_model)
    assert params.config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        d_model=576,
        d_ff=1536,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    # Digests of the file as the gguf package dequantises it, transformers' order of rows, and our layout.
    layer = params.weights["layers"][29]
    assert digest(params.weights["head"]) == "aa0e2f5b71dc4c27"
    assert digest(layer["q"]) == "7479c9736d1121c1"
    assert digest(layer["k"]) == "3b6a89cb99d9545b"
    assert digest(layer["down"]) == "ca6e27226b8d7411"


def digest(array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()[:16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "llama_rope_yarn", "llama_rope_dynamic", "mistral_sw8"])
def test_what_is_saved_loads_as_the_same_params(name, dtype, tmp_path):
    params = load(CHECKPOINTS / name, dtype=dtype)
    save(params, tmp_path / "copy")
    again = load(tmp_path / "copy", dtype=dtype)
    assert again.config == params.config
    jax.tree.map(np.testing.assert_array_equal, again.weights, params.weights)
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


def test_a_saved_checkpoint_has_the_published_names_and_values(tmp_path, monkeypatch):
    monkeypatch.setattr("jpaged.checkpoint.saver.SHARD_BYTES", 100_000)
    save(load(CHECKPOINTS / "llama"), tmp_path / "copy")
    expected, saved = tensors_of(CHECKPOINTS / "llama"), tensors_of(tmp_path / "copy")
    assert saved.keys() == expected.keys()
    for name in saved:
        np.testing.assert_array_equal(saved[name], expected[name], err_msg=name)
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == expected.keys() and len(set(index.values())) > 3
    check_against_published(load(tmp_path / "copy"), expected)


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    params = load(CHECKPOINTS / "llama")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("jpaged.checkpoint.saver._write_weights", full)
    with pytest.raises(OSError, match="disk full"):
        save(params, tmp_path / "copy")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="exists already"):
        save(params, CHECKPOINTS / "llama")
    with pytest.raises(ValueError, match="final_norm"):
        save(Params({**params.weights, "final_norm": jnp.zeros(3)}, params.config), tmp_path / "copy")
