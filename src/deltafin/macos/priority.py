"""Priorities: where a thread computes (quality of service) and whose reads go first (I/O policy).

macOS moves threads that nobody vouched for to its efficiency cores and holds their reads back, for example in a shell
that a scheduler or a remote login started. Both are set per thread, by the thread itself.
"""

from __future__ import annotations

from deltafin.macos import system

_USER_INITIATED = 0x19  # QOS_CLASS_USER_INITIATED in <sys/qos.h>
_DISK, _THREAD, _IMPORTANT = 0, 1, 1  # IOPOL_TYPE_DISK, IOPOL_SCOPE_THREAD, IOPOL_IMPORTANT in <sys/resource.h>


def raise_thread() -> bool:
    """Marks the calling thread as work that the user waits for: performance cores, reads that are not held back.

    Returns:
        Whether the system agreed to both; False on other systems, where nothing is done.
    """
    if not system.is_mac():
        return False
    cores = system.call("pthread_set_qos_class_self_np", _USER_INITIATED, 0)
    reads = system.call("setiopolicy_np", _DISK, _THREAD, _IMPORTANT)
    return cores and reads
