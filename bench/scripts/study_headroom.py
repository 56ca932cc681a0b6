"""Find where growth pays on the `repair` mixture, and whether the sensors say so.

Every arm grows the same held-out instances with the same keys, at most two seeds on four slots, rent 0.1. What is scored is
J on the test split of the network that would be exported. Finished arms are kept in --out and not run again.

    python bench/scripts/study_headroom.py [--quick] [--instances N] [--seeds N] [--jobs N] [--out DIR] [--page FILE]
    python bench/scripts/study_headroom.py --controllers --first 200        # controllers alone, chosen on training instances
"""

import argparse
import hashlib
import itertools
import multiprocessing
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.config.tree import Config, GatesConfig, HeuristicConfig, build_config
from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.view import View
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Stage
from esper.leyline.protocols import Controller
from esper.simic.rewards import objective
from esper.tamiyo.catalog import get_controller, with_sensors
from esper.tamiyo.rules.base import Never, RandomValid, Rule
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from esper_bench.records import load_figures, run_script, save_figures

Floats = NDArray[np.float64]
START, RENT, SLOTS = 4, 0.1, 4
TRAINING = 96
"""Training instances that the heuristic is tuned on, and by which a fixed schedule and a threshold are chosen."""
PLAIN = {"heuristic": HeuristicConfig().model_dump(), "gates": GatesConfig().model_dump()}
"""Arms start from the config's own rule and gates and not from the task's, which came out of this study."""
LIFTED = {"lifecycle": {"max_seeds": 4, "max_training_seeds": 4}}
PERMISSIVE = {"gates": {"permissive": True, "min_holding_steps": 1}}
INSTANT = {"gates": {"permissive": True, "min_training_steps": 0, "min_holding_steps": 1}}


class Arm(NamedTuple):
    """Describes one way to grow, and what it needs of the config."""

    name: str
    plan: tuple[tuple[int, str], ...] | None  # the seeds of a fixed schedule: (slot, blueprint)
    way: str  # 'instant', 'together' or 'lifecycle' for a schedule, else the name of a rule
    settings: Mapping[str, Any]


class Together(Rule):
    """Plants the seeds of a plan in one step, which a controller cannot; then advances and keeps them as they become valid."""

    def __init__(self, plan: Sequence[tuple[int, str]], at: int, tempo: int) -> None:
        self.plan, self.at, self.tempo = plan, at, tempo

    def extra(self, view: View, op: Op) -> Iterator[Actions]:
        """Yield the decisions of one step but its last, for `VectorizedEngine.carry_out`; each is valid or refused."""
        for slot, blueprint in self.plan:
            yield self._decision(view, op, slot, blueprint)

    def act(self, view: View) -> Actions:
        """Return no further decision: everything is in `extra`."""
        return Actions.wait(len(view.host_params))

    def _decision(self, view: View, op: Op, slot: int, blueprint: str) -> Actions:
        heads = [np.full(len(view.host_params), value, np.int64) for value in (op, slot, 0, 0, 0, 0)]
        actions = Actions(*heads)
        actions.blueprint[:] = [entry.name for entry in view.space.blueprints].index(blueprint)
        actions.tempo[:] = view.space.tempos.index(self.tempo)
        actions.target[:] = view.space.targets.index(1.0)
        return actions


class Threshold(Rule):
    """Plants linear bypasses at the `slots` of least rank, or at fixed ones, where the metric is under a threshold at START."""

    def __init__(self, threshold: float, slots: tuple[int, ...] | None) -> None:
        self.threshold, self.slots = threshold, slots

    def act(self, view: View) -> Actions:
        """Choose FOSSILIZE, ADVANCE or GERMINATE, in that order of precedence."""
        may, rank = view.masks.slot, view.measurements.participation
        envs = np.arange(len(rank))
        if view.step == START:
            order = np.argsort(rank, axis=1)[:, :2] if self.slots is None else np.tile(self.slots, (len(rank), 1))
            self.plan = np.zeros(rank.shape, bool)
            self.plan[envs[:, None], order] = (view.measurements.metric < self.threshold)[:, None]
        op, slot = np.zeros(len(rank), np.int64), np.zeros(len(rank), np.int64)
        if view.step >= START:
            for choice, candidates in (
                (Op.GERMINATE, may[:, Op.GERMINATE] & self.plan),
                (Op.ADVANCE, may[:, Op.ADVANCE]),
                (Op.FOSSILIZE, may[:, Op.FOSSILIZE]),
            ):
                op = np.where(candidates.any(1), choice, op)
                slot = np.where(candidates.any(1), candidates.argmax(1), slot)
            planted = op == Op.GERMINATE
            self.plan[envs[planted], slot[planted]] = False
        usual = defaults(view.space)
        usual[Head.BLUEPRINT] = [entry.name for entry in view.space.blueprints].index("bypass-linear")
        return complete(view.masks, op, slot, usual)


def schedules() -> list[Arm]:
    """List every fixed schedule of at most two seeds that the study compares."""
    singles = [((slot, b),) for b in ("bypass-linear", "bypass-mlp", "mlp-small") for slot in range(SLOTS)]
    pairs = [
        ((i, b), (j, b)) for b in ("bypass-linear", "bypass-mlp") for i, j in itertools.combinations(range(SLOTS), 2)
    ]
    mixed = [((slot, "bypass-linear"), (3, "mlp-small")) for slot in range(3)]
    return [Arm(_name(plan), plan, "together", PERMISSIVE) for plan in (*singles, *pairs, *mixed)]


def _name(plan: Sequence[tuple[int, str]]) -> str:
    return " + ".join(f"{blueprint}@{slot}" for slot, blueprint in plan)


def config_of(arm: Arm, instances: int, seed: int, part: str, first: int, sensors: int) -> Config:
    """Return the config of an arm on some instances."""
    task = get_task("repair")
    return build_config(
        task.defaults,
        PLAIN,
        {"task": "repair", "envs": instances, "seed": seed, "twin": False, "instances": part, "first_instance": first},
        {"probe": {"sensors_every": sensors or None, "coalitions_every": 10**6}, "reward": {"rent": RENT}},
        arm.settings,
    )


def client_of(arm: Arm, config: Config) -> Controller:
    """Return the controller of an arm."""
    if arm.way == "never":
        return Never()
    if arm.way == "random-valid":
        return RandomValid()
    if arm.way == "heuristic":
        return get_controller("heuristic", config)
    if arm.way.startswith("rank<"):
        return Threshold(float(arm.way.removeprefix("rank<")), None)
    if arm.way.startswith("accuracy<"):
        assert arm.plan is not None
        return Threshold(float(arm.way.removeprefix("accuracy<")), tuple(slot for slot, _ in arm.plan))
    assert arm.plan is not None
    if arm.way == "together":
        return Together(arm.plan, START, 2)
    if arm.way == "instant":
        return Together(arm.plan, START - 1, 1)
    entries = [
        ScheduleEntry(at=START, op="germinate", slot=f"block{slot}", blueprint=b, keep=True, tempo=2, target=1.0)
        for slot, b in arm.plan
    ]
    return Schedule(entries)


def grow(arm: Arm, instances: int, seed: int, part: str, first: int, sensors: int) -> dict[str, Floats]:
    """Play one episode of an arm, and return figures by instance."""
    task = get_task("repair")
    config = config_of(arm, instances, seed, part, first, sensors)
    client = client_of(arm, config)
    engine = VectorizedEngine(task, with_sensors(config, client))
    view = engine.reset()
    seen: dict[str, Floats] = {}
    while view.step < config.steps:
        if sensors and view.step == START:
            measured = view.measurements
            seen = {"sensors": measured.sensors, "metric": measured.metric, "loss": measured.loss}
            seen |= {"train_loss": measured.train_loss, "host": view.host_params.astype(np.float64)}
        if isinstance(client, Together):
            if view.step == client.at:
                for actions in client.extra(view, Op.GERMINATE):
                    engine.carry_out(actions)
            elif view.step > client.at:
                for op in (Op.ADVANCE, Op.FOSSILIZE):
                    for actions in client.extra(view, op):
                        engine.carry_out(actions)
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
        if arm.way == "together" and view.step == START + 1 + config.gates.min_training_steps:  # incubation ends here
            measured, slot = view.measurements, arm.plan[0][0] if arm.plan else 0
            at_one = measured.metric + measured.gain_metric.mean[:, slot]
            seen |= {"gain": measured.gain.mean[:, slot], "accuracy_at_one": at_one, "accuracy_host": measured.metric}
    tests = [task.test_split(int(key)) for key in engine.space.instance]
    metric, _ = engine.evaluate([split for split in tests if split is not None])
    added = engine.exported_params() - view.host_params
    stage = view.seeds.stage
    return seen | {
        "accuracy": metric,
        "added": added.astype(np.float64),
        "J": objective(metric, added, view.host_params, RENT, 0),
        "kept": (stage == Stage.FOSSILIZED).sum(1).astype(np.float64),
    }


def run_arm(job: tuple[Arm, int, int, str, int, int, Path]) -> str:
    """Grow an arm unless its figures are there already, and keep them."""
    arm, instances, seed, part, first, sensors, path = job
    if not path.exists():
        torch.set_num_threads(1)
        figures = grow(arm, instances, seed, part, first, sensors)
        save_figures(path, **figures)
    return arm.name


class Results:
    """Holds figures of arms, (instances, seeds), from the folder they are kept in."""

    def __init__(self, out: Path, instances: int, seeds: int, part: str, first: int, jobs: int) -> None:
        self.out, self.instances, self.seeds, self.part, self.first, self.jobs = (
            out,
            instances,
            seeds,
            part,
            first,
            jobs,
        )
        out.mkdir(parents=True, exist_ok=True)

    def path(self, arm: Arm, seed: int) -> Path:
        """Return where an arm's figures of one seed are."""
        tag = hashlib.sha256(repr(sorted(arm.settings.items())).encode()).hexdigest()[:8]
        safe = f"{arm.way}-{arm.name}-{tag}".replace(" + ", "+").replace("/", "-").replace("<", "lt")
        return self.out / f"{self.part}{self.first}-{self.instances}-{safe}-s{seed}.npz"

    def grow(self, arms: Sequence[Arm], sensors: Sequence[str] = ()) -> None:
        """Run what is not there yet."""
        jobs = [
            (
                arm,
                self.instances,
                seed,
                self.part,
                self.first,
                START if arm.name in sensors else 0,
                self.path(arm, seed),
            )
            for arm in arms
            for seed in range(self.seeds)
        ]
        jobs = [job for job in jobs if not job[-1].exists()]
        begin = time.perf_counter()
        with multiprocessing.get_context("spawn").Pool(self.jobs) as pool:
            for done, name in enumerate(pool.imap_unordered(run_arm, jobs), 1):
                print(f"{done}/{len(jobs)} {name}, {time.perf_counter() - begin:.0f} s", flush=True)

    def get(self, arm: Arm, figure: str = "J") -> Floats:
        """Return a figure of an arm, (instances, seeds, ...)."""
        return np.stack([load_figures(self.path(arm, seed))[figure] for seed in range(self.seeds)], 1)


def interval(values: Floats) -> str:
    """Format the mean over instances with its 95 % bootstrap interval; values (instances,)."""
    draws = np.random.default_rng(0).integers(len(values), size=(4000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def oracle(scores: Floats) -> Floats:
    """Return J (instances,) of the best schedule on all seeds but one, scored on that one, from (schedules, instances, seeds)."""
    seeds = scores.shape[2]
    picked = []
    for held in range(seeds):
        rest = [seed for seed in range(seeds) if seed != held] or [held]
        best = scores[:, :, rest].mean(2).argmax(0)
        picked.append(np.take_along_axis(scores[:, :, held], best[None], 0)[0])
    return np.mean(picked, 0)


def tree_policy(scores: Floats, features: Floats, folds: int = 6) -> Floats:
    """Return J (instances,) of the schedule that a tree model on the sensors picks for instances it has not seen.

    scores (schedules, instances, seeds), features (instances, seeds, f).
    """
    from sklearn.ensemble import ExtraTreesRegressor

    count, seeds = features.shape[:2]
    x, y = np.nan_to_num(features.reshape(count * seeds, -1)), scores.reshape(len(scores), -1).T
    fold = np.repeat(np.arange(count) % folds, seeds)
    chosen = np.zeros(len(x), np.int64)
    for held in range(folds):
        train, test = fold != held, fold == held
        model = ExtraTreesRegressor(200, min_samples_leaf=3, max_features=0.5, random_state=0)
        chosen[test] = model.fit(x[train], y[train] - y[train, :1]).predict(x[test]).argmax(1)
    return y[np.arange(len(x)), chosen].reshape(count, seeds).mean(1)


def features_of(results: Results, never: Arm) -> dict[str, Floats]:
    """Return groups of what a controller sees at START, each (instances, seeds, f)."""
    sensors = results.get(never, "sensors")  # (N, seeds, S, F)
    relative = sensors - sensors.mean(2, keepdims=True)
    plain = np.stack([results.get(never, name) for name in ("metric", "loss", "train_loss")], 2)
    sizes = np.log(results.get(never, "host"))[..., None]
    level = np.concatenate([plain, sizes], 2)
    flat = np.concatenate([sensors, relative], 3).reshape(*sensors.shape[:2], -1)
    rank = np.concatenate([sensors[..., :4], relative[..., :4]], 3).reshape(*sensors.shape[:2], -1)
    return {
        "losses and sizes": level,
        "+ rank (participation, dead, unsaturated)": np.concatenate([level, rank], 2),
        "+ all sensors": np.concatenate([level, flat], 2),
    }


def tune_heuristic(results: Results) -> dict[str, Any]:
    """Return the settings of the heuristic and its gates that do best on training instances."""
    strict: dict[str, Any] = {"gain_z": 1.0, "contribution_z": 1.0, "min_contribution": 0.0}
    lenient = {"gain_z": -1.0, "contribution_z": 0.0, "min_contribution": -0.02}
    open_ = {"gain_z": -10.0, "contribution_z": 0.0, "min_contribution": -1.0, "min_holding_steps": 1}
    grid = [
        {"heuristic": {"plant_below": below, "weak_below": weak, "keep_above": keep}, "gates": gates}
        for below, weak, keep, gates in itertools.product(
            (0.88, 0.94), (0.5, 0.7, 0.85), (0.0, 0.5), (strict, lenient, open_)
        )
    ]
    arms = [Arm(f"tuning {index}", None, "heuristic", settings) for index, settings in enumerate(grid)]
    results.grow(arms)
    means = [results.get(arm).mean() for arm in arms]
    for mean, settings in sorted(zip(means, grid, strict=True), key=lambda pair: -pair[0])[:5]:
        print(f"tuning: {mean:.3f} {settings}", flush=True)
    return grid[int(np.argmax(means))]


def incubation_arms() -> list[Arm]:
    """List arms of one seed, incubated under either objective."""
    plans = [((3, "bypass-mlp"),), ((0, "bypass-linear"),), ((1, "mlp-small"),)]
    settings = {objective: PERMISSIVE | {"lifecycle": {"incubation": objective}} for objective in ("shadow", "ste")}
    return [Arm(f"{_name(plan)}, {name}", plan, "together", settings[name]) for plan in plans for name in settings]


def incubation_table(held: Results, never: Arm) -> list[str]:
    """Tabulate what incubation is worth: the network at alpha 1 right after it, and what its gain says of the seed's future."""
    arms = incubation_arms()
    held.grow(arms)
    lines = ["", "## Incubation: shadow against straight-through", ""]
    lines.append("| one seed, objective | probe accuracy of the host | at alpha 1 after 2 steps | J | gain and rise |")
    lines.append("|---|---|---|---|---|")
    for arm in arms:
        rise = (held.get(arm, "accuracy") - held.get(never, "accuracy")).ravel()
        gain = held.get(arm, "gain").ravel()
        seen = np.isfinite(gain)
        first, second = (values[seen].argsort().argsort() for values in (gain, rise))
        correlation = np.corrcoef(first, second)[0, 1]
        figures = [held.get(arm, name).mean() for name in ("accuracy_host", "accuracy_at_one", "J")]
        lines.append(f"| {arm.name} | {figures[0]:.3f} | {figures[1]:.3f} | {figures[2]:.3f} | {correlation:.2f} |")
    lines += [
        "",
        "The last column is Spearman's correlation of the incubation gain with the rise of the final test accuracy over never "
        "growing. That the host is unharmed meanwhile is bitwise: tests/kasmina/test_body.py.",
    ]
    return lines


def rank_rules() -> list[Arm]:
    """List arms of the threshold rule: linear bypasses at the two slots of least rank."""
    return [
        Arm(f"two least-rank slots where accuracy < {t}", None, f"rank<{t}", PERMISSIVE) for t in (0.8, 0.9, 0.97, 1.1)
    ]


def best_of(results: Results, arms: Sequence[Arm], count: int = 1) -> list[Arm]:
    """Return the arms of the highest mean J, best first."""
    results.grow(arms)
    return sorted(arms, key=lambda arm: -results.get(arm).mean())[:count]


def controllers_page(training: Results, held: Results) -> list[str]:
    """Compare every controller, at what did best on training instances, on held-out ones; differences are paired."""
    tuned = Arm("heuristic, tuned", None, "heuristic", tune_heuristic(training))
    fixed = best_of(training, schedules(), 8)
    (rule,) = best_of(training, rank_rules())
    never = Arm("never", None, "never", {})
    random = Arm("random-valid", None, "random-valid", {})
    usual = Arm("heuristic, the config's own settings", None, "heuristic", {})
    arms = [never, random, *reversed(fixed), usual, rule, tuned]
    held.grow(arms)
    scores = {arm.name: held.get(arm).mean(1) for arm in arms}
    best = scores[fixed[0].name]
    lines = [
        f"Held-out instances {held.first} to {held.first + held.instances - 1} of `repair` by {held.seeds} seeds. The schedules "
        f"are the eight best of {len(schedules())} on training instances 0 to {training.instances - 1}, best last; the "
        "threshold and the settings of the tuned heuristic are the best on the same. Intervals are 95 % bootstraps over "
        "instances of paired differences.",
        "",
        "| controller | J | accuracy | seeds kept | against the best fixed | against the tuned heuristic |",
        "|---|---|---|---|---|---|",
    ]
    for arm in arms:
        j, accuracy, kept = scores[arm.name], held.get(arm, "accuracy").mean(), held.get(arm, "kept").mean()
        label = f"**{arm.name}**" if arm in (fixed[0], tuned) else arm.name
        lines.append(
            f"| {label} | {j.mean():.3f} | {accuracy:.3f} | {kept:.2f} | {interval(j - best)} | "
            f"{interval(j - scores[tuned.name])} |"
        )
    return [*lines, "", f"Tuned settings: `{tuned.settings}`."]


def publish(lines: Sequence[str], page: Path | None) -> None:
    """Print a page, and write it where a file is named."""
    text = "\n".join(lines) + "\n"
    print(text)
    if page:
        page.write_text(text, encoding="utf-8")


def main() -> None:
    """Run, compare and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few instances, to see that it runs")
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first held-out instance")
    parser.add_argument("--controllers", action="store_true", help="compare controllers alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/headroom"), help="where figures of arms are kept")
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    arguments = parser.parse_args()
    instances, seeds = (12, 2) if arguments.quick else (arguments.instances, arguments.seeds)

    begin = time.perf_counter()
    training = Results(arguments.out, 8 if arguments.quick else TRAINING, 1, "training", 0, arguments.jobs)
    held = Results(arguments.out, instances, seeds, "heldout", arguments.first, arguments.jobs)
    if arguments.controllers:
        publish(controllers_page(training, held), arguments.page)
        return
    best = tune_heuristic(training)
    never = Arm("never", None, "never", {})
    random = Arm("random-valid", None, "random-valid", {})
    tuned = Arm("heuristic, tuned on training instances", None, "heuristic", best)
    usual = Arm("heuristic, defaults", None, "heuristic", {})
    everywhere = Arm(
        "all slots, cap lifted",
        tuple((slot, "bypass-linear") for slot in range(SLOTS)),
        "together",
        LIFTED | PERMISSIVE,
    )
    fixed = schedules()
    held.grow([never, random, tuned, usual, everywhere, *fixed], sensors=("never",))
    scores = np.stack([held.get(arm) for arm in (never, *fixed)])
    top = fixed[int(scores[1:].mean((1, 2)).argmax())]
    rules = rank_rules()
    rules += [Arm(f"{top.name} where accuracy < {t}", top.plan, f"accuracy<{t}", PERMISSIVE) for t in (0.8, 0.9, 0.97)]
    ways = [Arm(top.name, top.plan, way, settings) for way, settings in (("instant", INSTANT), ("lifecycle", {}))]
    held.grow([*rules, *ways])

    base = held.get(top).mean(1)
    ideal = oracle(scores)
    lines = [
        "# Where growth pays, through the engine",
        "",
        "A static network without the damage lies above everything on this page: the hosts of `repair` are damaged on purpose, "
        "and the oracle is the ceiling of growing schedules on them, not that of static networks. See [the hosts](../hosts.md).",
        "",
        f"`python bench/scripts/study_headroom.py --instances {instances} --seeds {seeds}`: {instances} held-out instances of "
        f"`repair` by {seeds} seeds, {time.perf_counter() - begin:.0f} s in this call with "
        f"{arguments.jobs} processes of one thread, torch "
        f"{torch.__version__}, {platform.machine()}. J is on the test split, of the network that would be exported; rent {RENT}. "
        "Intervals are 95 % bootstraps over instances; the oracle picks on all seeds but one and is scored on that one.",
        "",
        "## Three ways of growing the best fixed schedule",
        "",
        "| way | J | accuracy | against planting together |",
        "|---|---|---|---|",
    ]
    named = {
        "instant": "instant insertion at alpha 1, no incubation",
        "lifecycle": "one operation a step, with the default gates",
    }
    lines.append(
        f"| planted together, incubation 2, ramp 2 | {base.mean():.3f} | {held.get(top, 'accuracy').mean():.3f} | |"
    )
    for arm in ways:
        j, accuracy = held.get(arm).mean(1), held.get(arm, "accuracy").mean()
        lines.append(f"| {named[arm.way]} | {j.mean():.3f} | {accuracy:.3f} | {interval(j - base)} |")
    lines += [
        "",
        "## Controllers",
        "",
        "| controller | J | accuracy | seeds kept | against best fixed |",
        "|---|---|---|---|---|",
    ]
    for arm in (never, random, everywhere, *rules, usual, tuned, top):
        j, kept = held.get(arm).mean(1), held.get(arm, "kept").mean()
        label = f"**best fixed: {arm.name}**" if arm is top else arm.name
        lines.append(
            f"| {label} | {j.mean():.3f} | {held.get(arm, 'accuracy').mean():.3f} | {kept:.2f} | {interval(j - base)} |"
        )
    lines.append(
        f"| unbiased oracle over {len(scores)} schedules | {ideal.mean():.3f} | | | {interval(ideal - base)} |"
    )
    lines += [
        "",
        f"Best fixed against never: {interval(base - held.get(never).mean(1))}.",
        f"Tuned settings: `{best}`.",
        "",
    ]
    lines += [
        "## What the sensors tell a tree model",
        "",
        "| sees, at step 4 | J | against best fixed | share of headroom |",
        "|---|---|---|---|",
    ]
    for name, features in features_of(held, never).items():
        picked = tree_policy(scores, features)
        share = (picked - base).mean() / (ideal - base).mean()
        lines.append(f"| {name} | {picked.mean():.3f} | {interval(picked - base)} | {share:.0%} |")
    lines += incubation_table(held, never)
    lines += [
        "",
        "## Every fixed schedule",
        "",
        "| schedule | J | accuracy | against best fixed |",
        "|---|---|---|---|",
    ]
    for arm in sorted(fixed, key=lambda arm: -held.get(arm).mean()):
        j = held.get(arm).mean(1)
        lines.append(f"| {arm.name} | {j.mean():.3f} | {held.get(arm, 'accuracy').mean():.3f} | {interval(j - base)} |")
    publish(lines, arguments.page)


if __name__ == "__main__":
    run_script(main)
