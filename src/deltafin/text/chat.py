"""A conversation as K3 reads it: messages become XTML segments, segments become ids.

Only structural markers are special segments; names, attributes and every text are ordinary ones. Each segment
is encoded on its own, so the segment boundaries are part of the format.

An assistant turn sent back renders to the ids that were generated if those were the tokenizer's own choice
for each stretch of text. A model may also spell a text in other tokens, format a number its own way or leave
a marker out; then only the ids themselves, kept by the caller and handed to ``encode_chat`` as ``recall``,
repeat the turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deltafin.errors import InputError, UsageError
from deltafin.text.messages import (
    AssistantMessage,
    Call,
    ImagePart,
    Message,
    SystemMessage,
    TextPart,
    ToolMessage,
)
from deltafin.text.tokenizer import CLOSE, END_OF_MESSAGE, OPEN, SEP, K3Tokenizer

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_CHOICE = "The system is invoked with `tool_choice={}`.\nYou {} tools in the next message."
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class Segment(NamedTuple):
    """A stretch of prompt text that is encoded on its own; ``special`` ones may contain special tokens."""

    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a request asks of the next turn, besides its messages.

    Attributes:
        effort: ``low``, ``high`` or ``max``; ``none`` switches thinking off, in earlier turns as well.
        tools: tool definitions as JSON objects, OpenAI's shape.
        tool_choice: None or ``auto`` say nothing; ``required`` and ``none`` become a system message.
        response_format: OpenAI's object with ``type`` ``text``, ``json_object`` or ``json_schema``.

    Raises:
        UsageError: a value K3's template has no words for.
    """

    effort: str = "max"
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.effort not in ("low", "high", "max", "none"):
            # K3's own prompt text lists medium, its reference encoder refuses it; we never map it silently.
            raise UsageError(f"reasoning effort {self.effort!r} is not accepted", remedy="use low, high, max or none")
        if self.tool_choice not in (None, "auto", "required", "none"):
            raise UsageError(f"tool_choice {self.tool_choice!r} is not supported", remedy="use auto, required or none")
        form = {"type": "text"} if self.response_format is None else self.response_format
        if form.get("type") not in ("text", "json_object", "json_schema"):
            remedy = "use text, json_object or json_schema"
            raise UsageError(f"response_format type {form.get('type')!r} is not supported", remedy=remedy)
        if form["type"] == "json_schema" and not isinstance(form.get("json_schema"), Mapping):
            raise UsageError("response_format has no object json_schema", remedy="send json_schema.schema")

    @property
    def thinking(self) -> bool:
        """Whether turns have a think element and the reply begins inside it."""
        return self.effort != "none"


def render(
    messages: Sequence[Message],
    options: ChatOptions | None = None,
    *,
    image_prompts: Sequence[str] = (),
) -> list[Segment]:
    """The prompt for the next assistant turn.

    Args:
        image_prompts: prepared texts with media tokens, one for each image part or placeholder, in order;
            they may contain special tokens, so they must not come from a user.

    Raises:
        InputError: an image without a prompt, a tool result of no known call, arguments that are no object.
    """
    turns = _turns(messages, options or ChatOptions(), _Images(image_prompts))
    return [segment for _, opening, body in turns for segment in (*opening, *body) if segment.text]


def encode_chat(
    tokenizer: K3Tokenizer,
    messages: Sequence[Message],
    options: ChatOptions | None = None,
    *,
    recall: Callable[[AssistantMessage, Sequence[int]], Sequence[int] | None] = lambda message, before: None,
) -> list[int]:
    """Prompt ids for the next assistant turn.

    Args:
        recall: given an earlier turn and the ids before it, generation prefix included, the ids generated for it up
            to the end of the message included, thinking being on or off as now; or None. They replace the turn's
            body.

    Raises:
        InputError: as ``render``, and for text with lone surrogates.
    """
    ids: list[int] = []
    for message, opening, body in _turns(messages, options or ChatOptions(), _Images(())):
        for text, special in opening:
            ids += tokenizer.encode(text, allow_special=special)
        known = recall(message, ids) if isinstance(message, AssistantMessage) and not message.name else None
        if known is not None:
            ids += known
            continue
        for text, special in body:
            ids += tokenizer.encode(text, allow_special=special)
    return ids


_Segments = list[Segment]
_Turn = tuple[Message | None, _Segments, _Segments]  # what it renders, its opening, its body


def _turns(messages: Sequence[Message], options: ChatOptions, images: _Images) -> Iterator[_Turn]:
    if options.tools:
        yield _internal("tool-declare", _TOOLS.format(_compact(options.tools, "tools")))
    if options.thinking:
        yield _internal("thinking-effort", _EFFORT.format(options.effort))
    calls: Sequence[Call] = ()
    results = 0
    for n, message in enumerate(_results_in_call_order(messages)):
        where = f"messages[{n}]"
        if isinstance(message, SystemMessage) and message.tools:
            yield _internal("tool-declare", _MORE_TOOLS.format(_compact(message.tools, f"{where}.tools")))
            continue
        content = images.content(message.content, where)
        attributes = [("name", message.name)] if message.name else []
        if isinstance(message, AssistantMessage):
            calls, results = message.tool_calls, 0
            opening, body = _assistant(message, content, options.thinking, where)
            yield message, _open("message", ("role", "assistant"), *attributes) + opening, body
            continue
        if isinstance(message, ToolMessage):
            called = calls[results].function.name if results < len(calls) else ""
            results += 1
            tool = message.tool or message.name or called
            if not tool:
                raise InputError(f"{where} is a tool result that belongs to no call", remedy="name its tool")
            # A running counter, not the call's position: published engines differ where a call has no result.
            attributes = [("tool", tool), ("index", str(results))]
        role = "system" if message.role == "developer" else message.role
        yield message, _open("message", ("role", role), *attributes), [*content, *_end()]
    images.finish()
    if options.tool_choice in ("required", "none"):
        rule = "MUST call" if options.tool_choice == "required" else "MUST NOT call any"
        yield _internal("tool-choice", _CHOICE.format(options.tool_choice, rule))
    form = options.response_format or {"type": "text"}
    if form["type"] != "text":
        text = _FORMAT.format(form["type"])
        if form["type"] == "json_schema":
            schema = form["json_schema"]
            schema = schema.get("schema") or schema.get("json_schema") or schema
            text += _SCHEMA.format(_compact(schema, "response_format"))
        yield _internal("response-format", text)
    first = "think" if options.thinking else "response"
    yield None, _open("message", ("role", "assistant")) + _open(first), []


def _assistant(
    message: AssistantMessage, content: _Segments, thinking: bool, where: str
) -> tuple[_Segments, _Segments]:
    """The first element's opening, behind which a reply begins, and the rest."""
    opening = _open("response")
    body = [*content, *_close("response")]
    if thinking:
        reasoning = message.reasoning_content or message.reasoning or ""
        shown = Segment(reasoning if reasoning.strip() else "", False)
        opening, body = _open("think"), [shown, *_close("think"), *opening, *body]
    if message.tool_calls:
        body += _open("tools")
        for n, call in enumerate(message.tool_calls):
            body += _open("call", ("tool", call.function.name), ("index", str(n + 1)))
            body += _arguments(call.function.arguments, f"{where}.tool_calls[{n}].function.arguments")
            body += _close("call")
        body += _close("tools")
    return opening, body + _end()


def _arguments(arguments: str | dict[str, Any], where: str) -> _Segments:
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return [*_open("json", ("type", "object")), Segment(arguments, False), *_close("json")]
        if not isinstance(decoded, dict):
            raise InputError(f"{where} is JSON but no object", remedy="send the arguments as a JSON object")
        arguments = decoded
    out: _Segments = []
    for key, value in arguments.items():
        out += _open("argument", ("key", key), ("type", _json_type(value)))
        out += [Segment(value if isinstance(value, str) else _json(value, where), False), *_close("argument")]
    return out


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


def _results_in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Sorts the tool results behind an assistant turn by its calls, if each of them names a call by id."""
    out: list[Message] = []
    run: list[ToolMessage] = []
    calls: dict[str | None, tuple[int, str]] = {}
    for message in (*messages, None):
        if isinstance(message, ToolMessage):
            run.append(message)
            continue
        known = [(calls[i], result) for result in run if (i := result.tool_call_id or result.id) in calls]
        if len(known) == len(run):
            known.sort(key=lambda item: item[0][0])
            run = [result.model_copy(update={"tool": name}) for (_, name), result in known]
        out += run
        run, calls = [], {}
        if isinstance(message, AssistantMessage):
            for n, call in enumerate(message.tool_calls):
                if call.id:
                    calls.setdefault(call.id, (n, call.function.name))
        if message is not None:
            out.append(message)
    return out


class _Images:
    """Hands out image prompts in order."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts, self._used = prompts, 0

    def content(self, parts: Sequence[TextPart | ImagePart], where: str) -> _Segments:
        out: _Segments = []
        for n, part in enumerate(parts):
            if isinstance(part, ImagePart):
                out.append(self._next(f"{where}.content[{n}] is of type {part.type}"))
                continue
            first, *others = part.text.split(IMAGE_PLACEHOLDER) if self._prompts else [part.text]
            out.append(Segment(first, False))
            for text in others:
                out += [self._next(f"{where}.content[{n}] has an image placeholder"), Segment(text, False)]
        return out

    def _next(self, what: str) -> Segment:
        if self._used == len(self._prompts):
            problem = "no image prompt is left for it" if self._prompts else "this engine reads text only"
            raise InputError(f"{what}, but {problem}", remedy="leave images out of the conversation")
        self._used += 1
        return Segment(self._prompts[self._used - 1], True)

    def finish(self) -> None:
        if self._used != len(self._prompts):
            raise InputError(f"{len(self._prompts)} image prompts were given and {self._used} used")


def _open(tag: str, *attributes: tuple[str, str]) -> _Segments:
    out = [Segment(OPEN, True), Segment(tag, False)]
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        out += [Segment(text, False) for text in (f" {key}", '="', escaped, '"')]
    return [*out, Segment(SEP, True)]


def _close(tag: str) -> _Segments:
    return [Segment(CLOSE, True), Segment(tag, False), Segment(SEP, True)]


def _end() -> _Segments:
    return [*_close("message"), Segment(END_OF_MESSAGE, True)]


def _internal(kind: str, text: str) -> _Turn:
    return None, _open("message", ("role", "system"), ("type", kind)), [Segment(text, False), *_end()]


def _compact(value: object, where: str) -> str:
    return _json(value, where, sort_keys=True, separators=(",", ":"))


def _json(value: object, where: str, **style: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **style)
    except (TypeError, ValueError, RecursionError) as e:
        raise InputError(f"{where} cannot be written as JSON: {e}", remedy="send plain JSON values") from None
