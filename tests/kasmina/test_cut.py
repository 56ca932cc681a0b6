"""Test plain modules as hosts: an nn.Sequential and other modules, cut into segments with slots between them."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.kasmina.host import CutHost
from esper.leyline.messages import InputError
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry

X = torch.randn(2, 6)


class Residual(nn.Module):
    """Keeps layers as attributes, with functions and skips between them."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.head(x.view(x.size(0), -1))


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.block(torch.relu(self.block(torch.relu(self.stem(x))))))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self, bidirectional):
        super().__init__()
        self.table, self.mix = nn.Embedding(5, 6), nn.GRU(6, 4, batch_first=True, bidirectional=bidirectional)
        self.hidden, self.head = nn.Linear(8 if bidirectional else 4, 6), nn.Linear(6, 5)

    def forward(self, x):
        mixed, _ = self.mix(self.table(x))
        return self.head(torch.relu(self.hidden(mixed)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, a, b):
        return self.head(torch.relu(self.left(a) + self.right(b)))


def plain():
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)
    )


def nested():
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 4), nn.ReLU()), nn.Linear(4, 2)
    )


def images():
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6, 2))


def repeated():
    layer = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("build", "x", "slots", "segments"),
    [
        (plain, X, [("0", 8, "vector"), ("4", 4, "vector")], 3),
        (nested, X, [("0.0", 8, "vector"), ("1.0", 4, "vector")], 3),
        (Residual, X, [("stem", 8, "vector"), ("blocks.0.2", 8, "vector"), ("blocks.1.2", 8, "vector")], 4),
        (repeated, X, [("0", 8, "vector"), ("4", 8, "vector")], 3),
        (Repeated, X, [("stem", 8, "vector"), ("block", 8, "vector")], 3),
        (images, torch.randn(2, 1, 9, 9), [("0", 4, "map"), ("3", 6, "map")], 3),
        (Images, torch.randn(2, 1, 9, 9), [("first", 4, "map"), ("second", 6, "map")], 3),
        (Pair, (torch.randn(2, 3), torch.randn(2, 5)), [("right", 4, "vector")], 2),
        (Pair, {"a": torch.randn(2, 3), "b": torch.randn(2, 5)}, [("right", 4, "vector")], 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_plain_module_is_cut_into_segments_that_compute_what_it_does(build, x, slots, segments):
    made = []

    def factory():
        made.append(build())
        return made[-1]

    host = CutHost(factory, x)()
    assert [(slot.name, slot.width, slot.kind) for slot in host.slots] == slots
    assert [slot.after for slot in host.slots] == list(range(len(slots)))
    assert len(host.segments) == segments
    assert host.training
    assert all(module.training for module in host.modules())
    whole = made[-1].eval()
    batch = x if isinstance(x, tuple) else ((), x) if isinstance(x, dict) else (x,)
    given = whole(**x) if isinstance(x, dict) else whole(*batch)
    assert torch.equal(host.eval()(**x) if isinstance(x, dict) else host(*batch), given)
    assert {id(value) for value in host.parameters()} == {id(value) for value in whole.parameters()}


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_slot_is_causal_where_no_position_depends_on_later_ones(bidirectional):
    host = CutHost(lambda: Tokens(bidirectional), torch.zeros(2, 9, dtype=torch.int64))()
    assert {slot.name: slot.causal for slot in host.slots if slot.name != "table"} == {
        "mix": not bidirectional,
        "hidden": not bidirectional,
    }


class Undecided(Residual):
    def forward(self, x):
        return self.head(self.stem(x)) if x.sum() > 0 else self.head(self.stem(-x))


class Functional(Residual):
    def forward(self, x):
        return self.head(F.dropout(self.stem(x), training=self.training))


class Sound(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 4), nn.Flatten())


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Undecided, r"the host, a Undecided, cannot be cut into segments, as torch\.fx cannot trace it \(TraceError: "),
        (Functional, r"its forward does other things in training than in evaluation; use modules such as nn\.Dropout"),
        (
            Sound,
            r"has no place for a slot: nowhere does one tensor of shape \(B, C\), \(B, C, H, W\) or \(B, L, C\) lead",
        ),
        (lambda: nn.Sequential(nn.Linear(6, 2)), "the host, a Sequential, has no place for a slot"),
        (
            lambda: nn.Sequential(nn.Linear(5, 2)),
            r"cannot run on examples of shape \(6,\): RuntimeError: .*; make the two fit",
        ),
    ],
)
def test_a_module_that_cannot_be_cut_is_one_sentence(build, said):
    x = torch.randn(60, 6)
    with pytest.raises(InputError, match=said) as caught:
        esper.task("t", x, x[:, 0] > 0, host=build)
    if "cannot run" not in said:
        assert "esper.Growth (`esper docs growth`)" in str(caught.value)


@pytest.mark.parametrize("build", [plain, Residual])
def test_a_plain_module_grows_and_its_network_loads_with_its_factory(build, tmp_path):
    x = torch.randn(240, 6)
    task = esper.task("t", x, (x[:, 0] * x[:, 1] > 0).long(), host=build, standardize=True)
    slot = task.host().slots[0].name
    plan = Schedule([ScheduleEntry(at=0, op="germinate", slot=slot, blueprint="bypass-mlp", keep=True)])
    config = {"envs": 2, "steps": 10, "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}}
    settings = {**config, "data": {"batches_per_step": 1}, "baselines": [], "early_stopping": {"enabled": False}}
    summary = esper.grow(task, settings, controller=plan, run=tmp_path / "r", progress=False)
    assert summary["grown"] == [{slot: "bypass-mlp"}] * 2
    assert summary["untraced"] == []
    network = esper.load(tmp_path / "r", host=build)
    program = torch.export.load(tmp_path / "r/models/best/model.pt2").module()
    torch.testing.assert_close(network(x), program(x))
    again = esper.task("again", x, (x[:, 0] > 0).long(), host=lambda: network)
    assert [each.name for each in again.host().slots] == [each.name for each in task.host().slots]


def test_the_factory_of_a_cut_host_can_be_sent_to_a_process():
    host = CutHost(Residual, X)
    assert pickle.loads(pickle.dumps(host))().slots == host().slots
