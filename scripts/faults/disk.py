"""Fill a disk at each kind of write of real runs, on a small file system of their own.

The room ends just before a file of that kind is written (faults/victim.py). Either it is back after a while: then the run is to
wait and finish. Or it is not: then the run is to stop with one line and exit code 1 and, with room again, to be resumed. Both
must come to the numbers of the run that always had room.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from esper.store.files import CONFIG
from faults.records import Record, append, records, table
from faults.runs import PATIENCE, Command, differences, left_over, resume_line, straight

FILE = "disk.jsonl"
SIZE = "24m"
BACK = 2.5
"""Seconds after which room is back, where it comes back; runs try again every second."""
OFTEN = ("--set", "checkpoint.every_seconds=0", "--set", "checkpoint.every_steps=2")
GROW = Command("grow iris", ("grow", "iris", "--envs", "2", "--steps", "8", *OFTEN))
TRAIN = Command(
    "train iris",
    (
        *("train", "iris", "--envs", "4", "--steps", "4", "--rounds", "2", *OFTEN, "--set", "reward.group_size=2"),
        *("--set", "ppo={imitation_rounds: 0, validate_every: 1, validate_envs: 2}"),
    ),
)


class Kind(NamedTuple):
    """Describes a kind of write."""

    name: str
    command: Command
    pattern: str  # of the path
    number: int  # which write to such a path


KINDS = (
    Kind("lock", GROW, r"/lock$", 1),
    Kind("config.yaml", GROW, r"/\.config\.yaml\.\w+\.tmp$", 1),
    Kind("environment.json", GROW, r"/\.environment\.json\.\w+\.tmp$", 1),
    Kind("events, the first row", GROW, r"/events\.jsonl$", 1),
    Kind("events, between two checkpoints", GROW, r"/events\.jsonl$", 5),
    Kind("checkpoint, its arrays", GROW, r"/\.step-\d+\.new/state\.safetensors$", 2),
    Kind("checkpoint, state.json", GROW, r"/\.step-\d+\.new/state\.json$", 2),
    Kind("checkpoint, latest", GROW, r"/\.latest\.\w+\.tmp$", 2),
    Kind("network, its arrays", GROW, r"/\.env-001\.new/model\.safetensors$", 1),
    Kind("network, its topology", GROW, r"/\.env-001\.new/topology\.json$", 1),
    Kind("network, the program", GROW, r"/\.env-001\.new/model\.pt2$", 1),
    Kind("summary.json", GROW, r"/\.summary\.json\.\w+\.tmp$", 1),
    Kind("events of a training", TRAIN, r"/events\.jsonl$", 3),
    Kind("checkpoint of a training", TRAIN, r"/\.step-\d+\.new/state\.safetensors$", 2),
    Kind("checkpoint, best", TRAIN, r"/\.best\.\w+\.tmp$", 1),
    Kind("controller, its arrays", TRAIN, r"/\.controller\.new/controller\.safetensors$", 1),
    Kind("controller, the rest", TRAIN, r"/\.controller\.new/controller\.json$", 1),
)
QUICK = (KINDS[5]._replace(command=Command("grow iris", (*GROW.arguments, "--models", "none", "--baselines", "none"))),)


def campaign(out: Path, kinds: tuple[Kind, ...]) -> None:
    """Run every case that is not yet kept."""
    kept = {(record["kind"], record["back"]) for record in records(out / FILE)}
    known = {command: straight(command, out / "straight")[0] for command in dict.fromkeys(k.command for k in kinds)}
    with disk() as (folder, ballast):
        for kind in kinds:
            for back in (True, False):
                if (kind.name, back) not in kept:
                    found = examine(kind, back, folder, ballast, known[kind.command])
                    append(out / FILE, found)
                    if not found["well"]:
                        print(f"NOT WELL: {found}", flush=True)


@contextmanager
def disk() -> Iterator[tuple[Path, Path | None]]:
    """Yield a small file system and the file that fills it, or a plain folder and None where nothing may be mounted."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "disk"
        folder.mkdir()
        mounted = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
        try:
            yield folder, folder / "ballast" if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", str(folder)], check=True)


def examine(kind: Kind, back: bool, folder: Path, ballast: Path | None, known: Path) -> Record:
    """Run a command on a disk that becomes full, and see what is made of it with room again."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    wait = 60 if back else 0
    asked = [*kind.command.line(run)[3:], "--set", f"faults.disk_seconds={wait}"]
    victim = [sys.executable, "-m", "faults.victim", kind.pattern, str(kind.number), str(BACK if back else 0)]
    first = process([*victim, str(ballast or "-"), *asked])
    said = [
        line.replace(str(run), "RUN")
        for line in first.stderr.splitlines()
        if line.startswith(("cannot write", "error: cannot write"))
    ]
    if ballast is not None:
        ballast.unlink(missing_ok=True)
    again = None
    if first.returncode:
        again = process(resume_line(run) if (run / CONFIG).exists() else [sys.executable, "-m", "esper", *asked])
    odd = differences(run, known) + left_over(run)
    code = again.returncode if again is not None else first.returncode
    right = not first.returncode if back else first.returncode == 1 and "Traceback" not in first.stderr
    return {
        "kind": kind.name,
        "back": back,
        "disk": "tmpfs" if ballast is not None else "injected",
        "code": first.returncode,
        "lines": len(said),
        "said": said[:1],
        "code_with_room": code,
        "differences": odd,
        "well": right and len(said) == 1 and not code and not odd,
    }


def process(line: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a process that ends by itself."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        line,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def section(out: Path) -> list[str]:
    """Return the results as Markdown."""
    rows = records(out / FILE)
    if not rows:
        return []
    lines = []
    for name in dict.fromkeys(row["kind"] for row in rows):
        mine = {row["back"]: row for row in rows if row["kind"] == name}
        lines.append([name, *(outcome(mine.get(back)) for back in (True, False))])
    told = [row["said"][0] for row in rows if not row["back"] and row["said"]]
    example = next((line for line in told if "esper resume" in line), "").replace("`", "")
    real = all(row["disk"] == "tmpfs" for row in rows)
    where = f"on a file system of {SIZE.removesuffix('m')} MiB (tmpfs)" if real else "by an injected ENOSPC"
    return [
        "## A full disk",
        "",
        f"{sum(row['well'] for row in rows)} of {len(rows)} cases went as they should, {where} whose room ends just before the "
        f"named file is written. Room is back after {BACK:g} s, or only when the run has ended. One line is said of it, "
        f"in the second case: `{example}`",
        "",
        *table(["written", "room comes back", "room does not come back"], lines),
        "",
    ]


def outcome(row: Record | None) -> str:
    """Say what became of a case, in words."""
    if row is None:
        return "-"
    if not row["well"]:
        return f"NOT WELL: exit {row['code']}, then {row['code_with_room']}, {row['lines']} lines, {row['differences']}"
    return "waited, bitwise equal" if row["back"] else "exit 1, resumed, bitwise equal"
