"""Talking to a hub: what it holds, and ranges of it, straight into the caller's memory.

A range read survives what home connections and busy hubs do: resets, stalls, short bodies, 429 with a reset time, 5xx,
addresses that expire, servers that ignore ranges. It resumes at the byte where it was cut, gives up only after several
failures in a row without one new byte, and never believes a length, a redirect or an ETag that contradicts what the
metadata promised.
"""

from __future__ import annotations

import http.client
import importlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from deltafin import offline
from deltafin.errors import DeltafinError, HubError, Interrupted
from deltafin.hub.line import Line, origin
from deltafin.hub.pins import Pin

MAX_REDIRECTS = 5
MAX_METADATA_BYTES = 64 << 20
METADATA_SECONDS = 120.0
PATIENCE = 8
"""Failures in a row, without one new byte, after which a read is given up."""

_TELL_AFTER = 3  # failures in a row
_TELL_WAIT = 5.0  # seconds
_LONGEST_WAIT = 900.0  # seconds; a hub's rate limit window is at most some minutes
_BACKOFF = (0.5, 30.0)  # seconds: first and longest wait
_PIECE = 1 << 20  # what a reset may cost of what had arrived
_SKIP_BYTES = 32 << 20  # read past so many bytes when a server ignores the range
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_RESET = re.compile(r"\bt=(\d{1,6})\b")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_HUB_SUFFIXES = (".huggingface.co", ".hf.co")
_AGAIN = "check the connection, then run the same command again: what was fetched is kept"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at a revision, as the hub describes it.

    Attributes:
        name: plain, inside the repository's top folder.
        size: bytes.
        sha256: of a large file; empty for a small one.
        git_sha1: of a small file's git object; empty for a large one.
    """

    name: str
    size: int
    sha256: str
    git_sha1: str


class _Transient(Exception):
    """Worth another try, after ``wait`` seconds when the hub said so."""

    def __init__(self, reason: str, wait: float | None = None, *, resolve: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.resolve = resolve  # the resolved address is no longer good


class Hub:
    """A connection pool to one hub. Its methods may be called from any thread.

    Args:
        endpoint: base address; None takes huggingface_hub's own, which honours ``HF_ENDPOINT``.
        hosts: further hosts to which payload may be redirected, for mirrors.
        connections: most simultaneous connections.
        timeout: seconds without a byte after which a connection counts as dead.
        backoff: (first, longest) wait in seconds between tries.
        notify: told, once per outage, that the hub does not answer and is tried again.

    Raises:
        OfflineError: the network was switched off.
        HubError: the endpoint is no address.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        hosts: Collection[str] = (),
        connections: int = 16,
        timeout: float = 20.0,
        backoff: tuple[float, float] = _BACKOFF,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        offline.allow()
        if not os.environ.get("SSL_CERT_FILE") and os.environ.get("REQUESTS_CA_BUNDLE"):
            # What users of other tools have set for their company's authority; ours and huggingface_hub read the other.
            os.environ["SSL_CERT_FILE"] = os.environ["REQUESTS_CA_BUNDLE"]
        from huggingface_hub import constants

        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        base = urlsplit(self.endpoint)
        if base.scheme not in ("http", "https") or not base.hostname:
            raise HubError(f"{self.endpoint!r} is not the address of a hub", remedy="correct HF_ENDPOINT")
        self._base = base
        self._hosts = frozenset(hosts)
        self._timeout = timeout
        self._backoff = backoff
        self._notify = notify
        self._told = False  # about the present outage
        self._line = Line(timeout)
        self._turns = threading.Semaphore(connections)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._resolved: dict[tuple[str, str, str], SplitResult] = {}
        self._etags: dict[tuple[str, str, str], str] = {}
        self.requests = 0

    def files(self, pin: Pin) -> dict[str, RemoteFile]:
        """The files in the top folder of ``pin``, by name. Names that are not plain are left out: never taken.

        Raises:
            HubError: no such repository or revision, no access, or an answer that makes no sense.
        """
        info = self._retry(lambda: self._model_info(pin), f"{pin.repo} at {self.endpoint}")
        if info.sha != pin.revision:
            raise HubError(
                f"{self.endpoint} answers with revision {str(info.sha)[:40]} of {pin.repo} instead of {pin.revision}",
                remedy="this mirror cannot be used; unset HF_ENDPOINT or name another",
            )
        found: dict[str, RemoteFile] = {}
        for sibling in info.siblings or ():
            name, size = sibling.rfilename, sibling.size
            if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
                continue
            lfs = sibling.lfs
            sha256 = str(lfs.sha256) if lfs is not None else ""
            git = str(sibling.blob_id or "") if lfs is None else ""
            if type(size) is not int or not 0 <= size < 1 << 53:
                raise HubError(f"{self.endpoint} gives no usable size for {name} of {pin.repo}", remedy=_AGAIN)
            if not (_SHA256.fullmatch(sha256) or _GIT_SHA1.fullmatch(git)):
                raise HubError(f"{self.endpoint} gives no checksum for {name} of {pin.repo}", remedy=_AGAIN)
            found[name] = RemoteFile(name, size, sha256, git)
        return found

    def read(
        self,
        pin: Pin,
        file: RemoteFile,
        offset: int,
        view: memoryview,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fills ``view`` with the bytes of ``file`` from ``offset``; ``stopped`` ends it early.

        Raises:
            HubError: given up after ``PATIENCE`` failures in a row without progress, or an answer that cannot be right.
            Interrupted: ``stop`` was called, or ``stopped`` is true.
        """
        if offset < 0 or offset + len(view) > file.size:
            raise ValueError(f"bytes {offset} to {offset + len(view)} of {file.name}, which has {file.size}")
        done = [0]

        def attempt() -> None:
            if stopped():
                raise Interrupted("stopped while fetching")
            self._range(pin, file, offset, view, done)

        if len(view):
            self._retry(attempt, f"{file.name} of {pin.repo}", progress=lambda: done[0])

    def stop(self) -> None:
        """Makes every running and later call end soon with ``Interrupted``."""
        self._stop.set()

    def close(self) -> None:
        """Stops and closes all connections."""
        self.stop()
        self._line.close()

    def _retry(self, step: Callable[[], Any], what: str, progress: Callable[[], int] = lambda: 0) -> Any:
        failures, before = 0, progress()
        while True:
            if self._stop.is_set():
                raise Interrupted("stopped while fetching", remedy="run the same command again to continue")
            try:
                result = step()
                self._told = False
                return result
            except DeltafinError:
                raise
            except (http.client.HTTPException, ValueError, OSError, _Transient) as e:
                if "CERTIFICATE_VERIFY_FAILED" in str(e):
                    raise HubError(
                        f"{what} cannot be fetched: the certificate is not trusted",
                        remedy="behind a proxy with its own authority, name that one's certificate in SSL_CERT_FILE",
                    ) from None
                failures = 1 if progress() > before else failures + 1
                before = progress()
                if failures > PATIENCE:
                    raise HubError(f"{what} cannot be fetched: {_reason(e)}", remedy=_AGAIN) from None
                wait = e.wait if isinstance(e, _Transient) else None
                if wait is None:
                    first, longest = self._backoff
                    wait = min(longest, first * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
                if (failures == _TELL_AFTER or wait > _TELL_WAIT) and not self._told:
                    self._told = True
                    self._notify(f"{what}: {_reason(e)}; trying again")
                self._stop.wait(min(wait, _LONGEST_WAIT))

    def _model_info(self, pin: Pin) -> Any:
        from huggingface_hub import HfApi, get_session
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        session = get_session()
        hooks = session.event_hooks
        if _bounded not in hooks["response"]:
            hooks["response"].append(_bounded)
            session.event_hooks = hooks
        self.requests += 1
        try:
            return HfApi(endpoint=self.endpoint).model_info(
                pin.repo, revision=pin.revision, files_metadata=True, timeout=self._timeout
            )
        except OfflineModeIsEnabled:
            raise HubError(
                f"{pin.repo} is needed from the hub, and HF_HUB_OFFLINE forbids it", remedy="unset HF_HUB_OFFLINE"
            ) from None
        except HFValidationError as e:
            raise HubError(f"{pin.repo}: {str(e)[:200]}", remedy="correct the repository's name") from None
        except HfHubHTTPError as e:
            status, headers = e.response.status_code, e.response.headers
            self._refuse(status, headers, f"{pin.repo} at revision {pin.revision[:12]}")
            raise
        except (DeltafinError, OSError):
            raise
        except Exception as e:
            # The library's HTTP package differs between versions, so its errors cannot be named here; malformed
            # metadata raises nearly anything.
            raise _Transient(f"{type(e).__name__}: {str(e)[:200]}") from None

    def _range(self, pin: Pin, file: RemoteFile, offset: int, view: memoryview, done: list[int]) -> None:
        """One request for what is missing of ``view``; ``done[0]`` grows with every byte."""
        key = (pin.repo, pin.revision, file.name)
        with self._lock:
            url = self._resolved.get(key)
        direct = url is not None
        if url is None:
            url = self._address(pin, file)
        begin, end = offset + done[0], offset + len(view)
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        for _ in range(MAX_REDIRECTS + 1):
            own = origin(url) == origin(self._base)
            # The token belongs to the hub alone: it stays on redirects within the hub and never leaves for a CDN.
            credentials = self._credentials() if own else {"User-Agent": "deltafin"}
            self.requests += 1
            with self._turns, self._line.get(url, {**credentials, **headers}) as response:
                if own:
                    _check_promises(response.headers, pin, file)
                if response.status in (301, 302, 303, 307, 308):
                    url = self._next(url, response.headers.get("location", ""), file)
                    continue
                self._check(response, file, key, begin, end, direct=direct)
                if not own:
                    with self._lock:
                        self._resolved[key] = url
                self._body(response, begin, view, done)
                return
        raise HubError(f"{self.endpoint} redirects {file.name} in circles", remedy="this hub or mirror cannot be used")

    def _check(
        self,
        response: http.client.HTTPResponse,
        file: RemoteFile,
        key: tuple[str, str, str],
        begin: int,
        end: int,
        *,
        direct: bool,
    ) -> None:
        status, headers = response.status, response.headers
        if status not in (200, 206):
            if direct and status in (401, 403, 404, 410):
                self._forget(key)
                raise _Transient(f"HTTP {status} from an address that has expired", wait=0.0)
            self._forget(key)
            self._refuse(status, headers, file.name)
            raise _Transient(f"HTTP {status}")
        if headers.get("content-encoding", "identity") != "identity":
            self._forget(key)
            raise _Transient(f"the body is encoded as {headers['content-encoding'][:40]!r}")
        length = headers.get("content-length", "")
        if status == 206:
            match = _RANGE.fullmatch(headers.get("content-range", ""))
            if match is None or tuple(map(int, match.groups())) != (begin, end - 1, file.size):
                self._forget(key)
                raise _Transient(
                    f"bytes {headers.get('content-range', '')[:60]!r} were sent instead of those asked for"
                )
            if length and length != str(end - begin):
                self._forget(key)
                raise _Transient(f"a body of {length[:20]} bytes was announced for {end - begin}")
        elif length and length != str(file.size):
            self._forget(key)
            kind = " (a web page)" if "html" in headers.get("content-type", "") else ""
            raise _Transient(f"{length[:20]} bytes{kind} were sent in place of a file of {file.size}")
        etag = headers.get("etag", "").removeprefix("W/").strip('"')
        if _SHA256.fullmatch(etag) and file.sha256 and etag != file.sha256:
            self._forget(key)
            raise _Transient("the content behind this address is of another file")
        with self._lock:
            before = self._etags.setdefault(key, etag)
        if before != etag:
            self._forget(key)
            raise _Transient("the file's ETag changed while it was being read")

    def _body(self, response: http.client.HTTPResponse, begin: int, view: memoryview, done: list[int]) -> None:
        skip = begin if response.status == 200 else 0
        if skip > _SKIP_BYTES:
            raise _Transient("the server ignores ranges")
        scratch = memoryview(bytearray(_PIECE if skip else 0))
        while done[0] < len(view):
            if self._stop.is_set():
                raise Interrupted("stopped while fetching", remedy="run the same command again to continue")
            # Never more than asked for, however long the body is.
            place = scratch[: min(skip, _PIECE)] if skip else view[done[0] : done[0] + _PIECE]
            got = response.readinto(place)
            if not got:
                raise _Transient("the connection was closed early")
            if skip:
                skip -= got
            else:
                done[0] += got

    def _address(self, pin: Pin, file: RemoteFile) -> SplitResult:
        from huggingface_hub import hf_hub_url

        return urlsplit(hf_hub_url(pin.repo, file.name, revision=pin.revision, endpoint=self.endpoint))

    @staticmethod
    def _credentials() -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers: dict[str, str] = build_hf_headers(library_name="deltafin")
        return headers

    def _next(self, url: SplitResult, location: str, file: RemoteFile) -> SplitResult:
        target = urlsplit(urljoin(url.geturl(), location))
        host = target.hostname or ""
        known = host == self._base.hostname or host in self._hosts or host.endswith(_HUB_SUFFIXES)
        if not location or len(location) > 16384 or "@" in target.netloc or not known:
            raise HubError(
                f"{url.hostname} redirects {file.name} to {host[:100]!r}, which is no host of this hub",
                remedy="if you trust this mirror's host, name it in K3_HUB_HOSTS",
            )
        if target.scheme != "https" and target.scheme != self._base.scheme:
            raise HubError(
                f"{url.hostname} redirects {file.name} to an unencrypted address", remedy="use another mirror"
            )
        return target

    def _forget(self, key: tuple[str, str, str]) -> None:
        with self._lock:
            self._resolved.pop(key, None)
            self._etags.pop(key, None)

    def _refuse(self, status: int, headers: Any, what: str) -> None:
        """Raises what a failed status means; returns when nothing but another try can tell."""
        if status in (401, 403):
            raise HubError(
                f"{self.endpoint} refuses access to {what} (HTTP {status})",
                remedy="accept the model's licence on its page, and log in with: hf auth login",
            )
        if status == 404:
            raise HubError(f"{self.endpoint} has no {what}", remedy="check the repository's name and revision")
        if status == 416:
            raise HubError(f"{what} is shorter on {self.endpoint} than its metadata says", remedy=_AGAIN)
        if status == 429 or status >= 500:
            raise _Transient(f"HTTP {status}", _wait_from(headers))
        if 400 <= status < 500 and status != 408:
            raise HubError(f"{self.endpoint} answers HTTP {status} for {what}", remedy=_AGAIN)


def _check_promises(headers: Any, pin: Pin, file: RemoteFile) -> None:
    """The hub's own answer must agree with its metadata: same commit, same content, same size."""
    commit = headers.get("x-repo-commit")
    if commit and commit != pin.revision:
        raise HubError(f"{file.name} was served from commit {commit[:40]!r}", remedy="this mirror cannot be used")
    linked = headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
    if linked and file.sha256 and linked != file.sha256:
        raise HubError(f"{file.name} is announced with the checksum {linked[:64]!r}, not {file.sha256}", remedy=_AGAIN)
    size = headers.get("x-linked-size")
    if size and size != str(file.size):
        raise HubError(f"{file.name} is announced with {size[:20]} bytes, not {file.size}", remedy=_AGAIN)


def _wait_from(headers: Any) -> float | None:
    """Seconds until the hub wants to be asked again, from ``Retry-After`` (seconds or a date) or ``RateLimit``; None
    when untold."""
    after = str(headers.get("retry-after", "")).strip()
    if after.isdecimal():
        return float(after[:6])
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(after[:64]).timestamp() - time.time())
    match = _RESET.search(str(headers.get("ratelimit", ""))[:200])
    return float(match[1]) if match else None


def _reason(error: Exception) -> str:
    return f"{str(error)[:200] or type(error).__name__}"


def _bounded(response: Any) -> None:
    """Response hook for metadata: an endless or endlessly slow body ends here."""
    # The stream must derive from a class of the HTTP package in use, which differs between versions of the library.
    package = importlib.import_module(type(response).__module__.partition(".")[0])
    kind = type("BoundedStream", (_BoundedStream, package.SyncByteStream), {})
    response.stream = kind(response.stream)


class _BoundedStream:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._deadline = time.monotonic() + METADATA_SECONDS

    def __iter__(self) -> Any:
        total = 0
        for chunk in self._inner:
            total += len(chunk)
            if total > MAX_METADATA_BYTES or time.monotonic() > self._deadline:
                raise HubError("the hub's metadata has no end", remedy="this hub or mirror cannot be used")
            yield chunk

    def close(self) -> None:
        self._inner.close()
