"""Find files of installed packages without importing the packages."""

import importlib.util
from pathlib import Path

from esper.leyline.messages import InputError


def package_file(module: str, path: str, package: str) -> Path:
    """Return the path of a file in the folder of a module. InputError names the package of PyPI if the file is not there."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InputError(f"the package {package} is not installed; run pip install --no-deps {package}")
    file = Path(spec.origin).parent / path
    if not file.is_file():
        raise InputError(f"{file} is not there; run pip install --no-deps --force-reinstall {package}")
    return file
