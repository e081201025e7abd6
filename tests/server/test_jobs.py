"""The scheduler: order, bounds, followers, and the moments between two jobs."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from deltafin.server.errors import ApiError
from deltafin.server.jobs import Job, Memo, Scheduler, Work
from deltafin.server.pieces import Done, Failed, Text

END = Done("stop", 1, 0, 1, 0)


def work(key: str) -> Work:
    return Work(key, (1, 2), 5, (), None, None, None)


async def until(condition: object, within: float = 10.0) -> None:
    started = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < started + within
        await asyncio.sleep(0.002)


def test_the_next_request_of_a_client_that_has_its_answer_is_not_refused() -> None:
    def run(job: Job) -> None:
        job.publish(END)
        time.sleep(0.2)  # the worker still tidies up

    async def main() -> None:
        scheduler = Scheduler(run, lambda: None, waiting=0, memo=Memo(0, 0))
        for n in range(3):
            job = scheduler.submit(work(str(n)))
            await until(lambda job=job: job.finished)
            scheduler.leave(job)
        scheduler.close()

    asyncio.run(main())


def test_the_queue_is_bounded_and_kept_in_order() -> None:
    go, order = threading.Event(), []

    def run(job: Job) -> None:
        go.wait(10)
        order.append(job.work.key)
        job.publish(END)

    async def main() -> None:
        scheduler = Scheduler(run, lambda: None, waiting=2, memo=Memo(4, 1000))
        jobs = [scheduler.submit(work(key)) for key in "abc"]
        assert [scheduler.position(job) for job in jobs] == [0, 1, 2]
        with pytest.raises(ApiError) as full:
            scheduler.submit(work("d"))
        assert full.value.status == 429
        assert scheduler.submit(work("b")) is jobs[1]
        assert jobs[1].followers == 2
        scheduler.leave(jobs[2])
        assert jobs[2].cancelled
        last = scheduler.submit(work("c"))
        assert last is not jobs[2]
        go.set()
        await until(lambda: last.finished)
        await until(lambda: not scheduler.busy)
        assert order == ["a", "b", "c"]
        assert scheduler.submit(work("a")) is jobs[0]
        assert scheduler.memo_hits == 1
        scheduler.close()

    asyncio.run(main())


def test_the_last_follower_to_leave_stops_the_job() -> None:
    stopped = threading.Event()

    def run(job: Job) -> None:
        stopped.wait(10)
        if not job.cancelled:
            job.publish(END)

    async def main() -> None:
        scheduler = Scheduler(run, stopped.set, waiting=0, memo=Memo(4, 1000))
        job = scheduler.submit(work("a"))
        assert scheduler.submit(work("a")) is job
        scheduler.leave(job)
        assert not stopped.is_set()
        scheduler.leave(job)
        assert stopped.is_set()
        # The same request does not join what is being stopped, and may come before the worker is back.
        again = scheduler.submit(work("a"))
        assert again is not job
        await until(lambda: again.finished)
        assert isinstance(job.pieces[-1], Failed)
        assert again.pieces == [END]
        scheduler.close()

    asyncio.run(main())


def test_a_worker_that_fails_goes_on() -> None:
    def run(job: Job) -> None:
        if job.work.key == "a":
            return
        job.publish(END)

    async def main() -> None:
        scheduler = Scheduler(run, lambda: None, waiting=1, memo=Memo(4, 1000))
        first, second = scheduler.submit(work("a")), scheduler.submit(work("b"))
        await until(lambda: second.finished)
        assert isinstance(first.pieces[-1], Failed)
        scheduler.close()

    asyncio.run(main())


def test_the_memo_is_bounded() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        memo = Memo(3, 5000)
        for n in range(6):
            job = Job(work(str(n)), loop)
            job.pieces += [Text("content", "x" * 100), END]
            memo.put(job)
        assert [n for n in range(6) if memo.get(str(n))] == [3, 4, 5]
        assert memo.nbytes <= 5000
        large = Job(work("large"), loop)
        large.pieces += [Text("content", "x" * 10_000), END]
        memo.put(large)
        assert memo.get("large") is None
        assert len(memo) == 3

    asyncio.run(main())
