"""Ctrl-C, or a polite kill, as a request to come to an end."""

import signal
import threading
from types import FrameType
from typing import Self

ASKING = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask for an end."""


class Interrupt:
    """While it is open, the first SIGINT or SIGTERM only sets `asked`, and the second does what it would do without us.

    Signals reach the main thread alone; opened in another one, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = {number: signal.signal(number, self._ask) for number in ASKING}
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            for number, previous in self._previous.items():
                signal.signal(number, previous)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # a shell starts a background job with SIGINT ignored; whoever sends two signals means them all the same
        for each, previous in self._previous.items():
            usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, usual if previous == signal.SIG_IGN else previous)
