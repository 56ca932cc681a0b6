"""The distribution that Esper is installed from: its name, its version, its extras, and a library that takes its place.

The package `esper` comes from the distribution `esper-grow`. The distribution `esper` of the package index is another
library, whose package is called `esper` too, so pip writes the files of both into one folder.
"""

import os

DISTRIBUTION = "esper-grow"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

EXTRAS = {"gym": ("gymnasium",), "vision": ("pyarrow", "PIL")}
"""The modules that each extra of pyproject.toml installs."""


def installed_version() -> str | None:
    """The version of the installed distribution; None where Esper runs from its sources."""
    from importlib import metadata  # ten milliseconds, which an import of esper need not spend

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def pip_install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def warn_of_another(folder: str = os.path.dirname(_PACKAGE)) -> None:
    """Warn, in one sentence, where the distribution `esper` has files in the package `esper` of `folder`.

    Where there is no such distribution, this is one listing of the folder: less than a millisecond.
    """
    try:
        names = os.listdir(folder)
    except OSError:  # the package is in a zip archive
        return
    for name in names:
        if (
            name.startswith("esper-")
            and name.endswith(".dist-info")
            and _has_package(os.path.join(folder, name, "RECORD"))
        ):
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
"""What the warnings module notes there, so that the sentence is shown once."""


def _has_package(record: str) -> bool:
    try:
        with open(record, encoding="utf-8") as file:
            return any(line.startswith("esper/") for line in file)
    except (OSError, UnicodeDecodeError):
        return False
