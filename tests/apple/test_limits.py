"""MLX's memory limits, with simulated devices."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from deltafin.apple import limits


class Device:
    def __init__(self, info: dict[str, Any], *, refuses: bool = False) -> None:
        self._info, self._refuses = info, refuses
        self.wired: list[int] = []
        self.cache: list[int] = []

    def device_info(self) -> dict[str, Any]:
        return self._info

    def set_wired_limit(self, limit: int) -> int:
        if self._refuses:
            raise ValueError("macOS 15 is needed")
        self.wired.append(limit)
        return 0

    def set_cache_limit(self, limit: int) -> int:
        self.cache.append(limit)
        return 0


@pytest.mark.parametrize(
    ("device", "wired"),
    [
        (Device({"max_recommended_working_set_size": 96 << 30}), [96 << 30]),
        (Device({"max_recommended_working_set_size": 96 << 30}, refuses=True), []),
        (Device({"device_name": "a CPU"}), []),
        (Device({"max_recommended_working_set_size": "much"}), []),
    ],
    ids=["GPU", "older macOS", "CPU", "nonsense"],
)
def test_what_stays_wired(device: Device, wired: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MX", device)
    assert limits.apply_limits() == sum(wired)
    assert device.wired == wired
    assert device.cache == [limits.CACHE_BYTES]


def test_on_this_machine() -> None:
    before = mx.set_cache_limit(limits.CACHE_BYTES)
    try:
        assert limits.apply_limits() >= 0
        assert mx.set_cache_limit(before) == limits.CACHE_BYTES
    finally:
        mx.set_cache_limit(before)
