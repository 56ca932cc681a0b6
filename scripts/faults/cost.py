"""Measure checkpoints: bytes and seconds against E environments and S slots, and the throughput of a training with them.

Three trainings of the same seed take turns in one process, round by round, one with a run folder and its checkpoints and two
with neither, so that a machine whose speed drifts slows all alike. Their rounds compute the same, so each pair is a ratio, and
the two that do the same tell how far a ratio is to be trusted.
"""

import hashlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from floors import SEED

from esper.leyline.config.tree import CheckpointConfig, build_config
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.vocabulary import LIVE, Actions, Op, Stage, among
from esper.leyline.progress import Progress
from esper.runs.configuration import training_configs
from esper.runs.train import train
from esper.store.checkpoint import Checkpoints
from esper.store.files import CHECKPOINTS, CONFIG
from esper.store.tensors import Tree, flatten, to_parts
from esper.tamiyo.catalog import get_controller
from esper.tasks.catalog import get_task
from esper.tasks.small import digits_narrow
from esper.tolaria.engine import VectorizedEngine
from faults.records import Record, append, records, table

WIDTH = 16
"""Of the stream and of every block of the host whose population is written."""
SIZES = tuple((envs, slots) for envs in (8, 64, 256) for slots in (2, 4, 8))
REPEATS = 7
CADENCE = 30
"""Default of checkpoint.every_seconds [seconds]."""
SHORT: Mapping[str, Any] = {"ppo": {"rounds": 12}}
"""Of the default training; its rounds of imitation, whose checkpoints are the largest, all come before."""
QUICK: Mapping[str, Any] = {
    "envs": 4,
    "steps": 4,
    "data": {"batches_per_step": 1},
    "reward": {"group_size": 2},
    "ppo": {"rounds": 2, "imitation_rounds": 1, "validate_envs": 2},
}
FILE = "cost.jsonl"


def campaign(out: Path, quick: bool) -> None:
    """Run every measurement that is not yet kept."""
    kept = {record["what"] for record in records(out / FILE)}
    for envs, slots in SIZES[:1] if quick else SIZES:
        what = f"E = {envs}, S = {slots}"
        if what not in kept:
            found = writing(grown_state(envs, slots), out, 2 if quick else REPEATS)
            append(out / FILE, {"what": what, "envs": envs, "slots": slots, **found})
            print(f"{what}: {found}", flush=True)
    if "training" not in kept:
        found = training(get_task("iris" if quick else "repair"), QUICK if quick else SHORT, out)
        append(out / FILE, {"what": "training", **found})
        print(f"training: {found}", flush=True)


def grown_state(envs: int, slots: int) -> Tree:
    """Return what `grow` writes of a population with a seed at every slot: half of them fossilized, half of them live."""
    task = digits_narrow(hidden=(WIDTH,) * slots, width=WIDTH)
    config = build_config(
        task.defaults,
        {"envs": envs, "steps": 100, "data": {"batches_per_step": 1}},
        {"lifecycle": {"max_seeds": slots, "max_training_seeds": slots}},
        {"gates": {"permissive": True, "min_training_steps": 0, "min_holding_steps": 0}},
    )
    engine = VectorizedEngine(task, config)
    engine.reset()
    for op, count in ((Op.GERMINATE, slots), (Op.ADVANCE, slots), (Op.FOSSILIZE, slots // 2)):
        for slot in range(count):
            actions, space = Actions.wait(envs), engine.space
            actions.op[:], actions.slot[:] = op, slot
            actions.blueprint[:] = [entry.name for entry in space.blueprints].index(SEED)
            actions.tempo[:], actions.target[:] = space.tempos.index(1), space.targets.index(1.0)
            _, outcome = engine.step(actions)
            assert outcome.accepted.all(), (op, slot)
    stage = engine.state.seeds.stage[:envs]
    assert (stage == Stage.FOSSILIZED).sum() == envs * (slots // 2)
    assert among(stage, LIVE).sum() == envs * (slots - slots // 2)
    client = get_controller("heuristic", config)
    client.act(engine.view())
    return {"seq": 0, "client": client.state(), "engine": engine.snapshot()}


def writing(state: Tree, out: Path, repeats: int) -> Record:
    """Measure a checkpoint's bytes, and median seconds of its parts: the copy, the bytes and their sha256, and the files."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        (Path(scratch) / CONFIG).write_text("task: digits-narrow\n")
        store = Checkpoints(Path(scratch), CheckpointConfig())
        seconds: dict[str, list[float]] = {"copy": [], "pack": [], "files": []}
        for number in range(1, repeats + 1):
            (tensors, plain), copy = timed(lambda: flatten(state))
            (data, text), pack = timed(lambda tensors=tensors, plain=plain: packed(tensors, plain))
            _, whole = timed(lambda number=number: store.write(number, state))
            for name, value in (("copy", copy), ("pack", pack), ("files", max(whole - copy - pack, 0.0))):
                seconds[name].append(value)
    return {
        "bytes": sum(map(len, data)) + len(text),
        "json_bytes": len(text),
        "arrays": len(tensors),
        **{name: statistics.median(values) for name, values in seconds.items()},
    }


def packed(tensors: Any, plain: Any) -> tuple[list[bytes | memoryview], bytes]:
    """Return the content of both files, with the sums that are taken of them."""
    data, text, digest = to_parts(tensors), json.dumps(plain, allow_nan=False).encode(), hashlib.sha256()
    for part in (*data, text, json.dumps(plain, sort_keys=True).encode()):
        digest.update(part)
    digest.digest()
    return data, text


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Call a function, and return its value and its seconds."""
    begin = time.perf_counter()
    value = call()
    return value, time.perf_counter() - begin


class InTurn(Progress):
    """Lets the next training run after each of its own rounds."""

    def __init__(self, mine: threading.Semaphore, following: threading.Semaphore) -> None:
        self._mine, self._following = mine, following
        self.clock: list[float] = []  # seconds of each turn
        self.own: list[float] = []  # seconds of the processor, likewise

    def begin(self) -> None:
        """Wait for the turn."""
        self._mine.acquire()
        self._mark = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Give it away."""
        self._following.release()

    def round(self, number: int, rounds: int, figures: Mapping[str, float]) -> None:
        """End a turn when a round is over; what follows the round, its checkpoint, belongs to the next turn."""
        self.clock.append(time.perf_counter() - self._mark[0])
        self.own.append(time.process_time() - self._mark[1])
        self.end()
        self.begin()


def training(task: AnyTask, settings: Mapping[str, Any], out: Path) -> Record:
    """Time rounds of the default training with and without a run folder, and the writing of its largest checkpoint."""
    every = {"checkpoint": {"keep": 1000}}  # so that the largest is still there at the end
    configs = training_configs([task], "quick", settings, every)
    turns = [threading.Semaphore(value) for value in (1, 0, 0)]
    watches = [InTurn(mine, following) for mine, following in zip(turns, turns[1:] + turns[:1], strict=True)]
    with tempfile.TemporaryDirectory(dir=out) as scratch, ThreadPoolExecutor(len(turns)) as pool:
        folder = Path(scratch) / "run"
        places = (folder, None, None)
        waiting = [pool.submit(one, task, configs, *each) for each in zip(watches, places, strict=True)]
        for each in waiting:
            each.result()
        paths = sorted((folder / CHECKPOINTS).glob("step-*"), key=lambda path: path.stat().st_mtime)
        sizes = {path: sum(part.stat().st_size for part in path.iterdir()) for path in paths}
        largest = max(sizes, key=lambda path: sizes[path])
        store = Checkpoints(folder, configs[0].checkpoint)
        (folder / CHECKPOINTS / "latest").unlink()
        for path in paths:
            if path != largest:
                path.rename(path.with_name(f".{path.name}"))
        found = store.read(lambda note: None)
        assert found is not None
        parts = writing(found.state, out, REPEATS)
    # (3 trainings, 2 clocks, rounds); the first turn sets everything up
    saved, bare, again = np.array([[watch.clock, watch.own] for watch in watches])[..., 1:]
    return {
        "envs": configs[0].envs,
        "rounds": saved.shape[1],
        "checkpoints": len(paths),
        "round_seconds": float(np.median(bare[0])),
        "with": (saved / bare).tolist(),
        "control": (again / bare).tolist(),
        "smallest": min(sizes.values()),
        **parts,
    }


def one(task: AnyTask, configs: Sequence[Any], watch: InTurn, folder: Path | None) -> None:
    """Train, in turns with the other trainings."""
    try:
        watch.begin()
        train([task], configs, folder, watch)
    finally:
        watch.end()


def section(out: Path) -> list[str]:
    """Return the results as Markdown."""
    rows = records(out / FILE)
    sized = [row for row in rows if "slots" in row]
    lines = ["## The cost of checkpoints", ""] if rows else []
    if sized:
        lines += [
            f"A population of digits hosts of as many blocks of width {WIDTH} as there are slots, with twins, a seed at every "
            "slot of every environment, half of them fossilized and half live "
            f"(medians of {REPEATS}). *Copy*: to memory of its own on the host. *Pack*: to bytes, with their sha256. *Files*: "
            "write, flush to the disk, rename, `latest`, retention.",
            "",
            *table(["E", "S", *TAKEN], [[row["envs"], row["slots"], *taken(row)] for row in sized]),
            "",
        ]
    for row in rows:
        if row["what"] == "training":
            lines += throughput(row)
    return lines


def throughput(row: Record) -> list[str]:
    """Return what a training with checkpoints takes, as Markdown."""
    share = (row["copy"] + row["pack"] + row["files"]) / CADENCE
    return [
        f"The default `esper train` (E = {row['envs']}), whose rounds take {row['round_seconds']:.1f} s, with its run folder "
        f"against without one, {row['rounds']} pairs of rounds in turns, medians and quartiles of the ratios. A checkpoint is "
        f"written at the end of every round besides every {CADENCE} s, {row['checkpoints']} in all, of {row['smallest']:,} to "
        f"{row['bytes']:,} bytes. The last line is reckoned: all the time of the largest one as a share of {CADENCE} s.",
        "",
        *table(
            ["seconds of a round over those without checkpoints", "by the clock", "by the processor"],
            [
                ["without, once more", *map(spread, row["control"])],
                [f"every round, and every {CADENCE} s", *map(spread, row["with"])],
                [f"every {CADENCE} s, reckoned", f"{1 + share:.4f}", ""],
            ],
        ),
        "",
        *table(["largest checkpoint of it", *TAKEN[1:]], [taken(row)]),
        "",
    ]


TAKEN = ["bytes", "of them JSON", "arrays", "copy [ms]", "pack [ms]", "files [ms]"]


def taken(row: Record) -> list[object]:
    """Format the bytes and times of a checkpoint."""
    times = [f"{row[name] * 1e3:.1f}" for name in ("copy", "pack", "files")]
    return [f"{row['bytes']:,}", f"{row['json_bytes']:,}", row["arrays"], *times]


def spread(ratios: Sequence[float]) -> str:
    """Format the median with the quartiles."""
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
