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
    """Every slot of every environment: the only place where a stage or an alpha is stored."""

    stage: NDArray[np.int8]  # (E, S) Stage
    age: NDArray[np.int32]  # (E, S) steps in the present stage
    life: NDArray[np.int32]  # (E, S) steps since germination; 0 when empty
    blueprint: NDArray[np.int16]  # (E, S) index into the menu, -1 when empty
    blend: NDArray[np.int8]  # (E, S) Blend
    alpha: NDArray[np.float32]  # (E, S) the dose of this step's training, [0, 1]
    ramp: NDArray[np.float32]  # (E, S, 3) alpha at the start, alpha at the end, length in steps
    doomed: Bools  # (E, S) ramping down to be pruned


@brief
class Transitions(NamedTuple):
    """Changes of stage, in order of environment and slot; every field is (n,)."""

    env: NDArray[np.int64]
    slot: NDArray[np.int64]
    source: NDArray[np.int8]  # Stage
    target: NDArray[np.int8]  # Stage


@brief
class Estimate(NamedTuple):
    """Mean of per-example differences with its standard error; both are nan where `measured` is False."""

    mean: Floats
    se: Floats
    measured: Bools

    @classmethod
    def absent(cls, *shape: int) -> "Estimate":
        """Nothing measured yet."""
        return cls(np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool))


@brief
class Measurements(NamedTuple):
    """What the last step's training and probe measured. Losses in nats (or squared units), metrics as the task defines."""

    metric: Floats  # (E,) on the probe split, at the real doses
    loss: Floats  # (E,) on the probe split, at the real doses
    train_loss: Floats  # (E,) mean over the step's batches; nan before the first step
    gradient_norm: Floats  # (E,) of the host's rows, mean over the step; nan before the first step
    contribution: Estimate  # (E, S) metric at the real doses minus metric with the slot at dose 0; live seeds
    contribution_loss: Estimate  # (E, S) loss with the slot at dose 0 minus loss at the real doses; live seeds
    gain: Estimate  # (E, S) loss at the real doses minus loss with the slot at dose 1; incubating seeds
    gain_metric: Estimate  # (E, S) metric with the slot at dose 1 minus metric at the real doses; incubating seeds
    seed_gradient_norm: Floats  # (E, S) mean over the step; nan where no seed trained
    seed_gradient_finite: Bools  # (E, S) a seed trained and every gradient of the step was finite
    participation: Floats  # (E, S) participation ratio of the stream at the slot / its width, in (0, 1]
    sensors: Floats  # (E, S, F) growth sensors, named in `Space.sensors`; nan where they were not measured yet
    sensor_age: int  # steps since they were computed


@brief
class CoalitionValues(NamedTuple):
    """What networks were worth with some of their live seeds at dose 0. C coalitions, by environment and bit mask.

    Bit s of a mask says that slot s keeps its dose. Environments without live seeds have none.
    """

    step: int  # steps that had been taken in the episode
    draw: int  # the key of the permutations, where they were sampled
    live: Bools  # (rows, S) the seeds that were live
    env: NDArray[np.int64]  # (C,)
    mask: NDArray[np.int64]  # (C,)
    metric: Floats  # (C,) on the probe split
    loss: Floats  # (C,)


@brief
class Masks(NamedTuple):
    """What may be done now. A later head's mask is indexed by the choices it depends on."""

    op: Bools  # (E, O)
    slot: Bools  # (E, O, S) given the op; all False for WAIT
    blueprint: Bools  # (E, S, K) given the slot of a GERMINATE
    blend: Bools  # (E, S, Bl) given the slot of a GERMINATE
    tempo: Bools  # (E, O, S, T) given the op and the slot
    target: Bools  # (E, O, S, A) given the op and the slot


class BlueprintInfo(NamedTuple):
    """A blueprint of the menu, as a controller sees it."""

    name: str
    tap: str


@brief
class Space(NamedTuple):
    """What does not change in a run: the names behind the indices, and the key of every environment."""

    slots: tuple[str, ...]
    blueprints: tuple[BlueprintInfo, ...]
    tempos: tuple[int, ...]  # steps
    targets: tuple[float, ...]
    cost: NDArray[np.int64]  # (E, S, K) parameters that each blueprint would add at each slot, blended by ADD
    fits: Bools  # (S, K)
    width: NDArray[np.int64]  # (E, S) features (or channels) of the stream at each slot
    sensors: tuple[str, ...]  # (F,)
    max_seeds: int
    seed: int  # run seed
    instance: NDArray[np.int64]  # (E,)
    floor: Floats  # (E,) metric on the probe split of the best constant prediction; nan where it is not known
    ceiling: Floats  # (E,) metric on the probe split of a prediction that is always right; likewise
    objective: Literal["metric", "log_loss"]  # what J is made of, `reward.objective`
    rent: float  # price of parameters in J, `reward.rent`
    rent_size: int  # a smaller host is charged as if it had so many parameters, `reward.rent_size`
    blends: Bools = np.ones(len(Blend), bool)  # (Bl,) the blends that a seed may have


@brief
class View(NamedTuple):
    """All that a controller may know when it decides."""

    space: Space
    episode: int
    step: int  # steps taken in this episode
    steps: int  # length of an episode
    seeds: Seeds
    masks: Masks
    measurements: Measurements
    coalitions: CoalitionValues | None  # the last ones; None before the first
    host_params: NDArray[np.int64]  # (E,)
    added_params: NDArray[np.int64]  # (E,) of the seeds in BLENDING, HOLDING or FOSSILIZED


@brief
class Scores(NamedTuple):
    """A network on the probe split; every field is (E,)."""

    metric: Floats
    loss: Floats
    added_params: NDArray[np.int64]


@brief
class Outcome(NamedTuple):
    """What one step did, measured after the action acted."""

    episode: int
    step: int  # the step that was taken, counted from 0
    actions: Actions
    refused: NDArray[np.int8]  # (E,) a Refusal, NONE where the decision was carried out
    found: NDArray[np.int8]  # (E,) a Vital; all but GOOD were rolled back, and `after` is the network that was restored
    before: Scores
    after: Scores
    host_params: NDArray[np.int64]  # (E,)
    terminal: bool  # the episode ended, for every environment
    exported: Scores | None  # at the end: the network that would be exported, every unfinished slot at dose 0
    seeds: Seeds  # (E, S) after the step
    contribution: Estimate  # (E, S) after the step, as in `Measurements`
    contribution_loss: Estimate  # (E, S) likewise
    twin: tuple[Scores, Scores] | None  # (E,) before and after, of the never-grow twins where they are trained

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
