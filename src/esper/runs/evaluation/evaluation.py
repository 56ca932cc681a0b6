"""Compare controllers on the same held-out instances, with the same seeds, by the test split.

C contenders, N instances, R seeds, E environments of a population. The parts of an evaluation are populations, computed in this
process or by workers. What a part is follows from the evaluation, not from the number of workers, so the results do not depend
on it.
"""

import hashlib
import io
import itertools
import json
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.lifecycle import dormant
from esper.leyline.config.tree import BASELINES, Config, baseline_names, build_config, check_controller_settings
from esper.leyline.data.objective import objective_of
from esper.leyline.data.task import AnyTask, Mixture, with_steps
from esper.leyline.lifecycle.view import Outcome, Scores
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError, counted, system_in_words
from esper.leyline.progress import Pace
from esper.runs.baselines import Absent, GrowthResult, grown_of, train_baseline
from esper.runs.evaluation.contenders import ROWS, RULES, Contender, grow_contender, named, unheard
from esper.runs.evaluation.record import Evaluation, Record, RecordedFigures, findings
from esper.runs.figures import exported_objective, test_splits
from esper.runs.folder.environment import describe_environment, fingerprint
from esper.runs.folder.interrupt import Interrupt
from esper.runs.workers.transports import Sign, pickled, serve_rank, unpickled
from esper.runs.workers.workers import ALONE, Stop, WorkerOptions, WorkerPool, sent, shared_facts, start_workers
from esper.store.disk import DiskRetry, file_name, remove_unfinished, write_atomic
from esper.store.files import EVALUATION
from esper.store.lock import locked_folder
from esper.store.tensors import Tree
from esper.tamiyo.catalog import with_sensors
from esper.tolaria.engine import Until, VectorizedEngine, decide
from esper.tolaria.runtime import resolve_device
from esper.tolaria.stacked.population import instance_keys

FIGURE, GROWN = "evaluation.png", "grown"
ROOT = Path("runs/evaluation")
"""The parent of default folders. A default folder is named after the arguments; all of them share the stored populations."""
ASKED = ("task", "tasks", "controller", "envs", "twin", "baselines", "instances", "first_instance", "models")
"""Config keys that an evaluation sets itself. Settings must not contain them."""


Arrays = Mapping[str, NDArray[Any]]


class EvaluationPart(NamedTuple):
    """Describes a population of an evaluation or of a search."""

    task: AnyTask  # the task, with its test split
    who: Sequence[str]  # what makes the result, in the key of the stored one
    config: Config  # of the population
    needed: Collection[str]  # arrays that a result must have
    # from the task, the config and in a worker its sign to the arrays; workers get it pickled
    compute: Callable[..., Arrays | Absent]
    said: str = ""  # the line of progress when it is done; none if empty


def disk_retry(config: Config, note: Callable[[str], None], folder: Path) -> DiskRetry:
    """Return what waits for room on a full disk while an evaluation is written to a folder."""
    again = "give the same command again, which goes on from what was grown"
    return DiskRetry(config.faults.disk_seconds, note, folder, lambda: False, further=again)


class EvaluationPlayer:
    """Computes the parts of an evaluation in a worker: of its tasks, with their test splits, and those of references."""

    def __init__(self, tasks: Sequence[Callable[[], AnyTask]], device: str | None) -> None:
        """Make the tasks in this process. Parts are computed on the device, or on that of their config if it is None."""
        self._tasks, self._device = [make() for make in tasks], device
        self.facts = shared_facts(self._tasks)

    def play(self, part: Tree, sign: Sign) -> Tree:
        """Compute a part. Returns its arrays, or the reason why it is absent, and its duration [seconds]."""
        begin = time.perf_counter()
        config, compute = unpickled(part["content"].tobytes())  # from the process that started this one
        if self._device is not None:
            config = config.model_copy(update={"device": self._device})
        made = compute(self._tasks[part["task"]], config, sign)
        result = {"absent": made.reason} if isinstance(made, Absent) else {"arrays": dict(made)}
        return {**result, "seconds": time.perf_counter() - begin}


class Runner:
    """Computes parts, by workers or in this process. Results are stored in a folder, if there is one, and reused."""

    def __init__(
        self,
        folder: Path | None = None,
        watch: Callable[[str], None] = unheard,
        pool: WorkerPool | None = None,
        tasks: Sequence[AnyTask] = (),
    ) -> None:
        """Let the workers of a pool, which have the `tasks`, compute parts."""
        self.folder, self.watch, self.pool = folder, watch, pool
        self.pace: Pace | None = None  # counts what was computed
        self._data: dict[int, tuple[AnyTask, Mapping[str, str]]] = {}  # tasks and their fingerprints, by id
        self._places = {id(task): place for place, task in enumerate(tasks)}
        self._begin, self._playing = time.perf_counter(), 0.0

    def play(self, parts: Sequence[EvaluationPart]) -> list[Arrays | Absent]:
        """Return the results of parts in their order."""
        found: dict[int, Arrays | Absent] = {}
        missing, given = list[int](), list[Tree]()  # places of the parts that workers compute, and what they get

        def done(place: int, made: Arrays | Absent, seconds: float | None) -> None:
            part, found[place] = parts[place], made
            if seconds is not None and self.folder is not None and not isinstance(made, Absent):
                path, content = self._path(self.folder, part), io.BytesIO()
                np.savez_compressed(content, allow_pickle=False, **made)
                retry = disk_retry(part.config, self.watch, self.folder)
                retry(path, lambda: write_atomic(path, content.getvalue()))
            if self.pace is not None:
                hands = 1 if self.pool is None else self.pool.size
                self.pace.add(part.config.envs, None if seconds is None else seconds / hands)
            if part.said and not isinstance(made, Absent):
                self.watch(part.said)

        for place, part in enumerate(parts):
            if (stored := self._stored(part)) is not None:
                done(place, stored, None)
            elif self.pool is not None:
                content = pickled((part.config, part.compute), f"the controller {part.who[0]!r}")
                missing.append(place)
                given.append({"task": self._places[id(part.task)], "content": np.frombuffer(content, np.uint8)})
            else:
                begin = time.perf_counter()
                made = part.compute(part.task, part.config)
                done(place, made, time.perf_counter() - begin)
        if self.pool is not None and missing:
            self.pool.patience = max(parts[place].config.faults.worker_seconds for place in missing)
            for at, result in self.pool.play(given):
                self._playing += result["seconds"]
                made = Absent(result["absent"]) if "absent" in result else result["arrays"]
                done(missing[at], made, result["seconds"])
        return [found[place] for place in range(len(parts))]

    def _stored(self, part: EvaluationPart) -> Arrays | None:
        """Return the stored result of a part; None if there is none."""
        if self.folder is None or not (path := self._path(self.folder, part)).exists():
            return None
        try:
            with zipfile.ZipFile(path) as files:
                if sum(file.file_size for file in files.infolist()) > 2**30:
                    raise ValueError("more than any figures")
            with np.load(path, allow_pickle=False) as arrays:
                found = dict(arrays)
            if set(part.needed) - set(found):
                raise KeyError("some figures")
        except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error):
            raise InputError(f"{path} cannot be read as kept figures; remove it, and they are grown again") from None
        return found

    def _path(self, folder: Path, part: EvaluationPart) -> Path:
        """Return the file of the result of a part. A task is hashed once, which takes seconds for a large one."""
        task, config = part.task, part.config
        if id(task) not in self._data:
            self._data[id(task)] = task, fingerprint(task)
        asked = json.dumps([*part.who, config.model_dump(mode="json"), self._data[id(task)][1]], sort_keys=True)
        tag = hashlib.sha256(asked.encode()).hexdigest()[:16]
        who = file_name(part.who[0])[-40:]
        return folder / f"{file_name(config.task)}-{who}-s{config.seed}-{config.first_instance}-{tag}.npz"

    def summary(self) -> dict[str, Any]:
        """Return what the record says of the workers: their number, how many were lost, and the seconds that they waited."""
        if self.pool is None:
            return {}
        whole = self.pool.size * (time.perf_counter() - self._begin)
        self.pool.waiting += max(whole - self._playing, 0.0)
        return {"workers": self.pool.summary()}


@dataclass(frozen=True)
class Design:
    """Holds the task, instances, seeds and settings that contenders share, and names their populations.

    Raises InputError if nothing can be evaluated.
    """

    task: AnyTask
    settings: Sequence[Mapping[str, Any]]  # layers of config over that of the task
    runs: int  # number of seeds, which are consecutive from that of the config on
    part: str  # the part of the task's instances
    first: int
    instances: int
    rows: int = ROWS  # largest number of environments of a population

    def __post_init__(self) -> None:
        for name, count in (("instances", self.instances), ("seeds", self.runs)):
            if count < 1:
                raise InputError(f"{name} is {count}; an evaluation needs 1 or more")
        if build_config(self.task.defaults, *self.settings).widen.at:
            raise InputError("widen.at is set, but networks become wider in `esper grow` alone; leave widen out")
        for name in ASKED:
            if any(name in layer for layer in self.settings):
                raise InputError(f"{name} is among the settings, but an evaluation sets it by itself; leave it out")

    @cached_property
    def seeds(self) -> range:
        """The seed of each run."""
        first = build_config(self.task.defaults, *self.settings).seed
        return range(first, first + self.runs)

    def check(self, contender: Contender) -> None:
        """Raise InputError if a contender cannot decide on the task, by one decision in one environment."""
        if self.task.test is None:
            raise InputError(f"task {self.task.name!r} has no test split, which an evaluation reads; give it one")
        instance_keys(self.task, self.config(contender, self.seeds[-1]))
        config = self.config(contender, self.seeds[0], envs=1)
        client = contender.make(config)
        engine = VectorizedEngine(self.task.sealed(), with_sensors(config, client))
        decide(client, engine.reset(), engine.trial)

    def config(self, contender: Contender, seed: int, start: int = 0, envs: int | None = None) -> Config:
        """Return the config of a contender on `envs` instances from `start` on, or on all.

        With early stopping, every contender plays all steps: one that keeps seeds under way would otherwise choose its best
        state among more steps than one that never grows.
        """
        ours = {
            "task": self.task.name,
            "seed": seed,
            "baselines": [],
            "envs": self.instances if envs is None else envs,
            "instances": self.part,
            "first_instance": self.first + start,
            "telemetry": {"level": "off"},
            "models": "none",
        }
        own = {name: value for name, value in contender.settings.items() if name != "controller"}
        check_controller_settings(own, contender.name)
        layers = (self.task.defaults, *self.settings, contender.settings, ours)
        config = with_steps(build_config(*layers), self.task)
        whole = config.early_stopping.model_copy(update={"patience": config.steps})
        return config.model_copy(update={"early_stopping": whole})

    def populations(self, contender: Contender) -> list[Config]:
        """Return the config of every population of a contender, by seed and first instance."""
        starts = range(0, self.instances, self.rows)
        return [
            self.config(contender, seed, start, min(self.rows, self.instances - start))
            for seed, start in itertools.product(self.seeds, starts)
        ]

    def parts(self, contender: Contender) -> list[EvaluationPart]:
        """Return every population of a contender."""
        who, compute = [contender.name, contender.content], partial(_figures, contender)
        return [self.part_of(who, config, compute) for config in self.populations(contender)]

    def part_of(self, who: Sequence[str], config: Config, compute: Callable[..., Arrays | Absent]) -> EvaluationPart:
        """Return the part that computes the figures (E,) of a population."""
        done = f"{config.first_instance - self.first + config.envs} of {counted(self.instances, 'instance')}"
        said = f"{self.task.name}: {who[0]}, seed {config.seed}, {done}"
        return EvaluationPart(self.task, who, config, RecordedFigures._fields, compute, said)

    def train(
        self, runner: Runner, names: Sequence[str], sizer: Contender, grown: Sequence[Arrays]
    ) -> dict[str, Arrays | Absent]:
        """Train the static networks of names for every population that `sizer` grew; Absent are those that the task lacks."""
        parts = [
            self.part_of([name, sizer.name, sizer.content], config, partial(_trained, name, own))
            for name in names
            for config, own in zip(self.populations(sizer), grown, strict=True)
        ]
        made, found = iter(runner.play(parts)), dict[str, Arrays | Absent]()
        for name in names:
            trained = list(itertools.islice(made, len(grown)))
            absent = next((each for each in trained if isinstance(each, Absent)), None)
            if absent is not None:
                runner.watch(f"{self.task.name}: {name} is absent: {absent.reason}")
            found[name] = absent or self.joined(trained)
        return found

    def joined(self, made: Sequence[Arrays | Absent]) -> Arrays:
        """Return the results of all populations of a contender, of which none is absent, as arrays (N, R, ...)."""
        present = [each for each in made if not isinstance(each, Absent)]
        count = len(present) // len(self.seeds)
        by_seed = [present[start : start + count] for start in range(0, len(present), count)]
        return {
            name: np.stack([np.concatenate([own[name] for own in chunks]) for chunks in by_seed], 1)
            for name in present[0]
            if all(name in own for own in present)
        }


_KEPT = ("stage", "blueprint", "blend", "alpha")


def _figures(contender: Contender, task: AnyTask, config: Config, sign: Sign = lambda: False) -> Arrays:
    """Return the figures (E,) of one population, and its growth as arrays, from which `_trained` makes it again."""
    engine, outcome, seconds = grow_contender(task.sealed(), contender, config, observers=[Until(sign)])
    grown = grown_of(engine)
    figures = tested(task, config, engine, outcome, seconds)._asdict()
    planted = {f"seeds_{name}": getattr(grown.kept, name) for name in _KEPT}
    return {**figures, "instance": grown.instance, "params": grown.params, **planted}


def tested(
    task: AnyTask, config: Config, engine: VectorizedEngine, outcome: Outcome, seconds: float
) -> RecordedFigures:
    """Return the figures (E,) of a population that grew on `task.sealed()`; no other function reads test data of one.

    outcome: the last one. seconds: duration of the steps.
    """
    metric, loss = engine.evaluate(test_splits(engine, task))
    return RecordedFigures(
        objective=exported_objective(engine, metric, loss),
        metric=metric,
        added_params=(engine.exported_params() - outcome.host_params).astype(np.float64),
        kept=(outcome.seeds.stage == Stage.FOSSILIZED).sum(1).astype(np.float64),
        seconds=np.full(config.envs, seconds / config.envs),
    )


def _trained(name: str, arrays: Arrays, task: AnyTask, config: Config, sign: Sign = lambda: False) -> Arrays | Absent:
    """Train the static networks of one baseline, and return their figures (E,).

    arrays: of the population that grew, from `_figures`. The figure `kept` is nan for networks without seeds.
    """
    planted = dormant(*arrays["seeds_stage"].shape)._replace(**{each: arrays[f"seeds_{each}"] for each in _KEPT})
    grown = GrowthResult(arrays["instance"], planted, arrays["params"])
    trained = train_baseline(name, task, config, grown, config.steps, stop=sign)
    if isinstance(trained, Absent):
        return trained
    assert trained.seconds is not None
    host_params = grown.params - arrays["added_params"].astype(np.int64)
    added = trained.params - host_params
    kept = (planted.stage == Stage.FOSSILIZED).sum(1) if name == "same-size" else np.full(config.envs, np.nan)
    return RecordedFigures(
        objective=objective_of(Scores(trained.metric, trained.loss, added), host_params, config.reward),
        metric=trained.metric,
        added_params=added.astype(np.float64),
        kept=kept.astype(np.float64),
        seconds=np.full(config.envs, trained.seconds / config.envs),
    )._asdict()


class Entry(NamedTuple):
    """Holds what rivals add to the contenders of one task."""

    rules: Sequence[Contender] = ()  # compared with every controller, as the rules are
    # each with its design; those on tasks of their own grow the same instances
    opponents: Sequence[tuple[Design, Contender]] = ()
    plans: Sequence[Contender] = ()  # grown for `best_of` alone
    # name of an opponent, and what makes its figures (N, R) from those of all that was grown, by name
    best_of: tuple[str, Callable[[Mapping[str, Arrays]], Arrays]] | None = None
    absent: Mapping[str, str] = {}  # names of those that take no part, with the reasons


class Rivals:
    """Adds contenders to an evaluation; a package may pass such an object as `rivals`. This class adds none."""

    # known once they have entered
    searched = 0  # networks that are grown to choose contenders, on all tasks
    # tasks that contenders have for themselves, each with the function that makes it
    references: Sequence[tuple[AnyTask, Callable[[], AnyTask]]] = ()
    lines: Sequence[str] = ()  # printed before anything is grown

    def enter(
        self, designs: Sequence[Design], controllers: Sequence[Contender], settings: Sequence[Any]
    ) -> Sequence[int]:
        """Decide who takes part; return by task how many of them grow networks. Raises InputError where a contender cannot."""
        return [0] * len(designs)

    def grow(self, at: int, design: Design, runner: Runner) -> Entry:
        """Return the contenders of task `at`, whose searches may let the runner grow networks."""
        return Entry()

    def complete(self, record: Record, evaluations: Sequence[Evaluation]) -> None:
        """Add to the record what is known of them; "lines" of it and of its tasks are printed below the tables."""


def run_evaluation(
    controllers: Sequence[Contender],
    tasks: Sequence[AnyTask],
    *,
    instances: int = 200,
    seeds: int = 3,
    first: int = 0,
    settings: Sequence[Mapping[str, Any]] = (),
    baselines: Sequence[str] = BASELINES,
    folder: Path | None = None,
    watch: Callable[[str], None] = unheard,
    workers: WorkerOptions = ALONE,
    rivals: Rivals | None = None,
) -> Record:
    """Compare controllers with the rules, static networks and `rivals` on every task; return a strict JSON object.

    Arguments are as in `esper.evaluate`, with static networks of which the twin is left out, since the controller never is that.
    settings: layers of config. folder: stores the results of populations, which are reused. workers: in a rank of torchrun above
    0, this process is one of them until the evaluation ends.
    """
    rivals = rivals or Rivals()
    rules = [named(name) for name in RULES]
    again = [(rule.name, rule.settings) for rule in rules]
    ours = [controller for controller in controllers if (controller.name, controller.settings) not in again]
    names = [contender.name for contender in (*rules, *ours)]
    if len({*names, *BASELINES}) < len(names) + len(BASELINES):
        raise InputError(
            f"the controllers are {', '.join(names)}; give each a name of its own, and none of "
            f"{', '.join(map(repr, BASELINES))}"
        )
    try:
        static = [name for name in baseline_names(list(baselines)) if name != BASELINES[0]]
    except ValueError as error:
        raise InputError(f"baselines is {', '.join(map(str, baselines))!r}; {error}") from None
    if len({task.name for task in tasks}) < len(tasks) or not tasks:
        given = ", ".join(task.name for task in tasks) or "none"
        raise InputError(f"the tasks of the evaluation are {given}; give one or more, each once")
    designs = [Design(task, settings, seeds, "heldout", first, instances) for task in tasks]
    counts = rivals.enter(designs, ours, settings)
    for design, contender in itertools.product(designs, (*rules, *ours)):
        design.check(contender)
    grown = [len(rules) + len(ours) + count for count in counts]  # contenders
    most = max(len(each.populations(rules[0])) * own for each, own in zip(designs, grown, strict=True))
    if workers.any and workers.size > most:
        raise InputError(
            f"workers is {workers.size}, but the evaluation has {counted(most, 'population')} to grow, each by one worker; give "
            f"{most} or fewer, or more instances or seeds"
        )
    goes_on = "what was grown is stored where there is a folder, and the same command goes on from it"
    every = [*((task, workers.maker(task.name)) for task in tasks), *rivals.references]
    interrupt, begun = Interrupt(), not workers.any
    with ExitStack() as stack:
        try:
            pool = None
            if workers.any:
                for contender in () if workers.is_rank else (*rules, *ours):
                    pickled(contender, f"the controller {contender.name!r}")
                work = partial(EvaluationPlayer, [sent(task, make, sealed=False) for task, make in every])
                if workers.is_rank:
                    return serve_rank(work, workers.devices or (None,))
                if workers.cluster == "torchrun":  # which ends all ranks if one is lost, and rank 0 is to say so first
                    stack.enter_context(interrupt)
                pool = start_workers(
                    WorkerPool,
                    workers,
                    work,
                    watch,
                    shared_facts([task for task, _ in every]),
                    mend=f"give fewer workers; {goes_on}",
                    again=goes_on,
                    stop=lambda: interrupt.asked,
                )
                stack.callback(pool.close)
                begun = True
            runner = Runner(folder, watch, pool, [task for task, _ in every])
            if folder is not None:
                with system_in_words(f"cannot keep figures in {folder}", "name another folder"):
                    folder.mkdir(parents=True, exist_ok=True)
            networks = (sum(grown) + len(static) * len(tasks)) * instances * seeds
            more = f", and {rivals.searched:,} in searches on training instances" if rivals.searched else ""
            shown = (
                f"{counted(networks, 'network')} to grow on {counted(len(tasks), 'task')}, with static networks{more}"
            )
            for line in (shown, *rivals.lines):
                watch(line)
            runner.pace = Pace(networks + rivals.searched, "networks", watch)
            sized_by = ours[0].name if ours else RULES[2]
            evaluations = list[Evaluation]()
            for at, design in enumerate(designs):
                entry = rivals.grow(at, design, runner)
                contenders = [*rules, *entry.rules, *ours]
                evaluations.append(
                    compared(design, runner, contenders, len(contenders) - len(ours), entry, static, sized_by)
                )
            waited = runner.summary()
        except (KeyboardInterrupt, Stop):
            said = f"interrupted{'' if begun else ' while the workers were started'}; {goes_on}"
            watch(said)
            raise KeyboardInterrupt(said) from None
    rows = [contender.group or contender.name for contender in controllers]
    config = build_config(tasks[0].defaults, *settings)
    record = {
        "named": list(dict.fromkeys(rows)),
        "instances": instances,
        "seeds": list(evaluations[0].seeds),
        "part": designs[0].part,
        "first_instance": first,
        "settings": [dict(layer) for layer in settings],
        "environment": describe_environment(resolve_device(config.device), config),
        **findings(evaluations, static, rows),
        **waited,
    }
    rivals.complete(record, evaluations)
    return record


def compared(
    design: Design,
    runner: Runner,
    contenders: Sequence[Contender],
    rules: int,
    entry: Entry,
    static: Sequence[str],
    sized_by: str | None,
) -> Evaluation:
    """Return the figures of contenders, the first `rules` of them before the rivals, and of static networks."""
    task, absent, names = design.task, dict(entry.absent), [each.name for each in contenders]
    asked = [*entry.opponents, *((design, each) for each in (*contenders, *entry.plans))]
    asked = list({each.name: (own, each) for own, each in asked}.values())  # a controller may be an opponent
    parts = [own.parts(contender) for own, contender in asked]  # the populations of all are played together
    made = iter(runner.play([*itertools.chain(*parts)]))
    grown: dict[str, list[Any]] = {
        contender.name: [*itertools.islice(made, len(of))] for (_, contender), of in zip(asked, parts, strict=True)
    }
    every = {name: design.joined(own) for name, own in grown.items()}
    against = [each.name for _, each in entry.opponents]
    if entry.best_of is not None:
        name, choose = entry.best_of
        every[name] = choose(every)
        against.append(name)
    runs = {name: every[name] for name in (*names[:rules], *against, *names[rules:])}
    if static:
        sizer = next(contender for contender in contenders if contender.name == sized_by)
        trained = design.train(runner, static, sizer, grown[sizer.name])
        absent |= {name: each.reason for name, each in trained.items() if isinstance(each, Absent)}
        runs |= {name: each for name, each in trained.items() if not isinstance(each, Absent)}
    groups = {each.group: tuple(own.name for own in contenders if own.group == each.group) for each in contenders}
    groups.pop("", None)
    episodes = {contender.name: contender.episodes for _, contender in asked}
    episodes |= {name: max((episodes[own] or 0 for own in of), default=0) or None for name, of in groups.items()}
    return Evaluation(
        task=task.name,
        metric=task.objective.metric,
        contenders=tuple(runs),
        instances=instance_keys(task, design.config(contenders[0], design.seeds[0])),
        seeds=tuple(design.seeds),
        sampled=isinstance(task, Mixture),
        figures=RecordedFigures(
            *(np.stack([each[name] for each in runs.values()]) for name in RecordedFigures._fields)
        ),
        static=tuple(name for name in static if name not in absent),
        absent=absent,
        sized_by=sized_by,
        rules=tuple(names[:rules]),
        opponents=tuple(against),
        groups=groups,
        episodes=episodes,
    )


@contextmanager
def evaluation_folder(path: Path, note: Callable[[str], None], *, overwrite: bool = False) -> Iterator[Path]:
    """Make and lock the folder of an evaluation, and give the one, in or beside it, in which results are stored."""
    shared = path.parent == ROOT
    retry = DiskRetry(0.0, note, path, lambda: False, further="give the same command again")  # nothing is lost yet
    with locked_folder(path, note, retry):
        if (path / EVALUATION).exists() and not overwrite:
            raise InputError(
                f"{path / EVALUATION} is the record of an evaluation; name another folder (--out, out=), or replace "
                "it (--overwrite, overwrite=True), which keeps the networks that were grown"
            )
        remove_unfinished(path)
        if not shared:  # other processes may be writing to one that is shared
            remove_unfinished(path / GROWN)
        yield (path.parent if shared else path) / GROWN


def default_folder(
    controllers: Sequence[Contender], tasks: Sequence[str], settings: Sequence[Mapping[str, Any]], **numbers: int | None
) -> Path:
    """Return the default folder of an evaluation, which is a function of its arguments."""
    asked = [[each.name, each.content, dict(each.settings)] for each in controllers]
    digest = hashlib.sha256(json.dumps([asked, tasks, settings, numbers], sort_keys=True, default=str).encode())
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in "+".join(tasks))[:40]
    return ROOT / f"{readable}-{digest.hexdigest()[:8]}"
