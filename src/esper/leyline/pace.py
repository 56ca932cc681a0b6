"""An estimate of how long work takes, from the time of its first part."""

from collections.abc import Callable


class Pace:
    """Counts finished parts of some work, and after the first part estimates the time of the others.

        pace = Pace(3_000, "networks", print)
        pace.add(200, seconds=14.0)    # 200 of 3,000 networks took 14 seconds; about 3 minutes for the others

    A part whose results existed already is counted with `seconds=None`, and is not used for the estimate.
    """

    def __init__(self, parts: int, name: str, say: Callable[[str], None] | None) -> None:
        self.parts, self.name, self.say = parts, name, say
        self.done = 0
        self._told = False

    def add(self, parts: int, seconds: float | None) -> None:
        """Count finished parts that took `seconds`; None if their results existed already."""
        self.done += parts
        left = self.parts - self.done
        if seconds is None or self._told or self.say is None or left <= 0:
            return
        self._told = True
        some = f"{parts:,} of {self.parts:,} {self.name} took {duration(seconds)}"
        self.say(f"{some}; about {duration(seconds * left / parts)} for the others")


def duration(seconds: float) -> str:
    """A time in a readable unit: `14 seconds`, `3 minutes`, `2.5 hours`."""
    if seconds < 90:
        return f"{seconds:.2g} seconds" if seconds < 10 else f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"
