"""Drawing the next token of each row from its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jpaged.host.batch import SamplingBatch

CHUNK = 256  # vocabulary entries summed together when a draw is looked up
NEVER = -jnp.inf


def sample(
    logits: Float[Array, "num_seqs vocab"], sampling: SamplingBatch, positions: Int32[Array, " num_seqs"]
) -> tuple[Int32[Array, " num_seqs"], Float[Array, " num_seqs"]]:
    """One token a row, and its log-probability under the unmodified logits.

    `positions` are those the new tokens will have. Temperature 0 takes the largest logit, the lowest id among equals.
    Otherwise one uniform number, which depends on the row's seed and position alone, is looked up in the cumulative
    distribution over the ids that the filters left.
    """
    num_seqs = logits.shape[0]
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    # Without a branch: one would copy the logits. `vocab` stands for no id.
    rows = jnp.arange(num_seqs)[:, None]
    allowed = logits.at[rows, sampling.banned_ids].set(NEVER, mode="drop")
    greedy = _argmax(allowed)
    token_ids = lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(sampling.temperature > 0, _draw(allowed, sampling, positions), greedy),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(allowed, token_ids[:, None], axis=-1)[:, 0]  # no banned id is chosen
    return token_ids, chosen - normalizer


def _argmax(logits):
    """The lowest id with the largest logit: two plain reductions, which a CPU does faster than one over pairs."""
    vocab = logits.shape[1]
    top = jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.min(jnp.where(logits == top, jnp.arange(vocab, dtype=jnp.int32), vocab), axis=-1)
    return jnp.minimum(ids, vocab - 1)  # only NaN equals nothing


def _draw(logits, sampling: SamplingBatch, positions):
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    # Subtracted before the division, which may overflow: the largest stays 0, whatever the temperature.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    filtered = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    kept = lax.cond(
        jnp.any(filtered & (sampling.temperature > 0)),
        lambda: _keep(scaled, sampling),
        lambda: jnp.ones(scaled.shape, bool),
    )
    return _look_up(jnp.where(kept, jnp.exp(scaled), 0), _uniform(sampling.seed, positions))


def _keep(scaled, sampling: SamplingBatch):
    """Which ids pass top-k, then top-p, then min-p. Equal logits count in the order of their ids."""
    num_seqs, vocab = scaled.shape
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), scaled.shape)
    negated, order = lax.sort((-scaled, ids), dimension=1, num_keys=1, is_stable=True)
    weights = jnp.exp(-negated)  # descending, the first is 1
    rank = jnp.arange(vocab, dtype=jnp.int32)
    in_k = rank < jnp.where(sampling.top_k > 0, sampling.top_k, vocab)[:, None]
    weights = jnp.where(in_k, weights, 0)
    before = jnp.cumsum(weights, axis=-1) - weights
    in_p = before < sampling.top_p[:, None] * jnp.sum(weights, axis=-1, keepdims=True)
    in_p |= (sampling.top_p >= 1)[:, None]
    kept = in_k & in_p & (weights >= sampling.min_p[:, None])
    rows = jnp.arange(num_seqs)[:, None]
    return jnp.zeros(scaled.shape, bool).at[rows, order].set(kept)


def _uniform(seed, positions):
    """A number in [0, 1) for each row, a function of its seed (two words) and the position alone."""

    def one(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(seed, positions)


def _look_up(weights, uniform):
    """The first id at which the running sum of `weights` passes `uniform` times their total.

    In two levels: sums of chunks, then inside one chunk, so that no running sum over the vocabulary is formed.
    """
    num_seqs, vocab = weights.shape
    chunks = jnp.pad(weights, [(0, 0), (0, -vocab % CHUNK)]).reshape(num_seqs, -1, CHUNK)

    def first_past(weights, target):
        sums = jnp.cumsum(weights, axis=-1)
        # Rounding may leave the target below the sum before an entry without weight: such an entry is never taken.
        past = (sums > target[:, None]) & (weights > 0)
        # It may also leave the target at or over the last sum: then the last entry with a weight.
        last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
        index = jnp.where(past.any(axis=-1), jnp.argmax(past, axis=-1), last)
        return index, jnp.take_along_axis(sums - weights, index[:, None], axis=-1)[:, 0]

    sums = chunks.sum(axis=-1)
    target = uniform * sums.sum(axis=-1)
    chunk, before = first_past(sums, target)
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    index, _ = first_past(inside, target - before)
    return jnp.minimum(chunk * CHUNK + index, vocab - 1).astype(jnp.int32)  # only NaN leads into the padding
