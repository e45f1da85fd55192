"""Bad input, of every kind: a 4xx that names what is wrong, and a server that goes on."""

from __future__ import annotations

import json
import logging
import socket
import threading

import pytest
from server_support import Live, build, random_params, until

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
GOOD = {COMPLETIONS: {"prompt": "a"}, CHATS: {"messages": [{"role": "user", "content": "a"}]}}
GOOD |= {GENERATE: {"token_ids": [5]}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}
NOT_JSON = [
    b'{"a":',
    b"[]",
    b'"x"',
    b"null",
    b"1",
    b"",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    '{"prompt": "\xe9"}'.encode("latin-1"),
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a\\u0000b"}',
    b'{"prompt": "a\x00b"}',
    b"\x00" * 100,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt": "a"} x',
]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("raw", NOT_JSON, ids=lambda raw: repr(raw[:30]))
def test_a_body_that_is_no_json_object_is_a_400(live, path, raw):
    status, headers, answer = live.call("POST", path, raw)
    assert status == 400 and headers["content-type"] == "application/json"
    assert json.loads(answer)["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_of_another_type_is_a_415(live, kind):
    assert live.call("POST", COMPLETIONS, b'{"prompt": "a"}', {"content-type": kind})[0] == 415
    assert live.call("POST", COMPLETIONS, b"x", {"content-encoding": "gzip"})[0] == 415


@pytest.mark.parametrize("path", GOOD)
def test_a_body_that_does_not_say_its_type_is_a_415(live, path):
    raw = json.dumps(GOOD[path]).encode()
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert b" 415 " in connection.recv(4096).splitlines()[0]


def test_a_charset_may_be_named(live):
    headers = {"content-type": "application/json; charset=utf-8"}
    assert live.call("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 1}', headers)[0] == 200


PARAMETERS = [
    ("n", [0, -1, 10**6, 1.5, "2", True, [1]]),
    ("best_of", [0, 10**6]),
    ("temperature", [-1, "hot", True, 1e999, [1.0]]),
    ("top_p", [0, 1.5, -1, "x"]),
    ("top_k", [-2, 1.5, "x"]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0, -1]),
    ("frequency_penalty", [2.1, -2.1]),
    ("presence_penalty", [2.1, -2.1]),
    ("max_tokens", [-1, 1.5, "x", 10**9, 2**70]),
    ("min_tokens", [-1, "x"]),
    ("stop", [5, [5], [""], ["a"] * 17]),
    ("stop_token_ids", [[-1], [49_152], ["a"], 5, [2**70]]),
    ("seed", [1.5, "x", 2**70]),
    ("logit_bias", [[], {"a": 1}, {"5": 101}, {"-1": 1}, {"49152": 1}, {"5": "x"}]),
    ("stream", ["yes", 1]),
    ("model", ["absent"]),
    ("priority", [1.5, 2**40]),
    ("cache_salt", [5, "a\nb"]),
    ("guided_json", ['{"type":', {"type": "nothing"}, {"x": "y" * 70_000}]),
    ("guided_regex", ["(", "a" * 70_000]),
    ("guided_choice", [[], [5]]),
    ("guided_grammar", ["no grammar"]),
    ("structured_outputs", [{}, {"regex": "a", "choice": ["b"]}, {"absent": 1}]),
    ("response_format", [{"type": "absent"}, {}, 5]),
    ("truncate_prompt_tokens", [0, -1]),
    ("allowed_token_ids", [[], [-1], [49_152]]),
    ("prompt_logprobs", [-1, 21]),
    ("use_beam_search", [True]),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(("name", "values"), PARAMETERS, ids=[name for name, _ in PARAMETERS])
def test_a_parameter_out_of_its_range_is_named(live, path, name, values, stream):
    for value in values:
        status = 404 if name == "model" else 400
        if isinstance(value, float) and value > 1e300:
            raw = json.dumps(GOOD[path]).encode()[:-1] + b', "temperature": 1e999}'
            assert live.call("POST", path, raw)[0] == 400
            continue
        error = live.refused(path, GOOD[path] | {"stream": stream} | {name: value}, status)
        params = {name} | ({"best_of"} if name == "use_beam_search" else set())
        assert error["param"] in params, (value, error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_fewer_drawn_than_returned_is_refused(live, path, stream):
    assert live.refused(path, GOOD[path] | {"n": 3, "best_of": 2, "stream": stream})["param"] == "best_of"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token_id", [49_152, -1, 2**31, 2**63, 1.5, True])
def test_a_token_id_that_is_none_is_named(live, token_id, stream):
    for path, name in ((COMPLETIONS, "prompt"), (GENERATE, "token_ids")):
        for prompt in ([5, token_id], [[5], [5, token_id]]):
            error = live.refused(path, {name: prompt, "stream": stream})
            assert error["param"] == name and str(token_id) in error["message"]


def test_bad_requests_leave_those_that_run_alone(live):
    body = {"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    alone, answers = live.post(COMPLETIONS, body)["choices"], []
    running = threading.Thread(target=lambda: answers.append(live.post(COMPLETIONS, body)["choices"]))
    running.start()
    until(lambda: live.engine.stats.num_running or answers)
    for more in ({"prompt": [2**31]}, {"n": 0}, {"stop_token_ids": [49_152]}, {"guided_regex": "("}, {"prompt": ""}):
        for stream in (False, True):
            live.refused(COMPLETIONS, {"prompt": "a"} | more | {"stream": stream})
    running.join()
    assert answers == [alone]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "name", "values"),
    [
        (COMPLETIONS, "prompt", ["", [], [""], [[]], ["a", ""], [[5], []], 5, {}, True]),
        (COMPLETIONS, "prompt", [[5, "a"], ["a", [5]], [["a"]], ["a"] * 257]),
        (COMPLETIONS, "prompt", [[49_152], [-1], [2**31], [2**63], [1.5], [True], [[5], [50_000]], [5] * 10**6]),
        (COMPLETIONS, "logprobs", [-1, 21, 10**6, "x", True]),
        (COMPLETIONS, "suffix", ["x"]),
        (GENERATE, "token_ids", [[], [[]], "a", [49_152], [-1], [2**63], [1.5], [True], [5] * 10**6]),
        (GENERATE, "sampling_params", [5, {"temprature": 1}, {"n": 0}, {"stop": ["a"]}, {"logits_processor": "x"}]),
        (
            GENERATE,
            "sampling_params",
            [{"n": 10**6}, {"logprobs": 21}, {"logprobs": -1}, {"structured": {"regex": "("}}],
        ),
        ("/tokenize", "prompt", [5, ""]),
        ("/detokenize", "tokens", [5, [-1], [49_152], ["a"], [1.5], [2**70]]),
    ],
)
def test_what_is_asked_about_is_named_if_it_is_nothing(live, path, name, values, stream):
    for value in values:
        error = live.refused(path, GOOD[path] | {"stream": stream, name: value})
        assert error["param"] in (name, "stop_token_ids"), (value, error)


@pytest.mark.parametrize("path", GOOD)
def test_null_is_as_good_as_nothing_and_unknown_keys_do_no_harm(live, path):
    body = GOOD[path] | ({"max_tokens": 1} if path in (COMPLETIONS, CHATS) else {})
    nothing = dict.fromkeys(("model", "n", "stop", "logit_bias", "stream", "seed", "user", "stream_options", "tools"))
    live.post(path, nothing | {"absent": {"a": [1]}, "metadata": {}, "store": False, **body})


@pytest.mark.parametrize("path", GOOD)
def test_an_empty_body_says_what_is_missing(live, path):
    error = live.refused(path, {})
    assert error["param"] in GOOD[path]


def test_a_prompt_of_a_million_tokens_is_refused(live):
    for prompt in ("word " * 10**6, "a" * 10**7):
        error = live.refused(COMPLETIONS, {"prompt": prompt})
        assert error["code"] == "context_length_exceeded"


def test_a_body_that_is_too_large_is_not_read():
    with Live(build(random_params()), max_body="1KiB") as live:
        assert live.refused(COMPLETIONS, {"prompt": "a" * 2000}, 413)["code"] == "body_too_large"
        connection = socket.create_connection(("127.0.0.1", live.port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n800\r\n" + b"a" * 2048 + b"\r\n")
        assert b" 413 " in connection.recv(4096)
        connection.close()


def test_headers_without_end_are_cut_off(live):
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Bomb: " + b"a" * 200_000)
    answer = connection.recv(4096)
    assert b" 400 " in answer.splitlines()[0]
    connection.close()
    assert live.call("GET", "/health")[0] == 200


@pytest.mark.parametrize("keys", [{"api_keys": ["one", "two-é"]}, {"api_key_file": True}, {}])
def test_a_key_is_needed_where_there_are_any(keys, tmp_path, monkeypatch):
    if "api_key_file" in keys:
        (tmp_path / "keys").write_text("one\ntwo-é\n", encoding="utf-8")
        keys = {"api_key_file": str(tmp_path / "keys")}
    elif not keys:
        monkeypatch.setenv("JPAGED_API_KEY", "one two-é")
    with Live(build(random_params()), **keys) as live:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/tokenizer_info"):
            for given in (
                {},
                {"authorization": "Bearer three"},
                {"authorization": "one"},
                {"authorization": "Bearer "},
            ):
                status, headers, raw = live.call("GET", path, headers=given)
                assert status == 401 and headers["www-authenticate"] == "Bearer"
                assert json.loads(raw)["error"]["code"] == "invalid_api_key"
            for key in ("one", "two-é"):
                given = {"authorization": f"Bearer {key}".encode().decode("latin-1")}
                assert live.call("GET", path, headers=given)[0] == 200
        assert live.refused(COMPLETIONS, {"prompt": "a"}, 401)
        for path in ("/health", "/ready", "/version"):
            assert live.call("GET", path)[0] == 200


def test_metrics_are_given_without_a_key_where_that_is_chosen():
    with Live(build(random_params()), api_keys=["k"], open_metrics=True) as live:
        assert live.call("GET", "/metrics")[0] == 200
        assert live.call("GET", "/v1/models")[0] == 401


def test_other_origins_may_not_call_unless_they_are_named():
    ask = {"origin": "http://there", "access-control-request-method": "POST"}
    with Live(build(random_params())) as live:
        assert "access-control-allow-origin" not in live.call("GET", "/version", headers=ask)[1]
    with Live(build(random_params()), cors_origins=["http://there"], api_keys=["k"]) as live:
        assert live.call("GET", "/version", headers=ask)[1]["access-control-allow-origin"] == "http://there"
        status, headers, _ = live.call("OPTIONS", COMPLETIONS, headers=ask)
        assert status == 200 and headers["access-control-allow-origin"] == "http://there"


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("private", [True, False])
def test_logs_have_the_requests_id_and_no_prompt_unless_asked(form, private, capsys):
    from jpaged.server.logs import set_up

    with Live(build(random_params()), log_format=form, log_level="debug", log_prompts=not private) as live:
        set_up("debug", form)
        body = {"prompt": "the secret of the sphinx", "max_tokens": 1}
        raw = json.dumps(body).encode()
        _, headers, _ = live.call("POST", COMPLETIONS, raw, {"x-request-id": "abc-1"})
        assert headers["x-request-id"] == "abc-1"
        forged = live.call("POST", COMPLETIONS, raw, {"x-request-id": "a b"})[1]["x-request-id"]
        assert forged != "a b"
        live.refused(COMPLETIONS, body | {"n": 0})
    text = capsys.readouterr().err
    for name in ("jpaged", "uvicorn", "opentelemetry"):
        logging.getLogger(name).handlers = [logging.NullHandler()]  # what they wrote to is closed
    assert "abc-1" in text and ("sphinx" in text) != private
    assert "NoneType" not in text and "invalid_type" in text
    if form == "json":
        lines = [json.loads(line) for line in text.splitlines()]
        assert {line["status"] for line in lines if line["message"] == "answered"} == {200, 400}


def test_what_nobody_foresaw_is_a_500_without_a_word_of_it(live, monkeypatch):
    monkeypatch.setattr(type(live.service), "check_model", lambda self, name: 1 / 0)
    error = live.refused(COMPLETIONS, GOOD[COMPLETIONS], 500)
    assert "division" not in error["message"]
    monkeypatch.undo()
    live.post(COMPLETIONS, GOOD[COMPLETIONS] | {"max_tokens": 1})


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/x", 404), ("GET", COMPLETIONS, 405)])
def test_paths_and_methods_that_are_not_there_have_errors_of_the_same_form(live, method, path, status):
    found, _, raw = live.call(method, path)
    assert found == status and json.loads(raw)["error"].keys() == {"message", "type", "param", "code"}
