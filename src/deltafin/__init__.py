"""Deltafin runs the complete, unaltered Kimi K3 on one machine by streaming its released expert bytes from drives.

Rooms, in the order data flows: ``text`` (tokens), ``generation`` (sessions and the token loop), ``model`` (K3's maths),
``streaming`` (bytes on their way), ``residency`` (bytes that stay), ``store`` (drives), ``checkpoint`` (K3 as
released), ``kernels`` (native arithmetic). ``cli`` is a consumer of all of it. See ``docs/architecture.md``.
"""

__version__ = "0.1.0"
