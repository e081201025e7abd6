"""On one machine MLX gives the same bits whatever moves the bytes, and however positions are grouped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bits import Trace, greedy
from conftest import in_place, striped
from deltafin.apple import probe, rows
from deltafin.errors import MemoryBudgetError
from deltafin.generation import engine as engine_module
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.store.store import Store

from .conftest import options

NEW = 10


@pytest.fixture(scope="module")
def cases(prompts: list[dict[str, Any]]) -> list[list[int]]:
    chat = next(p["ids"] for p in prompts if p["kind"] == "chat")[:30]
    return [chat, max((p["ids"] for p in prompts), key=len)[:70]]


@pytest.fixture(scope="module")
def baseline(mini_store: Path, cases: list[list[int]]) -> list[Trace]:
    return traces(mini_store, cases, options())


def traces(home: Path, cases: list[list[int]], chosen: EngineOptions, **how: int) -> list[Trace]:
    with Engine.open(home, chosen) as engine:
        return [greedy(engine, ids, NEW, **how) for ids in cases]


def test_the_traces_tell_different_computations_apart(
    mini_store: Path, cases: list[list[int]], baseline: list[Trace]
) -> None:
    assert len({t.digest for t in baseline}) == len(baseline)
    other = traces(mini_store, cases, options(precision="fp32"))
    assert all(a.digest != b.digest for a, b in zip(other, baseline, strict=True))


@pytest.mark.parametrize("weights", [(1.0,), (5.0, 1.0, 2.5)])
def test_any_number_of_unequal_drives(
    weights: tuple[float, ...], mini_target: Path, tmp_path: Path, cases: list[list[int]], baseline: list[Trace]
) -> None:
    assert traces(striped(mini_target, tmp_path, weights), cases, options()) == baseline


def test_in_place(mini_target: Path, tmp_path: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    assert traces(in_place(mini_target, tmp_path / "home"), cases, options()) == baseline


@pytest.mark.parametrize("tier", [0, 1, 100])
def test_any_number_of_experts_kept(tier: int, mini_store: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    assert traces(mini_store, cases, options(tier=tier)) == baseline


@pytest.mark.parametrize("chunk", [1, 7])
def test_any_prefill_chunk(chunk: int, mini_store: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    assert traces(mini_store, cases, options(), chunk=chunk) == baseline


@pytest.mark.parametrize("width", [2, 8])
@pytest.mark.parametrize("mode", ["together", "tiles", "alone"])
def test_positions_verified_together(
    width: int, mode: rows.Mode, mini_store: Path, cases: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "choose", lambda *_: mode)
    with Engine.open(mini_store, options()) as engine:
        single = greedy(engine, cases[0], NEW)
        assert greedy(engine, cases[0], NEW, width=width) == single
        assert greedy(engine, cases[0], NEW, chunk=5) == single


def test_a_streamed_spine(
    mini_store: Path, cases: list[list[int]], baseline: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unit is resident, and the two buffers are read into again and again."""
    planned = engine_module.plan_with_draft

    def nothing_resident(store: Store, chosen: EngineOptions) -> Any:
        plan, found, status = planned(store, chosen)
        largest = max(store.spine_unit(key).plan.buffer_bytes for key in store.spine_keys if key != "embed")
        return replace(plan, resident_units=frozenset(), stream_buffers=(2, largest)), found, status

    monkeypatch.setattr(engine_module, "plan_with_draft", nothing_resident)
    with Engine.open(mini_store, options()) as engine:
        assert [greedy(engine, ids, NEW) for ids in cases] == baseline
        assert engine.spine.stats.read_bytes > 100 << 20


def test_a_small_memory_budget(mini_store: Path, cases: list[list[int]], baseline: list[Trace]) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        Engine.open(mini_store, options(ram=1))
    match = re.search(r"at least ([\d,]+) MiB", refused.value.remedy)
    assert match
    # Room for what the process itself takes between the two openings.
    ram = (int(match[1].replace(",", "")) + 48) << 20
    assert traces(mini_store, cases, options(ram=ram)) == baseline


@pytest.mark.parametrize("kept", [0, 1, 5, 8])
@pytest.mark.parametrize("mode", ["together", "alone"])
def test_a_partial_commit_equals_having_computed_only_that_part(
    kept: int, mode: rows.Mode, mini_store: Path, cases: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "choose", lambda *_: mode)
    prompt, block = cases[1][:40], cases[1][40:48]
    with Engine.open(mini_store, options()) as engine:
        mixed, plain = (engine.backend.state(engine.config, 256) for _ in range(2))
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
        after = [engine.target.forward(cases[1][60:63], s) for s in (mixed, plain)]
        assert after[0].tobytes() == after[1].tobytes()
