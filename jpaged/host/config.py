"""Owns `EngineConfig`: what may be chosen about an engine, checked once, where it is made."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from .sampling_params import MAX_BEAMS

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("mosaic_gpu", "triton", "xla")


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine; None lets the engine choose (what it chooses is in parentheses).

    page_size: tokens in a page of KV memory.
    max_num_seqs: at most so many sequences run together (64 on a CPU, 256 elsewhere). Each of `n` samples is one.
    max_num_beams: the widest beam search that may be asked for. Above 1, every step finds candidates for one.
    max_num_batched_tokens: at most so many tokens are computed in a step (2048).
    max_model_len: at most so many tokens, prompt and output together (the model's own limit).
    gpu_memory_utilization: share of a GPU's memory for weights, activations and KV cache together. On a CPU, the KV
        cache takes at most a quarter of the free RAM.
    kv_cache_memory: the KV cache's size instead, in bytes or as text such as "2GiB".
    num_pages: the KV cache's size instead, in pages; one of them, the null page, only takes the writes of padding.
    dtype: of the KV cache: "float32", "bfloat16" or "float16" (that of the weights).
    swap_space: host memory for pages that the KV cache has no room for, in bytes or as text. Preempted requests and
        later prompts find them there (None: they are computed again).
    swap_disk_space: as much again on disk, for what `swap_space` has no room for. swap_dir: the folder for it (that for
        temporary files).
    preemption: "swap": what is in swap space is brought back whatever it costs; "recompute": there is none (None: what
        is there is brought back where that takes less time than to compute it again, as measured).
    prefix_caching: keep the KV of full pages, until their place is needed, for later prompts that begin with the same
        tokens.
    prompt_logprobs: whether steps can give the log-probabilities of prompts, which `Session.score` needs.
    logits_processor: a function (logits, state) -> logits of JAX arrays, compiled into the programs that draw, for all
        rows of every step: float32 [num_seqs, vocab], and a `jpaged.device.adjusted_sampler.LogitsState`. It runs after
        penalties and bias and before masks.
    deterministic: the tokens and log-probabilities of a request are the same, to the last bit, whatever shares its
        batches, how it is cut into chunks, what is cached, and how pages are sized. docs/sampling.md has what it costs.
    async_scheduling: start a decode step before the tokens of the one before have reached the host.
    warm_up: compile and try every shape when the engine is built (True); compile them in threads while it serves, those
        that a request waits for first ("background"); or compile each when it is first met (False).
    late_compile: whether a compilation after warm-up is allowed, or an error.
    compilation_cache_dir: where compiled programs are kept between runs. None: where JAX is set to keep them, else in
        jpaged's cache folder; "": leave JAX's setting as it is.
    kernels: the kernels to run, "mosaic_gpu", "triton" or "xla" (the best that can serve the model on its device).
    interpret_kernels: run GPU kernels on a CPU, by interpretation, for tests. Very slow.
    check_integrity: check the bookkeeping of the pages after each step. Slow.

    Raises ValueError naming the option, its value and what it may be.
    """

    page_size: int = 16
    max_num_seqs: int | None = None
    max_num_beams: int = 1
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | str | None = None
    num_pages: int | None = None
    dtype: Any = None
    swap_space: int | str | None = None
    swap_disk_space: int | str | None = None
    swap_dir: str | None = None
    preemption: Literal["swap", "recompute"] | None = None
    prefix_caching: bool = True
    prompt_logprobs: bool = False
    logits_processor: Callable[..., Any] | None = None
    deterministic: bool = False
    async_scheduling: bool = True
    warm_up: bool | Literal["background"] = "background"
    late_compile: Literal["allow", "error"] = "allow"
    compilation_cache_dir: str | None = None
    kernels: Literal["mosaic_gpu", "triton", "xla"] | None = None
    interpret_kernels: bool = False
    check_integrity: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From names and values, such as a file's or the caller's keywords; an unknown name is a ValueError."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                cure = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
                raise ValueError(f"unknown engine option {name!r}: {cure}")
        return cls(**options)

    def __post_init__(self):
        for name, low in (
            ("page_size", 1),
            ("max_num_seqs", 1),
            ("max_num_beams", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),  # one token of prompt and one to generate
            ("num_pages", 2),  # the null page and another
        ):
            value = getattr(self, name)
            if value is None and name not in ("page_size", "max_num_beams"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")
        if self.max_num_beams > MAX_BEAMS:
            raise ValueError(f"max_num_beams must be at most {MAX_BEAMS}, got {self.max_num_beams}")
        if self.max_num_seqs is not None and self.max_num_beams > self.max_num_seqs:
            raise ValueError(
                f"max_num_beams ({self.max_num_beams}) must not exceed max_num_seqs ({self.max_num_seqs}): each beam "
                "is a sequence, so raise max_num_seqs"
            )

        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a share above 0 and at most 1, got {share!r}")
        for name in ("kv_cache_memory", "swap_space", "swap_disk_space"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        if self.kv_cache_memory is not None and self.num_pages is not None:
            raise ValueError(
                f"kv_cache_memory ({self.kv_cache_memory} bytes) and num_pages ({self.num_pages}) both fix the "
                "size of the KV cache: give one of them"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        if self.warm_up != "background" and not isinstance(self.warm_up, bool):
            raise ValueError(f"warm_up must be True, False or 'background', got {self.warm_up!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name} must be True or False, got {value!r}")
        self._check_swap()
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise ValueError(f"logits_processor must be a function or None, got {self.logits_processor!r}")
        if self.kernels not in (None, *KERNELS):
            raise ValueError(f"kernels must be None or one of {', '.join(KERNELS)}, got {self.kernels!r}")
        if self.interpret_kernels and self.kernels not in ("mosaic_gpu", "triton"):
            raise ValueError(f"interpret_kernels=True needs GPU kernels to interpret, got kernels={self.kernels!r}")
        if self.late_compile not in ("allow", "error"):
            raise ValueError(f"late_compile must be 'allow' or 'error', got {self.late_compile!r}")
        if self.late_compile == "error" and not self.warm_up:
            raise ValueError(
                "late_compile='error' needs warm_up=True or 'background': without it every compilation is a late one"
            )
        for name in ("compilation_cache_dir", "swap_dir"):
            path = getattr(self, name)
            if path is not None:
                if not isinstance(path, (str, os.PathLike)):
                    raise ValueError(f"{name} must be a path, got {path!r}")
                object.__setattr__(self, name, os.fspath(path))

    def _check_swap(self) -> None:
        if self.preemption not in (None, "swap", "recompute"):
            raise ValueError(f"preemption must be None, 'swap' or 'recompute', got {self.preemption!r}")
        if self.swap_space is None:
            for name, value in (("preemption", self.preemption == "swap"), ("swap_disk_space", self.swap_disk_space)):
                if value:
                    raise ValueError(f"{name}={getattr(self, name)!r} needs swap_space: give it some, such as '4GiB'")
        elif self.preemption == "recompute":
            raise ValueError(
                f"preemption='recompute' contradicts swap_space={self.swap_space!r}: nothing would be brought back"
            )
        elif not self.prefix_caching:
            raise ValueError("swap_space needs prefix_caching=True: what is in it is found by its tokens")
        if self.swap_dir is not None and self.swap_disk_space is None:
            raise ValueError(f"swap_dir={self.swap_dir!r} needs swap_disk_space: say how much of it may be used")


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from a number or from text: GiB is 1024**3, GB is 1000**3."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b)?\s*", value, re.IGNORECASE)
        if match and (match[2] or not match[3]):
            power = ("", "k", "m", "g", "t").index((match[2] or "").lower())
            size = float(match[1]) * (1024 if match[3] else 1000) ** power
            if 1 <= size < float("inf"):
                return int(size)
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    cure = "" if name == "kv_cache_memory" else ": leave it out for none"
    raise ValueError(f"{name} must be bytes above 0, or text such as '2GiB' or '500MB', got {value!r}{cure}")


def _dtype_name(value: Any) -> str:
    try:
        name = value if isinstance(value, str) else np.dtype(value).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {value!r}")
    return name
