import json
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.errors import InputError
from deltafin.text.chat import ChatOptions, encode_chat
from deltafin.text.messages import AssistantMessage, UserMessage, parse_messages
from deltafin.text.reply import MAX_MARKER_BYTES, Content, Event, Reasoning, Reply, ReplyParser, ToolCall, parse_reply
from deltafin.text.tokenizer import K3Tokenizer

# In these tests ⟨tag …⟩ opens and ⟨/tag⟩ closes an element with special ids; ■ ends the message. All else is ordinary.
END = "⟨/response⟩⟨/message⟩■"


def tokens(tok: K3Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    for piece in (
        text.replace("⟨/", "\0</\0").replace("⟨", "\0<\0").replace("⟩", "\0>\0").replace("■", "\0.\0").split("\0")
    ):
        name = {"<": "<|open|>", "</": "<|close|>", ">": "<|sep|>", ".": "<|end_of_msg|>"}.get(piece)
        ids += [tok.special[name]] if name else tok.encode(piece)
    return ids


def parse(tok: K3Tokenizer, text: str, thinking: bool = True) -> Reply:
    return parse_reply(tok, tokens(tok, text), thinking=thinking)


def calls(reply: Reply) -> list[tuple[str, Any]]:
    assert [call.index for call in reply.tool_calls] == list(range(len(reply.tool_calls)))
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


def test_reasoning_then_answer(tok: K3Tokenizer) -> None:
    reply = parse(tok, "… = 36.⟨/think⟩⟨response⟩15% of 240 is 36." + END)
    assert reply == Reply("… = 36.", "15% of 240 is 36.", (), True)


def test_thinking_off(tok: K3Tokenizer) -> None:
    assert parse(tok, "Hi" + END, thinking=False) == Reply("", "Hi", (), True)


def test_oracle_replies(tok: K3Tokenizer, oracle: list[dict[str, Any]]) -> None:
    for prompt in oracle:
        if "messages" not in prompt:
            continue
        thinking = prompt["thinking_effort"] is not None
        reply = parse_reply(tok, prompt["reference"]["ids"], thinking=thinking)
        text = prompt["reference"]["text"]
        if thinking:
            reasoning, text = text.split("<|close|>think<|sep|><|open|>response<|sep|>")
            assert reply.reasoning == reasoning
        assert reply.content == text.split("<|close|>")[0] != ""
        assert reply.complete == text.endswith("<|end_of_msg|>")
        if reply.complete:  # a turn sent back has the ids that were generated
            messages = [*parse_messages(prompt["messages"]), reply.message()]
            options = ChatOptions(effort=prompt["thinking_effort"] or "none")
            sent = prompt["ids"] + prompt["reference"]["ids"]
            assert encode_chat(tok, messages, options)[: len(sent)] == sent


CALL = '⟨call tool="f" index="1"⟩⟨argument key="x" type="number"⟩1⟨/argument⟩⟨/call⟩'


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("never closed", True, ("never closed", "", 0, False)),
        ("never closed■", True, ("never closed", "", 0, True)),
        ("a⟨/think⟩\n\nb", True, ("a", "\n\nb", 0, False)),
        ("a⟨/think⟩\n⟨response⟩b" + END, True, ("a", "b", 0, True)),
        ("a⟨/think⟩\n⟨response⟩b⟨/response⟩ c■", True, ("a", "b c", 0, True)),
        ("a⟨response⟩b" + END, True, ("a", "b", 0, True)),
        (f"a⟨tools⟩{CALL}⟨/tools⟩⟨/message⟩■", True, ("a", "", 1, True)),
        (f"a⟨tools⟩{CALL}⟨/tools⟩b⟨/think⟩⟨response⟩c" + END, True, ("ab", "c", 1, True)),
        (f"a{CALL}b⟨/think⟩⟨response⟩c{END}", True, ("ab", "c", 1, True)),
        (f"a⟨/response⟩⟨tools⟩\n{CALL}\n{CALL}\n⟨/tools⟩⟨/message⟩■", False, ("", "a", 2, True)),
        (f"a⟨tools⟩{CALL}■", False, ("", "a", 1, True)),
        (f"⟨/response⟩⟨tools⟩lost?{CALL}⟨/tools⟩", False, ("", "lost?", 1, False)),
        ("a⟨/think⟩b" + END, False, ("", "ab", 0, True)),
        ("⟨think⟩a⟨/think⟩⟨response⟩b⟨think⟩c⟨response⟩d" + END, False, ("ac", "bd", 0, True)),
        ('⟨message role="assistant"⟩⟨think⟩a⟨/think⟩⟨response⟩b' + END, False, ("a", "b", 0, True)),
        ('a⟨/message⟩⟨message role="user"⟩b', False, ("", "a", 0, True)),
        ("a■b" + END, False, ("", "a", 0, True)),
        ("a⟨/thi", True, ("a", "", 0, False)),
        ("a⟨", True, ("a", "", 0, False)),
        ("a⟨/response■", False, ("", "a", 0, True)),
        ("", True, ("", "", 0, False)),
    ],
)
def test_shapes_of_replies(tok: K3Tokenizer, text: str, thinking: bool, expected: tuple[str, str, int, bool]) -> None:
    reply = parse(tok, text, thinking)
    assert (reply.reasoning, reply.content, len(reply.tool_calls), reply.complete) == expected
    assert calls(reply) == [("f", {"x": 1})] * expected[2]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a⟨b⟩c" + END, "a<|open|>b<|sep|>c"),
        ("a⟨/b⟩c" + END, "a<|close|>b<|sep|>c"),
        ("a⟨⟩c" + END, "a<|open|><|sep|>c"),
        ("a⟩c" + END, "a<|sep|>c"),
        ("a⟨/resp⟨/response⟩■", "a<|close|>resp"),
        ('⟨argument key="x"⟩1⟨/argument⟩' + END, '<|open|>argument key="x"<|sep|>1<|close|>argument<|sep|>'),
        ("<|close|>response<|sep|>" + END, "<|close|>response<|sep|>"),
        ("a⟨" + "b" * (MAX_MARKER_BYTES + 10) + "c" + END, "a<|open|>" + "b" * (MAX_MARKER_BYTES + 10) + "c"),
    ],
)
def test_what_is_no_marker_is_text(tok: K3Tokenizer, text: str, content: str) -> None:
    assert parse(tok, text, thinking=False).content == content


def test_other_special_ids_are_text(tok: K3Tokenizer) -> None:
    ids = [tok.special["[PAD]"], tok.special["<|open|>"], tok.special["<|media_pad|>"], *tokens(tok, "x" + END)]
    assert parse_reply(tok, ids, thinking=False).content == "[PAD]<|open|><|media_pad|>x"


def test_a_special_id_inside_a_marker_makes_it_text(tok: K3Tokenizer) -> None:
    ids = [*tokens(tok, '⟨call tool="'), tok.special["[PAD]"], *tokens(tok, '"⟩⟨/call⟩x' + END)]
    assert parse_reply(tok, ids, thinking=False) == Reply("", '<|open|>call tool="[PAD]"<|sep|>x', (), True)


def test_a_damaged_stream_is_text_at_once(tok: K3Tokenizer) -> None:
    parser = ReplyParser(tok, thinking=False)
    assert parser.feed(tokens(tok, "⟨" + "b" * MAX_MARKER_BYTES)) == []
    assert parser.feed(tok.encode("b")) != []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", {}),
        ("\n", {}),
        ('⟨argument key="a" type="string"⟩⟨/argument⟩', {"a": ""}),
        ('⟨argument key="a" type="string"⟩line\n"two"\\⟨/argument⟩', {"a": 'line\n"two"\\'}),
        ('⟨argument key="a" type="string"⟩{"no": "json"}⟨/argument⟩', {"a": '{"no": "json"}'}),
        ('⟨argument key="a" type="string"⟩<|close|>argument<|sep|>⟨/argument⟩', {"a": "<|close|>argument<|sep|>"}),
        ('⟨argument key="a" type="string"⟩x⟨/b⟩y⟨/argument⟩', {"a": "x<|close|>b<|sep|>y"}),
        ('⟨argument key="a" type="array"⟩\n["x\ny"]⟨/argument⟩', {"a": ["x\ny"]}),
        ('⟨argument key="a" type="object"⟩{"b":\n{"c": null}}\n⟨/argument⟩', {"a": {"b": {"c": None}}}),
        ('⟨argument key="a" type="number"⟩twelve⟨/argument⟩', {"a": "twelve"}),
        ('⟨argument key="a" type="number"⟩NaN⟨/argument⟩', {"a": "NaN"}),
        ('⟨argument key="a" type="array"⟩' + "[" * 20_000 + "⟨/argument⟩", {"a": "[" * 20_000}),
        ('⟨argument key="a"⟩true⟨/argument⟩', {"a": True}),
        ('⟨argument key="&quot;&amp;amp;" type="null"⟩null⟨/argument⟩', {'"&amp;': None}),
        ('⟨argument key="a" type="number"⟩1⟨argument key="b" type="number"⟩2', {"a": 1, "b": 2}),
        ('⟨argument key="a" type="number"⟩1⟨/argument⟩⟨argument key="a" type="number"⟩2⟨/argument⟩', {"a": 2}),
        ('⟨argument type="number"⟩1⟨/argument⟩', {}),
        ('⟨json type="object"⟩{"a": [1]}⟨/json⟩', {"a": [1]}),
        ('⟨json type="object"⟩⟨/json⟩', {}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_arguments(tok: K3Tokenizer, body: str, expected: dict[str, Any]) -> None:
    reply = parse(tok, f'⟨/response⟩⟨tools⟩⟨call tool="f.g" index="7"⟩{body}⟨/call⟩⟨/tools⟩⟨/message⟩■', thinking=False)
    assert calls(reply) == [("f.g", expected)]
    assert reply.content == ""


def test_numbers_keep_their_spelling(tok: K3Tokenizer) -> None:
    body = '⟨call tool="f"⟩⟨argument key="a" type="number"⟩1.50e3⟨/argument⟩⟨/call⟩'
    assert parse(tok, body).tool_calls[0].arguments == '{"a": 1.50e3}'


def test_arguments_that_are_no_json_are_handed_over_as_they_are(tok: K3Tokenizer) -> None:
    reply = parse(tok, '⟨call tool="f" index="1"⟩⟨json type="object"⟩{"a": ⟨/json⟩⟨/call⟩')
    assert reply.tool_calls == (ToolCall(0, "f", '{"a": '),)


@pytest.mark.parametrize("opening", ["call", 'call tool=""', 'call index="1"', "call tool=f"])
def test_a_call_without_a_name_is_dropped(tok: K3Tokenizer, opening: str) -> None:
    reply = parse(tok, f'⟨tools⟩⟨{opening}⟩⟨argument key="x"⟩1⟨/argument⟩⟨/call⟩{CALL}⟨/tools⟩')
    assert calls(reply) == [("f", {"x": 1})]


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_unfinished_call_is_dropped(tok: K3Tokenizer, cut: int) -> None:
    ids = tokens(tok, f"a⟨/think⟩⟨tools⟩{CALL}{CALL}")
    reply = parse_reply(tok, ids[:-cut], thinking=True)
    assert (reply.reasoning, reply.content, len(reply.tool_calls)) == ("a", "", 1)


def test_half_a_character_ends_with_its_element(tok: K3Tokenizer) -> None:
    half = next(i for i in range(tok.vocab_size) if tok.token_bytes(i) == b"\xe2")
    assert parse_reply(tok, [half, *tokens(tok, "⟨/think⟩b")], thinking=True) == Reply("\ufffd", "b", (), False)
    assert parse_reply(tok, [half], thinking=True).reasoning == "\ufffd"


def test_unknown_id(tok: K3Tokenizer) -> None:
    with pytest.raises(InputError):
        parse_reply(tok, [6144], thinking=True)


def joined(events: list[Event]) -> list[Any]:
    out: list[Any] = []
    for kind, group in groupby(events, type):
        items = list(group)
        out += items if kind is ToolCall else [(kind, "".join(e.text for e in items if not isinstance(e, ToolCall)))]
    return out


PIECES = [
    *[
        "⟨think⟩",
        "⟨/think⟩",
        "⟨response⟩",
        "⟨/response⟩",
        "⟨tools⟩",
        "⟨/tools⟩",
        '⟨call tool="f.g" index="1"⟩',
        "⟨/call⟩",
    ],
    *['⟨argument key="k" type="string"⟩', '⟨argument key="n" type="number"⟩', "⟨/argument⟩", '⟨json type="object"⟩'],
    *[
        "⟨/json⟩",
        "⟨/message⟩",
        "⟨",
        "⟩",
        "⟨/",
        "■",
        "text",
        " ",
        "\n",
        "1",
        "{}",
        "👩‍💻",
        "e\u0301",
        "漢字",
        "<|open|>",
        "call",
    ],
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25), thinking=st.booleans(), data=st.data())
def test_any_split_gives_the_same_events(
    tok: K3Tokenizer, pieces: list[str], thinking: bool, data: st.DataObject
) -> None:
    ids = [i for piece in pieces for i in tokens(tok, piece)]
    whole = ReplyParser(tok, thinking=thinking)
    expected = joined([*whole.feed(ids), *whole.finish()])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    for bounds in ([0, *cuts, len(ids)], list(range(len(ids) + 1))):
        parser = ReplyParser(tok, thinking=thinking)
        events = [e for a, b in pairwise(bounds) for e in parser.feed(ids[a:b])]
        assert joined([*events, *parser.finish()]) == expected
        assert parser.complete == whole.complete
    assert all(e.text for e in events if isinstance(e, Reasoning | Content))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
not_blank = st.text(max_size=20).filter(lambda text: text.strip() != "")
names = st.text('abcXYZ019._-&"é =\n<|>', min_size=1, max_size=12)
raw_arguments = st.sampled_from(["{", "not <|close|> json", '{"a": 1', "x\n"])
turns = st.builds(
    lambda reasoning, content, called: {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in called],
    },
    st.just("") | not_blank,
    st.text(max_size=20),
    st.lists(st.tuples(names, raw_arguments | st.dictionaries(names, json_values)), max_size=3),
)


@given(turn=turns, thinking=st.booleans())
def test_a_rendered_turn_is_parsed_back(tok: K3Tokenizer, turn: dict[str, Any], thinking: bool) -> None:
    options = ChatOptions(effort="low" if thinking else "none")
    prompt = encode_chat(tok, [UserMessage(content="x")], options)
    [message] = parse_messages([turn])
    assert isinstance(message, AssistantMessage)
    ids = encode_chat(tok, [UserMessage(content="x"), message], options)[len(prompt) :]
    generated = ids[: ids.index(tok.special["<|end_of_msg|>"]) + 1]
    reply = parse_reply(tok, generated, thinking=thinking)
    assert reply.complete
    assert reply.reasoning == (turn["reasoning_content"] if thinking else "")
    assert reply.content == turn["content"]
    got = [(call.name, call.arguments) for call in reply.tool_calls]
    for (name, arguments), sent in zip(got, turn["tool_calls"], strict=True):
        assert name == sent["function"]["name"]
        wanted = sent["function"]["arguments"]
        assert (arguments if isinstance(wanted, str) else json.loads(arguments)) == wanted
    # And sent back, the parsed reply renders to the ids it was parsed from.
    again = encode_chat(tok, [UserMessage(content="x"), reply.message()], options)
    assert again[len(prompt) :][: len(generated)] == generated
