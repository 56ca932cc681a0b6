"""Test what was grown in a frozen host, on another copy of it."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, is_grafted
from esper.kasmina.network.saving import ADAPTER, ADAPTER_WEIGHTS, attach
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from esper.store.disk import SUMS
from populations import Script

SCRIPT = {
    (0, 0): (Op.GERMINATE, 0, 0, 1, 1, 2),
    (1, 0): (Op.GERMINATE, 1, 1, 0, 1, 3),
    (2, 0): (Op.ADVANCE, 0),
    (3, 0): (Op.ADVANCE, 1),
    (4, 0): (Op.FOSSILIZE, 0),
    (5, 0): (Op.FOSSILIZE, 1),
    (6, 0): (Op.GERMINATE, 2, 2, 0, 1, 3),
}


def host(width=8):
    with drawn_with(0):
        return nn.Sequential(
            nn.Linear(4, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Linear(width, 3),
        )


def data():
    with drawn_with(1):
        return torch.randn(16, 4), torch.arange(16) % 3


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Grow a frozen host, and return it with the folder of what grew."""
    model = host().requires_grad_(False)
    sites = {"a": ("0", "0"), "b": ("2", "0"), "c": ("4", "4")}
    graft(model, {name: Site(name, *paths, Vector(8)) for name, paths in sites.items()})
    head = nn.Parameter(torch.zeros(3))
    model[5].bias = head
    x, y = data()
    settings = {
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0},
        "lifecycle": {"max_training_seeds": 3},
    }
    optimizer = torch.optim.Adam([head], lr=0.02)
    growth = Growth(
        model,
        optimizer,
        probe=[(x, y)],
        loss=F.cross_entropy,
        controller=Script(SCRIPT),
        every=3,
        budget=9.0,
        settings=settings,
    )
    for _ in range(27):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    folder = tmp_path_factory.mktemp("grown") / "adapter"
    growth.save_adapter(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    growth.finish()
    growth.save_adapter(folder)  # nothing was folded into the frozen host
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    return model, head.detach(), folder, growth


def copy_of(grown, width=8):
    model = host(width)
    with torch.no_grad():
        model[5].bias.copy_(grown[1])
    return model


def test_a_frozen_host_is_bit_for_bit_what_it_was(grown):
    model, plain = grown[0], host().state_dict()
    plain.pop("5.bias")
    mine = {name: value for name, value in model.state_dict().items() if name in plain}
    assert mine.keys() == plain.keys()
    assert all(torch.equal(mine[name], value) for name, value in plain.items())


def test_another_copy_of_the_host_computes_the_same_with_the_adapter(grown):
    model, _, folder, _ = grown
    other = attach(copy_of(grown), folder)
    x, _ = data()
    assert torch.equal(other(x), model(x))
    assert not torch.allclose(other(x), copy_of(grown)(x), atol=1e-3)
    assert other.state_dict().keys() == model.state_dict().keys()
    F.cross_entropy(other(x), data()[1]).backward()
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_the_folder_holds_the_kept_seeds_alone(grown):
    described = json.loads((grown[2] / ADAPTER).read_text())
    assert [seed["site"] for seed in described["seeds"]] == ["a", "b"]
    assert [seed["blend"] for seed in described["seeds"]] == ["GATE", "ADD"]
    assert {path.name for path in grown[2].iterdir()} == {ADAPTER, ADAPTER_WEIGHTS, SUMS}


def altered(folder, **fields):
    described = json.loads((folder / ADAPTER).read_text())
    described["seeds"][0] |= fields
    return json.dumps(described)


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (
            lambda folder: (folder / ADAPTER_WEIGHTS).write_bytes(b"x"),
            "is damaged: its sha256 .*; save the adapter again",
        ),
        (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), f"has no file {ADAPTER_WEIGHTS}"),
        (
            lambda folder: [(folder / SUMS).unlink(), (folder / ADAPTER_WEIGHTS).write_bytes(b"x")],
            "is damaged: .*header",
        ),
        (lambda folder: [(folder / SUMS).unlink(), (folder / ADAPTER).write_text("{")], "is not valid JSON"),
        (lambda folder: [(folder / SUMS).unlink(), (folder / ADAPTER).write_text("[]")], "has format None"),
        (
            lambda folder: [(folder / SUMS).unlink(), (folder / ADAPTER).write_text(altered(folder, alpha=2.0))],
            r"is damaged at 'seeds\.0\.alpha'",
        ),
        (
            lambda folder: [(folder / SUMS).unlink(), (folder / ADAPTER).write_text(altered(folder, blend="add"))],
            r"is damaged at 'seeds\.0\.blend': .*'ADD', 'GATE' or 'MULTIPLY'",
        ),
        (
            lambda folder: [
                (folder / SUMS).unlink(),
                (folder / ADAPTER).write_text(altered(folder, blueprint="gated")),
            ],
            "has other parameters than blueprint 'gated'",
        ),
    ],
)
def test_a_damaged_adapter_is_refused_and_the_model_stays_as_it_was(grown, tmp_path, alter, said):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for path in grown[2].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    alter(folder)
    model = host()
    with pytest.raises(InputError, match=said):
        attach(model, folder)
    assert not is_grafted(model)
    assert type(model[0]) is nn.Linear


def test_another_training_of_the_host_is_refused_unless_that_is_asked_for(grown):
    other = copy_of(grown)
    with torch.no_grad():
        other[2].weight[0, 0] += 1e-6
    before, said = (
        other.state_dict(),
        r"weights have digest ([0-9a-f]{16}), and those of this one have (?!\1)[0-9a-f]{16}",
    )
    with pytest.raises(
        InputError, match=f"{said}; attach it to the host as it was trained then, or give other_host=True"
    ):
        attach(other, grown[2])
    assert not is_grafted(other)
    assert other.state_dict().keys() == before.keys()
    x, _ = data()
    assert torch.allclose(attach(other, grown[2], other_host=True)(x), grown[0](x), atol=1e-4)


def test_a_folder_that_holds_something_else_is_left_as_it_is(grown, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    *_, growth = grown
    with pytest.raises(
        InputError, match=r"holds 'notes.txt', which would be removed; give a folder that is new or empty"
    ):
        growth.save_adapter(tmp_path)
    with pytest.raises(InputError, match="is a file; give the name of a folder"):
        growth.save_adapter(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_another_host_is_refused_by_name(grown):
    with pytest.raises(InputError, match=r"whose 0\.weight has shape \[8, 4\], and this one has \[9, 4\]"):
        attach(copy_of((None, grown[1]), 9), grown[2])
    with pytest.raises(InputError, match="names submodule '2', which is not there"):
        attach(host()[:2], grown[2])
