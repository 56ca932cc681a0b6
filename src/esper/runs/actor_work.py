"""What an actor does: it makes its own copy of a training from a specification, and plays the parts that it is given."""

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from esper.leyline.config import Config, RewardConfig
from esper.leyline.errors import InputError, describe_error, typed_line
from esper.leyline.protocols import Reward
from esper.leyline.task import AnyTask
from esper.leyline.view import View
from esper.nissa.events import encode
from esper.nissa.hub import Hub, Level
from esper.nissa.rows import Row
from esper.runs.cohort import cohorts_of
from esper.runs.environment import describe_versions
from esper.runs.origin import fingerprint
from esper.runs.parts import Part, Player, learner_of
from esper.store.checkpoint import Tree
from esper.store.wire import pack, unpack
from esper.tamiyo.controller import Language, Policy
from esper.tolaria.play import Observer


class Work(Protocol):
    """What an actor computes."""

    def facts(self) -> Tree:
        """Return what must be the same in every actor and in the learner: data and versions."""
        ...

    def load(self, weights: Tree) -> None:
        """Take the weights with which the next parts are played."""
        ...

    def play(self, part: Tree, *observers: Observer) -> Tree:
        """Play a part and return its result."""
        ...


class SentTask(NamedTuple):
    """A task on its way to an actor.

    Attributes:
        name (str): name of the task
        content (bytes or None): the pickled task; None if the actor builds it from its name
        find (callable or None): from the name to the task
        sealed (bool): whether the actor gets the task without its test split
    """

    name: str
    content: bytes | None
    find: Callable[[str], AnyTask] | None = None
    sealed: bool = True

    @classmethod
    def of(cls, task: AnyTask, find: Callable[[str], AnyTask] | None, *, sealed: bool = True) -> "SentTask":
        """Pickle a task, without its test split if `sealed`.

        Raises InputError if it can neither be pickled nor be built from its name.
        """
        try:
            return cls(task.name, pickle.dumps(task.sealed() if sealed else task))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            with suppress(InputError):
                if find is not None:
                    find(task.name)
                    return cls(task.name, None, find, sealed)
            raise InputError(
                f"the task {task.name!r} cannot be sent to an actor ({typed_line(error)}); define its host and its functions at "
                "the top of a module, or name the task as path.py:function"
            ) from None

    def task(self) -> AnyTask:
        """Return the task, in an actor. Raises InputError if it cannot be imported there."""
        if self.content is None:
            assert self.find is not None, "a task without content is found by its name"
            made = self.find(self.name)
            return made.sealed() if self.sealed else made
        try:
            task: AnyTask = pickle.loads(self.content)
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise InputError(
                f"an actor cannot import the task {self.name!r} ({typed_line(error)}); define it in a file that can be imported, "
                "or name it as path.py:function"
            ) from None
        return task


@dataclass(frozen=True)
class TrainingWork:
    """The specification of a training's actors.

    Attributes:
        tasks (sequence): the tasks
        configs (sequence): the config of each
        reward (callable): as of `train`
        level (text): level of the events
        engines (int): number of cohorts whose populations an actor keeps in memory
    """

    tasks: Sequence[SentTask]
    configs: Sequence[Config]
    reward: Callable[[RewardConfig], Reward]
    level: Level
    engines: int

    def make(self, device: str | None) -> "TrainingPlayer":
        """Make the populations' cohorts in this process, on a device; None is that of the configs."""
        return TrainingPlayer(self, device)


class _Rows:
    """An output that keeps rows as lines of JSON."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, row: Row) -> None:
        """Keep a row."""
        self.lines.append(encode(row))

    def close(self) -> None:
        """No row follows."""


class TrainingPlayer:
    """Plays the parts of a training in an actor."""

    def __init__(self, work: TrainingWork, device: str | None) -> None:
        tasks = [sent.task() for sent in work.tasks]
        configs = [each if device is None else each.model_copy(update={"device": device}) for each in work.configs]
        cohorts = [
            each for task, config in zip(tasks, configs, strict=True) for each in cohorts_of(task, config, made=0)
        ]
        first = [next(each for each in cohorts if each.task is task) for task in tasks]
        language = Language.of([cohort.engine.space for cohort in first], configs[0].ppo.packages)
        policy = Policy.fresh(language, configs[0].seed, decisions_per_step=configs[0].ppo.decisions_per_step)
        for cohort in first:
            cohort.engines.release()
        self._data = {task.name: fingerprint(task) for task in tasks}
        self._rows, self._most, self._recent = _Rows(), work.engines, list[int]()
        hub = Hub([self._rows], work.level, raise_steps=configs[0].telemetry.raise_steps)
        self.player = Player(cohorts, learner_of(policy, configs[0]), work.reward, hub)

    def facts(self) -> Tree:
        """Return digests of the data, and the versions of the software."""
        return facts_of(self._data)

    def load(self, weights: Tree) -> None:
        """Take the policy, and the round of learning."""
        learner = self.player.learner
        learner.policy.load_state(weights["policy"])
        learner.round = weights["round"]

    def play(self, part: Tree, *observers: Observer) -> Tree:
        """Play a `Part`. Returns its statistics, its rollout or its validation, and its rows."""
        played, player = Part(**part), self.player
        self._make_room(played.cohort)
        self._rows.lines.clear()
        if played.kind == "validation":
            result: Tree = {"validated": player.validate(played, *observers)._asdict()}
        else:
            statistics, client = player.close(played, player.open(played), *observers), player.client(played)
            result = {"played": statistics._asdict(), "rollout": client.rollout().tree(), "menu": client.menu}
            client.clear()
        return {**result, "rows": np.frombuffer(b"".join(self._rows.lines), np.uint8)}

    def _make_room(self, cohort: int) -> None:
        """Free the populations that were not used for the longest time, so that there is room for those of a cohort."""
        self._recent = [cohort, *(each for each in self._recent if each != cohort)]
        for each in self._recent[self._most :]:
            self.player.cohorts[each].engines.release()
        del self._recent[self._most :]


def facts_of(data: Mapping[str, Any]) -> Tree:
    """Return the facts of fingerprints of tasks by name."""
    return {"data": dict(data), "versions": describe_versions(("esper", "torch", "numpy", "python"))}


def check_facts(own: Tree, ready: Tree) -> None:
    """Raise InputError if an actor has other data or other versions than the learner."""
    for name, parts in own["data"].items():
        if ready["data"].get(name) != parts:
            raise InputError(
                f"an actor has other data of task {name!r} than this process; let the function that makes the task return the "
                "same data at every call, and give every machine the same files"
            )
    if ready["versions"] != own["versions"]:
        raise InputError(
            f"an actor runs {ready['versions']}, this process {own['versions']}; install the same versions"
        )


class Answers:
    """Answers the messages of a learner. Errors are answers too."""

    def __init__(self, make: Callable[[], Work]) -> None:
        self._make = make
        self._work: Work | None = None

    def ready(self) -> bytes:
        """Make the work, and return the first answer."""
        return self._caught(self._begin)

    def answer(self, message: bytes, *observers: Observer) -> bytes | None:
        """Return the answer to a message; weights have none, unless they cannot be used."""
        tree = unpack(message)
        assert self._work is not None, "the actor is not ready"
        if "weights" in tree:
            self._work.load(tree["weights"])
            return None
        work = self._work
        return self._caught(lambda: {"result": work.play(tree["part"], *observers)})

    def _begin(self) -> Tree:
        self._work = self._make()
        return {"ready": self._work.facts()}

    @staticmethod
    def _caught(compute: Callable[[], Tree]) -> bytes:
        """Return the packed result, or the packed error of code that raised one."""
        try:
            return pack(compute())
        except Exception as error:  # of the user's code as well; the learner raises it again
            trace = "" if isinstance(error, InputError) else traceback.format_exc()
            return pack({"error": {**describe_error(error), "trace": trace}})


class Orphaned(BaseException):
    """The learner is gone, so the part is not needed any more."""


class Attached(Observer):
    """Ends a part whose learner is gone."""

    def __init__(self, gone: Callable[[], bool]) -> None:
        self._gone = gone

    def going(self, view: View) -> bool:
        """Raise Orphaned if the learner is gone."""
        if self._gone():
            raise Orphaned
        return True
