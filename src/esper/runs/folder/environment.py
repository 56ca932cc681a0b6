"""Describe where a run takes place, in environment.json, and compare it with where the run began when it is resumed.

The numbers of a run depend on its config and its seed, and also on its origin: the versions of the software, the data, and the
code of the user's own functions.
"""

import hashlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.config.parsing import parse_json
from esper.leyline.config.tree import Config
from esper.leyline.data.task import AnyTask, Mixture
from esper.leyline.distribution import installed_version
from esper.leyline.messages import InputError, RunWarning, warn
from esper.leyline.reference import digest_of, is_reference, own_code
from esper.nissa.rows import EnvironmentRow
from esper.store.changes import read_trail
from esper.store.disk import read_kept
from esper.store.files import ENVIRONMENT
from esper.store.tensors import bytes_of
from esper.tolaria.runtime import describe_gpu

VERSIONS = ("esper", "python", "torch", "numpy", "safetensors", "scikit-learn")
"""The software whose versions environment.json records."""
DATA = "data"
"""The key of environment.json that holds the fingerprints of the tasks by name."""
COMPARED = ("esper", "torch", "numpy", "python")
"""The software whose versions must be the same in all processes of a run, and are compared when it is resumed."""
CODE = "code"
"""The key of environment.json that holds digests of the files of code that the config refers to, by reference."""

_SPLITS = ("train", "source", "probe", "validation", "test")
# attributes of a task that are hashed with its splits
_BESIDE = ("objective", "pixels", "scaling", "classes", "weights")
_LARGEST = 64 * 2**20  # largest environment.json that is read [bytes]

Fingerprint = dict[str, str]
"""The first 16 hexadecimal digits of the sha256 of each part of a task, such as 'train' or 'objective'."""


def describe_environment(device: torch.device, config: Config) -> dict[str, Any]:
    """Return the versions, device, command line, and commit of the working directory, with '-dirty' for changed files.

    With a GPU, `gpu` holds its driver, its CUDA version and what of the config changes its arithmetic.
    """
    git = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        revision = None
    gpu = describe_gpu(device, config)
    return {
        **describe_versions(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        **({"gpu": gpu} if gpu else {}),
        "threads": torch.get_num_threads(),
        "git_revision": revision,
        "command": sys.argv,
    }


def environment_row(found: Mapping[str, Any]) -> EnvironmentRow:
    """Return the row of the events that holds an environment."""
    names = ("platform", "device", "device_name", "threads", "git_revision", "command")
    return EnvironmentRow(versions={name: found[name] for name in VERSIONS}, **{name: found[name] for name in names})


def describe_versions(names: Sequence[str] = VERSIONS) -> dict[str, str | None]:
    """Return the installed versions by name; None for what is not installed."""
    own = {"esper": installed_version(), "python": platform.python_version()}
    return {name: own[name] if name in own else installed_version(name) for name in names}


def origin_of(tasks: Sequence[AnyTask], controller: str) -> dict[str, dict[str, Any]]:
    """Return on what the numbers of a run in this process depend, in addition to its config and its seed.

    `versions` are those of Esper, torch, numpy and Python, and for each function of the user's own that the config refers to the
    digest of its file; `data` are the fingerprints of the tasks by name. That of a sealed task lacks the test split.
    """
    own = own_code(controller)
    references = [*(task.name for task in tasks if is_reference(task.name)), *([] if own is None else [own[1]])]
    code = {name: known for name in references if (known := digest_of(name)) is not None}
    return {"versions": {**describe_versions(COMPARED), **code}, DATA: {task.name: fingerprint(task) for task in tasks}}


def fingerprint(task: AnyTask) -> Fingerprint:
    """Return the digests of the splits of a task, its objective, and the scaling of its examples.

    Hashing takes one to four seconds per GB. Of a train split that is read batch by batch, the first examples are
    hashed, and which examples of the Dataset it has; of a mixture, the first instance of each part, because its data
    follow from keys.
    """
    if isinstance(task, Mixture):
        parts = {}
        for part, keys in sorted(task.ranges.items()):
            first, test = task.instance(keys.start), task.test_split(keys.start)
            parts[f"{part} instances"] = digest([first.train, first.probe, first.validation, first.pixels, test])
        return {**parts, "objective": digest(task.objective)}
    values = {name: getattr(task, name) for name in (*_SPLITS, *_BESIDE)}
    return {name: digest(value) for name, value in values.items() if value is not None or name in _BESIDE}


def compare_origin(folder: Path, now: Mapping[str, dict[str, Any]], other_data: bool) -> tuple[str, ...] | None:
    """Compare the recorded origin of a run with the current one, whose data must be the same unless `other_data`.

    Returns sentences about the differences, for changes.json and the events, or None if the recorded origin stays in
    effect.
    """
    layers: list[Mapping[str, Any]] = []  # of versions and data, the latest last
    try:
        content = parse_json(read_kept(folder / ENVIRONMENT, _LARGEST, ""), folder / ENVIRONMENT, "")
    except InputError:
        content = None
    if isinstance(content, dict):
        code = content.get(CODE)
        versions_then = {name: content[name] for name in COMPARED if name in content}
        layers.append({"versions": versions_then | (code if isinstance(code, dict) else {}), DATA: content.get(DATA)})
    layers += [entry.origin for entry in read_trail(folder).entries if entry.origin is not None]
    if not layers:
        warn(f"{folder} does not say with which versions and data the run began; they are not compared", RunWarning)
        return ()
    parts = [[part for layer in layers if isinstance(part := layer.get(name), dict)] for name in ("versions", DATA)]
    versions, data = ({key: value for part in own for key, value in part.items()} for own in parts)
    found = [
        f"{name} {versions[name]} -> {new}" for name, new in now["versions"].items() if versions.get(name, new) != new
    ]
    if found:
        warn(
            f"the run in {folder} continues under other versions ({', '.join(found)}); its numbers may differ from those of an "
            "uninterrupted run",
            RunWarning,
        )
    unknown = sorted(now[DATA].keys() - data.keys())
    if unknown:
        warn(
            f"{folder} holds no fingerprint of the data of {', '.join(unknown)}, as runs of earlier versions do; whether they "
            "are the same is not checked",
            RunWarning,
        )
    words = []
    for name, fingerprints in now[DATA].items():
        before = data.get(name)
        known_parts = before if isinstance(before, dict) else {}
        # a part that only one of the two contains is not compared
        others = [part for part, digest in fingerprints.items() if known_parts.get(part, digest) != digest]
        if others:
            words.append(f"{', '.join(others)} of task {name}")
    if words and not other_data:
        raise InputError(
            f"the data differ, by sha256, from those that the run in {folder} began with: {'; '.join(words)}; restore the old "
            "data, or continue with the new data by --other-data (from Python other_data=True), which is recorded"
        )
    noted = (*found, *(f"other data: {each}" for each in words))
    return noted if noted or unknown else None


def digest(value: Any, depth: int = 8) -> str:
    """Return the first 16 hexadecimal digits of the sha256 of a value: arrays with all their values, in nested containers."""
    made = hashlib.sha256()
    _feed(made, value, depth)
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
            for part in (each for each in fields(value) if each.compare):
                _feed(digest, getattr(value, part.name), depth - 1)
        case _:
            digest.update(f"<{getattr(value, '__qualname__', type(value).__qualname__)}".encode())
