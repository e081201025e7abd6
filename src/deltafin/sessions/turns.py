"""The ids of earlier replies, and those of replies that a crash may cut: one small SQLite file.

A client sends a reply back as text; only the ids K3 decided repeat the turn exactly, so they are kept by what the
client will send and by the ids before them. Requests that carry an idempotency key have each decided token written
down.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from deltafin.generation.events import TokenLogprobs
from deltafin.sessions.points import as_tokens
from deltafin.text.messages import AssistantMessage, TextPart

MAX_TURNS = 4096
MAX_REQUESTS = 64
_SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (key BLOB PRIMARY KEY, ids BLOB NOT NULL, used REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (key TEXT PRIMARY KEY, work TEXT NOT NULL, used REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decided (key TEXT, place INTEGER, token INTEGER NOT NULL, info TEXT,
    PRIMARY KEY (key, place)) WITHOUT ROWID;
"""


class TurnLog:
    """Safe to use from several threads and processes. A file that cannot be used costs reuse, nothing else.

    Args:
        path: the file, or None to remember within this process only.
        identity: of the model; another model's ids mean something else.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self._identity = identity.encode()
        self._lock = threading.Lock()
        try:
            self._db = self._open(path)
        except (sqlite3.Error, OSError):
            if path is not None:
                # Damaged, or a place that cannot be written. The next start begins anew.
                with contextlib.suppress(OSError):
                    path.unlink()
            self._db = self._open(None)

    def _open(self, path: Path | None) -> sqlite3.Connection:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
        db = sqlite3.connect(path or ":memory:", timeout=5, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        # Survives a crash of the process; a power cut may cost the last tokens, which are then decided again.
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_SCHEMA)
        return db

    def remember(self, before: Sequence[int], reply: Sequence[int], message: AssistantMessage, thinking: bool) -> None:
        """Keeps the ids of a complete reply.

        Args:
            before: the prompt.
            reply: decided ids, end of message included.
            message: the reply as the client got it.
        """
        key, now = self._key(before, message, thinking), time.time()
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.execute("REPLACE INTO turns VALUES (?, ?, ?)", (key, _pack(reply), now))
            self._db.execute(
                "DELETE FROM turns WHERE used < (SELECT used FROM turns ORDER BY used DESC LIMIT 1 OFFSET ?)",
                (MAX_TURNS,),
            )

    def recall(self, message: AssistantMessage, before: Sequence[int], thinking: bool) -> list[int] | None:
        """The ids of the reply ``message`` that followed ``before``, if K3 wrote it here."""
        key = self._key(before, message, thinking)
        with self._lock, contextlib.suppress(sqlite3.Error):
            row = self._db.execute("SELECT ids FROM turns WHERE key = ?", (key,)).fetchone()
            if row is not None:
                self._db.execute("UPDATE turns SET used = ? WHERE key = ?", (time.time(), key))
                return _unpack(row[0])
        return None

    def begin(self, key: str, work: str) -> list[tuple[int, TokenLogprobs | None]] | None:
        """Opens a resumable request, or finds what was decided of it.

        Args:
            key: the client's idempotency key.
            work: a name for everything that determines the reply.

        Returns:
            Decided tokens in order; None when the key belongs to another request.
        """
        with self._lock, contextlib.suppress(sqlite3.Error):
            row = self._db.execute("SELECT work FROM requests WHERE key = ?", (key,)).fetchone()
            if row is not None and row[0] != work:
                return None
            self._db.execute("REPLACE INTO requests VALUES (?, ?, ?)", (key, work, time.time()))
            old = self._db.execute("SELECT key FROM requests ORDER BY used DESC LIMIT -1 OFFSET ?", (MAX_REQUESTS,))
            for (gone,) in old.fetchall():
                self._db.execute("DELETE FROM decided WHERE key = ?", (gone,))
                self._db.execute("DELETE FROM requests WHERE key = ?", (gone,))
            rows = self._db.execute("SELECT place, token, info FROM decided WHERE key = ? ORDER BY place", (key,))
            out = []
            for n, (place, token, info) in enumerate(rows.fetchall()):
                if place != n:  # a hole: what follows it is of no use
                    break
                out.append((token, _logprobs(info)))
            return out
        return []

    def belongs(self, key: str, work: str) -> bool:
        """Whether ``key`` is free or already this request's."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            row = self._db.execute("SELECT work FROM requests WHERE key = ?", (key,)).fetchone()
            return row is None or row[0] == work
        return True

    def decided(self, key: str, place: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """Writes down the token at ``place`` of a resumable request."""
        info = None if logprobs is None else json.dumps([logprobs.logprob, logprobs.top])
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.execute("REPLACE INTO decided VALUES (?, ?, ?, ?)", (key, place, token, info))

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def _key(self, before: Sequence[int], message: AssistantMessage, thinking: bool) -> bytes:
        content = "".join(part.text for part in message.content if isinstance(part, TextPart))
        reasoning = message.reasoning_content or message.reasoning or ""
        calls = [[call.function.name, _arguments(call.function.arguments)] for call in message.tool_calls]
        shown = json.dumps([reasoning if thinking and reasoning.strip() else "", content, calls])
        digest = xxhash.xxh3_128(self._identity + (b"\1" if thinking else b"\0"))
        digest.update(_pack(before))
        digest.update(shown.encode())
        return digest.digest()


def _arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _pack(ids: Sequence[int]) -> bytes:
    return as_tokens(ids).astype("<i4").tobytes()


def _unpack(data: bytes) -> list[int]:
    out: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return out


def _logprobs(info: str | None) -> TokenLogprobs | None:
    if info is None:
        return None
    logprob, top = json.loads(info)
    return TokenLogprobs(logprob, tuple((int(i), float(p)) for i, p in top))
