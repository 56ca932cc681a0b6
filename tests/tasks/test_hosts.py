import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch.func import functional_call

from esper.kasmina.host import check_host
from esper.leyline.errors import InputError
from esper.tasks.hosts import HOSTS, MLP, DamagedMLP, host_from

FACTORY = MLP(inputs=7, width=6, hidden=(3, 1, 4), outputs=5)
DAMAGED = DamagedMLP(
    inputs=7, width=6, hidden=(3, 1, 4), outputs=5, linear=(False, True, False), frozen=(False, False, True)
)


@pytest.mark.parametrize("factory", [FACTORY, DAMAGED])
def test_a_host_is_what_it_declares(factory: MLP | DamagedMLP) -> None:
    check_host(factory(), torch.randn(3, 7), outputs=5)


def test_a_slot_follows_every_block() -> None:
    assert [(slot.name, slot.after, slot.width) for slot in FACTORY().slots] == [
        ("block0", 1, 6),
        ("block1", 2, 6),
        ("block2", 3, 6),
    ]


def test_a_block_has_no_residual_path() -> None:
    block = FACTORY().segments[1]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert not block(torch.randn(3, 6)).any()


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("examples", [1, 9, 64])
@pytest.mark.parametrize("width", [1, 3, 8, 16])
def test_stacked_parameters_compute_what_every_host_computes_alone(rows: int, examples: int, width: int) -> None:
    factory = MLP(inputs=7, width=width, hidden=(3, 1), outputs=5)
    hosts = [factory().double() for _ in range(rows)]
    x = torch.randn(rows, examples, 7, dtype=torch.float64)
    stacked = {n: torch.stack([dict(h.named_parameters())[n] for h in hosts]) for n, _ in hosts[0].named_parameters()}
    alone = torch.stack([host(x[row]) for row, host in enumerate(hosts)])
    assert hosts[0].stacks
    torch.testing.assert_close(functional_call(hosts[0], stacked, x), alone, rtol=1e-10, atol=1e-12)


def test_a_host_is_drawn_from_torchs_generator() -> None:
    torch.manual_seed(3)
    first, other = FACTORY().state_dict(), FACTORY().state_dict()
    torch.manual_seed(3)
    again = FACTORY().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["segments.0.weight"], other["segments.0.weight"])


def test_the_scale_of_weights_follows_their_fan_in_and_biases_are_zero() -> None:
    torch.manual_seed(0)
    state = MLP(inputs=400, width=500, hidden=(300,), outputs=200)().state_dict()
    scale = {"0": 400**-0.5, "1.0": (2 / 500) ** 0.5, "1.2": 300**-0.5, "2": 500**-0.5}
    for segment, expected in scale.items():
        assert state[f"segments.{segment}.weight"].std().item() == pytest.approx(expected, rel=0.02)
        assert not state[f"segments.{segment}.bias"].any()


@pytest.mark.parametrize("factory", [FACTORY, DAMAGED])
def test_a_host_comes_back_from_its_json_arguments(factory: MLP | DamagedMLP) -> None:
    saved = json.loads(json.dumps(dataclasses.asdict(factory)))
    assert host_from(factory.name, saved) == factory
    assert hash(host_from(factory.name, saved)) == hash(factory)


def test_a_damaged_host_without_damage_is_the_mlp_of_the_same_draw() -> None:
    sound = dataclasses.replace(DAMAGED, linear=(False,) * 3, frozen=(False,) * 3)
    torch.manual_seed(3)
    plain = FACTORY()
    torch.manual_seed(3)
    host = sound()
    x = torch.randn(9, 7)
    assert torch.equal(host(x), plain(x))
    assert {n: p.shape for n, p in host.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_a_block_is_an_affine_map_exactly_where_it_is_linear() -> None:
    x, y = torch.randn(2, 50, 6, dtype=torch.float64)
    for block, linear in zip(DAMAGED().double().segments[1:-1], DAMAGED.linear, strict=True):
        bend = block(x + y) - block(x) - block(y) + block(torch.zeros_like(x))
        assert (bend.abs().max() < 1e-12) == linear


def test_the_gradient_of_a_linear_block_is_not_halved_at_zero() -> None:
    block = DAMAGED().segments[2]
    z = torch.zeros(1, 1, requires_grad=True)
    block[1](z).sum().backward()
    assert z.grad is not None
    assert z.grad.item() == 1


def test_only_the_parameters_of_a_frozen_block_do_not_train() -> None:
    fixed = [name for name, parameter in DAMAGED().named_parameters() if not parameter.requires_grad]
    assert fixed == [f"segments.3.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")]


def test_linear_and_sound_blocks_run_as_one_stack() -> None:
    factories = [
        dataclasses.replace(DAMAGED, linear=flags, frozen=(False,) * 3)
        for flags in ((False, True, False), (True, True, False), (False,) * 3)
    ]
    hosts = [factory().double() for factory in factories]
    states = [host.state_dict() for host in hosts]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    x = torch.randn(3, 9, 7, dtype=torch.float64)
    alone = torch.stack([host(rows) for host, rows in zip(hosts, x, strict=True)])
    torch.testing.assert_close(functional_call(factories[2]().double(), stacked, x), alone, rtol=1e-10, atol=1e-12)


def test_every_host_is_listed_under_its_name() -> None:
    assert all(factory.name == name for name, factory in HOSTS.items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 0}, "width of an MLP host is 0; give a whole number from 1 on"),
        ({"inputs": 2.5}, "inputs of an MLP host is 2.5; give a whole number from 1 on"),
        ({"outputs": True}, "outputs of an MLP host is True; give a whole number from 1 on"),
        ({"hidden": (3, -1)}, "hidden[1] of an MLP host is -1; give a whole number from 1 on"),
        ({"hidden": ()}, "hidden of an MLP host is (); give the inner widths of its blocks, as (4, 12)"),
        ({"hidden": 3}, "hidden of an MLP host is 3; give the inner widths of its blocks, as (4, 12)"),
    ],
)
def test_a_size_that_is_none_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        dataclasses.replace(FACTORY, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 0}, "width of an MLP host is 0; give a whole number from 1 on"),
        (
            {"linear": (True, False)},
            "linear of a damaged MLP host is (True, False); give True or False for each of its 3 blocks",
        ),
        ({"frozen": 1}, "frozen of a damaged MLP host is 1; give True or False for each of its 3 blocks"),
        (
            {"frozen": (0, 1, 0)},
            "frozen of a damaged MLP host is (0, 1, 0); give True or False for each of its 3 blocks",
        ),
    ],
)
def test_damage_that_is_none_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        dataclasses.replace(DAMAGED, **changes)


def test_an_unknown_host_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^unknown host 'gru'; the hosts that can be rebuilt by name are mlp, "):
        host_from("gru", {})


def test_arguments_of_another_host_are_refused() -> None:
    with pytest.raises(InputError, match=r"^host 'mlp' was given the arguments \['depth'\]; give exactly \['inputs'"):
        host_from("mlp", {"depth": 3})
