"""The official client, unmodified."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from answers import cold
from deltafin.text.chat import ChatOptions, encode_chat
from deltafin.text.messages import parse_messages
from deltafin.text.reply import parse_reply
from serving import LONG, MODEL, Running

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def tool(name: str, **properties: Any) -> Any:
    """A strict function."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


# The miniature never saw tools: what it may say beside and inside a call is narrow, so that it comes to an end.
TOOLS = [
    tool(
        "geo.weather",
        city={"type": "string", "enum": ['Ål "x"\n&amp; 上海 👩‍👩‍👧', 'Ål "y"\n']},
        days={"type": "integer", "enum": [2, 3]},
        deep={"enum": [{"a": [1, None]}], "type": "object"},
    ),
    tool("switch", mode={"type": "string", "enum": ["on", "off"]}),
]
BRIEF = {"type": "json_schema", "json_schema": {"name": "brief", "schema": {"enum": [1]}}}


def ask(server: Running, messages: list[Any] = FRANCE, **fields: Any) -> Any:
    fields = {"model": MODEL, "reasoning_effort": "none", **fields}
    return server.client().chat.completions.create(messages=messages, **fields)


def gathered(stream: Any) -> dict[str, Any]:
    """What the chunks of a stream add up to."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None, "logprobs": []}
    for chunk in stream:
        if chunk.usage:
            assert chunk.choices == []
            out["usage"] = chunk.usage
        for choice in chunk.choices:
            assert out["finish"] is None
            delta = choice.delta
            out["content"] += delta.content or ""
            out["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                known = out["calls"].setdefault(
                    call.index, {"id": call.id, "name": call.function.name, "arguments": ""}
                )
                known["arguments"] += call.function.arguments
            if choice.logprobs:
                out["logprobs"] += choice.logprobs.content
            out["finish"] = choice.finish_reason
    return out


def expected(server: Running, messages: list[Any], effort: str, new: int) -> Any:
    """The reply of a session that knows nothing of the server."""
    ids = encode_chat(server.tokenizer, parse_messages(messages), ChatOptions(effort=effort))
    events = server.engine.session().generate(ids, max_new=new, stop=server.tokenizer.stop_ids)
    tokens = [e.token for e in events if hasattr(e, "token")]
    return parse_reply(server.tokenizer, tokens, thinking=effort != "none"), len(ids), len(tokens)


@pytest.mark.parametrize("effort", ["none", "low"])
def test_chat_equals_a_plain_session(server: Running, effort: str) -> None:
    reply, prompt_tokens, new = expected(server, FRANCE, effort, 80)
    got = ask(server, reasoning_effort=effort, max_completion_tokens=80)
    choice = got.choices[0]
    assert choice.message.content == reply.content
    assert (getattr(choice.message, "reasoning_content", None) or "") == reply.reasoning
    assert choice.finish_reason == ("stop" if reply.complete else "length")
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (prompt_tokens, new)
    assert got.usage.total_tokens == prompt_tokens + new
    assert (got.usage.completion_tokens_details.reasoning_tokens > 0) == bool(reply.reasoning)
    streamed = gathered(
        ask(server, reasoning_effort=effort, max_tokens=80, stream=True, stream_options={"include_usage": True})
    )
    assert (streamed["content"], streamed["reasoning"]) == (reply.content, reply.reasoning)
    assert streamed["finish"] == choice.finish_reason
    assert streamed["usage"] == got.usage


def test_a_think_block_that_is_never_closed(server: Running) -> None:
    got = ask(server, reasoning_effort="low", max_tokens=3)
    assert got.choices[0].finish_reason == "length"
    assert got.choices[0].message.content == ""
    assert got.usage.completion_tokens_details.reasoning_tokens == 3


def test_completions(server: Running) -> None:
    client, prompt = server.client(), "The capital of Norway is"
    ids = server.tokenizer.encode(prompt)
    wanted = server.tokenizer.decode(cold(server.engine, ids, 8))
    for given in (prompt, [prompt], ids, [ids]):
        got = client.completions.create(model=MODEL, prompt=given, max_tokens=8, logprobs=2)
        assert got.choices[0].text == wanted
        assert got.choices[0].finish_reason == "length"
    logprobs = got.choices[0].logprobs
    assert "".join(logprobs.tokens) == wanted
    assert [wanted[at:].startswith(t) for at, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == [
        True
    ] * 8
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == max(top.values()) == logprob
    text = "".join(
        c.choices[0].text for c in client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, stream=True)
    )
    assert text == wanted


def test_tools_round_trip(server: Running) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS[:1],
        "tool_choice": "required",
        "response_format": BRIEF,
        "max_tokens": 300,
        "parallel_tool_calls": False,
    }
    got = ask(server, **fields)
    choice = got.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "geo.weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"].startswith('Ål "')
    assert (arguments["days"] in (2, 3), arguments["deep"]) == (True, {"a": [1, None]})
    streamed = gathered(ask(server, **fields, stream=True))
    assert streamed["calls"] == {0: {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}}
    assert streamed["finish"] == "tool_calls"
    # The turn goes back as the client has it and is the very ids that were decided.
    decided = server.session.tokens[-got.usage.completion_tokens :]
    history = [*FRANCE, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "mild"}]
    again = ask(server, history, tools=TOOLS[:1], max_tokens=8)
    prompt = server.session.tokens[: again.usage.prompt_tokens]
    assert any(prompt[i : i + len(decided)] == decided for i in range(len(prompt)))
    third = [*history, again.choices[0].message.model_dump(), *FRANCE]
    assert ask(server, third, tools=TOOLS[:1], max_tokens=8).usage.cached_tokens >= again.usage.prompt_tokens
    assert again.usage.cached_tokens == again.usage.prompt_tokens_details.cached_tokens


def test_tool_choice_is_honoured(server: Running) -> None:
    named: dict[str, Any] = {"type": "function"}
    for name in ("switch", "geo.weather"):
        named["function"] = {"name": name}
        got = ask(
            server, tools=TOOLS, tool_choice=named, response_format=BRIEF, max_tokens=200, parallel_tool_calls=False
        )
        assert [c.function.name for c in got.choices[0].message.tool_calls] == [name]
    none = ask(server, tools=TOOLS, tool_choice="none", max_tokens=60)
    assert not none.choices[0].message.tool_calls


class Answer(BaseModel):
    """What a structured reply must be."""

    city: str
    known: bool


def test_structured_output(server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "n": {"type": "integer", "minimum": 3, "maximum": 5}},
        "required": ["size", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for effort in ("none", "low"):
        got = ask(server, response_format=form, max_tokens=400, reasoning_effort=effort)
        if got.choices[0].finish_reason == "stop":
            value = json.loads(got.choices[0].message.content)
            assert value["size"] in ("small", "large")
            assert 3 <= value["n"] <= 5
        else:
            assert effort == "low"
    free = ask(server, response_format={"type": "json_object"}, max_tokens=200)
    content = free.choices[0].message.content
    assert content.lstrip().startswith("{")
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


def test_structured_output_through_the_clients_own_helper(server: Running) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "long", "strict": True, "schema": Answer.model_json_schema()},
    }
    got = ask(server, response_format=form, max_tokens=300)
    if got.choices[0].finish_reason == "stop":
        Answer.model_validate_json(got.choices[0].message.content)
    try:
        parsed = server.client().chat.completions.parse(
            model=MODEL, messages=FRANCE, response_format=Answer, max_tokens=300, reasoning_effort="none"
        )
    except openai.LengthFinishReasonError:
        return
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_logprobs(server: Running) -> None:
    got = ask(server, logprobs=True, top_logprobs=3)
    choice = got.choices[0]
    entries = choice.logprobs.content
    assert "".join(e.token for e in entries) == choice.message.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert sum(math.exp(t.logprob) for t in entry.top_logprobs) <= 1 + 1e-9
    streamed = gathered(ask(server, logprobs=True, top_logprobs=3, stream=True))
    assert streamed["logprobs"] == entries
    assert ask(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(server).choices[0].logprobs is None
    # What is allowed does not change what K3 thinks.
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["zzz"]}}}
    forced = ask(server, response_format=form, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert any(e.top_logprobs[0].token != e.token for e in forced)


@pytest.mark.parametrize("stop", ["Paris", [" is", "nothing"], ["s Par"], "of Fr", ["l of France is Paris."]])
def test_stop_texts(server: Running, stop: Any) -> None:
    whole = ask(server).choices[0].message.content
    stops = [stop] if isinstance(stop, str) else stop
    end = min((whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole)[1]
    got = ask(server, stop=stop, logprobs=True)
    assert got.choices[0].message.content == whole[:end]
    assert got.choices[0].finish_reason == "stop"
    tokens = "".join(e.token for e in got.choices[0].logprobs.content)
    assert tokens.startswith(whole[:end])
    streamed = gathered(ask(server, stop=stop, logprobs=True, stream=True))
    assert streamed["content"] == whole[:end]
    assert streamed["logprobs"] == got.choices[0].logprobs.content


def test_errors_are_the_clients_own(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(server, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        ask(server, model="gpt-4o")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(server, [{"role": "user", "content": "word " * 5000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as more:
        ask(server, max_tokens=4090)
    assert more.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        server.client().embeddings.create(model=MODEL, input="x")


def test_models_and_raw_responses(server: Running) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra["context_length"] == server.engine.plan.context  # type: ignore[index]
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=FRANCE, reasoning_effort="none")
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == ask(server).choices[0].message.content
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=FRANCE, reasoning_effort="none", stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_a_client_that_gives_up_frees_k3(server: Running) -> None:
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.5).chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            reasoning_effort="none",
            response_format=LONG,  # type: ignore[arg-type]
        )
    server.idle(10)
    assert ask(server).choices[0].message.content
