"""PyTorch and our own kernels as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import xxhash

import deltafin
from deltafin import kernels
from deltafin.checkpoint.config import K3Config
from deltafin.contract import BackendName
from deltafin.kernels import selftest
from deltafin.model.state import SequenceState
from deltafin.model.target import Target
from deltafin.model.weights import head_weights
from deltafin.residency.machine import default_threads
from deltafin.store.buffers import aligned_memory
from deltafin.store.store import Store
from deltafin.streaming.arena import Arena
from deltafin.streaming.experts import ExpertStream
from deltafin.streaming.spine import Spine
from deltafin.streaming.stop import StopFlag

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class TorchSpineMemory:
    """Spine bytes in anonymous pages, as views."""

    def allocate(self, nbytes: int) -> memoryview:
        """See ``SpineMemory``."""
        return aligned_memory(nbytes)

    def view(self, memory: memoryview) -> memoryview:
        """See ``SpineMemory``."""
        return memory

    def array(self, memory: memoryview, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """See ``SpineMemory``."""
        count = 1
        for n in shape:
            count *= n
        return torch.frombuffer(memory, dtype=_DTYPES[dtype], count=count, offset=offset).view(shape)

    def take(self, table: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """Rows widened to fp32, which is exact."""
        return table[torch.tensor(ids, dtype=torch.int64)].float()

    def stack(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows widened to fp32, which is exact."""
        return torch.stack([row.float() for row in rows])


class TorchBackend:
    """K3 on CPUs: fp32 activations, weights as stored."""

    name: BackendName = "torch"

    def prepare(self, threads: int | None) -> None:
        """Sets threads and compares every kernel with its reference."""
        kernels.set_threads(threads or default_threads())
        # Our kernels do the heavy work on their own threads; PyTorch's would only compete with them and the readers.
        torch.set_num_threads(1)
        selftest.check()

    def describe(self) -> str:
        """PyTorch's version and the instruction set of our kernels."""
        return f"PyTorch {torch.__version__}, kernels {kernels.isa()}"

    def numerics(self) -> str:
        """The code that computes, and PyTorch's version.

        Our kernels give the same bits on every instruction set, so the machine is not part of it.
        """
        return _numerics()

    def bound_memory(self, budget: int) -> None:
        """Nothing is held beyond the plan."""

    def spine_memory(self) -> TorchSpineMemory:
        """See ``Backend``."""
        return TorchSpineMemory()

    def frames(self, count: int, frame_bytes: int) -> Arena:
        """See ``Backend``."""
        return Arena(count, frame_bytes)

    def state(self, config: K3Config, context: int) -> SequenceState:
        """See ``Backend``."""
        return SequenceState.empty(config, context)

    def target(
        self,
        store: Store,
        spine: Spine[torch.Tensor],
        experts: ExpertStream,
        *,
        file_order: Callable[[int], Sequence[int]],
        block_rows: int,
        stop: StopFlag,
    ) -> Target:
        """See ``Backend``."""
        return Target(
            store.config,
            store.expert_layout,
            spine,
            experts,
            file_order=file_order,
            block_rows=block_rows,
            stop=stop,
        )

    def lm_head(self, spine: Spine[torch.Tensor]) -> torch.Tensor:
        """See ``Backend``."""
        with spine.unit("head") as unit:
            return head_weights(unit).lm_head


@cache
def _numerics() -> str:
    room = Path(deltafin.__file__).parent
    digest = xxhash.xxh3_128(f"torch {torch.__version__}".encode())
    for folder in ("kernels", "model"):
        for path in sorted((room / folder).iterdir()):
            if path.suffix in (".py", ".so", ".pyd"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
