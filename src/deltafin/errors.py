"""Every failure a user can meet: what happened, to which file or drive, and what to do next.

One hierarchy, mapped here once to exit codes and once to HTTP status. Nothing else in the package decides either.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, documented in ``docs/errors.md``."""

    OK = 0
    INTERNAL = 1  # a defect of ours: the only case in which a report is asked for
    USAGE = 2  # the command line or a setting is wrong
    CHECKPOINT = 3  # released files are missing, damaged, or not K3
    STORE = 4  # an install, its manifest, a drive or a slice
    MEMORY = 5  # the budget cannot hold what K3 needs
    MACHINE = 6  # this machine cannot run the engine (kernel self-test, missing native build)
    INPUT = 7  # the prompt cannot be processed (too long, not UTF-8)
    HUB = 8  # the hub cannot be reached, answers wrongly, or may not be asked
    INTERRUPTED = 130  # Ctrl-C


class DeltafinError(Exception):
    """Base of all errors shown to a user.

    Args:
        message: what happened, naming the file, drive or setting.
        remedy: the next step, preferably a command; empty only when there is none.
    """

    exit_code: ExitCode = ExitCode.INTERNAL
    http_status: int = 500

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  what to do: {self.remedy}" if self.remedy else self.message


class UsageError(DeltafinError):
    """A flag, setting or argument is wrong or has no effect here."""

    exit_code = ExitCode.USAGE
    http_status = 400


class InputError(DeltafinError):
    """The prompt or conversation cannot be processed."""

    exit_code = ExitCode.INPUT
    http_status = 400


class CheckpointError(DeltafinError):
    """Released files are missing, damaged, hostile, or describe a model this engine does not run."""

    exit_code = ExitCode.CHECKPOINT


class ConfigError(CheckpointError):
    """A configuration value is missing, malformed or changes the computation in a way we do not implement."""


class TensorFileError(CheckpointError):
    """A safetensors file or index is malformed, truncated or points outside its folder."""


class TokenizerError(CheckpointError):
    """The rank file or tokenizer_config.json is malformed, or does not fit the model's config.json."""


class DraftError(DeltafinError):
    """A draft's files cannot be used. K3 continues without it; this reaches a user only who asked for that draft."""

    exit_code = ExitCode.CHECKPOINT


class StoreError(DeltafinError):
    """An install, its manifest or its drives."""

    exit_code = ExitCode.STORE
    http_status = 503


class ManifestError(StoreError):
    """The manifest is missing, damaged, of another version or of another model."""


class DriveError(StoreError):
    """A drive is missing, swapped, foreign, read-only or full."""


class DriveMissingError(DriveError):
    """No drive directory where the manifest expects one."""


class DriveSwappedError(DriveError):
    """The directory carries the marker of another drive or another install, or none."""


class DriveFullError(DriveError):
    """No space left while writing; finished work is kept."""


class SliceError(StoreError):
    """A slice cannot be used."""


class SliceMissingError(SliceError):
    """A slice was never completely written (an unfinished ingest)."""


class SliceCorruptError(SliceError):
    """Bytes read differ from the manifest's checksum."""


class ReadError(SliceError):
    """The operating system could not read a slice (EIO, truncated file, drive gone)."""


class HubError(DeltafinError):
    """The hub could not be reached or gave an answer that cannot be used."""

    exit_code = ExitCode.HUB
    http_status = 503


class HubChecksumError(HubError):
    """Bytes from the hub differ from the checksum the hub itself gives for them, or from a pinned one."""


class OfflineError(HubError):
    """The network is needed and was switched off."""


class MemoryBudgetError(DeltafinError):
    """The memory budget cannot hold what K3 needs."""

    exit_code = ExitCode.MEMORY
    http_status = 503


class MachineError(DeltafinError):
    """This machine or this build cannot run the engine."""

    exit_code = ExitCode.MACHINE


class Interrupted(DeltafinError):
    """The user pressed Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED
