"""The networks people have: HTTPS with an authority of their own, proxies with and without a password."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deltafin.bench.hub import LocalHub
from deltafin.errors import HubError
from deltafin.hub import install
from deltafin.hub.client import Hub, _wait_from
from deltafin.hub.pins import Pin
from deltafin.store import Store
from store.installs_help import all_bytes, make_drives, released_bytes

LOGIN = "Basic " + base64.b64encode(b"user:pass word").decode()


@pytest.fixture(autouse=True)
def _fresh_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """huggingface_hub keeps one session, made with the environment of its first use."""
    from huggingface_hub.utils import close_session

    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    close_session()
    yield
    close_session()


class Proxy:
    """A proxy through which every host is ``behind``; notes what it was asked for."""

    def __init__(self, behind: int) -> None:
        self.asked: list[tuple[str, str]] = []  # (method, host)
        self.logins: set[str] = set()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                self.note(url.netloc)
                with socket.create_connection(("127.0.0.1", behind)) as other:
                    kept = "".join(f"{k}: {v}\r\n" for k, v in self.headers.items() if "connection" not in k.lower())
                    target = url.path + (f"?{url.query}" if url.query else "")
                    other.sendall(f"GET {target} HTTP/1.1\r\n{kept}Connection: close\r\n\r\n".encode())
                    while data := other.recv(1 << 20):
                        self.wfile.write(data)
                self.close_connection = True

            def do_CONNECT(self) -> None:
                self.note(self.path)
                self.send_response(200)
                self.end_headers()
                self.close_connection = True
                with socket.create_connection(("127.0.0.1", behind)) as other, contextlib.suppress(OSError):
                    ends = {self.connection: other, other: self.connection}
                    while True:
                        for end in select.select(list(ends), [], [])[0]:
                            data = end.recv(1 << 20)
                            if not data:
                                return
                            ends[end].sendall(data)

            def note(self, host: str) -> None:
                proxy.asked.append((self.command, host))
                proxy.logins.add(self.headers.get("Proxy-Authorization", ""))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that vouches for itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:hub.invalid"
    usage = "keyUsage=critical,digitalSignature,keyCertSign"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj /CN=hub -keyout key.pem -out cert.pem"
    with contextlib.suppress(FileNotFoundError):
        subprocess.run([*command.split(), "-addext", names, "-addext", usage], cwd=folder, capture_output=True)
    if not (folder / "cert.pem").exists():
        pytest.skip("no openssl to make a certificate with")
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def secure(small_model: Path, certificate: tuple[Path, Path]) -> Iterator[LocalHub]:
    with LocalHub({"small/k3": small_model}, tls=certificate) as hub:
        yield hub


def installed(endpoint: str, hub: LocalHub, base: Path, model: Path) -> None:
    """A full install through this endpoint holds the released bytes."""
    client = Hub(endpoint, hosts=["localhost"], timeout=10.0, backoff=(0.01, 0.05))
    try:
        pin, drives = Pin("small/k3", hub.revision), make_drives(base, (1.0, 1.0))
        install.install_striped(client, pin, drives, base / "home", experts=True)
    finally:
        client.close()
    with Store.open(base / "home") as store:
        assert all_bytes(store) == released_bytes(model)


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_an_authority_of_ones_own(
    name: str,
    secure: LocalHub,
    certificate: tuple[Path, Path],
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, str(certificate[0]))
    installed(secure.endpoint, secure, tmp_path, small_model)
    assert secure.requests("cdn")


def test_an_unknown_authority_is_refused(secure: LocalHub) -> None:
    client = Hub(secure.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
    with pytest.raises(HubError, match="not trusted") as caught:
        client.files(Pin("small/k3", secure.revision))
    assert client.requests == 1, "trying again would not help"
    client.close()
    assert "SSL_CERT_FILE" in caught.value.remedy
    assert not secure.log


def test_payload_is_refused_from_an_unknown_authority(
    secure: LocalHub, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    client = Hub(secure.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
    pin = Pin("small/k3", secure.revision)
    file = next(f for f in client.files(pin).values() if f.sha256)
    monkeypatch.delenv("SSL_CERT_FILE")  # our own connections, made from now on, do not know it
    with pytest.raises(HubError, match="not trusted"):
        client.read(pin, file, 0, memoryview(bytearray(100)))
    client.close()
    assert not secure.requests("cdn")


def test_a_proxy(small: LocalHub, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(small.port)
    monkeypatch.setenv("HTTP_PROXY", f"http://user:pass%20word@{proxy.address}")
    monkeypatch.setenv("http_proxy", f"http://user:pass%20word@{proxy.address}")
    installed("http://hub.invalid", small, tmp_path, small_model)  # a name that only the proxy knows
    proxy.close()
    assert {host.partition(":")[0] for _, host in proxy.asked} == {"hub.invalid", "localhost"}
    assert proxy.logins == {LOGIN}
    assert {r.token for r in small.requests("cdn")} == {""}


def test_a_tunnel_through_a_proxy(
    secure: LocalHub,
    certificate: tuple[Path, Path],
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = Proxy(secure.port)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://user:pass%20word@{proxy.address}")
    installed("https://hub.invalid", secure, tmp_path, small_model)
    proxy.close()
    assert {method for method, _ in proxy.asked} == {"CONNECT"}
    assert proxy.logins == {LOGIN}


def test_hosts_that_need_no_proxy(small: LocalHub, small_pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(small.port)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://{proxy.address}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    client = Hub(small.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
    file = next(f for f in client.files(small_pin).values() if f.sha256)
    client.read(small_pin, file, 0, memoryview(bytearray(100)))
    client.close()
    proxy.close()
    assert proxy.asked == []


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "17"}, 17.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"ratelimit": '"resolvers";r=0;t=243'}, 243.0),
        ({}, None),
    ],
)
def test_how_long_a_hub_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert _wait_from(headers) == seconds
