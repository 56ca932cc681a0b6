"""Compare policies that learn the game `grow-unknown` with plans, rules, trees and an oracle (bench/docs/game.md).

    python bench/scripts/study_growing_game.py OUT --page FILE

Every plan of PLANS grows the same training instances. The best of them on average is the best fixed plan, trees are fitted to
their J, and the settings of each rule are the best of GRIDS there. A training of PPO draws new instances in every round, and
keeps the policy of its best validation. All then play the same held-out instances. The oracle takes for each of these the plan
with the highest J on the probe split, and has the J of that plan on the test split. What is in OUT is not made again.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor
from study_game import points
from study_heal_ppo import curve_table

from esper.leyline.config.tree import Config, build_config
from esper.leyline.lifecycle.view import Floats, View, sensor
from esper.leyline.lifecycle.vocabulary import Actions
from esper.leyline.messages import InputError, counted
from esper.leyline.protocols import Controller
from esper.runs.configuration import training_configs
from esper.runs.folder.interrupt import Interrupt
from esper.runs.train import LED, Trainer, cohorts_of, settings_of_policy
from esper.simic.client import Apprentice
from esper.tamiyo.catalog import FOLDER, get_controller, with_sensors
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy, save_policy
from esper.tamiyo.rules.base import Never
from esper.tolaria.engine import VectorizedEngine, play
from esper_bench.controllers.widening import (
    Planned,
    Planting,
    WidenByExamples,
    WidenByGradient,
    WidenBySlope,
    WidenNarrow,
)
from esper_bench.growing import BLOCKS, AtStops, StopScores, describe, grow_unknown
from esper_bench.records import load_figures, load_record, run_script, save_figures, save_record

TASK = grow_unknown()
SETTINGS: dict[str, Any] = {
    "envs": 64,
    "probe": {
        "coalitions_every": 1000,
        "sensors_every": 1,
        "sensors": ["participation", "inner", "dead", "gradient"],
    },
    "reward": {"relative_to": "group", "group_size": 8},
    "telemetry": {"level": "off"},
    "ppo": {
        "gae_lambda": 1.0,
        "update_epochs": 8,
        "lr": 0.002,
        "decisions_per_step": BLOCKS + 1,
        "validate_envs": 64,
    },
}
"""Settings of a training, chosen on training and validation keys."""
IMITATION = 3
"""Rounds in which one arm imitates the best rule before PPO."""
EVERY = 10
"""Rounds between validations."""
ROWS = 64
"""Networks that grow together."""

SMALL, LARGE, DEEP = TASK.menu
ALL = tuple(range(BLOCKS))
PLANS: list[Planned] = [
    Planned(SMALL, (), 0),
    *(Planned(each, ALL, at) for each in (SMALL, LARGE) for at in (0, 4)),
    *(Planned(each, (slot,), at) for each in (SMALL, LARGE) for at in (0, 4) for slot in ALL),
    *(Planned(DEEP, (slot,), 0) for slot in ALL),
    *(Planned(SMALL, two, 0) for two in itertools.combinations(ALL, 2)),
]
"""What the oracle and the trees choose from; the first plants nothing."""
PER_STEP = TASK.defaults["data"]["batch_size"] * TASK.defaults["data"]["batches_per_step"]
GRIDS: dict[str, list[Callable[[], Controller]]] = {
    "all at once": [partial(Planned, each, ALL, 0) for each in (SMALL, LARGE, DEEP)],
    "by examples a parameter": [
        partial(WidenByExamples, each, ratio, PER_STEP) for each in (SMALL, LARGE) for ratio in (0.5, 1.0, 2.0, 4.0)
    ],
    "by the slope of the loss": [partial(WidenBySlope, each, fall) for each in (SMALL, LARGE) for fall in (0.02, 0.1)],
    "narrow blocks, by sensors": [
        partial(WidenNarrow, each, below) for each in (SMALL, LARGE) for below in (0.15, 0.3, 0.5)
    ],
    "by the gradient of new units": [
        partial(WidenByGradient, each, every, every, count)
        for each in (SMALL, LARGE)
        for every in (1, 2, 3)
        for count in (1, 2)
    ],
    "by the gradient before training": [partial(WidenByGradient, each, 0, 1, 1) for each in (SMALL, LARGE)],
}
"""The rules, each with the settings from which its own are chosen."""
RULES_SEE = {"coalitions_every": SETTINGS["probe"]["coalitions_every"]}
"""What a rule is measured: the sensors that it reads."""
LEARNED, TAUGHT, FIXED, TREES, ORACLE = "learned", "taught", "best fixed plan", "fitted trees", "oracle"
ORACLE_AT_ONCE = "oracle, plans of step 0"
ORACLE_OTHER = "best plan of the instance by another start"
NAMES = {LEARNED: "**learned**: PPO alone", TAUGHT: "**taught**: PPO after imitating the rule by the gradient"}


class Objectives(NamedTuple):
    """Holds J of a controller on some instances, each (I,)."""

    probe: Floats
    test: Floats


def played(
    make: Callable[[Config], Controller], keys: NDArray[np.int64], probe: Mapping[str, Any], start: int = 0
) -> Objectives:
    """Let a controller play instances, one start each. probe: what it is measured."""
    parts = []
    for chunk in np.split(keys, range(ROWS, len(keys), ROWS)):
        ours = {"task": TASK.name, "envs": len(chunk), "baselines": [], "telemetry": {"level": "off"}, "seed": start}
        config = build_config(TASK.defaults, {"probe": probe}, ours)
        client = make(config)
        engine = VectorizedEngine(TASK, with_sensors(config, client))
        engine.reset(chunk)
        scores = StopScores(engine, [split for key in chunk.tolist() if (split := TASK.test_split(key)) is not None])
        play(engine, client, scores)
        parts.append([scores.probe, scores.given])
    return Objectives(*np.concatenate(parts, 1))


def kept(
    path: Path,
    make: Callable[[Config], Controller],
    keys: NDArray[np.int64],
    probe: Mapping[str, Any] = RULES_SEE,
    start: int = 0,
) -> Objectives:
    """Return what `played` gives, from a file where it was made before."""
    if not path.is_file():
        found = played(make, keys, probe, start)
        save_figures(path, keys=keys, probe=found.probe, test=found.test)
    figures = load_figures(path)
    if not np.array_equal(figures["keys"], keys):
        raise InputError(f"{path} is of other instances; name another folder, or delete the file")
    return Objectives(figures["probe"], figures["test"])


def every_plan(out: Path, keys: NDArray[np.int64], start: int = 0) -> Objectives:
    """Return J of every plan, each (P, I)."""
    found = [kept(out / f"{at}.npz", partial(as_it_is, plan), keys, start=start) for at, plan in enumerate(PLANS)]
    return Objectives(np.stack([each.probe for each in found]), np.stack([each.test for each in found]))


def as_it_is(controller: Controller, config: Config) -> Controller:
    """Return the controller. It does not depend on the config."""
    return controller


class Trees(Planting):
    """Chooses one of PLANS for each network before the first step: the one to which trees give the highest J."""

    def __init__(self, trees: ExtraTreesRegressor) -> None:
        super().__init__()
        self.trees, self._plan = trees, np.zeros(0, np.int64)  # (E,) index into PLANS

    def begin(self, view: View) -> None:
        """Choose the plans."""
        super().begin(view)
        seen = features(view)
        self._plan = self.trees.predict(seen.reshape(-1, seen.shape[-1])).reshape(seen.shape[:2]).argmax(1)

    def wish(self, view: View) -> NDArray[np.int64]:
        """Return what the plan of each network plants now."""
        return np.stack([PLANS[plan].wish(view)[env] for env, plan in enumerate(self._plan.tolist())])


def features(view: View) -> Floats:
    """Return features (E, P, F): what is known before the first step, of the network and of each plan."""
    part = sensor(view, "participation")
    left = part / np.maximum(sensor(view, "participation_before"), 1e-9)
    seen = np.nan_to_num(np.stack([left, part, sensor(view, "participation_inner"), sensor(view, "dead")]))
    host = np.stack([np.log(view.host_params), view.measurements.metric, view.measurements.loss])
    rows = []
    for plan in PLANS:
        wish = plan.wish(view._replace(step=view.steps))
        chosen = wish >= 0  # (E, S), the same in every environment
        cost = np.take_along_axis(view.space.cost, np.maximum(wish, 0)[..., None], 2)[..., 0]
        added = np.log1p((cost * chosen).sum(1) / view.host_params)
        of = [np.where(where, seen, np.inf).min(2) for where in (chosen, ~chosen)]  # (sensors, E) each
        of += [np.where(where, seen, -np.inf).max(2) for where in (chosen, ~chosen)]
        fixed = np.array([plan.at, chosen[0].sum(), wish[0].max()])[:, None] * np.ones(len(added))
        rows.append(np.concatenate([host, fixed, added[None], np.clip(np.concatenate(of), -10, 10)]))
    return np.stack(rows).transpose(2, 0, 1)


class Looks(Never):
    """Grows nothing, and notes what is known before the first step."""

    def __init__(self) -> None:
        self.seen: list[Floats] = []  # (E, P, F) of each population

    def act(self, view: View) -> Actions:
        """WAIT, and keep the features of the first view."""
        if view.step == 0:
            self.seen.append(features(view))
        return super().act(view)


def fitted(worth: Floats, keys: NDArray[np.int64]) -> ExtraTreesRegressor:
    """Fit trees to the J of plans (P, I) above that of the first, which grows nothing."""
    look = Looks()
    played(partial(as_it_is, look), keys, SETTINGS["probe"])
    trees = ExtraTreesRegressor(300, min_samples_leaf=8, max_features=0.5, random_state=0)
    seen = np.concatenate(look.seen)
    return trees.fit(seen.reshape(-1, seen.shape[-1]), (worth - worth[0]).T.ravel())


def train(folder: Path, seed: int, rounds: int, teacher: Controller | None) -> list[list[float]]:
    """Train with one seed, and return a row for each validation: episodes, seconds of one core, J. Imitates a teacher first."""
    curve = folder / "curve.json"
    if curve.is_file():
        made: list[list[float]] = load_record(curve)["validations"]
        return made
    first = 0 if teacher is None else IMITATION
    own = {"seed": seed, "ppo": {"rounds": rounds, "imitation_rounds": first, "imitation_passes": 24}}
    (config,) = training_configs([TASK], "quick", SETTINGS, own)
    cohorts = cohorts_of(TASK.sealed(), config)
    language = Language.of([cohorts[0].engine.space])
    policy = Policy.fresh(
        language, seed, settings_of_policy(config), config.ppo.decisions_per_step, config.ppo.undo_bias
    )
    trainer = Trainer(cohorts, policy, config, AtStops)
    if teacher is not None:
        trainer.clients["imitation"] = [Apprentice(trainer.learner, AtStops(config.reward), teacher, LED[0])]
    folder.mkdir(parents=True, exist_ok=True)
    begin, rows, best = time.process_time(), list[list[float]](), -np.inf
    with Interrupt() as interrupt:
        for number in range(-first, rounds):
            (trainer.imitate if number < 0 else trainer.learn)(number, interrupt)
            if (number + 1) % EVERY == 0 or number + 1 == rounds:
                engine = cohorts[0].validation
                engine.reset(episode=0)
                scores = StopScores(engine, engine.population.validation_splits())
                play(engine, Learned(policy), scores)
                worth = float(scores.given.mean())
                if worth > best:
                    best = worth
                    save_policy(policy, folder / FOLDER)
                rows.append([float((first + number + 1) * config.envs), time.process_time() - begin, worth])
                seeds = (engine.state.seeds.stage[: config.ppo.validate_envs] > 0).sum(1).mean()
                print(
                    f"seed {seed}, round {number + 1}: J {worth:.3f}, {seeds:.1f} seeds, {rows[-1][1]:,.0f} s",
                    flush=True,
                )
    save_record(curve, {"validations": rows})
    return rows


def table(worth: Mapping[str, Floats], trainings: Mapping[str, Floats], episodes: Mapping[str, int]) -> list[str]:
    """Tabulate J on the fresh instances, and what the learned policies and the oracle have above each, paired by instance."""
    arms = [*trainings, *([ORACLE] if ORACLE in worth else [])]
    lines = [
        f"| controller | episodes to learn or to search | J on {len(worth[FIXED])} fresh instances | "
        + " | ".join(f"{arm} above it, points [95 %]" for arm in arms)
        + " |",
        f"|---|---|---|{'---|' * len(arms)}",
    ]
    for name in sorted(worth, key=lambda name: -worth[name].mean()):
        gains = ["" if name == arm else f"{points(worth[arm] - worth[name]):+.1f}" for arm in arms]
        cost = "" if name in (ORACLE, ORACLE_AT_ONCE, ORACLE_OTHER) else f"{episodes.get(name, 0):,}"
        lines.append(f"| {NAMES.get(name, name)} | {cost} | {worth[name].mean():.3f} | {' | '.join(gains)} |")
    within = [name for name in worth if name not in (*arms, ORACLE_AT_ONCE, ORACLE_OTHER)]
    best = max(within, key=lambda name: worth[name].mean())
    lines += ["", f"The best opponent, which is not the oracle, is `{best}`.", ""]
    for arm, each in trainings.items():
        gain, alone = points(worth[arm] - worth[best]), (each - worth[best]).mean(1)
        verdict = "above" if gain.above else "below" if gain.below else "level with"
        spread = f", {points(alone):+.1f} over {counted(len(alone), 'training')}" if len(alone) > 1 else ""
        worths = ", ".join(f"{own:.3f}" for own in each.mean(1))
        lines.append(
            f"- {arm}: {verdict} it, {gain:+.1f} points over the instances{spread}; J of each training: {worths}."
        )
    return lines


def groups(worth: Mapping[str, Floats], keys: NDArray[np.int64]) -> list[str]:
    """Tabulate J by the number of narrow blocks and by the family of problems."""
    facts, lines = [describe(key) for key in keys.tolist()], list[str]()
    for what, of in (
        ("narrow blocks", [str(len(each.narrow)) for each in facts]),
        ("problem", [each.problem.family for each in facts]),
    ):
        kinds = sorted(set(of))
        lines += ["", f"| controller, by {what} | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
        for name in sorted(worth, key=lambda name: -worth[name].mean()):
            cells = [f"{worth[name][np.array(of) == kind].mean():.3f}" for kind in kinds]
            lines.append(f"| {NAMES.get(name, name)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Train, evaluate and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the trainings and of the figures")
    parser.add_argument("--trainings", type=int, default=3, metavar="N", help="trainings of PPO alone (3)")
    parser.add_argument("--taught", type=int, default=3, metavar="N", help="trainings that imitate a rule first (3)")
    parser.add_argument("--rounds", type=int, default=20, metavar="R", help="rounds of 64 episodes of PPO (20)")
    parser.add_argument("--searched", type=int, default=64, metavar="I", help="training instances of each search (64)")
    parser.add_argument("--instances", type=int, default=64, metavar="I", help="fresh instances (64)")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first fresh instance (0)")
    parser.add_argument(
        "--quick", action="store_true", help="one training of two rounds and few instances, to see that all runs"
    )
    parser.add_argument("--no-oracle", action="store_true", help="leave out the plans on fresh instances")
    parser.add_argument("--search-only", action="store_true", help="search and train, and look at no fresh instance")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the tables to a Markdown file")
    asked = parser.parse_args()
    if asked.quick:
        asked.trainings, asked.taught, asked.rounds, asked.searched, asked.instances = 1, 1, 2, 4, 4
    torch.set_num_threads(1)
    out, keys = asked.out, np.array(TASK.keys("training")[: asked.searched])
    plans = every_plan(out / "plans-training", keys)
    order = plans.probe.mean(1).argsort()[::-1].tolist()
    oracle = plans.test[plans.probe.argmax(0), np.arange(len(keys))]
    lines = [
        f"On {len(keys)} training instances the best fixed plan is {PLANS[order[0]]!r}. The oracle is "
        f"{points(oracle - plans.test[order[0]]):+.1f} points above it, and {points(oracle - plans.test[0]):+.1f} above none."
    ]
    rules: dict[str, Callable[[], Controller]] = {}
    for name, grid in GRIDS.items():
        path = out / "rules-training" / name.replace(" ", "-")
        means = [
            kept(path / f"{at}.npz", lambda config, make=make: make(), keys).probe.mean()
            for at, make in enumerate(grid)
        ]
        rules[name] = grid[int(np.argmax(means))]
        lines.append(f"- {name}: {rules[name]()!r}, J {max(means):.3f}")
    print("\n".join(lines), flush=True)
    arms: dict[str, tuple[int, Callable[[], Controller | None]]] = {
        TAUGHT: (asked.taught, rules["by the gradient of new units"]),
        LEARNED: (asked.trainings, lambda: None),
    }
    folders = {arm: [out / f"{arm}-s{seed}" for seed in range(many)] for arm, (many, _) in arms.items() if many}
    episodes = {
        FIXED: plans.probe.size,
        TREES: plans.probe.size,
        **{name: len(grid) * len(keys) for name, grid in GRIDS.items()},
    }
    for arm, own in folders.items():
        teacher = arms[arm][1]
        curves = np.array([train(path, seed, asked.rounds, teacher()) for seed, path in enumerate(own)])
        lines += ["", f"{NAMES[arm]}:", "", *curve_table(curves)]
        episodes[arm] = int(curves[0, -1, 0])
    if not asked.search_only:
        fresh = np.array(TASK.keys("heldout")[asked.first :][: asked.instances])
        place = out / "fresh"
        worth = {
            FIXED: kept(place / "fixed.npz", partial(as_it_is, PLANS[order[0]]), fresh).test,
            TREES: kept(
                place / "trees.npz", lambda config: Trees(fitted(plans.probe, keys)), fresh, SETTINGS["probe"]
            ).test,
            "never": kept(place / "never.npz", lambda config: Never(), fresh).test,
            "heuristic": kept(place / "heuristic.npz", partial(get_controller, "heuristic"), fresh).test,
        }
        for name, make in rules.items():
            worth[name] = kept(place / f"{name.replace(' ', '-')}.npz", lambda config, make=make: make(), fresh).test
        trainings = {
            arm: np.stack(
                [
                    kept(
                        place / f"{path.name}.npz",
                        partial(get_controller, str(path / FOLDER)),
                        fresh,
                        SETTINGS["probe"],
                    ).test
                    for path in own
                ]
            )
            for arm, own in folders.items()
        }
        worth |= {arm: each.mean(0) for arm, each in trainings.items()}
        if not asked.no_oracle:
            every, here = every_plan(out / "plans-fresh", fresh), np.arange(len(fresh))
            worth[ORACLE] = every.test[every.probe.argmax(0), here]
            at_once = np.array([plan.at == 0 for plan in PLANS])[:, None]
            worth[ORACLE_AT_ONCE] = every.test[np.where(at_once, every.probe, -np.inf).argmax(0), here]
            worth[ORACLE_OTHER] = every.test[every_plan(out / "plans-fresh-1", fresh, 1).probe.argmax(0), here]
        lines += ["", *table(worth, trainings, episodes), *groups(worth, fresh)]
    print("\n".join(lines))
    if asked.page:
        numbers = ("trainings", "taught", "rounds", "searched", "instances", "first")
        command = "    python bench/scripts/study_growing_game.py OUT "
        command += " ".join(f"--{name} {getattr(asked, name)}" for name in numbers) + " --no-oracle" * asked.no_oracle
        asked.page.write_text("\n".join(["# The game of growth", "", command, "", *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
