"""`POST /v1/completions`, as clients of OpenAI's protocol send it and read it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
from typing import Any

import numpy as np
import pytest
from engine_support import of_few_shapes, reference, tiny
from logits_oracle import adjusted
from server_support import Live, build, chat_tokenizer, close, random_params, saying, until
from test_beam_search import stored_cases

import jpaged

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
        {"prompt": [[9690, 5], [17]], "n": 2, "temperature": 1.0, "seed": 5, "echo": True, "logprobs": 1},
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
    """As evaluations ask, several prompts at once: an entry for each token of the prompt, the first null, the greedy
    token's value the same in both places."""
    stored = reference("llama")
    prompts = stored["input_ids"].tolist()
    choices = plain.post(PATH, GREEDY | {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1})["choices"]
    for ids, logits, choice in zip(prompts, stored["logits"], choices, strict=True):
        logprobs = choice["logprobs"]
        scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        expected = [scores[i, token_id] for i, token_id in enumerate(ids[1:])] + [scores[-1].max()]
        np.testing.assert_allclose(logprobs["token_logprobs"][1:], expected, atol=2e-3)
        columns = zip(*(logprobs[name][1:] for name in ("token_logprobs", "tokens", "top_logprobs")), strict=True)
        for (value, token, top), row in zip(columns, scores, strict=True):
            assert top[token] == value and max(top.values()) == pytest.approx(row.max(), abs=2e-3)
            assert (value == max(top.values())) == (token == f"token_id:{row.argmax()}")
        assert logprobs["tokens"][:-1] == [f"token_id:{token_id}" for token_id in ids]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("name", ["live", "llama_parrot"])
def test_tokens_joined_are_the_text_and_offsets_say_where_they_begin(name, echo, request):
    live = request.getfixturevalue(name)
    asked = {"prompt": "\n1. Carol has 20", "logprobs": 1, "max_tokens": 40, "temperature": 2.0, "seed": 3}
    with saying(live, SCRIPT) if name == "llama_parrot" else contextlib.nullcontext():
        choice = live.post(PATH, asked | {"echo": echo, "ignore_eos": True, "return_token_ids": True})["choices"][0]
    logprobs, at = choice["logprobs"], 0
    ids = choice["prompt_token_ids"] * echo + choice["token_ids"]
    for token, offset, token_id in zip(logprobs["tokens"], logprobs["text_offset"], ids, strict=True):
        assert offset == at
        if token_id not in live.engine.tokenizer.special_ids:  # those are told, and not in the text
            assert choice["text"][at:].startswith(token)
            at += len(token)
    assert at == len(choice["text"]) and choice["text"].startswith(asked["prompt"] * echo)
    assert [value is None for value in logprobs["token_logprobs"]] == [echo] + [False] * (len(ids) - 1)
    assert [top is None for top in logprobs["top_logprobs"]] == [echo] + [False] * (len(ids) - 1)


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


STOPS = [
    ("STOP HERE", False, " one two three ", "STOP HERE"),
    ("TOP H", False, " one two three S", "TOP H"),
    (["HERE", "two three"], False, " one ", "two three"),
    (["HERE", "two three"], True, " one two three", "two three"),
    (" one", False, "", " one"),
    (["absent"], False, SCRIPT, None),
]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("stop", "included", "text", "reason"), STOPS)
def test_stop_strings_end_streams_and_plain_answers_alike(any_parrot, stop, included, text, reason, n):
    body = GREEDY | {"prompt": "Say", "max_tokens": 30, "stop": stop, "include_stop_str_in_output": included, "n": n}
    with saying(any_parrot, SCRIPT):
        for logprobs in (None, 2):
            whole = any_parrot.post(PATH, body | {"logprobs": logprobs})
            events = any_parrot.events(PATH, body | {"logprobs": logprobs, "stream_options": {"include_usage": True}})
            num_tokens = whole["usage"]["completion_tokens"]
            assert events[-1]["usage"]["completion_tokens"] == num_tokens
            for choice in whole["choices"]:
                assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
                same(choice, joined(events, choice["index"]))
                assert not logprobs or {len(values) for values in choice["logprobs"].values()} == {num_tokens // n}


@pytest.mark.parametrize("text", [" a 👩‍🚀 b 日本 c", " 👩 b 日", "é🙂"])
def test_characters_of_several_tokens_arrive_whole(any_parrot, text):
    for more in ({}, {"echo": True}, {"stop": ["\u200dx", "本x", "🙂x"]}):
        with saying(any_parrot, text):
            events = any_parrot.events(PATH, GREEDY | {"prompt": "Say", "max_tokens": 40} | more)
        parts = [event["choices"][0]["text"] for event in events]
        assert "".join(parts) == "Say" * ("echo" in more) + text and all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_what_asks_for_more_tokens_than_generated_by_the_end_of_text_is_honoured(parrot, stream):
    def told(**more: Any) -> tuple[str, str, int]:
        body = GREEDY | {"prompt": "Say", "max_tokens": 20} | more
        if not stream:
            answer = parrot.post(PATH, body)
            (choice,), usage = answer["choices"], answer["usage"]
        else:
            *events, last = parrot.events(PATH, body | {"stream_options": {"include_usage": True}})
            choice, usage = joined(events), last["usage"]
        return choice["text"], choice["finish_reason"], usage["completion_tokens"]

    with saying(parrot, SCRIPT) as script:
        assert told() == (SCRIPT, "stop", len(script))
        again = parrot.engine.tokenizer.decode((script * 3)[:20])
        assert told(ignore_eos=True) == (again, "length", 20)
        assert told(ignore_eos=True, stop="HERE")[:2] == (SCRIPT.partition("HERE")[0], "stop")
        assert told(ignore_eos=True, stop_token_ids=script[2:3])[1:] == ("stop", 3)
        text, _, num_tokens = told(min_tokens=12)
        assert num_tokens >= 12 and text.startswith(SCRIPT)


def test_each_of_the_ids_that_end_a_text_does():
    stored = reference("llama_multi_eos")
    ids, greedy = stored["input_ids"].tolist(), stored["greedy"].tolist()
    body = GREEDY | {"prompt": ids, "max_tokens": 20, "return_token_ids": True}
    ended = [one[:size] for one, size in zip(greedy, stored["stop_lengths"].tolist(), strict=True)]
    with Live(of_few_shapes(build(tiny("llama_multi_eos"), max_model_len=64))) as live:
        for more, expected in (({}, ended), ({"ignore_eos": True}, greedy)):
            assert [choice["token_ids"] for choice in live.post(PATH, body | more)["choices"]] == expected
            found: list[list[int]] = [[], []]
            for event in live.events(PATH, body | more):
                found[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
            assert found == expected


def test_beams_have_the_scores_of_transformers_for_each_length_penalty(plain):
    """A score is divided by a power of the generated length, whatever the prompt's."""
    penalties = set()
    for prompt, sampling, expected in stored_cases("llama"):
        if sampling.num_beams > 4 or len(sampling.stop_token_ids) > 4:
            continue
        asked = {name: getattr(sampling, name) for name in ("n", "length_penalty", "early_stopping", "max_tokens")}
        asked |= {"prompt": prompt, "use_beam_search": True, "best_of": sampling.num_beams, "logprobs": 0}
        asked |= {"stop_token_ids": list(sampling.stop_token_ids), "ignore_eos": True, "return_token_ids": True}
        choices = plain.post(PATH, asked)["choices"]
        assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _, _ in expected], sampling
        for choice, (_, _, logprobs) in zip(choices, expected, strict=True):
            np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], logprobs, atol=1e-4)
        penalties.add(sampling.length_penalty)
    assert len(penalties) > 2


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 2.0}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.2}, {"frequency_penalty": -0.5}],
    ids=str,
)
def test_penalties_count_what_they_are_said_to_count(plain, penalty):
    """Repetition those of prompt and output, the others those of the output alone: as worked out from logits."""
    params = tiny("llama")
    for prompt in reference("llama")["input_ids"][:, :12].tolist():
        output: list[int] = []
        differs = False
        for _ in range(10):
            padded = np.zeros((1, 24), np.int32)
            padded[0, : len(prompt + output)] = prompt + output
            logits = np.asarray(jpaged.forward(params, padded))[0, len(prompt + output) - 1]
            output.append(int(np.argmax(adjusted(logits, prompt, output, **penalty))))
            differs |= output[-1] != np.argmax(logits)
        body = GREEDY | {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
        assert plain.post(PATH, body | penalty)["choices"][0]["token_ids"] == output
        assert differs, "the penalty changes something"


def test_a_beam_search_returns_its_sequences_best_first(plain):
    asked = {"prompt": [5, 6], "max_tokens": 6, "use_beam_search": True, "n": 2, "best_of": 4, "ignore_eos": True}
    choices = plain.post(PATH, asked | {"logprobs": 0})["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert len(choices) == 2 and sums == sorted(sums, reverse=True)
    assert plain.refused(PATH, asked | {"stream": True})["param"] == "stream"
    assert "max_num_beams" in plain.refused(PATH, asked | {"best_of": 8})["message"]


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
            assert str(size) in error["message"] and (size >= most or f"max_tokens={more}" in error["message"])
    left = live.post(PATH, GREEDY | {"prompt": [5] * (most - 6), "ignore_eos": True})
    assert left["usage"]["completion_tokens"] == 6, "what is left of the context"
    cut = live.post(PATH, GREEDY | {"prompt": [5] * 1000, "truncate_prompt_tokens": 20, "max_tokens": 2})
    assert cut["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize(("own", "of_others"), [(1.0, 2.0), (2.0, 1.0)])
def test_equal_requests_have_equal_answers_whatever_runs_beside_them(live, own, of_others):
    body = GREEDY | {"prompt": "Once upon a time", "max_tokens": 16, "logprobs": 1, "ignore_eos": True}
    body |= {"repetition_penalty": own}
    alone = live.post(PATH, body)["choices"][0]
    answers: list[dict] = []
    others = [
        {"prompt": "x" * size, "max_tokens": 40, "repetition_penalty": of_others, "logprobs": 3} for size in (1, 50, 90)
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


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_pool_cannot_hold_is_refused_at_once_and_others_share_it(stream):
    """It has room for one sequence of the greatest length."""
    prompts = [[5 + i] * size for i, size in enumerate([40, 3, 20, 33, 9, 40])]
    body = GREEDY | {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    engine = of_few_shapes(build(random_params(), num_pages=17, max_model_len=64))
    with Live(engine) as live:

        def told(*prompts: list[int]) -> list[Any]:
            if stream:
                events = live.events(PATH, body | {"prompt": prompts})
                choices = [joined(events, i) for i in range(len(prompts))]
            else:
                choices = live.post(PATH, body | {"prompt": prompts})["choices"]
            return [(choice["text"], choice["logprobs"]) for choice in choices]

        alone = [told(prompt)[0] for prompt in prompts]
        assert engine.stats.num_preemptions == 0
        together: list[Any] = []
        running = threading.Thread(target=lambda: together.extend(told(*prompts)))
        running.start()
        until(lambda: live.service.thread.num_requests or together)
        for path, size in itertools.product((PATH, "/v1/chat/completions"), (65, 64, 1000)):
            asked = {"prompt": [5] * size, "messages": [{"role": "user", "content": " a" * size}], "max_tokens": 1}
            assert live.refused(path, asked | {"stream": stream})["code"] == "context_length_exceeded"
        running.join(60)
        assert [close(list(one)) for one in alone] == [list(one) for one in together]
        assert engine.stats.num_preemptions > 0
        live.assert_idle()


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(live, temperature):
    body = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    greedy, found = (live.post(PATH, body | {"temperature": t})["choices"][0] for t in (0, temperature))
    assert found == close(greedy)


def test_what_the_model_was_published_with_counts_where_a_request_says_nothing():
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
