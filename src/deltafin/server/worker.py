"""Makes a job's reply: a generation's events become pieces. Runs in the worker thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deltafin.errors import DeltafinError
from deltafin.generation.events import Finished, FinishReason, PrefillProgress, TokenDecided, TokenLogprobs
from deltafin.server.errors import ApiError, from_deltafin, place_of
from deltafin.server.jobs import Job, Progress, Work
from deltafin.server.pieces import Assembler, Call, Done, Failed, Text
from deltafin.sessions.reuse import ReusingSession
from deltafin.sessions.turns import TurnLog
from deltafin.text.grammar import ReplyConstraint, ReplyGrammars
from deltafin.text.messages import AssistantMessage, FunctionCall, TextPart
from deltafin.text.messages import Call as MessageCall
from deltafin.text.tokenizer import K3Tokenizer

log = logging.getLogger("deltafin.server")


class Worker:
    """Runs jobs on one session.

    Args:
        session: generates.
        turns: remembers replies.
        clear: makes the engine usable after a stop that came too late to be noticed.
    """

    def __init__(
        self,
        session: ReusingSession,
        tokenizer: K3Tokenizer,
        turns: TurnLog,
        grammars: ReplyGrammars,
        clear: Callable[[], None],
    ) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._turns = turns
        self._grammars = grammars
        self._clear = clear
        self.resumed_tokens = 0

    def run(self, job: Job) -> None:
        """Publishes pieces up to ``Done`` or ``Failed``."""
        # In this order: whoever cancels sets the job's flag first and the engine's after it.
        self._clear()
        try:
            if not job.cancelled:
                self._reply(job)
        except DeltafinError as e:
            error = from_deltafin(e)
            if error.status >= 500:
                log.error("%s", e)
            job.publish(Failed(error))
        except ApiError as e:
            job.publish(Failed(e))
        except Exception as e:
            log.error("internal error in a generation: %s", place_of(e))
            job.publish(Failed(ApiError(500, f"internal error ({type(e).__name__})", code="internal_error")))

    def _reply(self, job: Job) -> None:
        work = job.work
        reply = _Reply(job, self._tokenizer)
        constraint = None
        if work.form is not None and not work.form.free:
            constraint = self._grammars.constraint(work.form)
        prompt = list(work.prompt)
        earlier = self._earlier(work, constraint)
        for token, logprobs in earlier:
            reply.token(TokenDecided(token, len(reply.ids), 0.0, 0.0, False, logprobs))
        if reply.ids:
            prompt += reply.ids
        reason: FinishReason | None = None
        left = work.max_new - len(reply.ids)
        if reply.ended(self._tokenizer):
            reason = "stop"
        elif left <= 0:
            reason = "length"
        if reason is None:
            reason = self._generate(job, reply, prompt, left, constraint)
        reply.finish()
        if job.cancelled or reason == "interrupted":
            job.publish(Failed(ApiError(503, "the generation was stopped", code="stopped")))
            return
        self._remember(work, reply)
        stopped = reason == "stop" or reply.assembler.stopped
        finish = "tool_calls" if stopped and reply.assembler.calls else "stop" if stopped else "length"
        counted = reply.assembler.tokens
        job.publish(Done(finish, len(work.prompt), reply.cached, counted, reply.assembler.reasoning_tokens))  # type: ignore[arg-type]

    def _earlier(self, work: Work, constraint: ReplyConstraint | None) -> list[tuple[int, TokenLogprobs | None]]:
        """What a crash left of this reply."""
        if work.resume_key is None:
            return []
        earlier = self._turns.begin(work.resume_key, work.key)
        if earlier is None:
            raise ApiError(422, "this Idempotency-Key was used with another request", code="idempotency_key_reused")
        if constraint is not None:
            for token, _ in earlier:
                constraint.accept(token)
        self.resumed_tokens += len(earlier)
        return earlier

    def _generate(
        self, job: Job, reply: _Reply, prompt: list[int], max_new: int, constraint: ReplyConstraint | None
    ) -> FinishReason:
        work, first = job.work, len(reply.ids)
        events = self._session.generate(
            prompt,
            max_new=max_new,
            stop=self._tokenizer.stop_ids,
            constraint=constraint,
            logprobs=work.logprobs,
        )
        try:
            for event in events:
                if job.cancelled:
                    return "interrupted"
                if isinstance(event, PrefillProgress):
                    reply.cached = min(event.reused, len(work.prompt))
                    job.report(_progress(event))
                elif isinstance(event, TokenDecided):
                    if work.resume_key is not None:
                        self._turns.decided(work.resume_key, first + event.index, event.token, event.logprobs)
                    reply.token(event)
                    if reply.assembler.stopped:
                        return "stop"
                elif isinstance(event, Finished):
                    return event.reason
        finally:
            events.close()  # type: ignore[attr-defined]
        return "interrupted"

    def _remember(self, work: Work, reply: _Reply) -> None:
        if work.thinking is None or not reply.assembler.complete or reply.assembler.stopped:
            return
        reasoning = "".join(p.text for p in reply.texts if p.kind == "reasoning")
        content = "".join(p.text for p in reply.texts if p.kind == "content")
        message = AssistantMessage(
            content=[TextPart(text=content)] if content else [],
            reasoning_content=reasoning or None,
            tool_calls=[MessageCall(function=FunctionCall(name=c.name, arguments=c.arguments)) for c in reply.calls],
        )
        self._turns.remember(work.before, reply.ids, message, work.thinking)


class _Reply:
    """What a job has said so far."""

    def __init__(self, job: Job, tokenizer: K3Tokenizer) -> None:
        work = job.work
        self._job = job
        self.assembler = Assembler(
            tokenizer, thinking=work.thinking, stops=work.stops, report=work.logprobs is not None
        )
        self.ids: list[int] = []
        self.texts: list[Text] = []
        self.calls: list[Call] = []
        self.cached = 0

    def token(self, event: TokenDecided) -> None:
        """Takes a decided token and publishes what it completes."""
        self.ids.append(event.token)
        self._publish(self.assembler.feed(event))

    def finish(self) -> None:
        """Publishes the rest."""
        self._publish(self.assembler.finish())

    def ended(self, tokenizer: K3Tokenizer) -> bool:
        """Whether nothing more is to be decided."""
        return self.assembler.stopped or (bool(self.ids) and self.ids[-1] in tokenizer.stop_ids)

    def _publish(self, pieces: list) -> None:  # type: ignore[type-arg]
        for piece in pieces:
            if isinstance(piece, Text):
                self.texts.append(piece)
            elif isinstance(piece, Call):
                self.calls.append(piece)
            self._job.publish(piece)


def _progress(event: PrefillProgress) -> Progress:
    left = None
    if event.done > 0:
        left = event.seconds * (event.total - event.done) / event.done
    return Progress(event.done, event.total, event.reused, left)
