"""`POST /v1/completions`, as clients of OpenAI's protocol send it and read it."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from engine_support import reference
from server_support import chat_tokenizer, close, saying

PATH = "/v1/completions"
GREEDY = {"model": "tiny", "temperature": 0}
SCRIPT = " one two three STOP HERE four five"


def joined(events: list[dict], index: int = 0) -> dict:
    """The choice that a stream's events make."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1 and choices[-1]["finish_reason"], "one finish reason, in the last event of the choice"
    found = {"index": index, "text": "".join(choice["text"] for choice in choices), "finish_reason": reasons[0]}
    if choices[0]["logprobs"] is not None:
        names = choices[0]["logprobs"].keys()
        found["logprobs"] = {
            name: None
            if choices[0]["logprobs"][name] is None
            else list(itertools.chain(*(choice["logprobs"][name] for choice in choices)))
            for name in names
        }
    return found


def same(choice: dict, streamed: dict) -> None:
    assert {name: choice[name] for name in streamed} == close(streamed)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "Once upon a time", "max_tokens": 24},
        {"prompt": "Once upon a time", "max_tokens": 24, "echo": True},
        {"prompt": "Once upon a time", "max_tokens": 12, "logprobs": 3, "echo": True},
        {"prompt": [9690, 2], "max_tokens": 12, "logprobs": 0},
        {"prompt": ["a b", "c"], "max_tokens": 9, "n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True},
        {"prompt": [[5, 6, 7], [8]], "max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 5, "logprobs": 2},
        {"prompt": "x", "max_tokens": 40, "temperature": 3.0, "seed": 11, "logprobs": 1},
        {"prompt": "x", "max_tokens": 40, "temperature": 3.0, "seed": 12, "stop": ["e", "the"]},
        {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    ids=str,
)
def test_a_stream_is_the_plain_answer_in_parts(live, asked):
    body = GREEDY | asked
    whole = live.post(PATH, body)
    events = live.events(PATH, body | {"stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        same(choice, joined(events, choice["index"]))
    assert events[-1]["choices"] == [] and [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    for usage in (whole["usage"], events[-1]["usage"]):
        del usage["prompt_tokens_details"]
    assert events[-1]["usage"] == whole["usage"]


def test_usage_counts_each_prompt_once_and_the_tokens_of_all_choices(live):
    whole = live.post(PATH, {"prompt": ["a b", "c"], "n": 3, "max_tokens": 5, "ignore_eos": True, "seed": 1})
    size = sum(len(chat_tokenizer().encode(text)) for text in ("a b", "c"))
    usage = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": size, "completion_tokens": 30, "total_tokens": size + 30}
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))


def test_usage_can_be_had_with_each_event(live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.events(PATH, GREEDY | {"prompt": "a", "max_tokens": 6, "ignore_eos": True, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6


def test_without_being_asked_a_stream_says_nothing_of_usage(live):
    assert all("usage" not in event for event in live.events(PATH, GREEDY | {"prompt": "a", "max_tokens": 3}))


def test_echoed_logprobs_are_those_of_the_stored_reference(plain):
    """As evaluations ask: an entry for each token of the prompt, the first null, the greedy token's value the same in
    both places."""
    stored = reference("llama")
    for ids, logits in zip(stored["input_ids"].tolist(), stored["logits"], strict=True):
        whole = plain.post(PATH, GREEDY | {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1})
        logprobs = whole["choices"][0]["logprobs"]
        scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        expected = [scores[i, token_id] for i, token_id in enumerate(ids[1:])] + [scores[-1].max()]
        np.testing.assert_allclose(logprobs["token_logprobs"][1:], expected, atol=2e-3)
        columns = zip(*(logprobs[name][1:] for name in ("token_logprobs", "tokens", "top_logprobs")), strict=True)
        for (value, token, top), row in zip(columns, scores, strict=True):
            assert top[token] == value and max(top.values()) == pytest.approx(row.max(), abs=2e-3)
            assert (value == max(top.values())) == (token == f"token_id:{row.argmax()}")
        assert logprobs["tokens"][:-1] == [f"token_id:{token_id}" for token_id in ids]


def test_tokens_joined_are_the_text_and_offsets_say_where_they_begin(live):
    asked = {
        "prompt": "\n1. Carol has 20",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 40,
        "temperature": 2.0,
        "seed": 3,
    }
    choice = live.post(PATH, asked | {"ignore_eos": True})["choices"][0]
    logprobs, at = choice["logprobs"], 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert offset == at and choice["text"][at:].startswith(token)
        at += len(token)


def test_nothing_is_generated_for_no_tokens(live):
    whole = live.post(PATH, GREEDY | {"prompt": "Hi there", "max_tokens": 0, "echo": True, "logprobs": 1})
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]) == ("Hi there", "length", 0)
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["prompt_tokens"]
    assert live.post(PATH, GREEDY | {"prompt": "Hi", "max_tokens": 0})["choices"][0]["text"] == ""


def test_a_prompt_of_ids_is_echoed_as_text(live):
    ids = chat_tokenizer().encode("Water boils")
    choice = live.post(PATH, GREEDY | {"prompt": ids, "echo": True, "max_tokens": 2})["choices"][0]
    assert choice["text"].startswith("Water boils")


def test_seeds_repeat_and_differ(live):
    def texts(**more):
        asked = {"prompt": "Once", "temperature": 1.0, "max_tokens": 12, "ignore_eos": True} | more
        return [choice["text"] for choice in live.post(PATH, asked)["choices"]]

    seeded = [texts(seed=seed)[0] for seed in range(5)]
    assert len(set(seeded)) == 5 and seeded == [texts(seed=seed)[0] for seed in range(5)]
    assert len(set(texts(seed=42, n=4))) == 4 and texts(seed=42, n=4) == texts(seed=42, n=4)
    assert len({texts()[0] for _ in range(3)}) == 3


def test_the_best_of_several_is_returned(live):
    asked = {"prompt": "Once", "max_tokens": 6, "seed": 1, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    drawn = live.post(PATH, asked | {"n": 4})["choices"]
    best = live.post(PATH, asked | {"n": 2, "best_of": 4})["choices"]
    sums = sorted((sum(choice["logprobs"]["token_logprobs"]) for choice in drawn), reverse=True)
    assert [sum(choice["logprobs"]["token_logprobs"]) for choice in best] == pytest.approx(sums[:2])


def test_ids_of_prompt_and_text_can_be_had(live):
    body = GREEDY | {"prompt": "Once upon", "max_tokens": 5, "return_token_ids": True}
    choice = live.post(PATH, body)["choices"][0]
    assert choice["prompt_token_ids"] == chat_tokenizer().encode("Once upon") and len(choice["token_ids"]) == 5
    events = live.events(PATH, body)
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == choice["token_ids"]


def test_prompt_logprobs_have_an_entry_a_token(live):
    ids = [9690, 1303, 17]
    choice = live.post(PATH, GREEDY | {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1})["choices"][0]
    entries = choice["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 3 and all(str(i) in e for i, e in zip(ids[1:], entries[1:]))
    ranks = [sorted(value["rank"] for value in entry.values() if value["rank"]) for entry in entries[1:]]
    assert ranks == [[1, 2], [1, 2]]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("stop", "included", "text", "reason"),
    [
        ("STOP HERE", False, " one two three ", "STOP HERE"),
        ("TOP H", False, " one two three S", "TOP H"),
        (["HERE", "two three"], False, " one ", "two three"),
        (["HERE", "two three"], True, " one two three", "two three"),
        (" one", False, "", " one"),
        (["absent"], False, SCRIPT, None),
    ],
)
def test_stop_strings_end_streams_and_plain_answers_alike(parrot, stop, included, text, reason, n):
    body = GREEDY | {"prompt": "Say", "max_tokens": 30, "stop": stop, "include_stop_str_in_output": included}
    with saying(parrot, SCRIPT):
        for logprobs in (None, 2):
            whole = parrot.post(PATH, body | {"logprobs": logprobs, "n": n})
            events = parrot.events(PATH, body | {"logprobs": logprobs, "n": n})
            for choice in whole["choices"]:
                assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
                same(choice, joined(events, choice["index"]))


def test_characters_of_several_tokens_arrive_whole(parrot):
    text = " a 👩‍🚀 b 日本 c"
    ids = chat_tokenizer().encode(text)
    if len(set(ids)) < len(ids):
        text = " a 👩 b 日 c"
    with saying(parrot, text):
        events = parrot.events(PATH, GREEDY | {"prompt": "Say", "max_tokens": 40})
    parts = [event["choices"][0]["text"] for event in events]
    assert "".join(parts) == text and all("\ufffd" not in part for part in parts)


def test_what_asks_for_more_tokens_than_generated_by_the_end_of_text_is_honoured(parrot):
    with saying(parrot, SCRIPT) as script:
        body = GREEDY | {"prompt": "Say", "max_tokens": 20}
        assert parrot.post(PATH, body)["usage"]["completion_tokens"] == len(script)
        assert parrot.post(PATH, body | {"ignore_eos": True})["usage"]["completion_tokens"] == 20
        assert parrot.post(PATH, body | {"min_tokens": 12})["usage"]["completion_tokens"] >= 12


def test_a_beam_search_returns_its_sequences_best_first(tmp_path):
    from server_support import Live, build, random_params

    with Live(build(random_params(), max_num_beams=4)) as live:
        asked = {"prompt": "Once", "max_tokens": 6, "use_beam_search": True, "n": 2, "best_of": 4, "ignore_eos": True}
        choices = live.post(PATH, asked | {"logprobs": 0})["choices"]
        sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
        assert len(choices) == 2 and sums == sorted(sums, reverse=True)
        assert live.refused(PATH, asked | {"stream": True})["param"] == "stream"
        assert "max_num_beams" in live.refused(PATH, asked | {"best_of": 8})["message"]
        live.assert_idle()


def test_structured_texts_have_their_shape(live):
    choice = live.post(PATH, {"prompt": "Is it?", "guided_choice": ["yes", "no"], "max_tokens": 20})["choices"][0]
    assert choice["text"] in ("yes", "no")
    choice = live.post(PATH, {"prompt": "x", "structured_outputs": {"regex": "[ab]{3}"}, "max_tokens": 20})["choices"][
        0
    ]
    assert len(choice["text"]) == 3 and set(choice["text"]) <= {"a", "b"}


def test_a_grammar_that_grows_too_large_fails_its_request_alone(live):
    body = {"prompt": "x", "max_tokens": 20, "guided_regex": "a{1000000}"}
    error = live.refused(PATH, body)
    assert error["param"] == "guided_regex" and error["message"].startswith("regex cannot be followed beyond")
    status, _, raw = live.call("POST", PATH, body | {"stream": True})
    last = json.loads(raw.decode().split("\n\n")[-2].removeprefix("data: "))
    assert status == 200 and last == {"error": error}
    assert live.post(PATH, {"prompt": "x", "max_tokens": 2})["choices"]


def test_the_longest_prompt_has_one_token_to_follow(live):
    most = live.engine.max_model_len
    whole = live.post(PATH, GREEDY | {"prompt": [5] * (most - 1), "max_tokens": 1})
    assert whole["usage"]["completion_tokens"] == 1
    for stream in (False, True):
        for size, more in ((most, 1), (most + 1, 1), (most - 10, 30)):
            body = GREEDY | {"prompt": [5] * size, "max_tokens": more, "stream": stream}
            error = live.refused(PATH, body)
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(f"This model's maximum context length is {most} tokens")
    cut = live.post(PATH, GREEDY | {"prompt": [5] * 1000, "truncate_prompt_tokens": 20, "max_tokens": 2})
    assert cut["usage"]["prompt_tokens"] == 20


def test_equal_requests_have_equal_answers_whatever_runs_beside_them(live):
    import threading

    body = GREEDY | {"prompt": "Once upon a time", "max_tokens": 16, "logprobs": 1, "ignore_eos": True}
    alone = live.post(PATH, body)["choices"][0]
    answers: list[dict] = []
    others = [
        {"prompt": "x" * size, "max_tokens": 40, "repetition_penalty": 2.0, "logprobs": 3} for size in (1, 50, 90)
    ]
    threads = [threading.Thread(target=live.post, args=(PATH, other)) for other in others * 2]
    threads += [threading.Thread(target=lambda: answers.append(live.post(PATH, body)["choices"][0])) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 5
    for answer in answers:
        assert answer["text"] == alone["text"]
        values = (choice["logprobs"]["token_logprobs"] for choice in (answer, alone))
        np.testing.assert_allclose(*values, atol=1e-4)


def test_a_tiny_temperature_is_greedy(live):
    body = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True}
    assert (
        live.post(PATH, body | {"temperature": 1e-4})["choices"][0]
        == live.post(PATH, body | {"temperature": 0})["choices"][0]
    )


def test_what_the_model_was_published_with_counts_where_a_request_says_nothing():
    import dataclasses

    from server_support import Live, build, random_params

    params = random_params()
    config = dataclasses.replace(params.config, sampling_defaults=(("temperature", 0.0), ("top_k", 3)))
    params = type(params)(params.weights, config, params.tokenizer)
    body = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True}
    with Live(build(params)) as live:
        texts = {live.post(PATH, body)["choices"][0]["text"] for _ in range(3)}
        drawn = {live.post(PATH, body | {"temperature": 1.0, "top_k": 0})["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 1 and len(drawn) == 3
    with Live(build(params), model_defaults=False) as live:
        assert len({live.post(PATH, body)["choices"][0]["text"] for _ in range(3)}) == 3
