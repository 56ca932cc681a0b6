"""The vital signs of a population and what they say: arrays in, arrays out. E rows, S slots, W losses of history.

A row is judged by its own numbers and its own past alone, so what is found of it does not depend on the others.
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
"""Signs that must last for `patience` steps, the most telling first."""


class Signs(NamedTuple):
    """What a step showed of every row; each field is (E,)."""

    loss: Floats  # on the probe split
    metric: Floats  # likewise
    metric_se: Floats  # standard error of its mean over examples
    spread: Floats  # standard deviation of the outputs over examples, root mean square over outputs
    train_loss: Floats  # mean over the step's batches; nan where none was trained
    gradient: Bools  # every gradient of the host and of its seeds was finite
    parameter: Bools  # every parameter of the host and of its seeds is


class History(NamedTuple):
    """What a row is held against; nan where nothing is known yet."""

    first: Floats  # (E,) loss on the probe split before training
    loss: Floats  # (E, W) the last training losses that were no strike, the newest first
    best: Floats  # (E,) metric
    best_se: Floats  # (E,)
    spread: Floats  # (E,) the largest
    strikes: NDArray[np.int64]  # (E, 3) steps in a row that each of the `PATIENT` signs has lasted

    @classmethod
    def begin(cls, signs: Signs, config: GovernorConfig) -> "History":
        """The history of fresh networks."""
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
        """Forget all of some rows, (E,) bool, but the loss before training."""
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
    """What is wrong with each row after a step, (E,) a `Vital`, and the history that the next step is held against.

        RISE      train_loss - median > loss_rise_z * max(1.4826 MAD, min_loss_std * first)      of the row's last losses
        COLLAPSE  spread < collapse * largest spread so far,  and  train_loss - median > min_loss_std * first
        FALL      best - metric > max(metric_drop_z * sqrt(se^2 + se_best^2), min_metric_drop)

    1.4826 MAD estimates the standard deviation of a normal sample and is not moved by single large losses (Rousseeuw and
    Croux, "Alternatives to the median absolute deviation", 1993, section 1). A sign that has not lasted yet is a strike: the
    row's numbers are kept out of its history, and no snapshot is taken of it. A row's loss is compared with no median of fewer
    than `confirm_steps` losses, as one lucky loss would then stay its measure. A network that never told its examples apart loses
    nothing by not doing so, hence the second condition of a collapse. The loss on the probe split is not held against its
    history, since it may rise for a whole episode while a network learns its training examples by heart.
    """
    known = ~np.isnan(history.loss)
    count, least = known.sum(1), min(config.confirm_steps, config.loss_window)
    filled = np.where(known, history.loss, np.inf)  # a median over a row's own number of losses
    middle = np.where(count < least, np.nan, _median(filled, count))
    deviation = np.where(known, np.abs(history.loss - middle[:, None]), np.inf)
    scale = np.maximum(1.4826 * _median(deviation, count), config.min_loss_std * history.first)
    noise = np.sqrt(signs.metric_se**2 + history.best_se**2)
    with np.errstate(invalid="ignore"):  # what is not known compares False
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
    """(E,) rows of which a seed's dose was lowered: what then gets worse does so by a decision, and is no failure.

    The dose of a ramp is set one step ahead: the first training at the last dose of a ramp down comes when that dose is no
    news any more.
    """
    start, end = before.ramp[..., 0], before.ramp[..., 1]
    falling = (before.stage == Stage.BLENDING) & (end < start)
    return np.asarray((falling | (doses(after) < doses(before))).any(1))


def _median(values: Floats, count: NDArray[np.int64]) -> Floats:
    """(E, W) with inf for what is not there -> (E,) the medians of each row's `count` (E,) values, nan where there is none."""
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, (low + high) / 2, np.nan)


def remembered(history: History, signs: Signs, rows: Bools) -> History:
    """The history with the signs of some rows, (E,) bool, taken into it."""
    column = rows[:, None]
    better = rows & ~np.isnan(signs.metric) & ~(signs.metric <= history.best)  # also where there is no best yet
    return history._replace(
        loss=np.where(column, np.concatenate([signs.train_loss[:, None], history.loss[:, :-1]], 1), history.loss),
        best=np.where(better, signs.metric, history.best),
        best_se=np.where(better, signs.metric_se, history.best_se),
        spread=np.where(rows, np.fmax(signs.spread, history.spread), history.spread),
    )
