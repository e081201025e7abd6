"""The nouns that cross the store's walls: where bytes lie, how to read them, how the drives did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
"""Bytes to which offsets, lengths and memory of direct reads are aligned."""

SLICE_ALIGN = 16384
"""Bytes to which slices are aligned in a slice file: a whole number of pages on every supported machine."""

SPINE_PAGE = 16 << 20
"""Most bytes of one spine blob."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One slice: a byte range of one file on one drive, and where it belongs in the reader's buffer.

    Attributes:
        drive: index into ``Store.drives``.
        file: index into the store's file table.
        offset: first byte in the file; need not be aligned.
        length: bytes wanted.
        at: position of the first wanted byte in the buffer; ``(at - offset) % PAGE == 0``, so that a direct
            read may round the range out to whole pages on both sides.
        checksum: xxh3_64 of the wanted bytes.
        replica: the same bytes on another drive, which reads them when it is free first.
    """

    drive: int
    file: int
    offset: int
    length: int
    at: int
    checksum: int
    replica: Extent | None = None


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything needed to bring one blob into memory.

    After the read the blob is ``buffer[view_offset:view_offset + nbytes]``, contiguous. The bytes around it
    are undefined. No two extents touch the same page of the buffer.

    Attributes:
        extents: the slices, in blob order.
        view_offset: position of the blob's first byte in the buffer, less than ``PAGE``.
        nbytes: length of the blob.
        buffer_bytes: bytes the buffer must have, a multiple of ``PAGE``.
        name: what is read, for error messages.
        absent: the bytes are not in the install and must be brought; checksums mean nothing.
    """

    extents: tuple[Extent, ...]
    view_offset: int
    nbytes: int
    buffer_bytes: int
    name: str = "blob"
    absent: bool = False


@dataclass(frozen=True, slots=True)
class SpineTensor:
    """One resident tensor inside its unit's buffer.

    Attributes:
        name: released name.
        dtype: ``BF16`` or ``F32``.
        shape: as released.
        offset: first byte in the unit's buffer, a multiple of the element size.
        nbytes: bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SpineUnit:
    """The resident tensors that are read and dropped together: one layer, the embedding, or the head.

    Attributes:
        key: ``layer.<l>``, ``embed`` or ``head``.
        plan: reads the whole unit; ``view_offset`` and ``nbytes`` have no meaning here.
        tensors: where each tensor lies in the buffer.
    """

    key: str
    plan: ReadPlan
    tensors: tuple[SpineTensor, ...]


@dataclass(frozen=True, slots=True)
class DriveSpec:
    """A drive as the user names it.

    Attributes:
        path: an existing directory on the drive.
        weight: share of every blob relative to the other drives; measured when None.
    """

    path: Path
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class DriveInfo:
    """A drive of an install.

    Attributes:
        index: position in the install, used by ``Extent.drive``.
        uuid: identity written into its marker.
        path: directory where it was last found.
        weight: share of every blob relative to the other drives.
        bytes_per_s: read bandwidth measured when the install was created; 0 when not measured.
    """

    index: int
    uuid: str
    path: Path
    weight: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class DriveStats:
    """What one drive did since the store was opened.

    Attributes:
        drive: index into ``Store.drives``.
        path: its directory.
        bytes: wanted bytes delivered (rounding to pages not counted).
        reads: requests sent to the operating system.
        busy_seconds: wall time during which at least one request was in flight.
        wait_seconds: time requests spent queued, summed over requests.
        retries: requests repeated after an error or a checksum mismatch.
        direct: whether every read bypassed the page cache.
        fallback: why not, empty when ``direct``.
        helped_bytes: part of ``bytes`` that were read from replicas for a drive that was slower.
    """

    drive: int
    path: Path
    bytes: int
    reads: int
    busy_seconds: float
    wait_seconds: float
    retries: int
    direct: bool
    fallback: str
    helped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """A moment of a running ``create``.

    Attributes:
        phase: ``measure``, ``copy`` or ``checksum``.
        done_bytes: payload bytes that are finished and durable or on their way to the drives.
        total_bytes: payload bytes of the whole install.
        resumed_bytes: part of ``done_bytes`` found finished when this run began.
        bytes_per_s: of each drive in the last seconds.
        eta_seconds: remaining time at the present rate; None before it is known.
    """

    phase: str
    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    bytes_per_s: tuple[float, ...]
    eta_seconds: float | None


class ReadCancelled(Exception):
    """The read was cancelled before any of it started, or the reader was closed. Never shown to a user."""
