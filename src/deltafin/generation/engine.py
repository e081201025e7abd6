"""Puts the rooms together for one install: memory plan, spine, expert stream, target."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil

from deltafin.backends import BackendChoice, Precision, open_backend
from deltafin.checkpoint.config import K3Config
from deltafin.contract import Backend, Target
from deltafin.drafting.drafts import CONTEXT_ROWS, MAX_WIDTH, Candidate, DraftChoice, Drafts, find
from deltafin.errors import DeltafinError, MemoryBudgetError
from deltafin.generation.session import Session
from deltafin.history.heat import Heat, load
from deltafin.history.recorder import RouteRecorder
from deltafin.history.trace import TraceShape, TraceWriter
from deltafin.residency.budget import MemoryPlan, plan_memory
from deltafin.residency.machine import MemoryWatch, available_memory, free_memory
from deltafin.residency.usage import UseModel
from deltafin.store.manifest import Manifest
from deltafin.store.recovery import Supplier
from deltafin.store.store import Store
from deltafin.streaming.experts import ExpertStream
from deltafin.streaming.spine import Spine
from deltafin.streaming.stop import StopFlag

DEFAULT_CONTEXT = 16384

# What a draft may take from K3: spine that would have been resident, and experts that would have been kept.
_DRAFT_SPINE_SHARE = 0.2
_DRAFT_TIER_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may choose about an engine; None means decided here.

    Attributes:
        backend: what computes; ``auto`` is MLX on Apple Silicon, PyTorch elsewhere.
        precision: of activations, where the backend has a choice.
        ram: bytes for the whole process; None takes four fifths of what the machine has free.
        threads: compute threads; None takes the physical cores.
        context: positions of prompt and reply together.
        depth: reads in flight per drive.
        prefill_rows: upper bound for the prefill chunk (for experiments and tests).
        tier: upper bound for experts kept in RAM (for experiments and tests).
        max_bytes_per_s: drive index → read rate limit.
        draft: which draft proposes tokens, if any; it never changes a token.
        draft_width: most proposals verified in one pass.
        draft_folders: where drafts are looked for, in subfolders ``dspark`` and ``qwen``; the install's own comes last.
        draft_always: draft at every step instead of when it pays (for experiments and tests).
        raw: sessions are raw completions (only these may use Qwen).
        reserve: bytes of the budget that are promised to others, such as kept state points.
        prefetch: whether experts are read ahead of their router.
        heat: folder of heat histograms; None neither reads nor keeps any.
        trace: new file that receives the routes of every committed token.
        available: what tells the machine's free bytes while running (for tests).
        supplier: makes what brings absent or damaged slices, see ``Store.open``.
    """

    backend: BackendChoice = "auto"
    precision: Precision = "auto"
    ram: int | None = None
    threads: int | None = None
    context: int | None = None
    depth: int | None = None
    prefill_rows: int | None = None
    tier: int | None = None
    max_bytes_per_s: Mapping[int, float] | None = None
    draft: DraftChoice = "auto"
    draft_width: int | None = None
    draft_folders: tuple[Path, ...] = ()
    draft_always: bool = False
    raw: bool = False
    reserve: int = 0
    prefetch: bool = True
    heat: Path | None = None
    trace: Path | None = None
    available: Callable[[], int] = free_memory
    supplier: Callable[[Manifest], Supplier | None] | None = None


class Engine:
    """An install ready to generate; a context manager.

    Use ``Engine.open``; the attributes ``config``, ``plan`` and ``store`` describe what was opened.

    Attributes:
        drafts: the loaded draft, or None.
        draft_status: which draft is used, or why there is none.
    """

    def __init__(self, store: Store, options: EngineOptions, backend: Backend) -> None:
        self.store = store
        self.backend = backend
        self.config: K3Config = store.config
        self.stop = StopFlag()
        self.options = options
        self.plan, self._draft, self.draft_status = plan_with_draft(store, options)
        backend.bound_memory(self.plan.budget)
        self.drafts: Drafts | None = None
        rows = self.plan.prefill_rows
        self.prefill_rows = min(rows, options.prefill_rows) if options.prefill_rows else rows
        tier = self.plan.frames.tier
        self._planned_tier = tier if options.tier is None else min(tier, options.tier)
        self.recorder, model = recorder_for(store, options)
        self._memory = MemoryWatch(options.available)
        self.experts = ExpertStream(
            store,
            in_flight=self.plan.frames.in_flight,
            tier=self._planned_tier,
            stop=self.stop,
            model=model,
            ahead=options.prefetch,
            frames=backend.frames,
        )
        self.spine = Spine(
            store,
            backend.spine_memory(),
            resident=self.plan.resident_units,
            buffers=self.plan.stream_buffers,
            stop=self.stop,
        )
        order = {layer: store.file_order(layer, range(self.config.experts)) for layer in self.config.moe_layers}
        self.target: Target = backend.target(
            store,
            self.spine,
            self.experts,
            file_order=order.__getitem__,
            block_rows=self.plan.block_rows,
            stop=self.stop,
        )

    @classmethod
    def open(
        cls,
        home: Path,
        options: EngineOptions | None = None,
        *,
        on_load: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Opens the install at ``home`` and loads the resident spine.

        Args:
            home: folder of the install's manifest.
            options: user's choices.
            on_load: told (bytes loaded, bytes to load).

        Raises:
            StoreError, CheckpointError: the install cannot be used.
            MemoryBudgetError: the budget cannot hold what K3 needs.
            MachineError: the backend is not installed, or a kernel disagrees with its reference on this machine.
            UsageError: the backend does not compute in the chosen precision.
        """
        options = options or EngineOptions()
        backend = open_backend(options.backend, options.precision)
        backend.prepare(options.threads)
        store = Store.open(
            home, depth=options.depth, max_bytes_per_s=options.max_bytes_per_s, supplier=options.supplier
        )
        try:
            engine = cls(store, options, backend)
            done = 0
            for _, size in engine.spine.load():
                done += size
                if on_load is not None:
                    on_load(done, engine.plan.resident_bytes)
            engine._load_draft()
        except BaseException:
            store.close()
            raise
        return engine

    def session(self) -> Session:
        """A new, empty conversation."""
        return Session(self, None if self.drafts is None else self.drafts.controller())

    def _load_draft(self) -> None:
        """Reads the admitted draft; one that cannot be used is left out, unless the user named it."""
        found, options = self._draft, self.options
        if found is None:
            return
        lm_head = self.backend.lm_head(self.spine) if found.needs_head else None
        try:
            self.drafts = Drafts.load(
                found,
                self.config,
                self.backend.name,
                metadata=self.store.metadata_dir,
                embed=self.spine.embedding,
                lm_head=lm_head,
                context=self.plan.context,
                width=min(options.draft_width or MAX_WIDTH, self.plan.block_rows - 1),
                always=options.draft_always,
            )
        except (DeltafinError, OSError, MemoryError) as e:
            if options.draft != "auto":
                raise
            self.draft_status = f"{found.kind} cannot be used: {e.message if isinstance(e, DeltafinError) else e}"
            return
        self.target.taps, self.target.tap_rows = found.taps, CONTEXT_ROWS

    def observe(self, count: int) -> None:
        """The first ``count`` rows of the last pass were committed: their routes become knowledge.

        Also the moment between two passes at which the tier follows the machine's free memory.
        """
        rows = np.stack(self.target.routes, axis=1)
        routes = rows[:count]
        self.experts.observe(routes, rows[count] if len(rows) > count else None)
        self.recorder.observe(routes)
        now = self.experts.tier_capacity
        frames = self._memory.tier_frames(now, self._planned_tier, self.store.expert_buffer_bytes)
        if frames != now:
            self.experts.resize_tier(frames)

    def close(self) -> None:
        """Keeps the heat of this run, stops reads and closes the install."""
        self.recorder.close()
        self.spine.close()
        self.store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def heat_file(folder: Path, store: Store) -> Path:
    """Where the heat of an install's model is kept."""
    return folder / f"{hashlib.sha256(store.identity.encode()).hexdigest()[:32]}.heat"


def recorder_for(store: Store, options: EngineOptions) -> tuple[RouteRecorder, UseModel]:
    """What keeps this run's routes, and the chances of use as earlier runs leave them.

    Raises:
        UsageError: the trace file exists or cannot be written.
    """
    config = store.config
    layers, experts, model = len(config.moe_layers), config.experts, store.identity
    heat_path = None if options.heat is None else heat_file(options.heat, store)
    known = Heat.empty(model, layers, experts) if heat_path is None else load(heat_path, model, layers, experts)
    trace = None
    if options.trace is not None:
        trace = TraceWriter(options.trace, TraceShape(layers, experts, config.experts_per_token, model))
    recorder = RouteRecorder(Heat.empty(model, layers, experts), heat_path, trace)
    recorder.problem = known.problem
    return recorder, UseModel(layers, experts, heat=known.counts, heat_tokens=known.tokens)


def plan_for(store: Store, options: EngineOptions) -> MemoryPlan:
    """The memory plan of an install under the user's options; see ``plan_with_draft``."""
    return plan_with_draft(store, options)[0]


def plan_with_draft(store: Store, options: EngineOptions) -> tuple[MemoryPlan, Candidate | None, str]:
    """The memory plan of an install under the user's options, measured against this process as it is now.

    A draft is admitted when K3 keeps everything it had without it but spine residency and kept experts. Of these it
    may take a share, since it makes passes rarer, which no larger cache does; one named by the user may take more.

    Returns:
        (plan, admitted draft or None, which draft it is or why there is none).

    Raises:
        MemoryBudgetError: the budget cannot hold what K3 needs.
        DraftError: a draft named by the user is missing or damaged.
    """
    runtime = psutil.Process().memory_info().rss
    budget = options.ram if options.ram is not None else runtime + available_memory() * 4 // 5
    units: dict[str, int] = {key: store.spine_unit(key).plan.buffer_bytes for key in store.spine_keys}

    def plan(draft: Candidate | None) -> MemoryPlan:
        return plan_memory(
            store.config,
            units,
            budget=budget,
            runtime=runtime + options.reserve,
            frame_bytes=store.expert_buffer_bytes,
            context=min(options.context or DEFAULT_CONTEXT, store.config.max_positions),
            # A context that was asked for is kept or refused; the default one may shrink to make room.
            must_hold=options.context or 512,
            drives=len(store.drives),
            draft_bytes=draft.nbytes if draft else 0,
            draft_row_bytes=draft.row_bytes if draft else 0,
            pinned=frozenset({"head"}) if draft and draft.needs_head else frozenset(),
        )

    alone = plan(None)
    found, status = find(
        options.draft,
        (*options.draft_folders, store.metadata_dir),
        store.config,
        raw=options.raw,
        context=alone.context,
        spine_bytes=sum(units.values()),
    )
    if found is None:
        return alone, None, status
    try:
        shared = plan(found)
    except MemoryBudgetError:
        return alone, None, f"{found.kind} needs {found.nbytes >> 20:,} MiB, which K3 leaves no room for"
    streams_more = shared.streamed_bytes - alone.streamed_bytes > _DRAFT_SPINE_SHARE * sum(units.values())
    keeps_fewer = shared.frames.tier < alone.frames.tier * (1 - _DRAFT_TIER_SHARE) and not shared.streamed_bytes
    cramped = shared.context < alone.context or shared.prefill_rows < min(alone.prefill_rows, 64)
    if cramped or (options.draft == "auto" and (streams_more or keeps_fewer)):
        return alone, None, f"{found.kind} would take {found.nbytes >> 20:,} MiB that K3 uses better"
    return shared, found, status
