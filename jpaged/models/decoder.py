"""The one decoder that every family is: what differs between them is in `ModelConfig`, how it attends an argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jpaged.device.layers import ACTIVATIONS, linear, rms_norm, rope_angles, rotate
from jpaged.device.params import Params
from jpaged.device.tiles import Tiles, over
from jpaged.models.config import ModelConfig

# attend(config, q, k, v, cache, context) -> (out, cache): q [..., num_q_heads, head_dim], k and v
# [..., num_kv_heads, head_dim], out like q. `cache` is what this layer keeps between calls, `context` what all layers
# share. It must be a plain function: layers are traced once for each function and shape.
Attend = Callable[..., tuple[Array, Any]]


def decode(
    weights: dict[str, Any],
    config: ModelConfig,
    token_ids: Int32[Array, "..."],
    positions: Int32[Array, "..."],
    rope_lens: Int32[Array, "..."] | None,
    attend: Attend,
    caches: tuple[Any, ...],
    context: Any,
    tiles: Tiles | None = None,
) -> tuple[Float[Array, "... d_model"], tuple[Any, ...]]:
    """The hidden states after the final norm, and each layer's new cache.

    With `tiles`, tokens have one axis.
    """
    with jax.named_scope("embed"):
        if config.tie_embeddings:
            x = jnp.moveaxis(weights["head"][:, token_ids], 0, -1)
        else:
            x = weights["embed"][token_ids]
    angles = over(tiles, partial(rope_angles, config))(positions, rope_lens)
    new_caches = []
    for layer, cache in zip(weights["layers"], caches, strict=True):
        x, cache = _layer(config, attend, tiles, layer, x, angles, cache, context)
        new_caches.append(cache)
    normed = over(tiles, lambda x: rms_norm(x, weights["final_norm"], config.norm_eps, tiles))(x)
    return normed, tuple(new_caches)


# A jit of its own so that the loop above traces and lowers one layer, not all of them; XLA inlines the calls.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(config: ModelConfig, attend: Attend, tiles: Tiles | None, layer: dict[str, Any], x, angles, cache, context):
    def project(name: str, x, inputs: int = 1):
        out = linear(x, layer[name], inputs, tiles)
        bias = layer.get(f"{name}_bias")
        return out if bias is None else out + bias

    def before(x, angles):
        normed = rms_norm(x, layer["attn_norm"], config.norm_eps, tiles)
        q, k, v = project("q", normed), project("k", normed), project("v", normed)
        return rotate(q, angles), rotate(k, angles), v

    def after(x, out):
        with jax.named_scope("attention"):
            x += project("out", out, inputs=2)
        with jax.named_scope("mlp"):
            normed = rms_norm(x, layer["mlp_norm"], config.norm_eps, tiles)
            return x + project("down", ACTIVATIONS[config.activation](project("gate", normed)) * project("up", normed))

    with jax.named_scope("attention"):
        q, k, v = over(tiles, before)(x, angles)
        out, cache = attend(config, q, k, v, cache, context)
    return over(tiles, after)(x, out), cache


def logits(
    weights: dict[str, Any], hidden: Float[Array, "... d_model"], tiles: Tiles | None = None
) -> Float[Array, "... vocab"]:
    """Float32 scores over the vocabulary."""
    with jax.named_scope("head"):
        return over(tiles, lambda x: linear(x, weights["head"], 1, tiles).astype(jnp.float32))(hidden)


def attend_dense(config: ModelConfig, q, k, v, cache, context):
    """Causal attention within whole sequences: q, k, v [batch, length, heads, head_dim]; nothing is cached."""
    window = None if config.sliding_window is None else (config.sliding_window - 1, 0)
    scale = config.head_dim**-0.5
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, local_window_size=window), cache


def forward(params: Params, tokens: Int32[Array, "batch length"]) -> Float[Array, "batch length vocab"]:
    """Logits after every token of whole sequences, differentiable: the model as a trainer uses it.

    tokens: int32 [batch, length]. There is no mask: pad shorter sequences at the end, where the padding changes
        no logits before it (unless rope scaling is dynamic), and leave its positions out of the loss.

    Returns float32 [batch, length, vocab]; those at i score the token at i + 1. Not jitted: call it inside a `jax.jit`.
    Raises ValueError if `tokens` has not two axes.
    """
    config = params.config
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [batch, length], got shape {tokens.shape}")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    rope_lens = jnp.full_like(positions, tokens.shape[1])
    caches = (None,) * config.num_layers
    hidden, _ = decode(params.weights, config, tokens, positions, rope_lens, attend_dense, caches, None)
    return logits(params.weights, hidden)
