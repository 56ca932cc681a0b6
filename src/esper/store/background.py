"""A thread that does one thing after another beside the run."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Job = tuple[Callable[[], None], Future[None]]


class Background:
    """One thread for all jobs, begun with the first.

    It is a daemon, unlike those of concurrent.futures, which every end of the process waits for: one that is to leave at once
    waits for no job. And it is one for all, since memory may be short by the next: a thread that has none to begin with is
    waited for in `Thread.start` for ever. A KeyboardInterrupt may come at any moment of `submit`; `close` fits all of them.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="background", daemon=True)
        self._newest: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Do it behind the jobs before it. The future has what it raised. None may follow a `close`."""
        if self._newest is None:
            self._thread.start()
        done: Future[None] = Future()
        self._newest = done
        self._jobs.put((job, done))
        return done

    def close(self, last: Callable[[], None]) -> None:
        """Let the thread end behind its jobs, and see that `last` is called: at once where they are done, else by the thread."""
        if self._thread.is_alive() and self._newest is not None and not self._newest.done():
            self._jobs.put((last, Future()))
        else:
            last()
        self._jobs.put(None)


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (entry := jobs.get()) is not None:
        job, done = entry
        try:
            job()
        except BaseException as error:
            done.set_exception(error)  # raised where it is asked for
        else:
            done.set_result(None)
        del entry, job, done  # what they hold is large
