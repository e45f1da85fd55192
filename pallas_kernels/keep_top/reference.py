"""The meaning of `keep_top`, by a sort of the whole vocabulary: slow, and the order can be read off."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def boundary(logits, largest, temperature, top_k, top_p):
    """The last id that top-k and top-p keep, by falling logits and then by rising ids: (its logit, the id)."""
    vocab = logits.shape[1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), logits.shape)
    negated, order = lax.sort((-logits, ids), dimension=1, num_keys=1, is_stable=True)
    weights = jnp.exp((-negated - largest[:, None]) / temperature[:, None])
    in_k = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    weights = jnp.where(in_k, weights, 0)
    before = jnp.cumsum(weights, axis=-1) - weights
    in_p = before < top_p[:, None] * jnp.sum(weights, axis=-1, keepdims=True)
    in_p |= (top_p >= 1)[:, None]
    kept = jnp.sum(in_k & in_p, axis=-1, keepdims=True)  # the first so many: both conditions end once
    last = jnp.maximum(kept - 1, 0)
    return -jnp.take_along_axis(negated, last, axis=-1)[:, 0], jnp.take_along_axis(order, last, axis=-1)[:, 0]
