"""Ctrl-C as a request to come to an end."""

import signal
import threading
from types import FrameType
from typing import Self


class Interrupt:
    """While it is open, the first SIGINT only sets `asked`, and the second does what it would do without us.

    Signals reach the main thread alone; opened in another one, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # a shell starts a background job with SIGINT ignored; whoever sends it two means it all the same
        again = signal.default_int_handler if self._previous == signal.SIG_IGN else self._previous
        signal.signal(signal.SIGINT, again)
