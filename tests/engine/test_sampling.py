"""Penalties, bias, masks and log-probabilities through an engine: as definitions and whole sequences' logits say."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import engine_support as support
import jax
import logits_oracle as oracle
import numpy as np
import pytest

import jpaged
from jpaged.device import sampler
from jpaged.device.params import Params
from jpaged.engine.engine import Engine
from jpaged.engine.outputs import RequestOutput
from jpaged.engine.samples import seed_of_sample
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured

VOCAB = 320
LENGTH = 64
NEAR = 1e-4  # of logits
NEAR_SUM = 1e-5  # of the running sums that a draw is looked up in
EOS = 2


@functools.cache
def params() -> Params:
    """The tiny llama with the tokenizer of another model of the same vocabulary, for bad words."""
    llama = support.tiny("llama")
    other = jpaged.load(support.CHECKPOINTS.parent / "gguf" / "llama_legacy.gguf", dtype="float32")
    assert llama.config.vocab_size == other.tokenizer.vocab_size == VOCAB
    return Params(llama.weights, llama.config, other.tokenizer)


@pytest.fixture(scope="module")
def engine():
    built = support.build(params())
    yield built
    support.assert_idle(built)


# What is expected


@functools.cache
def forward():
    return jax.jit(lambda weights, tokens: jpaged.forward(Params(weights, params().config), tokens))


@functools.cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward()(params().weights, padded)[0, len(tokens) - 1], np.float64)


class Step(NamedTuple):
    """A token, and the log-probabilities that are told in its place."""

    token_id: int
    logprobs: np.ndarray
    is_near: bool  # rounding could lead to another token
    differs: bool  # without adjustments another id would be the likeliest


@functools.cache
def uniform(seed: int, position: int) -> float:
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    return float(sampler.uniform(words, np.array([position], np.int32))[0])


def rules_of(sampling: SamplingParams) -> dict[str, Any]:
    """The settings under the names of the oracle."""
    encode = params().tokenizer.encode_continuation
    return {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)} | {
        "bad_words": [encode(space + word) for word in sampling.bad_words or () for space in ("", " ")],
        "ending_ids": {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))},
    }


def expected_step(prompt: list[int], output: list[int], sampling: SamplingParams, seed: int) -> Step:
    rules = rules_of(sampling)
    raw = logits_after((*prompt, *output))
    scores = oracle.adjusted(raw, prompt, output, **rules)
    told = oracle.logprobs(raw, scores, **rules)
    first, second = oracle.likeliest(scores, 2)
    differs = first != int(np.argmax(raw))
    if sampling.temperature == 0:
        return Step(first, told, bool(scores[first] - scores[second] < NEAR), differs)
    sums = np.cumsum(oracle.probabilities(scores, **rules))
    number = uniform(seed, len(prompt) + len(output))
    token_id = int(np.searchsorted(sums, number, side="right"))
    is_near = oracle.is_close(scores, **rules) or bool(np.abs(sums - number).min() < NEAR_SUM)
    return Step(token_id, told, is_near, differs)


def expected(prompt: list[int], sampling: SamplingParams, seed: int, known: list[int]) -> list[Step]:
    """Step by step what is to be generated, up to the end or the first token that rounding may have made another one;
    from there on as the `known` output goes."""
    ending = rules_of(sampling)["ending_ids"]
    steps: list[Step] = []
    output: list[int] = []
    for index in range(sampling.max_tokens):
        step = expected_step(prompt, output, sampling, seed)
        steps.append(step)
        near = step.is_near and index < len(known)
        output.append(known[index] if near else step.token_id)
        if output[-1] in ending and len(output) > sampling.min_tokens:
            break
    return steps


def check(outputs: Sequence[RequestOutput], asked: Sequence[tuple[list[int], SamplingParams]]) -> tuple[int, int, int]:
    """Asserts tokens and log-probabilities; the numbers of tokens, of near ones and of those that were adjusted."""
    num_tokens = num_near = num_changed = 0
    for (prompt, sampling), output in zip(asked, outputs, strict=True):
        for sample in output.outputs:
            steps = expected(prompt, sampling, seed_of_sample(sampling.seed or 0, sample.index), sample.token_ids)
            assert len(sample.token_ids) == len(steps), sampling
            assert (sample.logprobs is not None) == sampling.returns_logprobs
            assert (sample.top_logprobs is not None) == bool(sampling.num_top_logprobs)
            for index, (found, step) in enumerate(zip(sample.token_ids, steps, strict=True)):
                num_tokens, num_changed = num_tokens + 1, num_changed + step.differs
                if step.is_near:
                    num_near += 1
                    continue
                assert found == step.token_id, (index, sampling)
                if sample.logprobs is not None:
                    np.testing.assert_allclose(sample.logprobs[index], step.logprobs[found], atol=1e-4)
                if sample.top_logprobs is not None:
                    check_tops(sample.top_logprobs[index], step.logprobs, sampling)
    return num_tokens, num_near, num_changed


def check_tops(tops: dict[int, float], logprobs: np.ndarray, sampling: SamplingParams) -> None:
    number = VOCAB if sampling.num_top_logprobs < 0 else sampling.num_top_logprobs
    ids = [i for i in oracle.likeliest(logprobs, number) if logprobs[i] > -np.inf]  # the others cannot be drawn
    assert len(tops) == len(ids)
    found = np.array(list(tops.values()))
    assert (found[:-1] >= found[1:]).all(), "not best first"
    np.testing.assert_allclose(found, logprobs[ids], atol=1e-4)  # rank by rank
    np.testing.assert_allclose(found, logprobs[list(tops)], atol=1e-4)  # id by id


# What is asked


def prompts(number: int) -> list[list[int]]:
    rng = np.random.default_rng(number)
    # Of few ids, so that outputs have some of the prompts' and penalties meet them.
    return [rng.integers(3, VOCAB, 8)[rng.integers(0, 8, int(rng.integers(1, 41)))].tolist() for _ in range(number)]


@functools.cache
def questions() -> list[tuple[list[int], SamplingParams]]:
    """One prompt for each kind of settings. Ids and words are those that come without any settings, so that it matters
    what is said of them."""
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 18, "ignore_eos": True}
    plain = [[step.token_id for step in expected(p, SamplingParams(**common), 0, [])] for p in prompts(16)]
    words = [[words_in(tokens, space) for space in ("", " ")] for tokens in plain]
    with_words = max(range(16), key=lambda i: min(map(len, words[i])))
    assert all(words[with_words]), "no output has words of both kinds in it"
    kinds: list[tuple[int, dict[str, Any]]] = [
        (0, {}),
        (1, {"repetition_penalty": 1.4, "logprobs": True}),
        (2, {"frequency_penalty": 1.1, "presence_penalty": 0.6, "logprobs": 3}),
        (3, {"presence_penalty": -2.0, "logprobs": 0, "logprobs_mode": "processed"}),
        (4, {"repetition_penalty": 0.8, "frequency_penalty": 2.0, "logprobs": 40}),
        (5, {"logit_bias": {plain[5][0]: -4.0, plain[5][3]: 2.0, 319: 1.5, 0: 1.0}, "logprobs": 3}),
        (6, {"logit_bias": {i: 3.0 for i in range(200, 320)}, "logprobs": -1, "logprobs_mode": "processed"}),
        (7, {"allowed_token_ids": [*range(40, 75), 319], "logprobs": 40, "logprobs_mode": "processed"}),
        (8, {"allowed_token_ids": [9, 64, 95, 96, 319], "frequency_penalty": 0.5, "logprobs": -1}),
        (9, {"min_tokens": 9, "stop_token_ids": plain[9][2:6], "logprobs": 3, "logprobs_mode": "processed"}),
        (10, {"allowed_token_ids": [70, *plain[10][:8]], "min_tokens": 7, "stop_token_ids": plain[10][1:4]}),
        (11, {"ignore_eos": False, "logit_bias": {EOS: 100}, "min_tokens": 4, "logprobs": True}),
        (with_words, {"bad_words": sum(words[with_words], []), "logprobs": 3, "logprobs_mode": "processed"}),
        (12, {"temperature": 0.8, "seed": 5, "n": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4}),
        (13, {"temperature": 1.2, "seed": 6, "top_k": 30, "top_p": 0.9, "logprobs": 40, "logprobs_mode": "processed"}),
        (14, {"temperature": 0.7, "seed": 7, "min_p": 0.05, "logit_bias": {5: 2.5}, "logprobs": 3}),
        (15, {"temperature": 1.0, "seed": 8, "logprobs": -1, "allowed_token_ids": list(range(0, 320, 3))}),
    ]
    return [(prompts(16)[i], SamplingParams(**(common | kind))) for i, kind in kinds]


def words_in(tokens: list[int], space: str) -> list[str]:
    """Words of one token and of two that an output has after a space or none, spelled by these tokens wherever they
    stand."""
    tokenizer = params().tokenizer
    found = []
    for size in (1, 2):
        for start in range(len(tokens) - size + 1):
            part = tokens[start : start + size]
            text = tokenizer.decode(part)
            word = text.removeprefix(space)
            if word and text == space + word and tokenizer.encode_continuation(text) == part:
                found.append(word)
    return [word for word in found if not word.startswith(" ")]


def test_a_mixed_batch_gives_what_the_definitions_say_in_chunks_and_with_steps_started_ahead(engine, monkeypatch):
    launched = []
    launch = Engine._launch
    monkeypatch.setattr(Engine, "_launch", lambda self, *args: launched.append(len(args)) or launch(self, *args))
    outputs = support.serve(engine, *zip(*questions(), strict=True))
    assert launched.count(2) > 5, "no step was started ahead"
    num_tokens, num_near, num_changed = check(outputs, questions())
    print(f"{num_tokens} tokens, {num_near} near another one, {num_changed} changed by the adjustments")
    assert num_near < num_tokens / 20
    assert num_changed > num_tokens / 10
    # As many as there are rows, so that nearly every step is started ahead.
    for few in (questions()[1:5], questions()[7:11]):
        launched.clear()
        outputs = support.serve(engine, *zip(*few, strict=True))
        assert launched.count(2) > 8
        check(outputs, few)


def test_a_mixed_batch_gives_the_same_without_steps_started_ahead_and_from_cached_prompts(engine, monkeypatch):
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, async_scheduling=False))
    check(support.serve(engine, *zip(*questions(), strict=True)), questions())
    for few in (questions()[1:5], questions()[11:]):  # whose pages all stay in the pool
        support.serve(engine, *zip(*few, strict=True))
        outputs = support.serve(engine, *zip(*few, strict=True))
        assert all(output.num_cached_tokens for output in outputs if len(output.prompt_token_ids) > 4)
        check(outputs, few)


def test_each_setting_changes_some_token():
    for prompt, sampling in questions()[1:]:
        steps = expected(prompt, sampling, sampling.seed or 0, [])
        plain = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
        neutral = SamplingParams(**plain, max_tokens=sampling.max_tokens)
        others = expected(prompt, neutral, sampling.seed or 0, [])
        assert [step.token_id for step in steps] != [step.token_id for step in others], sampling


@pytest.mark.parametrize("ahead", [True, False])
def test_preempted_requests_are_penalized_for_the_output_that_they_had(engine, monkeypatch, ahead):
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, async_scheduling=ahead))
    asked = questions()[::-1]
    before = engine.stats.num_preemptions
    with support.small_pool(engine, 17):
        outputs = support.serve(engine, *zip(*asked, strict=True))
    assert engine.stats.num_preemptions > before
    assert any(output.num_preemptions and sampling.has_penalties for output, (_, sampling) in zip(outputs, asked))
    check(outputs, asked)


def test_a_fork_goes_on_from_the_counts_and_masks_of_its_parent(engine):
    for prompt, sampling in questions():
        if sampling.n > 1 or sampling.temperature > 0:  # a fork has draws of its own
            continue
        name = engine.add_request(prompt, sampling)
        while len(engine._groups[name].samples[0].request.output_token_ids) < 3:
            engine.step()
        (fork,) = engine.fork(name)
        finished = support.finish(engine)
        check([finished[name], finished[fork]], [(prompt, sampling)] * 2)


def test_ids_that_end_the_text_do_not_wait_where_nothing_else_is_left_to_draw(engine):
    sampling = SamplingParams(temperature=0, allowed_token_ids=[EOS, 70], stop_token_ids=[70], min_tokens=3)
    ((sample,),) = [output.outputs for output in support.serve(engine, [[5, 6]], sampling)]
    assert set(sample.token_ids) <= {EOS, 70}


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [70], "stop_token_ids": [70]},
        {"structured": Structured(choice=["ab", "cd"])},
    ],
)
def test_a_text_ends_with_the_first_id_that_ends_it_where_min_tokens_gives_way(engine, asked):
    sampling = SamplingParams(temperature=0, min_tokens=6, max_tokens=12, **asked)
    (sample,) = support.serve(engine, [[5, 6]], sampling)[0].outputs
    ending = rules_of(sampling)["ending_ids"]
    assert [token_id in ending for token_id in sample.token_ids] == [False] * (len(sample.token_ids) - 1) + [True]
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize("penalty", [1e-45, 1e-40, 1e-38, 3e38, 1e39, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_least_and_the_greatest_penalties_break_no_number(engine, penalty, temperature):
    sampling = SamplingParams(
        temperature=temperature,
        seed=1,
        repetition_penalty=penalty,
        max_tokens=3,
        logprobs=3,
        logprobs_mode="processed",
        ignore_eos=True,
    )
    name = engine.add_request([5, 6, 7], sampling)
    try:
        (sample,) = support.finish(engine)[name].outputs
    finally:
        engine.abort(name)  # whatever failed must not reach the next test
    assert not np.isnan(sample.logprobs).any()
    assert all(0 <= i < VOCAB for tops in sample.top_logprobs for i in tops)


def test_the_likeliest_ids_are_in_the_vocabulary_if_the_model_breaks(engine, monkeypatch):
    monkeypatch.setattr(engine, "weights", jax.tree.map(lambda leaf: leaf * np.float32("inf"), params().weights))
    (sample,) = support.serve(engine, [[5, 6, 7]], SamplingParams(logprobs=3, max_tokens=2, ignore_eos=True))[0].outputs
    assert all(0 <= i < VOCAB for tops in sample.top_logprobs for i in tops)


def test_the_log_probability_of_a_sample_is_the_same_whether_or_not_each_token_is_told(engine):
    common: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "seed": 1, "max_tokens": 6, "ignore_eos": True}
    common |= {"logprobs_mode": "processed"}
    for adjusted in ({}, {"presence_penalty": 1e-6}):
        told, silent = (
            support.serve(engine, [[5, 6, 7]], SamplingParams(**common, **adjusted, logprobs=logprobs))[0].outputs[0]
            for logprobs in (True, None)
        )
        assert silent.token_ids == told.token_ids
        assert silent.cumulative_logprob == pytest.approx(told.cumulative_logprob, abs=1e-4), adjusted


def test_whatever_is_asked_for_nothing_is_compiled_after_warm_up():
    warm = support.build(params(), warm_up=True, late_compile="error", prompt_logprobs=True)
    asked = [*questions(), ([5, 6, 7], SamplingParams(prompt_logprobs=3, logprobs=-1, max_tokens=4))]
    asked += [([8] * 9, SamplingParams(structured=Structured(regex="[a-z]{4}"), n=2, seed=1))]
    asked += [([9, 9], SamplingParams(logits_processor=lambda tokens, logits: logits, max_tokens=3))]
    for _ in range(2):
        support.serve(warm, *map(list, zip(*asked)))
    assert warm.stats.num_compiles == 0
    support.assert_idle(warm)
