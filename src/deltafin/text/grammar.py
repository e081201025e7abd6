"""Replies that must have a form: JSON of a schema, a tool call, no tool call.

The form is a grammar over K3's own reply format, so that every token K3 may choose keeps the reply well formed; K3
still decides which of them. Matching is llguidance's, on token bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from deltafin.errors import InputError
from deltafin.text.tokenizer import CLOSE, END_OF_MESSAGE, OPEN, PATTERN, SEP, K3Tokenizer

MAX_GRAMMAR_CHARS = 1 << 20
_JSON_TYPES = ("number", "boolean", "null", "object", "array")
# Compact, spaced and indented JSON are all allowed, but nothing that greedy decoding could go on with for ever.
_WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": r" ?|\r?\n[ \t]{0,64}"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called; ``strict`` holds its parameters' schema when calls must obey it."""

    name: str
    strict: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What a reply must look like.

    Attributes:
        thinking: the reply begins inside the thinking part, which is always free.
        schema: JSON schema of the content; None: any text.
        calls: whether tools may, must or must not be called.
        functions: what may be called.
        parallel: whether there may be several calls.
    """

    thinking: bool
    schema: Mapping[str, Any] | None = None
    calls: Literal["optional", "required", "forbidden"] = "optional"
    functions: Sequence[Function] = ()
    parallel: bool = True

    @property
    def free(self) -> bool:
        """Whether every reply is allowed, as a conversation without special wishes."""
        strict = any(f.strict is not None for f in self.functions)
        return self.schema is None and self.calls == "optional" and self.parallel and not strict

    def grammar(self) -> str:
        """The form in llguidance's dialect of Lark.

        Raises:
            InputError: a strict function whose parameters cannot be expressed.
        """
        rules = _Rules()
        think = f"TEXT {_close('think')} {_open('response')} " if self.thinking else ""
        end, ends = _close("message"), _close("response")
        content = "TEXT" if self.schema is None else rules.add(f"%json {_json(self.schema)}")
        bodies = []
        if self.calls != "required":
            bodies.append(f"{content} {ends} {end}")
        if self.calls != "forbidden" and self.functions:
            calls = rules.calls(self.functions, first=True)
            if self.parallel:
                calls = rules.add(f"{calls} {rules.calls(self.functions, first=False)}*")
            spoken = "TEXT" if self.schema is None else f"{content}?"
            bodies.append(f"{spoken} {ends} {_open('tools')} {calls} {_close('tools')} {end}")
        lines = [f"start: {think}({' | '.join(bodies)})", "TEXT: /(?s:.*)/", *rules.lines]
        return "\n".join(lines) + "\n"


class ReplyConstraint:
    """Which ids keep a reply in its form; one reply's progress. See ``generation.choice.Constraint``."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, vocab_size: int) -> None:
        self._matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        self._check()
        self._bits = allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Ids that may come next, bool [vocab].

        Raises:
            InputError: the form became too complex to follow.
        """
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)

    def accept(self, token: int) -> None:
        """``token`` was decided."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = str(self._matcher.get_error()).splitlines()[0][:300]
            raise InputError(f"the required form cannot be followed: {problem}", remedy="simplify the schema")


class ReplyGrammars:
    """Makes constraints for one tokenizer."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _matching(self) -> LLTokenizer:
        t = self._tokenizer
        ranks = {t.token_bytes(i): i for i in range(t.first_special)}
        return LLTokenizer.from_tiktoken(  # type: ignore[attr-defined,no-any-return]
            encoder=ranks,
            special_tokens=t.special,
            pattern=PATTERN,
            eos_token=t.special[END_OF_MESSAGE],
            n_vocab=t.vocab_size,
        )

    def constraint(self, form: ReplyForm) -> ReplyConstraint:
        """A constraint at the beginning of a reply.

        Raises:
            InputError: a schema that is malformed, uses keywords that cannot be honoured, or is too large.
        """
        grammar = form.grammar()
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InputError("the schema is too large", remedy=f"keep it below {MAX_GRAMMAR_CHARS:,} characters")
        return ReplyConstraint(self._matching, grammar, self._tokenizer.vocab_size)


class _Rules:
    """Numbered grammar rules."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._arguments: dict[str, str] = {}  # rule of each function's arguments

    def add(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def calls(self, functions: Sequence[Function], *, first: bool) -> str:
        """A call of one of ``functions``, with any arguments or with those its strict schema asks for."""
        index = '"1"' if first else "/[1-9][0-9]{0,2}/"
        return self.add(" | ".join(self._call(f, index) for f in functions))

    def _call(self, function: Function, index: str) -> str:
        if function.name not in self._arguments:
            body = self._any_arguments() if function.strict is None else self._strict(function)
            self._arguments[function.name] = self.add(body)
        arguments = self._arguments[function.name]
        opening = f'{OPEN} "call tool=" {_Q} "{function.name}" {_Q} " index=" {_Q} {index} {_Q} {SEP}'
        return self.add(f"{opening} {arguments} {_close('call')}")

    def _any_arguments(self) -> str:
        values = [self._argument('/[^"<>&\\n]+/', "string", "TEXT")]
        values += [self._argument('/[^"<>&\\n]+/', kind, self._json({"type": kind})) for kind in _JSON_TYPES]
        return f"({' | '.join(values)})*"

    def _strict(self, function: Function) -> str:
        schema = function.strict or {}
        properties = schema.get("properties") or {}
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        where = f"strict function {function.name}"
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list) or set(required) != set(properties):
            raise InputError(f"{where}: every property must be required", remedy="list all properties in required")
        if schema.get("additionalProperties") is not False:
            raise InputError(f"{where}: additionalProperties must be false", remedy="set it to false")
        return (
            " ".join(
                self.add(" | ".join(self._property(where, key, value, shared))) for key, value in properties.items()
            )
            or '""'
        )

    def _property(self, where: str, key: str, schema: Any, shared: Mapping[str, Any]) -> list[str]:
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        out = []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            name = json.dumps(key.replace("&", "&amp;").replace('"', "&quot;"), ensure_ascii=False)
            if kind == "string":
                values = schema.get("enum", [schema["const"]] if "const" in schema else None)
                if values is not None:
                    text = " | ".join(json.dumps(v, ensure_ascii=False) for v in values if isinstance(v, str))
                    value = self.add(text or '""')
                elif set(schema) & {"pattern", "format", "minLength", "maxLength"}:
                    raise InputError(
                        f"{where}: {key} restricts its text", remedy="leave pattern, format and lengths out"
                    )
                else:
                    value = "TEXT"
                out.append(self._argument(name, "string", value))
            elif kind in (*_JSON_TYPES, "integer"):
                shown = "number" if kind == "integer" else kind
                out.append(self._argument(name, shown, self._json({**schema, "type": kind, **shared})))
            else:
                raise InputError(f"{where}: {key} has no plain type", remedy="give every property a type")
        return out

    def _argument(self, key: str, kind: str, value: str) -> str:
        opening = f'{OPEN} "argument key=" {_Q} {key} {_Q} " type=" {_Q} "{kind}" {_Q} {SEP}'
        return self.add(f"{opening} {value} {_close('argument')}")

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self.add(f"%json {_json(schema)}")


_Q = r'"\""'


def _open(tag: str) -> str:
    return f'{OPEN} "{tag}" {SEP}'


def _close(tag: str) -> str:
    return f'{CLOSE} "{tag}" {SEP}'


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps({**schema, "x-guidance": _WHITE_SPACE}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise InputError(f"the schema cannot be written as JSON: {e}", remedy="send plain JSON values") from None
