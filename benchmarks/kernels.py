"""Speed of the native kernels at Kimi K3's true shapes, against what this machine reads and multiplies.

    python -m benchmarks.kernels [--threads 1 2] [--isa avx2 avx512] [--rows 1 8 64] [--repeats 15] [--only expert]

Ceilings, measured in the same run with the same threads and vectors: bytes per second of summing a buffer far larger
than the caches, and fused multiply-adds per second on registers. Arms run in random order, the best of the repeats
counts, and all arms of one operation must give the same bits. "cold" works on weights that cannot be cached (a 176 MB
matrix; experts drawn from 32, 561 MB), "again" on the same expert or a 4.7 MB matrix over and over.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafin import kernels
from deltafin.kernels import ExpertLayout
from deltafin.kernels.machine import _native

LATENT, INTERMEDIATE, HIDDEN, HEADS, HEAD_DIM = 3584, 3072, 7168, 96, 128
EXPERTS = 32
READ_BYTES = 1 << 27  # at a time, from a buffer four times as long


@dataclass(frozen=True)
class Operation:
    """``run(rows)`` does the work and returns what must be equal in all arms; bytes and flops are for one run."""

    name: str
    run: Callable[[int], Tensor]
    nbytes: Callable[[int], int]
    flops: Callable[[int], int]


def experts(cold: bool) -> Operation:
    layout = ExpertLayout.released(LATENT, INTERMEDIATE)
    count = EXPERTS if cold else 1
    pool = torch.randint(0, 256, (count * layout.nbytes,), dtype=torch.uint8)
    for e in range(count):
        for begin in (layout.w1_scale, layout.w2_scale, layout.w3_scale):
            pool[e * layout.nbytes + begin :][: layout.scale_nbytes].random_(119, 125)
    x = torch.randn(512, LATENT)

    def used(rows: int) -> int:
        return 4 if cold and rows < 16 else 1

    def run(rows: int) -> Tensor:
        n = used(rows)
        chosen = [*random.sample(range(1, count), n - 1), 0] if cold else [0]
        out = torch.empty(n * rows, LATENT)
        kernels.expert_forward(
            x[:rows],
            [pool.data_ptr() + e * layout.nbytes for e in chosen],
            layout,
            torch.arange(0, n * rows + 1, rows, dtype=torch.int32),
            torch.arange(rows, dtype=torch.int32).repeat(n),
            torch.arange(n * rows, dtype=torch.int32),
            out,
            beta=4.0,
            linear_beta=25.0,
        )
        return out[-rows:]

    return Operation(
        f"expert, {'cold' if cold else 'again'}",
        run,
        lambda rows: used(rows) * layout.nbytes,
        lambda rows: used(rows) * rows * 6 * LATENT * INTERMEDIATE,
    )


def bf16(n: int, k: int, name: str) -> Operation:
    w, x = torch.randn(n, k).bfloat16(), torch.randn(512, k)
    return Operation(
        name, lambda rows: kernels.linear(x[:rows], w), lambda rows: 2 * n * k, lambda rows: 2 * n * k * rows
    )


def kda() -> Operation:
    width = HEADS * HEAD_DIM
    q, k, v = (torch.randn(512, width) / HEAD_DIM for _ in range(3))
    decay, beta, state = torch.rand(512, width), torch.rand(512, HEADS), torch.randn(HEADS, HEAD_DIM, HEAD_DIM)
    after = torch.empty_like(state)

    def run(rows: int) -> Tensor:
        out = torch.empty(rows, width)
        kernels.kda_recurrence(q[:rows], k[:rows], v[:rows], decay[:rows], beta[:rows], state, after, out)
        return out

    return Operation("KDA recurrence", run, lambda rows: 2 * state.numel() * 4, lambda rows: 8 * state.numel() * rows)


def mla(context: int) -> Operation:
    q, gate = torch.randn(512, HEADS * 192), torch.randn(512, HEADS * 128)
    kv_b, cache = torch.randn(HEADS * 256, 512).bfloat16() / 16, torch.randn(context + 512, 576)

    def run(rows: int) -> Tensor:
        return kernels.mla_attention(
            q[:rows], kv_b, cache, context, gate[:rows],
            heads=HEADS, nope=128, rope=64, v_dim=128, kv_lora=512, scale=192**-0.5,
        )  # fmt: skip

    def flops(rows: int) -> int:
        seen = sum(context + t + 1 for t in range(rows))
        return 2 * HEADS * (seen * (576 + 512) + rows * 2 * 128 * 512)

    return Operation(f"MLA after {context:,}", run, lambda rows: kv_b.numel() * 2 + context * 576 * 4, flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = kernels.threads()
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, most}))
    parser.add_argument("--isa", nargs="+", default=[i for i in kernels.available_isas() if i != "portable"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    a = parser.parse_args()

    makers: dict[str, Callable[[], Operation]] = {
        "expert, cold": lambda: experts(cold=True),
        "expert, again": lambda: experts(cold=False),
        "bf16 12288x7168, cold": lambda: bf16(12288, HIDDEN, "bf16 12288x7168, cold"),
        "bf16 1536x1536, again": lambda: bf16(1536, 1536, "bf16 1536x1536, again"),
        "KDA recurrence": kda,
        "MLA after 8,192": lambda: mla(8192),
    }
    buffer = torch.ones(READ_BYTES)
    ceilings = {(isa, n): [0.0, 0.0] for isa in a.isa for n in a.threads}

    def measure_ceilings(isa: str, n: int) -> None:
        best = ceilings[isa, n]
        begin = random.randrange(4) * READ_BYTES
        best[0] = max(best[0], READ_BYTES / _native.read_seconds(buffer.data_ptr() + begin, READ_BYTES))
        best[1] = max(best[1], 2 * _native.fma_per_second(1_000_000))

    for name, make in makers.items():
        if a.only not in name:
            continue
        operation = make()
        arms = [(isa, n, rows) for isa in a.isa for n in a.threads for rows in a.rows]
        best: dict[tuple[str, int, int], float] = {}
        outputs: dict[int, Tensor] = {}
        for _ in range(a.repeats):
            for isa, n in ceilings:
                kernels.select_isa(isa)
                kernels.set_threads(n)
                measure_ceilings(isa, n)
            random.shuffle(arms)
            for isa, n, rows in arms:
                kernels.select_isa(isa)
                kernels.set_threads(n)
                operation.run(rows)  # threads awake, memory mapped, caches as the operation leaves them
                started = time.perf_counter()
                out = operation.run(rows)
                seconds = time.perf_counter() - started
                best[isa, n, rows] = min(best.get((isa, n, rows), seconds), seconds)
                if not torch.equal(out, outputs.setdefault(rows, out)):
                    raise SystemExit(f"{name}: {isa} with {n} threads gives other bits for {rows} rows")
        for isa in a.isa:
            for n in a.threads:
                read, fma = ceilings[isa, n]
                print(f"\n{name}: {isa}, threads {n} (reads {read / 1e9:.1f} GB/s, multiplies {fma / 1e9:.0f} GFLOP/s)")
                print("   rows       ms     GB/s  of read   GFLOP/s  of peak  x one row")
                for rows in a.rows:
                    t = best[isa, n, rows]
                    gb, gf = operation.nbytes(rows) / t, operation.flops(rows) / t
                    line = f"{rows:>7} {t * 1e3:>8.2f} {gb / 1e9:>8.1f} {gb / read:>8.0%}"
                    line += f" {gf / 1e9:>9.0f} {gf / fma:>8.0%}"
                    if (isa, n, 1) in best:
                        # per byte of weights, as arms may use different numbers of experts
                        ratio = operation.nbytes(1) / best[isa, n, 1] / gb
                        line += f" {ratio:>10.2f}"
                    print(line)


if __name__ == "__main__":
    main()
