"""A reply in pieces: what the worker produces, what followers, the memo and both response shapes consume."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from deltafin.generation.events import TokenDecided, TokenLogprobs
from deltafin.server.errors import ApiError
from deltafin.text import reply as parsed
from deltafin.text.reply import ReplyParser
from deltafin.text.stream import StreamingDetokenizer
from deltafin.text.tokenizer import K3Tokenizer


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token of the content with its log probability and its rivals'; its text begins ``offset`` characters in."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A stretch of reasoning or content. ``logprobs`` are of the content's tokens, when asked for."""

    kind: Literal["reasoning", "content"]
    text: str
    logprobs: tuple[TokenReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end.

    Attributes:
        reason: OpenAI's finish reason.
        prompt_tokens, completion_tokens: of this reply.
        cached_tokens: of the prompt, that needed no pass.
        reasoning_tokens: of the completion.
    """

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The end, by a failure."""

    error: ApiError


Piece = Text | Call | Done | Failed


class StopScanner:
    """Finds the stop text that is complete first; text that may still become one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop text; nothing after a hit."""
        if not self._stops:
            return text
        if self.hit:
            return ""
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.hit, self._held = True, ""
            return held[: min(ends)[1]]
        keep = next(
            (n for n in range(min(self._longest - 1, len(held)), 0, -1) if self._may_become(held[-n:])),
            0,
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """The end of the text: what was held back is text."""
        held, self._held = self._held, ""
        return held

    def _may_become(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)


class Assembler:
    """Decided tokens to pieces.

    Args:
        thinking: the reply begins inside the thinking part; None: plain text without structure.
        stops: texts that end the content; not part of it, and not searched for in reasoning.
        report: whether tokens carry log probabilities.
    """

    def __init__(self, tokenizer: K3Tokenizer, *, thinking: bool | None, stops: tuple[str, ...], report: bool) -> None:
        self._tokenizer = tokenizer
        self._parser = None if thinking is None else ReplyParser(tokenizer, thinking=thinking)
        self._plain = StreamingDetokenizer(tokenizer)
        self._scanner = StopScanner(stops)
        self._report = report
        self._marker: list[TokenReport] = []  # of tokens that may be structure
        self._waiting: list[TokenReport] = []  # whose text is not shown yet
        self._decoded = 0  # characters of content seen
        self._shown = 0  # characters of content emitted
        self.tokens = 0
        self.reasoning_tokens = 0
        self.calls = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._scanner.hit

    @property
    def complete(self) -> bool:
        """Whether K3 ended the message itself."""
        return self._parser is not None and self._parser.complete

    def feed(self, event: TokenDecided) -> list[Piece]:
        """The pieces that ``event`` completes; nothing once a stop text was found."""
        if self.stopped:
            return []
        self.tokens += 1
        parser, token = self._parser, event.token
        if parser is None:
            if token in self._tokenizer.stop_ids:
                return []
            self._wait(self._of(token, event.logprobs))
            return self._content(self._plain.feed([token]))
        before = parser.element
        self.reasoning_tokens += before == "think"
        events = parser.feed([token])
        reports = [*self._marker, *self._of(token, event.logprobs)]
        if parser.pending:
            self._marker = reports if before == "response" else []
        else:
            self._marker = []
            if before == parser.element == "response" and not parser.complete:
                self._wait(reports)
        return self._pieces(events)

    def finish(self) -> list[Piece]:
        """The rest, when no more tokens come."""
        out: list[Piece] = []
        if not self.stopped:
            if self._parser is not None:
                out += self._pieces(self._parser.finish())
            else:
                out += self._content(self._plain.flush())
        if not self.stopped:
            text, waiting = self._scanner.flush(), tuple(self._waiting)
            if text or waiting:
                out.append(Text("content", text, waiting))
        return out

    def _pieces(self, events: list[parsed.Event]) -> list[Piece]:
        out: list[Piece] = []
        for event in events:
            if self.stopped:
                break
            if isinstance(event, parsed.Reasoning):
                out.append(Text("reasoning", event.text))
            elif isinstance(event, parsed.Content):
                out += self._content(event.text)
            else:
                self.calls += 1
                out.append(Call(event.index, event.name, event.arguments))
        return out

    def _content(self, text: str) -> list[Piece]:
        self._decoded += len(text)
        shown = self._scanner.feed(text)
        self._shown += len(shown)
        ready = tuple(report for report in self._waiting if report.offset < self._shown)
        self._waiting = self._waiting[len(ready) :]
        return [Text("content", shown, ready)] if shown or ready else []

    def _wait(self, reports: list[TokenReport]) -> None:
        self._waiting += [replace(report, offset=self._decoded) for report in reports]

    def _of(self, token: int, logprobs: TokenLogprobs | None) -> list[TokenReport]:
        if not self._report or logprobs is None:
            return []
        data = self._tokenizer.token_bytes
        return [TokenReport(data(token), logprobs.logprob, tuple((data(i), p) for i, p in logprobs.top))]
