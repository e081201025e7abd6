"""Drafts on the command line: the text is the same, and reasons are given only where they are asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.command import deltafin
from conftest import MINI

RAW = ("run", "--prompt", "The capital of Norway is", "--max-new", "40")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Deltafin folder shared by this module."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def plain(home: Path) -> str:
    """What K3 says alone."""
    code, out, errors = deltafin(home, *RAW, "--draft", "off")
    assert code == 0, errors
    return out


@pytest.mark.parametrize("flags", [(), ("--draft", "dspark", "--draft-width", "3"), ("--draft", "qwen")])
def test_the_text_is_the_same(flags: tuple[str, ...], home: Path, plain: str) -> None:
    if "qwen" in flags:
        pytest.importorskip("transformers")
    code, out, errors = deltafin(home, *RAW, *flags)
    assert (code, out) == (0, plain), errors
    assert "draft" not in errors


def test_stats_say_what_the_draft_did(home: Path, plain: str) -> None:
    code, out, errors = deltafin(home, *RAW, "--stats")
    assert (code, out) == (0, plain)
    for part in ("draft: dspark from", "guesses accepted (by position", "relative to one", "gain estimated"):
        assert part in errors
    assert "switched off" in deltafin(home, *RAW, "--stats", "--draft", "off")[2]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--draft", "llama"), 2, "draft"),
        (("--draft-width", "0"), 2, "draft_width"),
        (("--draft-width", "8"), 2, "draft_width"),
        (("--draft", "off", "--draft-width", "3"), 2, "no effect"),
        (("--draft", "qwen", "--chat"), 2, "raw completions"),
        (("--draft", "dspark", "--draft-dir", "/nonexistent"), 3, "no dspark draft in /nonexistent"),
    ],
)
def test_impossible_wishes_are_refused(flags: tuple[str, ...], code: int, message: str, home: Path) -> None:
    got, out, errors = deltafin(home, *RAW, *flags)
    assert (got, out) == (code, ""), errors
    assert message in errors
    assert "Traceback" not in errors


def test_a_damaged_draft_never_reaches_the_text(home: Path, plain: str, tmp_path: Path) -> None:
    shutil.copytree(MINI / "dspark", tmp_path / "dspark")
    weights = tmp_path / "dspark/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    flags = ("--draft-dir", str(tmp_path))
    code, out, errors = deltafin(home, *RAW, *flags)
    assert (code, out) == (0, plain)
    assert "dspark" not in errors
    code, out, _ = deltafin(home, "info", "--json", *flags)
    assert code == 0
    draft = json.loads(out)["draft"]
    assert draft["kind"] is None
    assert str(weights) in draft["status"]
    assert deltafin(home, *RAW, *flags, "--draft", "dspark")[0] == 3


def test_info_names_the_draft_and_its_memory(home: Path) -> None:
    draft = json.loads(deltafin(home, "info", "--json")[1])["draft"]
    assert draft["kind"] == "dspark"
    assert draft["bytes"] > 1 << 20
    assert "draft: dspark from" in deltafin(home, "info")[1]
