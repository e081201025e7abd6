"""MLX as a backend."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import mlx.core as mx

from deltafin.apple import probe, selftest
from deltafin.apple.frames import MlxFrames
from deltafin.apple.kda import replay
from deltafin.apple.limits import apply_limits, bound_cache
from deltafin.apple.memory import MlxSpineMemory
from deltafin.apple.state import MlxState
from deltafin.apple.target import MlxTarget
from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import spine_inventory
from deltafin.contract import BackendName
from deltafin.errors import UsageError
from deltafin.store.store import Store
from deltafin.streaming.experts import ExpertStream
from deltafin.streaming.spine import Spine
from deltafin.streaming.stop import StopFlag


class MlxBackend:
    """K3 on MLX.

    Args:
        precision: of activations; weights are as stored in both cases.
    """

    name: BackendName = "mlx"

    def __init__(self, precision: Literal["bf16", "fp32"] = "bf16") -> None:
        self._activations = mx.float32 if precision == "fp32" else mx.bfloat16
        self._precision = precision

    def prepare(self, threads: int | None) -> None:
        """Compares the kernels with their reference; see ``Backend``."""
        if threads is not None:
            raise UsageError("--threads has no effect with the mlx backend", remedy="drop it, or use --backend torch")
        apply_limits()
        selftest.check(self._activations)

    def describe(self) -> str:
        """MLX's version, device and the precision of activations."""
        return f"MLX {version('mlx')} on {_device()}, {self._precision} activations"

    def numerics(self) -> str:
        """The code that computes, MLX's version, the device, and the precision."""
        return f"{_numerics()}-{self._precision}"

    def bound_memory(self, budget: int) -> None:
        """Bounds the freed memory that MLX keeps for reuse."""
        bound_cache(budget)

    def spine_memory(self) -> MlxSpineMemory:
        """See ``Backend``."""
        return MlxSpineMemory(self._activations)

    def frames(self, count: int, frame_bytes: int) -> MlxFrames:
        """See ``Backend``."""
        return MlxFrames(count, frame_bytes)

    def state(self, config: K3Config, context: int) -> MlxState:
        """See ``Backend``."""
        return MlxState.empty(config, context, self._activations, replay)

    def target(
        self,
        store: Store,
        spine: Spine[mx.array],
        experts: ExpertStream,
        *,
        file_order: Callable[[int], Sequence[int]],
        block_rows: int,
        stop: StopFlag,
    ) -> MlxTarget:
        """See ``Backend``."""
        frames = experts.frames
        assert isinstance(frames, MlxFrames)
        units = spine_inventory(store.config).values()
        shapes = {(spec.shape[0], spec.shape[1]) for unit in units for spec in unit.values() if len(spec.shape) == 2}
        return MlxTarget(
            store.config,
            store.expert_layout,
            spine,
            experts,
            frames,
            file_order=file_order,
            block_rows=block_rows,
            stop=stop,
            activations=self._activations,
            mode=probe.choose(shapes, self._activations),
        )

    def lm_head(self, spine: Spine[mx.array]) -> mx.array:
        """See ``Backend``."""
        with spine.unit("head") as unit:
            return unit["language_model.lm_head.weight"]


def _device() -> str:
    info = mx.device_info(mx.default_device()) if mx.default_device() == mx.Device(mx.gpu) else {}
    return str(info.get("device_name", "the CPU"))


@cache
def _numerics() -> str:
    digest = hashlib.sha256(f"mlx {version('mlx')} {_device()}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
