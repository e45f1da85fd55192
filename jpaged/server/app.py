"""Owns the ASGI app: which path leads where, who may come in, and what every answer has."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged import __version__
from jpaged.server.chats import chats
from jpaged.server.completions import completions
from jpaged.server.engine_thread import EngineGone
from jpaged.server.errors import ApiError, unavailable
from jpaged.server.http import LEFT, Events, Json, error_response, read_json
from jpaged.server.logs import log, request_id
from jpaged.server.metrics import reading
from jpaged.server.openapi import openapi
from jpaged.server.pages import OPEN_PATHS, page_routes
from jpaged.server.rollouts import rollouts
from jpaged.server.service import RETRY_AFTER, Service
from jpaged.server.tokens import detokenize, tokenize, tokenizer_info
from jpaged.server.tracing import note_error

POST: dict[str, Callable[[Service, Request, Mapping[str, Any]], Awaitable[Response]]] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chats,
    "/v1/generate": rollouts,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
OPEN = {"/health", "/ready", "/version"}  # without a key: what a load balancer asks
ASKED_OFTEN = OPEN | {"/metrics", "/dashboard/state"}  # not worth a line of the log each time
GRACE = 10  # seconds after the time of a request, in which what it has come to can be read
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(service: Service) -> ASGIApp:
    """The server of one model. Its lifespan starts the engine and ends it."""
    routes = [
        *(Route(path, _post(service, handler), methods=["POST"]) for path, handler in POST.items()),
        *(Route(path, _get(service, handler), methods=["GET"]) for path, handler in GET.items()),
    ]
    if service.config.pages:
        routes += page_routes(service.watch)
    schema = openapi(service.config.root_path)
    routes.append(Route("/openapi.json", lambda request: Json(schema), methods=["GET"]))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.end()

    config = service.config
    outside = [Middleware(Gate, service=service, paths={route.path for route in routes})]
    if config.cors_origins:
        outside.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            ),
        )
    handlers: dict[Any, Any] = {ApiError: _told, EngineGone: _told, HTTPException: _told, ClientDisconnect: _told}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers | {Exception: _unforeseen})
    app.router.redirect_slashes = False  # clients don't follow: they get a 404 that says what is here
    # Outside of Starlette's own, which would answer an error that nobody foresaw before it is logged here.
    wrapped: ASGIApp = app
    for middleware in reversed(outside):
        wrapped = middleware.cls(wrapped, *middleware.args, **middleware.kwargs)
    return wrapped


class Gate:
    """Lets in who has a key; gives each answer its request's id, counts it and logs it."""

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]):
        self._app, self._service, self._paths = app, service, paths
        self._open = OPEN.union(OPEN_PATHS, {"/metrics"} if service.config.open_metrics else ())
        self._keys = [key.encode() for key in service.config.all_api_keys()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(name)
        began, status = time.perf_counter(), 0
        path = scope["path"].removeprefix(self._service.config.root_path)
        metrics = self._service.metrics
        asks = path in POST and scope["method"] == "POST"
        span = self._service.tracing.begin(path, headers) if self._service.tracing and asks else None

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        if asks:
            metrics.in_flight.inc()
        try:
            if path in self._open or self._may(headers.get(b"authorization", "")):
                await self._app(scope, receive, send_on)
            else:
                error = ApiError(
                    401,
                    "the API key is none of this server's"
                    if b"authorization" in headers
                    else "this server needs an API key: send it as 'Authorization: Bearer KEY'",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(error)(scope, receive, send_on)
        except asyncio.CancelledError:  # the server ends, and a body was still to come
            if not self._service.is_ending or status:
                raise
            await error_response(unavailable("the server has ended", "ending", RETRY_AFTER))(scope, receive, send_on)
        except Exception as error:  # it was answered with a 500, or the connection broke in the middle
            log("an error that nobody foresaw", logging.ERROR, error)
            note_error(error)
        finally:
            status = scope.get("jpaged.outcome") or status
            if asks:
                metrics.in_flight.dec()
            metrics.record_answer(path if path in self._paths else "other", status)
            traced: dict[str, Any] = {} if span is None else {"trace_id": span.trace_id}
            log(
                "answered",
                logging.DEBUG if path in ASKED_OFTEN else logging.INFO,
                method=scope["method"],
                path=path[:200],
                status=status,
                seconds=round(time.perf_counter() - began, 4),
                **scope.get("jpaged.error", {}),
                **traced,
            )
            if span is not None:
                span.end(status, name)
            request_id.reset(token)

    def _may(self, authorization: str) -> bool:
        """All keys are compared, each in the time of its length, whatever was given."""
        if not self._keys:
            return True
        kind, _, key = authorization.partition(" ")
        found = [hmac.compare_digest(key.strip().encode("latin-1"), known) for known in self._keys]
        return kind.lower() == "bearer" and any(found)


def _post(service: Service, handler: Callable) -> Callable[[Request], Awaitable[Response]]:
    config = service.config

    async def endpoint(request: Request) -> Response:
        body = await read_json(request, int(config.max_body), config.body_timeout)
        if config.log_prompts:
            log("asked", body=body)
        response = await handler(service, request, body)
        if isinstance(response, Events):
            response.time_limit = config.request_timeout + GRACE
            response.on_outcome = lambda status: request.scope.__setitem__("jpaged.outcome", status)
        elif config.log_prompts:
            log("answering", body=bytes(response.body).decode(errors="replace"))
        return response

    return endpoint


def _get(service: Service, handler: Callable) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


async def health(service: Service, request: Request) -> Response:
    """Whether the server works, or will when it has started."""
    state = service.thread.state
    return Json({"status": _status(service)}, 200 if state in ("starting", "ready") else 503)


async def ready(service: Service, request: Request) -> Response:
    """Whether requests are served now."""
    return Json({"status": _status(service)}, 200 if service.is_ready else 503)


def _status(service: Service) -> str:
    return "ending" if service.is_ending and service.thread.state == "ready" else service.thread.state


async def version(service: Service, request: Request) -> Response:
    return Json({"version": __version__})


async def models(service: Service, request: Request) -> Response:
    return Json({"object": "list", "data": [_model(service, name) for name in service.config.names]})


async def model(service: Service, request: Request) -> Response:
    return Json(_model(service, service.check_model(request.path_params["id"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    found = {"id": name, "object": "model", "created": service.created, "owned_by": "jpaged"}
    if service.is_ready:
        found["max_model_len"] = service.prompts.max_model_len
    return found


async def metrics(service: Service, request: Request) -> Response:
    values = reading(service.thread.engine) if service.thread.state == "ready" else {}
    return Response(service.metrics.text(values), media_type=CONTENT_TYPE_LATEST)


GET: dict[str, Callable[[Service, Request], Awaitable[Response]]] = {
    "/v1/models": models,
    "/v1/models/{id:path}": model,
    "/tokenizer_info": tokenizer_info,
    "/health": health,
    "/ready": ready,
    "/version": version,
    "/metrics": metrics,
}


async def _told(request: Request, error: Exception) -> Response:
    """What an endpoint raised, as an answer."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=LEFT)  # to nobody
    if isinstance(error, EngineGone):
        error = unavailable(str(error), "engine_gone")
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        message = {
            404: "there is nothing here: /openapi.json lists what is",
            405: f"{request.method} is no method of this path: {headers.get('Allow')} is",
        }
        error = ApiError(error.status_code, message.get(error.status_code, str(error.detail)), headers=headers)
    assert isinstance(error, ApiError)
    # Not the message: it may quote what was sent.
    request.scope["jpaged.error"] = {"error": error.error["code"] or error.error["type"], "param": error.error["param"]}
    return error_response(error)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """Without a word of what it was: it is in the log."""
    message = f"an error that nobody foresaw; the server's log has it under {request_id.get()}"
    return error_response(ApiError(500, message, kind="server_error", code="internal_error"))
