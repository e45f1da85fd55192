"""The parts of a decoder layer: functions of arrays, in the arithmetic of the published models."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jpaged.device.tiles import Tiles, ordered_product, ordered_sum
from jpaged.models.config import ModelConfig, RopeScaling

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def rms_norm(x: Float[Array, "... d_model"], weight: Float[Array, " d_model"], eps: float, tiles: Tiles | None = None):
    """Root-mean-square norm in float32, scaled after the cast back (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    if tiles is None:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    else:
        mean = ordered_sum(wide * wide)[..., None] / x.shape[-1]
    wide = wide * jax.lax.rsqrt(mean + eps)
    return wide.astype(x.dtype) * weight


def linear(x: Float[Array, "..."], w: Float[Array, "..."], inputs: int = 1, tiles: Tiles | None = None):
    """`x` times `w`, contracting the last `inputs` axes of x with the first `inputs` axes of w."""
    rows, d_in = x.shape[: x.ndim - inputs], math.prod(w.shape[:inputs])
    x, flat = x.reshape(*rows, d_in), w.reshape(d_in, -1)
    out = x @ flat if tiles is None else ordered_product(x, flat, tiles.depth)
    return out.reshape(*rows, *w.shape[inputs:])


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Rotations a token for each pair of dimensions, float32 [head_dim / 2], and the factor on cosine and sine."""
    half = config.head_dim // 2
    base = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return base.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        # Long waves are stretched, short ones kept, those between are blended.
        turns = scaling.original_max_position * base / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return (base * keep + base / scaling.factor * (1 - keep)).astype(np.float32), 1.0
    if scaling.kind == "yarn":
        return _yarn(config, scaling, base)
    raise ValueError(f"rope scaling kind {scaling.kind!r} is unknown")


def _yarn(config: ModelConfig, scaling: RopeScaling, base: np.ndarray) -> tuple[np.ndarray, float]:
    half = config.head_dim // 2

    def dimension(turns: float) -> float:
        """The pair of dimensions that turns that often within the original length."""
        return half * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(config.rope_theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    keep = 1 - np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        factor = scaling.attention_factor
    elif scaling.mscale and scaling.mscale_all_dim:
        factor = magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    else:
        factor = magnitude(1.0)
    return (base * keep + base / scaling.factor * (1 - keep)).astype(np.float32), factor


def rope_angles(
    config: ModelConfig, positions: Int32[Array, "..."], rope_lens: Int32[Array, "..."] | None
) -> Float[Array, "... 2 head_dim"]:
    """What `rotate` takes for tokens at `positions`: cosines, and sines that are negative in their first half, float32.

    `rope_lens` (dynamic scaling alone) is the length of the sequence as it stood when the token was first computed: the
    base of the rotations follows it.
    """
    frequencies, factor = rope_frequencies(config)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        original = scaling.original_max_position
        assert rope_lens is not None
        length = jnp.maximum(rope_lens, original).astype(jnp.float32)
        stretch = scaling.factor * length / original - (scaling.factor - 1)
        # theta * stretch^(d / (d - 2)), raised to -2 i / d
        exponent = np.arange(config.head_dim // 2, dtype=np.float32) * (-2.0 / (config.head_dim - 2))
        angles = positions[..., None] * frequencies * stretch[..., None] ** exponent
    else:
        angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    both = jnp.stack([jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)], axis=-2)
    # Or XLA computes them again in every layer, as part of what uses them.
    return lax.optimization_barrier(both)


def rotate(x: Float[Array, "... heads head_dim"], angles: Float[Array, "... 2 head_dim"]):
    """Rotary embedding over the two halves of each head (Su et al. 2021, arXiv:2104.09864, in the half-split order)."""
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    swapped = halves[..., ::-1, :].reshape(x.shape)
    cos, sin = angles[..., 0, None, :], angles[..., 1, None, :]
    return (halves.reshape(x.shape) * cos + swapped * sin).astype(x.dtype)
