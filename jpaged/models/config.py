"""Owns `ModelConfig`: everything the decoder needs to know about an architecture, as plain hashable data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the length a model was first trained on.

    `kind` picks the rule; the other fields are read by the kinds named beside them.
    Sources: linear (Chen et al. 2023, arXiv:2306.15595), dynamic (NTK-aware, as in Hugging Face transformers),
    llama3 (Llama 3.1 model card), yarn (Peng et al. 2023, arXiv:2309.00071).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_max_position: int = 0  # dynamic, llama3, yarn: the length before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn, DeepSeek's form of the attention factor
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    """The options of the shared decoder. Static under `jax.jit`: two equal configs share compiled programs."""

    architecture: str  # the published name, for messages only ("LlamaForCausalLM")
    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the longest sequence the checkpoint says it serves
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: tuple[tuple[str, float], ...] = ()  # fields of SamplingParams, as the publisher sets them

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "d_ff", "num_layers", "num_q_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads ({self.num_q_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads}): "
                "every KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head (GQA group size)."""
        return self.num_q_heads // self.num_kv_heads
