"""Reuse changes when work is done, never which token comes out; and it really reuses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from answers import answer, cold
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.sessions import files as files_module
from deltafin.sessions.files import PointFiles
from deltafin.sessions.points import PointCache, as_tokens, take
from deltafin.sessions.reuse import ReusingSession

BIG = 1 << 30
NEW = 12


@pytest.fixture(scope="module")
def engine(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, EngineOptions(context=1024)) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(engine: Engine) -> list[int]:
    """Two hundred arbitrary ordinary ids."""
    rng = random.Random(7)
    return [rng.randrange(300, 5000) for _ in range(200)]


def generate(session: ReusingSession, prompt: list[int], new: int = NEW) -> tuple[list[int], int]:
    return answer(session.generate(prompt, max_new=new, stop=()))


def test_a_conversation_with_an_edit_in_the_middle(engine: Engine, text: list[int]) -> None:
    session = ReusingSession(engine, PointCache(BIG))
    history: list[int] = []
    ends = []
    for turn in range(10):
        prompt = history + text[turn * 11 : turn * 11 + 9]
        got, reused = generate(session, prompt)
        assert got == cold(engine, prompt, NEW)
        # The last decided token of a turn has not been processed.
        assert reused == max(0, len(history) - 1)
        history = prompt + got
        ends.append(len(history))
    edited = history[: ends[4]] + text[150:160]
    got, reused = generate(session, edited)
    assert (got, reused) == (cold(engine, edited, NEW), ends[4] - 1)
    branch = history[: ends[6]] + text[160:165]
    assert generate(session, branch) == (cold(engine, branch, NEW), ends[6] - 1)


def test_the_same_prompt_again_needs_no_pass(engine: Engine, text: list[int]) -> None:
    session = ReusingSession(engine, PointCache(BIG))
    first, _ = generate(session, text[:30])
    assert generate(session, text[:30], 20) == (cold(engine, text[:30], 20), 30)
    assert generate(session, text[:30]) == (first, 30)


def test_several_conversations_take_turns(engine: Engine, text: list[int]) -> None:
    session = ReusingSession(engine, PointCache(BIG))
    talks = [text[i * 40 : i * 40 + 20] for i in range(4)]
    for _ in range(3):
        for i, prompt in enumerate(talks):
            got, reused = generate(session, prompt, 5)
            assert got == cold(engine, prompt, 5)
            assert reused == 0 or reused >= len(prompt) - 4
            talks[i] = prompt + got + text[i : i + 3]
    assert session.stats.ram >= 7


def test_a_generation_cut_short_leaves_its_prefix(engine: Engine, text: list[int]) -> None:
    session = ReusingSession(engine, PointCache(BIG))
    events = session.generate(text[:50], max_new=100, stop=())
    got = []
    for event in events:
        if hasattr(event, "token"):
            got.append(event.token)
        if len(got) == 6:
            break
    events.close()
    again, reused = generate(session, text[:50] + got)
    assert reused >= 54
    assert again == cold(engine, text[:50] + got, NEW)


def test_ram_is_bounded_and_rows_are_shared(engine: Engine, text: list[int]) -> None:
    session = engine.session()
    answer(session.generate(text[:100], max_new=1, stop=()))
    first = take(session.tokens[:100], session.tensors())
    answer(session.generate(text[:120], max_new=1, stop=()))
    second = take(session.tokens[:120], session.tensors(), first)
    assert second.rows[0] is first.rows[0]
    alone = take(session.tokens[:120], session.tensors())
    for (name, a), (_, b) in zip(sorted(second.tensors().items()), sorted(alone.tensors().items()), strict=True):
        assert np.array_equal(a, b), name
    one = sum(t.nbytes for t in alone.tensors().values())
    cache = PointCache(2 * one)
    cache.add(first)
    cache.add(second)
    assert cache.nbytes < 2 * one - first.rows[0].nbytes + first.rows[0].nbytes // 2
    for start in range(20):
        answer(session.generate(text[start : start + 60], max_new=1, stop=()))
        cache.add(take(session.tokens[:60], session.tensors()))
        assert cache.nbytes <= cache.limit
    assert cache.find(as_tokens(text[19:90])) is not None
    assert cache.find(as_tokens(text[:90])) is None
    small = PointCache(10)
    small.add(first)
    assert len(small) == small.nbytes == 0


def files_in(engine: Engine, folder: Path, limit: int = BIG) -> PointFiles:
    return PointFiles(folder, engine.store.identity, engine.backend.numerics(), limit)


def restarted(engine: Engine, folder: Path) -> ReusingSession:
    return ReusingSession(engine, PointCache(BIG), files_in(engine, folder))


def saved(engine: Engine, folder: Path, prompt: list[int]) -> list[int]:
    """Saves a turn and returns prompt and reply."""
    session = restarted(engine, folder)
    got, _ = generate(session, prompt)
    session.close()
    return prompt + got


def state_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.state"))


def test_points_survive_a_restart(engine: Engine, text: list[int], tmp_path: Path) -> None:
    history = saved(engine, tmp_path, text[:40])
    assert len(state_files(tmp_path)) == 2
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in state_files(tmp_path))
    prompt = history + text[40:45]
    assert generate(restarted(engine, tmp_path), prompt) == (cold(engine, prompt, NEW), len(history) - 1)
    edited = text[:40] + text[70:75]
    assert generate(restarted(engine, tmp_path), edited) == (cold(engine, edited, NEW), 40)
    assert generate(restarted(engine, tmp_path), text[:40]) == (history[40:], 40)


def _flip(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 1
    return data


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda data: data[: len(data) // 2],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: b"\xff" * 64,
        lambda data: data + b"more",
    ],
    ids=["flipped bit", "half", "stump", "empty", "absurd header", "trailing bytes"],
)
def test_a_damaged_file_means_a_full_pass(
    damage: Callable[[bytearray], bytes], engine: Engine, text: list[int], tmp_path: Path
) -> None:
    history = saved(engine, tmp_path, text[:40])
    for path in state_files(tmp_path):
        path.write_bytes(damage(bytearray(path.read_bytes())))
    prompt = history + text[40:45]
    assert files_in(engine, tmp_path).find(as_tokens(prompt)) is None
    assert not state_files(tmp_path)
    assert generate(restarted(engine, tmp_path), prompt) == (cold(engine, prompt, NEW), 0)


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    """Changes a file's content and gives it valid checksums."""
    with safetensors.safe_open(path, framework="np") as f:
        metadata = dict(f.metadata())
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    change(tensors, metadata)
    sums = {f"xxh3.{name}": files_module._checksum(name, t) for name, t in tensors.items()}
    safetensors.numpy.save_file(tensors, path, metadata={"key": metadata["key"], **sums})


def test_a_state_without_its_recurrent_half_is_not_used(engine: Engine, text: list[int], tmp_path: Path) -> None:
    history = saved(engine, tmp_path, text[:40])

    def forget(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        for name in [n for n in tensors if n.startswith("kda.") and n.endswith("recurrent")]:
            del tensors[name]

    for path in state_files(tmp_path):
        rewrite(path, forget)
    prompt = history + text[40:45]
    assert generate(restarted(engine, tmp_path), prompt) == (cold(engine, prompt, NEW), 0)


def test_a_state_of_other_shapes_types_or_arithmetic_is_not_used(
    engine: Engine, text: list[int], tmp_path: Path
) -> None:
    def narrow(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        name = next(n for n in tensors if n.endswith("recurrent"))
        tensors[name] = tensors[name][:1].copy()

    def double(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        name = next(n for n in tensors if n.endswith("history"))
        tensors[name] = tensors[name].astype(np.float64)

    def other(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata["key"] = "0" * 32

    def fewer(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        name = next(n for n in tensors if n.endswith("rows"))
        tensors[name] = tensors[name][:-1].copy()

    def others(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors["tokens"][3] += 1

    for i, change in enumerate((narrow, double, other, fewer, others)):
        folder = tmp_path / str(i)
        history = saved(engine, folder, text[:40])
        for path in state_files(folder):
            rewrite(path, change)
        prompt = history + text[40:45]
        assert generate(restarted(engine, folder), prompt) == (cold(engine, prompt, NEW), 0), change


def test_another_model_or_build_finds_nothing(engine: Engine, text: list[int], tmp_path: Path) -> None:
    saved(engine, tmp_path, text[:40])
    identity, numerics = engine.store.identity, engine.backend.numerics()
    assert PointFiles(tmp_path, "another", numerics, BIG).find(as_tokens(text[:60])) is None
    assert PointFiles(tmp_path, identity, numerics, BIG).find(as_tokens(text[:60])) is not None
    assert PointFiles(tmp_path, identity, "other arithmetic", BIG).find(as_tokens(text[:60])) is None


def test_disk_use_is_bounded_and_the_oldest_goes_first(engine: Engine, text: list[int], tmp_path: Path) -> None:
    saved(engine, tmp_path / "probe", text[:40])
    one = max(p.stat().st_size for p in state_files(tmp_path / "probe"))
    files = files_in(engine, tmp_path / "bounded", 3 * one + one // 2)
    session = engine.session()
    for start in range(6):
        answer(session.generate(text[start : start + 40], max_new=1, stop=()))
        files.save(take(session.tokens[:40], session.tensors()))
        files.close()
        time.sleep(0.02)
        assert sum(p.stat().st_size for p in state_files(tmp_path / "bounded")) <= files.limit
    assert files.find(as_tokens(text[5:60])) is not None
    assert files.find(as_tokens(text[0:60])) is None


def test_a_folder_that_cannot_be_written_costs_only_the_files(engine: Engine, text: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    session = ReusingSession(engine, PointCache(BIG), files_in(engine, tmp_path / "file"))
    assert generate(session, text[:20])[0] == cold(engine, text[:20], NEW)
    session.close()
    assert session.files_failure


_WRITER = """
import sys
import numpy as np
from pathlib import Path
from deltafin.sessions.files import PointFiles
from deltafin.sessions.points import Point, Rows, as_tokens
files = PointFiles(Path(sys.argv[1]), "model", "arithmetic", 1 << 30)
print("ready", flush=True)
n = 0
while True:
    tokens = as_tokens([n, 2, 3])
    files._write(Point(tokens, {"a": np.full(1 << 19, n, np.float32)}, (Rows(0, 3, {"b.rows": np.ones((3, 4))}),)))
    n += 1
"""


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0.02, 0.2))
        child.send_signal(signal.SIGKILL)
        child.wait()
    files = PointFiles(tmp_path, "model", "arithmetic", 1 << 30)
    found = state_files(tmp_path)
    assert found
    for path in found:
        n = int(np.asarray(safetensors.numpy.load_file(path)["tokens"])[0])
        point = files.find(as_tokens([n, 2, 3, 4]))
        assert point is not None
        assert float(point.fixed["a"][0]) == n
    files._make_room(0)
    assert not list(tmp_path.glob("*/*.tmp"))


def test_a_file_being_written_by_a_living_process_is_left_alone(tmp_path: Path) -> None:
    files = PointFiles(tmp_path, "model", "arithmetic", 1 << 30)
    files.folder.mkdir(parents=True)
    mine, dead = files.folder / f"3-{'0' * 32}.{os.getpid()}.tmp", files.folder / f"3-{'1' * 32}.{1 << 22}.tmp"
    for path in (mine, dead):
        path.write_bytes(b"x")
    files._make_room(0)
    assert mine.exists()
    assert not dead.exists()
