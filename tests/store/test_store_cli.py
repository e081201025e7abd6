from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltafin.cli.store import app, drive_spec
from deltafin.errors import DeltafinError, DriveMissingError, ExitCode, ManifestError, UsageError
from deltafin.store import DriveSpec
from deltafin.store.manifest import Manifest
from store.installs_help import make_drives


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, standalone_mode=False)


def create(model: Path, base: Path, *options: str) -> Path:
    drives = make_drives(base, (1.0, 3.0))
    arguments = [f"--drive={spec.path}:{spec.weight}" for spec in drives]
    result = invoke("create", "--model", str(model), *arguments, *options)
    assert result.exception is None
    return Path(result.stdout.strip())


def test_create_inspect_verify_repair(tiny_once: Path, tmp_path: Path) -> None:
    home = create(tiny_once, tmp_path)
    assert [d.weight for d in Manifest.load(home).drives] == [1.0, 3.0]
    shown = invoke("inspect", str(home)).stdout
    assert "striped" in shown
    assert "75.0%" in shown
    facts = json.loads(invoke("inspect", str(home), "--json").stdout)
    assert facts["complete"] is True
    assert len(facts["drives"]) == 2
    result = invoke("verify", str(tmp_path / "drive0"))  # a drive with one install stands for it
    assert "everything is in order" in result.stdout
    path = next((tmp_path / "drive1").glob("*/layer-0002.slices"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    result = invoke("verify", str(home))
    assert result.return_value == ExitCode.STORE or result.exit_code == ExitCode.STORE
    assert "damaged" in result.stdout
    assert "store repair" in result.stdout
    facts = json.loads(invoke("verify", str(home), "--json").stdout)
    assert facts["bad"][0]["path"] == str(path)
    assert "1 damaged" in invoke("repair", str(home), "--model", str(tiny_once)).stdout
    assert "everything is in order" in invoke("verify", str(home), "--limit", "1000").stdout


def test_create_in_place_and_relocate(tmp_path: Path) -> None:
    from store.installs_help import tiny_checkpoint

    model = tiny_checkpoint(tmp_path / "model")
    result = invoke("create", "--model", str(model), "--layout", "in-place", "--home", str(tmp_path / "home"))
    assert result.stdout.strip() == str(tmp_path / "home")
    moved = model.rename(tmp_path / "moved")
    assert isinstance(invoke("verify", str(tmp_path / "home")).exception, DriveMissingError)
    result = invoke("relocate", str(tmp_path / "home"), "--drive", str(moved))
    assert result.stdout == f"drive 0: {moved}\n"
    assert "everything is in order" in invoke("verify", str(tmp_path / "home")).stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("create", "--model", "{tiny}"), UsageError),
        (("create", "--model", "{tiny}", "--drive", "{tmp}/none"), DriveMissingError),
        (("create", "--model", "{tiny}", "--layout", "in-place", "--drive", "{tmp}:2"), UsageError),
        (("create", "--model", "{tmp}", "--drive", "{tmp}"), DeltafinError),
        (("inspect", "{tmp}"), ManifestError),
        (("verify", "{tmp}"), ManifestError),
        (("relocate", "{tmp}"), ManifestError),
        (("repair", "{tmp}", "--model", "{tiny}"), ManifestError),
    ],
)
def test_errors_are_ours(tiny_once: Path, tmp_path: Path, arguments: tuple[str, ...], error: type[Exception]) -> None:
    result = invoke(*(text.format(tiny=tiny_once, tmp=tmp_path) for text in arguments))
    assert isinstance(result.exception, error)
    assert list(tmp_path.rglob("*.slices")) == []


def test_silent_in_a_pipe(tiny_once: Path, tmp_path: Path) -> None:
    drives = make_drives(tmp_path, (1.0,))
    result = invoke("create", "--model", str(tiny_once), f"--drive={drives[0].path}")
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1


def test_drive_specifications(tmp_path: Path) -> None:
    (tmp_path / "disk:2").mkdir()
    assert drive_spec("/mnt/a") == DriveSpec(Path("/mnt/a"))
    assert drive_spec("/mnt/a:2.5") == DriveSpec(Path("/mnt/a"), 2.5)
    assert drive_spec("/mnt/a:b") == DriveSpec(Path("/mnt/a:b"))
    assert drive_spec(f"{tmp_path}/disk:2") == DriveSpec(tmp_path / "disk:2")
    assert drive_spec(f"{tmp_path}/disk:2:3") == DriveSpec(tmp_path / "disk:2", 3.0)
