"""A thread that runs jobs one after the other in the background."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
Job = tuple[Callable[[], Any], Future[Any]]


class Background:
    """One thread for all jobs, started with the first job.

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


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (entry := jobs.get()) is not None:
        job, done = entry
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)  # raised by Future.result
        del entry, job, done  # they hold large arrays
