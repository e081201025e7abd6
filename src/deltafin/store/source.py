"""A blob's bytes out of the released shards: one direct read where they lie together, gathered where they do not."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from deltafin.checkpoint import Checkpoint, Run
from deltafin.errors import ReadError
from deltafin.store.buffers import AlignedBuffer
from deltafin.store.direct import DirectFile
from deltafin.store.files import patiently
from deltafin.store.manifest import Manifest
from deltafin.store.types import PAGE, SPINE_PAGE

AGAIN = "finished work is kept: run the same command again to continue"


class BlobSource:
    """Reads a blob's bytes out of the checkpoint, gathering scattered ones. One per thread.

    Args:
        manifest: of the install, which numbers blobs and places spine tensors.
        checkpoint: the released files.
    """

    def __init__(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._files: dict[str, DirectFile] = {}
        self._blob = AlignedBuffer(1)
        self._scratch = AlignedBuffer(1)
        self._unit: tuple[int, int, list[tuple[int, Run]]] = (0, 0, [])

    def read(self, blob: int, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes [begin, end) of ``blob``, all by default, valid until the next call.

        Raises:
            ReadError: the checkpoint cannot be read.
        """
        runs, nbytes = self._runs(blob)
        if begin or (end is not None and end < nbytes):
            nbytes = (nbytes if end is None else end) - begin
            runs = cut_runs(runs, begin, begin + nbytes)
        if len(runs) == 1 and runs[0][1].nbytes == nbytes:
            self._blob, view = self._direct(self._blob, runs[0][1])
            return view
        self._blob = _at_least(self._blob, nbytes)
        target = self._blob.view[:nbytes]
        target[:] = bytes(nbytes)  # padding between tensors is part of the slice and of its checksum
        self._gather(target, runs)
        return target

    def _gather(self, target: memoryview, runs: list[tuple[int, Run]]) -> None:
        """Puts each run at its place in ``target``."""
        for at, run in runs:
            self._scratch, view = self._direct(self._scratch, run)
            target[at : at + run.nbytes] = view

    def close(self) -> None:
        """Closes the shards."""
        for file in self._files.values():
            file.close()

    def _runs(self, blob: int) -> tuple[list[tuple[int, Run]], int]:
        m = self._manifest
        first, end = int(m.first[blob]), int(m.first[blob + 1])
        begin = int(m.at[first])
        nbytes = int(m.at[end - 1] + m.length[end - 1]) - begin
        if blob < m.expert_blobs:
            layer, expert = divmod(blob, m.config.experts)
            runs = self._checkpoint.expert_runs(layer + m.config.dense_layers, expert)
            starts = np.cumsum([0, *(run.nbytes for run in runs)]).tolist()
            return list(zip(starts, runs, strict=False)), nbytes
        return cut_runs(self._unit_runs(blob), begin, begin + nbytes), nbytes

    def _unit_runs(self, blob: int) -> list[tuple[int, Run]]:
        """Where the unit that contains ``blob`` comes from, sorted by position in its buffer."""
        low, high, runs = self._unit
        if low <= blob < high:
            return runs
        m = self._manifest
        key = next(k for k, u in m.units.items() if u.first_blob <= blob < u.first_blob + u.blobs)
        tensors = self._checkpoint.spine_units()[key]
        runs = sorted(
            (m.tensor_offsets[name], Run(info.file, info.offset, info.nbytes)) for name, info in tensors.items()
        )
        self._unit = (m.units[key].first_blob, m.units[key].first_blob + m.units[key].blobs, runs)
        return runs

    def _direct(self, buffer: AlignedBuffer, run: Run) -> tuple[AlignedBuffer, memoryview]:
        lead = run.offset % PAGE
        wanted = lead + run.nbytes
        buffer = _at_least(buffer, wanted)
        path = self._checkpoint.folder / run.file
        try:
            file = self._files.get(run.file) or DirectFile(path.resolve())
            self._files[run.file] = file
            view = buffer.view[: -(-wanted // PAGE) * PAGE]
            patiently(lambda: file.read(view, run.offset - lead, wanted))
        except (OSError, EOFError) as e:
            reason = (e.strerror if isinstance(e, OSError) else None) or e
            raise ReadError(
                f"{path}, bytes {run.offset} to {run.offset + run.nbytes}: {reason}",
                remedy="fetch this file again from the model's repository; " + AGAIN,
            ) from None
        return buffer, buffer.view[lead:wanted]


def _at_least(buffer: AlignedBuffer, nbytes: int) -> AlignedBuffer:
    return buffer if buffer.view.nbytes >= nbytes else AlignedBuffer(max(nbytes, SPINE_PAGE))


def cut_runs(runs: list[tuple[int, Run]], begin: int, end: int) -> list[tuple[int, Run]]:
    """The part of ``runs`` between two positions, relative to the first; touching neighbours merged."""
    index = max(0, bisect_right(runs, begin, key=lambda item: item[0]) - 1)
    cut: list[tuple[int, Run]] = []
    for at, run in runs[index:]:
        if at >= end:
            break
        low, high = max(at, begin), min(at + run.nbytes, end)
        if low >= high:
            continue
        part = Run(run.file, run.offset + low - at, high - low)
        if cut:
            previous_at, previous = cut[-1]
            touches = previous_at + previous.nbytes == low - begin
            if touches and previous.file == part.file and previous.offset + previous.nbytes == part.offset:
                cut[-1] = (previous_at, Run(part.file, previous.offset, previous.nbytes + part.nbytes))
                continue
        cut.append((low - begin, part))
    return cut
