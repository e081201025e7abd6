"""A failed or stopped pass costs that pass and nothing else; a chunk reads no expert twice."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bits import greedy
from deltafin.errors import ReadError, SliceError
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import Finished, TokenDecided
from deltafin.model.state import SequenceState

REAL_PREADV = os.preadv


@pytest.fixture
def engine(mini_store: Path) -> Iterator[Engine]:
    # No expert is kept, so that every pass reads.
    with Engine.open(mini_store, EngineOptions(context=1024, tier=0)) as opened:
        yield opened


def distinct_experts(engine: Engine) -> int:
    return sum(len(set(ids.reshape(-1).tolist())) for ids in engine.target.routes)


@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_a_chunk_reads_each_needed_expert_once(engine: Engine, prompts: list[dict[str, Any]], rows: int) -> None:
    ids = max((p["ids"] for p in prompts), key=len)[:rows]
    before = engine.experts.stats.reads
    engine.target.forward(ids, SequenceState.empty(engine.config, 512), logits="last")
    assert engine.experts.stats.reads - before == distinct_experts(engine)


def test_an_io_error_at_any_read_loses_only_the_pass(
    engine: Engine, prompts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompts[0]["ids"]
    expected = greedy(engine, ids, 8)
    rng = random.Random(7)
    session = engine.session()
    failures = 0
    for _ in range(12):
        countdown = rng.randrange(1, 400)

        def failing(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            nonlocal countdown
            countdown -= 1
            # Persistent from here on: the reader's own retries must not hide it.
            if countdown <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return REAL_PREADV(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", failing)
        error = None
        try:
            list(session.generate(ids, max_new=8, stop=[]))
        except ReadError as e:
            error = e
        if error is not None:
            failures += 1
            assert "layer" in error.message or "expert" in error.message
            assert error.remedy
        monkeypatch.setattr(os, "preadv", REAL_PREADV)
        events = list(session.generate(ids, max_new=8, stop=[]))
        assert [e.token for e in events if isinstance(e, TokenDecided)] == list(expected.tokens)
    assert failures >= 6
    assert greedy(engine, ids, 8) == expected


def test_a_stop_at_any_moment_leaves_the_session_usable(engine: Engine, prompts: list[dict[str, Any]]) -> None:
    ids = prompts[0]["ids"]
    undisturbed = list(engine.session().generate(ids, max_new=8, stop=[]))
    expected = [e.token for e in undisturbed if isinstance(e, TokenDecided)]
    for moment in range(len(undisturbed) - 2):
        session = engine.session()
        seen = []
        for event in session.generate(ids, max_new=8, stop=[]):
            if len(seen) == moment:
                engine.stop.set()
            seen.append(event)
        last = seen[-1]
        assert isinstance(last, Finished)
        assert last.reason == "interrupted"
        decided = [e.token for e in seen if isinstance(e, TokenDecided)]
        assert decided == expected[: len(decided)]
        again = list(session.generate(ids, max_new=8, stop=[]))
        assert [e.token for e in again if isinstance(e, TokenDecided)] == expected


def test_a_stop_that_comes_too_late_does_not_end_the_next_generation(
    engine: Engine, prompts: list[dict[str, Any]]
) -> None:
    session = engine.session()
    list(session.generate(prompts[0]["ids"], max_new=2, stop=[]))
    engine.stop.set()
    last = list(session.generate(prompts[0]["ids"], max_new=2, stop=[]))[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length"


def test_a_consumer_that_stops_listening_leaves_the_session_usable(
    engine: Engine, prompts: list[dict[str, Any]]
) -> None:
    ids = prompts[0]["ids"]
    expected = list(greedy(engine, ids, 8).tokens)
    for cut in range(1, 18):
        session = engine.session()
        events = session.generate(ids, max_new=8, stop=[])
        list(islice(events, cut))
        events.close()  # type: ignore[attr-defined]
        whole = list(session.generate(ids, max_new=8, stop=[]))
        assert [e.token for e in whole if isinstance(e, TokenDecided)] == expected


def test_a_continued_conversation_processes_only_what_is_new(engine: Engine, prompts: list[dict[str, Any]]) -> None:
    ids = prompts[0]["ids"]
    session = engine.session()
    first = [e.token for e in session.generate(ids, max_new=6, stop=[]) if isinstance(e, TokenDecided)]
    longer = [*ids, *first, *prompts[1]["ids"]]
    events = list(session.generate(longer, max_new=6, stop=[]))
    last = events[-1]
    assert isinstance(last, Finished)
    # All but the pending last token of the first reply had been committed.
    assert last.stats.prefill.tokens == len(prompts[1]["ids"]) + 1
    assert [e.token for e in events if isinstance(e, TokenDecided)] == list(greedy(engine, longer, 6).tokens)


def test_missing_bytes_are_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(SliceError) as failed:
        list(engine.session().generate([5, 6, 7], max_new=2, stop=[]))
    assert str(engine.store.drives[0].path.parent) in failed.value.message
