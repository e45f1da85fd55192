"""The parts of a decoder layer against their definitions in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.layers import ACTIVATIONS, linear, rms_norm, rope_angles, rope_frequencies, rotate
from jpaged.models.config import ModelConfig, RopeScaling

RNG = np.random.default_rng(0)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    d_model=8,
    d_ff=8,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position=4096,
    rope_theta=10_000.0,
)
BASE = 10_000.0 ** (-2 * np.arange(32) / 64)


def scaled(*args, **options) -> ModelConfig:
    return replace(CONFIG, rope_scaling=RopeScaling(*args, **options))


def test_rms_norm_is_its_definition():
    x = RNG.standard_normal((3, 5, 8)) * 100
    weight = RNG.standard_normal(8)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * weight
    np.testing.assert_allclose(rms_norm(jnp.float32(x), jnp.float32(weight), 1e-2), wanted, rtol=1e-5)
    small = rms_norm(jnp.float32(x) * 1e-12, jnp.float32(weight), 1e-2)  # the epsilon counts
    np.testing.assert_allclose(small, x * 1e-12 / 0.1 * weight, rtol=1e-5)


def test_rms_norm_of_bfloat16_is_computed_in_float32_and_stays_bfloat16():
    x = jnp.asarray(RNG.standard_normal((4, 4096)) + 300, jnp.bfloat16)  # squares summed in bfloat16 would stall
    out = rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-5)
    assert out.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=2**-8)


@pytest.mark.parametrize(
    ("x", "w", "inputs", "formula"),
    [
        ((5, 4), (4, 6), 1, "ti,io->to"),
        ((5, 4), (4, 2, 3, 5), 1, "ti,ighd->tghd"),
        ((5, 2, 3, 4), (2, 3, 4, 6), 3, "tghd,ghdo->to"),
        ((2, 5, 2, 3, 4), (2, 3, 4, 6), 3, "btghd,ghdo->bto"),
        ((4,), (4, 2, 3), 1, "i,ijk->jk"),
    ],
)
def test_linear_contracts_the_last_axes_with_the_first(x, w, inputs, formula):
    x, w = RNG.standard_normal(x), RNG.standard_normal(w)
    out = linear(jnp.float32(x), jnp.float32(w), inputs)
    np.testing.assert_allclose(out, np.einsum(formula, x, w), rtol=1e-5, atol=1e-5)


def test_activations_are_their_definitions():
    x = np.linspace(-6, 6, 101)
    wanted = {
        "silu": x / (1 + np.exp(-x)),
        "gelu": np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x]),
        "gelu_tanh": 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }
    assert ACTIVATIONS.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(ACTIVATIONS[name](jnp.float32(x)), values, rtol=1e-5, atol=1e-6)
    assert np.abs(wanted["gelu"] - wanted["gelu_tanh"]).max() > 1e-4  # the bounds above tell them apart


def test_rotation_turns_the_pair_i_and_i_plus_half_by_position_times_frequency():
    positions = np.array([0, 1, 7, 1000], np.int32)
    x = RNG.standard_normal((4, 3, 64))
    complex_x = x[..., :32] + 1j * x[..., 32:]
    turned = complex_x * np.exp(1j * positions[:, None] * BASE)[:, None]
    wanted = np.concatenate([turned.real, turned.imag], -1)
    out = rotate(jnp.float32(x), rope_angles(CONFIG, jnp.asarray(positions), None))
    np.testing.assert_allclose(out, wanted, atol=2e-4)
    np.testing.assert_allclose(out[:3], wanted[:3], atol=3e-6)
    np.testing.assert_array_equal(out[0], jnp.float32(x)[0])


def test_rotation_of_bfloat16_is_computed_in_float32():
    x = jnp.asarray(RNG.standard_normal((4, 3, 64)), jnp.bfloat16)
    angles = rope_angles(CONFIG, jnp.array([0, 5, 999, 4000], jnp.int32), None)
    assert angles.dtype == jnp.float32
    out = rotate(x, angles)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), angles).astype(jnp.bfloat16))


def test_scores_depend_on_the_distance_alone():
    q, k = jnp.float32(RNG.standard_normal((2, 1, 1, 64)))

    def score(at_q, at_k):
        turned = [rotate(x, rope_angles(CONFIG, jnp.array([at], jnp.int32), None)) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(205, 200), abs=1e-3)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_plain_and_linear_frequencies():
    frequencies, factor = rope_frequencies(CONFIG)
    np.testing.assert_allclose(frequencies, BASE, rtol=1e-6)
    assert factor == 1 and frequencies.dtype == np.float32
    np.testing.assert_allclose(rope_frequencies(scaled("linear", 4.0))[0], BASE / 4, rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(replace(CONFIG, rope_theta=5e5))[0][-1], 5e5 ** (-62 / 64), rtol=1e-6)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    frequencies, factor = rope_frequencies(
        scaled("llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0),
    )
    wanted = []
    for frequency in BASE:
        wave = 2 * math.pi / frequency
        if wave < 512 / 4:
            wanted.append(frequency)
        elif wave > 512 / 1:
            wanted.append(frequency / 8)
        else:
            smooth = (512 / wave - 1) / (4 - 1)
            wanted.append((1 - smooth) * frequency / 8 + smooth * frequency)
    np.testing.assert_allclose(frequencies, wanted, rtol=1e-6)
    assert factor == 1
    assert wanted[0] == BASE[0] and wanted[-1] == BASE[-1] / 8
    assert any(b / 8 < w < b for b, w in zip(BASE, wanted))


def yarn_by_hand(factor: float, original: int, truncate: bool) -> np.ndarray:
    def find(turns):
        return 64 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(10_000.0))

    low, high = find(32), find(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    out = []
    for i, frequency in enumerate(BASE):
        ramp = min(1, max(0, (i - max(low, 0)) / (min(high, 63) - max(low, 0))))
        out.append(frequency / factor * ramp + frequency * (1 - ramp))
    return np.array(out)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_stretched_and_kept_frequencies(truncate):
    frequencies, factor = rope_frequencies(scaled("yarn", 16.0, 2048, truncate=truncate))
    np.testing.assert_allclose(frequencies, yarn_by_hand(16, 2048, truncate), rtol=1e-6)
    assert factor == pytest.approx(0.1 * math.log(16) + 1)
    assert np.abs(yarn_by_hand(16, 2048, True) / yarn_by_hand(16, 2048, False) - 1).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(attention_factor=0.7), 0.7),
        (dict(mscale=1.0, mscale_all_dim=0.5), (0.1 * math.log(16) + 1) / (0.05 * math.log(16) + 1)),
        (dict(mscale=1.0), 0.1 * math.log(16) + 1),
    ],
)
def test_yarn_scales_cosine_and_sine_by_its_attention_factor(options, wanted):
    config = scaled("yarn", 16.0, 2048, **options)
    assert rope_frequencies(config)[1] == pytest.approx(wanted)
    x = jnp.float32(RNG.standard_normal((1, 1, 64)))
    out = rotate(x, rope_angles(config, jnp.array([0], jnp.int32), None))
    np.testing.assert_allclose(out, x * wanted, rtol=1e-5)


def test_yarn_of_a_factor_of_at_most_one_scales_nothing():
    assert rope_frequencies(scaled("yarn", 1.0, 2048))[1] == 1


def test_dynamic_scaling_follows_the_length_of_the_sequence():
    config = scaled("dynamic", 4.0, original_max_position=100)
    positions = jnp.array([50, 50, 150], jnp.int32)
    lens = np.array([60, 300, 300], np.int32)
    x = RNG.standard_normal((3, 1, 64))
    wanted = []
    for position, length, row in zip(positions, lens, x[:, 0]):
        length = max(length, 100)
        theta = 10_000.0 * (4.0 * length / 100 - 3.0) ** (64 / 62)
        turned = (row[:32] + 1j * row[32:]) * np.exp(1j * float(position) * theta ** (-2 * np.arange(32) / 64))
        wanted.append(np.concatenate([turned.real, turned.imag]))
    out = rotate(jnp.float32(x), rope_angles(config, positions, jnp.asarray(lens)))[:, 0]
    np.testing.assert_allclose(out, wanted, atol=5e-5)
    plain = rotate(jnp.float32(x), rope_angles(CONFIG, positions, None))[:, 0]
    np.testing.assert_allclose(out[0], plain[0], atol=1e-5)  # within the original length nothing changes
    assert np.abs(out[1] - plain[1]).max() > 0.1


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="'longrope'"):
        rope_frequencies(scaled("longrope", 4.0))
