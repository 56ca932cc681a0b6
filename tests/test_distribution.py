"""Check that the distribution is `esper-grow`, and that the package that it installs is `esper`."""

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import esper
from esper.leyline.distribution import DISTRIBUTION, EXTRAS, pip_install, warn_of_conflict

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [
    ROOT / "README.md",
    ROOT / "Makefile",
    *(path for folder in ("src", "docs", "scripts") for path in sorted((ROOT / folder).rglob("*.*"))),
]


def other(folder, files="esper/__init__.py,sha256=x,1\n"):
    """Write what pip leaves of the library of the package index that is called esper."""
    (folder / "esper-3.2.dist-info").mkdir()
    (folder / "esper-3.2.dist-info" / "RECORD").write_text(files)


def run(*arguments, path):
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_the_distribution_does_not_have_the_name_of_another_library():
    assert PROJECT["name"] == DISTRIBUTION == "esper-grow"


def test_every_pip_command_installs_this_distribution():
    commands = [
        command
        for path in TEXTS
        if path.suffix in (".py", ".md", "")
        for command in re.findall(r"pip install [^`\n]*esper[^`\n]*", path.read_text(encoding="utf-8"))
    ]
    assert commands, "README and docs name the extras"
    assert [command for command in commands if "esper-grow" not in command and "esper}" not in command] == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_for_an_extra_names_one_that_is_declared(extra):
    assert pip_install(extra) == f"pip install 'esper-grow[{extra}]'"
    assert extra in PROJECT["optional-dependencies"]


def test_every_extra_is_used_by_the_code():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for modules in EXTRAS.values():
        for module in modules:
            assert re.search(rf"(import|from) {module}\b", sources), module


def test_the_version_is_that_of_this_distribution(monkeypatch):
    asked = []
    monkeypatch.setattr("importlib.metadata.version", lambda name: asked.append(name) or "9.8.7")
    assert esper.__version__ == "9.8.7"
    assert asked == ["esper-grow"]


def test_another_library_in_the_place_of_esper_is_one_sentence_at_import(tmp_path):
    (tmp_path / "esper").symlink_to(ROOT / "src" / "esper")
    other(tmp_path)
    ended = run("-c", "import esper, esper.cli", path=tmp_path)
    assert ended.returncode == 0
    assert ended.stderr.splitlines() == [
        f"esper:1: UserWarning: the distribution `esper` 3.2, another library, is installed over `esper-grow` in {tmp_path}; "
        "run `pip uninstall esper`, then `pip install --force-reinstall --no-deps esper-grow`"
    ]


@pytest.mark.parametrize(
    "files", [None, "../../bin/esper,,\n_editable_impl_esper.pth,,\nesper-3.2.dist-info/METADATA,,\n", "\udcff"]
)
def test_a_distribution_that_has_no_file_of_the_package_is_not_warned_of(tmp_path, files):
    if files is not None:
        (tmp_path / "esper-3.2.dist-info").mkdir()
        (tmp_path / "esper-3.2.dist-info" / "RECORD").write_bytes(files.encode(errors="surrogateescape"))
    (tmp_path / "esper_grow-0.1.0.dist-info").mkdir()
    (tmp_path / "esper_grow-0.1.0.dist-info" / "RECORD").write_text("esper/__init__.py,sha256=x,1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_conflict(str(tmp_path))


def test_an_import_of_esper_loads_no_metadata_of_distributions():
    ended = run("-c", "import esper, sys; print('importlib.metadata' in sys.modules)", path=ROOT / "src")
    assert ended.stdout == "False\n"
