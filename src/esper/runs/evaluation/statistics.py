"""Estimate figures with 95 % intervals for controllers that grew the same instances with the same seeds.

P problems, R runs of each. The scores of one task are an array (P, R), and several tasks are a sequence of arrays. A
mixture has many problems, with one run per seed. A data set is one problem, and every start is a run.

The interquartile mean, the probability of improvement and the stratified percentile bootstrap follow Agarwal et al.,
"Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021, sections 4.1 and 4.3, and their
library rliable, which calls a problem a task. There is one difference. The bootstrap must resample the units that were
sampled independently. For rliable these are the runs. The problems of a mixture are a sample themselves, and the runs of
one problem are correlated, so resampling runs alone would give intervals that are too narrow for the mixture. Here
problems are resampled, each with all of its runs (Davison and Hinkley, "Bootstrap Methods and their Application", 1997,
section 3.8, on hierarchical data). Runs are resampled only where a task is one problem. Controllers that are compared are
resampled together, because they are paired.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tasks = Sequence[Floats]
"""One array (..., P, R) per task. The leading axes are those of bootstrap samples."""

DRAWS = 2000
"""Number of bootstrap samples."""
CONFIDENCE = 0.95
AT_ONCE = 10**6
"""Approximate number of scores of bootstrap samples that are in memory at a time."""


class Interval(NamedTuple):
    """Holds an estimate and the bounds of its interval; nan where they cannot be computed."""

    value: float
    low: float
    high: float


def mean(tasks: Tasks) -> Floats:
    """Compute the mean (...) over tasks of the mean over problems and runs."""
    return np.asarray(np.mean([scores.mean((-2, -1)) for scores in tasks], axis=0))


def interquartile_mean(tasks: Tasks) -> Floats:
    """Compute the mean (...) of the middle half of all scores: of n, floor(n / 4) are left out at each end."""
    values = np.sort(np.concatenate([scores.reshape(*scores.shape[:-2], -1) for scores in tasks], axis=-1), axis=-1)
    cut = values.shape[-1] // 4
    return np.asarray(values[..., cut : values.shape[-1] - cut].mean(-1))


def mean_difference(ours: Tasks, theirs: Tasks) -> Floats:
    """Compute the mean (...) over tasks of the paired differences ours - theirs."""
    return mean([a - b for a, b in zip(ours, theirs, strict=True)])


def probability_of_improvement(ours: Tasks, theirs: Tasks) -> Floats:
    """Compute P(X > Y) + P(X = Y) / 2, (...), for independent runs X of ours and Y of theirs on one problem.

    The estimate is the Mann-Whitney statistic U / R^2, averaged over the problems of a task and then over tasks.
    """
    from scipy.stats import mannwhitneyu  # type: ignore[import-untyped]  # imported here because it takes 1 s

    found = [mannwhitneyu(a, b, axis=-1, method="asymptotic").statistic for a, b in zip(ours, theirs, strict=True)]
    return mean([each[..., None] / own.shape[-1] / own.shape[-1] for each, own in zip(found, ours, strict=True)])


def interval(
    statistic: Callable[..., Floats], *controllers: Tasks, draws: int = DRAWS, seed: int = 0, trainings: int = 1
) -> Interval:
    """Compute a statistic of the scores of one or more controllers, with percentile bounds from a stratified bootstrap.

    Each task is a stratum. A bootstrap sample has the same problems (or runs, where a task is one problem) for all
    controllers. All three numbers are nan where a score is nan. The bounds are nan where a task has a single unit, or where
    the statistic of a sample is nan.

    trainings: number of trainings of the same controller; the runs of a problem are those of one training after the other. A
    bootstrap sample then has trainings and problems that are both drawn with replacement, the same trainings for all
    problems and tasks (Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1, 2007). Scores of a controller
    without trainings are repeated for every training.
    """
    assert controllers
    shapes = [scores.shape for scores in controllers[0]]
    assert all([scores.shape for scores in tasks] == shapes for tasks in controllers), "scores must be paired"
    if any(np.isnan(scores).any() for tasks in controllers for scores in tasks):
        return Interval(np.nan, np.nan, np.nan)
    value = float(statistic(*controllers))
    units = [problems if problems > 1 else runs // trainings for problems, runs in shapes]
    if min(units) < 2:
        return Interval(value, np.nan, np.nan)
    random, drawn = np.random.default_rng(seed), np.zeros(draws)
    batch = 1 + AT_ONCE // sum(problems * runs for problems, runs in shapes)
    for start in range(0, draws, batch):
        some = drawn[start : start + batch]
        chosen = [random.integers(count, size=(len(some), count)) for count in units]
        which = random.integers(trainings, size=(len(some), trainings))
        samples = [[_take(*pair, which) for pair in zip(tasks, chosen, strict=True)] for tasks in controllers]
        some[:] = statistic(*samples)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def _take(scores: Floats, chosen: NDArray[np.int64], which: NDArray[np.int64]) -> Floats:
    """Map scores (P, T R), chosen (draws, units), which (draws, T) -> (draws, P, T R).

    Units are problems, or the runs of a single problem; which are trainings.
    """
    problems, trainings = len(scores), which.shape[1]
    by_training = scores.reshape(problems, trainings, -1).swapaxes(0, 1)  # (T, P, R)
    if problems > 1:
        taken = by_training[which[:, None], chosen[:, :, None]]  # (draws, P, T, R)
    else:
        taken = by_training[which[:, :, None], 0, chosen[:, None]][:, None]  # (draws, 1, T, R)
    return np.asarray(taken.reshape(len(which), problems, -1))
