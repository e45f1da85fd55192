"""The one function that runs on the device: a batch in, a token a row out, the pool updated in place."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int32

from jpaged.device.kv_pages import KVPages
from jpaged.device.prompt_logprobs import prompt_logprobs
from jpaged.device.sampler import Sampled, sample
from jpaged.device.sharding import over_heads, replicated
from jpaged.device.tiles import Tiles, in_tiles
from jpaged.host.batch import Batch
from jpaged.host.sampling_params import MAX_PROMPT_TOPS
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Attend, decode, logits
from pallas_kernels import copy_pages, paged_attention, ragged_paged_attention, write_kv
from pallas_kernels.implementation import choose


class Kernels(NamedTuple):
    """Which kernels a step runs: see `pallas_kernels`."""

    implementation: str | None = None
    interpret: bool = False
    tiles: Tiles | None = None  # for bits that are the same in any batch

    @property
    def attention(self) -> dict[str, Any]:
        return {"implementation": self.implementation, "interpret": self.interpret}

    @property
    def sampler_rows(self) -> int | None:
        return None if self.tiles is None else self.tiles.sampler_rows

    @property
    def others(self) -> dict[str, Any]:
        """For what has no Mosaic kernel, and would gain nothing by one."""
        implementation = "triton" if self.implementation == "mosaic_gpu" else self.implementation
        return {"implementation": implementation, "interpret": self.interpret}


BEST = Kernels()


def check_kernels(config: ModelConfig, batch: Any, pages: Any, dtype: Any, kernels: Kernels) -> None:
    """Raise NotImplementedError if the kernels cannot serve a model of `dtype` on the default device. `batch` and
    `pages` (one layer's keys) are shapes."""
    (tokens,), (rows,) = batch.positions.shape, batch.context_lens.shape
    q = jax.ShapeDtypeStruct((tokens, config.num_q_heads, config.head_dim), dtype)
    k = jax.ShapeDtypeStruct((tokens, config.num_kv_heads, config.head_dim), dtype)
    scores = jax.ShapeDtypeStruct((rows, config.vocab_size), jnp.float32)
    for kernel in ("paged_attention", "ragged_paged_attention"):
        choose(kernel, kernels.implementation, kernels.interpret, q, pages, batch.block_tables)
    others = tuple(kernels.others.values())
    for kernel, arrays in {"write_kv": (pages, k), "copy_pages": (pages,), "keep_top": (scores,)}.items():
        choose(kernel, *others, *arrays)


@cache  # one function for one choice: layers are traced once for each function
def attend_through(kernels: Kernels) -> Attend:
    """The `attend` of paged generation."""

    def attend_paged(config: ModelConfig, q, k, v, cache, batch: Batch):
        """Write the new keys and values into their slots, then attend to the pages. `cache` is one layer's pair."""

        def local(q, k, v, cache, tables, lens, slots, starts):
            k_pages, v_pages = write_kv(*cache, k, v, slots, **kernels.others)
            options = {"scale": config.head_dim**-0.5, "sliding_window": config.sliding_window, **kernels.attention}
            if kernels.tiles is not None:
                # One kernel for all: another one would sum in another order.
                if starts is None:
                    starts = jnp.pad(jnp.cumsum(lens > 0, dtype=jnp.int32), (1, 0))
                out = ragged_paged_attention(q, k_pages, v_pages, tables, lens, starts, invariant=True, **options)
            elif starts is None:
                out = paged_attention(q, k_pages, v_pages, tables, lens, **options)
            else:
                out = ragged_paged_attention(q, k_pages, v_pages, tables, lens, starts, **options)
            return out, (k_pages, v_pages)

        return over_heads(local)(
            (q, k, v, cache), (batch.block_tables, batch.context_lens, batch.slot_mapping, batch.query_starts)
        )

    return attend_paged


def hidden_states(
    config: ModelConfig, weights: dict[str, Any], kv_pages: KVPages, batch: Batch, kernels: Kernels = BEST
) -> tuple[KVPages, Float[Array, "num_tokens d_model"]]:
    """The pool with the batch's tokens written, and the hidden state after each token."""
    attend, tokens = attend_through(kernels), (batch.token_ids, batch.positions, batch.rope_lens)
    hidden, kv_pages = decode(weights, config, *tokens, attend, kv_pages, batch, kernels.tiles)
    return kv_pages, hidden


def last_hidden(hidden: Float[Array, "num_tokens d_model"], batch: Batch) -> Float[Array, "num_seqs d_model"]:
    """The hidden states after the last token of each row."""
    return hidden if batch.query_starts is None else hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)]


def next_logits(
    config: ModelConfig, weights: dict[str, Any], kv_pages: KVPages, batch: Batch, kernels: Kernels = BEST
) -> tuple[KVPages, Float[Array, "num_seqs vocab"]]:
    """The pool with the batch's tokens written, and the logits after the last token of each row."""
    kv_pages, hidden = hidden_states(config, weights, kv_pages, batch, kernels)
    return kv_pages, replicated(logits(weights, last_hidden(hidden, batch)))


def step(
    config: ModelConfig,
    weights: dict[str, Any],
    kv_pages: KVPages,
    batch: Batch,
    kernels: Kernels = BEST,
    num_candidates: int = 0,
) -> tuple[KVPages, Sampled]:
    """The pool, and what is drawn for each row. Of a row whose tokens are not all computed yet, it means nothing."""
    kv_pages, hidden = hidden_states(config, weights, kv_pages, batch, kernels)

    # Every device samples for itself: it needs the scores of the whole vocabulary.
    scores = replicated(logits(weights, last_hidden(hidden, batch), kernels.tiles))

    def draw(scores, sampling, positions):
        return sample(scores, sampling, positions, num_candidates=num_candidates, **kernels.others)

    with jax.named_scope("sample"):
        # context_lens counts the tokens so far: it is the position of the token to be drawn.
        sampled = in_tiles(draw, kernels.sampler_rows)(scores, batch.sampling, batch.context_lens)
    if batch.targets is not None:
        scored, tops = prompt_logprobs(weights, hidden, batch.targets, MAX_PROMPT_TOPS, kernels.tiles)
        sampled = sampled._replace(prompt_logprobs=scored, prompt_tops=tops)
    return kv_pages, sampled


def copy(kv_pages: KVPages, page_copies: Int32[Array, "num_copies 2"], kernels: Kernels = BEST) -> KVPages:
    """The pool with the second page of each pair equal to the first. No page may be a first and a second one, but for
    the null page, whose pairs are padding.

    A program of its own, which most steps do without: as a condition in the step it would have a GPU wait for the host.
    """

    def local(k_pages, v_pages, page_copies):
        return copy_pages(k_pages, v_pages, page_copies[:, 0], page_copies[:, 1], **kernels.others)

    return tuple(over_heads(local)(layer, (page_copies,)) for layer in kv_pages)


jitted_copy = jax.jit(copy, static_argnums=2, donate_argnums=0)


@cache
def jitted_step_on(sampled: Sharding | None):
    """`step`, compiled; what is drawn lies as `sampled` says (None: as it comes), which is what `sample_adjusted` is
    compiled for."""
    if sampled is None:
        return jax.jit(step, static_argnums=(0, 4, 5), donate_argnums=2)
    return jax.jit(step, static_argnums=(0, 4, 5), donate_argnums=2, out_shardings=(None, sampled))


jitted_step = jitted_step_on(None)
