"""Show the progress of a run or of other work, and estimate how long it takes."""

from collections.abc import Callable, Mapping
from typing import Any, Self

from esper.leyline.lifecycle.view import View
from esper.leyline.messages import duration


class Progress:
    """Shows the progress of a run, and is entered while the run lasts. This class shows nothing."""

    def step(self, view: View, speed: float, rollbacks: int) -> None:
        """Show a step of a population. `speed` is rows * steps / second and `rollbacks` a count, both so far and with twins."""

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        """Show a round of a training that was played. Rounds of imitation have numbers below 0."""

    def note(self, text: str) -> None:
        """Show a line, such as the name of the next phase."""

    def answer(self, text: str) -> None:
        """Show the answer to Ctrl-C, even if progress is not shown."""

    def waits(self) -> dict[str, Any] | None:
        """Return how often and how long the run has waited because progress was shown more slowly; None if it never has."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Pace:
    """Counts finished parts of some work, and after the first part estimates the time of the others.

        pace = Pace(3_000, "networks", print)
        pace.add(200, seconds=14.0)    # 200 of 3,000 networks took 14 seconds; about 3 minutes for the others

    A part whose results existed already is counted with `seconds=None`, and is not used for the estimate.
    """

    def __init__(self, parts: int, name: str, say: Callable[[str], None]) -> None:
        self.parts, self.name, self.say = parts, name, say
        self.done = 0
        self._told = False

    def add(self, parts: int, seconds: float | None) -> None:
        """Count finished parts that took `seconds`; None if their results existed already."""
        self.done += parts
        left = self.parts - self.done
        if seconds is None or self._told or left <= 0:
            return
        self._told = True
        some = f"{parts:,} of {self.parts:,} {self.name} took {duration(seconds)}"
        self.say(f"{some}; about {duration(seconds * left / parts)} for the others")
