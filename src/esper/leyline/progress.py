"""The protocols that show the progress of a run."""

from collections.abc import Mapping
from typing import Protocol

from esper.leyline.view import View


class Watch(Protocol):
    """Shows the progress of a population."""

    def step(self, view: View, speed: float, rollbacks: int) -> None:
        """Called after each step. `speed` is rows * steps / second and `rollbacks` a count, both so far and with twins."""
        ...

    def note(self, text: str) -> None:
        """Show a line, such as the name of the next phase."""
        ...

    def answer(self, text: str) -> None:
        """Show the answer to Ctrl-C, even if progress is not shown."""
        ...


class Progress(Protocol):
    """Shows the progress of a training."""

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        """Called after each round. Rounds of imitation have numbers below 0."""
        ...

    def note(self, text: str) -> None:
        """Show a line, such as the name of the next phase."""
        ...


class Silent:
    """A Watch and a Progress that shows nothing."""

    def step(self, view: View, speed: float, rollbacks: int) -> None:
        """Do nothing."""

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def answer(self, text: str) -> None:
        """Do nothing."""
