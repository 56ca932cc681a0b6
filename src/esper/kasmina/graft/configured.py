"""Keep the configs of models that are loaded by them, as those of transformers, true to what the models became."""

import copy
import math
import re
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from esper.kasmina.graft.grafted import with_own_files
from esper.kasmina.graft.multiplying import HEADS, NO_WIDTHS, WIDTHS, configs
from esper.leyline.errors import GrowthWarning, warn

_SIZES = re.compile(f"{WIDTHS.pattern}|ratio", re.I)
"""Names of entries of a config that say a width, or how many times as wide something is."""


class Configured:
    """Compares the models in a network that have a `config` and a `save_pretrained` with what is built from that config."""

    def __init__(self, network: nn.Module) -> None:
        """The network as it is before it changes: what differs then is the user's."""
        parts = [part for _, part in with_own_files(network) if vars(part).get("config") is not None]
        self._parts = [(part, set(_differences(part))) for part in parts]

    def follow(self, factor: float = 1.0) -> None:
        """Multiply widths in the configs where shapes are then those of the model, and warn of a difference that is left."""
        for part, known in self._parts:
            different = _differences(part)
            for name, own in list(vars(part.config).items()) if different.keys() - known and factor > 1 else ():
                if type(own) not in (int, float) or NO_WIDTHS.search(name) or not _SIZES.search(name):
                    continue
                places = [vars(each) for inner in part.modules() for _, each in configs(inner, "")]
                places = [each for each in places if each.get(name) == own]
                for each in places:
                    each[name] = math.ceil(factor * own) if type(own) is int else factor * own
                fewer = _differences(part)
                if _shapes(fewer) < _shapes(different):
                    different = fewer
                else:
                    for each in places:
                        each[name] = own
            left = sorted(_shapes(different) - known) or sorted(different.keys() - known)
            if left:
                own, built = different[left[0]]
                where = f"{left[0]!r}{f' and at {len(left) - 1} more places' * (len(left) > 1)}"
                mend = "set that again on what from_pretrained returns, or it computes something else"
                if isinstance(own, tuple):
                    mend = "set what counts it in model.config before save_pretrained, or it is not loaded"
                warn(
                    f"the {type(part).__name__} has {own} at {where}, where one that is built from its config has {built}; "
                    f"{mend}",
                    GrowthWarning,
                )


def _shapes(different: dict[str, tuple[Any, Any]]) -> set[str]:
    return {name for name, pair in different.items() if any(isinstance(each, tuple) for each in pair)}


def _differences(part: Any) -> dict[str, tuple[Any, Any]]:
    """Return what a model has and what one that is built from its config has, by name, where these are not equal.

    That is shapes of its state, and fractions and numbers of heads among attributes; nothing where none can be built.
    """
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
        own, built = _facts(part), _facts(type(part)(copy.deepcopy(part.config)))
        return {name: (own.get(name), built.get(name)) for name in own | built if own.get(name) != built.get(name)}
    return {}


def _facts(network: nn.Module) -> dict[str, Any]:
    numbers = {
        f"{path}.{name}".lstrip("."): value
        for path, part in network.named_modules()
        for name, value in vars(part).items()
        if type(value) is float or (type(value) is int and HEADS.search(name))
    }
    shapes = {name: tuple(each.shape) for name, each in network.state_dict().items() if hasattr(each, "shape")}
    return numbers | shapes
