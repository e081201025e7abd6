"""From a validated request to the work it means. No generation happens here, and everything refusable is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import xxhash
from pydantic import ValidationError

from deltafin.errors import DeltafinError
from deltafin.server.errors import ApiError, from_deltafin, from_validation
from deltafin.server.jobs import Work
from deltafin.server.schema import ChatRequest, CompletionRequest, NamedChoice, StreamOptions
from deltafin.sessions.turns import TurnLog
from deltafin.text.chat import ChatOptions, encode_chat
from deltafin.text.grammar import Function, ReplyForm, ReplyGrammars
from deltafin.text.messages import AssistantMessage, parse_messages
from deltafin.text.tokenizer import K3Tokenizer

MAX_RESUME_KEY = 256
_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run.

    Attributes:
        stream: None for one answer, else how to stream it.
    """

    work: Work
    stream: StreamOptions | None


class Preparer:
    """Validates, renders and bounds requests.

    Args:
        model: the only model name served.
        context: positions of prompt and reply together.
        max_tokens: most tokens of a reply, whatever the request says.
        effort: K3's thinking effort where the request names none.
        turns: ids of earlier replies.
        resume: whether idempotency keys mean anything.
    """

    def __init__(
        self,
        tokenizer: K3Tokenizer,
        turns: TurnLog,
        *,
        model: str,
        context: int,
        max_tokens: int,
        effort: str,
        resume: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self.grammars = ReplyGrammars(tokenizer)
        self.model = model
        self.context = context
        self._max_tokens = max_tokens
        self._effort = effort
        self._resume = resume

    def chat(self, body: bytes, idempotency_key: str | None = None) -> Prepared:
        """``POST /v1/chat/completions``.

        Raises:
            ApiError: the request cannot be honoured.
        """
        raw = parse_json(body)
        request = self._validated(ChatRequest, raw)
        # K3's template shows tools and schemas as the client wrote them.
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()]
        choice = request.tool_choice
        form = request.response_format
        try:
            options = ChatOptions(
                effort=request.reasoning_effort or self._effort,
                tools=tools,
                tool_choice="required" if isinstance(choice, NamedChoice) else choice if tools else None,
                response_format=None if form is None else form.model_dump(by_alias=True, exclude_unset=True),
            )
            thinking = options.thinking

            def recall(message: AssistantMessage, before: Sequence[int]) -> list[int] | None:
                return self._turns.recall(message, before, thinking)

            messages = parse_messages(raw["messages"])
            ids = encode_chat(self._tokenizer, messages, options, recall=recall)
            # What K3's template says about the next turn only will not stand before that turn later.
            lasting = replace(options, tool_choice=None, response_format=None)
            before = ids if lasting == options else encode_chat(self._tokenizer, messages, lasting, recall=recall)
        except DeltafinError as e:
            raise from_deltafin(e, "messages") from None
        reply = _form(request, thinking)
        if not reply.free:
            self._check_form(reply, request)
        count = (request.top_logprobs or 0) if request.logprobs else None
        most = request.max_completion_tokens or request.max_tokens
        named = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        form_key = None if reply.free else reply.grammar()
        return self._prepared(request, ids, most, named, thinking, count, reply, form_key, idempotency_key, before)

    def completion(self, body: bytes, idempotency_key: str | None = None) -> Prepared:
        """``POST /v1/completions``.

        Raises:
            ApiError: the request cannot be honoured.
        """
        request = self._validated(CompletionRequest, parse_json(body))
        try:
            prompt = request.prompt
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except DeltafinError as e:
            raise from_deltafin(e, "prompt") from None
        if not ids:
            raise ApiError(400, "prompt: is empty", param="prompt", code="invalid_value")
        if not all(0 <= i < self._tokenizer.vocab_size for i in ids):
            raise ApiError(400, "prompt: a token id is not in the vocabulary", param="prompt", code="invalid_value")
        most = request.max_tokens
        return self._prepared(request, ids, most, "max_tokens", None, request.logprobs, None, None, idempotency_key)

    def _validated(self, kind: type[_Request], raw: Any) -> _Request:
        try:
            request = kind.model_validate(raw)
        except ValidationError as e:
            raise from_validation(e) from None
        if request.model != self.model:
            raise ApiError(
                404,
                f"The model {request.model[:100]!r} does not exist; this server has {self.model!r}",
                param="model",
                code="model_not_found",
            )
        return request

    def _check_form(self, reply: ReplyForm, request: ChatRequest) -> None:
        try:
            self.grammars.constraint(reply)
        except DeltafinError as e:
            error = from_deltafin(e, "tools" if request.response_format is None else "response_format")
            raise error from None

    def _prepared(
        self,
        request: ChatRequest | CompletionRequest,
        ids: list[int],
        most: int | None,
        named: str,
        thinking: bool | None,
        logprobs: int | None,
        form: ReplyForm | None,
        form_key: str | None,
        idempotency_key: str | None,
        before: Sequence[int] = (),
    ) -> Prepared:
        if most is not None and most > self._max_tokens:
            raise ApiError(
                400,
                f"{named} is {most} and this server allows {self._max_tokens}; --max-tokens changes that",
                param=named,
                code="invalid_value",
            )
        room = self.context - len(ids)
        if room < 1 or (most is not None and most > room):
            asked = f" and {most} for the reply" if most is not None else ""
            raise ApiError(
                400,
                f"This server's context holds {self.context} tokens: the prompt has {len(ids)}{asked}. "
                "Shorten it, or start the server with a larger --context and enough --ram.",
                param="messages" if thinking is not None else "prompt",
                code="context_length_exceeded",
            )
        max_new = most or min(self._max_tokens, room)
        stops = request.stop or ()
        what = json.dumps([max_new, stops, thinking, logprobs, form_key])
        key = xxhash.xxh3_128(json.dumps(ids).encode() + what.encode()).hexdigest()
        if idempotency_key is not None and not re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_RESUME_KEY}}}", idempotency_key):
            raise ApiError(400, f"Idempotency-Key must have 1 to {MAX_RESUME_KEY} visible characters")
        if not self._resume:
            idempotency_key = None
        elif idempotency_key is not None and not self._turns.belongs(idempotency_key, key):
            raise ApiError(422, "this Idempotency-Key was used with another request", code="idempotency_key_reused")
        work = Work(key, tuple(ids), max_new, stops, thinking, logprobs, form, tuple(before), idempotency_key)
        return Prepared(work, (request.stream_options or StreamOptions()) if request.stream else None)


def parse_json(body: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, bounded depth.

    Raises:
        ApiError: it is not.
    """
    try:
        raw = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        raise ApiError(400, f"the body is not UTF-8 (byte {e.start})", code="invalid_json") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "We could not parse the JSON body of your request.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return raw


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _form(request: ChatRequest, thinking: bool) -> ReplyForm:
    functions = tuple(
        Function(t.function.name, (t.function.parameters or {}) if t.function.strict else None)
        for t in request.tools or ()
    )
    calls: Any = "optional"
    if isinstance(request.tool_choice, NamedChoice):
        functions = tuple(f for f in functions if f.name == request.tool_choice.function.name)
        calls = "required"
    elif request.tool_choice == "required":
        calls = "required"
    elif request.tool_choice == "none" and functions:
        calls = "forbidden"
    schema: dict[str, Any] | None = None
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        schema = {"type": "object"}
    elif wanted is not None and wanted.json_schema is not None:
        schema = wanted.json_schema.schema_
    return ReplyForm(thinking, schema, calls, functions, request.parallel_tool_calls is not False)
