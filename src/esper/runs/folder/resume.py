"""Resume a run: read its folder, and prepare the folder for the run to continue."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from esper.leyline.config.input import dotted
from esper.leyline.config.parsing import LARGEST_YAML, parse_yaml
from esper.leyline.config.tree import Config, RewardConfig, build_config, dump_config, parse_setting
from esper.leyline.messages import InputError, amended
from esper.leyline.protocols import Reward
from esper.leyline.reference import PAID_BY, own_code, resume_command
from esper.simic.rewards import get_reward, load_reward
from esper.store.changes import record_change
from esper.store.checkpoint import Checkpoint
from esper.store.disk import read_kept, write_atomic
from esper.store.files import CONFIG, MARK, SUMMARY, check_is_run, check_links

PAID = "ppo"
"""The `controller` in the config of a training whose reward comes from the config."""
_LARGEST = 64 * 2**20  # largest summary.json that is read, in bytes
_MEND = "restore the file as it was, or start a new run"


def read_config(folder: Path) -> Config:
    """Return the config of a run folder. Raises InputError if it is not a run folder, or its config.yaml cannot be read."""
    check_is_run(folder)
    check_links(folder)
    content = parse_yaml(read_kept(folder / CONFIG, LARGEST_YAML, _MEND), str(folder / CONFIG), _MEND)
    if not isinstance(content, dict):
        raise InputError(f"{folder / CONFIG} is not a mapping of keys; restore the file as it was, or start a new run")
    if "anytime" in content:
        raise InputError(
            f"{folder} is a run of esper.AnytimeGrowth, whose loop is in a program of its own; resume it there, with the same "
            "run= and growth.load_state_dict(state)"
        )
    mend = "continue with the version of Esper that environment.json names, or start a new run"
    with amended(f"{folder / CONFIG}: ", f"; {mend}"):
        return build_config(content)


def cohort_configs(config: Config) -> list[Config]:
    """Return the config of every task of a training, from the config of its folder."""
    own = config.model_copy(update={"cohorts": {}})
    return [own if name == config.task else build_config(config.cohorts.get(name, {})) for name in config.tasks]


def with_cohorts(configs: Sequence[Config], controller: str) -> Config:
    """Return the config for the folder of a training: that of the first task, with those of the others in `cohorts`."""
    others = {config.task: config.model_dump(mode="json", exclude={"cohorts"}) for config in configs[1:]}
    return configs[0].model_copy(update={"cohorts": others, "controller": controller})


def is_training(config: Config) -> bool:
    """Return whether the run of a config trains a controller."""
    return bool(config.tasks) and (config.controller == PAID or config.controller.startswith(PAID_BY))


def reward_of(folder: Path, config: Config, given: str | None) -> Callable[[RewardConfig], Reward]:
    """Return what makes the rewards of a training that is resumed. given: the reference to a reward of one's own."""
    own = own_code(config.controller)
    if config.controller != PAID and own is None:
        raise InputError(
            f"the controller was {config.controller}, a reward given as an object from Python, which cannot be resumed; start "
            "the training again, with the reward as path.py:function"
        )
    if own is not None and given is None:
        raise InputError(
            f"{folder} is a training paid by {own[1]!r}, whose code a run folder may not start; if you trust it, give "
            f"{resume_command(folder, config.tasks, config.controller)}"
        )
    if given is not None and (own is None or own[1] != given):
        paid = "the reward of its config" if own is None else repr(own[1])
        raise InputError(f"{folder} is a training paid by {paid}, not by {given!r}; give the reward that it began with")
    return get_reward if given is None else load_reward(given)


FIXED = (
    *("task", "tasks", "cohorts", "controller", "envs", "shards", "seed", "twin", "slots", "blueprints"),
    *("instances", "first_instance", "lifecycle.tempos", "lifecycle.targets", "reward.group_size"),
    *("governor.enabled", "governor.loss_window", "early_stopping.enabled", "ppo.packages", "ppo.undo_bias"),
    *("ppo.advantage_floor", "widen"),
)
"""Keys that cannot change when a run is resumed."""


class Opening(NamedTuple):
    """Says how a run takes its folder: by default as a new one, which must not hold a run."""

    overwrite: bool = False  # whether to replace the run in the folder
    resume: bool = False  # whether to continue the run in the folder from its last checkpoint
    before: Config | None = None  # the config in the folder, where the run continues with another one
    settings: tuple[str, ...] = ()  # what changes that config, KEY=VALUE
    other_data: bool = False  # whether the run may continue with other data than it began with


NEW = Opening()


def changed(config: Config, settings: Sequence[str]) -> Config:
    """Return the config of a run folder with settings, KEY=VALUE, applied to it and to every cohort of a training."""
    layers, trains = [parse_setting(setting) for setting in settings], is_training(config)
    before = cohort_configs(config) if trains else [config]
    after = [build_config(each.model_dump(mode="json"), *layers) for each in before]
    pairs = list(zip(before, after, strict=True))
    names = {"twin"} if any(one.twin != other.twin for one, other in pairs) else set()  # rows of the population
    for pair in pairs:
        mine, theirs = (dict(dotted(each.model_dump())) for each in pair)
        names |= {name for name in mine | theirs if mine.get(name) != theirs.get(name)}
    compared = ("select",) if config.early_stopping.enabled else ()  # decides which step so far is the best
    fixed = (*FIXED, *compared, "steps") if trains else (*FIXED, *compared)
    for key in fixed:
        if any(name == key or name.startswith(f"{key}.") for name in names):
            raise InputError(f"changing {key} would make this another run, so it cannot be resumed; start a new one")
    return with_cohorts(after, config.controller) if trains else after[0]


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run; None if the run is not finished."""
    path = folder / SUMMARY
    if not path.is_file():
        return None
    data = read_kept(path, _LARGEST, "remove it, and it is computed again")
    try:
        summary = json.loads(data)
    except (ValueError, RecursionError):
        return None  # the run continues from its checkpoint and writes the summary again
    return summary if isinstance(summary, dict) and summary.get("status") == "finished" else None


@contextmanager
def fitting(found: Checkpoint) -> Iterator[None]:
    """Raise InputError if the body fails because the checkpoint does not fit the task or the controller."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the checkpoint of step {found.number} does not fit the task and the controller as they are now ({error}); "
            "restore them as they were, or start a new run"
        ) from None


def change_config(folder: Path, config: Config, settings: Sequence[str], steps: int) -> None:
    """Replace the config of a run and record the change. A crash leaves either the old or the new config."""
    (folder / SUMMARY).unlink(missing_ok=True)  # with the new config, the run is not finished
    text = MARK + dump_config(config)
    record_change(folder, text, settings, steps)
    write_atomic(folder / CONFIG, text)
