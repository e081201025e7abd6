"""MLX's own memory: how much of it stays wired for the GPU, and how much freed memory it may hold back.

The memory plan knows the arrays the engine keeps; what MLX caches beyond them would break the budget unseen.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

CACHE_BYTES = 256 << 20
"""Freed buffers that MLX may keep for reuse: several layers' worth of activations, and no more."""
_CACHE_SHARE = 64
"""Of a small budget it may keep this part."""

# Not typed, and not the same in all versions.
_MX: Any = mx


def bound_cache(budget: int) -> None:
    """Bounds freed memory for a process that may use ``budget`` bytes."""
    _MX.set_cache_limit(min(CACHE_BYTES, budget // _CACHE_SHARE))


def apply_limits() -> int:
    """Bounds MLX's cache, and lets it keep wired as much as the GPU may hold, so that weights are not wired anew for
    every command.

    Returns:
        Bytes that may stay wired; 0 without a GPU, or where the system refuses (macOS before 15).
    """
    _MX.set_cache_limit(CACHE_BYTES)
    limit = 0
    try:
        limit = int(_MX.device_info().get("max_recommended_working_set_size", 0))
        if limit:
            _MX.set_wired_limit(limit)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0
    return limit
