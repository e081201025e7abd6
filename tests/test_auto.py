"""``--backend auto``: the machine's own framework, or the other one where only that is installed."""

from __future__ import annotations

from typing import Any

import pytest

from deltafin import backends
from deltafin.errors import MachineError


@pytest.mark.parametrize(
    ("apple", "installed", "chosen"),
    [
        (True, {"mlx", "torch"}, "mlx"),
        (True, {"mlx"}, "mlx"),
        (True, {"torch"}, "torch"),
        (True, set(), "mlx"),
        (False, {"mlx", "torch"}, "torch"),
        (False, {"torch"}, "torch"),
        (False, {"mlx"}, "mlx"),
        (False, set(), "torch"),
    ],
)
def test_what_auto_means(apple: bool, installed: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        return object() if name in installed else None

    monkeypatch.setattr(backends, "apple_silicon", lambda: apple)
    monkeypatch.setattr(backends, "find_spec", find)
    assert backends.choose("auto") == chosen
    assert backends.choose("torch") == "torch"
    assert backends.choose("mlx") == "mlx"
    for named in ("torch", "mlx", "auto"):
        if backends.choose(named) not in installed:  # type: ignore[arg-type]
            with pytest.raises(MachineError, match="not installed") as refused:
                backends.open_backend(named)  # type: ignore[arg-type]
            assert refused.value.remedy.startswith("pip install")
