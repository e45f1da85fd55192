"""Owns `serve`: a server as a process, from the socket that it binds to the signal that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from jpaged.server.app import make_app
from jpaged.server.config import ServerConfig
from jpaged.server.connection import Connection
from jpaged.server.engine_thread import EngineGone
from jpaged.server.logs import log, set_up
from jpaged.server.service import Service


def serve(config: ServerConfig) -> int:
    """Serves until it gets SIGTERM or SIGINT; returns the exit status.

    Raises OSError if the address is not to be had, ValueError for keys that can't be read.
    """
    set_up(config.log_level, config.log_format)
    with listening(config) as listener:
        return asyncio.run(_serve(config, listener))


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
    # asyncio sets it for sockets whose `proto` is TCP, which those of `create_server` don't say: a chunk of a stream
    # would wait until the client has acknowledged the one before, 40 ms where it delays that.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # of its connections: peers may be gone
        yield listener


class HttpServer(uvicorn.Server):
    """Leaves signals alone: what they lead to is decided in `serve`."""

    def __init__(self, service: Service):
        config = service.config
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=type("Protocol", (Connection,), {"head_timeout": config.body_timeout}),
                loop="asyncio",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                root_path=config.root_path,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: ServerConfig, listener: socket.socket) -> int:
    service = Service(config)
    server = HttpServer(service)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if told.is_set():
            log("told to end twice: ending now", logging.WARNING)
            os._exit(128 + number)
        log(
            f"told to end: taking no more requests; those that run get {config.shutdown_timeout:g} seconds (a second "
            "signal ends them now)",
            signal=signal.Signals(number).name,
            requests=service.thread.num_requests,
        )
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    scheme = "https" if config.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.all_api_keys():
        log(f"whoever reaches {config.host} may ask: no API key is needed", logging.WARNING)
    log("starting", model=config.model, url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    ending = asyncio.ensure_future(told.wait())
    starting = asyncio.ensure_future(_start(service))
    crashing = asyncio.ensure_future(_until_crashed(service))
    status = 0
    await asyncio.wait([starting, ending, serving], return_when=asyncio.FIRST_COMPLETED)
    if starting.done() and not starting.result():
        status = 1
    else:
        await asyncio.wait([ending, serving, crashing], return_when=asyncio.FIRST_COMPLETED)
        if crashing.done():
            status = 1
            if not config.exit_on_crash:  # then /health says so until somebody ends the process
                await asyncio.wait([ending, serving], return_when=asyncio.FIRST_COMPLETED)
    await service.end()
    server.should_exit = True
    await serving
    for task in (starting, ending, crashing):
        task.cancel()
    log("ended", status=status)
    if service.thread.is_alive:  # it compiles, and Python would crash while it does
        sys.stderr.flush()
        os._exit(status)
    return status


async def _until_crashed(service: Service) -> None:
    while service.thread.state != "crashed":
        await service.thread.changed.wait()


async def _start(service: Service) -> bool:
    """Returns when requests are served, or False if that failed."""
    while service.starting is None:  # the app's lifespan has not begun
        await asyncio.sleep(0.01)
    try:
        await service.starting
    except EngineGone:
        log(
            f"the engine could not be made: {service.thread.error}",
            logging.ERROR,
            # A sentence of ours says what to do; anything else is a fault, of which the place is told.
            None if isinstance(service.thread.error, ValueError | OSError) else service.thread.error,
        )
        return False
    engine = service.thread.engine
    log(
        "ready",
        seconds=round(engine.warm_up_seconds, 1),
        max_num_seqs=engine.limits.max_num_seqs,
        max_model_len=engine.max_model_len,
        num_pages=engine.num_pages,
        sampling_defaults=service.defaults,
        tool_format=service.tool_format,
        pages="/dashboard and /chat" if service.config.pages else None,
    )
    return True
