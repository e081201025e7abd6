"""What a setup would do, before it does it: bytes per drive, time at the measured link speed, tokens per second."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import expert_inventory, spine_inventory
from deltafin.errors import DeltafinError
from deltafin.hub.client import Hub, RemoteFile
from deltafin.hub.pins import DRAFT_FILES, Pin
from deltafin.hub.released import Released
from deltafin.store.drives import measure_bandwidth
from deltafin.store.types import DriveSpec

_TRIAL_BYTES = 32 << 20
_TRIAL_SECONDS = 5.0
_RESERVE = 2 << 30  # bytes to leave free on a drive
_MEASURE_FROM = 4 << 30


@dataclass(frozen=True, slots=True)
class DrivePlan:
    """One folder's part: bytes it gets, bytes free there, its measured reads in bytes per second (0: not measured)."""

    path: Path
    bytes: int
    free: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SetupPlan:
    """A setup's cost.

    Attributes:
        kind: ``full`` or ``stream``.
        bytes: to fetch and keep now.
        expert_bytes: of all experts, which a streaming install fetches one by one.
        draft_bytes: of drafts, part of ``bytes``.
        drives: their parts.
        home: that of the folder with the drafts and small files.
        fits: whether there is room for all of them.
        link_bytes_per_s: measured; 0 when it could not be.
        seconds: to fetch ``bytes``; None when unknown.
        tokens_per_s: upper bound by the drives' speed with nothing in RAM; None when they were not measured.
    """

    kind: str
    bytes: int
    expert_bytes: int
    draft_bytes: int
    drives: tuple[DrivePlan, ...]
    home: DrivePlan
    fits: bool
    link_bytes_per_s: float
    seconds: float | None
    tokens_per_s: float | None


def plan_setup(
    kind: str,
    config: K3Config,
    drives: Sequence[DriveSpec],
    home: Path,
    draft_bytes: int,
    link: float,
    *,
    measure: bool = True,
) -> SetupPlan:
    """Plans an install of ``kind``.

    Args:
        kind: ``full`` or ``stream``.
        config: of the model.
        drives: existing directories.
        home: folder of the drafts and small files; need not exist yet.
        draft_bytes: of the drafts that go with it.
        link: bytes per second of the connection; 0 when unknown.
        measure: read from the drives to learn their speed, when the model is large enough to pay for it.

    Raises:
        DriveError: a drive cannot be measured.
    """
    spine = sum(spec.nbytes for unit in spine_inventory(config).values() for spec in unit.values())
    expert = sum(spec.nbytes for spec in expert_inventory(config).values())
    experts = expert * len(config.moe_layers) * config.experts
    payload = spine + experts if kind == "full" else spine
    rates = [0.0] * len(drives)
    if measure and experts > _MEASURE_FROM:
        rates = [measure_bandwidth(spec.path) for spec in drives]
    weights = [spec.weight or rate or 1.0 for spec, rate in zip(drives, rates, strict=True)]
    parts = tuple(
        DrivePlan(
            spec.path,
            round(payload * weight / sum(weights)),
            shutil.disk_usage(spec.path).free,
            rate,
        )
        for spec, weight, rate in zip(drives, weights, rates, strict=True)
    )
    own = DrivePlan(home, draft_bytes, free_at(home), 0.0)
    needed: dict[int, int] = {}
    for part in (*parts, own):
        device = os.stat(_existing(part.path)).st_dev
        needed[device] = needed.get(device, 0) + part.bytes
    reserve = _RESERVE if experts > _MEASURE_FROM else 0
    fits = all(needed[os.stat(_existing(p.path)).st_dev] + reserve <= p.free for p in (*parts, own))
    total = payload + draft_bytes
    per_token = expert * len(config.moe_layers) * config.experts_per_token
    return SetupPlan(
        kind,
        total,
        experts,
        draft_bytes,
        parts,
        own,
        fits,
        link,
        total / link if link else None,
        sum(rates) / per_token if all(rates) and rates else None,
    )


def free_at(folder: Path) -> int:
    """Bytes free where ``folder`` is, or is going to be."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def draft_bytes(listed: dict[str, RemoteFile]) -> int:
    """Bytes of a draft's files."""
    return sum(file.size for name, file in listed.items() if name in DRAFT_FILES)


def measure_link(hub: Hub, pin: Pin, released: Released) -> float:
    """Bytes per second of one connection reading the beginning of the largest shard, for some seconds; 0 when it
    failed."""
    file = max(released.files.values(), key=lambda f: f.size)
    view = memoryview(bytearray(min(_TRIAL_BYTES, file.size)))
    start = time.perf_counter()
    done = 0
    try:
        while done < len(view) and time.perf_counter() - start < _TRIAL_SECONDS:
            piece = min(1 << 20 if not done else 8 << 20, len(view) - done)
            hub.read(pin, file, done, view[done : done + piece])
            done += piece
    except DeltafinError:
        return 0.0
    return done / (time.perf_counter() - start)
