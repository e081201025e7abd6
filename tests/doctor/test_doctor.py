"""Every way an install can be wrong is a finding with a remedy, and looking changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command import deltafin
from deltafin.doctor import Finding, Level, examine
from deltafin.errors import ExitCode
from deltafin.store import create_store
from deltafin.store.manifest import Manifest, PresenceLog
from store.installs_help import make_drives, striped_install, tiny_checkpoint


@pytest.fixture
def home(tiny_once: Path, tmp_path: Path) -> Path:
    return create_store(tiny_once, make_drives(tmp_path, (1.0, 1.0)), layout="striped", home=tmp_path / "home")


@pytest.fixture(scope="session")
def tiny_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def problems(home: Path, *, deep: bool = False) -> list[Finding]:
    found = list(examine(home, home.parent / "data", deep=deep))
    assert {f.area for f in found} >= {"machine", "runtime", "install", "sessions"}
    bad = [f for f in found if f.level is Level.FAIL]
    assert all(f.remedy and f.code is not ExitCode.OK for f in bad)
    return bad


def damage_byte(home: Path) -> None:
    m = Manifest.load(home)
    with open(m.file_path(int(m.file[0])), "r+b") as file:
        file.seek(int(m.offset[0]))
        byte = file.read(1)[0]
        file.seek(int(m.offset[0]))
        file.write(bytes([byte ^ 1]))


def lose_spine(home: Path) -> None:
    m = Manifest.load(home)
    log = PresenceLog(m.path)
    log.forget([(m.expert_blobs, 0)])
    log.close()


def lose_expert(home: Path) -> None:
    log = PresenceLog(Manifest.load(home).path)
    log.forget([(0, 0)])
    log.close()


def lose_drive(home: Path) -> None:
    (home.parent / "drive1").rename(home.parent / "elsewhere")


def swap_drive(home: Path) -> None:
    lose_drive(home)
    (home.parent / "drive1").mkdir()


def lose_file(home: Path) -> None:
    m = Manifest.load(home)
    m.file_path(int(m.file[0])).unlink()


def cut_file(home: Path) -> None:
    m = Manifest.load(home)
    with open(m.file_path(int(m.file[0])), "r+b") as file:
        file.truncate(10)


def change_metadata(home: Path) -> None:
    with open(home / "model.safetensors.index.json", "ab") as file:
        file.write(b"x")


def break_manifest(home: Path) -> None:
    (home / "manifest.sqlite").write_bytes(b"nonsense" * 1000)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lose_spine, "of the spine are absent"),
        (lose_expert, "experts are absent"),
        (lose_drive, "missing"),
        (swap_drive, "swapped"),
        (lose_file, "missing or truncated"),
        (cut_file, "missing or truncated"),
        (change_metadata, "model.safetensors.index.json"),
        (break_manifest, "manifest.sqlite is"),
    ],
)
def test_what_is_wrong_is_found(home: Path, harm: Callable[[Path], None], said: str) -> None:
    assert problems(home) == []
    harm(home)
    assert any(said in f.what for f in problems(home))


def test_only_reading_finds_a_flipped_bit(home: Path) -> None:
    damage_byte(home)
    assert problems(home) == []
    assert any("damaged" in f.what for f in problems(home, deep=True))


def test_no_install_is_no_failure(tmp_path: Path) -> None:
    found = list(examine(tmp_path / "nothing", tmp_path))
    assert not [f for f in found if f.level is Level.FAIL]
    assert any("deltafin setup" in f.remedy for f in found)


def test_a_setup_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "home/released").mkdir(parents=True)
    (bad,) = problems(tmp_path / "home")
    assert "run the same deltafin setup again" in bad.remedy


def test_damaged_drafts_are_named(home: Path) -> None:
    (home / "dspark").mkdir()
    (home / "dspark/config.json").write_text("{}")
    found = [f for f in examine(home, home.parent) if f.area == "drafts"]
    assert [f.level for f in found] == [Level.WARN]


def test_looking_changes_nothing(home: Path, tmp_path: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}

    before = state()
    problems(home, deep=True)
    assert state() == before


def test_the_command(tiny_once: Path, tmp_path: Path) -> None:
    home = striped_install(tiny_once, tmp_path, (1.0, 1.0))
    code, out, err = deltafin(tmp_path / "k3", "doctor", "--json", "--store", str(home))
    assert code == 0, err
    assert {f["level"] for f in json.loads(out)} <= {"ok", "note", "warn"}
    shutil.rmtree(tmp_path / "drive1")
    code, out, _ = deltafin(tmp_path / "k3", "doctor", "--store", str(home))
    assert code == ExitCode.STORE
    assert "what to do: connect it" in out
