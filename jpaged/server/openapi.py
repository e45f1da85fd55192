"""Owns the description of the server's endpoints in the format of OpenAPI."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from jpaged import __version__
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
    names, schemas = models_json_schema(
        [(body, "validation") for body in BODIES.values()], ref_template="#/components/schemas/{model}"
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
                "responses": _responses(events=path.startswith("/v1")),
            }
        }
    for path, summary in READ.items():
        operation: dict[str, Any] = {"summary": summary, "responses": _responses()}
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
            "schemas": schemas.get("$defs", {}) | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _responses(events: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"200": {"description": "The answer.", "content": content}, "default": _error()}


def _error() -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": "What is wrong.", "content": {"application/json": {"schema": schema}}}
