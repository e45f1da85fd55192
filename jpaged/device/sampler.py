"""Drawing the next token of each row from its logits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jpaged.host.batch import SamplingBatch
from pallas_kernels.keep_top import keep_top

CHUNK = 256  # vocabulary entries taken together when a largest one or a draw is looked up
NEVER = -jnp.inf


class Scores(NamedTuple):
    """The logits that a row draws from, and those that were taken out of them for `SamplingBatch.banned_ids`."""

    allowed: Float[Array, "num_seqs vocab"]
    taken: Float[Array, "num_seqs num_banned"]


class Sampled(NamedTuple):
    """What a step draws for each row."""

    token_ids: Int32[Array, " num_seqs"]
    logprobs: Float[Array, " num_seqs"]  # under the unmodified logits
    # The likeliest ids, best first and of equal ones the lowest: what a beam search goes on with.
    candidate_ids: Int32[Array, "num_seqs num_candidates"] | None = None
    candidate_logprobs: Float[Array, "num_seqs num_candidates"] | None = None
    # Of each token's target (`Batch.targets`), where the batch has any: this one is by token, not by row.
    prompt_logprobs: Float[Array, " num_tokens"] | None = None
    # The likeliest ids in the target's place and their log-probabilities. They stay on the device until asked for.
    prompt_tops: tuple[Int32[Array, "num_tokens num_tops"], Float[Array, "num_tokens num_tops"]] | None = None
    scores: Scores | None = None  # for what looks at them again; they stay on the device


def sample(
    logits: Float[Array, "num_seqs vocab"],
    sampling: SamplingBatch,
    positions: Int32[Array, " num_seqs"],
    *,
    implementation: str | None = None,
    interpret: bool = False,
    num_candidates: int = 0,
) -> Sampled:
    """One token a row, and its log-probability under the unmodified logits; with `num_candidates`, so many of the
    likeliest ids too.

    `positions` are those the new tokens will have. Temperature 0 takes the largest logit, the lowest id among equals.
    Otherwise one uniform number, which depends on the row's seed and position alone, is looked up in the cumulative
    distribution over the ids that the filters left. `implementation` and `interpret` are those of `keep_top`.
    """
    # Without a branch: one would copy the logits. `vocab` stands for no id.
    banned = jnp.arange(logits.shape[0])[:, None], sampling.banned_ids
    taken = logits.at[banned].get(mode="fill", fill_value=NEVER)
    # Nothing reads the logits any more when they are written: else they would be copied.
    logits, taken = lax.optimization_barrier((logits, taken))
    allowed = logits.at[banned].set(NEVER, mode="drop")
    greedy, largest = argmax(allowed)
    # Over the allowed and the taken apart: then one pass finds the largest logits for all that follows.
    normalizer = jnp.logaddexp(log_sum_exp(allowed, largest), jax.nn.logsumexp(taken, axis=-1))
    token_ids = lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(
            sampling.temperature > 0, _draw(allowed, largest, sampling, positions, implementation, interpret), greedy
        ),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(allowed, token_ids[:, None], axis=-1)[:, 0]  # no banned id is chosen
    sampled = Sampled(token_ids, chosen - normalizer, scores=Scores(allowed, taken))
    if not num_candidates:
        return sampled
    ids, scores = largest_of(allowed, num_candidates)
    return sampled._replace(candidate_ids=ids, candidate_logprobs=scores - normalizer[:, None])


def largest_of(logits, number):
    """The `number` largest logits of each row and their ids. They lie in the chunks with the largest maxima, of which
    as many are looked at."""
    num_seqs, vocab = logits.shape
    chunks = _chunks(logits, NEVER)
    number = min(number, vocab)
    index = lax.top_k(jnp.max(chunks, axis=-1), min(number, chunks.shape[1]))[1]
    index = jnp.sort(index, axis=-1)  # so that of equal logits the lowest id comes first
    few = jnp.take_along_axis(chunks, index[:, :, None], axis=1).reshape(num_seqs, -1)
    scores, place = lax.top_k(few, number)
    ids = jnp.take_along_axis(index, place // CHUNK, axis=1) * CHUNK + place % CHUNK
    return jnp.minimum(ids, vocab - 1).astype(jnp.int32), scores  # only NaN leads into the padding


def log_sum_exp(logits, largest):
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    return shift + jnp.log(jnp.sum(jnp.exp(logits - shift[:, None]), axis=-1))


def argmax(logits):
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
    kept, scaled = keep(logits, largest, sampling, implementation, interpret)
    return look_up(jnp.where(kept, jnp.exp(scaled), 0), uniform(sampling.seed, positions))


def keep(logits, largest, sampling: SamplingBatch, implementation, interpret):
    """Which ids the filters leave, and what the logits are after the temperature, the largest being 0. Of rows that
    are greedy it means nothing."""
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
    return kept, (logits - largest[:, None]) / temperature[:, None]


def uniform(seed, positions):
    """A number in [0, 1) for each row, a function of its seed (two words) and the position alone."""

    def one(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(seed, positions)


def look_up(weights, uniform):
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
