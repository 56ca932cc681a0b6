"""Damage files of checkpoints and controllers, and record what is made of them.

The checkpoints lie as SIGKILL left them, those of a training and of a growth, with an earlier checkpoint beside the newest and
without. A case damages one file or folder of a copy, a quarter of the drawn ones `latest` too, and reads it with the library's
own reader. It is well where a refusal names what was damaged, nothing ran that a pickle asked for, and what is used is, bit for
bit, the newest checkpoint that was left whole: nothing where there is none. Some are then taken up by `esper resume`.
"""

import hashlib
import itertools
import json
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import save

from esper.leyline.config.tree import CheckpointConfig
from esper.leyline.messages import InputError
from esper.store.checkpoint import BEST, FACTS, LATEST, TENSORS, Checkpoints
from esper.store.files import CHECKPOINTS, CONFIG
from esper.store.tensors import flatten
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.policy.controller import FACTS as POLICY
from esper.tamiyo.policy.controller import WEIGHTS, load_policy
from faults.damages import (
    DAMAGES,
    DRAWN,
    OF_ALL,
    OF_FILES,
    OF_FOLDERS,
    Place,
    check_payload,
    deleted,
    folder,
    truncated,
)
from faults.records import Record, append, records, table
from faults.runs import PATIENCE, Command, differences, killed_at, reached, resume_line, start, straight

OFTEN = ("--set", "checkpoint={every_steps: 1, every_seconds: 0}")
SMALL = ("--set", "data.batches_per_step=2")
LEARN = ("--set", "ppo={imitation_rounds: 1, validate_envs: 4, validate_every: 1}")
TRAIN, GROW = "train iris", "grow wine"
COMMANDS = (
    Command(TRAIN, ("train", "iris", "--envs", "8", "--steps", "12", "--rounds", "2", *LEARN, *SMALL, *OFTEN)),
    Command(
        GROW,
        (
            *("grow", "wine", "--envs", "3", "--steps", "60", "--controller", "random-valid", "--models", "best"),
            *(*SMALL, *OFTEN),
        ),
    ),
)
QUICK = COMMANDS[1:]
KILLED = 20
"""Step behind which the material is killed, so that the training has gone through imitation and a validation."""
HANGING = 20
"""Seconds after which reading counts as hanging."""
FILE = "corrupt.jsonl"


class Case(NamedTuple):
    """Describes one damage."""

    material: str  # the command whose run is damaged
    target: (
        str  # latest, best, state.json, state.safetensors, checkpoint (the newest), checkpoints, or a controller's file
    )
    damage: str
    previous: bool  # whether a checkpoint before the newest is there
    latest_too: bool = False  # whether `latest` is cut short beside it

    def words(self) -> str:
        """Describe the damage for a person."""
        beside = f"{', latest cut short' if self.latest_too else ''}, {'one' if self.previous else 'none'} before it"
        return f"{self.material}: {self.target} {self.damage}{beside}"


CHECKPOINT, CONTROLLER = "checkpoint", (POLICY, WEIGHTS)


def cases(commands: Sequence[Command], count: int, seed: int) -> list[Case]:
    """List every damage of every file and folder, then random truncations and bits until there are `count`; thinned to fewer."""
    files, rest = (LATEST, FACTS, TENSORS), {CHECKPOINT: OF_FOLDERS, CHECKPOINTS: OF_ALL}
    wanted = {**dict.fromkeys(files, OF_FILES), **rest}
    every = [
        Case(command.name, target, damage.__name__, previous)
        for command, (target, damages) in itertools.product(commands, wanted.items())
        for damage, previous in itertools.product(damages, (True, False))
    ]
    if TRAIN in [command.name for command in commands]:
        every += [Case(TRAIN, BEST, damage.__name__, True) for damage in OF_FILES]
        every += [Case(TRAIN, target, damage.__name__, False) for target in CONTROLLER for damage in OF_FILES]
    rng = np.random.default_rng(seed)
    if count < len(every):
        return [every[i] for i in sorted(rng.choice(len(every), count, replace=False))]
    while len(every) < count:
        command, damage = commands[rng.integers(len(commands))].name, DRAWN[rng.integers(len(DRAWN))].__name__
        target = str(rng.choice([*files, *CONTROLLER] if command == TRAIN else files))
        of_checkpoint = target not in CONTROLLER
        too = bool(rng.random() < 0.25) and target in (FACTS, TENSORS)
        every.append(Case(command, target, damage, bool(rng.random() < 0.5) and of_checkpoint, too))
    return every


class Material(NamedTuple):
    """Runs as SIGKILL left them."""

    run: Path  # with two checkpoints, and the one that a training's `best` names
    other: Path  # likewise, of another seed
    known: Path  # the first one, brought to its end without a kill
    digests: Mapping[int, str]  # of the state of each checkpoint, by its step

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint."""
        return max(self.digests)


def material(command: Command, out: Path) -> Material:
    """Make the runs of a command that are damaged, once, and keep them in `out`."""
    place = out / "material" / command.name
    if not place.exists():
        scratch = Path(tempfile.mkdtemp(dir=out))
        killed_at(command, scratch / "run", KILLED)
        killed_at(Command(command.name, (*command.arguments, "--seed", "1")), scratch / "other", KILLED)
        for run in (scratch / "run", scratch / "other"):
            keep_two(run)
        place.parent.mkdir(exist_ok=True)
        scratch.rename(place)
    run = place / "run"
    digests = {}
    for path in sorted((run / CHECKPOINTS).glob("step-*")):
        only = Path(tempfile.mkdtemp(dir=out))
        shutil.copyfile(run / CONFIG, only / CONFIG)
        shutil.copytree(path, only / CHECKPOINTS / path.name)
        found = Checkpoints(only, CheckpointConfig()).read(lambda note: None)
        assert found is not None, path
        digests[found.number] = digest(found.state)
        shutil.rmtree(only)
    assert len(digests) >= 2, f"{run} holds {len(digests)} checkpoints, where two were to be"
    return Material(run, place / "other", straight(command, out / "straight")[0], digests)


def keep_two(run: Path) -> None:
    """Leave the checkpoint that `latest` names, the one before it, and the best, whatever the writer was about."""
    kept = {LATEST, BEST, *(f"step-{reached(run) - back:06d}" for back in (0, 1))}
    if (run / CHECKPOINTS / BEST).exists():
        kept.add((run / CHECKPOINTS / BEST).read_text().split()[0])
    for path in (run / CHECKPOINTS).iterdir():
        if path.name not in kept:
            deleted(path)


def digest(state: Mapping[str, Any]) -> str:
    """Return the sha256 of all that a checkpoint brought back."""
    tensors, plain = flatten(dict(state))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode() + save(tensors)).hexdigest()


def campaign(out: Path, commands: Sequence[Command], count: int, resumed: int, seed: int) -> None:
    """Run every case that is not yet kept, `resumed` of them through `esper resume` too."""
    check_payload(out)
    listed = cases(commands, count, seed)
    of_checkpoint = [number for number, case in enumerate(listed) if case.target not in CONTROLLER]
    through = {of_checkpoint[i] for i in np.linspace(0, len(of_checkpoint) - 1, resumed).round().astype(int)}
    # the next checkpoint has to take the name of what was damaged
    through |= {i for i, case in enumerate(listed) if case.target in (LATEST, BEST) and case.damage == folder.__name__}
    kept = {record["number"] for record in records(out / FILE)}
    stock = {command.name: material(command, out) for command in commands}
    for number, case in enumerate(listed):
        if number in kept:
            continue
        with tempfile.TemporaryDirectory(dir=out, prefix="case-") as scratch:
            found = examine(case, stock[case.material], Path(scratch), (seed, number), number in through)
        append(out / FILE, {"number": number, **case._asdict(), **found})
        if not found["well"]:
            print(f"{number:4} {case.words()}: {found}", flush=True)
        elif number % 100 == 99 or number in through:
            print(f"{number + 1}/{len(listed)} {case.words()}: {found['used']}", flush=True)


def examine(case: Case, stock: Material, scratch: Path, seed: Sequence[int], resumes: bool) -> Record:
    """Damage a copy of a run, read it, and return whether all went well."""
    run, newest = scratch / "run", f"step-{stock.newest:06d}"
    shutil.copytree(stock.run, run)
    if not case.previous:
        (run / CHECKPOINTS / BEST).unlink(missing_ok=True)
        for path in (run / CHECKPOINTS).glob("step-*"):
            if path.name != newest:
                shutil.rmtree(path)
    path, theirs = path_of(case.target, newest), path_of(case.target, f"step-{reached(stock.other):06d}")
    place = Place(np.random.default_rng(seed), stock.other / theirs, scratch / "aside", scratch / "obeyed")
    place.aside.mkdir()
    DAMAGES[case.damage](run / path, place)
    if case.latest_too:
        truncated(run / CHECKPOINTS / LATEST, place)
    same = says_the_same(run / path, stock.run / path)
    gone = case.target == BEST and case.damage == deleted.__name__  # as if no checkpoint had been the best yet
    found = read_controller(run) if case.target in CONTROLLER else read_checkpoint(run, stock)
    right = expected(case, stock, same)
    named = str(run / path) in found["told"] or (case.target in CONTROLLER and path.name in found["told"])
    named = named and (not case.latest_too or str(run / CHECKPOINTS / LATEST) in found["told"])
    result = {
        **found,
        "told": found["told"].replace(f"{scratch}/", ""),
        "right": right,
        "named": named,
        "newest": found["used"] == f"step {stock.newest}",
        "says_the_same": same,
    }
    if resumes:
        result["resume"] = resume(run, stock.known, "" if gone else str(run / path), scratch)
    result["executed"] = place.marker.exists()
    taken_up = not resumes or (
        result["resume"]["well"] and (result["resume"]["code"] == 2) == (found["used"] == "refused")
    )
    # another way to write the same JSON is no damage
    silent = gone or (same and case.target in CONTROLLER)
    fitting = found["used"] == right or (right == "nothing" and found["used"] == "refused")
    result["well"] = bool((named or silent) and fitting and found["equal"] and not result["executed"] and taken_up)
    return result


def path_of(target: str, checkpoint: str) -> Path:
    """Return where a target lies in a run folder whose newest checkpoint is named."""
    if target in CONTROLLER:
        return Path(FOLDER, target)
    place = Path(CHECKPOINTS)
    inside = {CHECKPOINTS: place, CHECKPOINT: place / checkpoint, LATEST: place / LATEST, BEST: place / BEST}
    return inside.get(target, place / checkpoint / target)


def expected(case: Case, stock: Material, same: bool) -> str:
    """Name what is to be used."""
    if case.target in CONTROLLER:
        return "the controller" if same else "refused"
    if case.target == CHECKPOINTS:
        return "refused"
    if case.target in (LATEST, BEST) or same:
        return f"step {stock.newest}"
    return f"step {max(stock.digests.keys() - {stock.newest})}" if case.previous else "nothing"


def says_the_same(path: Path, known: Path) -> bool:
    """Return whether a damaged file of JSON has kept its meaning, as where 1e-05 became 1E-05."""
    if path.suffix != ".json" or path.is_symlink() or not path.is_file():
        return False
    try:
        return bool(json.loads(path.read_bytes()) == json.loads(known.read_bytes()))
    except (ValueError, RecursionError):
        return False


def read_checkpoint(run: Path, stock: Material) -> Record:
    """Read a damaged run's checkpoints; return what the reader says and uses."""
    told: list[str] = []
    try:
        with in_time():
            found = Checkpoints(run, CheckpointConfig()).read(told.append)
    except InputError as error:
        return {"used": "refused", "told": "; ".join([*told, str(error)]), "equal": True}
    except Exception as error:  # whatever it is, it is what this campaign looks for
        return {"used": f"failed: {error!r}", "told": "; ".join(told), "equal": False}
    if found is None:
        return {"used": "nothing", "told": "; ".join(told), "equal": True}
    equal = digest(found.state) == stock.digests.get(found.number)
    return {"used": f"step {found.number}", "told": "; ".join(told), "equal": equal}


def read_controller(run: Path) -> Record:
    """Read a damaged run's controller; return what the reader says and uses."""
    try:
        with in_time():
            load_policy(run / FOLDER)
    except InputError as error:
        return {"used": "refused", "told": str(error), "equal": True}
    except Exception as error:
        return {"used": f"failed: {error!r}", "told": "", "equal": False}
    return {"used": "the controller", "told": "", "equal": True}


def resume(run: Path, known: Path, name: str, scratch: Path) -> Record:
    """Run `esper resume`; well if it goes on to the numbers of the straight run, or refuses, naming the file or folder."""
    with open(scratch / "told", "wb") as told:
        code = start(resume_line(run), told).wait(PATIENCE)
    heard = (scratch / "told").read_text()
    refused = code == 2 and heard.splitlines()[-1].startswith("error: ") and "Traceback" not in heard
    odd = differences(run, known) if code == 0 else []
    return {"code": code, "differences": odd, "well": name in heard and (refused or (code == 0 and not odd))}


class Hanging(Exception):
    """Says that reading did not come to an end."""


@contextmanager
def in_time() -> Iterator[None]:
    """Raise Hanging where the block takes longer than HANGING."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hanging

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANGING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def section(out: Path) -> list[str]:
    """Return the results as Markdown."""
    rows = records(out / FILE)
    if not rows:
        return []
    taken = [row["resume"] for row in rows if "resume" in row]
    return [
        "## Damaged files",
        "",
        "Checkpoints of a training and of a growth, as a SIGKILL left them: every file cut or with a bit flipped at random "
        "places, emptied, deleted, replaced by that of another run, by a pickle, a pipe, a folder or a link; with an earlier "
        "checkpoint beside and without. *Named*: a refusal names what was damaged. *Well*: named, nothing executed, and what is "
        "used is bit for bit the newest checkpoint that was left whole, or nothing where there is none. A flipped bit that turns "
        "1e-05 into 1E-05 changes no value, and the file is used once it was named. That `best` was "
        "deleted nobody can tell.",
        "",
        *table(["what", *HEAD], grouped(rows, lambda row: WORDS.get(row["target"], f"`{row['target']}`"))),
        "",
        *table(["damage", *HEAD], grouped(rows, lambda row: row["damage"].replace("_", " "))),
        "",
        f"{len(taken)} of them were taken up by `esper resume`: {sum(t['code'] == 0 for t in taken)} came to the numbers of the "
        f"undisturbed run, {sum(t['code'] == 2 for t in taken)} were refused with exit code 2, "
        f"{sum(not t['well'] for t in taken)} did something else.",
        "",
    ]


HEAD = ["cases", "named", "executed", "newest used", "earlier one used", "nothing used", "refused", "well"]
WORDS = {CHECKPOINT: "the folder of a checkpoint", CHECKPOINTS: "the folder of all"}


def grouped(rows: Sequence[Record], of: Callable[[Record], str]) -> list[list[object]]:
    """Return a line of counts for each group, and one for all."""
    names = dict.fromkeys(map(of, rows))
    return [*([name, *counts([row for row in rows if of(row) == name])] for name in names), ["all", *counts(rows)]]


def counts(rows: Sequence[Record]) -> list[object]:
    """Count cases by what became of them."""
    used = Counter(row["used"] for row in rows)
    steps = {name: n for name, n in used.items() if name.startswith("step")}
    newest = sum(row["used"].startswith("step") and row["newest"] for row in rows)
    return [
        *(len(rows), sum(row["named"] for row in rows), sum(row["executed"] for row in rows)),
        *(newest, sum(steps.values()) - newest, used["nothing"], used["refused"], sum(row["well"] for row in rows)),
    ]
