"""What a generation decided, and how much of its prompt needed no pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deltafin.generation.engine import Engine
from deltafin.generation.events import Event, PrefillProgress, TokenDecided


def answer(events: Iterator[Event]) -> tuple[list[int], int]:
    """(decided tokens, prompt tokens reused)."""
    tokens, reused = [], -1
    for event in events:
        if isinstance(event, TokenDecided):
            tokens.append(event.token)
        elif isinstance(event, PrefillProgress):
            reused = event.reused
    return tokens, reused


def cold(engine: Engine, prompt: Sequence[int], new: int) -> list[int]:
    """What a session that knows nothing decides."""
    return answer(engine.session().generate(prompt, max_new=new, stop=()))[0]
