"""Owns `Tracing`: a span of OpenTelemetry for each request, sent by OTLP over HTTP. Off, it costs nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from jpaged import __version__
from jpaged.host.sampling_params import SamplingParams
from jpaged.server.config import ServerConfig
from jpaged.server.engine_thread import Stream
from jpaged.server.errors import ApiError
from jpaged.server.prompts import EncodedPrompt

END_WITHIN = 5.0  # seconds, for the spans that were not sent yet when the server ends
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/generate": "text_completion"}

_current: ContextVar[Span | None] = ContextVar("span", default=None)  # of the request that is being answered


class Tracing:
    """Sends spans to where the config says. The SDK's variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, ...)
    hold. exporter: takes the spans in the place of that, for tests.

    Raises ValueError if the packages are missing.
    """

    def __init__(self, config: ServerConfig, exporter: Any = None):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                f"otlp_endpoint needs packages that are not installed ({error}): install jpaged with its extra 'otel'"
            ) from error
        self._model = config.names[0]
        self._kind = SpanKind.SERVER
        self._read = TraceContextTextMapPropagator().extract
        name = os.environ.get("OTEL_SERVICE_NAME", "jpaged")
        # Not the process's own provider: that is not a server's to choose where it is embedded.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name, "service.version": __version__}), shutdown_on_exit=False
        )
        if exporter is None:
            exporter = OTLPSpanExporter(_with_path(str(config.otlp_endpoint)), timeout=END_WITHIN)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jpaged.server", __version__)

    def begin(self, path: str, headers: Mapping[bytes, str]) -> Span:
        """The span of a request, in the trace that its headers are of. It is the current one until it ends."""
        operation = OPERATIONS.get(path)
        attributes = {"http.request.method": "POST", "url.path": path}
        if operation:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "jpaged"}
            attributes["gen_ai.request.model"] = self._model
        parent = self._read({name: headers.get(name.encode(), "") for name in ("traceparent", "tracestate")})
        named = f"{operation} {self._model}" if operation else f"POST {path}"
        return Span(self._tracer.start_span(named, parent, self._kind, attributes), self._model)

    def end(self) -> None:
        """Sends what is left, if it can be sent soon. Blocks."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(END_WITHIN)


class Span:
    """What is told of one request: names are those of the conventions for HTTP and for generative AI."""

    def __init__(self, span: Any, model: str):
        self._span, self._model = span, model
        self._token = _current.set(self)

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def note_streams(
        self, prompts: Sequence[EncodedPrompt], sampling: SamplingParams, streams: Sequence[Stream]
    ) -> None:
        """What was asked of the engine, and what it did. Texts are left out."""
        told: dict[str, Any] = {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": len(prompts) * sampling.n,
            "gen_ai.usage.input_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        }
        ends = [stream.last for stream in streams if stream.last is not None]
        if ends and len(ends) == len(prompts):
            samples = [sample for end in ends for sample in end.outputs]
            times = [one for end in ends for one in end.latencies]
            firsts = [one.ttft for one in times if one.ttft is not None]
            queued = [one.queue_time for one in times if one.queue_time is not None]
            told |= {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [sample.finish_reason or "abort" for sample in samples],
                "gen_ai.usage.output_tokens": sum(len(sample.token_ids) for sample in samples),
                "gen_ai.usage.cache_read.input_tokens": sum(end.num_cached_tokens for end in ends),
                "gen_ai.response.time_to_first_chunk": min(firsts, default=None),  # seconds
                "jpaged.queue_time": min(queued, default=None),  # seconds; the conventions have none
            }
        self._span.set_attributes({name: value for name, value in told.items() if value is not None})

    def note_error(self, error: BaseException) -> None:
        """What a client is told of an error may quote what it sent, so its kind alone is kept; of a fault, all is."""
        if isinstance(error, ApiError):
            kind = error.error["code"] or error.error["type"]
        else:
            kind = type(error).__name__
            self._span.record_exception(error)
        self._span.set_attribute("error.type", kind)

    def end(self, status: int, request_id: str) -> None:
        """status: that of the answer, or what the log says of it."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes({"http.response.status_code": status, "jpaged.request_id": request_id})
        if not status or status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
        _current.reset(self._token)


def note_streams(prompts: Sequence[EncodedPrompt], sampling: SamplingParams, streams: Sequence[Stream]) -> None:
    """Tell the span of the current request, if there is one, what the engine did for it."""
    if (span := _current.get()) is not None:
        span.note_streams(prompts, sampling, streams)


def note_error(error: BaseException) -> None:
    """Tell the span of the current request, if there is one, what went wrong."""
    if (span := _current.get()) is not None:
        span.note_error(error)


def _with_path(endpoint: str) -> str:
    """A host alone stands for the path that collectors listen on."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
