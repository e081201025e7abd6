import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.errors import InputError, UsageError
from deltafin.text.chat import ChatOptions, Segment, encode_chat, render
from deltafin.text.messages import AssistantMessage, TextPart, UserMessage, parse_messages
from deltafin.text.tokenizer import K3Tokenizer

NO_THINKING = ChatOptions(effort="none")


def fnv(values: list[int]) -> str:
    """FNV-1a 64 over each value's four little-endian bytes."""
    state = 0xCBF29CE484222325
    for value in values:
        for byte in value.to_bytes(4, "little"):
            state = (state ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{state:016x}"


def rendered(messages: Any, options: ChatOptions | None = None, **more: Any) -> str:
    return "".join(segment.text for segment in render(parse_messages(messages), options, **more))


def function(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"description": description, "name": name, "parameters": parameters}}


def call(name: str, arguments: Any = None, call_id: str | None = None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    function("beta", "B tool", {"z": {"type": "number"}, "a": {"type": "string"}}),
    function("alpha", "A tool", {"type": "object"}),
]
SCHEMA = {
    "required": ["b", "a"],
    "properties": {"b": {"type": "number"}, "a": {"type": "string"}},
    "type": "object",
}

# Published vectors of Moonshot's encoder: messages, options, image prompts, segments, their hash, ids, their hash.
CASES: dict[str, tuple[list[dict[str, Any]], ChatOptions, list[str], int, str, int, str]] = {
    "defaults": (
        [{"role": "user", "content": "Hello <|open|> & goodbye"}],
        ChatOptions(),
        [],
        *(38, "8d67f74027f3f8f4", 95, "14e384b37a03643f"),
    ),
    "images": (
        [
            {"role": "system", "name": 'ops&"x', "content": "Rules."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look: "},
                    {"type": "image_url", "image_url": {"url": "ignored"}},
                    {"type": "text", "text": " then <|kimi_image_placeholder|>."},
                ],
            },
        ],
        NO_THINKING,
        ["<|media_begin|>cat<|media_end|>", "<|media_begin|>dog<|media_end|>"],
        *(42, "35c43bb588feecd9", 54, "fb1cc45919cb3313"),
    ),
    "tools": (
        [
            {
                "role": "assistant",
                "reasoning_content": "Check.",
                "content": "Calling.",
                "tool_calls": [call("beta", '{"z":1,"a":"x"}', "b"), call("alpha", "not valid <|open|>", "a")],
            },
            {"role": "tool", "tool_call_id": "a", "name": "stale", "content": "alpha result"},
            {"role": "tool", "tool_call_id": "b", "tool": "wrong", "content": "beta result"},
        ],
        ChatOptions(effort="low", tools=TOOLS),
        [],
        *(182, "b060b0cf4e2a9500", 316, "38e754cb40cdd010"),
    ),
    "schema": (
        [{"role": "user", "name": 'A&B"', "content": "Return JSON."}],
        ChatOptions(
            effort="high",
            tool_choice="required",
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        ),
        [],
        *(74, "c65d123d688dd863", 223, "597461e6ffe68c32"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_segments_of_published_vectors(case: str) -> None:
    messages, options, images, count, digest, *_ = CASES[case]
    segments = render(parse_messages(messages), options, image_prompts=images)
    assert len(segments) == count
    assert fnv([len(s.text.encode()) | s.special << 31 for s in segments]) == digest


@pytest.mark.parametrize("case", CASES)
def test_ids_of_published_vectors(real_tok: K3Tokenizer, case: str) -> None:
    messages, options, images, _, _, count, digest = CASES[case]
    segments = render(parse_messages(messages), options, image_prompts=images)
    ids = [i for text, special in segments for i in real_tok.encode(text, allow_special=special)]
    assert (len(ids), fnv(ids)) == (count, digest)
    if not images:
        assert encode_chat(real_tok, parse_messages(messages), options) == ids


def test_texts_of_published_vectors() -> None:
    messages, options, images, *_ = CASES["images"]
    assert rendered(messages, options, image_prompts=images) == (
        '<|open|>message role="system" name="ops&amp;&quot;x"<|sep|>Rules.<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>Look: <|media_begin|>cat<|media_end|> then '
        "<|media_begin|>dog<|media_end|>.<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )
    messages, options, *_ = CASES["tools"]
    assert (
        '[{"function":{"description":"B tool","name":"beta","parameters":{"a":{"type":"string"},"z":{"type":"number"}}}'
        ',"type":"function"},{"function":{"description":"A tool","name":"alpha","parameters":{"type":"object"}}'
        ',"type":"function"}]'
    ) in rendered(messages, options)
    assert rendered(messages, options).endswith(
        '<|open|>call tool="alpha" index="2"<|sep|><|open|>json type="object"<|sep|>not valid <|open|><|close|>json'
        "<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="beta" index="1"<|sep|>beta result<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="tool" tool="alpha" index="2"<|sep|>alpha result<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


def test_oracle_chats(tok: K3Tokenizer, oracle: list[dict[str, Any]]) -> None:
    chats = [prompt for prompt in oracle if "messages" in prompt]
    assert len(chats) == 70
    for prompt in chats:
        options = ChatOptions(effort=prompt["thinking_effort"] or "none")
        assert encode_chat(tok, parse_messages(prompt["messages"]), options) == prompt["ids"]


CONTROL = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|kimi_image_placeholder|>", '"', "&", "x"]
hostile = st.lists(st.sampled_from(CONTROL), min_size=1, max_size=6).map("".join)


@given(hostile, hostile, hostile)
def test_no_text_adds_structure(tok: K3Tokenizer, a: str, b: str, c: str) -> None:
    def structure(a: str, b: str, c: str) -> list[int]:
        calls = [call(a, {b: c, "n": [c]}, "1"), call(b, "{" + c, "2")]
        messages = [
            {"role": "system", "name": a, "content": b},
            {"role": "developer", "tools": [{c: a}]},
            {"role": "user", "name": b, "content": [{"type": "text", "text": c}, {"type": "text", "text": a}]},
            {"role": "assistant", "reasoning_content": a, "content": b, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "2", "content": c},
            {"role": "tool", "name": a, "content": b},
        ]
        schema = {"type": "json_schema", "json_schema": {"schema": {a: b}}}
        ids = encode_chat(tok, parse_messages(messages), ChatOptions(tools=[{a: c}], response_format=schema))
        return [i for i in ids if tok.is_special(i)]

    assert structure(a, b, c) == structure("p", "q", "r")


def test_system_messages_of_the_template() -> None:
    user = [{"role": "user", "content": "u"}]
    for choice, rule in (("required", "MUST call tools"), ("none", "MUST NOT call any tools")):
        text = rendered(user, ChatOptions(effort="none", tool_choice=choice))
        assert f"`tool_choice={choice}`.\nYou {rule} in the next message.<|close|>" in text
        assert text.index("u<|close|>message") < text.index("tool-choice")
    assert rendered(user, ChatOptions(tool_choice="auto", response_format={"type": "text"})) == rendered(user)
    text = rendered(user, ChatOptions(response_format={"type": "json_object"}))
    assert 'type="response-format"<|sep|>The system is invoked with `response_format=json_object`.\nYour' in text
    assert "additional formatting.<|close|>" in text
    for schema in ({"schema": {"é": 1}}, {"json_schema": {"é": 1}}, {"é": 1}):
        text = rendered(user, ChatOptions(response_format={"type": "json_schema", "json_schema": schema}))
        assert 'following schema:\n```json\n{"é":1}\n```<|close|>' in text
    text = rendered([{"role": "system", "tools": [{"b": 1, "a": [{"d": 1, "c": 2}]}]}, *user], NO_THINKING)
    assert text.startswith('<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n')
    assert '```json\n[{"a":[{"c":2,"d":1}],"b":1}]\n```<|close|>' in text


def test_developer_is_system() -> None:
    assert rendered([{"role": "developer", "content": "x"}]) == rendered([{"role": "system", "content": "x"}])


def test_argument_values() -> None:
    arguments = {"s": 'a"<b>\n', "n": -1.5, "i": 10**30, "b": True, "z": None, "o": {"y": [1, "é"], "x": {}}, "l": []}
    message = {"role": "assistant", "content": None, "tool_calls": [call("f.g-h", json.dumps(arguments))]}
    text = rendered([message], NO_THINKING)
    assert text == rendered([{**message, "tool_calls": [call("f.g-h", arguments)]}], NO_THINKING)
    body = text.split('tool="f.g-h" index="1"<|sep|>')[1].split("<|close|>call")[0]
    assert body.split("<|close|>argument<|sep|>") == [
        '<|open|>argument key="s" type="string"<|sep|>a"<b>\n',
        '<|open|>argument key="n" type="number"<|sep|>-1.5',
        f'<|open|>argument key="i" type="number"<|sep|>{10**30}',
        '<|open|>argument key="b" type="boolean"<|sep|>true',
        '<|open|>argument key="z" type="null"<|sep|>null',
        '<|open|>argument key="o" type="object"<|sep|>{"y": [1, "é"], "x": {}}',
        '<|open|>argument key="l" type="array"<|sep|>[]',
        "",
    ]


@pytest.mark.parametrize("arguments", [None, "", " \n", "{}", {}])
def test_no_arguments(arguments: Any) -> None:
    text = rendered([{"role": "assistant", "tool_calls": [call("f", arguments)]}])
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in text


@pytest.mark.parametrize("arguments", ["[1]", "1", '"x"', "null"])
def test_arguments_that_are_json_but_no_object(arguments: str) -> None:
    with pytest.raises(InputError, match=r"messages\[0\]\.tool_calls\[1\]\.function\.arguments is JSON but no object"):
        rendered([{"role": "assistant", "tool_calls": [call("f"), call("f", arguments)]}])


def test_reasoning_of_earlier_turns() -> None:
    assert "<|open|>think<|sep|>why<|close|>think<|sep|>" in rendered([{"role": "assistant", "reasoning": "why"}])
    both = {"role": "assistant", "reasoning": "no", "reasoning_content": "yes"}
    assert "<|sep|>yes<|close|>" in rendered([both])
    assert "<|open|>think<|sep|><|close|>think<|sep|>" in rendered([{"role": "assistant", "reasoning": " \n"}])
    assert "yes" not in rendered([both], NO_THINKING)


def tool_results(messages: list[dict[str, Any]]) -> list[str]:
    text = rendered(messages)
    return [part.split("<|close|>")[0].replace("<|sep|>", " ") for part in text.split('message role="tool" ')[1:]]


def test_tool_results_find_their_call() -> None:
    asked = {
        "role": "assistant",
        "tool_calls": [call("f", call_id="1"), call("g", call_id="2"), call("f", call_id="3")],
    }

    def result(content: str, **more: str) -> dict[str, Any]:
        return {"role": "tool", "content": content, **more}

    # Without ids by position; the counter starts again behind each assistant turn.
    assert tool_results([asked, result("x"), result("y"), asked, result("z")]) == [
        'tool="f" index="1" x',
        'tool="g" index="2" y',
        'tool="f" index="1" z',
    ]
    # By id in the order of the calls, equal ids as they came; a call without a result leaves no gap.
    assert tool_results([asked, result("z", id="3"), result("x", tool_call_id="1"), result("y", tool_call_id="1")]) == [
        'tool="f" index="1" x',
        'tool="f" index="2" y',
        'tool="f" index="3" z',
    ]
    # An id that two calls share belongs to the first.
    twice = {"role": "assistant", "tool_calls": [call("f", call_id="1"), call("g", call_id="1")]}
    assert tool_results([twice, result("x", id="1")]) == ['tool="f" index="1" x']
    # One that matches no call leaves the run as it is.
    assert tool_results([asked, result("y", tool_call_id="2"), result("?", tool_call_id="9", name="h")]) == [
        'tool="f" index="1" y',
        'tool="h" index="2" ?',
    ]
    # A user message in between ends the run, not the counting.
    assert tool_results([asked, result("x"), {"role": "user"}, result("y", tool_call_id="1")]) == [
        'tool="f" index="1" x',
        'tool="g" index="2" y',
    ]
    with pytest.raises(InputError, match=r"messages\[1\] is a tool result that belongs to no call"):
        tool_results([{"role": "user"}, result("x", tool_call_id="1")])


def test_many_tool_results_are_no_burden() -> None:
    n = 20_000
    asked = {"role": "assistant", "tool_calls": [call("f", call_id=str(i)) for i in range(n)]}
    results = [{"role": "tool", "tool_call_id": str(i), "content": str(i)} for i in reversed(range(n))]
    text = "".join(segment.text for segment in render(parse_messages([asked, *results]), NO_THINKING))
    assert f'tool="f" index="{n}"<|sep|>{n - 1}<|close|>message' in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "medium"}, "'medium' is not accepted"),
        ({"effort": ""}, "'' is not accepted"),
        ({"tool_choice": "get_weather"}, "tool_choice 'get_weather'"),
        ({"response_format": {}}, "type None"),
        ({"response_format": {"type": "xml"}}, "type 'xml'"),
        ({"response_format": {"json_schema": {}}}, "type None"),
        ({"response_format": {"type": "json_schema"}}, "no object json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "no object json_schema"),
    ],
)
def test_options_the_template_has_no_words_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as e:
        ChatOptions(**options)
    assert e.value.remedy


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        (None, "messages: "),
        ([], "messages: "),
        ([1], r"messages\[0\]: "),
        ([{"content": "x"}], r"messages\[0\]: "),
        ([{"role": "admin", "content": "x"}], r"messages\[0\]: "),
        ([{"role": "user", "content": 1}], r"messages\[0\]\.content: "),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text: "),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], r"messages\[0\]\.content\[0\]: .*input_audio"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]: "),
        ([{"role": "user", "tool_calls": []}], r"messages\[0\]\.tool_calls: "),
        ([{"role": "user"}, {"role": "assistant", "tool_calls": [{}]}], r"messages\[1\]\.tool_calls\[0\]\.function: "),
        ([{"role": "assistant", "tool_calls": [call("")]}], r"messages\[0\]\.tool_calls\[0\]\.function\.name: "),
        ([{"role": "system", "content": "x", "tools": [{}]}], r"messages\[0\]: .*no place for content"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\]\.name: "),
    ],
)
def test_malformed_messages_are_named(messages: Any, path: str) -> None:
    with pytest.raises(InputError, match=f"^{path}"):
        parse_messages(messages)


def test_null_fields_of_clients_are_absent() -> None:
    reply = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": None, "name": None}
    assert parse_messages([reply]) == [AssistantMessage()]


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_images_are_refused_by_name(kind: str) -> None:
    content = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:"}}]
    with pytest.raises(InputError, match=rf"messages\[1\]\.content\[1\] is of type {kind}, .* reads text only"):
        rendered([{"role": "system"}, {"role": "user", "content": content}])


def test_image_prompts_must_be_used_up() -> None:
    with pytest.raises(InputError, match="2 image prompts were given and 1 used"):
        rendered([{"role": "user", "content": "<|kimi_image_placeholder|>"}], image_prompts=["a", "b"])
    with pytest.raises(InputError, match="no image prompt is left"):
        rendered([{"role": "user", "content": "<|kimi_image_placeholder|>" * 2}], image_prompts=["a"])
    assert "<|sep|><|kimi_image_placeholder|><|close|>" in rendered(
        [{"role": "user", "content": "<|kimi_image_placeholder|>"}]
    )


def deep(n: int) -> Any:
    value: Any = 0
    for _ in range(n):
        value = [value]
    return value


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, deep(100_000)])
def test_tools_that_are_not_json(value: Any) -> None:
    with pytest.raises(InputError, match="tools cannot be written as JSON"):
        render([UserMessage()], ChatOptions(tools=[{"x": value}]))


def test_surrogates_in_any_text(tok: K3Tokenizer) -> None:
    message = {"role": "assistant", "tool_calls": [call("f", '{"x": "\\ud800"}')]}
    with pytest.raises(InputError, match="lone surrogate"):
        encode_chat(tok, parse_messages([message]))


def test_recalled_turns_keep_their_ids(tok: K3Tokenizer) -> None:
    turn = AssistantMessage(content=[TextPart(text="Paris")])
    messages = [UserMessage(content="x"), turn, UserMessage(content="y")]
    plain = encode_chat(tok, messages, NO_THINKING)
    ends = tok.encode("<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", allow_special=True)
    canonical = [*tok.encode("Paris"), *ends]
    spelled = [i for letter in "Paris" for i in tok.encode(letter)] + ends
    assert encode_chat(tok, messages, NO_THINKING, recall=lambda m, before: canonical) == plain
    other = encode_chat(tok, messages, NO_THINKING, recall=lambda m, before: spelled if m == turn else None)
    assert other != plain
    assert tok.decode(other) == tok.decode(plain)
    named = [turn.model_copy(update={"name": "n"})]  # generated turns have no name: nothing to recall
    assert encode_chat(tok, named, recall=lambda m, before: [1]) == encode_chat(tok, named)


def test_empty_segments_are_dropped() -> None:
    assert Segment("", False) not in render([UserMessage(content="")])
