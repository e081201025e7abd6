"""Runs the benchmarks one after the other, each in a process of its own: ``python -m benchmarks [name …]``."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> int:
    names = sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"default: all of {', '.join(names)}")
    chosen = parser.parse_args().names or names
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(names)}")
    failed = []
    for name in chosen:
        spec = importlib.util.find_spec(f"benchmarks.{name}")
        assert spec is not None
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", spec.name], cwd=FOLDER.parent, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
