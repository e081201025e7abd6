"""On a machine without one of the frameworks, what needs it is skipped and says so; nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
AT_THE_TOP = "import torch\ndef test_never_run(): raise AssertionError\n"
INSIDE = """
import pytest
def test_inside(): import torch.nn
@pytest.fixture
def data(): import torch
def test_with_a_fixture(data): raise AssertionError
def test_without(): pass
def test_of_a_defect(): import no_such_package
"""
OTHER = "import no_such_package\ndef test_never_run(): pass\n"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (AT_THE_TOP, {"skipped": 1}),
        (INSIDE, {"passed": 1, "skipped": 2, "failed": 1}),
        (OTHER, {"error": 1}),
    ],
    ids=["at the top", "inside", "another package"],
)
def test_what_needs_an_absent_framework_is_skipped(text: str, outcome: dict[str, int], tmp_path: Path) -> None:
    shim = tmp_path / "shim" / "torch"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text(ABSENT)
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(text)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(shim.parent), *sys.path])},
    )
    last = done.stdout.strip().splitlines()[-1]
    for word in ("passed", "skipped", "failed", "error"):
        assert (f"{outcome[word]} {word}" in last) if word in outcome else (word not in last), done.stdout
    if "skipped" in outcome:
        assert "needs torch, which is not installed here" in done.stdout


@pytest.mark.parametrize("command", ["--help", "info", "doctor", "bench", "run"])
def test_no_command_needs_a_framework_to_explain_itself(command: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = sys.modules["mlx"] = sys.modules["mlx.core"] = None
sys.argv = ["deltafin", {command!r}, "--help"]
from deltafin.cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
