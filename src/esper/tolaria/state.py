"""What an engine keeps of its population between two steps. E environments, S slots."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions
from esper.leyline.brief import brief
from esper.leyline.view import CoalitionValues, Masks, Measurements, Scores, Seeds


@brief
class Opened(NamedTuple):
    """A step under way: what was decided, and what it was decided on.

    Attributes:
        actions ((E,) Actions): the decisions
        refused ((E,) int8): a `Refusal` each
        before ((rows,) Scores): of the step before
        decided ((rows, S) Seeds): before the decisions were carried out
    """

    actions: Actions
    refused: NDArray[np.int8]
    before: Scores
    decided: Seeds


@brief
@dataclass
class ParallelEnvState:
    """What an engine knows of its population between two steps; the networks and their data are the population's own.

    Rows are the environments, then their twins, then, where there would be one row alone, a ghost that nobody sees.
    """

    seeds: Seeds  # (rows, S)
    instance: NDArray[np.int64]  # (rows,) which host, data order and births a row has
    measurements: Measurements  # of the last step
    coalitions: CoalitionValues | None  # of the last step at which they were due
    scores: Scores  # (rows,) of the last step
    masks: Masks  # (rows, ...) of the next decision
    episode: int
    step: int  # steps taken in the episode
    opened: Opened | None = None  # the step between `apply` and `close`
