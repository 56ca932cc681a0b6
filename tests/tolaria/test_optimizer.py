"""Stacked optimizers beside torch's own, a row a network."""

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.stack import Stack
from esper.leyline.config import OptimizerConfig
from esper.tolaria.optimizer import StackedOptimizer

ROWS, STEPS = 4, 20
BORN = [0, 3, 3, 11]  # the step from which each row takes part
BOTH = pytest.mark.parametrize("name", ["adamw", "sgd"])
KINDS = pytest.mark.parametrize(
    "as_rows", [lambda a, b: slice(a, b), lambda a, b: np.arange(a, b)], ids=["slice", "index"]
)


def module():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make(config, rows=ROWS):
    """A stack whose rows are modules drawn one after the other, its optimizer, and those modules."""
    optimizer = StackedOptimizer(config)
    modules = [module() for _ in range(rows)]
    stack = Stack(modules[0], rows, moments=optimizer.rule.moments, dtype=torch.float64)
    for row, one in enumerate(modules):
        stack.write(row, one)
    return stack, optimizer, modules


def torch_optimizer(config, parameters):
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum)


def flat(one):
    return nn.utils.parameters_to_vector(one.parameters()).detach()


def scaled_loss(y):
    """Gradients from 1e-3 to 1e3, so that rows differ in whether they are clipped."""
    scale = torch.logspace(-3, 3, len(y), dtype=y.dtype).view(-1, *[1] * (y.dim() - 1))
    return (scale * y.square()).sum()


CONFIGS = {
    "plain": {},
    "decayed": {"weight_decay": 0.1},
    "clipped": {"max_grad_norm": 0.5},
    "decayed and clipped": {"weight_decay": 0.1, "max_grad_norm": 0.5},
    "without momentum": {"momentum": 0.0},
}


@BOTH
@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_every_row_is_moved_as_torch_moves_it(name, settings):
    config = OptimizerConfig(name=name, lr=0.01, **settings)
    stack, optimizer, modules = make(config)
    theirs = [torch_optimizer(config, m.parameters()) for m in modules]
    for step in range(STEPS):
        rows = np.array([row for row in range(ROWS) if step >= BORN[row]])
        x = torch.randn(len(rows), 5, 3, dtype=torch.float64)
        scaled_loss(stack(x, rows)).backward()
        norms = optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
        losses = [modules[row](one) for row, one in zip(rows, x, strict=True)]
        scaled_loss(torch.stack(losses)).backward()
        for row, norm in zip(rows, norms, strict=True):
            largest = config.max_grad_norm if config.max_grad_norm is not None else float("inf")
            theirs_norm = nn.utils.clip_grad_norm_(modules[row].parameters(), largest)
            torch.testing.assert_close(norm, theirs_norm, rtol=1e-10, atol=1e-12)
            theirs[row].step()
            theirs[row].zero_grad()
    for row, one in enumerate(modules):
        torch.testing.assert_close(stack.columns["value"][row], flat(one), rtol=1e-10, atol=1e-12)
    assert stack.steps.tolist() == [STEPS - born for born in BORN]


@BOTH
def test_the_first_step_of_a_newborn_row_is_that_of_a_first_step_anywhere(name):
    stack, optimizer, _ = make(OptimizerConfig(name=name))
    stack.columns["value"][:] = stack.columns["value"][0].clone()
    gradient = torch.randn(stack.size, dtype=torch.float64)
    moved = []
    for rows in (slice(0, 1), slice(0, 2)):  # row 1 is born a step after row 0
        stack.columns["gradient"][rows] = gradient
        before = stack.columns["value"].clone()
        optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
        moved.append(stack.columns["value"] - before)
    assert torch.equal(moved[0][0], moved[1][1])


@BOTH
def test_a_plan_of_several_steps_is_several_plans_of_one(name):
    stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1))
    stack.steps[:] = [0, 7, 1, 100]
    rows = slice(1, 4)
    plan = optimizer.plan(stack, rows, 5)
    for factors in plan:
        assert torch.equal(optimizer.plan(stack, rows, 1)[0], factors)
        optimizer.step(stack, rows, factors)


def everything(stack, rows):
    return {name: column[rows].clone() for name, column in stack.columns.items()} | {
        "steps": torch.from_numpy(stack.steps[rows].copy()),
    }  # fmt: skip


@BOTH
@KINDS
def test_rows_that_are_not_named_do_not_move_moments_included(name, as_rows):
    stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5))
    for column in stack.columns.values():
        column[:] = torch.rand_like(column)
    others = [0, 3]
    before = everything(stack, others)
    rows = as_rows(1, 3)
    for factors in optimizer.plan(stack, rows, 3):
        optimizer.step(stack, rows, factors)
    after = everything(stack, others)
    assert all(torch.equal(before[part], after[part]) for part in before)
    assert stack.steps.tolist() == [0, 3, 3, 0]


@BOTH
@KINDS
def test_gradients_become_0_for_the_rows_that_stepped_alone(name, as_rows):
    stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5))
    stack.columns["gradient"][:] = 1
    rows = as_rows(1, 3)
    optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
    assert stack.columns["gradient"].sum(1).tolist() == [stack.size, 0, 0, stack.size]


@BOTH
def test_a_slice_and_an_index_array_of_the_same_rows_do_the_same_bit_for_bit(name):
    def run(rows):
        torch.manual_seed(1)
        stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5))
        stack.steps[:] = [0, 5, 2, 9]
        norms = []
        for factors in optimizer.plan(stack, rows, 3):
            stack.columns["gradient"][:] = torch.randn_like(stack.columns["gradient"])
            norms.append(optimizer.step(stack, rows, factors))
        return everything(stack, slice(0, ROWS)) | {"norm": torch.stack(norms)}

    one, other = run(slice(1, 4)), run(np.arange(1, 4))
    assert all(torch.equal(one[part], other[part]) for part in one)


@BOTH
def test_rows_in_any_order_are_moved_by_factors_of_their_own(name):
    def run(rows):
        torch.manual_seed(1)
        stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1))
        stack.steps[:] = [0, 5, 2, 9]
        stack.columns["gradient"][:] = torch.randn_like(stack.columns["gradient"])
        norms = optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
        return stack.columns["value"], norms[np.argsort(rows)]

    for one, other in zip(run(np.array([0, 1, 3])), run(np.array([3, 0, 1])), strict=True):
        assert torch.equal(one, other)


@BOTH
def test_norms_are_those_before_clipping(name):
    stack, optimizer, _ = make(OptimizerConfig(name=name, max_grad_norm=0.5))
    gradient = torch.randn(ROWS, stack.size, dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [10.0], [0.0]])
    stack.columns["gradient"][:] = gradient
    rows = slice(0, ROWS)
    norms = optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
    torch.testing.assert_close(norms, gradient.norm(dim=1))


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_gradient_that_is_not_finite_shows_in_its_row_and_moves_no_other(name, bad, clip):
    def run(poison):
        torch.manual_seed(1)
        stack, optimizer, _ = make(OptimizerConfig(name=name, max_grad_norm=clip))
        stack.columns["gradient"][:] = torch.randn_like(stack.columns["gradient"])
        if poison:
            stack.columns["gradient"][2, 5] = bad
        rows = slice(0, ROWS)
        norms = optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
        return stack.columns["value"], norms

    (clean, _), (poisoned, norms) = run(False), run(True)
    others = [0, 1, 3]
    assert torch.equal(clean[others], poisoned[others])
    assert norms.isfinite().tolist() == [True, True, False, True]


@BOTH
@KINDS
def test_a_parameter_that_does_not_require_a_gradient_is_not_decayed(name, as_rows):
    one = module()
    one[0].weight.requires_grad_(False)
    optimizer = StackedOptimizer(OptimizerConfig(name=name, weight_decay=0.1))
    stack = Stack(one, 2, moments=optimizer.rule.moments, dtype=torch.float64)
    for row in range(2):
        stack.write(row, one)
    rows = as_rows(0, 2)
    stack(torch.randn(2, 5, 3, dtype=torch.float64), rows).sum().backward()
    optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
    for row in range(2):
        moved = stack.read(row, module())
        assert torch.equal(moved[0].weight, one[0].weight)
        assert not torch.equal(moved[2].weight, one[2].weight)


@BOTH
@KINDS
def test_a_parameter_that_is_fixed_in_one_row_moves_in_the_others(name, as_rows):
    fixed, free = module(), module()
    fixed[0].weight.requires_grad_(False)
    config = OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5)
    optimizer = StackedOptimizer(config)
    stack = Stack(free, 2, moments=optimizer.rule.moments, dtype=torch.float64)
    theirs = [torch_optimizer(config, [p for p in m.parameters() if p.requires_grad]) for m in (fixed, free)]
    stack.write(0, fixed)
    stack.write(1, free)
    rows = as_rows(0, 2)
    for _ in range(STEPS):
        x = torch.randn(2, 5, 3, dtype=torch.float64)
        stack(x, rows).square().sum().backward()
        norms = optimizer.step(stack, rows, optimizer.plan(stack, rows, 1)[0])
        for one, batch, norm, their in zip((fixed, free), x, norms, theirs, strict=True):
            one(batch).square().sum().backward()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 0.5), rtol=1e-10, atol=1e-12)
            their.step()
            their.zero_grad()
    for row, one in enumerate((fixed, free)):
        torch.testing.assert_close(flat(stack.read(row, module())), flat(one), rtol=1e-10, atol=1e-12)


@BOTH
def test_in_float32_the_factors_are_worked_out_in_float64(name):
    optimizer = StackedOptimizer(OptimizerConfig(name=name))
    stack = Stack(module().float(), 2, moments=optimizer.rule.moments, dtype=torch.float32)
    stack.steps[:] = [0, 100_000]
    exact = np.array(optimizer.rule.factors(stack.steps), np.float64)
    plan = optimizer.plan(stack, slice(0, 2), 1)[0]
    assert plan.dtype == torch.float32
    assert np.array_equal(plan[..., 0].numpy(), exact.astype(np.float32))
