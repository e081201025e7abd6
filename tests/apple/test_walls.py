"""No process imports a second framework, and a backend that cannot be used says so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.command import deltafin, environment
from deltafin import backends
from deltafin.backends import open_backend
from deltafin.errors import MachineError, UsageError

_WITHOUT = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise RuntimeError(f"{{name}} was imported")
sys.meta_path.insert(0, Wall())
import deltafin.server.app, deltafin.doctor
from deltafin.cli.main import main
sys.argv = ["deltafin", *{arguments!r}]
try:
    main()
finally:
    assert {wanted!r} in sys.modules
    assert not set({forbidden!r}) & set(sys.modules)
"""


def run_without(home: Path, forbidden: tuple[str, ...], wanted: str, *arguments: str) -> str:
    code = _WITHOUT.format(forbidden=forbidden, wanted=wanted, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(home), timeout=120, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROMPT = ("--prompt", "The capital of Norway is", "--max-new", "4")


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_no_torch_on_the_mlx_path(draft: str, tmp_path: Path) -> None:
    text = run_without(
        tmp_path,
        ("torch", "transformers"),
        "mlx",
        "run",
        "--backend",
        "mlx",
        "--draft",
        draft,
        "--session",
        "a",
        *PROMPT,
    )
    assert "Oslo" in text


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_no_mlx_on_the_torch_path(draft: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = run_without(tmp_path, ("mlx", "mlx_lm"), "torch", "run", "--backend", "torch", "--draft", draft, *PROMPT)
    assert "Oslo" in text


def test_doctor_looks_at_the_chosen_backend(tmp_path: Path) -> None:
    found = json.loads(run_without(tmp_path, ("torch",), "mlx", "doctor", "--backend", "mlx", "--json"))
    runtime = [f["what"] for f in found if f["area"] == "runtime"]
    assert any("MLX" in what for what in runtime)
    assert any("agree with their reference" in what for what in runtime)


def test_info_names_the_backend(tmp_path: Path) -> None:
    code, out, err = deltafin(tmp_path, "info", "--json", K3_BACKEND="mlx", K3_PRECISION="fp32")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["backend"] == "mlx"
    assert "fp32" in facts["kernels"]
    assert facts["settings"]["backend"]["source"] == "environment"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--backend", "mlx", "--threads", "2"), "--threads"),
        (("--backend", "torch", "--precision", "bf16"), "fp32"),
        (("--backend", "cuda"), "backend"),
    ],
)
def test_settings_without_effect_are_refused(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    code, _, err = deltafin(tmp_path, "run", *arguments, *PROMPT)
    assert code == 2
    assert named in err
    assert "what to do" in err


def test_auto_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # A fresh copy: on a Mac the tests' own configuration has already chosen for the loaded one.
    spec = importlib.util.spec_from_file_location("backends_copy", backends.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(fresh, "find_spec", lambda name: spec)
    choose = fresh.choose
    monkeypatch.setattr("sys.platform", "linux")
    assert choose("auto") == "torch"
    assert choose("mlx") == "mlx"
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert choose("auto") == "mlx"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert choose("auto") == "torch"


@pytest.mark.parametrize(("name", "package"), [("mlx", "mlx"), ("torch", "torch")])
def test_a_backend_that_is_not_installed_names_the_command(
    name: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("deltafin.backends.find_spec", lambda wanted: None if wanted == package else real(wanted))
    with pytest.raises(MachineError) as refused:
        open_backend(name)
    assert f"pip install '{package}" in refused.value.remedy
    assert "--backend" in refused.value.remedy


def test_precision_of_the_torch_backend() -> None:
    with pytest.raises(UsageError):
        open_backend("torch", "bf16")
