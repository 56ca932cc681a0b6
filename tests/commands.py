"""Run the `esper` command, or a script, in this process and in a folder of its own."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from esper.cli import main


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Run the test in a folder of its own, in a terminal of 200 columns; processes that it starts find the same modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def esper(capsys):
    """Return a function that runs the command and gives (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def script(capsys, monkeypatch):
    """Return a function that runs a script here, where it need not load torch anew, and gives what `esper` gives."""

    def run(path: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        capsys.readouterr()
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def files(folder: Path = Path()) -> list[str]:
    """List every path below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
