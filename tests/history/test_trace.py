"""Router traces: what is written is read, and damage is noticed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.errors import UsageError
from deltafin.history.trace import TraceShape, TraceWriter, read_trace

SHAPE = TraceShape(3, 50, 2, "model")


def write(path: Path, *blocks: np.ndarray) -> np.ndarray:
    writer = TraceWriter(path, SHAPE)
    for i, block in enumerate(blocks):
        writer.write(block, new_sequence=i == 2)
    writer.close()
    return np.concatenate(blocks)


def routes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (count, 3, 2))


def test_round_trip(tmp_path: Path) -> None:
    wanted = write(tmp_path / "t", routes(5), routes(1), routes(9))
    trace = read_trace(tmp_path / "t")
    assert trace.shape == SHAPE
    assert (trace.routes == wanted).all()
    assert trace.starts == (0, 6)
    assert not trace.torn


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        TraceWriter(tmp_path / "t", SHAPE)
    assert (tmp_path / "t").read_text() == "precious"


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cut_or_changed_anywhere_it_never_yields_wrong_routes(data, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    wanted = write(path, routes(4, 1), routes(4, 2))
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    spoilt = good[:at] if data.draw(st.booleans()) else good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :]
    path.write_bytes(spoilt)
    try:
        trace = read_trace(path)
    except UsageError:
        return
    header = good.index(b"\n")
    if at > header + 4:  # a changed header may honestly describe another model or sequence start
        assert (trace.routes == wanted[: len(trace.routes)]).all()


def test_a_block_that_would_swell_is_refused(tmp_path: Path) -> None:
    import struct
    import zlib

    import xxhash

    path = tmp_path / "t"
    write(path, routes(1))
    bomb = zlib.compress(bytes(50 << 20))
    with path.open("ab") as file:
        file.write(struct.pack("<IIQ", 1, len(bomb), xxhash.xxh3_64_intdigest(bomb)) + bomb)
    with pytest.raises(UsageError, match="damaged"):
        read_trace(path)


@pytest.mark.parametrize("text", [b"", b"hello", b'{"magic": "deltafin-router-trace", "version": 1}\n', b"[" * 4000])
def test_other_files_are_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(text)
    with pytest.raises(UsageError):
        read_trace(tmp_path / "t")
