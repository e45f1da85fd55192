"""Owns the description of the server's endpoints in the format of OpenAPI."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from jpaged import __version__
from jpaged.server.answer_types import ANSWERS, Status
from jpaged.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

BODIES: dict[str, type[pydantic.BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PLACE = "#/components/schemas/{model}"
READ = {
    "/v1/models": "The names of the model.",
    "/v1/models/{id}": "One of them.",
    "/tokenizer_info": "What the tokenizer is.",
    "/health": "Whether the server works.",
    "/ready": "Whether it serves requests now.",
    "/version": "Of jpaged.",
    "/openapi.json": "This description.",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(root_path: str = "") -> dict[str, Any]:
    """OpenAPI 3.1."""
    names, schemas = models_json_schema([(body, "validation") for body in BODIES.values()], ref_template=PLACE)
    for body in BODIES.values():
        _accept_null(schemas["$defs"][body.__name__])
    answers, answer_schemas = TypeAdapter.json_schemas(
        [(path, "serialization", TypeAdapter(answer)) for path, answer in ANSWERS.items()], ref_template=PLACE
    )
    paths: dict[str, Any] = {}
    for path, body in BODIES.items():
        paths[path] = {
            "post": {
                "summary": (body.__doc__ or "").strip(),
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": names[body, "validation"]}},
                },
                "responses": _responses(answers[path, "serialization"], events=path.startswith("/v1")),
            }
        }
    for path, summary in READ.items():
        answer = answers[path, "serialization"]
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(answer)}
        if ANSWERS[path] is Status:  # which is told in the same way when it is a bad one
            operation["responses"]["503"] = {"description": "It does not.", "content": _json(answer)}
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": operation}
    paths["/metrics"] = {
        "get": {
            "summary": "What Prometheus reads.",
            "responses": {
                "200": {
                    "description": "In its text format.",
                    "content": {"text/plain": {"schema": {"type": "string"}}},
                },
                "default": _error(),
            },
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jpaged",
            "version": __version__,
            "description": "OpenAI's protocol, and what goes beyond it.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"] | answer_schemas["$defs"] | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _accept_null(schema: dict[str, Any]) -> None:
    """A key that is null counts as not given, whatever its type."""
    for name, given in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in given.get("anyOf", ()):
            kept = {key: given.pop(key) for key in ("title", "description", "default") if key in given}
            schema["properties"][name] = {"anyOf": [given, {"type": "null"}], **kept}


def _responses(answer: dict[str, Any], events: bool = False) -> dict[str, Any]:
    content = _json(answer)
    if events:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for what the events of a stream look like
    return {"200": {"description": "The answer.", "content": content}, "default": _error()}


def _error() -> dict[str, Any]:
    return {"description": "What is wrong.", "content": _json({"$ref": PLACE.format(model="Error")})}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
