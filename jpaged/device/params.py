"""Owns `Params`: a model's weights as one pytree, with what is needed to run them as its static part."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.host.sampling_params import SamplingParams
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

    def default_sampling(self, **given: Any) -> SamplingParams:
        """`SamplingParams` of those `given`, and for the others of what the model was published with."""
        return SamplingParams(**self.defaults_beside(given), **given)

    def defaults_beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The published parameters that count beside those `given`: none in their place, and none at all in a beam
        search, which they would contradict."""
        if given.get("num_beams", 1) != 1:
            return {}
        return {name: value for name, value in self.config.sampling_defaults if name not in given}

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


def check_params(params: Any) -> None:
    """Raise ValueError unless these are `Params` that can be run: every weight that the config asks for, an array of
    that shape on a device."""
    if not isinstance(params, Params):
        raise ValueError(f"params must be a jpaged.Params, such as jpaged.load returns, got {type(params).__name__}")
    shapes = _shapes_by_path(params.config)
    found = {_dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params.weights)[0]}
    for path in shapes:
        if path not in found:
            raise ValueError(
                f"params have no weight {path}, which their config asks for: take both from one checkpoint"
            )
    for path, leaf in found.items():
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"weight {path} is being traced, and generation can be no part of a transformed function (jit, grad, "
                "vmap): call it outside, with arrays"
            )
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"weights must lie on a device, but {path} is a {type(leaf).__name__}: use jax.device_put(params)"
            )
        if leaf.is_deleted():
            raise ValueError(f"weight {path} was deleted, maybe donated to a jitted function: pass what that returned")
        if leaf.shape != shapes.get(path, leaf.shape):
            raise ValueError(f"weight {path} has shape {leaf.shape}, but the config asks for {shapes[path]}")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"weights must be floats, but {path} is {leaf.dtype}: use a dtype such as bfloat16")


@functools.lru_cache(maxsize=8)
def _shapes_by_path(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    def is_shape(node: Any) -> bool:
        return isinstance(node, tuple) and isinstance(node[0], int)

    shapes = jax.tree_util.tree_flatten_with_path(weight_shapes(config), is_leaf=is_shape)[0]
    return {_dotted(path): shape for path, shape in shapes}


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
