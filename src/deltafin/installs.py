"""Finds or makes the install a command works on: named store, released folder in place, default, built-in miniature."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import StoreError, UsageError
from deltafin.settings import Settings
from deltafin.store.create import create_store
from deltafin.store.manifest import MANIFEST_NAME
from deltafin.store.store import find_home
from deltafin.store.types import DriveSpec, IngestProgress

MINI_DRIVES = 2


@dataclass(frozen=True, slots=True)
class Install:
    """Where an install is and how to call it.

    Attributes:
        home: folder of the manifest.
        label: for the user, e.g. ``mini K3 (built in)``.
        builtin: whether it is the miniature model, which only shows and tests the engine.
        draft_folders: where drafts that belong to it may lie, in subfolders ``dspark`` and ``qwen``.
    """

    home: Path
    label: str
    builtin: bool = False
    draft_folders: tuple[Path, ...] = ()


def embedded_checkpoint() -> Path:
    """The miniature K3 checkpoint that ships with the package."""
    return Path(__file__).parent / "mini_k3" / "target"


def resolve(settings: Settings, progress: Callable[[IngestProgress], None] | None = None) -> Install:
    """The install that ``settings`` mean, created when it is derived from a folder of released files.

    Raises:
        UsageError: contradictory settings, or a folder that is neither an install nor a checkpoint.
        StoreError, CheckpointError: it cannot be created or used.
    """
    if settings.store is not None and settings.model is not None:
        raise UsageError("--store and --model both name a model", remedy="give one of them")
    if settings.store is not None:
        home = find_home(settings.store)
        return Install(home, f"install at {home}")
    if settings.model is not None:
        folder = settings.model.resolve()
        if not folder.is_dir():
            raise UsageError(
                f"{settings.model} is not a folder",
                remedy="point --model at a folder with the released files",
            )
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        home = settings.home / "in-place" / name
        with _lock(home):
            create_store(folder, [], layout="in-place", home=home, progress=progress)
        return Install(home, f"released files at {folder}, in place", draft_folders=(folder, folder.parent))
    default = settings.home / "store"
    if (default / MANIFEST_NAME).is_file():
        return Install(default, f"default install at {default}")
    return embedded(settings, progress)


def embedded(settings: Settings, progress: Callable[[IngestProgress], None] | None = None) -> Install:
    """The built-in miniature, striped over two folders as a real install is over two drives; made at first use."""
    base = settings.home / "mini-k3"
    drives = [DriveSpec(base / f"drive-{i + 1}", weight=1.0) for i in range(MINI_DRIVES)]
    with _lock(base):
        for drive in drives:
            _make(drive.path)
        home = create_store(embedded_checkpoint(), drives, layout="striped", progress=progress)
    return Install(home, "mini K3 (built in)", builtin=True, draft_folders=(embedded_checkpoint().parent,))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise StoreError(
            f"{folder} cannot be created: {e.strerror}", remedy="name another folder with K3_HOME"
        ) from None


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time makes an install; others wait and then find it made."""
    _make(folder)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
