"""Put NaN into one environment's data, loss, gradient or parameter, in a random step of an episode of a population.

The learner samples the decisions, so that what it is paid, and where its sequences end, is looked at too. Every case is held
against the episode of the same population in which nothing was broken.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import Config
from esper.leyline.lifecycle.vocabulary import Vital
from esper.runs.configuration import training_configs
from esper.simic.client import SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import delta, get_reward, total
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.controller import Language, Policy
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from faults.poison import FAULTS, Fault, fingerprints, poisoned
from faults.records import Record, append, records, table

FILE = "nan.jsonl"
TASKS = ("repair", "digits-narrow")
SETTINGS: Mapping[str, Any] = {
    "envs": 8,
    "steps": 12,
    "twin": True,
    "telemetry": {"level": "off"},
    "reward": {"relative_to": "none", "group_size": 1},
    "probe": {"sensors_every": 4},
}
QUICK: Mapping[str, Any] = {"envs": 3, "steps": 4, "data": {"batches_per_step": 2}}


class Case(NamedTuple):
    """Describes what is broken."""

    number: int
    task: str
    kind: Fault
    row: int  # an environment or, in a quarter of the cases, a twin; for a seed's gradient one that then has a seed
    step: int
    batch: int


class Episode(NamedTuple):
    """Holds what came of an episode."""

    trace: list[list[str]]  # by step, the fingerprint of every row
    found: NDArray[np.int8]  # (T, E) `Vital` of every environment
    pay: NDArray[np.float32]  # (T, E) the rise of J less the penalty of what was rolled back
    rollout: Rollout
    counts: dict[str, dict[str, int]]
    training: list[list[int]]  # by step, the environments with a seed that trains in it


def campaign(out: Path, count: int, seed: int, quick: bool) -> None:
    """Run every case that is not yet kept."""
    kept = {record["number"] for record in records(out / FILE)}
    for number in range(count):
        if number not in kept:
            record = examine(draw(number, seed, quick), quick)
            append(out / FILE, record)
            if not well(record):
                print(f"NOT WELL: {record}", flush=True)


def draw(number: int, seed: int, quick: bool) -> Case:
    """Draw a case by its number; kinds and tasks take turns, the rest is random."""
    generator = np.random.default_rng([seed, number])
    task, kind = TASKS[number // len(FAULTS) % len(TASKS)], FAULTS[number % len(FAULTS)]
    config = config_of(task, quick)
    step, batch = int(generator.integers(config.steps)), int(generator.integers(config.data.batches_per_step))
    rows = list(range(config.envs))
    if number // len(FAULTS) % 4 == 3:  # a twin
        rows = list(range(config.envs, 2 * config.envs))
    if kind == "seed gradient":
        several = [found for found in straight(task, quick).training if found]
        steps = [at for at, found in enumerate(straight(task, quick).training) if found]
        step = steps[int(generator.integers(len(several)))]
        rows = straight(task, quick).training[step]
    return Case(number, task, kind, rows[int(generator.integers(len(rows)))], step, batch)


def config_of(task: str, quick: bool) -> Config:
    """Return the config of the population."""
    return training_configs([get_task(task)], "quick", SETTINGS, QUICK if quick else {})[0]


@lru_cache
def straight(task: str, quick: bool) -> Episode:
    """Play the episode in which nothing is broken."""
    return play(task, None, quick)


def play(task: str, case: Case | None, quick: bool) -> Episode:
    """Play an episode under a fresh policy, which samples; with a case, something is broken in one of its steps."""
    config = config_of(task, quick)
    engine = VectorizedEngine(get_task(task).sealed(), config)
    policy = Policy.fresh(Language.of([engine.space]), config.seed)
    client = SimicClient(PPO(policy, config.ppo, config.seed), get_reward(config.reward), config.governor.penalty)
    trace, found, training, pay, view = [], [], [], [], engine.reset()
    while view.step < view.steps:
        actions = client.act(view)
        breaks = case is not None and view.step == case.step
        with poisoned(engine, case.row, case.kind, case.batch) if breaks and case else nullcontext():
            view, outcome = engine.step(actions)
        client.store(outcome)
        trace.append(fingerprints(engine))
        found.append(outcome.vital)
        pay.append(total(delta(outcome, config.reward)) - config.governor.penalty * outcome.rolled_back)
        training.append(np.flatnonzero(np.isfinite(view.measurements.seed_gradient_norm).any(1)).tolist())
    counts = engine.governor.record.counts()
    return Episode(trace, np.array(found), np.float32(pay), client.rollout(), counts, training)


def examine(case: Case, quick: bool) -> Record:
    """Break a case, and return whether the other rows were touched and what became of its own."""
    whole, broken = straight(case.task, quick), play(case.task, case, quick)
    envs = whole.found.shape[1]
    others = [row for row in range(2 * envs) if row != case.row]
    touched = sum(now[row] != then[row] for now, then in zip(broken.trace, whole.trace, strict=True) for row in others)
    seen = [env for env in range(envs) if env != case.row]
    learnt = all(
        np.array_equal(a[:, seen].numpy(), b[:, seen].numpy(), equal_nan=a.is_floating_point())
        for a, b in zip(parts(broken.rollout), parts(whole.rollout), strict=True)
    )
    back = np.argwhere(broken.found != Vital.GOOD).tolist()
    ends = broken.rollout.end.numpy()
    if case.row < envs:
        rolled = back == [[case.step, case.row]]
        paid = float(broken.rollout.reward[case.step, case.row])
        penalised = bool(ends[case.step, case.row]) and paid == float(broken.pay[case.step, case.row])
    else:  # a twin has no transition; it must only be rolled back, and leave its environment alone
        rolled, penalised = not back, True
    counted = sum(broken.counts["rollbacks"].values())
    return {
        **case._asdict(),
        "twin": case.row >= envs,
        "others_touched": touched,
        "others_learnt_from_the_same": learnt,
        "rolled_back_in_its_step": rolled,
        "terminal_and_penalised": penalised,
        "rollbacks_counted": counted,
        "steps_looked_at": len(broken.trace),
        "reason": next(iter(broken.counts["rollbacks"]), None),
        "row_changed": broken.trace[case.step][case.row] != whole.trace[case.step][case.row],
    }


def parts(rollout: Rollout) -> list[Any]:
    """List all tensors of a rollout."""
    return [part for field in rollout for part in (field if isinstance(field, tuple) else (field,))]


def well(record: Record) -> bool:
    """Return whether a case went as it should."""
    return (
        not record["others_touched"]
        and record["others_learnt_from_the_same"]
        and record["rolled_back_in_its_step"]
        and record["terminal_and_penalised"]
        and record["rollbacks_counted"] == 1
        and record["row_changed"]
    )


def section(out: Path) -> list[str]:
    """Return the results as Markdown."""
    rows = records(out / FILE)
    if not rows:
        return []
    steps = sum(row["steps_looked_at"] for row in rows)
    lines = []
    for kind in FAULTS:
        mine = [row for row in rows if row["kind"] == kind]
        reasons = sorted({row["reason"] for row in mine if row["reason"]})
        lines.append(
            [
                kind,
                len(mine),
                sum(row["twin"] for row in mine),
                sum(not row["others_touched"] and row["others_learnt_from_the_same"] for row in mine),
                sum(row["rolled_back_in_its_step"] for row in mine),
                sum(row["terminal_and_penalised"] for row in mine),
                sum(row["rollbacks_counted"] == 1 for row in mine),
                ", ".join(reasons),
            ]
        )
    head = [
        "NaN in",
        "cases",
        "of a twin",
        "all others bitwise the same",
        "rolled back in that step",
        "terminal and penalised there",
        "counted once",
        "found as",
    ]
    return [
        "## NaN in one environment",
        "",
        f"{sum(map(well, rows))} of {len(rows)} cases went as they should, over {steps:,} steps of populations of "
        f"{SETTINGS['envs']} environments and their twins ({', '.join(TASKS)}), decided by a policy that samples. "
        "Looked at, bit for bit and after every step: parameters, moments, buffers, lifecycle, measurements and masks of all "
        "other rows, and all that the learner keeps of the other environments.",
        "",
        *table(head, lines),
        "",
    ]
