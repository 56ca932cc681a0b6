"""Send SIGKILL at any moment to runs that `esper resume` takes up, and to commands that are given again, until they finish.

The first moment of a run is uniform between the appearance of config.yaml, or of the folder of another command, and the time at
which the straight run ended. The process that goes on has its own moment, uniform over as long from its start, so its start-up is
hit too; where it comes to its end before that, the run is finished. A command that is given again is killed at most CHAIN times,
as one that begins anew would never end. *Aimed* kills wait, from such a moment, for the next temporary file, and come within AIM
of that, as writing takes too small a part of the time to be hit often by chance.
"""

import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from esper.store.checkpoint import LATEST
from esper.store.files import CHECKPOINTS, MODELS
from faults.records import Record, append, records, table
from faults.runs import (
    PATIENCE,
    Command,
    differences,
    left_over,
    outcome_differences,
    reached,
    refusals,
    start,
    straight,
)

OFTEN = ("--set", "checkpoint.every_seconds=2")
LEARN = ("--set", "ppo={imitation_rounds: 2, validate_every: 2, validate_envs: 16}")
HERE = Path(__file__).parents[1]
ESPER = (sys.executable, "-m", "esper")
FEW = ("--instances", "2", "--seeds", "1", "--baselines", "same-size")
PRUNED = HERE / "faults" / "pruned.py"
SHARDS, WORKERS = ("--set", "shards=2"), ("--workers", "2")
VICTIMS = (
    Command("train repair", ("train", "repair", "--envs", "16", "--rounds", "3", *LEARN, *OFTEN)),
    Command(
        "train repair digits-narrow",
        ("train", "repair", "digits-narrow", "--envs", "8", "--rounds", "2", *LEARN, *OFTEN),
    ),
    Command("grow digits-narrow", ("grow", "digits-narrow", "--envs", "24", "--steps", "120", *OFTEN)),
    Command(
        "grow repair",
        ("grow", "repair", "--envs", "32", "--steps", "80", "--controller", "random-valid", "--models", "best", *OFTEN),
    ),
    Command(
        "train iris --workers 2",
        ("train", "iris", "--envs", "16", "--steps", "12", "--rounds", "4", *WORKERS, *SHARDS, *LEARN, *OFTEN),
        resumed=WORKERS,
    ),
    Command("stream", (*ESPER, "stream", "adamw", "reset-blocks", "--streams", "4", "--updates", "1200"), True),
    Command("heal", (*ESPER, "heal", f"{PRUNED}:network", "--data", f"{PRUNED}:images", "--budget", "0.2"), True),
    Command("eval", (*ESPER, "eval", "--tasks", "iris", *FEW, "--set", "steps=12"), True),
    Command("own loop with a moving average", (sys.executable, str(HERE / "faults" / "own_loop.py")), True),
)
QUICKLY = ("--set", "checkpoint.every_seconds=0.2")
QUICK = (
    Command(
        "train iris",
        (
            *("train", "iris", "--envs", "4", "--steps", "8", "--rounds", "1", *QUICKLY),
            *("--set", "reward.group_size=2", "--set", "ppo={imitation_rounds: 1, validate_envs: 2}"),
        ),
    ),
    Command("grow iris", ("grow", "iris", "--envs", "4", "--steps", "60", "--models", "best", *QUICKLY)),
)
CHAIN = 3
"""Most kills of one command that is given again."""
AIM = 0.03
"""An aimed kill comes up to so many seconds after a checkpoint folder was begun."""
STARTING, WRITING, EXPORTING = (
    "a resume, before it had read its checkpoint",
    "writing a checkpoint",
    "evaluating or exporting",
)
FIRST, STEPPING = "before the first checkpoint", "stepping, updating or validating"
MOMENTS = (FIRST, STEPPING, WRITING, STARTING, EXPORTING)
FILE = "kill.jsonl"


class Kill(NamedTuple):
    """Describes when a process is to be killed."""

    after: float  # seconds from the appearance of config.yaml
    aimed: bool  # at the next checkpoint after that, so many seconds after its folder appears
    delay: float


class Budget:
    """Holds the kills that are still to be made, shared by threads."""

    def __init__(self, uniform: int, aimed: int) -> None:
        self._left = {False: uniform, True: aimed}
        self._lock = threading.Lock()

    def take(self, rng: np.random.Generator, seconds: float) -> Kill | None:
        """Draw a kill of one of the kinds that are left; None where none is left."""
        with self._lock:
            left = sum(self._left.values())
            if not left:
                return None
            aimed = bool(rng.integers(left) < self._left[True])
            self._left[aimed] -= 1
        return Kill(rng.uniform(0, seconds), aimed, rng.uniform(0, AIM))

    def give_back(self, kill: Kill) -> None:
        """Put a kill back whose process had come to its end before."""
        with self._lock:
            self._left[kill.aimed] += 1

    def spent(self) -> bool:
        """Return whether every kill was made."""
        with self._lock:
            return not any(self._left.values())


class Campaign:
    """Kills victims in threads, a process each."""

    def __init__(self, out: Path, commands: Sequence[Command], uniform: int, aimed: int, seed: int) -> None:
        self.out, self.commands, self.seed = out, commands, seed
        self.done = records(out / FILE)
        names = {command.name for command in commands}
        kills = Counter(kill["aimed"] for row in self.done if row["victim"] in names for kill in row["kills"])
        self.budget = Budget(max(uniform - kills[False], 0), max(aimed - kills[True], 0))
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def run(self, jobs: int) -> None:
        """Run victims in threads, one after another, until every kill was made."""
        scratch = self.out / "victims"
        shutil.rmtree(scratch, ignore_errors=True)  # what a campaign that was broken off left
        scratch.mkdir(parents=True)
        with ThreadPoolExecutor(jobs) as pool:
            try:
                known = dict(
                    zip(
                        self.commands,
                        pool.map(lambda each: straight(each, self.out / "straight"), self.commands),
                        strict=True,
                    )
                )
                done = {row["number"] for row in self.done}
                numbers = itertools.filterfalse(done.__contains__, itertools.count())
                working = [pool.submit(self._work, numbers, known, scratch) for _ in range(jobs)]
                for each in working:
                    each.result()
            finally:
                self._stopped.set()
                for process in list(self._processes):
                    process.kill()

    def _work(self, numbers: Iterator[int], known: dict[Command, tuple[Path, float]], scratch: Path) -> None:
        while not (self.budget.spent() or self._stopped.is_set()):
            number = next(numbers)
            command = self.commands[number % len(self.commands)]
            folder = Path(tempfile.mkdtemp(prefix=f"{number:04d}-", dir=scratch))
            record = self._victim(number, command, folder, *known[command])
            if self._stopped.is_set():
                return
            append(self.out / FILE, record)
            print(line(record), flush=True)
            if well(record):
                shutil.rmtree(folder)

    def _victim(self, number: int, command: Command, folder: Path, known: Path, seconds: float) -> Record:
        """Kill and restart one run until it finishes or the kills are spent."""
        run, rng, kills = folder / "run", np.random.default_rng((self.seed, number)), []
        scratch = folder / "temporary"
        scratch.mkdir()
        begin = time.monotonic()
        while not self._stopped.is_set():
            spared = command.again and len(kills) == CHAIN
            kill = None if spared else self.budget.take(rng, seconds)
            stale, resuming = scratch_of(run), command.begun(run)
            with open(folder / f"told-{len(kills)}", "wb") as told:
                process = start(command.next(run), told, scratch)
                self._processes.add(process)
                code = shot(process, command, run, stale, kill)
                self._processes.discard(process)
            heard = (folder / f"told-{len(kills)}").read_text()
            if code != -signal.SIGKILL or kill is None:
                if kill is not None:
                    self.budget.give_back(kill)
                break
            kills.append(
                {
                    "aimed": kill.aimed,
                    "after": round(kill.after, 3),
                    "during": what_was_on(command, run, stale, resuming, heard),
                    "refused": [] if command.again else refusals(run),
                }
            )
            if command.whole(run):
                code = 0
                break
        return {
            "number": number,
            "victim": command.name,
            "kills": kills,
            "code": code,
            "told": heard[-500:] if code else "",
            "differences": (outcome_differences if command.again else differences)(run, known),
            "left_over": [*left_over(run), *(path.name for path in scratch.iterdir())],
            "seconds": round(time.monotonic() - begin, 1),
        }


def shot(
    process: subprocess.Popen[bytes], command: Command, run: Path, stale: frozenset[tuple[str, int]], kill: Kill | None
) -> int:
    """Wait for the moment of the kill, or for the end of the process; returns its exit code."""
    if kill is None:
        return process.wait(PATIENCE)
    while not command.begun(run) and process.poll() is None:
        time.sleep(0.005)
    try:
        return process.wait(kill.after)
    except subprocess.TimeoutExpired:
        pass
    if kill.aimed:
        while scratch_of(run) <= stale and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(kill.delay)
    process.send_signal(signal.SIGKILL)
    return process.wait(PATIENCE)


def scratch_of(run: Path) -> frozenset[tuple[str, int]]:
    """List what stands under a temporary name in the folder or among the checkpoints, by name and inode."""
    found = set()
    for path in (*run.glob(".*"), *run.glob("*/.*"), *run.glob("*.new")):
        try:
            found.add((path.name, path.stat().st_ino))
        except FileNotFoundError:  # it has just got its name
            continue
    return frozenset(found)


def what_was_on(command: Command, run: Path, stale: frozenset[tuple[str, int]], resuming: bool, heard: str) -> str:
    """Tell what a process was doing when it was killed, by what it left and said."""
    if command.again:
        return WRITING if scratch_of(run) - stale else STEPPING if heard.strip() else STARTING
    if resuming and "going on after step" not in heard and "starting again" not in heard:
        return STARTING
    numbers = [int(path.name.removeprefix("step-")) for path in (run / CHECKPOINTS).glob("step-*")]
    if scratch_of(run) - stale or max(numbers, default=-1) > reached(run):
        return WRITING
    if "exporting" in heard or (run / MODELS).exists():
        return EXPORTING
    return STEPPING if (run / CHECKPOINTS / LATEST).exists() else FIRST


def well(record: Record) -> bool:
    """Return whether a victim came to the numbers of the straight run and nothing had to be refused."""
    wrong = record["code"] or record["differences"] or record["left_over"]
    return not (wrong or any(kill["refused"] for kill in record["kills"]))


def line(record: Record) -> str:
    """Describe a victim in one line."""
    end = "bitwise equal" if well(record) else f"exit code {record['code']}, differs in {record['differences']}"
    return f"{record['number']:4} {record['victim']}: {len(record['kills'])} kills, {record['seconds']:.0f} s, {end}"


def section(out: Path) -> list[str]:
    """Return the results as Markdown."""
    rows = records(out / FILE)
    if not rows:
        return []
    lines: list[list[object]] = []
    for name in [*dict.fromkeys(row["victim"] for row in rows), ""]:
        own = [row for row in rows if name in (row["victim"], "")]
        kills = [kill for row in own for kill in row["kills"]]
        lines.append(
            [
                name if name.startswith("own") else f"`esper {name}`" if name else "all",
                len(own),
                sum(not kill["aimed"] for kill in kills),
                sum(kill["aimed"] for kill in kills),
                max(len(row["kills"]) for row in own),
                sum(bool(kill["refused"]) for kill in kills),
                sum(bool(row["code"]) for row in own),
                sum(bool(row["differences"]) for row in own),
                sum(bool(row["left_over"]) for row in own),
            ]
        )
    during = Counter((kill["during"], kill["aimed"]) for row in rows for kill in row["kills"])
    return [
        "## Kills",
        "",
        "SIGKILL of the process of `esper train` or `esper grow`, and of the `esper resume` that takes the run up, until the run "
        "finishes. The moments are uniform from the appearance of `config.yaml`, or the start of `esper resume`, over as long as "
        f"the run takes undisturbed; *aimed* ones come within {AIM * 1000:.0f} ms of the beginning of a checkpoint folder or "
        "another temporary file. After every kill the checkpoints are read with the library's reader. A run *differs* where a "
        "file of its networks or its controller, a tensor of its last checkpoint (parameters, moments, rollouts), the summary or "
        "the events but for times are not those of the run that was never killed, bit for bit, or `seq` has a gap.",
        "",
        "`esper stream`, `heal` and `eval`, and a loop of one's own with `esper.Growth`, an `AveragedModel` and a state that it "
        f"saves itself, are killed up to {CHAIN} times and given again with the same folder: `stream` goes on from the batches "
        "that it has played, `eval` from the networks that it has grown, the loop from its file, and `heal` begins anew. They "
        "*differ* where a file is missing or more, or where records, arrays or networks, but for times, are not those of the "
        "command that was never killed. *Temporary files* are those in the folder and in TMPDIR after the end.",
        "",
        *table(
            [
                *("run", "runs", "kills", "aimed kills", "most of one run", "unreadable checkpoints"),
                *("runs that failed", "runs that differ", "runs that left temporary files"),
            ],
            lines,
        ),
        "",
        *table(
            ["killed during", "kills", "aimed kills"],
            [[name, during[name, False], during[name, True]] for name in MOMENTS],
        ),
        "",
    ]  # fmt: skip
