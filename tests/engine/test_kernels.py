"""The engine on GPU kernels, which are interpreted here: the same tokens as from the reference."""

from __future__ import annotations

import engine_support as support
import numpy as np
import pytest
from engine_support import GREEDY, serve, tokens

import jpaged
from jpaged.host.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 31, 77, 12, 8, 3], [44, 2, 17], [9] * 19, [60, 61]]
SAMPLING = [
    GREEDY,
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, n=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=16, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.05, max_tokens=12, seed=4, ignore_eos=True),
]
TRITON = {"kernels": "triton", "interpret_kernels": True}


def build(name: str, **options):
    engine = support.build(support.tiny(name), **options)
    engine._buckets = engine._buckets._replace(decode=(4,))  # interpreted kernels take long to compile
    return engine


@pytest.mark.parametrize("name", ["llama", "mistral_sw8"])
def test_interpreted_kernels_give_the_references_tokens(name):
    """Chunked prompts, mixed batches, several samples, a pool that is too small for all, a sliding window."""
    small = {"page_size": 8, "num_pages": 9, "max_num_seqs": 4}
    expected = serve(build(name, kernels="xla", **small), PROMPTS, SAMPLING)
    engine = build(name, **TRITON, **small)
    found = serve(engine, PROMPTS, SAMPLING)
    assert tokens(found) == tokens(expected)
    for a, b in zip(found, expected):
        for x, y in zip(a.outputs, b.outputs):
            np.testing.assert_allclose(x.cumulative_logprob, y.cumulative_logprob, atol=1e-3)
    assert (engine.stats.num_preemptions > 0) == (engine.model_config.sliding_window is None)
    support.assert_idle(engine)


def test_interpreted_kernels_give_the_stored_references_tokens():
    """Of a library that knows nothing of pages."""
    stored = support.reference("llama")
    wanted = stored["greedy"]
    engine = build("llama", **TRITON, page_size=16, num_pages=20)
    sampling = SamplingParams(temperature=0, max_tokens=wanted.shape[-1], ignore_eos=True)
    assert tokens(serve(engine, stored["input_ids"].tolist(), sampling)) == wanted.tolist()


def test_kernels_that_need_a_gpu_are_refused_without_one():
    with pytest.raises(NotImplementedError, match="triton.*NVIDIA GPUs.*cpu"):
        support.build(support.tiny("llama"), kernels="triton", page_size=16, num_pages=20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "cuda"}, "kernels must be None or one of mosaic_gpu, triton, xla, got 'cuda'"),
        ({"interpret_kernels": True}, "needs GPU kernels.*kernels=None"),
        ({"interpret_kernels": 1}, "interpret_kernels must be True or False"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        jpaged.EngineConfig(**options)
