"""Structured texts through the engine. The parrot finds all tokens but those of its script equally likely: what it
draws beside them is chance, held in shape by the masks alone."""

from __future__ import annotations

import json
import re

import engine_support as support
import jax
import pytest

from jpaged.host.request import RequestFailed
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured

CODE = Structured(regex="[0-9]{3}-[a-z]{4,9}")
POINT = Structured(
    json={
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
        "required": ["x", "on"],
        "additionalProperties": False,
    }
)
ENDLESS = Structured(regex="[0-9]{1000,}")


def draw(structured=CODE, **options):
    return SamplingParams(**({"max_tokens": 60, "structured": structured, "seed": 1} | options))


def texts(outputs):
    return [sample.text for output in outputs for sample in output.outputs]


@pytest.fixture(autouse=True)
def silent(parrot):
    """Says nothing by itself: its script is a token that no test allows."""
    support.teach(parrot, "!")


def test_texts_have_the_shape_that_was_asked_for_beside_others_that_have_none(parrot):
    free = SamplingParams(max_tokens=9, ignore_eos=True, seed=5)
    alone = support.serve(parrot, ["Go"], free)
    choice = Structured(choice=["maybe so", "surely not"])
    sampling = [draw(n=4), free, draw(choice), draw(POINT, seed=3), draw(choice, temperature=0)]
    outputs = support.serve(parrot, ["Go"] * 5, sampling)
    codes = texts(outputs[:1])
    assert len(set(codes)) == 4 and all(re.fullmatch(CODE.regex, code) for code in codes)
    assert support.tokens(outputs[1:2]) == support.tokens(alone), "a structure reaches into another row"
    assert set(texts(outputs[2:3]) + texts(outputs[4:])) <= set(choice.choice)
    assert {sample.finish_reason for output in (outputs[0], outputs[2]) for sample in output.outputs} == {"stop"}
    (point,) = outputs[3].outputs
    assert point.text.startswith("{")
    if point.finish_reason == "stop":  # white space may take all the room that there is
        assert set(json.loads(point.text)) == {"x", "on"}
    assert texts(support.serve(parrot, ["Go"] * 5, sampling)) == texts(outputs), "seeds do not repeat"


def test_a_text_that_cannot_end_is_cut_at_max_tokens(parrot):
    (output,) = support.serve(parrot, ["Go"], draw(ENDLESS, max_tokens=12))
    (sample,) = output.outputs
    assert sample.finish_reason == "length" and len(sample.token_ids) == 12 and sample.text.isdigit()


def test_a_complete_text_ends_before_min_tokens(parrot):
    (output,) = support.serve(parrot, ["Go"], draw(Structured(choice=["abc"]), min_tokens=20))
    assert texts([output]) == ["abc"] and output.outputs[0].finish_reason == "stop"
    # Where more may follow, it does.
    (output,) = support.serve(parrot, ["Go"], draw(Structured(regex="[0-9]+"), min_tokens=20))
    assert len(output.outputs[0].token_ids) >= 20


def test_a_stop_string_ends_a_structured_text(parrot):
    (output,) = support.serve(parrot, ["Go"], draw(Structured(choice=["one two three four"]), stop="three"))
    (sample,) = output.outputs
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("one two ", "stop", "three")


def test_a_structure_that_nothing_can_have_is_refused_and_others_go_on(parrot):
    running = parrot.add_request("Go", draw())
    with pytest.raises(ValueError, match="regex cannot be followed"):
        parrot.add_request("Go", draw(Structured(regex="((")))
    finished = support.finish(parrot)
    assert re.fullmatch(CODE.regex, finished[running].outputs[0].text)


def test_a_grammar_that_grows_too_large_ends_its_request_and_no_other(parrot):
    expected = texts(support.serve(parrot, ["Go"], draw()))
    running = parrot.add_request("Go", draw())
    too_large = [parrot.add_request("Go", draw(Structured(regex="a{1000000}"), n=n)) for n in (1, 2)]
    failed, finished = [], {}
    while parrot.has_unfinished_requests():
        try:
            finished |= {output.request_id: output for output in parrot.step() if output.finished}
        except RequestFailed as error:
            assert re.match("regex cannot be followed beyond [0-9]+ tokens: [^<]+$", str(error)), error
            failed.append(error.request_id)
    assert sorted(failed) == sorted(too_large)
    assert list(finished) == [running] and texts(finished.values()) == expected
    support.assert_idle(parrot)


def test_preemption_and_interruptions_do_not_change_a_structured_text(parrot, monkeypatch):
    sampling = [draw(seed=seed) for seed in range(4)]
    expected = texts(support.serve(parrot, ["Go on"] * 4, sampling))
    with support.small_pool(parrot, 6):
        outputs = support.serve(parrot, ["Go on"] * 4, sampling)
    assert texts(outputs) == expected and sum(output.num_preemptions for output in outputs)

    ids = [parrot.add_request("Go on", one) for one in sampling]
    for _ in range(3):
        parrot.step()
    get = jax.device_get

    def fail(*args):
        monkeypatch.setattr(jax, "device_get", get)
        raise KeyboardInterrupt

    monkeypatch.setattr(jax, "device_get", fail)
    with pytest.raises(KeyboardInterrupt):
        parrot.step()
    finished = support.finish(parrot)
    assert texts(finished[name] for name in ids) == expected


def test_an_interruption_at_the_end_leaves_no_request_counted(parrot, monkeypatch):
    name = parrot.add_request("Go on", draw(max_tokens=1))

    def fail(gained):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(parrot, "_outputs", fail)
    with pytest.raises(KeyboardInterrupt):
        parrot.step()
    assert list(support.finish(parrot)) == [name]
    assert parrot.stats.num_running == parrot.stats.num_waiting == parrot.stats.num_used_pages == 0


def test_a_fork_goes_on_in_the_structure(parrot):
    name = parrot.add_request("Go", draw(Structured(regex="[0-9]{12}"), max_tokens=20))
    parrot.step()
    parrot.step()
    forks = parrot.fork(name, 2)
    finished = support.finish(parrot)
    assert all(re.fullmatch("[0-9]{12}", text) for text in texts(finished[one] for one in (name, *forks)))


def test_bad_words_do_not_come(parrot):
    support.teach(parrot, " one two three")
    (free,) = support.serve(parrot, ["Say:"], SamplingParams(temperature=0, max_tokens=3))
    assert free.outputs[0].text == " one two three"
    greedy = SamplingParams(temperature=0, max_tokens=3, bad_words=["two"])
    (output,) = support.serve(parrot, ["Say:"], greedy)
    assert output.outputs[0].text.startswith(" one") and "two" not in output.outputs[0].text
    longer = SamplingParams(temperature=0, max_tokens=3, bad_words=["one two", "one three"])
    (output,) = support.serve(parrot, ["Say:"], longer)
    assert output.outputs[0].text.startswith(" one") and "two" not in output.outputs[0].text


def test_without_detokenization_there_are_tokens_and_no_text(parrot):
    support.teach(parrot, " one two")
    (output,) = support.serve(parrot, ["Say:"], SamplingParams(temperature=0, detokenize=False))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3


def test_only_the_last_tokens_of_a_prompt_are_used_if_it_is_so_asked(parrot):
    (output,) = support.serve(parrot, [[5, 6, 7, 8]], SamplingParams(max_tokens=1, truncate_prompt_tokens=2))
    assert output.prompt_token_ids == [7, 8]
    (output,) = support.serve(parrot, [[5, 6, 7, 8]], SamplingParams(max_tokens=1, truncate_prompt_tokens=9))
    assert output.prompt_token_ids == [5, 6, 7, 8]


def test_bad_words_that_leave_none_of_the_allowed_ids_are_refused(parrot):
    word = parrot.tokenizer.encode_continuation(" two")
    with pytest.raises(ValueError, match="bad_words leave none of allowed_token_ids"):
        parrot.add_request("Say:", SamplingParams(allowed_token_ids=word, bad_words=["two"]))


def test_of_processed_log_probabilities_only_those_that_can_be_drawn_are_told(parrot):
    sampling = SamplingParams(
        temperature=0, max_tokens=1, logprobs=5, logprobs_mode="processed", allowed_token_ids=[7, 9]
    )
    (output,) = support.serve(parrot, ["Go"], sampling)
    (tops,) = output.outputs[0].top_logprobs
    assert set(tops) == {7, 9}
