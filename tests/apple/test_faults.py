"""A stop or a fault in the middle costs the pass and nothing else, as on the other backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bits import greedy
from deltafin.errors import SliceCorruptError
from deltafin.generation.engine import Engine
from deltafin.generation.events import Finished, TokenDecided

from .conftest import options


@pytest.fixture(scope="module")
def engine(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, options(tier=0)) as opened:
        yield opened


def test_a_stop_at_any_moment_leaves_the_session_usable(engine: Engine, prompts: list[dict[str, Any]]) -> None:
    ids = prompts[0]["ids"][:12]
    undisturbed = list(engine.session().generate(ids, max_new=4, stop=[]))
    expected = [e.token for e in undisturbed if isinstance(e, TokenDecided)]
    for moment in range(0, len(undisturbed) - 2, 2):
        session = engine.session()
        seen = []
        for event in session.generate(ids, max_new=4, stop=[]):
            if len(seen) == moment:
                engine.stop.set()
            seen.append(event)
        assert isinstance(seen[-1], Finished)
        assert seen[-1].reason == "interrupted"
        again = list(session.generate(ids, max_new=4, stop=[]))
        assert [e.token for e in again if isinstance(e, TokenDecided)] == expected
    assert not engine.experts._leased


def test_a_flipped_bit_is_named_and_costs_only_the_pass(
    engine: Engine, prompts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    ids = prompts[0]["ids"][:12]
    wanted = greedy(engine, ids, 4)
    session = engine.session()
    real = os.preadv

    def flipping(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        got = real(fd, buffers, offset)
        buffers[0][got // 2] ^= 1
        return got

    monkeypatch.setattr(os, "preadv", flipping)
    with pytest.raises(SliceCorruptError):
        list(session.generate(ids, max_new=4, stop=[]))
    monkeypatch.setattr(os, "preadv", real)
    events = list(session.generate(ids, max_new=4, stop=[]))
    assert [e.token for e in events if isinstance(e, TokenDecided)] == list(wanted.tokens)
    assert greedy(engine, ids, 4) == wanted
