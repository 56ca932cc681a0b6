"""The names of the targets to which a run can be exported, and the check of their packages."""

from importlib.util import find_spec

from esper.leyline.distribution import EXTRAS, pip_install
from esper.leyline.errors import InputError

TARGETS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Each is the name of an extra, too."""


def check_installed(target: str) -> None:
    """InputError if the package of a target is not installed; nothing is imported."""
    for module in EXTRAS[target]:
        if find_spec(module) is None:
            raise InputError(f"the target {target} needs {module}, which is not installed; run {pip_install(target)}")
