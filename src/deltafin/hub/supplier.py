"""Bringing single slices from the hub while an install is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deltafin.checkpoint import Checkpoint, TensorInfo
from deltafin.checkpoint.tensorfile import INDEX_NAME, SINGLE_NAME, read_header, read_index
from deltafin.hub.client import Hub
from deltafin.hub.released import HubShards, Released
from deltafin.hub.slices import HubSource
from deltafin.store.manifest import Manifest
from deltafin.store.recovery import Supplier


class LazyTensors(Mapping[str, TensorInfo]):
    """The tensor table of a checkpoint that was checked when the install was made; a shard's header is read when one of
    its tensors is asked for. The whole table of the full model takes seconds to read, one header some milliseconds."""

    def __init__(self, folder: Path, shards: HubShards) -> None:
        self._folder = folder
        self._shards = shards
        self._index: dict[str, str] | None = None
        self._headers: dict[str, dict[str, TensorInfo]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> TensorInfo:
        with self._lock:
            if self._index is None:
                path = self._folder / INDEX_NAME
                self._index = read_index(path) if path.exists() else {}
            file = self._index.get(name, SINGLE_NAME)
            header = self._headers.get(file)
            if header is None:
                header = self._headers[file] = read_header(self._folder / file, shards=self._shards)
            return header[name]

    def __iter__(self) -> Iterator[str]:
        raise TypeError("the table is read piece by piece")

    def __len__(self) -> int:
        raise TypeError("the table is read piece by piece")


class HubSupplier:
    """A ``Supplier`` that reads from the hub. Opens no connection before something is missing.

    Args:
        manifest: of the install.
        released: what it remembers of its hub.
        hub: makes the connection pool.
    """

    def __init__(self, manifest: Manifest, released: Released, hub: Callable[[], Hub]) -> None:
        self._m = manifest
        self._released = released
        self._make = hub
        self._hub: Hub | None = None
        self._checkpoint: Checkpoint | None = None
        self._lock = threading.Lock()
        self._closed = False

    def fetch(self, blob: int, begin: int, view: memoryview, stopped: Callable[[], bool]) -> None:
        """See ``Supplier``.

        Raises:
            HubError: the bytes cannot be had.
        """
        checkpoint, hub = self._opened()
        source = HubSource(self._m, checkpoint, self._released, hub, stopped=stopped)
        source.read_into(blob, begin, view)

    def close(self) -> None:
        """See ``Supplier``."""
        self._closed = True
        if self._hub is not None:
            self._hub.close()

    def _opened(self) -> tuple[Checkpoint, Hub]:
        with self._lock:
            if self._hub is None or self._checkpoint is None:
                self._hub = self._make()
                if self._closed:
                    self._hub.stop()
                folder, shards = self._released.folder, HubShards(self._released, self._hub)
                table = LazyTensors(folder, shards)
                self._checkpoint = Checkpoint(folder, self._m.config, table, {}, self._m.identity, shards)
            return self._checkpoint, self._hub


def supplier_for(hub: Callable[[], Hub]) -> Callable[[Manifest], Supplier | None]:
    """What ``Store.open`` needs to bring slices from the hub; yields None for an install that came from no hub."""

    def make(manifest: Manifest) -> Supplier | None:
        released = Released.load(manifest.path.parent)
        return None if released is None else HubSupplier(manifest, released, hub)

    return make
