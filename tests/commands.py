"""Run the `esper` command in this process and in a folder of its own."""

import os
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


def files(folder: Path = Path()) -> list[str]:
    """List every path below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
