"""Measure trained controllers on the mixture `repair`, in a campaign of parts that goes on where it was left.

    train      trainings of the preset standard, seeds 0 to 2
    quick      one training of the preset quick, beside the rules
    evaluate   the standard controllers beside the rules and the best fixed schedule, on held-out instances
    others     the first of them on other data sets, three of which need no growth
    leave-out  preset quick without one kind of instance, judged on that kind alone
    ablation   the first standard controller with one group of its features taken from another environment
    page       the page of all results that there are

    python bench/scripts/study_controller.py [PART ...] [--quick] [--out DIR] [--jobs N] [--machine WORDS] [--page FILE]
        [--json FILE]

J is on the test split of the network that would be exported. A finished training, a grown population and the results of a
part are kept in --out; results are made anew where the controllers, or what is asked of them, are others. A change of the
code is not noticed: name another folder. A training that was broken off begins anew.
"""

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.config.tree import build_config
from esper.leyline.data.task import AnyTask, Instance, Mixture, Split
from esper.leyline.messages import InputError
from esper.leyline.progress import Progress
from esper.runs.configuration import TRAINING
from esper.runs.evaluation.contenders import ROWS, Contender, named
from esper.runs.evaluation.record import Evaluation
from esper.runs.evaluation.statistics import interquartile_mean, interval, mean, mean_difference
from esper.runs.evaluation.statistics import probability_of_improvement as improvement
from esper.runs.folder.resume import Opening
from esper.runs.train import train
from esper.store.files import EVENTS, SUMMARY, to_json
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Policy, load_policy
from esper.tamiyo.policy.observation import RELATIVE, Observation, input_names
from esper.tamiyo.rules.schedule import ScheduleEntry
from esper.tasks.catalog import get_task
from esper.tasks.repair import Facts, describe
from esper_bench.controllers.plans import Placed, Plan
from esper_bench.evaluation.declared import SEARCHED as BEST
from esper_bench.evaluation.one_task import evaluate
from esper_bench.evaluation.plan_menu import Candidate, entry_line
from esper_bench.evaluation.plan_search import search_plans
from esper_bench.records import load_record, run_script, save_record

Floats = NDArray[np.float64]
Record = dict[str, Any]
Job = tuple[Callable[..., str], tuple[Any, ...]]

NEVER, BEST_THERE, ORACLE, TREE = 0.680, 0.743, 0.809, 0.821
"""bench/docs/headroom.md, instances 0 to 199 by 3 seeds: J of never growing, of the fixed schedule that is best on these
very instances, of the unbiased oracle over 28 schedules, and of a tree model on all ranks and losses at step 4."""

RESTRICTED = 8192
"""Instances of each part that a mixture of one kind has; few enough that their keys are found in seconds."""
KINDS: Mapping[str, Callable[[Facts], bool]] = MappingProxyType(
    {
        "digits": lambda facts: facts.family == "digits",
        "two-bottlenecks": lambda facts: facts.damage == "narrow2",
    }
)
OTHERS = ("digits-narrow", "spirals-narrow", "iris-plain", "wine-plain", "breast-cancer-plain")
RULES = ("never", "random-valid", "heuristic")

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "metric and losses": r"metric|loss|train_loss|generalisation_gap",
        "their slopes": r".*_slope_\d+",
        "sizes and costs": r"host_params|width",
        "ranks (participation)": r"participation.*",
        "dead and unsaturated units": r"dead|unsaturated",
        "norms of gradients and streams": r"(map_)?gradient_.*|stream_rms|seed_gradient",
        "explained gradient": r"explained_.*",
        "the same on held-out examples": r"heldout_.*",
        "worth of seeds": r"contribution.*|gain.*|interaction.*",
    }
)
"""What is measured, by the names of its features. What a controller has done itself is in no group: see STATE."""
STATE = r"time_left|steps_left|added_params|seeds_.*|sensor_age|age|life|alpha|ramp_.*|depth"
EVERYTHING = "all of these"


PARTS = ("train", "quick", "evaluate", "others", "leave-out", "ablation", "page")
TITLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "evaluate": ("Standard controllers beside the rules and the best fixed schedule", ""),
        "quick": ("The quick preset", ""),
        "others": (
            "On data that it was not trained on",
            "On iris-plain, wine-plain and breast-cancer-plain the right answer is not to grow.",
        ),
        "leave-out": (
            "On a kind of instance that was left out of training",
            "The heuristic and the best fixed schedule were chosen on all kinds, these among them.",
        ),
        "ablation": (
            "What it looks at",
            "A group of columns, raw, relative and whether they were measured, is that of another environment for the whole "
            "episode. What other groups tell too is not missed, so the falls do not add up.",
        ),
    }
)
"""The parts that grow, in the order of the page: a title and a remark."""
TOGETHER = "standard, all seeds"
ROUNDS = {"quick": 60, "standard": 150}
"""Rounds of a training; the presets of these names were of this length when the study was made."""
PAGE = Path(__file__).parents[1] / "docs/controller.md"


class Size(NamedTuple):
    """Sets how large the study is: instances by seeds of a part."""

    trainings: tuple[int, ...]  # seeds of the standard trainings
    searched: int  # episodes of the search for the best fixed plan
    evaluate: tuple[int, int]
    quick: tuple[int, int]
    others: tuple[int, int]
    leave_out: tuple[int, int]
    ablation: tuple[int, int]
    layer: Mapping[str, Any]  # settings of every training and evaluation
    learner: Mapping[str, Any]  # settings of every training


FULL = Size((0, 1, 2), 2048, (200, 3), (50, 3), (24, 2), (100, 2), (200, 1), {}, {})
QUICK = Size(
    (0, 1),
    20,
    *((4, 2), (4, 1), (3, 1), (4, 1), (4, 1)),
    {"steps": 14, "data": {"batches_per_step": 2}, "blueprints": ["bypass-linear"]},
    {"envs": 16, "ppo": {"rounds": 1, "imitation_rounds": 1, "validate_envs": 4}},
)


class Training(NamedTuple):
    """Describes one training of a controller; `name` is its folder."""

    name: str
    task: str
    preset: str
    seed: int


class Player(NamedTuple):
    """Describes who decides, in words that another process can act on."""

    name: str
    source: str  # the name of a controller, the folder of a trained one, or the file of a schedule that was found
    shuffled: str = ""  # the group of features that it is given from another environment


class Study(NamedTuple):
    """Runs the campaign."""

    size: Size
    out: Path
    pool: Executor

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs, as many at once as there are processes."""
        waiting = [self.pool.submit(work, *arguments) for work, arguments in jobs]
        for done, future in enumerate(as_completed(waiting), 1):
            say(f"{done}/{len(jobs)} {future.result()}")

    def controller(self, training: str) -> Path:
        """Return where a finished training left its controller. InputError where there is none."""
        if not finished(self.out / training):
            raise InputError(
                f"{self.out / training} holds no finished training; run the parts train, quick and leave-out"
            )
        return self.out / training / FOLDER

    def standard(self) -> list[Player]:
        """List the standard controllers that are trained."""
        trainings = trainings_of("train", self.size)
        there = [each for each in trainings if finished(self.out / each.name)] or trainings[:1]
        return [Player(f"standard, seed {each.seed}", str(self.controller(each.name))) for each in there]

    def grow(self, task: str, players: Sequence[Player], shape: tuple[int, int], rows: int) -> Evaluation:
        """Grow held-out instances by seeds with every player, one seed a process at a time."""
        rest, (instances, seeds) = (shape[0], self.size.layer, self.out / "grown", rows), shape
        self.run([(grow, (task, player, seed, *rest)) for seed in range(seeds) for player in players])
        return evaluate(
            task_of(task),
            [contender_of(player) for player in players],
            instances=instances,
            seeds=seeds,
            settings=[self.size.layer],
            folder=self.out / "grown",
            rows=rows,
        )

    def examine(self, part: str) -> None:
        """Write the results of a part, unless they are there for the same controllers and the same question."""
        exam, path = exam_of(self, part), self.out / f"{part}.json"
        who = {task: [[p.name, contender_of(p).content] for p in players] for task, players in exam.tasks.items()}
        asked = {"players": who, "shape": exam.shape, "rivals": exam.rivals, "settings": dict(self.size.layer)}
        asked = json.loads(to_json(asked))
        if not path.is_file() or load_record(path)["asked"] != asked:
            tasks = {
                task: estimates(self.grow(task, players, exam.shape, exam.rows), exam.rivals, exam.pools)
                for task, players in exam.tasks.items()
            }
            save_record(path, {"asked": asked, "tasks": tasks})
        say(f"{part}: {path}")


class Exam(NamedTuple):
    """Describes what is grown for a part, and what it is compared with."""

    tasks: Mapping[str, Sequence[Player]]
    shape: tuple[int, int]  # instances, seeds
    rivals: Sequence[str]
    pools: Mapping[str, Sequence[str]] = MappingProxyType({})  # players whose runs are taken together too
    rows: int = ROWS


class ValidationLines(Progress):
    """Says how a training goes on whenever it was validated."""

    def __init__(self, name: str) -> None:
        self.name = name

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        """Print a line at a validation."""
        if "validation_objective" in figures:
            say(f"{self.name}: round {number} of {rounds}, validation J {figures['validation_objective']:.3f}")

    def note(self, text: str) -> None:
        """Pass it on."""
        say(f"{self.name}: {text}")


@dataclass
class Shuffled(Policy):
    """Shows a policy one group of its features from another environment, the same one for a whole episode."""

    group: str = EVERYTHING

    def normalised(self, observation: Observation) -> Observation:
        """Return what the network reads, with the group's columns, raw, relative and `name?`, those of another environment."""
        seen = super().normalised(observation)
        other = partners(len(seen.env))
        env, slot = seen.env.copy(), seen.slot.copy()
        for values, names in zip((env, slot), input_names(self.language.sensors), strict=True):
            columns = columns_of(names, self.group)
            values[..., columns] = values[other][..., columns]
        costs = self.group in ("sizes and costs", EVERYTHING)
        return seen._replace(env=env, slot=slot, cost=seen.cost[other] if costs else seen.cost)


def partners(envs: int) -> NDArray[np.int64]:
    """Return the environment (E,) that each is shown in its place: one cycle in a drawn order, so that none is shown itself."""
    order, other = np.random.default_rng(0).permutation(envs), np.zeros(envs, np.int64)
    other[order] = np.roll(order, 1)
    return other


def columns_of(names: Sequence[str], group: str) -> list[int]:
    """Return the columns of a group among the names of `input_names`."""
    pattern = "|".join(GROUPS.values()) if group == EVERYTHING else GROUPS[group]
    return [i for i, name in enumerate(names) if re.fullmatch(pattern, name.removesuffix("?").removesuffix(RELATIVE))]


@lru_cache
def task_of(name: str) -> AnyTask:
    """Return a task of the catalogue, or `repair` with one kind alone, `repair-only-KIND`, or without, `repair-without-KIND`."""
    for kind, belongs in KINDS.items():
        if name == f"repair-only-{kind}":
            return restricted(get_task("repair"), name, belongs)
        if name == f"repair-without-{kind}":
            return restricted(get_task("repair"), name, lambda facts, belongs=belongs: not belongs(facts))
    return get_task(name)


def restricted(mixture: AnyTask, name: str, belongs: Callable[[Facts], bool]) -> Mixture:
    """Return the mixture of some of its instances: the i-th key of a part stands for the i-th instance there that belongs."""
    assert isinstance(mixture, Mixture)
    ranges = {part: range(keys.start, keys.start + RESTRICTED) for part, keys in mixture.ranges.items()}
    rest = {part: (key for key in keys if belongs(describe(key))) for part, keys in mixture.ranges.items()}
    found: dict[str, list[int]] = {part: [] for part in ranges}

    def original(key: int) -> int:
        part = next((part for part, keys in ranges.items() if key in keys), None)
        if part is None:
            raise InputError(f"key {key} is no instance of {name!r}; its parts have {RESTRICTED} instances each")
        place = key - ranges[part].start
        while len(found[part]) <= place:
            found[part].append(next(rest[part]))
        return found[part][place]

    def sample(key: int) -> Instance:
        return mixture.instance(original(key))

    def test(key: int) -> Split:
        split = mixture.test_split(original(key))
        assert split is not None
        return split

    return replace(mixture, name=name, sample=sample, test=test, ranges=ranges)


def trainings_of(part: str, size: Size) -> list[Training]:
    """List what a part has trained."""
    quick = Training("quick-s0", "repair", "quick", 0)
    match part:
        case "train":
            return [Training(f"train-s{seed}", "repair", "standard", seed) for seed in size.trainings]
        case "quick":
            return [quick]
        case "leave-out":
            return [quick, *(Training(f"without-{kind}", f"repair-without-{kind}", "quick", 0) for kind in KINDS)]
    return []


def finished(folder: Path) -> bool:
    """Return whether a training was brought to its end."""
    path = folder / SUMMARY
    return path.is_file() and read(path)["status"] == "finished"


def train_one(training: Training, folder: Path, settings: Sequence[Mapping[str, Any]]) -> str:
    """Train a controller into a folder, as `esper train` does."""
    torch.set_num_threads(1)
    task = task_of(training.task)
    ours = {"task": task.name, "tasks": [task.name], "controller": "ppo", "seed": training.seed}
    length = {"ppo": {"rounds": ROUNDS[training.preset], "imitation_rounds": 8}}
    config = build_config(task.defaults, TRAINING, length, *settings, ours)
    summary = train([task], [config], folder, ValidationLines(training.name), Opening(overwrite=True))
    return f"{training.name} {summary['status']} in {summary['seconds']:.0f} s"


def search(path: Path, searched: int, layer: Mapping[str, Any]) -> str:
    """Find the best fixed plan on training instances and write it to a file."""
    torch.set_num_threads(1)
    found = search_plans(task_of("repair"), [layer], episodes=searched)
    facts = {name: getattr(found, name) for name in ("objective", "candidates", "instances", "episodes", "seconds")}
    choice = found.best.choice
    if isinstance(choice, Placed):
        lines = {"plan": [*choice.plan, choice.slot], "entries": []}
    else:
        lines = {"plan": None, "entries": [entry_line(entry) for entry in choice]}
    save_record(path, {**lines, "settings": dict(found.best.settings), **facts})
    return f"search in {found.seconds:.0f} s"


def contender_of(player: Player) -> Contender:
    """Return a player as an evaluation wants it; the same in every process, wherever its folder lies."""
    ours = {"controller": player.name}
    if player.source.endswith(".json"):
        found = load_record(Path(player.source))
        choice: Placed | tuple[ScheduleEntry, ...] = tuple(
            ScheduleEntry.model_validate(line) for line in found["entries"]
        )
        if found["plan"] is not None:
            name, here, others, everywhere, slot = found["plan"]
            choice = Placed(Plan(name, tuple(here), tuple(others), everywhere), slot)
        return Candidate(player.name, choice, found["settings"]).contender(player.name)
    known = named(player.source)
    known = known._replace(name=player.name, settings={**known.settings, **ours})
    if not player.shuffled:
        return known

    def make(config: object) -> Learned:
        policy = load_policy(Path(player.source))
        return Learned(Shuffled(**vars(policy), group=player.shuffled))

    return known._replace(make=make, content=f"{known.content} {player.shuffled} {dict(GROUPS)}")


def grow(
    task: str, player: Player, seed: int, instances: int, layer: Mapping[str, Any], folder: Path, rows: int
) -> str:
    """Grow the instances from one seed and keep what came of it."""
    torch.set_num_threads(1)
    settings = [layer, {"seed": seed}]
    evaluate(
        task_of(task), [contender_of(player)], instances=instances, seeds=1, settings=settings, folder=folder, rows=rows
    )
    return f"{task}: {player.name}, seed {seed}"


def exam_of(study: Study, part: str) -> Exam:
    """Return what the parts that grow compare. InputError where a controller that they need is not trained."""
    never, random, heuristic = (Player(name, name) for name in RULES)
    best, size = Player(BEST, str(study.out / "search.json")), study.size
    match part:
        case "quick":
            players = [never, random, heuristic, Player("quick, seed 0", str(study.controller("quick-s0")))]
            return Exam({"repair": players}, size.quick, ["heuristic", "never"])
        case "evaluate":
            ours = study.standard()
            players, rivals = [never, random, heuristic, best, *ours], [BEST, "heuristic"]
            return Exam({"repair": players}, size.evaluate, rivals, {TOGETHER: [player.name for player in ours]})
        case "others":
            players = [never, heuristic, study.standard()[0]]
            return Exam(dict.fromkeys(OTHERS, players), size.others, ["never"])
        case "leave-out":
            everything = Player("quick, trained on all kinds", str(study.controller("quick-s0")))
            tasks = {
                f"repair-only-{kind}": [never, heuristic, best, everything]
                + [Player("quick, without this kind", str(study.controller(f"without-{kind}")))]
                for kind in KINDS
            }
            return Exam(tasks, size.leave_out, [BEST, "heuristic", everything.name])
    assert part == "ablation", part
    plain = study.standard()[0]
    players = [plain, *(Player(f"without {group}", plain.source, group) for group in (*GROUPS, EVERYTHING))]
    return Exam({"repair": players}, size.ablation, [plain.name], rows=size.ablation[0])


def estimates(evaluation: Evaluation, rivals: Sequence[str], pools: Mapping[str, Sequence[str]]) -> list[Record]:
    """Estimate every contender, and every pool as one contender of more runs, with intervals, and paired against the rivals."""

    def scores(names: Sequence[str], figure: str) -> list[Floats]:
        """Return scores (P, R names): the runs of one contender beside those of the next."""
        values = getattr(evaluation.figures, figure)[[evaluation.contenders.index(name) for name in names]]
        return [evaluation.problems(np.concatenate(list(values), 1))]

    rows = []
    for name, ours in ({name: [name] for name in evaluation.contenders} | dict(pools)).items():
        j, metric = scores(ours, "objective"), scores(ours, "metric")
        row = {"name": name, "objective": interval(mean, j), "iqm": interval(interquartile_mean, j)}
        row |= {"metric": interval(mean, metric), "seconds": float(scores(ours, "seconds")[0].sum())}
        row |= {figure: interval(mean, scores(ours, figure)) for figure in ("added_params", "kept")}
        row["against"] = against = {}
        for rival in (rival for rival in rivals if rival not in ours):
            their_j, their_metric = (scores([rival] * len(ours), figure) for figure in ("objective", "metric"))
            against[rival] = {"objective": interval(mean_difference, j, their_j)}
            against[rival] |= {"metric": interval(mean_difference, metric, their_metric)}
            against[rival] |= {"probability": interval(improvement, j, their_j)}
        rows.append(row)
    return plain(rows)


def plain(value: Any) -> Any:
    """Convert records to what JSON has: an interval is a list, and null is in place of what is not finite."""
    match value:
        case dict():
            return {name: plain(part) for name, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case float():
            return value if np.isfinite(value) else None
    return value


def read(path: Path) -> Record:
    """Read a JSON file."""
    known: Record = json.loads(path.read_text(encoding="utf-8"))
    return known


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def format_estimate(estimate: Sequence[float | None], form: str) -> str:
    """Format an estimate with its interval; what was not measured is shown as "?"."""
    value, low, high = ("?" if number is None else format(number, form) for number in estimate)
    return f"{value} [{low}, {high}]"


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the lines of a table in Markdown; rows by column, absent cells are empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in rows)]
    return ["", *("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]


def figures(row: Record) -> Record:
    """Return what a contender came to, as a row of a table."""
    return {
        "controller": row["name"],
        "J": format_estimate(row["objective"], ".3f"),
        "interquartile mean": format_estimate(row["iqm"], ".3f"),
        "accuracy": format_estimate(row["metric"], ".3f"),
        "parameters added": f"{row['added_params'][0]:.0f}",
        "seeds kept": f"{row['kept'][0]:.2f}",
        "seconds": f"{row['seconds']:.0f}",
    }


def comparisons(row: Record) -> Record:
    """Return paired differences, as a row of a table."""
    cells = {"controller": row["name"]}
    for rival, pair in row["against"].items():
        cells[f"J less that of {rival}"] = format_estimate(pair["objective"], "+.3f")
        cells[f"accuracy less that of {rival}"] = format_estimate(pair["metric"], "+.3f")
        cells[f"P(better than {rival})"] = format_estimate(pair["probability"], ".2f")
    return cells


def shares(rows: Sequence[Record], oracle: float, best_there: float) -> list[str]:
    """Return lines on how much of the headroom every contender captures."""
    of = {row["name"]: row for row in rows}
    best = of[BEST]["objective"][0]
    cells = [
        {
            "controller": name,
            "J": f"{row['objective'][0]:.3f}",
            "share, best fixed here": format_estimate(
                [d and d / (oracle - best) for d in row["against"][BEST]["objective"]], ".0%"
            ),
            "share, best fixed there": f"{(row['objective'][0] - best_there) / (oracle - best_there):.0%}",
        }
        for name, row in of.items()
        if name != BEST
    ]
    return [
        "Share of the headroom: (J - J of the best fixed) / (J of the oracle - J of the best fixed). The oracle is the unbiased "
        f"one of [headroom.md](headroom.md), {oracle:.3f} on instances 0 to 199. The best fixed schedule has {best:.3f} here, "
        f"found on training instances, and {best_there:.3f} there, found on these very instances. The interval is that of the "
        f"paired difference, the headroom taken as known. Never growing has {of['never']['objective'][0]:.3f} here and "
        f"{NEVER:.3f} there; a tree model on the sensors of one step has {TREE:.3f} there. The oracle picks among 28 schedules "
        "alone, so a share may exceed 100 %.",
        *table(cells),
    ]


def training_lines(out: Path, names: Sequence[str]) -> list[str]:
    """Return lines with facts and learning curves of finished trainings."""
    facts, points = [], {}
    for name in names:
        summary = read(out / name / SUMMARY)
        last = {key: "" if value is None else f"{value:.3g}" for key, value in summary["last_rounds"].items()}
        facts.append(
            {
                "training": name,
                "rounds": summary["rounds_done"],
                "seconds": f"{summary['seconds']:.0f}",
                "best round": summary["best_round"] + 1,
                "its validation J": f"{summary['best_validation_objective']:.3f}",
                "explained variance": last["explained_variance"],
                "seeds kept of planted": last["kept_share"],
                "seeds kept a network": last["kept"],
                "environment steps / s": last["env_steps_per_second"],
                "controller's share": f"{summary['controller_share']:.1%}",
            }
        )
        for line in (out / name / EVENTS).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["kind"] == "round" and row["figures"].get("validation_objective") is not None:
                point = points.setdefault(row["round"] + 1, {"rounds": row["round"] + 1})
                point[name] = f"{row['figures']['validation_objective']:.3f}"
    return [
        *table(facts),
        "The columns from explained variance to steps a second are means over the last ten rounds, where the policy still draws; "
        "the controller's share is what deciding and learning take of the time. The best round is that of the controller that "
        "was kept. Validation J of the greedy policy on validation instances, by rounds done, 0 being after imitation:",
        *table([points[number] for number in sorted(points)]),
    ]


def page(study: Study, machine: str, oracle: float, best_there: float) -> tuple[str, Record]:
    """Return the page, and everything that it is made of."""
    out, command = study.out, "python bench/scripts/study_controller.py" + (" --quick" if study.size is QUICK else "")
    results = {part: load_record(out / f"{part}.json") for part in TITLES if (out / f"{part}.json").is_file()}
    names = dict.fromkeys(training.name for part in PARTS for training in trainings_of(part, study.size))
    names = [name for name in names if finished(out / name)]
    lines = [
        "# What a trained controller is worth",
        "",
        "The menu here has 3 of the 13 blueprints, and no static network stands in the tables: [what growing `repair` is "
        "worth](repair.md) has the full menu and the static networks.",
        "",
        f"`{command}`, in parts: {machine}, torch {torch.__version__}, one thread a process. J is on the test split, of the "
        "network that would be exported; all grow the same held-out instances, from the first on, with the same keys. Intervals "
        "are 95 % bootstraps over instances (over starts, where a task is one data set), paired in differences; they say nothing "
        "of other trainings, of which each seed is one. Seconds are of growing all instances, decisions included.",
        "",
        "## Trainings",
        *(training_lines(out, names) if names else ["", f"Not run: `{command} train`."]),
    ]
    for part, (title, remark) in TITLES.items():
        lines += ["", f"## {title}", ""]
        if part not in results:
            lines.append(f"Not run: `{command} {part}`.")
            continue
        tasks, (instances, seeds) = results[part]["tasks"], results[part]["asked"]["shape"]
        lines.append(f"{instances} instances by {seeds} {'seed' if seeds == 1 else 'seeds'}. {remark}".rstrip())
        rows = [
            row | {"name": f"{task}: {row['name']}" if len(tasks) > 1 else row["name"]}
            for task, group in tasks.items()
            for row in group
        ]
        lines += [*table([figures(row) for row in rows]), *table([comparisons(row) for row in rows if row["against"]])]
        if part == "evaluate":
            lines += shares(rows, oracle, best_there)
    return "\n".join(lines) + "\n", results | {"trainings": {name: read(out / name / SUMMARY) for name in names}}


def main() -> None:
    """Train, grow and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them where none is named")
    parser.add_argument("--quick", action="store_true", help="all in tiny form, in a folder of its own")
    parser.add_argument("--out", type=Path, default=Path("runs/study-controller"), help="where everything is kept")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--oracle", type=float, default=ORACLE, help="J of the unbiased oracle of headroom.md")
    parser.add_argument("--fixed", type=float, default=BEST_THERE, help="J of the best fixed schedule of headroom.md")
    parser.add_argument("--machine", default=platform.machine(), help="what it runs on, in words, for the page")
    parser.add_argument("--page", type=Path, help="write the page to this file; bench/docs/controller.md")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    size, out = (QUICK, arguments.out / "quick") if arguments.quick else (FULL, arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        study = Study(size, out, pool)
        wanted = dict.fromkeys(training for part in parts for training in trainings_of(part, size))
        jobs: list[Job] = [
            (train_one, (training, out / training.name, (size.layer, size.learner)))
            for training in wanted
            if not finished(out / training.name)
        ]
        if {"evaluate", "leave-out"} & set(parts) and not (out / "search.json").is_file():
            jobs.append((search, (out / "search.json", size.searched, size.layer)))
        try:
            study.run(jobs)
            for part in (part for part in TITLES if part in parts):
                study.examine(part)
        except InputError as error:
            parser.exit(2, f"{error}\n")
    text, results = page(study, arguments.machine, arguments.oracle, arguments.fixed)
    if "page" in parts:
        usual = out / PAGE.name if arguments.quick else PAGE
        (arguments.page or usual).write_text(text, encoding="utf-8")
        say(f"page: {arguments.page or usual}")
    if arguments.json:
        save_record(arguments.json, results)


if __name__ == "__main__":
    run_script(main)
