"""Find the distribution that Esper is installed from: its name, version and extras. Check for a conflicting one.

The distribution `esper-grow` installs the package `esper`. The distribution `esper` on the package index is an unrelated
library that installs a package of the same name, so pip writes the files of both into one folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTION = "esper-grow"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

EXTRAS = {
    "gym": ("gymnasium",),
    "vision": ("pyarrow", "PIL"),
    "frames": ("pandas", "pyarrow"),
    "tui": ("textual",),
    "web": ("starlette", "uvicorn"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "lightning": ("lightning",),
    "hf": ("transformers",),
    "ray": ("ray",),
}
"""The modules that each extra of pyproject.toml installs."""


def installed_version(name: str = DISTRIBUTION) -> str | None:
    """Return the version of an installed distribution; None if it is not, as where Esper runs from its sources."""
    from importlib import metadata  # imported here because it takes 10 ms

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def pip_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def of_extra(extra: str, sentence: str) -> Iterator[None]:
    """Raise InputError with the command that installs an extra if the body cannot import; `sentence` ends in `which is`."""
    try:
        yield
    except ImportError as error:
        from esper.leyline.messages import InputError, typed_line  # what imports `esper` does not need them

        found = "not installed" if isinstance(error, ModuleNotFoundError) else f"damaged: {typed_line(error)}"
        raise InputError(f"{sentence} {found}; run {pip_install(extra)}") from None


TARGETS = ("tensorboard", "wandb", "mlflow", "trackio")
"""The targets to which a run can be exported; each is the name of an extra, too."""


def check_installed(target: str) -> None:
    """Raise InputError if the package of a target is not installed; nothing is imported."""
    from importlib.util import find_spec

    from esper.leyline.messages import InputError  # what imports `esper` does not need it

    for module in EXTRAS[target]:
        if find_spec(module) is None:
            raise InputError(f"the target {target} needs {module}, which is not installed; run {pip_install(target)}")


def warn_of_conflict(folder: str = os.path.dirname(_PACKAGE)) -> None:
    """Warn if the distribution `esper` has files in the package `esper` of `folder`. Takes less than 1 ms without it."""
    try:
        names = os.listdir(folder)
    except OSError:  # the package is in a zip archive
        return
    for name in [each for each in names if each.startswith("esper-") and each.endswith(".dist-info")]:
        try:
            with open(os.path.join(folder, name, "RECORD"), encoding="utf-8") as file:
                installs = any(line.startswith("esper/") for line in file)
        except (OSError, UnicodeDecodeError):
            continue
        if installs:
            import warnings

            version = name.removeprefix("esper-").removesuffix(".dist-info")
            warnings.warn_explicit(
                f"the distribution `esper` {version}, another library, is installed over `{DISTRIBUTION}` in {folder}; run "
                f"`pip uninstall esper`, then `pip install --force-reinstall --no-deps {DISTRIBUTION}`",
                UserWarning,
                "esper",
                1,
                registry=_SHOWN,
            )


_SHOWN: dict[str | tuple[str, type[Warning], int], int] = {}
"""The registry of the warnings module, so that the warning is shown once."""
