from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltafin.bench.synthetic import released_config
from deltafin.checkpoint.config import K3Config
from deltafin.errors import ConfigError, ManifestError
from deltafin.store import DriveInfo, Store
from deltafin.store.manifest import MANIFEST_NAME, Manifest, PresenceLog, write_manifest
from deltafin.store.slicing import plan_striped
from store.installs_help import striped_install


@pytest.fixture
def home(tiny_once: Path, tmp_path: Path) -> Path:
    return striped_install(tiny_once, tmp_path, (1.0, 2.0))


@pytest.fixture(scope="module")
def made_once(tiny_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return striped_install(tiny_once, tmp_path_factory.mktemp("made"), (1.0, 2.0))


@pytest.fixture
def copied(made_once: Path, tmp_path: Path) -> Path:
    """A folder with copies of the files that loading needs."""
    for name in (MANIFEST_NAME, "config.json"):
        shutil.copy(made_once / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE files SET name = '../../etc/passwd' WHERE file = 3",
        "UPDATE files SET name = '/etc/passwd' WHERE file = 3",
        "UPDATE files SET name = 'a/../b' WHERE file = 3",
        "UPDATE files SET name = 'a//b' WHERE file = 3",
        "UPDATE files SET name = 'a/b/c' WHERE file = 3",
        "UPDATE files SET name = '' WHERE file = 3",
        "UPDATE files SET name = 'a\\b' WHERE file = 3",
        "UPDATE files SET name = 'a' || char(0) WHERE file = 3",
        "UPDATE files SET drive = 2 WHERE file = 3",
        "UPDATE files SET drive = -1 WHERE file = 3",
        "UPDATE files SET nbytes = -1 WHERE file = 3",
        "UPDATE files SET nbytes = 16384 WHERE file = 3",
        "DELETE FROM files WHERE file = 3",
        "UPDATE drives SET path = 'relative' WHERE drive = 1",
        "UPDATE drives SET weight = -1 WHERE drive = 1",
        "DELETE FROM drives WHERE drive = 0",
        "DELETE FROM drives",
        "UPDATE info SET value = '2' WHERE key = 'format'",
        "UPDATE info SET value = 'mirrored' WHERE key = 'layout'",
        "UPDATE info SET value = '{\"../x\": 1}' WHERE key = 'metadata'",
        "UPDATE info SET value = '[[' WHERE key = 'metadata'",
        "UPDATE info SET value = '[]' WHERE key = 'metadata'",
        "DELETE FROM info WHERE key = 'identity'",
        "DELETE FROM info WHERE key = 'metadata'",
        "DELETE FROM units WHERE unit = 4",
        "UPDATE units SET first_blob = first_blob + 1 WHERE unit = 4",
        "UPDATE units SET blobs = 1 << 40 WHERE unit = 4",
        "UPDATE units SET buffer_bytes = 1 << 40 WHERE unit = 4",
        "UPDATE units SET buffer_bytes = 4096 WHERE unit = 4",
        "DELETE FROM tensors WHERE name LIKE '%lm_head%'",
        "UPDATE tensors SET name = 'x' WHERE name LIKE '%lm_head%'",
        "UPDATE tensors SET offset = -64 WHERE name LIKE '%lm_head%'",
        "UPDATE tensors SET offset = offset + 1 WHERE name LIKE '%lm_head%'",
        "UPDATE tensors SET offset = 1 << 40 WHERE name LIKE '%lm_head%'",
        "UPDATE slices SET file = 999 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET file = -1 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET offset = -16384 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET offset = 1 << 40 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET offset = 9223372036854771712 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET offset = offset + 1 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET length = 0 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET length = -1 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET length = 9223372036854775807 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET length = length - 1 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET at = at + 4096 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET at = -4096 WHERE blob = 5 AND part = 0",
        "UPDATE slices SET at = at + 4096 WHERE blob = 13",
        "UPDATE slices SET at = 1 << 47 WHERE blob = 13",
        "DELETE FROM slices WHERE blob = 5",
        "DELETE FROM slices WHERE blob = 13",
        "DELETE FROM slices WHERE blob = 5 AND part = 0",
        "DELETE FROM slices",
        "INSERT INTO slices SELECT 999, part, file, offset, length, at, checksum, present FROM slices WHERE blob = 5",
        "INSERT INTO slices SELECT -1, part, file, offset, length, at, checksum, present FROM slices WHERE blob = 5",
        "CREATE TRIGGER t AFTER UPDATE ON slices BEGIN DELETE FROM files; END",
        "CREATE VIEW v AS SELECT * FROM slices",
        "CREATE TABLE more (x)",
        "DROP TABLE tensors",
        "ALTER TABLE slices ADD COLUMN more ANY",
    ],
)
def test_a_tampered_manifest_is_refused(copied: Path, statement: str) -> None:
    home = copied
    db = sqlite3.connect(home / MANIFEST_NAME)
    with db:
        assert db.execute(statement).rowcount != 0
    db.close()
    with pytest.raises(ManifestError) as caught:
        Manifest.load(home)
    assert str(home / MANIFEST_NAME) in caught.value.message
    assert caught.value.remedy


def test_values_of_other_types_are_refused(home: Path) -> None:
    # Strict tables keep SQLite from storing these; a file made by hand can still hold them.
    path = home / MANIFEST_NAME
    db = sqlite3.connect(path)
    with db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, ' STRICT,', ' ') WHERE name = 'slices'")
    db.close()
    for value in ("'many'", "1.5", "NULL", "x'00'"):
        copy = home / "copy"
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns("copy"))
        db = sqlite3.connect(copy / MANIFEST_NAME)
        with db:
            db.execute("PRAGMA ignore_check_constraints = ON")
            if value != "NULL":
                db.execute(f"UPDATE slices SET length = {value} WHERE blob = 5 AND part = 0")
            db.execute("PRAGMA writable_schema = ON")
            sql = "replace(sql, '), WITHOUT', ') STRICT, WITHOUT')"
            db.execute(f"UPDATE sqlite_master SET sql = {sql} WHERE name = 'slices'")
        db.close()
        with pytest.raises(ManifestError):
            Manifest.load(copy)
        shutil.rmtree(copy)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_mutated_manifest_raises_nothing_else(
    mini_store: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("mutant")
    shutil.copy(mini_store / "config.json", folder)
    mutant = bytearray((mini_store / MANIFEST_NAME).read_bytes())
    kind = data.draw(st.sampled_from(["bytes", "truncate", "zero"]))
    at = data.draw(st.integers(0, len(mutant) - 1))
    if kind == "truncate":
        del mutant[at:]
    elif kind == "zero":
        mutant[at : at + 4096] = bytes(len(mutant[at : at + 4096]))
    else:
        for _ in range(data.draw(st.integers(1, 20))):
            mutant[data.draw(st.integers(0, len(mutant) - 1))] = data.draw(st.integers(0, 255))
    (folder / MANIFEST_NAME).write_bytes(mutant)
    try:
        manifest = Manifest.load(folder)
    except ManifestError:
        return
    sizes = np.array([f.nbytes for f in manifest.files])[manifest.file]
    assert np.all(manifest.offset + manifest.length <= sizes)
    shutil.rmtree(folder)


def test_other_files_in_its_place(home: Path, tmp_path: Path) -> None:
    for content in (b"", b"not a database", b"\0" * 8192):
        (home / MANIFEST_NAME).write_bytes(content)
        with pytest.raises(ManifestError):
            Manifest.load(home)
    (home / MANIFEST_NAME).unlink()
    with pytest.raises(ManifestError, match="holds no install"):
        Store.open(home)
    with pytest.raises(ManifestError, match="holds no install"):
        Store.open(tmp_path / "nowhere")


def test_configuration_and_metadata_belong_to_the_manifest(home: Path) -> None:
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(config))  # same meaning, other bytes
    with pytest.raises(ManifestError, match=r"config\.json differs"):
        Store.open(home)
    config["text_config"]["num_experts"] += 1
    (home / "config.json").write_text(json.dumps(config))
    with pytest.raises(ManifestError):
        Store.open(home)
    (home / "config.json").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        Store.open(home)


def test_a_home_is_found_through_its_drive(home: Path) -> None:
    with Store.open(home.parent) as store:
        assert store.metadata_dir == home
    shutil.copytree(home, home.parent / "deltafin-other")
    with pytest.raises(ManifestError, match="several installs"):
        Store.open(home.parent)


def test_presence_is_recorded_and_taken_back(home: Path) -> None:
    log = PresenceLog(home / MANIFEST_NAME)
    m = Manifest.load(home)
    several = int(np.flatnonzero(np.diff(m.first) > 1)[0])
    log.forget([(3, 0), (several, 1)])
    m = Manifest.load(home)
    assert sorted(np.flatnonzero(~m.present)) == sorted([m.first[3], m.first[several] + 1])
    for checksum in (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        log.commit([(3, 0, checksum)])
        assert int(Manifest.load(home).checksum[m.first[3]]) == checksum
    log.close()


def test_an_unwritable_manifest(home: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be written"):
        PresenceLog(home)  # a directory is as unwritable as a database can be, even for root


def test_a_transaction_cut_by_a_kill_is_rolled_back(home: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sqlite3, os, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_spill = ON'); db.execute('PRAGMA cache_size = 1')\n"
        "db.execute('BEGIN'); db.execute('UPDATE slices SET present = 0, checksum = 7')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(home / MANIFEST_NAME)], check=False)
    assert (home / (MANIFEST_NAME + "-journal")).exists()
    assert Manifest.load(home).present.all()


def test_the_manifest_of_the_full_model_loads(tmp_path: Path) -> None:
    raw = released_config()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    drives = [DriveInfo(i, f"u{i}", tmp_path / f"d{i}", w, 0.0) for i, w in enumerate((3.1, 2.9, 7.0, 5.5))]
    plan = plan_striped(K3Config.parse(raw), [d.weight for d in drives], "folder")
    ids = {"identity": "i", "store_uuid": "s", "layout": "striped"}
    write_manifest(tmp_path, plan, drives, **ids, metadata={})
    manifest = Manifest.load(tmp_path)
    assert manifest.expert_blobs == 82_432
    payload = int(manifest.length.sum())
    assert 0 <= payload - (1_446_456_066_048 + 113_509_540_864) < 1 << 20  # alignment of spine tensors only
    stored = sum(f.nbytes for f in manifest.files)
    assert stored < payload * 1.00001
    shares = np.bincount([f.drive for f in manifest.files], weights=[f.nbytes for f in manifest.files]) / stored
    assert np.allclose(shares, np.array([3.1, 2.9, 7.0, 5.5]) / 18.5, atol=1e-6)
