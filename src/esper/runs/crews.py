"""Which actors a run has: the workers, devices and cluster that were asked for, and the crew that they make."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.runs.actors import Actors, Crew
from esper.runs.cohort import default_shards
from esper.runs.processes import Processes
from esper.runs.ranks_crew import RanksCrew, is_learner, world_size
from esper.runs.ray_crew import RayCrew
from esper.store.checkpoint import Tree
from esper.tolaria.runtime import resolve_device

CLUSTERS = ("ray", "ray://HOST:PORT", "torchrun")


class Asked(NamedTuple):
    """The actors that were asked for. By default there are none, and the parts are played in this process.

    Attributes:
        workers (int or None): number of actors; None is one for each device
        devices (texts): devices of the actors, taken in turn; without any, each has the device of the config
        cluster (text or None): 'ray', a `ray://` address, or 'torchrun'; None starts processes on this machine
        find (callable or None): from the name of a task to the task, for actors that are not sent the task itself
    """

    workers: int | None = None
    devices: tuple[str, ...] = ()
    cluster: str | None = None
    find: Callable[[str], AnyTask] | None = None

    @property
    def any(self) -> bool:
        """Whether there are actors."""
        return self.workers is not None or bool(self.devices) or self.cluster is not None

    @property
    def is_rank(self) -> bool:
        """Whether this process is a rank of torchrun above 0, which is an actor itself."""
        return self.cluster == "torchrun" and not is_learner()

    @property
    def size(self) -> int:
        """Number of actors."""
        if self.cluster == "torchrun":
            return world_size()
        return self.workers if self.workers is not None else max(len(self.devices), 1)


ALONE = Asked()


def asked_for(
    workers: Any = None, devices: Any = None, cluster: Any = None, find: Callable[[str], AnyTask] | None = None
) -> Asked:
    """Return the actors that arguments ask for. Raises InputError if they cannot be had on this machine.

    workers: a whole number or its text; devices: names, or a text of names separated by commas; cluster: one of CLUSTERS.
    """
    try:
        count = None if workers is None or isinstance(workers, bool) else int(str(workers))
        valid = isinstance(workers, bool) is False and (count is None or count >= 1)
    except ValueError:
        valid, count = False, None
    if not valid:
        raise InputError(f"workers is {workers!r}; give the number of actors, a whole number of 1 or more")
    listed = devices.split(",") if isinstance(devices, str) else list(devices or ())
    names = tuple(str(name).strip() for name in listed)
    for name in names:
        try:
            resolve_device(name)
        except InputError as error:
            raise InputError(f"devices is {','.join(names)!r}: {error}") from None
    kinds = {resolve_device(name).type for name in names}
    if len(kinds) > 1:
        raise InputError(
            f"devices is {','.join(names)!r}, but a CPU and a GPU round differently, so that results would depend on which actor "
            "was free; give devices of one kind"
        )
    if count is not None and len(names) > count:
        raise InputError(
            f"devices names {counted(len(names), 'device')}, but workers is {count}; give a worker to each device"
        )
    if cluster is not None and not (cluster in ("ray", "torchrun") or str(cluster).startswith("ray://")):
        raise InputError(f"cluster is {cluster!r}; give one of {', '.join(CLUSTERS)}")
    if cluster == "torchrun":
        if "RANK" not in os.environ:
            raise InputError(
                "cluster is torchrun, but torchrun did not start this process; give torchrun --nproc-per-node N -m -- "
                "esper train|eval ... --cluster torchrun"
            )
        if count is not None and count != world_size():
            raise InputError(
                f"workers is {count}, but torchrun started {world_size()} ranks, each an actor; leave workers out"
            )
    return Asked(count, names, cluster, find)


def with_shards(configs: Sequence[Config], asked: Asked, *, resumed: bool) -> list[Config]:
    """Return the configs of a training with the shards that its actors play, and check that each actor has one.

    Raises InputError if there are more actors than shards.
    """
    if not asked.any:
        return list(configs)
    chosen = list(configs) if resumed else [_chosen(config, asked) for config in configs]
    shards, envs = sum(config.shards for config in chosen), sum(config.envs for config in chosen)
    if asked.size > shards:
        mend = (
            "the shards of a run cannot change, so give fewer workers"
            if resumed
            else f"give {shards} or fewer, or divide the environments further with --set shards=N"
        )
        raise InputError(
            f"workers is {asked.size}, but {counted(envs, 'environment')} in {counted(shards, 'shard')} give work to "
            f"{counted(shards, 'actor')}; {mend}"
        )
    return chosen


def _chosen(config: Config, asked: Asked) -> Config:
    """Return the config of a new run with the shards that it has by default, and the device of the first actor."""
    update: dict[str, Any] = {} if "shards" in config.model_fields_set else {"shards": default_shards(config)}
    return config.model_copy(update=update | ({"device": asked.devices[0]} if asked.devices else {}))


def hire(
    asked: Asked,
    work: Any,
    note: Callable[[str], None],
    facts: Tree,
    check: Callable[[Tree, Tree], None],
    *,
    mend: str = "give fewer workers, or lower envs",
    again: str = "continue with esper resume",
    stop: Callable[[], bool] = lambda: False,
) -> Actors:
    """Start the actors that were asked for, and wait until they are ready.

    `check` compares the facts of each with those of this process. mend: what to do if actors are lost for good. again: how the
    run continues after a rank of torchrun was lost. Raises InputError if an actor cannot start, and KeyboardInterrupt if `stop`
    says so before all are ready.
    """
    devices: Sequence[str | None] = asked.devices or (None,)
    crew: Crew
    if asked.cluster is None:
        crew = Processes(asked.size, work, devices)
    elif asked.cluster == "torchrun":
        crew = RanksCrew(work, devices, again)
    else:
        crew = RayCrew(asked.size, work, devices, None if asked.cluster == "ray" else asked.cluster)
    return Actors(crew, note, lambda ready: check(facts, ready), mend, stop)
