"""The heat file: decayed, merged, and worth nothing at worst."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from deltafin.history import heat
from deltafin.history.heat import Heat
from deltafin.history.recorder import FLUSH_TOKENS, RouteRecorder
from deltafin.history.trace import TraceShape, TraceWriter, read_trace

SHAPE = (2, 8)


def seen(*experts: int) -> Heat:
    h = Heat.empty("model", *SHAPE)
    for e in experts:
        h.add(np.full((1, 2, 1), e))
    return h


def test_recent_uses_weigh_more() -> None:
    h = Heat.empty("model", *SHAPE)
    h.add(np.zeros((1, 2, 1), int))
    h.add(np.ones((int(heat.HALF_LIFE), 2, 1), int))
    assert h.counts[0, 0] == pytest.approx(0.5, rel=1e-3)
    assert h.total_tokens == heat.HALF_LIFE + 1


def test_adding_in_one_go_or_in_parts_is_the_same() -> None:
    routes = np.random.default_rng(0).integers(0, 8, (50, 2, 3))
    whole, parts = Heat.empty("model", *SHAPE), Heat.empty("model", *SHAPE)
    whole.add(routes)
    for part in np.split(routes, [7, 8, 30]):
        parts = parts.followed_by(_of(part))
    np.testing.assert_allclose(whole.counts, parts.counts, rtol=1e-5)
    assert whole.tokens == pytest.approx(parts.tokens)


def _of(routes: np.ndarray) -> Heat:
    h = Heat.empty("model", *SHAPE)
    h.add(routes)
    return h


def test_merging_adds_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x.heat"
    assert heat.merge(path, seen(1, 1))
    assert heat.merge(path, seen(2))
    loaded = heat.load(path, "model", *SHAPE)
    assert not loaded.problem
    assert loaded.counts[0, 1] == pytest.approx(2, rel=1e-2)
    assert loaded.counts[0, 2] == pytest.approx(1, rel=1e-2)


def _merge_often(path: Path, expert: int) -> None:
    for _ in range(20):
        while not heat.merge(path, seen(expert), wait=True):
            pass


def test_processes_merge_without_losing_anything(tmp_path: Path) -> None:
    path = tmp_path / "x.heat"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_merge_often, args=(path, i)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert heat.load(path, "model", *SHAPE).total_tokens == 60


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(b"{" * 5000),
        lambda p: p.write_bytes(b"[1]\n"),
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        lambda p: p.write_bytes(p.read_bytes() + b"x"),
        lambda p: p.write_bytes(p.read_bytes()[:-3] + b"abc"),
        lambda p: p.write_bytes(p.read_bytes().replace(b'"version": 1', b'"version": 9')),
        lambda p: p.write_bytes(p.read_bytes().replace(b'"model": "model"', b'"model": "other"')),
        lambda p: p.write_bytes(p.read_bytes().replace(b'"tokens": ', b'"tokens": "x", "y": ')),
        lambda p: (p.unlink(), p.mkdir()),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_stops_nothing(spoil, tmp_path: Path) -> None:
    path = tmp_path / "x.heat"
    heat.merge(path, seen(1))
    spoil(path)
    loaded = heat.load(path, "model", *SHAPE)
    assert loaded.problem
    assert not loaded.counts.any()
    heat.merge(path, seen(3))  # never raises


def test_impossible_counts_are_refused(tmp_path: Path) -> None:
    bad = seen(1)
    bad.counts[0, 0] = np.nan
    heat._write(tmp_path / "x.heat", bad)
    assert heat.load(tmp_path / "x.heat", "model", *SHAPE).problem


def test_a_busy_file_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "x.heat"
    with heat._locked(path.with_suffix(".lock"), wait=False) as mine:
        assert mine
        assert not heat.merge(path, seen(1))
    assert heat.merge(path, seen(1))


def _record(folder: Path) -> None:
    trace = TraceWriter(folder / "trace", TraceShape(2, 8, 1, "model"))
    recorder = RouteRecorder(Heat.empty("model", *SHAPE), folder / "x.heat", trace)
    for i in range(1 << 30):
        recorder.observe(np.full((1, 2, 1), i % 8, np.int32))


def test_kill_loses_at_most_the_last_interval(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("spawn").Process(target=_record, args=(tmp_path,))
    worker.start()
    deadline = time.monotonic() + 60
    while heat.load(tmp_path / "x.heat", "model", *SHAPE).total_tokens < 5 * FLUSH_TOKENS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    loaded = heat.load(tmp_path / "x.heat", "model", *SHAPE)
    trace = read_trace(tmp_path / "trace")
    assert not loaded.problem
    # Heat and trace are handed on together, so a kill falls between them or between two intervals.
    assert 0 <= len(trace.routes) - loaded.total_tokens <= FLUSH_TOKENS
    assert (trace.routes[:, 0, 0] == np.arange(len(trace.routes)) % 8).all()
