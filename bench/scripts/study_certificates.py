"""Measure certified keeps: how often runs keep a seed that does not help, and how many of the helpful seeds they keep.

Labels that are drawn at random, independently of the inputs: no seed helps, so every keep is false. Real labels: the truth of a
keep is its contribution on 4,096 examples that no run reads. Two controllers: the heuristic, and one that plants whenever it
may, keeps whatever its gate lets through, and removes what does not contribute, which makes as many false keeps as it can.

Networks that share their fresh examples share a budget: the table of rows says how many true keeps that costs, and an adversary
that learns the examples from the verdicts on many rows tries to get a false certificate.

python bench/scripts/study_certificates.py [--quick] [--runs N] [--real N] [--shared N] [--first INSTANCE] [--sizes N ...]
    [--page FILE]
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import beta

import esper
from esper.kasmina.lifecycle import dormant
from esper.leyline.data.task import AnyTask, Instance, Lengths, Mixture, Room, Split, Task
from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.vocabulary import Stage
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.rules.base import Rule
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification
from esper.tasks.spirals import spiral_points
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.certifying import LEAST, MOST, Certificates, sign_test, signs
from esper.tolaria.measure.coalitions import coalitions
from esper.tolaria.measure.probe import probe

HELD, LOT, ALPHA = 4096, 125, 0.05
HOST = MLP(inputs=2, width=16, hidden=(2, 12, 4), outputs=2)
BLOCK = 10_000  # points of an instance


class Eager(Rule):
    """Plants anything anywhere, keeps what the gate lets through, and prunes what has not been kept after 12 steps."""

    def act(self, view: esper.View) -> esper.Actions:
        """Return one decision per environment; a later operation of the list is preferred."""
        envs, masks = len(view.host_params), view.masks
        op, slot = np.full(envs, esper.Op.WAIT), np.zeros(envs, np.int64)
        draws = np.random.default_rng([view.episode, view.step]).random(view.seeds.stage.shape)
        old = (view.seeds.stage == Stage.HOLDING) & (view.seeds.age >= 12)
        for choice in (esper.Op.GERMINATE, esper.Op.PRUNE, esper.Op.ADVANCE, esper.Op.FOSSILIZE):
            valid = masks.slot[:, choice] & (old if choice == esper.Op.PRUNE else True)
            able = valid.any(1)
            op[able], slot[able] = choice, np.where(valid, draws, -1.0).argmax(1)[able]
        return complete(masks, op, slot, defaults(view.space))


def mixture(*, random_labels: bool, probe_size: int) -> Mixture:
    """Return spirals of which every instance has points of its own; the labels are those of the spirals, or coin flips."""

    def drawn(key: int) -> dict[str, Split]:
        generator = np.random.default_rng([key, 7])
        sizes = {"train": 512, "probe": probe_size, "validation": 64, "held": HELD}
        place = torch.from_numpy(generator.permutation(sum(sizes.values())))
        x, y = (part[place] for part in spiral_points(len(place), BLOCK * key))
        if random_labels:
            y = torch.from_numpy(generator.integers(0, 2, len(y)))
        counts = list(sizes.values())
        return {name: Split(*part) for name, *part in zip(sizes, x.split(counts), y.split(counts), strict=True)}

    def sample(key: int) -> Instance:
        parts = drawn(key)
        return Instance(HOST, parts["train"], parts["probe"], parts["validation"], 2)

    return Mixture(
        name="spirals-drawn",
        summary="spirals with points of their own",
        room=Room(HOST, (2,), Lengths(probe=probe_size, held=HELD)),
        sample=sample,
        test=lambda key: drawn(key)["held"],
        ranges={"training": range(10**6), "validation": range(0), "heldout": range(0)},
        objective=Classification(2),
        menu=("bypass-linear", "bypass-mlp", "mlp-small"),
        defaults={"data": {"batch_size": 64, "batches_per_step": 8}},
    )


def one_data_set(task: Mixture, key: int) -> Task:
    """Return the instance of a key as a task of its own, whose environments are other starts on the same data."""
    found, test = task.sample(key), task.test_split(key)
    parts = {name: getattr(found, name) for name in ("host", "train", "probe", "validation")}
    shared = {name: getattr(task, name) for name in ("summary", "objective", "menu", "defaults")}
    return Task(name="spirals-shared", **parts, **shared, test=test)


class Uncorrected(Certificates):
    """Tests at `ALPHA` at every look, as if it were the only one: about the most that any test of this level can certify."""

    def looked(self, *arguments: Any) -> "Uncorrected":
        """Return the state after looks, with a new budget."""
        state = Certificates(*self).looked(*arguments)
        return Uncorrected(*state._replace(budget=np.full(len(state.budget), ALPHA / MOST)))


class KeepCounts(NamedTuple):
    """Counts what the runs of a study kept; every field is (runs,)."""

    true: np.ndarray[Any, Any]  # seeds with a contribution above 0 on the held examples when they were kept
    false: np.ndarray[Any, Any]  # the other seeds that were kept
    trials: np.ndarray[Any, Any]  # trials that were looked at


def play(
    task: AnyTask,
    name: str,
    runs: int,
    gates: Mapping[str, Any],
    *,
    steps: int,
    random_labels: bool,
    start: int = 0,
    corrected: bool = True,
    lot: int = LOT,
) -> KeepCounts:
    """Grow `runs` networks from instance `start` on, in lots, and measure each kept seed on held examples as it is kept."""
    lots = []
    for first in range(start, start + runs, lot):
        envs = min(lot, start + runs - first)
        settings = {
            "envs": envs,
            "first_instance": first,
            "steps": steps,
            "baselines": [],
            "gates": gates,
            "lifecycle": {"max_seeds": 3, "max_training_seeds": 2, "embargo": 0},
            "heuristic": {"holding_patience": 8},
            "probe": {"coalitions_every": steps},
        }
        config = esper.build_config(task.defaults, settings)
        engine = VectorizedEngine(task, config)
        client = Eager() if name == "eager" else get_controller("heuristic", config)
        tests = [task.test_split(key) for key in engine.state.instance[:envs]]
        held = engine.population.data.stacked(tests, engine.population.environment, "held")
        view, counts, trials = engine.reset(), np.zeros((2, envs), np.int64), np.zeros(envs, np.int64)
        if engine.certifier and not corrected:
            state = engine.certifier.state
            engine.certifier.state = Uncorrected(*state._replace(budget=np.full(len(state.budget), ALPHA / MOST)))
        while not engine.over:
            actions = client.act(view)
            kept = (actions.op == esper.Op.FOSSILIZE) & (
                view.seeds.stage[np.arange(envs), actions.slot] == Stage.HOLDING
            )
            helps = np.zeros(envs, bool)
            if kept.any() and not random_labels:
                asked = coalitions(engine.state.seeds, None, terminal=False)
                body, seeds = engine.population.body, engine.state.seeds
                fall = probe(body, seeds, held, task.objective, asked.branches, signs=False)["metric_fall"][
                    :, 0
                ].numpy()
                branch, env, slot = asked.without()
                own = slot == actions.slot[np.minimum(env, envs - 1)]
                helps[env[own]] = fall[branch[own]] > 0
            unseen = np.isnan(view.measurements.certificate)
            view, outcome = engine.step(actions)
            trials += (unseen & ~np.isnan(view.measurements.certificate)).sum(1)
            counts += outcome.accepted & kept & np.stack([helps, ~helps])
        lots.append(KeepCounts(*counts, trials))
    return KeepCounts(*map(np.concatenate, zip(*lots, strict=True)))


def interval(hits: int, count: int) -> str:
    """Format a share with its exact 95 % interval (Clopper and Pearson, 1934)."""
    low = beta.ppf(0.025, hits, count - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, count - hits) if hits < count else 1.0
    return f"{hits / count:.1%} [{low:.1%}, {high:.1%}]"


def fooled(rows: int, runs: int, *, shared: bool) -> str:
    """Let verdicts on 8 seeds of every row but the last, which help a little, choose a seed of the last row that does not help.

    The rows of a run have the same 60 fresh examples. With one row, that row has all nine looks. shared: whether the rows share
    a budget, or have one each.
    """
    generator, size = np.random.default_rng(0), runs * rows
    group = np.arange(runs).repeat(rows) if shared else np.arange(size)
    state, seeds, sure = Certificates.none(group, 1, ALPHA), dormant(size, 1), np.full((size, 1), np.inf)
    votes = np.zeros((runs, 60))

    def verdict(differences: np.ndarray[Any, Any], row: int) -> np.ndarray[Any, Any]:
        nonlocal state
        due = (np.arange(size) % rows == row)[:, None]
        state = state.looked(due, sign_test(signs(torch.from_numpy(differences), None).numpy()), seeds, sure)
        return state.level[due[:, 0], 0] > 0

    for look in range(8 * max(rows - 1, 1)):
        feature = generator.choice([-1.0, 1.0], votes.shape)
        helps = np.where(generator.random(votes.shape) < 0.2, 1.0, feature)  # expectation 0.2
        votes += np.where(verdict(helps, look // 8), 1, -1)[:, None] * feature
    guess = np.where(votes == 0, generator.choice([-1.0, 1.0], votes.shape), np.sign(votes))
    return interval(int(verdict(guess, rows - 1).sum()), runs)


def attack(runs: int) -> Iterator[str]:
    """Yield the lines of the table of the adversary."""
    yield from ("", "## An adversary", "")
    yield "| rows that share 60 fresh examples | runs | false certificate in the last row | with a budget for each row |"
    yield "|---|---|---|---|"
    for rows in (1, 2, 8, 64):
        count = max(runs // rows, 100)
        yield f"| {rows} | {count} | {fooled(rows, count, shared=True)} | {fooled(rows, count, shared=False)} |"


def shared_rows(networks: int, steps: int, sizes: Sequence[int], start: int) -> Iterator[str]:
    """Yield the lines of the table of networks on one data set, in populations of 1, 8 and all."""
    yield from ("", "## Rows that share fresh examples", "")
    yield "| controller | probe split | rows that share | true keeps | false keeps | true keeps / those of G5 |"
    yield "|---|---|---|---|---|---|"
    for name, size in itertools.product(("eager", "heuristic"), sizes):
        task = one_data_set(mixture(random_labels=False, probe_size=size), start)
        common = {"steps": steps, "random_labels": False}
        without = play(task, name, networks, {}, lot=networks, **common)
        yield f"| {name} | {size} | G5 without certificates | {without.true.sum()} | {without.false.sum()} | |"
        for rows in sorted({1, min(8, networks), networks}):
            kept = play(task, name, networks, {"certify": ALPHA}, lot=rows, **common)
            share = f"{kept.true.sum() / max(without.true.sum(), 1):.0%}"
            yield f"| {name} | {size} | {rows} | {kept.true.sum()} | {kept.false.sum()} | {share} |"


def needed(gains: float, losses: float, power: float) -> int:
    """Find the fewest fresh examples, of 8 times powers of 1.05, with which a first look certifies a seed with chance `power`."""
    generator, size = np.random.default_rng(0), 8.0
    while True:
        counts = generator.multinomial(int(size), [gains, losses, 1 - gains - losses], 4000)[:, :2]
        if (sign_test(counts.astype(float)) <= ALPHA * LEAST).mean() >= power:
            return int(size)
        size *= 1.05


def sizes_table() -> Iterator[str]:
    """Yield the lines of the table of how many fresh examples an effect needs."""
    yield from ("", "## How many fresh examples an effect needs", "")
    yield "| predictions that the seed corrects | and breaks | certified by the first look in 50 % of runs | in 90 % |"
    yield "|---|---|---|---|"
    for gains, losses in ((0.1, 0.0), (0.05, 0.0), (0.05, 0.01), (0.02, 0.0), (0.03, 0.02)):
        yield f"| {gains:.0%} | {losses:.0%} | {needed(gains, losses, 0.5)} | {needed(gains, losses, 0.9)} |"


def random_labels(runs: int, steps: int) -> Iterator[str]:
    """Yield the lines of the table of runs on random labels, where every keep is false."""
    yield from ("## Random labels: every keep is false", "")
    yield from (
        "| controller | gate | runs | runs with a false keep | trials looked at per run |",
        "|---|---|---|---|---|",
    )
    task = mixture(random_labels=True, probe_size=512)
    for name, gate in (
        ("eager", {}),
        ("eager", {"certify": ALPHA}),
        ("eager", {"certify": ALPHA, "permissive": True}),
        ("heuristic", {}),
        ("heuristic", {"certify": ALPHA}),
    ):
        kept = play(task, name, runs, {"gain_z": -100.0, **gate}, steps=steps, random_labels=True)
        hits, looked = int((kept.false > 0).sum()), f"{kept.trials.mean():.1f}" if gate else ""
        yield f"| {name} | {worded(gate)} | {runs} | {interval(hits, runs)} | {looked} |"


def real_labels(runs: int, steps: int, sizes: Sequence[int], start: int) -> Iterator[str]:
    """Yield the table of runs on real labels: true and false keeps without certificates, with them, and with looks at `ALPHA`."""
    yield from ("", "## Real labels: what is kept", "")
    yield "| controller | probe split | gate | true keeps | false keeps | true keeps / those of G5 |"
    yield "|---|---|---|---|---|---|"
    draws = np.random.default_rng(0).integers(runs, size=(4000, runs))
    for name, size in itertools.product(("eager", "heuristic"), sizes):
        task, today = mixture(random_labels=False, probe_size=size), None
        for gate, corrected in (({}, True), ({"certify": ALPHA}, True), ({"certify": ALPHA}, False)):
            kept = play(task, name, runs, gate, steps=steps, random_labels=False, start=start, corrected=corrected)
            today = kept if today is None else today
            low, high = np.quantile(kept.true[draws].sum(1) / np.maximum(today.true[draws].sum(1), 1), [0.025, 0.975])
            share = f"{kept.true.sum() / max(today.true.sum(), 1):.0%} [{low:.0%}, {high:.0%}]" if gate else ""
            words = worded(gate) if corrected else f"G5, every look at {ALPHA}"
            yield f"| {name} | {size} | {words} | {kept.true.sum()} | {kept.false.sum()} | {share} |"


def worded(gate: Mapping[str, Any]) -> str:
    """Describe the gate in words."""
    if not gate:
        return "G5"
    return f"G5, certify {ALPHA}" if "permissive" not in gate else f"permissive, certify {ALPHA}"


def main() -> None:
    """Play all studies, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few runs, to see that it works")
    parser.add_argument("--runs", type=int, default=1000, help="runs on random labels")
    parser.add_argument("--real", type=int, default=100, help="runs on real labels")
    parser.add_argument("--shared", type=int, default=64, help="networks on one data set")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096], help="examples of the probe split")
    parser.add_argument("--first", type=int, default=3000, help="first instance on real labels")
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs, real, shared, steps, sizes = arguments.runs, arguments.real, arguments.shared, 32, arguments.sizes
    if arguments.quick:
        runs, real, shared, steps, sizes = 8, 4, 2, 8, (256,)
    lines = [
        "# Certified keeps",
        "",
        f"`{shlex.join(['python', 'bench/scripts/study_certificates.py', *sys.argv[1:]])}`, torch {torch.__version__}, one "
        "two shared cores of an AMD EPYC virtual machine. Intervals of shares are exact 95 % intervals; those of ratios are 95 % "
        "bootstraps over runs, which are paired by instance.",
        "",
        (__doc__ or "").split("\n\n")[1].replace("\n", " "),
        "",
    ]
    tables = itertools.chain(
        random_labels(runs, steps) if runs else (),
        real_labels(real, steps, sizes, arguments.first) if real else (),
        shared_rows(shared, steps, sizes, arguments.first) if shared else (),
        sizes_table(),
        attack(400 if arguments.quick else 20_000),
    )
    for line in tables:
        lines.append(line)
        print(line, flush=True)
    if arguments.page:
        arguments.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
