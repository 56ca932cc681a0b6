"""The populations of a training: each task's environments, divided into shards. E environments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.leyline.keys import Purpose, key, scalar
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.fitting import instance_keys

ENVS_OF_SHARD = 32
"""Number of environments of a shard, where `--workers` is given and `shards` is not."""


class Engines:
    """The engines of a cohort. Each is made when it is first used, and again after `release`."""

    def __init__(self, task: AnyTask, config: Config, watched: Config | None) -> None:
        """config, watched: of the training and of the validation; None where the cohort has no validation."""
        self._configs = {"training": config, "validation": watched}
        self._task, self._made = task, dict[str, VectorizedEngine]()

    def get(self, name: str) -> VectorizedEngine:
        """Return an engine, 'training' or 'validation'."""
        if name not in self._made:
            config = self._configs[name]
            assert config is not None, "this shard has no environments in the validation"
            self._made[name] = VectorizedEngine(self._task, config)
        return self._made[name]

    def release(self) -> None:
        """Free the engines."""
        self._made.clear()


class Cohort(NamedTuple):
    """The populations of a task, or of one shard of its environments.

    Attributes:
        task (task): the task without its test split
        config (Config): config of the population
        whole (Config): config of the task's training, with the environments of all its shards
        watched (Config or None): config of the population of validation instances; None where it has no environment
        engines (Engines): the engines of the populations
    """

    task: AnyTask
    config: Config
    whole: Config
    watched: Config | None
    engines: Engines

    @property
    def engine(self) -> VectorizedEngine:
        """The population of training instances."""
        return self.engines.get("training")

    @property
    def validation(self) -> VectorizedEngine:
        """The population of validation instances."""
        return self.engines.get("validation")

    @property
    def first_env(self) -> int | None:
        """Number of the first environment among those of the task; None where the task has one shard."""
        return self.config.first_instance - self.whole.first_instance if self.whole.shards > 1 else None

    @property
    def first_watched(self) -> int | None:
        """Likewise for the validation."""
        return self.watched.first_instance if self.whole.shards > 1 and self.watched is not None else None


def default_shards(config: Config) -> int:
    """Return the number of shards of a training with `--workers`: one for each ENVS_OF_SHARD environments, and 2 or more
    where the groups allow it. It does not depend on the number of workers, and therefore the results do not.
    """
    return min(max(config.envs // ENVS_OF_SHARD, 2), config.envs // config.reward.group_size)


def cohort_of(task: AnyTask, config: Config) -> Cohort:
    """Make the populations of a task in one shard. Raises InputError as `cohorts_of`."""
    (cohort,) = cohorts_of(task, config.model_copy(update={"shards": 1}))
    return cohort


def cohorts_of(task: AnyTask, config: Config, made: int | None = None) -> list[Cohort]:
    """Make the cohorts of a task, one for each shard, and the engines of the first `made` of them; None makes all.

    Raises InputError if a controller cannot learn from the task and the config.
    """
    _check(config)
    instance_keys(task, config)
    groups, size = config.envs // config.reward.group_size, config.reward.group_size
    ends = [0, *np.cumsum([len(part) for part in np.array_split(np.arange(groups), config.shards)]) * size]
    watched_ends = _ends(config.ppo.validate_envs, config.shards)
    cohorts = []
    for shard in range(config.shards):
        begin, end = int(ends[shard]), int(ends[shard + 1])
        own = config.model_copy(update={"envs": end - begin, "first_instance": config.first_instance + begin})
        watched = _watched(config, watched_ends[shard], watched_ends[shard + 1])
        cohorts.append(Cohort(task, own, config, watched, Engines(task, own, watched)))
    for cohort in cohorts[:made]:
        _make(cohort)
    return cohorts


def _ends(count: int, parts: int) -> list[int]:
    """Return where the parts of `count` things begin and end; sizes differ by 1 at most."""
    return [0, *(int(end) for end in np.cumsum([len(part) for part in np.array_split(np.arange(count), parts)]))]


def _check(config: Config) -> None:
    """Raise InputError if a controller cannot learn with a config."""
    reward = config.reward
    for name, count in (("envs", config.envs), ("first_instance", config.first_instance)):
        if count % reward.group_size:  # for any baseline, because instances are drawn by the group
            raise InputError(
                f"reward.group_size is {reward.group_size}, which does not divide {name}, {count}; choose a divisor"
            )
    groups = config.envs // reward.group_size
    if config.shards > groups:
        raise InputError(
            f"shards is {config.shards}, but {counted(config.envs, 'environment')} in groups of {reward.group_size} "
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


def _watched(config: Config, begin: int, end: int) -> Config | None:
    """Return the config of the environments `begin` to `end` of the validation."""
    if begin == end:
        return None
    # Another run seed, so that on a data set the starts of the validation differ from those of an evaluation.
    return config.model_copy(
        update={
            "instances": "validation",
            "first_instance": begin,
            "envs": end - begin,
            "baselines": (),
            "seed": scalar(config.seed, Purpose.VALIDATION),
        }
    )


def _make(cohort: Cohort) -> None:
    """Make the engines of a cohort. Raises InputError if nothing can be learnt."""
    task, config = cohort.task, cohort.config
    space = cohort.engine.space
    if not space.slots or not space.fits.any() or not config.lifecycle.max_seeds:
        raise InputError(
            f"task {task.name} has no slot in which a blueprint of its menu can be planted, so nothing can be learnt; give it "
            "slots, blueprints that fit them, and a lifecycle.max_seeds of 1 or more"
        )
    if cohort.watched is None:
        return
    try:
        assert cohort.validation is not None
    except InputError as error:
        raise InputError(f"in the validation, which takes ppo.validate_envs as envs: {error}") from None


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
