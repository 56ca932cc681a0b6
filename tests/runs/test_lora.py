"""Test the layers and ranks of LoRA that a gradient and a budget choose."""

import json

import pytest
import torch
from torch import nn

import esper
from esper.cli import main
from esper.leyline.messages import InputError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


X, Y = torch.randn(300, 6, generator=torch.Generator().manual_seed(1)), torch.arange(300) % 3
COSTS = {"0.up": 18, "0.down": 18, "1.up": 18, "1.down": 18, "2": 9}


def size(chosen):
    return sum(COSTS[name] * rank for name, rank in chosen["rank_pattern"].items())


def test_the_directions_taken_are_those_with_the_largest_square_for_each_parameter():
    model = network()
    chosen = esper.lora_ranks(model, (X, Y), budget=0.25)
    nn.functional.cross_entropy(model(X), Y).backward()
    offers = [
        (float(value) ** 2 / COSTS[name], name)
        for name in COSTS
        for value in torch.linalg.svdvals(model.get_submodule(name).weight.grad)
    ]
    room = int(0.25 * sum(each.numel() for each in model.parameters()))
    taken = []
    for _, name in sorted(offers, reverse=True):
        if sum(COSTS[each] for each in [*taken, name]) <= room:
            taken.append(name)
    assert chosen["rank_pattern"] == {name: taken.count(name) for name in COSTS if name in taken}
    assert room - size(chosen) < 18
    assert chosen["alpha_pattern"] == chosen["rank_pattern"]


def test_the_square_is_what_a_first_step_along_the_direction_gains():
    model = network().double()
    x = X.double()
    ranks = esper.lora_ranks(model, (x, Y), budget=0.055, layers=["0.up"])["rank_pattern"]
    assert ranks == {"0.up": 1}
    weight = model.get_parameter("0.up.weight")
    before = nn.functional.cross_entropy(model(x), Y)
    (gradient,) = torch.autograd.grad(before, weight)
    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
    with torch.no_grad():
        weight -= 1e-4 * s[0] * torch.outer(u[:, 0], v[0])
        gained = float(before - nn.functional.cross_entropy(model(x), Y)) / 1e-4
    assert gained == pytest.approx(float(s[0]) ** 2, rel=1e-2)


def test_the_model_is_not_changed():
    model = network().requires_grad_(False)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    esper.lora_ranks(model, (X, Y), budget=0.25)
    assert model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None and not each.requires_grad for each in model.parameters())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": ["blocks.*"]}, "no linear layer is named 'blocks.*'; there are 0.up, 0.down"),
        ({"budget": 0.001}, "rank 1 of the smallest layer has 9"),
        ({"loss": lambda output, target: output.sum() * float("nan")}, "the gradient of 0.up is not finite"),
        ({"loss": lambda output, target: output.sum() * 0}, "the gradient is 0 at every layer"),
    ],
)
def test_bad_input_is_one_sentence(options, sentence):
    with pytest.raises(InputError, match=sentence):
        esper.lora_ranks(network(), (X, Y), **{"budget": 0.25, **options})


MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
"""


def test_the_command_prints_what_the_function_returns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    torch.save({"x": X, "y": Y}, "data.pt")
    arguments = ["find-sites", "net.py:model", "--data", "data.pt"]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--as", "peft", "--budget", "0.4", "--layers", "0", "--layers", "[1-9]"])
    assert not left.value.code
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    assert json.loads(capsys.readouterr().out) == esper.lora_ranks(model, (X, Y), budget=0.4)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert not left.value.code
    assert capsys.readouterr().out.strip() == repr(esper.find_sites(model, X[:2]))


@pytest.mark.third_party
@pytest.mark.parametrize("budget", [0.05, 0.25])
def test_peft_makes_these_adapters_and_no_others(budget):
    peft = pytest.importorskip("peft", reason="the package is not installed: pip install peft")
    ambiguous = nn.Sequential()
    ambiguous.add_module("down", nn.Linear(6, 6))
    ambiguous.add_module("block", Block())
    ambiguous.add_module("2", nn.Linear(6, 3))
    for model in (network(), ambiguous):
        chosen = esper.lora_ranks(model, (X, Y), budget=budget)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**chosen))
        made = {
            name.removeprefix("base_model.model."): (part.r["default"], part.scaling["default"])
            for name, part in adapted.named_modules()
            if isinstance(part, peft.tuners.lora.Linear)
        }
        wanted = {name.lstrip("^").replace("\\", ""): (rank, 1.0) for name, rank in chosen["rank_pattern"].items()}
        assert made == wanted
