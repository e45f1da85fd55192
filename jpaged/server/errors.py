"""Owns `ApiError`: what goes wrong with a request, as its sender is told."""

from __future__ import annotations

import json
from typing import Any


class ApiError(Exception):
    """An answer in the place of a result: `{"error": {"message", "type", "param", "code"}}` with an HTTP status.

    param: the key of the body that is wrong, if it is one. headers: of the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}
        self.headers = headers or {}

    def json(self) -> bytes:
        # Escaped: a message may quote what was sent, and that may be no Unicode.
        return json.dumps({"error": self.error}).encode()


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    """The server, not the request, is why there is no answer."""
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return ApiError(503, message, kind="server_error", code=code, headers=headers)


def overloaded(message: str) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": "1"})


def from_value_error(error: ValueError, names: dict[str, Any]) -> ApiError:
    """Of a check of ours, whose message begins with what it is about. `names`: that to the key of the body."""
    message = str(error)
    word = message.split(maxsplit=1)[0].split("=")[0].split("[")[0].strip(":,'") if message else ""
    code = "context_length_exceeded" if "max_model_len" in message else None
    return ApiError(400, message, param=names.get(word), code=code)
