from __future__ import annotations

import hashlib
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltafin.hub import digest as digests
from deltafin.hub.digest import RunningDigest


@pytest.mark.parametrize("pending", [0, 3000, 1 << 20])
def test_any_order_overlaps_and_gaps(pending: int) -> None:
    chooser = random.Random(pending)
    data = chooser.randbytes(50_000)
    for _ in range(20):
        digest = RunningDigest(len(data), lambda at, n: data[at : at + n], pending=pending)
        cuts = sorted({0, len(data), *(chooser.randrange(len(data)) for _ in range(30))})
        pieces = list(itertools.pairwise(cuts))
        pieces += [(b, min(b + 700, len(data))) for b, _ in chooser.sample(pieces, 5)]  # overlapping ones
        chooser.shuffle(pieces)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda p, d=digest: d.offer(p[0], memoryview(data)[p[0] : p[1]]), pieces[3:]))  # type: ignore[misc]
        assert digest.finish() == hashlib.sha256(data).hexdigest()


def test_a_wrong_byte_shows() -> None:
    data = bytes(10_000)
    digest = RunningDigest(len(data), lambda at, n: data[at : at + n])
    digest.offer(0, b"\1" + data[1:5000])
    assert digest.finish() != hashlib.sha256(data).hexdigest()


def test_who_waits_needs_no_reading_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "STALL_SECONDS", 600.0)
    data = random.Random(1).randbytes(64_000)
    read_back: list[int] = []

    def read(at: int, nbytes: int) -> bytes:
        read_back.append(at)
        return data[at : at + nbytes]

    digest = RunningDigest(len(data), read, pending=0)
    # Eight threads with a piece each, the last in file order first: all but one of them wait.
    threads = [
        threading.Thread(target=digest.offer, args=(at, data[at : at + 8000]), kwargs={"wait": True})
        for at in range(0, len(data), 8000)
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert digest.finish() == hashlib.sha256(data).hexdigest()
    assert read_back == []


def test_what_is_known_is_read_where_it_stands() -> None:
    data = random.Random(2).randbytes(50_000)
    read_back: list[tuple[int, int]] = []

    def read(at: int, nbytes: int) -> bytes:
        read_back.append((at, nbytes))
        return data[at : at + nbytes]

    def known(at: int) -> int:  # the beginning, and a piece in the middle, were there before
        return 10_000 - at if at < 10_000 else 30_000 - at if 20_000 <= at < 30_000 else 0

    digest = RunningDigest(len(data), read, known, head=data[:100])
    for at in (10_000, 30_000, 40_000):
        digest.offer(at, data[at : at + 10_000], wait=True)
    assert digest.finish() == hashlib.sha256(data).hexdigest()
    assert read_back == [(100, 9_900), (20_000, 10_000)]


def test_a_piece_before_which_nothing_moves_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "STALL_SECONDS", 0.01)
    data = random.Random(3).randbytes(30_000)
    digest = RunningDigest(len(data), lambda at, n: data[at : at + n], pending=0)
    digest.offer(10_000, data[10_000:], wait=True)
    assert digest.finish() == hashlib.sha256(data).hexdigest()


def test_an_error_in_reading_back_frees_the_turn() -> None:
    data = bytes(20_000)
    broken = [True]

    def read(at: int, nbytes: int) -> bytes:
        if broken[0]:
            raise OSError("unplugged")
        return data[at : at + nbytes]

    digest = RunningDigest(len(data), read, lambda at: 10_000 - at if at < 10_000 else 0)
    with pytest.raises(OSError, match="unplugged"):
        digest.offer(10_000, data[10_000:], wait=True)
    broken[0] = False
    digest.offer(10_000, data[10_000:], wait=True)
    assert digest.finish() == hashlib.sha256(data).hexdigest()
