"""Runs the application on uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltafin.errors import UsageError

CONNECTIONS = 1024
MAX_HEADER_BYTES = 64 << 10
HEADER_SECONDS = 10.0
GRACE_SECONDS = 3


class _Protocol(H11Protocol):
    """Closes connections that do not get their first request's header across in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._check_header)

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer.cancel()
        super().connection_lost(exc)

    def _check_header(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


def make_server(app: Any, host: str, port: int) -> tuple[uvicorn.Server, socket.socket]:
    """A server and its bound socket.

    Raises:
        UsageError: the address cannot be listened on.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=_Protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named, asyncio switches off the wait for acknowledgements that would delay small answers.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as e:
        raise UsageError(
            f"cannot listen on {host} port {port}: {e.strerror or e}", remedy="choose another --host or --port"
        ) from None
    return uvicorn.Server(config), bound


def listen(app: Any, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves until Ctrl-C or SIGTERM.

    Args:
        ready: told the address once connections are accepted.
    """
    server, bound = make_server(app, host, port)
    name, actual = bound.getsockname()[:2]
    shown = f"[{name}]:{actual}" if ":" in name else f"{name}:{actual}"

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(shown)

    Announcing(server.config).run(sockets=[bound])
