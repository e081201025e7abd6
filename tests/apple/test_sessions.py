"""Saved states on MLX: taken back bit for bit, and never read by the other backend or in another precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import PrefillProgress, TokenDecided
from deltafin.sessions import files as files_module
from deltafin.sessions.files import PointFiles
from deltafin.sessions.points import PointCache, as_tokens
from deltafin.sessions.reuse import ReusingSession

BIG = 1 << 30
NEW = 6


@pytest.fixture(scope="module")
def torch(mini_store: Path) -> Iterator[Engine]:
    pytest.importorskip("torch")
    with Engine.open(mini_store, EngineOptions(backend="torch", context=1024, draft="off")) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(prompts: list[dict[str, Any]]) -> list[int]:
    return max((p["ids"] for p in prompts), key=len)[:60]


def generate(engine: Engine, folder: Path | None, ids: list[int]) -> tuple[list[int], int]:
    """(decided tokens, reused prompt tokens) of a fresh session over the states in ``folder``."""
    files = None
    if folder is not None:
        files = PointFiles(folder, engine.store.identity, engine.backend.numerics(), BIG)
    session = ReusingSession(engine, PointCache(BIG), files)
    tokens, reused = [], 0
    for event in session.generate(ids, max_new=NEW, stop=()):
        if isinstance(event, PrefillProgress):
            reused = event.reused
        elif isinstance(event, TokenDecided):
            tokens.append(event.token)
    session.close()
    return tokens, reused


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_saved_state_goes_on_as_if_nothing_had_been_between(
    precision: str, request: pytest.FixtureRequest, text: list[int], tmp_path: Path
) -> None:
    engine: Engine = request.getfixturevalue(precision)
    first, _ = generate(engine, tmp_path, text[:40])
    longer = text[:40] + first + text[40:50]
    wanted = generate(engine, None, longer)
    assert wanted[1] == 0
    tokens, reused = generate(engine, tmp_path, longer)
    assert reused >= 40 + NEW - 1
    assert tokens == wanted[0]


def test_states_hold_the_bits(bf16: Engine, text: list[int]) -> None:
    state = bf16.backend.state(bf16.config, 128)
    bf16.target.forward(text[:20], state)
    state.commit(20)
    saved = {name: tensor.copy() for name, tensor in state.tensors()}
    assert saved["mla.3.rows"].dtype == np.uint16
    assert saved["kda.0.recurrent"].dtype == np.float32
    other = bf16.backend.state(bf16.config, 128)
    other.restore(20, saved)
    a, b = (bf16.target.forward(text[20:24], s) for s in (state, other))
    assert a.tobytes() == b.tobytes()
    for name in saved:
        damaged = dict(saved) | {name: saved[name][:1]}
        with pytest.raises(ValueError):
            bf16.backend.state(bf16.config, 128).restore(20, damaged)
        with pytest.raises(KeyError):
            bf16.backend.state(bf16.config, 128).restore(20, {n: t for n, t in saved.items() if n != name})


def test_other_arithmetic_finds_nothing(
    torch: Engine, fp32: Engine, bf16: Engine, text: list[int], tmp_path: Path
) -> None:
    names = [engine.backend.numerics() for engine in (torch, fp32, bf16)]
    assert len(set(names)) == 3
    for i, engine in enumerate((torch, fp32, bf16)):
        # Each finds its own state only, in the folder that all share; the newest other one stays.
        assert generate(engine, tmp_path, text[:30])[1] == 0, i
        assert generate(engine, tmp_path, text[:40])[1] >= 30, i


def test_a_file_relabelled_as_the_other_backends_is_refused(
    torch: Engine, fp32: Engine, bf16: Engine, text: list[int], tmp_path: Path
) -> None:
    """Even with a forged name and valid checksums no backend continues what another computed."""
    engines = {"torch": torch, "fp32": fp32, "bf16": bf16}
    for writer, writing in engines.items():
        for reader, reading in engines.items():
            if reader == writer:
                continue
            folder = tmp_path / f"{writer}-{reader}"
            generate(writing, folder, text[:30])
            files = PointFiles(folder / "new", reading.store.identity, reading.backend.numerics(), BIG)
            files.folder.mkdir(parents=True)
            for path in folder.glob("*/*.state"):
                with safetensors.safe_open(path, framework="np") as f:
                    tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
                sums = {f"xxh3.{name}": files_module._checksum(name, t) for name, t in tensors.items()}
                safetensors.numpy.save_file(tensors, files.folder / path.name, metadata={"key": files.key, **sums})
            assert files.find(as_tokens(text[:40])) is not None
            assert generate(reading, folder / "new", text[:35]) == generate(reading, None, text[:35])
