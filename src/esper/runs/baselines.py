"""Train baselines: static networks, on the same batches as the grown networks, for the same number of steps.

    twin       the host alone, as a further row of the population that grows
    same-size  the grown network, with its seeds in place from step 0
    plain      the host without its bottlenecks, of the smallest width with at least the parameters of the grown network
    skips      the host with an identity skip around every segment where one fits

All but the twin are separate populations, which are trained after the growth and do not affect it. E environments, S slots.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.lifecycle import dormant
from esper.kasmina.network.grown_network import RegrownHost
from esper.kasmina.network.static import Factory, Skipped, skip_places, widened
from esper.leyline.config.tree import Config, WidenConfig
from esper.leyline.data.batches import Shape, map_leaves, picked, shapes
from esper.leyline.data.task import AnyTask, Instance, Mixture, Room, Task
from esper.leyline.lifecycle.view import Floats, Seeds, take
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError, OutOfMemory, amended, counted, is_out_of_memory
from esper.runs.figures import test_splits
from esper.runs.workers.sharded import ShardedEngine
from esper.runs.workers.workers import ShardPool
from esper.tamiyo.rules.base import Never
from esper.tolaria.engine import TaskEngine, Until, VectorizedEngine, play

Keys = NDArray[np.int64]
Stop = Callable[[], bool]

EXAMPLES = 64
"""Number of training examples on which a derived host is checked."""
OWN = "pass esper.task(..., plain=f), where f(parameters) returns a host factory of at least that many parameters, to bring one"


class Absent(NamedTuple):
    """Says why there are no static networks of a baseline."""

    reason: str  # one sentence


INTERRUPTED = Absent(
    "the run was interrupted before it was trained; esper resume trains it where there is a run folder"
)


_ALIKE = {"same-size": "{} kept no seed", "plain": "the host of {} is plain and of that size already", "skips": "{}"}
"""The reason for which a static network equals the twin, by baseline."""


class GrowthResult(NamedTuple):
    """Holds the results of a growth on which static networks depend."""

    instance: Keys  # (E,) keys of the instances
    kept: Seeds  # (E, S) the fossilized seeds; every other slot is empty
    params: Keys  # (E,) parameters of the networks as exported


class BaselineResult(NamedTuple):
    """Holds the results of static networks on the test split."""

    metric: Floats  # (E,) metric
    loss: Floats  # (E,) loss
    params: Keys  # (E,) parameters
    # duration of building, training and evaluation; None for twins, which are trained with the growth
    seconds: float | None
    note: str | None = None  # further information for a reader


class _Population(NamedTuple):
    """Holds static networks of n environments that are trained together."""

    envs: Keys  # (n,)
    task: AnyTask
    planted: Seeds | None = None  # (n, S) seeds that are in place from step 0


def static_task(name: str, grown: GrowthResult, twins: bool, index: int, task: AnyTask) -> AnyTask:
    """Return the task of one population of the static networks of a baseline, from the task on which others grew."""
    return _POPULATIONS[name](task, grown, twins)[index].task


def grown_of(engine: TaskEngine[Any]) -> GrowthResult:
    """Return the results of the growth of a population."""
    envs = slice(0, engine.config.envs)
    seeds: Seeds = take(engine.state.seeds, envs)
    fossil = seeds.stage == Stage.FOSSILIZED
    kept = dormant(*seeds.stage.shape)
    for name in ("stage", "blueprint", "blend", "alpha"):
        getattr(kept, name)[fossil] = getattr(seeds, name)[fossil]
    return GrowthResult(engine.space.instance.copy(), kept, engine.exported_params()[envs])


def as_record(trained: BaselineResult | Absent, metric: str) -> dict[str, Any]:
    """Return a baseline as an entry of the summary: strict JSON, with null for a figure that is not finite."""
    if isinstance(trained, Absent):
        return {"absent": trained.reason}
    values = [float(value) if np.isfinite(value) else None for value in trained.metric]
    seconds = None if trained.seconds is None else round(trained.seconds, 3)
    record = {f"test_{metric}": values, "params": trained.params.tolist(), "seconds": seconds}
    return record if trained.note is None else {**record, "note": trained.note}


def train_baseline(
    name: str,
    task: AnyTask,
    config: Config,
    grown: GrowthResult,
    steps: int,
    *,
    until: Keys | None = None,
    twin: BaselineResult | None = None,
    stop: Stop = lambda: False,
    pool: ShardPool | None = None,
) -> BaselineResult | Absent:
    """Train the static networks of one baseline for `steps` steps, and evaluate them on the test split.

    config, grown: those of the run with which the baseline is compared.
    until: (E,) steps after which early stopping stopped each grown network, so that its static network chooses its best state
        among as many; None lets each static network stop by its own patience.
    twin: results of the twins; an environment whose static network equals the twin takes these results.
    stop: called at every step; if it returns true, the baseline is absent.
    pool: the workers that train them; None trains them in this process.

    Returns `Absent` if the host has no such network, or if it does not fit into memory.
    """
    assert name in _POPULATIONS, name
    begin = time.perf_counter()
    try:
        populations = _POPULATIONS[name](task, grown, twin is not None)
        if twin is None:
            nothing = np.full(len(grown.instance), np.nan)
            result = BaselineResult(nothing, nothing.copy(), np.zeros_like(grown.params), 0.0)
        else:
            result = BaselineResult(twin.metric.copy(), twin.loss.copy(), twin.params.copy(), 0.0)
        update: dict[str, Any] = {"baselines": (), "slots": None, "steps": max(steps, 1), "epochs": None}
        update["probe"] = config.probe.model_copy(update={"sensors_every": 0})
        if name == "plain":  # it has the parameters of the grown one from the start
            update["widen"] = WidenConfig()
        for index, population in enumerate(populations):
            sealed, instance = population.task.sealed(), grown.instance[population.envs]
            own = config.model_copy(update={**update, "envs": len(instance)})
            engine: TaskEngine[Any]
            if pool is None:
                engine = VectorizedEngine(sealed, own, instance=instance)
            else:
                derive = partial(static_task, name, grown, twin is not None, index)
                engine = ShardedEngine(pool, sealed, own, instance=instance, derive=derive)
            with closing(engine.population):
                engine.reset(planted=population.planted)
                if engine.stopping is not None and until is not None:
                    engine.stopping.until = until[population.envs][engine.population.environment]
                interrupted = Until(stop)
                if steps:
                    play(engine, Never(), interrupted)
                if interrupted.stopped:
                    return INTERRUPTED
                engine.finish()
                tested = (*engine.evaluate(test_splits(engine, population.task)), engine.exported_params())
            for mine, theirs in zip(result[:3], tested, strict=True):
                mine[population.envs] = theirs
    except (InputError, OutOfMemory) as error:
        return Absent(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return Absent("memory ran out while it was trained")
    alike = len(grown.instance) - sum(len(population.envs) for population in populations)
    where = f"{alike} of {counted(len(grown.instance), 'environment')}"
    note = f"{_ALIKE[name].format(where)}; there it is the twin"
    return result._replace(seconds=time.perf_counter() - begin, note=note if alike else None)


def _same_size(task: AnyTask, grown: GrowthResult, twins: bool) -> list[_Population]:
    kept = (grown.kept.stage == Stage.FOSSILIZED).any(1)
    envs = np.flatnonzero(kept | (not twins))
    planted = Seeds._make(own[envs] for own in grown.kept)
    return [_Population(envs, task, planted)] if len(envs) else []


def _plain(task: AnyTask, grown: GrowthResult, twins: bool) -> list[_Population]:
    known: dict[tuple[int, int], Factory] = {}
    hosts: list[Factory] = []
    for key, parameters in zip(grown.instance.tolist(), grown.params.tolist(), strict=True):
        instance = task.instance(key)
        at = id(instance.host), parameters
        if at not in known:
            known[at] = _plain_host(instance, parameters)
        hosts.append(known[at])
    same = [host == task.instance(key).host for host, key in zip(hosts, grown.instance.tolist(), strict=True)]
    envs = np.flatnonzero(~np.array(same) | (not twins))
    return _laid_out(task, grown.instance, [hosts[env] for env in envs], envs)


def _plain_host(instance: Instance, parameters: int) -> Factory:
    """Return the factory of the plain network for the host of an instance, with at least `parameters` parameters.

    InputError if it has none.
    """
    if instance.plain is not None:
        made = instance.plain(parameters)
        with drawn_with(0):
            size = count(made())
        if size < parameters:
            raise InputError(
                f"plain({parameters:,}) of the task makes {size:,} parameters, fewer than the grown network has"
            )
        return made
    host = instance.host.ungrown if isinstance(instance.host, RegrownHost) else instance.host
    plain: Callable[[int], Factory] | None = getattr(host, "plain", None)
    if plain is not None:  # it knows the network of its kind without a bottleneck
        return plain(parameters)
    with amended(after=f"; {OWN}"):
        return widened(host, instance.read(picked(instance.train.x, slice(EXAMPLES))), parameters)


def _laid_out(task: AnyTask, instance: Keys, hosts: Sequence[Factory], envs: Keys) -> list[_Population]:
    """Return populations for the hosts (n,) of environments (n,): one if they fit into one layout, otherwise one per host."""
    if not len(envs):
        return []
    first = hosts[0]
    # hosts of a class with a room fit into the leading corner of a larger one of the class, where padded units stay 0
    if all(type(host) is type(first) for host in hosts) and (room_of := getattr(first, "room", None)) is not None:
        room = room_of(hosts, task.objective.outputs)
        return [_Population(envs, _with_hosts(task, instance[envs], hosts, room))]
    kinds: dict[Factory, list[int]] = {}
    for env, host in zip(envs.tolist(), hosts, strict=True):
        kinds.setdefault(host, []).append(env)
    populations = []
    for host, group in kinds.items():
        inputs = shapes(task.instance(int(instance[group[0]])).train.x)
        same = [host] * len(group)
        populations.append(_Population(np.array(group), _with_hosts(task, instance[group], same, Room(host, inputs))))
    return populations


def _skips(task: AnyTask, grown: GrowthResult, twins: bool) -> list[_Population]:
    def padded(x: Tensor, inputs: Shape) -> Tensor:
        """Pad one leaf of examples (B, ...) with 0 to the inputs of a larger host."""
        missing = [wide - own for wide, own in zip(inputs, x.shape[1:], strict=True)]
        return F.pad(x, [pad for extra in reversed(missing) for pad in (0, extra)])

    whole = task.room
    instances = {key: task.instance(key) for key in grown.instance.tolist()}
    first: dict[int, Instance] = {}  # of those that have a host
    for instance in instances.values():
        first.setdefault(id(instance.host), instance)
    tried = [(each.host, each.read(picked(each.train.x, slice(EXAMPLES)))) for each in first.values()]
    if whole is not None:
        tried.insert(1, (whole.host, map_leaves(padded, tried[0][1], whole.inputs)))
    chosen = tuple(sorted(set.intersection(*(set(skip_places(host, x)) for host, x in tried))))
    if not chosen:
        raise InputError("no skip fits the same segment of every environment's host")
    skipped = {name: Skipped(each.host, chosen) for name, each in first.items()}
    rows = [skipped[id(instances[key].host)] for key in grown.instance.tolist()]
    room = whole._replace(host=Skipped(whole.host, chosen)) if whole is not None else None
    return [_Population(np.arange(len(rows)), _with_hosts(task, grown.instance, rows, room))]


@dataclass(frozen=True, kw_only=True)
class _Rowwise(Task):
    """Gives its instances different hosts."""

    hosts: Mapping[int, Factory] = field(default_factory=dict)  # by key of the instance

    def instance(self, key: int) -> Instance:
        return replace(self, host=self.hosts[key])


def _with_hosts(task: AnyTask, instance: Keys, hosts: Sequence[Factory], room: Room | None) -> AnyTask:
    """Return the task with the hosts (E,) for the given instances, in a layout that holds them all."""
    by_key = dict(zip(instance.tolist(), hosts, strict=True))
    if isinstance(task, Mixture):
        assert room is not None
        sample = task.sample
        return replace(
            task, room=room._replace(lengths=task.lengths), sample=lambda key: replace(sample(key), host=by_key[key])
        )
    known = {each.name: getattr(task, each.name) for each in fields(task) if each.init}
    return _Rowwise(**{**known, "host": hosts[0], "room": room, "hosts": by_key})


_POPULATIONS: Mapping[str, Callable[[AnyTask, GrowthResult, bool], list[_Population]]] = {
    "same-size": _same_size,
    "plain": _plain,
    "skips": _skips,
}
