"""The log-probabilities of given next tokens, chunk by chunk, so that no scores of all tokens exist at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jpaged.device.sampler import largest_of
from jpaged.device.sharding import replicated
from jpaged.device.tiles import Tiles
from jpaged.models.decoder import logits

CHUNK = 64  # tokens: with a vocabulary of 128 k, their scores take 32 MiB


def prompt_logprobs(
    weights: dict[str, Any],
    hidden: Float[Array, "num_tokens d_model"],
    targets: Int32[Array, " num_tokens"],
    num_tops: int = 1,
    tiles: Tiles | None = None,
) -> tuple[
    Float[Array, " num_tokens"], tuple[Int32[Array, "num_tokens num_tops"], Float[Array, "num_tokens num_tops"]]
]:
    """The log-probability of each target after the token with this hidden state, under the model's own logits (no
    temperature, no filters), and 0 where the target is -1; the `num_tops` likeliest ids in its place, best first, with
    theirs. Chunks without a target cost next to nothing. With `tiles`, none is smaller than others.
    """
    num_tops = min(num_tops, jax.eval_shape(logits, weights, hidden).shape[1])
    num_tokens = len(targets)
    size = min(CHUNK, num_tokens) if tiles is None else CHUNK
    padding = -num_tokens % size
    hidden = jnp.pad(hidden, [(0, padding), (0, 0)])
    targets = jnp.pad(targets, (0, padding), constant_values=-1)

    def of_chunk(chunk):
        hidden, targets = chunk

        def compute():
            scores = replicated(logits(weights, hidden, tiles))
            chosen = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
            normalizer = jax.nn.logsumexp(scores, axis=-1)
            ids, tops = largest_of(scores, num_tops)
            return jnp.where(targets >= 0, chosen - normalizer, 0), (ids, tops - normalizer[:, None])

        def nothing():
            shape = len(targets), num_tops
            return jnp.zeros(targets.shape, jnp.float32), (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

        return lax.cond(jnp.any(targets >= 0), compute, nothing)

    chunks = hidden.reshape(-1, size, hidden.shape[1]), targets.reshape(-1, size)
    with jax.named_scope("prompt_logprobs"):
        found = lax.map(of_chunk, chunks)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:num_tokens], found)
