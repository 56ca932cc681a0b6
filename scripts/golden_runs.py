"""Record the results of a fixed set of runs as hashes, and check that the code of today still comes to the same, bit for bit.

    python scripts/golden_runs.py check                           # all runs; exit code 1 where a hash differs
    python scripts/golden_runs.py check grow-iris-heuristic       # some of them, by name
    python scripts/golden_runs.py record [RUN ...]                # writes their hashes to scripts/golden_runs.json

Every run is made twice: once without interruption, and once from a checkpoint in its middle (an evaluation: from half of what it
had grown). Both must come to the same hashes. Hashed are each entry of the summary and each kind of event, without times, places
and versions, the weights and the topology of each exported network, and the files of a trained controller; so a difference has
the name of what differs. The program `model.pt2` is left out, as it holds the line numbers of the source. The runs of `heal` and
`heal-bytes` and the evaluation with opponents need esper-bench (`pip install --editable bench`); their hosts are trained anew, so
that a change of their weights is found too.

The last bits of a sum depend on the processor and on the release of torch, so hashes are recorded for each kind of machine, and
`check` ends with exit code 2 on a kind that has none: there, `record` at an older revision first.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from faults.runs import of_any_process, timeless

import esper
from esper.store.checkpoint import LATEST
from esper.store.files import CHECKPOINTS, EVALUATION, EVENTS, MODELS, SUMMARY, VARIABLE
from esper.tamiyo.catalog import FOLDER

RECORDED = Path(__file__).with_suffix(".json")
SEARCHED = r" \((\d+\.\d seconds|read from the results of an earlier call)\)"
"""How an evaluation says what the search of a plan took."""

Hashes = dict[str, str]


class Golden(NamedTuple):
    """Describes one run: how it is made in a folder, how it goes on there, and how a folder is set back to its middle."""

    name: str
    start: Callable[[Path], Any]
    resume: Callable[[Path], Any]
    rewind: Callable[[Path], None]
    program: str  # the file that holds the figures of the whole


def main() -> None:
    """Record or check, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("names", nargs="*", metavar="RUN", help="runs by name; all where none is named")
    parser.add_argument("--file", type=Path, default=RECORDED, help="where the hashes are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = {run.name: run for run in golden_runs()}
    for name in arguments.names:
        if name not in runs:
            parser.error(f"unknown run {name!r}; the runs are {', '.join(runs)}")
    recorded: dict[str, dict[str, Hashes]] = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    known = recorded.setdefault(machine(), {})
    if arguments.command == "check" and not known:
        parser.error(f"{arguments.file} has no hashes of {machine()}; record them at a revision that you trust")
    odd = 0
    for name in arguments.names or runs:
        with tempfile.TemporaryDirectory(prefix="golden-cache-") as cache:
            os.environ[VARIABLE] = cache  # so that the code that is checked trains the hosts
            found, resumed = play(runs[name])
        said = differing("resumed", found, resumed)
        if arguments.command == "check":
            said += differing("recorded", found, known.get(name, {}))
        elif not said:
            known[name] = found
            write(arguments.file, recorded)
        odd += bool(said)
        print(f"{name:32} {len(found):4} hashes {'; '.join(said) or 'equal'}", flush=True)
    sys.exit(bool(odd))


def machine() -> str:
    """Name what the last bits of a figure depend on."""
    return f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()}, {processor()}"


def processor() -> str:
    """Return the name of the processor, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )


def golden_runs() -> list[Golden]:
    """List three controllers on six tasks, three trainings and an evaluation; with esper-bench, its tasks and opponents too."""
    tasks = {
        "digits": lambda: esper.get_task("digits"),
        "spirals-narrow": lambda: esper.get_task("spirals-narrow"),
        "repair": lambda: esper.get_task("repair"),
        "digits-image-narrow": lambda: esper.get_task("digits-image-narrow"),
        "iris": lambda: esper.get_task("iris"),
        "own-regression": own_task,
    }
    short = {"digits-image-narrow": 16}
    grown = [
        grow(name, task, controller, short.get(name, 24))
        for name, task in tasks.items()
        for controller in ("heuristic", "schedule", "random-valid")
    ]
    trained = [train("repair"), train("iris"), train("repair", "digits-narrow")]
    runs = [*grown, *trained, evaluation("eval-repair-rules", esper.evaluate)]
    if find_spec("esper_bench") is None:
        print("the runs of heal, heal-bytes and opponents are left out: pip install --editable bench", file=sys.stderr)
        return runs
    from esper_bench.evaluation.rivals import evaluate

    runs += [grow("heal", lambda: esper.get_task("heal"), controller, 40) for controller in ("tree", "sites")]
    runs += [grow("heal-bytes", lambda: esper.get_task("heal-bytes"), "uniform", 12)]
    return [*runs, evaluation("eval-repair", partial(evaluate, search_episodes=60))]


def own_task() -> esper.Task:
    """Make a regression on a host with dropout, whose modules run one environment after the other."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()

    def host() -> esper.SegmentedHost:
        blocks = [torch.nn.Sequential(torch.nn.Linear(10, 12), torch.nn.Tanh())]
        blocks += [
            torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Dropout(0.2)) for _ in range(2)
        ]
        slots = [esper.SlotSpec(f"block{each}", after=each, width=12) for each in range(3)]
        return esper.SegmentedHost([*blocks, torch.nn.Linear(12, 1)], slots)

    target = ((data.target - data.target.mean()) / data.target.std())[:, None].astype("float32")
    return esper.task("own", data.data, target, host=host, standardize=True, defaults={"mapping": "loop"})


def grow(name: str, task: Callable[[], esper.Task], controller: str, steps: int) -> Golden:
    """Describe the run of a population that a controller grows."""
    config = {
        "envs": 4,
        "steps": steps,
        "checkpoint": {"every_steps": steps // 2, "every_seconds": 0, "keep": 9},
    }

    def start(folder: Path) -> None:
        chosen, client = task(), controller
        if controller == "schedule":
            path = folder.with_name("plan.yaml")
            path.write_text(schedule(chosen))
            client = str(path)
        esper.grow(chosen, config, controller=client, run=folder, progress=False)

    def resume(folder: Path) -> None:
        esper.resume(folder, task=task(), progress=False)

    return Golden(f"grow-{name}-{controller}", start, resume, rewind_run, SUMMARY)


def schedule(task: esper.Task | esper.Mixture) -> str:
    """Return the text of a plan: one seed that is kept, one that is pruned while it is on trial, in the first and last slot."""
    slots, menu = [slot.name for slot in task.largest().slots], task.menu
    return f"""
- {{at: 0, op: GERMINATE, slot: {slots[0]}, blueprint: {menu[0]}, keep: true}}
- {{at: 1, op: GERMINATE, slot: {slots[-1]}, blueprint: {menu[-1]}, tempo: 4}}
- {{at: 6, op: ADVANCE, slot: {slots[-1]}}}
- {{at: 12, op: PRUNE, slot: {slots[-1]}}}
"""


def train(*names: str) -> Golden:
    """Describe a training of six rounds with the other settings of the preset `quick`."""
    config = {
        "envs": 16,
        "ppo": {"rounds": 6, "imitation_rounds": 2},
        "checkpoint": {"every_steps": 1, "every_seconds": 0, "keep": 999},
    }

    def start(folder: Path) -> None:
        esper.train([esper.get_task(name) for name in names], config, run=folder, progress=False)

    def resume(folder: Path) -> None:
        esper.resume(folder, progress=False)

    return Golden(f"train-{'-'.join(names)}", start, resume, rewind_run, SUMMARY)


def evaluation(name: str, evaluate: Callable[..., Any]) -> Golden:
    """Describe an evaluation of the heuristic and those that `evaluate` adds, on a few held-out instances of `repair`."""

    def start(folder: Path) -> None:
        evaluate("heuristic", "repair", instances=6, seeds=2, out=folder, overwrite=True, progress=False)

    def rewind(folder: Path) -> None:
        (folder / EVALUATION).unlink()
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix == ".json")
        for path in files[len(files) // 2 :]:
            path.unlink()

    return Golden(name, start, start, rewind, EVALUATION)


def rewind_run(folder: Path) -> None:
    """Set a finished run back to the checkpoint in the middle of those it has."""
    (folder / SUMMARY).unlink()
    shutil.rmtree(folder / MODELS, ignore_errors=True)
    steps = sorted(path for path in (folder / CHECKPOINTS).iterdir() if path.is_dir())
    middle = (len(steps) - 1) // 2
    for path in steps[middle + 1 :]:
        shutil.rmtree(path)
    (folder / CHECKPOINTS / LATEST).write_text(steps[middle].name + "\n")


def play(run: Golden) -> tuple[Hashes, Hashes]:
    """Return the hashes of a run without interruption, and those of its second half made again from a checkpoint."""
    scratch = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        folder = scratch / "run"
        run.start(folder)
        straight = hashes(folder, run.program)
        run.rewind(folder)
        run.resume(folder)
        return straight, hashes(folder, run.program)
    finally:
        shutil.rmtree(scratch)


def hashes(folder: Path, figures: str) -> Hashes:
    """Hash each part of a run folder, by its name."""
    parts: dict[str, bytes] = {}
    for entry, value in json.loads((folder / figures).read_text()).items():
        if entry != "environment" and timeless({entry: value}):
            parts[f"{figures}: {entry}"] = packed(value, folder.parent)
    kinds: dict[str, list[Any]] = defaultdict(list)
    if (folder / EVENTS).exists():
        for event in of_any_process([json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]):
            kinds[event["kind"]].append(event)
    parts |= {f"{EVENTS}: {kind}": packed(events, folder.parent) for kind, events in kinds.items()}
    for part in (MODELS, FOLDER):
        for path in sorted((folder / part).rglob("*")):
            if path.is_file() and path.suffix in (".safetensors", ".json"):
                parts[str(path.relative_to(folder))] = path.read_bytes()
    return {name: hashlib.sha256(content).hexdigest()[:12] for name, content in parts.items()}


def packed(value: Any, scratch: Path) -> bytes:
    """Return JSON without times, and with paths as they are seen from a folder, as bytes."""
    text = json.dumps(timeless(value), sort_keys=True).replace(str(scratch), "")
    return re.sub(SEARCHED, "", text).encode()


def differing(what: str, ours: Hashes, theirs: Hashes) -> list[str]:
    """Name the parts whose hashes differ in one sentence; nothing where none does."""
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    return [f"not as {what}: {', '.join(names)}"] if names else []


def write(path: Path, recorded: Mapping[str, Mapping[str, Hashes]]) -> None:
    """Write the file of all kinds of machines, a line for each run."""
    machines = []
    for name, runs in sorted(recorded.items()):
        lines = ",\n".join(f"  {json.dumps(run)}: {json.dumps(found)}" for run, found in sorted(runs.items()))
        machines.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    path.write_text("{\n" + ",\n".join(machines) + "\n}\n")


if __name__ == "__main__":
    main()
