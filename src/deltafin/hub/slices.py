"""Slices straight from a hub's shards onto the drives, and the proof that whole shards are genuine."""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from deltafin.checkpoint import Checkpoint, Run
from deltafin.errors import DeltafinError, HubChecksumError, ReadError
from deltafin.hub.client import Hub
from deltafin.hub.digest import RunningDigest
from deltafin.hub.download import expected_sha256
from deltafin.hub.released import Released
from deltafin.store.buffers import AlignedBuffer
from deltafin.store.direct import DirectFile
from deltafin.store.files import patiently
from deltafin.store.ingest import Row
from deltafin.store.manifest import Manifest
from deltafin.store.meter import Progress
from deltafin.store.source import BlobSource, cut_runs
from deltafin.store.types import PAGE, SPINE_PAGE, IngestProgress

_GAP = 256 << 10  # a request costs more than so many unneeded bytes


class HubSource(BlobSource):
    """Reads blobs from a hub. One per thread.

    Args:
        manifest: of the install.
        checkpoint: opened from ``released``.
        released: which files.
        hub: where from.
        arrived: told (shard, offset, bytes, alone) of every run, in order within a blob; alone when it is all of it.
        stopped: whether nobody waits for the bytes any more.
    """

    def __init__(
        self,
        manifest: Manifest,
        checkpoint: Checkpoint,
        released: Released,
        hub: Hub,
        arrived: Callable[[str, int, memoryview, bool], None] = lambda file, offset, data, alone: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(manifest, checkpoint)
        self._released = released
        self._hub = hub
        self._arrived = arrived
        self._stopped = stopped

    def read_into(self, blob: int, begin: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes of ``blob`` from ``begin``; a contiguous range needs no copy.

        Raises:
            HubError: they cannot be had.
        """
        runs = cut_runs(self._runs(blob)[0], begin, begin + len(view))
        if len(runs) == 1 and runs[0][1].nbytes == len(view):
            self._fetch(runs[0][1], view, alone=True)
        else:
            view[:] = bytes(len(view))
            self._gather(view, runs)

    def _direct(self, buffer: AlignedBuffer, run: Run) -> tuple[AlignedBuffer, memoryview]:
        if buffer.view.nbytes < run.nbytes:
            buffer = AlignedBuffer(max(run.nbytes, SPINE_PAGE))
        view = buffer.view[: run.nbytes]
        self._fetch(run, view, alone=buffer is not self._scratch)
        return buffer, view

    def _fetch(self, run: Run, view: memoryview, *, alone: bool) -> None:
        self._hub.read(self._released.pin, self._released.files[run.file], run.offset, view, self._stopped)
        self._arrived(run.file, run.offset, view, alone)

    def _gather(self, target: memoryview, runs: list[tuple[int, Run]]) -> None:
        # A page of the spine gathers dozens of small tensors that lie side by side: one request brings them all.
        group: list[tuple[int, Run]] = []
        for item in [*sorted(runs, key=lambda item: (item[1].file, item[1].offset)), None]:
            if group:
                last, first = group[-1][1], group[0][1]
                near = item is not None and item[1].file == last.file
                if item is not None and near and item[1].offset - (last.offset + last.nbytes) <= _GAP:
                    group.append(item)
                    continue
                span = Run(first.file, first.offset, last.offset + last.nbytes - first.offset)
                self._scratch, view = self._direct(self._scratch, span)
                for at, run in group:
                    begin = run.offset - first.offset
                    target[at : at + run.nbytes] = view[begin : begin + run.nbytes]
            group = [item] if item is not None else []


class ShardMap:
    """Which blobs a shard's bytes belong to, and reading shards back out of an install.

    Args:
        manifest: of the install.
        checkpoint: the released layout.
    """

    def __init__(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        self._manifest = manifest
        source = BlobSource(manifest, checkpoint)
        pieces: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)  # offset, bytes, blob, position in it
        for blob in range(len(manifest.first) - 1):
            runs, _ = source._runs(blob)
            for at, run in runs:
                pieces[run.file].append((run.offset, run.nbytes, blob, at))
        self.pieces: Mapping[str, list[tuple[int, int, int, int]]] = {f: sorted(p) for f, p in sorted(pieces.items())}

    def blobs(self, file: str) -> list[int]:
        """Blobs with bytes from ``file``, in the order in which they begin in it."""
        return list(dict.fromkeys(piece[2] for piece in self.pieces[file]))

    def order(self, blobs: Iterable[int] | None = None) -> list[int]:
        """``blobs`` (all by default) in the order of the shards' bytes."""
        chosen = None if blobs is None else set(blobs)
        order = dict.fromkeys(blob for file in self.pieces for blob in self.blobs(file))
        return [blob for blob in order if chosen is None or blob in chosen]


class Readback:
    """Reads ranges of one shard from the install's drives, and what no slice holds from the hub."""

    def __init__(self, manifest: Manifest, shards: ShardMap, released: Released, hub: Hub, file: str) -> None:
        self._m = manifest
        self._released = released
        self._hub = hub
        self._file = file
        self._pieces = shards.pieces[file]
        self._offsets = [piece[0] for piece in self._pieces]
        self._size = released.files[file].size
        self._open: dict[int, DirectFile] = {}
        self._buffer = AlignedBuffer(SPINE_PAGE + 2 * PAGE)

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        """At most ``nbytes`` of the shard from ``offset``, at least one."""
        index = bisect_right(self._offsets, offset) - 1
        if index >= 0:
            begin, length, blob, at = self._pieces[index]
            if offset < begin + length:
                return self._slice(blob, at + offset - begin, min(nbytes, begin + length - offset))
        # Header, and tensors that the text model does not use.
        data = bytearray(min(nbytes, self.piece(offset)[1]))
        self._hub.read(self._released.pin, self._released.files[self._file], offset, memoryview(data))
        return bytes(data)

    def is_piece(self, offset: int, nbytes: int) -> bool:
        """Whether exactly these bytes are one blob's part of the shard."""
        index = bisect_right(self._offsets, offset) - 1
        return index >= 0 and self._pieces[index][:2] == (offset, nbytes)

    def piece(self, offset: int) -> tuple[int | None, int]:
        """The blob that holds the shard's byte ``offset`` (None: no slice does), and for how many bytes."""
        index = bisect_right(self._offsets, offset) - 1
        if index >= 0:
            begin, length, blob, _ = self._pieces[index]
            if offset < begin + length:
                return blob, begin + length - offset
        following = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._size
        return None, following - offset

    def close(self) -> None:
        """Closes the slice files."""
        for file in self._open.values():
            file.close()

    def _slice(self, blob: int, at: int, nbytes: int) -> memoryview:
        m = self._m
        first, end = int(m.first[blob]), int(m.first[blob + 1])
        at += int(m.at[first])
        index = first + int(np.searchsorted(m.at[first:end], at, side="right")) - 1
        skip = at - int(m.at[index])
        nbytes = min(nbytes, int(m.length[index]) - skip, SPINE_PAGE)
        position = int(m.offset[index]) + skip
        number = int(m.file[index])
        lead = position % PAGE
        room = self._buffer.view[: -(-(lead + nbytes) // PAGE) * PAGE]
        try:
            file = self._open.get(number) or DirectFile(m.file_path(number))
            self._open[number] = file
            patiently(lambda: file.read(room, position - lead, lead + nbytes))
        except (OSError, EOFError) as e:
            raise ReadError(f"{m.file_path(number)} cannot be read back: {e}", remedy="check the drive") from None
        return self._buffer.view[lead : lead + nbytes]


class ShardProof:
    """Believes the slices of a shard when all of its bytes together have the sha256 that the hub promised.

    Hashes in memory what arrives in order and reads back the rest, in a thread of its own while later shards arrive.
    Blobs of shards that stay incomplete cannot be compared with anything but the size and the ETag under which they
    were served; they are believed when durable. An ingest's ``Witness``.

    Args:
        manifest, shards, released, hub: of the install.
        blobs: that are being brought.
        progress: told how far the proof is once everything has been brought.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: ShardMap,
        released: Released,
        hub: Hub,
        blobs: Iterable[int],
        progress: Progress | None = None,
    ) -> None:
        m = manifest
        self._progress = progress
        self._shards, self._released = shards, released
        brought = set(blobs)
        whole = [bool(m.present[m.first[b] : m.first[b + 1]].all()) for b in range(len(m.first) - 1)]
        files = [
            file
            for file in shards.pieces
            if file not in released.proved and all(whole[b] or b in brought for b in shards.blobs(file))
        ]
        self._left: dict[str, int] = {}
        self._of: dict[int, list[str]] = defaultdict(list)
        self._digests: dict[str, RunningDigest] = {}
        self._readers: dict[str, Readback] = {}
        self._proved: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._unproved: dict[int, int] = {}  # blob → shards that must still be proved
        self._absent: dict[int, int] = {}  # blob → slices not yet durable
        durable = m.present | m.written
        for file in files:
            blobs = shards.blobs(file)
            self._left[file] = 0
            for blob in blobs:
                absent = int((~durable[m.first[blob] : m.first[blob + 1]]).sum())
                self._absent[blob] = absent
                self._left[file] += absent > 0
                self._of[blob].append(file)
                self._unproved[blob] = self._unproved.get(blob, 0) + 1
            reader = Readback(m, shards, released, hub, file)
            self._readers[file] = reader
            header = released.folder / f"{file}.header"
            self._digests[file] = RunningDigest(
                released.files[file].size,
                reader.read,
                partial(self._known, reader),
                head=header.read_bytes() if header.exists() else b"",
            )
        self._free: list[int] = []  # to be believed at once
        for blob in brought - self._absent.keys():
            absent = int((~durable[m.first[blob] : m.first[blob + 1]]).sum())
            self._absent[blob] = absent
            if not absent:
                self._free.append(blob)
        self._thread = threading.Thread(target=self._judge, name="proof", daemon=True)
        self._thread.start()
        for file in files:
            if not self._left[file]:
                self._jobs.put(file)

    def arrived(self, file: str, offset: int, data: memoryview, alone: bool) -> None:
        """A run of a shard is in memory; see ``HubSource``."""
        digest = self._digests.get(file)
        if digest is not None:
            # Blobs are brought in the order of the shards' bytes, so what lies before a run is done or on its way. Not
            # so for blobs gathered from several places (waiting, they could wait for each other), and of a blob of
            # which part is here the other part cannot be next.
            digest.offer(offset, data, wait=alone and self._readers[file].is_piece(offset, len(data)))

    def _known(self, reader: Readback, at: int) -> int:
        """Bytes of a shard from ``at`` that need not be waited for."""
        blob, nbytes = reader.piece(at)
        return nbytes if blob is None or not self._absent[blob] else 0

    def durable(self, rows: Sequence[Row]) -> None:
        """See ``Witness``."""
        for blob, _, _ in rows:
            self._absent[blob] -= 1
            if not self._absent[blob]:
                if blob not in self._of:
                    self._free.append(blob)
                for file in self._of.get(blob, ()):
                    self._left[file] -= 1
                    if not self._left[file]:
                        self._jobs.put(file)
                    elif (digest := self._digests.get(file)) is not None:
                        digest.wake()

    def believed(self) -> list[int]:
        """See ``Witness``.

        Raises:
            HubChecksumError: a shard is not what the hub promised; all of ``failed`` must be fetched again.
        """
        if self._errors:
            raise self._errors[0]
        blobs, self._free = self._free, []
        while True:
            try:
                file = self._proved.get_nowait()
            except queue.Empty:
                break
            self._released.proved.add(file)
            self._released.save()
            for blob in self._shards.blobs(file):
                self._unproved[blob] -= 1
                if not self._unproved[blob]:
                    blobs.append(blob)
        return blobs

    def finish(self) -> None:
        """See ``Witness``."""
        self._jobs.put(None)
        digests = list(self._digests.values())
        total = sum(digest.size for digest in digests)
        start, first = time.monotonic(), sum(digest.done for digest in digests)
        while self._thread.is_alive():
            self._thread.join(0.2)  # lets Ctrl-C through
            done = sum(digest.done for digest in digests)
            if self._progress is not None and done < total:
                rate = (done - first) / max(time.monotonic() - start, 1e-9)
                left = (total - done) / rate if rate > 0 else None
                self._progress(IngestProgress("prove", done, total, first, (rate,), left))

    def close(self) -> None:
        """Ends the thread and closes what it read."""
        self._jobs.put(None)
        self._thread.join()
        for reader in self._readers.values():
            reader.close()

    failed: str = ""
    """The shard that was not genuine, after ``believed`` raised."""

    def _judge(self) -> None:
        while (file := self._jobs.get()) is not None:
            try:
                remote = self._released.files[file]
                expected = expected_sha256(self._released.pin, remote)
                if self._digests.pop(file).finish() != expected:
                    self.failed = file
                    raise HubChecksumError(
                        f"{file} of {self._released.pin.repo} differs from the hub's own checksum",
                        remedy="run the same command again; if it happens again, use another mirror",
                    )
                self._proved.put(file)
            except Exception as e:
                self._errors.append(e if isinstance(e, DeltafinError) else ReadError(f"{file}: {e}"))
                return
