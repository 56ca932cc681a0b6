"""What a run began with beside its config: the versions it ran under, and the data it read."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.errors import InputError, RunWarning, warn
from esper.leyline.parsing import parse_json
from esper.leyline.task import AnyTask, Mixture
from esper.runs.environment import describe_versions
from esper.store.changes import read_trail
from esper.store.files import ENVIRONMENT
from esper.store.reading import read_kept

DATA = "data"
"""The key of environment.json under which the fingerprints of the tasks stand, by the name of the task."""

_COMPARED = ("esper", "torch", "numpy", "python")
_SPLITS = ("train", "probe", "validation", "test")
_BESIDE = ("objective", "pixels", "scaling", "classes", "weights")  # of a task, beside its splits
_LARGEST = 64 * 2**20  # bytes of environment.json that are read

Fingerprint = dict[str, str]
"""Of one task: the first 16 hexadecimal digits of a sha256 by what they are of, as 'train' or 'objective'."""


class Origin(NamedTuple):
    """What the numbers of a run depend on beside its config and its seed."""

    versions: dict[str, str | None]  # of Esper, torch, numpy and Python
    data: dict[str, Fingerprint]  # by the name of the task


def origin_of(tasks: Sequence[AnyTask]) -> Origin:
    """That of a run on these tasks here and now. Of a sealed task the test split is no part."""
    return Origin(describe_versions(_COMPARED), {task.name: fingerprint(task) for task in tasks})


def fingerprint(task: AnyTask) -> Fingerprint:
    """By what the data of a task are known: its splits, its objective, and how its examples are read.

    Every example of a task is hashed once, a quarter to a whole GB a second. A mixture makes its data from keys; the first
    instance of each part stands for the others.
    """
    if isinstance(task, Mixture):
        found = {f"{part} instances": _of_instance(task, keys) for part, keys in sorted(task.ranges.items())}
        return {**found, "objective": _digest(task.objective)}
    splits = {name: split for name in _SPLITS if (split := getattr(task, name)) is not None}
    return {
        name: _digest(value) for name, value in {**splits, **{name: getattr(task, name) for name in _BESIDE}}.items()
    }


class Difference(NamedTuple):
    """Between what a run began with, or went on with last, and what it goes on with; it is recorded in changes.json."""

    noted: tuple[str, ...]  # in words, for the events
    origin: Origin  # the present one


def compare_origin(folder: Path, now: Origin, other_data: bool) -> Difference | None:
    """Compare what a run began with, or went on with last, and what it would go on with; None where nothing differs.

    Other versions are warned of (RunWarning). InputError where the data are others and `other_data` is not set.
    """
    known = _recorded(folder)
    if known is None:
        warn(f"{folder} does not say with which versions and data the run began; they are not compared", RunWarning)
        return Difference((), now)
    versions, data = known
    found = [
        f"{name} {versions[name]} -> {new}" for name, new in now.versions.items() if versions.get(name, new) != new
    ]
    if found:
        warn(
            f"the run in {folder} goes on under other versions ({', '.join(found)}); its numbers may differ from those it would "
            "have had",
            RunWarning,
        )
    unknown = sorted(now.data.keys() - data.keys())
    if unknown:
        warn(
            f"{folder} holds no fingerprint of the data of {', '.join(unknown)}, as runs of earlier versions do; whether they "
            "are the same is not checked",
            RunWarning,
        )
    differ = {name: _differing(data[name], of) for name, of in now.data.items() if name in data}
    words = [f"{', '.join(parts)} of task {name}" for name, parts in differ.items() if parts]
    if words and not other_data:
        raise InputError(
            f"other data than the run in {folder} began with, by their sha256: {'; '.join(words)}; bring those back, or go on "
            "with the others, on record, by --other-data (from Python other_data=True)"
        )
    noted = (*found, *(f"other data: {each}" for each in words))
    return Difference(noted, now) if noted or unknown else None


def _recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(versions, data) that a run began with, under those that it went on with; None where nothing can be read."""
    layers: list[Mapping[str, Any]] = []
    try:
        content = parse_json(read_kept(folder / ENVIRONMENT, _LARGEST, ""), folder / ENVIRONMENT, "")
    except InputError:
        content = None
    if isinstance(content, dict):
        layers.append(
            {"versions": {name: content[name] for name in _COMPARED if name in content}, DATA: content.get(DATA)}
        )
    layers += [entry.origin for entry in read_trail(folder).entries if entry.origin is not None]
    versions: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for layer in layers:
        for known, name in ((versions, "versions"), (data, DATA)):
            part = layer.get(name)
            known.update(part if isinstance(part, dict) else {})
    return (versions, data) if layers else None


def _differing(known: Any, now: Fingerprint) -> list[str]:
    """What of a task is not what it was; a name that one of the two lacks, as of another version, is not compared."""
    before = known if isinstance(known, dict) else {}
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


def _of_instance(task: Mixture, keys: range) -> str:
    """The first instance of a part of a mixture."""
    instance = task.instance(keys.start)
    test = task.test_split(keys.start)
    return _digest([instance.train, instance.probe, instance.validation, instance.pixels, test])


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    _feed(digest, value, 8)
    return digest.hexdigest()[:16]


def _feed(digest: "hashlib._Hash", value: Any, depth: int) -> None:
    """Add what a value is to a digest, down to so many levels; of functions and of unknown objects the name."""
    match value:
        case Tensor():
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        case None | bool() | int() | float() | str() | bytes():
            digest.update(f"{type(value).__name__} {value!r};".encode())
        case np.generic() | np.ndarray():
            digest.update(f"{value.dtype}{value.shape}{value.tolist()!r};".encode())
        case dict():
            _feed(digest, sorted(value.items(), key=str), depth)
        case list() | tuple():
            digest.update(f"[{len(value)}".encode())
            for item in value if depth else ():
                _feed(digest, item, depth - 1)
        case nn.Module():
            digest.update(f"<{type(value).__qualname__}".encode())
            _feed(digest, value.state_dict(), depth)
        case _ if is_dataclass(value) and depth and not isinstance(value, type):
            digest.update(f"<{type(value).__qualname__}".encode())
            for part in fields(value):
                _feed(digest, getattr(value, part.name), depth - 1)
        case _:
            digest.update(f"<{getattr(value, '__qualname__', type(value).__qualname__)}".encode())
