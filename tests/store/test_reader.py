from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deltafin.store.direct as direct_module
import deltafin.store.reader as reader_module
from deltafin.errors import ReadError, SliceCorruptError
from deltafin.store import AlignedBuffer, DriveInfo, Extent, ReadCancelled, Reader, ReadPlan, aligned_memory
from deltafin.store.reader import RateLimit
from store.installs_help import PAGE, extent, file_drives, open_descriptors, plan_of, read

real_preadv = os.preadv
CONTENT = os.urandom(5 * PAGE + 123)


@pytest.fixture
def one_file(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(*file_drives(tmp_path, [CONTENT]), depth=1)
    yield reader
    reader.close()


def test_a_slice_is_delivered(one_file: Reader) -> None:
    assert read(one_file, plan_of(extent(CONTENT, 100, 5000))) == CONTENT[100:5100]
    assert read(one_file, plan_of(extent(CONTENT, 0, len(CONTENT)))) == CONTENT  # rounds past the file's end


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_extents_of_any_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = tmp_path_factory.mktemp("files")
    contents = [os.urandom(data.draw(st.integers(1, 40_000))) for _ in range(data.draw(st.integers(1, 3)))]
    wanted: list[bytes] = []
    extents: list[Extent] = []
    page = 0
    for _ in range(data.draw(st.integers(1, 6))):
        drive = data.draw(st.integers(0, len(contents) - 1))
        offset = data.draw(st.integers(0, len(contents[drive]) - 1))
        length = data.draw(st.integers(1, len(contents[drive]) - offset))
        extents.append(extent(contents[drive], offset, length, drive=drive, page=page))
        wanted.append(contents[drive][offset : offset + length])
        page = -(-(extents[-1].at + length) // PAGE)
    pieces = data.draw(st.sampled_from([PAGE, 2 * PAGE, 1 << 20]))
    memory = aligned_memory(page * PAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "PIECE_BYTES", pieces)
        reader = Reader(*file_drives(base, contents), depth=data.draw(st.integers(1, 3)))
        read(reader, ReadPlan(tuple(extents), 0, page * PAGE, page * PAGE), memory)
        reader.close()
    for e, expected in zip(extents, wanted, strict=True):
        assert memory[e.at : e.at + e.length] == expected


def test_bytes_that_differ_from_the_checksum_are_refused(tmp_path: Path) -> None:
    drives, files = file_drives(tmp_path, [CONTENT])
    path = files[0][1]
    damaged = bytearray(CONTENT)
    damaged[5050] ^= 1
    path.write_bytes(damaged)
    reader = Reader(drives, files)
    with pytest.raises(SliceCorruptError) as caught:
        read(reader, plan_of(extent(CONTENT, 5000, 100)))
    message = caught.value.message
    assert all(part in message for part in ("drive 0", str(path), "bytes 5000 to 5100", "the blob"))
    assert "store repair" in caught.value.remedy
    assert read(reader, plan_of(extent(CONTENT, 5051, 100))) == CONTENT[5051:5151]
    assert reader.stats()[0].retries == 0  # only successful reads count, with the retries they took
    reader.close()


def failing(
    patch: pytest.MonkeyPatch, outcomes: Sequence[Callable[[int, list[memoryview], int], int] | int]
) -> list[int]:
    """Replaces os.preadv: the n-th call raises the n-th errno or runs the n-th function; later calls are real."""
    calls: list[int] = []

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) <= len(outcomes):
            outcome = outcomes[len(calls) - 1]
            if isinstance(outcome, int):
                raise OSError(outcome, os.strerror(outcome))
            return outcome(fd, views, offset)
        return real_preadv(fd, views, offset)

    patch.setattr(os, "preadv", preadv)
    return calls


def test_a_failed_read_is_repeated(one_file: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, [errno.EIO, errno.EIO])
    assert read(one_file, plan_of(extent(CONTENT, 0, 10))) == CONTENT[:10]
    stats = one_file.stats()[0]
    assert (stats.bytes, stats.reads, stats.retries) == (10, 3, 2)


def test_a_dead_sector_is_reported(one_file: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, [errno.EIO] * 99)
    with pytest.raises(ReadError, match="Input/output error") as caught:
        read(one_file, plan_of(extent(CONTENT, 0, 10)))
    assert "drive 0" in caught.value.message
    assert "store verify" in caught.value.remedy
    monkeypatch.undo()
    assert read(one_file, plan_of(extent(CONTENT, 0, 10))) == CONTENT[:10]  # the worker lives on


def test_a_transfer_error_heals_by_reading_again(one_file: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def garble(fd: int, views: list[memoryview], offset: int) -> int:
        got = real_preadv(fd, views, offset)
        views[0][200] ^= 255
        return got

    failing(monkeypatch, [garble])
    assert read(one_file, plan_of(extent(CONTENT, 100, 5000))) == CONTENT[100:5100]
    assert one_file.stats()[0].retries == 1


def test_short_reads_are_continued_on_a_page_boundary(one_file: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, views: list[memoryview], offset: int) -> int:
        real_preadv(fd, views, offset)
        return PAGE + 17

    calls = failing(monkeypatch, [short, short])
    assert read(one_file, plan_of(extent(CONTENT, 0, len(CONTENT)))) == CONTENT
    assert calls == [0, PAGE, 2 * PAGE]


def test_a_truncated_file(tmp_path: Path) -> None:
    drives, files = file_drives(tmp_path, [CONTENT[:6000]])
    reader = Reader(drives, files)
    for offset in (3000, 5999, 6000, 9000):
        with pytest.raises(ReadError, match="ends at byte"):
            read(reader, plan_of(extent(CONTENT, offset, 4000)))
    assert read(reader, plan_of(extent(CONTENT, 5000, 1000))) == CONTENT[5000:6000]
    reader.close()


def test_a_missing_file_and_a_link(tmp_path: Path) -> None:
    drives, files = file_drives(tmp_path, [CONTENT, CONTENT])
    files[0][1].unlink()
    files[1][1].rename(tmp_path / "elsewhere")
    files[1][1].symlink_to(tmp_path / "elsewhere")
    reader = Reader(drives, files)
    for drive in (0, 1):
        with pytest.raises(ReadError, match=str(files[drive][1])):
            read(reader, plan_of(extent(CONTENT, 0, 10, drive=drive)))
    reader.close()


def test_refused_direct_open_falls_back_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(direct_module, "_open_direct", refuse)
    reader = Reader(*file_drives(tmp_path, [CONTENT]))
    assert read(reader, plan_of(extent(CONTENT, 100, 5000))) == CONTENT[100:5100]
    stats = reader.stats()[0]
    assert not stats.direct
    assert stats.fallback == "open: Invalid argument"
    reader.close()


def test_refused_direct_read_falls_back_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(*file_drives(tmp_path, [CONTENT]), depth=1)
    assert read(reader, plan_of(extent(CONTENT, 0, 10))) == CONTENT[:10]
    if not reader.stats()[0].direct:
        pytest.skip("the temporary folder does not support direct reads")
    failing(monkeypatch, [errno.EINVAL])
    assert read(reader, plan_of(extent(CONTENT, 100, 5000))) == CONTENT[100:5100]
    assert not reader.stats()[0].direct
    assert reader.stats()[0].fallback.startswith("read: ")
    reader.close()


class Gate:
    """Holds every read of the given file descriptors' offsets until opened, recording the order of arrival."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.started: SimpleQueue[int] = SimpleQueue()
        self.order: list[int] = []
        self._open = threading.Semaphore(0)
        patch.setattr(os, "preadv", self._preadv)

    def _preadv(self, fd: int, views: list[memoryview], offset: int) -> int:
        self.started.put(offset)
        assert self._open.acquire(timeout=30)
        self.order.append(offset // PAGE)
        return real_preadv(fd, views, offset)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._open.release()


def page_plan(number: int) -> ReadPlan:
    return plan_of(extent(CONTENT, number * PAGE, PAGE))


def start(reader: Reader, plan: ReadPlan, **options: bool) -> tuple[Any, memoryview, SimpleQueue[Any]]:
    memory, done = aligned_memory(plan.buffer_bytes), SimpleQueue[Any]()
    return reader.submit(plan, memory, done.put, **options), memory, done


def test_cancel_before_start(one_file: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    first, _, first_done = start(one_file, page_plan(0))
    gate.started.get(timeout=30)
    second, memory, second_done = start(one_file, page_plan(1))
    third, _, third_done = start(one_file, page_plan(2))
    assert second.cancel() is True
    assert isinstance(second_done.get(timeout=0), ReadCancelled)
    assert second.cancel() is False  # only once
    assert first.cancel() is False  # already under way
    gate.let(3)
    assert first_done.get(timeout=30) is None
    assert third_done.get(timeout=30) is None
    assert third.cancel() is False  # over
    assert gate.order == [0, 2]
    assert bytes(memory) == bytes(len(memory))
    assert second_done.empty()


def test_cancelled_and_finished_reads_do_not_pin_memory(one_file: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    start(one_file, page_plan(0))
    gate.started.get(timeout=30)
    buffer, done = AlignedBuffer(PAGE), SimpleQueue[Any]()
    ticket = one_file.submit(page_plan(1), buffer.view[:], done.put)
    assert ticket.cancel()
    buffer.close()  # a view that is still alive somewhere would make this raise
    gate.let(2)
    buffer = AlignedBuffer(PAGE)
    one_file.submit(page_plan(1), buffer.view[:], done.put)
    done.get(timeout=0)
    assert done.get(timeout=30) is None
    buffer.close()
    failing(monkeypatch, [errno.EIO] * 3)
    buffer = AlignedBuffer(PAGE)
    one_file.submit(page_plan(1), buffer.view[:], done.put)
    error = done.get(timeout=30)
    assert isinstance(error, ReadError)
    buffer.close()


def test_demand_goes_before_prefetch_and_promotion_helps(one_file: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    reads = [start(one_file, page_plan(0))]
    gate.started.get(timeout=30)
    reads += [start(one_file, page_plan(number), prefetch=True) for number in (1, 2, 3)]
    reads += [start(one_file, page_plan(4))]
    reads[3][0].promote()
    reads[3][0].promote()
    reads[0][0].promote()  # harmless: already running
    gate.let(5)
    for _, _, done in reads:
        assert done.get(timeout=30) is None
    assert gate.order == [0, 4, 3, 1, 2]
    assert all(done.empty() for _, _, done in reads)  # exactly once each


def test_promotion_never_reads_a_piece_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(*file_drives(tmp_path, [CONTENT]), depth=3)
    gate = Gate(monkeypatch)
    reads = [start(reader, page_plan(number)) for number in (0, 1, 2)]
    for _ in range(3):
        gate.started.get(timeout=30)  # all workers are busy
    two = plan_of(extent(CONTENT, 3 * PAGE, PAGE), extent(CONTENT, 4 * PAGE, PAGE, page=1))
    reads.append(start(reader, two, prefetch=True))
    reads[-1][0].promote()
    gate.let(3)
    for _ in range(2):
        gate.started.get(timeout=30)  # both pieces are in flight, their twins still queued before an idle worker
    reads.append(start(reader, page_plan(0), prefetch=True))
    gate.started.get(timeout=30)  # that worker went past the twins
    gate.let(9)
    for _, _, done in reads:
        assert done.get(timeout=30) is None
    reader.close()
    assert sorted(gate.order) == [0, 0, 1, 2, 3, 4]


def test_an_error_waits_for_everything_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives, files = file_drives(tmp_path, [CONTENT, CONTENT[:10]])
    reader = Reader(drives, files, depth=1)
    held = threading.Event()
    slow_started = threading.Event()

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_size == len(CONTENT):
            slow_started.set()
            assert held.wait(30)
        return real_preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    plan = plan_of(extent(CONTENT, 0, 100), extent(CONTENT, 0, 100, drive=1, page=1))
    _, memory, done = start(reader, plan)
    assert slow_started.wait(30)
    follower = start(reader, plan_of(extent(CONTENT, 0, 10, drive=1)))
    assert follower[2].get(timeout=30) is None  # so the failure on drive 1 has happened by now
    assert done.empty()
    held.set()
    assert isinstance(done.get(timeout=30), ReadError)
    assert memory[:100] == CONTENT[:100]  # what was in flight had landed before the report
    reader.close()


def test_close_cancels_waits_and_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    threads = threading.active_count()
    reader = Reader(*file_drives(tmp_path, [CONTENT, CONTENT]), depth=1)
    gate = Gate(monkeypatch)
    both = plan_of(extent(CONTENT, 0, PAGE), extent(CONTENT, 0, PAGE, drive=1, page=1))
    running = start(reader, page_plan(0))
    gate.started.get(timeout=30)
    half = start(reader, both)  # its second half starts, its first waits behind ``running``
    gate.started.get(timeout=30)
    waiting = start(reader, page_plan(2), prefetch=True)
    closer = threading.Thread(target=reader.close)
    closer.start()
    assert isinstance(waiting[2].get(timeout=30), ReadCancelled)
    gate.let(2)
    closer.join(30)
    assert not closer.is_alive()
    assert running[2].get(timeout=30) is None
    assert isinstance(half[2].get(timeout=30), ReadCancelled)
    reader.close()  # idempotent
    with pytest.raises(RuntimeError, match="closed"):
        start(reader, page_plan(0))
    assert open_descriptors() == before
    assert threading.active_count() == threads


def test_unfit_buffers_are_refused(one_file: Reader) -> None:
    memory = aligned_memory(4 * PAGE)
    with pytest.raises(ValueError, match="needs"):
        one_file.submit(plan_of(extent(CONTENT, 0, 5000)), memory[:PAGE], print)
    with pytest.raises(ValueError, match="aligned"):
        one_file.submit(page_plan(0), memory[8:], print)
    with pytest.raises(TypeError):
        one_file.submit(page_plan(0), memoryview(bytes(4 * PAGE)), print)


def test_a_callback_that_raises_does_not_stop_the_drive(one_file: Reader) -> None:
    def bad(error: BaseException | None) -> None:
        raise RuntimeError("not ours")

    one_file.submit(page_plan(0), aligned_memory(PAGE), bad)
    assert read(one_file, page_plan(1)) == CONTENT[PAGE : 2 * PAGE]


def test_rate_limit_holds_its_average(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(reader_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(reader_module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds + 0.0005))
    limit = RateLimit(1e6)
    for _ in range(100):
        limit.wait(limit.book(10_000))  # ten milliseconds each, every sleep half a millisecond late
    assert now[0] - 100.0 == pytest.approx(1.0, rel=0.02)
    now[0] += 5  # an idle drive earns no more than the credit
    begin = now[0]
    assert limit.book(10_000) == pytest.approx(begin + 0.01 - RateLimit.CREDIT)


def test_limited_drives_are_read_correctly(tmp_path: Path) -> None:
    reader = Reader(*file_drives(tmp_path, [CONTENT]), max_bytes_per_s={0: 1e6})
    assert read(reader, plan_of(extent(CONTENT, 0, len(CONTENT)))) == CONTENT
    assert reader.stats()[0].busy_seconds > 0.01
    reader.close()


def test_statistics(one_file: Reader) -> None:
    read(one_file, plan_of(extent(CONTENT, 10, 5000)))
    read(one_file, plan_of(extent(CONTENT, 0, 7)))
    stats = one_file.stats()[0]
    assert (stats.drive, stats.bytes, stats.reads, stats.retries) == (0, 5007, 2, 0)
    assert stats.busy_seconds > 0
    assert stats.wait_seconds >= 0


def test_buffers_are_aligned_and_zeroed() -> None:
    for nbytes in (1, PAGE, PAGE + 1, 3 << 20):
        buffer = AlignedBuffer(nbytes)
        assert len(buffer.view) == -(-nbytes // PAGE) * PAGE
        assert not any(buffer.view)
        buffer.close()


def test_unknown_drive_is_a_programming_error() -> None:
    reader = Reader([DriveInfo(0, "u", Path("/"), 1.0, 0.0)], [])
    with pytest.raises(IndexError):
        start(reader, plan_of(Extent(1, 0, 0, 1, 0, 0)))
    reader.close()


@pytest.mark.parametrize("begun", [0, 1, 3])
def test_abandoning_takes_back_what_has_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: int
) -> None:
    monkeypatch.setattr(reader_module, "PIECE_BYTES", PAGE)
    entered, go = SimpleQueue[int](), threading.Event()

    def held(fd: int, buffers: Any, offset: int) -> int:
        entered.put(offset)
        assert go.wait(30)
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", held)
    reader = Reader(*file_drives(tmp_path, [CONTENT]), depth=3)
    plan = plan_of(extent(CONTENT, 0, 3 * PAGE))
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    blocker: SimpleQueue[BaseException | None] = SimpleQueue()
    for _ in range(3 - begun):  # workers that are busy elsewhere
        reader.submit(plan_of(extent(CONTENT, 4 * PAGE, 10)), aligned_memory(PAGE), blocker.put)
    for _ in range(3 - begun):
        entered.get(timeout=30)
    ticket = reader.submit(plan, aligned_memory(plan.buffer_bytes), done.put)
    for _ in range(begun):
        entered.get(timeout=30)
    ticket.abandon()
    ticket.abandon()
    if begun:
        assert done.empty()  # something may still land in the buffer
    else:
        assert isinstance(done.get(timeout=0), ReadCancelled)
    go.set()
    for _ in range(3 - begun):
        assert blocker.get(timeout=30) is None
    if begun:
        error = done.get(timeout=30)
        assert error is None if begun == 3 else isinstance(error, ReadCancelled)
    reader.close()
    assert done.empty()
    assert entered.empty()
