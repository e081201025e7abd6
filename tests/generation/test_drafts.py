"""Drafts change when tokens are decided, never which: ids and logits' bits with every drafter equal those without."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conftest import MINI
from deltafin.contract import Host, Native, Rows
from deltafin.drafting.controller import DraftController
from deltafin.drafting.drafts import Drafts
from deltafin.drafting.economics import Economics
from deltafin.drafting.proposal import Proposal
from deltafin.generation.choice import Chooser, Decided
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import Finished, TokenDecided
from deltafin.generation.session import Session
from deltafin.model.state import SequenceState

CONTEXT = 2048


@pytest.fixture(scope="module")
def plain(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, EngineOptions(context=CONTEXT, draft="off")) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, EngineOptions(context=CONTEXT, draft="dspark", draft_folders=(MINI,))) as engine:
        yield engine


def run(session: Session, ids: Sequence[int], new: int, stop: Sequence[int]) -> tuple[list[int], str]:
    """Decided tokens, and a hash over the bits of the logits that decided them."""
    digest = hashlib.sha256()
    original = Chooser.choose

    def choose(self: Chooser, row: Rows, proposal: int | None = None) -> Decided:
        digest.update(row.tobytes())
        return original(self, row, proposal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chooser, "choose", choose)
        events = list(session.generate(ids, max_new=new, stop=stop))
    assert isinstance(events[-1], Finished)
    return [e.token for e in events if isinstance(e, TokenDecided)], digest.hexdigest()


def with_dspark(engine: Engine, width: int, *, always: bool) -> Session:
    """A session of ``engine`` whose draft verifies at most ``width`` proposals."""
    assert engine.drafts is not None
    source = engine.drafts.controller()._source
    return Session(engine, DraftController(source, Economics(width, always=always), vocab_size=10**6))


def some(prompts: list[dict[str, Any]], *, each: int) -> list[dict[str, Any]]:
    """``each`` prompts of every kind."""
    seen: dict[str, int] = {}
    out = []
    for prompt in prompts:
        seen[prompt["kind"]] = seen.get(prompt["kind"], 0) + 1
        if seen[prompt["kind"]] <= each:
            out.append(prompt)
    return out


def test_dspark_changes_nothing_and_is_often_right(
    plain: Engine, drafting: Engine, prompts: list[dict[str, Any]]
) -> None:
    tokens = passes = 0
    for prompt in some(prompts, each=1):
        wanted = run(plain.session(), prompt["ids"], prompt["max_new"], prompt["stop"])
        for always in (True, False):
            session = with_dspark(drafting, 7, always=always)
            assert run(session, prompt["ids"], prompt["max_new"], prompt["stop"]) == wanted, prompt["id"]
            assert session.drafter is not None
            assert session.drafter.failure is None
            if always and prompt["kind"] == "chat":
                tokens += session.drafter.report.committed
                passes += session.drafter.report.steps
    assert tokens >= 2.5 * passes


@pytest.mark.slow
@pytest.mark.parametrize("width", range(1, 8))
@pytest.mark.parametrize("always", [True, False], ids=["always", "economics"])
def test_every_recorded_prompt_at_every_width(
    width: int, always: bool, plain: Engine, drafting: Engine, prompts: list[dict[str, Any]]
) -> None:
    accepted: dict[str, list[int]] = {}
    for prompt in prompts:
        session = with_dspark(drafting, width, always=always)
        tokens, digest = run(session, prompt["ids"], prompt["max_new"], prompt["stop"])
        assert (tokens, digest) == _alone(plain, prompt), prompt["id"]
        assert session.drafter is not None
        assert session.drafter.failure is None
        report = session.drafter.report
        entry = accepted.setdefault(prompt["kind"], [0, 0])
        entry[0] += report.committed
        entry[1] += report.steps
    print({kind: round(tokens / max(1, steps), 2) for kind, (tokens, steps) in accepted.items()})
    if always and width == 7:
        assert accepted["chat"][0] >= 2.5 * accepted["chat"][1]


_ALONE: dict[int, tuple[list[int], str]] = {}


def _alone(engine: Engine, prompt: dict[str, Any]) -> tuple[list[int], str]:
    if prompt["id"] not in _ALONE:
        _ALONE[prompt["id"]] = run(engine.session(), prompt["ids"], prompt["max_new"], prompt["stop"])
    return _ALONE[prompt["id"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "chat-thinking", "chat-unseen", "raw", "raw-code", "raw-stdlib"])
@pytest.mark.parametrize("width", [3, 7])
def test_six_hundred_tokens(
    kind: str, width: int, plain: Engine, drafting: Engine, prompts: list[dict[str, Any]]
) -> None:
    prompt = next(p for p in prompts if p["kind"] == kind)
    wanted = run(plain.session(), prompt["ids"], 600, [])
    for always in (True, False):
        assert run(with_dspark(drafting, width, always=always), prompt["ids"], 600, []) == wanted
    assert len(wanted[0]) == 600


class Hostile:
    """A drafter with every fault; ``fault`` picks one."""

    name = "hostile"

    def __init__(self, fault: str, known: Sequence[int], vocab: int, seed: int) -> None:
        self.fault, self.known, self.vocab = fault, list(known), vocab
        self.rng = random.Random(seed)

    def _right(self, tokens: Sequence[int], count: int) -> list[int]:
        return self.known[len(tokens) : len(tokens) + count]

    def propose(self, tokens: Sequence[int], count: int) -> Any:
        right = self._right(tokens, count)
        match self.fault:
            case "random":
                return Proposal(tuple(self.rng.randrange(self.vocab) for _ in range(count)), ())
            case "wrong":
                return Proposal(tuple((t + 1) % self.vocab for t in right), tuple(1.0 for _ in right))
            case "too many":
                return Proposal(tuple(self._right(tokens, 500)), ())
            case "outside":
                return Proposal((*right[:2], self.vocab, -1, 10**30), ())
            case "types":
                return Proposal((*right[:1], "7", None, 3.0, True), (0.5, "x", None, float("nan")))  # type: ignore[arg-type]
            case "no proposal":
                return self.rng.choice([None, 7, "text", Proposal(None, None)])  # type: ignore[arg-type]
            case "endless":
                return Proposal(iter(int, 1), iter(float, 1))  # type: ignore[arg-type]
            case "sometimes right":
                return Proposal(tuple(t if self.rng.random() < 0.7 else 5 for t in right), ())
            case "raises":
                if self.rng.random() < 0.3:
                    raise RuntimeError("broken")
        return Proposal(tuple(right), ())

    def commit(self, tokens: Sequence[int], taps: Sequence[Native]) -> None:
        if self.fault == "raises in commit" and self.rng.random() < 0.3:
            raise MemoryError("no room")
        for tap in taps:
            tap.zero_()  # what a draft does to its own copy must not reach K3

    def reset(self, position: int) -> None:
        if self.fault == "raises in reset":
            raise OSError("gone")

    def tensors(self) -> Sequence[tuple[str, Host]]:
        return []

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        raise ValueError("cannot")


FAULTS = [
    "random",
    "wrong",
    "too many",
    "outside",
    "types",
    "no proposal",
    "endless",
    "sometimes right",
    "raises",
    "raises in commit",
    "raises in reset",
]


@pytest.mark.parametrize("always", [True, False], ids=["always", "economics"])
@pytest.mark.parametrize("fault", FAULTS)
def test_hostile_drafters_change_nothing(
    fault: str, always: bool, drafting: Engine, plain: Engine, prompts: list[dict[str, Any]]
) -> None:
    prompt = prompts[0]
    if not _FREE:
        _FREE.append(run(plain.session(), prompt["ids"], 60, []))
    tokens, digest = _FREE[0]
    source = Hostile(fault, [*prompt["ids"], *tokens], plain.config.vocab_size, seed=3)
    controller = DraftController(source, Economics(7, always=always), vocab_size=plain.config.vocab_size)
    session = Session(drafting, controller)
    assert run(session, prompt["ids"], 60, []) == (tokens, digest)
    # And a second conversation in the same session, which starts over.
    assert run(session, prompt["ids"], 60, []) == (tokens, digest)
    if fault.startswith("raises in commit"):
        assert controller.failure is not None


_FREE: list[tuple[list[int], str]] = []


def test_a_draft_that_fails_while_opening_is_left_out(mini_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Drafts:
        raise MemoryError("no room for the draft")

    monkeypatch.setattr(Drafts, "load", broken)
    with Engine.open(mini_store, EngineOptions(context=256, draft_folders=(MINI,))) as engine:
        assert engine.drafts is None
        assert engine.session().drafter is None
        assert "no room for the draft" in engine.draft_status
    with pytest.raises(MemoryError):
        Engine.open(mini_store, EngineOptions(context=256, draft="dspark", draft_folders=(MINI,)))


class Verification(RuleBasedStateMachine):
    """Random propose–verify–commit sequences; after each, the state equals that of a model run from scratch."""

    engine: Engine
    prompt: list[int]
    known: list[int]

    @initialize()
    def prefill(self) -> None:
        self.state = SequenceState.empty(self.engine.config, 256)
        self.engine.target.forward(self.prompt, self.state)
        self.state.commit(len(self.prompt))
        self.tokens = [*self.prompt, self.known[0]]

    @rule(right=st.integers(0, 7), wrong=st.integers(0, 3), kept=st.integers(0, 8))
    def step(self, right: int, wrong: int, kept: int) -> None:
        """Verifies some right and some wrong guesses and commits what was agreed, or less."""
        done = len(self.tokens) - len(self.prompt)
        if done + right + 1 >= len(self.known):
            return
        guesses = self.known[done : done + right] + [(t + 3) % 5000 for t in self.known[done + right :][:wrong]]
        logits = self.engine.target.forward([self.tokens[-1], *guesses[:7]], self.state, partial=True)
        decided = [d.token for d in Chooser().verify(logits, guesses[:7], ())]
        assert decided == self.known[done : done + len(decided)]
        assert len(decided) == right + 1
        kept = min(kept, len(decided))
        self.state.commit(kept)
        self.tokens += decided[:kept]

    @rule(rows=st.integers(1, 8))
    def abandon(self, rows: int) -> None:
        """A pass whose result nobody takes, as after an error."""
        self.engine.target.forward(self.known[:rows], self.state, partial=True)

    @invariant()
    def equals_a_run_from_scratch(self) -> None:
        if not hasattr(self, "state"):
            return
        fresh = SequenceState.empty(self.engine.config, 256)
        self.engine.target.forward(self.tokens[:-1], fresh)
        fresh.commit(len(self.tokens) - 1)
        assert fresh.position == self.state.position
        for (name, a), (_, b) in zip(fresh.tensors(), self.state.tensors(), strict=True):
            assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("examples", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_any_sequence_of_commits_and_rollbacks(examples: int, plain: Engine, prompts: list[dict[str, Any]]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    prompt = prompts[41]["ids"][:40]
    known = run(plain.session(), prompt, 64, [])[0]
    machine = type("Bound", (Verification,), {"engine": plain, "prompt": prompt, "known": known})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=8,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_saved_session_goes_on_drafting(drafting: Engine, plain: Engine, prompts: list[dict[str, Any]]) -> None:
    prompt = prompts[43]
    half = len(prompt["ids"]) - 10
    first = with_dspark(drafting, 7, always=True)
    run(first, prompt["ids"][:half], 1, [])
    saved = {name: tensor.copy() for name, tensor in first.tensors()}
    wanted = run(plain.session(), prompt["ids"], 30, [])
    results = []
    for keep in (True, False):
        session = with_dspark(drafting, 7, always=True)
        kept = {n: t for n, t in saved.items() if keep or not n.startswith("draft.")}
        assert session.restore(prompt["ids"][:half], kept)
        assert run(session, prompt["ids"], 30, []) == wanted
        assert session.drafter is not None
        assert session.drafter.failure is None
        results.append(session.drafter.report.tokens_per_pass)
    whole = with_dspark(drafting, 7, always=True)
    run(whole, prompt["ids"], 30, [])
    assert whole.drafter is not None
    assert results[0] == whole.drafter.report.tokens_per_pass
