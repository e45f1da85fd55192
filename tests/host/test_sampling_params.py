import numpy as np
import pytest

from jpaged.host.sampling_params import MAX_BIASED_IDS, MAX_N, SamplingParams
from jpaged.host.structured import Structured


def test_by_default_a_sample_of_sixteen_tokens_is_drawn_from_the_unmodified_distribution():
    sampling = SamplingParams()
    assert (sampling.n, sampling.max_tokens, sampling.min_tokens) == (1, 16, 0)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.stop, sampling.stop_token_ids, sampling.seed) == ((), (), None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("n", MAX_N),
        ("temperature", 0),
        ("temperature", 2.5),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 50),
        ("top_p", 1),
        ("top_p", 0.01),
        ("min_p", 0),
        ("min_p", 1.0),
        ("max_tokens", 1),
        ("max_tokens", None),
        ("min_tokens", 16),
        ("repetition_penalty", 0.1),
        ("frequency_penalty", -2),
        ("presence_penalty", 2.0),
        ("logprobs", 0),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("truncate_prompt_tokens", 1),
        ("seed", 0),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
    ],
)
def test_the_ends_of_every_range_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", MAX_N + 1),
        ("n", 1.0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", -0.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", False),
        ("stop_token_ids", 5),
        ("stop_token_ids", "2"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("include_stop_str_in_output", 1),
        ("ignore_eos", None),
        ("logprobs", -2),
        ("logprobs", 1.5),
        ("logprobs", "all"),
        ("logprobs_mode", "cooked"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("presence_penalty", -2.5),
        ("presence_penalty", None),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 7),
        ("allowed_token_ids", [True]),
        ("bad_words", [""]),
        ("bad_words", 3),
        ("structured", {"regex": "a"}),
        ("detokenize", 1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", 2.0),
        ("skip_special_tokens", "no"),
        ("spaces_between_special_tokens", 1),
        ("spaces_between_special_tokens", "yes"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_with_the_value(name, value):
    with pytest.raises(ValueError) as refused:
        SamplingParams(**{name: value})
    assert f"{name} must be" in str(refused.value)
    assert f"got {value!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("bias", "shown"),
    [
        ({5: 101}, "5: 101"),
        ({5: float("nan")}, "5: nan"),
        ({5: "much"}, "5: 'much'"),
        ({5: True}, "5: True"),
        ({-1: 1.0}, "-1: 1.0"),
        ({"five": 1.0}, "'five': 1.0"),
        ({1.5: 1.0}, "1.5: 1.0"),
        ({True: 1.0}, "True: 1.0"),
        ([5], "[5]"),
        (dict.fromkeys(range(MAX_BIASED_IDS + 1), 1.0), f"dict of {MAX_BIASED_IDS + 1}"),
    ],
)
def test_a_logit_bias_is_ids_and_numbers(bias, shown):
    with pytest.raises(ValueError) as refused:
        SamplingParams(logit_bias=bias)
    assert "logit_bias must be" in str(refused.value) and str(refused.value).endswith(f"got {shown}")


def test_the_ids_of_a_logit_bias_may_be_text_as_in_json():
    assert SamplingParams(logit_bias={"7": 1, 8: np.float32(-2)}).logit_bias == {7: 1.0, 8: -2.0}
    assert SamplingParams(logit_bias={}) == SamplingParams()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stop": "a", "detokenize": False}, "needs detokenize=True"),
        ({"structured": Structured(regex="a"), "ignore_eos": True}, "contradicts ignore_eos"),
        ({"structured": Structured(regex="a"), "allowed_token_ids": [1]}, "give one of them"),
        ({"num_beams": 2, "temperature": 0, "logit_bias": {1: 1.0}}, "contradicts num_beams"),
        ({"num_beams": 2, "temperature": 0, "logprobs": 3}, "contradicts num_beams"),
        ({"num_beams": 2, "temperature": 0, "bad_words": "a"}, "contradicts num_beams"),
    ],
)
def test_what_contradicts_is_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "exactly one of json, json_object, regex, grammar, choice .*got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"regex": b"a"}, "regex must be text, got bytes"),
        ({"choice": []}, "from 1 to"),
        ({"choice": ["a", ""]}, "non-empty texts"),
        ({"choice": "abc"}, "non-empty texts"),
        ({"json": "{"}, "not JSON"),
        ({"json": [1]}, "an object"),
        ({"json": {"minimum": float("nan")}}, "not JSON"),
    ],
)
def test_a_structure_is_one_thing(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Structured(**options)


def test_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(ValueError, match=r"min_tokens \(17\) must not exceed max_tokens \(16\)"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17


def test_whether_log_probabilities_are_wanted_may_be_said_without_a_number():
    assert SamplingParams(logprobs=True) == SamplingParams(logprobs=0) != SamplingParams(logprobs=1)
    assert SamplingParams(logprobs=False) == SamplingParams()


def test_one_stop_string_is_not_a_list_of_letters():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert SamplingParams(temperature=1e-5).temperature == 0.0
    assert SamplingParams(temperature=1e-3).temperature == 1e-3


def test_equal_parameters_are_one_key():
    structures = [Structured(json={"type": "object"}), Structured(json='{"type": "object"}')]
    assert len({SamplingParams(structured=one, logit_bias={1: 2}) for one in structures}) == 1
    assert len({SamplingParams(stop=["a"]), SamplingParams(stop=("a",)), SamplingParams(stop="a")}) == 1


def test_parameters_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().n = 2


def test_numbers_of_numpy_are_taken_as_numbers():
    sampling = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), top_p=np.float32(0.25), top_k=np.uint8(7)
    )
    assert sampling == SamplingParams(max_tokens=3, temperature=0.5, top_p=0.25, top_k=7)
    assert type(sampling.max_tokens) is int and type(sampling.temperature) is float


def test_a_whole_number_beyond_all_floats_is_a_number_like_any_other():
    assert SamplingParams(temperature=10**400).temperature == 10**400
    with pytest.raises(ValueError, match="min_p must be from 0"):
        SamplingParams(min_p=10**400)
