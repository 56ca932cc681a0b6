"""The configuration tree: the one source of YAML files, `--set`, and the reference that `esper config` prints.

Every field says in one line what it means and, where it has one, its unit. Unknown keys are refused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from esper.leyline.actions import Op
from esper.leyline.config_input import RENAMED, explain, show, to_sections
from esper.leyline.errors import InputError
from esper.leyline.parsing import NUMBERS, parse_yaml

LARGE = 10**9
"""More than any count of steps, rows or seeds that a machine can hold."""

BASELINES = ("twin", "same-size", "plain", "skips")
"""The static networks that can stand beside grown ones (docs/baselines.md), in the order in which they are shown."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __repr__(self) -> str:
        """The keys that differ from their defaults."""
        changed = (
            f"{name}={getattr(self, name)!r}"
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    __str__ = __repr__

    @pydantic.model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        """Refuse the old name of a key, in a section of a config or in one that stands alone."""
        unknown = [name for name in data if name not in cls.model_fields] if isinstance(data, Mapping) else []
        for old, new in RENAMED.items():
            section, _, name = old.partition(".")
            if name in unknown and Config.model_fields[section].annotation is cls:
                raise ValueError(f"{name} is now {new}")
        return data

    @pydantic.model_validator(mode="before")
    @classmethod
    def _plain_numbers(cls, data: Any) -> Any:
        """Refuse true for 1, and whole numbers that no array can hold."""
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


class DataConfig(_Section):
    """What an optimizer step sees."""

    batch_size: int = Field(64, ge=1, description="training examples per environment and batch [examples]")
    batches_per_step: int = Field(16, ge=1, description="batches per environment and step [batches]")
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="examples that hold NaN or an infinite value: stop says which, skip leaves them out"
    )


class OptimizerConfig(_Section):
    """The optimizer of every row, host or seed."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="adamw (Loshchilov and Hutter) or sgd with momentum")
    lr: float = Field(5e-3, gt=0, description="learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled for adamw, added to the gradient for sgd")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd; adamw uses betas .9 and .999")
    max_grad_norm: float | None = Field(
        None, gt=0, description="gradient norm to which a row's gradient is clipped; null does not clip"
    )
    accumulation_steps: int = Field(
        1, ge=1, description="batches whose gradients are averaged into one optimizer step [batches]"
    )


class LifecycleConfig(_Section):
    """What may be planted, and how it enters the network."""

    max_seeds: int = Field(2, ge=0, description="seeds in the budget per environment, fossils included [seeds]")
    max_training_seeds: int = Field(
        1, ge=1, description="seeds that incubate at once (stage TRAINING) per environment [seeds]"
    )
    embargo: int = Field(2, ge=0, description="rest of a slot after a prune [steps]")
    min_prune_age: int = Field(1, ge=0, description="life of a seed before it may be pruned [steps]")
    auto_advance: bool = Field(False, description="advance a seed as soon as its gate passes, without an action")
    incubation: Literal["shadow", "ste"] = Field(
        "shadow", description="what an incubating seed minimises (docs/lifecycle.md)"
    )
    proximal: float = Field(1.0, ge=0, description="weight of |change|^2 / |stream|^2 in the ste objective")
    isolation: Literal["open", "isolated"] = Field(
        "open", description="isolated: no gradient through what a live seed reads, until it is fossilized"
    )
    ramp: Literal["linear", "cosine", "sigmoid"] = Field("linear", description="shape of the path of alpha")
    tempos: Annotated[tuple[int, ...], Field(min_length=1)] = Field(
        (0, 1, 2, 4, 8), description="ramp lengths a decision may choose; 0 only to prune or set alpha [steps]"
    )
    targets: Annotated[tuple[float, ...], Field(min_length=1)] = Field(
        (0.25, 0.5, 0.75, 1.0), description="alphas a decision may choose"
    )

    @pydantic.field_validator("tempos")
    @classmethod
    def _tempos(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(v > 10**6 for v in value):
            raise ValueError("give lengths of at most 1,000,000 steps")
        if any(v < 0 for v in value) or not any(v > 0 for v in value) or 0 not in value or len(set(value)) < len(value):
            raise ValueError("give distinct lengths: 0, at least one above 0, and none below 0")
        return value

    @pydantic.field_validator("targets")
    @classmethod
    def _targets(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < v <= 1 for v in value) or len(set(value)) < len(value):
            raise ValueError("give distinct numbers above 0 and of at most 1")
        return value


class GatesConfig(_Section):
    """What a seed must show before it advances (G2) and before it is kept (G5)."""

    min_training_steps: int = Field(
        2, ge=0, description="steps of incubation (stage TRAINING) before ADVANCE is allowed [steps]"
    )
    gain_z: float = Field(1.0, description="incubation gain must exceed this many standard errors")
    min_holding_steps: int = Field(
        2, ge=0, description="steps of trial (stage HOLDING) before FOSSILIZE is allowed [steps]"
    )
    min_contribution: float = Field(0.0, description="lower confidence bound of the contribution must exceed it")
    contribution_z: float = Field(
        1.0,
        ge=0,
        description="width of the confidence bound of the contribution, for min_contribution [standard errors]",
    )
    permissive: bool = Field(False, description="ask only for the dwell and that the number was measured")


class ProbeConfig(_Section):
    """What is measured on the probe split after every step."""

    coalitions_every: int = Field(
        4, description="cadence of complete attribution; contributions are measured always [steps]"
    )
    shapley_samples: int = Field(
        8, ge=2, description="antithetic permutations of attribution above 4 live seeds [pairs]"
    )
    sensors_every: int | None = Field(
        None, ge=0, description="cadence of the growth sensors; 0 measures none, null what the controller needs [steps]"
    )

    @pydantic.field_validator("coalitions_every")
    @classmethod
    def _coalitions(cls, value: int) -> int:
        if value < 1:
            raise ValueError("gates and attribution need coalitions; give 1 or more steps")
        return value


class RewardConfig(_Section):
    """The objective J = metric - rent * ln(1 + added / max(host, rent_size) parameters), and how a controller is paid for it."""

    name: Literal["delta", "sparse", "escrow"] = Field(
        "delta",
        description="delta: every rise of J; sparse: J_T - J_0 at the end; escrow: experimental, also pays for what is kept",
    )
    objective: Literal["metric", "log_loss"] = Field(
        "metric", description="the task's metric, or minus the loss [nats]"
    )
    rent: float = Field(0.1, ge=0, description="price of parameters: doubling the network costs rent * ln 2")
    rent_size: int = Field(
        0, ge=0, description="a smaller host pays rent as if it had so many; 1000 for tasks of one's own [parameters]"
    )
    relative_to: Literal["none", "twin", "group"] = Field(
        "none",
        description="what is subtracted. twin: the rise of J of the never-grow twin, from the reward of each step; "
        "group: the mean advantage of the group, from the advantage; none: nothing",
    )
    group_size: int = Field(8, ge=1, description="environments that share an instance in training [environments]")
    param_budget: float | None = Field(
        None, ge=0, description="soft cap of added parameters / host parameters; null for none"
    )
    param_penalty_weight: float = Field(
        0.1, ge=0, description="penalty of each host's worth of parameters above the cap"
    )
    sparse_reward_scale: float = Field(1.0, gt=0, description="factor of the sparse reward")
    fees: Mapping[str, float] = Field(
        {}, description="price of an accepted operation, by name in lower case, as {prune: 0.01}"
    )

    @pydantic.field_validator("fees")
    @classmethod
    def _fees(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        for name, fee in value.items():
            if name.upper() not in Op.__members__ or fee < 0:
                names = ", ".join(op.name.lower() for op in Op)
                raise ValueError(f"give a price of 0 or more by operation: {names}")
        return dict(value)


class TelemetryConfig(_Section):
    """What is written to events.jsonl. It never changes what is computed."""

    level: Literal["off", "run", "step"] = Field("step", description="off; run: all but step rows; step: everything")

    @pydantic.field_validator("level", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads off without quotes as false


class CheckpointConfig(_Section):
    """When the state of a run is written, so that `esper resume` goes on from there. It never changes what is computed."""

    every_steps: int = Field(0, ge=0, description="steps between checkpoints; 0 writes none by steps [steps]")
    every_seconds: float = Field(
        30.0, ge=0, description="seconds between checkpoints; 0 writes none by the clock [seconds]"
    )
    keep: int = Field(2, ge=1, description="checkpoints that are kept, the last ones, beside the best of a training")


class GovernorConfig(_Section):
    """When a row is taken for broken and rolled back to its last healthy snapshot, and which edits are refused beforehand."""

    enabled: bool = Field(True, description="watch every row; else a diverged one stays so to the end of its episode")
    snapshot_every: int = Field(1, ge=1, description="cadence of the snapshots of healthy rows [steps]")
    penalty: float = Field(0.5, ge=0, description="minus the reward of a step that is rolled back")
    confirm_steps: int = Field(
        3,
        ge=1,
        description="consecutive steps beyond loss_rise_z, min_output_spread or metric_drop_z after which a row is restored; NaN "
        "and infinite values restore it immediately [steps]",
    )
    loss_window: int = Field(
        16, ge=2, description="number of past training losses with which a new loss is compared [steps]"
    )
    loss_rise_z: float = Field(
        8.0,
        gt=0,
        description="rise of the training loss above its median over loss_window steps [robust standard deviations, 1.4826 MAD]",
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
        description="a row has collapsed where its outputs spread over the examples by less than this share of the largest "
        "spread so far",
    )
    metric_drop_z: float = Field(
        5.0, gt=0, description="drop of the metric below its best [standard errors of the difference]"
    )
    min_metric_drop: float = Field(
        0.2,
        ge=0,
        description="smallest drop of the metric that counts, whatever its standard error; in units of the metric",
    )
    param_limit: float | None = Field(
        None, ge=0, description="hard cap of the parameters of all seeds / host parameters; null for none"
    )
    memory_share: float = Field(
        0.9, gt=0, le=1, description="share of the free memory that the edits of a step may take"
    )


class EarlyStoppingConfig(_Section):
    """Which state of a network is evaluated and exported, and when a run ends before its last step (docs/runs.md)."""

    enabled: bool = Field(
        False, description="keep each network's best state by its validation split; tasks of one's own set it"
    )
    patience: int = Field(
        12, ge=1, description="steps without a better validation score or a fossilized seed that end a run [steps]"
    )


class FaultsConfig(_Section):
    """What a run puts up with before it stops, so that it can be resumed."""

    disk_seconds: float = Field(
        300.0, ge=0, description="how long a run waits for room where the disk is full; 0 stops it at once [seconds]"
    )


REMOVED: Mapping[str, str] = {
    "start": "the rule plants from the first decision on; leave the key out",
    "threshold": "give heuristic.plant_below, the share of the way from the best constant prediction to a perfect one",
    "blueprint": "give heuristic.narrow_blueprints and heuristic.weak_blueprints, the names in order of preference",
    "min_rank": "give heuristic.narrow_from, the share of its inner units in use from which a segment is narrow",
}
"""Keys of `heuristic` that are no more, and what stands in their place."""


class HeuristicConfig(_Section):
    """The rule `heuristic`."""

    plant_below: float = Field(
        0.94,
        description="plant while (metric - that of the best constant prediction) / (perfect metric - the same) is below it",
    )
    weak_below: float = Field(
        0.5,
        description="the same limit where no free slot is behind a narrow segment; plants only while no seed incubates",
    )
    narrow_from: float = Field(
        0.5,
        gt=0,
        description="a segment is narrow where participation_inner, the share of its inner units in use, is at least this",
    )
    tie_ratio: float = Field(
        1.5,
        ge=1,
        description="where inner features are not measured, slots whose participation is at most this many times the lowest are "
        "equally good",
    )
    narrow_blueprints: tuple[str, ...] = Field(
        ("bypass-linear", "bypass-conv-1x1"),
        description="what to plant behind a narrow segment: the first of these that fits; tasks of one's own have "
        "bypass-mlp and bypass-conv-3x3",
    )
    weak_blueprints: tuple[str, ...] = Field(
        ("bypass-mlp", "bypass-conv-3x3"),
        description="what to plant behind any other segment, and where inner features are not measured: the first that fits",
    )
    spare_steps: int = Field(
        0,
        ge=0,
        description="steps that must be left in the episode beyond the shortest life of a seed when it is planted [steps]",
    )
    keep_above: float = Field(0.5, description="keep a seed whose contribution exceeds this share of the rent for it")
    holding_patience: int = Field(
        3, ge=1, description="prune a seed on trial (stage HOLDING) that its gate has refused for so many steps [steps]"
    )
    training_patience: int = Field(
        12,
        ge=1,
        description="prune an incubating seed (stage TRAINING) that its gate has refused for so many steps [steps]",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _removed(cls, data: Any) -> Any:
        for name in REMOVED if isinstance(data, Mapping) else ():
            if name in data:
                raise ValueError(f"{name} is no key any more; {REMOVED[name]}")
        return data


class PPOConfig(_Section):
    """How a controller learns. A round is one episode of every environment and one update."""

    rounds: int = Field(100, ge=1, description="rounds of training [rounds]")
    update_epochs: int = Field(4, ge=1, description="passes over a round's rollout [epochs]")
    minibatches: int = Field(4, ge=1, description="parts of the sequences, each one step of the policy's optimizer")
    lr: float = Field(1e-3, gt=0, description="learning rate of the policy (Adam), annealed to a tenth")
    clip_range: float = Field(
        0.2, gt=0, lt=1, description="largest change of the joint probability ratio that is rewarded"
    )
    target_kl: float = Field(0.03, gt=0, description="an update ends when the policy has moved this far [nats]")
    gamma: float = Field(1.0, gt=0, le=1, description="discount a step")
    gae_lambda: float = Field(
        0.98, ge=0, le=1, description="lambda of generalised advantage estimation (Schulman et al. 2016)"
    )
    value_weight: float = Field(0.5, ge=0, description="weight of the critic's loss")
    entropy_weight: float = Field(
        0.02, ge=0, description="weight of the entropy of the sampled heads, annealed to a tenth"
    )
    exploration: float = Field(
        0.2, ge=0, lt=1, description="share of the uniform in the choice of slot, blueprint and the rest, annealed to 0"
    )
    op_exploration: float = Field(
        0.01, ge=0, lt=1, description="share of the uniform in the choice of the operation, annealed to 0"
    )
    imitation_rounds: int = Field(
        0, ge=0, description="rounds before the first in which the policy learns to do as the heuristic does [rounds]"
    )
    max_grad_norm: float = Field(0.5, gt=0, description="largest gradient norm of the policy")
    validate_every: int = Field(
        10, ge=1, description="cadence of the greedy evaluation on validation instances [rounds]"
    )
    validate_envs: int = Field(64, ge=1, description="validation instances [environments]")


class Config(_Section):
    """Everything that was asked for, after defaults."""

    task: str = Field("digits", description="name of the task; `esper tasks` lists them")
    tasks: tuple[str, ...] = Field((), description="tasks that a controller is trained on, `task` the first of them")
    cohorts: Mapping[str, Any] = Field(
        {}, description="of a training on several tasks: the configs of all but the first, by task"
    )
    controller: str = Field(
        "heuristic", description="never, random-valid, heuristic, a schedule file, or the run folder of a trained one"
    )
    envs: int = Field(8, ge=1, description="environments, twins not counted")
    steps: int = Field(24, ge=1, description="steps in an episode")
    epochs: float | None = Field(
        None,
        gt=0,
        description="length of an episode as passes over the train split, in place of steps (docs/runs.md) [epochs]",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="run seed: every draw is a hash of it and of what it is for")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:i")
    deterministic: bool = Field(
        False, description="use torch's deterministic kernels alone, without TF32 (docs/determinism.md)"
    )
    baselines: tuple[str, ...] = Field(
        BASELINES,
        description="static networks trained beside the grown ones: twin, same-size, plain, skips, or none "
        "(docs/baselines.md); twin: true or false adds or removes the first alone",
    )
    mapping: Literal["auto", "vmap", "loop"] = Field(
        "auto", description="how stacked modules run: auto takes the fastest that the module allows"
    )
    instances: Literal["training", "validation", "heldout"] = Field(
        "training", description="part of a mixture's instances that the environments are; one data set has but one"
    )
    first_instance: int = Field(0, ge=0, description="environment e is instance first_instance + e of that part")
    models: Literal["all", "best", "none"] = Field("all", description="which grown networks are exported")
    select: Literal["metric", "objective"] = Field(
        "metric", description="the best network has the highest metric, or the highest J, on the validation split"
    )
    slots: tuple[str, ...] | None = Field(None, description="slots that may be used, by name; null for all of the task")
    blueprints: tuple[str, ...] | None = Field(None, description="menu, by name; null for that of the task")
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    gates: GatesConfig = GatesConfig()
    probe: ProbeConfig = ProbeConfig()
    reward: RewardConfig = RewardConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    governor: GovernorConfig = GovernorConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    faults: FaultsConfig = FaultsConfig()
    heuristic: HeuristicConfig = HeuristicConfig()
    ppo: PPOConfig = PPOConfig()

    @pydantic.field_validator("device", mode="before")
    @classmethod
    def _device(cls, value: Any) -> Any:
        if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value, re.ASCII):
            raise ValueError("give auto, cpu, cuda or cuda:i, such as cuda:0")
        return value

    @property
    def twin(self) -> bool:
        """Whether a never-grow twin of every environment is a further row of its population."""
        return BASELINES[0] in self.baselines

    @pydantic.model_validator(mode="before")
    @classmethod
    def _twin(cls, data: Any) -> Any:
        return _without_twin(data, {}) if isinstance(data, Mapping) else data

    @pydantic.field_validator("baselines", mode="before")
    @classmethod
    def _baselines(cls, value: Any) -> Any:
        return baseline_names(value)

    @pydantic.field_validator("slots", "blueprints")
    @classmethod
    def _distinct(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError("give a list of at least one name, each once, or null for all")
        return value

    @pydantic.model_validator(mode="after")
    def _whole_accumulations(self) -> "Config":
        if self.data.batches_per_step % self.optimizer.accumulation_steps:
            raise ValueError(
                f"optimizer.accumulation_steps is {self.optimizer.accumulation_steps}, which does not divide "
                f"data.batches_per_step ({self.data.batches_per_step}); choose a divisor"
            )
        return self


def build_config(*layers: Mapping[str, Any]) -> Config:
    """A config from nested mappings, of which a later one goes over the earlier; `{"optimizer.lr": 1}` is taken too.

    InputError on the first bad key or value.
    """
    try:
        return Config.model_validate(merge_settings(*layers))
    except pydantic.ValidationError as error:
        raise InputError(explain(error, Config)) from None


def merge_settings(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one, of which a later one goes over the earlier. InputError where one is no mapping.

    A layer that gives `steps` and no `epochs` goes over the `epochs` of those before it too, and the other way round.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise InputError(f"a config is {show(layer)}; give a mapping of keys to values, such as {{'steps': 24}}")
        over = _without_twin(to_sections(layer, Config), merged)
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if over.get(name) is not None and over.get(other) is None:
                merged.pop(other, None)
        merged = _merge(merged, over)
    return merged


def baseline_names(value: Any) -> tuple[str, ...]:
    """Baselines from a list of names, a text of names with commas between them, or 'none'; in the order of `BASELINES`."""
    given = [] if value is None or value in ("none", ["none"], ("none",)) else value
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or any(name not in BASELINES for name in names):
        raise ValueError(f"give names out of {', '.join(BASELINES)}, or none")
    return tuple(name for name in BASELINES if name in names)


def _without_twin(layer: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layer of a config in which `twin`, true or false, has become a change of the `baselines` of the layers below it."""
    if "twin" not in layer:
        return layer
    twin, first = layer["twin"], BASELINES[0]
    if not isinstance(twin, bool):
        raise InputError(f"twin is {show(twin)}; give true or false, or name it among the baselines")
    rest = {key: value for key, value in layer.items() if key != "twin"}
    try:
        names = baseline_names(layer.get("baselines", below.get("baselines", BASELINES)))
    except ValueError:
        return rest  # the field says what is wrong with it
    if "baselines" in layer and (first in names) != twin:
        raise InputError(
            f"twin is {str(twin).lower()}, but baselines is {', '.join(names) or 'none'}; leave twin out, as baselines says it"
        )
    chosen = [name for name in BASELINES if (twin if name == first else name in names)]
    return {**rest, "baselines": chosen}


def parse_setting(text: str) -> dict[str, Any]:
    """`a.b=value` as a nested mapping, the value read as YAML. InputError where there is no key or no value."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise InputError(f"--set {text!r} is not of the form key=value, for example --set data.batch_size=32")
    parsed: Any = parse_yaml(value, f"--set {text[:60]!r}", "quote the value")
    for part in reversed(name.strip().split(".")):
        parsed = {part: parsed}
    assert isinstance(parsed, dict)
    return parsed


def dump_config(config: Config) -> str:
    """The config as YAML that `runs.configuration.load_config_file` reads back to an equal one."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_WrittenOut, sort_keys=False, allow_unicode=True)


class _WrittenOut(yaml.SafeDumper):
    """PyYAML's writer of plain objects, which writes out what stands in two places, as no alias is read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in NUMBERS:  # text that would be read as a number is quoted
    _WrittenOut.add_implicit_resolver(_tag, _pattern, list(_first))


def reference(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every field, depth first, as strings."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from reference(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, _type_name(field.annotation), _default(field.default), field.description or ""


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _type_name(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for old, new in (
        ("typing.", ""),
        ("collections.abc.Mapping", "mapping"),
        ("Literal", ""),
        ("tuple[", "list["),
        (", ...", ""),
        ("None", "null"),
    ):
        text = text.replace(old, new)
    if text.startswith("Annotated["):
        text = text.removeprefix("Annotated[").split("], ")[0] + "]"
    return text.replace("['", "").replace("']", "").replace("', '", " | ")


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
