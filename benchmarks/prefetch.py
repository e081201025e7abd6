"""What reading ahead gains on the built-in miniature's real routes, against a predictor that knows the future.

    python -m benchmarks.prefetch [--reads 0.1 1 4] [--tokens 50] [--rounds 3]

No expert is kept, so every token reads all of its own. One virtual drive is throttled so that reading takes --reads
times as long as computing: at 1 overlap matters most, elsewhere reading ahead must at least cost nothing. Arms (off,
on, perfect) run in random order and must give equal logits. The gain is compared with the perfect predictor's, whose
limits are the same windows and policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltafin.generation.engine import Engine, EngineOptions
from deltafin.installs import embedded_checkpoint
from deltafin.model.state import SequenceState
from deltafin.store.create import create_store
from deltafin.store.types import DriveSpec

PROMPTS = Path(__file__).parents[1] / "tests/data/oracle/prompts.json"


def decode(
    engine: Engine, prompt: list[int], tokens: int, future: list[Any] | None
) -> tuple[list[float], str, list[Any]]:
    """(seconds of each token, digest of the logits, routes of each token)."""
    state = SequenceState.empty(engine.config, engine.plan.context)
    logits = engine.target.forward(prompt, state)
    state.commit(len(prompt))
    engine.observe(len(prompt))
    seconds, routes, digest = [], [], hashlib.sha256()
    look, again = engine.experts.look_ahead, engine.experts.look_again
    for i in range(tokens):
        if future is not None:
            known, after = future[i], future[min(i + 1, tokens - 1)]

            def told(layer: int, predict: Any, *, long: bool = False, known: Any = known, after: Any = after) -> None:
                first = engine.config.dense_layers
                at = after if len(engine.target.routes) >= len(known) - 1 and layer == first else known
                look(layer, lambda layer: at[layer - first], long=long)

            engine.experts.look_ahead = told  # type: ignore[method-assign]
            engine.experts.look_again = lambda layer, predict: None  # type: ignore[method-assign]
        token = int(np.argmax(logits[-1]))
        started = time.perf_counter()
        logits = engine.target.forward([token], state)
        state.commit(1)
        engine.observe(1)
        seconds.append(time.perf_counter() - started)
        digest.update(logits.tobytes())
        routes.append([ids[0].tolist() for ids in engine.target.routes])
    engine.experts.look_ahead, engine.experts.look_again = look, again  # type: ignore[method-assign]
    return seconds, digest.hexdigest(), routes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=float, nargs="*", default=[0.1, 1.0, 4.0])
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute", type=float, default=25.0, help="milliseconds of imagined computing per layer")
    a = parser.parse_args()
    prompt: list[int] = json.loads(PROMPTS.read_text())["prompts"][43]["ids"]
    with tempfile.TemporaryDirectory() as base:
        drive = DriveSpec(Path(base) / "drive", 1.0)
        drive.path.mkdir()
        home = create_store(embedded_checkpoint(), [drive], layout="striped")
        with opened(home, a.compute, False, None) as engine:
            plain, digest, future = decode(engine, prompt, a.tokens, None)
            layers = len(engine.config.moe_layers)
            nbytes = engine.experts.blob_bytes * engine.config.experts_per_token * layers
        print(f"a token takes {statistics.median(plain) * 1e3:.1f} ms on the unthrottled drive")
        for reads in a.reads:
            rate = nbytes / (reads * a.compute / 1e3 * layers)
            print(
                f"drive {rate / 1e6:.1f} MB/s: a token's experts take {nbytes / rate * 1e3:.1f} ms, {reads} x computing"
            )
            compare(home, a, rate, prompt, digest, future)


def opened(home: Path, compute: float, prefetch: bool, rate: float | None) -> Engine:
    """An engine that keeps no expert."""
    limits = None if rate is None else {0: rate}
    options = EngineOptions(tier=0, prefetch=prefetch, max_bytes_per_s=limits, context=2048, draft="off")
    engine = Engine.open(home, options)
    slow_attention(engine, compute / 1e3)
    return engine


def compare(home: Path, a: argparse.Namespace, rate: float, prompt: list[int], digest: str, future: list[Any]) -> None:
    """Off, on and perfect at one rate."""
    times: dict[str, list[float]] = {"off": [], "on": [], "perfect": []}
    recall: list[Sequence[str]] = []
    for _ in range(a.rounds):
        for arm in random.sample(list(times), len(times)):
            with opened(home, a.compute, arm != "off", rate) as engine:
                seconds, got, _ = decode(engine, prompt, a.tokens, future if arm == "perfect" else None)
                assert got == digest, "reading ahead changed a logit"
                times[arm].append(statistics.median(seconds[10:]))
                if arm == "on":
                    report = engine.experts.prefetch_policy.report()
                    recall = [[f"{name} {s.recall:.2f}" for name, s in layer.items()] for layer in report]
                    moe_layers = engine.config.moe_layers
    best = {arm: statistics.median(t) for arm, t in times.items()}
    print("  " + ", ".join(f"{arm} {t * 1e3:.2f} ms" for arm, t in best.items()) + " per token")
    possible, gained = best["off"] - best["perfect"], best["off"] - best["on"]
    print(
        f"  gained {gained * 1e3:.2f} of a perfect predictor's {possible * 1e3:.2f} ms: {gained / possible:.2f}; "
        f"on / off {best['on'] / best['off']:.3f}"
    )
    for layer, figures in zip(moe_layers, recall, strict=True):
        print(f"    layer {layer}: recall {', '.join(figures) or 'not asked'}")


def slow_attention(engine: Engine, seconds: float) -> None:
    """Stands for K3's real attention, which takes long; the miniature's would leave no window worth the name."""
    attend = engine.target._attend

    def slow(*args: Any) -> Any:
        until = time.perf_counter() + seconds * (len(args[2]) == 1)
        out = attend(*args)
        time.sleep(max(0.0, until - time.perf_counter()))
        return out

    engine.target._attend = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
