"""What only a Mac needs looked at. Each finding says what it means here and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deltafin.doctor.finding import Finding, Level
from deltafin.macos import awake, backup, memory, power, priority, spotlight, system

GB = 1e9


def examine_mac(folders: list[Path]) -> Iterator[Finding]:
    """Looks at the Mac and, on its drives, at ``folders`` that hold slices. Nothing on another system.

    Asks the system for priorities of the calling thread, which is all it changes.
    """
    if not system.is_mac():
        return
    yield from _translated()
    yield from _memory()
    yield from _pressure()
    yield _priorities()
    yield _awake()
    yield from _power()
    for folder in folders:
        yield from _spotlight(folder)
        yield from _backup(folder)


def _translated() -> Iterator[Finding]:
    if system.sysctl("sysctl.proc_translated") == 1:
        yield Finding(
            "machine",
            Level.WARN,
            "this Python is an Intel program on Apple Silicon",
            "the GPU cannot be used, and the CPU runs at a fraction of its speed",
            "install Deltafin with an arm64 Python",
        )


def _memory() -> Iterator[Finding]:
    found = memory.unified_memory()
    if found is None:
        yield Finding("machine", Level.NOTE, "no unified memory", "this is not Apple Silicon: the CPU computes")
        return
    how = "set by you" if found.chosen else "the system's own limit" if found.exact else "the usual limit"
    text = f"the GPU may hold {found.gpu / GB:,.0f} of {found.total / GB:,.0f} GB ({how})"
    if found.chosen and found.gpu > found.raised:
        meaning = "that leaves macOS so little that it may page, or stop"
        lower = f"sudo sysctl iogpu.wired_limit_mb={found.raised >> 20}"
        yield Finding("machine", Level.WARN, text, meaning, lower)
    elif found.command:
        meaning = f"{(found.raised - found.gpu) / GB:,.0f} GB more could hold spine and experts, until the next start"
        yield Finding("machine", Level.NOTE, text, meaning, found.command)
    else:
        yield Finding("machine", Level.OK, text)


def _pressure() -> Iterator[Finding]:
    level = memory.pressure()
    if level is memory.Pressure.NORMAL:
        yield Finding("machine", Level.OK, "memory is not short")
        return
    what = "short" if level is memory.Pressure.WARN else "critically short"
    meaning = "experts kept in memory are given back while this lasts, so tokens take longer"
    yield Finding("machine", Level.WARN, f"memory is {what} now", meaning, "quit other programs, or give less --ram")


def _priorities() -> Finding:
    if priority.raise_thread():
        return Finding("machine", Level.OK, "threads get performance cores and unthrottled reads")
    meaning = "other work may push computing to efficiency cores and hold reads back"
    return Finding("machine", Level.NOTE, "macOS refused higher priorities", meaning, "run it from Terminal")


def _awake() -> Finding:
    if Path(awake.PROGRAM).exists():
        return Finding("machine", Level.OK, "long work keeps the Mac awake, unless its lid is closed")
    meaning = "long work stops when the Mac falls asleep, and goes on when it wakes"
    return Finding("machine", Level.NOTE, f"{awake.PROGRAM} is missing", meaning, "sudo pmset -c sleep 0")


def _backup(folder: Path) -> Iterator[Finding]:
    if backup.backed_up(folder):
        meaning = "slices can be fetched again, and copying them fills the backup and takes bandwidth"
        mend = f"tmutil addexclusion '{folder}'"
        yield Finding("install", Level.NOTE, f"Time Machine backs up {folder}", meaning, mend)


def _power() -> Iterator[Finding]:
    if power.low_power():
        meaning = "processors and drives are held back"
        yield Finding("machine", Level.WARN, "Low Power Mode is on", meaning, power.FULL_POWER)
    minutes = power.drive_sleep_minutes()
    if minutes:
        meaning = "the first token after a pause waits for the drives to wake"
        yield Finding(
            "machine", Level.NOTE, f"idle drives sleep after {minutes} minutes", meaning, power.KEEP_DRIVES_AWAKE
        )


def _spotlight(folder: Path) -> Iterator[Finding]:
    known = spotlight.indexed(folder)
    if known:
        meaning = "it reads slices to find words, which takes bandwidth from every token"
        mend = f"System Settings, Spotlight, Search Privacy: add {folder}; or sudo mdutil -i off for its volume"
        yield Finding("install", Level.WARN, f"Spotlight indexes {folder} ({known:,} files)", meaning, mend)
    elif not (folder / spotlight.MARKER).exists():
        meaning = "Spotlight does not index it now, but may begin to"
        mend = f"touch '{folder / spotlight.MARKER}'"
        yield Finding("install", Level.NOTE, f"{folder} is not marked against Spotlight", meaning, mend)
    else:
        yield Finding("install", Level.OK, f"Spotlight leaves {folder} alone")
