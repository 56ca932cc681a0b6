"""Define the config of a run: one class per section, one field per key with its unit and its meaning, and how layers merge.

The keys are those of YAML files, of `--set` and of `build_config`. The text below a field is its meaning in `esper config`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from esper.leyline.config.input import dotted, explain, merged, show, to_sections
from esper.leyline.config.parsing import NUMBERS, parse_yaml
from esper.leyline.distribution import TARGETS
from esper.leyline.lifecycle.vocabulary import Head, Op
from esper.leyline.messages import InputError
from esper.leyline.plugins import OUTPUTS, plugins

LARGE = 10**9
"""Upper limit of every whole number in a config but the seed."""
SENSOR_FAMILIES = ("participation", "inner", "dead", "drift", "gradient", "explained")
"""Families of growth sensors, which are measured apart (tolaria/measure/sensors.py has the sensors of each)."""


def _chosen(value: Any, known: Sequence[str], mend: str) -> tuple[str, ...]:
    """Return the names of a list, or of a text with commas, in the order of `known`. ValueError with `mend` for others."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or any(name not in known for name in names):
        raise ValueError(mend)
    return tuple(name for name in known if name in names)


class Section(BaseModel):
    """Groups keys that belong together. Unknown keys, numbers that are not finite, and changes after construction are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield what is printed: the keys whose values differ from their defaults."""
        for name, field in type(self).model_fields.items():
            if getattr(self, name) != field.default:
                yield name, getattr(self, name)

    __str__ = BaseModel.__repr__

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_booleans_and_large_numbers(cls, data: Any) -> Any:
        """Take true and false for on and off, as which YAML reads these; refuse them as numbers, and whole ones above `LARGE`."""
        for name, value in dict(data).items() if isinstance(data, Mapping) else ():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            if isinstance(value, bool) and (word := "on" if value else "off") in get_args(annotation):
                data = {**data, name: word}
            elif isinstance(value, bool) and annotation in (int, float, float | None):
                raise ValueError(f"{name} is {value}; give a number")
            listed = value if annotation == tuple[int, ...] and isinstance(value, list | tuple) else ()
            if any(isinstance(each, bool) for each in listed):
                raise ValueError(f"{name} is {show(value)}; give a list of whole numbers")
            if annotation is int and name != "seed":
                number = value if isinstance(value, int | float) else 0
                if isinstance(value, str) and value.lstrip("+-").isdigit():
                    number = float(value)
                if abs(number) > LARGE:
                    raise ValueError(f"{name} is {show(value)}; give a whole number up to {LARGE:,}")
        return data


def _by_name(field: str, known: type[IntEnum], wanted: str) -> Any:
    """Return a validator of numbers of at least 0 by names of an enumeration in lower case, which says what is wanted."""

    def check(value: Mapping[str, float]) -> dict[str, float]:
        if any(name.upper() not in known.__members__ or number < 0 for name, number in value.items()):
            raise ValueError(f"give {wanted}: {', '.join(each.name.lower() for each in known)}")
        return dict(value)

    return pydantic.field_validator(field)(check)


class DataConfig(Section):
    """Sets the batches that a network trains on."""

    batch_size: int = Field(64, ge=1)
    """training examples per environment and batch [examples]"""
    batches_per_step: int = Field(16, ge=1)
    """batches per environment and step [batches]"""
    microbatch: int = Field(0, ge=0)
    """largest number of examples of a batch whose activations are in memory at one time; 0 takes the whole batch (`esper docs
    precision`) [examples]"""
    read_ahead: int = Field(2, ge=0, le=1024)
    """batches of a task with stream=True that are read before training needs them, by a thread or by the workers of the task; 0
    reads each batch when it is needed (`esper docs tasks`) [batches]"""
    nonfinite: Literal["stop", "skip"] = "stop"
    """examples that hold NaN or an infinite value: stop ends the run and names them, skip leaves them out"""


class OptimizerConfig(Section):
    """Sets the optimizer of every host and every seed."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw (Loshchilov and Hutter), or sgd with momentum"""
    lr: float = Field(5e-3, gt=0)
    """learning rate of the hosts and the seeds"""
    weight_decay: float = Field(0.0, ge=0)
    """weight decay: decoupled for adamw, added to the gradient for sgd; 0 disables it"""
    momentum: float = Field(0.9, ge=0, lt=1)
    """momentum of sgd; adamw ignores it and uses betas 0.9 and 0.999"""
    max_grad_norm: float | None = Field(None, gt=0)
    """largest gradient norm of a host, and of a seed; a larger gradient is scaled down; null disables clipping"""
    accumulation_steps: int = Field(1, ge=1)
    """batches whose gradients are averaged into one optimizer step [batches]"""


class LifecycleConfig(Section):
    """Sets which seeds may be planted, and how a seed enters the network."""

    max_seeds: int = Field(2, ge=0)
    """largest number of seeds per environment, fossils included [seeds]"""
    max_training_seeds: int = Field(1, ge=1)
    """largest number of seeds per environment that incubate (stage TRAINING) at one time [seeds]"""
    embargo: int = Field(2, ge=0)
    """steps after a prune in which its slot cannot be planted [steps]"""
    min_prune_age: int = Field(1, ge=0)
    """steps after germination before a seed may be pruned [steps]"""
    direct: bool = False
    """GERMINATE may choose a ramp of 0 steps, with which a seed acts at its target from its first step, without incubation: what
    it adds is 0 at first; the rule heuristic does so where something is plainly missing"""
    absorb: bool = False
    """a kept seed that is further units of two layers, or a narrow copy, becomes part of the host at once, and its slot can be
    planted again; for esper.Growth under the rule heuristic"""
    auto_advance: bool = False
    """advance an incubating seed as soon as its gate passes, without a decision of the controller"""
    incubation: Literal["shadow", "ste"] = "shadow"
    """objective that an incubating seed minimises (`esper docs lifecycle`)"""
    proximal: float = Field(1.0, ge=0)
    """weight of |change|^2 / |stream|^2 in the objective of an incubating seed, for ste"""
    isolation: Literal["open", "isolated"] = "open"
    """isolated stops the gradient from a live seed to what it reads until the seed is fossilized; open does not, and grew
    networks as good or better (`esper docs lifecycle`)"""
    ramp: Literal["linear", "cosine", "sigmoid"] = "linear"
    """curve along which alpha moves from its present value to its target"""
    tempos: tuple[int, ...] = Field((0, 1, 2, 4, 8), min_length=1)
    """ramp lengths that a decision may choose; only PRUNE and SET_ALPHA may choose 0 [steps]"""
    targets: tuple[float, ...] = Field((0.25, 0.5, 0.75, 1.0), min_length=1)
    """alphas at the end of a ramp that a decision may choose"""

    @pydantic.field_validator("tempos")
    @classmethod
    def _check_tempos(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not min(value) == 0 < max(value) <= 10**6 or len(set(value)) < len(value):
            raise ValueError("give distinct lengths: 0, at least one above 0, none below 0, and none above 1,000,000")
        return value

    @pydantic.field_validator("targets")
    @classmethod
    def _check_targets(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < alpha <= 1 for alpha in value) or len(set(value)) < len(value):
            raise ValueError("give distinct numbers above 0 and of at most 1")
        return value


class GatesConfig(Section):
    """Sets the checks that a seed must pass before ADVANCE (gate G2) and before FOSSILIZE (gate G5)."""

    min_training_steps: int = Field(2, ge=0)
    """steps that a seed must incubate (stage TRAINING) before ADVANCE is allowed [steps]"""
    gain_z: float = 1.0
    """gate G2: the incubation gain of a seed must exceed this many of its standard errors [standard errors]"""
    min_holding_steps: int = Field(2, ge=0)
    """steps that a seed must be on trial (stage HOLDING) before FOSSILIZE is allowed [steps]"""
    min_contribution: float = 0.0
    """gate G5: limit that the lower confidence bound of a seed's contribution must exceed"""
    contribution_z: float = Field(1.0, ge=0)
    """gate G5: the lower confidence bound is the contribution less this many standard errors [standard errors]"""
    permissive: bool = False
    """true requires only the smallest number of steps and that gain or contribution was measured"""
    twins: bool = False
    """gate G5: compare the network with one that is trained beside it without the seed, on the same batches, for as long as the
    seed is on trial, and not with itself without the seed; for esper.Growth under the rule heuristic"""
    certify: float | None = Field(None, gt=0, lt=1)
    """gate G5: largest chance, over all seeds of all environments that share fresh examples, of certifying one that does not
    help on them (`esper docs lifecycle`); null keeps without a certificate"""
    certify_share: float = Field(0.5, gt=0, lt=1)
    """with certify, share of the probe split that is set aside as fresh examples, which only certificates read"""
    certify_clip: float = Field(1.0, gt=0)
    """with certify and a metric other than the accuracy, bound at which the difference of an example's losses is clipped [nats;
    regression: squared units]"""


class ProbeConfig(Section):
    """Sets the measurements on the probe split after every step."""

    coalitions_every: int = Field(4, ge=1)
    """steps between measurements of all coalitions of live seeds, which gates and attribution need; contributions are measured
    every step [steps]"""
    shapley_samples: int = Field(8, ge=2)
    """permutations, each with its reverse, that estimate the Shapley values of more than 4 live seeds [pairs]"""
    sensors_every: int | None = Field(None, ge=0)
    """steps between measurements of the growth sensors; 0 for none, null for what the controller needs [steps]"""
    sensors: tuple[str, ...] | None = None
    """families of growth sensors that are measured, of participation, inner, dead, drift, gradient and explained; null for all,
    and where sensors_every is null too for those that the controller names (`esper docs observation`)"""

    @pydantic.field_validator("sensors", mode="before")
    @classmethod
    def _parse_sensors(cls, value: Any) -> Any:
        mend = f"give families out of {', '.join(SENSOR_FAMILIES)}; sensors_every 0 measures none"
        return None if value is None else _chosen(value or None, SENSOR_FAMILIES, mend)


class RewardConfig(Section):
    """Sets the objective J = metric - rent * ln(1 + added / max(host, rent_size) parameters), and how J becomes a reward."""

    name: Literal["delta", "sparse", "escrow"] = "delta"
    """delta pays each change of J; sparse pays J_T - J_0 at the end; escrow (experimental) also pays kept seeds"""
    objective: Literal["metric", "log_loss"] = "metric"
    """first term of J: the metric of the task, or minus the loss [nats]"""
    rent: float = Field(0.1, ge=0)
    """price of parameters in J: doubling the network costs rent * ln 2"""
    rent_size: int = Field(0, ge=0)
    """a host with fewer parameters pays rent as if it had this many; tasks of your own set 1000 [parameters]"""
    relative_to: Literal["none", "twin", "group"] = "none"
    """what is subtracted. twin: the rise of J of the never-grow twin, from the reward of each step; group: the mean advantage of
    the group, from the advantage; none: nothing"""
    group_size: int = Field(8, ge=1)
    """environments that share an instance in training [environments]"""
    param_budget: float | None = Field(None, ge=0)
    """added parameters / host parameters above which the reward has a penalty; null disables the penalty"""
    param_penalty_weight: float = Field(0.1, ge=0)
    """penalty per unit of added parameters / host parameters above param_budget"""
    sparse_reward_scale: float = Field(1.0, gt=0)
    """factor of the reward named sparse"""
    compute_price: float = Field(0.0, ge=0)
    """price in J of the compute beyond the host's own, of seeds by their parameters and of the copies in which a controller
    trials:RULE tries candidates; 1 unit is what the host takes in an episode (`esper docs hosts`)"""
    fees: Mapping[str, float] = {}
    """cost of each operation that is carried out, by name in lower case, such as {prune: 0.01}"""

    _check_fees = _by_name("fees", Op, "a price of 0 or more by operation")


class TelemetryConfig(Section):
    """Sets which rows events.jsonl holds. This section does not change results."""

    level: Literal["off", "run", "step", "debug"] = "step"
    """rows of events.jsonl: off writes none; run leaves out those of every step; step writes all but the gradients rows; debug
    writes these too, every measurement of the sensors, and the decisions to WAIT"""
    sensor_rows_every: int | None = Field(None, ge=1)
    """steps between sensors rows, and between phases rows, at level step, raised to a multiple of probe.sensors_every for the
    sensors; null for about 30 of each in an episode [steps]"""
    gradients_every: int | None = Field(None, ge=0)
    """steps between gradients rows, which have the norms of each parameter at level debug; 0 for none, null for 1 at level debug
    and none at the others [steps]"""
    raise_steps: int = Field(3, ge=0)
    """steps for which the level run counts as step, and step as debug, after a network was restored; 0 for none [steps]"""
    exporters: tuple[str, ...] = ()
    """targets to which the run is exported while it goes on, of tensorboard, wandb, mlflow and trackio, into exports/TARGET
    beside the run folder; each needs its extra (`esper docs exporters`); and outputs of other packages (`esper docs plugins`)"""

    @pydantic.field_validator("exporters", mode="before")
    @classmethod
    def _parse_exporters(cls, value: Any) -> Any:
        known = (*TARGETS, *plugins(OUTPUTS))
        return _chosen(value, known, f"give a list of names out of {', '.join(known)}; [] for none")


class CheckpointConfig(Section):
    """Sets when the state of a run is written, so that `esper resume` can continue it. This section does not change results."""

    every_steps: int = Field(0, ge=0)
    """steps between checkpoints; 0 disables this trigger [steps]"""
    every_seconds: float = Field(30.0, ge=0)
    """seconds between checkpoints; 0 disables the timer [seconds]"""
    keep: int = Field(2, ge=1)
    """newest checkpoints that are kept; a training also keeps its best one [checkpoints]"""


class GovernorConfig(Section):
    """Sets when a network is restored to its last healthy snapshot, and which edits are refused because of their size."""

    enabled: bool = True
    """watch every network; false leaves a diverged network as it is until its episode ends"""
    snapshot_every: int = Field(1, ge=1)
    """steps between snapshots of healthy networks [steps]"""
    penalty: float = Field(0.5, ge=0)
    """amount subtracted from the reward of a step that is rolled back"""
    confirm_steps: int = Field(3, ge=1)
    """consecutive steps beyond loss_rise_z, min_output_spread or metric_drop_z before a network is restored; NaN and infinite
    values restore it immediately [steps]"""
    loss_window: int = Field(16, ge=2)
    """number of past training losses with which a new loss is compared [steps]"""
    loss_rise_z: float = Field(8.0, gt=0)
    """largest rise of the training loss above its median over loss_window steps [robust standard deviations, 1.4826 MAD]"""
    min_loss_std: float = Field(0.05, gt=0)
    """lower limit of the standard deviation in loss_rise_z, as a share of the loss before training"""
    min_output_spread: float = Field(1e-3, ge=0, lt=1)
    """smallest spread of a network's outputs over the examples, as a share of its largest spread so far; below it the network
    has collapsed"""
    metric_drop_z: float = Field(5.0, gt=0)
    """largest drop of the metric below its best value [standard errors of the difference]"""
    min_metric_drop: float = Field(0.2, ge=0)
    """a smaller drop of the metric is ignored, whatever its standard error [units of the metric]"""
    param_limit: float | None = Field(None, ge=0)
    """hard limit of the parameters of all seeds / host parameters; a planting above it is refused; null for none"""
    memory_share: float = Field(0.9, gt=0, le=1)
    """share of the free memory that the edits of one step may take"""


class EarlyStoppingConfig(Section):
    """Sets which state of a network is evaluated and exported, and when a run ends before its last step (`esper docs runs`)."""

    enabled: bool = False
    """evaluate and export each network in its best state by the validation split; tasks of your own set it"""
    patience: int = Field(12, ge=1)
    """steps without a better validation score and without a newly fossilized seed after which a run ends [steps]"""


class WidenConfig(Section):
    """Sets when all networks of a growth become wider together (`esper docs widening`)."""

    at: tuple[int, ...] = ()
    """numbers of steps after which all networks become wider, increasing; none leaves their widths as they are [steps]"""
    factor: int = Field(2, ge=2)
    """factor by which hidden widths rise each time"""

    @pydantic.field_validator("at")
    @classmethod
    def _check_at(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(step < 1 for step in value) or any(first >= second for first, second in pairwise(value)):
            raise ValueError("give increasing numbers of steps from 1 on, such as [8, 16]")
        return value


class FaultsConfig(Section):
    """Sets how long a run waits for a fault to pass before it stops. A run that stops can be resumed."""

    disk_seconds: float = Field(300.0, ge=0)
    """seconds for which a run waits for room on a full disk; 0 stops it immediately [seconds]"""
    worker_seconds: float = Field(1800.0, ge=0)
    """seconds without a sign of a worker after which it is ended, and another plays its part again; 0 waits for it without
    end [seconds]"""


class HeuristicConfig(Section):
    """Sets the limits of the rule `heuristic`."""

    plant_below: float = 0.94
    """plant only while the metric is below this share of the way from the best constant prediction (0) to a perfect one (1)"""
    weak_below: float = 0.5
    """the limit in place of plant_below where every free slot is behind a segment that is not narrow; such a slot is planted
    only while no seed incubates"""
    narrow_from: float = Field(0.5, gt=0)
    """a segment is narrow if participation_inner, the share of its inner units in use, is at least this"""
    tie_ratio: float = Field(1.5, ge=1)
    """where inner features are not measured, slots whose participation is at most this many times the lowest are equally good"""
    narrow_blueprints: tuple[str, ...] = ("bypass-linear", "bypass-conv-1x1")
    """blueprints for a slot behind a narrow segment, of which the first that fits is planted; tasks of your own set bypass-mlp
    and bypass-conv-3x3"""
    weak_blueprints: tuple[str, ...] = ("bypass-mlp", "bypass-conv-3x3")
    """blueprints for any other slot, and where inner features are not measured; the first that fits is planted"""
    nominated: int = Field(2, ge=1)
    """most seeds that incubate at once where it is measured what is missing at the sites, as in esper.Growth; of this and
    lifecycle.max_training_seeds, the smaller holds [seeds]"""
    missing_ratio: float = Field(0.3, ge=0, le=1)
    """of these sites, one is nominated where at least this share is missing of what is missing at the one that lacks most"""
    spare_steps: int = Field(0, ge=0)
    """steps that must remain in the episode beyond the shortest life of a seed for it to be planted [steps]"""
    keep_above: float = 0.5
    """keep a seed whose contribution exceeds this share of the rent for it"""
    holding_patience: int = Field(3, ge=1)
    """prune a seed on trial (stage HOLDING) after its gate has refused it for this many steps [steps]"""
    training_patience: int = Field(12, ge=1)
    """prune an incubating seed (stage TRAINING) after its gate has refused it for this many steps [steps]"""


class TrialsConfig(Section):
    """Sets the trials of a controller `trials:RULE`: its first candidates grow in copies of the network; the best is planted."""

    candidates: int = Field(4, ge=2)
    """largest number of candidates that an environment tries [candidates]"""
    trial_steps: int = Field(8, ge=1)
    """length of a trial: each candidate grows in a copy of the network for this long [steps]"""


class PPOConfig(Section):
    """Sets how a controller learns. A round is one episode of every environment, and one update of the policy."""

    rounds: int = Field(100, ge=0)
    """rounds of training; 0 ends with imitation [rounds]"""
    update_epochs: int = Field(4, ge=1)
    """passes over the rollout of a round [epochs]"""
    minibatches: int = Field(4, ge=1)
    """minibatches of a pass, each one step of the policy's optimizer"""
    lr: float = Field(1e-3, gt=0)
    """learning rate of the policy (Adam), annealed to a tenth"""
    clip_range: float = Field(0.2, gt=0, lt=1)
    """epsilon of PPO: changes of the joint probability ratio beyond it are not rewarded"""
    target_kl: float = Field(0.03, gt=0)
    """KL divergence from the policy before the update at which the update ends [nats]"""
    gamma: float = Field(1.0, gt=0, le=1)
    """discount factor per decision"""
    gae_lambda: float = Field(0.98, ge=0, le=1)
    """lambda of generalised advantage estimation (Schulman et al. 2016)"""
    value_weight: float = Field(0.5, ge=0)
    """weight of the critic's loss; 0 leaves the critic out, where groups give the baseline"""
    advantage_floor: float = Field(0.02, gt=0)
    """spread of the advantages, in units of J, from which on they are scaled to unit variance; a smaller one is not scaled up"""
    entropy_weight: float = Field(0.02, ge=0)
    """weight of the entropy of the sampled heads, annealed to a tenth"""
    entropy_weights: Mapping[str, float] = {}
    """the same for single heads, by name in lower case, such as {op: 0.05}; the others have ppo.entropy_weight"""
    exploration: float = Field(0.2, ge=0, lt=1)
    """weight of the uniform distribution when slot, blueprint, blend, tempo and target are sampled, annealed to 0"""
    op_exploration: float = Field(0.01, ge=0, lt=1)
    """weight of the uniform distribution when the operation is sampled, annealed to 0"""
    undo_bias: float = -4.0
    """bias of the logits of PRUNE and SET_ALPHA in an untrained policy; below 0, it rarely undoes what it planted"""
    partial_menus: float = Field(0.0, ge=0, le=1)
    """share of the environments that may plant only a part of the menu in an episode, drawn anew in each; 0 gives all of it"""
    imitation_rounds: int = Field(0, ge=0)
    """rounds before the first in which the policy learns to imitate the teacher [rounds]"""
    imitation_passes: int | None = Field(None, ge=1)
    """passes over what the teacher has shown in the last round of imitation; null is ppo.update_epochs [epochs]"""
    teacher: str = "heuristic"
    """controller that the policy imitates: a name, or the path of a schedule, of trees or of a trained controller"""
    decisions_per_step: int = Field(1, ge=1)
    """largest number of decisions of the policy for an environment in one step, such as to plant several seeds"""
    packages: tuple[str, ...] = ()
    """blueprints that one decision of the policy can plant in every slot behind a segment that keeps the width"""
    max_grad_norm: float = Field(0.5, gt=0)
    """largest gradient norm of the policy; a larger one is scaled down"""
    validate_every: int = Field(10, ge=1)
    """rounds between greedy evaluations of the policy on validation instances [rounds]"""
    validate_envs: int = Field(64, ge=1)
    """environments of each validation [environments]"""
    device: str = "cpu"
    """device of the policy: cpu, cuda or cuda:i, or same, that of the networks (`esper docs training`)"""
    exchange: Literal["gloo", "nccl"] = "gloo"
    """backend of torch.distributed through which workers sum gradients: gloo on the CPU, or nccl between GPUs"""

    _check_entropy_weights = _by_name("entropy_weights", Head, "a weight of 0 or more by head")


BASELINES = ("twin", "same-size", "plain", "skips")
"""The static networks that a run compares grown networks with (`esper docs baselines`), in the order in which they are shown."""


def baseline_names(value: Any) -> tuple[str, ...]:
    """Return the baselines of a list of names, a text with commas, 'none' or None, in order. ValueError for an unknown one."""
    given = [] if value is None or value in ("none", ["none"], ("none",)) else value
    return _chosen(given, BASELINES, f"give names out of {', '.join(BASELINES)}, or none")


class GrowthConfig(Section):
    """Holds the settings of a growth, whoever trains the network: all those that `esper.Growth` takes."""

    steps: int = Field(24, ge=1)
    """length of an episode [steps]"""
    seed: int = Field(0, ge=0, lt=2**63)
    """seed of the run, from which all its random numbers derive"""
    blueprints: tuple[str, ...] | None = None
    """names of the blueprints that may be planted; null for the menu of the task"""
    lifecycle: LifecycleConfig = LifecycleConfig()
    gates: GatesConfig = GatesConfig()
    probe: ProbeConfig = ProbeConfig()
    reward: RewardConfig = RewardConfig()
    governor: GovernorConfig = GovernorConfig()
    heuristic: HeuristicConfig = HeuristicConfig()
    trials: TrialsConfig = TrialsConfig()

    @pydantic.field_validator("slots", "blueprints", check_fields=False)
    @classmethod
    def _check_distinct(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError("give a list of at least one name, each once, or null for all")
        return value


class Config(GrowthConfig):
    """Holds all settings of a run, defaults included: those of its growth, and those of all that Esper does around it."""

    task: str = "digits"
    """name of the task; `esper tasks` lists the names"""
    tasks: tuple[str, ...] = ()
    """tasks that a controller is trained on; the first of them is `task`"""
    cohorts: Mapping[str, Any] = {}
    """in a training on several tasks, the config of each task but the first, by name of the task"""
    controller: str = "heuristic"
    """name of a controller (`esper controller` lists them), the path of a schedule file, or the run folder of a trained
    controller"""
    envs: int = Field(8, ge=1)
    """environments, twins not counted"""
    shards: int = Field(1, ge=1)
    """populations into which a training divides the environments of each task, for workers to play (`esper docs workers`);
    `--workers` chooses it where it is not set"""
    epochs: float | None = Field(None, gt=0)
    """length of an episode as passes over the train split; null takes steps (`esper docs runs`) [epochs]"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:i; auto takes cuda where torch sees such a device"""
    deterministic: bool = False
    """true uses only deterministic kernels of torch, without TF32 (`esper docs determinism`)"""
    amp: Literal["off", "bf16", "fp16", "auto"] = "off"
    """type of the products in training: off computes them in float32, bf16 in bfloat16, fp16 in float16 with a loss scale for
    each network, and auto in bfloat16 if the device multiplies it natively; parameters, the optimizer and all measured
    figures stay float32"""
    compile: Literal["off", "on", "auto"] = "off"
    """on compiles the training passes by torch's compiler, and auto does so for plans that gain from it by a measurement (`esper
    docs compiling`)"""
    activation_checkpointing: bool = False
    """true stores only the input of each segment and seed for the backward pass, which computes the rest again: less memory and
    more time for the same numbers (`esper docs precision`)"""
    baselines: tuple[str, ...] = BASELINES
    """static networks that are trained for comparison: any of twin, same-size, plain, skips, or none (`esper docs baselines`);
    the key twin, true or false, adds or removes the twin alone"""
    mapping: Literal["auto", "vmap", "loop"] = "auto"
    """how stacked modules run: vmap, loop, or auto, the fastest way that the module allows"""
    instances: Literal["training", "validation", "heldout"] = "training"
    """part of a mixture's instances that environments are drawn from; a data set has one part"""
    first_instance: int = Field(0, ge=0)
    """environment e is instance first_instance + e of that part"""
    models: Literal["all", "best", "none"] = "all"
    """which grown networks are exported"""
    report: bool = True
    """write report.html, one page about the run, at the end of the run"""
    select: Literal["metric", "objective"] = "metric"
    """score on the validation split that the best network has the highest of: the metric, or J"""
    slots: tuple[str, ...] | None = None
    """names of the slots that may be planted; null for all slots of the task"""
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    widen: WidenConfig = WidenConfig()
    faults: FaultsConfig = FaultsConfig()
    ppo: PPOConfig = PPOConfig()

    @property
    def twin(self) -> bool:
        """Whether every environment has a never-grow twin in its population."""
        return BASELINES[0] in self.baselines

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_twin(cls, data: Any) -> Any:
        return _without_twin(data, {}) if isinstance(data, Mapping) else data

    @pydantic.field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, value: Any) -> Any:
        if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value, re.ASCII):
            raise ValueError("give auto, cpu, cuda or cuda:i, such as cuda:0")
        return value

    _parse_baselines = pydantic.field_validator("baselines", mode="before")(baseline_names)

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> "Config":
        if self.data.batches_per_step % self.optimizer.accumulation_steps:
            raise ValueError(
                f"optimizer.accumulation_steps is {self.optimizer.accumulation_steps}, which does not divide "
                f"data.batches_per_step ({self.data.batches_per_step}); choose a divisor"
            )
        if self.data.microbatch > self.data.batch_size:
            raise ValueError(
                f"data.microbatch is {self.data.microbatch}, more than data.batch_size ({self.data.batch_size}); give at "
                "most that, or 0 for the whole batch"
            )
        if 0 < self.data.microbatch < self.data.batch_size and self.lifecycle.incubation == "ste":
            raise ValueError(
                f"data.microbatch is {self.data.microbatch}, but lifecycle.incubation is ste, whose proximal term is a ratio "
                "over a whole batch; set lifecycle.incubation to shadow, or data.microbatch to 0"
            )
        if self.activation_checkpointing and self.compile != "off":
            raise ValueError(
                f"activation_checkpointing is true, but compile is {self.compile}, and a compiled pass chooses by itself what it "
                "stores; set one of them to off"
            )
        return self


def build_config(*layers: Mapping[str, Any]) -> Config:
    """Return a config from mappings of keys to values; where several set a key, the last one wins.

    Sections are nested mappings or dotted keys: `{"optimizer": {"lr": 1}}` equals `{"optimizer.lr": 1}`. Raises InputError on
    the first bad key or value.
    """
    return _validated(Config, layers)


def build_growth_config(*layers: Mapping[str, Any]) -> GrowthConfig:
    """Return the settings of one network that grows in the user's own loop, from layers as those of `build_config`."""
    return _validated(GrowthConfig, layers)


_Model = TypeVar("_Model", bound=Section)


def _validated(model: type[_Model], layers: Sequence[Mapping[str, Any]]) -> _Model:
    try:
        return model.model_validate(merge_settings(*layers))
    except pydantic.ValidationError as error:
        raise InputError(explain(error, model)) from None


def merge_settings(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; where several set a key, the last one wins. InputError if a layer is not a mapping.

    `steps` and `epochs` are two ways to set one length: a layer that sets one of them removes the other of earlier layers.
    """
    settings: dict[str, Any] = {}
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise InputError(f"a config is {show(layer)}; give a mapping of keys to values, such as {{'steps': 24}}")
        later = _without_twin(to_sections(layer, Config), settings)
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if later.get(name) is not None and later.get(other) is None:
                settings.pop(other, None)
        settings = merged(settings, later)
    return settings


def _without_twin(layer: Mapping[str, Any], earlier: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the key `twin` of a layer, true or false, by `baselines`: those of this layer or of earlier ones, changed."""
    if "twin" not in layer:
        return layer
    twin, first = layer["twin"], BASELINES[0]
    if not isinstance(twin, bool):
        raise InputError(f"twin is {show(twin)}; give true or false, or name it among the baselines")
    rest = {key: value for key, value in layer.items() if key != "twin"}
    try:
        names = baseline_names(layer.get("baselines", earlier.get("baselines", BASELINES)))
    except ValueError:
        return rest  # the validation of baselines reports what is wrong
    if "baselines" in layer and (first in names) != twin:
        raise InputError(
            f"twin is {str(twin).lower()}, but baselines is {', '.join(names) or 'none'}; leave twin out, as baselines says it"
        )
    chosen = [name for name in BASELINES if (twin if name == first else name in names)]
    return {**rest, "baselines": chosen}


def parse_setting(text: str) -> dict[str, Any]:
    """Parse `a.b=value` to a nested mapping, with the value read as YAML. InputError if the key or the value is missing."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise InputError(f"--set {text!r} is not of the form key=value, for example --set data.batch_size=32")
    parsed: Any = parse_yaml(value, f"--set {text[:60]!r}", "quote the value")
    for part in reversed(name.strip().split(".")):
        parsed = {part: parsed}
    assert isinstance(parsed, dict)
    return parsed


OF_CONTROLLERS = (
    "gates",
    "probe.coalitions_every",
    "probe.sensors",
    "probe.sensors_every",
    "lifecycle.tempos",
    "lifecycle.targets",
)
"""The keys that a controller may set: those of gates, measurements and decisions, but none that changes the problem.

The name of a section stands for all keys of that section."""


def check_controller_settings(settings: Mapping[str, Any], who: str) -> None:
    """Raise InputError if settings of a controller hold a key that controllers may not set; `who` names its file."""
    for key, _ in dotted(settings):
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in OF_CONTROLLERS):
            raise InputError(
                f"{who} sets {key}, which a controller may not set; it may set {', '.join(OF_CONTROLLERS)}: leave {key} out "
                "there, and set it for the whole run or evaluation (--set, or the config; settings= of esper.evaluate)"
            )


def dump_config(config: Config) -> str:
    """Return the config as YAML, from which `runs.configuration.load_config_file` reads an equal config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes plain objects as PyYAML does, without aliases, which the reader refuses."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in NUMBERS:  # text that would be read as a number is quoted
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))


def reference(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every key, depth first, as strings. The meaning is the text below the field."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from reference(field.annotation, f"{prefix}{name}.")
        else:
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            assert field.description is not None, f"{prefix}{name} has no text below it"
            yield prefix + name, _type_name(field.annotation), default, " ".join(field.description.split())


def _type_name(annotation: Any) -> str:
    """Return a type as the table shows it: `list[int]`, `float | null`, `adamw | sgd`."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for old in ("typing.", "Literal", ", ...", "['", "']"):
        text = text.replace(old, "")
    for old, new in {"collections.abc.Mapping": "mapping", "tuple[": "list[", "None": "null", "', '": " | "}.items():
        text = text.replace(old, new)
    return text
