"""What drafts gain and what they cost, by class of prompt: off, auto (the economics), always, and a perfect draft.

The arms run every prompt in random order in one process, and every arm must decide the same tokens. Times are sums over
a class of each prompt's best round, decoding only. The ceiling is the perfect arm, measured in the same run: a draft
that knows K3's answer and costs nothing.

    python benchmarks/drafts.py --scenario resident
    python benchmarks/drafts.py --scenario reads --rate 60      # experts from two drives of 60 MB/s, spine resident
    python benchmarks/drafts.py --scenario streamed --rate 60   # the spine streamed as well
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deltafin import installs, kernels
from deltafin.contract import Host, Native
from deltafin.drafting.controller import DraftController
from deltafin.drafting.economics import Economics, Experience
from deltafin.drafting.proposal import Proposal
from deltafin.errors import MemoryBudgetError
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import Finished, TokenDecided
from deltafin.generation.session import Session
from deltafin.model.state import SequenceState
from deltafin.store.create import create_store
from deltafin.store.types import DriveSpec

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "tests/data/oracle/prompts.json"
MINI = installs.embedded_checkpoint().parent
CONTEXT = 2048
ARMS = ("off", "auto", "always", "perfect")


class Perfect:
    """Proposes what K3 is known to say."""

    name = "perfect"

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """The next ``count`` tokens."""
        known = tuple(self._tokens[len(tokens) : len(tokens) + count])
        return Proposal(known, (1.0,) * len(known))

    def commit(self, tokens: Sequence[int], taps: Sequence[Native]) -> None:
        """Nothing to learn."""

    def reset(self, position: int) -> None:
        """Nothing to forget."""

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """Nothing to save."""
        return []

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """Nothing to take back."""


def options_for(scenario: str, rate: float, threads: int | None) -> dict[str, Any]:
    """Engine options of a scenario but for the draft."""
    common: dict[str, Any] = {"context": CONTEXT, "draft_folders": (MINI,), "threads": threads, "prefill_rows": 512}
    if scenario == "resident":
        return common
    common["max_bytes_per_s"] = {0: rate * 1e6, 1: rate * 1e6}
    if scenario == "reads":
        return common | {"tier": 256}
    return common | {"tier": 256, "streamed": True}


def open_engine(home: Path, options: dict[str, Any], **draft: Any) -> Engine:
    """An engine of the scenario. For a streamed spine each arm gets the smallest budget that admits what it needs.

    A miniature draft is a third of its model's spine, the released one a twenty-fifth. So the arms do not share a
    budget; each streams all it can, and what it streams is printed.
    """
    chosen = dict(options)
    if not chosen.pop("streamed", False):
        return Engine.open(home, EngineOptions(**chosen, **draft))
    gc.collect()
    ram = psutil.Process().memory_info().rss - (32 << 20)
    while True:
        ram += 1 << 20
        try:
            engine = Engine.open(home, EngineOptions(ram=ram, **chosen, **draft))
        except MemoryBudgetError:
            continue
        if draft["draft"] == "off" or engine.drafts is not None:
            return engine
        engine.close()


def positions(engine: Engine, tokens: Sequence[int], rounds: int) -> None:
    """Verifying eight positions against one, experts resident."""
    state = SequenceState.empty(engine.config, CONTEXT)
    engine.target.forward(tokens[:32], state)
    state.commit(32)
    times: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(rounds):
        for rows in random.sample(sorted(times), 2):
            started = time.perf_counter()
            engine.target.forward(tokens[32 : 32 + rows], state, partial=rows > 1)
            times[rows].append(time.perf_counter() - started)
    one, eight = min(times[1]), min(times[8])
    print(f"eight positions {1e3 * eight:.2f} ms, one {1e3 * one:.2f} ms: ratio {eight / one:.2f} (best of {rounds})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=["resident", "reads", "streamed"], default="resident")
    parser.add_argument("--rate", type=float, default=60.0, help="MB/s of each of the two throttled drives")
    parser.add_argument("--each", type=int, default=6, help="prompts of each class")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-new", type=int, help="ignore stop tokens and decide so many")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="count processor time, in the policy too: for a busy machine; resident only, implies one thread",
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    if args.cpu:
        if args.scenario != "resident":
            parser.error("--cpu does not see waiting, so it only serves --scenario resident")
        args.threads = 1
        time.perf_counter = time.process_time

    classes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for prompt in json.loads(PROMPTS.read_text())["prompts"]:
        # The smallest budgets process prompts in very short chunks.
        short = args.scenario != "streamed" or len(prompt["ids"]) <= 100
        if short and len(classes[prompt["kind"]]) < args.each:
            classes[prompt["kind"]].append(prompt)
    with tempfile.TemporaryDirectory() as base:
        drives = [DriveSpec(Path(base) / f"drive-{i}", 1.0) for i in range(2)]
        for drive in drives:
            drive.path.mkdir()
        home = create_store(installs.embedded_checkpoint(), drives, layout="striped")
        options = options_for(args.scenario, args.rate, args.threads)
        engines = {
            "off": open_engine(home, options, draft="off"),
            "auto": open_engine(home, options, draft="dspark"),
            "always": open_engine(home, options, draft="dspark", draft_always=True),
        }
        engines["perfect"] = engines["off"]
        print(f"{platform.machine()}, {kernels.isa()}, {kernels.threads()} threads; {' '.join(sys.argv[1:])}")
        for name, engine in engines.items():
            plan = engine.plan
            print(f"  {name}: {plan.streamed_bytes / 1e6:.1f} MB of the spine streamed; {engine.draft_status}")
        best: dict[tuple[int, str], float] = {}
        passes: dict[tuple[int, str], int] = {}
        decided: dict[int, list[int]] = {}
        perfect = Experience(7)
        for _ in range(args.rounds):
            for prompts in classes.values():
                for prompt in prompts:
                    order = random.sample(ARMS, len(ARMS))
                    if prompt["id"] not in decided:
                        order.sort(key="perfect".__eq__)
                    for arm in order:
                        session = engines[arm].session()
                        if arm == "perfect":
                            source = Perfect([*prompt["ids"], *decided[prompt["id"]]])
                            economics = Economics(7, always=True, experience=perfect)
                            session = Session(engines[arm], DraftController(source, economics, vocab_size=10**6))
                        new, stop = (args.max_new, []) if args.max_new else (prompt["max_new"], prompt["stop"])
                        events = list(session.generate(prompt["ids"], max_new=new, stop=stop))
                        tokens = [e.token for e in events if isinstance(e, TokenDecided)]
                        assert tokens == decided.setdefault(prompt["id"], tokens), (
                            f"{arm} changed prompt {prompt['id']}"
                        )
                        finished = events[-1]
                        assert isinstance(finished, Finished)
                        key = prompt["id"], arm
                        best[key] = min(best.get(key, 1e9), finished.stats.decode.seconds)
                        passes[key] = finished.stats.decode.passes
        print(f"{'class':14} {'off ms/tok':>10}   gain over off (tokens per pass)")
        for kind, prompts in classes.items():
            if not prompts:
                continue
            keys = [p["id"] for p in prompts]
            tokens_total = sum(len(decided[k]) - 1 for k in keys)
            seconds = {arm: sum(best[k, arm] for k in keys) for arm in ARMS}
            rates = {arm: tokens_total / sum(passes[k, arm] for k in keys) for arm in ARMS}
            line = f"{kind:14} {1e3 * seconds['off'] / tokens_total:10.2f}  "
            for arm in ARMS[1:]:
                line += f"  {arm} {seconds['off'] / seconds[arm]:.2f} ({rates[arm]:.2f})"
            share = (seconds["off"] / seconds["auto"]) / (seconds["off"] / seconds["perfect"])
            print(f"{line}  auto/ceiling {share:.2f}")
        drafts = engines["auto"].drafts
        assert drafts is not None
        e = drafts.experience
        costs = ", ".join(f"{e.pass_seconds(n) / e.pass_seconds(1):.2f}" for n in range(1, 9))
        print(f"pass of 1 … 8 positions relative to one: {costs}; a draft {e.draft.value / e.pass_seconds(1):.2f}")
        if args.scenario == "resident":
            positions(engines["off"], [*classes["chat-long"][0]["ids"]], 60)
        for name in ("off", "auto", "always"):
            engines[name].close()


if __name__ == "__main__":
    main()
