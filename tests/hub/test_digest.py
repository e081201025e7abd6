from __future__ import annotations

import hashlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

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
