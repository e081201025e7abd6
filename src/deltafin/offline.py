"""The promise that nothing is contacted: connections are refused until the hub room asks for them, or for good.

An audit hook sees every connection and every name look-up that Python code makes, whichever library makes it.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from typing import Any

from deltafin.errors import OfflineError

_state = {"installed": False, "allowed": False, "forbidden": False}


def guard() -> None:
    """From now on this process refuses outgoing connections until ``allow``; the command line calls it first."""
    if not _state["installed"]:
        _state["installed"] = True
        sys.addaudithook(_watch)


def forbid() -> None:
    """Switches the network off for the rest of the process; ``allow`` then fails."""
    guard()
    _state["forbidden"], _state["allowed"] = True, False


def allow() -> None:
    """Lets connections through; called where the hub is about to be used.

    Raises:
        OfflineError: the network was switched off.
    """
    if _state["forbidden"]:
        raise OfflineError(
            "this needs the hub, and the network is switched off (--offline, K3_OFFLINE or DELTAFIN_OFFLINE)",
            remedy="run it once without, or use what is installed",
        )
    _state["allowed"] = True


def forbidden() -> bool:
    """Whether ``forbid`` was called."""
    return _state["forbidden"]


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not event.startswith("socket.") or _state["allowed"]:
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        if arguments[0].family not in (socket.AF_INET, socket.AF_INET6):
            return
        where = arguments[1]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        # A server looks up the address it listens on; numbers need no one to be asked.
        where = arguments[0]
        if where is None or _is_local(where):
            return
    else:
        return
    raise OfflineError(f"a connection to {str(where)[:100]} was refused: this command works without the network")


def _is_local(host: Any) -> bool:
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    if text in ("", "localhost", socket.gethostname()):
        return True
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
