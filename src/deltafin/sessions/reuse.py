"""Generation that begins behind the longest known prefix and leaves state points behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from deltafin.drafting.controller import DraftController
from deltafin.generation.choice import Constraint
from deltafin.generation.engine import Engine
from deltafin.generation.events import Event, TokenDecided
from deltafin.sessions.files import PointFiles
from deltafin.sessions.points import PointCache, as_tokens, take


@dataclass(slots=True)
class ReuseStats:
    """Where prefixes came from since the start: the running session, RAM, disk, or nowhere; and how many tokens."""

    live: int = 0
    ram: int = 0
    disk: int = 0
    none: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0


class ReusingSession:
    """One engine's session, moved from conversation to conversation.

    Points are taken at the end of each prompt and of each turn, so that a reply regenerated, a message edited or a
    branch taken costs only what comes behind the last point before the difference.

    Args:
        engine: generates.
        cache: points in RAM.
        files: points on disk, or None.
    """

    def __init__(self, engine: Engine, cache: PointCache, files: PointFiles | None = None) -> None:
        self._session = engine.session()
        self._cache = cache
        self._files = files
        self.stats = ReuseStats()

    @property
    def tokens(self) -> list[int]:
        """Every token of the current sequence."""
        return self._session.tokens

    @property
    def drafter(self) -> DraftController | None:
        """What drafts for this session."""
        return self._session.drafter

    @property
    def files_failure(self) -> str | None:
        """Why points are not being saved, if they are not."""
        return self._files.failure if self._files is not None else None

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new: int,
        stop: Collection[int],
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> Iterator[Event]:
        """As ``Session.generate``, which it wraps."""
        self._begin(prompt)
        events = self._session.generate(prompt, max_new=max_new, stop=stop, constraint=constraint, logprobs=logprobs)
        try:
            for event in events:
                yield event
                # After the consumer has the first token: it should not wait for the copy.
                if isinstance(event, TokenDecided) and event.index == 0:
                    self._keep()
        finally:
            # Also after an error, an interrupt or a consumer that left: what was committed is good.
            self._keep()

    def _begin(self, prompt: Sequence[int]) -> None:
        session, stats, tokens = self._session, self.stats, as_tokens(prompt)
        reused, source = session.reusable(prompt), "live"
        if (point := self._cache.find(tokens)) is not None and len(point) > reused:
            reused, source = len(point), "ram"
        else:
            point = None
        if self._files is not None and reused < len(prompt) - 1:
            found = self._files.find(tokens, longer_than=reused)
            if found is not None:
                point, reused, source = found, len(found), "disk"
                self._cache.add(found)
        if point is not None and not session.restore(point.tokens.tolist(), point.tensors()):
            reused = 0
        setattr(stats, source if reused else "none", getattr(stats, source if reused else "none") + 1)
        stats.reused_tokens += reused
        stats.prompt_tokens += len(prompt)

    def _keep(self) -> None:
        session = self._session
        tokens = as_tokens(session.tokens[: session.state.position])
        if not len(tokens):
            return
        base = self._cache.base(tokens)
        if base is not None and len(base) == len(tokens):
            if "logits" in base.fixed or all(name != "logits" for name, _ in session.tensors()):
                return
            base = None
        point = take(tokens.tolist(), session.tensors(), base)
        self._cache.add(point)
        if self._files is not None:
            self._files.save(point)

    def close(self) -> None:
        """Waits until all points are on disk."""
        if self._files is not None:
            self._files.close()
