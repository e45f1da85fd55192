"""Tiny GGUF files of many quantisation types, with references computed from the dequantised weights in HF's layout.

The `gguf` package can quantise the legacy types (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) and only dequantise the K and IQ4
types. For those the file holds random blocks whose scales are chosen to give weights of a sensible size: every bit
pattern of a block is a valid one, and what matters to a loader is that it reads blocks right. The IQ1 to IQ3 types, TQ,
MXFP4 and NVFP4 are left out.
"""

import dataclasses
import pathlib

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from .checkpoints import MIN_GAP, VOCAB, make_reference

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = """\
Ġ t;Ġ a;h e;i n;r e;o n;e r;Ġt he;a t;Ġ s;Ġ o;e n;Ġ c;e s;Ġ w;n d;i t;o r;i s;a l;Ġ p;in g;Ġ f;a n;e d;Ġ b;o u;a r;\
Ġ in;Ġo f;Ġ m;Ġa nd;i on;i c;Ġ d;Ġt o;l e;r o;a s;c t;e l;Ġ l;s t;l l;Ġ h;e t;o m;i l;v e;u t;Ġ n;o t;Ġ re;i d;u r;a c;\
i m;Ġt h;o w;a m;en t""".split(";")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A K-quant block holds fields besides the quantised values; here the float16 ones, by the byte where they stand.
# `minimum` is multiplied to balance the positive values, so that the weights have a mean of about zero.
SCALE_AT = {Q.Q2_K: 80, Q.Q3_K: 108, Q.Q4_K: 0, Q.Q5_K: 0, Q.Q6_K: 208, Q.IQ4_NL: 0, Q.IQ4_XS: 0}
MINIMUM_AT = {Q.Q2_K: (82, 1.5), Q.Q4_K: (2, 7.5), Q.Q5_K: (2, 15.5)}


@dataclasses.dataclass
class Spec:
    """One file: the shape of its model and the type of every tensor (`types` by name without `.weight`)."""

    config: LlamaConfig
    types: dict[str, Q]
    rope_freqs: bool = False


def config(**changes) -> LlamaConfig:
    base = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        dtype="float32",
    )
    return LlamaConfig(**{**base, **changes})


def layer(index: int, q: Q, k: Q, v: Q, output: Q, gate: Q, up: Q, down: Q) -> dict[str, Q]:
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return {f"blk.{index}.{name}": kind for name, kind in zip(names, (q, k, v, output, gate, up, down), strict=True)}


SPECS = {
    "llama_legacy": Spec(
        config(num_hidden_layers=2),
        {
            "token_embd": Q.F16,
            "output": Q.Q8_0,
            **layer(0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_0, Q.Q4_1),
            **layer(1, Q.BF16, Q.F16, Q.F32, Q.Q8_0, Q.Q5_0, Q.Q5_1, Q.Q4_0),
        },
    ),
    "llama_kquant": Spec(  # a K block is 256 weights; tied, as small published models are
        config(hidden_size=256, intermediate_size=256, num_key_value_heads=2, tie_word_embeddings=True),
        {"token_embd": Q.Q6_K, **layer(0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q3_K, Q.Q2_K, Q.IQ4_XS, Q.IQ4_NL)},
    ),
    "llama_rope_freqs": Spec(  # Llama 3 scaling comes as a tensor of divisors of the frequencies, not as metadata
        config(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        {"token_embd": Q.F16, "output": Q.F16, **layer(0, *[Q.F16] * 7)},
        rope_freqs=True,
    ),
}
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write(out: pathlib.Path) -> None:
    """Write NAME.gguf and NAME.ref.npz (the arrays of `checkpoints.make_reference`) for each spec."""
    out.mkdir(parents=True, exist_ok=True)
    for name, spec in SPECS.items():
        seed = 0
        while True:
            tensors = make_tensors(spec, np.random.default_rng(seed))
            model = load_dequantised(spec, tensors)
            reference = make_reference(model, seed)
            if reference["gaps"].min() > MIN_GAP:
                break
            seed += 1
        path = out / f"{name}.gguf"
        write_file(path, spec, tensors)
        np.savez_compressed(out / f"{name}.ref.npz", **reference)
        check_with_transformers(path, spec, reference)
        print(f"{path.name}: seed {seed}, {path.stat().st_size} bytes, smallest gap {reference['gaps'].min():.4f}")


def shape_of(name: str, c: LlamaConfig) -> tuple[int, ...]:
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    d, ff = c.hidden_size, c.intermediate_size
    shapes = {"token_embd": (c.vocab_size, d), "output": (c.vocab_size, d), "attn_q": (q, d), "attn_k": (kv, d)}
    shapes |= {"attn_v": (kv, d), "attn_output": (d, q), "ffn_gate": (ff, d), "ffn_up": (ff, d), "ffn_down": (d, ff)}
    return shapes[name.split(".")[-1]]


def make_tensors(spec: Spec, rng: np.random.Generator) -> dict[str, tuple[np.ndarray, Q]]:
    """GGUF name to stored data (bytes for quantised types) and type, rows of Q and K in GGUF's order."""
    c = spec.config
    std = 0.12 * (64 / c.hidden_size) ** 0.5
    tensors = {}
    for name, kind in spec.types.items():
        shape = shape_of(name, c)
        if kind in SCALE_AT:
            data = random_blocks(kind, shape, std, rng)
        else:
            weight = (std * rng.standard_normal(shape)).astype(np.float32)
            data = gguf.quants.quantize(weight, kind)
        tensors[f"{name}.weight"] = data, kind
    norms = [f"blk.{i}.{norm}" for i in range(c.num_hidden_layers) for norm in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm"]:
        tensors[f"{name}.weight"] = (1 + 0.1 * rng.standard_normal(c.hidden_size)).astype(np.float32), Q.F32
    if spec.rope_freqs:
        tensors["rope_freqs.weight"] = llama3_divisors(c), Q.F32
    return tensors


def random_blocks(kind: Q, shape: tuple[int, ...], std: float, rng: np.random.Generator) -> np.ndarray:
    """Random bytes, then float16 scales such that the dequantised weights have about the deviation `std`."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = shape
    blocks = rng.integers(0, 256, (rows * columns // block_size, type_size), dtype=np.uint8)

    def with_scales(scale: np.ndarray) -> np.ndarray:
        fields = [(SCALE_AT[kind], 1.0)] + ([MINIMUM_AT[kind]] if kind in MINIMUM_AT else [])
        for at, factor in fields:
            blocks[:, at : at + 2] = (scale * factor).astype(np.float16)[:, None].view(np.uint8)
        return blocks.reshape(rows, columns // block_size * type_size)

    ones = np.ones(len(blocks), np.float32)
    deviation = gguf.quants.dequantize(with_scales(ones), kind).std()
    return with_scales(ones * std / deviation * rng.uniform(0.7, 1.3, len(blocks)).astype(np.float32)).copy()


def llama3_divisors(c: LlamaConfig) -> np.ndarray:
    """What a frequency is divided by: 1 for short waves, `factor` for long ones, something between in between."""
    p = c.rope_parameters
    frequencies = p["rope_theta"] ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
    waves_in_context = p["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    smooth = (waves_in_context - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / p["factor"] + smooth)).astype(np.float32)


def rows_to_hf(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of the rows of Q and K.

    HF rotates dimension i of a head with i + head_dim / 2. GGUF's converter places such a pair side by side (rows 2i
    and 2i + 1 of the head), for llama.cpp rotates neighbours.
    """
    out, d_model = weight.shape
    return weight.reshape(num_heads, out // num_heads // 2, 2, d_model).swapaxes(1, 2).reshape(out, d_model)


def load_dequantised(spec: Spec, tensors: dict[str, tuple[np.ndarray, Q]]) -> LlamaForCausalLM:
    c = spec.config
    c._attn_implementation = "eager"
    model = LlamaForCausalLM(c).eval()
    state = {}
    for name, (data, kind) in tensors.items():
        if name == "rope_freqs.weight":
            continue  # the config says it
        *block, last = name.removesuffix(".weight").split(".")
        weight = gguf.quants.dequantize(data, kind)
        if last in ("attn_q", "attn_k"):
            weight = rows_to_hf(weight, c.num_attention_heads if last == "attn_q" else c.num_key_value_heads)
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{HF_NAMES[last]}.weight"] = torch.from_numpy(np.array(weight, np.float32))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if c.tie_word_embeddings else set()), missing
    return model


def write_file(path: pathlib.Path, spec: Spec, tensors: dict[str, tuple[np.ndarray, Q]]) -> None:
    c = spec.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("model")
    writer.add_name(path.stem)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A small byte-level tokenizer after SmolLM2's: every byte, a few English merges, three special tokens."""
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    assert len(tokens) == VOCAB and len(set(tokens)) == VOCAB, (len(tokens), len(set(tokens)))
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


@torch.inference_mode()
def check_with_transformers(path: pathlib.Path, spec: Spec, reference: dict[str, np.ndarray]) -> None:
    """transformers' own GGUF reader must agree, the order of rows included (it ignores `rope_freqs`, so not there)."""
    if spec.rope_freqs:
        return
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    logits = model(torch.from_numpy(reference["input_ids"])).logits.numpy()
    np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)
