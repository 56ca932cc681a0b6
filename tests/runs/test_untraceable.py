"""Check that networks that torch.export cannot trace are one line of a run, whatever torch would print of them."""

import logging

import pytest
import torch
from torch import nn

import esper


class Branch(nn.Module):
    """Asks the data which way to go."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


def host():
    return esper.SegmentedHost([nn.Linear(4, 8), Branch(), nn.Linear(8, 2)], [esper.SlotSpec("m", after=1, width=8)])


@pytest.fixture
def tried(monkeypatch):
    """Record the networks that torch.export is asked to trace."""
    asked, export = [], torch.export.export
    monkeypatch.setattr(
        torch.export,
        "export",
        lambda network, *rest, **named: (asked.append(network), export(network, *rest, **named))[1],
    )
    return asked


def test_hosts_that_cannot_be_traced_are_one_line_and_one_try_for_all(tmp_path, capfd, tried):
    x = torch.linspace(-1, 1, 240).reshape(60, 4)
    task = esper.task("branch", x, torch.arange(60) % 2, host=host, classes=2)
    settings = {"envs": 3, "steps": 1, "twin": False, "data.batch_size": 8}
    summary = esper.grow(task, settings, controller="never", run=tmp_path / "r", progress=True)
    out, err = capfd.readouterr()
    assert summary["untraced"] == [0, 1, 2]
    assert len(tried) == 1
    (line,) = [line for line in err.splitlines() if "torch.export" in line]
    assert line.startswith("3 of 3 networks have no model.pt2, as torch.export cannot trace them: ")
    assert "data-dependent" in line
    assert "def forward" not in out + err
    assert "W1" not in err
    assert len(err.splitlines()) < 8
    assert logging.root.manager.disable == logging.NOTSET
    assert {path.name for path in (tmp_path / "r" / "models").iterdir()} == {"best", "env-000", "env-001", "env-002"}
