"""Owns how the Llama family (Llama, Mistral) is published: weight names and config fields, in safetensors and GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jpaged.models.config import ModelConfig, RopeScaling
from jpaged.models.published import Part, Weight, number, rope_from_hf, rope_to_hf, token_ids

LAYER, BLOCK = "model.layers.{i}.", "blk.{i}."
ATTN, MLP = LAYER + "self_attn.", LAYER + "mlp."

# Every weight of `Params` (a layer's index as {i}) and the published tensors it is made of.
WEIGHTS = {
    "embed": Weight((Part("model.embed_tokens.weight", "token_embd.weight"),), columns=(1,)),
    "head": Weight((Part("lm_head.weight", "output.weight"),), columns=(0,)),
    "final_norm": Weight((Part("model.norm.weight", "output_norm.weight"),)),
    "layers.{i}.attn_norm": Weight((Part(LAYER + "input_layernorm.weight", BLOCK + "attn_norm.weight"),)),
    "layers.{i}.mlp_norm": Weight((Part(LAYER + "post_attention_layernorm.weight", BLOCK + "ffn_norm.weight"),)),
    "layers.{i}.q": Weight((Part(ATTN + "q_proj.weight", BLOCK + "attn_q.weight", rotary=True),), columns=(0,)),
    "layers.{i}.k": Weight((Part(ATTN + "k_proj.weight", BLOCK + "attn_k.weight", rotary=True),), columns=(0,)),
    "layers.{i}.v": Weight((Part(ATTN + "v_proj.weight", BLOCK + "attn_v.weight"),), columns=(0,)),
    "layers.{i}.out": Weight((Part(ATTN + "o_proj.weight", BLOCK + "attn_output.weight"),), columns=(0, 1)),
    "layers.{i}.gate": Weight((Part(MLP + "gate_proj.weight", BLOCK + "ffn_gate.weight"),), columns=(0,)),
    "layers.{i}.up": Weight((Part(MLP + "up_proj.weight", BLOCK + "ffn_up.weight"),), columns=(0,)),
    "layers.{i}.down": Weight((Part(MLP + "down_proj.weight", BLOCK + "ffn_down.weight"),), columns=(0,)),
    "layers.{i}.q_bias": Weight((Part(ATTN + "q_proj.bias", BLOCK + "attn_q.bias", rotary=True),)),
    "layers.{i}.k_bias": Weight((Part(ATTN + "k_proj.bias", BLOCK + "attn_k.bias", rotary=True),)),
    "layers.{i}.v_bias": Weight((Part(ATTN + "v_proj.bias", BLOCK + "attn_v.bias"),)),
    "layers.{i}.out_bias": Weight((Part(ATTN + "o_proj.bias", BLOCK + "attn_output.bias"),)),
    "layers.{i}.gate_bias": Weight((Part(MLP + "gate_proj.bias", BLOCK + "ffn_gate.bias"),)),
    "layers.{i}.up_bias": Weight((Part(MLP + "up_proj.bias", BLOCK + "ffn_up.bias"),)),
    "layers.{i}.down_bias": Weight((Part(MLP + "down_proj.bias", BLOCK + "ffn_down.bias"),)),
}
# A tied model has no head of its own: ours is the embedding, turned.
TIED_HEAD = Weight((Part("model.embed_tokens.weight", "token_embd.weight"),), columns=(0,))
# Tensors that old exporters add: constants which follow from the config (`config_from_gguf` reads rope_freqs).
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")

ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Yarn settings of a GGUF file that scale attention in ways of their own: served at these values only.
YARN_PLAIN = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# What a config.json that leaves a field out means by it, where the two architectures differ.
MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def config_from_hf(architecture: str, fields: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """`fields` is config.json, `generation` generation_config.json ({} when there is none)."""
    mistral = architecture == "MistralForCausalLM"
    if mistral:
        fields = {**MISTRAL_DEFAULTS, **fields}
    activation = fields.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    d_model, num_q_heads = number(fields, "hidden_size"), number(fields, "num_attention_heads")
    theta, scaling, max_position = rope_from_hf(fields)
    bos = token_ids(generation.get("bos_token_id", fields.get("bos_token_id")), "bos_token_id")
    # Instruction-tuned checkpoints name the end of a turn in one of the two files only.
    eos = (
        *token_ids(generation.get("eos_token_id"), "eos_token_id"),
        *token_ids(fields.get("eos_token_id"), "eos_token_id"),
    )
    bias = False if mistral else bool(fields.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=number(fields, "vocab_size"),
        d_model=d_model,
        d_ff=number(fields, "intermediate_size"),
        num_layers=number(fields, "num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=number(fields, "num_key_value_heads", int, num_q_heads),
        head_dim=number(fields, "head_dim", int, 0) or split_heads(d_model, num_q_heads),
        max_position=max_position,
        norm_eps=number(fields, "rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=False if mistral else bool(fields.get("mlp_bias", False)),
        activation=ACTIVATIONS[activation],
        sliding_window=(number(fields, "sliding_window", int, 0) or None) if mistral else None,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json that `config_from_hf` reads back as `config`."""
    mistral = config.architecture == "MistralForCausalLM"
    names = {published: ours for published, ours in ACTIVATIONS.items() if published != "swish"}
    max_position = config.max_position
    if config.rope_scaling and config.rope_scaling.kind in ("linear", "dynamic"):
        max_position = round(max_position / config.rope_scaling.factor)
    fields = {
        "architectures": [config.architecture],
        "model_type": "mistral" if mistral else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_to_hf(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": next(published for published, ours in names.items() if ours == config.activation),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    if mistral:
        return fields | {"sliding_window": config.sliding_window}
    if config.attention_bias != config.output_bias or config.sliding_window:
        raise ValueError(f"LlamaForCausalLM cannot express a bias on only some projections, or a window: {config}")
    return fields | {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def config_from_gguf(fields: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], rope_freqs) -> ModelConfig:
    """`fields` is the metadata by name, `tensors` the shapes by name, `rope_freqs` that tensor (float32) or None.

    A GGUF of architecture "llama" may be a Mistral, whose window the format does not record: full attention then.
    """
    own = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    if own.get("expert_count"):
        raise ValueError(f"llama.expert_count is {own['expert_count']}: mixtures of experts are not supported")
    d_model, num_q_heads = number(own, "embedding_length"), number(own, "attention.head_count")
    head_dim = number(own, "attention.key_length", int, 0) or split_heads(d_model, num_q_heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if own.get(name, head_dim) != head_dim:
            raise ValueError(f"llama.{name} is {own[name]}, must equal head_dim, {head_dim}, for this architecture")
    theta = shortest(number(own, "rope.freq_base", float, 10_000.0))
    scaling, max_position = rope_scaling_from_gguf(own, theta, head_dim, rope_freqs)
    eos = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if "token_embd.weight" not in tensors:
        raise ValueError("tensor token_embd.weight is missing: the file is no complete language model")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tensors["token_embd.weight"][0],
        d_model=d_model,
        d_ff=number(own, "feed_forward_length"),
        num_layers=number(own, "block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=number(own, "attention.head_count_kv", int, num_q_heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=shortest(number(own, "attention.layer_norm_rms_epsilon", float)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
    )


def split_heads(d_model: int, num_q_heads: int) -> int:
    """The size of a head where the config doesn't say it."""
    if d_model % num_q_heads:
        raise ValueError(f"hidden size {d_model} does not split into {num_q_heads} heads: add head_dim to the config")
    return d_model // num_q_heads


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: GGUF keeps 1e-5 as the float32 9.99999974e-06."""
    return float(str(np.float32(value)))


def rope_scaling_from_gguf(
    own: Mapping[str, Any], theta: float, head_dim: int, rope_freqs: np.ndarray | None
) -> tuple[RopeScaling | None, int]:
    """(scaling, longest sequence). Linear and yarn scaling are metadata; Llama 3's is a tensor of divisors."""
    kind = own.get("rope.scaling.type", "none")
    factor = shortest(own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0)
    longest = number(own, "context_length")
    if rope_freqs is not None and not (rope_freqs == 1).all():
        if kind not in ("none", "linear") or factor != 1:
            raise ValueError(f"tensor rope_freqs.weight together with rope scaling {kind!r} is not supported")
        return llama3_scaling(rope_freqs, theta, head_dim), longest
    if kind == "yarn":
        for name, plain in YARN_PLAIN.items():
            if own.get(name, plain) != plain:
                raise ValueError(f"llama.{name} of {own[name]} is not supported, only {plain}")
        original = number(own, "rope.scaling.original_context_length", int, longest)
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=shortest(own.get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=shortest(own.get("rope.scaling.yarn_beta_slow", 1.0)),
        )
        return scaling, max(longest, int(original * factor))
    if kind not in ("none", "linear"):
        raise ValueError(f"llama.rope.scaling.type {kind!r} is not supported; supported are none, linear and yarn")
    return RopeScaling("linear", factor) if factor != 1 else None, int(longest * factor)


def llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int) -> RopeScaling:
    """The Llama 3 parameters that give `divisors` (`[head_dim / 2]`), found by trying and verified to 1e-5.

    All published models stretch between wavelengths of 1 and 1/4 of the original context, a power of two. When no
    wavelength of a small head falls in between, several contexts give the same divisors: they are the same model.
    """
    waves = theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # turns per token
    factor = float(divisors.max())
    for original in (2**power for power in range(4, 24)):
        smooth = np.clip((original * waves - 1.0) / (4.0 - 1.0), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if divisors.shape == expected.shape and np.allclose(expected, divisors, rtol=1e-5, atol=0):
            return RopeScaling("llama3", factor, original, low_freq_factor=1.0, high_freq_factor=4.0)
    raise ValueError(
        f"tensor rope_freqs.weight ({np.array2string(divisors, threshold=8)}) is not Llama 3's rule with low and high "
        "frequency factors 1 and 4: load the safetensors checkpoint this file was made from"
    )
