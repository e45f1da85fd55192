"""Owns what the server logs: lines of text or JSON, each with the id of its request, and no prompt unless asked."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time

LOG = logging.getLogger("jpaged.server")
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_plain(value)}" for name, value in getattr(record, "fields", {}).items())
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        known = request_id.get()
        line = f"{when}Z {record.levelname:7} {record.getMessage()}{f' request_id={known}' if known else ''}{fields}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _plain(value: object) -> str:
    """On one line, whatever a client has put into it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def set_up(level: str, form: str) -> None:
    """Logs go to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    for name in ("jpaged", "uvicorn", "uvicorn.error", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers = [] if "." in name else [handler]
        logger.propagate = "." in name
        logger.setLevel(level.upper() if name == "jpaged" else logging.ERROR)


def log(message: str, level: int = logging.INFO, error: BaseException | None = None, /, **fields: object) -> None:
    LOG.log(level, message, extra={"fields": fields}, exc_info=error)
