"""How many experts the tier may keep while other programs need memory: a pure rule with hysteresis."""

from __future__ import annotations

GIB = 1 << 30


def reserve_bytes(total: int) -> int:
    """Free memory to leave to the rest of the machine: a sixteenth of it, between a quarter and two GiB."""
    return min(2 * GIB, max(GIB // 4, total // 16))


def tier_under_pressure(now: int, planned: int, *, frame_bytes: int, available: int, reserve: int) -> int:
    """Frames the tier may have from now on.

    Memory is given back as soon as less than ``reserve`` bytes are free, and taken again, a quarter of the difference
    at a time, only when twice that is free: paging costs more than any hit could save.

    Args:
        now: frames it may have at present.
        planned: frames of the memory plan, never exceeded.
        frame_bytes: bytes of one.
        available: bytes the machine has free.
        reserve: see ``reserve_bytes``.
    """
    if available < reserve:
        return max(0, now - -(-(reserve - available) // frame_bytes))
    spare = (available - 2 * reserve) // frame_bytes
    if now < planned and spare > 0:
        return min(planned, now + max(1, min(spare, (planned - now + 3) // 4)))
    return min(now, planned)
