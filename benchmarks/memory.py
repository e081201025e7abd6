"""Peak memory of whole runs against the budget given with --ram.

    python -m benchmarks.memory [--store DIR] [--tokens N]

Ceiling: the budget itself. Each run is a fresh process; its peak is the maximum resident set size the kernel reports.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil


def run(arguments: list[str], prompt: Path) -> tuple[int, int, str]:
    """Runs the command line; returns (exit code, peak bytes, standard error)."""
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "deltafin", "run", "--prompt-file", str(prompt), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        scale = 1 if sys.platform == "darwin" else 1024
        return process.returncode, usage.ru_maxrss * scale, errors.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="an install; the built-in miniature otherwise")
    parser.add_argument("--tokens", type=int, default=2000, help="prompt length, about")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--budgets", type=int, nargs="*", help="MiB; by default from the smallest one that works")
    a = parser.parse_args()
    where = ["--store", a.store] if a.store else []
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text("The capital of Norway is Oslo. " * (a.tokens // 8))
        context = ["--context", str(2 * a.tokens + a.new)]
        _, _, errors = run([*where, *context, "--ram", "1MiB"], prompt)
        needed = re.search(r"at least ([\d,]+) MiB", errors)
        if needed is None:
            raise SystemExit(f"the smallest budget is not named in: {errors}")
        smallest = int(needed[1].replace(",", "")) + 1
        budgets = a.budgets or [smallest, smallest + 8, smallest + 24, smallest + 64, smallest + 256, 4 * smallest]
        print(f"machine: {psutil.cpu_count(logical=False)} cores, {psutil.virtual_memory().total / 2**30:.1f} GiB")
        print(f"{'budget MiB':>10} {'peak MiB':>10} {'peak/budget':>12}")
        for budget in budgets:
            code, peak, errors = run([*where, *context, "--ram", f"{budget}MiB", "--max-new", str(a.new)], prompt)
            if code:
                print(f"{budget:>10} {errors.splitlines()[-2:] if errors else code}")
                continue
            print(f"{budget:>10,} {peak / 2**20:>10,.1f} {peak / 2**20 / budget:>12.3f}")


if __name__ == "__main__":
    main()
