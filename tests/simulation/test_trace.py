"""The traces have the published statistics, and are the same each time."""

import numpy as np
import pytest

from jpaged.simulation.trace import ALPACA, MAX_LEN, SHAREGPT, draw_trace, mixed_trace


@pytest.mark.parametrize("spec", [SHAREGPT, ALPACA], ids=lambda spec: spec.name)
@pytest.mark.parametrize("num_tokens", [20_000, 1_000_000])
def test_a_trace_has_the_published_means(spec, num_tokens):
    trace = draw_trace(spec, num_tokens, seed=3)
    assert np.mean([one.prompt for one in trace]) == pytest.approx(spec.prompt_mean, rel=0.02)
    assert np.mean([one.output for one in trace]) == pytest.approx(spec.output_mean, rel=0.02)
    assert sum(one.prompt + one.output for one in trace) == pytest.approx(num_tokens, rel=0.03)
    assert all(one.prompt >= 1 and one.output >= 1 and one.prompt + one.output <= MAX_LEN for one in trace)


def test_at_a_random_moment_as_many_tokens_are_to_come_as_in_the_paper():
    outputs = np.array([one.output for one in draw_trace(SHAREGPT, 5_000_000, seed=0)])
    assert np.mean(outputs**2) / np.mean(outputs) / 2 == pytest.approx(299, rel=0.03)


def test_the_seed_decides_and_nothing_else():
    assert (
        draw_trace(ALPACA, 10_000, seed=1) == draw_trace(ALPACA, 10_000, seed=1) != draw_trace(ALPACA, 10_000, seed=2)
    )
    assert mixed_trace(50, seed=1) == mixed_trace(50, seed=1) != mixed_trace(50, seed=2)


def test_half_of_the_mixed_outputs_are_short():
    outputs = [one.output for one in mixed_trace(1000, seed=0)]
    assert sum(16 <= output <= 64 for output in outputs) == 500
    assert sum(256 <= output <= 512 for output in outputs) == 500
