"""Bad input: one ValueError with the value and the cure, before anything changes; what runs goes on."""

from __future__ import annotations

import math
import re

import engine_support as support
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged.device.params import Params
from jpaged.engine import api
from jpaged.engine.engine import Engine
from jpaged.host.config import EngineConfig
from jpaged.host.sampling_params import SamplingParams

PROMPTS = {
    "empty text": ("", "empty.*at least one character"),
    "no token ids": ([], "empty.*at least one token"),
    "an empty array": (np.zeros(0, np.int32), "empty"),
    "as long as max_model_len": ([5] * 64, "64 tokens.*max_model_len is 64.*shorten.*raise max_model_len"),
    "longer than max_model_len": ([5] * 1000, "1000 tokens.*max_model_len is 64"),
    "an id beyond the vocabulary": ([5, 320], "320 is outside.*0 to 319"),
    "a negative id": ([-1], "-1 is outside.*0 to 319"),
    "an id of 64 bits": ([2**63], f"{2**63} is outside"),
    "a fraction": ([1.5], "whole numbers, got 1.5"),
    "a truth value": ([True], "whole numbers, got True"),
    "nothing": (None, "text, a list of token ids or a list of messages, got NoneType"),
    "a number": (7, "got int"),
    "bytes": (b"abc", "got bytes"),
    "an array of fractions": (np.array([1.0, 2.0]), "whole numbers.*float64"),
    "an array of rows": (np.ones((2, 3), np.int32), r"shape \(2, 3\)"),
    "an array with a bad id": (np.array([5, 400]), "400 is outside"),
    "a jax array with a bad id": (jnp.array([5, 400]), "400 is outside"),
    "text without a tokenizer": ("hello", "no tokenizer.*token ids"),
    "messages without a tokenizer": ([{"role": "user", "content": "hello"}], "no tokenizer.*token ids"),
    "ids and text": ([5, "a"], "whole numbers, got 'a'"),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_bad_prompt_is_refused_and_what_runs_goes_on(engine, kind):
    prompt, message = PROMPTS[kind]
    ids = support.reference("llama")["input_ids"][0]
    engine.add_request(ids, support.GREEDY, request_id="running")
    for _ in range(4):
        engine.step()
    before = engine.num_free_pages, engine._scheduler.num_running, engine._scheduler.num_waiting
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, support.GREEDY, request_id="bad")
    assert (engine.num_free_pages, engine._scheduler.num_running, engine._scheduler.num_waiting) == before
    assert engine.abort("bad") is False
    finished = support.finish(engine)
    assert support.tokens([finished["running"]]) == [support.reference("llama")["greedy"][0].tolist()]


@pytest.mark.parametrize("prompt", ["beyond", [{"role": "user", "content": "beyond"}]])
def test_text_of_another_models_tokenizer_is_refused(prompt):
    class Other:
        eos_token_ids = frozenset()

        def encode(self, text, add_special_tokens=True):
            return [5, 320]

        def apply_chat_template(self, messages):
            return "beyond"

    params = support.tiny("llama")
    engine = support.build(Params(params.weights, params.config, Other()))
    with pytest.raises(ValueError, match="token id 320.*ids 0 to 319.*one checkpoint"):
        engine.add_request(prompt)
    support.assert_idle(engine)


def _with(**changed):
    params = support.tiny("llama")
    return Params({**params.weights, **changed}, params.config)


def _deleted():
    params = jax.tree.map(lambda w: w + 0, support.tiny("llama"))
    params.weights["head"].delete()
    return params


PARAMS = {
    "no params": (lambda: None, "must be a jpaged.Params.*got NoneType"),
    "a tree without config": (lambda: support.tiny("llama").weights, "must be a jpaged.Params.*got dict"),
    "no weights": (lambda: Params({}, support.tiny("llama").config), "no weight embed"),
    "a weight of None": (lambda: _with(head=None), "no weight head"),
    "a number": (lambda: _with(head=1.0), "head is a float: use jax.device_put"),
    "another shape": (lambda: _with(head=jnp.ones((64, 319))), r"head has shape \(64, 319\).*\(64, 320\)"),
    "whole numbers": (lambda: _with(head=jnp.ones((64, 320), int)), "must be floats, but head is int32"),
    "deleted": (_deleted, "head was deleted.*donated"),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_params_that_cannot_be_run_are_refused(kind):
    make, message = PARAMS[kind]
    with pytest.raises(ValueError, match=message):
        Engine(make(), warm_up=False)
    with pytest.raises(ValueError, match=message):
        jpaged.generate(make(), [5], support.GREEDY, **support.LIMITS)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_generating_inside_a_transformed_function_is_refused(transform):
    def loss(params):
        jpaged.generate(params, [5], support.GREEDY, **support.LIMITS)
        return 0.0

    with pytest.raises(ValueError, match="being traced.*call it outside"):
        transform(loss)(support.tiny("llama"))


def test_a_config_that_is_none_and_a_name_that_is_no_text_are_refused(engine):
    with pytest.raises(ValueError, match="must be an EngineConfig, got dict"):
        Engine(support.tiny("llama"), {"page_size": 16})
    with pytest.raises(ValueError, match=r"request_id must be text or None, got \[1\]"):
        engine.add_request([5], request_id=[1])


SAMPLING = {
    "temperature": (math.nan, math.inf, -0.5, "warm", True, None),
    "top_p": (0, 0.0, 1.5, -1, math.nan, "all"),
    "top_k": (-2, 1.5, True, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "max_tokens": (0, -1, 1.5, True),
    "min_tokens": (-1, 0.5, None),
    "n": (0, -1, 10**6, 1.5, True),
    "seed": (2**64, -(2**63) - 1, 1.5, True),
    "stop": ("", [""], [1], 5),
    "stop_token_ids": ([-1], [1.5], [True], 5),
    "ignore_eos": (1, "yes"),
    "logprobs": (-2, 1.5),
    "repetition_penalty": (0, math.nan, -1),
    "frequency_penalty": (3, math.inf),
    "allowed_token_ids": ([], [-1]),
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in SAMPLING.items() for value in values])
def test_a_bad_sampling_value_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(ValueError, match=f"^{name} .*{re.escape(repr(value))}"):
        SamplingParams(**{name: value})


def test_contradictory_sampling_values_are_refused():
    with pytest.raises(ValueError, match=r"min_tokens \(5\).*max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    "sampling, message",
    [
        (SamplingParams(stop_token_ids=[320]), "stop_token_ids has 320.*ends at 319"),
        (SamplingParams(logit_bias={320: 1}), "logit_bias has 320.*ends at 319"),
        (SamplingParams(allowed_token_ids=[1, 320]), "allowed_token_ids has 320.*ends at 319"),
        (SamplingParams(logprobs=321), "logprobs must be at most the size of the vocabulary, 320, got 321"),
        (SamplingParams(bad_words="x"), "bad_words needs a tokenizer"),
        (SamplingParams(structured=jpaged.Structured(regex="x")), "structured needs a tokenizer"),
        (SamplingParams(stop="x"), "stop strings need a tokenizer.*stop_token_ids"),
        (SamplingParams(stop_token_ids=list(range(3, 50)), min_tokens=1), "at most 32.*min_tokens=0"),
        ({"temperature": 0}, "sampling must be SamplingParams, got dict"),
        ([SamplingParams()], "sampling must be SamplingParams, got list"),
        ({}, "sampling must be SamplingParams, got dict"),
    ],
)
def test_sampling_that_this_model_cannot_honour_is_refused(engine, sampling, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request([5, 6], sampling)
    assert engine.step() == []


def test_a_tiny_temperature_is_greedy(engine):
    expected = support.tokens(support.serve(engine, [[5, 6]]))
    for temperature in (1e-5, 1e-300, 1e-4):
        sampling = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True, seed=1)
        assert support.tokens(support.serve(engine, [[5, 6]], sampling)) == expected


def test_a_huge_temperature_and_the_smallest_top_p_are_served(engine):
    wild = SamplingParams(temperature=1e300, max_tokens=20, ignore_eos=True, seed=1)
    narrow = SamplingParams(temperature=1, top_p=1e-300, max_tokens=20, ignore_eos=True, seed=1)
    drawn, alone = support.tokens(support.serve(engine, [[5, 6]] * 2, [wild, narrow]))
    assert len(set(drawn)) > 10
    assert [alone] == support.tokens(support.serve(engine, [[5, 6]]))


OPTIONS = {
    "page_size": 0,
    "max_num_seqs": -1,
    "max_num_batched_tokens": 1.5,
    "max_model_len": 1,
    "gpu_memory_utilization": 1.5,
    "kv_cache_memory": "lots",
    "num_pages": 1,
    "dtype": "int8",
    "warm_up": 1,
    "late_compile": "never",
    "check_integrity": "yes",
}


@pytest.mark.parametrize(
    "way_in, name",
    [
        (way_in, name)
        for way_in in ("engine", "with config", "generate", "LLM")
        for name in OPTIONS
        if (way_in, name) != ("LLM", "dtype")  # there it is the dtype of the weights, which loading checks
    ],
)
def test_a_bad_option_is_refused_by_every_way_in(way_in, name):
    params, options = support.tiny("llama"), {name: OPTIONS[name]}
    with pytest.raises(ValueError, match=f"^{name} .*{re.escape(repr(OPTIONS[name]))}"):
        if way_in == "engine":
            Engine(params, **options)
        elif way_in == "with config":
            Engine(params, EngineConfig(), **options)
        elif way_in == "generate":
            jpaged.generate(params, [[5]], **options)
        else:
            jpaged.LLM(params, **options)


@pytest.mark.parametrize("way_in", ["engine", "with config", "generate", "stream", "LLM"])
def test_an_unknown_option_is_named_with_the_nearest(way_in):
    params, options = support.tiny("llama"), {"max_num_seq": 4}
    with pytest.raises(ValueError, match="'max_num_seq'.*did you mean max_num_seqs"):
        if way_in == "engine":
            Engine(params, **options)
        elif way_in == "with config":
            Engine(params, EngineConfig(), **options)
        elif way_in == "LLM":
            jpaged.LLM(params, **options)
        else:
            getattr(jpaged, way_in)(params, [[5]], **options)


def test_an_option_near_to_nothing_lists_them_all():
    with pytest.raises(ValueError, match="'quux'.*page_size, max_num_seqs"):
        jpaged.generate(support.tiny("llama"), [[5]], quux=1)


def test_an_unknown_sampling_parameter_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="kv_cache_memory.*num_pages.*give one"):
        EngineConfig(kv_cache_memory="1GiB", num_pages=10)
    with pytest.raises(ValueError, match="late_compile='error' needs warm_up=True"):
        EngineConfig(late_compile="error", warm_up=False)


def test_a_pool_too_small_for_one_request_is_refused_with_the_sizes():
    with pytest.raises(ValueError, match=r"max_model_len \(64\) takes 16 pages of 4 tokens.*15.*lower.* to 60"):
        support.build(support.tiny("llama"), num_pages=16)


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match=r"max_model_len \(100000\) is beyond the \d+ positions"):
        support.build(support.tiny("llama"), max_model_len=100_000)


def test_what_is_no_params_is_refused():
    params = support.tiny("llama")
    for bad in (params.weights, None, "path/to/model"):
        with pytest.raises(ValueError, match=f"params must be a jpaged.Params.*got {type(bad).__name__}"):
            jpaged.generate(bad, [[5]])


def test_weights_of_another_kind_are_refused():
    params = support.tiny("llama")
    on_host = jax.tree.map(np.asarray, params)
    with pytest.raises(ValueError, match="jax.device_put"):
        support.build(on_host)


@pytest.mark.parametrize(
    "prompts, sampling, message",
    [
        ([[5], [6], []], None, "empty"),
        ([[5], [400]], None, "400 is outside"),
        ([[5], [6]], [SamplingParams()], "2 prompts and 1 SamplingParams"),
        ([[5]], [], "1 prompts and 0 SamplingParams"),
        ([[5]], [None], "sampling must be SamplingParams or a list of them, got NoneType"),
        ([[5]], 0.7, "sampling must be SamplingParams or a list of them, got float"),
        ([[5]], {"temperature": 1}, "sampling must be SamplingParams or a list of them, got dict"),
        (b"text", None, "got bytes"),
        (None, None, "got NoneType"),
        (5, None, "got int"),
        ({"role": "user", "content": "x"}, None, "got dict"),
        ([None], None, "got NoneType|whole numbers, got None"),
        ([[5], SamplingParams(), 3], None, "got SamplingParams|whole numbers"),
    ],
)
@pytest.mark.parametrize("way_in", ["generate", "stream"])
def test_one_bad_prompt_of_a_list_queues_none(prompts, sampling, message, way_in):
    options = support.LIMITS | {"warm_up": False, "check_integrity": True}
    with pytest.raises(ValueError, match=message):
        getattr(jpaged, way_in)(support.tiny("llama"), prompts, sampling, **options)
    for engine in api._engines.values():
        support.assert_idle(engine)
    # And the next call is served.
    assert len(jpaged.generate(support.tiny("llama"), [[5]], support.GREEDY, **options)) == 1
