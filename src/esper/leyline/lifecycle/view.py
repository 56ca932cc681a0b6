"""Define the records that the engine and a controller exchange. E environments, S slots, K blueprints in the menu."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.vocabulary import Actions, Blend, Refusal, Vital
from esper.leyline.records import brief

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@brief
class Seeds(NamedTuple):
    """Holds the state of every slot of every environment. Stages and alphas are stored here and nowhere else.

    Attributes:
        stage ((E, S) int8): a `Stage`
        age ((E, S) int32): steps since the slot entered its stage
        life ((E, S) int32): steps since germination; 0 where the slot is empty
        blueprint ((E, S) int16): index into the menu; -1 where the slot is empty
        blend ((E, S) int8): a `Blend`
        alpha ((E, S) float32): strength of the seed, in [0, 1]
        ramp ((E, S, 3) float32): alpha at the start, alpha at the end, length in steps
        doomed ((E, S) bool): whether alpha ramps to 0 and the seed is then pruned
    """

    stage: NDArray[np.int8]
    age: NDArray[np.int32]
    life: NDArray[np.int32]
    blueprint: NDArray[np.int16]
    blend: NDArray[np.int8]
    alpha: NDArray[np.float32]
    ramp: NDArray[np.float32]
    doomed: Bools


@brief
class Transitions(NamedTuple):
    """Lists changes of stage, ordered by environment and slot; every field is (n,)."""

    env: NDArray[np.int64]  # (n,) index of the environment
    slot: NDArray[np.int64]  # (n,) index of the slot
    source: NDArray[np.int8]  # (n,) the `Stage` before
    target: NDArray[np.int8]  # (n,) the `Stage` after


@brief
class Estimate(NamedTuple):
    """Holds the mean of differences per example, with its standard error; both are nan where `measured` is False.

    Attributes:
        mean (float64): mean over the examples; the shape is given where the estimate is a field
        se (float64): standard error of the mean, of the same shape
        measured (bool): whether it was measured, of the same shape
    """

    mean: Floats
    se: Floats
    measured: Bools

    @classmethod
    def absent(cls, *shape: int) -> "Estimate":
        """Return an estimate of this shape that was not measured."""
        return cls(np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool))


@brief
class Measurements(NamedTuple):
    """Holds measurements of the last step. Losses are in nats (regression: squared units); the task defines the metric.

    Attributes:
        metric ((E,) float64): metric on the probe split, at the present doses
        loss ((E,) float64): loss on the probe split, at the present doses
        train_loss ((E,) float64): mean training loss over the batches of the step; nan before the first step
        gradient_norm ((E,) float64): mean gradient norm of the host over the step; nan before the first step
        contribution ((E, S) Estimate): metric minus metric with the slot at dose 0; of live seeds
        contribution_loss ((E, S) Estimate): loss with the slot at dose 0 minus loss; of live seeds
        gain ((E, S) Estimate): loss minus loss with the slot at dose 1; of incubating seeds
        gain_metric ((E, S) Estimate): metric with the slot at dose 1 minus metric; of incubating seeds
        seed_gradient_norm ((E, S) float64): mean gradient norm of each seed over the step; nan where no seed trained
        seed_gradient_finite ((E, S) bool): whether a seed trained and all its gradients were finite
        participation ((E, S) float64): participation ratio of the stream at the slot / width of the stream, in (0, 1]
        sensors ((E, S, F) float64): growth sensors, named in `Space.sensors`; nan before their first measurement
        sensor_age (int): steps since the sensors were computed
        certificate ((E, S) float64): with `gates.certify`, the level at which a seed on trial is certified; 0 where looks refused
            it, and nan before its first look
        level ((E,) float64): what is left of `gates.certify`, below which the next look tests; nan without `gates.certify`
    """

    metric: Floats
    loss: Floats
    train_loss: Floats
    gradient_norm: Floats
    contribution: Estimate
    contribution_loss: Estimate
    gain: Estimate
    gain_metric: Estimate
    seed_gradient_norm: Floats
    seed_gradient_finite: Bools
    participation: Floats
    sensors: Floats
    sensor_age: int
    certificate: Floats
    level: Floats


@brief
class CoalitionValues(NamedTuple):
    """Holds metric and loss of networks with some of their live seeds at dose 0. C coalitions, by environment and bit mask.

    Bit s of a mask is set if slot s keeps its dose. Environments without live seeds have no coalitions.

    Attributes:
        step (int): number of steps taken in the episode
        draw (int): random key of the permutations, if they were sampled
        live ((rows, S) bool): whether the slot held a live seed
        env ((C,) int64): environment of each coalition
        mask ((C,) int64): bit mask of each coalition
        metric ((C,) float64): metric on the probe split
        loss ((C,) float64): loss on the probe split
    """

    step: int
    draw: int
    live: Bools
    env: NDArray[np.int64]
    mask: NDArray[np.int64]
    metric: Floats
    loss: Floats


@brief
class Masks(NamedTuple):
    """Marks the valid decisions. The mask of a later head is indexed by the choices that it depends on.

    Attributes:
        op ((E, O) bool): operations
        slot ((E, O, S) bool): slots, by operation; all False for WAIT
        blueprint ((E, S, K) bool): blueprints, by the slot of a GERMINATE
        blend ((E, S, Bl) bool): blends, by the slot of a GERMINATE
        tempo ((E, O, S, T) bool): entries of `Space.tempos`, by operation and slot
        target ((E, O, S, A) bool): entries of `Space.targets`, by operation and slot
    """

    op: Bools
    slot: Bools
    blueprint: Bools
    blend: Bools
    tempo: Bools
    target: Bools


class BlueprintInfo(NamedTuple):
    """Says what a controller knows of a blueprint in the menu.

    Attributes:
        name (str): name of the blueprint, as `esper blueprints` lists it
        tap (str): what its seeds read: 'here', 'before' or 'input' (see `Tap`)
        sensors (names): growth sensors that tell what its seeds could learn at a slot, in the order of
            `tamiyo.policy.observation.PROSPECTS`
        copies (bool): whether its seeds are further blocks of a stack, as in `esper.Growth`
    """

    name: str
    tap: str
    sensors: tuple[str, ...] = ()
    copies: bool = False


@brief
class Space(NamedTuple):
    """Holds what is constant in an episode: the names behind the indices, and sizes, prices and instances.

    Attributes:
        slots (S names): names of the slots
        blueprints (K BlueprintInfo): the menu
        tempos (T ints): ramp lengths, indexed by `Actions.tempo` [steps]
        targets (A floats): alphas, indexed by `Actions.target`
        cost ((E, S, K) int64): parameters that each blueprint would add at each slot with the blend ADD
        fits ((S, K) bool): whether each blueprint fits each slot
        width ((E, S) int64): features (or channels) of the stream at each slot
        sensors (F names): names of the growth sensors
        max_seeds (int): largest number of seeds in an environment, fossils included (`lifecycle.max_seeds`)
        seed (int): seed of the run
        number ((E,) int64): number of the environment among those of all populations; part of the key of its draws
        instance ((E,) int64): random key of the instance of each environment
        floor ((E,) float64): metric of the best constant prediction on the probe split; nan if unknown
        ceiling ((E,) float64): metric of a perfect prediction on the probe split; nan if unknown
        objective (str): first term of J, 'metric' or 'log_loss' (`reward.objective`)
        rent (float): price of parameters in J (`reward.rent`)
        rent_size (int): a smaller host pays rent as if it had this many parameters (`reward.rent_size`)
        frozen ((E,) bool): whether no parameter of the host trains, so that only seeds do
        blends ((Bl,) bool): whether each `Blend` may be chosen
        heads (int): number of slots behind the last layer (`SlotSpec.head`); they are the last ones
        stacks (S pairs): path of the stack of equal blocks and the place in it that a slot is behind; place -1 where there is
            none, and () where no blocks are added
    """

    slots: tuple[str, ...]
    blueprints: tuple[BlueprintInfo, ...]
    tempos: tuple[int, ...]
    targets: tuple[float, ...]
    cost: NDArray[np.int64]
    fits: Bools
    width: NDArray[np.int64]
    sensors: tuple[str, ...]
    max_seeds: int
    seed: int
    number: NDArray[np.int64]
    instance: NDArray[np.int64]
    floor: Floats
    ceiling: Floats
    objective: Literal["metric", "log_loss"]
    rent: float
    rent_size: int
    frozen: Bools
    blends: Bools = np.ones(len(Blend), bool)
    heads: int = 0
    stacks: tuple[tuple[str, int], ...] = ()


@brief
class View(NamedTuple):
    """Holds all information on which a controller may base its decisions.

    Attributes:
        space (Space): names, sizes, prices and instances
        episode (int): number of the episode, from 0
        step (int): number of steps taken in this episode
        steps (int): length of an episode [steps]
        seeds (Seeds): stage, age and dose of every slot
        masks (Masks): the valid decisions
        measurements (Measurements): measurements of the last step
        coalitions (CoalitionValues or None): the last coalitions that were evaluated; None before the first
        host_params ((E,) int64): parameters of the host
        added_params ((E,) int64): parameters of the seeds in BLENDING, HOLDING or FOSSILIZED
    """

    space: Space
    episode: int
    step: int
    steps: int
    seeds: Seeds
    masks: Masks
    measurements: Measurements
    coalitions: CoalitionValues | None
    host_params: NDArray[np.int64]
    added_params: NDArray[np.int64]


@brief
class Scores(NamedTuple):
    """Holds the scores of each network on the probe split; every field is (E,).

    Attributes:
        metric ((E,) float64): metric on the probe split
        loss ((E,) float64): loss on the probe split
        added_params ((E,) int64): parameters of the seeds in BLENDING, HOLDING or FOSSILIZED
    """

    metric: Floats
    loss: Floats
    added_params: NDArray[np.int64]


@brief
class ComputeShares(NamedTuple):
    """Counts the compute of seeds and of trials since an episode began, as a share of what the host takes in the episode.

    Attributes:
        before ((E,) float64): before a step
        after ((E,) float64): after the step
    """

    before: Floats
    after: Floats


@brief
class Outcome(NamedTuple):
    """Holds the result of one step: the decisions, and the networks before and after.

    Attributes:
        episode (int): number of the episode, from 0
        step (int): number of the step, from 0
        actions (Actions): the decisions of the controller
        refused ((E,) int8): a `Refusal`; NONE where the decision was carried out
        vital ((E,) int8): a `Vital`; where it is not GOOD, the row was restored to its last snapshot, and `after` describes
            the restored row
        before (Scores): the network before the step
        after (Scores): the network after the step
        host_params ((E,) int64): parameters of the host
        terminal (bool): whether the episode ended, for every environment
        exported (Scores or None): at the end of an episode, the networks that would be exported, in which every seed that is not
            fossilized has dose 0; None before the end
        seeds (Seeds): every slot after the step
        contribution ((E, S) Estimate): of a live seed that after the step, as in `Measurements`; of a seed that was kept, and so
            is not measured any more, the last one of its trial
        contribution_loss ((E, S) Estimate): the same of the loss
        twin (two Scores or None): the never-grow twins before and after the step; None without twins
        compute (ComputeShares or None): compute of seeds and trials before and after the step; None if it was not counted
        contribution_age ((E, S) int32 or None): steps since the contribution was measured, 0 after this step and more for a
            seed that was kept; -1 where there is none; None if it was not counted
    """

    episode: int
    step: int
    actions: Actions
    refused: NDArray[np.int8]
    vital: NDArray[np.int8]
    before: Scores
    after: Scores
    host_params: NDArray[np.int64]
    terminal: bool
    exported: Scores | None
    seeds: Seeds
    contribution: Estimate
    contribution_loss: Estimate
    twin: tuple[Scores, Scores] | None
    compute: ComputeShares | None = None
    contribution_age: NDArray[np.int32] | None = None

    @property
    def accepted(self) -> Bools:
        """(E,) bool: whether the decision was carried out."""
        return np.asarray(self.refused == Refusal.NONE)

    @property
    def ended(self) -> Bools:
        """(E,) bool: whether the sequence of decisions ends with this step, by the end of the episode or by a rollback."""
        return np.asarray(self.rolled_back | self.terminal)

    @property
    def rolled_back(self) -> Bools:
        """(E,) bool: whether the row was restored to its last snapshot because the step failed."""
        return np.asarray(self.vital != Vital.GOOD)


def map_arrays(function: Callable[..., Any], *records: Any) -> Any:
    """Return the last record, nested or not, with each array replaced by `function` of that array in all records.

    The records are tuples of one type; other values than arrays are unchanged.
    """
    last = records[-1]
    if isinstance(last, tuple):
        fields = [map_arrays(function, *each) for each in zip(*records, strict=True)]
        return tuple(fields) if type(last) is tuple else type(last)(*fields)
    return function(*records) if isinstance(last, np.ndarray) else last


def take(record: Any, rows: slice | NDArray[np.int64]) -> Any:
    """Return a record of arrays (E, ...) indexed along the leading axis."""
    return map_arrays(lambda array: array[rows], record)


def choose(rows: Bools, one: Any, other: Any) -> Any:
    """Compute `np.where(rows, one, other)` for records of arrays (E, ...); rows is (E,) bool, scalars are from `other`."""
    return map_arrays(lambda x, y: np.where(rows.reshape(-1, *(1,) * (y.ndim - 1)), x, y), one, other)


MISSING = "missing"
"""The growth sensor of a network in a loop of a person's own: what its layers cannot follow (`esper.tolaria.live.missing`)."""


def sensor(view: View, name: str) -> Floats:
    """Return the values (E, S) of a growth sensor; nan where the space does not have it."""
    if name not in view.space.sensors:
        return np.full(view.seeds.stage.shape, np.nan)
    return view.measurements.sensors[..., view.space.sensors.index(name)]


def read_only(record: Any) -> Any:
    """Return the record with read-only views of its arrays."""

    def protected(array: NDArray[Any]) -> NDArray[Any]:
        view = array.view()
        view.setflags(write=False)
        return view

    return map_arrays(protected, record)
