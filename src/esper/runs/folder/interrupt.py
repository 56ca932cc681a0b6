"""Turn signals (SIGINT, SIGTERM, SIGHUP) into requests to end a run in order."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Self

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that request an end."""
WORD_AFTER = 0.5
"""How long a run may take to answer a signal by itself before a line says what it waits for [seconds]."""


class Interrupt:
    """Turns signals into the flag `asked`, as a context manager.

    The first SIGINT or SIGTERM sets `asked`, and the second has its usual effect. To let the second request an end too, of what
    the run does after the first, enter another Interrupt with hangup=False then.

    Every SIGHUP sets `asked`, because closing a terminal can send two: one from the kernel and one from the shell. An ignored
    SIGHUP, as under nohup, stays ignored.

    Python delivers signals to the main thread. In another thread the context manager does nothing.
    """

    def __init__(self, say: Callable[[str], None] | None = None, *, hangup: bool = True) -> None:
        """`say` shows a line. It is called if a signal has come and `answered` was not called within `WORD_AFTER`.

        A thread calls it, because a step may compile a graph for a minute, and because a signal handler must not print: it
        may interrupt a print. hangup: whether SIGHUP sets `asked`.
        """
        self.asked = False  # whether any signal has come
        self._say, self._hangup = say, hangup
        # True: a signal has come; False: it is answered, or the run is over
        self._events: SimpleQueue[bool] = SimpleQueue()

    def __enter__(self) -> Self:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            left = not self._hangup or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            asking = [number for number in ASKING if not (left and number == signal.SIGHUP)]
            self._previous = {number: signal.signal(number, self._ask) for number in asking}
            if self._say is not None:
                threading.Thread(target=self._wait, args=(self._say,), name="interrupt", daemon=True).start()
        return self

    def answered(self) -> None:
        """Say no line about a signal that has come, because the run says one now."""
        self._events.put(False)

    def _wait(self, say: Callable[[str], None]) -> None:
        if not self._events.get():
            return
        try:
            self._events.get(timeout=WORD_AFTER)
        except Empty:
            say("interrupted: the run ends after the step that is under way; another Ctrl-C ends it at once")

    def __exit__(self, *error: object) -> None:
        if self._installed:
            for number, previous in self._previous.items():
                signal.signal(number, previous)
        self.answered()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self._events.put(True)
        self.asked = True
        # A shell starts a background job with SIGINT ignored. A second signal ends the process even then.
        for each, previous in self._previous.items():
            if each == signal.SIGHUP:
                continue
            usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, usual if previous == signal.SIG_IGN else previous)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, so that what is open is closed, locks among it.

    A signal that is ignored or has a handler stays as it is. In another thread than the main one this does nothing.
    """
    main = threading.current_thread() is threading.main_thread()
    usual = [each for each in ASKING if main and signal.getsignal(each) == signal.SIG_DFL]
    try:
        for number in usual:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)
