"""Grow three environments on iris, and return what a command prints."""

import pytest

import esper
from esper.cli import main


def grow_iris(folder, steps=6):
    """Grow a run by random decisions, and return its folder."""
    settings = {"envs": 3, "steps": steps, "models": "none", "baselines": ["twin"]}
    esper.grow("iris", settings, controller="random-valid", run=folder, progress=False)
    return folder


def printed(capsys, *arguments):
    """Run a command and return its exit code, output and errors."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err
