"""Hold the populations of a training, each task's environments divided into shards, and check what they need. E environments."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from esper.leyline.config.tree import Config
from esper.leyline.data.keys import Purpose, key, scalar
from esper.leyline.data.task import AnyTask
from esper.leyline.errors import InputError
from esper.leyline.protocols import Controller
from esper.leyline.reference import is_own_controller
from esper.leyline.text import counted
from esper.runs.workers.workers import WorkerOptions
from esper.tamiyo.catalog import get_controller
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import resolve_device
from esper.tolaria.stacked.population import instance_keys

ENVS_OF_SHARD = 32
"""Number of environments of a shard, where `--workers` is given and `shards` is not."""


@dataclass(eq=False)
class Cohort:
    """Holds the populations of a task, or of one shard of its environments."""

    task: AnyTask  # the task without its test split
    config: Config  # config of the population
    whole: Config  # config of the task's training, with the environments of all its shards
    watched: Config | None  # config of the population of validation instances; None where it has no environment

    @cached_property
    def engine(self) -> VectorizedEngine:
        """The population of training instances."""
        return VectorizedEngine(self.task, self.config)

    @cached_property
    def validation(self) -> VectorizedEngine:
        """The population of validation instances."""
        assert self.watched is not None, "this shard has no environments in the validation"
        return VectorizedEngine(self.task, self.watched)

    def source(self, name: Literal["training", "validation"], number: int) -> dict[str, Any]:
        """Return the population to which the rows of a round belong, with its first environment where there are shards."""
        source = {"cohort": name, "task": self.task.name, "round": number}
        if self.whole.shards > 1 and name == "training":
            source["first_env"] = self.config.first_instance - self.whole.first_instance
        elif self.whole.shards > 1 and self.watched is not None:
            source["first_env"] = self.watched.first_instance
        return source

    def release(self) -> None:
        """Free the engines; they are made again when they are used again."""
        for name in ("engine", "validation"):
            vars(self).pop(name, None)


def with_shards(configs: Sequence[Config], asked: WorkerOptions, *, resumed: bool) -> list[Config]:
    """Return the configs of a training with the shards that its workers play, of which each worker must have one."""
    chosen = list(configs)
    for config in configs:  # every baseline asks for environments that are drawn by the group
        size = config.reward.group_size
        for name, count in (("envs", config.envs), ("first_instance", config.first_instance)):
            if count % size:
                raise InputError(
                    f"reward.group_size is {size}, which does not divide {name}, {count}; choose a divisor"
                )
    if not asked.any:
        return chosen
    if not resumed:  # a new run has the shards by default, and the device of the first worker
        device = {"device": asked.devices[0]} if asked.devices else {}
        for at, config in enumerate(configs):
            # whatever the number of workers: one for ENVS_OF_SHARD environments, and at least 2 where the groups allow it
            shards = min(max(config.envs // ENVS_OF_SHARD, 2), config.envs // config.reward.group_size)
            usual = {} if "shards" in config.model_fields_set else {"shards": shards}
            chosen[at] = config.model_copy(update=usual | device)
    shards, envs = sum(config.shards for config in chosen), sum(config.envs for config in chosen)
    if asked.size > shards:
        mend = f"give {shards} or fewer, or divide the environments further with --set shards=N"
        if resumed:
            mend = "the shards of a run cannot change, so give fewer workers"
        raise InputError(
            f"workers is {asked.size}, but {counted(envs, 'environment')} in {counted(shards, 'shard')} give work to "
            f"{counted(shards, 'worker')}; {mend}"
        )
    return chosen


def cohorts_of(task: AnyTask, config: Config, made: int | None = None) -> list[Cohort]:
    """Make the cohorts of a task, one for each shard, and the engines of the first `made` of them; None makes all."""
    reward, size = config.reward, config.reward.group_size
    groups = config.envs // size
    if config.shards > groups:
        raise InputError(
            f"shards is {config.shards}, but {counted(config.envs, 'environment')} in groups of {size} "
            f"(reward.group_size) can be divided into {groups} at most; lower shards, or raise envs"
        )
    if reward.relative_to == "twin" and not config.twin:
        raise InputError(
            "reward.relative_to is twin, but no twins are trained; give --twin (the key twin), or set "
            "reward.relative_to to none or group"
        )
    if not config.ppo.rounds and not config.ppo.imitation_rounds:
        raise InputError(
            "ppo.rounds and ppo.imitation_rounds are 0, so nothing would be learnt; set one of them to 1 or more"
        )
    if config.early_stopping.enabled:
        raise InputError("early_stopping.enabled is true, but a controller learns from whole episodes; leave it out")
    if config.gates.certify is not None:
        raise InputError(
            "gates.certify is set, but a training plays many episodes on the same fresh examples; leave it out, and set it where "
            "the trained controller grows"
        )
    instance_keys(task, config)
    cohorts = []
    trained, watched = (
        [count // config.shards + (shard < count % config.shards) for shard in range(config.shards)]
        for count in (groups, config.ppo.validate_envs)
    )
    for shard in range(config.shards):
        begin = config.first_instance + size * sum(trained[:shard])
        own = config.model_copy(update={"envs": size * trained[shard], "first_instance": begin})
        validated = None
        if watched[shard]:
            update = {
                "instances": "validation",
                "first_instance": sum(watched[:shard]),
                "envs": watched[shard],
                "baselines": (),
                # Another run seed, so that on a data set the starts of the validation differ from those of an evaluation.
                "seed": scalar(config.seed, Purpose.VALIDATION),
            }
            validated = config.model_copy(update=update)
        cohorts.append(Cohort(task, own, config, validated))
    for cohort in cohorts[:made]:
        space = cohort.engine.space
        if not space.slots or not space.fits.any() or not config.lifecycle.max_seeds:
            raise InputError(
                f"task {task.name} has no slot in which a blueprint of its menu can be planted, so nothing can be learnt; give "
                "it slots, blueprints that fit them, and a lifecycle.max_seeds of 1 or more"
            )
        try:
            assert cohort.watched is None or cohort.validation is not None
        except InputError as error:
            raise InputError(f"in the validation, which takes ppo.validate_envs as envs: {error}") from None
    return cohorts


def sample_instances(cohort: Cohort, number: int, group: int) -> NDArray[np.int64]:
    """Return the keys (E,) of the training instances of a round, of which each `group` consecutive environments share one."""
    config, keys = cohort.config, cohort.task.keys("training")
    numbers = config.first_instance + np.arange(config.envs)
    drawn = key(config.seed, Purpose.SAMPLE, number, numbers // group) & ((1 << 62) - 1)
    return keys.start + drawn % len(keys)


def settings_of_policy(config: Config) -> dict[str, Any]:
    """Return the settings that a trained controller requires of every run."""
    probe, families = config.probe, config.probe.sensors
    measured = {} if families is None else {"sensors": list(families)}
    return {
        "gates": config.gates.model_dump(mode="json"),
        "probe": {"sensors_every": probe.sensors_every, "coalitions_every": probe.coalitions_every, **measured},
        "lifecycle": {"tempos": list(config.lifecycle.tempos), "targets": list(config.lifecycle.targets)},
    }


def by_task(cohorts: Sequence[Cohort]) -> list[list[int]]:
    """Return the indices of the cohorts of each task; the shards of a task follow each other."""
    of_task = itertools.groupby(range(len(cohorts)), lambda place: cohorts[place].task.name)
    return [list(places) for _, places in of_task]


def teacher_of(config: Config) -> Controller:
    """Return the controller that a training imitates. Raises InputError if it cannot be imitated."""
    if is_own_controller(config.ppo.teacher):  # a key of the config, which `esper resume` reads from a folder
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, but code of your own cannot be a teacher; give a name of `esper controller`, "
            "a schedule file, or the run folder of a trained controller"
        )
    try:
        teacher = get_controller(config.ppo.teacher, config)
    except InputError as error:
        raise InputError(f"ppo.teacher: {error}") from None
    if config.ppo.imitation_rounds and type(teacher).proposals is not Controller.proposals:
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which tries candidates in copies of the networks, and a training makes no "
            "copies; give another controller"
        )
    if config.ppo.imitation_rounds and teacher.sensors_every and config.probe.sensors_every == 0:
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which reads growth sensors, but probe.sensors_every is 0; set it to 1 or more"
        )
    return teacher


def policy_device(config: Config, devices: Sequence[str] = ()) -> torch.device:
    """Return the device of the policy. devices: those that the workers were given.

    Raises InputError if the device does not exist, or is a GPU other than that of a worker.
    """
    name = config.ppo.device
    if name == "same":
        return resolve_device(config.device)
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        raise InputError(f"ppo.device is {name[:60]!r}; give cpu, cuda, cuda:i, or same, the device of the networks")
    try:
        device = resolve_device(name)
    except InputError:
        there = torch.cuda.device_count()
        raise InputError(
            f"ppo.device is {name}, but torch sees {counted(there, 'CUDA device')}; give cpu, or same, the device of the networks"
        ) from None
    others = {other for other in map(resolve_device, devices) if other.type == "cuda"}
    if device.type == "cuda" and any((other.index or 0) != (device.index or 0) for other in others):
        raise InputError(
            f"ppo.device is {name}, but the devices of the workers are {','.join(devices)}; give same, the device of each "
            "worker, or cpu"
        )
    return device


def check_exchange(config: Config, place: torch.device, asked: WorkerOptions) -> None:
    """Raise InputError if the gradients of workers cannot go through the backend of `ppo.exchange`. place: of the policy."""
    if config.ppo.exchange == "gloo" or asked.size == 1:
        return
    if not dist.is_nccl_available():
        raise InputError("ppo.exchange is nccl, but this build of torch has no NCCL; give gloo")
    own = place.type == "cuda" and config.ppo.device == "same"
    known = {resolve_device(name).index or 0 for name in asked.devices}
    given = asked.cluster not in (None, "torchrun") and not known  # Ray gives each worker its own
    if not own or not (given or len(known) == asked.size):
        raise InputError(
            f"ppo.exchange is nccl, which needs a GPU for each of {asked.size} workers; give them in devices, with "
            "ppo.device=same, or give ppo.exchange=gloo"
        )


def name_of_place(device: torch.device) -> str:
    """Return 'cpu', or the model of a GPU. Policies on two of them do not stay equal bit for bit."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
