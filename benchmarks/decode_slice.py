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
    Step,
    measure_decode,
    measure_prefill,
    measure_streamed,
    medians,
    open_slice,
    slice_install,
    streaming_options,
)


def show(name: str, step: Step) -> None:
    print(
        f"{name:34} read {step.read * 1e3:8.1f} ms  compute {step.compute * 1e3:8.1f} ms  "
        f"total {step.total * 1e3:8.1f} ms  ratio {step.over_ceiling:.3f}  "
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
    parser.add_argument("--threads", type=int, help="compute threads; fewer leave processor time to the reads")
    a = parser.parse_args()
    with slice_install(a.dir, layers=a.layers, experts=a.experts) as home:
        with open_slice(home, context=16384, depth=a.depth, threads=a.threads) as engine:
            base = medians([d.settled for d in measure_decode(engine, max(4, a.tokens // 3))])
            whole = medians([d.token for d in measure_decode(engine, max(4, a.tokens // 3))])
        arms = []
        for rate in a.rate:
            if rate == "none":
                rates = None
            else:
                total = base.nbytes / base.compute if rate == "equal" else float(rate) * 1e9 * len(a.dir)
                rates = [total / len(a.dir)] * len(a.dir)
            arms += [(rate, rates, ahead) for ahead in (False, True)]
        random.shuffle(arms)
        for rate, rates, ahead in arms:
            with open_slice(
                home, rates=rates, prefetch=ahead, context=16384, depth=a.depth, threads=a.threads
            ) as engine:
                name = f"{len(a.dir)} drive(s), rate {rate}, read ahead {'on' if ahead else 'off'}"
                decoded = measure_decode(engine, a.tokens, rates=rates)
                show(name, medians([d.token for d in decoded]))
                show("  its layers from 2", medians([d.settled for d in decoded]))
                if ahead:
                    recalls = [
                        f"{name} {s.recall:.2f}"
                        for layer in engine.experts.prefetch_policy.report()
                        for name, s in layer.items()
                    ]
                    stats = engine.experts.stats
                    print(
                        f"{'':34} read ahead {stats.ahead_used} of {stats.reads} experts; "
                        f"recall by layer and predictor: {' '.join(recalls)}"
                    )
                for rows in a.prefill if ahead else []:
                    show(f"  prefill of {rows}", measure_prefill(engine, rows, rates=rates))
        with open_slice(home, depth=a.depth, threads=a.threads, **streaming_options(home)) as engine:
            steps = measure_streamed(engine, max(4, a.tokens // 3), whole.compute)
            show(f"{len(a.dir)} drive(s), spine streamed too", medians(steps))


if __name__ == "__main__":
    main()
