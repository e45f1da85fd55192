"""The endpoints beside those of texts and chats."""

from __future__ import annotations

import json
import threading
import time

import jax
import numpy as np
import pytest
from engine_support import reference
from prometheus_client.parser import text_string_to_metric_families
from server_support import Live, build, chat_tokenizer, close, random_params, until

import jpaged

GENERATE = "/v1/generate"


def get(live: Live, path: str) -> dict:
    status, _, raw = live.call("GET", path)
    assert status == 200, raw
    return json.loads(raw)


def test_models_are_listed_and_looked_up_by_names_with_slashes():
    with Live(build(random_params()), served_model_names=["org/name", "short"]) as live:
        assert [model["id"] for model in get(live, "/v1/models")["data"]] == ["org/name", "short"]
        assert get(live, "/v1/models/org/name")["max_model_len"] == live.engine.max_model_len
        status, _, raw = live.call("GET", "/v1/models/absent")
        assert status == 404 and json.loads(raw)["error"]["code"] == "model_not_found"
        for name in ("org/name", "short"):
            answer = live.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
            assert answer["model"] == name


def test_texts_become_tokens_and_tokens_texts(live):
    text = "Wörter 日本 👩‍🚀!"
    answer = live.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["tokens"] == chat_tokenizer().encode(text) and answer["count"] == len(answer["tokens"])
    assert len(answer["token_strs"]) == answer["count"] and answer["max_model_len"] == live.engine.max_model_len
    assert live.post("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    assert live.post("/detokenize", {"tokens": []}) == {"prompt": ""}
    assert live.refused("/tokenize", {})["param"] == "prompt"
    assert live.refused("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]})


def test_the_tokenizer_says_what_it_is(live):
    found = get(live, "/tokenizer_info")
    assert found["vocab_size"] == 49_152 and found["eos_token_ids"] == [2] and found["chat_template"]
    assert (found["bos_token"], found["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_the_version_is_that_of_the_package(live):
    assert get(live, "/version") == {"version": jpaged.__version__}


def test_rollouts_are_ids_with_their_log_probabilities(plain):
    stored = reference("llama")
    prompts, greedy = stored["input_ids"].tolist(), stored["greedy"].tolist()
    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    answer = plain.post(GENERATE, {"token_ids": prompts, "sampling_params": params | {"prompt_logprobs": 0}})
    assert [output["token_ids"] for output in answer["outputs"]] == greedy
    assert [output["prompt_index"] for output in answer["outputs"]] == [0, 1]
    for output, prompt, ids, logits in zip(
        answer["outputs"], answer["prompts"], prompts, stored["logits"], strict=True
    ):
        scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        assert output["logprobs"][0] == pytest.approx(scores[-1].max(), abs=2e-3)
        expected = [scores[i, token_id] for i, token_id in enumerate(ids[1:])]
        np.testing.assert_allclose(prompt["logprobs"][1:], expected, atol=2e-3)
    one = plain.post(GENERATE, {"token_ids": prompts[0], "sampling_params": params})
    assert one["outputs"][0]["prompt_index"] == 0
    assert one["outputs"][0]["token_ids"] == greedy[0] and "text" not in one["outputs"][0]


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_rollouts_are_the_plain_ones_in_parts(live, n):
    params = {"temperature": 1.0, "max_tokens": 9, "n": n, "seed": 3, "logprobs": 2, "ignore_eos": True}
    body = {"token_ids": [[5, 6], [7]], "sampling_params": params}
    whole, events = live.post(GENERATE, body), live.events(GENERATE, body)
    for output in whole["outputs"]:
        parts = [
            part
            for event in events
            for part in event["outputs"]
            if (part["index"], part["prompt_index"]) == (output["index"], output["prompt_index"])
        ]
        for name in ("token_ids", "logprobs", "top_logprobs"):
            assert [value for part in parts for value in part[name]] == close(output[name])
        assert parts[-1]["finish_reason"] == output["finish_reason"] == "length"
    assert [prompt["num_tokens"] for prompt in events[-1]["prompts"]] == [2, 1]


def test_metrics_count_what_was_served():
    with Live(build(random_params())) as live:

        def values() -> dict[str, float]:
            status, headers, raw = live.call("GET", "/metrics")
            assert status == 200 and headers["content-type"].startswith("text/plain")
            families = text_string_to_metric_families(raw.decode())
            return {sample.name: sample.value for family in families for sample in family.samples}

        before = values()
        assert before["jpaged_pages"] == live.engine.num_pages
        answer = live.post("/v1/completions", {"prompt": ["a b c", "d"], "n": 2, "max_tokens": 5, "ignore_eos": True})
        live.call("POST", "/v1/completions", {"prompt": ""})
        live.assert_idle()
        after = values()
        assert after["jpaged_output_tokens_total"] == 20
        assert after["jpaged_prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
        for name in ("time_to_first_token", "e2e_latency", "queue_time", "time_per_output_token"):
            assert after[f"jpaged_{name}_seconds_count"] == 4, name
        assert after["jpaged_inter_token_latency_seconds_count"] == 16
        assert after["jpaged_queue_time_seconds_sum"] <= after["jpaged_time_to_first_token_seconds_sum"]
        assert after["jpaged_batch_sequences_count"] == after["jpaged_steps_total"] > 0
        assert after["jpaged_sequences_running"] == after["jpaged_sequences_waiting"] == after["jpaged_pages_used"] == 0
        assert after["jpaged_pages_cached"] >= 0 and "jpaged_padded_tokens_total" in after
        assert after["jpaged_generated_tokens_total"] == 20 and after["jpaged_sequences_limit"] == 4
        assert after["jpaged_ready"] == 1 and after["jpaged_http_requests_in_flight"] == 0
        assert not [name for name in after if name.endswith("_created")]
        raw = live.call("GET", "/metrics")[2].decode()
        assert f'jpaged_build_info{{jax="{jax.__version__}",model="tiny",' in raw
        assert 'jpaged_http_responses_total{model="tiny",path="/v1/completions",status="400"} 1.0' in raw


def test_metrics_tell_of_a_server_that_does_not_serve_yet_and_of_requests_under_way():
    with Live(build(random_params())) as live:

        def shows(line: str) -> bool:
            return line in live.call("GET", "/metrics")[2].decode().splitlines()

        step = live.engine.step
        live.engine.step = lambda: (time.sleep(0.02), step())[1]
        asked = threading.Thread(target=live.post, args=("/v1/completions", {"prompt": "a", "max_tokens": 20}))
        asked.start()
        until(lambda: shows('jpaged_http_requests_in_flight{model="tiny"} 1.0'))
        asked.join()
        until(lambda: shows('jpaged_http_requests_in_flight{model="tiny"} 0.0'))
        live.service.thread.state = "starting"
        assert shows('jpaged_ready{model="tiny"} 0.0')
        live.service.thread.state = "ready"
        assert shows('jpaged_ready{model="tiny"} 1.0')


def test_every_endpoint_is_described(live):
    found = get(live, "/openapi.json")
    assert found["openapi"] == "3.1.0"
    from jpaged.server.app import GET, POST

    paths = {path.replace("{id:path}", "{id}") for path in (*GET, *POST)} | {"/openapi.json"}
    assert set(found["paths"]) == paths
    names = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "guided_json", "priority"} <= set(names)


def test_what_a_rollout_asks_in_the_wrong_place_is_said(live):
    error = live.refused(GENERATE, {"token_ids": [5], "max_tokens": 3})
    assert error["param"] == "max_tokens" and "sampling_params" in error["message"]
    assert "texts" in live.refused(GENERATE, {"token_ids": [5], "sampling_params": {"stop": ["x"]}})["message"]


def test_paths_with_a_slash_too_many_are_not_there(live):
    assert live.call("POST", "/v1/completions/", {"prompt": "a"})[0] == 404
    status, _, raw = live.call("GET", "/v1/completions")
    assert status == 405 and "POST is" in json.loads(raw)["error"]["message"]


def test_defaults_of_the_model_do_not_contradict_the_beams_of_a_rollout(live, monkeypatch):
    monkeypatch.setattr(live.service, "defaults", {"top_p": 0.9})
    asked = {"token_ids": [5], "sampling_params": {"num_beams": 2, "temperature": 0}}
    assert "max_num_beams" in live.refused(GENERATE, asked)["message"]
