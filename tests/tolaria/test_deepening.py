"""Test deeper stacks: the network computes what it did, new blocks learn, and what counts blocks follows."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tests.tolaria.test_widening_networks import GPT, TOKENS, ViT, encoder, output, resnet
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.leyline.messages import InputError

NETWORKS = {
    "GPT": (GPT, TOKENS, {"h": (2, 4)}),
    "ViT": (ViT, (3, 1, 8, 8), {"body.layers": (2, 4)}),
    "ResNet": (lambda: resnet(nn.BatchNorm2d), (3, 1, 8, 8), {"": (2, 4)}),
    "one block in a list": (lambda: GPT(nn.RMSNorm, blocks=1), TOKENS, {"h": (1, 3)}),
}


def trained(build, given):
    torch.manual_seed(0)
    model = build().double()
    x = given if isinstance(given, torch.Tensor) else torch.randn(given, dtype=torch.float64)
    named = dict(model.named_parameters())
    groups = [[p for name, p in named.items() if p.dim() < 2], [p for name, p in named.items() if p.dim() > 1]]
    optimizer = torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=1e-2)
    average = AveragedModel(model)
    for _ in range(2):
        learn(model, x, optimizer)
        average.update_parameters(model)
    return model, x, optimizer, average


def learn(model, x, optimizer):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_deeper_network_computes_what_it_did_and_its_new_blocks_learn(name):
    build, given, blocks = NETWORKS[name]
    model, x, optimizer, average = trained(build, given)
    before, old = [output(each, x) for each in (model, average)], dict(model.named_parameters())
    assert esper.deepen(model, 2, example=x, optimizer=optimizer, ema=average) == blocks
    for one, other in zip(before, (model, average), strict=True):
        assert torch.allclose(one, output(other, x), rtol=0, atol=1e-12)
    new = {key: value for key, value in model.named_parameters() if not any(value is each for each in old.values())}
    assert {key for key, _ in average.module.named_parameters()} == {key for key, _ in model.named_parameters()}
    plain, matrices = ({id(each) for each in group["params"]} for group in optimizer.param_groups)
    assert all(id(value) in (plain if value.dim() < 2 else matrices) for value in new.values())
    assert len(plain) + len(matrices) == len(list(model.parameters()))
    born = {key: value.detach().clone() for key, value in new.items()}
    for _ in range(3):
        learn(model, x, optimizer)
    assert all((value != born[key]).any() for key, value in new.items())


def test_a_deeper_network_loads_into_one_that_is_built_with_the_blocks():
    model, x, optimizer, _ = trained(GPT, TOKENS)
    esper.deepen(model, example=x, at="h", optimizer=optimizer)
    learn(model, x, optimizer)
    again = GPT(blocks=3).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    esper.widen(model, 2, example=x, optimizer=optimizer)
    assert model.h[2].c_attn.out_features == 48


class Sliced(nn.Module):
    """Runs its first two blocks alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks[:2]:
            x = x + block(x)
        return x


def plain():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("build", "given", "settings", "sentence"),
    [
        (Sliced, (2, 4), {}, "does not run a new block of 'blocks'"),
        (plain, (2, 4), {}, "a new block of '' changes the outputs"),
        (encoder, (3, 4, 5), {}, "has no nn.Sequential or nn.ModuleList with blocks of one class"),
        (plain, (2, 4), {"blocks": 0}, "blocks is 0; give a whole number from 1 on"),
        (GPT, TOKENS, {"at": "body"}, "at is 'body'; give the path of a stack: 'h'"),
    ],
)
def test_what_cannot_be_deeper_stays_and_the_reason_is_said(build, given, settings, sentence):
    torch.manual_seed(0)
    model = build()
    x = given if isinstance(given, torch.Tensor) else torch.randn(given)
    shown, state = repr(model), copy.deepcopy(model.state_dict())
    with pytest.raises(InputError) as caught:
        esper.deepen(model, example=x, **settings)
    assert sentence in str(caught.value)
    assert repr(model) == shown
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


class Windowed(nn.Module):
    """Runs two blocks that share a norm, and has a number that counts tokens, not blocks."""

    def __init__(self):
        super().__init__()
        self.block_size, self.n_block = 2, 2
        norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(nn.Sequential(norm, nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_that_share_a_norm_are_added_and_only_what_counts_blocks_follows():
    model = Windowed()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    assert esper.deepen(model, 1, example=torch.randn(3, 4), optimizer=optimizer) == {"blocks": (2, 3)}
    assert (model.block_size, model.n_block) == (2, 3)
    (group,) = optimizer.param_groups
    assert {id(each) for each in group["params"]} == {id(each) for each in model.parameters()}
    assert len(group["params"]) == len(group["param_names"])


class Placed(nn.Module):
    """Keeps its place; the first has a further weight, as the bias by distance that all blocks of T5 share."""

    def __init__(self, place, width=4):
        super().__init__()
        self.layer_idx, self.leave = place, nn.Linear(width, 4)
        self.bias = nn.Parameter(torch.randn(4)) if place == 0 else None

    def forward(self, x):
        x = x if self.bias is None else x + self.bias
        return x + self.leave(x if self.leave.in_features == 4 else torch.cat([x, x], -1))


class Row(nn.Sequential):
    """Counts its blocks in an attribute, as no class of torch does."""


@pytest.mark.parametrize("widths", [(4, 4, 4), (4, 4), (4, 4, 4, 8)])
def test_all_blocks_of_the_class_are_counted_and_those_behind_know_their_new_place(widths):
    torch.manual_seed(0)
    model = Row(*(Placed(place, width) for place, width in enumerate(widths)))
    model.n_layer, x = len(widths), torch.randn(3, 4)
    before = model(x)
    assert esper.deepen(model, 2, example=x) == {"": (len(widths), len(widths) + 2)}
    assert torch.allclose(model(x), before, atol=1e-6)
    assert [block.layer_idx for block in model] == list(range(len(widths) + 2))
    assert [block.bias is None for block in model] == [False] + [True] * (len(widths) + 1)
    assert (model.n_layer, model[-1].leave.in_features) == (len(widths) + 2, widths[-1])


def test_frozen_blocks_are_refused():
    model = Windowed().requires_grad_(False)
    with pytest.raises(InputError, match=r"'blocks\.1' is frozen, and so would its copies be"):
        esper.deepen(model, 1, example=torch.randn(3, 4))
    assert len(model.blocks) == 2


class Factor(nn.Module):
    """Puts a branch behind a factor that begins at 0 (ReZero), or behind another branch."""

    def __init__(self, product):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.factor = nn.Linear(4, 4) if product else nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.inner(x) * (self.factor(x) if isinstance(self.factor, nn.Module) else self.factor)


class Gated(Windowed):
    def __init__(self, product):
        super().__init__()
        self.blocks = nn.ModuleList(Factor(product) for _ in range(2))


def test_a_block_learns_whose_factor_is_zero_and_one_with_two_such_factors_is_refused():
    model, x = Gated(product=False), torch.randn(3, 4)
    before = model(x)
    esper.deepen(model, 1, example=x)
    assert torch.equal(model(x), before)
    model(x).square().sum().backward()
    assert model.blocks[2].factor.grad
    assert [float(block.factor) for block in model.blocks] == [0, 0, 0]
    with pytest.raises(InputError, match="would never learn, because two factors of what it adds are 0"):
        esper.deepen(Gated(product=True), 1, example=x)


def test_a_network_that_fails_on_drawn_weights_is_refused_and_left_as_it_is():
    class Bounded(Gated):
        def __init__(self):
            super().__init__(product=False)
            self.gate = nn.Linear(4, 4)
            nn.init.zeros_(self.gate.weight)

        def forward(self, x):
            if self.gate.weight.any():
                raise ValueError("no weights are wanted here")
            return super().forward(x + self.gate(x))

    model = Bounded()
    with pytest.raises(InputError, match="the deeper network fails on the example: ValueError: no weights are wanted"):
        esper.deepen(model, 1, example=torch.randn(3, 4))
    assert not model.gate.weight.any()
    assert len(model.blocks) == 2


def test_a_block_that_stands_twice_in_its_stack_is_refused():
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(block, block))
    with pytest.raises(
        InputError, match=r"'1\.1' and '1\.0' are one module; blocks of a stack have weights of their own"
    ):
        esper.deepen(model, 1, example=torch.randn(3, 4))


def test_blocks_in_front_of_a_head_of_zeros_are_added():
    head = nn.Linear(4, 2)
    nn.init.zeros_(head.weight)
    model = nn.Sequential(Windowed(), head)
    assert esper.deepen(model, 1, example=torch.randn(3, 4), at="0.blocks") == {"0.blocks": (2, 3)}
    assert not head.weight.any()


def test_a_plain_stack_behind_a_zero_head_is_refused():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    head = nn.Linear(4, 2)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    with pytest.raises(InputError):
        esper.deepen(nn.Sequential(*layers, head), 1, example=torch.randn(3, 4))
    assert not head.weight.any()


def test_more_blocks_than_the_memory_holds_are_refused_before_any_is_made():
    block = [nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)) for _ in range(2)]
    with pytest.raises(
        InputError, match=r"growing the Sequential by 1,000,000,000,000 blocks takes at least .* give fewer blocks"
    ):
        esper.deepen(nn.Sequential(*block), 10**12, example=torch.randn(3, 5))


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Staged(nn.Module):
    """Runs two stages of two and three blocks, and has a config that lists something."""

    def __init__(self, **listed):
        super().__init__()
        self.config = SimpleNamespace(**listed)
        self.stage1 = nn.Sequential(Added(), Added())
        self.stage2 = nn.Sequential(Added(), Added(), Added())

    def forward(self, x):
        return self.stage2(self.stage1(x))


@pytest.mark.parametrize(
    ("listed", "after"),
    [
        ({"depths": [2, 3]}, {"depths": [3, 3]}),
        ({"layers": (2, 3)}, {"layers": (3, 3)}),
        ({"layer_types": ["a", "b"]}, {"layer_types": ["a", "b", "b"]}),
        ({"heads_per_layer": [4, 8]}, {"heads_per_layer": [4, 8, 8]}),
        ({"out_layers": [1, 3, 4]}, {"out_layers": [1, 3, 4]}),
    ],
)
def test_lists_of_a_config_follow_where_they_have_an_entry_for_each_block_or_stage(listed, after):
    model, x = Staged(**listed), torch.randn(5, 8)
    before = model(x)
    assert esper.deepen(model, 1, example=x, at="stage1") == {"stage1": (2, 3)}
    assert torch.equal(model(x), before)
    assert vars(model.config) == after
