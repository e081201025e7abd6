"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deltafin.errors import DeltafinError, ExitCode


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing is wrong
    WARN = "warn"  # works, but slower or less than it could
    FAIL = "fail"  # does not work until mended


@dataclass(frozen=True, slots=True)
class Finding:
    """One result.

    Attributes:
        area: ``machine``, ``runtime``, ``install``, ``drafts`` or ``sessions``.
        level: how much it matters.
        what: what was found, naming the file or drive.
        meaning: what follows from it for the user; may be empty when ``ok``.
        remedy: the command or step that mends it; empty when nothing needs mending.
        code: exit code that belongs to a failure.
    """

    area: str
    level: Level
    what: str
    meaning: str = ""
    remedy: str = ""
    code: ExitCode = ExitCode.OK


def failed(area: str, error: DeltafinError, meaning: str = "") -> Finding:
    """An error as a finding."""
    return Finding(area, Level.FAIL, error.message, meaning, error.remedy, error.exit_code)
