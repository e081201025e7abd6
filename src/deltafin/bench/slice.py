"""A slice of the real thing: a few layers of K3's true dimensions on the user's drives, read, computed and overlapped.

For every measured token three times come from the same run, the ceiling first: reading its expert bytes with nothing
but threads and direct reads; computing it with all its experts in memory; and the token as the engine makes it, cold.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import psutil

from deltafin.bench.synthetic import released_config, write_synthetic_checkpoint
from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import spine_inventory
from deltafin.contract import State
from deltafin.errors import DriveFullError, UsageError
from deltafin.expert_layout import ExpertLayout
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.store.buffers import aligned_memory
from deltafin.store.create import create_store
from deltafin.store.direct import DirectFile
from deltafin.store.reader import DEFAULT_DEPTH
from deltafin.store.store import Store
from deltafin.store.types import PAGE, DriveSpec, ReadPlan

FOLDER = "deltafin-bench-slice"
PREFILL_TIER = 256
"""Experts kept where prefills are measured, 4.5 GB: a machine that runs K3 has at least that much for them."""
VOCAB = 4096
_SPARE = 1 << 30
_REQUEST = 4 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One measured token or prompt, seconds.

    Attributes:
        read: its missed expert bytes, read raw.
        compute: the same pass with every expert in memory.
        total: the pass, cold.
        nbytes: expert bytes read and used by it.
        wasted: experts read ahead and not used.
    """

    read: float
    compute: float
    total: float
    nbytes: int
    wasted: int = 0

    @property
    def over_ceiling(self) -> float:
        """Time relative to the larger of the two ceilings."""
        return self.total / max(self.read, self.compute)


class Decoded(NamedTuple):
    """A measured token: all of it, and its layers behind the first with experts.

    In a slice of a few layers the dense layer and the head, during which no reads can be under way because nobody knows
    which, weigh as they do not in 93 layers. ``settled`` leaves them out: each of its layers follows one with experts.
    """

    token: Step
    settled: Step


def slice_bytes(layers: int, experts: int) -> int:
    """Bytes of a slice's checkpoint; an install over several drives needs as much again while it is made."""
    config = K3Config.parse(released_config(layers=layers, experts=experts, vocab_size=VOCAB))
    spine = sum(t.nbytes for unit in spine_inventory(config).values() for t in unit.values())
    blob = ExpertLayout.released(config.latent, config.expert_intermediate).nbytes
    return spine + blob * experts * len(config.moe_layers)


@contextlib.contextmanager
def slice_install(
    folders: Sequence[Path],
    *,
    layers: int,
    experts: int,
    progress: Callable[[str, float], None] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Iterator[Path]:
    """Writes a slice and removes it again, whatever happens.

    Args:
        folders: one per drive; the first also holds the checkpoint while an install over several is made.
        layers: decoder layers, the first of them dense.
        experts: per layer, up to 896.
        progress: told what is being done and the finished share.
        overrides: of the configuration, for tests.

    Yields:
        The install's home.

    Raises:
        UsageError: sizes that make no slice, or a folder left by another run.
        DriveFullError: not enough space; nothing was written.
    """
    if not 2 <= layers <= 93 or not 16 <= experts <= 896:
        raise UsageError("a slice has 2 to 93 layers and 16 to 896 experts a layer")
    need = slice_bytes(layers, experts) if overrides is None else 64 << 20
    striped = len(folders) > 1
    for i, folder in enumerate(folders):
        wanted = (need // len(folders) if striped else 0) + (need if i == 0 else 0) + _SPARE
        try:
            free = shutil.disk_usage(folder).free
        except OSError as e:
            raise UsageError(f"{folder} cannot be used: {e.strerror}", remedy="name an existing folder") from None
        if free < wanted:
            raise DriveFullError(
                f"{folder} has {free / 1e9:.1f} GB free and this slice needs {wanted / 1e9:.1f} GB there",
                remedy="give fewer --experts or --layers, or another folder; nothing was written",
            )
    places = [folder / FOLDER for folder in folders]
    for place in places:
        if place.exists():
            raise UsageError(f"{place} is in the way", remedy="it may be left from a killed run: delete it")
    try:
        for place in places:
            place.mkdir()
        checkpoint = places[0] / "checkpoint"

        def written(done: int, total: int) -> None:
            if progress:
                progress("writing", done / total)

        write_synthetic_checkpoint(
            checkpoint, layers=layers, experts=experts, vocab_size=VOCAB, text_overrides=overrides, progress=written
        )
        if striped:
            drives = [DriveSpec(place / "drive", 1.0) for place in places]
            for drive in drives:
                drive.path.mkdir()
            home = create_store(checkpoint, drives, layout="striped")
            shutil.rmtree(checkpoint)
        else:
            home = create_store(checkpoint, [], layout="in-place", home=places[0] / "home")
        yield home
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def raw_read_seconds(store: Store, plans: Sequence[ReadPlan], depth: int | None = None) -> float:
    """The plans' byte ranges with nothing but threads and direct reads: what the drives can do.

    A checksum is not computed, nothing is ordered, memory is touched beforehand.
    """
    ranges: dict[int, SimpleQueue[tuple[int, int, int] | None]] = {d.index: SimpleQueue() for d in store.drives}
    files: dict[int, DirectFile] = {}
    for plan in plans:
        for e in plan.extents:
            if e.file not in files:
                files[e.file] = DirectFile(store.reader.path(e.file))
            for begin in range(e.offset // PAGE * PAGE, e.offset + e.length, _REQUEST):
                ranges[e.drive].put((e.file, begin, min(_REQUEST, e.offset + e.length - begin)))
    threads = depth or DEFAULT_DEPTH

    def work(todo: SimpleQueue[tuple[int, int, int] | None], memory: memoryview) -> None:
        while (item := todo.get()) is not None:
            file, offset, wanted = item
            files[file].read(memory[: -(-wanted // PAGE) * PAGE], offset, wanted)

    workers = []
    for todo in ranges.values():
        for _ in range(threads):
            todo.put(None)
            memory = aligned_memory(_REQUEST)
            memory[:] = bytes(len(memory))
            workers.append(threading.Thread(target=work, args=(todo, memory)))
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    for file in files.values():
        file.close()
    return seconds


def measure_decode(
    engine: Engine,
    tokens: int,
    *,
    seed: int = 0,
    warmup: int = 3,
    rates: Sequence[float] | None = None,
    foretold: bool = False,
) -> list[Decoded]:
    """Decodes random tokens cold, each measured three ways. The engine's tier is emptied before each cold pass.

    Args:
        engine: with a tier of at least one token's experts.
        warmup: tokens before the measured ones, in which windows and read times are learned.
        rates: bytes per second of each drive where they are throttled: the ceiling is then bytes over their sum.
        foretold: tell the stream the routes beforehand, as a perfect predictor would.
    """
    rng = random.Random(seed)
    state = engine.backend.state(engine.config, engine.plan.context)
    engine.target.forward([1, 2, 3, 4], state)
    state.commit(4)
    steps = []
    first = engine.config.dense_layers
    for i in range(warmup + tokens):
        token = [rng.randrange(VOCAB)]
        if foretold:
            engine.target.forward(token, state)
        engine.experts.clear_tier()
        before = engine.experts.stats.copy()
        with _foretold(engine, first) if foretold else contextlib.nullcontext():
            total, settled = _timed_pass(engine, token, state, first)
        now = engine.experts.stats
        nbytes, wasted = now.read_bytes - before.read_bytes, now.ahead_wasted - before.ahead_wasted
        # The same pass again: every expert is in the tier now.
        compute, settled_compute = _timed_pass(engine, token, state, first)
        plans = _plans(engine)
        later = plans[engine.config.experts_per_token :]
        share = sum(plan.nbytes for plan in later) / sum(plan.nbytes for plan in plans)
        read = nbytes / sum(rates) if rates else raw_read_seconds(engine.store, plans)
        state.commit(1)
        if i >= warmup:
            whole = Step(read, compute, total, nbytes, wasted)
            steps.append(Decoded(whole, Step(read * share, settled_compute, settled, int(nbytes * share), wasted)))
    return steps


@contextlib.contextmanager
def _foretold(engine: Engine, first: int) -> Iterator[None]:
    """Until the end of the context, what is looked ahead for is what the last pass used."""
    routes = [ids[0].tolist() for ids in engine.target.routes]
    stream = engine.experts
    look = stream.look_ahead
    stream.look_ahead = lambda layer, predict, **how: look(layer, lambda at: routes[at - first], **how)  # type: ignore[method-assign]
    stream.look_again = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del stream.look_ahead, stream.look_again


def _timed_pass(engine: Engine, token: list[int], state: State, first: int) -> tuple[float, float]:
    """Seconds of one pass, and of its layers behind ``first``."""
    started = mark = end = time.perf_counter()
    for done in engine.target.run(token, state):
        end = time.perf_counter()
        if done == first + 1:
            mark = end
    return time.perf_counter() - started, end - mark


def measure_streamed(engine: Engine, tokens: int, compute: float, *, seed: int = 0) -> list[Step]:
    """Decodes random tokens with nothing but two spine buffers in memory: each token reads its experts and its spine.

    Args:
        engine: opened with ``streaming_options``.
        compute: seconds of a pass with everything in memory, measured elsewhere in the same run.
    """
    rng = random.Random(seed)
    state = engine.backend.state(engine.config, engine.plan.context)
    engine.target.forward([1, 2, 3, 4], state)
    state.commit(4)
    units = [u for u in engine.store.spine_keys if u not in engine.plan.resident_units and u != "embed"]
    steps = []
    for i in range(1 + tokens):
        engine.experts.clear_tier()
        before = engine.experts.stats.copy()
        started = time.perf_counter()
        engine.target.forward([rng.randrange(VOCAB)], state)
        total = time.perf_counter() - started
        now = engine.experts.stats
        state.commit(1)
        # The engine has begun to read for the token after this one; it must not disturb the ceiling.
        engine.spine.close()
        plans = [engine.store.spine_unit(unit).plan for unit in units] + _plans(engine)
        read = raw_read_seconds(engine.store, plans)
        if i:
            nbytes = sum(plan.nbytes for plan in plans)
            steps.append(Step(read, compute, total, nbytes, now.ahead_wasted - before.ahead_wasted))
    return steps


def streaming_options(home: Path) -> dict[str, int]:
    """A memory budget that leaves room for two spine buffers and little else."""
    with Store.open(home) as store:
        largest = max(store.spine_unit(unit).plan.buffer_bytes for unit in store.spine_keys)
        frames = 6 * store.expert_buffer_bytes
        return {"ram": psutil.Process().memory_info().rss + 2 * largest + frames + (100 << 20), "context": 64}


def measure_prefill(engine: Engine, rows: int, *, seed: int = 0, rates: Sequence[float] | None = None) -> Step:
    """A prompt of random tokens in one chunk, cold; computing is what the engine did not wait for."""
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(rows)]
    # Buffers in which nothing has ever lain cost page faults: an engine meets that once, in its first minute.
    engine.target.forward(prompt[:64], engine.backend.state(engine.config, engine.plan.context), logits="last")
    engine.experts.clear_tier()
    state = engine.backend.state(engine.config, engine.plan.context)
    before = engine.experts.stats.copy()
    started = time.perf_counter()
    engine.target.forward(prompt, state, logits="last")
    total = time.perf_counter() - started
    now = engine.experts.stats
    wait = now.wait_seconds - before.wait_seconds
    plans = _plans(engine)
    nbytes = now.read_bytes - before.read_bytes
    read = nbytes / sum(rates) if rates else raw_read_seconds(engine.store, plans)
    union = sum(plan.nbytes for plan in plans)
    assert nbytes == union, "an expert was read twice in one sweep"
    return Step(read, total - wait, total, nbytes, now.ahead_wasted - before.ahead_wasted)


def open_slice(home: Path, *, rates: Sequence[float] | None = None, tier: int | None = None, **options: Any) -> Engine:
    """The engine over a slice: spine in memory, a tier of one token's experts unless told otherwise."""
    config = K3Config.load(home)
    limits = None if rates is None else dict(enumerate(rates))
    kept = config.experts_per_token * len(config.moe_layers) if tier is None else tier
    return Engine.open(home, EngineOptions(tier=kept, draft="off", max_bytes_per_s=limits, **options))


def _plans(engine: Engine) -> list[ReadPlan]:
    plans = []
    for layer, ids in zip(engine.config.moe_layers, engine.target.routes, strict=True):
        plans += [engine.store.expert_plan(layer, expert) for expert in sorted(set(ids.reshape(-1).tolist()))]
    return plans


def medians(steps: Sequence[Step]) -> Step:
    """The step whose every figure is the median."""
    return Step(
        statistics.median(s.read for s in steps),
        statistics.median(s.compute for s in steps),
        statistics.median(s.total for s in steps),
        int(statistics.median(s.nbytes for s in steps)),
        sum(s.wasted for s in steps),
    )
