"""The contents of environment.json: versions, device and command of a run."""

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from esper.leyline.distribution import installed_version
from esper.nissa.rows import EnvironmentRow

VERSIONS = ("esper", "python", "torch", "numpy", "safetensors", "scikit-learn")
"""The software whose versions environment.json records."""


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device, git revision of the working directory, and the command line."""
    return {
        **describe_versions(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "git_revision": git_revision(),
        "command": sys.argv,
    }


def environment_row(found: Mapping[str, Any]) -> EnvironmentRow:
    """Return the row of what `describe_environment` found."""
    names = ("platform", "device", "device_name", "threads", "git_revision", "command")
    return EnvironmentRow(versions={name: found[name] for name in VERSIONS}, **{name: found[name] for name in names})


def describe_versions(names: Sequence[str] = VERSIONS) -> dict[str, str | None]:
    """Return the installed versions by name."""
    own = {"esper": installed_version, "python": platform.python_version}
    return {name: own[name]() if name in own else version(name) for name in names}


def version(distribution: str) -> str | None:
    """Return the installed version, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """Return the git commit of the working directory, with the suffix '-dirty' for changed files; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
