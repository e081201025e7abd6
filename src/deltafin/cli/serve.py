"""``deltafin serve``: the OpenAI-compatible server."""

from __future__ import annotations

import ipaddress
import logging
from typing import Annotated

import typer
from rich.console import Console

from deltafin import installs
from deltafin.cli import options, show
from deltafin.errors import UsageError
from deltafin.residency.machine import available_memory
from deltafin.sessions.opening import open_sessions, ram_share
from deltafin.settings import Settings
from deltafin.text.tokenizer import K3Tokenizer

MODEL_NAME = "deltafin-kimi-k3"
MINI_NAME = "deltafin-mini-k3"


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [default: 8000]")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must present; better given as K3_API_KEY.")
    ] = None,
    insecure_bind: Annotated[
        bool | None, typer.Option("--insecure-bind", help="Listen beyond this machine without a key.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Accept requests for this host name. Once per name.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let web pages of this origin call. Once per origin.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of a reply. [default: 1000000]")] = None,
    max_request_bytes: Annotated[
        str | None, typer.Option(help="Most bytes of a request, e.g. 16MiB. [default: 128MiB]")
    ] = None,
    queue: Annotated[int | None, typer.Option(help="Generations that wait while one runs. [default: 0]")] = None,
    no_memo: Annotated[bool, typer.Option("--no-memo", help="Do not answer identical requests from memory.")] = False,
    resume: Annotated[
        bool | None,
        typer.Option("--resume", help="Continue a reply that a crash cut, by the request's Idempotency-Key."),
    ] = None,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="Thinking where a request names none: low, high, max or none. [default: max]")
    ] = None,
    state_ram: Annotated[
        str | None, typer.Option(help="Memory for states of earlier turns. [default: 1/16 of the budget]")
    ] = None,
    state_disk: options.StateDisk = None,
    router_trace: options.RouterTrace = None,
    draft: options.Draft = None,
    draft_width: options.DraftWidth = None,
    draft_dir: options.DraftDir = None,
    backend: options.Backend = None,
    precision: options.Precision = None,
    model: options.Model = None,
    store: options.Store = None,
    ram: options.Ram = None,
    threads: options.Threads = None,
    context: options.Context = None,
    depth: options.Depth = None,
) -> None:
    """Serve K3 over HTTP, in the shape of OpenAI's API."""
    settings, _ = options.settings_from(
        host=host,
        port=port,
        api_key=api_key,
        insecure_bind=insecure_bind,
        allow_host=tuple(allow_host) if allow_host else None,
        cors_origin=tuple(cors_origin) if cors_origin else None,
        max_tokens=max_tokens,
        max_request_bytes=max_request_bytes,
        queue=queue,
        memo=False if no_memo else None,
        resume=resume,
        reasoning_effort=reasoning_effort,
        state_ram=state_ram,
        state_disk=state_disk,
        draft=draft,
        draft_width=draft_width,
        draft_dir=draft_dir,
        backend=backend,
        precision=precision,
        model=model,
        store=store,
        ram=ram,
        threads=threads,
        context=context,
        depth=depth,
    )
    _check_address(settings)
    # Imported here so that no other command waits for the web framework.
    from deltafin.server.app import ServerOptions, create_app
    from deltafin.server.listen import listen

    if settings.draft == "qwen":
        raise UsageError("Qwen drafts only serve raw completions at the command line", remedy="use --draft dspark")
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    with options.ingest_progress(console) as progress:
        install = installs.resolve(settings, progress)
    budget = int(settings.ram) if settings.ram is not None else available_memory()
    points = ram_share(budget) if settings.state_ram is None else int(settings.state_ram)
    with options.open_engine(settings, install, console, reserve=points, trace=router_trace) as engine:
        tokenizer = K3Tokenizer.load(engine.store.metadata_dir, engine.config)
        session, turns = open_sessions(
            engine,
            settings.home,
            ram=points,
            disk=None if settings.state_disk is None else int(settings.state_disk),
        )
        served = ServerOptions(
            model=MINI_NAME if install.builtin else MODEL_NAME,
            api_key=settings.api_key.get_secret_value() if settings.api_key else None,
            hosts=settings.allow_host,
            origins=settings.cors_origin,
            max_tokens=settings.max_tokens,
            max_request_bytes=int(settings.max_request_bytes),
            queue=settings.queue,
            memo=settings.memo,
            resume=settings.resume,
            effort=settings.reasoning_effort,
        )
        try:
            app = create_app(engine, tokenizer, session, turns, served)
            for line in show.plan_lines(engine.plan, len(engine.store.spine_keys)):
                console.print(line, style="dim")
            if install.builtin:
                console.print("no model is installed: serving the built-in miniature K3", style="dim")

            def ready(address: str) -> None:
                console.print(f"serving {served.model} at http://{address}/v1; Ctrl-C stops", markup=False)

            listen(app, settings.host, settings.port, ready)
        finally:
            session.close()
            turns.close()


def _check_address(settings: Settings) -> None:
    """Beyond this machine only with a key, or on the operator's word."""
    name = settings.host
    try:
        loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        loopback = name == "localhost"
    if not loopback and settings.api_key is None and not settings.insecure_bind:
        raise UsageError(
            f"listening on {name} without a key would let everyone on the network use K3",
            remedy="set K3_API_KEY, or add --insecure-bind if that is meant",
        )
    if settings.insecure_bind and (loopback or settings.api_key is not None):
        raise UsageError("--insecure-bind has no effect here", remedy="drop it")
