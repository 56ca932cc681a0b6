"""Run jobs one after the other in a thread in the background."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
Job = tuple[Callable[[], Any], Future[Any]]


class Background:
    """Runs all jobs in one thread, started with the first job.

    The thread is a daemon, so that the process can exit without waiting for a job; threads of concurrent.futures cannot be
    left behind. One thread serves all jobs, because `Thread.start` blocks forever if there is no memory for a new thread.
    `close` works whenever a KeyboardInterrupt ended `submit`.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="background", daemon=True)
        self._newest: Future[Any] | None = None

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a job after the earlier ones. The future holds its result or error. Not allowed after `close`."""
        if self._newest is None:
            self._thread.start()
        done: Future[Result] = Future()
        self._newest = done
        self._jobs.put((job, done))
        return done

    def close(self, last: Callable[[], None]) -> None:
        """End the thread after its jobs, and call `last` after them: now if they are done, else in the thread."""
        if self._thread.is_alive() and self._newest is not None and not self._newest.done():
            self._jobs.put((last, Future()))
        else:
            last()
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread after `close`, at most so long."""
        if self._thread.is_alive():
            self._thread.join(seconds)


class Backlog:
    """Bounds the work of a `Background`: a caller that is ahead by more than `most` waits, and the waits are counted.

    Each job has a size, and `size` is the sum of those that are not done. An error of a job is raised by `wait_for_room` or
    `finish`, in the thread that calls these.
    """

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self.waits, self.waited = 0, 0.0  # how often and how long `wait_for_room` waited [seconds]
        self._background = Background()
        self._jobs = deque[tuple[Future[None], int]]()  # those whose end was not noticed yet

    def submit(self, job: Callable[[], None], size: int = 1) -> None:
        """Run a job after the earlier ones; returns at once, so that an interrupt loses no job."""
        self.size += size
        self._jobs.append((self._background.submit(job), size))

    def wait_for_room(self) -> None:
        """Wait while the jobs that are not done have more than `most` in sum."""
        self._notice()
        if self.size <= self.most:
            return
        begin = time.perf_counter()
        self.waits += 1
        try:
            while self.size > self.most:
                self._jobs[0][0].exception()  # returns when the job is done
                self._notice()
        finally:
            self.waited += time.perf_counter() - begin

    def finish(self, seconds: float | None = None) -> None:
        """Wait until all jobs are done. Raises TimeoutError after some seconds."""
        if self._jobs:
            self._jobs[-1][0].exception(seconds)
        self._notice()

    def close(self) -> None:
        """End the thread after its jobs, without waiting for them."""
        self._background.close(lambda: None)

    def _notice(self) -> None:
        while self._jobs and self._jobs[0][0].done():
            job, size = self._jobs.popleft()
            self.size -= size
            job.result()


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (entry := jobs.get()) is not None:
        job, done = entry
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)  # raised by Future.result
        del entry, job, done  # they hold large arrays
