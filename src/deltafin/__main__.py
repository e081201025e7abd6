"""``python -m deltafin`` is the command ``deltafin``."""

from deltafin.cli import main

main()
