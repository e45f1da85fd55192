"""Drawing from logits that are changed row by row, and telling of the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jpaged.device.sampler import NEVER, Sampled, Scores, argmax, keep, largest_of, log_sum_exp, look_up, uniform
from jpaged.device.tiles import in_tiles
from jpaged.host.adjustments import Adjustments
from jpaged.host.batch import SamplingBatch

NUM_TOPS = 32  # of the likeliest ids that a step tells of; for more, the whole vocabulary's are fetched


class LogitsState(NamedTuple):
    """What a `logits_processor` knows of its rows. Rows that only fill up the batch have no tokens."""

    token_ids: Int32[Array, "num_seqs max_model_len"]  # prompt and output so far, padded with the vocabulary size
    num_tokens: Int32[Array, " num_seqs"]  # of them; where the token to be drawn will stand
    num_prompt_tokens: Int32[Array, " num_seqs"]


Processor = Callable[[jax.Array, LogitsState], jax.Array]


class Told(NamedTuple):
    """What is told of the distribution that a row's token was drawn from, or of the raw one."""

    ids: Int32[Array, "num_seqs num_tops"]  # the likeliest, best first and of equal ones the lowest
    logprobs: Float[Array, "num_seqs num_tops"]
    all_logprobs: Float[Array, "num_seqs vocab"]


def sample_adjusted(
    scores: Scores,
    sampling: SamplingBatch,
    positions: Int32[Array, " num_seqs"],
    adjustments: Adjustments,
    drawn: Sampled,
    *,
    implementation: str | None = None,
    interpret: bool = False,
    processor: Processor | None = None,
    tile_rows: int | None = None,
) -> tuple[Sampled, Told]:
    """As `sample`, from adjusted logits: penalties first, then bias, the `processor`, and masks. Rows that ask for
    nothing keep what the step has `drawn` for them. `tile_rows`: see `in_tiles`."""

    def of_rows(scores, sampling, positions, adjustments, drawn):
        return _sample(scores, sampling, positions, adjustments, drawn, implementation, interpret, processor)

    return in_tiles(of_rows, tile_rows)(scores, sampling, positions, adjustments, drawn)


def _sample(scores, sampling, positions, adjustments, drawn, implementation, interpret, processor):
    banned = jnp.arange(len(positions))[:, None], sampling.banned_ids
    raw = scores.allowed.at[banned].set(scores.taken, mode="drop")
    logits = adjusted_logits(raw, positions, adjustments, processor).at[banned].set(NEVER, mode="drop")
    greedy, largest = argmax(logits)
    draws = sampling.temperature > 0

    def draw():
        kept, scaled = keep(logits, largest, sampling, implementation, interpret)
        ids = look_up(jnp.where(kept, jnp.exp(scaled), 0), uniform(sampling.seed, positions))
        final = jnp.where(draws[:, None], jnp.where(kept, scaled, NEVER), logits)
        return jnp.where(draws, ids, greedy), final

    token_ids, final = lax.cond(jnp.any(draws), draw, lambda: (greedy, logits))
    told_of = jnp.where(adjustments.processed[:, None], final, raw)
    logprobs = told_of - log_sum_exp(told_of, jnp.max(told_of, axis=-1))[:, None]
    ids, tops = largest_of(logprobs, NUM_TOPS)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)[:, 0]
    asks = adjustments.asks
    return Sampled(jnp.where(asks, token_ids, drawn.token_ids), jnp.where(asks, chosen, drawn.logprobs)), Told(
        ids, tops, logprobs
    )


def adjusted_logits(
    logits: Float[Array, "num_seqs vocab"],
    positions: Int32[Array, " num_seqs"],
    adjustments: Adjustments,
    processor: Processor | None = None,
) -> Float[Array, "num_seqs vocab"]:
    """The logits under penalties, bias and masks. `positions`: of the tokens to be drawn."""
    num_seqs, vocab = logits.shape
    rows = jnp.arange(num_seqs)
    repetition, frequency, presence = (adjustments.penalties[:, i : i + 1] for i in range(3))
    history = jnp.asarray(adjustments.history)

    def tokens():
        # A row that fills up the batch has no last token: its place would be the last one, from the end.
        last = jnp.where(positions > 0, positions - 1, history.shape[1])
        return history.at[rows, last].set(adjustments.last_ids, mode="drop")

    def penalize(logits):
        ids = tokens()
        is_output = jnp.arange(ids.shape[1]) >= adjustments.prompt_lens[:, None]
        counts = jnp.zeros((num_seqs, vocab), jnp.int32).at[rows[:, None], ids].add(is_output, mode="drop")
        seen = jnp.zeros((num_seqs, vocab), bool).at[rows[:, None], ids].set(True, mode="drop")
        logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
        return logits - frequency * counts - presence * (counts > 0)

    penalized = jnp.any(adjustments.penalties != jnp.array([1, 0, 0], jnp.float32))
    logits = lax.cond(penalized, penalize, lambda logits: logits, logits)
    logits = logits.at[rows[:, None], adjustments.bias_ids].add(adjustments.bias, mode="drop")
    if processor is not None:
        processed = processor(logits, LogitsState(tokens(), positions, jnp.asarray(adjustments.prompt_lens)))
        if processed.shape != logits.shape:
            raise ValueError(f"logits_processor must return logits {logits.shape}, got {processed.shape}")
        logits = processed.astype(logits.dtype)
    bits = jnp.asarray(adjustments.masks)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(num_seqs, -1)[:, :vocab] > 0, logits, NEVER)


jitted_sample_adjusted = jax.jit(
    sample_adjusted, static_argnames=("implementation", "interpret", "processor", "tile_rows"), donate_argnums=0
)
