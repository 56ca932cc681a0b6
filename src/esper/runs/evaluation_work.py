"""The parts of an evaluation: populations that are computed in this process or by actors. E environments.

What a part is follows from the evaluation, and not from the number of actors, so the results do not depend on it.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from esper.kasmina.static import Absent
from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.leyline.pace import Pace
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.runs.actor_work import SentTask, check_facts, facts_of
from esper.runs.actors import Actors, Stop
from esper.runs.contenders import Contender, Say, tell
from esper.runs.crews import Asked, hire
from esper.runs.interrupt import Interrupt
from esper.runs.kept import Kept
from esper.runs.origin import fingerprint
from esper.runs.processes import pickled, unpickled
from esper.runs.static_contenders import Arrays
from esper.store.checkpoint import Tree
from esper.tolaria.play import Observer


class EvaluationPart(NamedTuple):
    """A population of an evaluation or of a search.

    Attributes:
        kept (Kept): the stored results
        task (task): the task, with its test split
        who (names): what makes the result, in the key of the stored one
        config (Config): of the population
        needed (names): arrays that a result must have
        compute (callable): from the task, the config and observers to the arrays; actors get it pickled
        said (str): the line of progress when it is done; none if empty
    """

    kept: Kept
    task: AnyTask
    who: Sequence[str]
    config: Config
    needed: Collection[str]
    compute: Callable[..., Arrays | Absent]
    said: str = ""


@dataclass(frozen=True)
class EvaluationWork:
    """The specification of an evaluation's actors: its tasks, with their test splits, and those of references."""

    tasks: Sequence[SentTask]

    def make(self, device: str | None) -> "EvaluationPlayer":
        """Make the tasks in this process; parts are computed on the device, or on that of their config if it is None."""
        return EvaluationPlayer([sent.task() for sent in self.tasks], device)


class EvaluationPlayer:
    """Computes the parts of an evaluation in an actor."""

    def __init__(self, tasks: Sequence[AnyTask], device: str | None) -> None:
        self._tasks, self._device = tasks, device

    def facts(self) -> Tree:
        """Return digests of the data, and the versions of the software."""
        return _facts(self._tasks)

    def load(self, weights: Tree) -> None:
        """Take nothing: each part has its own controller."""

    def play(self, part: Tree, *observers: Observer) -> Tree:
        """Compute a part. Returns its arrays, or the reason why it is absent, and its duration [seconds]."""
        begin = time.perf_counter()
        config, compute = unpickled(part["content"].tobytes())  # from the process that started this one
        if self._device is not None:
            config = config.model_copy(update={"device": self._device})
        made = compute(self._tasks[part["task"]], config, *observers)
        result = {"absent": made.reason} if isinstance(made, Absent) else {"arrays": dict(made)}
        return {**result, "seconds": time.perf_counter() - begin}


class EvaluationActors:
    """The actors of an evaluation, and what they did."""

    def __init__(self, actors: Actors, tasks: Sequence[AnyTask], interrupt: Interrupt) -> None:
        """`play` raises Stop once the interrupt was asked for."""
        self.actors, self._interrupt = actors, interrupt
        self._places = {id(task): place for place, task in enumerate(tasks)}
        self._begin, self._playing = time.perf_counter(), 0.0

    def play(self, parts: Sequence[EvaluationPart], done: Callable[[int, Arrays | Absent, float], None]) -> None:
        """Let the actors compute parts. `done` gets the place of a part, its result, and its duration [seconds]."""

        def returned(place: int, result: Mapping[str, Any]) -> None:
            self._playing += result["seconds"]
            absent = result.get("absent")
            done(place, result["arrays"] if absent is None else Absent(absent), result["seconds"])

        self.actors.play({}, [self._sent(part) for part in parts], lambda: self._interrupt.asked, returned)

    def summary(self) -> dict[str, Any]:
        """Return the number of actors, how many were lost, and the seconds that they waited, all together."""
        self.actors.waited(time.perf_counter() - self._begin, self._playing)
        return self.actors.summary()

    def _sent(self, part: EvaluationPart) -> Tree:
        content = pickled((part.config, part.compute), f"the controller {part.who[0]!r}")
        return {"task": self._places[id(part.task)], "content": np.frombuffer(content, np.uint8)}


References = Sequence[tuple[AnyTask, Callable[[], AnyTask]]]
"""The tasks of references, each with the function that makes it."""

_AGAIN = "what was grown is stored where there is a folder, and the same command goes on from it"


def evaluation_work(asked: Asked, tasks: Sequence[AnyTask], references: References) -> EvaluationWork:
    """Return the specification of the actors of an evaluation. Raises InputError if a task cannot be sent to them."""
    sent = [SentTask.of(task, asked.find, sealed=False) for task in tasks]
    return EvaluationWork(
        [*sent, *(SentTask.of(task, partial(_made, make), sealed=False) for task, make in references)]
    )


@contextmanager
def hired(
    asked: Asked,
    tasks: Sequence[AnyTask],
    references: References,
    contenders: Sequence[Contender],
    watch: Say | None,
) -> Iterator[EvaluationActors | None]:
    """Start the actors that were asked for, and end them afterwards; None if none were asked for.

    Raises InputError if an actor cannot start, or if a task or a contender cannot be sent to one.
    """
    if not asked.any:
        try:
            yield None
        except KeyboardInterrupt:
            tell(watch, f"interrupted; {_AGAIN}")
            raise
        return
    for contender in contenders:
        pickled(contender, f"the controller {contender.name!r}")
    every = [*tasks, *(task for task, _ in references)]
    interrupt = Interrupt()  # torchrun ends all ranks if one is lost, and rank 0 is to say so first
    with interrupt if asked.cluster == "torchrun" else nullcontext():
        try:
            actors = hire(
                asked,
                evaluation_work(asked, tasks, references),
                partial(tell, watch),
                _facts(every),
                check_facts,
                mend=f"give fewer workers; {_AGAIN}",
                again=_AGAIN,
                stop=lambda: interrupt.asked,
            )
        except KeyboardInterrupt:
            tell(watch, f"interrupted while the actors were started; {_AGAIN}")
            raise
        try:
            yield EvaluationActors(actors, every, interrupt)
        except Stop:
            tell(watch, f"interrupted; {_AGAIN}")
            raise KeyboardInterrupt(f"the evaluation was interrupted; {_AGAIN}") from None
        finally:
            actors.close()


def check_size(asked: Asked, parts: int) -> None:
    """Raise InputError if there are more actors than populations that can be grown at the same time."""
    if asked.any and asked.size > parts:
        raise InputError(
            f"workers is {asked.size}, but the evaluation has {counted(parts, 'population')} to grow, each by one actor; give "
            f"{parts} or fewer, or more instances or seeds"
        )


def play_parts(
    parts: Sequence[EvaluationPart],
    actors: EvaluationActors | None = None,
    watch: Say | None = None,
    pace: Pace | None = None,
) -> list[Arrays | Absent]:
    """Return the results of parts in their order, computed by actors or in this process. Stored results are reused."""
    found: dict[int, Arrays | Absent] = {}

    def done(place: int, made: Arrays | Absent, seconds: float | None) -> None:
        part = parts[place]
        if seconds is not None and not isinstance(made, Absent):
            part.kept.store(part.who, part.config, made)
        found[place] = made
        if pace is not None:
            hands = 1 if actors is None else actors.actors.size
            pace.add(part.config.envs, None if seconds is None else seconds / hands)
        if part.said and not isinstance(made, Absent):
            tell(watch, part.said)

    missing = []
    for place, part in enumerate(parts):
        stored = part.kept.look(part.who, part.config, part.needed)
        if stored is not None:
            done(place, stored, None)
        elif actors is not None:
            missing.append(place)
        else:
            begin = time.perf_counter()
            made = part.compute(part.task, part.config)
            done(place, made, time.perf_counter() - begin)
    if actors is not None and missing:
        actors.play([parts[place] for place in missing], lambda at, made, seconds: done(missing[at], made, seconds))
    return [found[place] for place in range(len(parts))]


def computed(parts: Sequence[EvaluationPart], **how: Any) -> list[Arrays]:
    """Return the results of parts that cannot be absent, as `play_parts`."""
    made = play_parts(parts, **how)
    assert not any(isinstance(each, Absent) for each in made), "only static networks can be absent"
    return [each for each in made if not isinstance(each, Absent)]


def _made(make: Callable[[], AnyTask], name: str) -> AnyTask:
    """Make the task of a reference, which has no name that a catalog knows."""
    return make()


def _facts(tasks: Sequence[AnyTask]) -> Tree:
    return facts_of({task.name: fingerprint(task) for task in tasks})
