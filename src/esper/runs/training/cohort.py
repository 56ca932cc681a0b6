"""Make the populations of a training: each task's environments, divided into shards. E environments."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import Config
from esper.leyline.data.keys import Purpose, key, scalar
from esper.leyline.data.task import AnyTask
from esper.leyline.errors import InputError
from esper.leyline.text import counted
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.population import instance_keys

ENVS_OF_SHARD = 32
"""Number of environments of a shard, where `--workers` is given and `shards` is not."""


@dataclass(eq=False)
class Cohort:
    """The populations of a task, or of one shard of its environments. An engine is made when it is first used."""

    task: AnyTask  # the task without its test split
    config: Config  # config of the population
    whole: Config  # config of the task's training, with the environments of all its shards
    watched: Config | None  # config of the population of validation instances; None where it has no environment
    made: dict[str, VectorizedEngine] = field(default_factory=dict)  # the engines by name, until `release`

    @property
    def engine(self) -> VectorizedEngine:
        """The population of training instances."""
        return self._engine("training", self.config)

    @property
    def validation(self) -> VectorizedEngine:
        """The population of validation instances."""
        assert self.watched is not None, "this shard has no environments in the validation"
        return self._engine("validation", self.watched)

    def _engine(self, name: str, config: Config) -> VectorizedEngine:
        if name not in self.made:
            self.made[name] = VectorizedEngine(self.task, config)
        return self.made[name]

    def release(self) -> None:
        """Free the engines."""
        self.made.clear()


def default_shards(config: Config) -> int:
    """Return the number of shards of a training with `--workers`: one for each ENVS_OF_SHARD environments, and 2 or more
    where the groups allow it. It does not depend on the number of workers, and therefore the results do not.
    """
    return min(max(config.envs // ENVS_OF_SHARD, 2), config.envs // config.reward.group_size)


def cohorts_of(task: AnyTask, config: Config, made: int | None = None) -> list[Cohort]:
    """Make the cohorts of a task, one for each shard, and the engines of the first `made` of them; None makes all.

    Raises InputError if a controller cannot learn from the task and the config.
    """
    reward, size = config.reward, config.reward.group_size
    groups = config.envs // size
    for name, count in (("envs", config.envs), ("first_instance", config.first_instance)):
        if count % size:  # for any baseline, because instances are drawn by the group
            raise InputError(f"reward.group_size is {size}, which does not divide {name}, {count}; choose a divisor")
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
    """Return the keys (E,) of the training instances of a round.

    Each `group` environments with consecutive numbers share an instance.
    """
    config = cohort.config
    keys = cohort.task.keys("training")
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
    places: dict[str, list[int]] = {}
    for place, cohort in enumerate(cohorts):
        places.setdefault(cohort.task.name, []).append(place)
    return list(places.values())
