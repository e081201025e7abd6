"""Pieces in the shape of OpenAI's responses, whole or as chunks of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from deltafin.server.jobs import Job, Progress
from deltafin.server.pieces import Call, Done, Piece, Text, TokenReport

LEAST_LOGPROB = -9999.0


class Shape:
    """One response; ids and times are the response's own, everything else is the job's.

    Args:
        object_name, prefix: OpenAI's name of the object, and how its id begins.
        fingerprint: of model and arithmetic, as ``system_fingerprint``.
    """

    object_name: str
    chunk_name: str
    prefix: str

    def __init__(self, job: Job, model: str, fingerprint: str) -> None:
        self._job = job
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": job.created,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The response as one object; the last piece must be ``Done``."""
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        """Choices of chunks before the first piece."""
        return []

    def choices(self, piece: Text | Call) -> list[dict[str, Any]]:
        """Choices of the chunks that ``piece`` becomes, one each."""
        raise NotImplementedError

    def closing(self, done: Done) -> dict[str, Any]:
        """The choice of the last chunk."""
        raise NotImplementedError

    def chunk(self, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """A chunk with one choice or none."""
        choices = [] if choice is None else [choice]
        return {**self._head, "object": self.chunk_name, "choices": choices, **more}

    def _object(self, choice: dict[str, Any], done: Done) -> dict[str, Any]:
        return {**self._head, "object": self.object_name, "choices": [choice], "usage": usage(done)}


class ChatShape(Shape):
    """``chat.completion``."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl"

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        texts = [p for p in pieces if isinstance(p, Text)]
        calls = [self._call(p, whole=True) for p in pieces if isinstance(p, Call)]
        content = "".join(p.text for p in texts if p.kind == "content")
        reasoning = "".join(p.text for p in texts if p.kind == "reasoning")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            message["content"] = content or None
        done = pieces[-1]
        assert isinstance(done, Done)
        reports = [r for p in texts for r in p.logprobs]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(reports),
            "finish_reason": done.reason,
        }
        return self._object(choice, done)

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice({"role": "assistant", "content": ""})]

    def choices(self, piece: Text | Call) -> list[dict[str, Any]]:
        if isinstance(piece, Call):
            first = self._call(piece, whole=False)
            rest = {"index": piece.index, "function": {"arguments": piece.arguments}}
            return [self._choice({"tool_calls": [part]}) for part in (first, rest)]
        key = "content" if piece.kind == "content" else "reasoning_content"
        return [self._choice({key: piece.text}, self._logprobs(piece.logprobs) if piece.logprobs else None)]

    def closing(self, done: Done) -> dict[str, Any]:
        return {**self._choice({}), "finish_reason": done.reason}

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _call(self, call: Call, *, whole: bool) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments if whole else ""}
        # The same reply has the same call ids, however often it is sent.
        out = {"id": f"call_{self._job.work.key[:24]}_{call.index}", "type": "function", "function": function}
        return out if whole else {"index": call.index, **out}

    def _logprobs(self, reports: Sequence[TokenReport]) -> dict[str, Any] | None:
        if self._job.work.logprobs is None:
            return None
        return {"content": [self._report(r) for r in reports], "refusal": None}

    def _report(self, report: TokenReport) -> dict[str, Any]:
        return {
            **_token(report.token, report.logprob),
            "top_logprobs": [_token(data, logprob) for data, logprob in report.top],
        }


class CompletionShape(Shape):
    """``text_completion``."""

    object_name = chunk_name = "text_completion"
    prefix = "cmpl"

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        texts = [p for p in pieces if isinstance(p, Text)]
        done = pieces[-1]
        assert isinstance(done, Done)
        reports = [r for p in texts for r in p.logprobs]
        return self._object(self._choice("".join(p.text for p in texts), reports, done.reason), done)

    def choices(self, piece: Text | Call) -> list[dict[str, Any]]:
        assert isinstance(piece, Text)
        return [self._choice(piece.text, piece.logprobs, None)]

    def closing(self, done: Done) -> dict[str, Any]:
        return self._choice("", (), done.reason)

    def _choice(self, text: str, reports: Sequence[TokenReport], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._job.work.logprobs is not None:
            logprobs = {
                "tokens": [_shown(r.token) for r in reports],
                "token_logprobs": [_finite(r.logprob) for r in reports],
                "top_logprobs": [
                    {_shown(data): _finite(p) for data, p in (*r.top, (r.token, r.logprob))} for r in reports
                ],
                "text_offset": [r.offset for r in reports],
            }
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}


def usage(done: Done) -> dict[str, Any]:
    """Token counts; ``cached_tokens`` also at the top, where hosted K3 has it."""
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "cached_tokens": done.cached_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": done.reasoning_tokens},
    }


def progress(position: int, state: Progress | None) -> dict[str, Any]:
    """The ``progress`` of a chunk without choices."""
    out: dict[str, Any] = {"queue_position": position, "prefill": None, "seconds_left": None}
    if state is not None:
        share = 1.0 if not state.total else min(1.0, state.done / state.total)
        out["prefill"] = {"share": round(share, 4), "tokens": state.total, "cached_tokens": state.reused}
        out["seconds_left"] = None if state.seconds_left is None else round(state.seconds_left, 1)
    return out


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _shown(data: bytes) -> str:
    """A token as a key: its text, or its bytes where it is only a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
