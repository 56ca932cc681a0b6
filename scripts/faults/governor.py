"""Run the governor over populations that fare well, to see whether it is silent, and measure what it costs.

For the cost two engines of the same seed, one with a governor and one without, take turns step by step, each first in every
other step, and their processor times make a ratio; a third without one tells how far a ratio is to be trusted.
"""

import statistics
import time
from pathlib import Path
from typing import Any

from esper.leyline.config.tree import build_config
from esper.leyline.protocols import Controller
from esper.tamiyo.catalog import get_controller, with_sensors
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from faults.records import Record, append, records, table

FILE = "governor.jsonl"
TASKS = (
    *("repair", "digits-narrow", "spirals-narrow"),
    *("iris-plain", "wine-plain", "breast-cancer-plain", "digits-image-narrow"),
)
CONTROLLERS = ("never", "heuristic", "random-valid")
SIZES = tuple((task, envs) for task in ("digits-narrow", "repair") for envs in (8, 64, 256))


def campaign(out: Path, quick: bool) -> None:
    """Run every measurement that is not yet kept."""
    kept = {record["what"] for record in records(out / FILE)}
    for task in ("iris",) if quick else TASKS:
        for controller in CONTROLLERS:
            what = f"{task}, {controller}"
            if what not in kept:
                keep(out, silence(task, controller, 4 if quick else 8 if task == "digits-image-narrow" else 64), what)
    for task, envs in (("iris", 4),) if quick else SIZES:
        what = f"{task}, E = {envs}"
        if what not in kept:
            keep(out, cost(task, envs, {"steps": 6} if quick else {}), what)


def keep(out: Path, found: Record, what: str) -> None:
    """Write down a measurement."""
    append(out / FILE, {"what": what, **found})
    print(f"{what}: {found}", flush=True)


def silence(task: str, controller: str, envs: int) -> Record:
    """Count the rollbacks over an episode of every environment and its twin."""
    engine, client = population(task, controller, {"envs": envs, "twin": True})
    engine.run(client)
    counts = engine.governor.record.counts()["rollbacks"]
    steps = engine.config.steps * engine.rows
    return {"task": task, "controller": controller, "row_steps": steps, "rollbacks": sum(counts.values()), "by": counts}


def cost(task: str, envs: int, settings: dict[str, Any]) -> Record:
    """Measure ratios of processor time, with a governor over without and without over without, and the share of governing."""
    shape = {"envs": envs, "twin": False, **settings}
    three = [
        population(task, "heuristic", {**shape, "governor": {"enabled": enabled}}) for enabled in (True, False, False)
    ]
    views = [engine.reset() for engine, _ in three]
    ratios: dict[str, list[float]] = {"with": [], "control": []}
    while views[0].step < views[0].steps:
        order = (0, 1, 2) if views[0].step % 2 else (2, 1, 0)
        seconds = [0.0] * 3
        for place in order:
            engine, client = three[place]
            begin = time.process_time()
            views[place], outcome = engine.step(client.act(views[place]))
            seconds[place] = time.process_time() - begin
            client.store(outcome)
        ratios["with"].append(seconds[0] / seconds[1])
        ratios["control"].append(seconds[2] / seconds[1])
    spent = three[0][0].timer.seconds
    return {"task": task, "envs": envs, **ratios, "share": spent["govern"] / sum(spent.values())}


def population(task: str, controller: str, settings: dict[str, Any]) -> tuple[VectorizedEngine, Controller]:
    """Return an engine under the task's own defaults, and its controller."""
    chosen = get_task(task)
    config = build_config(chosen.defaults, {"telemetry": {"level": "off"}, "controller": controller}, settings)
    client = get_controller(controller, config)
    return VectorizedEngine(chosen.sealed(), with_sensors(config, client)), client


def section(out: Path) -> list[str]:
    """Return the results as Markdown."""
    rows = records(out / FILE)
    if not rows:
        return []
    silent, costs = [row for row in rows if "controller" in row], [row for row in rows if "share" in row]
    lines = []
    for row in costs:
        ratio, control = (statistics.median(row[name]) for name in ("with", "control"))
        low, _, high = statistics.quantiles(row["with"], n=4)
        lines.append(
            [
                row["task"],
                row["envs"],
                f"{ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{control:.3f}",
                f"{row['share']:.1%}",
            ]
        )
    return [
        "## The governor where nothing is wrong",
        "",
        f"{sum(row['rollbacks'] for row in silent)} rollbacks over {sum(row['row_steps'] for row in silent):,} steps of rows, "
        "environments and twins, in whole episodes under each task's own defaults:",
        "",
        *table(
            ["task", *CONTROLLERS],
            [
                [task, *(row["rollbacks"] for row in silent if row["task"] == task)]
                for task in dict.fromkeys(row["task"] for row in silent)
            ],
        ),
        "",
        "Its cost, with a snapshot of every row in every step, under the heuristic: processor time of a step with one over "
        "one without, median and quartiles over the steps of an episode; the same of two without; and the share of its phase, "
        "which leaves out three more numbers a row in the packet of the probe.",
        "",
        *table(["task", "E", "with / without", "quartiles", "without / without", "phase"], lines),
        "",
    ]
