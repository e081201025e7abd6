"""Drafts in an MLX engine: no token changes, as much is accepted as with PyTorch, and saved sessions go on drafting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from conftest import MINI
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import TokenDecided
from deltafin.generation.session import Session

NEW = 24


def options(backend: Any, draft: Any, **how: Any) -> EngineOptions:
    return EngineOptions(
        backend=backend, context=512, draft=draft, draft_folders=(MINI,), draft_always=True, raw=draft == "qwen", **how
    )


def run(session: Session, ids: Sequence[int], count: int = NEW) -> tuple[list[int], int]:
    """Tokens, and how many of them were drafted."""
    decided = [e for e in session.generate(ids, max_new=count, stop=[]) if isinstance(e, TokenDecided)]
    assert session.drafter is None or session.drafter.failure is None
    return [e.token for e in decided], sum(e.drafted for e in decided)


@pytest.fixture(scope="module")
def drafting(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, options("mlx", "dspark")) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, options("mlx", "off")) as opened:
        yield opened


@pytest.fixture(scope="module")
def chosen(prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [prompt["ids"] for prompt in prompts[::24]]


@pytest.fixture(scope="module")
def wanted(plain: Engine, chosen: list[list[int]]) -> list[list[int]]:
    return [run(plain.session(), ids)[0] for ids in chosen]


def test_dspark_changes_no_token(drafting: Engine, chosen: list[list[int]], wanted: list[list[int]]) -> None:
    drafted = 0
    for ids, tokens in zip(chosen, wanted, strict=True):
        got, hits = run(drafting.session(), ids)
        assert got == tokens
        drafted += hits
    assert drafted > len(chosen) * NEW // 2


def test_qwen_changes_no_token(mini_store: Path, plain: Engine, prompts: list[dict[str, Any]]) -> None:
    pytest.importorskip("mlx_lm")
    pytest.importorskip("transformers")
    drafted = 0
    raw = [prompt["ids"] for prompt in prompts if prompt["kind"].startswith("raw")][::12]
    with Engine.open(mini_store, options("mlx", "qwen")) as engine:
        assert engine.drafts is not None
        for ids in raw:
            got, hits = run(engine.session(), ids)
            assert got == run(plain.session(), ids)[0]
            drafted += hits
    assert drafted > len(raw) * NEW // 3


def test_as_much_is_accepted_as_with_pytorch(mini_store: Path, drafting: Engine, chosen: list[list[int]]) -> None:
    pytest.importorskip("torch")
    with Engine.open(mini_store, options("torch", "dspark")) as other:
        for ids in chosen[:4]:
            theirs, here = run(other.session(), ids), run(drafting.session(), ids)
            if theirs[0] == here[0]:  # near-ties of K3 itself may fall differently
                assert abs(theirs[1] - here[1]) <= NEW // 4


def test_a_saved_session_goes_on_drafting(drafting: Engine, plain: Engine, chosen: list[list[int]]) -> None:
    ids = max(chosen, key=len)
    half = len(ids) - 10
    first = drafting.session()
    run(first, ids[:half], 1)
    saved = {name: tensor.copy() for name, tensor in first.tensors()}
    assert saved["draft.context"].shape[1] == half
    tokens, _ = run(plain.session(), ids)
    for keep in (True, False):
        session = drafting.session()
        kept = {name: tensor for name, tensor in saved.items() if keep or not name.startswith("draft.")}
        assert session.restore(ids[:half], kept)
        assert run(session, ids)[0] == tokens


def test_a_broken_draft_costs_only_itself(
    drafting: Engine, chosen: list[list[int]], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltafin.apple import dspark

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    session = drafting.session()
    monkeypatch.setattr(dspark.DSpark, "block", fails)
    decided = [e for e in session.generate(chosen[0], max_new=NEW, stop=[]) if isinstance(e, TokenDecided)]
    assert [e.token for e in decided] == wanted[0]
    assert session.drafter is not None
    assert "out of memory" in str(session.drafter.failure)


@pytest.mark.parametrize("draft", ["dspark", "qwen"])
def test_no_pytorch_is_imported_while_drafting(draft: str, mini_store: Path) -> None:
    pytest.importorskip("mlx_lm")
    pytest.importorskip("transformers")
    code = f"""
import sys
from pathlib import Path
from deltafin.generation.engine import Engine, EngineOptions
options = EngineOptions(backend="mlx", context=128, draft={draft!r}, draft_folders=(Path({str(MINI)!r}),), raw=True,
    draft_always=True)
with Engine.open(Path({str(mini_store)!r}), options) as engine:
    session = engine.session()
    list(session.generate(list(range(100, 120)), max_new=4, stop=[]))
    assert session.drafter.failure is None, session.drafter.failure
assert not [m for m in ("torch", "transformers", "mlx_lm") if m in sys.modules]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
