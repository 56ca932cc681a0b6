"""The records that the engine and a controller exchange. E environments, S slots, K blueprints of the menu."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Blend
from esper.leyline.brief import brief
from esper.leyline.verdicts import Refusal, Vital

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@brief
class Seeds(NamedTuple):
    """Every slot of every environment: the only place where a stage or an alpha is stored.

    Attributes:
        stage ((E, S) int8): a `Stage`
        age ((E, S) int32): steps in the present stage
        life ((E, S) int32): steps since germination; 0 where the slot is empty
        blueprint ((E, S) int16): index into the menu; -1 where the slot is empty
        blend ((E, S) int8): a `Blend`
        alpha ((E, S) float32): dose of the seed in this step's training, in [0, 1]
        ramp ((E, S, 3) float32): alpha at the start, alpha at the end, length in steps
        doomed ((E, S) bool): whether the seed ramps down in order to be pruned
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
    """Changes of stage, in order of environment and slot; every field is (n,).

    Attributes:
        env ((n,) int64): index of the environment
        slot ((n,) int64): index of the slot
        source ((n,) int8): the `Stage` before
        target ((n,) int8): the `Stage` after
    """

    env: NDArray[np.int64]
    slot: NDArray[np.int64]
    source: NDArray[np.int8]
    target: NDArray[np.int8]


@brief
class Estimate(NamedTuple):
    """Mean of per-example differences with its standard error; both are nan where `measured` is False.

    Attributes:
        mean (float64): mean over the examples; its shape is that of the field that holds the estimate
        se (float64): standard error of the mean, of the same shape
        measured (bool): whether it was measured, of the same shape
    """

    mean: Floats
    se: Floats
    measured: Bools

    @classmethod
    def absent(cls, *shape: int) -> "Estimate":
        """Nothing measured yet."""
        return cls(np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool))


@brief
class Measurements(NamedTuple):
    """What the last step's training and probe measured. Losses in nats (or squared units), metrics as the task defines.

    Attributes:
        metric ((E,) float64): metric on the probe split, at the real doses
        loss ((E,) float64): loss on the probe split, at the real doses
        train_loss ((E,) float64): training loss, mean over the step's batches; nan before the first step
        gradient_norm ((E,) float64): gradient norm of the host's rows, mean over the step; nan before the first step
        contribution ((E, S) Estimate): metric at the real doses minus metric with the slot at dose 0; of live seeds
        contribution_loss ((E, S) Estimate): loss with the slot at dose 0 minus loss at the real doses; of live seeds
        gain ((E, S) Estimate): loss at the real doses minus loss with the slot at dose 1; of incubating seeds
        gain_metric ((E, S) Estimate): metric with the slot at dose 1 minus metric at the real doses; of incubating seeds
        seed_gradient_norm ((E, S) float64): gradient norm of each seed, mean over the step; nan where no seed trained
        seed_gradient_finite ((E, S) bool): whether a seed trained and every gradient of the step was finite
        participation ((E, S) float64): participation ratio of the stream at the slot / its width, in (0, 1]
        sensors ((E, S, F) float64): growth sensors, named in `Space.sensors`; nan where they were not measured yet
        sensor_age (int): steps since the sensors were computed
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


@brief
class CoalitionValues(NamedTuple):
    """What networks were worth with some of their live seeds at dose 0. C coalitions, by environment and bit mask.

    Bit s of a mask says that slot s keeps its dose. Environments without live seeds have none.

    Attributes:
        step (int): steps of the episode that had been taken
        draw (int): key of the permutations, where they were sampled
        live ((rows, S) bool): the seeds that were live
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
    """What may be done now. A later head's mask is indexed by the choices it depends on.

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
    """A blueprint of the menu, as a controller sees it.

    Attributes:
        name (str): name of the blueprint, as `esper blueprints` lists it
        tap (str): what its seeds read: 'here', 'before' or 'input', see `Tap`
    """

    name: str
    tap: str


@brief
class Space(NamedTuple):
    """What does not change in a run: the names behind the indices, and the key of every environment.

    Attributes:
        slots (S names): names of the slots
        blueprints (K BlueprintInfo): the menu
        tempos (T ints): ramp lengths that `Actions.tempo` chooses from [steps]
        targets (A floats): alphas that `Actions.target` chooses from
        cost ((E, S, K) int64): parameters that each blueprint would add at each slot, blended by ADD
        fits ((S, K) bool): whether each blueprint fits each slot
        width ((E, S) int64): features (or channels) of the stream at each slot
        sensors (F names): names of the growth sensors
        max_seeds (int): seeds in the budget of an environment, fossils included, `lifecycle.max_seeds`
        seed (int): seed of the run
        number ((E,) int64): number of each environment among all that are grown, here and in other populations; it keys draws
        instance ((E,) int64): key of the instance of each environment
        floor ((E,) float64): metric on the probe split of the best constant prediction; nan where it is not known
        ceiling ((E,) float64): metric on the probe split of a prediction that is always right; nan where it is not known
        objective (str): 'metric' or 'log_loss': what J is made of, `reward.objective`
        rent (float): price of parameters in J, `reward.rent`
        rent_size (int): a smaller host is charged as if it had so many parameters, `reward.rent_size`
        blends ((Bl,) bool): the blends that a seed may have
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
    blends: Bools = np.ones(len(Blend), bool)


@brief
class View(NamedTuple):
    """All that a controller may know when it decides.

    Attributes:
        space (Space): what does not change in a run
        episode (int): number of the episode, from 0
        step (int): steps taken in this episode
        steps (int): length of an episode [steps]
        seeds (Seeds): stage, age and dose of every slot
        masks (Masks): what may be decided now
        measurements (Measurements): what the last step measured
        coalitions (CoalitionValues or None): the last that were evaluated; None before the first
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
    """A network on the probe split; every field is (E,).

    Attributes:
        metric ((E,) float64): metric on the probe split
        loss ((E,) float64): loss on the probe split
        added_params ((E,) int64): parameters of the seeds in BLENDING, HOLDING or FOSSILIZED
    """

    metric: Floats
    loss: Floats
    added_params: NDArray[np.int64]


@brief
class Outcome(NamedTuple):
    """What one step did, measured after the action acted.

    Attributes:
        episode (int): number of the episode, from 0
        step (int): the step that was taken, counted from 0
        actions (Actions): what was decided
        refused ((E,) int8): a `Refusal`, NONE where the decision was carried out
        found ((E,) int8): a `Vital`; a row with any other than GOOD was restored to its last snapshot, which `after` then
            describes
        before (Scores): the network before the step
        after (Scores): the network after the step
        host_params ((E,) int64): parameters of the host
        terminal (bool): whether the episode ended, for every environment
        exported (Scores or None): at the end of an episode the network that would be exported, with every unfinished slot at dose
            0; None before
        seeds (Seeds): every slot after the step
        contribution ((E, S) Estimate): after the step, as in `Measurements`
        contribution_loss ((E, S) Estimate): after the step, as in `Measurements`
        twin (two Scores or None): the never-grow twins before and after the step, where they are trained
    """

    episode: int
    step: int
    actions: Actions
    refused: NDArray[np.int8]
    found: NDArray[np.int8]
    before: Scores
    after: Scores
    host_params: NDArray[np.int64]
    terminal: bool
    exported: Scores | None
    seeds: Seeds
    contribution: Estimate
    contribution_loss: Estimate
    twin: tuple[Scores, Scores] | None

    @property
    def accepted(self) -> Bools:
        """(E,) whether the decision was carried out."""
        return np.asarray(self.refused == Refusal.NONE)

    @property
    def ended(self) -> Bools:
        """(E,) whether a sequence of decisions ends with this step: by the episode's end, or since it was rolled back."""
        return np.asarray(self.rolled_back | self.terminal)

    @property
    def rolled_back(self) -> Bools:
        """(E,) whether the step failed: what came of it was taken back, and its sequence of decisions ends here."""
        return np.asarray(self.found != Vital.GOOD)


def take(record: Any, rows: slice | NDArray[np.int64]) -> Any:
    """A record of arrays, nested or not, cut to some environments along the leading axis; scalars stay."""
    if isinstance(record, tuple):
        return type(record)(*(take(field, rows) for field in record))
    return record[rows] if isinstance(record, np.ndarray) else record


def choose(rows: Bools, one: Any, other: Any) -> Any:
    """The record of arrays (E, ...), nested or not, whose rows are those of `one` where chosen, (E,); scalars are of `other`."""
    if isinstance(other, tuple):
        return type(other)(*(choose(rows, mine, theirs) for mine, theirs in zip(one, other, strict=True)))
    if isinstance(other, np.ndarray):
        return np.where(rows.reshape(-1, *(1,) * (other.ndim - 1)), one, other)
    return other


def read_only(record: Any) -> Any:
    """The record with arrays that nobody can write into; they share memory with the given ones."""
    if isinstance(record, tuple):
        fields = [read_only(field) for field in record]
        return tuple(fields) if type(record) is tuple else type(record)(*fields)
    if isinstance(record, np.ndarray):
        record = record.view()
        record.setflags(write=False)
    return record
