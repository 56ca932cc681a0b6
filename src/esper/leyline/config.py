"""The config of a run: the keys of YAML files, of `--set` and of `build_config`, and how layers of settings are merged."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from esper.leyline.config_input import explain, show, to_sections
from esper.leyline.config_sections import (
    LARGE,
    CheckpointConfig,
    DataConfig,
    EarlyStoppingConfig,
    FaultsConfig,
    GatesConfig,
    GovernorConfig,
    HeuristicConfig,
    LifecycleConfig,
    OptimizerConfig,
    PPOConfig,
    ProbeConfig,
    RewardConfig,
    Section,
    TelemetryConfig,
    TrialsConfig,
)
from esper.leyline.errors import InputError
from esper.leyline.parsing import parse_yaml

__all__ = [
    "BASELINES",
    "LARGE",
    "RENAMED",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EarlyStoppingConfig",
    "FaultsConfig",
    "GatesConfig",
    "GovernorConfig",
    "HeuristicConfig",
    "LifecycleConfig",
    "OptimizerConfig",
    "PPOConfig",
    "ProbeConfig",
    "RewardConfig",
    "TelemetryConfig",
    "TrialsConfig",
    "baseline_names",
    "build_config",
    "merge_settings",
    "parse_setting",
]

BASELINES = ("twin", "same-size", "plain", "skips")
"""The static networks that a run compares grown networks with (`esper docs baselines`), in the order in which they are shown."""


class Config(Section):
    """All settings of a run, defaults included."""

    task: str = Field("digits", description="name of the task; `esper tasks` lists the names")
    tasks: tuple[str, ...] = Field((), description="tasks that a controller is trained on; the first of them is `task`")
    cohorts: Mapping[str, Any] = Field(
        {}, description="in a training on several tasks, the config of each task but the first, by name of the task"
    )
    controller: str = Field(
        "heuristic",
        description="name of a controller (`esper docs hosts`), the path of a schedule file or of fitted trees, or the "
        "run folder of a trained controller; where nothing sets it, `esper grow` takes shipped if its card says that it beats "
        "the rule (`esper docs shipped`)",
    )
    envs: int = Field(8, ge=1, description="environments, twins not counted")
    shards: int = Field(
        1,
        ge=1,
        description="populations into which a training divides the environments of each task, for actors to play "
        "(`esper docs actors`); `--workers` chooses it where it is not set",
    )
    steps: int = Field(24, ge=1, description="length of an episode [steps]")
    epochs: float | None = Field(
        None,
        gt=0,
        description="length of an episode as passes over the train split; null takes steps (`esper docs runs`) [epochs]",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the run, from which all its random numbers derive")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:i; auto takes cuda where torch sees such a device")
    deterministic: bool = Field(
        False, description="true uses only deterministic kernels of torch, without TF32 (`esper docs determinism`)"
    )
    amp: Literal["off", "bf16", "fp16", "auto"] = Field(
        "off",
        description="type of the products in training: off computes them in float32, bf16 in bfloat16, fp16 in float16 with a "
        "loss scale for each network, and auto in bfloat16 if the device multiplies it natively; parameters, the optimizer "
        "and all measured figures stay float32",
    )
    compile: Literal["off", "on", "auto"] = Field(
        "off",
        description="on compiles the training passes by torch's compiler, and auto does so for plans that gain from it by a "
        "measurement (`esper docs compiling`)",
    )
    activation_checkpointing: bool = Field(
        False,
        description="true stores only the input of each segment and seed for the backward pass, which computes the rest "
        "again: less memory and more time for the same numbers (`esper docs precision`)",
    )
    baselines: tuple[str, ...] = Field(
        BASELINES,
        description="static networks that are trained for comparison: any of twin, same-size, plain, skips, or none "
        "(`esper docs baselines`); the key twin, true or false, adds or removes the twin alone",
    )
    mapping: Literal["auto", "vmap", "loop"] = Field(
        "auto", description="how stacked modules run: vmap, loop, or auto, the fastest way that the module allows"
    )
    instances: Literal["training", "validation", "heldout"] = Field(
        "training",
        description="part of a mixture's instances that environments are drawn from; a data set has one part",
    )
    first_instance: int = Field(0, ge=0, description="environment e is instance first_instance + e of that part")
    models: Literal["all", "best", "none"] = Field("all", description="which grown networks are exported")
    report: bool = Field(True, description="write report.html, one page about the run, at the end of the run")
    select: Literal["metric", "objective"] = Field(
        "metric", description="score on the validation split that the best network has the highest of: the metric, or J"
    )
    slots: tuple[str, ...] | None = Field(
        None, description="names of the slots that may be planted; null for all slots of the task"
    )
    blueprints: tuple[str, ...] | None = Field(
        None, description="names of the blueprints that may be planted; null for the menu of the task"
    )
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
    trials: TrialsConfig = TrialsConfig()
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

    @pydantic.field_validator("amp", "compile", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # as YAML reads them

    @pydantic.field_validator("baselines", mode="before")
    @classmethod
    def _parse_baselines(cls, value: Any) -> Any:
        return baseline_names(value)

    @pydantic.field_validator("slots", "blueprints")
    @classmethod
    def _check_distinct(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError("give a list of at least one name, each once, or null for all")
        return value

    @pydantic.model_validator(mode="after")
    def _check_accumulation(self) -> "Config":
        if self.data.batches_per_step % self.optimizer.accumulation_steps:
            raise ValueError(
                f"optimizer.accumulation_steps is {self.optimizer.accumulation_steps}, which does not divide "
                f"data.batches_per_step ({self.data.batches_per_step}); choose a divisor"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_memory_keys(self) -> "Config":
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


RENAMED: Mapping[str, str] = {
    f"{name}.{earlier}": new
    for name, field in Config.model_fields.items()
    if isinstance(field.default, Section)
    for earlier, new in field.default.renamed.items()
}
"""Earlier dotted names of keys, each with the key that replaces it."""


def build_config(*layers: Mapping[str, Any]) -> Config:
    """A config from mappings of keys to values; where several set a key, the last one wins.

    Sections are nested mappings or dotted keys: `{"optimizer": {"lr": 1}}` equals `{"optimizer.lr": 1}`. Raises InputError on
    the first bad key or value.
    """
    try:
        return Config.model_validate(merge_settings(*layers))
    except pydantic.ValidationError as error:
        raise InputError(explain(error, Config)) from None


def merge_settings(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings merged into one; where several set a key, the last one wins. InputError if a layer is not a mapping.

    `steps` and `epochs` are two ways to set one length: a layer that sets one of them removes the other of earlier layers.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise InputError(f"a config is {show(layer)}; give a mapping of keys to values, such as {{'steps': 24}}")
        later = _without_twin(to_sections(layer, Config), merged)
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if later.get(name) is not None and later.get(other) is None:
                merged.pop(other, None)
        merged = _merge(merged, later)
    return merged


def _merge(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(earlier)
    for name, value in later.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def baseline_names(value: Any) -> tuple[str, ...]:
    """Baselines from a list of names, a text of names separated by commas, 'none' or None; in the order of `BASELINES`.

    Raises ValueError if a name is unknown.
    """
    given = [] if value is None or value in ("none", ["none"], ("none",)) else value
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or any(name not in BASELINES for name in names):
        raise ValueError(f"give names out of {', '.join(BASELINES)}, or none")
    return tuple(name for name in BASELINES if name in names)


def _without_twin(layer: Mapping[str, Any], earlier: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layer with its key `twin`, true or false, replaced by `baselines`: those of the layer or of earlier layers, changed."""
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
    """`a.b=value` as a nested mapping, with the value read as YAML. InputError if the key or the value is missing."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise InputError(f"--set {text!r} is not of the form key=value, for example --set data.batch_size=32")
    parsed: Any = parse_yaml(value, f"--set {text[:60]!r}", "quote the value")
    for part in reversed(name.strip().split(".")):
        parsed = {part: parsed}
    assert isinstance(parsed, dict)
    return parsed
