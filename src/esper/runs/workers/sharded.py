"""Grow a population whose rows are divided among workers, in lockstep. E environments, R rows, S slots, X branches.

The engine, with the lifecycle, the controller, the governor and the events, is in the process of the run and knows all rows.
The networks and their data are in the workers. An engine cannot tell a `ShardedPopulation` from a population of this process:
what a row computes depends on no other row, so results do not depend on the number of workers.

A `Shard` in a worker has n rows of a population: some environments, then their twins. It is a population of its own. Where a row
alone would need a ghost, each shard has two rows or more.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.host import drawn_host, dtype_of
from esper.kasmina.lifecycle import Edits, dormant, uprooted
from esper.kasmina.network.export import grown_network
from esper.kasmina.stack.layout import HostTable
from esper.kasmina.stack.snapshot import joined_bodies, joined_snapshots, picked_body, picked_snapshot
from esper.leyline.config.tree import Config
from esper.leyline.data.batches import picked
from esper.leyline.data.task import AnyTask, Split, with_steps
from esper.leyline.lifecycle.view import Bools, Floats, Seeds, choose, take
from esper.leyline.messages import InputError, counted
from esper.leyline.protocols import Controller
from esper.runs.workers.transports import Sign, unpickled
from esper.runs.workers.workers import ShardPool, WorkerOptions, shared_facts
from esper.store.tensors import StateCopy, Tree
from esper.tolaria.engine import TaskEngine
from esper.tolaria.population import (
    Figures,
    Indices,
    Keeper,
    ParameterNorms,
    ProbeRequest,
    TrainedFigures,
    row_environments,
    space_of,
)
from esper.tolaria.runtime import PhaseTimer, Waits, resolve_device
from esper.tolaria.stacked import population as stacked
from esper.tolaria.stacked.optimizer import SCALE, TRACKER

Derive = Callable[[AnyTask], AnyTask]
"""From the task of a run to that of one of its populations, such as static networks."""


def check_workers(asked: WorkerOptions, config: Config, client: Controller) -> None:
    """Raise InputError if a growth cannot have the workers that were asked for."""
    if asked.cluster is not None:
        raise InputError(
            f"cluster is {asked.cluster}, but the workers of a growth are processes of this machine; leave it out, or give "
            "--workers or --devices"
        )
    if asked.size > config.envs:
        raise InputError(
            f"workers is {asked.size}, but {counted(config.envs, 'environment')} (envs) can be divided among {config.envs} at "
            f"most; give {counted(config.envs, 'worker')} or fewer, or raise envs"
        )
    if type(client).proposals is not Controller.proposals:
        raise InputError(
            f"the controller {config.controller} tries candidates in copies of the networks, which workers do not make; leave "
            "workers and devices out, or give another controller"
        )


class ShardedEngine(TaskEngine["ShardedPopulation"]):
    """Grows a population that workers hold."""

    def __init__(
        self,
        pool: ShardPool,
        task: AnyTask,
        config: Config,
        *,
        instance: Indices | None = None,
        derive: Derive | None = None,
    ) -> None:
        """instance (E,): as in `VectorizedEngine`. derive: makes the task in the workers from that of the run, if it is another.

        Raises InputError if the task, the config and the devices do not fit together.
        """
        task, config = task.sealed(), with_steps(config, task)
        keys = stacked.instance_keys(task, config) if instance is None else instance
        super().__init__(ShardedPopulation(pool, task, config, keys, derive), config)
        # the phases are those of this process, which waits for the workers
        self.timer = PhaseTimer(torch.device("cpu"), self.population.label)

    @property
    def reads(self) -> bool:
        return self.population.reads

    def remembering(self) -> AbstractContextManager[None]:
        return self.population.remembering(self.state.step)

    def remembered(self, snapshot: dict[str, Any]) -> None:
        population = self.population
        parts = population.ask("remembered")
        snapshot.update(population.joined([part["snapshot"] for part in parts]))
        for name, owner in (("governor", self.governor), ("early_stopping", self.stopping)):
            if owner is not None and snapshot[name]["snapshot"] is not None:
                assert isinstance(owner.keeper, ShardedKeeper)
                states = [part["keepers"][owner.keeper.number] for part in parts]
                snapshot[name]["snapshot"] = joined_snapshots(states, population.rows)


class ShardedPopulation:
    """Trains R hosts and their seeds in workers; implements `tolaria.population.TaskPopulation`.

    A command without a result is sent with the next one that has one, or with `train`.
    """

    waits: Waits | None = None  # the workers read batches by themselves
    _numbers = count()

    def __init__(
        self, pool: ShardPool, task: AnyTask, config: Config, instance: Indices, derive: Derive | None
    ) -> None:
        self._pool, self.task, self.config = pool, task, config
        self.device, self.label = resolve_device(config.device), stacked.label_of(config)
        self.environment = row_environments(config, ghost=stacked.needs_ghost(task, config))
        self.widenings, self.widened = stacked.widenings_of(task, config), 0
        self._number, self._keepers = next(self._numbers), 0
        alone = stacked.needs_ghost(task, config.model_copy(update={"envs": 1}))
        workers = min(pool.size, max(config.envs // (1 + alone), 1))
        ends = [config.envs * at // workers for at in range(workers + 1)]
        self._envs = [slice(*ends[at : at + 2]) for at in range(workers)]  # of each worker
        self._owner = np.searchsorted(ends, self.environment, side="right") - 1  # (R,) the worker of each row
        self.rows = [np.flatnonzero(self._owner == at) for at in range(workers)]  # (n,) of each worker, ascending
        self._place = _scattered([np.arange(len(rows)) for rows in self.rows], self.rows)  # (R,) of a row in its worker
        self._sent: tuple[Seeds, list[Seeds]] | None = None  # the last seeds, and those of each worker
        self._queue: list[list[Tree]] = [[] for _ in self._envs]
        self._known: dict[str, Any] | None = None  # the last snapshot, until a row changes
        self.remembers = False  # whether the workers keep the states of rows in place of sending them
        self._dtype = dtype_of(drawn_host(task.largest))
        configs = []
        for own in self._envs:
            update = {"envs": own.stop - own.start, "first_instance": config.first_instance + own.start}
            configs.append(config.model_copy(update=update))
        self.tell("make", configs, [instance[own] for own in self._envs], ends[:-1], derive)
        self.skipped = np.zeros(len(self._owner), np.int64)  # (R,) as in `StackedPopulation`
        self._survey()

    # What the engine asks for.

    def begin(self, instance: Indices, episode: int) -> None:
        self.skipped[:] = self.widened = 0
        self.tell("begin", instance, episode)
        self._survey()

    def edit(self, changes: Edits, seeds: Seeds, step: int) -> None:
        divided = []
        for at in range(len(self.rows)):
            own = (pairs[self._owner[pairs[:, 0]] == at] for pairs in changes)  # (n, 2) of row and slot
            divided.append(Edits(*(np.stack([self._place[pairs[:, 0]], pairs[:, 1]], 1) for pairs in own)))
        self.tell("edit", divided, seeds, step)

    def widen(self, seeds: Seeds, step: int) -> None:
        self.widened += 1
        self.tell("widen", seeds, step)
        self._survey()

    def train(self, seeds: Seeds, *, parameter_norms: bool = False) -> None:
        self.ask("train", seeds, parameter_norms, kept=True)

    def probe(self, seeds: Seeds, asked: ProbeRequest) -> Figures:
        chosen, requests = self._divided(asked.branches.env), []
        for rows, of in zip(self.rows, chosen, strict=True):
            branches = take(asked.branches, of)
            look = None if asked.look is None or not asked.look[rows].any() else asked.look[rows]
            branches = branches._replace(env=self._place[branches.env])
            requests.append(asked._replace(branches=branches, look=look))
        # in float16 a probe takes the updates that were skipped off the counts of steps
        kept = asked.trained and self._scaled
        parts: list[Any] = [Figures(*part) for part in self.ask("probe", seeds, requests, kept=kept)]
        found: dict[str, Any] = {
            name: self._whole([getattr(part, name) for part in parts])
            for name in ("loss", "metric", "participation", "signs", "sensors", "finite")
        }
        for name in ("branch_loss", "branch_metric", "loss_rise", "metric_fall"):
            found[name] = _scattered([getattr(part, name) for part in parts], chosen)
        if asked.validation:
            metric, loss = (self._whole([part.validation[at] for part in parts]) for at in range(2))
            found["validation"] = metric, loss
        if asked.look is not None:
            places = self._divided(np.nonzero(asked.look)[0])
            having = [at for at, of in enumerate(places) if len(of)]
            found["compared"] = _scattered([parts[at].compared for at in having], [places[at] for at in having])
        if asked.trained:
            found["trained"] = self._trained([TrainedFigures(*part.trained) for part in parts])
        return Figures(**found)

    def tainted(self, rows: Indices, step: int) -> list[int]:
        found = self.ask("tainted", [self._place[rows[of]] for of in self._divided(rows)], step)
        return [int(self.rows[at][row]) for at, part in enumerate(found) for row in part]

    def growth(self, rows: Indices, slot: Indices, blueprint: Indices) -> int:
        chosen = self._divided(rows)
        divided = [[values[of] for of in chosen] for values in (self._place[rows], slot, blueprint)]
        needed, devices = self.ask("growth", *divided), len(self._pool.devices)
        of_device = [sum(needed[at::devices]) for at in range(devices)]
        return sum(of_device) if self.device.type == "cpu" else max(of_device)

    @property
    def compiled(self) -> dict[str, float] | None:
        """The sums over the workers."""
        if self.config.compile == "off":
            return None
        parts: list[dict[str, float]] = self.ask("compiled")
        return {name: round(sum(part[name] for part in parts), 3) for name in parts[0]}

    @property
    def overflowed(self) -> Indices | None:
        return self.skipped if self._scaled else None

    def keeper(self, seeds: Seeds) -> "ShardedKeeper":
        self.tell("keeper", seeds.stage.shape[1])
        self._keepers += 1
        return ShardedKeeper(self, self._keepers - 1, seeds)

    # The state of all rows, in the form in which one process has it.

    @contextmanager
    def remembering(self, step: int) -> Iterator[None]:
        """Let the workers copy the state of their rows after a step. Within, `snapshot` and `ShardedKeeper.state` are empty."""
        self.tell("remember", step, kept=False)
        self.remembers = True
        try:
            yield
        finally:
            self.remembers = False

    def snapshot(self) -> dict[str, Any]:
        if self.remembers:
            return {}
        if self._known is None:
            self._known = self.joined(self.ask("snapshot"))
        return self._known

    def joined(self, parts: Sequence[Tree]) -> dict[str, Any]:
        """Return the snapshot of all rows from those of the workers."""
        found = {**parts[0], "body": joined_bodies([part["body"] for part in parts], self.rows)}
        found["skipped"] = self._whole([part["skipped"] for part in parts])
        return found

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        divided = []
        for rows in self.rows:
            seeds = take(Seeds(**tree["seeds"]), rows)._asdict()
            part = {**tree, "body": picked_body(tree["body"], rows), "seeds": seeds, "skipped": tree["skipped"][rows]}
            divided.append(part)
        self.skipped, self.widened = np.array(tree["skipped"]), tree["widened"]
        self.tell("load", divided, instance, episode)
        self._survey()

    # Evaluation and export at the end of an episode.

    def validation_splits(self) -> list[Split]:
        return [self.task.instance(key).validation for key in self.space.instance[: self.config.envs].tolist()]

    def evaluate(self, seeds: Seeds, split: Split | Sequence[Split]) -> tuple[Floats, Floats]:
        splits = [split if isinstance(split, Split) else split[own] for own in self._envs]
        parts = self.ask("evaluate", seeds, splits)
        metric, loss = (self._whole([part[at] for part in parts]) for at in range(2))
        return metric, loss

    def outputs(self, seeds: Seeds, split: Split) -> Floats:
        return self._whole(self.ask("outputs", seeds, split))

    def export(self, seeds: Seeds, env: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return a network of a body in this process that holds its row alone."""
        problem = self.task.instance(int(self.space.instance[env]))
        few = problem.read(picked(problem.train.x, slice(2)), self._dtype)
        # the layout of a body depends on its device, as only on a CPU may rows run one after another
        config = self.config if self.device.type == "cpu" else self.config.model_copy(update={"mapping": "vmap"})
        widenings = self.widenings[: self.widened]
        body = stacked.body_of(self.task, config, 1, few, torch.device("cpu"), widenings)
        state = picked_body(self.snapshot()["body"], np.array([env]))
        columns = {name: each for name, each in state["host"]["columns"].items() if name not in (SCALE, TRACKER)}
        body.load_state({**state, "host": {**state["host"], "columns": columns}})
        return grown_network(problem.host, body, take(seeds, slice(env, env + 1)), 0, problem.interface, widenings)

    def close(self) -> None:
        """Let the workers free the population when they carry out another command."""
        self._queue = [[] for _ in self.rows]
        self._pool.forget(self._number)

    # Commands.

    def parts_of(self, seeds: Seeds) -> list[Seeds]:
        """Return the seeds of each worker. They are made once for several commands, which share them as long as they are kept."""
        if self._sent is None or self._sent[0] is not seeds:
            self._sent = seeds, [take(seeds, rows) for rows in self.rows]
        return self._sent[1]

    def tell(self, name: str, *arguments: Any, kept: bool = True) -> None:
        """Queue a command. kept: whether it changes the rows.

        Each worker gets its rows of seeds and of arrays (R, ...), its entry of a list, and every other argument as it is.
        """
        if kept:
            self._known = None

        def divided(own: Any) -> Sequence[Any]:
            if isinstance(own, Seeds):
                return self.parts_of(own)
            if isinstance(own, list):
                return own
            return [own[rows] if isinstance(own, np.ndarray) else own for rows in self.rows]

        parts = [divided(own) for own in arguments]
        for at, queue in enumerate(self._queue):
            own = [part[at] for part in parts]
            queue.append({"population": self._number, "name": name, "arguments": own, "kept": kept})

    def ask(self, name: str, *arguments: Any, kept: bool = False) -> list[Any]:
        """Let the workers carry out what is queued and a command; return the result of each."""
        self.tell(name, *arguments, kept=kept)
        asked, self._queue = dict(enumerate(self._queue)), [[] for _ in self.rows]
        found = self._pool.ask(asked)
        return [found[at] for at in range(len(self.rows))]

    def _survey(self) -> None:
        """Note the constants of the rows, as they are after the commands so far."""
        parts = self.ask("survey")
        shared, menu = parts[0]["shared"], stacked.menu_of(self.task, self.config)
        self.table = HostTable(len(self._owner), len(shared["slots"]), menu)
        self.table.load_state(
            {name: self._whole([part["table"][name] for part in parts]) for name in parts[0]["table"]}
        )
        self.host_params = self.table.host_params
        of_rows = {name: self._whole([part["space"][name] for part in parts]) for name in parts[0]["space"]}
        slots, fits, heads = tuple(shared["slots"]), shared["fits"], shared["heads"]
        self.space = space_of(self.config, menu, slots=slots, fits=fits, heads=heads, **of_rows)
        self._scaled, self.reads = bool(parts[0]["scaled"]), bool(parts[0]["reads"])
        fresh = [[part["fresh"][of] for of in part["fresh_of"]] for part in parts]
        self.set_aside = [fresh[at][row] for at, row in zip(self._owner.tolist(), self._place.tolist(), strict=True)]

    def _trained(self, parts: Sequence[Any]) -> TrainedFigures:
        norms = None
        if parts[0].parameter_norms is not None:
            norms = ParameterNorms(*(self._by_name([part.parameter_norms[at] for part in parts]) for at in range(2)))
        of_rows = [part._replace(parameter_norms=None) for part in parts]
        found = TrainedFigures(*(self._whole(each) for each in zip(*of_rows, strict=True)))
        if found.skipped is not None:
            self.skipped += found.skipped
        return found._replace(parameter_norms=norms)

    def _by_name(self, parts: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
        """Join arrays (n,) by name to arrays (R,), which are nan in the rows of a worker that does not have the name."""
        found: dict[str, Floats] = {}
        for part, rows in zip(parts, self.rows, strict=True):
            for name, values in part.items():
                found.setdefault(name, np.full(len(self._owner), np.nan))[rows] = values
        return found

    # Rows.

    def _whole(self, parts: Sequence[Any]) -> Any:
        """Join arrays (n, ...) of the workers to one of all rows; None if they are None."""
        return None if parts[0] is None else _scattered(parts, self.rows)

    def _divided(self, rows: Indices) -> list[Indices]:
        """Return for each worker the indices of those of some rows (n,) that it holds."""
        return [np.flatnonzero(self._owner[rows] == at) for at in range(len(self.rows))]


class ShardedKeeper:
    """Keeps snapshots of all rows, which the workers hold; a `tolaria.population.Keeper`."""

    def __init__(self, population: ShardedPopulation, number: int, seeds: Seeds) -> None:
        self._population, self.number = population, number
        self.seeds, self.step = seeds, np.full(len(seeds.stage), -1, np.int64)

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        self._population.tell("with_keeper", self.number, "take", seeds, rows, step)
        self.seeds = choose(rows, seeds, self.seeds)
        self.step[rows] = step

    def put_back(self, seeds: Seeds, rows: Bools) -> Seeds:
        self._population.tell("with_keeper", self.number, "put_back", seeds, rows)
        restored: Seeds = choose(rows, uprooted(self.seeds, rows, self._population.config.lifecycle.embargo), seeds)
        return restored

    def state(self, now: int) -> dict[str, Any]:
        if self._population.remembers:
            return {}
        population = self._population
        states = population.ask("with_keeper", self.number, "state", now)
        return joined_snapshots(states, population.rows)

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        self.step, self.seeds = state["step"], Seeds(**state["seeds"])
        parts = [picked_snapshot(state, rows) for rows in self._population.rows]
        self._population.ask("with_keeper", self.number, "load_state", parts, seeds, kept=True)


def _scattered(parts: Sequence[NDArray[Any]], places: Sequence[Indices]) -> NDArray[Any]:
    """Join arrays (n, ...) to one in which those of part i are at places[i] (n,)."""
    return np.concatenate(parts)[np.concatenate(places).argsort()]


# In the workers.


class Shard:
    """Carries out commands on one shard: its own methods, and those of its population. Their arguments are of the n rows;
    numbers of rows are below n.
    """

    def __init__(self, task: AnyTask, config: Config, instance: Indices, first_env: int, derive: Derive | None) -> None:
        """config, instance (E,): of the shard alone. first_env: number of its first environment in the whole population.
        derive: None where the population grows on the task of the run itself.
        """
        task = task if derive is None else derive(task)
        self._population = stacked.StackedPopulation(task, config, instance)
        self._population.first_env = first_env
        self._keepers, self._copy = list[Keeper](), StateCopy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._population, name)

    def survey(self) -> Tree:
        """Return the constants of the rows, and their fresh examples."""
        population = self._population
        space, fresh = population.space, {id(each): each for each in population.set_aside}
        of_rows = ("cost", "width", "number", "instance", "floor", "ceiling", "frozen")
        return {
            "table": population.table.state(),
            "space": {name: getattr(space, name) for name in of_rows},
            "shared": {"slots": space.slots, "fits": space.fits, "heads": space.heads},
            "scaled": population.scaler is not None,
            "reads": population.waits is not None,
            "fresh": list(fresh.values()),
            "fresh_of": [list(fresh).index(id(each)) for each in population.set_aside],
        }

    def keeper(self, slots: int) -> None:
        self._keepers.append(self._population.keeper(dormant(len(self._population.environment), slots)))

    def with_keeper(self, number: int, name: str, *arguments: Any) -> Any:
        """Call a method of a keeper of the rows."""
        return getattr(self._keepers[number], name)(*arguments)

    def remember(self, step: int) -> None:
        """Copy the state of the rows and of their keepers after a step, in place of the copy before."""
        keepers = [keeper.state(step) for keeper in self._keepers]
        self._copy.take({"snapshot": self._population.snapshot(), "keepers": keepers})

    def remembered(self) -> Tree:
        """Return that copy."""
        found: Tree = self._copy.tree()
        return found


class ShardWorker:
    """Does the work of a worker of a growth, on its shards of the populations that are open."""

    def __init__(self, task: Callable[[], AnyTask], device: str | None) -> None:
        """Make the task in this process. Shards are on the device, or on that of their config if it is None."""
        self._task, self._device = task(), device
        self._shards: dict[int, Shard] = {}
        self.facts = shared_facts([self._task])

    def play(self, part: Tree, sign: Sign) -> Tree:
        """Carry out commands. Returns the result of the last one, and the duration of all [seconds]."""
        begin, value = time.perf_counter(), None
        for command in unpickled(part["commands"].tobytes()):  # very many in place of a worker that was lost
            sign()
            population, name, value = command["population"], command["name"], None
            if name == "make":
                config, *others = command["arguments"]
                if self._device is not None:
                    config = config.model_copy(update={"device": self._device})
                self._shards[population] = Shard(self._task, config, *others)
            elif name != "close":
                found = getattr(self._shards[population], name)  # of a property the value
                value = found(*command["arguments"]) if callable(found) else found
            elif (closed := self._shards.pop(population, None)) is not None:  # else this worker has nothing of it
                closed.close()
        return {"value": value, "seconds": time.perf_counter() - begin}
