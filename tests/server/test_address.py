"""Who may reach the server is decided before anything is opened."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from deltafin.cli.serve import _check_address
from deltafin.errors import UsageError
from deltafin.server.listen import make_server
from deltafin.settings import load_settings


def check(**flags: Any) -> None:
    _check_address(load_settings(flags)[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    check(host=host)
    with pytest.raises(UsageError, match="no effect"):
        check(host=host, insecure_bind=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "k3.example", "127.0.0.1.example"])
def test_elsewhere_needs_a_key_or_the_operators_word(host: str) -> None:
    with pytest.raises(UsageError, match="without a key"):
        check(host=host)
    check(host=host, insecure_bind=True)
    check(host=host, api_key="k")


def test_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_API_KEY", "sesame")
    settings, sources = load_settings({})
    assert sources["api_key"] == "environment"
    assert "sesame" not in f"{settings!r} {settings.api_key}"
    with pytest.raises(UsageError):
        load_settings({"api_key": ""})


def test_a_taken_port_is_named_and_small_answers_do_not_wait() -> None:
    server, bound = make_server(None, "127.0.0.1", 0)
    # asyncio switches Nagle's algorithm off only for sockets that name their protocol.
    assert bound.proto == socket.IPPROTO_TCP
    bound.listen()
    with pytest.raises(UsageError, match="cannot listen"):
        make_server(None, "127.0.0.1", bound.getsockname()[1])
    bound.close()
    assert server.config.access_log is False
