"""Statistics over the rounds of a training, for its summary. The events hold the figures of every round."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LAST = 10
"""Number of rounds of learning whose mean is the summary's `last_rounds`."""

SHOWN = (
    "return",
    "explained_variance",
    "entropy",
    "wait",
    "decisions",
    "kept",
    "kept_share",
    "env_steps_per_second",
)
"""The figures of `last_rounds`."""


class History:
    """The figures of the last rounds of learning, and the mean of `controller_share` over all rounds."""

    def __init__(self) -> None:
        self._last: list[dict[str, float]] = []  # figures of the last rounds of learning
        self._share, self._rounds = 0.0, 0  # sum of controller_share, and number of rounds in it

    def add(self, figures: Mapping[str, float]) -> None:
        """Add the figures of a round. Rounds of imitation, which have no `kl`, do not enter `last_rounds`."""
        if "kl" in figures:
            self._last = [*self._last, dict(figures)][-LAST:]
        share = figures.get("controller_share", math.nan)
        if math.isfinite(share):
            self._share, self._rounds = self._share + share, self._rounds + 1

    def summary(self) -> dict[str, Any]:
        """Return means over the last rounds of learning, and the share of the total time spent on deciding and learning."""
        last = {name: _mean([figures[name] for figures in self._last if name in figures]) for name in SHOWN}
        return {"last_rounds": last, "controller_share": self._share / self._rounds if self._rounds else None}

    def state(self) -> dict[str, Any]:
        """Return the statistics, for a checkpoint."""
        return {"last": self._last, "controller_share": self._share, "rounds": self._rounds}

    def load_state(self, state: Mapping[str, Any] | Sequence[Mapping[str, float]]) -> None:
        """Restore a `state`, or the list of the figures of all rounds, which checkpoints of Esper 0.1 contain."""
        if isinstance(state, Mapping):
            self._last = [dict(figures) for figures in state["last"]]
            self._share, self._rounds = state["controller_share"], state["rounds"]
        else:
            self.__init__()  # type: ignore[misc]
            for figures in state:
                self.add(figures)


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite else None
