from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.errors import InputError
from deltafin.text.stream import StreamingDetokenizer
from deltafin.text.tokenizer import K3Tokenizer


def stream(tok: K3Tokenizer, groups: list[list[int]]) -> list[str]:
    detokenizer = StreamingDetokenizer(tok)
    return [*map(detokenizer.feed, groups), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 6143), max_size=60), data=st.data())
def test_any_ids_in_any_split_give_the_one_shot_text(tok: K3Tokenizer, ids: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(stream(tok, groups)) == tok.decode(ids)


@pytest.mark.parametrize("text", ["👩‍💻👨‍👩‍👧‍👦🏳️‍🌈", "e\u0301\u0323 a\u0308", "漢字かな交じり文", "ᚠᛇᚻ🙂x", "plain"])
def test_characters_split_over_tokens_arrive_whole(tok: K3Tokenizer, text: str) -> None:
    single = {tok.token_bytes(i): i for i in range(tok.first_special)}
    ids = [single[bytes([byte])] for byte in text.encode()]
    pieces = stream(tok, [[i] for i in ids])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_replaced_once_and_forgotten(tok: K3Tokenizer) -> None:
    first = next(i for i in range(tok.vocab_size) if tok.token_bytes(i) == b"\xf0")
    detokenizer = StreamingDetokenizer(tok)
    assert detokenizer.feed([first]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.feed(tok.encode("next")) == "next"
    assert detokenizer.flush() == ""


def test_unknown_id(tok: K3Tokenizer) -> None:
    with pytest.raises(InputError):
        StreamingDetokenizer(tok).feed([6144])


def test_oracle_replies(tok: K3Tokenizer, oracle: list[dict[str, Any]]) -> None:
    for prompt in oracle:
        ids = prompt["reference"]["ids"]
        assert "".join(stream(tok, [[i] for i in ids])) == prompt["reference"]["text"]
