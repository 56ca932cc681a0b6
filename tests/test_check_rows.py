"""Check that `esper.check_rows` names what of a user's own task depends on neighbours."""

import pytest
import torch
from torch import nn

import esper


class Centred(nn.Module):
    """Subtracts the mean over the rows of a stack."""

    stacks = True

    def __init__(self):
        super().__init__()
        self.map = esper.Linear(8, 8)

    def forward(self, x):
        y = self.map(x)
        return y - y.mean(0) if y.dim() == 3 else y


def own_task(middle):
    x = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))

    def host():
        return esper.SegmentedHost(
            [nn.Linear(4, 8), middle(), nn.Linear(8, 2)], [esper.SlotSpec("middle", after=1, width=8)]
        )

    return esper.task("own", x, (x[:, 0] > x[:, 1]).long(), host=host, classes=2)


def test_a_segment_of_a_users_host_that_mixes_rows_is_named():
    found = esper.check_rows(own_task(Centred))
    assert list(found) == ["segments.1"]
    assert "differs from the same rows in one of 5" in found["segments.1"]


def test_nothing_is_named_where_every_row_stands_alone():
    assert esper.check_rows(own_task(lambda: nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8)))) == {}


@pytest.mark.parametrize("name", ["digits", "repair"])
def test_nothing_of_a_task_of_ours_is_named(name):
    assert esper.check_rows(esper.get_task(name)) == {}
