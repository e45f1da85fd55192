"""What broke the server once: bodies made to stall it, names that collide, characters cut in two, odd configs."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
import yaml
from server_support import Live, build, chat_tokenizer, random_params, until
from test_life import head

from jpaged.server.config import ServerConfig, read_config
from jpaged.server.http import dumps

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
HI = [{"role": "user", "content": "Hi"}]
MANY = 300_000


@pytest.mark.parametrize("path", [CHATS, "/tokenize"])
@pytest.mark.parametrize("name", ["self", "messages", "add_generation_prompt"])
def test_a_variable_of_a_template_that_is_none_is_refused(live, path, name):
    error = live.refused(path, {"messages": HI, "chat_template_kwargs": {name: []}})
    assert error["param"] == "chat_template_kwargs" and name in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, {"messages": [{**HI[0], "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}]}, "messages"),
        (COMPLETIONS, {"prompt": "a", "guided_json": '{"a":' * 10_000}, "guided_json"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": "[" * 10_000}}, "structured_outputs"),
        (GENERATE, {"token_ids": [5], "sampling_params": {"structured": {"json": "[" * 10_000}}}, "sampling_params"),
    ],
)
def test_json_in_a_text_that_is_nested_too_deep_is_refused(live, path, body, param):
    assert live.refused(path, body)["param"] == param


@pytest.mark.parametrize("shape", [5, [], "", {"absent": 1}, {"self": 1}, {"regex": 5}, {"choice": []}])
def test_a_shape_of_a_rollout_that_is_none_is_refused_in_our_words(live, shape):
    error = live.refused(GENERATE, {"token_ids": [5], "sampling_params": {"structured": shape}})
    assert error["param"] == "sampling_params" and "__init__" not in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "stop_token_ids", ["a"] * MANY),
        (COMPLETIONS, "stop", [1] * MANY),
        (COMPLETIONS, "bad_words", ["a"] * MANY),
        (COMPLETIONS, "stop", ["n" * 10**6]),
        (COMPLETIONS, "logit_bias", {str(i): "x" for i in range(MANY)}),
        (COMPLETIONS, "structured_outputs", {str(i): 1 for i in range(MANY)}),
        (COMPLETIONS, "structured_outputs", {"choice": [1] * MANY}),
        (CHATS, "messages", [1] * MANY),
        (CHATS, "tools", [1] * MANY),
        (GENERATE, "token_ids", ["a"] * MANY),
        (GENERATE, "sampling_params", {"n" * 10**7: 1}),
        ("/detokenize", "tokens", ["a"] * MANY),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_large_body_that_is_all_wrong_is_refused_at_once(live, path, name, value):
    body = {"prompt": "a", "messages": HI, "token_ids": [5], "tokens": [5]}
    times = [time.monotonic()]
    live.call("POST", path, body | {"max_tokens": -1, "absent": value})  # as long to read
    times.append(time.monotonic())
    assert live.refused(path, body | {name: value})["param"] == name
    times.append(time.monotonic())
    # Each of these took 2 seconds and hundreds of megabytes, or more, where to read it takes a tenth of that.
    assert times[2] - times[1] < max(1.5, 8 * (times[1] - times[0]))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a b " * 250_000}),
        ("/tokenize", {"messages": [{**HI[0], "tool_calls": [{"function": {"arguments": "{}"}}] * 30_000}]}),
        ("/detokenize", {"tokens": [500] * 1_000_000}),
    ],
    ids=["text", "messages", "tokens"],
)
def test_others_are_served_while_a_long_text_is_tokenized(live, path, body):
    answered = threading.Thread(target=live.post, args=(path, body))
    num_served = 0
    answered.start()
    while answered.is_alive():
        assert live.call("GET", "/health")[0] == 200
        num_served += 1
    assert num_served > 3


def test_the_key_that_asked_for_too_much_is_named(live):
    error = live.refused(CHATS, {"messages": HI, "max_completion_tokens": 1000})
    assert error["param"] == "max_completion_tokens" and "max_completion_tokens=1000" in error["message"]


def test_a_request_that_can_never_be_taken_is_not_told_to_come_again():
    with Live(build(random_params()), max_waiting=2) as live:
        for body in ({"prompt": "a", "n": 7}, {"prompt": ["a"] * 7}):
            assert "6" in live.refused(COMPLETIONS, body)["message"]
        assert len(live.post(COMPLETIONS, {"prompt": "a", "n": 6, "max_tokens": 1})["choices"]) == 6


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_character_that_a_prompt_breaks_off_is_shown_once(live, cut, max_tokens):
    """Its beginning is echoed, and what is generated either completes it or does not."""
    tokenizer = chat_tokenizer()
    rocket = tokenizer.encode("a 🚀", add_special_tokens=False)
    prompt, rest = rocket[:-cut], rocket[-cut:]
    for allowed in (rest[:1], [500]):
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
        body |= {"return_token_ids": True, "allowed_token_ids": allowed, "ignore_eos": True}
        choice = live.post(COMPLETIONS, body)["choices"][0]
        assert choice["text"] == tokenizer.decode(prompt + choice["token_ids"])
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        streamed = [event["choices"][0]["text"] for event in live.events(COMPLETIONS, body)]
        assert "".join(streamed) == choice["text"]


def test_an_event_is_one_line_for_whoever_reads_it():
    text = "a\nb\rc\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029é"
    raw = dumps({"text": text})
    assert len(raw.decode().splitlines()) == 1 and json.loads(raw) == {"text": text} and "é".encode() in raw


def test_a_moment_that_is_none_has_an_error_of_the_usual_form(live):
    status, _, raw = live.call("GET", "/dashboard/state?since=x")
    assert status == 400 and json.loads(raw)["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("value", ["@x!#", "12345", "a: b", "*x", "no", "{a", "2024-01-01", "a #b", "[k]"])
def test_a_text_of_the_environment_is_what_it_says(tmp_path, monkeypatch, value):
    monkeypatch.setenv("VALUE", value)
    path = tmp_path / "config.yaml"
    path.write_text("api_keys: ['${VALUE}']\nmodel: ${VALUE}\nserved_model_names: ${VALUE}\n")
    config = read_config(path)
    assert (config.api_keys, config.model, config.served_model_names) == ([value], value, [value])
    path.write_text("revision: ${ABSENT:-}\nengine: {max_num_seqs: '${ABSENT:-7}'}")
    config = read_config(path)
    assert config.revision is None and config.engine == {"max_num_seqs": 7}


@pytest.mark.parametrize(
    "text",
    [
        "host: ''",
        "model: ' '",
        "? [a, b]\n: c",
        "model: &a [*a]",
        "[" * 3000,
        "port: ${ABSENT:-[}",
        "max_n: " + "[" * 9,
    ],
    ids=lambda text: text[:12],
)
def test_a_file_that_says_nothing_sensible_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_config(path)
    assert not isinstance(caught.value, yaml.YAMLError) and "\n" not in str(caught.value)


def test_a_time_beyond_all_numbers_is_none():
    assert ServerConfig(request_timeout=10**400).request_timeout == float("inf")


def test_half_a_body_is_answered_when_the_server_ends(capsys):
    live = Live(build(random_params()))
    with live, socket.create_connection(("127.0.0.1", live.port)) as connection:
        live.server.config.timeout_graceful_shutdown = 0.2
        connection.sendall(head(100) + b"{")
        until(lambda: live.service.metrics.in_flight._value.get() == 1)
        live.server.should_exit = live.service.is_ending = True
        assert b" 503 " in connection.recv(4096)
    assert "Traceback" not in capsys.readouterr().err


def test_half_a_head_that_never_goes_on_is_given_up_and_a_connection_that_is_used_again_is_not():
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    def answered(connection: socket.socket) -> bool:
        connection.sendall(ask)
        raw = b""
        while not raw.endswith(b"}"):
            raw += (part := connection.recv(4096))
            assert part, raw
        return b" 200 " in raw

    with Live(build(random_params()), body_timeout=0.5) as live, contextlib.ExitStack() as stack:
        silent, half, after_one, kept = (
            stack.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=30)) for _ in range(4)
        )
        assert answered(after_one) and answered(kept)
        half.sendall(ask[:10])
        after_one.sendall(ask[:10])
        for connection in (silent, half, after_one):
            assert connection.recv(4096) == b""
        assert answered(kept)


ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b'{"prompt": "a", "max_tokens": 2}'
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def received(connection: socket.socket, until: bytes = b"") -> bytes:
    """What comes until the connection is closed, or this has come."""
    raw = b""
    while (part := connection.recv(65536)) and not (until and until in raw + part):
        raw += part
    return raw + part


@pytest.mark.parametrize("cut", [1, 60, len(head(0)) - 2, -1])
def test_a_wish_to_upgrade_is_passed_over(live, cut):
    request = head(len(BODY))[:-2] + UPGRADE + b"\r\n" + BODY
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        for part in (
            request[:cut],
            request[cut:] + request + ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        ):
            connection.sendall(part)
            time.sleep(0.05)
        assert received(connection).count(b" 200 OK\r\n") == 3


def test_what_is_no_request_is_not_answered_in_the_middle_of_a_stream(live):
    body = json.dumps({"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(head(len(body)) + body)
        assert received(connection, b"data: ")
        connection.sendall(b"no request\r\n\r\n")
        assert b"400" not in received(connection).rpartition(b"data: ")[2]


def test_a_stream_of_http_1_0_has_no_chunks(live):
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(head(len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        start, _, events = received(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in start and b"\r\n" not in events
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


def test_not_more_requests_are_held_than_a_client_could_wait_for(live):
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(ASK * 100)
        assert received(connection, b'{"status"').startswith(b"HTTP/1.1 200 ")
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(ASK * 200)
        assert received(connection).startswith(b"HTTP/1.1 400 ")


def test_the_rest_of_a_body_that_is_answered_already_is_not_waited_for():
    with Live(build(random_params()), body_timeout=0.5) as live:
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
            connection.sendall(head(100).replace(b"/v1/completions", b"/absent"))
            assert b" 404 " in received(connection, b"}}")
            connection.sendall(b"{")
            assert connection.recv(4096) == b""


def test_what_an_engine_broke_on_is_in_the_log(monkeypatch):
    logged = []
    monkeypatch.setattr("jpaged.server.service.log", lambda *told: logged.append(told))
    with Live(build(random_params())) as live:
        monkeypatch.setattr(live.engine, "step", lambda: 1 / 0)
        assert live.refused(COMPLETIONS, {"prompt": "a"}, 503)["code"] == "engine_gone"
        until(lambda: logged)
    ((message, _, error),) = logged
    assert "crashed" in message and isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize(
    "more", [{"allowed_token_ids": [5]}, {"ignore_eos": True}, {"use_beam_search": True, "n": 2}], ids=str
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_what_contradicts_a_shape_of_the_text_is_named(live, path, more):
    error = live.refused(path, {"prompt": "a", "messages": HI, "guided_regex": "[a-z]+", **more})
    assert error["param"] in more
