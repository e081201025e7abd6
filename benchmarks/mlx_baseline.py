"""Tokens per second of mlx-lm's Kimi K3 on CPU: the speed to beat, on any released-format folder.

    python benchmarks/mlx_baseline.py [folder] [--prompts 0 30 43 68 99] [--dtype float32 stored] [--repeat 3]

Greedy decoding of recorded prompts with a warm model and a cache; prefill and decode are timed apart. The ceiling is
the weight bytes of one decoded token over the memory read rate measured in the same run. Needs the ``test`` extra.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

# What is measured is the oracle that the test-suite has compared with two others.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from oracles import recorded
from oracles.mlx_k3 import Dtype, MlxK3

Request = tuple[Sequence[int], int, Collection[int]]


@dataclass(frozen=True)
class Rate:
    """Tokens per second, medians over repeats.

    Attributes:
        prefill: prompt tokens until the first new token is known.
        decode: new tokens after the first of each prompt.
        overall: all new tokens over all time, prefill included.
        ids: the new tokens of each prompt.
    """

    prefill: float
    decode: float
    overall: float
    ids: list[list[int]]


def tokens_per_second(
    folder: Path | str, prompts: Sequence[Request], dtype: Dtype = "float32", *, repeat: int = 3
) -> Rate:
    """Decodes every prompt greedily with mlx-lm on CPU.

    Args:
        folder: released-format target.
        prompts: (prompt ids, most new tokens, stop ids) of each.
        dtype: ``float32`` widens the weights; ``stored`` computes in the checkpoint's bf16.
        repeat: timed passes over all prompts, after an untimed one over the first.
    """
    model = MlxK3(folder, dtype=dtype)
    model.generate_greedy(*prompts[0])
    rates: list[tuple[float, float, float]] = []
    for _ in range(repeat):
        before = after = 0.0
        written: list[list[int]] = []
        for ids, most, stop in prompts:
            start, out = time.perf_counter(), []
            for token, _ in model.steps(ids):
                out.append(token)
                if len(out) == 1:
                    first = time.perf_counter()
                if token in stop or len(out) == most:
                    break
            before += first - start
            after += time.perf_counter() - first
            written.append(out)
        new = sum(len(out) for out in written)
        read = sum(len(ids) for ids, _, _ in prompts)
        rates.append((read / before, (new - len(prompts)) / after, new / (before + after)))
    prefill, decode, overall = (float(m) for m in np.median(rates, axis=0))
    return Rate(prefill, decode, overall, written)


def weight_bytes(folder: Path, dtype: Dtype) -> int:
    """Bytes of weights one decoded token reads: all but the embedding, and the chosen share of the experts."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    share = config["num_experts_per_token"] / config["num_experts"]
    total = 0.0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                size = int(np.prod(part.get_shape()))
                if part.get_dtype() == "U8":
                    total += size * share
                elif not name.endswith("embed_tokens.weight"):
                    total += size * (4 if dtype == "float32" or part.get_dtype() == "F32" else 2)
    return int(total)


def read_rate() -> float:
    """Bytes per second of summing 1 GiB on all of torch's threads, best of five."""
    data = torch.ones(1 << 28)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=recorded.TARGET)
    parser.add_argument("--prompts", nargs="+", type=int, default=[0, 30, 43, 68, 99], help="numbers in prompts.json")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "stored"], default=["float32", "stored"])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    chosen = [recorded.prompts()[n] for n in args.prompts]
    memory = read_rate()
    print(f"memory reads {memory / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    for dtype in args.dtype:
        rate = tokens_per_second(args.folder, [(p.ids, p.max_new, p.stop) for p in chosen], dtype, repeat=args.repeat)
        ceiling = memory / weight_bytes(args.folder, dtype)
        same = sum(got == p.expected for got, p in zip(rate.ids, chosen, strict=True))
        print(
            f"mlx-lm {dtype:8} prefill {rate.prefill:6.1f}, decode {rate.decode:6.1f}, "
            f"overall {rate.overall:6.1f} tok/s; "
            f"decode ceiling {ceiling:.0f} tok/s, {rate.decode / ceiling:.1%} of it; "
            f"{same} of {len(chosen)} continuations as recorded"
        )


if __name__ == "__main__":
    main()
