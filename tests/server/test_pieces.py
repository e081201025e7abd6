"""Replies cut into tokens at the worst places, and stop texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.generation.events import TokenDecided, TokenLogprobs
from deltafin.server.pieces import Assembler, Call, StopScanner, Text
from deltafin.text.chat import Segment, render
from deltafin.text.messages import parse_messages
from deltafin.text.tokenizer import CLOSE, OPEN, SEP, K3Tokenizer

FAMILY = "👩‍👩‍👧‍👦"
TEXTS = [FAMILY, "é̂ñ̃", "漢字かな交じり文", "𝒳𝔘 🇳🇴", "a\u200db", "‮right to left"]


@pytest.fixture(scope="module")
def tok(mini_target: Path) -> K3Tokenizer:
    return K3Tokenizer.load(mini_target)


def by_byte(tok: K3Tokenizer, text: str) -> list[int]:
    """The worst tokens a text can have: one for every byte."""
    single = {tok.token_bytes(i): i for i in range(tok.first_special) if len(tok.token_bytes(i)) == 1}
    return [single[bytes([b])] for b in text.encode()]


def run(
    tok: K3Tokenizer, ids: list[int], thinking: bool | None, stops: tuple[str, ...] = ()
) -> tuple[list[Any], Assembler]:
    assembler = Assembler(tok, thinking=thinking, stops=stops, report=True)
    pieces: list[Any] = []
    for n, i in enumerate(ids):
        pieces += assembler.feed(TokenDecided(i, n, 0.0, 0.0, False, TokenLogprobs(-0.5, ((i, -0.5),))))
    return pieces + assembler.finish(), assembler


def joined(pieces: list[Any], kind: str) -> str:
    return "".join(p.text for p in pieces if isinstance(p, Text) and p.kind == kind)


def marker(tok: K3Tokenizer, name: str, tag: str) -> list[int]:
    return [tok.special[name], *by_byte(tok, tag), tok.special[SEP]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("thinking", [None, False])
def test_characters_split_over_tokens(tok: K3Tokenizer, text: str, thinking: bool | None) -> None:
    for ids in (by_byte(tok, text), tok.encode(text)):
        pieces, _ = run(tok, ids, thinking)
        assert joined(pieces, "content") == text
        assert all("�" not in p.text for p in pieces)
        assert b"".join(r.token for p in pieces for r in p.logprobs) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_text_in_the_middle_of_what_tokens_split(tok: K3Tokenizer, text: str) -> None:
    for at in range(len(text)):
        for ids in (by_byte(tok, "xy" + text + "z"), tok.encode("xy" + text + "z")):
            pieces, assembler = run(tok, ids, False, (text[at], "never"))
            assert joined(pieces, "content") == ("xy" + text).split(text[at])[0]
            assert assembler.stopped


def test_half_a_character_at_the_end(tok: K3Tokenizer) -> None:
    pieces, _ = run(tok, by_byte(tok, "ab" + FAMILY)[:-2], False)
    assert joined(pieces, "content").endswith("�")
    assert sum(len(p.logprobs) for p in pieces) == len(("ab" + FAMILY).encode()) - 2


def test_reasoning_content_calls_and_log_probabilities(tok: K3Tokenizer) -> None:
    call = {"function": {"name": "a.b", "arguments": '{"x": "1\\n2", "y": {}}'}}
    message = {
        "role": "assistant",
        "reasoning_content": "r" + FAMILY,
        "content": "c" + FAMILY,
        "tool_calls": [call, call],
    }
    segments = render([*parse_messages([{"role": "user", "content": "q"}, message])])
    starts = [i for i, s in enumerate(segments) if s == Segment("think", False) and segments[i - 1].text == OPEN]
    start = starts[-2]  # the last one opens the next turn
    body = segments[start + 2 :]
    end = next(i for i, s in enumerate(body) if s.text == "<|end_of_msg|>")
    ids: list[int] = []
    for text, special in body[: end + 1]:
        ids += tok.encode(text, allow_special=True) if special else by_byte(tok, text)
    pieces, assembler = run(tok, ids, True)
    assert joined(pieces, "reasoning") == "r" + FAMILY
    assert joined(pieces, "content") == "c" + FAMILY
    assert [p for p in pieces if isinstance(p, Call)] == [Call(n, "a.b", '{"x": "1\\n2", "y": {}}') for n in range(2)]
    assert assembler.complete
    assert assembler.calls == 2
    assert assembler.reasoning_tokens >= len(("r" + FAMILY).encode())
    # Structure is no content: only the content's own tokens are reported.
    reports = [r for p in pieces if isinstance(p, Text) for r in p.logprobs]
    assert b"".join(r.token for r in reports) == ("c" + FAMILY).encode()


def test_a_call_inside_thinking(tok: K3Tokenizer) -> None:
    ids = by_byte(tok, "hm ")
    ids += marker(tok, OPEN, "tools") + marker(tok, OPEN, 'call tool="f" index="1"') + marker(tok, CLOSE, "call")
    ids += marker(tok, CLOSE, "tools") + by_byte(tok, "more") + marker(tok, CLOSE, "think")
    ids += marker(tok, OPEN, "response") + by_byte(tok, "done")
    pieces, assembler = run(tok, ids, True)
    assert [p for p in pieces if isinstance(p, Call)] == [Call(0, "f", "{}")]
    assert joined(pieces, "reasoning") == "hm more"
    assert joined(pieces, "content") == "done"
    assert not assembler.complete


def test_what_only_looks_like_structure_is_reported_as_content(tok: K3Tokenizer) -> None:
    ids = by_byte(tok, "a") + marker(tok, OPEN, "banana") + by_byte(tok, "b")
    pieces, _ = run(tok, ids, False)
    text = joined(pieces, "content")
    assert text == "a<|open|>banana<|sep|>b"
    assert b"".join(r.token for p in pieces for r in p.logprobs).decode() == text


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the stop that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
)
def test_stop_texts_do_not_depend_on_how_the_text_arrives(parts: list[str], stops: list[str]) -> None:
    scanner = StopScanner(tuple(stops))
    out = ""
    for part in parts:
        out += scanner.feed(part)
        assert "".join(parts).startswith(out)
    if not scanner.hit:
        out += scanner.flush()
    assert (out, scanner.hit) == reference("".join(parts), tuple(stops))
