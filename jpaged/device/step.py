"""The one function that runs on the device: a batch in, a token a row out, the pool updated in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jpaged.device.kv_pages import KVPages
from jpaged.device.sampler import sample
from jpaged.host.batch import Batch
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import decode, logits
from pallas_kernels import paged_attention, ragged_paged_attention, write_kv


def attend_paged(config: ModelConfig, q, k, v, cache, batch: Batch):
    """Write the new keys and values into their slots, then attend to the pages. `cache` is one layer's pair."""
    k_pages, v_pages = write_kv(cache[0], cache[1], k, v, batch.slot_mapping)
    options: dict[str, Any] = {"scale": config.head_dim**-0.5, "sliding_window": config.sliding_window}
    if batch.query_starts is None:
        out = paged_attention(q, k_pages, v_pages, batch.block_tables, batch.context_lens, **options)
    else:
        out = ragged_paged_attention(
            q, k_pages, v_pages, batch.block_tables, batch.context_lens, batch.query_starts, **options
        )
    return out, (k_pages, v_pages)


def next_logits(
    config: ModelConfig, weights: dict[str, Any], kv_pages: KVPages, batch: Batch
) -> tuple[KVPages, Float[Array, "num_seqs vocab"]]:
    """The pool with the batch's tokens written, and the logits after the last token of each row."""
    hidden, kv_pages = decode(
        weights, config, batch.token_ids, batch.positions, batch.rope_lens, attend_paged, kv_pages, batch
    )
    if batch.query_starts is not None:
        hidden = hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)]
    return kv_pages, logits(weights, hidden)


def step(
    config: ModelConfig, weights: dict[str, Any], kv_pages: KVPages, batch: Batch
) -> tuple[KVPages, Int32[Array, " num_seqs"], Float[Array, " num_seqs"]]:
    """The pool, one token a row, its log-probability. Of a row whose tokens are not all computed yet, the token means
    nothing."""
    kv_pages, scores = next_logits(config, weights, kv_pages, batch)
    with jax.named_scope("sample"):
        # context_lens counts the tokens so far: it is the position of the token to be drawn.
        token_ids, logprobs = sample(scores, batch.sampling, batch.context_lens)
    return kv_pages, token_ids, logprobs


jitted_step = jax.jit(step, static_argnums=0, donate_argnums=2)
