"""The spans of requests: in whose trace they are, what they say, and that nothing is spent without them."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time

import pytest
from server_support import Live, build, random_params

from jpaged.server import tracing
from jpaged.server.config import ServerConfig
from jpaged.server.tracing import Tracing

BODY = {"prompt": ["a b c", "d"], "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "n": 2}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def traced():
    """A server, and what gives the spans that were ended since it was asked last."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Live(build(random_params())) as live:
        exporter = memory.InMemorySpanExporter()
        live.service.tracing = Tracing(live.config, exporter)

        def spans(count: int) -> list:
            live.assert_idle()
            live.service.tracing._provider.force_flush()
            until = time.monotonic() + 10
            while len(found := exporter.get_finished_spans()) < count and time.monotonic() < until:
                time.sleep(0.01)
                live.service.tracing._provider.force_flush()
            exporter.clear()
            assert len(found) == count
            return list(found)

        yield live, spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_says_what_the_engine_did(traced, stream):
    live, spans = traced
    status, headers, _ = live.call(
        "POST", "/v1/completions", BODY | {"stream": stream}, {"traceparent": PARENT, "x-request-id": "mine"}
    )
    assert status == 200
    (span,) = spans(1)
    assert span.name == "text_completion tiny" and span.kind.name == "SERVER" and span.status.is_unset
    assert f"{span.context.trace_id:032x}" == PARENT[3:35] and f"{span.parent.span_id:016x}" == PARENT[36:52]
    told = dict(span.attributes)
    assert 0 < told.pop("jpaged.queue_time") <= told.pop("gen_ai.response.time_to_first_chunk") < 10
    assert told.pop("gen_ai.usage.cache_read.input_tokens") >= 0
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jpaged",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 4,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ("length",) * 4,
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "jpaged.request_id": "mine",
    }
    assert span.end_time > span.start_time and headers["x-request-id"] == "mine"


def test_each_request_has_a_span_of_its_own_and_probes_have_none(traced):
    live, spans = traced
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert live.call("GET", path)[0] == 200
    live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    live.post("/tokenize", {"prompt": "a"})
    chat, tokenize = spans(2)
    assert (chat.name, tokenize.name) == ("chat tiny", "POST /tokenize")
    assert chat.parent is None and chat.context.trace_id != tokenize.context.trace_id


def test_a_trace_that_is_not_sampled_has_no_span(traced):
    live, spans = traced
    assert live.call("POST", "/v1/completions", BODY, {"traceparent": PARENT[:-1] + "0"})[0] == 200
    live.refused("/v1/completions", {"prompt": ""})
    (span,) = spans(1)
    assert span.attributes["http.response.status_code"] == 400


def test_what_is_wrong_with_a_request_is_told_without_its_texts(traced):
    live, spans = traced
    live.refused("/v1/completions", {"prompt": "a", "temperature": "private"})
    (span,) = spans(1)
    assert span.attributes["http.response.status_code"] == 400 and span.status.is_unset
    assert span.attributes["error.type"] == "invalid_type"
    assert "private" not in span.to_json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_took_too_long_is_an_error(traced, stream, monkeypatch):
    live, spans = traced
    step = live.engine.step
    monkeypatch.setattr(live.engine, "step", lambda: (time.sleep(0.05), step())[1], raising=False)
    monkeypatch.setattr(live.service, "config", live.config.model_copy(update={"request_timeout": 0.3}))
    live.call("POST", "/v1/completions", BODY | {"max_tokens": 200, "stream": stream})
    (span,) = spans(1)
    assert span.attributes["http.response.status_code"] == 504 and span.status.status_code.name == "ERROR"
    assert span.attributes["error.type"] == "request_timeout" and span.attributes["gen_ai.usage.input_tokens"] == 4
    assert "gen_ai.usage.output_tokens" not in span.attributes


def test_an_error_that_nobody_foresaw_is_told_whole(traced, monkeypatch):
    live, spans = traced

    def broken(*_):
        raise RuntimeError("that was not foreseen")

    monkeypatch.setattr(live.service, "check_model", broken)
    assert live.call("POST", "/v1/completions", BODY)[0] == 500
    (span,) = spans(1)
    assert span.status.status_code.name == "ERROR" and span.attributes["error.type"] == "RuntimeError"
    assert span.events[0].attributes["exception.message"] == "that was not foreseen"


def test_spans_reach_a_collector_when_the_server_ends():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}"
            with Live(build(random_params()), otlp_endpoint=endpoint) as live:
                live.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        finally:
            collector.shutdown()
            thread.join()
    assert [path for path, _ in got] == ["/v1/traces"]


def test_a_collector_that_is_not_there_does_not_keep_the_server_from_ending(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(tracing, "END_WITHIN", 0.5)
    with Live(build(random_params()), otlp_endpoint="http://127.0.0.1:1") as live:
        live.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        began = time.monotonic()
    assert time.monotonic() - began < 5


def test_without_an_endpoint_nothing_of_it_is_imported():
    code = (
        "import sys; from jpaged.server.service import Service; from jpaged.server.config import ServerConfig;"
        "assert Service(ServerConfig()).tracing is None; sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_packages_that_are_missing_are_named_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"^otlp_endpoint needs packages .*extra 'otel'$") as caught:
        Tracing(ServerConfig(otlp_endpoint="http://localhost:4318"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ValueError, match="otlp_endpoint must begin with http:// or https://"):
        ServerConfig(otlp_endpoint=endpoint)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("http://host:4318/", "http://host:4318/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_usual_one(endpoint, url):
    assert tracing._with_path(endpoint) == url
