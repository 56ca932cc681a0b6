"""Detect rows that failed, roll them back, and refuse operations before they are applied. E rows, S slots, W losses of history.

At every step the governor compares the vital signs of each row with the row's own history, takes snapshots of healthy rows, and
restores the others to their last snapshots. All computations are array operations over rows, and none depends on another row.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.lifecycle import doses
from esper.leyline.config.tree import GovernorConfig, GrowthConfig
from esper.leyline.lifecycle.masks import allowed
from esper.leyline.lifecycle.view import Bools, Floats, Masks, Seeds, choose
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Actions, Op, Refusal, Stage, Vital, among
from esper.tolaria.population import Keeper, Population
from esper.tolaria.runtime import available_memory

PATIENT = (Vital.RISE, Vital.COLLAPSE, Vital.FALL)
"""Failures that must last for `confirm_steps` steps. The first of several is reported."""


class Signs(NamedTuple):
    """Holds the vital signs of every row after a step; each field is (E,)."""

    loss: Floats  # loss on the probe split
    metric: Floats  # metric on the probe split
    metric_se: Floats  # standard error of the metric
    spread: Floats  # standard deviation of the outputs over examples, root mean square over outputs
    train_loss: Floats  # mean loss over the batches of the step; nan where the row was not trained
    gradient: Bools  # whether every gradient of the host and its seeds was finite
    parameter: Bools  # whether every parameter of the host and its seeds is finite


class VitalHistory(NamedTuple):
    """Holds the history with which the signs of a row are compared; nan where a value is not known."""

    first: Floats  # (E,) loss on the probe split before training
    loss: Floats  # (E, W) last training losses of healthy steps, newest first
    best: Floats  # (E,) best metric
    best_se: Floats  # (E,) standard error of the best metric
    spread: Floats  # (E,) largest spread
    strikes: NDArray[np.int64]  # (E, 3) number of consecutive steps for which each failure of `PATIENT` has lasted

    @classmethod
    def empty(cls, first: Floats, window: int) -> "VitalHistory":
        """Return a history of no step."""
        nothing, strikes = np.full(len(first), np.nan), np.zeros((len(first), len(PATIENT)), np.int64)
        return cls(first, np.full((len(first), window), np.nan), nothing, nothing, nothing, strikes)

    @classmethod
    def begin(cls, signs: Signs, config: GovernorConfig) -> "VitalHistory":
        return remembered(cls.empty(signs.loss, config.loss_window), signs, np.ones(len(signs.loss), bool))

    def restart(self, rows: Bools) -> "VitalHistory":
        """Return the history, emptied in the rows that are marked in `rows` (E,) except for the loss before training."""
        return choose(rows, VitalHistory.empty(self.first, self.loss.shape[1]), self)


def examine(history: VitalHistory, signs: Signs, config: GovernorConfig) -> tuple[VitalHistory, NDArray[np.int8]]:
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
    """Compute medians: values (E, W), with inf after the `count` (E,) values of a row -> (E,); nan where count is 0."""
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, (low + high) / 2, np.nan)


def remembered(history: VitalHistory, signs: Signs, rows: Bools) -> VitalHistory:
    """Return the history with the signs of the rows that are marked in `rows` (E,)."""
    column = rows[:, None]
    better = rows & ~np.isnan(signs.metric) & ~(signs.metric <= history.best)  # true where best is nan
    return history._replace(
        loss=np.where(column, np.concatenate([signs.train_loss[:, None], history.loss[:, :-1]], 1), history.loss),
        best=np.where(better, signs.metric, history.best),
        best_se=np.where(better, signs.metric_se, history.best_se),
        spread=np.where(rows, np.fmax(signs.spread, history.spread), history.spread),
    )


Verdicts = NDArray[np.int8]
"""A `Vital` or a `Refusal` for every row, (E,) int8."""
Counts = dict[str, dict[str, int]]
"""Numbers of rollbacks and refusals by reason, under the keys `rollbacks` and `refused`."""


class GovernorRecord(NamedTuple):
    """Counts rollbacks and refusals, int64."""

    rollbacks: NDArray[np.int64]  # (E,) rollbacks of each row in this episode
    found: NDArray[np.int64]  # (vitals,) rollbacks by `Vital` since the engine was created, twins included
    refused: NDArray[np.int64]  # (refusals,) refused decisions by `Refusal` since the engine was created

    @classmethod
    def empty(cls, rows: int) -> "GovernorRecord":
        return cls(np.zeros(rows, np.int64), np.zeros(len(Vital), np.int64), np.zeros(len(Refusal), np.int64))

    def counts(self) -> Counts:
        return {"rollbacks": _by_name(self.found, Vital), "refused": _by_name(self.refused, Refusal)}


class Governor:
    """Holds the history and the snapshots of the rows of a population, and rolls rows back."""

    def __init__(self, keeper: Keeper, real: int, config: GrowthConfig) -> None:
        """real: number of rows that are counted, from the first; the padding rows after them are not."""
        self.config, self.max_seeds, self.keeper = config.governor, config.lifecycle.max_seeds, keeper
        rows = len(keeper.step)
        self.history = VitalHistory.empty(np.full(rows, np.nan), config.governor.loss_window)
        self.record = GovernorRecord.empty(rows)
        self._real = np.arange(rows) < real

    def begin(self, seeds: Seeds, signs: Signs) -> None:
        """Begin an episode. `signs` are those of the newly initialised hosts."""
        self.record.rollbacks[:] = 0
        if self.config.enabled:
            self.history = VitalHistory.begin(signs, self.config)
            self.keeper.take(seeds, np.ones(len(seeds.stage), bool), 0)

    def preflight(self, population: Population, seeds: Seeds, actions: Actions, masks: Masks) -> Verdicts:
        """Return a `Refusal` for every row (E,), and count them. Seeds of a step that do not fit into memory are all refused."""
        refused = np.full(len(seeds.stage), Refusal.NONE, np.int8)
        plants, legal = actions.op == Op.GERMINATE, allowed(masks, actions)
        full = among(seeds.stage, IN_BUDGET).sum(1) >= self.max_seeds
        refused[~legal] = Refusal.MASKED
        refused[~legal & plants & full] = Refusal.SEED_CAP
        if len(env := np.flatnonzero(legal & plants)):
            slot, blueprint = actions.slot[env], actions.blueprint[env]
            if self.config.param_limit is not None:
                price = population.table.price(env, slot, blueprint, actions.blend[env])
                whole = population.table.added_params(seeds, IN_BUDGET)[env] + price
                refused[env[whole > self.config.param_limit * population.host_params[env]]] = Refusal.PARAM_BUDGET
            left = refused[env] == Refusal.NONE
            needed = population.growth(env[left], slot[left], blueprint[left])
            if needed and needed > self.config.memory_share * available_memory(population.device):
                refused[env[left]] = Refusal.MEMORY
        np.add.at(self.record.refused, refused[self._real], 1)
        return refused

    def inspect(self, before: Seeds, after: Seeds, signs: Signs) -> Verdicts:
        """Examine every row after a step that changed the seeds from `before` to `after`. Returns (E,) a `Vital`."""
        if not self.config.enabled:
            return np.full(len(after.stage), Vital.GOOD, np.int8)
        self.history, found = examine(self.history.restart(lowered(before, after)), signs, self.config)
        return found

    def resume(self, found: Verdicts, signs: Signs) -> None:
        """Count the rows that were rolled back, and restart their histories with the signs of the restored rows."""
        rows = found != Vital.GOOD
        self.record.rollbacks[rows] += 1
        np.add.at(self.record.found, found[rows & self._real], 1)
        self.history = remembered(self.history.restart(rows), signs, rows)

    def keep(self, seeds: Seeds, found: Verdicts, step: int) -> None:
        """Take snapshots of healthy rows, where they are due, and of the rows that were rolled back in this step."""
        if not self.config.enabled:
            return
        well = ~self.history.strikes.any(1) & (step % self.config.snapshot_every == 0)
        self.keeper.take(seeds, well | (found != Vital.GOOD), step)

    def state(self, step: int) -> dict[str, Any]:
        """Return the record, the history and the snapshots, as a tree of arrays, after `step` steps of the episode."""
        return {
            "record": self.record._asdict(),
            "history": self.history._asdict() if self.config.enabled else None,
            "snapshot": self.keeper.state(step) if self.config.enabled else None,
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Restore a `state`. Population and seeds must have been restored already. Raises ValueError if they do not fit."""
        self.record = GovernorRecord(**state["record"])
        if self.config.enabled:
            self.history = VitalHistory(**state["history"])
            self.keeper.load_state(state["snapshot"], seeds)


def _by_name(counts: NDArray[np.int64], kind: type[Vital] | type[Refusal]) -> dict[str, int]:
    return {kind(index).name.lower(): int(count) for index, count in enumerate(counts) if index and count}
