"""Let the config of a model that saves itself, as those of Hugging Face do, count the features of layers that grew."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from esper.kasmina.graft.grafted import with_own_files
from esper.kasmina.graft.grown import CHILD, class_of

_INNER = re.compile("inner|intermediate|ff|mlp|hidden|dim")
"""Names of settings that count inner features, and may be None for a multiple of the width, as `n_inner`."""


def count_in_configs(network: nn.Module, widened: Mapping[str, tuple[int, int]]) -> list[str]:
    """Set what counts the features of layers that became wider in each `config` that is saved with a part of a network.

    `from_pretrained` builds the class from the config, so a value is set only if the class then has the shapes of the network.
    widened: the widths of layers before and after. Returns the names of the parts that no value builds, as where one block of
    several became wider.
    """
    cannot = []
    for path, part in with_own_files(network):
        grown = {widths for name, widths in widened.items() if name.startswith(f"{path}." if path else "")}
        if grown and not _counts(part, grown):
            cannot.append(path)
    return cannot


def _counts(part: Any, grown: set[tuple[int, int]]) -> bool:
    """Return whether the config of a part builds its shapes, after a setting got another value where that is needed."""
    if "config" not in vars(part):
        return False
    if _builds(part, part.config):
        return True
    if len(grown) != 1:
        return False
    ((before, now),) = grown
    settings = vars(part.config)
    counting = [name for name, value in settings.items() if type(value) is int and value == before]
    counting += [name for name, value in settings.items() if value is None and _INNER.search(name)]
    for name in counting:
        other = copy.deepcopy(part.config)
        setattr(other, name, now)
        if _builds(part, other):
            setattr(part.config, name, now)
            return True
    return False


def _builds(part: nn.Module, config: Any) -> bool:
    """Return whether the class of a part, built from a config, has parameters and buffers of its shapes."""
    kind: Any = class_of(part)
    try:
        with torch.device("meta"):
            built = kind(config)
    except Exception:  # a config may refuse a value, in any way
        return False
    shapes = [
        {name: value.shape for name, value in each.state_dict().items() if f".{CHILD}." not in f".{name}"}
        for each in (part, built)
    ]
    return shapes[0] == shapes[1]
