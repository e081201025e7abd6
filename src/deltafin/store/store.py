"""An opened install: plans for experts and spine units, and the reader that carries them out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from glob import escape, glob
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from deltafin.checkpoint.inventory import spine_inventory
from deltafin.errors import ManifestError, SliceMissingError
from deltafin.expert_layout import ExpertLayout
from deltafin.store.drives import check_drive, check_files, follow, places_of
from deltafin.store.files import hold
from deltafin.store.manifest import MANIFEST_NAME, Manifest
from deltafin.store.reader import Reader, raise_file_limit
from deltafin.store.recovery import Recovery, Supplier
from deltafin.store.replicas import Replicas, load, replica_path
from deltafin.store.types import PAGE, Extent, ReadPlan, SpineTensor, SpineUnit

_log = logging.getLogger("deltafin")
_log = logging.getLogger("deltafin")
_MAX_CACHED_PLANS = 16384
_MAX_CHECKED_METADATA = 64 << 20  # the tensor index is larger and is not used by an opened install


class Store:
    """An opened install; a context manager. Everything but ``reader`` is immutable and may be used from any thread.

    Attributes:
        config: the model's geometry.
        metadata_dir: folder with config.json, tiktoken.model and the other small released files.
        identity: of the model, see ``Checkpoint.identity``.
        layout: ``striped`` or ``in-place``.
        drives: the drives, by index.
        expert_layout: where an expert's six tensors lie inside its blob.
        expert_buffer_bytes: memory that any expert's plan fits into.
        spine_keys: units in reading order: ``embed``, ``layer.0`` …, ``head``.
        reader: carries out plans.
    """

    def __init__(self, home: Path, manifest: Manifest, reader: Reader, replicas: Replicas) -> None:
        m = manifest
        self.config = m.config
        self.metadata_dir = home
        self.identity = m.identity
        self.layout = m.layout
        self.drives = m.drives
        self.reader = reader
        self.expert_layout = ExpertLayout.released(m.config.latent, m.config.expert_intermediate)
        self.spine_keys = tuple(m.units)
        self._manifest = m
        drive_of_file = np.array([f.drive for f in m.files], dtype=np.int64)
        self._rows = np.stack([drive_of_file[m.file], m.file, m.offset, m.length, m.at], axis=1)
        self._replicas = replicas
        self._first: list[int] = m.first.tolist()
        experts = m.expert_blobs
        starts, ends = m.first[:experts], m.first[1 : experts + 1] - 1
        self.expert_buffer_bytes = -(-int((m.at + m.length)[ends].max(initial=0)) // PAGE) * PAGE
        rank = np.empty(experts, dtype=np.int64)
        rank[np.lexsort((m.offset[starts], m.file[starts]))] = np.arange(experts)
        self._rank: list[int] = rank.tolist()
        self._plans: dict[int, ReadPlan] = {}
        self._held: int | None = None

    @classmethod
    def open(
        cls,
        home: Path,
        *,
        depth: int | None = None,
        max_bytes_per_s: Mapping[int, float] | None = None,
        supplier: Callable[[Manifest], Supplier | None] | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> Store:
        """Opens the install at ``home``.

        Args:
            home: the install's folder, or a drive that holds exactly one.
            depth: requests in flight per drive; None for the default.
            max_bytes_per_s: bandwidth limit by drive index, for tests and benchmarks.
            supplier: makes what brings slices that are absent or damaged; without it these are errors.
            notify: told single sentences for the user while reads wait; logged by default.

        Raises:
            ManifestError: no install there, or its manifest or metadata is damaged.
            ConfigError: the configuration beside it is not K3's.
            DriveMissingError: a drive's directory is missing.
            DriveSwappedError: a drive's directory belongs to something else.
            ReadError: a slice file is missing or truncated.
        """
        home = find_home(home)
        held = hold(home)  # before the manifest is read: what it names stays until this is closed
        try:
            store = cls._open(home, depth, max_bytes_per_s, supplier, notify)
        except BaseException:
            if held is not None:
                os.close(held)
            raise
        store._held = held
        return store

    @classmethod
    def _open(
        cls,
        home: Path,
        depth: int | None,
        max_bytes_per_s: Mapping[int, float] | None,
        supplier: Callable[[Manifest], Supplier | None] | None,
        notify: Callable[[str], None] | None,
    ) -> Store:
        manifest, moved = follow(Manifest.load(home))
        for sentence in moved:
            (notify or _log.warning)(sentence)
        check_metadata(home, manifest)
        for drive in manifest.drives:
            check_drive(manifest, drive)
        check_files(manifest)
        raise_file_limit(len(manifest.files))
        paths = [(entry.drive, manifest.file_path(index)) for index, entry in enumerate(manifest.files)]
        replicas = load(manifest)
        if replicas.problem:
            _log.warning("%s", replicas.problem)
        if replicas.count:  # one more file on each drive, behind those of the manifest
            paths += [(drive.index, replica_path(manifest, drive.index)) for drive in manifest.drives]
        reader = Reader(manifest.drives, paths, depth=depth, max_bytes_per_s=max_bytes_per_s)
        brings = None if supplier is None else supplier(manifest)
        reader.recovery = Recovery(manifest, brings, reopen=reader.reopen, notify=notify)
        return cls(home, manifest, reader, replicas)

    def expert_plan(self, layer: int, expert: int) -> ReadPlan:
        """How to read one routed expert.

        Args:
            layer: 0-based layer with routed experts.
            expert: 0-based.

        Raises:
            SliceMissingError: the expert was never completely written.
            IndexError: no such expert.
        """
        config = self.config
        if not (config.dense_layers <= layer < config.layers and 0 <= expert < config.experts):
            raise IndexError(f"no expert {expert} in layer {layer}")
        blob = (layer - config.dense_layers) * config.experts + expert
        plan = self._plans.get(blob)
        if plan is None:
            extents, absent = self._extents(blob, blob + 1)
            last = extents[-1]
            view = extents[0].at
            end = last.at + last.length
            name = f"expert {expert} of layer {layer}"
            plan = ReadPlan(extents, view, end - view, -(-end // PAGE) * PAGE, name, absent)
            if absent:
                return plan
            if len(self._plans) >= _MAX_CACHED_PLANS:
                self._plans.clear()
            self._plans[blob] = plan
        return plan

    def has_expert(self, layer: int, expert: int) -> bool:
        """Whether all slices of an expert are present, so that reading it needs no network."""
        blob = (layer - self.config.dense_layers) * self.config.experts + expert
        return bool(self._manifest.present[self._first[blob] : self._first[blob + 1]].all())

    def file_order(self, layer: int, experts: Sequence[int]) -> list[int]:
        """``experts`` of ``layer`` sorted by position on the drives, for sequential reading."""
        base = (layer - self.config.dense_layers) * self.config.experts
        return sorted(experts, key=lambda expert: self._rank[base + expert])

    def spine_unit(self, key: str) -> SpineUnit:
        """How to read one spine unit, and where its tensors land.

        Raises:
            SliceMissingError: the unit was never completely written.
            KeyError: no such unit.
        """
        m, unit = self._manifest, self._manifest.units[key]
        extents, _ = self._extents(unit.first_blob, unit.first_blob + unit.blobs)
        tensors = tuple(
            SpineTensor(name, spec.dtype, spec.shape, m.tensor_offsets[name], spec.nbytes)
            for name, spec in spine_inventory(m.config)[key].items()
        )
        return SpineUnit(key, ReadPlan(extents, 0, unit.buffer_bytes, unit.buffer_bytes, f"spine unit {key}"), tensors)

    def close(self) -> None:
        """Stops the reader and closes all files. Idempotent."""
        if self.reader.recovery is not None:
            self.reader.recovery.close()
        self.reader.close()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _extents(self, blob: int, end: int) -> tuple[tuple[Extent, ...], bool]:
        """The extents of blobs [blob, end), and whether they are absent and can be brought."""
        m = self._manifest
        first, last = self._first[blob], self._first[end]
        absent = not m.present[first:last].all()
        # The spine is needed at once and whole: bringing it is a matter of setup, not of a read.
        if absent and (blob >= m.expert_blobs or self.reader.recovery is None or self.reader.recovery.supplier is None):
            missing = int(m.blobs[first + int(np.argmin(m.present[first:last]))])
            raise SliceMissingError(
                f"{m.blob_name(missing)} is not in the install at {self.metadata_dir}",
                remedy=self._how_to_complete(missing),
            )
        checksums = m.checksum[first:last].tolist()
        others = zip(self._replicas.drive[first:last].tolist(), self._replicas.offset[first:last].tolist(), strict=True)
        extents = (
            Extent(drive, file, offset, length, at, checksum, self._replica(*other, length, at, checksum))
            for (drive, file, offset, length, at), checksum, other in zip(
                self._rows[first:last].tolist(), checksums, others, strict=True
            )
        )
        return tuple(extents), absent

    def _replica(self, drive: int, offset: int, length: int, at: int, checksum: int) -> Extent | None:
        if drive < 0:
            return None
        return Extent(drive, len(self._manifest.files) + drive, offset, length, at, checksum)

    def _how_to_complete(self, blob: int) -> str:
        if not (self.metadata_dir / "released").is_dir():
            return "complete it by running the same deltafin store create again"
        config = self.config
        if blob >= self._manifest.expert_blobs:
            return "complete it by running the same deltafin setup again"
        layer, expert = divmod(blob, config.experts)
        which = f"--layers {layer + config.dense_layers} --experts {expert}"
        return f"fetch it with: deltafin fetch --store {self.metadata_dir} {which}; or allow the network"


def find_home(path: Path) -> Path:
    """The folder with the manifest: ``path`` itself, or the only install directly below it.

    Raises:
        ManifestError: there is none, or more than one.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    found = sorted(path.glob(f"deltafin-*/{MANIFEST_NAME}"))
    if len(found) == 1:
        return found[0].parent
    if found:
        names = ", ".join(str(manifest.parent) for manifest in found[:8])
        raise ManifestError(f"{path} holds several installs: {names}", remedy="name one of them")
    for place in places_of(path.absolute()):
        # The functions of ``Path`` raise where a folder may not be entered.
        below = glob(os.path.join(escape(str(place)), "deltafin-*", MANIFEST_NAME))
        if os.path.isfile(place / MANIFEST_NAME) or below:
            raise ManifestError(
                f"{path} holds no install, but {place} does", remedy=f"if that volume is meant: --store '{place}'"
            )
    raise ManifestError(
        f"{path} holds no install ({MANIFEST_NAME} is missing)",
        remedy="make one with deltafin setup (or, from files, deltafin store create), or name the right folder",
    )


def check_metadata(home: Path, manifest: Manifest) -> None:
    """Checks the small released files beside the manifest against it.

    Raises:
        ManifestError: one is missing or differs.
    """
    for name, checksum in manifest.metadata.items():
        path = home / name
        try:
            if path.stat().st_size <= _MAX_CHECKED_METADATA and xxhash.xxh3_64_intdigest(path.read_bytes()) != checksum:
                raise ManifestError(f"{path} differs from the file this install was made with", remedy=_METADATA)
        except OSError as e:
            raise ManifestError(f"{path} cannot be read: {e.strerror}", remedy=_METADATA) from None


_METADATA = "copy it again from the released model's folder"
