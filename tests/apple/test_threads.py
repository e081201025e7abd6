"""MLX evaluates an array only in the thread that wrote it down; engines and sessions must not care who made them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from conftest import MINI
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import TokenDecided
from deltafin.generation.session import Session


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of ``work`` in a thread of its own."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(work())
        except Exception as e:
            results.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def test_made_in_one_thread_run_in_another_and_continued_in_a_third(
    mini_store: Path, prompts: list[dict[str, Any]]
) -> None:
    ids = prompts[0]["ids"]
    options = EngineOptions(backend="mlx", context=256, draft="dspark", draft_folders=(MINI,), draft_always=True)
    with Engine.open(mini_store, options) as engine:

        def run(session: Session, to: list[int], count: int) -> list[int]:
            tokens = [e.token for e in session.generate(to, max_new=count, stop=[]) if isinstance(e, TokenDecided)]
            assert session.drafter is not None
            assert session.drafter.failure is None
            return tokens

        first, whole, later = engine.session(), engine.session(), engine.session()

        def begin() -> tuple[list[int], dict[str, Any]]:
            tokens = run(first, ids, 4)
            return tokens, {name: tensor.copy() for name, tensor in first.tensors()}

        tokens, saved = elsewhere(begin)
        wanted = elsewhere(lambda: run(whole, ids, 12))
        assert tokens == wanted[:4]
        assert later.restore(first.tokens[: first.state.position], saved)
        assert elsewhere(lambda: run(later, ids + tokens, 8)) == wanted[4:]
