"""The curves of a run, made from its rows one by one. E environments.

A grown run has one point for each step, a training one for each round. x never decreases.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from esper.nissa.rows import EpisodeRow, GradientsRow, LifecycleRow, RollbackRow, RoundRow, Row, StepRow

Best = Callable[[NDArray[np.float64]], np.float64]

_LONGEST = 60  # characters of a task's name in the name of a curve


class Point(NamedTuple):
    """The values of curves at one place.

    Attributes:
        x (int): `step` of the row in a grown run; number of rounds before this one in a training
        time (float): when the row was written [seconds since 1970]
        values (mapping): by name of the curve; a quantity that was not measured is missing
    """

    x: int
    time: float
    values: Mapping[str, float]


class Curve(NamedTuple):
    """A figure of every environment, of which quartiles and the best value over environments are curves.

    Attributes:
        name (str): prefix of the names of the curves
        field (str): field of the row
        best (callable or None): the best of the values; None where none is better than another
    """

    name: str
    field: str
    best: Best | None


CURVES: Mapping[type[Row], Sequence[Curve]] = {
    StepRow: (
        Curve("metric", "metrics", np.max),
        Curve("twin_metric", "twin_metrics", np.max),
        Curve("loss", "losses", np.min),
        Curve("train_loss", "train_losses", np.min),
        Curve("added_params", "added_param_counts", None),
    ),
    GradientsRow: (Curve("host_gradient", "host_gradients", None),),
}
"""The figures of the environments, by kind of row (`esper docs exporters`)."""
EPISODE_CURVES = (
    Curve("metric", "metric", np.max),
    Curve("loss", "loss", np.min),
    Curve("added_params", "added_params", None),
)
"""The figures of the networks at the end of an episode, which a training exports for each of its populations."""
COUNTED: Mapping[str, str] = {"GERMINATED": "seeds/planted", "FOSSILIZED": "seeds/kept", "PRUNED": "seeds/pruned"}
"""The changes of stage that are counted, and the names of their curves."""
ROLLBACKS = "rollbacks"


class Curves:
    """Makes the points of the curves from the rows of a run, which `points` takes in order, the first row first."""

    def __init__(self) -> None:
        self.rounds = 0  # round rows so far
        self._counts: Counter[str] = Counter(dict.fromkeys((*COUNTED.values(), ROLLBACKS), 0))
        self._episodes: dict[tuple[str, str], list[EpisodeRow]] = {}  # of the present round, by cohort and task
        self._names: dict[str, str] = {}  # of the tasks, as they are in the names of curves

    def points(self, row: Row) -> Iterator[Point]:
        """The point of a row; none for rows that only add to later ones."""
        match row:
            case LifecycleRow() if row.to_stage in COUNTED:
                self._counts[COUNTED[row.to_stage]] += row.cohort is UNSET
            case RollbackRow():
                self._counts[ROLLBACKS] += row.cohort is UNSET and not row.twin
            case StepRow() | GradientsRow() if row.cohort is UNSET:  # a training shows its rounds instead
                values = {
                    name: value
                    for curve in CURVES[type(row)]
                    for name, value in spread(curve, getattr(row, curve.field) or ()).items()
                }
                yield Point(row.step, row.time, values | (dict(self._counts) if isinstance(row, StepRow) else {}))
            case EpisodeRow(cohort=str(cohort), task=str(task)):
                self._episodes.setdefault((cohort, task), []).append(row)
            case RoundRow():
                yield self._round(row)

    def _round(self, row: RoundRow) -> Point:
        values = {f"round/{name}": float(value) for name, value in row.figures.items() if value is not None}
        for (cohort, task), rows in self._episodes.items():
            ended = [each for each in rows if each.round == row.round]
            for curve in EPISODE_CURVES:
                own = curve._replace(name=f"{cohort}/{self._name(task)}/{curve.name}")
                values |= spread(own, [getattr(each, curve.field) for each in ended])
        self._episodes.clear()
        self.rounds += 1
        return Point(self.rounds - 1, row.time, values)

    def _name(self, task: str) -> str:
        """The name of a task with the characters that every target accepts; each task has a name of its own."""
        if task not in self._names:
            base = re.sub(r"[^A-Za-z0-9_-]+", "_", task)[-_LONGEST:] or "_"
            taken, name, count = set(self._names.values()), base, 1
            while name in taken:
                count += 1
                name = f"{base}-{count}"
            self._names[task] = name
        return self._names[task]


def spread(curve: Curve, values: Sequence[float | None]) -> dict[str, float]:
    """Median, quartiles (linear interpolation) and best of the values (E,) that are not None; empty if there are none."""
    known = np.array([value for value in values if value is not None], np.float64)
    if not known.size:
        return {}
    low, middle, high = np.percentile(known, (25, 50, 75)).tolist()
    shown = {"median": middle, "q25": low, "q75": high}
    if curve.best is not None:
        shown["best"] = float(curve.best(known))
    return {f"{curve.name}/{name}": value for name, value in shown.items()}
