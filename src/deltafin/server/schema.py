"""Requests: every field OpenAI publishes is honoured, accepted because it changes nothing, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _refuse(why: str) -> Any:
    """A field that is known and cannot be honoured."""

    def check(value: Any) -> Any:
        raise PydanticCustomError("unsupported", "{why}", {"why": f"is not supported: {why}"})

    return Annotated[Any, BeforeValidator(check), WithJsonSchema({"type": "null", "description": f"refused: {why}"})]


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} entries, and at most {MAX_STOPS} are possible")
    for stop in stops:
        if not 0 < len(stop) <= 1024:
            raise ValueError("a stop text must have 1 to 1024 characters")
        try:
            stop.encode()
        except UnicodeEncodeError:
            raise ValueError("a stop text has a lone surrogate, which no text contains") from None
    return tuple(stops)


_TEXT = {"type": "string", "minLength": 1, "maxLength": 1024}
Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}]}),
]


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    if isinstance(value, list) and len(value) > 1 and all(isinstance(v, str | list) for v in value):
        raise ValueError("several prompts in one request are not supported: send one request for each")
    raise ValueError("must be a text or a list of token ids")


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ONE = {"type": "array", "minItems": 1, "maxItems": 1}
Prompt = Annotated[
    Any,
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {**_ONE, "items": {"type": "string"}},
                {**_ONE, "items": _IDS},
            ]
        }
    ),
]


def _no_bias(value: Any) -> Any:
    if value != {}:
        raise ValueError("is not supported: K3 alone decides every token")
    return value


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in value.items()):
        raise ValueError("holds at most 16 entries, keys of 64 and values of 512 characters")
    return value


Metadata = Annotated[
    dict[str, str],
    AfterValidator(_metadata),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        }
    ),
]
NoBias = Annotated[dict[str, Any], BeforeValidator(_no_bias), WithJsonSchema({"type": "object", "maxProperties": 0})]
One = Annotated[int, Field(ge=1, le=1)]
Zero = Annotated[float, Field(ge=0, le=0)]


class StreamOptions(_Strict):
    """``include_progress`` is ours: chunks without choices tell queue position, prefill share and time left."""

    include_usage: bool = False
    include_progress: bool = False
    include_obfuscation: bool = False


class _Request(_Strict):
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Accepted and inert: generation is greedy and reproducible.
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    user: str | None = None
    # Only where they change nothing.
    n: One | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: NoBias | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        return self


class FunctionDefinition(_Strict):
    """A function; ``strict`` holds K3 to its parameters."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(_Strict):
    """A tool K3 may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Strict):
    """The function that must be called."""

    name: Name


class NamedChoice(_Strict):
    """A call of this function is required."""

    type: Literal["function"]
    function: NamedFunction


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError("must be none, auto, required or an object that names a function")
    if not isinstance(value, str | dict):
        raise ValueError("must be a text or an object")
    return value if isinstance(value, str) else NamedChoice.model_validate(value)


_NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}},
        },
    },
}
ToolChoice = Annotated[
    Any,
    BeforeValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}),
]


class JsonSchemaFormat(_Strict):
    """The schema the content obeys, whatever ``strict`` says."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_if_asked_for(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "json_schema goes with type json_schema and with no other")
        return self


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Any], Field(min_length=1), WithJsonSchema({"type": "array"})]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: Literal["low", "high", "max", "none"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    # Accepted and inert.
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    # Only where they change nothing.
    store: Annotated[bool, WithJsonSchema({"const": False})] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["medium"] | None = None
    # Refused.
    audio: _refuse("this engine is text only") = None  # type: ignore[valid-type]
    function_call: _refuse("use tool_choice") = None  # type: ignore[valid-type]
    functions: _refuse("use tools") = None  # type: ignore[valid-type]
    moderation: _refuse("there is no moderation here") = None  # type: ignore[valid-type]
    prediction: _refuse("K3 is drafted for by its own draft") = None  # type: ignore[valid-type]
    prompt_cache_options: _refuse("prefixes are always kept") = None  # type: ignore[valid-type]
    web_search_options: _refuse("this engine reaches no network") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.store:
            raise PydanticCustomError("store", "store: is not supported: nothing is kept for later retrieval")
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise PydanticCustomError("tool_choice", "tool_choice needs tools")
            if self.parallel_tool_calls is not None:
                raise PydanticCustomError("parallel_tool_calls", "parallel_tool_calls needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise PydanticCustomError("tools", "tools: two functions have one name")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a function that is not among the tools")
        return self


class CompletionRequest(_Request):
    """``POST /v1/completions``."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: One | None = None
    echo: Annotated[bool, WithJsonSchema({"const": False})] | None = None
    suffix: _refuse("K3 only writes forward") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _no_echo(self) -> CompletionRequest:
        if self.echo:
            raise PydanticCustomError("echo", "echo: is not supported: the prompt is not repeated")
        return self


PARAM_OF = {
    "stream_options": "stream_options",
    "max_tokens": "max_tokens",
    "top_logprobs": "top_logprobs",
    "store": "store",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "tools": "tools",
    "echo": "echo",
    "json_schema": "response_format.json_schema",
}
"""The field meant by an error that concerns a whole request, by the error's type."""
