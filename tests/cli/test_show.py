"""What the lines behind ``--stats`` say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deltafin.cli.show import drive_lines
from deltafin.store.types import DriveInfo, DriveStats

DRIVES = [DriveInfo(i, f"u{i}", Path(f"/d{i}"), weight, 0.0) for i, weight in enumerate((1.0, 2.0, 1.0))]
STATS = [DriveStats(i, Path(f"/d{i}"), nbytes, 10, 2.0, 0.0, 0, True, "") for i, nbytes in enumerate((100, 200, 100))]


def test_drives_that_keep_pace_are_not_mentioned() -> None:
    assert drive_lines(DRIVES, STATS) == []
    assert drive_lines(DRIVES[:1], [replace(STATS[0], busy_seconds=0.0)]) == []


def test_the_slow_drive_is_named() -> None:
    (line,) = drive_lines(DRIVES, [STATS[0], replace(STATS[1], busy_seconds=4.0), STATS[2]])
    assert line.startswith("drive 1, /d1, was slower than its share (50%")
    assert "rebalance" in line


def test_a_drive_that_hardly_worked_says_nothing() -> None:
    assert drive_lines(DRIVES, [STATS[0], replace(STATS[1], bytes=1, busy_seconds=0.5), STATS[2]]) == []


def test_help_is_counted() -> None:
    (line,) = drive_lines(DRIVES, [STATS[0], STATS[1], replace(STATS[2], helped_bytes=50_000_000)])
    assert "50" in line
