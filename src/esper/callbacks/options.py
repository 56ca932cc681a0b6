"""The arguments of a callback that are those of `esper.Growth`."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from esper.leyline.errors import InputError
from esper.runs.growth import Growth

FROM_THE_TRAINER = ("model", "optimizer", "scheduler", "ema", "scaler", "shared")
"""Arguments of `esper.Growth` that a callback takes from its trainer."""


def check_options(callback: str, options: Mapping[str, Any]) -> None:
    """InputError if an argument of a callback is none of `esper.Growth`, or one that the trainer gives."""
    known = [name for name in inspect.signature(Growth).parameters if name not in FROM_THE_TRAINER]
    for name in options:
        if name in FROM_THE_TRAINER:
            raise InputError(f"{callback} takes {name} from the trainer; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) or [", ".join(known)]
            raise InputError(f"{callback} has no argument {name!r}; did you mean {near[0]}?")
