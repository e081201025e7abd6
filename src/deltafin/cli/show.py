"""Consumers of the event stream: text as it is decided, a progress line, JSON lines, and the table of ``--stats``."""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deltafin.drafting.controller import DraftController
from deltafin.errors import UsageError
from deltafin.generation.engine import Engine
from deltafin.generation.events import (
    Event,
    Finished,
    GenerationStats,
    PhaseStats,
    PrefillProgress,
    TokenDecided,
)
from deltafin.residency.budget import MemoryPlan
from deltafin.residency.value import predicted_hit_rate, seconds_saved_per_gib
from deltafin.store.types import DriveInfo, DriveStats
from deltafin.text.reply import Content, Reasoning, ReplyParser, ToolCall
from deltafin.text.stream import StreamingDetokenizer
from deltafin.text.tokenizer import K3Tokenizer

_SLOW = 0.7
"""Share of the other drives' pace below which a drive is named."""


@contextmanager
def stop_on_signal(engine: Engine) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks the engine to stop at the next safe point, the second stops at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if engine.stop.is_set():
            raise KeyboardInterrupt
        engine.stop.set()

    previous = [(s, signal.signal(s, handle)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, old in previous:
            signal.signal(number, old)


class TextPrinter:
    """Writes decided text to ``out`` at once. Reasoning is dimmed on a terminal and left out of a pipe.

    Args:
        chat: parse the reply's structure; otherwise ids are plain text.
        thinking: the reply begins inside the thinking part.
    """

    def __init__(self, tokenizer: K3Tokenizer, *, chat: bool, thinking: bool, out: IO[str] | None = None) -> None:
        self._out = out or sys.stdout
        self._color = self._out.isatty()
        self._tokenizer = tokenizer
        self._parser = ReplyParser(tokenizer, thinking=thinking) if chat else None
        self._plain = StreamingDetokenizer(tokenizer)
        self._reasoning = False
        self.ends_with_newline = True

    def token(self, token: int) -> None:
        """Shows what ``token`` completes; the special ids that end a text are not text."""
        if self._parser is not None:
            self._events(self._parser.feed([token]))
        elif token not in self._tokenizer.stop_ids:
            self._write(self._plain.feed([token]))

    def finish(self) -> None:
        """Shows what was held back and ends the line."""
        if self._parser is not None:
            self._events(self._parser.finish())
        else:
            self._write(self._plain.flush())
        self._mode(False)
        if not self.ends_with_newline:
            self._write("\n")

    def _events(self, events: Iterable[Reasoning | Content | ToolCall]) -> None:
        for event in events:
            if isinstance(event, Reasoning):
                if self._color:
                    self._mode(True)
                    self._write(event.text)
            elif isinstance(event, Content):
                self._mode(False)
                self._write(event.text)
            else:
                self._mode(False)
                self._write(f"\n[tool call {event.name} {event.arguments}]\n")

    def _mode(self, reasoning: bool) -> None:
        if reasoning == self._reasoning:
            return
        self._reasoning = reasoning
        if self._color:
            self._out.write("\x1b[2m" if reasoning else "\x1b[22m" + ("" if self.ends_with_newline else "\n"))
            self._out.flush()

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self.ends_with_newline = text.endswith("\n")


class EventLog:
    """Writes every event as one JSON line (``--events-jsonl``).

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: str | None, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._file: IO[str] | None = None
        if path is not None:
            try:
                # One file for several turns, open for the whole command.
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
            except OSError as e:
                raise UsageError(f"{path} cannot be written: {e.strerror}", remedy="name another file") from None

    def write(self, event: Event) -> None:
        """Appends ``event``, flushed, so that a killed run leaves what it had."""
        if self._file is None:
            return
        record: dict[str, Any] = {"event": _EVENT_NAMES[type(event)], **asdict(event)}
        if isinstance(event, TokenDecided):
            record["bytes"] = self._tokenizer.token_bytes(event.token).decode("latin-1")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


_EVENT_NAMES = {PrefillProgress: "prefill", TokenDecided: "token", Finished: "finished"}


def consume(
    events: Iterable[Event], printer: TextPrinter, log: EventLog, console: Console
) -> tuple[list[int], Finished]:
    """Prints a generation as it happens.

    Returns:
        (decided tokens, the last event).
    """
    tokens: list[int] = []
    finished: Finished | None = None
    with _progress_line(console) as show:
        for event in events:
            log.write(event)
            if isinstance(event, PrefillProgress):
                show(event)
            elif isinstance(event, TokenDecided):
                show(None)
                tokens.append(event.token)
                printer.token(event.token)
            else:
                finished = event
    printer.finish()
    assert finished is not None
    return tokens, finished


@contextmanager
def _progress_line(console: Console) -> Iterator[Callable[[PrefillProgress | None], None]]:
    if not console.is_terminal:
        yield lambda _: None
        return
    live: Live | None = Live(console=console, transient=True, refresh_per_second=8)

    def show(event: PrefillProgress | None) -> None:
        nonlocal live
        if live is None:
            return
        if event is None:
            live.stop()
            live = None
            return
        if not live.is_started:
            live.start()
        live.update(Text(progress_text(event)))

    try:
        yield show
    finally:
        if live is not None:
            live.stop()


def progress_text(p: PrefillProgress) -> str:
    """One line: tokens, bytes, rate and time left."""
    parts = [f"prefill {p.done:,.0f}/{p.total:,} tokens"]
    if p.reused:
        parts.append(f"{p.reused:,} reused")
    if p.read_bytes:
        parts.append(f"{gigabytes(p.read_bytes)} read")
        if p.seconds > 0.2:
            rates = [gigabytes(read / p.seconds) for read in p.drive_bytes or (p.read_bytes,)]
            parts.append(f"{' + '.join(rates)}/s")
    if p.seconds > 0.5 and 0 < p.done < p.total:
        parts.append(f"{p.seconds * (p.total - p.done) / p.done:,.0f} s left")
    return " · ".join(parts)


def gigabytes(n: float) -> str:
    """Decimal units, as drives are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if n >= size:
            return f"{n / size:,.2f} {unit}"
    return f"{n / 1e3:,.1f} kB"


def stats_table(stats: GenerationStats) -> Table:
    """The table of ``--stats``: one column per phase."""
    table = Table(title=None, box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("prefill", justify="right")
    table.add_column("decode", justify="right")

    def row(name: str, value: Callable[[PhaseStats], str]) -> None:
        table.add_row(name, value(stats.prefill), value(stats.decode))

    row("tokens", lambda s: f"{s.tokens:,}")
    row("K3 passes", lambda s: f"{s.passes:,}")
    row("seconds", lambda s: f"{s.seconds:,.3f}")
    row(
        "tokens per second",
        lambda s: f"{s.tokens_per_second:,.3f}" if s.tokens_per_second < 10 else f"{s.tokens_per_second:,.1f}",
    )
    row("  attention", lambda s: f"{s.attention_seconds:,.3f} s")
    row("  dense, shared, router", lambda s: f"{s.mlp_seconds:,.3f} s")
    row("  routed experts", lambda s: f"{s.expert_seconds:,.3f} s")
    row("  head", lambda s: f"{s.head_seconds:,.3f} s")
    row("  waiting for drives", lambda s: f"{s.wait_seconds:,.3f} s")
    row("experts from RAM", lambda s: f"{s.tier_hits:,} ({s.hit_rate:.1%}, {gigabytes(s.tier_bytes)})")
    row("experts from drives", lambda s: f"{s.expert_reads:,} ({gigabytes(s.expert_bytes)})")
    row("spine streamed", lambda s: gigabytes(s.spine_bytes))
    for i in range(len(stats.decode.drives)):
        row(f"drive {i + 1}", lambda s, i=i: _drive(s, i))  # type: ignore[misc]
    return table


def _drive(stats: PhaseStats, index: int) -> str:
    d = stats.drives[index]
    rate = f", {gigabytes(d.read_bytes / d.busy_seconds)}/s busy" if d.busy_seconds > 1e-3 else ""
    return f"{gigabytes(d.read_bytes)} in {d.reads:,} reads{rate}{'' if d.direct else ', buffered'}"


def draft_lines(drafter: DraftController | None, status: str) -> list[str]:
    """Drafting in words: acceptance, widths, gains, rests, and why there is no draft."""
    if drafter is None:
        return [f"draft: none; {status}"]
    report, economics = drafter.report, drafter.economics
    lines = [f"draft: {status}"]
    if drafter.failure is not None:
        lines.append(f"  stopped: {drafter.failure}")
    if report.steps:
        at = ", ".join(
            f"{hit / offered:.0%}"
            for hit, offered in zip(report.accepted_at, report.offered_at, strict=True)
            if offered
        )
        growth = ", ".join(f"{g:.2f}" for g in economics.union_growth)
        lines += [
            f"  {report.steps:,} drafted passes decided {report.committed:,} tokens, "
            f"{report.tokens_per_pass:.2f} a pass; "
            f"{report.accepted:,} of {report.proposed:,} guesses accepted (by position: {at})",
            f"  experts read by 1, 2, … positions, relative to one: {growth}",
            f"  gain estimated {report.estimated_gain / report.steps:.2f}, realised "
            f"{report.realised_gain / report.steps:.2f}",
        ]
    lines.append(
        f"  {report.draft_seconds:,.3f} s spent drafting; {report.declined:,} drafts not worth checking; "
        f"stood down {report.rests:,} times{', resting now' if economics.resting else ''}"
    )
    return lines


def residency_lines(engine: Engine) -> list[str]:
    """Experts kept and read ahead, in words."""
    stream, stats = engine.experts, engine.experts.stats
    lines = [
        f"experts kept: {stream.tier_used:,} of {stream.tier_capacity:,}; {stats.evictions:,} replaced; "
        f"read ahead: {stats.ahead_used:,} used, {stats.ahead_cancelled:,} taken back, {stats.ahead_wasted:,} not used"
    ]
    figures: dict[str, list[float]] = {}
    for layer in stream.prefetch_policy.report():
        for name, seen in layer.items():
            figures.setdefault(name, []).append(seen.recall)
    for name, recalls in figures.items():
        lines.append(
            f"  next layer's experts guessed by {name}: {sum(recalls) / len(recalls):.0%} right on average, "
            f"{min(recalls):.0%} to {max(recalls):.0%} by layer"
        )
    lines += drive_lines(engine.store.drives, engine.store.reader.stats())
    if engine.recorder.problem:
        lines.append(f"  the heat of earlier runs is not used: {engine.recorder.problem}")
    return lines


def drive_lines(drives: Sequence[DriveInfo], stats: Sequence[DriveStats]) -> list[str]:
    """What drives did for one another, and which of them hold the others up.

    Every blob is cut by the drives' weights, so that drives of the speeds these were taken from end together.
    """
    lines = []
    helped = sum(s.helped_bytes for s in stats)
    if helped:
        lines.append(f"replicas: {gigabytes(helped)} were read from a drive that was free earlier")
    both = list(zip(drives, stats, strict=True))
    paces = [s.bytes / s.busy_seconds / d.weight if s.busy_seconds > 1 else 0.0 for d, s in both]
    usual = statistics.median_high(paces)
    for drive, pace in zip(drives, paces, strict=True):
        if 0 < pace < _SLOW * usual:
            lines.append(
                f"drive {drive.index}, {drive.path}, was slower than its share ({pace / usual:.0%} of the usual pace): "
                "deltafin drives rebalance gives it less, deltafin drives replicate lets the others help"
            )
    return lines


def tier_value_line(counts: npt.NDArray[np.float32], plan: MemoryPlan, uses: int, bytes_per_s: float) -> str:
    """What the plan's memory for experts is worth by the heat of earlier runs, and what another GiB would be."""
    frames = plan.frames.tier
    hit = predicted_hit_rate(counts, frames)
    line = f"experts in RAM serve {hit:.0%} of the uses, by the heat of earlier runs"
    if bytes_per_s and hit < 1:
        saved = seconds_saved_per_gib(
            counts, frames, frame_bytes=plan.frame_bytes, uses_per_token=uses, bytes_per_s=bytes_per_s
        )
        line += f"; another GiB would save {saved * 1e3:,.1f} ms of reading per token"
    return line


def plan_lines(plan: MemoryPlan, units: int) -> list[str]:
    """The memory plan in words."""
    mib = 1 << 20
    spine = (
        "spine resident"
        if not plan.streamed_bytes
        else f"spine {len(plan.resident_units)}/{units} units resident, {plan.streamed_bytes / mib:,.0f} MiB streamed"
    )
    frames = plan.frames
    return [
        f"memory: {plan.planned / mib:,.0f} of {plan.budget / mib:,.0f} MiB planned; {spine}",
        f"prefill chunk {plan.prefill_rows:,} tokens; context {plan.context:,}; "
        f"experts: {frames.tier:,} kept in RAM, {frames.in_flight:,} in flight",
    ]
