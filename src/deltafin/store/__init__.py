"""The user's drives: where every slice lies, how it got there, and reading it back verified at drive speed.

Two layouts behind one interface: *in place* (released shards stay where they are) and *striped* (each
expert and each spine page cut into one slice per drive). Knows byte ranges, checksums and drives; must not
know tensors' meaning, caches, the router or which bytes will be needed next. May import ``checkpoint``,
``errors`` and the expert byte layout of ``expert_layout``.
"""

from deltafin.store.buffers import AlignedBuffer, aligned_memory
from deltafin.store.create import create_store
from deltafin.store.reader import Reader, Ticket
from deltafin.store.store import Store
from deltafin.store.types import (
    DriveInfo,
    DriveSpec,
    DriveStats,
    Extent,
    IngestProgress,
    ReadCancelled,
    ReadPlan,
    SpineTensor,
    SpineUnit,
)

__all__ = [
    "AlignedBuffer",
    "DriveInfo",
    "DriveSpec",
    "DriveStats",
    "Extent",
    "IngestProgress",
    "ReadCancelled",
    "ReadPlan",
    "Reader",
    "SpineTensor",
    "SpineUnit",
    "Store",
    "Ticket",
    "aligned_memory",
    "create_store",
]
