"""Check that a stack runs many copies of a module as if each were alone, in whichever way it is run."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.stack.layers import Linear
from esper.kasmina.stack.rows import Stack
from esper.leyline.config.tree import OptimizerConfig
from esper.leyline.messages import InputError
from esper.tolaria.stacked.optimizer import Updates


class Tanh(nn.Module):
    """Computes by operations that all act on trailing axes."""

    stacks = True

    def __init__(self, reads=5, hidden=4, writes=3):
        super().__init__()
        self.inner, self.out = Linear(reads, hidden), Linear(hidden, writes)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(x)))


class Normed(nn.Module):
    """Normalises in a way that no way of running knows beforehand, with a parameter of no dimension."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.gain * self.out(torch.relu(self.norm(self.inner(x))))


def filled(module, rows, **options):
    stack = Stack(module(), rows, moments=("first_moment", "second_moment"), **options)
    for row in range(rows):
        with drawn_with(row):
            stack.write(row, module())
    return stack


def trained(module, mapping, dtype, steps=20):
    """Return the losses, last gradients and parameters of 20 AdamW steps."""
    stack, rows = filled(module, 4, mapping=mapping, dtype=dtype), slice(0, 4)
    optimizer = partial(Updates, config=OptimizerConfig(lr=1e-2))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64).to(dtype)
        loss = stack(x, rows).square().mean((1, 2))
        loss.sum().backward()
        gradient = stack.columns["gradient"].clone()
        optimizer(stack, rows).step()
        losses.append(loss.detach())
    return torch.stack(losses), gradient, stack.columns["value"]


@pytest.mark.parametrize("module", [Tanh, Normed])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-10, 1e-12), (torch.float32, 1e-5, 1e-6)])
def test_every_mapping_gives_the_same_losses_gradients_and_parameters_after_20_steps(module, dtype, rtol, atol):
    expected = trained(module, "loop", dtype)
    for mapping in ("vmap", "auto"):
        for got, want in zip(trained(module, mapping, dtype), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("module", "mapping"), [(Tanh, "auto"), (Tanh, "vmap"), (Normed, "vmap"), (Normed, "loop")])
def test_a_row_alone_is_bitwise_the_row_among_others(module, mapping):
    x = torch.randn(5, 7, 5)
    whole = filled(module, 5, mapping=mapping)
    together = whole(x, slice(0, 5))
    for row in range(5):
        assert torch.equal(whole(x[row : row + 1], slice(row, row + 1))[0], together[row])
    together.square().sum().backward()
    alone = filled(module, 5, mapping=mapping)
    alone(x[2:3], slice(2, 3)).square().sum().backward()
    assert torch.equal(alone.columns["gradient"][2], whole.columns["gradient"][2])
    assert not alone.columns["gradient"][[0, 1, 3, 4]].count_nonzero()


@pytest.mark.parametrize(("module", "mapping"), [(Tanh, "auto"), (Normed, "vmap"), (Normed, "loop")])
def test_rows_by_index_run_the_rows_that_are_named(module, mapping):
    stack, x = filled(module, 4, mapping=mapping), torch.randn(3, 6, 5)
    rows = np.array([3, 0, 3])
    got = stack(x, rows)
    for i, row in enumerate(rows):
        with drawn_with(int(row)):
            torch.testing.assert_close(got[i], module()(x[i]))


@pytest.mark.parametrize("mapping", ["auto", "vmap", "loop"])
def test_a_frozen_call_passes_gradients_through_to_its_input_alone(mapping):
    stack, x = filled(Tanh, 3, mapping=mapping), torch.randn(3, 6, 5, requires_grad=True)
    stack(x, slice(0, 3), frozen=True).sum().backward()
    assert x.grad.count_nonzero()
    assert not stack.columns["gradient"].count_nonzero()


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_running_statistics_of_each_row_are_those_of_the_module_alone(mapping):
    class Batched(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4))

    stack, x = filled(Batched, 3, mapping=mapping), torch.randn(3, 8, 5)
    stack.train(True)
    stack(x, slice(0, 3))
    stack(x[1:2], slice(1, 2))
    with drawn_with(1):
        alone = Batched()
    alone(x[1])
    alone(x[1])
    torch.testing.assert_close(stack.columns["buffer.1.running_var"][1], alone[1].running_var)
    assert stack.columns["buffer.1.num_batches_tracked"].tolist() == [1, 2, 1]
    before = stack.columns["buffer.1.running_mean"].clone()
    stack.train(False)
    stack(x, slice(0, 3))
    assert torch.equal(stack.columns["buffer.1.running_mean"], before)


def test_dropout_is_drawn_by_key_for_each_row():
    def module():
        return nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5))

    stack, x, keys = filled(module, 3), torch.randn(3, 6, 5), np.array([5, 6, 7])
    stack.train(True)
    first = stack(x, slice(0, 3), keys=keys)
    torch.rand(3)
    assert torch.equal(stack(x, slice(0, 3), keys=keys), first)
    assert torch.equal(stack(x[1:2], slice(1, 2), keys=keys[1:2])[0], first[1])
    assert not torch.equal(stack(x, slice(0, 3), keys=keys + 1), first)


def test_vmap_refuses_dropout_by_name():
    with pytest.raises(InputError, match=r"dropout.*loop"):
        Stack(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), 2, mapping="vmap")


class Starved(nn.Module):
    """Raises an error at a call of many rows, as a device without memory left does; row by row there would be enough."""

    def __init__(self, error):
        super().__init__()
        self.linear, self.error = nn.Linear(2, 2), error

    def forward(self, x):
        if torch._C._functorch.is_batchedtensor(x):
            raise self.error
        return self.linear(x)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes."),
    ],
    ids=["cuda", "cpu"],
)
def test_a_lack_of_memory_is_said_and_not_taken_for_what_vmap_cannot_map(error):
    stack = Stack(Starved(error), 3)
    with pytest.raises(type(error), match=re.escape(str(error))):
        stack(torch.zeros(3, 4, 2), slice(0, 3))


def test_a_smaller_module_sits_in_the_leading_corner_and_the_rest_is_zero():
    stack = filled(lambda: Tanh(5, 4, 3), 2)
    stack.write(1, Tanh(5, 2, 3))
    assert not stack.parameter("inner.weight")[1, 2:].count_nonzero()
    assert not stack.parameter("out.weight")[1, :, 2:].count_nonzero()
    small = stack.read(1, Tanh(5, 2, 3))
    x = torch.randn(6, 5)
    torch.testing.assert_close(stack(x[None], slice(1, 2))[0], small(x))


def test_surgery_on_a_row_leaves_every_other_row_bit_identical():
    stack = filled(Tanh, 5)
    for column in stack.columns.values():
        column.copy_(torch.randn(column.shape))
    stack.steps[:] = range(5)
    before = {name: column.clone() for name, column in stack.columns.items()}
    stack.write(1, Tanh())
    stack.clear(2)
    for name, column in stack.columns.items():
        assert torch.equal(column[[0, 3, 4]], before[name][[0, 3, 4]])
        assert not column[2].count_nonzero()
    assert stack.steps.tolist() == [0, 0, 0, 3, 4]


def test_rows_keep_all_their_numbers_when_they_move_and_when_room_is_made():
    stack = filled(Tanh, 4)
    for column in stack.columns.values():
        column.copy_(torch.randn(column.shape))
    stack.steps[:] = range(4)
    before = {name: column.clone() for name, column in stack.columns.items()}
    stack.arrange(np.array([2, 0, 3]))
    stack.reserve(9)
    assert stack.capacity >= 9
    for name, column in stack.columns.items():
        assert torch.equal(column[:3], before[name][[2, 0, 3]])
    assert stack.steps[:3].tolist() == [2, 0, 3]


def test_a_parameter_that_needs_no_gradient_never_moves():
    def module():
        made = Tanh()
        made.inner.weight.requires_grad_(False)
        return made

    stack, rows = filled(module, 3), slice(0, 3)
    before = stack.parameter("inner.weight").clone()
    optimizer = partial(Updates, config=OptimizerConfig(lr=1e-2, weight_decay=0.5))
    stack(torch.randn(3, 6, 5), rows).square().sum().backward()
    optimizer(stack, rows).step()
    assert torch.equal(stack.parameter("inner.weight"), before)
    assert stack.parameter("inner.bias").count_nonzero()


def test_a_parameter_shared_inside_the_module_is_stored_once():
    class Tied(nn.Module):
        stacks = True

        def __init__(self):
            super().__init__()
            self.a, self.b = Linear(4, 4), Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    x = torch.randn(2, 6, 4)
    results = []
    for mapping in ("auto", "vmap", "loop"):
        stack = filled(Tied, 2, mapping=mapping)
        assert stack.size == 4 * 4 + 4 + 4
        y = stack(x, slice(0, 2))
        y.square().sum().backward()
        results.append((y.detach(), stack.columns["gradient"]))
    for y, gradient in results[1:]:
        torch.testing.assert_close(y, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_rows_that_cannot_run_at_once_run_as_the_module_does_before_any_call():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls, self.seen = nn.Linear(4, 4), 0, None

        def forward(self, x):
            self.calls += 1
            self.seen = self.inner(x)  # a tensor of vmap, where that is tried first
            return self.seen * self.calls if self.seen.sum() > -100 else self.seen

    module = Counting()
    stack, x = Stack(module, 3), torch.ones(3, 5, 4)
    for row in range(3):
        stack.write(row, module)
    found = stack(x, slice(0, 3))
    assert torch.equal(found, module(x))
