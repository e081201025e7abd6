"""Every reply the grammar allows has the form, and K3's own spelling of such a reply is allowed."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from deltafin.errors import InputError
from deltafin.text.chat import ChatOptions, encode_chat
from deltafin.text.grammar import Function, ReplyForm, ReplyGrammars
from deltafin.text.messages import parse_messages
from deltafin.text.reply import parse_reply
from deltafin.text.tokenizer import K3Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
WEATHER = Function("get.weather")
STRICT = Function(
    "set",
    {
        "type": "object",
        "properties": {
            "where": {"type": "string"},
            "mode": {"type": "string", "enum": ["on", "off"]},
            "level": {"type": ["integer", "null"]},
        },
        "required": ["where", "mode", "level"],
        "additionalProperties": False,
    },
)


@pytest.fixture(scope="module")
def grammars(tok: K3Tokenizer) -> ReplyGrammars:
    return ReplyGrammars(tok)


def wander(tok: K3Tokenizer, grammars: ReplyGrammars, form: ReplyForm, seed: int) -> list[int]:
    """A random allowed reply; after a while only what leads to an end, which structure is."""
    rng = random.Random(seed)
    constraint = grammars.constraint(form)
    ids: list[int] = []
    while len(ids) < 4000:
        allowed = constraint.allowed().nonzero()[0].tolist()
        special = [i for i in allowed if tok.is_special(i)]
        short = [i for i in allowed if len(tok.token_bytes(i)) == 1 and 32 < tok.token_bytes(i)[0] < 127]
        pool = special if special and rng.random() < 0.3 else (short or allowed) if rng.random() < 0.7 else allowed
        ids.append(rng.choice(pool))
        constraint.accept(ids[-1])
        if ids[-1] in tok.stop_ids:
            break
    return ids


def rendered(tok: K3Tokenizer, message: dict, effort: str) -> list[int]:
    """The ids of an assistant turn, behind its opening."""
    before = parse_messages([{"role": "user", "content": "x"}])
    prompt = encode_chat(tok, before, ChatOptions(effort=effort))
    whole = encode_chat(tok, [*before, *parse_messages([message])], ChatOptions(effort=effort))
    return whole[len(prompt) : whole.index(tok.special["<|end_of_msg|>"], len(prompt)) + 1]


def follows(grammars: ReplyGrammars, form: ReplyForm, ids: list[int]) -> bool:
    constraint = grammars.constraint(form)
    for i in ids:
        if not constraint.allowed()[i]:
            return False
        constraint.accept(i)
    return True


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("thinking", [False, True])
def test_content_obeys_the_schema(tok: K3Tokenizer, grammars: ReplyGrammars, thinking: bool, seed: int) -> None:
    reply = parse_reply(tok, wander(tok, grammars, ReplyForm(thinking, SCHEMA), seed), thinking=thinking)
    assert reply.complete
    jsonschema.validate(json.loads(reply.content), SCHEMA)
    assert not reply.tool_calls


@pytest.mark.parametrize("seed", range(6))
def test_a_required_call_is_made(tok: K3Tokenizer, grammars: ReplyGrammars, seed: int) -> None:
    form = ReplyForm(False, calls="required", functions=[WEATHER, STRICT])
    reply = parse_reply(tok, wander(tok, grammars, form, seed), thinking=False)
    assert reply.complete
    assert reply.tool_calls
    for call in reply.tool_calls:
        arguments = json.loads(call.arguments)
        assert call.name in ("get.weather", "set")
        if call.name == "set":
            jsonschema.validate(arguments, STRICT.strict)
    one = ReplyForm(False, calls="required", functions=[STRICT], parallel=False)
    assert len(parse_reply(tok, wander(tok, grammars, one, seed), thinking=False).tool_calls) == 1


def test_what_k3_would_write_is_allowed_and_the_rest_is_not(tok: K3Tokenizer, grammars: ReplyGrammars) -> None:
    arguments = {"city": "Oslo\n<b>", "days": 3, "deep": {"a": [1, None]}, "flag": True}
    call = {"function": {"name": "get.weather", "arguments": json.dumps(arguments)}}
    spoken = {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call, call]}
    silent = {"role": "assistant", "content": "look", "reasoning_content": "hm"}
    calling, talking = rendered(tok, spoken, "low"), rendered(tok, silent, "low")
    tools = [WEATHER]
    assert follows(grammars, ReplyForm(True, calls="required", functions=tools), calling)
    assert follows(grammars, ReplyForm(True, functions=tools), calling)
    assert not follows(grammars, ReplyForm(True, calls="forbidden", functions=tools), calling)
    assert follows(grammars, ReplyForm(True, calls="forbidden", functions=tools), talking)
    assert not follows(grammars, ReplyForm(True, calls="required", functions=tools), talking)
    assert not follows(grammars, ReplyForm(True, functions=tools, parallel=False), calling)
    assert not follows(grammars, ReplyForm(True, calls="required", functions=[Function("other")]), calling)
    pretty = rendered(tok, {"role": "assistant", "content": json.dumps({"a": [1, 2]}, indent=4)}, "none")
    assert follows(grammars, ReplyForm(False, {"type": "object"}), pretty)
    assert not follows(grammars, ReplyForm(False, {"type": "array"}), pretty)


def test_when_it_is_free() -> None:
    assert ReplyForm(True).free
    assert ReplyForm(True, functions=[WEATHER]).free
    assert not ReplyForm(True, {}).free
    assert not ReplyForm(True, functions=[STRICT]).free
    assert not ReplyForm(True, functions=[WEATHER], parallel=False).free


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "object", "properties": 3}, {"not": {"type": "string"}}],
)
def test_a_schema_that_cannot_be_honoured_is_refused(grammars: ReplyGrammars, schema: dict) -> None:
    with pytest.raises(InputError):
        grammars.constraint(ReplyForm(False, schema))


def test_a_huge_schema_is_refused(grammars: ReplyGrammars) -> None:
    with pytest.raises(InputError, match="too large"):
        grammars.constraint(ReplyForm(False, {"enum": ["x" * 100] * 20000}))
