"""State points in RAM: the whole state of a sequence behind some tokens, for several conversations at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from deltafin.contract import Host

Tokens = npt.NDArray[np.int32]


def as_tokens(ids: Sequence[int]) -> Tokens:
    """Ids in the form in which points hold and compare them."""
    return np.asarray(ids, dtype=np.int32)


def prefix_hash(tokens: Tokens) -> str:
    """A name for exactly these ids."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tokens, dtype="<i4").tobytes())


@dataclass(frozen=True, eq=False)
class Rows:
    """Per-position tensors of the positions ``start`` … ``stop``; shared by all points that contain those positions."""

    start: int
    stop: int
    tensors: Mapping[str, Host]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in self.tensors.values())


@dataclass(frozen=True, eq=False)
class Point:
    """The state behind ``tokens``, owned by the point and never changed.

    Attributes:
        tokens: int32 [n].
        fixed: tensors whose size does not depend on n, the recurrent state above all.
        rows: per-position tensors, in order, without gaps from 0 to n.
    """

    tokens: Tokens
    fixed: Mapping[str, Host]
    rows: tuple[Rows, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, shared ones included."""
        return sum(t.nbytes for t in self.fixed.values()) + sum(block.nbytes for block in self.rows)

    @cached_property
    def name(self) -> str:
        """Number of tokens and hash of the tokens."""
        return f"{len(self.tokens)}-{prefix_hash(self.tokens)}"

    def begins(self, tokens: Tokens) -> bool:
        """Whether ``tokens`` begin with this point's and there is something left to do or to look up."""
        n = len(self.tokens)
        enough = n < len(tokens) or (n == len(tokens) and "logits" in self.fixed)
        return enough and bool(np.array_equal(self.tokens, tokens[:n]))

    def tensors(self) -> dict[str, Host]:
        """All tensors by name, as ``Session.restore`` takes them."""
        out = dict(self.fixed)
        for name in self.rows[0].tensors if self.rows else ():
            parts = [block.tensors[name] for block in self.rows]
            out[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return out


def take(ids: Sequence[int], tensors: Iterable[tuple[str, Host]], base: Point | None = None) -> Point:
    """Copies a session's state into a point.

    Args:
        ids: the committed tokens.
        tensors: of the session, see ``Session.tensors``.
        base: a point whose tokens begin ``ids``; its rows are shared instead of copied, since the same tokens always
            have the same bits.
    """
    shared = base.rows if base is not None else ()
    start = len(base) if base is not None else 0
    fixed, rows = {}, {}
    for name, tensor in tensors:
        if not name.endswith(".rows"):
            fixed[name] = tensor.copy()
        elif len(tensor) == len(ids):
            rows[name] = tensor
    if shared and set(shared[0].tensors) != set(rows):  # a draft came or went
        shared, start = (), 0
    if start < len(ids):
        block = Rows(start, len(ids), {name: tensor[start:].copy() for name, tensor in rows.items()})
        shared = (*shared, block)
    return Point(as_tokens(ids), fixed, shared)


class PointCache:
    """The most recently used points that fit into ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._points: OrderedDict[str, Point] = OrderedDict()
        self._uses: dict[Rows, int] = {}

    def __len__(self) -> int:
        return len(self._points)

    def find(self, tokens: Tokens) -> Point | None:
        """The longest point that ``tokens`` begin with, and marks it as used."""
        best: Point | None = None
        for point in self._points.values():
            if (best is None or len(point) > len(best)) and point.begins(tokens):
                best = point
        if best is not None:
            self._points.move_to_end(best.name)
        return best

    def base(self, tokens: Tokens) -> Point | None:
        """The longest point whose tokens begin ``tokens`` or are all of them, to share rows with."""
        found = [
            p for p in self._points.values() if len(p) <= len(tokens) and np.array_equal(p.tokens, tokens[: len(p)])
        ]
        return max(found, key=len, default=None)

    def __contains__(self, name: str) -> bool:
        return name in self._points

    def add(self, point: Point) -> None:
        """Keeps ``point`` and drops the least recently used ones beyond the limit; a too large one is not kept."""
        if point.name in self._points:
            self._drop(point.name)
        self._points[point.name] = point
        self.nbytes += sum(t.nbytes for t in point.fixed.values())
        for block in point.rows:
            if block not in self._uses:
                self.nbytes += block.nbytes
            self._uses[block] = self._uses.get(block, 0) + 1
        while self.nbytes > self.limit:
            self._drop(next(iter(self._points)))

    def _drop(self, name: str) -> None:
        point = self._points.pop(name)
        self.nbytes -= sum(t.nbytes for t in point.fixed.values())
        for block in point.rows:
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self.nbytes -= block.nbytes
