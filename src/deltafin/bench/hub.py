"""A hub on this machine: metadata, resolve, redirect and ranges over real HTTP, with faults to order.

For tests and measurements; serves folders from memory of their names and checksums, from disk their bytes.

    python -m deltafin.bench.hub OWNER/NAME=FOLDER ...     prints the address, serves until killed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_SMALL = (".json", ".model", "LICENSE", ".txt", ".md")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """A file of a served repository."""

    path: Path
    size: int
    sha256: str
    git_sha1: str
    lfs: bool


@dataclass(slots=True)
class Fault:
    """What to do wrong, and how often.

    Attributes:
        where: ``api``, ``resolve`` or ``cdn``.
        what: name of the fault, see ``_Handler``.
        times: how many requests it hits; -1 for all.
        name: only requests for this file; empty for all.
        value: the fault's parameter.
        after: requests to let pass before.
    """

    where: str
    what: str
    times: int = 1
    name: str = ""
    value: int = 0
    after: int = 0


@dataclass(slots=True)
class Request:
    """A request that was received."""

    where: str
    name: str
    range: str
    token: str
    host: str


@dataclass
class LocalHub:
    """The server; a context manager.

    Args:
        repos: ``owner/name`` → folder.
        latency: seconds before every answer.
        cdn_host: host that payload is redirected to; empty serves it from the hub's own address.
        tls: certificate and key file, to speak HTTPS.
    """

    repos: Mapping[str, Path]
    latency: float = 0.0
    cdn_host: str = "localhost"
    port: int = 0
    revision: str = "0123456789abcdef0123456789abcdef01234567"
    tls: tuple[Path, Path] | None = None
    faults: list[Fault] = field(default_factory=list)
    log: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.files = {repo: {p.name: _served(p) for p in sorted(f.iterdir())} for repo, f in self.repos.items()}
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = _Server(("127.0.0.1", self.port), handler)
        self.port = self.server.server_address[1]
        self.scheme = "https" if self.tls else "http"
        if self.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.tls)
            self.server.socket = context.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.endpoint = f"{self.scheme}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self._epoch = 0

    def __enter__(self) -> LocalHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def expire(self) -> None:
        """Makes every address handed out so far answer 403."""
        self._epoch += 1

    @property
    def epoch(self) -> int:
        """Addresses of other epochs have expired."""
        return self._epoch

    def requests(self, where: str, name: str = "") -> list[Request]:
        """Requests received so far."""
        with self.lock:
            return [r for r in self.log if r.where == where and name in ("", r.name)]

    def due(self, where: str, name: str) -> Fault | None:
        """The fault that hits this request, if any."""
        with self.lock:
            for fault in self.faults:
                if fault.where == where and fault.name in ("", name) and fault.times:
                    if fault.after:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


def _served(path: Path) -> Served:
    data = path.read_bytes() if path.stat().st_size < 1 << 26 else None
    if data is not None:
        sha256 = hashlib.sha256(data).hexdigest()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    else:
        with open(path, "rb") as file:
            sha256, git = hashlib.file_digest(file, "sha256").hexdigest(), ""
    return Served(path, path.stat().st_size, sha256, git, not path.name.endswith(_SMALL))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # by default the sixth of sixteen connections at once waits a second for its next try

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that are killed or give up are the point of this server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two sends: without this the body waits up to 40 ms for the head's acknowledgement.
    disable_nagle_algorithm = True
    hub: LocalHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        time.sleep(hub.latency)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if parts[0] == "api":
                self._api("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "")
            elif parts[0] == "cdn":
                self._cdn("/".join(parts[1:3]), parts[3], parse_qs(url.query))
            elif len(parts) == 5 and parts[2] == "resolve":
                self._resolve("/".join(parts[:2]), parts[3], parts[4])
            else:
                self._answer(404)

    def _note(self, where: str, name: str) -> Fault | None:
        h = self.headers
        request = Request(where, name, h.get("Range", ""), h.get("Authorization", ""), h.get("Host", ""))
        with self.hub.lock:
            self.hub.log.append(request)
        fault = self.hub.due(where, name)
        if fault is None:
            return None
        simple: dict[str, Callable[[], None]] = {
            "status": lambda: self._answer(fault.value),
            "busy": lambda: self._answer(429, {"RateLimit": f'"api";r=0;t={fault.value}'}),
            "later": lambda: self._answer(503, {"Retry-After": str(fault.value)}),
            "reset": self._reset,
            "huge-header": lambda: self._answer(200, {"X-Large": "x" * (1 << 20)}),
            "loop": lambda: self._answer(302, {"Location": self.path}),
            "foreign": lambda: self._answer(302, {"Location": "http://example.invalid/stolen"}),
            "relative": lambda: self._answer(
                307, {"Location": self.path + ("&" if "?" in self.path else "?") + "moved=1"}
            ),
            "html": lambda: self._answer(200, {"Content-Type": "text/html"}, b"<html>log in, please</html>"),
            "endless": self._endless,
        }
        if fault.what in simple:
            simple[fault.what]()
            raise BrokenPipeError  # answered
        return fault

    def _api(self, repo: str, revision: str) -> None:
        fault = self._note("api", repo)
        files = self.hub.files.get(repo)
        if files is None or revision != self.hub.revision:
            self._answer(404)
            return
        siblings = []
        for name, file in files.items():
            entry: dict[str, object] = {"rfilename": name, "size": file.size, "blobId": file.git_sha1 or "0" * 40}
            if file.lfs:
                entry["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": 134}
            siblings.append(entry)
        sha = revision
        if fault is not None and fault.what == "traversal":
            siblings += [{"rfilename": n, "size": 3, "blobId": "0" * 40} for n in ("../evil.json", "/etc/x", "a/b.py")]
        elif fault is not None and fault.what == "other-commit":
            sha = "f" * 40
        elif fault is not None and fault.what == "wrong-sha":
            for entry in siblings:
                if isinstance(entry.get("lfs"), dict):
                    entry["lfs"] = {"sha256": "0" * 64, "size": entry["size"], "pointerSize": 134}
        elif fault is not None and fault.what == "wrong-size":
            for entry in siblings:
                entry["size"] = -5
        body = json.dumps({"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "tags": []}).encode()
        self._answer(200, {"Content-Type": "application/json"}, body)

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        fault = self._note("resolve", name)
        hub = self.hub
        file = hub.files.get(repo, {}).get(name)
        if file is None or revision != hub.revision:
            self._answer(404)
            return
        if not file.lfs:
            self._send(file, fault, {"X-Repo-Commit": revision, "ETag": f'"{file.git_sha1}"'})
            return
        etag = "0" * 64 if fault is not None and fault.what == "other-etag" else file.sha256
        headers = {"X-Repo-Commit": revision, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(file.size)}
        host = f"{hub.scheme}://{hub.cdn_host}:{hub.port}" if hub.cdn_host else hub.endpoint
        self._answer(302, {**headers, "Location": f"{host}/cdn/{repo}/{name}?epoch={hub.epoch}"})

    def _cdn(self, repo: str, name: str, query: Mapping[str, list[str]]) -> None:
        fault = self._note("cdn", name)
        file = self.hub.files.get(repo, {}).get(name)
        if file is None:
            self._answer(404)
        elif query.get("epoch") != [str(self.hub.epoch)]:
            self._answer(403)
        else:
            etag = file.sha256[::-1][:32]  # a CDN has its own ETags
            if fault is not None and fault.what == "new-etag":
                etag = f"{time.time_ns():032d}"
            self._send(file, fault, {"ETag": f'"{etag}"'})

    def _send(self, file: Served, fault: Fault | None, headers: dict[str, str]) -> None:
        what, hub = "" if fault is None else fault.what, self.hub
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = 0, file.size
        status = 200
        if match and what != "no-ranges":
            begin, end = int(match[1]), min(int(match[2]) + 1, file.size)
            if begin >= file.size:
                self._answer(416, {"Content-Range": f"bytes */{file.size}"})
                return
            status = 206
            shift = 4096 if what == "wrong-range" else 0
            headers["Content-Range"] = f"bytes {begin + shift}-{end - 1 + shift}/{file.size}"
        length = end - begin
        promised = length + (1000 if what == "long-length" else -1000 if what == "short-length" else 0)
        self.send_response(status)
        self.send_header("Content-Length", str(max(promised, 0)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = what in ("cut", "stall", "long-length")
        stop = begin + (
            min(length, fault.value or max(1, length // 2)) if cut and fault is not None else max(promised, 0)
        )
        stop = min(stop, end)
        self.wfile.flush()
        with open(file.path, "rb", buffering=0) as source:
            at = begin
            if what in ("corrupt", "zeros"):
                source.seek(begin)
                data = bytearray(source.read(length))
                if what == "corrupt" and data:
                    data[len(data) // 2] ^= 1
                elif data:
                    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
                self.wfile.write(data)
                return
            while at < stop and hub.tls:
                source.seek(at)
                at += self.connection.send(source.read(min(_PIECE, stop - at)))
            while at < stop:
                # One buffer's worth at a time, or a client that reads slowly would keep others from the processor.
                at += os.sendfile(self.connection.fileno(), source.fileno(), at, min(_PIECE, stop - at))
        if what == "stall":
            time.sleep(5.0)
        if what == "cut":
            # An orderly end, since a reset may take back what was sent; "reset" is a fault of its own.
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_WR)
        elif cut:
            self._reset()

    def _answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.shutdown(socket.SHUT_RDWR)

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        while True:
            self.wfile.write(piece)


def main(arguments: list[str]) -> None:
    """Serves folders until killed."""
    repos = {repo: Path(folder) for repo, _, folder in (text.partition("=") for text in arguments)}
    with LocalHub(repos, latency=float(os.environ.get("HUB_LATENCY", "0"))) as hub:
        print(f"{hub.endpoint} revision {hub.revision}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
