"""Define the rows of events.jsonl, one class per kind. E environments, S slots, F sensors.

A value that was not measured is nan in an array and null in the file. Fields with one value per environment take arrays,
which the writer converts to lists. A field that has its default is left out of the file. A field name has the same type in all
kinds of rows, so that the file can be read as one table; an array therefore has another name than the number of one environment.

The types are the schema by which a line is read. Beside a type of lists stand their axes, as "ES", whose lengths the reader
checks.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from esper.leyline.lifecycle.vocabulary import Stage

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Value = float | None
"""A number, or null where it was not measured."""
StageNumber = Annotated[int, Meta(ge=int(min(Stage)), le=int(max(Stage)))]

if TYPE_CHECKING:
    Numbers = Sequence[float | None] | NDArray[np.floating[Any]]
    Matrix = Sequence[Sequence[float | None]] | NDArray[np.floating[Any]]
    Integers = Sequence[int] | NDArray[np.integer[Any]]
    Table = Sequence[Sequence[int]] | NDArray[np.integer[Any]]
    StageName: TypeAlias = str
    Cube = Sequence[Sequence[Sequence[float | None]]] | NDArray[np.floating[Any]]
else:  # the types in the file, where null stands for a list of nulls
    StageName = Literal[tuple(Stage.__members__)]
    Numbers = Annotated[list[float | None], "E"]
    Matrix = Annotated[list[list[float | None] | None], "ES"]
    Integers = Annotated[list[Count], "E"]
    Table = Annotated[list[list[StageNumber]], "ES"]
    Cube = list[list[list[float | None] | None] | None]


SCHEMA = 4  # version of the rows, in every `run` row; rows of another version are refused


def about(text: str) -> Meta:
    """Describe a field in the schema."""
    return Meta(description=text)


def axes_of(kind: Any) -> str:
    """Return the axes of the lists that the type of a field holds, a letter each; empty if it holds none."""
    named = [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, str)]
    return named[0] if named else next(filter(None, map(axes_of, get_args(kind))), "")


class Row(msgspec.Struct, kw_only=True, tag_field="kind", omit_defaults=True):
    """Holds the fields of every row, beside `kind`."""

    seq: Annotated[Whole, about("place in the file, from 0, without a gap")] = -1
    time: Annotated[float, about("when the row was written [seconds since 1970]")] = 0.0


class PlayedRow(Row, kw_only=True):
    """Holds the fields of every row of an episode in a training, which has several populations; other runs leave them out."""

    cohort: Annotated[str | UnsetType, about("`training`, or `validation` for the greedy growth after a round")] = UNSET
    task: Annotated[str | UnsetType, about("name of the population's task")] = UNSET
    round: Annotated[Whole | UnsetType, about("round of the training; rounds of imitation are below 0")] = UNSET
    first_env: Annotated[
        Count | UnsetType,
        about(
            "where `shards` is above 1: number of the shard's first environment; environment e of the row is "
            "environment first_env + e of the task"
        ),
    ] = UNSET


class AtStepRow(PlayedRow, kw_only=True):
    """Holds the fields of the rows of a step."""

    episode: Annotated[Count, about("counted from 0")]
    step: Annotated[Count, about("counted from 0")]


class EnvRow(AtStepRow, kw_only=True):
    """Holds the fields of the rows of one environment in a step."""

    env: Annotated[Count, about("environment")]


class SlotRow(EnvRow, kw_only=True):
    """Holds the fields of the rows of one slot of one environment in a step."""

    slot: Annotated[str, about("name of the slot")]


class AnyRow(msgspec.Struct):
    """Reads the fields that rows of every kind and version have, and what a run row says of its run and its version."""

    kind: str
    seq: Count
    status: str | None = None
    schema: int = 1  # the field came with version 2, so a run row without it is of version 1

    @property
    def ends(self) -> bool:
        """Whether this is the last row of a run."""
        return self.kind == "run" and self.status != "running"


class RunRow(Row, tag="run", kw_only=True):
    """Begins and ends a run. A run that is resumed with a changed config has one more at that place."""

    schema: Annotated[Count, about("version of the rows")] = msgspec.field(default_factory=lambda: SCHEMA)
    status: Annotated[Literal["running", "finished", "interrupted", "failed"], about("of the run")]
    task: Annotated[str, about("name of the task")]
    controller: Annotated[str, about("name of the controller; ppo in a training")]
    envs: Annotated[Count, about("environments, twins not counted")]
    steps: Annotated[Count, about("steps of an episode")]
    seed: Annotated[Count, about("run seed")]
    device: Annotated[str, about("device of the networks")]
    slots: Annotated[Sequence[str], "S", about("names of the slots")]
    blueprints: Annotated[Sequence[str], about("names of the menu")]
    host_param_counts: Annotated[
        Integers, about("parameters of the hosts; empty in a training, whose hosts change every round")
    ]
    changed: Annotated[
        Sequence[str], about("settings that `esper resume --set` changed at this row, as key=value")
    ] = ()
    error: Annotated[str | None, about("type and message of the error of a failed run; null otherwise")] = None


class EnvironmentRow(Row, tag="environment", kw_only=True):
    """Says what the run began on, as in environment.json."""

    versions: Annotated[Mapping[str, str | None], about("by library; null where it is not installed")]
    platform: Annotated[str, about("operating system and processor")]
    device: Annotated[str, about("device of the networks")]
    device_name: Annotated[str, about("name of the device")]
    threads: Annotated[Count, about("threads of torch")]
    git_revision: Annotated[str | None, about("commit of the working directory; null outside a repository")]
    command: Annotated[Sequence[str], about("command line")]


class StepRow(AtStepRow, tag="step", kw_only=True):
    """Records one step of every environment, to 5 digits. An environment without a `decision` row at this step chose WAIT."""

    metrics: Annotated[Numbers, about("task metric on the probe split, after the step")]
    losses: Annotated[Numbers, about("loss on the probe split, after the step")]
    train_losses: Annotated[Numbers, about("mean loss over the batches of the step")]
    stages: Annotated[Table, about("stage of every slot, 0 DORMANT to 7 EMBARGOED")]
    alphas: Annotated[Matrix, about("dose of every slot")]
    added_param_counts: Annotated[Integers, about("parameters of the seeds in BLENDING, HOLDING or FOSSILIZED")]
    twin_metrics: Annotated[Numbers | None, about("task metric of the never-grow twins; null without twins")] = None


class DecisionRow(EnvRow, tag="decision", kw_only=True):
    """Records one decision of one environment, with what it was based on: the measurements before the step, to 5 digits.

    Decisions to WAIT have rows at level debug only.
    """

    op: Annotated[str, about("operation that the controller chose")]
    slot: Annotated[str | None, about("name of the slot; null where the controller named none that exists")] = None
    stage: Annotated[StageName | None, about("stage of the slot before the decision")] = None
    blueprint: Annotated[
        str | None, about("blueprint to be planted, or of the seed in the slot; null where the slot is empty")
    ] = None
    blend: Annotated[str | None, about("how the seed enters the stream; null where there is no seed")] = None
    tempo: Annotated[Count | None, about("length of the ramp; null where the operation has none [steps]")] = None
    target: Annotated[Value, about("dose at the end of the ramp; null where the operation has none")] = None
    price: Annotated[Count | None, about("parameters of the seed; null where there is no seed")] = None
    carried_out: Annotated[bool, about("whether the decision was carried out")]
    refusal: Annotated[str | None, about("why it was not carried out; null where it was")] = None
    why: Annotated[str | None, about("reason that the controller gives; null where it gives none")] = None
    gate_checks: Annotated[
        str | None, about("result of the gate that the seed must pass next; null at a stage without a gate")
    ] = None
    margins: Annotated[
        Mapping[str, Value],
        about(
            "by check of that gate: how far the seed is above the limit, in the unit of the check; a check passes "
            "above 0, and null is not measured"
        ),
    ] = {}
    contribution_mean: Annotated[Value, about("contribution of the seed to the metric; null where not measured")] = None
    contribution_se: Annotated[Value, about("its standard error")] = None
    gain_mean: Annotated[Value, about("incubation gain of the seed; null where not measured")] = None
    gain_se: Annotated[Value, about("its standard error")] = None
    rule_sensors: Annotated[
        Mapping[str, Value],
        about("by name: the sensors of the slot that the controller's rule looked at; absent for a policy"),
    ] = {}
    choice_counts: Annotated[
        Sequence[Count],
        "6",
        about(
            "number of choices that the mask left for operation, slot, blueprint, blend, tempo and target, "
            "given the choices before; 0 where the operation does not read the head"
        ),
    ]
    probabilities: Annotated[
        Numbers | None,
        "6",
        about(
            "probability that a trained policy gave to its choice of each head; null where the head is not "
            "read, or for other controllers"
        ),
    ] = None
    entropies: Annotated[
        Numbers | None,
        "6",
        about("entropy of the policy's distribution of each head [nats]; null where `probabilities` are"),
    ] = None
    value: Annotated[Value, about("return that the policy expected from this step on; null for other controllers")] = (
        None
    )


class LifecycleRow(SlotRow, tag="lifecycle", kw_only=True, rename={"from_stage": "from", "to_stage": "to"}):
    """Records one change of stage of one slot of one environment."""

    from_stage: Annotated[StageName, about("stage before")]
    to_stage: Annotated[StageName, about("stage after")]
    blueprint: Annotated[str | None, about("blueprint of the seed; null where the slot held none")] = None
    alpha: Annotated[float, about("dose after the change")]
    why: Annotated[
        str | None, about("why the seed was planted, pruned or fossilized; null at other changes and rollbacks")
    ] = None
    contribution_mean: Annotated[
        Value, about("contribution to the metric at that decision; null where not measured")
    ] = None
    contribution_se: Annotated[Value, about("its standard error")] = None
    gain_mean: Annotated[Value, about("incubation gain at that decision; null where not measured")] = None
    gain_se: Annotated[Value, about("its standard error")] = None
    gate_checks: Annotated[str | None, about("result of the gate of the seed at that decision")] = None


class GateRow(SlotRow, tag="gate", kw_only=True):
    """Says that the gate that a seed must pass next has its first result, or another result than before the step."""

    gate: Annotated[str, about("advance, which ends TRAINING, or fossilize, which ends HOLDING")]
    passed: Annotated[bool, about("whether the seed passes")]
    margins: Annotated[
        Mapping[str, Value],
        about("by check: how far the seed is above the limit; a check passes above 0, and null is not measured"),
    ]


class MeasurementRow(AtStepRow, tag="measurement", kw_only=True):
    """Records measurements of every seed after a step, to 5 digits. Contributions and Shapley values are in units of the metric.

    A step at which no seed was measured has no row.
    """

    contribution_means: Annotated[
        Matrix | None,
        about("metric minus metric without the seed, of seeds with a dose above 0; null where none was measured"),
    ] = None
    contribution_ses: Annotated[Matrix | None, about("standard errors of the contributions")] = None
    gain_means: Annotated[
        Matrix | None,
        about("loss minus loss with the seed at dose 1, of seeds in TRAINING; null where none was measured"),
    ] = None
    gain_ses: Annotated[Matrix | None, about("standard errors of the gains")] = None
    participations: Annotated[
        Matrix | None,
        about("participation ratio of the stream at the slot / width of the stream; at level debug"),
    ] = None
    shapley_means: Annotated[
        Matrix | None, about("Shapley values; null at steps at which no coalitions are measured")
    ] = None
    shapley_ses: Annotated[Matrix | None, about("their standard errors; 0 where every coalition was measured")] = None
    interactions: Annotated[
        Cube | None, "ESS", about("Shapley interactions of pairs of seeds; null where coalitions were sampled")
    ] = None


class SensorsRow(AtStepRow, tag="sensors", kw_only=True):
    """Records growth sensors, to 5 digits, after a step at which they were measured and due (see `esper docs observation`).

    `telemetry.sensor_rows_every` says how often they are due.
    """

    sensors: Annotated[Sequence[str], "F", about("names of the sensors")]
    readings: Annotated[Cube, "ESF", about("the sensors of every slot; null where a sensor has no value")]


class RewardRow(AtStepRow, tag="reward", kw_only=True):
    """Records the rewards that a training paid for a step, to 5 digits."""

    rewards: Annotated[Numbers, about("sum of the components")]
    components: Annotated[Mapping[str, Numbers], about("by name of the component (`esper docs training`): (E,)")]


class PhasesRow(AtStepRow, tag="phases", kw_only=True):
    """Says where the time of the last steps went. `telemetry.sensor_rows_every` says how many steps a row covers."""

    step: Annotated[Count, about("last of the steps, counted from 0")]
    covered: Annotated[Count, about("number of steps that the row covers")] = msgspec.field(default_factory=lambda: 1)
    phase_seconds: Annotated[
        Mapping[str, float],
        about(
            "by phase: its time in all of these steps, to 4 digits; deciding is the controller, reading the wait of training "
            "for batches that are not in memory, and writing the wait for the rows of the step before; on CUDA the other phases "
            "are timed by the device, and the last of a step may be counted with the next [seconds]"
        ),
    ]
    reading_p95: Annotated[
        Value,
        about(
            "the wait for a batch that 95 % of those of these steps did not exceed, up to 5 % too high; null where all "
            "examples are in memory [seconds]"
        ),
    ] = None
    device_reads: Annotated[
        Count,
        about("reads of the device in all of these steps: 1 a step, and 1 more where an environment was restored"),
    ]
    output_waits: Annotated[
        Count | None,
        about("how often the run waited in these steps because the queue of an output was full; null without one"),
    ] = None
    output_wait_seconds: Annotated[Value, about("how long it waited so; null without an output [seconds]")] = None


class GradientsRow(AtStepRow, tag="gradients", kw_only=True):
    """Records gradient norms of a step before clipping, to 5 digits: of the host, of seeds, and at level debug of parameters.

    A norm is the mean over the optimizer steps of the step [units of the loss / units of the parameter]. The norms of each
    parameter are those of the training pass, also in an environment that was restored afterwards; there, null is a norm that is
    not finite. They are left out in a step that raises the level to debug, because it was trained before, and by `esper.Growth`.
    """

    host_gradients: Annotated[Numbers, about("gradient norm of the host, mean over the step")]
    seed_gradients: Annotated[
        Matrix, about("gradient norm of the seed, mean over the step; null where no seed trained")
    ]
    host_parameter_gradients: Annotated[
        Mapping[str, Numbers] | None,
        about("at level debug, by the name of the parameter in the host: (E,) its gradient norm"),
    ] = None
    seed_parameter_gradients: Annotated[
        Mapping[str, Numbers] | None,
        about(
            "at level debug, by `slot/name`, the name being that of the parameter in the seed: (E,) its gradient "
            "norm; null where the environment trains no such seed"
        ),
    ] = None


class RollbackRow(EnvRow, tag="rollback", kw_only=True):
    """Says that an environment, or its twin, failed in a step and was restored to its last healthy snapshot."""

    twin: Annotated[bool, about("true if the never-grow twin failed, false if the environment itself failed")]
    reason: Annotated[str, about("the vital sign that failed")]
    metric: Annotated[Value, about("task metric on the probe split, before the restoration")]
    loss: Annotated[Value, about("loss on the probe split, before the restoration")]
    pruned: Annotated[Sequence[str], about("slots whose seed is not in the snapshot")]
    slot_stages: Annotated[Sequence[StageNumber], "S", about("stage of every slot, after the restoration")]


class AnomalyRow(AtStepRow, tag="anomaly", kw_only=True):
    """Says that a vital sign failed in a step. The level of the telemetry rises for some steps, if a higher one writes more."""

    reason: Annotated[str, about("the vital sign that failed")]
    failed_envs: Annotated[Sequence[Count], about("environments in which it failed")]
    failed_twins: Annotated[Sequence[Count], about("environments in whose never-grow twin it failed")] = ()
    raised_level: Annotated[str | None, about("level that holds from this step on; null if it did not rise")] = None
    raised_steps: Annotated[Count, about("steps for which it holds, this one included")] = 0


class WideningRow(AtStepRow, tag="widening", kw_only=True):
    """Says that all networks became wider after the training of a step (`widen.at`); what they compute stayed the same."""

    host_param_counts: Annotated[Integers, about("parameters of the hosts from now on")]
    widths: Annotated[
        Mapping[str, Sequence[Count]],
        about("by the first layer that returns them: how many hidden features there were, and how many there are"),
    ]
    left_out: Annotated[Mapping[str, str], about("by the first layer of the other hidden features: why they stay")] = {}


class EpisodeRow(EnvRow, tag="episode", kw_only=True):
    """Records one environment at the end of an episode. The figures are those of the network that is exported."""

    step: Annotated[Count, about("steps taken")]
    metric: Annotated[Value, about("task metric on the probe split")]
    loss: Annotated[Value, about("loss on the probe split")]
    host_params: Annotated[Count, about("parameters of the host")]
    added_params: Annotated[Count, about("parameters of the seeds that were kept")]
    fossilized: Annotated[Count, about("seeds that were kept")]
    grown: Annotated[dict[str, str], about("blueprint by slot, of the seeds that were kept")]
    unfinished: Annotated[Sequence[str], about("slots whose seed was not kept and is left out")]
    rollbacks: Annotated[Count, about("restorations of the environment in the episode")]


class EvaluationRow(PlayedRow, tag="evaluation", kw_only=True):
    """Records an evaluation of the networks as they are exported: at the end of a run, and in a training after a round."""

    split: Annotated[str, about("test or validation")]
    metrics: Annotated[Numbers, about("task metric on the split")]
    losses: Annotated[Numbers, about("loss on the split")]
    objectives: Annotated[Numbers, about("J: metric or minus loss, less the rent of the parameters")]
    twin_metrics: Annotated[Numbers | None, about("metric of the never-grow twins; null without")] = None


class CheckpointRow(Row, tag="checkpoint", kw_only=True):
    """Says that a checkpoint was written. The row follows when it is complete, at the latest at the end of the run."""

    steps: Annotated[Count, about("steps that were taken before it; in a training those of all rounds")]
    file: Annotated[str, about("its folder within the run folder")]
    bytes: Annotated[Count, about("size of its files [bytes]")]
    seconds: Annotated[
        Value, about("duration of the writing, beside the run; null where the run was resumed from it [seconds]")
    ] = None
    best: Annotated[bool, about("whether it is that of the best controller so far")] = False


class RoundRow(Row, tag="round", kw_only=True):
    """Records one round of a controller's training."""

    round: Annotated[Whole, about("counted from 0; rounds of imitation are below 0")]
    seconds: Annotated[float, about("duration of the round [seconds]")]
    figures: Annotated[Mapping[str, Value], about("by name (`esper docs training`); null where not measured")]
    anomalies: Annotated[Mapping[str, str], about("what is wrong with the learner: a sentence by name")] = {}


class SizeRow(Row, tag="size", kw_only=True):
    """Records the size of a network under `esper.AnytimeGrowth`: at each growth, each look at its loss, each 8 % of compute."""

    step: Annotated[Count, about("steps of the optimizer so far")]
    seen: Annotated[Count, about("targets, such as labels or tokens, that the loop has trained on")]
    params: Annotated[Count, about("parameters of the network")]
    loss: Annotated[Value, about("loss of the averaged network on the probe; null where it was not looked at")] = None
    widths: Annotated[
        Mapping[str, Sequence[Count]],
        about("by layer: its width before and after the growth; absent where the network did not grow"),
    ] = {}
    seconds: Annotated[Value, about("what the growth took; null where the network did not grow [seconds]")] = None
    why: Annotated[str | None, about("why the network became wider, or why it is not larger")] = None


KINDS: Mapping[str, type[Row]] = {
    str(each.__struct_config__.tag): each
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, Row) and not each.__subclasses__()
}
"""The kinds of rows by their names in the file, in the order of this one: every class from which no other derives."""
