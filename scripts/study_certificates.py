"""Certified keeps: how often runs keep a seed that does not help, and how many of the helpful seeds they keep.

Labels that are drawn at random, independently of the inputs: no seed helps, so every keep is false. Real labels: the truth of a
keep is its contribution on 4,096 examples that no run reads. Two controllers: the heuristic, and one that plants whenever it
may, keeps whatever its gate lets through, and removes what does not contribute, which makes as many false keeps as it can.

python scripts/study_certificates.py [--quick] [--runs N] [--real N] [--first INSTANCE] [--sizes N ...] [--page FILE]
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
from esper.kasmina.certificates import Certificates, sign_test, signs
from esper.kasmina.lifecycle import dormant
from esper.leyline.masks import complete, defaults
from esper.leyline.stages import Stage
from esper.leyline.task import Instance, Lengths, Mixture, Room, Split
from esper.tamiyo.baselines import Rule
from esper.tamiyo.catalog import get_controller
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification
from esper.tasks.spirals import spiral_points
from esper.tolaria.coalitions import coalitions
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.probe import probe

HELD, LOT, ALPHA = 4096, 125, 0.05
HOST = MLP(inputs=2, width=16, hidden=(2, 12, 4), outputs=2)
POINTS = spiral_points(60_000)


class Eager(Rule):
    """Plants anything anywhere, keeps what the gate lets through, and prunes what has not been kept after 12 steps."""

    def act(self, view: esper.View) -> esper.Actions:
        """One decision per environment; a later operation of the list is preferred."""
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
    """Spirals of which every instance has points of its own; the labels are those of the spirals, or coin flips."""

    def drawn(key: int) -> dict[str, Split]:
        generator = np.random.default_rng([key, 7])
        sizes = {"train": 512, "probe": probe_size, "validation": 64, "held": HELD}
        place = torch.from_numpy(generator.permutation(len(POINTS[1]))[: sum(sizes.values())])
        x, y = POINTS[0][place], POINTS[1][place]
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


class Uncorrected(Certificates):
    """Every look tests at `ALPHA`, as if it were the only one: about the most that any test of this level can certify."""

    def next_level(self) -> np.ndarray[Any, Any]:
        """(R,) the level of the next look."""
        return np.full(len(self.budget), ALPHA)


class Kept(NamedTuple):
    """What the runs of a study kept; every field is (runs,)."""

    true: np.ndarray[Any, Any]  # seeds with a contribution above 0 on the held examples when they were kept
    false: np.ndarray[Any, Any]  # the other seeds that were kept
    trials: np.ndarray[Any, Any]  # trials that were looked at


def play(
    task: Mixture,
    name: str,
    runs: int,
    gates: Mapping[str, Any],
    *,
    steps: int,
    random_labels: bool,
    start: int = 0,
    corrected: bool = True,
) -> Kept:
    """Grow `runs` networks from instance `start` on, in lots, and measure each kept seed on held examples as it is kept."""
    lots = []
    for first in range(start, start + runs, LOT):
        envs = min(LOT, start + runs - first)
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
        tests = [task.test(key) for key in engine.state.instance[:envs]]
        held = engine.population.data.stacked(tests, engine.population.environment, "held")
        view, counts, trials = engine.reset(), np.zeros((2, envs), np.int64), np.zeros(envs, np.int64)
        if engine.certifier and not corrected:
            engine.certifier.state = Uncorrected(*engine.certifier.state)
        while not engine.over:
            actions = client.act(view)
            kept = (actions.op == esper.Op.FOSSILIZE) & (
                view.seeds.stage[np.arange(envs), actions.slot] == Stage.HOLDING
            )
            helps = np.zeros(envs, bool)
            if kept.any() and not random_labels:
                asked = coalitions(engine.state.seeds, None, terminal=False)
                body, seeds = engine.population.body, engine.state.seeds
                fall = probe(body, seeds, held, task.objective, asked, signs=False).metric_fall[:, 0].numpy()
                branch, env, slot = asked.without()
                own = slot == actions.slot[np.minimum(env, envs - 1)]
                helps[env[own]] = fall[branch[own]] > 0
            unseen = np.isnan(view.measurements.certificate)
            view, outcome = engine.step(actions)
            trials += (unseen & ~np.isnan(view.measurements.certificate)).sum(1)
            counts += outcome.accepted & kept & np.stack([helps, ~helps])
        lots.append(Kept(*counts, trials))
    return Kept(*map(np.concatenate, zip(*lots, strict=True)))


def interval(hits: int, count: int) -> str:
    """A share with its exact 95 % interval (Clopper and Pearson, 1934)."""
    low = beta.ppf(0.025, hits, count - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, count - hits) if hits < count else 1.0
    return f"{hits / count:.1%} [{low:.1%}, {high:.1%}]"


def fooled(runs: int, *, corrected: bool) -> str:
    """An adversary: verdicts on 8 seeds that help a little choose a ninth that does not; 60 fresh examples, all used 9 times."""
    generator = np.random.default_rng(0)
    state, due = (
        (Certificates if corrected else Uncorrected)(*Certificates.none(runs, 1, ALPHA)),
        np.ones((runs, 1), bool),
    )
    votes, seeds = np.zeros((runs, 60)), dormant(runs, 1)

    def verdict(differences: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal state
        state = state.looked(due, sign_test(signs(torch.from_numpy(differences), None).numpy()), seeds)
        return state.level[:, 0] > 0

    for feature in generator.choice([-1.0, 1.0], (8, runs, 60)):
        helps = np.where(generator.random((runs, 60)) < 0.2, 1.0, feature)  # expectation 0.2
        votes += np.where(verdict(helps), 1, -1)[:, None] * feature
    return interval(int(verdict(np.sign(votes)).sum()), runs)


def needed(gains: float, losses: float, power: float) -> int:
    """The fewest fresh examples, of 8 times powers of 1.05, with which a first look certifies a seed with probability `power`."""
    generator, size = np.random.default_rng(0), 8.0
    while True:
        counts = generator.multinomial(int(size), [gains, losses, 1 - gains - losses], 4000)[:, :2]
        if (sign_test(counts.astype(float)) <= ALPHA / 2).mean() >= power:
            return int(size)
        size *= 1.05


def sizes_table() -> Iterator[str]:
    """The table of how many fresh examples an effect needs."""
    yield from ("", "## How many fresh examples an effect needs", "")
    yield "| predictions that the seed corrects | and breaks | certified by the first look in 50 % of runs | in 90 % |"
    yield "|---|---|---|---|"
    for gains, losses in ((0.1, 0.0), (0.05, 0.0), (0.05, 0.01), (0.02, 0.0), (0.03, 0.02)):
        yield f"| {gains:.0%} | {losses:.0%} | {needed(gains, losses, 0.5)} | {needed(gains, losses, 0.9)} |"


def random_labels(runs: int, steps: int) -> Iterator[str]:
    """The table of runs on random labels, where every keep is false."""
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
    """The table of runs on real labels: true and false keeps without certificates, with them, and with looks at `ALPHA` each."""
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
    """The gate in words."""
    if not gate:
        return "G5"
    return f"G5, certify {ALPHA}" if "permissive" not in gate else f"permissive, certify {ALPHA}"


def main() -> None:
    """Play all studies, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few runs, to see that it works")
    parser.add_argument("--runs", type=int, default=1000, help="runs on random labels")
    parser.add_argument("--real", type=int, default=100, help="runs on real labels")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096], help="examples of the probe split")
    parser.add_argument("--first", type=int, default=3000, help="first instance on real labels")
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs, real, steps, sizes = arguments.runs, arguments.real, 32, arguments.sizes
    if arguments.quick:
        runs, real, steps, sizes = 8, 4, 8, (256,)
    lines = [
        "# Certified keeps",
        "",
        f"`{shlex.join(['python', 'scripts/study_certificates.py', *sys.argv[1:]])}`, torch {torch.__version__}, one thread of "
        "two shared cores of an AMD EPYC virtual machine. Intervals of shares are exact 95 % intervals; those of ratios are 95 % "
        "bootstraps over runs, which are paired by instance.",
        "",
        (__doc__ or "").split("\n\n")[1].replace("\n", " "),
        "",
    ]
    tables = itertools.chain(
        random_labels(runs, steps) if runs else (),
        real_labels(real, steps, sizes, arguments.first) if real else (),
        sizes_table(),
    )
    for line in tables:
        lines.append(line)
        print(line, flush=True)
    simulations = 400 if arguments.quick else 20_000
    lines += [
        "",
        f"Of {simulations} simulated runs, an adversary that learns the fresh examples from verdicts gets a false certificate in "
        f"{fooled(simulations, corrected=True)}, and in {fooled(simulations, corrected=False)} if every look tests at {ALPHA}.",
    ]
    print(lines[-1])
    if arguments.page:
        arguments.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
