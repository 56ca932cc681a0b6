"""The versions and the data of a run, and their comparison when the run is resumed."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from esper.leyline.errors import InputError, RunWarning, warn
from esper.leyline.parsing import parse_json
from esper.leyline.reference import digest_of
from esper.leyline.resuming import is_reference, own_code
from esper.leyline.task import AnyTask, Mixture
from esper.runs.environment import describe_versions
from esper.store.changes import read_trail
from esper.store.files import ENVIRONMENT
from esper.store.reading import read_kept
from esper.store.tensors import bytes_of

DATA = "data"
"""The key of environment.json that holds the fingerprints of the tasks by name."""
CODE = "code"
"""The key of environment.json that holds digests of the files of code that the config refers to, by reference."""

_COMPARED = ("esper", "torch", "numpy", "python")
_SPLITS = ("train", "source", "probe", "validation", "test")
_BESIDE = (
    "objective",
    "pixels",
    "scaling",
    "classes",
    "weights",
)  # attributes of a task that are hashed with its splits
_LARGEST = 64 * 2**20  # largest environment.json that is read [bytes]

Fingerprint = dict[str, str]
"""The first 16 hexadecimal digits of the sha256 of each part of a task, such as 'train' or 'objective'."""


class Origin(NamedTuple):
    """The quantities on which the numbers of a run depend, in addition to its config and its seed.

    Attributes:
        versions (mapping): versions of Esper, torch, numpy and Python, and for each function of the user's own that the config
            refers to, the digest of its file
        data (mapping): fingerprints of the tasks by name
    """

    versions: dict[str, str | None]
    data: dict[str, Fingerprint]


def origin_of(tasks: Sequence[AnyTask], controller: str = "") -> Origin:
    """Return the origin of a run on these tasks in this process. The fingerprint of a sealed task lacks the test split.

    controller: that of the config.
    """
    own = own_code(controller)
    references = [*(task.name for task in tasks if is_reference(task.name)), *([] if own is None else [own[1]])]
    code = {name: known for name in references if (known := digest_of(name)) is not None}
    return Origin({**describe_versions(_COMPARED), **code}, {task.name: fingerprint(task) for task in tasks})


def fingerprint(task: AnyTask) -> Fingerprint:
    """Return the fingerprint of a task: digests of its splits, its objective, and the scaling of its examples.

    Of a train split that is read batch by batch, the first examples are hashed, and which examples of the Dataset it has.

    Hashing takes one to four seconds per GB. Of a mixture, only the first instance of each part is hashed, because its data
    follow from keys.
    """
    if isinstance(task, Mixture):
        parts = {f"{part} instances": _of_instance(task, keys) for part, keys in sorted(task.ranges.items())}
        return {**parts, "objective": digest(task.objective)}
    values = {name: getattr(task, name) for name in (*_SPLITS, *_BESIDE)}
    return {name: digest(value) for name, value in values.items() if value is not None or name in _BESIDE}


class Difference(NamedTuple):
    """The difference between the origin of a run and the origin with which it is resumed. It is recorded in changes.json.

    Attributes:
        noted (texts): the differences, for the events
        origin (Origin): the origin with which the run is resumed
    """

    noted: tuple[str, ...]
    origin: Origin


def compare_origin(folder: Path, now: Origin, other_data: bool) -> Difference | None:
    """Compare the recorded origin of a run with the current one. Returns None if they are equal.

    Issues a RunWarning for other versions. Raises InputError for other data, unless `other_data` is set.
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
            f"the run in {folder} continues under other versions ({', '.join(found)}); its numbers may differ from those of an "
            "uninterrupted run",
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
            f"the data differ, by sha256, from those that the run in {folder} began with: {'; '.join(words)}; restore the old "
            "data, or continue with the new data by --other-data (from Python other_data=True), which is recorded"
        )
    noted = (*found, *(f"other data: {each}" for each in words))
    return Difference(noted, now) if noted or unknown else None


def _recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the recorded versions and data of a run, the latest of each; None if nothing can be read."""
    layers: list[Mapping[str, Any]] = []
    try:
        content = parse_json(read_kept(folder / ENVIRONMENT, _LARGEST, ""), folder / ENVIRONMENT, "")
    except InputError:
        content = None
    if isinstance(content, dict):
        code = content.get(CODE)
        versions_then = {name: content[name] for name in _COMPARED if name in content}
        layers.append({"versions": versions_then | (code if isinstance(code, dict) else {}), DATA: content.get(DATA)})
    layers += [entry.origin for entry in read_trail(folder).entries if entry.origin is not None]
    versions: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for layer in layers:
        for known, name in ((versions, "versions"), (data, DATA)):
            part = layer.get(name)
            known.update(part if isinstance(part, dict) else {})
    return (versions, data) if layers else None


def _differing(known: Any, now: Fingerprint) -> list[str]:
    """Return the parts whose digests differ. A part that only one of the two contains is not compared."""
    before = known if isinstance(known, dict) else {}
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


def _of_instance(task: Mixture, keys: range) -> str:
    """Return the digest of the first instance of a part of a mixture."""
    instance = task.instance(keys.start)
    test = task.test_split(keys.start)
    return digest([instance.train, instance.probe, instance.validation, instance.pixels, test])


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the sha256 of a value: arrays with all their values, in containers."""
    made = hashlib.sha256()
    _feed(made, value, 8)
    return made.hexdigest()[:16]


def _feed(digest: "hashlib._Hash", value: Any, depth: int) -> None:
    """Add a value to a digest, down to `depth` nested levels. Functions and unknown objects are represented by their names."""
    match value:
        case Tensor():
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(bytes_of(value.detach().cpu()))
        case None | bool() | int() | float() | str() | bytes():
            digest.update(f"{type(value).__name__} {value!r};".encode())
        case np.generic() | np.ndarray():
            digest.update(f"{value.dtype}{value.shape}{value.tolist()!r};".encode())
        case Mapping():
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
