"""Train policies on the game `heal-unknown`, and compare them with every opponent on fresh instances (bench/docs/game.md).

    python bench/scripts/study_game.py OUT --trainings 10 --page FILE

A training draws new instances in every round, with the known kinds of damage, and keeps the policy of its best validation. Some
trainings are of PPO alone, and some imitate the rule `regrow` for three rounds before it. The policies and their opponents then
play the same held-out instances, whose hosts, problems and kinds of damage no training has shown. The searched plan and the
fitted trees have as many episodes as the longest training. The ceiling is the best of all placements of three small seeds behind
the blocks, chosen for each instance by the other of two starts. Trainings in OUT are not made again.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from study_heal_ppo import LEARNER, curve_table, train

from esper.leyline.config.tree import Config
from esper.leyline.data.task import AnyTask
from esper.leyline.intervals import MeanInterval, t_interval
from esper.leyline.lifecycle.view import Floats, View, sensor
from esper.leyline.messages import counted
from esper.runs.evaluation.contenders import ROWS, Contender, grow_contender
from esper.runs.evaluation.evaluation import Design, tested
from esper_bench.controllers.catalog import KEEPS
from esper_bench.controllers.placement import CUT, DROP, ONCE, Fixed, Picks, Placement, padded
from esper_bench.controllers.plans import RANKS, Placed, Plan
from esper_bench.controllers.regrow import Regrow
from esper_bench.evaluation.plan_menu import UNMEASURED
from esper_bench.evaluation.rivals import best_by_others, evaluate
from esper_bench.healing.heal import describe, heal
from esper_bench.healing.hosts import BLOCKS
from esper_bench.healing.unknown import UNKNOWN_HOSTS

SETTINGS: dict[str, Any] = {**LEARNER, "ppo": {**LEARNER["ppo"], "validate_envs": 64, "undo_bias": -2.0}}
"""Those of `study_heal_ppo.py`, but that an untrained policy prunes: to move the budget is the game."""
LEARNED, TAUGHT = "learned", "taught"
ARMS: dict[str, dict[str, Any]] = {
    LEARNED: SETTINGS,
    TAUGHT: {
        **SETTINGS,
        "ppo": {**SETTINGS["ppo"], "imitation_rounds": 3, "imitation_passes": 24, "teacher": "regrow"},
    },
}
"""PPO alone, and PPO after rounds in which the policy imitates the rule that moves its budget."""
RULES = ("uniform", "collapse", "sites", "tree", "trials:collapse", "regrow")
REDRAWN, FITTED, SEARCHED = "fine-tuning-redrawn", "fitted-tree", "best fixed plan"
WITHIN = ("uniform", "collapse", "sites", "tree", FITTED, "trials:collapse", SEARCHED, "Once")
"""Opponents within the cap, none of which moves its budget."""
SMALL = Plan("three of rank 1", RANKS[-1:])
CEILING = "ceiling"
NAMES = {
    LEARNED: "**learned**: PPO alone",
    TAUGHT: "**taught**: PPO after imitating `regrow`",
    "regrow": "`regrow`, a rule that moves the budget",
    "Once": "once, in an order by sensors",
    "ByOrder": "`regrow` in that order",
    REDRAWN: "not frozen, far above the cap: all weights trained, dead units drawn anew",
    CEILING: "the best of 10 placements of three seeds, known from another start",
}
EVERY_THREE = [Placed(SMALL, three[0], three[1:]) for three in itertools.combinations(range(1, BLOCKS + 1), 3)]
"""Placements behind three of the five blocks."""


class ByOrder(Regrow):
    """Plays the rule `regrow` in an order by sensors: blocks of dead units, then those behind which the participation falls."""

    sensors_every = ONCE
    sensor_families = ("participation", "dead")

    def order(self, view: View) -> Floats:
        """Return the score of every slot; the order of `regrow` decides between slots that do not stand out."""
        slots = view.seeds.stage.shape[1]
        dead = np.nan_to_num(sensor(view, "dead"))
        ratio = sensor(view, "participation") / np.maximum(sensor(view, "participation_before"), 1e-9)
        drop = np.where(ratio < DROP, 1 - ratio, 0.0)
        return np.where(dead > CUT, 2 + dead, 0) + drop + super().order(view) / (100 * slots)


class Once(Placement):
    """Plants bypasses of rank 1 in the first step, in the order of a rule that moves its budget, and keeps them."""

    def __init__(self, rule: Regrow) -> None:
        super().__init__()
        self.rule, self.sensors_every, self.sensor_families = rule, rule.sensors_every, rule.sensor_families

    def pick(self, view: View) -> Picks:
        """Pick the first slots of the order that the cap holds."""
        space, cap = view.space, UNKNOWN_HOSTS.settings["governor"]["param_limit"]
        first = (-self.rule.order(view)).argsort(1)
        held = (cap * view.host_params // space.cost[:, -1, 0]).astype(int)  # bypasses of rank 1 behind a block
        slots = [tuple(own[:count].tolist()) for own, count in zip(first, held, strict=True)]
        return Picks([SMALL] * len(slots), padded(slots), ["the order is that of the rule"] * len(slots))


def later(instances: int) -> list[str]:
    """Compare, on training instances, a rule that moves its budget over an order of slots with one that plants it once."""
    task = heal(UNKNOWN_HOSTS)
    keys = np.array(task.keys("training")[:instances])
    lines = [
        f"| order of the slots | planted once | moved | moved above it, points [95 %], {instances} training instances |",
        "|---|---|---|---|",
    ]
    for name, rule in (("fixed", Regrow), ("by sensors", ByOrder)):
        makes = (lambda config, rule=rule: Once(rule()), lambda config, rule=rule: rule())
        once, moved = (grown(task, Contender(name, {"controller": name, **KEEPS}, make), keys) for make in makes)
        lines.append(f"| {name} | {once.mean():.3f} | {moved.mean():.3f} | {points(moved - once):+.1f} |")
    return lines


def grown(task: AnyTask, contender: Contender, keys: NDArray[np.int64], seed: int = 0) -> Floats:
    """Return J (instances,) of a contender on the test split."""
    parts = []
    for chunk in np.split(keys, range(ROWS, len(keys), ROWS)):
        config = Design(task.sealed(), [], 1, "training", 0, len(chunk)).config(contender, seed)
        engine, outcome, seconds = grow_contender(task.sealed(), contender, config, chunk)
        parts.append(tested(task, config, engine, outcome, seconds).objective)
    return np.concatenate(parts)


class GameScores(NamedTuple):
    """Holds J of every controller on the fresh instances, by name, each (instances,): of an arm, the mean over its trainings."""

    worth: dict[str, Floats]
    trainings: dict[str, Floats]  # by arm, (trainings, instances)
    searched: int  # episodes of each search
    kinds: list[str]  # (instances,) of damage


def played(out: Path, folders: dict[str, list[Path]], first: int, instances: int, episodes: int) -> GameScores:
    """Play the held-out instances from the one with the number `first` on, under the trained policies and every opponent.

    episodes: of the search for the best fixed plan, and of fitting trees.
    """
    record = evaluate(
        [*(f"{arm}={','.join(map(str, own))}" for arm, own in folders.items()), *RULES, Once(ByOrder()), ByOrder()],
        "heal-unknown",
        opponents=("uniform", "collapse", "sites", "tree", FITTED, REDRAWN),
        first=first,
        instances=instances,
        seeds=1,
        search_episodes=episodes,
        baselines=(),
        out=out / "evaluation",
        overwrite=True,
        progress=False,
    )
    found = record["tasks"][0]
    worth = {name: np.array(runs["objective"])[:, 0] for name, runs in found["runs"].items()}
    trainings = {arm: np.stack([worth.pop(f"{arm}: {path}") for path in own]) for arm, own in folders.items()}
    means = {arm: each.mean(0) for arm, each in trainings.items()}
    kinds = [describe(key, UNKNOWN_HOSTS).damage.kind.value for key in found["instance_keys"]]
    return GameScores({**means, **worth}, trainings, episodes, kinds)


def ceiling(out: Path, first: int, instances: int, placements: int) -> Floats:
    """Return J (instances,) of the best of some placements of three small seeds in the first step, chosen by the other start."""
    task, scores = heal(UNKNOWN_HOSTS), []
    keys = np.array(task.keys("heldout")[first : first + instances])
    for seed, (at, placed) in itertools.product(range(2), enumerate(EVERY_THREE[:placements])):
        path = out / "ceiling" / f"{at}-{first}-{instances}-{seed}.npy"
        if not path.is_file():
            contender = Contender(CEILING, {"controller": CEILING, **UNMEASURED}, partial(planting, placed))
            worth_of_placed = grown(task, contender, keys, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, worth_of_placed)
        scores.append(np.load(path))
    worth = np.stack(scores).reshape(2, placements, instances).transpose(1, 2, 0)  # (placements, instances, starts)
    chosen = best_by_others(worth)
    best: Floats = np.take_along_axis(worth, chosen[None], 0)[0].mean(1)
    return best


def planting(placed: Placed, config: Config) -> Fixed:
    """Return the controller of a placement. It does not depend on the config."""
    return Fixed([placed])


def table(found: GameScores, best_placed: Floats | None, cost: dict[str, int]) -> list[str]:
    """Tabulate J on the fresh instances, what learned policies have above each, paired by instance, and each training alone."""
    rows, arms, many = dict(found.worth), list(found.trainings), len(found.kinds)
    if best_placed is not None:
        rows[CEILING] = best_placed
    cost = {**cost, "tree": 7_200, FITTED: found.searched, SEARCHED: found.searched}
    above = " | ".join(f"{arm} above it, points [95 %]" for arm in arms)
    lines = [
        f"| controller | episodes to learn or to search | J on {many} fresh instances | {above} |",
        f"|---|---|---|{'---|' * len(arms)}",
    ]
    for name in sorted(rows, key=lambda name: -rows[name].mean()):
        episodes = "" if name in (CEILING, REDRAWN) else f"{cost.get(name, 0):,}"
        gains = ["" if name == arm else f"{points(rows[arm] - rows[name]):+.1f}" for arm in arms]
        lines.append(f"| {NAMES.get(name, name)} | {episodes} | {rows[name].mean():.3f} | {' | '.join(gains)} |")
    best = max((name for name in WITHIN if name in rows), key=lambda name: rows[name].mean())
    lines += ["", f"The best opponent within the cap that does not move its budget is `{best}`.", ""]
    for arm, each in found.trainings.items():
        gain, alone = points(rows[arm] - rows[best]), (each - rows[best]).mean(1)
        verdict = "above" if gain.above else "below" if gain.below else "level with"
        spread = f", {points(alone):+.1f} over {counted(len(alone), 'training')}" if len(alone) > 1 else ""
        worths = ", ".join(f"{own:.3f}" for own in each.mean(1))
        lines.append(
            f"- {arm}: {verdict} it, {gain:+.1f} points over the instances{spread}; J of each training: {worths}."
        )
    kinds = sorted(set(found.kinds))
    lines += ["", "J by kind of damage:", "", f"| controller | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for name in dict.fromkeys(
        (*arms, "regrow", best, "uniform", "never", REDRAWN, *([CEILING] if CEILING in rows else []))
    ):
        of = [f"{rows[name][np.array(found.kinds) == kind].mean():.3f}" for kind in kinds]
        lines.append(f"| {NAMES.get(name, name)} | {' | '.join(of)} |")
    return lines


def points(difference: Floats) -> MeanInterval:
    """Return the mean of differences of J (n,), with its 95 % interval, in points."""
    return t_interval((100 * difference).tolist())


def main() -> None:
    """Train, evaluate and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the trainings and of the evaluation")
    parser.add_argument("--trainings", type=int, default=10, metavar="N", help="trainings of PPO alone (10)")
    parser.add_argument("--taught", type=int, default=1, metavar="N", help="trainings that imitate `regrow` first (1)")
    parser.add_argument("--rounds", type=int, default=20, metavar="R", help="rounds of 64 episodes of each (20)")
    parser.add_argument("--instances", type=int, default=128, metavar="I", help="fresh instances (128)")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first fresh instance (0)")
    parser.add_argument(
        "--quick", action="store_true", help="one training of two rounds and 2 instances, to see that all runs"
    )
    parser.add_argument("--no-ceiling", action="store_true", help="leave out the best placements")
    parser.add_argument("--train-only", action="store_true", help="train, and look at no fresh instance")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the tables to a Markdown file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.trainings, arguments.rounds, arguments.instances = 1, 2, 2
    torch.set_num_threads(1)
    count = {LEARNED: arguments.trainings, TAUGHT: arguments.taught}
    folders = {arm: [arguments.out / f"{arm}-s{seed}" for seed in range(many)] for arm, many in count.items()}
    lines, cost, task = list[str](), dict[str, int](), heal(UNKNOWN_HOSTS)
    for arm, own in folders.items():
        if not own:
            continue
        curves = np.array([train(path, task, seed, arguments.rounds, ARMS[arm]) for seed, path in enumerate(own)])
        lines += [f"{NAMES[arm]}:", "", *curve_table(curves), ""]
        cost[arm] = int(curves[0, -1, 0])
    if not arguments.train_only:
        found = played(
            arguments.out,
            {arm: own for arm, own in folders.items() if own},
            arguments.first,
            arguments.instances,
            max(cost.values()),
        )
        few = 2 if arguments.quick else len(EVERY_THREE)
        placed = None if arguments.no_ceiling else ceiling(arguments.out, arguments.first, arguments.instances, few)
        lines += [*table(found, placed, cost), "", *later(arguments.instances)]
    print("\n".join(lines))
    if arguments.page:
        numbers = {name: getattr(arguments, name) for name in ("trainings", "taught", "rounds", "first", "instances")}
        command = "    python bench/scripts/study_game.py OUT " + " ".join(
            f"--{name} {n}" for name, n in numbers.items()
        )
        arguments.page.write_text("\n".join(["# The game", "", command, "", *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
