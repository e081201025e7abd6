"""Qwen drafts on MLX: recorded acceptance, the cache, agreement with PyTorch, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from conftest import MINI
from deltafin.apple import qwen as module
from deltafin.apple.qwen import QwenModel, load_models, qwen_source
from deltafin.checkpoint.config import K3Config
from deltafin.drafting.qwen_files import CACHE_POSITIONS
from deltafin.drafting.qwen_text import QwenSource
from deltafin.errors import CheckpointError, DraftError
from deltafin.text.tokenizer import K3Tokenizer

FOLDER = MINI / "qwen"


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer.load(MINI / "target", K3Config.load(MINI / "target"))


@pytest.fixture(scope="module")
def model() -> QwenModel:
    (loaded,) = load_models(FOLDER)
    return loaded


def replay(source: Any, prompts: list[dict[str, Any]], step: int) -> tuple[float, list[tuple[int, ...]]]:
    """Accepted tokens per proposal over recorded replies, and the proposals."""
    kept, proposals = 0, []
    for prompt in [p for p in prompts if p["kind"] in ("raw", "raw-stdlib")][::step]:
        reply = prompt["reference"]["ids"]
        done = 1
        while done < len(reply):
            guesses = source.propose(prompt["ids"] + reply[:done], 7).tokens
            pairs = zip(guesses, reply[done:], strict=False)
            hits = next((i for i, (g, t) in enumerate(pairs) if g != t), min(len(guesses), len(reply) - done))
            kept, done = kept + hits, done + hits + 1
            proposals.append(guesses)
    return kept / len(proposals), proposals


def test_it_guesses_raw_text_as_recorded(tokenizer: K3Tokenizer, prompts: list[dict[str, Any]]) -> None:
    source = qwen_source(FOLDER, tokenizer)()
    assert source.name == "qwen"
    assert source.tensors() == []
    assert replay(source, prompts, 4)[0] > 4  # 6.1 here and with PyTorch


def test_it_guesses_what_pytorch_guesses(
    model: QwenModel, tokenizer: K3Tokenizer, prompts: list[dict[str, Any]]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from deltafin.drafting import qwen as pytorch

    _, mine = replay(QwenSource([model], tokenizer), prompts, 8)
    _, others = replay(QwenSource(pytorch.load_models(FOLDER), tokenizer), prompts, 8)
    assert sum(a == b for a, b in zip(mine, others, strict=False)) >= 0.8 * max(len(mine), len(others))


def test_the_kept_cache_changes_nothing(model: QwenModel) -> None:
    def cold(ids: list[int], count: int) -> list[tuple[int, float]]:
        model._forget()
        return model.complete(ids, count)

    a = model.encode("The capital of France is Paris. The capital of Norway")
    b = model.encode("The capital of France is Paris. Elements are")
    wanted = [cold(ids, 3) for ids in (a, b, a[:3])]
    model._forget()
    for ids, expected in [(a, wanted[0]), (b, wanted[1]), (a, wanted[0]), (a[:3], wanted[2]), (b, wanted[1])]:
        got = model.complete(ids, 3)
        assert got[0][0] == expected[0][0]
        assert got[0][1] == pytest.approx(expected[0][1], abs=0.1)


def test_a_text_longer_than_its_cache_gets_no_guess(model: QwenModel) -> None:
    assert model.complete([5] * CACHE_POSITIONS, 3) == []


def test_a_failed_pass_leaves_no_half_grown_cache(model: QwenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = model.encode("The capital of France is")
    wanted = model.complete(ids, 1)

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(module.mx, "argmax", fails)
        with pytest.raises(RuntimeError):
            model.complete([*ids, 5], 1)
    assert model._cached == []
    assert model.complete(ids, 1)[0][0] == wanted[0][0]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("data", [None, b"", b"\xff" * 100])
def test_files_that_are_no_model_are_refused(name: str, data: bytes | None, copy: Path) -> None:
    (copy / name).unlink()
    if data is not None:
        (copy / name).write_bytes(data)
    if name == "config.json" and data is None:
        assert load_models(copy) == []
        return
    with pytest.raises((DraftError, CheckpointError)):
        load_models(copy)


def test_a_missing_package_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise DraftError(f"no {name}")

    monkeypatch.setattr(module, "model_file", absent)
    with pytest.raises(DraftError):
        load_models(copy)
