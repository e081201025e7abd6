"""The heat histogram of one model: decayed use counts per (layer, expert), merged safely across runs and processes.

The file is a JSON header line, then fp32 counts [layers, experts]. Writers take turns by a lock file, add what they saw
to what the file holds by then, and replace it in one step; so a kill loses at most the last interval, and a reader
never sees half a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

HALF_LIFE = 4096.0
"""Tokens after which a use counts half."""

_MAGIC = "deltafin-heat"
_VERSION = 1
_WAIT_SECONDS = 2.0
_MAX_HEADER = 4096
_MAX_COUNTS = 1 << 24
_FADE = 2.0 ** (-1.0 / HALF_LIFE)

Counts = npt.NDArray[np.float32]


@dataclass(slots=True)
class Heat:
    """Decayed counts.

    Attributes:
        model: identity of the checkpoint.
        counts: fp32 [layers with routed experts, experts].
        tokens: decayed number of tokens the counts come from.
        total_tokens: tokens ever seen.
        problem: why a file that exists was not used; empty otherwise.
    """

    model: str
    counts: Counts
    tokens: float = 0.0
    total_tokens: int = 0
    problem: str = field(default="", compare=False)

    @classmethod
    def empty(cls, model: str, layers: int, experts: int, problem: str = "") -> Heat:
        """No knowledge."""
        return cls(model, np.zeros((layers, experts), np.float32), problem=problem)

    def add(self, routes: npt.NDArray[np.integer]) -> None:
        """Counts committed tokens, routes [tokens, layers, k]."""
        count = len(routes)
        if not count:
            return
        fade = np.float32(_FADE)
        ages = fade ** np.arange(count - 1, -1, -1, dtype=np.float32)
        layers, experts = self.counts.shape
        flat = (routes + np.arange(layers)[:, None] * experts).reshape(-1)
        weights = np.repeat(ages, layers * routes.shape[2])
        self.counts *= fade**count
        self.counts += np.bincount(flat, weights, layers * experts).reshape(layers, experts).astype(np.float32)
        self.tokens = self.tokens * _FADE**count + float(ages.sum())
        self.total_tokens += count

    def followed_by(self, later: Heat) -> Heat:
        """What both saw, ``later`` after this."""
        fade = _FADE**later.total_tokens
        return Heat(
            self.model,
            self.counts * np.float32(fade) + later.counts,
            self.tokens * fade + later.tokens,
            self.total_tokens + later.total_tokens,
        )


def load(path: Path, model: str, layers: int, experts: int) -> Heat:
    """The histogram at ``path``; an empty one, with ``problem`` set where there is one, when it cannot be used."""
    try:
        with path.open("rb") as file:
            line = file.readline(_MAX_HEADER)
            header = json.loads(line)
            if not isinstance(header, dict) or header.get("magic") != _MAGIC or header.get("version") != _VERSION:
                raise ValueError("it is not a heat file of this version")
            if header.get("model") != model or header.get("shape") != [layers, experts]:
                raise ValueError("it belongs to another model")
            size = layers * experts * 4
            if layers * experts > _MAX_COUNTS:
                raise ValueError("it is too large")
            data = file.read(size + 1)
        tokens, total = float(header["tokens"]), int(header["total_tokens"])
        if len(data) != size or xxhash.xxh3_64_hexdigest(data) != header.get("checksum"):
            raise ValueError("it is damaged")
        counts = np.frombuffer(data, np.float32).reshape(layers, experts).copy()
        if not (np.isfinite(counts).all() and counts.min() >= 0 and 0 <= tokens < 1e9 and 0 <= total < 1 << 60):
            raise ValueError("it holds impossible counts")
    except FileNotFoundError:
        return Heat.empty(model, layers, experts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
        return Heat.empty(model, layers, experts, problem=f"{path}: {e}")
    return Heat(model, counts, tokens, total)


def merge(path: Path, seen: Heat, *, wait: bool = False) -> bool:
    """Adds ``seen`` to the file.

    Args:
        wait: wait up to two seconds for another process that is writing; otherwise give up at once and try again later.

    Returns:
        Whether it was added. Never raises for the file's sake: heat is advisory.
    """
    layers, experts = seen.counts.shape
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock"), wait=wait) as mine:
            if not mine:
                return False
            _write(path, load(path, seen.model, layers, experts).followed_by(seen))
    except OSError:
        return False
    return True


def _write(path: Path, heat: Heat) -> None:
    data = np.ascontiguousarray(heat.counts, np.float32).tobytes()
    header = {
        "magic": _MAGIC,
        "version": _VERSION,
        "model": heat.model,
        "shape": list(heat.counts.shape),
        "tokens": heat.tokens,
        "total_tokens": heat.total_tokens,
        "checksum": xxhash.xxh3_64_hexdigest(data),
    }
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(json.dumps(header).encode() + b"\n" + data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        # Never for ever: a stopped process may hold the lock, and heat is not worth hanging for.
        until = time.monotonic() + (_WAIT_SECONDS if wait else 0.0)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    yield False
                    return
                time.sleep(0.01)
        yield True
    finally:
        os.close(fd)
