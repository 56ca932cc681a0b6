"""Who looks on while something runs."""

from collections.abc import Mapping
from typing import Protocol

from esper.leyline.view import View


class Watch(Protocol):
    """Who looks on while a population grows."""

    def step(self, view: View, eps: float, rollbacks: int) -> None:
        """A step is done; `eps` are the rows stepped per second so far, and `rollbacks` counts those so far, twins included."""
        ...

    def note(self, text: str) -> None:
        """Something else begins."""
        ...

    def answer(self, text: str) -> None:
        """What becomes of a run whose user has pressed Ctrl-C, and has to be told even where no progress is shown."""
        ...


class Progress(Protocol):
    """Who looks on while a controller is trained."""

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        """A round is done; those of imitation are numbered below 0."""
        ...

    def note(self, text: str) -> None:
        """Something else begins."""
        ...


class Silent:
    """A Watch and a Progress that looks away."""

    def step(self, view: View, eps: float, rollbacks: int) -> None:
        """Nothing."""

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def answer(self, text: str) -> None:
        """Nothing."""
