"""Tokens per second on the built-in miniature, everything resident, against mlx-lm with the same files and prompts.

    python -m benchmarks.mini_decode [--prompts 0 30 43 68 99] [--rounds 3]

Three arms in this process, in alternating rounds: mlx-lm in fp32, Deltafin without a draft, and Deltafin as it comes
(with its DSpark draft). The ratio is that of the medians; outputs must be equal. The ceiling is the weight bytes of one
token over the memory read rate measured here. Needs the ``test`` extra.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import mlx_baseline
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import Finished, TokenDecided
from deltafin.store.create import create_store
from deltafin.store.types import DriveSpec


def decode(engine: Engine, requests: list[mlx_baseline.Request]) -> tuple[float, float, list[list[int]]]:
    """(decode tokens per second, overall tokens per second, new tokens of each prompt)."""
    seconds = new = 0.0
    started, written = time.perf_counter(), []
    for ids, most, stop in requests:
        events = list(engine.session().generate(ids, max_new=most, stop=stop))
        last = events[-1]
        assert isinstance(last, Finished)
        seconds += last.stats.decode.seconds
        new += last.new_tokens - 1
        written.append([e.token for e in events if isinstance(e, TokenDecided)])
    return new / seconds, sum(map(len, written)) / (time.perf_counter() - started), written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=int, default=[0, 30, 43, 68, 99], help="numbers in prompts.json")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    chosen = [mlx_baseline.recorded.prompts()[n] for n in a.prompts]
    requests: list[mlx_baseline.Request] = [(p.ids, p.max_new, p.stop) for p in chosen]
    folder = mlx_baseline.recorded.TARGET
    with tempfile.TemporaryDirectory() as base:
        drives = [DriveSpec(Path(base) / name, 1.0) for name in ("a", "b")]
        for drive in drives:
            drive.path.mkdir()
        home = create_store(folder, drives, layout="striped")
        plain = EngineOptions(context=2048, draft="off")
        drafted = EngineOptions(context=2048, draft_folders=(folder.parent,))
        arms: dict[str, list[tuple[float, float]]] = {"mlx-lm fp32": [], "deltafin, no draft": [], "deltafin": []}
        with Engine.open(home, plain) as alone, Engine.open(home, drafted) as usual:
            engines = {"deltafin, no draft": alone, "deltafin": usual}
            assert usual.drafts is not None, usual.draft_status
            for engine in engines.values():
                decode(engine, requests)  # brings every needed expert into the tier
            for _ in range(a.rounds):
                rate = mlx_baseline.tokens_per_second(folder, requests, "float32", repeat=1)
                arms["mlx-lm fp32"].append((rate.decode, rate.overall))
                torch.set_num_threads(1)
                for name, engine in engines.items():
                    fast, overall, written = decode(engine, requests)
                    arms[name].append((fast, overall))
                    assert written == rate.ids, "the engines wrote different tokens"
    memory = mlx_baseline.read_rate()
    ceiling = memory / mlx_baseline.weight_bytes(folder, "stored")
    print(f"memory reads {memory / 1e9:.1f} GB/s; ceiling {ceiling:,.0f} tok/s for the bytes as stored")
    base = [statistics.median(column) for column in zip(*arms["mlx-lm fp32"], strict=True)]
    for name, rows in arms.items():
        fast, overall = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{name:20} decode {fast:6.1f} tok/s ({fast / base[0]:.2f} × mlx-lm), "
            f"with prefill {overall:6.1f} tok/s ({overall / base[1]:.2f} ×)"
        )


if __name__ == "__main__":
    main()
