"""A thread that does one thing after another beside the run."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Background:
    """One thread for all jobs, begun with the first.

    It is a daemon, unlike those of concurrent.futures, which every end of the process waits for: one that is to leave at once
    waits for no job. And it is one for all, since memory may be short by the next: a thread that has none to begin with is
    waited for in `Thread.start` for ever.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._begun = False

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Do it behind the jobs before it. The future has what it raised."""
        if not self._begun:
            threading.Thread(target=_work, args=(self._jobs,), name="background", daemon=True).start()
            self._begun = True
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def close(self) -> None:
        """Let the thread end behind its last job, without waiting for it; a later job begins another."""
        if self._begun:
            self._jobs.put(None)
            self._jobs, self._begun = SimpleQueue(), False


def _work(jobs: "SimpleQueue[tuple[Callable[[], None], Future[None]] | None]") -> None:
    while (entry := jobs.get()) is not None:
        job, done = entry
        try:
            job()
        except BaseException as error:
            done.set_exception(error)  # raised where it is asked for
        else:
            done.set_result(None)
        del entry, job, done  # what they hold is large
