"""Threads, instruction sets, forks, concurrent callers, the self-test and the layout."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deltafin import kernels
from deltafin.errors import MachineError
from deltafin.kernels import ExpertLayout, selftest


def test_threads_are_what_was_asked_for() -> None:
    for n in (1, 3, 2):
        kernels.set_threads(n)
        assert kernels.threads() == n
    for n in (0, -1, 5000):
        with pytest.raises(ValueError):
            kernels.set_threads(n)


def test_unknown_instruction_set() -> None:
    before = kernels.isa()
    with pytest.raises(MachineError, match="mmx"):
        kernels.select_isa("mmx")
    assert kernels.isa() == before
    assert "portable" in kernels.available_isas()


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


def test_environment_selects_the_instruction_set() -> None:
    code = "from deltafin import kernels; print(kernels.isa())"
    assert run(code, K3_ISA="portable").stdout.strip() == "portable"
    refused = run(code, K3_ISA="mmx")
    assert refused.returncode != 0
    assert "mmx" in refused.stderr


def test_missing_extension_says_how_to_build_it() -> None:
    done = run(
        "import sys; sys.modules['deltafin.kernels._native'] = None\n"
        "from deltafin.errors import MachineError\n"
        "try:\n    import deltafin.kernels\nexcept MachineError as e:\n    print(e)"
    )
    assert "pip install ." in done.stdout


def test_callers_on_many_threads_get_their_own_results() -> None:
    kernels.set_threads(2)
    w = torch.randn(300, 512).bfloat16()
    xs = [torch.randn(1 + i % 20, 512) for i in range(40)]
    expected = [kernels.linear(x, w) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(lambda x: kernels.linear(x, w), xs), expected, strict=True):
            assert torch.equal(got, want)


def test_a_forked_child_can_compute() -> None:
    code = """
import os, torch
from deltafin import kernels
kernels.set_threads(2)
x, w = torch.randn(4, 512), torch.randn(512, 512).bfloat16()
want = kernels.linear(x, w)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(kernels.linear(x, w), want) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.equal(kernels.linear(x, w), want)
print("fine")
"""
    done = run(code)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_selftest_passes(isa: str) -> None:
    kernels.select_isa(isa)
    selftest.check()


def test_selftest_names_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.rmsnorm
    monkeypatch.setattr(kernels, "rmsnorm", lambda *a: right(*a) * 1.0001)
    with pytest.raises(MachineError, match="rmsnorm"):
        selftest.check()


def test_released_layout() -> None:
    layout = ExpertLayout.released(3584, 3072)
    assert (layout.w1_packed, layout.w1_scale, layout.w2_packed) == (0, 5_505_024, 5_849_088)
    assert (layout.w2_scale, layout.w3_packed, layout.w3_scale) == (11_354_112, 11_698_176, 17_203_200)
    assert layout.nbytes == 17_547_264


@pytest.mark.parametrize(
    "change",
    [{"latent": 33}, {"latent": 0}, {"intermediate": 1 << 40}, {"w1_packed": -1}, {"w2_packed": 100}, {"w3_scale": 0}],
)
def test_impossible_layouts_are_refused(change: dict[str, int]) -> None:
    fields = {name: getattr(ExpertLayout.released(64, 32), name) for name in ExpertLayout.__slots__}
    with pytest.raises(ValueError):
        ExpertLayout(**{**fields, **change})
