"""Record what a fixed set of runs comes to as hashes, and check that the code of today comes to the same, bit for bit.

    python scripts/golden_runs.py record            # writes docs/benchmarks/golden.json
    python scripts/golden_runs.py check             # exit code 1 where a hash differs
    python scripts/golden_runs.py check grow-iris-heuristic train-repair

A hash covers the summary and the events without their times, every exported network, and the trained controller. Every run
is played twice: straight through, and interrupted in the middle and resumed; both must come to the same hash. The hashes
hold for one kind of processor and one version of torch, which the file names: on another machine, record first.
"""

import argparse
import hashlib
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from faults.runs import timeless
from golden.runs import RUNS, Golden

from esper.nissa.files import EVENTS, MODELS, SUMMARY
from esper.tamiyo.catalog import FOLDER

RECORDED = Path(__file__).parents[1] / "docs" / "benchmarks" / "golden.json"
PATHLIKE = ("run", "folder")
"""Keys of a summary or an event whose value is the place of a folder."""


def main() -> None:
    """Record or check, by the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("names", nargs="*", metavar="RUN", help="runs by name; all of them where none is named")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [run for run in RUNS if not arguments.names or run.name in arguments.names]
    if unknown := sorted(set(arguments.names) - {run.name for run in RUNS}):
        parser.error(f"unknown run {unknown[0]}; the runs are {', '.join(run.name for run in RUNS)}")
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"hashes": {}}
    found, odd = {}, []
    for run in chosen:
        straight, resumed = play(run)
        found[run.name] = straight
        if straight != resumed:
            odd.append(f"{run.name}: the resumed run differs in {', '.join(differing(straight, resumed))}")
        if arguments.command == "check" and straight != known["hashes"].get(run.name):
            odd.append(
                f"{run.name}: {', '.join(differing(straight, known['hashes'].get(run.name, {})))} not as recorded"
            )
        print(f"{run.name:32} {'differs' if odd and odd[-1].startswith(run.name + ':') else 'equal'}", flush=True)
    if arguments.command == "record" and not odd:
        RECORDED.write_text(json.dumps({"machine": machine(), "hashes": known["hashes"] | found}, indent=2) + "\n")
    elif known.get("machine") != machine():
        print(f"recorded on {known.get('machine')}; this is {machine()}", file=sys.stderr)
    print("\n".join(odd), file=sys.stderr)
    sys.exit(bool(odd))


def machine() -> dict[str, str]:
    """What the last bits of a number depend on."""
    return {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def play(run: Golden) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes of a run that goes straight through, and of one that is interrupted in the middle and resumed."""
    scratch = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        run.straight(scratch / "straight")
        run.resumed(scratch / "resumed")
        return hashes(scratch / "straight"), hashes(scratch / "resumed")
    finally:
        shutil.rmtree(scratch)


def hashes(folder: Path) -> dict[str, str]:
    """The hash of each part of a run folder."""
    parts: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.name in (SUMMARY, "evaluation.json"):
            parts[path.name] = packed(json.loads(path.read_text()))
    if (folder / EVENTS).exists():
        rows = [json.loads(line) for line in (folder / EVENTS).open()]
        parts[EVENTS] = packed([row for row in rows if row["kind"] not in RESUMING])
    for part in (MODELS, FOLDER):
        for path in sorted((folder / part).rglob("*")):
            if path.is_file() and path.suffix != ".pt2":
                parts[str(path.relative_to(folder))] = path.read_bytes()
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in parts.items()}


RESUMING = ("resumed",)
"""Kinds of events that only a run that was interrupted has."""


def packed(value: Any) -> bytes:
    """JSON without times and places, as bytes."""
    return json.dumps(placeless(timeless(value)), sort_keys=True).encode()


def placeless(value: Any) -> Any:
    """JSON without the places of folders, and without the sequence numbers that a resumption moves."""
    if isinstance(value, Mapping):
        return {name: placeless(item) for name, item in value.items() if name not in (*PATHLIKE, "seq", "environment")}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [placeless(item) for item in value]
    return value


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The parts whose hashes differ."""
    return [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]


if __name__ == "__main__":
    main()
