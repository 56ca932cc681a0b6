"""Find controllers by name or path: every name becomes one object that knows its settings and how to make the controller."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.leyline.config.tree import Config
from esper.leyline.messages import InputError, did_you_mean
from esper.leyline.plugins import CONTROLLERS as GROUP
from esper.leyline.plugins import lacking, load_plugin, plugins
from esper.leyline.protocols import Controller, as_controller
from esper.leyline.reference import digest_of_sources, is_own_controller, load_reference, unnamed_function
from esper.store.disk import find_folder, read_named
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import FACTS, WEIGHTS, load_policy, read_facts
from esper.tamiyo.rules.base import Never, RandomValid
from esper.tamiyo.rules.heuristic import Heuristic
from esper.tamiyo.rules.schedule import load_schedule

FOLDER = "controller"
"""Name of the folder, within a run folder, of the controller that was trained in the run."""


@dataclass(frozen=True)
class ControllerSpec:
    """Names a controller, and says how to make it and what a run needs to know of it.

    Attributes:
        name (str): the name in the config and in records; a name that stands for the latest version becomes that version
        make (callable): from the `Config` of a run to a new controller
        summary (str): what it does, in one line for `esper controller`
        settings (mapping): config keys that it sets; they take precedence over the defaults of a task, and those of the user
            over them
        episodes (int or None): number of episodes that it was trained or fitted with, 0 for a rule; None if unknown
        content (callable): returns a digest of the files that decide what it does; empty for one that only the version of
            Esper decides
        card (callable or None): returns what `esper controller NAME` prints
    """

    name: str
    make: Callable[[Config], Controller]
    summary: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    episodes: int | None = 0
    content: Callable[[], str] = str
    card: Callable[[], str] | None = None


_BUILT_IN = (
    ControllerSpec("never", lambda config: Never(), "always waits, so the host is trained without growth"),
    ControllerSpec("random-valid", lambda config: RandomValid(), "draws decisions uniformly from the valid ones"),
    ControllerSpec(
        "heuristic",
        lambda config: Heuristic(config.heuristic, config.gates, config.governor.param_limit),
        "plants bypasses early where the host is narrow, and keeps seeds that contribute more than they cost",
    ),
)
CONTROLLERS: Mapping[str, ControllerSpec] = MappingProxyType({spec.name: spec for spec in _BUILT_IN})
"""The built-in controllers by name."""


def controller_names() -> set[str]:
    """Return the names of built-in controllers and of those that packages add, of which none is imported."""
    return {*CONTROLLERS, *plugins(GROUP)}


def controller_summaries() -> dict[str, str]:
    """Return the one-line summary of every controller that has a name: built-in ones, then those of packages."""
    built_in = {name: spec.summary for name, spec in CONTROLLERS.items()}
    return built_in | {name: load_plugin(GROUP, name)("").summary for name in plugins(GROUP)}


def find_controller(name_or_path: Any) -> ControllerSpec:
    """Find a controller: by name, as a schedule file, as the folder of a trained controller, as a function or class of your
    own, "path.py:function", or as the controller itself.

    A package adds names by entry points of the group `esper.controllers` (`esper docs plugins`); NAME:ARGUMENT passes the
    argument to its function. Raises InputError if there is no such name, file, folder or function.
    """
    name = name_or_path
    if not isinstance(name, str):
        client = as_controller(name)
        return ControllerSpec(type(client).__name__, lambda config: client, episodes=None)
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    plugin, _, argument = name.partition(":")
    if plugin in plugins(GROUP):
        return load_plugin(GROUP, plugin)(argument)
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return ControllerSpec(
            name, lambda config: load_schedule(name), episodes=None, content=lambda: _digest({Path(): path})
        )
    if (folder := trained(name)) is not None:
        facts = read_facts(folder)
        episodes = facts["origin"].get("episodes")
        return ControllerSpec(
            name,
            lambda config: Learned(load_policy(folder)),
            settings=facts["settings"],
            episodes=episodes if isinstance(episodes, int) and episodes > 0 else None,
            content=lambda: _digest({Path(each): folder / each for each in (FACTS, WEIGHTS)}),
        )
    if name and path.is_dir():
        raise InputError(
            f"the folder {name!r} holds no trained controller, because it has no file {FOLDER}/{FACTS}; name a folder "
            "that `esper train` wrote; the file is there after the first validation"
        )
    if is_own_controller(name):

        def load(config: Config | None = None) -> Controller:
            return as_controller(load_reference(name, "controller", "a controller"), f"{name} returned")

        def content() -> str:
            load()  # imports the source files of the user's own, whose digest is returned
            return digest_of_sources()

        return ControllerSpec(name, load, episodes=None, content=content)
    if name.endswith(".py"):
        raise InputError(unnamed_function(name, "controller"))
    known = (*CONTROLLERS, *plugins(GROUP))
    hint = did_you_mean(name, known) or lacking(name)
    raise InputError(
        f"unknown controller {name!r}; give one of {', '.join(known)}, the path of a schedule file "
        "(.yaml or .yml), the run folder of a trained controller, which must exist, or path.py:function for one of your own"
        + (f"; {hint}" if hint else "")
    )


def get_controller(name_or_path: str, config: Config | None = None) -> Controller:
    """Make a controller, by name or path (`esper controller` lists the names).

    `config` has the settings of the rule `heuristic`; None takes the defaults. Raises InputError if there is no such name, file,
    folder or function.
    """
    return find_controller(name_or_path).make(Config() if config is None else config)


def _digest(files: Mapping[Path, Path]) -> str:
    """Return a digest of files, each under the name that stands for it."""
    digest = hashlib.sha256()
    for name, file in files.items():
        if file.is_file():
            data = read_named(file, 64 * 2**20, "give a schedule file, or the folder of a trained controller")
            digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def with_sensors(config: Config, client: Controller) -> Config:
    """Return the config with `probe.sensors_every` and then `probe.sensors` as the controller needs them, where they are null."""
    if config.probe.sensors_every is not None:
        return config
    needs: dict[str, Any] = {"sensors_every": client.sensors_every}
    if config.probe.sensors is None and client.sensor_families:
        needs["sensors"] = tuple(client.sensor_families)
    return config.model_copy(update={"probe": config.probe.model_copy(update=needs)})


def trained(name_or_path: str) -> Path | None:
    """Return the folder of a trained controller, given it or its run folder; None where the path is neither."""
    inner = Path(name_or_path) / FOLDER
    if inner.is_symlink():
        raise InputError(f"{inner} is a link, which is not followed; name the folder that it leads to, if you trust it")
    return next((path for path in (inner, Path(name_or_path)) if (find_folder(path) / FACTS).is_file()), None)
