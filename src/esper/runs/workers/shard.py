"""Hold shards of populations in a worker, and carry out the commands of a growth on them. S slots, X branches.

A shard has n rows of a population: some environments, then their twins. It is a population of its own, which may have a ghost
behind these rows (`needs_ghost`). What its rows compute does not depend on which rows they are with.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.lifecycle import Edits, dormant
from esper.kasmina.stack.division import picked_body, picked_snapshot
from esper.kasmina.stack.plan import Branches
from esper.leyline.config.tree import Config
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.view import Bools, Seeds
from esper.runs.workers.transports import give_sign, unpickled
from esper.runs.workers.workers import SentTask, shared_facts
from esper.store.tensors import Tree
from esper.tolaria.play import Observer
from esper.tolaria.population import Indices, Keeper, ProbeRequest
from esper.tolaria.runtime import available_memory, resolve_device
from esper.tolaria.stacked.population import StackedPopulation, check_memory

Derive = Callable[[AnyTask], AnyTask]
"""From the task of a run to that of one of its populations, such as static networks."""


class ShardPart(NamedTuple):
    """Says what makes a shard in a worker."""

    config: Config  # of the shard alone
    instance: Indices  # (E,) instances of its environments
    rows: int  # n
    first_env: int  # number of its first environment in the whole population
    derive: Derive | None  # None where the population grows on the task of the run itself


class Shard:
    """Carries out commands on one shard: its public methods. Their arguments are of the n rows; numbers of rows are below n."""

    def __init__(self, task: AnyTask, part: ShardPart) -> None:
        task = task if part.derive is None else part.derive(task)
        check_memory(task, part.config, available_memory(resolve_device(part.config.device)))
        self._population = StackedPopulation(task, part.config, part.instance)
        self._population.first_env = part.first_env
        self._rows, self._keepers = part.rows, list[Keeper]()
        self._ghosts = len(self._population.environment) - part.rows
        self._every = np.append(np.arange(part.rows), np.zeros(self._ghosts, np.int64))  # a ghost is a copy of row 0

    def survey(self) -> Tree:
        """Return the constants of the rows, and their fresh examples."""
        population, rows = self._population, slice(0, self._rows)
        space, fresh = population.space, {id(each): each for each in population.fresh[rows]}
        of_rows = ("cost", "width", "number", "instance", "floor", "ceiling", "frozen")
        return {
            "table": {name: array[rows] for name, array in population.body.table.state().items()},
            "space": {name: getattr(space, name)[rows] for name in of_rows},
            "shared": {"slots": space.slots, "fits": space.fits, "heads": space.heads},
            "scaled": population.scaler is not None,
            "fresh": list(fresh.values()),
            "fresh_of": [list(fresh).index(id(each)) for each in population.fresh[rows]],
        }

    def begin(self, instance: Indices, episode: int) -> Tree:
        self._population.begin(instance[self._every], episode)
        return self.survey()

    def edit(self, born: Indices, freed: Indices, seeds: Sequence[NDArray[Any]], step: int) -> None:
        self._population.edit(Edits(born, freed), self._seeds(seeds), step)

    def widen(self, seeds: Sequence[NDArray[Any]], step: int) -> Tree:
        self._population.widen(self._seeds(seeds), step)
        return self.survey()

    def train(self, seeds: Sequence[NDArray[Any]], parameter_norms: bool) -> None:
        self._population.train(self._seeds(seeds), parameter_norms=parameter_norms)

    def probe(self, seeds: Sequence[NDArray[Any]], branches: Sequence[Any], look: Bools | None, asked: Tree) -> Tree:
        """Return the figures of the rows, and of the branches."""
        if look is not None:
            look = np.concatenate([look, np.zeros((self._ghosts, look.shape[1]), bool)])
        request = ProbeRequest(Branches(*branches), look=look, **asked)
        found, rows = self._population.probe(self._seeds(seeds), request)._asdict(), slice(0, self._rows)
        for name in ("loss", "metric", "participation", "signs", "sensors", "finite"):
            found[name] = None if found[name] is None else found[name][rows]
        if found["validation"] is not None:
            found["validation"] = [each[rows] for each in found["validation"]]
        if (trained := found["trained"]) is not None:
            norms = trained.parameter_norms
            found["trained"] = {
                "loss": trained.loss[rows],
                "gradient_norm": trained.gradient_norm[rows],
                "seed_norms": trained.seed_norms,
                "seed_owners": trained.seed_owners,
                "parameter_norms": None
                if norms is None
                else [{name: values[rows] for name, values in part.items()} for part in norms],
                "skipped": None if trained.skipped is None else trained.skipped[rows],
            }
        return found

    def tainted(self, rows: Indices, step: int) -> list[int]:
        return [int(row) for row in self._population.tainted(rows, step)]

    def growth(self, rows: Indices, slot: Indices, blueprint: Indices) -> int:
        return self._population.growth(rows, slot, blueprint)

    def arrange(self, seeds: Sequence[NDArray[Any]]) -> None:
        self._population.arrange(self._seeds(seeds))

    # Snapshots of rows, by the number of their keeper.

    def keeper(self, slots: int) -> None:
        self._keepers.append(self._population.keeper(dormant(self._rows + self._ghosts, slots)))

    def take(self, keeper: int, seeds: Sequence[NDArray[Any]], rows: Bools, step: int) -> None:
        self._keepers[keeper].take(self._seeds(seeds), self._marked(rows), step)

    def put_back(self, keeper: int, seeds: Sequence[NDArray[Any]], rows: Bools, kept: Sequence[NDArray[Any]]) -> None:
        self._keepers[keeper].put_back(self._seeds(seeds), self._marked(rows), self._seeds(kept))

    def keeper_state(self, keeper: int, now: int) -> Tree:
        return self._keepers[keeper].state(now)

    def load_keeper(self, keeper: int, state: Tree, seeds: Sequence[NDArray[Any]]) -> None:
        state = picked_snapshot(state, self._every)
        state["seeds"] = self._seeds([field[: self._rows] for field in state["seeds"].values()])._asdict()
        self._keepers[keeper].load_state(state, self._seeds(seeds))

    # The state of the rows.

    def snapshot(self) -> Tree:
        return self._population.snapshot()

    def load(self, tree: Tree, instance: Indices, episode: int) -> Tree:
        skipped = {"skipped": tree["skipped"][self._every]} if "skipped" in tree else {}
        body = picked_body(tree["body"], self._every, self._rows)
        self._population.load({**tree, "body": body, **skipped}, instance[self._every], episode)
        return self.survey()

    # The networks as exported.

    def evaluate(self, seeds: Sequence[NDArray[Any]], splits: NDArray[np.uint8]) -> list[NDArray[np.float64]]:
        found = self._population.evaluate(self._seeds(seeds), unpickled(splits.tobytes()))
        return [each[: self._rows] for each in found]

    def outputs(self, seeds: Sequence[NDArray[Any]], split: NDArray[np.uint8]) -> NDArray[np.float64]:
        return self._population.outputs(self._seeds(seeds), unpickled(split.tobytes()))[: self._rows]

    def compiled(self) -> dict[str, float] | None:
        return self._population.compiled

    def close(self) -> None:
        self._population.close()

    def _seeds(self, seeds: Sequence[NDArray[Any]]) -> Seeds:
        """Return the seeds of all rows from those of the n rows; the slots of a ghost are empty."""
        empty = dormant(self._ghosts, seeds[0].shape[1])
        return Seeds(*(np.concatenate([own, none]) for own, none in zip(seeds, empty, strict=True)))

    def _marked(self, rows: Bools) -> Bools:
        return rows[self._every]  # a ghost, whose results are ignored, is saved and restored with its row


class ShardWorker:
    """Does the work of a worker of a growth, on its shards of the populations that are open."""

    def __init__(self, sent: SentTask, device: str | None) -> None:
        """Make the task in this process. Shards are on the device, or on that of their config if it is None."""
        self._task, self._device = sent.task(), device
        self._shards: dict[int, Shard] = {}
        self.facts = shared_facts([self._task])

    def play(self, part: Tree, *observers: Observer) -> Tree:
        """Carry out commands. Returns the result of the last one, and the duration of all [seconds]."""
        begin, value = time.perf_counter(), None
        for command in part["commands"]:  # very many in place of a worker that was lost
            give_sign(observers)
            value = self._carry_out(command["population"], command["name"], command["arguments"])
        return {"value": value, "seconds": time.perf_counter() - begin}

    def _carry_out(self, population: int, name: str, arguments: Sequence[Any]) -> Any:
        if name == "make":
            made: ShardPart = unpickled(arguments[0].tobytes())  # from the process that started this one
            if self._device is not None:
                made = made._replace(config=made.config.model_copy(update={"device": self._device}))
            shard = self._shards[population] = Shard(self._task, made)
            return shard.survey()
        if name == "close":
            if (closed := self._shards.pop(population, None)) is not None:  # else it is in none of this worker's hands
                closed.close()
            return None
        return getattr(self._shards[population], name)(*arguments)
