"""A run of three environments on iris, and what a command prints."""

import pytest

import esper
from esper.cli import main


def grow_iris(folder, steps=6):
    """The folder of a run, grown by random decisions."""
    settings = {"envs": 3, "steps": steps, "models": "none", "baselines": ["twin"]}
    esper.grow("iris", settings, controller="random-valid", run=folder, progress=False)
    return folder


def printed(capsys, *arguments):
    """Exit code, output and errors of a command."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err
