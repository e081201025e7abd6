"""Damaged installs and hostile checkpoints, met through the real command: one clear error, then a run that works."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cli.command import deltafin
from conftest import MINI

PROMPT = ("--prompt", "The capital of Norway is", "--max-new", "10")
TEXT = " Oslo. The currency of Norway is the Krone"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A striped install over two drives, made through the command line."""
    base = tmp_path_factory.mktemp("pristine")
    for name in ("a", "b"):
        (base / name).mkdir()
    code, _, errors = deltafin(
        base / "k3", "store", "create", "--model", str(MINI / "target"),
        "--drive", f"{base / 'a'}:1", "--drive", f"{base / 'b'}:1",
    )  # fmt: skip
    assert code == 0, errors
    return base


@pytest.fixture
def store(pristine: Path) -> Path:
    """The same install where it was made (drives remember their place), restored afterwards."""
    yield pristine
    for name in ("a", "b", "gone"):
        shutil.rmtree(pristine / name, ignore_errors=True)
    for name in ("a", "b"):
        shutil.copytree(pristine / f"saved-{name}", pristine / name)


@pytest.fixture(autouse=True, scope="module")
def _saved(pristine: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(pristine / name, pristine / f"saved-{name}")


def run(base: Path, *more: str) -> tuple[int, str, str]:
    return deltafin(base / "k3", "run", "--store", str(base / "a"), *PROMPT, *more)


def slice_file(base: Path, drive: str, name: str) -> Path:
    (found,) = (base / drive).glob(f"deltafin-*/{name}")
    return found


def assert_stopped(result: tuple[int, str, str], code: int, *words: str) -> None:
    got, out, errors = result
    assert got == code, errors
    assert "Traceback" not in errors
    assert errors.count("what to do:") == 1, errors
    for word in words:
        assert word in errors, errors
    assert not out.strip() or TEXT.startswith(out.rstrip("\n")), "a wrong token was printed"


def test_it_works_undamaged(pristine: Path) -> None:
    code, out, errors = run(pristine)
    assert (code, out) == (0, TEXT + "\n"), errors


@pytest.mark.parametrize("name", ["layer-0005.slices", "head.slices", "embed.slices", "layer-0000.slices"])
def test_a_flipped_bit_is_found_before_it_is_used(store: Path, name: str) -> None:
    file = slice_file(store, "b", name)
    data = bytearray(file.read_bytes())
    # Every expert of this layer, so that whichever is asked for first is damaged.
    for i in range(100, len(data), 1024):
        data[i] ^= 0x10
    file.write_bytes(data)
    assert_stopped(run(store), 4, str(file), "deltafin")


def test_a_truncated_slice_file(store: Path) -> None:
    file = slice_file(store, "a", "layer-0004.slices")
    os.truncate(file, 1000)
    assert_stopped(run(store), 4, str(file), "deltafin")


def test_a_missing_drive(store: Path) -> None:
    (store / "b").rename(store / "gone")
    assert_stopped(run(store), 4, str(store / "b"), "relocate")
    (store / "gone").rename(store / "b")
    assert run(store)[0] == 0


def test_swapped_drives(store: Path) -> None:
    (store / "a").rename(store / "x")
    (store / "b").rename(store / "a")
    (store / "x").rename(store / "b")
    home = next((store / "b").glob("deltafin-*/manifest.sqlite")).parent
    got = deltafin(store / "k3", "run", "--store", str(home), *PROMPT)
    assert_stopped(got, 4, "relocate")


def test_a_foreign_drive(store: Path) -> None:
    marker = slice_file(store, "b", "deltafin-drive.json")
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps({k: ("0" * len(v) if k == "drive" or "uuid" in k else v) if isinstance(v, str) else v
                                  for k, v in content.items()}))  # fmt: skip
    assert_stopped(run(store), 4, str(store / "b"))


def test_a_read_only_drive_is_enough_to_read(store: Path) -> None:
    for path in [store / "b", *(store / "b").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    code, out, errors = run(store)
    assert (code, out) == (0, TEXT + "\n"), errors


def test_a_manifest_that_is_not_one(store: Path) -> None:
    manifest = slice_file(store, "a", "manifest.sqlite")
    manifest.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    assert_stopped(run(store), 4, str(manifest.parent))


def _checkpoint(folder: Path) -> Path:
    shutil.copytree(MINI / "target", folder)
    return folder


def _from(folder: Path, base: Path) -> tuple[int, str, str]:
    return deltafin(base / "k3-hostile", "run", "--model", str(folder), *PROMPT)


@pytest.mark.parametrize("name", ["../escape.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_that_leaves_its_folder(tmp_path: Path, name: str) -> None:
    folder = _checkpoint(tmp_path / "model")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = name
    path.write_text(json.dumps(index))
    assert_stopped(_from(folder, tmp_path), 3, str(path))


@pytest.mark.parametrize("length", [2**63, 2**40, 10**7])
def test_a_header_of_absurd_size(tmp_path: Path, length: int) -> None:
    folder = _checkpoint(tmp_path / "model")
    shard = folder / "model-00002-of-000004.safetensors"
    with shard.open("r+b") as f:
        f.write(length.to_bytes(8, "little"))
    assert_stopped(_from(folder, tmp_path), 3, str(shard))


def test_a_truncated_shard(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "model")
    shard = folder / "model-00003-of-000004.safetensors"
    os.truncate(shard, shard.stat().st_size - 5000)
    assert_stopped(_from(folder, tmp_path), 3, str(shard))


def test_a_shard_that_changes_under_an_install_in_place(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "model")
    assert _from(folder, tmp_path)[0] == 0
    for shard in folder.glob("model-0000*.safetensors"):
        data = bytearray(shard.read_bytes())
        for i in range(len(data) // 2, len(data), 4096):
            data[i] ^= 1
        shard.write_bytes(data)
    got = _from(folder, tmp_path)
    assert_stopped(got, got[0], "model-0000")
    assert got[0] in (3, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "silu"), ("num_experts_per_token", 500), ("mla_use_nope", False), ("attn_res_block_size", 0)],
)
def test_a_configuration_of_another_model(tmp_path: Path, key: str, value: object) -> None:
    folder = _checkpoint(tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"][key] = value
    path.write_text(json.dumps(config))
    assert_stopped(_from(folder, tmp_path), 3, str(path))
