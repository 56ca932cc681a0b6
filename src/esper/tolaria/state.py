"""The state of an engine between two steps, without its population. E environments, S slots."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions
from esper.leyline.brief import brief
from esper.leyline.stages import Stage
from esper.leyline.view import CoalitionValues, Estimate, Floats, Masks, Measurements, Scores, Seeds, map_arrays
from esper.tolaria.compute import Compute


@brief
class Opened(NamedTuple):
    """The decisions of a step that has begun, and the state before them.

    Attributes:
        actions ((E,) Actions): the decisions
        refused ((E,) int8): a `Refusal` for each
        before ((rows,) Scores): the scores after the step before
        decided ((rows, S) Seeds): the seeds before the decisions were carried out
    """

    actions: Actions
    refused: NDArray[np.int8]
    before: Scores
    decided: Seeds


@brief
class Contributions(NamedTuple):
    """The last measured contribution of every seed that acts. One of a kept seed is from its trial, as it is not measured later.

    Attributes:
        metric ((E, S) Estimate): `Measurements.contribution` when it was measured last
        loss ((E, S) Estimate): `Measurements.contribution_loss` at that time
        age ((E, S) int32): steps since then; -1 where none was measured, or the seed is gone
    """

    metric: Estimate
    loss: Estimate
    age: NDArray[np.int32]

    @classmethod
    def none(cls, rows: int, slots: int) -> "Contributions":
        """No contributions, for the start of an episode."""
        return cls(Estimate.absent(rows, slots), Estimate.absent(rows, slots), np.full((rows, slots), -1, np.int32))

    def after(self, stage: NDArray[np.int8], measured: Measurements) -> "Contributions":
        """The contributions after a further step, from what it measured and the stages (E, S) in which it left the seeds."""
        fresh = measured.contribution.measured
        last = (stage == Stage.FOSSILIZED) & ~fresh & (self.age >= 0)
        now = np.where(fresh, 0, -1).astype(np.int32)
        measurement = Contributions(measured.contribution, measured.contribution_loss, now)
        kept: Contributions = map_arrays(lambda old, new: np.where(last, old, new), self, measurement)
        return kept._replace(age=np.where(last, self.age + 1, now).astype(np.int32))


@brief
@dataclass
class ParallelEnvState:
    """The state of an engine between two steps, without the networks and their data, which the population holds.

    Rows are the environments, then their twins, then a ghost, whose results are ignored, if there would be one row
    alone.
    """

    seeds: Seeds  # (rows, S)
    instance: NDArray[np.int64]  # (rows,) key of a row's host, data order and initial weights
    measurements: Measurements  # of the last step
    coalitions: CoalitionValues | None  # of the last step at which attribution was due
    scores: Scores  # (rows,) of the last step
    masks: Masks  # (rows, ...) for the next decision
    episode: int
    step: int  # steps taken in the episode
    compute: Compute  # (rows,) beyond that of the hosts in the steps of the episode
    contributions: Contributions  # (rows, S) the last of every seed that acts
    trial: Floats | None = None  # (rows,) compute of the copies that were tried since the last step
    opened: Opened | None = None  # the step between `apply` and `close`
