"""What a report shows of a run, as records of arrays. T steps, E environments, S slots, K blueprints.

A quantity that a run did not measure, or did not record, is None or nan, never 0.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.stages import Stage

Floats = NDArray[np.float64]
NO_SEED = -1


class Stay(NamedTuple):
    """A run of steps in which one slot of one environment is in one stage.

    Attributes:
        env (int): environment
        slot (int): index of the slot
        start (int): first step
        stop (int): one past the last step
        stage (Stage): the stage
        blueprint (str or None): the seed in the slot
        alpha (float): the dose at the end of the stay
        why (str or None): why the seed was planted, kept or pruned, where the stay begins with that
    """

    env: int
    slot: int
    start: int
    stop: int
    stage: Stage
    blueprint: str | None
    alpha: float
    why: str | None


class SeedMark(NamedTuple):
    """A seed that was planted (GERMINATED) or removed (PRUNED). Neither stage lasts as long as a step.

    Attributes:
        env (int): environment
        slot (int): index of the slot
        step (int): step
        planted (bool): true if it was planted, false if it was removed
        blueprint (str or None): the seed
        why (str or None): the reason
    """

    env: int
    slot: int
    step: int
    planted: bool
    blueprint: str | None
    why: str | None


class Population(NamedTuple):
    """The steps of an episode.

    Attributes:
        steps ((T,) int): numbers of the steps
        metric ((T, E) float): task metric on the probe split
        loss ((T, E) float): loss on the probe split
        train_loss ((T, E) float): mean loss over the batches of the step
        twin ((T, E) float or None): metric of the networks that never grow; None without twins
        added ((T, E) int): parameters of the seeds in BLENDING, HOLDING or FOSSILIZED
        stage ((T, E, S) int8): stage of every slot
        alpha ((T, E, S) float): dose of every slot
        seed ((T, E, S) int): index of the blueprint in the slot, NO_SEED if there is none
    """

    steps: NDArray[np.int64]
    metric: Floats
    loss: Floats
    train_loss: Floats
    twin: Floats | None
    added: NDArray[np.int64]
    stage: NDArray[np.int8]
    alpha: Floats
    seed: NDArray[np.int64]


class Worths(NamedTuple):
    """What seeds were worth, of the episode of the population. R rows, in the order in which they were measured.

    Attributes:
        steps ((R,) int): numbers of the steps
        contribution ((R, E, S) float): contribution of every seed to the metric
        shapley ((E, S) float or None): the last Shapley value of every seed, after the last step at which coalitions were
            measured there; None if they never were
        interaction ((E, S, S) float or None): the last interaction of every pair of seeds; None likewise
    """

    steps: NDArray[np.int64]
    contribution: Floats
    shapley: Floats | None
    interaction: Floats | None


class Sensed(NamedTuple):
    """The growth sensors, of the episode of the population. R rows, F sensors.

    Attributes:
        steps ((R,) int): steps after which they were measured
        names (names): (F,) the sensors
        medians ((R, S, F) float): medians over environments
    """

    steps: NDArray[np.int64]
    names: Sequence[str]
    medians: Floats


class Times(NamedTuple):
    """Where the time went, of the episode of the population. R rows.

    Attributes:
        steps ((R,) int): last step of each row
        seconds (mapping): by phase, (R,) seconds
    """

    steps: NDArray[np.int64]
    seconds: Mapping[str, Floats]
