"""``deltafin run``: one completion, or a chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltafin import installs
from deltafin.cli import options, show
from deltafin.errors import InputError, Interrupted, UsageError
from deltafin.generation.engine import Engine
from deltafin.generation.events import Finished
from deltafin.generation.session import Session
from deltafin.sessions.named import NamedSession
from deltafin.sessions.opening import open_sessions
from deltafin.sessions.reuse import ReusingSession
from deltafin.settings import Settings
from deltafin.text.chat import ChatOptions, encode_chat
from deltafin.text.messages import Message, parse_messages
from deltafin.text.reply import parse_reply
from deltafin.text.tokenizer import K3Tokenizer

MAX_PROMPT_BYTES = 64 << 20


def run(
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a UTF-8 file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Render the prompt as a chat message; on a terminal, keep talking.")
    ] = False,
    max_new: Annotated[int | None, typer.Option(help="Most tokens of a reply. [default: 512]")] = None,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="Thinking in chats: low, high, max or none. [default: max]")
    ] = None,
    backend: options.Backend = None,
    precision: options.Precision = None,
    model: options.Model = None,
    store: options.Store = None,
    ram: options.Ram = None,
    threads: options.Threads = None,
    context: options.Context = None,
    depth: options.Depth = None,
    offline: options.Offline = None,
    draft: options.Draft = None,
    draft_width: options.DraftWidth = None,
    draft_dir: options.DraftDir = None,
    session: Annotated[str | None, typer.Option(help="Continue the conversation of this name, or begin it.")] = None,
    state_disk: options.StateDisk = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print times, bytes, hit rates and speed afterwards.")] = False,
    events_jsonl: Annotated[str | None, typer.Option(help="Write every event as a JSON line to this file.")] = None,
    router_trace: options.RouterTrace = None,
) -> None:
    """Generate text: from --prompt, --prompt-file or standard input. Greedy and reproducible."""
    settings, _ = options.settings_from(
        backend=backend,
        precision=precision,
        model=model,
        store=store,
        ram=ram,
        threads=threads,
        context=context,
        depth=depth,
        offline=offline,
        draft=draft,
        draft_width=draft_width,
        draft_dir=draft_dir,
        max_new=max_new,
        reasoning_effort=reasoning_effort,
        state_disk=state_disk,
    )
    if state_disk is not None and session is None:
        raise UsageError("--state-disk has no effect without --session", remedy="add --session NAME or drop it")
    if reasoning_effort is not None and not chat:
        raise UsageError("--reasoning-effort has no effect without --chat", remedy="add --chat or drop it")
    if chat and settings.draft == "qwen":
        raise UsageError("Qwen drafts only serve raw completions", remedy="use --draft dspark, or drop --chat")
    if settings.draft_width is not None and settings.draft == "off":
        raise UsageError("--draft-width has no effect with --draft off", remedy="drop one of them")
    interactive = chat and prompt is None and prompt_file is None and sys.stdin.isatty()
    text = "" if interactive else read_prompt(prompt, prompt_file)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with options.ingest_progress(console) as progress:
        install = installs.resolve(settings, progress)
    with options.open_engine(settings, install, console, raw=not chat, trace=router_trace) as engine:
        tokenizer = K3Tokenizer.load(engine.store.metadata_dir, engine.config)
        if install.builtin:
            console.print(
                "no model is installed: using the built-in miniature K3, which only knows facts it memorised",
                style="dim",
            )
        if stats:
            for line in show.plan_lines(engine.plan, len(engine.store.spine_keys)):
                console.print(line, style="dim")
        log = show.EventLog(events_jsonl, tokenizer)
        try:
            named = None if session is None else NamedSession(settings.home, session, engine.store.identity, chat=chat)
            talk = Conversation(engine, tokenizer, settings, console, log, chat=chat, named=named)
            try:
                if interactive:
                    _converse(talk, console, stats=stats)
                else:
                    _report(talk, talk.turn(text), console, stats=stats)
            finally:
                talk.close()
        finally:
            log.close()


class Conversation:
    """Turns text into a prompt, runs it, prints the reply, and remembers the turn."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: K3Tokenizer,
        settings: Settings,
        console: Console,
        log: show.EventLog,
        *,
        chat: bool,
        named: NamedSession | None = None,
    ) -> None:
        self._named = named
        self._session: Session | ReusingSession
        if named is None:
            self._session = engine.session()
        else:
            disk = None if settings.state_disk is None else int(settings.state_disk)
            # The session itself holds what this run needs; other runs find its points on disk.
            self._session, self._turns = open_sessions(engine, settings.home, ram=0, disk=disk)
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._console = console
        self._log = log
        self._options = ChatOptions(effort=settings.reasoning_effort) if chat else None
        self._messages: list[Message] = named.messages if named else []
        self._replies: list[list[int] | None] = named.replies if named else []
        self._ids: list[int] = named.ids if named else []

    def close(self) -> None:
        """Waits until a named conversation's state is on disk."""
        if isinstance(self._session, ReusingSession):
            self._session.close()
            self._turns.close()

    def stats_lines(self) -> list[str]:
        """What the tier, reading ahead and drafting did in this conversation, or why they did nothing."""
        drafts = show.draft_lines(self._session.drafter, self._engine.draft_status)
        return [*show.residency_lines(self._engine), *drafts]

    def turn(self, text: str) -> Finished:
        """Runs one prompt to its end."""
        tokenizer, chat = self._tokenizer, self._options
        if chat is None:
            ids = self._ids + tokenizer.encode(text)
            stop = tokenizer.stop_ids
        else:
            self._messages += parse_messages([{"role": "user", "content": text}])
            replies = iter(self._replies)
            # A reply is sent back as the very ids K3 decided, so that its state can be used again.
            ids = encode_chat(tokenizer, self._messages, chat, recall=lambda message, before: next(replies))
            stop = tokenizer.stop_ids
        printer = show.TextPrinter(tokenizer, chat=chat is not None, thinking=chat is not None and chat.thinking)
        with show.stop_on_signal(self._engine):
            events = self._session.generate(ids, max_new=self._settings.max_new, stop=stop)
            tokens, finished = show.consume(events, printer, self._log, self._console)
        if chat is not None:
            reply = parse_reply(tokenizer, tokens, thinking=chat.thinking)
            self._messages.append(reply.message())
            # A reply that K3 did not end has no end to send back: it is closed as text.
            self._replies.append(tokens if reply.complete else None)
        elif self._named is not None:
            self._ids[:] = ids + (tokens[:-1] if tokens and tokens[-1] in stop else tokens)
        if self._named is not None:
            self._named.save()
        return finished


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from exactly one of flag, file and standard input.

    Raises:
        UsageError: two sources, or none.
        InputError: unreadable, too large, empty, or not UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file both give a prompt", remedy="give one of them")
    if prompt is not None:
        data, name = prompt.encode("utf-8", "surrogateescape"), "--prompt"
    elif prompt_file is not None:
        name = str(prompt_file)
        try:
            with prompt_file.open("rb") as f:
                data = f.read(MAX_PROMPT_BYTES + 1)
        except OSError as e:
            raise InputError(f"{name} cannot be read: {e.strerror}", remedy="name a readable file") from None
    elif sys.stdin.isatty():
        raise UsageError("no prompt", remedy="give --prompt, --prompt-file, or pipe text into the command")
    else:
        data, name = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "standard input"
    if len(data) > MAX_PROMPT_BYTES:
        raise InputError(f"{name} is larger than {MAX_PROMPT_BYTES >> 20} MiB", remedy="shorten the prompt")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise InputError(f"{name} is not UTF-8 text (byte {e.start})", remedy="convert it to UTF-8") from None
    if not text:
        raise InputError(f"{name} is empty", remedy="give at least one character")
    return text


def _converse(talk: Conversation, console: Console, *, stats: bool) -> None:
    console.print("type a message and press Enter; Ctrl-D ends", style="dim")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if line.strip():
            try:
                _report(talk, talk.turn(line), console, stats=stats)
            except Interrupted:
                continue


def _report(talk: Conversation, finished: Finished, console: Console, *, stats: bool) -> None:
    if stats:
        console.print(show.stats_table(finished.stats))
        for line in talk.stats_lines():
            console.print(line, markup=False)
    if finished.reason == "interrupted":
        raise Interrupted(f"stopped after {finished.new_tokens} tokens; the text above is complete up to there")
    if finished.reason == "length":
        console.print(f"[stopped at {finished.new_tokens} tokens; --max-new allows more]", style="dim", markup=False)
