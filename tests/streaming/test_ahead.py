"""Reading ahead, keeping, giving back: whatever moves bytes or memory, the bits stay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafin.errors import SliceCorruptError
from deltafin.generation.engine import Engine, EngineOptions, heat_file
from deltafin.history import heat
from deltafin.history.trace import read_trace
from deltafin.model.state import SequenceState
from deltafin.residency.prefetch import PrefetchPolicy
from deltafin.store.types import ReadCancelled
from deltafin.streaming.experts import ExpertStream

NEW = 12


def run(engine: Engine, prompt: list[int], *, between: Any = None) -> tuple[list[int], bytes]:
    """Prompt, then decoding, with everything a session tells the engine; tokens and the bits of all logits."""
    state = SequenceState.empty(engine.config, engine.plan.context)
    tokens, bits = list(prompt), b""
    pending = list(prompt)
    for _ in range(NEW):
        logits = engine.target.forward(pending, state)
        state.commit(len(pending))
        engine.observe(len(pending))
        bits += logits.tobytes()
        pending = [int(np.argmax(logits[-1]))]
        tokens += pending
        if between:
            between(engine)
    return tokens, bits


@pytest.fixture(scope="module")
def prompt(prompts: list[dict[str, Any]]) -> list[int]:
    return prompts[0]["ids"][:40]


@pytest.fixture(scope="module")
def plain(mini_store: Path, prompt: list[int]) -> tuple[list[int], bytes]:
    with Engine.open(mini_store, EngineOptions(context=256, tier=0, prefetch=False)) as engine:
        return run(engine, prompt)


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is thought worth reading, whatever it costs."""
    monkeypatch.setattr(PrefetchPolicy, "worth_predicting", lambda *_, **__: True)
    monkeypatch.setattr(
        PrefetchPolicy,
        "plan",
        lambda self, layer, guesses, *_, **__: [e for ranked in guesses.values() for e in ranked],
    )


@pytest.mark.parametrize("tier", [0, 5, 60, 400, 1024])
def test_with_the_routers_guesses(
    tier: int, mini_store: Path, prompt: list[int], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch)
    with Engine.open(mini_store, EngineOptions(context=256, tier=tier)) as engine:
        assert run(engine, prompt) == plain
        if tier < 400:
            assert engine.experts.stats.ahead_used > NEW
        _nothing_is_lost(engine.experts)


def _nothing_is_lost(stream: ExpertStream) -> None:
    """Every frame is free, kept, ready or being read into."""
    stream._abandon_ahead(())
    for flight in list(stream._flights.values()):
        flight.wanted = False
    while stream._flights:
        stream._land(stream._arrivals.get(timeout=10))
    frames = [*stream._arena.free, *(lease.frame for lease in stream._kept.values()), *stream._arena._retired]
    assert sorted(frames) == list(range(len(frames)))


@pytest.mark.parametrize("seed", range(4))
def test_with_guesses_that_are_always_wrong_or_random(
    seed: int, mini_store: Path, prompt: list[int], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch)
    chance = random.Random(seed)
    for name in ("look_ahead", "look_again"):
        look = getattr(ExpertStream, name)

        def mislead(self: ExpertStream, layer: int, predict: Any, *, look: Any = look, **long: bool) -> None:
            def wrong(layer: int) -> list[int]:
                ranked = list(predict(layer) or range(128))
                return ranked[::-1] if seed == 0 else chance.sample(ranked, len(ranked))

            look(self, layer, wrong, **long)

        monkeypatch.setattr(ExpertStream, name, mislead)
    options = EngineOptions(context=256, tier=chance.choice([0, 30, 200]), depth=chance.choice([1, 2, 4]))
    with Engine.open(mini_store, options) as engine:
        assert run(engine, prompt) == plain
        assert engine.experts.stats.ahead_wasted + engine.experts.stats.ahead_cancelled > 0
        _nothing_is_lost(engine.experts)


def test_better_knowledge_takes_back_guesses_that_have_not_begun(
    mini_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch)
    with Engine.open(mini_store, EngineOptions(context=256, tier=0)) as engine:
        stream, layer = engine.experts, engine.config.moe_layers[1]
        started: list[str] = []

        class Ticket:
            def __init__(self, name: str, done: Any) -> None:
                self.name, self.done = name, done
                started.append(name)

            def cancel(self) -> bool:
                if self.name.startswith("expert 2 "):
                    return False  # under way already
                self.done(ReadCancelled(self.name))
                return True

            def abandon(self) -> None:
                self.cancel()

        def submit(plan: Any, buffer: Any, done: Any, **_: Any) -> Ticket:
            return Ticket(plan.name, done)

        monkeypatch.setattr(stream._store.reader, "submit", submit)
        monkeypatch.setattr(stream._model, "likeliest", lambda *_: [])
        stream.look_again(layer, lambda layer: [7])
        assert not started  # nobody looked ahead
        stream.look_ahead(layer, lambda layer: [1, 2, 3])
        stream.look_again(layer, lambda layer: [3, 4])
        assert sorted(stream._flights) == [(layer, 2), (layer, 3), (layer, 4)]
        assert [name.split()[1] for name in started] == ["1", "2", "3", "4"]
        assert stream.stats.ahead_cancelled == 1
        for flight in stream._flights.values():
            flight.ticket.done(None)  # type: ignore[union-attr]
        _nothing_is_lost(stream)


def test_the_routes_of_a_rejected_draft_are_a_guess(
    mini_store: Path, prompt: list[int], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of three rows of which one is kept, again and again: the second row's routes are looked at."""
    monkeypatch.setattr(PrefetchPolicy, "worth_predicting", lambda *_, **__: True)
    with Engine.open(mini_store, EngineOptions(context=256, tier=0)) as engine:
        state = SequenceState.empty(engine.config, engine.plan.context)
        tokens, bits = list(prompt), b""
        pending = list(prompt)
        for _ in range(NEW):
            drafted = [] if pending is prompt or len(pending) > 1 else [7, 8]
            logits = engine.target.forward(pending + drafted, state, partial=bool(drafted))
            state.commit(len(pending))
            engine.observe(len(pending))
            bits += logits[: len(pending)].tobytes()
            pending = [int(np.argmax(logits[len(pending) - 1]))]
            tokens += pending
        assert (tokens, bits) == plain
        seen = {name for layer in engine.experts.prefetch_policy.report() for name in layer}
        assert "rejected draft" in seen
        assert engine.experts._rejected is not None
        assert engine.experts._rejected.shape == (8, 16)


def test_memory_that_comes_and_goes(mini_store: Path, prompt: list[int], plain: Any) -> None:
    sizes = random.Random(1)
    with Engine.open(mini_store, EngineOptions(context=256, tier=300)) as engine:

        def squeeze(engine: Engine) -> None:
            engine.experts.resize_tier(sizes.choice([0, 10, 100, 299, 300]))
            assert engine.experts.tier_used <= engine.experts.tier_capacity
            used = engine.plan.frames.in_flight + engine.experts.tier_capacity
            assert len(engine.experts._arena.free) + engine.experts.tier_used <= used

        assert run(engine, prompt, between=squeeze) == plain
        engine.experts.resize_tier(300)
        _nothing_is_lost(engine.experts)


def test_the_tier_follows_the_machines_free_memory(mini_store: Path, prompt: list[int], plain: Any) -> None:
    free = [1 << 40]
    options = EngineOptions(context=256, tier=300, available=lambda: free[0])
    with Engine.open(mini_store, options) as engine:
        engine._memory._every = 0.0
        engine._memory._next = 0.0
        assert run(engine, prompt) == plain
        full = engine.experts.tier_used
        assert full > 100
        free[0] = engine._memory._reserve - 50 * engine.store.expert_buffer_bytes
        engine.observe(1)
        assert engine.experts.tier_capacity == 250
        free[0] = 0
        assert run(engine, prompt) == plain
        assert engine.experts.tier_used == engine.experts.tier_capacity == 0
        free[0] = 1 << 40
        assert run(engine, prompt) == plain
        assert engine.experts.tier_capacity > 200


@pytest.mark.parametrize("content", [None, b"rubbish", "foreign", "true", "locked"])
def test_any_heat_file(content: Any, mini_store: Path, prompt: list[int], plain: Any, tmp_path: Path) -> None:
    options = EngineOptions(context=256, tier=60, heat=tmp_path)
    with Engine.open(mini_store, EngineOptions(context=256)) as engine:
        path, identity = heat_file(tmp_path, engine.store), engine.store.identity
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content in ("foreign", "true"):
        known = heat.Heat.empty(identity if content == "true" else "another", 8, 128)
        known.add(np.random.default_rng(0).integers(0, 128, (500, 8, 16)))
        heat.merge(path, known)
        if content == "foreign":
            assert heat.load(path, identity, 8, 128).problem
    with heat._locked(path.with_suffix(".lock" if content == "locked" else ".other"), wait=False) as mine:
        assert mine
        with Engine.open(mini_store, options) as engine:
            assert run(engine, prompt) == plain
            assert bool(engine.recorder.problem) == (content in (b"rubbish", "foreign"))
    expected = {"locked": 0, "true": 500 + len(prompt) + NEW - 1}.get(content, len(prompt) + NEW - 1)
    assert heat.load(path, identity, 8, 128).total_tokens == expected


def test_a_trace_holds_the_routes_of_committed_tokens(
    mini_store: Path, prompt: list[int], plain: Any, tmp_path: Path
) -> None:
    with Engine.open(mini_store, EngineOptions(context=256, trace=tmp_path / "t")) as engine:
        assert run(engine, prompt) == plain
        last = np.stack(engine.target.routes, axis=1)
    trace = read_trace(tmp_path / "t")
    assert trace.routes.shape == (len(prompt) + NEW - 1, 8, 16)
    assert (trace.routes[-1] == last[-1]).all()


def test_a_corrupt_expert_read_ahead_is_reported_only_when_it_is_needed(
    mini_target: Path, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conftest import striped

    eager(monkeypatch)
    home = striped(mini_target, tmp_path, (1.0,))
    with Engine.open(home, EngineOptions(context=256, tier=0)) as engine:
        state = SequenceState.empty(engine.config, 256)
        engine.target.forward(prompt, state)
        state.commit(len(prompt))
        engine.target.forward([5], state)
        used = engine.target.routes[3][0].tolist()
        plan = engine.store.expert_plan(4, used[0])
        files = sorted(p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 1 << 20)
        extent = plan.extents[0]
        path = engine.store.reader._paths[extent.file][1]
        assert path in files
        with path.open("r+b") as file:
            file.seek(extent.offset + 100)
            byte = file.read(1)
            file.seek(extent.offset + 100)
            file.write(bytes([byte[0] ^ 1]))
        for _ in range(2):
            with pytest.raises(SliceCorruptError):
                engine.target.forward([5], state)
        _nothing_is_lost(engine.experts)


@pytest.mark.parametrize("tier", [40, 300])
def test_a_long_pass_borrows_from_the_tier(
    tier: int, mini_store: Path, prompts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[int] = []
    lend = ExpertStream._lend

    def watched(self: ExpertStream, wanted: int) -> None:
        lend(self, wanted)
        lent.append(self._lent)

    monkeypatch.setattr(ExpertStream, "_lend", watched)
    long = (prompts[0]["ids"] * 9)[:220]
    outcomes = []
    for prefetch in (False, True):
        options = EngineOptions(context=512, tier=tier, prefetch=prefetch, prefill_rows=100)
        with Engine.open(mini_store, options) as engine:
            first = run(engine, long[:30])  # fills the tier
            outcomes.append((first, run(engine, long)))
            assert engine.experts.tier_capacity == tier
            assert engine.experts._lent == 0
            if prefetch:
                assert max(lent) > 0
                assert max(lent) <= tier // 2
            _nothing_is_lost(engine.experts)
    assert outcomes[0] == outcomes[1]
