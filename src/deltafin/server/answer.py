"""Answers that follow a job: one JSON object, or server-sent events. Both notice at once when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from deltafin.server.guard import Receive, Scope, Send, respond
from deltafin.server.jobs import Job, Progress, Scheduler
from deltafin.server.pieces import Done, Failed
from deltafin.server.schema import StreamOptions
from deltafin.server.shapes import Shape, progress, usage

FIRST_SIGN_SECONDS = 0.5
SIGN_SECONDS = 5.0
PROGRESS_SECONDS = 0.25


class JobResponse(Response):
    """Follows ``job`` until it ends or the client leaves.

    Args:
        stream: None for one JSON object.
        on_first: called when the first piece is there.
        on_done: called with the end of a finished reply.
    """

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        shape: Shape,
        stream: StreamOptions | None,
        *,
        on_first: Callable[[], None] = lambda: None,
        on_done: Callable[[Done], None] = lambda done: None,
    ) -> None:
        super().__init__()
        self._job = job
        self._scheduler = scheduler
        self._shape = shape
        self._stream = stream
        self._on_first = on_first
        self._on_done = on_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        follow = self._whole if self._stream is None else self._events
        answering = asyncio.ensure_future(follow(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        except OSError:  # the connection broke while we wrote
            pass
        finally:
            answering.cancel()
            leaving.cancel()
            self._scheduler.leave(self._job)

    async def _whole(self, send: Send) -> None:
        job = self._job
        event = job.watch()
        first = True
        try:
            while not job.finished:
                await job.changed(event, None)
                if first and job.pieces:
                    first = False
                    self._on_first()
        finally:
            job.unwatch(event)
        last = job.pieces[-1]
        if isinstance(last, Failed):
            await respond(send, last.error)
            return
        assert isinstance(last, Done)
        self._on_done(last)
        data = await asyncio.to_thread(lambda: json.dumps(self._shape.whole(job.pieces)).encode())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _events(self, send: Send) -> None:
        job, shape, options = self._job, self._shape, self._stream
        assert options is not None
        more: dict[str, Any] = {"usage": None} if options.include_usage else {}
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(*chunks: dict[str, Any]) -> None:
            await _write(send, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))

        event = job.watch()
        seen, patience = 0, FIRST_SIGN_SECONDS
        shown: tuple[int, Progress | None] = (-1, None)
        told = 0.0
        loop = asyncio.get_running_loop()
        try:
            await write(*(shape.chunk(choice, **more) for choice in shape.opening()))
            while True:
                if not await job.changed(event, patience):
                    # A comment: clients and proxies see that we live, parsers skip it.
                    await _write(send, ": still working\n\n")
                    patience = SIGN_SECONDS
                if options.include_progress and not seen:
                    now = (self._scheduler.position(job), job.progress)
                    # The first of each kind is told at once, so that even a short prefill is seen.
                    fresh_kind = now[0] != shown[0] or (shown[1] is None and now[1] is not None)
                    if fresh_kind or (now != shown and loop.time() - told > PROGRESS_SECONDS):
                        shown, told = now, loop.time()
                        await write(shape.chunk(None, progress=progress(*now), **more))
                fresh = job.pieces[seen:]
                if fresh and not seen:
                    self._on_first()
                seen += len(fresh)
                chunks = [
                    shape.chunk(choice, **more)
                    for piece in fresh
                    if not isinstance(piece, Done | Failed)
                    for choice in shape.choices(piece)
                ]
                if chunks:
                    await write(*chunks)
                if fresh and isinstance(fresh[-1], Done | Failed):
                    break
        finally:
            job.unwatch(event)
        last = job.pieces[-1]
        if isinstance(last, Failed):
            await write(last.error.body)
        else:
            assert isinstance(last, Done)
            self._on_done(last)
            await write(shape.chunk(shape.closing(last), **more))
            if options.include_usage:
                await write(shape.chunk(None, usage=usage(last)))
        await _write(send, "data: [DONE]\n\n", last=True)


async def _write(send: Send, text: str, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": not last})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
