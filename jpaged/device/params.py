"""Owns `Params`: a model's weights as one pytree, with what is needed to run them as its static part."""

from __future__ import annotations

from typing import Any

import jax

from jpaged.models.config import ModelConfig


@jax.tree_util.register_pytree_with_keys_class
class Params:
    """Weights (leaves) and their `ModelConfig` and tokenizer (static). `jax.tree.map`, `jax.grad`, optax, Orbax and
    `jax.device_put` work on it unchanged.

    `weights` is a nested dict:

        embed       [vocab, d_model]                 absent when `config.tie_embeddings`
        head        [d_model, vocab]                 the embedding too, read by columns, when tied
        final_norm  [d_model]
        layers      a tuple with one dict per layer:
            attn_norm, mlp_norm  [d_model]
            q        [d_model, num_q_heads, head_dim]
            k, v     [d_model, num_kv_heads, head_dim]
            out      [num_q_heads, head_dim, d_model]
            gate, up [d_model, d_ff]
            down     [d_ff, d_model]
            q_bias, k_bias, v_bias, out_bias, gate_bias, up_bias, down_bias   without the leading input axes, where the
                                                                             config has them

    Query head h attends to KV head `h // (num_q_heads // num_kv_heads)`. Heads are an axis of their own, so that a
    tensor-parallel split is a split of one axis.
    """

    __slots__ = ("weights", "config", "tokenizer")

    def __init__(self, weights: dict[str, Any], config: ModelConfig, tokenizer: Any = None):
        self.weights = weights
        self.config = config
        self.tokenizer = tokenizer

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("weights"), self.weights),), (self.config, self.tokenizer)

    def tree_flatten(self):
        return (self.weights,), (self.config, self.tokenizer)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)

    def __repr__(self) -> str:
        leaves = [leaf for leaf in jax.tree.leaves(self.weights) if hasattr(leaf, "nbytes")]
        size = sum(leaf.nbytes for leaf in leaves)
        return f"Params({self.config.architecture}, {len(leaves)} arrays, {size / 2**20:.0f} MiB)"


def weight_shapes(config: ModelConfig) -> dict[str, Any]:
    """The tree of `Params.weights` with a shape (tuple of ints) in the place of each array."""
    d, ff, hd = config.d_model, config.d_ff, config.head_dim
    heads, kv_heads = config.num_q_heads, config.num_kv_heads
    layer = {
        "attn_norm": (d,),
        "mlp_norm": (d,),
        "q": (d, heads, hd),
        "k": (d, kv_heads, hd),
        "v": (d, kv_heads, hd),
        "out": (heads, hd, d),
        "gate": (d, ff),
        "up": (d, ff),
        "down": (ff, d),
    }
    if config.attention_bias:
        layer |= {"q_bias": (heads, hd), "k_bias": (kv_heads, hd), "v_bias": (kv_heads, hd)}
    if config.output_bias:
        layer |= {"out_bias": (d,)}
    if config.mlp_bias:
        layer |= {"gate_bias": (ff,), "up_bias": (ff,), "down_bias": (d,)}
    shapes: dict[str, Any] = {
        "head": (d, config.vocab_size),
        "final_norm": (d,),
        "layers": tuple(dict(layer) for _ in range(config.num_layers)),
    }
    if not config.tie_embeddings:
        shapes["embed"] = (config.vocab_size, d)
    return shapes
