"""What a backend owes the rest of the house: a target, a sequence's state, and a name for its arithmetic.

A backend is one way to compute K3 (``torch`` on CPUs, ``mlx`` on Apple Silicon). Everybody else knows only these
protocols, so that no process imports a second framework. What crosses the wall is NumPy or opaque:

* logits are ``Rows``, routes int32 [T, k];
* the tensors of a saved state are NumPy arrays by name; bf16 travels as uint16 of the same bits;
* *native* arrays (taps, ``lm_head``, embedding rows) belong to the backend and are handed only to its own draft.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from deltafin.errors import InputError

if TYPE_CHECKING:
    from deltafin.checkpoint.config import K3Config
    from deltafin.store.store import Store
    from deltafin.streaming.arena import Frames
    from deltafin.streaming.experts import ExpertStream
    from deltafin.streaming.spine import Spine, SpineMemory
    from deltafin.streaming.stop import StopFlag

BackendName = Literal["torch", "mlx"]
Rows = npt.NDArray[np.float32]
"""Logits, fp32 [T, vocab]."""
Routes = npt.NDArray[np.int32]
"""Experts in router order, int32 [T, k]."""
Host = npt.NDArray[Any]
"""A tensor in memory of the host, as it is saved."""
Native = Any
"""An array of the backend's own framework."""


@dataclass(slots=True)
class MoeTimes:
    """Seconds of computing inside the expert loop (waiting for reads is counted by the stream)."""

    experts: float = 0.0


@dataclass(slots=True)
class PassTimes:
    """Seconds of computing since the engine started, by part of the model."""

    attention: float = 0.0
    mlp: float = 0.0
    head: float = 0.0
    moe: MoeTimes = field(default_factory=MoeTimes)


class State(Protocol):
    """Everything K3 carries from token to token.

    Attributes:
        position: committed tokens.
        context: most positions.
        taps: native bf16 accumulators [n, hidden], one for each tapped layer, of the last n rows of the last pass;
            after ``commit`` of the last n committed rows.
    """

    position: int
    context: int
    taps: list[Native]

    def commit(self, count: int) -> None:
        """Keeps the first ``count`` provisional positions and forgets the rest.

        Raises:
            ValueError: more than the pass computed, or fewer although the pass was not run for that.
        """

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """The committed state by name, views where possible; names that end in ``.rows`` hold one row a position."""

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """Replaces the committed state.

        Raises:
            KeyError, ValueError: a tensor is missing or of another shape or dtype; the state is unchanged then.
        """


def check_room(position: int, rows: int, context: int) -> None:
    """Refuses a pass of ``rows`` behind ``position`` that the state has no room for.

    Raises:
        InputError: the context is full.
    """
    if position + rows > context:
        raise InputError(
            f"the conversation needs {position + rows} positions and the memory plan holds {context}",
            remedy="shorten the prompt, raise --context, or allow more memory with --ram",
        )


def check_commit(count: int, pending: int, *, partial: bool) -> None:
    """Refuses to commit what a pass of ``pending`` rows cannot.

    Raises:
        ValueError: more than the pass computed, or fewer although it was not run for that.
    """
    if not 0 <= count <= pending:
        raise ValueError(f"cannot commit {count} of {pending} provisional positions")
    if count < pending and not partial:
        raise ValueError("this pass was run for a full commit only")


def finished(layers: Generator[int, None, Rows]) -> Rows:
    """The logits of a pass, run to its end without looking on; see ``Target.run``."""
    while True:
        try:
            next(layers)
        except StopIteration as done:
            result: Rows = done.value
            return result


class Target(Protocol):
    """K3's maths over streamed bytes.

    Every row has the same bits as if it had been computed alone, whatever the other rows, drives or budget.

    Attributes:
        taps: layers after which the accumulator is kept for a draft; may be set before the first pass.
        tap_rows: of a longer pass only the accumulators of this many last rows are kept.
        times: where the time went.
        routes: of the last pass, one for each layer with routed experts.
    """

    taps: tuple[int, ...]
    tap_rows: int
    times: PassTimes
    routes: list[Routes]

    def forward(
        self, tokens: Sequence[int], state: Any, *, logits: Literal["all", "last"] = "all", partial: bool = False
    ) -> Rows:
        """Computes ``len(tokens)`` provisional positions after the committed ones; see ``run``."""

    def run(
        self, tokens: Sequence[int], state: Any, *, logits: Literal["all", "last"] = "all", partial: bool = False
    ) -> Generator[int, None, Rows]:
        """The same pass as a generator that yields the number of finished layers.

        Args:
            tokens: vocabulary ids.
            state: receives the provisional rows; its committed part is untouched, also when this raises.
            logits: for which rows.
            partial: whether fewer positions than computed may be committed later (verification of a draft).

        Raises:
            InputError: the context is full.
            SliceError: bytes missing, unreadable or corrupt.
            Interrupted: a stop was asked for.
            ValueError: a token id outside the vocabulary, or a partial pass longer than one block.
        """


class Backend(Protocol):
    """One way to compute K3.

    Attributes:
        name: as chosen by the user.
    """

    @property
    def name(self) -> BackendName: ...

    def prepare(self, threads: int | None) -> None:
        """Sets up compute threads (None: as many as are good here) and checks the kernels on this machine.

        Raises:
            MachineError: naming the kernel that is wrong.
            UsageError: a number of threads has no effect here.
        """

    def describe(self) -> str:
        """Framework and kernels in use, for the user."""

    def numerics(self) -> str:
        """A name for this build's arithmetic: states of another one must not be continued."""

    def bound_memory(self, budget: int) -> None:
        """Told the bytes of the whole process before anything is loaded: what the plan does not know stays small."""

    def spine_memory(self) -> SpineMemory[Native]:
        """Where spine bytes land and how they become arrays."""

    def frames(self, count: int, frame_bytes: int) -> Frames:
        """Where expert bytes land."""

    def state(self, config: K3Config, context: int) -> State:
        """A sequence of no tokens with room for ``context`` positions."""

    def target(
        self,
        store: Store,
        spine: Spine[Native],
        experts: ExpertStream,
        *,
        file_order: Callable[[int], Sequence[int]],
        block_rows: int,
        stop: StopFlag,
    ) -> Target:
        """The model over the given streams.

        Args:
            file_order: layer → all its experts in the order they lie on the drives.
            block_rows: rows whose attention transients may exist at one time.
        """

    def lm_head(self, spine: Spine[Native]) -> Native:
        """K3's resident head, bf16 [vocab, hidden], for a draft that shares it."""
