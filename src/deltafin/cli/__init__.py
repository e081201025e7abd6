"""The ``deltafin`` command: parsing, printing and exit codes, nothing else.

One file per command. May import everything; nothing imports it.
"""

from deltafin.cli.main import main

__all__ = ["main"]
