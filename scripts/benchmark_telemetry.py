"""Measure what telemetry costs: the time of a step, the size of the events and the reads of the device, for each level.

    python scripts/benchmark_telemetry.py                      # a table on stdout
    python scripts/benchmark_telemetry.py --out docs/benchmarks/telemetry.md
    python scripts/benchmark_telemetry.py --sizes --out FILE   # add the bytes of runs of 1,000 steps to the page, by kind of row
    python scripts/benchmark_telemetry.py --journal 2000000    # how fast rows are written, and whether all of them are there
    python scripts/benchmark_telemetry.py --outputs --out FILE # add what an output of 20 ms a row costs

One population per level grows at the same time: every step is taken by all of them in turn, each time in another order, so that
whatever else the machine does falls on all levels alike. A step is that of the engine and the writing of its rows; the time of
the controller is left out. It is measured by the clock and in seconds of the processor that the process spends, which other
processes disturb less. All populations must come to the same parameters, bit for bit.

With `--outputs` whole episodes are played in turn: without an output, with one that sleeps and that the step waits for, with one
in its queue, and with one whose queue is too short.
"""

import argparse
import hashlib
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from device_reads import counted_reads

import esper
from esper.leyline.lifecycle.view import View
from esper.nissa.events import read_events
from esper.nissa.hub import QUEUED, Guarded, Hub, JsonLines, Level, Output
from esper.nissa.rows import LifecycleRow, Row
from esper.tamiyo.catalog import get_controller, with_sensors
from esper.tolaria.engine import Step, VectorizedEngine, decide
from esper.tolaria.journal import Journal

LEVELS: tuple[Level, ...] = ("off", "run", "step", "debug")
TASKS = ("digits", "repair", "digits-narrow")
HEAD = """# Benchmark: telemetry

What `telemetry.level` costs, measured by `scripts/benchmark_telemetry.py`, which explains the method. Ratios compare a level
with `off`: the median of the ratios of single steps, and the ratio of the 95th percentiles, by the clock and in seconds of the
processor. *Rows* are the seconds of the processor in which rows are made and written, as a share of the steps at level `off`: a
sum over the episode, which noise disturbs less than the ratios; `scripts/check_speed.py` fails above 2 % at level `step`. MB is
the size of `events.jsonl`, scaled from these few steps, in which most seeds are planted, to 1,000 steps of 8 environments; the
second table (`--sizes`) has whole runs of 1,000 steps. Reads are reads of the device in a step. Whatever the level, the
populations have the same parameters, bit for bit.
"""


class Turn(NamedTuple):
    """Holds one task at one level, and the seconds that its steps took."""

    engine: VectorizedEngine
    client: Any
    journal: Journal
    path: Path
    views: list[View]  # the last one
    seconds: list[float]  # by the clock
    own: list[float]  # of the processor
    journal_own: list[float]  # those of them that making and writing the rows took


class LevelFigures(NamedTuple):
    """Holds the figures of one level on one task."""

    task: str
    level: str
    median: float  # [ms]
    ratio: float
    p95: float
    own_ratio: float  # of seconds of the processor
    own_p95: float
    journal: float  # its share of a step at level off, of seconds of the processor
    megabytes: float
    reads: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=TASKS, help="names of tasks")
    parser.add_argument("--envs", type=int, default=64, help="environments of a population")
    parser.add_argument("--steps", type=int, default=24, help="steps of an episode")
    parser.add_argument("--controller", default="heuristic", help="name of the controller")
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--quick", action="store_true", help="three environments of iris for four steps")
    parser.add_argument("--sizes", action="store_true", help="runs of 1,000 steps, and nothing else")
    parser.add_argument("--outputs", action="store_true", help="what a slow output costs, and nothing else")
    parser.add_argument(
        "--journal", type=int, metavar="ROWS", help="write so many rows, 64 at a time, and nothing else"
    )
    arguments = parser.parse_args()
    if arguments.journal is not None:
        journal(arguments.journal)
        return
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.tasks, arguments.envs, arguments.steps = ("iris",), 3, 4
    if arguments.sizes or arguments.outputs:
        table = "\n".join(["", *(sizes(arguments.tasks) if arguments.sizes else slow_outputs(arguments))])
        print(table)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(table)
        return
    before = os.getloadavg()[0]
    rows = [row for name in arguments.tasks for row in measured(name, arguments)]
    text = page(rows, arguments, before)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


def journal(count: int, together: int = 64) -> None:
    """Write rows as 64 environments do that change a stage in every step, and read all of them back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        changes = [
            LifecycleRow(
                episode=0,
                step=0,
                env=env,
                slot="block0",
                from_stage="DORMANT",
                to_stage="GERMINATED",
                blueprint="bypass-mlp",
                alpha=0.0,
            )
            for env in range(together)
        ]
        resident = [peak()]
        begin, own = time.perf_counter(), time.process_time()
        with closing(Hub([JsonLines(path)])) as hub:
            for _ in range(count // together):
                hub.extend(changes)
            resident.append(peak())
        clock, own = time.perf_counter() - begin, time.process_time() - own
        written = count // together * together
        gaps = sum(row.seq != number for number, row in enumerate(read_events(path)))
        size = path.stat().st_size / 2**20
        print(
            f"{written:,} rows of {size:,.0f} MiB in {clock:.1f} s: {written / clock:,.0f} rows a second by the clock, "
            f"{written / own:,.0f} by the seconds of the process; {gaps} rows without their number; peak memory "
            f"{resident[0]:.0f} MiB before and {resident[1]:.0f} MiB after; load average {os.getloadavg()[0]:.1f}"
        )


def peak() -> float:
    """Return the largest resident size of this process so far [MiB]; on macOS the unit of the system is bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measured(name: str, arguments: argparse.Namespace) -> list[LevelFigures]:
    """Measure every level on a task; the levels take turns, step by step."""
    with tempfile.TemporaryDirectory() as folder:
        turns = {
            level: start_turn(name, level, arguments.envs, arguments.steps, arguments.controller, Path(folder))
            for level in LEVELS
        }
        for step in range(arguments.steps):
            for at in range(len(LEVELS)):
                take(turns[LEVELS[(step + at) % len(LEVELS)]])
        states = {level: fingerprint(turn.engine) for level, turn in turns.items()}
        assert len(set(states.values())) == 1, f"levels differ in their results: {states}"
        off, own_off = np.array(turns["off"].seconds), np.array(turns["off"].own)
        shares = journal_shares(turns)
        share = 1000 / arguments.steps * 8 / arguments.envs
        rows = []
        for level, turn in turns.items():
            seconds, own = np.array(turn.seconds), np.array(turn.own)
            size = turn.path.stat().st_size if turn.path.exists() else 0
            rows.append(
                LevelFigures(
                    name,
                    level,
                    float(np.median(seconds)) * 1000,
                    float(np.median(seconds / off)),
                    float(np.percentile(seconds, 95) / np.percentile(off, 95)),
                    float(np.median(own / own_off)),
                    float(np.percentile(own, 95) / np.percentile(own_off, 95)),
                    shares[level],
                    size * share / 1e6,
                    reads(name, level, arguments.controller, Path(folder)),
                )
            )
        return rows


def journal_shares(turns: Mapping[Level, Turn]) -> dict[Level, float]:
    """Return, by level, the processor seconds that rows take in an episode as a share of those of its steps at level off."""
    whole, least = sum(turns["off"].own), sum(turns["off"].journal_own)
    return {level: (sum(turn.journal_own) - least) / whole for level, turn in turns.items()}


def share_of_rows(name: str, envs: int, steps: int) -> float:
    """Measure what the rows of level step take, as `journal_shares` returns it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        levels: tuple[Level, ...] = ("off", "step")
        turns = {level: start_turn(name, level, envs, steps, "heuristic", Path(folder)) for level in levels}
        for _ in range(steps):
            for turn in turns.values():
                take(turn)
        return journal_shares(turns)["step"]


def start_turn(
    name: str, level: Level, envs: int, steps: int, controller: str, folder: Path, outputs: Sequence[Output] = ()
) -> Turn:
    """Start an episode of a population of a task. outputs: beside the file of the events."""
    task = esper.get_task(name)
    # on the CPU, also beside a GPU: the seconds of the processor are those of the whole step there
    asked = {"envs": envs, "steps": steps, "device": "cpu", "baselines": [], "telemetry": {"level": level}}
    config = esper.build_config(task.defaults, asked)
    client = get_controller(controller, config)
    engine = VectorizedEngine(task, with_sensors(config, client))
    path = folder / f"{name}-{level}-{envs}.jsonl"
    path.unlink(missing_ok=True)
    engine.reset()
    return Turn(
        engine, client, Journal(engine, Hub([JsonLines(path), *outputs], level)), path, [engine.view()], [], [], []
    )


def take(turn: Turn) -> None:
    """Take one step of a population, and record its seconds."""
    (view,) = turn.views
    decision = decide(turn.client, view)
    begin, own = time.perf_counter(), time.process_time()
    turn.journal.going(view)
    stepping = time.process_time()
    after, outcome = turn.engine.step(decision.actions, decision.reasons)
    stepped = time.process_time()
    turn.journal.stepped(Step(view, outcome, after, 0.0, 0.0, decision))
    done = time.process_time()
    turn.journal_own.append(done - stepped + stepping - own)
    turn.own.append(done - own)
    turn.seconds.append(time.perf_counter() - begin)
    turn.views[0] = after
    turn.client.store(outcome)


def reads(name: str, level: Level, controller: str, folder: Path) -> float:
    """Count the reads of the device in a step, as mean over eight steps of two environments."""
    turn = start_turn(name, level, 2, 8, controller, folder)
    with counted_reads() as found:
        for _ in range(8):
            take(turn)
    return len([read for read in found if read.site.startswith("runtime.py")]) / 8


def fingerprint(engine: VectorizedEngine) -> str:
    """Hash the stages and every parameter of the hosts."""
    digest = hashlib.sha256(engine.state.seeds.stage.tobytes())
    digest.update(engine.population.body.host.columns["value"].detach().numpy().tobytes())
    return digest.hexdigest()


def sizes(names: Sequence[str], steps: int = 1000, envs: int = 8) -> list[str]:
    """Tabulate the bytes of events.jsonl at level `step` in one run of each task, by kind of row."""
    lines = [
        f"Bytes of `events.jsonl` at level `step` in a run of {steps:,} steps of {envs} environments:\n",
        "| task | MB | rows | by kind [kB] |",
        "|---|---|---|---|",
    ]
    for name in names:
        kinds, count = Counter[str](), 0
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {"envs": envs, "steps": steps, "device": "cpu", "telemetry": {"level": "step"}}
            settings |= {"baselines": [], "models": "none"}
            esper.grow(name, settings, controller="heuristic", run=Path(folder) / "run", progress=False)
            for line in (Path(folder) / "run" / "events.jsonl").open("rb"):
                kinds[msgspec.json.decode(line)["kind"]] += len(line)
                count += 1
        shares = ", ".join(f"{kind} {size / 1e3:.0f}" for kind, size in kinds.most_common() if size >= 1000)
        lines.append(f"| {name} | {kinds.total() / 1e6:.2f} | {count:,} | {shares} |")
    return [*lines, ""]


class Sleeps:
    """Takes as long for each row as an output to a service on a network does."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds, self.seen = seconds, list[int]()

    def write(self, row: Row) -> None:
        time.sleep(self.seconds)
        self.seen.append(row.seq)

    def close(self) -> None:
        pass


OUTPUTS: dict[str, Callable[[Sleeps], list[Output]]] = {
    "none": lambda sleeps: [],
    "the step waits for it": lambda sleeps: [sleeps],
    f"a queue of {QUEUED:,} rows": lambda sleeps: [Guarded(sleeps)],
    "a queue of 8 rows": lambda sleeps: [Guarded(sleeps, most=8)],
}


def slow_outputs(arguments: argparse.Namespace) -> list[str]:
    """Tabulate the time of an episode with an output of 20 ms a row, beside an episode without one."""
    lines = [
        "What an output that sleeps 20 ms a row costs (`--outputs`): "
        f"{arguments.envs} environments and their twins, {arguments.steps} steps, medians of {REPEATS} episodes that were "
        "played in turn; the ratio is that to the episode without an output in the same turn, by the clock and in seconds of "
        f"the processor. Every output got every row in order, once; load average {os.getloadavg()[0]:.1f} before the start.\n",
        "| task | output | loop [s] | ratio | ratio, processor | rows | waits for room | waited [s] | at the end [s] |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in arguments.tasks:
        found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in OUTPUTS}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(REPEATS):
                for at in range(len(OUTPUTS)):
                    kind = list(OUTPUTS)[(turn + at) % len(OUTPUTS)]  # each in another order
                    found[kind].append(episode(name, arguments, Path(folder), OUTPUTS[kind]))
        alone = np.array(found["none"])
        for kind, figures in found.items():
            loop, _, rows, waits, waited, after = np.median(figures, 0).tolist()
            ratios = " | ".join(f"{ratio:.2f}" for ratio in np.median(np.array(figures)[:, :2] / alone[:, :2], 0))
            lines.append(
                f"| {name} | {kind} | {loop:.2f} | {ratios} | {rows:.0f} | {waits:.0f} | {waited:.2f} | {after:.2f} |"
            )
    return [*lines, ""]


REPEATS = 8


def episode(
    name: str, arguments: argparse.Namespace, folder: Path, make: Callable[[Sleeps], list[Output]]
) -> tuple[float, ...]:
    """Play an episode.

    Returns its seconds, those of the processor, its rows, the waits for room and their seconds, and the seconds of closing.
    """
    sleeps = Sleeps()
    turn = start_turn(name, "step", arguments.envs, arguments.steps, arguments.controller, folder, make(sleeps))
    begin, own = time.perf_counter(), time.process_time()
    for _ in range(arguments.steps):
        take(turn)
    looped, own, hub = time.perf_counter(), time.process_time() - own, turn.journal.hub
    waits = hub.waits() or {"waits": 0, "waiting_seconds": 0.0}
    hub.close()
    closed = time.perf_counter()
    if len(hub.outputs) > 1:
        assert sleeps.seen == list(range(hub.seq)), "a row is missing, or came twice or too early"
    return looped - begin, own, hub.seq, waits["waits"], waits["waiting_seconds"], closed - looped


def page(rows: list[LevelFigures], arguments: argparse.Namespace, load: float) -> str:
    """Return the page with the table of levels."""
    lines = [
        f"| {row.task} | {row.level} | {row.median:.1f} | {row.ratio:.3f} | {row.p95:.3f} | {row.own_ratio:.3f} "
        f"| {row.own_p95:.3f} | {row.journal:.2%} | {row.megabytes:.2f} | {row.reads:g} |"
        for row in rows
    ]
    return "\n".join(
        [
            HEAD,
            f"{arguments.envs} environments and their twins, {arguments.steps} steps, controller {arguments.controller}; torch "
            f"{torch.__version__} with one thread on {os.cpu_count()} cores; load average {load:.1f} before the start and "
            f"{os.getloadavg()[0]:.1f} at the end; above 1 the ratios hold the noise of the other processes. It "
            "has not run on a GPU.\n",
            "| task | level | median step [ms] | median ratio | p95 ratio | median ratio, processor | p95 ratio, processor "
            "| rows, processor | MB | reads |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
