"""K3's reply taken apart while it is generated: reasoning, content and tool calls.

Structure is recognised by special ids only. A marker is ``<|open|>`` or ``<|close|>``, ordinary ids that
spell a tag with attributes, and ``<|sep|>``; nothing of it is emitted while it may still become one. What
turns out to be no marker of K3's format is text after all.

Damaged structure is read generously: an element ends with the one around it, ``think`` and ``response`` end
all that was open, text outside any element is content, and a call inside reasoning is a call; reasoning goes
on behind it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltafin.text.messages import AssistantMessage, Call, FunctionCall, TextPart
from deltafin.text.tokenizer import CLOSE, OPEN, SEP, K3Tokenizer

MAX_MARKER_BYTES = 4096

_TAGS = frozenset({"message", "think", "response", "tools", "call", "argument", "json"})
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call.

    Attributes:
        index: position among the reply's calls, from 0.
        arguments: JSON text of an object, as K3 wrote it; not valid JSON when K3's was not.
    """

    index: int
    name: str
    arguments: str


Event = Reasoning | Content | ToolCall


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. ``complete`` tells that K3 ended the message itself."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    complete: bool

    def message(self) -> AssistantMessage:
        """The reply as a message of the conversation that continues."""
        return AssistantMessage(
            content=[TextPart(text=self.content)] if self.content else [],
            reasoning_content=self.reasoning or None,
            tool_calls=[Call(function=FunctionCall(name=c.name, arguments=c.arguments)) for c in self.tool_calls],
        )


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)  # of call, argument and json
    arguments: dict[str, str] = field(default_factory=dict)  # of call: key to JSON text


class ReplyParser:
    """Feeds on generated ids and emits events; joined, they do not depend on how the ids were split.

    Args:
        thinking: the prompt ended inside ``think`` rather than inside ``response``.
    """

    def __init__(self, tokenizer: K3Tokenizer, *, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._open_id, self._close_id, self._sep_id = (tokenizer.special[name] for name in (OPEN, CLOSE, SEP))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stack = [_Element("think" if thinking else "response")]
        self._marker: list[int] = []  # ids of a marker that is not complete yet
        self._marker_bytes = 0
        self._blank = ""  # white space between elements, shown only when text follows
        self._calls = 0
        self._events: list[Event] = []
        self.complete = False

    @property
    def element(self) -> str:
        """The innermost open element: ``think``, ``response``, ``tools``, …; empty outside all."""
        return self._stack[-1].tag if self._stack else ""

    @property
    def pending(self) -> bool:
        """Whether the last ids may be a marker that is not complete yet."""
        return bool(self._marker)

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Events that ``ids`` complete. Ids behind the end of the message are ignored.

        Raises:
            InputError: an id outside the vocabulary.
        """
        for token in ids:
            if self.complete:
                break
            self._feed(token)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Ends the stream: half a character becomes U+FFFD; an unfinished marker or call is dropped."""
        if not self.complete:
            self._flush_text()
        events, self._events = self._events, []
        return events

    def _feed(self, token: int) -> None:
        data = self._tokenizer.token_bytes(token)
        if token in self._tokenizer.stop_ids:
            self._end_reply()
        elif token in (self._open_id, self._close_id):
            self._marker_is_text()
            self._marker, self._marker_bytes = [token], 0
        elif not self._marker:
            self._text(data)
        elif token == self._sep_id:
            self._marker.append(token)
            self._resolve()
        else:
            self._marker.append(token)
            self._marker_bytes += len(data)
            if self._tokenizer.is_special(token) or self._marker_bytes > MAX_MARKER_BYTES:
                self._marker_is_text()

    def _marker_is_text(self) -> None:
        data = b"".join(map(self._tokenizer.token_bytes, self._marker))
        self._marker = []
        self._text(data)

    def _resolve(self) -> None:
        header = self._tokenizer.decode(self._marker[1:-1])
        tag = header.split(maxsplit=1)[0] if header.strip() else ""
        in_call = any(element.tag == "call" for element in self._stack)
        if tag not in _TAGS or (tag in ("argument", "json") and not in_call):
            self._marker_is_text()
            return
        opens = self._marker[0] == self._open_id
        self._marker = []
        self._flush_text()
        if opens:
            self._open(tag, {k: _unescape(v) for k, v in _ATTRIBUTE.findall(header)})
        elif tag == "message":
            self._end_reply()
        elif any(element.tag == tag for element in self._stack):
            while self._end_element() != tag:
                pass

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "message":
            return
        ends = {"tools": ("argument", "json", "call", "tools"), "call": ("argument", "json", "call")}
        inner = ends.get(tag, ("argument", "json") if tag in ("argument", "json") else _TAGS)
        while self._stack and self._stack[-1].tag in inner:
            self._end_element()
        self._stack.append(_Element(tag, attributes))

    def _text(self, data: bytes) -> None:
        if self._stack and self._stack[-1].tag in ("call", "argument", "json"):
            self._stack[-1].body += data
        else:
            self._emit(self._decoder.decode(data))

    def _flush_text(self) -> None:
        self._emit(self._decoder.decode(b"", final=True))
        self._blank = ""

    def _emit(self, text: str) -> None:
        tag = self._stack[-1].tag if self._stack else ""
        if tag not in ("think", "response"):
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank, ""
            tag = self._stack[0].tag if self._stack else "response"
        if text:
            self._events.append(Reasoning(text) if tag == "think" else Content(text))

    def _end_element(self) -> str:
        """Closes the innermost element and returns its tag."""
        element = self._stack.pop()
        text = element.body.decode("utf-8", "replace")
        if element.tag == "argument" and "key" in element.attributes:
            self._stack[-1].arguments[element.attributes["key"]] = _value(text, element.attributes.get("type"))
        elif element.tag == "json":
            self._stack[-1].body[:] = element.body
        elif element.tag == "call" and element.attributes.get("tool"):
            arguments = "{" + ", ".join(f"{_quote(k)}: {v}" for k, v in element.arguments.items()) + "}"
            if not element.arguments and text.strip():
                arguments = text
            self._events.append(ToolCall(self._calls, element.attributes["tool"], arguments))
            self._calls += 1
        return element.tag

    def _end_reply(self) -> None:
        self._marker = []
        self._flush_text()
        while self._stack:
            self._end_element()
        self.complete = True


def parse_reply(tokenizer: K3Tokenizer, ids: Iterable[int], *, thinking: bool) -> Reply:
    """A whole reply at once; see ``ReplyParser``."""
    parser = ReplyParser(tokenizer, thinking=thinking)
    events = [*parser.feed(ids), *parser.finish()]
    return Reply(
        reasoning="".join(e.text for e in events if isinstance(e, Reasoning)),
        content="".join(e.text for e in events if isinstance(e, Content)),
        tool_calls=tuple(e for e in events if isinstance(e, ToolCall)),
        complete=parser.complete,
    )


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _value(text: str, kind: str | None) -> str:
    """JSON text of an argument: K3's own if JSON, else with control characters escaped, else a string."""
    if kind == "string":
        return _quote(text)
    try:
        json.loads(text, parse_constant=_not_json)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(json.loads(text, strict=False, parse_constant=_not_json))
    except (ValueError, RecursionError):
        return _quote(text)


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
