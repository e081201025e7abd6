"""What every request passes first: host, key, and a body that is bounded in size and time."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from deltafin.server.errors import ApiError, place_of

log = logging.getLogger("deltafin.server")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SLOWEST_BYTES_PER_S = 65536
OPEN_PATHS = frozenset({"/health"})


class Guard:
    """ASGI middleware.

    A web page cannot make a browser send a host name of the page's own to us and have it accepted: only addresses,
    ``localhost`` and the names given are. Pages of other origins cannot read answers, unless CORS was asked for.

    Args:
        api_key: expected as bearer token, except for ``/health``; None: no key.
        hosts: more accepted host names.
        on_answer: told of path and status.
    """

    def __init__(
        self, app: App, *, api_key: str | None, hosts: Sequence[str], on_answer: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(8)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                self._on_answer(scope["path"], message["status"])
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, sending)
        except ApiError as e:
            if not started:
                await respond(sending, e)
        except (OSError, asyncio.CancelledError):
            raise
        except Exception as e:
            log.error("internal error %s (request %s)", place_of(e), request_id)
            if not started:
                await respond(
                    sending, ApiError(500, f"internal error, see request {request_id} in the server's output")
                )

    def _check(self, scope: Scope) -> None:
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._known(hosts[0].decode("latin-1")):
            raise ApiError(
                403, "this host name is not served here; allow it with --allow-host", code="host_not_allowed"
            )
        if self._key is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        given = b"".join(value for name, value in headers if name == b"authorization")
        scheme, _, token = given.partition(b" ")
        # Compared in constant time, whatever the length.
        if not (hmac.compare_digest(token.strip(), self._key) and scheme.lower() == b"bearer"):
            raise ApiError(
                401,
                "Incorrect or missing API key",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _known(self, host: str) -> bool:
        name = host.lower().strip()
        if name.startswith("["):
            name, _, port = name[1:].partition("]")
        else:
            name, _, port = name.partition(":")
        if port.lstrip(":") and not port.lstrip(":").isdigit():
            return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class BodyReader:
    """Reads request bodies within limits.

    Args:
        limit: most bytes of one body.
        total: most bytes of all bodies being read or processed.
        patience: seconds without a byte, and seconds granted before a body must keep a modest rate.
    """

    def __init__(self, limit: int, *, total: int | None = None, patience: float = 10.0) -> None:
        self._limit = limit
        self._total = total if total is not None else 3 * limit
        self._patience = patience
        self.held = 0

    async def read(self, scope: Scope, receive: Receive, send: Send) -> bytes:
        """The body; its bytes count as held until ``release``.

        Raises:
            ApiError: 408, 413, 415 or 429.
            ConnectionError: the client went away.
        """
        headers = {name.lower(): value for name, value in scope["headers"]}
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        # A page of another origin may post a form or plain text without asking first, but not JSON.
        if kind != b"application/json":
            raise ApiError(415, "send Content-Type: application/json", code="unsupported_media_type")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "compressed bodies are not supported", code="unsupported_media_type")
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._limit:
            await self._refuse(receive, send)
        parts: list[bytes] = []
        size, started = 0, time.monotonic()
        try:
            while True:
                allowed = self._patience + size / SLOWEST_BYTES_PER_S
                left = min(self._patience, started + allowed - time.monotonic())
                try:
                    async with asyncio.timeout(max(left, 0)):
                        message = await receive()
                except TimeoutError:
                    raise ApiError(
                        408, "the request body did not arrive in time", code="timeout", headers={"Connection": "close"}
                    ) from None
                if message["type"] == "http.disconnect":
                    raise ConnectionError
                part = message.get("body", b"")
                size += len(part)
                self.held += len(part)
                parts.append(part)
                if size > self._limit:
                    parts.clear()
                    await self._refuse(receive, send)
                if self.held > self._total:
                    parts.clear()
                    raise ApiError(
                        429, "too many large requests at once", code="overloaded", headers={"Retry-After": "5"}
                    )
                if not message.get("more_body"):
                    return b"".join(parts)
        except BaseException:
            self.held -= size
            raise

    def release(self, body: bytes) -> None:
        """The body has been processed."""
        self.held -= len(body)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        """Answers while the body is still arriving, and reads on a little so that the client can see the answer."""
        error = ApiError(
            413,
            f"the request has more than {self._limit} bytes; start the server with a larger --max-request-bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )
        await respond(send, error, last=False)
        until, drained = time.monotonic() + 2.0, 0
        with contextlib.suppress(TimeoutError):
            while drained < self._limit and time.monotonic() < until:
                async with asyncio.timeout(0.5):
                    message = await receive()
                drained += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        raise Answered


class Answered(Exception):
    """The request has its answer already."""


async def respond(send: Send, error: ApiError, *, last: bool = True) -> None:
    """Sends ``error`` as a complete response."""
    data = json.dumps(error.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(data)), **error.headers}
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": data, "more_body": not last})
