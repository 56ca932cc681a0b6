"""The rows of events.jsonl, one class per kind. E environments, S slots, F sensors.

A value that was not measured is nan in an array and null in the file. Fields with one value per environment take arrays,
which the writer converts to lists. A field name has the same type in all kinds of rows, so that the file can be read as one
table; an array therefore has another name than the number of one environment.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

if TYPE_CHECKING:
    Numbers = Sequence[float | None] | NDArray[np.floating[Any]]
    Matrix = Sequence[Sequence[float | None]] | NDArray[np.floating[Any]]
    Integers = Sequence[int] | NDArray[np.integer[Any]]
    Table = Sequence[Sequence[int]] | NDArray[np.integer[Any]]
    Flags = Sequence[bool] | NDArray[np.bool_]
    Cube = Sequence[Sequence[Sequence[float | None]]] | NDArray[np.floating[Any]]
else:  # the types in the file
    Numbers = list[float | None]
    Matrix = list[list[float | None]]
    Integers = list[int]
    Table = list[list[int]]
    Flags = list[bool]
    Cube = list[list[list[float | None]]]


SCHEMA = 3
"""Version of the rows, in every `run` row. Rows of version 1 have no such field; docs/events.md lists what changed."""
READABLE = (2, SCHEMA)
"""The versions whose rows are rows of the present version too."""


class Row(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Fields of every row, beside `kind`."""

    seq: Annotated[int, Meta(description="place in the file, from 0, without a gap")] = -1
    time: Annotated[float, Meta(description="when the row was written [seconds since 1970]")] = 0.0


class RunRow(Row, tag="run", kw_only=True):
    """The first and the last row of a run. A run that is resumed with a changed config has one more at that place."""

    schema: Annotated[int, Meta(description="version of the rows")] = SCHEMA
    status: Annotated[Literal["running", "finished", "interrupted", "failed"], Meta(description="of the run")]
    task: Annotated[str, Meta(description="name of the task")]
    controller: Annotated[str, Meta(description="name of the controller; ppo in a training")]
    envs: Annotated[int, Meta(description="environments, twins not counted")]
    steps: Annotated[int, Meta(description="steps of an episode")]
    seed: Annotated[int, Meta(description="run seed")]
    device: Annotated[str, Meta(description="device of the networks")]
    slots: Annotated[Sequence[str], Meta(description="(S,) names of the slots")]
    blueprints: Annotated[Sequence[str], Meta(description="names of the menu")]
    host_param_counts: Annotated[
        Integers, Meta(description="(E,) parameters of the hosts; empty in a training, whose hosts change every round")
    ]
    changed: Annotated[
        Sequence[str], Meta(description="settings that `esper resume --set` changed at this row, as key=value")
    ] = ()
    error: Annotated[str | None, Meta(description="type and message of the error of a failed run; null otherwise")] = (
        None
    )


class PlayedRow(Row, kw_only=True):
    """Fields of every row of an episode in a training, whose rows come from several populations; other runs have none of them."""

    cohort: Annotated[
        str | msgspec.UnsetType, Meta(description="`training`, or `validation` for the greedy growth after a round")
    ] = msgspec.UNSET
    task: Annotated[str | msgspec.UnsetType, Meta(description="name of the population's task")] = msgspec.UNSET
    round: Annotated[
        int | msgspec.UnsetType, Meta(description="round of the training; rounds of imitation are below 0")
    ] = msgspec.UNSET


class StepRow(PlayedRow, tag="step", kw_only=True):
    """One step of every environment. All lists are over environments."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    metrics: Annotated[Numbers, Meta(description="(E,) task metric on the probe split, after the step")]
    losses: Annotated[Numbers, Meta(description="(E,) loss on the probe split, after the step")]
    train_losses: Annotated[Numbers, Meta(description="(E,) mean loss over the batches of the step")]
    ops: Annotated[Sequence[str], Meta(description="(E,) operation that the controller chose")]
    op_slots: Annotated[
        Sequence[str | None], Meta(description="(E,) slot of the operation; null where it acts on none")
    ]
    accepted: Annotated[Flags, Meta(description="(E,) whether the operation was carried out")]
    refused: Annotated[
        Sequence[str | None], Meta(description="(E,) why the operation was not carried out; null where it was")
    ]
    stages: Annotated[Table, Meta(description="(E, S) stage of every slot, 0 DORMANT to 7 EMBARGOED")]
    alphas: Annotated[Matrix, Meta(description="(E, S) dose of every slot")]
    added_param_counts: Annotated[
        Integers, Meta(description="(E,) parameters of the seeds in BLENDING, HOLDING or FOSSILIZED")
    ]
    twin_metrics: Annotated[
        Numbers | None, Meta(description="(E,) task metric of the never-grow twins; null without twins")
    ] = None


class LifecycleRow(PlayedRow, tag="lifecycle", kw_only=True, rename={"from_stage": "from", "to_stage": "to"}):
    """One change of stage of one slot of one environment."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    env: Annotated[int, Meta(description="environment")]
    slot: Annotated[str, Meta(description="name of the slot")]
    from_stage: Annotated[str, Meta(description="stage before")]
    to_stage: Annotated[str, Meta(description="stage after")]
    blueprint: Annotated[str | None, Meta(description="blueprint of the seed; null where the slot held none")]
    alpha: Annotated[float, Meta(description="dose after the change")]
    why: Annotated[
        str | None,
        Meta(description="why the seed was planted, pruned or fossilized; null at other changes and rollbacks"),
    ] = None
    contribution_mean: Annotated[
        float | None, Meta(description="contribution to the metric at that decision; null where not measured")
    ] = None
    contribution_se: Annotated[float | None, Meta(description="its standard error")] = None
    gain_mean: Annotated[
        float | None, Meta(description="incubation gain at that decision; null where not measured")
    ] = None
    gain_se: Annotated[float | None, Meta(description="its standard error")] = None
    gate_checks: Annotated[str | None, Meta(description="result of the gate of the seed at that decision")] = None


class RollbackRow(PlayedRow, tag="rollback", kw_only=True):
    """One environment, or its twin, failed in a step and was restored to its last healthy snapshot."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    env: Annotated[int, Meta(description="environment")]
    twin: Annotated[
        bool, Meta(description="true if the never-grow twin failed, false if the environment itself failed")
    ]
    reason: Annotated[str, Meta(description="the vital sign that failed")]
    metric: Annotated[float | None, Meta(description="task metric on the probe split, before the restoration")]
    loss: Annotated[float | None, Meta(description="loss on the probe split, before the restoration")]
    pruned: Annotated[Sequence[str], Meta(description="slots whose seed is not in the snapshot")]
    slot_stages: Annotated[Sequence[int], Meta(description="(S,) stage of every slot, after the restoration")]


class DecisionRow(PlayedRow, tag="decision", kw_only=True):
    """One decision other than WAIT of one environment, with what it was based on. The measurements are those before the step."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    env: Annotated[int, Meta(description="environment")]
    op: Annotated[str, Meta(description="operation that the controller chose")]
    slot: Annotated[str | None, Meta(description="name of the slot; null where the controller named none that exists")]
    stage: Annotated[str | None, Meta(description="stage of the slot before the decision")]
    blueprint: Annotated[
        str | None,
        Meta(description="blueprint to be planted, or of the seed in the slot; null where the slot is empty"),
    ]
    blend: Annotated[str | None, Meta(description="how the seed enters the stream; null where there is no seed")]
    tempo: Annotated[int | None, Meta(description="length of the ramp; null where the operation has none [steps]")]
    target: Annotated[float | None, Meta(description="dose at the end of the ramp; null where the operation has none")]
    price: Annotated[int | None, Meta(description="parameters of the seed; null where there is no seed")]
    carried_out: Annotated[bool, Meta(description="whether the decision was carried out")]
    refusal: Annotated[str | None, Meta(description="why it was not carried out; null where it was")]
    why: Annotated[str | None, Meta(description="reason that the controller gives; null where it gives none")]
    gate_checks: Annotated[
        str | None, Meta(description="result of the gate that the seed must pass next; null at a stage without a gate")
    ]
    margins: Annotated[
        Mapping[str, float | None],
        Meta(
            description="by check of that gate: how far the seed is above the limit, in the unit of the check; a check passes "
            "above 0, and null is not measured"
        ),
    ]
    contribution_mean: Annotated[
        float | None, Meta(description="contribution of the seed to the metric; null where not measured")
    ]
    contribution_se: Annotated[float | None, Meta(description="its standard error")]
    gain_mean: Annotated[float | None, Meta(description="incubation gain of the seed; null where not measured")]
    gain_se: Annotated[float | None, Meta(description="its standard error")]
    choice_counts: Annotated[
        Sequence[int],
        Meta(
            description="(6,) number of choices that the mask left for operation, slot, blueprint, blend, tempo and target, "
            "given the choices before; 0 where the operation does not read the head"
        ),
    ]
    probabilities: Annotated[
        Numbers | None,
        Meta(
            description="(6,) probability that a trained policy gave to its choice of each head; null where the head is not "
            "read, or for other controllers"
        ),
    ] = None
    entropies: Annotated[
        Numbers | None, Meta(description="(6,) entropy of the policy's distribution of each head [nats]; null likewise")
    ] = None
    value: Annotated[
        float | None, Meta(description="return that the policy expected from this step on; null for other controllers")
    ] = None


class MeasurementRow(PlayedRow, tag="measurement", kw_only=True):
    """The measurements of every seed after a step, to 6 digits. Contributions and Shapley values are in units of the metric."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    contribution_means: Annotated[
        Matrix, Meta(description="(E, S) metric minus metric without the seed, of seeds with a dose above 0")
    ]
    contribution_ses: Annotated[Matrix, Meta(description="(E, S) standard errors of the contributions")]
    gain_means: Annotated[
        Matrix, Meta(description="(E, S) loss minus loss with the seed at dose 1, of seeds in TRAINING")
    ]
    gain_ses: Annotated[Matrix, Meta(description="(E, S) standard errors of the gains")]
    participations: Annotated[
        Matrix, Meta(description="(E, S) participation ratio of the stream at the slot / width of the stream")
    ]
    shapley_means: Annotated[
        Matrix | None, Meta(description="(E, S) Shapley values; null at steps at which no coalitions are measured")
    ] = None
    shapley_ses: Annotated[
        Matrix | None, Meta(description="(E, S) their standard errors; 0 where every coalition was measured")
    ] = None
    interactions: Annotated[
        Cube | None,
        Meta(description="(E, S, S) Shapley interactions of pairs of seeds; null where coalitions were sampled"),
    ] = None


class SensorsRow(PlayedRow, tag="sensors", kw_only=True):
    """The growth sensors, to 6 digits, after a step at which they were measured. docs/observation.md explains each."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    sensors: Annotated[Sequence[str], Meta(description="(F,) names of the sensors")]
    readings: Annotated[Cube, Meta(description="(E, S, F) the sensors of every slot; null where a sensor has no value")]


class PhasesRow(PlayedRow, tag="phases", kw_only=True):
    """Where the time of a step went."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    phase_seconds: Annotated[
        Mapping[str, float], Meta(description="by phase of the step; deciding is the controller [seconds]")
    ]
    device_reads: Annotated[
        int, Meta(description="reads of the device: 1, and 1 more where an environment was restored")
    ]


class GradientsRow(PlayedRow, tag="gradients", kw_only=True):
    """Gradient norms of a step, to 6 digits, one for each group of parameters: the host and every seed."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    host_gradients: Annotated[Numbers, Meta(description="(E,) gradient norm of the host, mean over the step")]
    seed_gradients: Annotated[
        Matrix, Meta(description="(E, S) gradient norm of the seed, mean over the step; null where no seed trained")
    ]


class EpisodeRow(PlayedRow, tag="episode", kw_only=True):
    """One environment at the end of an episode. The figures are those of the network that is exported."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="steps taken")]
    env: Annotated[int, Meta(description="environment")]
    metric: Annotated[float | None, Meta(description="task metric on the probe split")]
    loss: Annotated[float | None, Meta(description="loss on the probe split")]
    host_params: Annotated[int, Meta(description="parameters of the host")]
    added_params: Annotated[int, Meta(description="parameters of the seeds that were kept")]
    fossilized: Annotated[int, Meta(description="seeds that were kept")]
    grown: Annotated[dict[str, str], Meta(description="blueprint by slot, of the seeds that were kept")]
    unfinished: Annotated[Sequence[str], Meta(description="slots whose seed was not kept and is left out")]
    rollbacks: Annotated[int, Meta(description="restorations of the environment in the episode")]


class RoundRow(Row, tag="round", kw_only=True):
    """One round of a controller's training."""

    round: Annotated[int, Meta(description="counted from 0; rounds of imitation are below 0")]
    seconds: Annotated[float, Meta(description="duration of the round [seconds]")]
    figures: Annotated[
        Mapping[str, float | None], Meta(description="by name (docs/training.md); null where not measured")
    ]


ROWS: tuple[type[Row], ...] = (
    RunRow,
    StepRow,
    DecisionRow,
    LifecycleRow,
    MeasurementRow,
    SensorsRow,
    PhasesRow,
    GradientsRow,
    RollbackRow,
    EpisodeRow,
    RoundRow,
)
"""The kinds of rows."""
