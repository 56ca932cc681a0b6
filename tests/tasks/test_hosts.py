import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call

import esper
from esper.kasmina.blueprints import count
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.stack.rows import Stack
from esper.leyline.messages import InputError
from esper.tasks.hosts import (
    HOSTS,
    MAP_MENU,
    MLP,
    VECTOR_MENU,
    DamagedMLP,
    Host,
    ResidualCNN,
    ResidualMLP,
    host_from,
)

FACTORY = MLP(inputs=7, width=6, hidden=(3, 1, 4), outputs=5)
RESIDUAL = ResidualMLP(inputs=7, width=6, hidden=(3, 1, 4), outputs=5)
DAMAGED = DamagedMLP(
    inputs=7, width=6, hidden=(3, 1, 4), outputs=5, linear=(False, True, False), frozen=(False, False, True)
)


@pytest.mark.parametrize("factory", [FACTORY, RESIDUAL, DAMAGED])
def test_a_host_is_what_it_declares(factory: Callable[[], SegmentedHost]) -> None:
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


@pytest.mark.parametrize("factory", [RESIDUAL])
def test_a_residual_block_whose_parameters_are_0_is_the_identity(factory: Callable[[], SegmentedHost]) -> None:
    block, x = factory().segments[2], torch.randn(3, 6)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("factory", [FACTORY, RESIDUAL, DAMAGED])
@pytest.mark.parametrize("parameters", [1, 500, 4321])
def test_a_plain_network_is_the_smallest_even_one_of_so_many_parameters(factory: Host, parameters: int) -> None:
    plain = factory.plain(parameters)
    assert isinstance(plain, MLP | ResidualMLP)
    assert plain.hidden == (plain.width,) * 3
    assert count(plain()) >= parameters
    if plain.width > 1:
        smaller = dataclasses.replace(plain, width=plain.width - 1, hidden=(plain.width - 1,) * 3)
        assert count(smaller()) < parameters


def test_a_smaller_residual_host_computes_the_same_in_the_corner_of_its_layout() -> None:
    host, layout = RESIDUAL().double(), RESIDUAL.room().host()
    row = Stack(layout, 1, dtype=torch.float64)
    row.write(0, host)
    x = torch.randn(1, 9, 7, dtype=torch.float64)
    padded = torch.cat([x, torch.zeros(1, 9, 1, dtype=torch.float64)], 2)
    y = row(padded, slice(0, 1))
    torch.testing.assert_close(y[0, :, :5], host(x[0]), rtol=1e-10, atol=1e-12)
    assert not y[0, :, 5:].any()


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("examples", [1, 9, 64])
@pytest.mark.parametrize("width", [1, 3, 8, 16])
@pytest.mark.parametrize("kind", [MLP, ResidualMLP])
def test_stacked_parameters_compute_what_every_host_computes_alone(
    kind: type[MLP | ResidualMLP], rows: int, examples: int, width: int
) -> None:
    factory = kind(inputs=7, width=width, hidden=(3, 1), outputs=5)
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


@pytest.mark.parametrize("factory", [FACTORY, RESIDUAL, DAMAGED])
def test_a_host_comes_back_from_its_json_arguments(factory: Host) -> None:
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
        ({"hidden": (3, -1)}, "hidden of an MLP host is (3, -1); give whole numbers from 1 on, as (8, 16)"),
        ({"hidden": ()}, "hidden of an MLP host is (); give the inner widths of its blocks, as (4, 12)"),
        ({"hidden": 3}, "hidden of an MLP host is 3; give whole numbers from 1 on, as (8, 16)"),
    ],
)
def test_a_size_that_is_none_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        dataclasses.replace(FACTORY, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 0}, "width of a residual MLP host is 0; give a whole number from 1 on"),
        ({"hidden": ()}, "hidden of a residual MLP host is (); give the inner widths of its blocks, as (4, 12)"),
    ],
)
def test_a_size_of_a_residual_host_that_is_none_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        dataclasses.replace(RESIDUAL, **changes)


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
    with pytest.raises(InputError, match=r"^unknown host 'forest'; the hosts that can be rebuilt by name are mlp, "):
        host_from("forest", {})


def test_arguments_of_another_host_are_refused() -> None:
    with pytest.raises(InputError, match=r"^host 'mlp' was given the arguments \['depth'\]; give exactly \['inputs'"):
        host_from("mlp", {"depth": 3})


X, Y = torch.randn(80, 5, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 2
IMAGES = torch.randn(80, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_one_line_makes_a_host_for_vectors_of_ones_own() -> None:
    host = esper.mlp(inputs=5, width=6, classes=2, blocks=4)
    assert host == ResidualMLP(inputs=5, width=6, hidden=(6,) * 4, outputs=2)
    assert [slot.name for slot in host().slots] == ["block0", "block1", "block2", "block3"]
    assert esper.task("mine", X, Y, host=host).menu == VECTOR_MENU


def test_one_line_makes_a_host_for_images_of_ones_own() -> None:
    host = esper.cnn(inputs=(3, 8, 8), width=4, classes=2)
    assert host == ResidualCNN(inputs=(3, 8, 8), channels=(4, 8), outputs=2)
    assert esper.task("mine", IMAGES, Y, host=host).menu == MAP_MENU


def test_a_host_of_ones_own_regresses_where_outputs_are_named() -> None:
    task = esper.task("mine", X, X[:, :3] ** 2, host=esper.mlp(inputs=5, outputs=3))
    assert task.objective.outputs == 3


@pytest.mark.parametrize("host", [esper.mlp(inputs=5, classes=2), esper.cnn(inputs=(3, 8, 8), classes=2)], ids=str)
def test_a_host_of_ones_own_goes_through_pickle_and_prints_on_one_line(host: Host) -> None:
    assert pickle.loads(pickle.dumps(host)) == host
    assert len(repr(host)) < 100
    assert "tensor" not in repr(host)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: esper.mlp(5, 0, 2), "width of esper.mlp is 0; give a whole number from 1 on"),
        (lambda: esper.mlp(5, classes=2, blocks=0), "blocks of esper.mlp is 0; give a whole number from 1 on"),
        (lambda: esper.mlp(5, classes="2"), "classes of esper.mlp is '2'; give a whole number from 1 on"),  # type: ignore[arg-type]
        (
            lambda: esper.mlp(5),
            "esper.mlp was given classes=None and outputs=None; give one of them: classes, the number of classes, "
            "or outputs, the number of targets of a regression",
        ),
        (
            lambda: esper.cnn((3, 8, 8), classes=2, blocks=1.5),
            "blocks of esper.cnn is 1.5; give a whole number from 1 on",
        ),  # type: ignore[arg-type]
        (
            lambda: esper.cnn((3, 4, 8), classes=2, blocks=3),
            "an image of 4 x 8 pixels cannot be halved in 3 blocks; give fewer blocks or larger images",
        ),
        (
            lambda: esper.cnn(64, classes=2),  # type: ignore[arg-type]
            "inputs of a residual CNN host is 64; give whole numbers from 1 on, as (8, 16)",
        ),
    ],
)
def test_a_host_of_ones_own_of_impossible_sizes_is_refused(make: Callable[[], Host], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        make()
