"""The MLX backend against mlx-lm with the same weights fully in memory, both greedy, in one run.

    python benchmarks/apple.py [folder] [--prompts 0 30 68] [--precision bf16 fp32] [--rounds 3]

Ours starts with an install made for the run, with no expert in memory, and reads each through the store; mlx-lm holds
everything as stored (in fp32 both widen a matrix while it is used). Arms take turns in random order and must write the
same tokens (in bf16 but for near ties). Also printed: the host's own time in each layer, waits for the device in each
pass, bytes of experts copied after their read, and the rate of MLX's product of packed weights as the ceiling of a
token's expert bytes. Needs the ``test`` extra.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from deltafin.apple.frames import MlxFrames
from deltafin.apple.target import MlxTarget
from deltafin.expert_layout import ExpertLayout
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import TokenDecided
from deltafin.store.create import create_store
from deltafin.store.types import DriveSpec
from oracles import recorded
from oracles.mlx_k3 import MlxK3


def ours(engine: Engine, prompts: list[recorded.Prompt], *, cold: bool) -> tuple[list[list[int]], float]:
    """(tokens of each prompt, new tokens after the first of each per second)."""
    if cold:
        engine.experts.clear_tier()
    written, seconds = [], 0.0
    for prompt in prompts:
        out: list[int] = []
        first = 0.0
        for event in engine.session().generate(prompt.ids, max_new=prompt.max_new, stop=prompt.stop):
            if isinstance(event, TokenDecided):
                out.append(event.token)
                first = first or time.perf_counter()
        seconds += time.perf_counter() - first
        written.append(out)
    return written, sum(len(out) - 1 for out in written) / seconds


def theirs(model: MlxK3, prompts: list[recorded.Prompt]) -> tuple[list[list[int]], float]:
    """The same of mlx-lm."""
    written, seconds = [], 0.0
    for prompt in prompts:
        out: list[int] = []
        first = 0.0
        for token, _ in model.steps(prompt.ids):
            out.append(token)
            first = first or time.perf_counter()
            if token in prompt.stop or len(out) == prompt.max_new:
                break
        seconds += time.perf_counter() - first
        written.append(out)
    return written, sum(len(out) - 1 for out in written) / seconds


def host_milliseconds(engine: Engine, passes: int = 40) -> tuple[float, float]:
    """(host time in each layer, waits for the device in each layer) of decoding.

    The host's time is the processor time of the thread that runs the session, without what passes inside MLX's
    submission and waiting. Reads, MLX's threads and other processes have no part in it; building MLX's graph has.
    """
    target, config = engine.target, engine.config
    assert isinstance(target, MlxTarget)
    inside = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal inside
            started = time.thread_time()
            out = function(*args)
            inside += time.thread_time() - started
            return out

        return call

    state = engine.backend.state(config, 512)
    target.forward(list(range(5, 45)), state)
    state.commit(40)
    samples = []
    waits = target.waits
    names = ("eval", "async_eval")
    plain = {name: getattr(mx, name) for name in names}
    try:
        for name in names:
            setattr(mx, name, timed(plain[name]))
        for i in range(passes):
            started, before = time.thread_time(), inside
            target.forward([7 + i], state)
            state.commit(1)
            samples.append(time.thread_time() - started - (inside - before))
    finally:
        for name in names:
            setattr(mx, name, plain[name])
    return 1e3 * statistics.median(samples) / config.layers, (target.waits - waits) / passes / config.layers


def product_rate(layout: ExpertLayout, experts: int = 64) -> float:
    """Bytes of experts per second through MLX's gather product, one row, everything in memory."""
    frames = MlxFrames(experts, -(-layout.nbytes // 4096) * 4096, slab_bytes=1 << 40)
    frames.view(0)
    w = frames.windows(0, 0, layout)
    how = {"transpose": True, "group_size": 32, "bits": 4, "mode": "mxfp4"}
    x = mx.ones((1, 1, layout.latent))
    h = mx.ones((experts, 1, layout.intermediate))
    pairs, ones = mx.arange(2 * experts).reshape(-1, 2), mx.arange(experts)
    best = float("inf")
    for _ in range(9):
        started = time.perf_counter()
        mx.eval(
            mx.gather_qmm(x, w.gate_up, w.gate_up_scales, None, mx.zeros_like(pairs), pairs, **how),
            mx.gather_qmm(h, w.down, w.down_scales, None, None, ones, **how),
        )
        best = min(best, time.perf_counter() - started)
    return experts * layout.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=recorded.TARGET)
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=int,
        default=[0, 10, 20, 30, 43, 50, 60, 68, 90, 99],
        help="numbers in prompts.json",
    )
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    chosen = [recorded.prompts()[n] for n in args.prompts]
    device = mx.device_info().get("device_name", "?") if mx.metal.is_available() else platform.processor()
    print(f"{platform.platform()}, {device or platform.machine()}, MLX {mx.__version__} on {mx.default_device()}")
    for precision in args.precision:
        with tempfile.TemporaryDirectory() as folder:
            drives = [DriveSpec(Path(folder) / f"drive-{i}", 1.0) for i in range(2)]
            for drive in drives:
                drive.path.mkdir()
            home = create_store(args.folder, drives, layout="striped")
            options = EngineOptions(backend="mlx", precision=precision, context=2048, draft="off")
            drafted = replace(options, draft="auto", draft_folders=(args.folder.parent,))
            model = MlxK3(args.folder, dtype="stored" if precision == "bf16" else "float32", lean=True)
            model.generate_greedy(chosen[0].ids, 4)
            with Engine.open(home, options) as engine, Engine.open(home, drafted) as whole:
                ours(engine, chosen[:1], cold=False)
                ours(whole, chosen[:1], cold=False)
                report(engine, whole, model, chosen, precision, args.rounds)


def report(
    engine: Engine, whole: Engine, model: MlxK3, chosen: list[recorded.Prompt], precision: str, rounds: int
) -> None:
    """Measures and prints one precision; ``whole`` is the engine as it comes, with its draft."""
    arms = {
        "ours": lambda: ours(engine, chosen, cold=True),
        "mlx-lm": lambda: theirs(model, chosen),
        "drafted": lambda: ours(whole, chosen, cold=True),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    texts: dict[str, list[list[int]]] = {}
    read = engine.experts.stats.read_bytes
    for _ in range(rounds):
        for name in random.sample(list(arms), len(arms)):
            texts[name], rate = arms[name]()
            rates[name].append(rate)
    read = engine.experts.stats.read_bytes - read
    same = sum(a == b for a, b in zip(texts["ours"], texts["mlx-lm"], strict=True))
    assert texts["ours"] == texts["drafted"], "a draft changed a token"
    mine, other, drafted = (statistics.median(rates[name]) for name in arms)
    ratios = [a / b for a, b in zip(rates["ours"], rates["mlx-lm"], strict=True)]
    host, waits = host_milliseconds(engine)
    frames = engine.experts.frames
    assert isinstance(frames, MlxFrames)
    rate = product_rate(engine.store.expert_layout)
    per_token = engine.config.experts_per_token * len(engine.config.moe_layers) * engine.store.expert_layout.nbytes
    shown = ", ".join(f"{r:.2f}" for r in ratios)
    size = read / rounds / 1e6
    ceiling = rate / per_token
    print(f"{precision}: ours {mine:.1f} tok/s, streaming ({size:.0f} MB read a round); mlx-lm {other:.1f}")
    print(f"  ratio {statistics.median(ratios):.2f} ({shown}); {same}/{len(chosen)} texts equal")
    gains = [a / b for a, b in zip(rates["drafted"], rates["mlx-lm"], strict=True)]
    print(f"  as it comes, with its draft: {drafted:.1f} tok/s, ratio {statistics.median(gains):.2f}, the same tokens")
    print(f"  host {host:.3f} ms a layer (bound 0.5), {waits:.2f} waits a layer")
    print(f"  {frames.copied_bytes} bytes of experts copied after their read; rows kept apart: {engine.target.mode}")
    print(f"  expert products {rate / 1e9:.2f} GB/s: ceiling {ceiling:.0f} tok/s, {mine / ceiling:.0%} of it")


if __name__ == "__main__":
    main()
