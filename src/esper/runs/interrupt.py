"""Ctrl-C, a polite kill, or the end of a terminal, as a request to come to an end."""

import signal
import threading
from types import FrameType
from typing import Self

from esper.leyline.config import Config
from esper.leyline.text import counted

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask for an end."""


class Interrupt:
    """While it is open, the first SIGINT or SIGTERM only sets `asked`, and the second does what it would do without us.

    After `rearm` the next one only sets `ending`, and the one after that does what it would do without us.

    SIGHUP sets `asked` too, however often it comes: where a terminal is closed, the kernel and the shell each send one.
    Where it is ignored, as under nohup, it stays so.

    Signals reach the main thread alone; opened in another one, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False  # whether a signal has come at all
        self._rearmed = self._again = False

    @property
    def ending(self) -> bool:
        """Whether a signal has come since `rearm`; where that was not called, whether one has come at all."""
        return self._again if self._rearmed else self.asked

    def rearm(self) -> None:
        """Let one more SIGINT or SIGTERM ask, as the first one did: what it asked for is done, and something else begins."""
        self._rearmed, self._again = True, False
        if self._installed:
            for number in self._previous:
                signal.signal(number, self._ask)

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
        if self._rearmed and number != signal.SIGHUP:
            self._again = True
        # a shell starts a background job with SIGINT ignored; whoever sends two signals means them all the same
        for each, previous in self._previous.items():
            if each == signal.SIGHUP:
                continue
            usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, usual if previous == signal.SIG_IGN else previous)


def beside(config: Config) -> list[str]:
    """The static networks that train once the growth has ended."""
    return [name for name in config.baselines if name != "twin"]


def after_growth(steps: int, config: Config) -> str:
    """What an interrupted growth goes on with, and what another Ctrl-C does then."""
    said = f"interrupted after {steps:,} of {counted(config.steps, 'step')}: the networks are evaluated and exported as they are"
    static = beside(config)
    if not static:
        return f"{said}; another Ctrl-C ends the run at once, without a summary"
    return (
        f"{said}, then the static networks ({', '.join(static)}) train for {counted(steps, 'step')} too; "
        "another Ctrl-C leaves those out"
    )
