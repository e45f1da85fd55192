"""Owns `Blueprint`: what follows for an engine from its config, its model and its device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jpaged.device.kv_pages import kv_shape, page_bytes
from jpaged.device.params import Params
from jpaged.device.step import Kernels
from jpaged.device.tiles import TILES
from jpaged.engine.compile import CompiledSteps, needs_rope_lens
from jpaged.engine.memory import choose_num_pages
from jpaged.engine.swap_store import swap_sizes
from jpaged.host.batch import Buckets
from jpaged.host.config import EngineConfig
from jpaged.host.limits import Limits
from jpaged.models.config import ModelConfig

log = logging.getLogger("jpaged")

SPARE_CANDIDATES = 8  # of a beam's next tokens, beside as many as there are beams: for ids that end a text


@dataclass(frozen=True)
class Blueprint:
    """Sizes, limits and choices, all known before the first step."""

    config: EngineConfig
    model: ModelConfig
    device: jax.Device
    kv_dtype: np.dtype
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int  # the null page included
    page_bytes: int  # over all layers
    buckets: Buckets
    limits: Limits

    @classmethod
    def of(cls, params: Params, config: EngineConfig) -> Blueprint:
        """Raises ValueError if the memory does not hold one sequence of `max_model_len` tokens."""
        model = params.config
        leaf = jax.tree.leaves(params.weights)[0]
        device = next(iter(leaf.devices()))
        if config.deterministic and device.platform not in TILES:
            raise ValueError(
                f"deterministic=True serves {', '.join(TILES)}, and the weights lie on a {device.platform}: put them "
                "there with jax.device_put, or leave it out"
            )
        kv_dtype = np.dtype(config.dtype or leaf.dtype)
        # A tokenizer may know of end-of-turn tokens that the config does not name.
        eos_token_ids = frozenset(model.eos_token_ids) | getattr(params.tokenizer, "eos_token_ids", frozenset())
        # Among so many are as many that end no text as there are beams.
        spare = max(len(eos_token_ids), SPARE_CANDIDATES)
        num_candidates = config.max_num_beams + spare if config.max_num_beams > 1 else 0
        max_num_seqs = config.max_num_seqs or (64 if device.platform == "cpu" else 256)
        max_num_batched_tokens = config.max_num_batched_tokens or 2048
        longest = config.max_model_len or model.max_position
        if longest > model.max_position:
            raise ValueError(
                f"max_model_len ({longest}) is beyond the {model.max_position} positions that the model was made for"
            )

        def plan(num_pages: int, longest: int) -> Blueprint:
            return cls(
                config=config,
                model=model,
                device=device,
                kv_dtype=kv_dtype,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=longest,
                num_pages=num_pages,
                page_bytes=page_bytes(model, config.page_size, kv_dtype),
                buckets=Buckets.make(max_num_seqs, max_num_batched_tokens, longest, config.page_size),
                limits=Limits(
                    vocab_size=model.vocab_size,
                    eos_token_ids=eos_token_ids,
                    has_tokenizer=params.tokenizer is not None,
                    max_model_len=longest,
                    max_num_seqs=max_num_seqs,
                    max_num_beams=config.max_num_beams,
                    num_candidates=num_candidates,
                    num_pages=num_pages - 1,
                    page_size=config.page_size,
                    prefix_caching=config.prefix_caching,
                    prompt_logprobs=config.prompt_logprobs,
                    with_rope_lens=needs_rope_lens(model),
                ),
            )

        def step_bytes() -> int:
            small = plan(2, longest)
            steps = small.compiled_steps(params)
            return max(steps.temporary_bytes(shape) for shape in small.buckets.largest_shapes())

        num_pages = choose_num_pages(
            config,
            device=device,
            page_bytes=page_bytes(model, config.page_size, kv_dtype),
            useful_pages=1 + max_num_seqs * -(-longest // config.page_size),
            step_bytes=step_bytes,
        )
        held = (num_pages - 1) * config.page_size
        if config.max_model_len is None and held < longest:
            log.warning("max_model_len is %d, all that the KV cache holds, and not the model's %d", held, longest)
            longest = held
        planned = plan(num_pages, longest)
        size = num_pages * planned.page_bytes / 2**20
        log.info(
            "KV cache: %d tokens in %d pages of %d (%.0f MiB), %.1f sequences of %d",
            *(held, num_pages - 1, config.page_size, size, held / longest, longest),
        )
        return planned

    def compiled_steps(self, params: Params, *, with_swap: bool = False) -> CompiledSteps:
        return CompiledSteps(
            self.model,
            params.weights,
            self.buckets,
            num_pages=self.num_pages,
            kv_dtype=self.kv_dtype,
            kernels=Kernels(
                self.config.kernels,
                self.config.interpret_kernels,
                TILES[self.device.platform] if self.config.deterministic else None,
            ),
            num_candidates=self.limits.num_candidates,
            swap_sizes=swap_sizes(self.page_bytes) if with_swap else (),
            with_targets=self.config.prompt_logprobs,
            logits_processor=self.config.logits_processor,
            device=self.device,
            allow_late=self.config.late_compile == "allow",
        )

    def page_like(self) -> tuple[tuple[int, ...], Any]:
        """The shape and the dtype of a page over all layers, keys and values."""
        return (self.model.num_layers, 2, *kv_shape(self.model, 1, self.config.page_size)[1:]), self.kv_dtype
