"""Measure what a checkpoint of a training costs after many rounds, in bytes and seconds.

The state is that of a real training of a few rounds, whose history has then gone through as many more rounds of the same figures:
nothing else of the state of a training could grow with its rounds.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.leyline.config.tree import PPOConfig
from esper.runs.configuration import training_configs
from esper.runs.train import RoundHistory, train
from esper.store.checkpoint import Checkpoints
from esper.store.tensors import Tree
from esper.tasks.catalog import get_task
from faults.cost import QUICK, REPEATS, TAKEN, taken, writing
from faults.records import Record, append, records, table

SHORT: Mapping[str, Any] = {**QUICK, "ppo": {**QUICK["ppo"], "imitation_rounds": 0}}
AFTER = (10, 100, 500, 1000)
"""Rounds after which is looked."""
FILE = "rounds.jsonl"


def campaign(out: Path, quick: bool) -> None:
    """Run every measurement that is not yet kept."""
    kept = {record["rounds"] for record in records(out / FILE)}
    if kept >= set(AFTER):
        return
    configs = training_configs([get_task("iris")], "quick", SHORT)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        train([get_task("iris")], configs, Path(scratch) / "run")
        found = Checkpoints(Path(scratch) / "run", configs[0].checkpoint).read(print)
    assert found is not None
    for number in AFTER:
        if number not in kept:
            state = after(found.state, number, configs[0].ppo)
            record = {"rounds": number, **writing(state, out, 2 if quick else REPEATS)}
            append(out / FILE, record)
            print(record, flush=True)


def after(state: Tree, rounds: int, ppo: PPOConfig) -> Tree:
    """Return the state of a training after so many rounds."""
    history, figures = RoundHistory(), state["trainer"]["history"]["last"][-1]
    for number in range(rounds):
        history.add(number, figures, ppo)
    return {**state, "trainer": {**state["trainer"], "history": vars(history)}}


def section(out: Path) -> list[str]:
    """Return the results as Markdown."""
    rows: list[Record] = records(out / FILE)
    if not rows:
        return []
    return [
        "A checkpoint of a small training (iris, 4 environments) after so many rounds, taken apart as above.",
        "",
        *table(["rounds", *TAKEN], [[row["rounds"], *taken(row)] for row in rows]),
        "",
    ]
