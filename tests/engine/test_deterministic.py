"""`deterministic=True`: a request has the same bits whatever its batches, chunks, pages and neighbours are."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import engine_support as support
import numpy as np
import pytest

import jpaged
from jpaged.device.params import Params
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured

pytestmark = pytest.mark.slow

VOCAB = 320
PROMPT_LENS = (1, 3, 17, 140, 150, 150, 33)
# What a request can ask for: each way through the sampler, and through what stands behind it.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": True},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": True},
    {"temperature": 1.5, "top_k": 50, "min_p": 0.01, "logprobs": 3},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 2},
    {"temperature": 0, "logprobs": -1, "logprobs_mode": "processed", "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "n": 3, "logprobs": True},
    {"temperature": 0, "prompt_logprobs": 4, "logprobs": True},
]
# Engines that compute in other shapes, with other pages, in other orders. The tests below share their programs.
ENGINES: dict[str, dict[str, Any]] = {
    "small pages, four rows": {},
    "pages that divide no block": {
        "page_size": 5,
        "num_pages": 169,
        "prefix_caching": False,
        "async_scheduling": False,
    },
    "large pages, many rows": {"page_size": 32, "max_num_seqs": 12, "max_num_batched_tokens": 32, "num_pages": 85},
}
LENGTHS = {"max_model_len": 208, "num_pages": 209}
OPTIONS = {"deterministic": True, "prompt_logprobs": True, "max_num_beams": 3, **LENGTHS}


@functools.cache
def params() -> Params:
    """The first two layers of the tiny llama, for contexts that attention reads in more than one block."""
    llama = support.tiny("llama")
    weights = {**llama.weights, "layers": llama.weights["layers"][:2]}
    return Params(weights, dataclasses.replace(llama.config, num_layers=2, max_position=256), llama.tokenizer)


def build(name: str, **options: Any) -> jpaged.Engine:
    """One of the `ENGINES`, with few shapes: each takes seconds to compile."""
    engine = support.build(options.pop("params", params()), **(OPTIONS | ENGINES[name] | options))
    return support.of_few_shapes(engine, decode=2 if name == "large pages, many rows" else 1)


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    made = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENS]
    made[5][:135] = made[4][:135]  # a prefix to be found
    return made


def samplings() -> list[SamplingParams]:
    return [SamplingParams(**asked, max_tokens=14, seed=i, ignore_eos=True) for i, asked in enumerate(ASKED)]


def bits(output: Any) -> tuple[Any, ...]:
    """All numbers that an output tells, as they are."""
    samples = [
        (
            sample.token_ids,
            None if sample.logprobs is None else np.array(sample.logprobs, np.float64).tobytes(),
            None if sample.top_logprobs is None else [list(tops.items()) for tops in sample.top_logprobs],
            sample.cumulative_logprob,
        )
        for sample in output.outputs
    ]
    tops = output.prompt_top_logprobs
    return samples, output.prompt_logprobs, None if tops is None else [at and list(at.items()) for at in tops]


@functools.cache
def alone() -> list[tuple[Any, ...]]:
    """Each request by itself, token after token, its prompt in small chunks."""
    engine = support.build(params(), **OPTIONS, max_num_seqs=3, prefix_caching=False)
    engine._buckets = engine._buckets._replace(decode=(1, 3))
    each = zip(prompts(), samplings(), strict=True)
    return [bits(support.serve(engine, [prompt], sampling)[0]) for prompt, sampling in each]


def served(engine: jpaged.Engine, draw: random.Random, num_others: int) -> dict[int, tuple[Any, ...]]:
    """The requests in a drawn order, arriving at drawn steps, beside others that nobody asks about."""
    waiting: list[int | None] = [*range(len(ASKED)), *[None] * num_others]
    draw.shuffle(waiting)
    found, names, ours = {}, {}, (prompts(), samplings())
    while waiting or engine.has_unfinished_requests():
        while waiting and draw.random() < 0.4:
            index = waiting.pop()
            if index is not None:
                names[engine.add_request(ours[0][index], ours[1][index])] = index
                continue
            noise = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 40))]
            asked = {"presence_penalty": draw.choice([0, 1.0]), "logprobs": draw.choice([None, 5])}
            engine.add_request(noise, SamplingParams(max_tokens=draw.randrange(1, 20), ignore_eos=True, **asked))
        outputs = engine.step()
        found |= {names[x.request_id]: bits(x) for x in outputs if x.finished and x.request_id in names}
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_has_the_bits_that_it_has_alone_in_any_schedule(name):
    engine = build(name)
    preempted = 0
    # What three samples of a long prompt need, and one page more.
    page_size, (prompt, longest) = engine.config.page_size, (150, 150 + 14)
    few = prompt // page_size + 3 * (-(-longest // page_size) - prompt // page_size) + 1
    for seed, num_pages in ((1, engine.num_pages), (2, engine.num_pages), (3, few), (4, few)):
        before = engine.stats.num_preemptions
        with support.small_pool(engine, num_pages):
            found = served(engine, random.Random(seed), num_others=4)
        preempted += engine.stats.num_preemptions - before
        assert [index for index, one in enumerate(alone()) if found[index] != one] == []
        support.assert_idle(engine)
    assert preempted, "the small pool preempted nobody"


def test_without_it_bits_do_depend_on_the_batch():
    engine = support.build(params(), prompt_logprobs=True, **LENGTHS)
    engine._buckets = engine._buckets._replace(decode=(1, 4))
    each = zip(prompts(), samplings(), strict=True)
    apart = [bits(support.serve(engine, [prompt], sampling)[0]) for prompt, sampling in each]
    found = served(engine, random.Random(1), num_others=4)
    assert any(found[index] != one for index, one in enumerate(apart)), "the tests above could not fail"


def test_beams_and_sessions_have_the_same_bits_too():
    prompt = prompts()[4]

    def told(engine: jpaged.Engine, others: int) -> Any:
        for _ in range(others):
            engine.add_request(prompts()[3], SamplingParams(max_tokens=9, ignore_eos=True))
        beams = SamplingParams(num_beams=3, n=3, temperature=0, max_tokens=8, ignore_eos=True)
        name = engine.add_request(prompt, beams)
        output = support.finish(engine)[name]
        session = engine.session(prompt[:20])
        scores = np.array(session.score(prompt[20:]), np.float64).tobytes()
        return [(sample.token_ids, sample.cumulative_logprob) for sample in output.outputs], scores

    assert told(build("large pages, many rows"), 5) == told(build("small pages, four rows"), 0)


def test_what_processors_and_structured_texts_draw_has_the_same_bits_too():
    llama = params()
    tokenizer = jpaged.load(support.CHECKPOINTS.parent / "gguf" / "llama_legacy.gguf", dtype="float32").tokenizer
    speaking = Params(llama.weights, llama.config, tokenizer)

    def shifted(logits, state):
        return logits + 0.25 * (state.num_tokens % 3)[:, None]

    asked = SamplingParams(temperature=1.0, seed=4, max_tokens=12, logprobs=2, structured=Structured(regex="[a-z ]+"))
    found = []
    for name, others in (("small pages, four rows", 0), ("large pages, many rows", 5)):
        engine = build(name, params=speaking, logits_processor=shifted)
        for _ in range(others):
            engine.add_request([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True, frequency_penalty=1.0))
        name = engine.add_request(prompts()[3], asked)
        found.append(bits(support.finish(engine)[name]))
    assert found[0] == found[1]
