"""A decoded token and a prefill on a slice of K3's true geometry, cold, against the ceilings of the same run.

    python -m benchmarks.decode_slice --dir /mnt/ssd [--dir /mnt/ssd2] [--layers 3] [--experts 160]

Writes layers of true dimensions in the released format, measures, and removes them. For each token: ``read`` is the
missed expert bytes with nothing but threads and direct reads, ``compute`` the same pass with every expert in memory,
``total`` the cold pass; then the same for the layers behind the first with experts, as all but one of K3's are. With
--rate (GB/s per drive) drives are throttled and the read ceiling is bytes / summed rates; ``equal`` chooses the rate at
which reading takes as long as computing. Arms run in random order. A last arm has nothing but two spine buffers in
memory, so that a token reads its spine as well as its experts, as on a machine with less memory than the spine has
bytes.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from deltafin.bench.slice import (
    PREFILL_TIER,
    Step,
    measure_decode,
    measure_prefill,
    measure_streamed,
    medians,
    open_slice,
    slice_bytes,
    slice_install,
    streaming_options,
)


def show(name: str, step: Step) -> None:
    print(
        f"{name:34} read {step.read * 1e3:8.1f} ms  compute {step.compute * 1e3:8.1f} ms  "
        f"total {step.total * 1e3:8.1f} ms  ratio {step.over_ceiling:.3f}  "
        f"ceiling {max(step.read, step.compute) / step.total:.1%}  "
        f"{step.nbytes / step.total / 1e9:.2f} GB/s  wasted experts {step.wasted}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, action="append", required=True, help="folder on a drive; once per drive")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rate", nargs="*", default=["none"], help="none, equal, or GB/s of each drive")
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--depth", type=int)
    parser.add_argument("--threads", type=int, nargs="*", help="compute threads; fewer leave processors to the reads")
    a = parser.parse_args()
    with slice_install(a.dir, layers=a.layers, experts=a.experts) as home:
        print(f"{slice_bytes(a.layers, a.experts) / 1e9:.1f} GB, {a.layers} layers, {a.experts} experts a layer")
        for threads in a.threads or [None]:
            measure(home, a, threads)


def measure(home: Path, a: argparse.Namespace, threads: int | None) -> None:
    """All arms with one number of compute threads."""
    drives = len(a.dir)
    fixed = {"context": 16384, "depth": a.depth, "threads": threads}
    with open_slice(home, **fixed) as engine:
        decoded = measure_decode(engine, max(4, a.tokens // 3))
        base, whole = (medians([getattr(d, part) for d in decoded]) for part in ("settled", "token"))
    print(f"{drives} drive(s), {threads or 'default'} compute threads")
    arms = []
    for rate in a.rate:
        if rate == "none":
            rates = None
        else:
            total = base.nbytes / base.compute if rate == "equal" else float(rate) * 1e9 * drives
            rates = [total / drives] * drives
        arms += [(rate, rates, ahead) for ahead in ("off", "on", "perfect")]
    random.shuffle(arms)
    for rate, rates, ahead in arms:
        with open_slice(home, rates=rates, prefetch=ahead != "off", **fixed) as engine:
            decoded = measure_decode(engine, a.tokens, rates=rates, foretold=ahead == "perfect")
            show(f"rate {rate}, read ahead {ahead}", medians([d.token for d in decoded]))
            show("  its layers from 2", medians([d.settled for d in decoded]))
            if ahead == "on":
                report = engine.experts.prefetch_policy.report()
                recalls = [f"{name} {s.recall:.2f}" for layer in report for name, s in layer.items()]
                stats = engine.experts.stats
                print(f"{'':34} read ahead {stats.ahead_used} of {stats.reads}; recall by layer: {', '.join(recalls)}")
        if ahead == "on" and a.prefill:
            with open_slice(home, rates=rates, tier=PREFILL_TIER, **fixed) as engine:
                for rows in a.prefill:
                    show(f"  prefill of {rows}", measure_prefill(engine, rows, rates=rates))
    with open_slice(home, depth=a.depth, threads=threads, **streaming_options(home)) as engine:
        steps = measure_streamed(engine, max(4, a.tokens // 3), whole.compute)
        show("spine streamed too", medians(steps))


if __name__ == "__main__":
    main()
