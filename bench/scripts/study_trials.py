"""Measure what trials of candidates in copies of the rows are worth on `heal`, and their compute (bench/docs/heal.md).

    python bench/scripts/study_trials.py FOLDER --part fresh --cases 48 --starts 2 --steps 8

A case is a plain host with one damaged site, at a cap of 6 %. Every rule is grown without trials, and with trials of its first 2
and 4 candidates. J is measured on the test split, without a price of compute; the last column is the `reward.compute_price` at
which trials bring nothing. Figures of a contender and a start are one file of the folder, and are not
grown again.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from collect_healing import concentrated, fixed
from numpy.typing import NDArray

from esper.leyline.config.tree import Config, TrialsConfig
from esper.runs.evaluation.contenders import Contender, grow_contender
from esper.runs.evaluation.evaluation import Design, tested
from esper.runs.evaluation.statistics import interval, mean_difference
from esper.tamiyo.catalog import get_controller
from esper_bench.controllers.catalog import KEEPS
from esper_bench.controllers.placement import Placement
from esper_bench.controllers.plans import UNIFORM, Placed
from esper_bench.controllers.trials import Trials
from esper_bench.healing.heal import RANGES, describe, heal
from esper_bench.records import load_figures, run_script, save_figures

FIRST = {"training": RANGES["training"].start, "fresh": RANGES["heldout"].start + 49152}
"""First key of each set of cases. Nothing was chosen by the figures of `fresh`."""
RULES = ("participation", "tree")
CANDIDATES = (2, 4)
ROWS = 48  # cases that are grown together
BEST = "best fixed plan"
Floats = NDArray[np.float64]


class Figures(NamedTuple):
    """Holds figures (n,) of the cases. compute: of seeds and of trials, each as a share of what the host takes in an episode."""

    objective: Floats
    seeds: Floats
    trials: Floats


def contenders(steps: list[int]) -> dict[str, Contender]:
    """Return the best fixed plan of bench/docs/heal.md, which is `uniform`, and the rules without and with trials."""
    found = {BEST: fixed([Placed(UNIFORM)])[UNIFORM.name]}
    for rule in RULES:
        found[rule] = _contender(rule, partial(get_controller, rule))
        for length in steps:
            for count in CANDIDATES:
                name = f"{rule}, {count} tried for {length} steps"
                found[name] = _contender(name, _with_trials(rule, TrialsConfig(candidates=count, steps=length)))
    return found


def _contender(name: str, make: Callable[[Config], Placement]) -> Contender:
    return Contender(name, {"controller": name, **KEEPS, "probe": {"coalitions_every": 1000}}, make)


def _with_trials(rule: str, trials: TrialsConfig) -> Callable[[Config], Placement]:
    def make(config: Config) -> Placement:
        client = get_controller(rule, config)
        assert isinstance(client, Placement)
        return Trials(client, rule, trials)

    return make


def grown(folder: Path, name: str, contender: Contender, keys: list[int], seed: int) -> Figures:
    """Return the figures of the cases under a contender, from the folder or grown now, ROWS at a time."""
    task, parts = heal(), []
    for start in range(0, len(keys), ROWS):
        chunk = keys[start : start + ROWS]
        path = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{chunk[0]}-{len(chunk)}-s{seed}.npz"
        if not path.exists():
            config = Design(task.sealed(), [], 1, "training", 0, len(chunk)).config(contender, seed)
            engine, outcome, seconds = grow_contender(task.sealed(), contender, config, np.array(chunk))
            own, compute, envs = (
                tested(task, config, engine, outcome, seconds),
                engine.state.compute,
                slice(0, len(chunk)),
            )
            figures = Figures(own.objective, compute.seeds[envs] / config.steps, compute.forks[envs] / config.steps)
            save_figures(path, **figures._asdict())
            print(path.name, f"{own.objective.mean():.4f}", flush=True)
        parts.append(Figures(**load_figures(path)))
    return Figures(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def points(ours: Floats, theirs: Floats) -> str:
    """Format the mean of the paired difference (cases, starts), with its 95 % interval over cases."""
    found = interval(mean_difference, [ours], [theirs])
    return f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def show(found: dict[str, Figures]) -> None:
    """Print the table."""
    print(
        "| | J | over the rule without trials, points [95 %] | over the best fixed plan | compute of seeds | of trials | price |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, own in found.items():
        rule = name.partition(",")[0]
        gain = "" if rule == name else points(own.objective, found[rule].objective)
        base = "" if name == BEST else points(own.objective, found[BEST].objective)
        more = (own.objective - found[rule].objective).mean()
        spent = (own.seeds + own.trials - found[rule].seeds - found[rule].trials).mean()
        price = f"{more / spent:.3f}" if more > 0 and rule != name else ""
        cells = gain, base, f"{own.seeds.mean():.1%}", f"{own.trials.mean():.1%}", price
        print(f"| {name} | {own.objective.mean():.4f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=list(FIRST), default="training")
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--steps", type=int, nargs="+", default=[8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = (fact for fact in map(describe, itertools.count(FIRST[options.part])) if fact.plain and concentrated(fact))
    keys = [fact.key for fact in itertools.islice(facts, options.cases)]
    listed = contenders(options.steps)
    found: dict[str, list[Figures]] = {name: [] for name in listed}
    for seed in range(options.starts):
        for name, contender in listed.items():
            found[name].append(grown(options.folder, name, contender, keys, seed))
    print(f"\n{options.part}: keys {keys[0]:,} to {keys[-1]:,}, {len(keys)} cases, {options.starts} starts\n")
    show({name: Figures(*(np.stack(c, 1) for c in zip(*starts, strict=True))) for name, starts in found.items()})


if __name__ == "__main__":
    run_script(main)
