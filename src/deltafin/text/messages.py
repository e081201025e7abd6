"""The messages of a conversation, in the shape of OpenAI's API, validated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from deltafin.errors import InputError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        # Clients send back every field of a reply they received, most of them null.
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class TextPart(_Strict):
    """A piece of text."""

    type: Literal["text"] = "text"
    text: str


class ImagePart(_Strict):
    """An image: known only to be refused by name, or replaced by a prepared image prompt."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["image", "image_url"]


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
    BeforeValidator(_as_parts),
    Field(default=[], description="a string or a list of parts"),
]


class FunctionCall(_Strict):
    """What is called. ``arguments`` is an object or its JSON text; other text is carried as it is."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] = ""


class Call(_Strict):
    """One tool call of an assistant turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class SystemMessage(_Strict):
    """Instructions, or with ``tools`` an extension of the tool set. ``developer`` means ``system``."""

    role: Literal["system", "developer"] = "system"
    content: Parts
    name: str | None = None
    tools: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def _one_purpose(self) -> SystemMessage:
        if self.tools and self.content:
            raise ValueError("a system message with tools has no place for content")
        return self


class UserMessage(_Strict):
    """What the user says."""

    role: Literal["user"] = "user"
    content: Parts
    name: str | None = None


class AssistantMessage(_Strict):
    """An earlier reply; ``reasoning`` is another name of ``reasoning_content`` and yields to it."""

    role: Literal["assistant"] = "assistant"
    content: Parts
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] = []


class ToolMessage(_Strict):
    """A tool's result; ``id`` is another name of ``tool_call_id``; ``tool`` or ``name`` names the tool."""

    role: Literal["tool"] = "tool"
    content: Parts
    tool_call_id: str | None = None
    id: str | None = None
    tool: str | None = None
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]

_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
MESSAGES_SCHEMA: dict[str, Any] = _MESSAGES.json_schema(ref_template="#/components/schemas/{model}")
"""JSON schema of ``parse_messages``'s argument; its ``$defs`` are meant for an OpenAPI document's components."""

_UNION_TAGS = {"system", "developer", "user", "assistant", "tool", "text", "image", "image_url"}


def parse_messages(raw: object) -> list[Message]:
    """Validates decoded JSON in the shape of OpenAI's ``messages``.

    Raises:
        InputError: naming the first offending field as ``messages[i].field``.
    """
    try:
        return _MESSAGES.validate_python(raw)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
    raise InputError(f"{_path(first['loc'])}: {first['msg']}", remedy="correct the message and send it again")


def _path(loc: tuple[int | str, ...]) -> str:
    path, after_index = "messages", False
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (after_index and part in _UNION_TAGS):  # there pydantic puts which kind of message or part it is
            path += f".{part}"
        after_index = isinstance(part, int)
    return path
