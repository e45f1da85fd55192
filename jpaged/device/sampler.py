"""Drawing the next token of each row from its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jpaged.host.batch import SamplingBatch
from pallas_kernels.keep_top import keep_top

CHUNK = 256  # vocabulary entries taken together when a largest one or a draw is looked up
NEVER = -jnp.inf


def sample(
    logits: Float[Array, "num_seqs vocab"],
    sampling: SamplingBatch,
    positions: Int32[Array, " num_seqs"],
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, " num_seqs"], Float[Array, " num_seqs"]]:
    """One token a row, and its log-probability under the unmodified logits.

    `positions` are those the new tokens will have. Temperature 0 takes the largest logit, the lowest id among equals.
    Otherwise one uniform number, which depends on the row's seed and position alone, is looked up in the cumulative
    distribution over the ids that the filters left. `implementation` and `interpret` are those of `keep_top`.
    """
    # Without a branch: one would copy the logits. `vocab` stands for no id.
    banned = jnp.arange(logits.shape[0])[:, None], sampling.banned_ids
    taken = logits.at[banned].get(mode="fill", fill_value=NEVER)
    allowed = logits.at[banned].set(NEVER, mode="drop")
    greedy, largest = _argmax(allowed)
    # Over the allowed and the taken apart: then one pass finds the largest logits for all that follows.
    normalizer = jnp.logaddexp(_logsumexp(allowed, largest), jax.nn.logsumexp(taken, axis=-1))
    token_ids = lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(
            sampling.temperature > 0, _draw(allowed, largest, sampling, positions, implementation, interpret), greedy
        ),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(allowed, token_ids[:, None], axis=-1)[:, 0]  # no banned id is chosen
    return token_ids, chosen - normalizer


def _logsumexp(logits, largest):
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    return shift + jnp.log(jnp.sum(jnp.exp(logits - shift[:, None]), axis=-1))


def _argmax(logits):
    """The lowest id with the largest logit, and this logit: found among the maxima of chunks, then inside the first
    chunk that has it, so that the whole is read once."""
    num_seqs, vocab = logits.shape
    chunks = _chunks(logits, NEVER)
    maxima = jnp.max(chunks, axis=-1)
    top = jnp.max(maxima, axis=-1, keepdims=True)
    chunk = jnp.argmax(maxima == top, axis=-1)
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    ids = chunk * CHUNK + jnp.argmax(inside == top, axis=-1)
    return jnp.minimum(ids, vocab - 1).astype(jnp.int32), top[:, 0]


def _draw(logits, largest, sampling: SamplingBatch, positions, implementation, interpret):
    draws = sampling.temperature > 0
    # Beyond, a CPU takes the reciprocal for 0, and a banned id's weight would be NaN.
    temperature = jnp.where(draws, jnp.minimum(sampling.temperature, 1e37), 1.0)
    kept = keep_top(
        logits,
        temperature,
        jnp.where(draws, sampling.top_k, 0),  # greedy rows need no thresholds
        jnp.where(draws, sampling.top_p, 1),
        jnp.asarray(sampling.min_p),
        largest=largest,
        implementation=implementation,
        interpret=interpret,
    )
    # Subtracted before the division, which may overflow: the largest stays 0, whatever the temperature.
    scaled = (logits - largest[:, None]) / temperature[:, None]
    return _look_up(jnp.where(kept, jnp.exp(scaled), 0), _uniform(sampling.seed, positions))


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
    vocab = weights.shape[1]
    chunks = _chunks(weights, 0)

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


def _chunks(values, padding):
    num_seqs, vocab = values.shape
    return jnp.pad(values, [(0, 0), (0, -vocab % CHUNK)], constant_values=padding).reshape(num_seqs, -1, CHUNK)
