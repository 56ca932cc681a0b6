"""The sections of a config: one class per section, one field per key, with its unit and its meaning.

The file is long because it is the one table of all keys.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from esper.leyline.actions import Op
from esper.leyline.config_input import show
from esper.leyline.exporters import TARGETS

LARGE = 10**9
"""Upper limit of every whole number in a config but the seed."""
SENSOR_FAMILIES = ("participation", "inner", "dead", "drift", "gradient", "explained")
"""Families of growth sensors, which are measured apart (tolaria/sensors.py has the sensors of each)."""


class Section(BaseModel):
    """Keys that belong together. Unknown keys, numbers that are not finite, and changes after construction are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    renamed: ClassVar[Mapping[str, str]] = {}
    """Earlier names of keys, each with the dotted key that replaces it. A config that gives an earlier name is refused."""

    def __repr__(self) -> str:
        """The keys whose values differ from their defaults."""
        changed = (
            f"{name}={getattr(self, name)!r}"
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    __str__ = __repr__

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_earlier_names(cls, data: Any) -> Any:
        for name in data if isinstance(data, Mapping) else ():
            if name in cls.renamed:
                raise ValueError(f"{name} is now {cls.renamed[name]}")
        return data

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_booleans_and_large_numbers(cls, data: Any) -> Any:
        """Refuse true and false where a number is expected, and whole numbers above `LARGE`."""
        for name, value in data.items() if isinstance(data, Mapping) else ():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            if isinstance(value, bool) and annotation in (int, float, float | None):
                raise ValueError(f"{name} is {value}; give a number")
            if annotation is int and name != "seed":
                number = value if isinstance(value, int | float) else 0
                if isinstance(value, str) and value.lstrip("+-").isdigit():
                    number = float(value)
                if abs(number) > LARGE:
                    raise ValueError(f"{name} is {show(value)}; give a whole number up to {LARGE:,}")
        return data


class DataConfig(Section):
    """The batches that a network trains on."""

    renamed = {"batch": "data.batch_size"}

    batch_size: int = Field(64, ge=1, description="training examples per environment and batch [examples]")
    batches_per_step: int = Field(16, ge=1, description="batches per environment and step [batches]")
    microbatch: int = Field(
        0,
        ge=0,
        description="largest number of examples of a batch whose activations are in memory at one time; 0 takes the whole batch "
        "(`esper docs precision`) [examples]",
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="examples that hold NaN or an infinite value: stop ends the run and names them, skip leaves them out",
    )


class OptimizerConfig(Section):
    """The optimizer of every host and every seed."""

    renamed = {"accumulate": "optimizer.accumulation_steps", "clip": "optimizer.max_grad_norm"}

    name: Literal["adamw", "sgd"] = Field("adamw", description="adamw (Loshchilov and Hutter), or sgd with momentum")
    lr: float = Field(5e-3, gt=0, description="learning rate of the hosts and the seeds")
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay: decoupled for adamw, added to the gradient for sgd; 0 disables it"
    )
    momentum: float = Field(
        0.9, ge=0, lt=1, description="momentum of sgd; adamw ignores it and uses betas 0.9 and 0.999"
    )
    max_grad_norm: float | None = Field(
        None,
        gt=0,
        description="largest gradient norm of a host, and of a seed; a larger gradient is scaled down; null disables clipping",
    )
    accumulation_steps: int = Field(
        1, ge=1, description="batches whose gradients are averaged into one optimizer step [batches]"
    )


class LifecycleConfig(Section):
    """Which seeds may be planted, and how a seed enters the network."""

    renamed = {"max_training": "lifecycle.max_training_seeds"}

    max_seeds: int = Field(2, ge=0, description="largest number of seeds per environment, fossils included [seeds]")
    max_training_seeds: int = Field(
        1,
        ge=1,
        description="largest number of seeds per environment that incubate (stage TRAINING) at one time [seeds]",
    )
    embargo: int = Field(2, ge=0, description="steps after a prune in which its slot cannot be planted [steps]")
    min_prune_age: int = Field(1, ge=0, description="steps after germination before a seed may be pruned [steps]")
    auto_advance: bool = Field(
        False, description="advance an incubating seed as soon as its gate passes, without a decision of the controller"
    )
    incubation: Literal["shadow", "ste"] = Field(
        "shadow", description="objective that an incubating seed minimises (`esper docs lifecycle`)"
    )
    proximal: float = Field(
        1.0, ge=0, description="weight of |change|^2 / |stream|^2 in the objective of an incubating seed, for ste"
    )
    isolation: Literal["open", "isolated"] = Field(
        "open",
        description="isolated stops the gradient from a live seed to what it reads until the seed is fossilized; open does not",
    )
    ramp: Literal["linear", "cosine", "sigmoid"] = Field(
        "linear", description="curve along which alpha moves from its present value to its target"
    )
    tempos: tuple[int, ...] = Field(
        (0, 1, 2, 4, 8),
        min_length=1,
        description="ramp lengths that a decision may choose; only PRUNE and SET_ALPHA may choose 0 [steps]",
    )
    targets: tuple[float, ...] = Field(
        (0.25, 0.5, 0.75, 1.0), min_length=1, description="alphas at the end of a ramp that a decision may choose"
    )

    @pydantic.field_validator("tempos")
    @classmethod
    def _check_tempos(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if max(value) > 10**6:
            raise ValueError("give lengths of at most 1,000,000 steps")
        if min(value) != 0 or max(value) == 0 or len(set(value)) < len(value):
            raise ValueError("give distinct lengths: 0, at least one above 0, and none below 0")
        return value

    @pydantic.field_validator("targets")
    @classmethod
    def _check_targets(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < alpha <= 1 for alpha in value) or len(set(value)) < len(value):
            raise ValueError("give distinct numbers above 0 and of at most 1")
        return value


class GatesConfig(Section):
    """The checks that a seed must pass before ADVANCE (gate G2) and before FOSSILIZE (gate G5)."""

    renamed = {
        "min_training": "gates.min_training_steps",
        "min_holding": "gates.min_holding_steps",
        "z": "gates.contribution_z",
    }

    min_training_steps: int = Field(
        2, ge=0, description="steps that a seed must incubate (stage TRAINING) before ADVANCE is allowed [steps]"
    )
    gain_z: float = Field(
        1.0,
        description="gate G2: the incubation gain of a seed must exceed this many of its standard errors [standard errors]",
    )
    min_holding_steps: int = Field(
        2, ge=0, description="steps that a seed must be on trial (stage HOLDING) before FOSSILIZE is allowed [steps]"
    )
    min_contribution: float = Field(
        0.0, description="gate G5: limit that the lower confidence bound of a seed's contribution must exceed"
    )
    contribution_z: float = Field(
        1.0,
        ge=0,
        description="gate G5: the lower confidence bound is the contribution less this many standard errors [standard errors]",
    )
    permissive: bool = Field(
        False, description="true requires only the smallest number of steps and that gain or contribution was measured"
    )
    certify: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="gate G5: largest chance, over all seeds of all environments that share fresh examples, of certifying one "
        "that does not help on them (`esper docs lifecycle`); null keeps without a certificate",
    )
    certify_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="with certify, share of the probe split that is set aside as fresh examples, which only certificates read",
    )
    certify_clip: float = Field(
        1.0,
        gt=0,
        description="with certify and a metric other than the accuracy, bound at which the difference of an example's losses is "
        "clipped [nats; regression: squared units]",
    )


class ProbeConfig(Section):
    """The measurements on the probe split after every step."""

    coalitions_every: int = Field(
        4,
        description="steps between measurements of all coalitions of live seeds; contributions are measured every step [steps]",
    )
    shapley_samples: int = Field(
        8,
        ge=2,
        description="permutations, each with its reverse, that estimate the Shapley values of more than 4 live seeds [pairs]",
    )
    sensors_every: int | None = Field(
        None,
        ge=0,
        description="steps between measurements of the growth sensors; 0 for none, null for what the controller needs [steps]",
    )
    sensors: tuple[str, ...] | None = Field(
        None,
        description="families of growth sensors that are measured, of participation, inner, dead, drift, gradient and explained; "
        "null for all, and where sensors_every is null too for those that the controller names (`esper docs observation`)",
    )

    @pydantic.field_validator("sensors", mode="before")
    @classmethod
    def _parse_sensors(cls, value: Any) -> Any:
        """Distinct families in the order of `SENSOR_FAMILIES`, from a list or from a text with commas between them."""
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        if names is None:
            return None
        if not isinstance(names, list | tuple) or not names or any(name not in SENSOR_FAMILIES for name in names):
            raise ValueError(f"give families out of {', '.join(SENSOR_FAMILIES)}; sensors_every 0 measures none")
        return tuple(name for name in SENSOR_FAMILIES if name in names)

    @pydantic.field_validator("coalitions_every")
    @classmethod
    def _check_coalitions_every(cls, value: int) -> int:
        if value < 1:
            raise ValueError("gates and attribution need coalitions; give 1 or more steps")
        return value


class RewardConfig(Section):
    """The objective J = metric - rent * ln(1 + added / max(host, rent_size) parameters), and how J becomes a reward."""

    renamed = {"baseline": "reward.relative_to", "group": "reward.group_size"}

    name: Literal["delta", "sparse", "escrow"] = Field(
        "delta",
        description="delta pays each change of J; sparse pays J_T - J_0 at the end; escrow (experimental) also pays kept seeds",
    )
    objective: Literal["metric", "log_loss"] = Field(
        "metric", description="first term of J: the metric of the task, or minus the loss [nats]"
    )
    rent: float = Field(0.1, ge=0, description="price of parameters in J: doubling the network costs rent * ln 2")
    rent_size: int = Field(
        0,
        ge=0,
        description="a host with fewer parameters pays rent as if it had this many; tasks of your own set 1000 [parameters]",
    )
    relative_to: Literal["none", "twin", "group"] = Field(
        "none",
        description="what is subtracted. twin: the rise of J of the never-grow twin, from the reward of each step; "
        "group: the mean advantage of the group, from the advantage; none: nothing",
    )
    group_size: int = Field(8, ge=1, description="environments that share an instance in training [environments]")
    param_budget: float | None = Field(
        None,
        ge=0,
        description="added parameters / host parameters above which the reward has a penalty; null disables the penalty",
    )
    param_penalty_weight: float = Field(
        0.1, ge=0, description="penalty per unit of added parameters / host parameters above param_budget"
    )
    sparse_reward_scale: float = Field(1.0, gt=0, description="factor of the reward named sparse")
    compute_price: float = Field(
        0.0,
        ge=0,
        description="price in J of the compute beyond the host's own, of seeds by their parameters and of the copies in which a "
        "controller trials:RULE tries candidates; 1 unit is what the host takes in an episode (`esper docs hosts`)",
    )
    fees: Mapping[str, float] = Field(
        {}, description="cost of each operation that is carried out, by name in lower case, such as {prune: 0.01}"
    )

    @pydantic.field_validator("fees")
    @classmethod
    def _check_fees(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        if any(name.upper() not in Op.__members__ or fee < 0 for name, fee in value.items()):
            names = ", ".join(op.name.lower() for op in Op)
            raise ValueError(f"give a price of 0 or more by operation: {names}")
        return dict(value)


class TelemetryConfig(Section):
    """Which rows events.jsonl holds. This section does not change results."""

    level: Literal["off", "run", "step", "debug"] = Field(
        "step",
        description="rows of events.jsonl: off writes none; run leaves out those of every step; step writes all but the "
        "gradients rows; debug writes these too, every measurement of the sensors, and the decisions to WAIT",
    )
    sensor_rows_every: int | None = Field(
        None,
        ge=1,
        description="steps between sensors rows, and between phases rows, at level step, raised to a multiple of "
        "probe.sensors_every for the sensors; null for about 30 of each in an episode [steps]",
    )
    gradients_every: int | None = Field(
        None,
        ge=0,
        description="steps between gradients rows, which have the norms of each parameter at level debug; 0 for none, null for 1 "
        "at level debug and none at the others [steps]",
    )
    raise_steps: int = Field(
        3,
        ge=0,
        description="steps for which the level run counts as step, and step as debug, after a network was restored; 0 for none "
        "[steps]",
    )
    exporters: tuple[str, ...] = Field(
        (),
        description="targets to which the run is exported while it goes on, of tensorboard, wandb, mlflow and trackio, into "
        "exports/TARGET beside the run folder; each needs its extra (`esper docs exporters`)",
    )

    @pydantic.field_validator("level", mode="before")
    @classmethod
    def _accept_false(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads off without quotes as false

    @pydantic.field_validator("exporters", mode="before")
    @classmethod
    def _parse_exporters(cls, value: Any) -> Any:
        """Distinct names in the order of `TARGETS`, from a list or from a text with commas between them."""
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or any(name not in TARGETS for name in names):
            raise ValueError(f"give a list of names out of {', '.join(TARGETS)}; [] for none")
        return tuple(name for name in TARGETS if name in names)


class CheckpointConfig(Section):
    """When the state of a run is written, so that `esper resume` can continue it. This section does not change results."""

    every_steps: int = Field(0, ge=0, description="steps between checkpoints; 0 disables this trigger [steps]")
    every_seconds: float = Field(30.0, ge=0, description="seconds between checkpoints; 0 disables the timer [seconds]")
    keep: int = Field(
        2, ge=1, description="newest checkpoints that are kept; a training also keeps its best one [checkpoints]"
    )


class GovernorConfig(Section):
    """When a network is restored to its last healthy snapshot, and which edits are refused because of their size."""

    renamed = {
        "collapse": "governor.min_output_spread",
        "patience": "governor.confirm_steps",
        "history": "governor.loss_window",
        "loss_rise": "governor.loss_rise_z",
        "loss_floor": "governor.min_loss_std",
        "metric_fall": "governor.metric_drop_z",
        "least_fall": "governor.min_metric_drop",
        "param_budget": "governor.param_limit",
    }

    enabled: bool = Field(
        True, description="watch every network; false leaves a diverged network as it is until its episode ends"
    )
    snapshot_every: int = Field(1, ge=1, description="steps between snapshots of healthy networks [steps]")
    penalty: float = Field(0.5, ge=0, description="amount subtracted from the reward of a step that is rolled back")
    confirm_steps: int = Field(
        3,
        ge=1,
        description="consecutive steps beyond loss_rise_z, min_output_spread or metric_drop_z before a network is restored; NaN "
        "and infinite values restore it immediately [steps]",
    )
    loss_window: int = Field(
        16, ge=2, description="number of past training losses with which a new loss is compared [steps]"
    )
    loss_rise_z: float = Field(
        8.0,
        gt=0,
        description="largest rise of the training loss above its median over loss_window steps "
        "[robust standard deviations, 1.4826 MAD]",
    )
    min_loss_std: float = Field(
        0.05,
        gt=0,
        description="lower limit of the standard deviation in loss_rise_z, as a share of the loss before training",
    )
    min_output_spread: float = Field(
        1e-3,
        ge=0,
        lt=1,
        description="smallest spread of a network's outputs over the examples, as a share of its largest spread so far; below "
        "it the network has collapsed",
    )
    metric_drop_z: float = Field(
        5.0, gt=0, description="largest drop of the metric below its best value [standard errors of the difference]"
    )
    min_metric_drop: float = Field(
        0.2,
        ge=0,
        description="a smaller drop of the metric is ignored, whatever its standard error [units of the metric]",
    )
    param_limit: float | None = Field(
        None,
        ge=0,
        description="hard limit of the parameters of all seeds / host parameters; a planting above it is refused; null for none",
    )
    memory_share: float = Field(
        0.9, gt=0, le=1, description="share of the free memory that the edits of one step may take"
    )


class EarlyStoppingConfig(Section):
    """Which state of a network is evaluated and exported, and when a run ends before its last step (`esper docs runs`)."""

    enabled: bool = Field(
        False,
        description="evaluate and export each network in its best state by the validation split; tasks of your own set it",
    )
    patience: int = Field(
        12,
        ge=1,
        description="steps without a better validation score and without a newly fossilized seed after which a run ends [steps]",
    )


class FaultsConfig(Section):
    """How long a run waits for a fault to pass before it stops. A run that stops can be resumed."""

    disk_seconds: float = Field(
        300.0,
        ge=0,
        description="seconds for which a run waits for room on a full disk; 0 stops it immediately [seconds]",
    )


class HeuristicConfig(Section):
    """The rule `heuristic`."""

    renamed = {
        "tie": "heuristic.tie_ratio",
        "slack": "heuristic.spare_steps",
        "keep": "heuristic.keep_above",
        "patience": "heuristic.holding_patience",
    }
    removed: ClassVar[Mapping[str, str]] = {
        "start": "the rule plants from the first decision on; leave the key out",
        "threshold": "give heuristic.plant_below, the share of the way from the best constant prediction to a perfect one",
        "blueprint": "give heuristic.narrow_blueprints and heuristic.weak_blueprints, the names in order of preference",
        "min_rank": "give heuristic.narrow_from, the share of its inner units in use from which a segment is narrow",
    }
    """Keys that no longer exist, each with what replaces it."""

    plant_below: float = Field(
        0.94,
        description="plant only while the metric is below this share of the way from the best constant prediction (0) to a "
        "perfect one (1)",
    )
    weak_below: float = Field(
        0.5,
        description="the limit in place of plant_below where every free slot is behind a segment that is not narrow; such a "
        "slot is planted only while no seed incubates",
    )
    narrow_from: float = Field(
        0.5,
        gt=0,
        description="a segment is narrow if participation_inner, the share of its inner units in use, is at least this",
    )
    tie_ratio: float = Field(
        1.5,
        ge=1,
        description="where inner features are not measured, slots whose participation is at most this many times the lowest are "
        "equally good",
    )
    narrow_blueprints: tuple[str, ...] = Field(
        ("bypass-linear", "bypass-conv-1x1"),
        description="blueprints for a slot behind a narrow segment, of which the first that fits is planted; tasks of your own "
        "set bypass-mlp and bypass-conv-3x3",
    )
    weak_blueprints: tuple[str, ...] = Field(
        ("bypass-mlp", "bypass-conv-3x3"),
        description="blueprints for any other slot, and where inner features are not measured; the first that fits is planted",
    )
    spare_steps: int = Field(
        0,
        ge=0,
        description="steps that must remain in the episode beyond the shortest life of a seed for it to be planted [steps]",
    )
    keep_above: float = Field(0.5, description="keep a seed whose contribution exceeds this share of the rent for it")
    holding_patience: int = Field(
        3,
        ge=1,
        description="prune a seed on trial (stage HOLDING) after its gate has refused it for this many steps [steps]",
    )
    training_patience: int = Field(
        12,
        ge=1,
        description="prune an incubating seed (stage TRAINING) after its gate has refused it for this many steps [steps]",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_removed_keys(cls, data: Any) -> Any:
        for name in data if isinstance(data, Mapping) else ():
            if name in cls.removed:
                raise ValueError(f"{name} is no longer a key; {cls.removed[name]}")
        return data


class TrialsConfig(Section):
    """The trials of a controller `trials:RULE`: its first candidates grow in copies of the network, and the best is planted."""

    candidates: int = Field(4, ge=2, description="largest number of candidates that an environment tries [candidates]")
    trial_steps: int = Field(
        8, ge=1, description="length of a trial: each candidate grows in a copy of the network for this long [steps]"
    )


class PPOConfig(Section):
    """How a controller learns. A round is one episode of every environment, and one update of the policy."""

    renamed = {
        "epochs": "ppo.update_epochs",
        "clip": "ppo.clip_range",
        "lam": "ppo.gae_lambda",
        "entropy": "ppo.entropy_weight",
        "exploration_op": "ppo.op_exploration",
    }

    rounds: int = Field(100, ge=0, description="rounds of training; 0 ends with imitation [rounds]")
    update_epochs: int = Field(4, ge=1, description="passes over the rollout of a round [epochs]")
    minibatches: int = Field(4, ge=1, description="minibatches of a pass, each one step of the policy's optimizer")
    lr: float = Field(1e-3, gt=0, description="learning rate of the policy (Adam), annealed to a tenth")
    clip_range: float = Field(
        0.2, gt=0, lt=1, description="epsilon of PPO: changes of the joint probability ratio beyond it are not rewarded"
    )
    target_kl: float = Field(
        0.03, gt=0, description="KL divergence from the policy before the update at which the update ends [nats]"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount factor per decision")
    gae_lambda: float = Field(
        0.98, ge=0, le=1, description="lambda of generalised advantage estimation (Schulman et al. 2016)"
    )
    value_weight: float = Field(0.5, ge=0, description="weight of the critic's loss")
    entropy_weight: float = Field(
        0.02, ge=0, description="weight of the entropy of the sampled heads, annealed to a tenth"
    )
    exploration: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="weight of the uniform distribution when slot, blueprint, blend, tempo and target are sampled, annealed to 0",
    )
    op_exploration: float = Field(
        0.01, ge=0, lt=1, description="weight of the uniform distribution when the operation is sampled, annealed to 0"
    )
    undo_bias: float = Field(
        0.0,
        description="bias of the logits of PRUNE and SET_ALPHA in an untrained policy; below 0, it rarely undoes what it planted",
    )
    imitation_rounds: int = Field(
        0, ge=0, description="rounds before the first in which the policy learns to imitate the teacher [rounds]"
    )
    imitation_passes: int | None = Field(
        None,
        ge=1,
        description="passes over what the teacher has shown in the last round of imitation; null is ppo.update_epochs [epochs]",
    )
    teacher: str = Field(
        "heuristic",
        description="controller that the policy imitates: a name, or the path of a schedule, of trees or of a trained controller",
    )
    decisions_per_step: int = Field(
        1,
        ge=1,
        description="largest number of decisions of the policy for an environment in one step, such as to plant several seeds",
    )
    packages: tuple[str, ...] = Field(
        (),
        description="blueprints that one decision of the policy can plant in every slot behind a segment that keeps the width",
    )
    max_grad_norm: float = Field(
        0.5, gt=0, description="largest gradient norm of the policy; a larger one is scaled down"
    )
    validate_every: int = Field(
        10, ge=1, description="rounds between greedy evaluations of the policy on validation instances [rounds]"
    )
    validate_envs: int = Field(64, ge=1, description="environments of each validation [environments]")
