"""Run the `esper` command in processes, and compare whether two runs came to the same."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from esper.leyline.config.tree import CheckpointConfig
from esper.leyline.messages import InputError
from esper.store.checkpoint import LATEST, TENSORS, Checkpoints
from esper.store.files import CHECKPOINTS, CONFIG, EVALUATION, EVENTS, MODELS, SUMMARY
from esper.store.lock import LOCK
from esper.tamiyo.catalog import FOLDER

TIMES = ("seconds", "time", "env_steps_per_second", "phase_seconds", "controller_share", "waiting_seconds")
"""Figures that tell how fast a machine was, in a summary, an event or a round's figures."""
PROCESS = ("checkpoint", "environment")
"""Kinds of events that tell of the process that wrote them: where it was interrupted, and on which machine it ran."""
COVERED = ("seq", "covered", "device_reads")
"""Fields of events that depend on where a run was interrupted: the first `phases` row after that covers fewer steps."""
PATIENCE = 600
"""Seconds after which a process that should have ended counts as hanging."""


class Command(NamedTuple):
    """Holds a command, but for its folder: a run of `esper`, or another one that is given again after a kill."""

    name: str
    arguments: tuple[str, ...]  # of esper; with `again`, all of the command line but for the folder
    again: bool = False  # whether the same command, with --out, goes on or begins anew after a kill
    resumed: tuple[str, ...] = ()  # what `esper resume` is given too: the workers, which no file of a run holds

    def line(self, run: Path) -> list[str]:
        """Return the command line that starts the command."""
        if self.again:
            return [*self.arguments, "--out", str(run)]
        return [sys.executable, "-m", "esper", *self.arguments, "--run", str(run), "--json"]

    def next(self, run: Path) -> list[str]:
        """Return the command line that starts the command, or that goes on after a kill."""
        return [*resume_line(run), *self.resumed] if not self.again and self.begun(run) else self.line(run)

    def whole(self, run: Path) -> bool:
        """Return whether the record that a command writes last is there, after which it is refused: a kill came at its exit."""
        return self.again and any((run / name).exists() for name in ("healing.json", EVALUATION))

    def begun(self, run: Path) -> bool:
        """Return whether the first file or the folder of the command is there."""
        return run.exists() if self.again else (run / CONFIG).exists()


def resume_line(run: Path) -> list[str]:
    """Return the command line that goes on with a run."""
    return [sys.executable, "-m", "esper", "resume", str(run), "--json"]


def start(line: list[str], told: IO[bytes], scratch: Path | None = None) -> subprocess.Popen[bytes]:
    """Start the process of a command, in a group of its own, so that Ctrl-C reaches the campaign alone.

    scratch: its folder of temporary files; torch's cache of compiled code is beside it.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if scratch is not None:
        environment |= {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch.with_name("inductor"))}
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=told, env=environment, start_new_session=True)


def straight(command: Command, out: Path) -> tuple[Path, float]:
    """Return the folder of a run that is never killed, and its seconds from the appearance of config.yaml to its end.

    It is kept in `out`; one that was broken off begins anew.
    """
    folder = out / command.name
    run, facts = folder / "run", folder / "straight.json"
    asked = list(command.arguments)
    if facts.exists() and (known := json.loads(facts.read_text()))["arguments"] == asked:
        return run, known["seconds"]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "told", "wb") as told:
        shutil.rmtree(run, ignore_errors=True)
        process = start(command.line(run), told)
        while not command.begun(run) and process.poll() is None:
            time.sleep(0.01)
        begin = time.monotonic()
        code = process.wait(PATIENCE)
        seconds = time.monotonic() - begin
    if code:
        raise RuntimeError(f"{command.name} cannot even run undisturbed: {(folder / 'told').read_text()[-500:]}")
    facts.write_text(json.dumps({"arguments": asked, "seconds": seconds}))
    return run, seconds


def killed_at(command: Command, run: Path, step: int) -> None:
    """Start a run and kill it as soon as `latest` names the checkpoint of a step, or of a later one."""
    with open(run.with_name(f"{run.name}.told"), "wb") as told, start(command.line(run), told) as process:
        while reached(run) < step:
            if process.poll() is not None:
                raise RuntimeError(f"{command.name} ended before step {step}")
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)


def reached(run: Path) -> int:
    """Return the step that `latest` names, -1 where there is none."""
    path = run / CHECKPOINTS / LATEST
    return int(path.read_text().split()[0].removeprefix("step-")) if path.exists() else -1


def refusals(run: Path) -> list[str]:
    """List what the library's own reader refuses of a run's checkpoints as they lie there; nothing where all is well.

    A folder that has just got its name and that no `latest` names yet is used, and is no refusal.
    """
    told: list[str] = []
    named = (run / CHECKPOINTS / LATEST).exists()
    try:
        found = Checkpoints(run, CheckpointConfig()).read(told.append)
    except InputError as error:
        return [*told, str(error)]
    if named and found is None:
        told.append(f"{LATEST} is there and names nothing that can be read")
    return [note for note in told if named or f"{LATEST} cannot be read" not in note]


def outcome_differences(run: Path, known: Path) -> list[str]:
    """List where the folder of a command that is given again differs from the other one; nothing where they are equal.

    Compared are the names of all files, JSON and arrays but for times, tensors of torch files and of exported networks, and
    all other files byte for byte. Pictures and pages have times in them, and only their names are compared.
    """
    ours, theirs = (
        {str(path.relative_to(each)): path for path in each.rglob("*") if path.is_file() and path.name != LOCK}
        for each in (run, known)
    )
    both = sorted(ours.keys() & theirs.keys())
    return [
        *sorted(ours.keys() ^ theirs.keys()),
        *(name for name in both if content(ours[name]) != content(theirs[name])),
    ]


def content(path: Path) -> Any:
    """Return what of a file does not depend on the machine."""
    match path.suffix:
        case ".json":
            record = json.loads(path.read_text())
            record.pop("environment", None)  # which names the folder, in the command
            return timeless(record)
        case ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name].tobytes() for name in arrays if name not in TIMES}
        case ".pt":
            return plain(torch.load(path, weights_only=True))
        case ".pt2":
            return plain(torch.export.load(path).state_dict)
        case ".png" | ".html":
            return None
    return path.read_bytes()


def plain(value: Any) -> Any:
    """Replace the tensors in a value by their bytes."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def differences(run: Path, known: Path) -> list[str]:
    """List where a finished run is not bit for bit the other one; nothing where it is.

    Compared are every file of the exported networks and the controller, all tensors of the last checkpoint (parameters,
    buffers, moments, rollouts), the summary and the events but for times, and the numbering of the events.
    """
    if not (run / SUMMARY).exists():
        return [f"{SUMMARY} is missing"]
    odd = []
    if timeless(json.loads((run / SUMMARY).read_text())) != timeless(json.loads((known / SUMMARY).read_text())):
        odd.append(SUMMARY)
    events, others = ([json.loads(line) for line in (each / EVENTS).open()] for each in (run, known))
    if [event["seq"] for event in events] != list(range(len(events))):
        odd.append(f"{EVENTS} has a gap in seq")
    if of_any_process(events) != of_any_process(others):
        odd.append(EVENTS)
    ours, theirs = exported(run), exported(known)
    odd += [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if last_tensors(run) != last_tensors(known):
        odd.append(f"{TENSORS} of the last checkpoint")
    return odd


def exported(run: Path) -> dict[str, bytes]:
    """Read every file of the networks and the controller by name."""
    paths = [path for part in (MODELS, FOLDER) for path in (run / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def last_tensors(run: Path) -> tuple[int, bytes]:
    """Return the step of the last checkpoint, and the bytes of all its tensors."""
    step = reached(run)
    return step, (run / CHECKPOINTS / f"step-{step:06d}" / TENSORS).read_bytes()


def of_any_process(events: list[dict[str, Any]]) -> Any:
    """Return events without what depends on the machine and on where a run was interrupted."""
    kept = [event for event in events if event["kind"] not in PROCESS]
    return timeless([{name: value for name, value in event.items() if name not in COVERED} for event in kept])


def timeless(value: Any) -> Any:
    """Return JSON without the figures that tell how fast a machine was."""
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def left_over(run: Path) -> list[str]:
    """List files and folders under a temporary name that a finished run still holds."""
    return sorted(
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.name.startswith(".") or path.suffix in (".tmp", ".new")
    )
