"""Prometheus figures of one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters that requests move, and gauges read when asked.

    Args:
        read: name → (value, whether it only grows, help).
    """

    def __init__(self, read: Callable[[], dict[str, tuple[float, bool, str]]]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter("deltafin_requests", "Answered requests.", ["path", "status"], registry=self._registry)
        self.tokens = Counter("deltafin_tokens", "Tokens of finished replies.", ["kind"], registry=self._registry)
        self.first_token = Histogram(
            "deltafin_first_piece_seconds",
            "From the arrival of a request to the first piece of its reply.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Read(read))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _Read(Collector):
    def __init__(self, read: Callable[[], dict[str, tuple[float, bool, str]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, (value, grows, text) in self._read().items():
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(f"deltafin_{name}", text)
            family.add_metric([], value)
            yield family
