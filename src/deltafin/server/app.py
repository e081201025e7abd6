"""The HTTP application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from deltafin.generation.engine import Engine
from deltafin.server.answer import JobResponse
from deltafin.server.errors import ApiError
from deltafin.server.guard import Answered, BodyReader, Guard
from deltafin.server.jobs import Memo, Scheduler
from deltafin.server.metrics import CONTENT_TYPE, Metrics
from deltafin.server.openapi import describe
from deltafin.server.pieces import Done
from deltafin.server.prepare import Prepared, Preparer
from deltafin.server.shapes import ChatShape, CompletionShape, Shape
from deltafin.server.worker import Worker
from deltafin.sessions.reuse import ReusingSession
from deltafin.sessions.turns import TurnLog
from deltafin.text.tokenizer import K3Tokenizer

MEMO_ENTRIES = 32
MEMO_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What an operator may choose.

    Attributes:
        model: the name clients use.
        api_key: None for none.
        hosts: accepted host names besides addresses and localhost.
        origins: origins of web pages that may call, empty for none.
        max_tokens: most tokens of a reply.
        max_request_bytes: most bytes of a request.
        queue: generations that wait while one runs.
        memo: whether identical requests are answered from memory.
        resume: whether a reply that a crash cut continues, by its idempotency key.
        effort: thinking effort where a request names none.
        patience: seconds a request body may pause.
    """

    model: str
    api_key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_tokens: int = 1_000_000
    max_request_bytes: int = 128 << 20
    queue: int = 0
    memo: bool = True
    resume: bool = False
    effort: str = "max"
    patience: float = 10.0


def create_app(
    engine: Engine, tokenizer: K3Tokenizer, session: ReusingSession, turns: TurnLog, options: ServerOptions
) -> FastAPI:
    """The application around one engine, which it uses alone; the caller closes what it passes in afterwards."""
    preparer = Preparer(
        tokenizer,
        turns,
        model=options.model,
        context=engine.plan.context,
        max_tokens=options.max_tokens,
        effort=options.effort,
        resume=options.resume,
    )
    worker = Worker(session, tokenizer, turns, preparer.grammars, engine.stop.clear)
    bodies = BodyReader(options.max_request_bytes, patience=options.patience)
    memo = Memo(MEMO_ENTRIES if options.memo else 0, MEMO_BYTES)
    started = int(time.time())
    fingerprint = f"fp_{engine.store.identity[:12]}"
    scheduler: Scheduler

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal scheduler
        scheduler = Scheduler(worker.run, engine.stop.set, waiting=options.queue, memo=memo)
        try:
            yield
        finally:
            scheduler.close()

    def figures() -> dict[str, tuple[float, bool, str]]:
        reuse = session.stats
        return {
            "busy": (scheduler.busy, False, "Whether a generation runs."),
            "waiting": (scheduler.waiting, False, "Generations that wait."),
            "memo_hits": (scheduler.memo_hits, True, "Requests answered from the memo."),
            "attached": (scheduler.attached, True, "Requests that joined a running generation."),
            "reuse_live": (reuse.live, True, "Prefixes found in the running session."),
            "reuse_ram": (reuse.ram, True, "Prefixes found in RAM."),
            "reuse_disk": (reuse.disk, True, "Prefixes found on disk."),
            "reused_tokens": (reuse.reused_tokens, True, "Prompt tokens that needed no pass."),
            "resumed_tokens": (worker.resumed_tokens, True, "Tokens that an earlier run of the server had decided."),
            "states_unsaved": (session.files_failure is not None, False, "Whether states cannot be saved."),
        }

    metrics = Metrics(figures)
    # The interactive pages would load scripts from elsewhere; the document itself is served.
    app = FastAPI(title="Deltafin", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json")

    async def generate(
        request: Request, prepare: Callable[[bytes, str | None], Prepared], shape: type[Shape]
    ) -> Response:
        arrived = time.monotonic()
        send = request.scope["deltafin.send"]
        body = await bodies.read(request.scope, request.receive, send)
        try:
            prepared = await asyncio.to_thread(prepare, body, request.headers.get("idempotency-key"))
        finally:
            bodies.release(body)
        job = scheduler.submit(prepared.work)

        def done(end: Done) -> None:
            metrics.tokens.labels("prompt").inc(end.prompt_tokens)
            metrics.tokens.labels("cached").inc(end.cached_tokens)
            metrics.tokens.labels("completion").inc(end.completion_tokens)

        return JobResponse(
            job,
            scheduler,
            shape(job, options.model, fingerprint),
            prepared.stream,
            on_first=lambda: metrics.first_token.observe(time.monotonic() - arrived),
            on_done=done,
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Continues a conversation."""
        return await generate(request, preparer.chat, ChatShape)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continues a text."""
        return await generate(request, preparer.completion, CompletionShape)

    def model() -> dict[str, Any]:
        return {
            "id": options.model,
            "object": "model",
            "created": started,
            "owned_by": "deltafin",
            "context_length": preparer.context,
            "max_output_tokens": min(options.max_tokens, preparer.context),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        """The one model, by name."""
        if name != options.model:
            raise ApiError(404, f"The model {name[:100]!r} does not exist", param="model", code="model_not_found")
        return model()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the server lives; never waits for K3."""
        return {"status": "ok", "busy": scheduler.busy, "waiting": scheduler.waiting}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Figures for Prometheus."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        wrong = ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path[:200]}")
        return JSONResponse(wrong.body, error.status_code, error.headers)

    @app.exception_handler(Answered)
    async def answered(request: Request, error: Answered) -> Response:
        return _Nothing()

    @app.exception_handler(ConnectionError)
    async def left(request: Request, error: ConnectionError) -> Response:
        return _Nothing()

    known = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/openapi.json"}

    def count(path: str, status: int) -> None:
        metrics.requests.labels(path if path in known else "other", str(status)).inc()

    if options.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(_Sender)
    app.add_middleware(Guard, api_key=options.api_key, hosts=options.hosts, on_answer=count)
    describe(app, options.model)
    return app


class _Nothing(Response):
    """Sends nothing: the answer was sent, or nobody is there to read it."""

    async def __call__(self, *_: Any) -> None:
        return None


class _Sender:
    """Lets a handler answer before the body has arrived."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["deltafin.send"] = send
        await self._app(scope, receive, send)
