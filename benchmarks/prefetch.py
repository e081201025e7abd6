"""What reading ahead gains on the built-in miniature's real routes, against a predictor that knows the future.

    python -m benchmarks.prefetch [--mb-per-s 40] [--tokens 50] [--rounds 3]

No expert is kept, so every token reads all of its own. One virtual drive is throttled; by default its rate is chosen
so that reading takes as long as computing, where overlap matters most. Arms (off, on, perfect) run in random order and
must give equal logits. The gain is compared with the perfect predictor's, whose limits are the same windows and policy.
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
    parser.add_argument("--mb-per-s", type=float)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute", type=float, default=25.0, help="milliseconds of imagined computing per layer")
    a = parser.parse_args()
    prompt: list[int] = json.loads(PROMPTS.read_text())["prompts"][43]["ids"]
    with tempfile.TemporaryDirectory() as base:
        drive = DriveSpec(Path(base) / "drive", 1.0)
        drive.path.mkdir()
        home = create_store(embedded_checkpoint(), [drive], layout="striped")

        def opened(prefetch: bool, rate: float | None) -> Engine:
            limits = None if rate is None else {0: rate}
            options = EngineOptions(tier=0, prefetch=prefetch, max_bytes_per_s=limits, context=2048, draft="off")
            engine = Engine.open(home, options)
            slow_attention(engine, a.compute / 1e3)
            return engine

        with opened(False, None) as engine:
            plain, digest, future = decode(engine, prompt, a.tokens, None)
            nbytes = engine.experts.blob_bytes * engine.config.experts_per_token * len(engine.config.moe_layers)
        rate = a.mb_per_s * 1e6 if a.mb_per_s else nbytes / (a.compute / 1e3 * len(engine.config.moe_layers))
        print(
            f"drive {rate / 1e6:.1f} MB/s, reading a token's experts takes {nbytes / rate * 1e3:.1f} ms; "
            f"a token takes {statistics.median(plain) * 1e3:.1f} ms on the unthrottled drive"
        )
        times: dict[str, list[float]] = {"off": [], "on": [], "perfect": []}
        recall: list[Sequence[str]] = []
        for _ in range(a.rounds):
            for arm in random.sample(list(times), len(times)):
                with opened(arm != "off", rate) as engine:
                    seconds, got, _ = decode(engine, prompt, a.tokens, future if arm == "perfect" else None)
                    assert got == digest, "reading ahead changed a logit"
                    times[arm].append(statistics.median(seconds[10:]))
                    if arm == "on":
                        recall = [
                            [f"{name} {s.recall:.2f}" for name, s in layer.items()]
                            for layer in engine.experts.prefetch_policy.report()
                        ]
        best = {arm: statistics.median(t) for arm, t in times.items()}
        for arm, t in best.items():
            print(f"{arm:8} {t * 1e3:8.2f} ms per token")
        possible, gained = best["off"] - best["perfect"], best["off"] - best["on"]
        print(f"gained {gained * 1e3:.2f} of a perfect predictor's {possible * 1e3:.2f} ms: {gained / possible:.2f}")
        for layer, figures in zip(engine.config.moe_layers, recall, strict=True):
            print(f"  layer {layer}: recall {', '.join(figures) or 'not asked'}")


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
