"""Owns the web pages of the server: the dashboard and the chat, each one file that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from jpaged.server.errors import ApiError
from jpaged.server.http import error_response
from jpaged.server.watch import Watch

STATIC = Path(__file__).parent / "static"
# These hold nothing of the engine, and ask for the key of what they fetch: a browser must get them without one.
OPEN_PATHS = ("/", "/dashboard", "/chat")


def page_routes(watch: Watch) -> list[Route]:
    """`GET /dashboard` and `GET /chat`, open to anyone, and `GET /dashboard/state`, which the server is to guard like
    `/v1`: it tells the names of requests."""

    async def state(request: Request) -> Response:
        try:
            since = float(request.query_params.get("since", "-inf"))
        except ValueError:
            since = math.nan
        if math.isnan(since):
            message = f"since must be a time in seconds, got {request.query_params['since']!r}"
            return error_response(ApiError(400, message, param="since"))
        text = await watch.state(since)
        return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def begin(request: Request) -> Response:
        """For who looks what is here; with a path of its own, as a proxy may have put the server under another."""
        return RedirectResponse("dashboard")

    return [
        Route("/", begin, methods=["GET"]),
        _page("/dashboard", "dashboard.html"),
        _page("/chat", "chat.html"),
        Route("/dashboard/state", state, methods=["GET"]),
    ]


def _page(path: str, name: str) -> Route:
    html = read_page(name)
    headers = {
        "Content-Security-Policy": content_security_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(request: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return Route(path, page, methods=["GET"])


def read_page(name: str) -> str:
    """A page with its parts in the places of the comments that name their files."""

    def part(found: re.Match[str]) -> str:
        return (STATIC / found["name"]).read_text(encoding="utf-8").strip()

    html = (STATIC / name).read_text(encoding="utf-8")
    return re.sub(r"(/\*|<!--) (?P<name>\w+\.(css|js|html)) (\*/|-->)", part, html)


def content_security_policy(html: str) -> str:
    """What a page may do: run its own scripts and styles, known by their hashes, and talk to this server."""
    hashes = {}
    for tag in ("script", "style"):
        found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
        hashes[tag] = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
