"""Same bits whatever moves the bytes: drives, layouts, threads, memory, chunks, and how many positions are verified."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # of the PyTorch backend; tests/apple has the like for MLX

from bits import Trace, greedy
from conftest import in_place, striped
from deltafin.errors import MemoryBudgetError
from deltafin.generation.engine import Engine, EngineOptions

NEW = 24


@pytest.fixture(scope="module")
def cases(prompts: list[dict[str, Any]]) -> list[list[int]]:
    """A short chat, a raw text, and a long conversation cut to 180 tokens."""
    chat = next(p["ids"] for p in prompts if p["kind"] == "chat")
    raw = next(p["ids"] for p in prompts if p["kind"] != "chat")
    long = max((p["ids"] for p in prompts), key=len)[:180]
    return [chat, raw, long]


@pytest.fixture(scope="module")
def baseline(mini_store: Path, cases: list[list[int]]) -> list[Trace]:
    with Engine.open(mini_store, EngineOptions(threads=1, context=1024)) as engine:
        return [greedy(engine, ids, NEW) for ids in cases]


def traces(home: Path, cases: list[list[int]], options: EngineOptions, **how: int) -> list[Trace]:
    with Engine.open(home, options) as engine:
        return [greedy(engine, ids, NEW, **how) for ids in cases]


def smallest_ram(home: Path) -> int:
    """Bytes of the smallest budget the plan accepts in this process."""
    with pytest.raises(MemoryBudgetError) as refused:
        Engine.open(home, EngineOptions(ram=1, context=1024))
    match = re.search(r"at least ([\d,]+) MiB", refused.value.remedy)
    assert match
    return (int(match[1].replace(",", "")) + 4) << 20


def test_the_traces_tell_different_computations_apart(baseline: list[Trace]) -> None:
    assert len({t.digest for t in baseline}) == len(baseline)


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (1.0, 2.5, 0.7), (5.0, 1.0, 1.0, 3.0, 0.5)])
def test_any_number_of_unequal_drives(
    weights: tuple[float, ...], mini_target: Path, tmp_path: Path, cases: list[list[int]], baseline: list[Trace]
) -> None:
    home = striped(mini_target, tmp_path, weights)
    assert traces(home, cases, EngineOptions(context=1024)) == baseline


def test_in_place(mini_target: Path, tmp_path: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    assert traces(in_place(mini_target, tmp_path / "home"), cases, EngineOptions(context=1024)) == baseline


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads(threads: int, mini_store: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    assert traces(mini_store, cases, EngineOptions(threads=threads, context=1024)) == baseline


@pytest.mark.parametrize("extra", [0, 6 << 20, 16 << 20, 40 << 20])
def test_any_memory_budget(extra: int, mini_store: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    options = EngineOptions(ram=smallest_ram(mini_store) + extra, context=1024)
    with Engine.open(mini_store, options) as engine:
        if not extra:
            assert engine.plan.streamed_bytes > 0
        assert [greedy(engine, ids, NEW) for ids in cases] == baseline


@pytest.mark.parametrize("tier", [0, 1, 100])
def test_any_number_of_experts_kept(tier: int, mini_store: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    assert traces(mini_store, cases, EngineOptions(tier=tier, context=1024)) == baseline


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_any_prefill_chunk(chunk: int, mini_store: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    assert traces(mini_store, cases, EngineOptions(context=1024), chunk=chunk) == baseline


@pytest.mark.parametrize("width", [2, 8])
def test_positions_verified_together(
    width: int, mini_store: Path, cases: list[list[int]], baseline: list[Trace]
) -> None:
    assert traces(mini_store, cases, EngineOptions(context=1024), width=width) == baseline


@pytest.fixture(scope="module")
def engine(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, EngineOptions(context=1024)) as opened:
        yield opened


@pytest.mark.parametrize("kept", [0, 1, 3, 7, 8])
def test_a_partial_commit_equals_having_computed_only_that_part(
    kept: int, engine: Engine, cases: list[list[int]]
) -> None:
    from deltafin.model.state import SequenceState

    prompt, block = cases[2][:40], cases[2][40:48]
    mixed, plain = (SequenceState.empty(engine.config, 256) for _ in range(2))
    for state in (mixed, plain):
        engine.target.forward(prompt, state)
        state.commit(len(prompt))
    engine.target.forward(block, mixed, partial=True)
    mixed.commit(kept)
    for token in block[:kept]:
        engine.target.forward([token], plain)
        plain.commit(1)
    assert mixed.position == plain.position == len(prompt) + kept
    for (name, a), (_, b) in zip(mixed.tensors(), plain.tensors(), strict=True):
        assert a.tobytes() == b.tobytes(), name
    after = [engine.target.forward(cases[2][60:63], s) for s in (mixed, plain)]
    assert after[0].tobytes() == after[1].tobytes()
