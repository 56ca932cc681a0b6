"""Taking up a run where it was left: what its folder says, and what has to be put in order before it goes on."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from esper.leyline.config import Config, build_config
from esper.leyline.disk import Patient
from esper.leyline.errors import DataFault, InputError, OutOfMemory
from esper.nissa.files import CONFIG, SUMMARY, cut_events, is_run
from esper.tolaria.checkpoint import Checkpoint, Checkpoints

PAID = "ppo"
"""What a training calls its controller, where the config's own reward pays it."""
_LARGEST = 16 * 2**20  # bytes of config.yaml or summary.json that are read


def read_config(folder: Path) -> Config:
    """What was asked for in a run folder. InputError where it is none, or its config.yaml cannot be read."""
    if not is_run(folder):
        raise InputError(f"{folder} is no run folder, as it holds no {CONFIG}; name one that esper grow or train wrote")
    try:
        content = yaml.safe_load(_text(folder / CONFIG))
    except (yaml.YAMLError, ValueError):
        raise InputError(f"{folder / CONFIG} is not valid YAML; put back what was there, or start a new run") from None
    if not isinstance(content, dict):
        raise InputError(f"{folder / CONFIG} holds no mapping of keys; put back what was there, or start a new run")
    return build_config(content)


def cohort_configs(config: Config) -> list[Config]:
    """The config of every task of a training, from the one in its folder."""
    own = config.model_copy(update={"cohorts": {}})
    return [own if name == config.task else build_config(config.cohorts.get(name, {})) for name in config.tasks]


def with_cohorts(configs: Sequence[Config], controller: str) -> Config:
    """The config for the folder of a training: that of the first task, which holds those of the others."""
    others = {config.task: config.model_dump(mode="json", exclude={"cohorts"}) for config in configs[1:]}
    return configs[0].model_copy(update={"cohorts": others, "controller": controller})


def is_training(config: Config) -> bool:
    """Whether the run of a config trains a controller. InputError where it was paid by what no config holds."""
    if not config.tasks or config.controller.split(",")[0] != PAID:
        return False
    if config.controller != PAID:
        raise InputError(
            f"the controller was {config.controller}, a reward given as an object from Python, which cannot be resumed; "
            "start the training again"
        )
    return True


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that came to its end; None where it did not."""
    path = folder / SUMMARY
    if not path.is_file():
        return None
    try:
        summary = json.loads(_text(path))
    except ValueError:
        return None  # it is worked out again
    return summary if isinstance(summary, dict) and summary.get("status") == "finished" else None


def take_up(
    folder: Path, config: Config, note: Callable[[str], None], patience: Patient
) -> tuple[Checkpoints, Checkpoint | None]:
    """The checkpoints of a run and the one to go on from, None where there is none. InputError where it is another run."""
    if read_config(folder) != config:
        raise InputError(f"{folder / CONFIG} is not the config of this run; resume it with what it says")
    store = Checkpoints(folder, config.checkpoint, patience)
    found = store.read(note)
    note(f"going on after step {found.number}" if found else "no complete checkpoint: starting again from config.yaml")
    return store, found


@contextmanager
def fitting(found: Checkpoint) -> Iterator[None]:
    """What does not fit the run any more is said in one sentence."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the checkpoint of step {found.number} does not fit the task and the controller as they are now ({error}); put "
            "back what was there, or start a new run"
        ) from None


def left(error: OutOfMemory | DataFault, folder: Path | None) -> OutOfMemory | DataFault:
    """The error that a run was left by, with how to go on where there is a folder to go on from."""
    if folder is None:
        return error
    return type(error)(f"{error}; the run is as its last checkpoint has it: esper resume {folder} goes on there")


def reopen_run(folder: Path, rows: int, note: Callable[[str], None]) -> None:
    """Cut the events behind the first `rows`, and remove the summary of the run that was left."""
    side = cut_events(folder, rows)
    if side is not None:
        note(f"events from behind the checkpoint were moved to {side}")
    (folder / SUMMARY).unlink(missing_ok=True)


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        raise InputError(
            f"{path} has {path.stat().st_size:,} bytes, more than any of its kind; put back what was there"
        )
    return path.read_text(encoding="utf-8")
