"""The checks, in the order in which a user would want them mended."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil

from deltafin.backends import BackendChoice, apple_silicon, choose, open_backend
from deltafin.contract import BackendName
from deltafin.doctor.finding import Finding, Level, failed
from deltafin.doctor.mac import examine_mac
from deltafin.errors import DeltafinError, ExitCode
from deltafin.hub.released import FOLDER, Released
from deltafin.store import replicas
from deltafin.store.drives import elsewhere, read_rate
from deltafin.store.manifest import MANIFEST_NAME, Manifest
from deltafin.store.store import check_metadata, find_home
from deltafin.store.survey import DriveReport, inspect_store
from deltafin.store.types import IngestProgress
from deltafin.store.verify import verify_store

_LEAST_MEMORY = 8 << 30
_SLOW_DRIVE = 500e6  # bytes per second; a token of the full model is 25.8 GB
_FULL_SPINE = 111_160_730_624
_RATE_BYTES = 16 << 20
_MOST_LISTED = 10


def examine(
    home: Path,
    data: Path,
    *,
    backend: BackendChoice = "auto",
    deep: bool = False,
    progress: Callable[[IngestProgress], None] | None = None,
) -> Iterator[Finding]:
    """Runs all checks.

    Args:
        home: the install's folder; one that holds no install is a finding.
        data: Deltafin's own folder, with heat and states.
        backend: whose runtime is looked at.
        deep: read every slice and compare its checksum, at drive speed.
        progress: for the deep check.

    Yields:
        Findings, area by area.
    """
    yield from _machine(choose(backend))
    yield from _runtime(backend)
    manifest = None
    try:
        found = find_home(home)
        manifest = Manifest.load(found)
    except DeltafinError as e:
        if (home / FOLDER).is_dir() and not (home / MANIFEST_NAME).exists():
            what = f"{home}: a setup was begun and is unfinished"
            again = "run the same deltafin setup again: what was fetched is kept"
            yield Finding("install", Level.FAIL, what, "nothing can be computed with it yet", again, ExitCode.STORE)
        elif home.exists():
            yield failed("install", e, "the install cannot be opened")
        else:
            yield Finding(
                "install",
                Level.NOTE,
                f"no install at {home}",
                "only the built-in miniature model can be used",
                "deltafin setup --drive DIR shows what fits on your drives",
            )
    if manifest is not None:
        yield from _install(manifest, deep=deep, progress=progress)
        yield from _drafts(manifest)
    yield from examine_mac([] if manifest is None else _slice_folders(manifest))
    yield from _sessions(data)


def _machine(backend: BackendName) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    size = f"{memory.total / 1e9:,.0f} GB of memory, {memory.available / 1e9:,.0f} GB free"
    if memory.total < _LEAST_MEMORY:
        yield Finding(
            "machine", Level.WARN, size, "the full model needs at least 8 GiB", "use a machine with more memory"
        )
    elif memory.available < _FULL_SPINE:
        yield Finding(
            "machine", Level.NOTE, size, "the full model's spine (111 GB) will be streamed in part for every token"
        )
    else:
        yield Finding("machine", Level.OK, size, "the full model's spine fits")
    cores = psutil.cpu_count(logical=False) or 1
    yield Finding("machine", Level.OK, f"{cores} cores, {platform.machine()}, {platform.system()} {platform.release()}")
    yield _gpu(backend)


def _gpu(backend: BackendName) -> Finding:
    if apple_silicon():
        return Finding("machine", Level.OK, "Apple Silicon GPU")
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
            return Finding("machine", Level.OK, f"{torch.cuda.device_count()} CUDA device(s): {', '.join(names)}")
    return Finding("machine", Level.NOTE, "no GPU", "the CPU computes; reading experts usually takes longer than that")


def _runtime(choice: BackendChoice) -> Iterator[Finding]:
    import deltafin

    version = f"Deltafin {deltafin.__version__}, Python {platform.python_version()}"
    try:
        backend = open_backend(choice)
        yield Finding("runtime", Level.OK, f"{version}, {backend.describe()}")
        backend.prepare(None)
        yield Finding("runtime", Level.OK, f"the {backend.name} backend's kernels agree with their reference")
    except DeltafinError as e:
        yield failed("runtime", e, "nothing can be computed with this backend")
    except ImportError as e:
        yield Finding(
            "runtime",
            Level.FAIL,
            f"{version}: the backend cannot be loaded: {e}",
            "nothing can be computed",
            "reinstall with a C++ compiler: pip install --force-reinstall --no-deps .",
            ExitCode.MACHINE,
        )


def _install(m: Manifest, *, deep: bool, progress: Callable[[IngestProgress], None] | None) -> Iterator[Finding]:
    home = m.path.parent
    report = inspect_store(home)
    total = f"{(report.expert_bytes + report.spine_bytes) / 1e9:,.2f} GB on {len(m.drives)} drive(s)"
    yield Finding(
        "install",
        Level.OK,
        f"{home}: {m.layout}, {report.layers} layers of {report.experts} experts, {total}",
    )
    try:
        check_metadata(home, m)
    except DeltafinError as e:
        yield failed("install", e, "the small released files must be the ones the install was made with")
    yield from _presence(m)
    yield from _replicas(m)
    for drive in report.drives:
        yield from _drive(m, drive)
    if not deep:
        yield Finding("install", Level.NOTE, "slices were not read", "", "read them all with: deltafin doctor --deep")
        return
    if any(drive.state != "ok" for drive in report.drives):
        return
    try:
        verified = verify_store(home, progress=progress)
    except DeltafinError as e:
        yield failed("install", e)
        return
    for bad in verified.bad[:_MOST_LISTED]:
        yield Finding("install", Level.FAIL, f"damaged: {bad.name}: {bad.reason}", "", _mend(m), ExitCode.STORE)
    if len(verified.bad) > _MOST_LISTED:
        yield Finding(
            "install", Level.FAIL, f"{len(verified.bad)} slices are damaged in all", "", _mend(m), ExitCode.STORE
        )
    if not verified.bad:
        yield Finding("install", Level.OK, f"all {verified.slices:,} slices that are present were read and are right")


def _slice_folders(m: Manifest) -> list[Path]:
    """Folders that hold nothing but slices; released files used in place are the user's own."""
    if m.layout == "in-place":
        return []
    return sorted({m.file_path(index).parent for index in range(len(m.files))})


def _mend(m: Manifest) -> str:
    home = m.path.parent
    if (home / "released").is_dir():
        return f"deltafin verify --repair --store {home}"
    return f"deltafin store repair {home} --model DIR"


def _presence(m: Manifest) -> Iterator[Finding]:
    complete = np.logical_and.reduceat(m.present, m.first[:-1])
    experts, spine = complete[: m.expert_blobs], complete[m.expert_blobs :]
    streams = (m.path.parent / "released").is_dir()
    if not spine.all():
        what = f"{int((~spine).sum())} of {len(spine)} parts of the spine are absent"
        again = "run the same deltafin setup again" if streams else "run the same deltafin store create again"
        yield Finding("install", Level.FAIL, what, "no token can be computed without them", again, ExitCode.STORE)
    missing = int((~experts).sum())
    if missing and streams:
        yield Finding(
            "install",
            Level.NOTE,
            f"{len(experts) - missing:,} of {len(experts):,} experts are here",
            "the others are fetched on first use; without the network they are missing",
            f"deltafin fetch --store {m.path.parent}",
        )
    elif missing:
        yield Finding(
            "install",
            Level.FAIL,
            f"{missing:,} of {len(experts):,} experts are absent",
            "a run stops when it needs one of them",
            "run the same deltafin store create again",
            ExitCode.STORE,
        )
    else:
        yield Finding("install", Level.OK, f"all {len(experts):,} experts are present")
    if m.written.any():
        yield Finding(
            "install",
            Level.NOTE,
            f"{int(m.written.sum()):,} slices are written but not yet proved",
            "an interrupted setup goes on from there",
            "run the same deltafin setup again",
        )
    yield from _proof(m)


def _proof(m: Manifest) -> Iterator[Finding]:
    """Whether what came from a hub has been compared with the hub's checksums, which are of whole files."""
    home = m.path.parent
    try:
        released = Released.load(home)
        if released is None:
            return
    except DeltafinError as e:
        yield failed("install", e, "nothing can be fetched again")
        return
    names = released.needed or {name for name in released.files if name.endswith(".safetensors")}
    proved = {n for n in released.proved if n in released.files and released.files[n].sha256}
    left = len(names) - len(proved & names)
    text = f"{len(names) - left} of {len(names)} released files were compared with the hub's checksum"
    if not left:
        yield Finding("install", Level.OK, text)
    elif m.layout == "in-place":
        again = "deltafin setup --adopt again, with the network"
        yield Finding("install", Level.NOTE, text, "only the form of the others is known to be right", again)
    else:
        meaning = "an expert fetched alone is compared with what arrived first, until its file is whole"
        yield Finding("install", Level.NOTE, text, meaning, f"deltafin fetch --store {home} completes and compares")


def _replicas(m: Manifest) -> Iterator[Finding]:
    found = replicas.load(m)
    if found.problem:
        again = "deltafin drives replicate again, or with --remove"
        yield Finding("install", Level.WARN, found.problem, "slow drives are not helped by the others", again)
    elif found.count:
        whole = int(np.logical_and.reduceat(found.drive >= 0, m.first[:-1]).sum())
        nbytes = int(m.length[found.drive >= 0].sum())
        yield Finding("install", Level.OK, f"{whole:,} experts lie on a second drive too, {nbytes / 1e9:,.2f} GB")


def _drive(m: Manifest, drive: DriveReport) -> Iterator[Finding]:
    name = f"drive {drive.index}, {drive.path}"
    home = m.path.parent
    if drive.state != "ok":
        meaning = "its slices cannot be read" if drive.state == "missing" else "another drive is mounted there"
        now = elsewhere(m, m.drives[drive.index])
        if now is not None:
            yield Finding(
                "install",
                Level.WARN,
                f"{name}: it is at {now} now",
                "it is found there at every start",
                f"deltafin store relocate {home} --drive '{now}'",
            )
            return
        remedy = f"connect it, or if it is mounted elsewhere: deltafin store relocate {home} --drive NEW_PATH"
        yield Finding("install", Level.FAIL, f"{name}: {drive.state}", meaning, remedy, ExitCode.STORE)
        return
    for damaged in drive.damaged_files[:_MOST_LISTED]:
        yield Finding("install", Level.FAIL, f"{name}: {damaged} is missing or truncated", "", _mend(m), ExitCode.STORE)
    usage = shutil.disk_usage(drive.path)
    to_come = drive.bytes - drive.present_bytes if m.layout == "striped" else 0
    text = f"{name}: {drive.present_bytes / 1e9:,.2f} of {drive.bytes / 1e9:,.2f} GB, {usage.free / 1e9:,.2f} GB free"
    if to_come > usage.free:
        yield Finding("install", Level.WARN, text, "what is still to come does not fit", "free some space")
    else:
        yield Finding("install", Level.OK, text)
    if not os.access(drive.path, os.W_OK) and to_come:
        yield Finding("install", Level.WARN, f"{name}: read-only", "fetched experts cannot be kept", "make it writable")
    yield from _speed(m, drive, name)


def _speed(m: Manifest, drive: DriveReport, name: str) -> Iterator[Finding]:
    paths = [m.file_path(i) for i, entry in enumerate(m.files) if entry.drive == drive.index]
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    largest = max(sizes, key=lambda path: sizes[path], default=None)
    if largest is None or sizes[largest] < _RATE_BYTES:
        yield Finding("machine", Level.NOTE, f"{name}: too little on it to measure its speed")
        return
    try:
        rate, fallback = read_rate(largest)
    except OSError as e:
        yield Finding(
            "machine",
            Level.FAIL,
            f"{largest} cannot be read: {e.strerror}",
            "",
            "check the drive and its cable",
            ExitCode.STORE,
        )
        return
    text = f"{name}: reads {rate / 1e6:,.0f} MB/s"
    if fallback:
        meaning = "reads go through the page cache, which costs memory and speed"
        yield Finding(
            "machine", Level.WARN, f"{text}, no direct reads ({fallback})", meaning, "use a local file system"
        )
    elif rate < _SLOW_DRIVE:
        yield Finding(
            "machine",
            Level.WARN,
            text,
            "a drive this slow sets the pace",
            "use an NVMe drive, or give it a smaller share",
        )
    elif drive.bytes_per_s and rate < drive.bytes_per_s / 2:
        then = f"{drive.bytes_per_s / 1e6:,.0f} MB/s when the install was made"
        yield Finding(
            "machine", Level.WARN, f"{text}; {then}", "it is busy, hot, or on a slower port", "check its port"
        )
    else:
        yield Finding("machine", Level.OK, text)


def _drafts(m: Manifest) -> Iterator[Finding]:
    from deltafin.drafting import dspark_files, qwen_files

    home = m.path.parent
    again = "deltafin setup again, or without a draft: --draft off"
    folder = home / "dspark"
    if (folder / "config.json").exists():
        try:
            dspark_files.check_files(folder, dspark_files.read_config(folder, m.config))
            yield Finding("drafts", Level.OK, f"DSpark in {folder}")
        except (DeltafinError, OSError) as e:
            yield Finding("drafts", Level.WARN, f"DSpark in {folder}: {e}", "K3 runs without it", again)
    else:
        yield Finding(
            "drafts", Level.NOTE, f"no DSpark draft in {home}", "K3 runs without one", "deltafin setup brings it"
        )
    for found in qwen_files.model_folders(home / "qwen"):
        try:
            qwen_files.check(found)
            yield Finding("drafts", Level.OK, f"Qwen in {found}")
        except (DeltafinError, OSError) as e:
            yield Finding("drafts", Level.WARN, f"Qwen in {found}: {e}", "K3 runs without it", "deltafin setup qwen")


def _sessions(data: Path) -> Iterator[Finding]:
    folder = data / "states"
    try:
        files = [path for path in folder.iterdir() if path.suffix == ".state"]
        nbytes = sum(path.stat().st_size for path in files)
        yield Finding("sessions", Level.OK, f"{len(files)} saved states, {nbytes / 1e9:,.2f} GB, in {folder}")
    except FileNotFoundError:
        yield Finding("sessions", Level.OK, "no saved states")
    except OSError as e:
        meaning = "conversations cannot be continued from disk"
        yield Finding("sessions", Level.WARN, f"{folder}: {e.strerror}", meaning, "make it readable, or delete it")
