"""Ctrl-C, a polite kill, or the end of a terminal, as a request to come to an end."""

import signal
import threading
from types import FrameType
from typing import Self

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask for an end."""


class Interrupt:
    """While it is open, the first SIGINT or SIGTERM only sets `asked`, and the second does what it would do without us.

    SIGHUP sets `asked` too, however often it comes: where a terminal is closed, the kernel and the shell each send one.
    Where it is ignored, as under nohup, it stays so.

    Signals reach the main thread alone; opened in another one, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            asking = [number for number in ASKING if not (ignored and number == signal.SIGHUP)]
            self._previous = {number: signal.signal(number, self._ask) for number in asking}
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            for number, previous in self._previous.items():
                signal.signal(number, previous)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # a shell starts a background job with SIGINT ignored; whoever sends two signals means them all the same
        for each, previous in self._previous.items():
            if each == signal.SIGHUP:
                continue
            usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, usual if previous == signal.SIG_IGN else previous)
