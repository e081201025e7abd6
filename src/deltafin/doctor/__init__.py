"""Looks at machine, runtime, install, drafts and sessions, changes nothing, asks nobody, and says what would help.

A check returns findings and never raises for what it looks at: the report of a broken install must be complete. May
import every room but ``cli``, ``server`` and ``hub``'s connections; must not write, and must not open a connection.
"""

from deltafin.doctor.checks import examine
from deltafin.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
