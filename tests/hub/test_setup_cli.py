"""``deltafin setup``, ``fetch``, ``verify`` and ``repair`` as a user calls them, and the network switched off."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.command import deltafin, environment
from deltafin.bench.hub import Fault, LocalHub
from deltafin.cli import setup
from deltafin.cli.store import _Log
from deltafin.errors import DriveFullError, ExitCode, StoreError, UsageError
from deltafin.hub import install
from deltafin.hub.client import Hub
from deltafin.hub.pins import Pin
from deltafin.store import Store
from deltafin.store.manifest import Manifest
from deltafin.store.types import IngestProgress
from store.installs_help import all_bytes, released_bytes

PROMPT = ("run", "--prompt", "The capital of Norway is", "--max-new", "4", "--draft", "off")


class User:
    """A user with two drives and a hub nearby."""

    def __init__(self, base: Path, hub: LocalHub) -> None:
        self.home = base / "k3"
        self.store = self.home / "store"
        self.hub = hub
        self.drives = [base / "a", base / "b"]
        for folder in (self.home, *self.drives):
            folder.mkdir()
        self.env = {"HF_ENDPOINT": hub.endpoint, "K3_HUB_HOSTS": "localhost"}
        self.model = ("--repo", "mini/k3", "--revision", hub.revision)

    def __call__(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        return deltafin(self.home, *arguments, **(self.env | env))

    def setup(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        drives = [part for folder in self.drives for part in ("--drive", f"{folder}:1")]
        return self("setup", *arguments, *drives, *self.model, **env)


@pytest.fixture
def user(tmp_path: Path, served: LocalHub) -> User:
    return User(tmp_path, served)


def test_stream_then_offline(user: User, mini_target: Path) -> None:
    code, out, err = user.setup("--stream", "--draft-repo", f"mini/dspark@{user.hub.revision}")
    assert (code, out.strip()) == (0, str(user.store)), err
    assert (user.store / "dspark/model.safetensors").stat().st_size == 5678762
    # Without the network a missing expert is an error that names the command for it.
    code, out, err = user(*PROMPT, "--offline")
    assert code == ExitCode.STORE
    assert "deltafin fetch --store" in err
    code, expected, err = user(*PROMPT)
    assert code == 0, err
    assert err.count(f"fetching what the drives lack from {user.hub.endpoint}") == 1
    before = len(user.hub.log)
    code, out, err = user(*PROMPT, DELTAFIN_OFFLINE="1")
    assert (code, out) == (0, expected), err
    assert len(user.hub.log) == before, "what was fetched stays"
    code, out, err = user("fetch", "--hot", "5")
    assert (code, out) == (0, "0.00 GB fetched\n"), err
    # The missing rest, layer by layer.
    assert user("fetch", "--layers", "1-3")[0] == 0
    code, out, err = user("fetch")
    assert code == 0, err
    with Store.open(user.store) as store:
        assert all_bytes(store) == released_bytes(mini_target)


def test_full_install_without_a_network_namespace(user: User) -> None:
    assert user.setup("--full", "--no-draft")[0] == 0
    alone = subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    prefix = ["unshare", "-rn"] if alone else []
    outputs = []
    for arguments in (PROMPT, ("verify",), ("store", "inspect", str(user.store)), ("doctor",), ("heat",)):
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "deltafin", *arguments],
            capture_output=True,
            env=environment(user.home) | user.env,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()
        outputs.append(done.stdout)
    asked = len(user.hub.log)
    assert outputs[0]
    assert user("info")[0] == 0
    assert len(user.hub.log) == asked, "no command but setup, fetch and repair asks the hub"


def test_plan(user: User) -> None:
    code, out, err = user.setup("--dry-run", "--json", "--no-draft")
    assert code == 0, err
    full, stream = json.loads(out)
    assert (full["kind"], stream["kind"]) == ("full", "stream")
    assert full["bytes"] - stream["bytes"] == full["expert_bytes"]
    assert full["fits"]
    assert full["link_bytes_per_s"] > 0
    assert not user.store.exists()
    assert full["home"]["bytes"] == 0
    code, out, _ = user.setup("--draft-repo", f"mini/dspark@{user.hub.revision}")
    assert code == 0
    assert f"{user.store}: 0.01 GB of" in out
    assert "proposed: deltafin setup --full --drive" in out
    assert not user.store.exists()


def test_adopt_a_folder_and_a_cache(user: User, mini_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "download"
    shutil.copytree(mini_target, folder)
    code, _, err = user("setup", "--adopt", str(folder), "--no-draft", *user.model)
    assert code == 0, err
    with Store.open(user.store) as store:
        assert all_bytes(store) == released_bytes(mini_target)
    cache = tmp_path / "hub" / "models--mini--k3"
    snapshot = cache / "snapshots" / user.hub.revision
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in user.hub.files["mini/k3"].values():
        blob = cache / "blobs" / (file.sha256 if file.lfs else file.git_sha1)
        shutil.copy(file.path, blob)
        (snapshot / file.path.name).symlink_to(Path("../../blobs") / blob.name)
    for blob in (cache / "blobs").iterdir():
        blob.chmod(0o444)
    other = ("--store", str(tmp_path / "second"))
    asked = len(user.hub.log)
    code, _, err = user("--offline", "setup", "--adopt", str(tmp_path / "hub"), *other, *user.model)
    assert code == 0, err
    assert len(user.hub.log) == asked
    with Store.open(tmp_path / "second") as store:
        assert all_bytes(store) == released_bytes(mini_target)


@pytest.mark.parametrize("damage", ["zeros", "pointer", "page", "dangling", "byte"])
def test_adopt_refuses_what_is_not_the_released_file(
    user: User, mini_target: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "download"
    shutil.copytree(mini_target, folder)
    shard = folder / "model-00003-of-000004.safetensors"
    size = shard.stat().st_size
    if damage == "zeros":  # preallocated, never filled
        with open(shard, "r+b") as file:
            file.truncate(size - 100_000)
            file.truncate(size)
    elif damage == "pointer":
        shard.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {size}\n")
    elif damage == "page":
        shard.write_text("<!doctype html><title>Sign in</title>")
    elif damage == "dangling":
        shard.unlink()
        shard.symlink_to("../blobs/gone")
    else:
        with open(shard, "r+b") as file:
            file.seek(size // 2)
            byte = file.read(1)[0]
            file.seek(size // 2)
            file.write(bytes([byte ^ 1]))
    for switch in ((), ("--offline",)):
        if damage == "byte" and switch:
            continue  # nothing here knows better
        code, _, err = user(*switch, "setup", "--adopt", str(folder), "--no-draft", *user.model)
        assert code in (ExitCode.HUB, ExitCode.CHECKPOINT), err
        said = {"pointer": "Git LFS pointer", "page": "web page", "dangling": "which is gone", "zeros": "ends in zeros"}
        assert said.get(damage, "differs from the hub's checksum") in err
        assert shard.name in err
    assert not (user.store / "manifest.sqlite").exists()


def test_repair(user: User) -> None:
    assert user.setup("--full", "--no-draft")[0] == 0
    m = Manifest.load(user.store)
    with open(m.file_path(0), "r+b") as file:
        file.seek(int(m.offset[0]))
        file.write(b"\0" * 999)
    code, out, _ = user("verify")
    assert code == ExitCode.STORE
    assert "damaged" in out
    code, out, err = user("verify", "--repair")
    assert code == 0, err
    assert ", 1 fetched again" in out


def test_a_hub_that_is_away(user: User) -> None:
    code, _, err = user.setup("--full", HF_ENDPOINT="ftp://nowhere")
    assert code == ExitCode.HUB
    assert "HF_ENDPOINT" in err
    user.hub.faults.append(Fault("api", "status", times=-1, value=404))
    code, _, err = user.setup("--full", "--no-draft")
    assert code == ExitCode.HUB
    assert "has no mini/k3" in err
    # What cannot be completed never ends well, and what is missing of it is known before anything large is fetched.
    user.hub.faults.clear()
    code, _, err = user.setup("--full", "--draft-repo", f"mini/none@{user.hub.revision}")
    assert code == ExitCode.HUB
    assert "has no mini/none" in err
    assert not user.hub.requests("cdn")
    user.hub.faults.append(Fault("cdn", "status", times=-1, value=404, name="model-00003-of-000004.safetensors"))
    code, out, err = user.setup("--full", "--no-draft")
    assert (code, out) == (ExitCode.HUB, "")
    assert "model-00003" in err


def test_drafts_that_do_not_fit(user: User, client: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = [("dspark", Pin("mini/dspark", user.hub.revision))]
    setup._check_drafts(client, user.store, drafts)
    monkeypatch.setattr(setup, "free_at", lambda _: 5_000_000)
    with pytest.raises(DriveFullError, match=r"the drafts need 0\.01 GB"):
        setup._check_drafts(client, user.store, drafts)
    install.fetch_draft(client, drafts[0][1], user.store / "dspark")
    setup._check_drafts(client, user.store, drafts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--full", "--stream"), "exclude each other"),
        (("--full", "--repo", "x"), "--repo and --revision"),
        (("--full", "--repo", "../x", "--revision", "0" * 40), "not a repository"),
        (("--full", "--repo", "a/b", "--revision", "main"), "not a full commit"),
        (("--full",), "no drive is named"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    drive = ("--drive", str(tmp_path)) if len(arguments) > 1 else ()
    result = CliRunner().invoke(setup.app, [*arguments, *drive], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert said in result.exception.message
    assert not list(tmp_path.rglob("manifest.sqlite"))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--full", "--no-draft", "--drive", str(tmp_path), "--store", str(tmp_path / "file" / "store")]
    result = CliRunner().invoke(setup.app, arguments, standalone_mode=False)
    assert isinstance(result.exception, StoreError)
    assert "--store" in result.exception.remedy


def test_days_of_fetching_leave_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    log = _Log(time.monotonic() - 61)
    report = IngestProgress("copy", 12_300_000_000, 1_560_000_000_000, 0, (40e6, 48e6), 17_588.0)
    log(report)
    log(report)  # within the same minute
    assert capsys.readouterr().err == "copy: 12.3 of 1,560.0 GB, 88 MB/s, 4.9 h left\n"
