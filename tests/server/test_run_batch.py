"""`jpaged run-batch` with an app that answers at once: its files, and runs that are stopped or killed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from jpaged.cli.run_batch import ModelServing, Served, run_batch
from jpaged.run_batch import batch_input, run
from jpaged.run_batch.asgi import lifespan, post
from jpaged.run_batch.batch_input import BatchIndex, raw_lines
from jpaged.run_batch.batch_output import BatchOutput

REPO = Path(__file__).parents[2]


def ask(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": f"say {custom_id}"} | body}


class FakeApp:
    """Answers with the prompt; `fate(body)` may give another answer. Counts what it sees at once."""

    def __init__(self, fate=lambda body: None, seconds=0.0):
        self.fate, self.seconds = fate, seconds
        self.seen, self.headers = [], []
        self.running = self.most_running = self.left = 0
        paths = "/v1/completions", "/v1/chat/completions"
        self.app = Starlette(routes=[Route(path, self.answer, methods=["POST"]) for path in paths])

    async def answer(self, request: Request):
        body = await request.json()
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
            usage = {"prompt_tokens": 2, "completion_tokens": 5}
            found = self.fate(body)
            return JSONResponse({"text": body["prompt"], "usage": usage}) if found is None else found
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1

    @contextlib.asynccontextmanager
    async def serving(self, stop):
        yield Served(self.app, {"authorization": "Bearer key"}, 4)


@pytest.fixture
def files(tmp_path):
    """Writes the lines of an input (objects, or bytes as they are), runs it, and reads the output."""

    class Files:
        input, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

        def write(self, *lines):
            raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
            self.input.write_bytes(b"\n".join(raw) + b"\n")

        def run(self, app=None, in_flight=None):
            return run_batch(self.input, self.output, in_flight, (app or FakeApp()).serving)

        def read(self):
            return [json.loads(line) for line in self.output.read_text().splitlines()]

    return Files()


def by_id(lines):
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_each_request_has_its_answer(files, capsys):
    files.write(*(ask(f"r{n}") for n in range(20)))
    app = FakeApp()
    assert files.run(app) == 0
    found = by_id(files.read())
    assert len(found) == 20
    line = found["r7"]
    assert line.keys() == {"id", "custom_id", "response", "error"} and line["error"] is None
    assert line["response"]["status_code"] == 200 and line["response"]["body"]["text"] == "say r7"
    assert line["response"]["request_id"] == line["id"]
    assert len({one["id"] for one in found.values()}) == 20
    assert app.headers[0]["authorization"] == "Bearer key"
    assert {headers["x-request-id"] for headers in app.headers} == {one["id"] for one in found.values()}
    assert "20 of 20 requests are answered; 100 output tokens" in capsys.readouterr().err


def test_so_many_requests_are_under_way_and_the_file_is_read_as_they_end(files):
    files.write(*(ask(f"r{n}") for n in range(40)))
    app = FakeApp(seconds=0.005)
    files.run(app)
    assert app.most_running == 4
    files.output.unlink()
    app = FakeApp(seconds=0.02)
    files.run(app, in_flight=17)
    assert app.most_running == 17


def test_errors_of_the_app_are_answers_and_are_told(files, capsys):
    def fate(body):
        if body["prompt"] == "say r1":
            return JSONResponse({"error": {"message": "too long"}}, 400)
        if body["prompt"] == "say r2":
            return PlainTextResponse("no JSON", 500)
        if body["prompt"] == "say r3":
            raise ZeroDivisionError("a fault")

    files.write(*(ask(f"r{n}") for n in range(5)))
    assert files.run(FakeApp(fate)) == 0
    found = by_id(files.read())
    assert found["r1"]["response"]["status_code"] == 400
    assert found["r1"]["response"]["body"]["error"]["message"] == "too long"
    assert found["r2"]["response"]["body"] == "no JSON"
    assert found["r3"]["response"]["status_code"] == 500
    assert "5 of 5 requests are answered; 3 of them with an error (1 x status 400, 2 x status 500)" in (
        capsys.readouterr().err
    )


BAD_LINES = [
    (b"{half", "invalid_json", None, "is no JSON"),
    (b"\xff\xfe", "invalid_json", None, "is no JSON"),
    (b"[" * 100_000, "invalid_json", None, "is no JSON"),
    (b"[1]", "invalid_line", None, "must be a JSON object, got a list"),
    ({"method": "POST"}, "invalid_custom_id", None, "custom_id must be a text, got null"),
    (ask(7), "invalid_custom_id", None, "got 7"),
    (ask("get") | {"method": "GET"}, "invalid_method", "get", 'must be POST, got "GET"'),
    (ask("url", url="/v1/embeddings"), "invalid_url", "url", 'got "/v1/embeddings"'),
    (ask("body") | {"body": None}, "invalid_body", "body", "must be a JSON object, got null"),
    (ask("stream", stream=True), "invalid_body", "stream", "leave body.stream out"),
    (ask("good", temperature=1), "duplicate_custom_id", None, 'custom_id "good" is that of line 1, too'),
]


def test_lines_that_are_no_requests_are_told_and_the_others_answered(files, capsys):
    files.write(ask("good"), *(line for line, *_ in BAD_LINES), b"", b"  ", ask("last"))
    assert files.run() == 1
    lines = files.read()
    assert len(lines) == len(BAD_LINES) + 2
    answered = by_id([line for line in lines if line["error"] is None])
    assert answered.keys() == {"good", "last"}
    told = {line["error"]["line"]: line for line in lines if line["error"]}
    for number, (_, code, custom_id, message) in enumerate(BAD_LINES, 2):
        assert told[number]["response"] is None
        assert (told[number]["error"]["code"], told[number]["custom_id"]) == (code, custom_id)
        assert told[number]["error"]["message"].startswith(f"line {number}: ")
        assert message in told[number]["error"]["message"]
    assert f"{len(BAD_LINES)} lines are no requests" in capsys.readouterr().err
    app = FakeApp()
    assert files.run(app) == 1
    assert files.read() == lines and app.seen == [], "all of it is done"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no batch file: it is empty"),
        (b"\n \n", "is no batch file: it is empty"),
        (b"\x89PNG\r\n\x1a\n" * 10, "is no batch file: line 1"),
        (b'{"prompt": "hello"}\n', "line 1: custom_id must be a text"),
    ],
)
def test_a_file_without_any_request_is_refused_and_nothing_is_written(files, content, complaint):
    files.input.write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        files.run()
    assert not files.output.exists()


def test_a_line_that_is_too_long_is_told_without_being_held(files, monkeypatch):
    monkeypatch.setattr(batch_input, "MAX_LINE", 200)
    files.write(ask("one"), ask("long", prompt="x" * 5000), ask("two"), ask("end", prompt="y" * 500))
    files.input.write_bytes(files.input.read_bytes()[:-1])
    assert max(map(len, raw_lines(files.input))) <= 202
    assert files.run() == 1
    errors = {line["error"]["line"]: line["error"]["code"] for line in files.read() if line["error"]}
    assert errors == {2: "line_too_long", 4: "line_too_long"}


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(files):
    files.input.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(ask(f"r{n}")).encode() for n in range(3)))
    assert files.run() == 0
    assert by_id(files.read()).keys() == {"r0", "r1", "r2"}


def test_duplicates_are_found_wherever_they_are(files):
    names = [random.Random(3).randrange(30) for _ in range(100)]
    files.write(*(ask(f"r{name}", n=place) for place, name in enumerate(names)))
    assert files.run() == 1
    lines = files.read()
    answered = by_id([line for line in lines if line["response"]])
    assert answered.keys() == {f"r{name}" for name in names}
    firsts = {line["error"]["line"]: line["error"]["message"] for line in lines if line["error"]}
    assert len(firsts) == 100 - len(set(names))
    for place, name in enumerate(names):
        if place != names.index(name):
            assert firsts[place + 1].endswith(f'"r{name}" is that of line {names.index(name) + 1}, too')


def test_the_index_takes_few_bytes_a_line(files):
    files.write(*(ask(f"r{n}") for n in range(500)))
    index = BatchIndex(files.input)
    held = index._digests.itemsize * len(index._digests) + len(index._states)
    assert (index.num_lines, held) == (500, 500 * 9)


# Runs that go on.


def test_a_run_that_is_whole_is_not_served_again(files, capsys):
    files.write(ask("a"), ask("b"))
    files.run()
    before = files.output.read_bytes()

    def never(stop):
        raise AssertionError("nothing is left to do")

    assert run_batch(files.input, files.output, None, never) == 0
    assert files.output.read_bytes() == before
    assert "2 of 2 lines are done already" in capsys.readouterr().err


def test_an_output_that_is_cut_anywhere_is_made_whole_again(files):
    files.write(*(ask(f"r{n}") for n in range(6)), b"bad")
    files.run()
    whole = files.output.read_bytes()
    for cut in range(0, len(whole), 7):
        files.output.write_bytes(whole[:cut])
        app = FakeApp()
        assert files.run(app) == 1
        lines = files.read()
        assert by_id(lines).keys() == {f"r{n}" for n in range(6)} | {None}
        assert files.output.read_bytes().startswith(whole[: whole[:cut].rfind(b"\n") + 1]), "what was whole stays"
        assert len(app.seen) == 6 - sum(
            line["error"] is None for line in map(json.loads, whole[:cut].split(b"\n")[:-1])
        )


def test_bytes_of_zero_that_a_crash_of_the_machine_leaves_are_cut(files):
    files.write(ask("a"), ask("b"))
    files.run()
    first = files.output.read_bytes().splitlines(keepends=True)[0]
    files.output.write_bytes(first + b"\0" * 50)
    assert files.run() == 0
    assert by_id(files.read()).keys() == {"a", "b"}


def test_lines_may_be_added_to_an_input(files):
    files.write(ask("a"), ask("b"))
    files.run()
    files.write(ask("a"), ask("b"), ask("c"))
    app = FakeApp()
    files.run(app)
    assert [body["prompt"] for body in app.seen] == ["say c"]
    assert by_id(files.read()).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ([ask("x"), ask("y")], 'is of custom_id "a"'),
        ([ask("a", temperature=1), ask("b")], 'is of custom_id "a"'),
        ([ask("a")], 'is of custom_id "b"'),
    ],
)
def test_an_output_of_another_input_is_refused_and_stays_as_it_is(files, other, complaint):
    files.write(ask("a"), ask("b"))
    files.run(in_flight=1)
    before = files.output.read_bytes() + b'{"id":"batch_r'
    files.output.write_bytes(before)
    files.write(*other)
    with pytest.raises(ValueError, match="answers to other requests") as error:
        files.run()
    assert complaint in str(error.value)
    assert files.output.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"notes of mine", b"notes of mine\n", b'{"id": "batch_x"}\n', b"[1]\n", b"\n", b"1\n"]
)
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(files, content):
    files.write(ask("a"))
    files.output.write_bytes(content)
    with pytest.raises(ValueError, match="line 1 is no answer to a batch"):
        files.run()
    assert files.output.read_bytes() == content


def test_an_answer_that_is_there_twice_is_refused(files):
    files.write(ask("a"), ask("b"))
    files.run()
    files.output.write_bytes(files.output.read_bytes() * 2)
    with pytest.raises(ValueError, match="its line 3"):
        files.run()


def test_files_that_cannot_be_used_are_refused(files, tmp_path):
    files.write(ask("a"))
    with pytest.raises(ValueError, match="is the file of requests"):
        run_batch(files.input, files.input, None, FakeApp().serving)
    with pytest.raises(ValueError, match="not a regular file, so"):
        run_batch(files.input, "/dev/null", None, FakeApp().serving)
    with pytest.raises(OSError):
        run_batch(files.input, tmp_path / "absent" / "out.jsonl", None, FakeApp().serving)
    with contextlib.closing(BatchOutput(files.output)), pytest.raises(ValueError, match="another run is writing"):
        files.run()


def test_an_input_that_changes_meanwhile_ends_the_run(files):
    def change(body):
        files.write(ask("r0"), ask("r1"), ask("other"))

    files.write(*(ask(f"r{n}") for n in range(3)))
    with pytest.raises(ValueError, match="has changed while it was read"):
        files.run(FakeApp(change), in_flight=1)


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(files, monkeypatch):
    files.write(*(ask(f"r{n}") for n in range(5)))
    write, count = os.write, iter(range(99))

    def full(file, data):
        number = next(count)
        if number > 3:
            raise OSError(28, "No space left on device")
        return write(file, data if number < 3 else data[:10])

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "write", full)
        files.run(in_flight=1)
    assert len(files.read()) == 3 and files.output.read_bytes().endswith(b"\n")
    assert files.run() == 0
    assert by_id(files.read()).keys() == {f"r{n}" for n in range(5)}


def test_a_disk_that_fails_behind_the_writes_ends_the_run(files, monkeypatch):
    def fail(file):
        raise OSError(5, "Input/output error")

    files.write(*(ask(f"r{n}") for n in range(50)))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
        patched.setattr(run, "SYNC_SECONDS", 0.01)
        patched.setattr(os, "fsync", lambda file: (patched.undo(), fail(file)))  # an error is told once
        files.run(FakeApp(seconds=0.02))
    assert len(files.read()) < 50
    assert files.run() == 0
    assert len(by_id(files.read())) == 50


def test_an_app_that_stops_serving_ends_the_run_without_answers_of_it(files, capsys):
    def fate(body):
        if len(app.seen) > 3:
            return JSONResponse({"error": {"message": "the engine has crashed"}}, 503)

    app = FakeApp(fate)
    files.write(*(ask(f"r{n}") for n in range(9)))
    assert files.run(app, in_flight=2) == 1
    assert "the engine has crashed; the same command goes on from here" in capsys.readouterr().err
    assert all(line["response"]["status_code"] == 200 for line in files.read())
    assert files.run() == 0
    assert len(by_id(files.read())) == 9


def test_a_request_that_finds_the_queue_full_is_sent_again(files):
    def fate(body):
        if app.running > 2:
            return JSONResponse({"error": {"message": "full"}}, 429)

    app = FakeApp(fate, seconds=0.01)
    files.write(*(ask(f"r{n}") for n in range(12)))
    files.run(app, in_flight=6)
    assert {line["response"]["status_code"] for line in files.read()} == {200}
    assert len(app.seen) > 12
    app = FakeApp(lambda body: JSONResponse({"error": {"message": "never"}}, 429))
    files.output.unlink()
    files.run(app, in_flight=2)
    assert [line["response"]["status_code"] for line in files.read()] == [429] * 12, "nothing else was under way"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_what_is_done(files, capsys, number):
    def fate(body):
        if len(app.seen) == 10:
            os.kill(os.getpid(), number)

    app = FakeApp(fate, seconds=0.01)
    files.write(*(ask(f"r{n}") for n in range(50)))
    assert files.run(app) == 128 + number
    assert "stopped; the same command goes on" in capsys.readouterr().err
    assert 0 < len(files.read()) < 50
    assert app.left > 0 and app.running == 0, "what was under way was given up"
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    again = FakeApp()
    assert files.run(again) == 0
    assert len(by_id(files.read())) == 50


KILLED = """
    import asyncio, json, pathlib, sys
    sys.path.insert(0, sys.argv[1])
    from test_run_batch import FakeApp, run_batch
    def fate(body):
        with open(sys.argv[4], "a") as log:
            log.write(body["prompt"] + "\\n")
    app = FakeApp(fate, seconds=0.001)
    print("begun", flush=True)
    sys.exit(run_batch(sys.argv[2], sys.argv[3], 8, app.serving))
"""


@pytest.mark.parametrize("torn", [False, True])
def test_a_run_that_is_killed_again_and_again_answers_each_request_once(files, tmp_path, torn):
    """Killed whenever it has written some more; and, `torn`, with bytes cut off as in the middle of a write."""
    count = 1500
    files.write(*(ask(f"r{n}", text="x" * (n % 500)) for n in range(count)))
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", textwrap.dedent(KILLED), Path(__file__).parent, files.input, files.output, log]
    rng = random.Random(torn)
    kept: list[bytes] = []
    for part in range(4):
        with subprocess.Popen([str(word) for word in command], cwd=REPO, stderr=subprocess.PIPE) as process:
            if part < 3:
                goal = count * (part + 1) // 5 + rng.randrange(100)
                until = time.monotonic() + 60
                while not files.output.exists() or files.output.read_bytes().count(b"\n") < goal:
                    assert time.monotonic() < until and process.poll() is None
                    time.sleep(0.002)
                process.kill()
            told = process.stderr.read().decode()
            assert process.wait(60) == (-signal.SIGKILL if part < 3 else 0), told
        if part and part < 3:
            assert "lines are done already" in told
        raw = files.output.read_bytes()
        assert raw.split(b"\n")[: len(kept)] == kept, "what was there stays"
        if torn and part < 3:
            raw = raw[: -rng.randrange(1, 60)]
            files.output.write_bytes(raw)
        kept = raw.split(b"\n")[:-1]
    found = by_id(files.read())
    assert found.keys() == {f"r{n}" for n in range(count)}
    assert all(line["response"]["body"]["text"] == f"say {name}" for name, line in found.items())
    asked = collections.Counter(log.read_text().splitlines())
    assert sum(asked.values()) - count <= 3 * (8 + 1), "only what was under way is asked again"


# With the server's own app.


def test_a_model_answers_completions_and_chats_as_the_server_does(files, monkeypatch):
    import server_support as support

    from jpaged.server.config import ServerConfig

    engine = support.build(support.random_params())
    monkeypatch.setenv("JPAGED_API_KEY", "secret")
    serving = ModelServing(ServerConfig(model="tiny", request_timeout=0.001), lambda: engine)
    asks = [ask(f"r{n}", prompt=[5, 6, 7 + n], max_tokens=3 + n % 4, ignore_eos=True) for n in range(11)]
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    asks.append(ask("chat", url="/v1/chat/completions") | {"body": chat})
    asks.append(ask("many", prompt=[5, 6, 7], n=4, max_tokens=2, seed=1))
    asks.append(ask("long", prompt=[1] * 1000))
    asks.append(ask("other", model="another"))
    files.write(*asks)
    assert run_batch(files.input, files.output, None, serving) == 0
    assert not serving.is_alive and not engine.has_unfinished_requests()
    found = {name: line["response"] for name, line in by_id(files.read()).items()}
    failed = {name: reply["body"]["error"]["code"] for name, reply in found.items() if reply["status_code"] != 200}
    assert failed == {"long": "context_length_exceeded", "other": "model_not_found"}
    for number in range(11):
        assert found[f"r{number}"]["body"]["usage"]["completion_tokens"] == 3 + number % 4
    assert found["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(found["many"]["body"]["choices"]) == 4


def test_a_model_that_cannot_be_loaded_is_told(files):
    from jpaged.server.config import ServerConfig

    def build():
        raise ValueError("there is no such model")

    files.write(ask("a"))
    with pytest.raises(ValueError, match="there is no such model"):
        run_batch(files.input, files.output, None, ModelServing(ServerConfig(), build))
    assert files.output.read_bytes() == b""


def test_a_signal_ends_a_run_whose_model_is_still_being_loaded(files, capsys):
    from jpaged.server.config import ServerConfig

    loaded = threading.Event()

    def build():
        os.kill(os.getpid(), signal.SIGINT)
        loaded.wait(30)
        raise ValueError("too late")

    files.write(ask("a"))
    serving = ModelServing(ServerConfig(), build)
    assert run_batch(files.input, files.output, None, serving) == 130
    assert serving.is_alive, "so that the command knows how to end"
    loaded.set()
    assert "0 of 1 requests are answered" in capsys.readouterr().err


# The way into the app.


def test_an_app_is_started_and_ended():
    told = []

    @contextlib.asynccontextmanager
    async def life(app):
        told.append("start")
        yield
        told.append("end")

    async def use(app):
        async with lifespan(app):
            told.append("use")

    asyncio.run(use(Starlette(lifespan=life)))
    assert told == ["start", "use", "end"]

    @contextlib.asynccontextmanager
    async def fails(app):
        raise ValueError("no such model")
        yield

    with pytest.raises(RuntimeError, match="no such model"):
        asyncio.run(use(Starlette(lifespan=fails)))

    async def without(scope, receive, send):
        assert scope["type"] == "http"

    asyncio.run(use(without))


def test_an_answer_in_parts_is_put_together_and_the_app_sees_its_client_leave_at_the_end():
    events = []

    async def app(scope, receive, send):
        events.append(await receive())
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-request-id", b"mine")]})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})
        events.append(await receive())

    reply = asyncio.run(post(app, "/x", b"{}", {"x-y": "z"}))
    assert reply == (201, "mine", b"one two")
    assert events == [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]
