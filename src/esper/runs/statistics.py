"""What can be said of controllers that grew the same instances with the same keys: estimates with 95 % intervals.

P problems, R runs of each. Scores of one task are an array (P, R), and several tasks are a sequence of them. A mixture has
many problems, and a run of each per seed; one data set is one problem, and every start is a run of it.

The interquartile mean, the probability of improvement and the stratified percentile bootstrap are those of Agarwal et al.,
"Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021, sections 4.1 and 4.3, and of their
library rliable, whose task is a problem here. One thing differs. What is resampled within a task must be what was sampled
independently, and rliable takes that to be the runs. The problems of a mixture are themselves a sample, and the runs of one
problem resemble each other; to resample runs alone would speak of these problems and of no others, with intervals that are
too narrow for the mixture. So problems are resampled, each with all of its runs (Davison and Hinkley, "Bootstrap Methods and
their Application", 1997, section 3.8, on hierarchical data), and runs only where a task is one problem. Controllers that are
compared are resampled together, because they are paired.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tasks = Sequence[Floats]  # one (..., P, R) a task; the leading axes are draws of the bootstrap, and there may be none

DRAWS = 2000
"""Bootstrap samples of an interval."""
CONFIDENCE = 0.95
AT_ONCE = 10**6
"""Scores of the bootstrap samples that are held in memory together, about."""


class Interval(NamedTuple):
    """An estimate and the bounds of its interval; nan where it cannot be told."""

    value: float
    low: float
    high: float


def mean(tasks: Tasks) -> Floats:
    """(...) the mean over tasks of the mean over problems and runs."""
    return np.asarray(np.mean([scores.mean((-2, -1)) for scores in tasks], axis=0))


def interquartile_mean(tasks: Tasks) -> Floats:
    """(...) the mean of the middle half of all scores: of n, floor(n / 4) are left out at either end."""
    values = np.sort(np.concatenate([scores.reshape(*scores.shape[:-2], -1) for scores in tasks], axis=-1), axis=-1)
    cut = values.shape[-1] // 4
    return np.asarray(values[..., cut : values.shape[-1] - cut].mean(-1))


def mean_difference(ours: Tasks, theirs: Tasks) -> Floats:
    """(...) the mean over tasks of our score less theirs, run by run."""
    return mean([a - b for a, b in zip(ours, theirs, strict=True)])


def probability_of_improvement(ours: Tasks, theirs: Tasks) -> Floats:
    """(...) P(X > Y) + P(X = Y) / 2 of a run of ours and a run of theirs on one problem, drawn apart from each other.

    The Mann-Whitney statistic over all pairs of runs, U / R^2, averaged over the problems of a task and then over tasks.
    """
    return mean([_better(a, b)[..., None] for a, b in zip(ours, theirs, strict=True)])


def interval(statistic: Callable[..., Floats], *controllers: Tasks, draws: int = DRAWS, seed: int = 0) -> Interval:
    """A statistic of the scores of one controller or more, with the percentile bounds of its stratified bootstrap.

    Each task is a stratum. In a draw all controllers keep the same problems (or runs, where a task is one problem). All three
    are nan where a score is nan, and the bounds are where a task has but one unit to draw from.
    """
    assert controllers
    shapes = [scores.shape for scores in controllers[0]]
    assert all([scores.shape for scores in tasks] == shapes for tasks in controllers), "the controllers are not paired"
    if any(np.isnan(scores).any() for tasks in controllers for scores in tasks):
        return Interval(np.nan, np.nan, np.nan)
    value = float(statistic(*controllers))
    units = [problems if problems > 1 else runs for problems, runs in shapes]
    if min(units) < 2:
        return Interval(value, np.nan, np.nan)
    random, drawn = np.random.default_rng(seed), np.zeros(draws)
    batch = 1 + AT_ONCE // sum(problems * runs for problems, runs in shapes)
    for start in range(0, draws, batch):
        some = drawn[start : start + batch]
        chosen = [random.integers(count, size=(len(some), count)) for count in units]
        some[:] = statistic(*([_take(*pair) for pair in zip(tasks, chosen, strict=True)] for tasks in controllers))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def _take(scores: Floats, chosen: NDArray[np.int64]) -> Floats:
    """(P, R) and (draws, units) -> (draws, P, R): problems, or the runs of the one problem."""
    return scores[chosen] if len(scores) > 1 else scores[0][chosen][:, None]


def _better(ours: Floats, theirs: Floats) -> Floats:
    """(..., P, R) twice -> (..., P): the share of pairs of runs in which ours is better, half of the level ones included.

    Scores become whole numbers on one line, problem behind problem, so that one search counts what lies under each.
    """
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    runs = ours.shape[-1]
    values, order = np.unique(np.stack([ours, theirs]), return_inverse=True)
    place = order.reshape(2, -1, runs) + len(values) * np.arange(ours.size // runs)[:, None]
    line = np.sort(place[1].ravel())
    under = (np.searchsorted(line, place[0], "left") + np.searchsorted(line, place[0], "right")) / 2
    under -= runs * np.arange(len(under))[:, None]  # what the problems in front hold lies under it too
    return np.asarray(under.mean(1) / runs).reshape(ours.shape[:-1])
