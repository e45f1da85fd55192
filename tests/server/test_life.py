"""Clients that leave, an engine that breaks, a server that is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from engine_support import CHECKPOINTS
from server_support import Live, build, random_params, until

from jpaged.host.sampling_params import SamplingParams
from jpaged.server import serve
from jpaged.server import service as service_module
from jpaged.server.config import ServerConfig
from jpaged.server.engine_thread import EngineGone
from jpaged.server.serve import listening
from jpaged.server.service import Service

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
SAMPLING = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}
BODY = {"prompt": "Once"} | SAMPLING
CHAT = {"messages": [{"role": "user", "content": "Hi"}]} | SAMPLING
REQUESTS = [
    (COMPLETIONS, BODY),
    (COMPLETIONS, BODY | {"n": 4}),
    (COMPLETIONS, BODY | {"prompt": ["a", "b", "c", "d", "e", "f"]}),  # more than there are rows for
    (COMPLETIONS, BODY | {"echo": True, "logprobs": 1}),
    (CHATS, CHAT),
    (CHATS, CHAT | {"n": 3}),
    (GENERATE, {"token_ids": [[5], [6, 7]], "sampling_params": SAMPLING | {"n": 2}}),
]


def head(size: int, path: str = COMPLETIONS) -> bytes:
    """Of a request with a body of so many bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {size}"]
    return "\r\n".join([*lines, "", ""]).encode()


def send(live: Live, body: dict, path: str = COMPLETIONS) -> socket.socket:
    """Sends a request, and leaves its answer unread."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(head(len(raw), path) + raw)
    return connection


@pytest.fixture
def slow(live):
    """The server, whose steps take 20 ms."""
    engine, step = live.engine, live.engine.step
    live.slow_steps = 0

    def slowly():
        time.sleep(0.02)
        live.slow_steps += 1
        return step()

    engine.step = slowly
    yield live
    del engine.step


def num_aborted(live: Live) -> float:
    labels = {"model": live.service.config.names[0], "reason": "abort"}
    return live.service.metrics.registry.get_sample_value("jpaged_sequences_finished_total", labels) or 0


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=str)
@pytest.mark.parametrize(("stream", "events"), [(False, 0), (True, 0), (True, 3)])
def test_a_client_that_leaves_takes_its_work_with_it(slow, path, body, stream, events):
    before = num_aborted(slow)
    connection = send(slow, body | {"stream": stream}, path)
    until(lambda: slow.service.thread.num_requests > 0)
    read = b""
    while read.count(b"data:") < events:
        read += connection.recv(4096)
    connection.close()
    until(lambda: slow.service.thread.num_requests == 0)
    if events:  # else it may have left before the engine knew of it
        prompts = body.get("token_ids", body.get("prompt", "Once"))
        num_prompts = len(prompts) if isinstance(prompts, list) else 1
        assert num_aborted(slow) - before == num_prompts * body.get("sampling_params", body).get("n", 1)
    steps = slow.slow_steps
    slow.assert_idle()
    assert slow.slow_steps - steps <= 2
    told = slow.call("GET", "/metrics")[2].decode()
    for name in ("sequences_running", "sequences_waiting", "pages_used"):
        assert f'jpaged_{name}{{model="tiny"}} 0.0' in told


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_another_request_sent_takes_its_work_with_it(slow, stream):
    connection = send(slow, BODY | {"stream": stream})
    until(lambda: slow.engine.stats.num_running == 1)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(0.1)
    connection.close()
    until(lambda: slow.service.thread.num_requests == 0)
    steps = slow.slow_steps
    slow.assert_idle()
    assert slow.slow_steps - steps <= 2 and slow.slow_steps < 150


def test_a_client_that_leaves_the_queue_is_forgotten(slow):
    running = [send(slow, BODY) for _ in range(4)]
    until(lambda: slow.engine.stats.num_running == 4)
    waiting = [send(slow, BODY | {"stream": stream}) for stream in (False, True)]
    until(lambda: slow.service.thread.num_requests == 6)
    for connection in waiting:
        connection.close()
    until(lambda: slow.service.thread.num_requests == 4)
    for connection in running:
        connection.close()


@pytest.mark.parametrize("limited", [False, True])
def test_a_client_that_does_not_read_holds_nobody_up(limited, monkeypatch):
    monkeypatch.setattr("jpaged.server.app.GRACE", 0.5)
    with Live(build(random_params()), request_timeout=0.5 if limited else 60) as live:
        live.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections, too
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.port))
        raw = json.dumps(
            BODY | {"n": 4, "prompt": ["a"] * 8, "stream": True, "logprobs": 20, "max_tokens": 100}
        ).encode()
        connection.sendall(head(len(raw)) + raw)
        until(lambda: live.engine.stats.num_output_tokens > 50)
        assert limited or live.post("/v1/completions", BODY | {"max_tokens": 2})["usage"]["completion_tokens"] == 2
        if limited:  # its connection is not held open for ever
            live.assert_idle()
        else:
            until(lambda: not live.engine.has_unfinished_requests())  # what it has not read is kept, and no more
            assert live.service.thread.num_requests == 8
        connection.close()
        live.assert_idle()
        until(lambda: not live.server.server_state.connections)


def test_half_a_body_that_never_goes_on_is_given_up():
    with Live(build(random_params()), body_timeout=0.2) as live:
        connection = socket.create_connection(("127.0.0.1", live.port))
        connection.sendall(head(100) + b"{")
        assert b" 408 " in connection.recv(4096)
        connection.close()


def test_a_full_queue_is_said_with_429():
    with Live(build(random_params()), max_waiting=1) as live:
        step = live.engine.step
        live.engine.step = lambda: (time.sleep(0.02), step())[1]
        connections = [send(live, BODY) for _ in range(5)]
        until(lambda: live.service.thread.num_requests == 5)
        status, headers, raw = live.call("POST", "/v1/completions", BODY)
        assert status == 429 and headers["retry-after"] == "1" and json.loads(raw)["error"]["code"] == "queue_full"
        status, _, _ = live.call("POST", "/v1/completions", BODY | {"stream": True})
        assert status == 429
        assert live.refused("/v1/completions", BODY | {"n": 6})["param"] == "n"
        for connection in connections:
            connection.close()
        live.assert_idle()
        assert live.post("/v1/completions", BODY | {"max_tokens": 2})["usage"]["completion_tokens"] == 2


def test_what_has_failed_says_so_even_while_it_still_gains(live):
    async def read() -> None:
        news = asyncio.Event()
        stream = live.service.thread.submit(
            [5, 6], SamplingParams(max_tokens=100, ignore_eos=True), news, as_it_comes=True
        )
        try:
            await news.wait()
            stream.fail(EngineGone("given up"))
            with pytest.raises(EngineGone, match="given up"):
                stream.drain()
        finally:
            stream.close()

    asyncio.run_coroutine_threadsafe(read(), live.service.thread.loop).result(60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_given_up(stream):
    with Live(build(random_params()), request_timeout=0.3) as live:
        step = live.engine.step
        live.engine.step = lambda: (time.sleep(0.05), step())[1]
        status, _, raw = live.call("POST", "/v1/completions", BODY | {"stream": stream})
        if stream:
            last = raw.decode().strip().split("\n\n")[-1]
            assert status == 200 and json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        else:
            assert status == 504 and json.loads(raw)["error"]["code"] == "request_timeout"
        live.assert_idle()


def test_an_engine_that_breaks_fails_its_requests_and_the_health_check():
    with Live(build(random_params())) as live:
        assert live.call("GET", "/health")[0] == live.call("GET", "/ready")[0] == 200
        step, steps = live.engine.step, []

        def breaking():
            time.sleep(0.02)
            steps.append(None)
            if len(steps) > 5:
                raise RuntimeError("out of everything")
            return step()

        live.engine.step = breaking
        answers = []
        threads = [
            threading.Thread(target=lambda more=more: answers.append(live.call("POST", "/v1/completions", BODY | more)))
            for more in ({}, {}, {"stream": True}, {"n": 3})
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(answers) == 4
        for status, _, raw in answers:
            error = json.loads(raw.decode().strip().split("\n\n")[-1].removeprefix("data: "))["error"]
            assert (status == 503 or b"data:" in raw) and error["code"] == "engine_gone"
        for path in ("/health", "/ready"):
            assert live.call("GET", path)[0] == 503
        for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "a"})):
            assert live.refused(path, body, 503)["code"] == "engine_gone"
        assert live.call("GET", "/metrics")[0] == 200


def test_a_request_that_the_engine_stumbles_over_is_a_500_and_others_go_on(live, monkeypatch):
    def stumble(*_, **__):
        raise OverflowError("what nobody foresaw")

    with monkeypatch.context() as patch:
        patch.setattr(live.engine, "add_request", stumble)
        for stream in (False, True):
            error = live.refused("/v1/completions", BODY | {"stream": stream}, 500)
            assert "foresaw" in error["message"] and "Overflow" not in error["message"]
    assert live.post("/v1/completions", BODY | {"max_tokens": 2})["usage"]["completion_tokens"] == 2


def test_a_function_is_run_on_the_engines_thread_between_two_steps(live):
    thread = live.service.thread

    def ask(function):
        return asyncio.run_coroutine_threadsafe(thread.run(function), thread.loop).result(30)

    assert ask(lambda engine: (engine is live.engine, threading.current_thread().name)) == (True, "engine")
    with pytest.raises(ZeroDivisionError):
        ask(lambda engine: 1 / 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_is_logged_as_such(slow, stream, monkeypatch):
    logged = []
    monkeypatch.setattr("jpaged.server.app.log", lambda message, *_, **fields: logged.append(fields))
    connection = send(slow, BODY | {"stream": stream})
    until(lambda: slow.engine.stats.num_running)
    connection.close()
    until(lambda: logged)
    assert logged[0]["status"] == 499


def test_a_server_that_starts_says_so():
    hold = threading.Event()
    live = Live(build(random_params()))
    live.service.thread._build = lambda: (hold.wait(), live.engine)[1]
    live._thread.start()
    until(lambda: live.server.started)
    assert live.call("GET", "/health")[0] == 200 and live.call("GET", "/ready")[0] == 503
    status, headers, raw = live.call("POST", "/v1/completions", BODY)
    assert status == 503 and headers["retry-after"] and json.loads(raw)["error"]["code"] == "starting"
    hold.set()
    until(lambda: live.call("GET", "/ready")[0] == 200)
    assert live.post("/v1/completions", BODY | {"max_tokens": 1})
    live.__exit__()


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Starts `scripts/serve.py` with a small checkpoint; gives the process and its port."""
    folder = tmp_path_factory.mktemp("serve")
    file = folder / "config.yaml"
    file.write_text(
        f"model: {CHECKPOINTS / 'llama'}\nserved_model_names: tiny\nshutdown_timeout: 20\n"
        "engine: {max_num_seqs: 2, max_num_batched_tokens: 16, max_model_len: 256, page_size: 16, num_pages: 60, "
        "warm_up: false}\n"
    )
    started, readers = [], []

    def start(*options: str) -> tuple[subprocess.Popen, int]:
        process = subprocess.Popen(
            [sys.executable, "scripts/serve.py", str(file), "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            cwd=CHECKPOINTS.parents[2],
            env={**os.environ, "JPAGED_API_KEY": ""},
        )
        started.append(process)
        port = None
        for line in process.stderr:
            if "starting" in line:
                port = int(line.rpartition(":")[2].split()[0].strip('"}'))
            if " ready" in line:
                break
        else:
            raise AssertionError("it never was ready")
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        readers.append(reader)
        return process, port

    yield start
    for one, reader in zip(started, readers, strict=True):
        one.kill()
        one.wait()
        reader.join()
        one.stderr.close()


@contextlib.contextmanager
def asking(port: int, num_prompts: int) -> Iterator[http.client.HTTPConnection]:
    """A connection on which rollouts have been asked for, of which some run."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        sampling = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
        body = {"token_ids": [[5, 6]] * num_prompts, "sampling_params": sampling}
        connection.request("POST", "/v1/generate", json.dumps(body), {"content-type": "application/json"})
        until(lambda: 'jpaged_sequences_running{model="tiny"} 2.0' in get(port, "/metrics")[1])
        yield connection


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_a_server_that_is_told_to_end_finishes_what_runs_and_exits_with_0(process):
    server, port = process()
    with asking(port, 40) as connection:
        server.send_signal(signal.SIGTERM)
        until(lambda: get(port, "/ready")[0] == 503)
        assert get(port, "/health")[0] == 200
        outputs = json.loads(connection.getresponse().read())["outputs"]
        assert [len(output["token_ids"]) for output in outputs] == [200] * 40
    assert server.wait(30) == 0


def test_what_takes_longer_than_it_is_given_is_failed_when_the_server_ends(process):
    server, port = process("--shutdown-timeout", "0.2")
    with asking(port, 200) as connection:
        server.send_signal(signal.SIGTERM)
        answer = connection.getresponse()
        assert answer.status == 503 and json.loads(answer.read())["error"]["code"] == "engine_gone"
    assert server.wait(30) == 0


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(tmp_path):
    command = [sys.executable, "scripts/serve.py", "--model", str(tmp_path / "absent"), "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=CHECKPOINTS.parents[2], timeout=120)
    assert found.returncode == 1 and "absent" in found.stderr and "Traceback" not in found.stderr


def test_a_process_whose_engine_crashes_answers_who_waits_and_ends_with_1(monkeypatch):
    engine, told, answers = build(random_params()), [], []

    def broken():
        raise RuntimeError("the device is gone")

    engine.step = broken
    monkeypatch.setattr(serve, "Service", lambda config: Service(config, lambda: engine))
    for module in (serve, service_module):
        monkeypatch.setattr(module, "log", lambda message, *more, **fields: told.append((message, *more)))
    config = ServerConfig(model="tiny", port=0, exit_on_crash=True)

    def ask(port: int) -> None:
        until(lambda: any(message == "ready" for message, *_ in told))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        answer = connection.getresponse()
        answers.append((answer.status, json.loads(answer.read())["error"]["code"]))
        connection.close()

    with listening(config) as listener:
        client = threading.Thread(target=ask, args=(listener.getsockname()[1],))
        client.start()
        assert asyncio.run(serve._serve(config, listener)) == 1
        client.join()
    assert answers == [(503, "engine_gone")]
    (crash,) = [more for message, *more in told if message == "the engine has crashed: the device is gone"]
    assert isinstance(crash[1], RuntimeError) and crash[1].__traceback__ is not None


def test_no_part_of_a_stream_waits_for_the_client_to_acknowledge_another():
    with listening(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_taken_is_said_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "scripts/serve.py", "--model", "absent", "--port", port]
        found = subprocess.run(command, capture_output=True, text=True, cwd=CHECKPOINTS.parents[2], timeout=120)
    assert found.returncode == 2 and f"127.0.0.1:{port}" in found.stderr and "Traceback" not in found.stderr
