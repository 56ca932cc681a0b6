"""Measure the default controller: settings on training instances, J on held-out ones, the cost of sensors, and rent.

python bench/scripts/study_heuristic.py training [--instances N] [--seeds N] [--quick]
python bench/scripts/study_heuristic.py heldout [--first N] [--instances N] [--seeds N] [--out FILE]
python bench/scripts/study_heuristic.py compare NEW OLD [NEW OLD ...]
python bench/scripts/study_heuristic.py sensors
python bench/scripts/study_heuristic.py rent

`training` is what settings are chosen by; held-out instances are grown once, with the settings that were chosen. `--quick`
grows 4 instances by one seed, to see that the script runs. `heldout` writes figures that `compare` pairs by instance with
those of another revision, made by the same command there.
"""

import argparse
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import esper
from esper.leyline.config.tree import Config, HeuristicConfig, build_config
from esper.leyline.data.task import Task
from esper.leyline.lifecycle.vocabulary import Actions
from esper.runs.evaluation.contenders import Contender, named
from esper.simic.rewards import objective
from esper.tamiyo.rules.heuristic import Heuristic
from esper.tasks.catalog import get_task
from esper.tasks.hosts import MLP
from esper.tolaria.engine import VectorizedEngine
from esper_bench.evaluation.one_task import evaluate
from esper_bench.records import load_record, run_script, save_record

Floats = NDArray[np.float64]
SIZES = (0, 300, 1000, 3000, 10_000)
"""What `reward.rent_size` is tried at [parameters]."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "the config's settings": {},
    "plant_below .97": {"plant_below": 0.97},
    "weak_below 0: behind narrow segments alone": {"weak_below": 0.0},
    "weak_below .7": {"weak_below": 0.7},
    "weak_below .85": {"weak_below": 0.85},
    "narrow_from .4": {"narrow_from": 0.4},
    "narrow_from .6": {"narrow_from": 0.6},
    "narrow_blueprints bypass-mlp": {"narrow_blueprints": ("bypass-mlp",)},
    "weak_blueprints bypass-linear": {"weak_blueprints": ("bypass-linear",)},
    "keep_above .25": {"keep_above": 0.25},
    "keep_above 1": {"keep_above": 1.0},
    "holding_patience and training_patience 99": {"holding_patience": 99, "training_patience": 99},
}
"""Settings of the heuristic that are tried on training instances, the first beside all others."""


def variant(name: str) -> Contender:
    """Return the heuristic with some settings in place of those of the config."""

    def make(config: Config) -> Heuristic:
        return Heuristic(HeuristicConfig(**{**dict(config.heuristic), **VARIANTS[name]}), config.gates)

    return Contender(name, {}, make)


def training(instances: int, seeds: int) -> None:
    """Print J of every variant on the first training instances, and its paired difference to the config's."""
    print("| settings | J | difference of J | standard error | metric | parameters added | seeds kept |")
    print("|---|" + "---|" * 6, flush=True)
    first: Floats | None = None
    for name in VARIANTS:
        grown = evaluate(get_task("repair"), [variant(name)], instances=instances, seeds=seeds, part="training").figures
        by_instance = grown.objective[0].mean(1)
        first = by_instance if first is None else first
        difference = by_instance - first
        error = difference.std(ddof=1) / len(difference) ** 0.5
        print(
            f"| {name} | {by_instance.mean():.4f} | {difference.mean():+.4f} | {error:.4f} | {grown.metric.mean():.4f} | "
            f"{grown.added_params.mean():.0f} | {grown.kept.mean():.2f} |",
            flush=True,
        )


def heldout(first: int, instances: int, seeds: int, out: Path) -> None:
    """Grow held-out instances under the heuristic, and write the figures by instance and seed."""
    evaluation = evaluate(get_task("repair"), [named("heuristic")], instances=instances, seeds=seeds, first=first)
    figures = {name: value[0].tolist() for name, value in evaluation.figures._asdict().items()}
    save_record(out, figures)
    print(out, np.mean(figures["objective"]))


def interval(values: Floats, form: str = ".3f") -> str:
    """Format the mean over instances with its 95 % bootstrap interval; values (instances,)."""
    draws = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return f"{values.mean():{form}} [{low:{form}}, {high:{form}}]"


def compare(pairs: list[Path]) -> list[str]:
    """Tabulate files in pairs, this revision's first: J, metric and seeds kept, and the paired difference of J."""
    lines = [
        "| figures | J of the other | J of this one | difference of J | metric | seeds kept |",
        "|---|" + "---|" * 5,
    ]
    for new, old in zip(pairs[::2], pairs[1::2], strict=True):
        ours, theirs = (load_record(path) for path in (new, old))
        mine, before = (np.asarray(figures["objective"]).mean(1) for figures in (ours, theirs))
        metric, kept = (np.mean(ours[name]) for name in ("metric", "kept"))
        lines.append(
            f"| {new.stem} | {interval(before)} | {interval(mine)} | {interval(mine - before, '+.3f')} | {metric:.3f} | "
            f"{kept:.2f} |"
        )
    return lines


def sensors(steps: int = 12, rounds: int = 3) -> list[str]:
    """Measure seconds of an episode with the growth sensors at the cadence of the heuristic over one without them."""
    lines = [
        "| task | environments | without [s] | every step, ratio | every 4 steps, ratio |",
        "|---|---|---|---|---|",
    ]
    for name, envs in (("repair", 16), ("digits-narrow", 8)):
        task = get_task(name).sealed()
        spent: dict[int, list[float]] = {every: [] for every in (0, 1, 4)}
        for _ in range(rounds):  # in turn, so that whatever else the machine does falls on all of them
            for every, times in spent.items():
                config = build_config(
                    task.defaults, {"envs": envs, "steps": steps, "twin": False, "probe": {"sensors_every": every}}
                )
                engine = VectorizedEngine(task, config)
                engine.reset()
                begin = time.process_time()
                for _ in range(steps):
                    engine.step(Actions.wait(envs))
                times.append(time.process_time() - begin)
        plain = statistics.median(spent[0])
        ratios = [statistics.median(a / b for a, b in zip(spent[every], spent[0], strict=True)) for every in (1, 4)]
        lines.append(f"| {name} | {envs} | {plain:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return lines


def rings(count: int) -> tuple[Tensor, Tensor]:
    """Draw noisy circles around one centre, one for each class."""
    generator = torch.Generator().manual_seed(count)
    y = torch.arange(300) % count
    angle = 2 * torch.pi * torch.rand(300, generator=generator)
    x = (1 + y)[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return x + 0.2 * torch.randn(300, 2, generator=generator), y


def tiny_tasks() -> dict[str, Task]:
    """Return tasks of small data on hosts of fewer than 300 parameters."""
    from sklearn.datasets import load_diabetes, load_iris, load_wine

    def task(name: str, x: Any, y: Any, host: Callable[[], esper.SegmentedHost], **more: Any) -> Task:
        return esper.task(name, x, y, host=host, standardize="features", **more)

    iris, wine, diabetes = load_iris(), load_wine(), load_diabetes()
    target = (diabetes.target - diabetes.target.mean()) / diabetes.target.std()
    return {
        "two rings": task("rings2", *rings(2), MLP(2, 4, (3, 3), 2)),
        "three rings": task("rings3", *rings(3), MLP(2, 6, (2, 4), 3)),
        "iris": task("iris4", iris.data, iris.target, MLP(4, 4, (2, 3), 3)),
        "wine": task("wine4", wine.data, wine.target, MLP(13, 4, (2, 3), 3)),
        "diabetes": task("diabetes4", diabetes.data, target[:, None].astype("float32"), MLP(10, 6, (2, 4), 1)),
    }


def rent(envs: int = 24) -> list[str]:
    """Measure what the choice between the host and the grown network costs when J makes it, by `reward.rent_size`.

    A seed is kept for any contribution above 0, so that the choice is J's alone; it is made on the validation split, for each
    environment, and scored on the test split.
    """
    lines = [
        "| task | host | grown by | never: metric | grown: metric | "
        + " | ".join(f"J, {size:,}" for size in SIZES)
        + " |",
        "|---|" + "---|" * (4 + len(SIZES)),
    ]
    for (name, task), blueprint in itertools.product(tiny_tasks().items(), ("bypass-linear", "bypass-mlp")):
        config = {
            "envs": envs,
            "blueprints": [blueprint],
            "steps": 24,
            "models": "none",
            "heuristic": {"keep_above": 0.0, "plant_below": 1.1, "weak_below": 1.1},
        }
        summary = esper.grow(task, config, controller="heuristic")
        metric = summary["metric"]
        test, validation = summary[f"test_{metric}"], summary[f"validation_{metric}"]
        host, grown = summary["host_params"], np.array(summary["grown_params"])
        cells = []
        for size in SIZES:
            J = objective(np.array(validation["grown"]), grown - host, host, 0.1, size)
            chosen = np.array(validation["host"]) < J
            picked = np.where(chosen, test["grown"], test["host"])
            cells.append(f"{picked.mean():.3f} ({chosen.mean():.0%})")
        lines.append(
            f"| {name}, {blueprint} | {host} | {np.mean(grown / host):.1f} times | {np.mean(test['host']):.3f} | "
            f"{np.mean(test['grown']):.3f} | " + " | ".join(cells) + " |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Run the part that is asked for and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("training", "heldout", "compare", "sensors", "rent"))
    parser.add_argument(
        "files", nargs="*", type=Path, help="of compare: figures of this revision and of the other, in turn"
    )
    parser.add_argument("--first", type=int, default=0, help="the first held-out instance")
    parser.add_argument("--instances", type=int, help="192 on training instances, 200 on held-out ones, unless given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="of training and heldout: 4 instances by one seed")
    parser.add_argument("--out", type=Path, default=Path("heuristic.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread")
    few, seeds = (4, 1) if arguments.quick else (None, arguments.seeds)
    match arguments.part:
        case "training":
            training(few or arguments.instances or 192, seeds)
        case "heldout":
            heldout(arguments.first, few or arguments.instances or 200, seeds, arguments.out)
        case "compare":
            print("\n".join(compare(arguments.files)))
        case "sensors":
            print("\n".join(sensors()))
        case "rent":
            print("\n".join(rent()))


if __name__ == "__main__":
    run_script(main)
