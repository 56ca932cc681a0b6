"""Check the saved state of one network that grows in the user's own loop: what it was made with, and whether it is whole."""

import functools
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.graft.grown import Freeze
from esper.kasmina.graft.sharding import gather_on_cpu
from esper.leyline.config.tree import GrowthConfig
from esper.leyline.messages import InputError, kind_of
from esper.leyline.protocols import Controller
from esper.runs.folder.environment import digest
from esper.tamiyo.catalog import controller_names
from esper.tolaria.live.population import LivePopulation

FORMAT = 8
"""Version of the state of a growth; other versions are refused."""
CHECKSUM = "checksum"
_FIXED = (
    *("sites", "menu", "mode", "ema", "optimizer", "schedulers", "lifecycle.tempos", "lifecycle.targets"),
    *("gates.certify", "governor.enabled", "governor.loss_window", "probe.sensors", "probe.sensors_every"),
)
"""What cannot change, because arrays of the state follow from it."""
_IMPLIED = {
    "controller": ("probe.sensors_every", "lifecycle.direct", "lifecycle.absorb", "gates.twins"),
    "budget": ("governor.param_limit",),
    "steps": ("decisions",),
    "every": ("decisions",),
}
"""Settings that follow from an argument, and change with it."""
_PLAIN = (bool, int, float, str, type(None))
_MEND = "give the state as growth.state_dict() returned it"


def made_with(
    population: LivePopulation,
    controller: tuple[str | Controller, Controller],
    config: GrowthConfig,
    arguments: Mapping[str, float | int | str | Freeze | None],
) -> dict[str, Any]:
    """Return all that decides what a growth computes, but for the network and what it has learned, as plain values by name.

    controller: as it was given, and the object. arguments: budget, budget_passes, budget_seconds, freeze, every, steps, seed
    and mode of Growth.
    """
    given, client = controller
    named = isinstance(given, str) and (given in controller_names() or not Path(given).exists())
    settings = config.model_dump(mode="json", include=set(GrowthConfig.model_fields))
    sections = {name: keys for name, keys in settings.items() if isinstance(keys, dict)}
    return {
        "sites": {name: repr(site) for name, site in zip(population.space.slots, population.sites, strict=True)},
        "menu": [f"{entry.kind.value} {entry.name}" for entry in population.menu],
        **{name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()},
        "decisions": config.steps,
        "probe": digest(population.probe_batches.batches()),
        "loss": describe(population.probe_batches.loss),
        "controller": given if named else describe(client, without=str(given)),
        "ema": "given" if population.averages else None,
        "optimizer": type(population.groups.optimizer).__qualname__,
        "schedulers": [type(each).__qualname__ for each in population.groups.schedulers],
        **{f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()},
    }


def check_made_with(saved: Mapping[str, Any], mine: Mapping[str, Any], changed: Sequence[str]) -> None:
    """Raise InputError if a growth is made with other arguments than one that was saved, except for those named in `changed`."""
    if isinstance(changed, str) or not all(isinstance(name, str) for name in changed):
        raise InputError(f"changed is {changed!r}; give a list of names, as changed=['budget']")
    for name in changed:
        if name not in mine or name in _FIXED:
            why = "which decides what the state consists of" if name in _FIXED else "which is no argument or setting"
            may = [known for known in mine if known not in _FIXED and "." not in known and known != "decisions"]
            raise InputError(f"changed names {name!r}, {why}; give any of {', '.join(may)}, or a key as 'reward.rent'")
    allowed = {implied for name in changed for implied in (name, *_IMPLIED.get(name, ()))}
    for name in mine:
        # A key that only one side has is one of another version of Esper.
        if name in allowed or name not in saved or saved[name] == mine[name]:
            continue
        theirs, own = saved[name], mine[name]
        if isinstance(theirs, dict) and theirs.keys() == own.keys():
            theirs, own = next((theirs[key], own[key]) for key in own if theirs[key] != own[key])
        elif isinstance(theirs, dict):
            theirs, own = list(theirs), list(own)
        section, _, key = name.partition(".")
        mend = f", with settings={ {section: {key: theirs}} }" if key else ""
        mend += "" if name in _FIXED else f", or go on with this one by load_state_dict(state, changed=[{name!r}])"
        raise InputError(
            f"the saved state has {name} {theirs!r}, where this one has {own!r}; make Growth as it was then{mend}"
        )


def describe(value: Any, without: str = "") -> str:
    """Return a function or an object as text that is equal in another process: its name, and the plain values it was made with.

    Arrays and modules that an object holds are what it has learned, and are left out. The buffers of a module, such as the
    weights of classes in a loss, are part. A function is its name; of a lambda or a local function, the names and constants
    that it uses are part too. `without` is a text attribute that is left out, such as the path of a file.
    """
    match value:
        case functools.partial():
            return f"{describe(value.func)} {digest(_plain([value.args, value.keywords]))}"
        case FunctionType() if "<" in value.__qualname__:
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            code = value.__code__
            used = [code.co_names, code.co_consts, value.__defaults__, value.__kwdefaults__, cells]
            return f"{value.__qualname__} {digest(_plain(used))}"
        case _ if hasattr(value, "__qualname__"):
            return str(value.__qualname__)
    # Every module has the flag `training` and registers of its own, which begin with an underscore.
    own = {
        name: each
        for name, each in getattr(value, "__dict__", {}).items()
        if not (isinstance(value, nn.Module) and (name == "training" or name.startswith("_")))
    }
    shown = {name: each for name, each in own.items() if isinstance(each, _PLAIN) and not name.startswith("_")}
    rest = [_plain({name: each for name, each in own.items() if name not in shown})]
    if isinstance(value, nn.Module):
        rest.append(dict(value.named_buffers()))
    text = ", ".join(f"{name}={each!r}" for name, each in sorted(shown.items()) if each != without)
    return f"{type(value).__qualname__}({text})" + (f" {digest(rest)}" if any(rest) else "")


def _plain(value: Any, depth: int = 8) -> Any:
    """Return containers of plain values, with the name of its type in place of everything else, and of what is nested deeper."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict) and depth:
        return {str(key): _plain(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_plain(each, depth - 1) for each in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


# The tree.


def saved_tree(tree: Any, first: bool) -> Any:
    """Return a tree of arrays, tensors and plain values as torch.save(..., weights_only loading) takes it.

    first: whether this process keeps what it gathers, one tensor after the other, or lets it go.
    """
    if isinstance(tree, np.ndarray):
        return {"array": torch.from_numpy(np.ascontiguousarray(tree)).reshape(tree.shape).clone()}
    if isinstance(tree, Tensor):
        return gather_on_cpu(tree, first)
    if isinstance(tree, Enum | np.generic):
        return tree.value if isinstance(tree, Enum) else tree.item()
    if type(tree) is dict:
        return {key: saved_tree(value, first) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(saved_tree(value, first) for value in tree)
    return tree


def loaded_tree(tree: Any) -> Any:
    """Return what `saved_tree` was given."""
    if isinstance(tree, Mapping) and set(tree) == {"array"}:
        return tree["array"].cpu().numpy().copy()
    if type(tree) is dict:
        return {key: loaded_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(loaded_tree(value) for value in tree)
    return tree


def signed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a saved tree with its format and its checksum."""
    whole = {"format": FORMAT, **tree}
    return {**whole, CHECKSUM: _checksum(whole)}


def check_format(state: Any, number: int, growth: str) -> None:
    """Raise InputError unless a state is one that a growth of this name returned, in the first process, and has this format."""
    if not isinstance(state, Mapping):
        raise InputError(f"the saved state is {kind_of(state)}; {_MEND}")
    if not state:
        raise InputError(
            "the saved state is empty; load that of the first process in all of them, as fully_shard gives the others none"
        )
    for name, entry in {"esper.Growth": "made_with", "esper.AnytimeGrowth": "progress"}.items():
        if entry in state and name != growth:
            raise InputError(f"the saved state is that of {name}, which {growth} cannot read; give it to {name}")
    if "format" not in state:
        raise InputError(f"the saved state is none of {growth}; {_MEND}")
    if state["format"] != number:
        raise InputError(
            f"the saved state has format {state['format']!r}, where {growth} of this Esper reads format {number}; go on with the "
            "Esper that wrote it, or begin a new run"
        )


def check_whole(state: Any) -> None:
    """Raise InputError unless a state is one that `signed` returned, with each of its entries."""
    check_format(state, FORMAT, "esper.Growth")
    if state.get(CHECKSUM) != _checksum({name: value for name, value in state.items() if name != CHECKSUM}):
        raise InputError(
            f"the saved state is damaged: its entries are not those that were saved, by its checksum; {_MEND}"
        )


def _checksum(tree: Mapping[str, Any]) -> str:
    """Return a digest of the names and the plain values of a tree, its arrays, and the shapes and dtypes of its tensors.

    The values of weights and moments are left out: a state is saved often, and they can be gigabytes on another device. So are
    the shapes of the weights, which `load_state_dict` compares with those of the model by name.
    """
    weights = tree.get("tensors")
    if isinstance(weights, Mapping):
        tree = {**tree, "tensors": {name: isinstance(each, Tensor) for name, each in weights.items()}}

    def outlined(value: Any) -> Any:
        match value:
            case {"array": Tensor(is_meta=False) as array}:
                return ["array", array]
            case Tensor():
                return [str(value.dtype), list(value.shape)]
            case Mapping():  # which is no list of pairs
                return ["mapping", [[key, outlined(value[key])] for key in sorted(value, key=str)]]
            case list() | tuple():
                return [outlined(each) for each in value]
        return value

    return digest(outlined(tree), depth=32)
