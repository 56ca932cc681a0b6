"""The vital signs of a population, and the detection of failures. E rows, S slots, W losses of history.

A row is judged by its own signs and its own history, so the result does not depend on other rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config import GovernorConfig
from esper.leyline.stages import Stage
from esper.leyline.verdicts import Vital
from esper.leyline.view import Bools, Floats, Seeds
from esper.tolaria.training import doses

PATIENT = (Vital.RISE, Vital.COLLAPSE, Vital.FALL)
"""Failures that must last for `confirm_steps` steps. The first of several is reported."""


class Signs(NamedTuple):
    """The vital signs of every row after a step; each field is (E,).

    Attributes:
        loss (array): loss on the probe split
        metric (array): metric on the probe split
        metric_se (array): standard error of the metric
        spread (array): standard deviation of the outputs over examples, root mean square over outputs
        train_loss (array): mean loss over the batches of the step; nan where the row was not trained
        gradient (bool array): whether every gradient of the host and its seeds was finite
        parameter (bool array): whether every parameter of the host and its seeds is finite
    """

    loss: Floats
    metric: Floats
    metric_se: Floats
    spread: Floats
    train_loss: Floats
    gradient: Bools
    parameter: Bools


class History(NamedTuple):
    """The history with which the signs of a row are compared; nan where a value is not known.

    Attributes:
        first ((E,) array): loss on the probe split before training
        loss ((E, W) array): last training losses of healthy steps, newest first
        best ((E,) array): best metric
        best_se ((E,) array): standard error of the best metric
        spread ((E,) array): largest spread
        strikes ((E, 3) int64 array): number of consecutive steps for which each failure of `PATIENT` has lasted
    """

    first: Floats
    loss: Floats
    best: Floats
    best_se: Floats
    spread: Floats
    strikes: NDArray[np.int64]

    @classmethod
    def begin(cls, signs: Signs, config: GovernorConfig) -> "History":
        """Return the history of newly initialised networks."""
        rows = len(signs.loss)
        nothing = np.full(rows, np.nan)
        empty = cls(
            first=signs.loss,
            loss=np.full((rows, config.loss_window), np.nan),
            best=nothing,
            best_se=nothing,
            spread=nothing,
            strikes=np.zeros((rows, len(PATIENT)), np.int64),
        )
        return remembered(empty, signs, np.ones(rows, bool))

    def restart(self, rows: Bools) -> "History":
        """Return the history, emptied in the rows that are marked in `rows` (E,) except for the loss before training."""
        column = rows[:, None]
        return History(
            first=self.first,
            loss=np.where(column, np.nan, self.loss),
            best=np.where(rows, np.nan, self.best),
            best_se=np.where(rows, np.nan, self.best_se),
            spread=np.where(rows, np.nan, self.spread),
            strikes=np.where(column, 0, self.strikes),
        )


def examine(history: History, signs: Signs, config: GovernorConfig) -> tuple[History, NDArray[np.int8]]:
    """Examine the signs of a step. Returns the history for the next step, and a `Vital` for every row, (E,) int8.

        RISE      train_loss - median > loss_rise_z * max(1.4826 MAD, min_loss_std * first)      of the row's last losses
        COLLAPSE  spread < min_output_spread * largest spread so far,  and  train_loss - median > min_loss_std * first
        FALL      best - metric > max(metric_drop_z * sqrt(se^2 + se_best^2), min_metric_drop)

    1.4826 MAD estimates the standard deviation of a normal sample and is robust to single large losses (Rousseeuw and
    Croux, "Alternatives to the median absolute deviation", 1993, section 1). A failure that has lasted for fewer than
    `confirm_steps` steps is a strike: the signs of the step do not enter the history, and no snapshot is taken. A loss is
    compared only with a median of at least `confirm_steps` losses, because a single low loss would be no reliable
    reference. The second condition of COLLAPSE excludes networks that never distinguished their examples. The loss on the
    probe split has no rule, because it can rise throughout an episode while a network overfits.
    """
    known = ~np.isnan(history.loss)
    count, least = known.sum(1), min(config.confirm_steps, config.loss_window)
    filled = np.where(known, history.loss, np.inf)
    middle = np.where(count < least, np.nan, _median(filled, count))
    deviation = np.where(known, np.abs(history.loss - middle[:, None]), np.inf)
    scale = np.maximum(1.4826 * _median(deviation, count), config.min_loss_std * history.first)
    noise = np.sqrt(signs.metric_se**2 + history.best_se**2)
    with np.errstate(invalid="ignore"):  # a comparison with nan is False
        rise = signs.train_loss - middle
        struck = np.stack(
            [
                rise > config.loss_rise_z * scale,
                (signs.spread < config.min_output_spread * history.spread)
                & (rise > config.min_loss_std * history.first),
                history.best - signs.metric > np.maximum(config.metric_drop_z * noise, config.min_metric_drop),
            ],
            1,
        )
    strikes = np.where(struck, history.strikes + 1, 0)
    found = np.full(len(signs.loss), Vital.GOOD, np.int8)
    for at, vital in reversed(list(enumerate(PATIENT))):
        found[strikes[:, at] >= config.confirm_steps] = vital
    found[~np.isfinite(signs.metric)] = Vital.METRIC
    found[~signs.parameter] = Vital.PARAMETER
    found[~signs.gradient] = Vital.GRADIENT
    found[~(np.isfinite(signs.loss) & np.isfinite(signs.train_loss))] = Vital.LOSS
    return remembered(history._replace(strikes=strikes), signs, ~struck.any(1) & (found == Vital.GOOD)), found


def lowered(before: Seeds, after: Seeds) -> Bools:
    """Return (E,) whether the dose of a seed was lowered. A row that gets worse by such a decision has not failed.

    The dose of a ramp is set one step ahead, so a ramp down is also recognised by the stage before the step.
    """
    start, end = before.ramp[..., 0], before.ramp[..., 1]
    falling = (before.stage == Stage.BLENDING) & (end < start)
    return np.asarray((falling | (doses(after) < doses(before))).any(1))


def _median(values: Floats, count: NDArray[np.int64]) -> Floats:
    """values (E, W), with inf after the `count` (E,) values of a row -> (E,) medians of these values; nan where count is 0."""
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, (low + high) / 2, np.nan)


def remembered(history: History, signs: Signs, rows: Bools) -> History:
    """Return the history with the signs of the rows that are marked in `rows` (E,)."""
    column = rows[:, None]
    better = rows & ~np.isnan(signs.metric) & ~(signs.metric <= history.best)  # true where best is nan
    return history._replace(
        loss=np.where(column, np.concatenate([signs.train_loss[:, None], history.loss[:, :-1]], 1), history.loss),
        best=np.where(better, signs.metric, history.best),
        best_se=np.where(better, signs.metric_se, history.best_se),
        spread=np.where(rows, np.fmax(signs.spread, history.spread), history.spread),
    )
