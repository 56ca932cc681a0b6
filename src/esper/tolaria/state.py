"""The state of an engine between two steps, without its population. E environments, S slots."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions
from esper.leyline.brief import brief
from esper.leyline.view import CoalitionValues, Floats, Masks, Measurements, Scores, Seeds
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
    trial: Floats | None = None  # (rows,) compute of the copies that were tried since the last step
    opened: Opened | None = None  # the step between `apply` and `close`
