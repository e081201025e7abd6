from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafin import offline
from deltafin.bench.hub import LocalHub
from deltafin.hub.client import Hub
from deltafin.hub.pins import Pin
from store.installs_help import tiny_checkpoint

MINI = Path(__file__).parents[2] / "src/deltafin/mini_k3"


@pytest.fixture(autouse=True)
def _own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxies, no token of the user's, no hub but this machine's, and no switch left over from another test."""
    real = socket.getaddrinfo

    def local_only(host: Any, *rest: Any, **named: Any) -> Any:
        assert host in ("127.0.0.1", "localhost", "", None), f"a test asks for {host}"
        return real(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", local_only)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_test_token")
    monkeypatch.setitem(offline._state, "forbidden", False)
    monkeypatch.setitem(offline._state, "allowed", False)


@pytest.fixture
def served() -> Iterator[LocalHub]:
    """The miniature family on a hub of this machine."""
    with LocalHub({"mini/k3": MINI / "target", "mini/dspark": MINI / "dspark", "mini/qwen": MINI / "qwen"}) as hub:
        yield hub


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of six experts: for tests that need many installs."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("small") / "model")
    for name in ("tokenizer_config.json", "tiktoken.model"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def small(small_model: Path) -> Iterator[LocalHub]:
    """It, served."""
    with LocalHub({"small/k3": small_model}) as hub:
        yield hub


@pytest.fixture
def small_pin(small: LocalHub) -> Pin:
    return Pin("small/k3", small.revision)


@pytest.fixture
def small_client(small: LocalHub) -> Iterator[Hub]:
    hub = Hub(small.endpoint, hosts=["localhost"], timeout=2.0, backoff=(0.01, 0.05))
    yield hub
    hub.close()


@pytest.fixture
def pin(served: LocalHub) -> Pin:
    return Pin("mini/k3", served.revision)


@pytest.fixture
def client(served: LocalHub) -> Iterator[Hub]:
    hub = Hub(served.endpoint, hosts=["localhost"], timeout=2.0, backoff=(0.01, 0.05))
    yield hub
    hub.close()
