"""Check that fused layers compute what their modules compute, and gradients as autograd does."""

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.host import SegmentedHost, steps_of
from esper.kasmina.stack.fused import Layers, layers_of
from esper.kasmina.stack.layers import Linear
from esper.kasmina.stack.rows import Stack
from esper.leyline.lifecycle.slots import SlotSpec
from esper.tasks.hosts import DamagedMLP, Floor


def damaged(linear: bool = False) -> nn.Module:
    return nn.Sequential(Linear(6, 5), Floor(linear), nn.Sequential(Linear(5, 7, bias=False), nn.ReLU()), Linear(7, 3))


def filled(module, rows: int = 4) -> Stack:
    stack = Stack(module(), rows, dtype=torch.float64)
    for row in range(rows):
        torch.manual_seed(row)
        stack.write(row, module().double())
    return stack


def gradients(stack: Stack, x: torch.Tensor, rows, *, apart: bool) -> tuple[torch.Tensor, ...]:
    """Return the output, the gradient of x and those of all parameters; `apart` runs the modules one by one instead."""
    stack.columns["gradient"].zero_()
    x = x.clone().requires_grad_()
    if apart:
        found = stack.part("")
        stack._parts[""] = found._replace(layers=None)
        with torch.autocast("cpu", enabled=False):
            y = stack(x, rows)
        stack._parts[""] = found
    else:
        y = stack(x, rows)
    (y.square().sum() + 3 * x.sum()).backward()
    return y.detach(), x.grad, stack.columns["gradient"].clone()


@pytest.mark.parametrize("rows", [slice(0, 4), slice(1, 3), np.array([3, 0, 2]), slice(2, 3)])
@pytest.mark.parametrize("linear", [False, True])
def test_gradients_are_those_of_the_modules_one_by_one(rows, linear):
    torch.manual_seed(9)
    stack = filled(lambda: damaged(linear))
    x = torch.randn(4, 8, 6, dtype=torch.float64)[rows]
    for got, expected in zip(
        gradients(stack, x, rows, apart=False), gradients(stack, x, rows, apart=True), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rows", [slice(0, 4), np.array([3, 0, 2])])
def test_gradients_are_those_of_separate_networks_and_add_up_over_passes(rows):
    torch.manual_seed(9)
    stack = filled(damaged)
    x = torch.randn(4, 8, 6, dtype=torch.float64)[rows]
    chosen = range(4)[rows] if isinstance(rows, slice) else rows.tolist()
    for _ in range(2):
        stack(x, rows).square().sum().backward()
    for place, row in enumerate(chosen):
        network = stack.read(row, damaged().double())
        plain = nn.Sequential(
            *(
                nn.Linear(m.in_features, m.out_features, m.bias is not None, dtype=torch.float64)
                if isinstance(m, Linear)
                else m
                for m in (*network[:2], *network[2], network[3])
            )
        )
        plain.load_state_dict(dict(zip(plain.state_dict(), network.state_dict().values(), strict=True)))
        (2 * plain(x[place]).square().sum()).backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
        torch.testing.assert_close(stack.columns["gradient"][row], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("functions", [(nn.Tanh,), (nn.Tanh, nn.ReLU), (nn.ReLU, nn.Tanh), (nn.Tanh, nn.Tanh)], ids=str)
@pytest.mark.parametrize(
    "batch", [lambda x: x, lambda x: (x,), lambda x: {"input": x}], ids=["tensor", "tuple", "mapping"]
)
def test_plain_modules_of_torch_run_in_one_call_and_compute_what_separate_networks_compute(functions, batch):
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), *(each() for each in functions), nn.Linear(5, 3, bias=False), nn.Tanh())

    stack, x, rows = filled(network), torch.randn(4, 7, 6, dtype=torch.float64), slice(0, 4)
    assert stack.part("").way == "direct"
    y = stack(batch(x), rows)
    y.square().sum().backward()
    for row in range(4):
        plain = stack.read(row, network().double())
        expected = plain(x[row])
        torch.testing.assert_close(y[row], expected, rtol=1e-12, atol=1e-14)
        expected.square().sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
        torch.testing.assert_close(stack.columns["gradient"][row], gradient, rtol=1e-10, atol=1e-13)


def test_a_host_may_say_that_its_segments_are_run_by_vmap():
    def host(stacks) -> SegmentedHost:
        made = SegmentedHost([nn.Linear(6, 4), nn.Linear(4, 2)], [SlotSpec("only", after=0, width=4)])
        if stacks is not None:
            made.stacks = stacks
        return made

    ways = {stacks: Stack(host(stacks), 2).part("segments.0").way for stacks in (None, False)}
    assert ways == {None: "direct", False: "vmap"}


def test_a_parameter_that_does_not_train_gets_no_gradient_and_its_input_does():
    def half() -> nn.Module:
        module = damaged()
        module[0].requires_grad_(False)
        return module

    stack, x = filled(half), torch.randn(4, 8, 6, dtype=torch.float64, requires_grad=True)
    stack(x, slice(0, 4)).square().sum().backward()
    assert (stack.parameter("0.weight", "gradient") == 0).all()
    assert (stack.parameter("3.weight", "gradient") != 0).any()
    assert (x.grad != 0).any()


@pytest.mark.parametrize("name", ["bypass-mlp", "bypass-linear", "bypass-rank-2"])
def test_seeds_of_layers_compute_what_their_modules_compute(name):
    seed = get_blueprint(name)
    stack = filled(lambda: seed.build(6, 6))
    assert isinstance(layers_of(seed.build(6, 6), []), Layers)
    stack.columns["value"].normal_()
    x = torch.randn(4, 8, 6, dtype=torch.float64)
    for got, expected in zip(
        gradients(stack, x, slice(0, 4), apart=False), gradients(stack, x, slice(0, 4), apart=True), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_layers_are_found_in_sequences_of_known_modules_without_hooks():
    assert isinstance(layers_of(damaged(), []), Layers)
    assert isinstance(layers_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []), Layers)
    assert layers_of(nn.Sequential(Linear(2, 2), nn.GELU()), []) is None
    assert layers_of(nn.LazyLinear(2), []) is None
    shared = nn.Linear(2, 2)
    assert layers_of(nn.Sequential(shared, nn.ReLU(), shared), []) is None
    assert layers_of(nn.Sequential(), []) is None
    hooked = damaged()
    hooked[2].register_forward_hook(lambda *_: None)
    assert layers_of(hooked, []) is None


@pytest.mark.parametrize(
    ("acting", "paths", "visited"),
    [
        ((), ["segments.0:4"], []),
        ((0,), ["segments.0", "segments.1", "segments.2:4"], [0]),
        ((1,), ["segments.0:1", "segments.2", "segments.3:4"], [1]),
        ((2,), ["segments.0:2", "segments.3", "segments.4"], [2]),
        ((0, 1, 2), [f"segments.{index}" for index in range(5)], [0, 1, 2]),
    ],
)
def test_merged_steps_stop_in_front_of_and_behind_the_segment_of_each_site_where_something_acts(acting, paths, visited):
    steps = steps_of(5, [SlotSpec(str(after), after, 8) for after in (1, 2, 3)], acting)
    assert [path for _, path, _ in steps] == paths
    assert [(path, site) for _, path, site in steps if site is not None] == [(f"segments.{1 + s}", s) for s in visited]
    assert [f"segments.{first}" for first, _, _ in steps] == [path.partition(":")[0] for path in paths]


def test_merged_segments_compute_what_the_segments_compute_one_after_another():
    factory = DamagedMLP(6, 8, (3, 5, 4), 3, linear=(False, True, False), frozen=(False, False, True))
    stack = filled(factory)
    x = torch.randn(4, 7, 6, dtype=torch.float64)
    y, rows = x, slice(0, 4)
    for path in ("segments.0", "segments.1", "segments.2", "segments.3", "segments.4"):
        y = stack(y, rows, part=path)
    assert torch.equal(stack(x, rows, part="segments.0:4"), y)
    z = stack(stack(stack(x, rows, part="segments.0:1"), rows, part="segments.2"), rows, part="segments.3:4")
    assert torch.equal(z, y)
