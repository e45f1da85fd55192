"""Tiny random Llama checkpoints, each for one thing that a loader or a decoder may get wrong."""

import itertools
import json
import pathlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 320
PROMPT_LENGTH = 40
NUM_NEW_TOKENS = 20
MIN_GAP = 0.01  # between the best and the second logit
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
    dtype="float32",
)
# The prompts (40 tokens) reach past the original length in both rope variants, and far enough for it to matter.
VARIANTS = {
    # transformers takes the base of NTK scaling from max_position_embeddings, which is here the length before scaling.
    "llama_rope_dynamic": dict(
        max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama_rope_yarn": dict(
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama_head_dim": dict(head_dim=24),
    "llama_tied_bias": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama_multi_eos": dict(),
}


def write(out: pathlib.Path) -> None:
    """Write every variant into a folder of its own below `out`."""
    for name, changes in VARIANTS.items():
        for seed in itertools.count():  # the first whose greedy tokens don't hang on rounding
            model = random_model(LlamaConfig(**{**BASE, **changes}), seed)
            reference = make_reference(model, seed)
            if reference["gaps"].min() > MIN_GAP:
                break
        if name == "llama_rope_dynamic":
            add_dynamic_rope(reference, model)
        if name == "llama_multi_eos":
            # Two tokens that the greedy continuations reach; the config keeps its single one.
            eos = [2, int(reference["greedy"][0, 5]), int(reference["greedy"][1, 9])]
            model.generation_config.eos_token_id = eos
            reference["stop_lengths"] = np.array(
                [next(i for i, token in enumerate(row, 1) if token in eos) for row in reference["greedy"].tolist()]
            )
        folder = out / name
        model.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        np.savez_compressed(folder / "ref.npz", **reference)
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB
        print(f"{name}: seed {seed}, smallest gap of a greedy token {reference['gaps'].min():.4f}")


def random_model(config: LlamaConfig, seed: int, std: float = 0.17) -> LlamaForCausalLM:
    """A model whose norm weights and biases are random too, so that one left out shows."""
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is no parameter of its own
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_((0.1 if name.endswith("bias") else std) * noise)
    return model


@torch.inference_mode()
def make_reference(model: LlamaForCausalLM, seed: int) -> dict[str, np.ndarray]:
    """`input_ids [2, 40]`, `logits [2, 40, vocab]`, `greedy [2, 20]` (no end of text) and its `gaps [2, 20]`.

    Every greedy token comes from a full forward over the sequence so far, without a cache.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(3, model.config.vocab_size, (2, PROMPT_LENGTH), generator=generator)
    logits = model(ids, use_cache=False).logits
    tokens, gaps = ids, []
    for _ in range(NUM_NEW_TOKENS):
        top = torch.topk(model(tokens, use_cache=False).logits[:, -1], 2)
        gaps.append(top.values[:, 0] - top.values[:, 1])
        tokens = torch.cat([tokens, top.indices[:, :1]], 1)
    return {
        "input_ids": ids.numpy(),
        "logits": logits.numpy(),
        "greedy": tokens[:, PROMPT_LENGTH:].numpy(),
        "gaps": torch.stack(gaps, 1).numpy(),
    }


@torch.inference_mode()
def add_dynamic_rope(reference: dict[str, np.ndarray], model: LlamaForCausalLM) -> None:
    """NTK scaling in transformers depends on the length of the sequence, so say what is compared.

    A forward over n tokens rotates *all* positions with the frequencies of length n. `logits` is that forward at
    n = 40; `greedy` takes each token from a forward over all tokens so far, thus from frequencies that change with
    every token. With a key-value cache, transformers leaves the cached keys as they were rotated at shorter lengths:
    `greedy_cached` is what `generate` then gives. `logits_short [2, 12, vocab]` is a forward within the original
    length, where the scaling has no effect.
    """
    ids = torch.from_numpy(reference["input_ids"])
    reference["logits_short"] = model(ids[:, :12], use_cache=False).logits.numpy()
    mask = torch.ones_like(ids)
    generated = model.generate(
        ids, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    reference["greedy_cached"] = generated[:, PROMPT_LENGTH:].numpy()
