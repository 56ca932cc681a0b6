"""Compare stacked optimizers with torch's own, a row a network."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.stack.rows import Stack
from esper.leyline.config.tree import OptimizerConfig
from esper.tolaria.stacked.optimizer import MOMENTS, Updates

ROWS, STEPS = 4, 20
BORN = [0, 3, 3, 11]  # the step from which each row takes part
BOTH = pytest.mark.parametrize("name", ["adamw", "sgd"])


def module():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make(config, rows=ROWS):
    """Make a stack whose rows are modules drawn one after the other, its optimizer, and those modules."""
    optimizer = partial(Updates, config=config)
    modules = [module() for _ in range(rows)]
    stack = Stack(modules[0], rows, moments=MOMENTS[config.name], dtype=torch.float64)
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
    """Compute a loss whose gradients go from 1e-3 to 1e3, so that rows differ in whether they are clipped."""
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
        rows = slice(0, sum(step >= born for born in BORN))
        x = torch.randn(rows.stop, 5, 3, dtype=torch.float64)
        scaled_loss(stack(x, rows)).backward()
        norms = optimizer(stack, rows).step()
        losses = [one(batch) for one, batch in zip(modules, x, strict=False)]
        scaled_loss(torch.stack(losses)).backward()
        for row, norm in enumerate(norms):
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
        optimizer(stack, rows).step()
        moved.append(stack.columns["value"] - before)
    assert torch.equal(moved[0][0], moved[1][1])


@BOTH
def test_updates_prepared_at_once_are_updates_prepared_one_by_one(name):
    def run(at_once):
        torch.manual_seed(1)
        stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5))
        stack.steps[:] = [0, 7, 1, 100]
        rows = slice(1, 4)
        updates = optimizer(stack, rows)
        for _ in range(5):
            stack.columns["gradient"][:] = torch.randn_like(stack.columns["gradient"])
            (updates if at_once else optimizer(stack, rows)).step()
        return everything(stack, slice(0, ROWS))

    one, other = run(at_once=True), run(at_once=False)
    assert all(torch.equal(one[part], other[part]) for part in one)


def everything(stack, rows):
    return {name: column[rows].clone() for name, column in stack.columns.items()} | {
        "steps": torch.from_numpy(stack.steps[rows].copy()),
    }  # fmt: skip


@BOTH
def test_rows_that_are_not_named_do_not_move_moments_included(name):
    stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5))
    for column in stack.columns.values():
        column[:] = torch.rand_like(column)
    others = [0, 3]
    before = everything(stack, others)
    rows = slice(1, 3)
    updates = optimizer(stack, rows)
    for _ in range(3):
        updates.step()
    after = everything(stack, others)
    assert all(torch.equal(before[part], after[part]) for part in before)
    assert stack.steps.tolist() == [0, 3, 3, 0]


@BOTH
def test_gradients_become_0_for_the_rows_that_stepped_alone(name):
    stack, optimizer, _ = make(OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5))
    stack.columns["gradient"][:] = 1
    rows = slice(1, 3)
    optimizer(stack, rows).step()
    assert stack.columns["gradient"].sum(1).tolist() == [stack.size, 0, 0, stack.size]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_moves_alike_bit_for_bit_whatever_rows_stand_beside_it(name, dtype):
    """Check with kernels that take several numbers at once: 37 of them, so that some are left over in every row."""
    config = OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5)

    def run(chosen):
        optimizer = partial(Updates, config=config)
        stack = Stack(nn.Linear(36, 1), len(chosen), moments=MOMENTS[name], dtype=dtype)
        draws = torch.Generator().manual_seed(1)
        stack.steps[:] = np.array([0, 5, 2, 9])[chosen]
        stack.columns["value"][:] = torch.randn(ROWS, 37, dtype=dtype, generator=draws)[chosen]
        updates = optimizer(stack, slice(0, len(chosen)))
        for _ in range(7):
            stack.columns["gradient"][:] = torch.randn(ROWS, 37, dtype=dtype, generator=draws)[chosen]
            updates.step()
        return everything(stack, slice(0, len(chosen)))

    everyone = run([0, 1, 2, 3])
    for chosen in ([2], [3, 0, 1], [1, 3]):
        some = run(chosen)
        assert all(torch.equal(everyone[part][chosen], some[part]) for part in some)


@BOTH
def test_norms_are_those_before_clipping(name):
    stack, optimizer, _ = make(OptimizerConfig(name=name, max_grad_norm=0.5))
    gradient = torch.randn(ROWS, stack.size, dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [10.0], [0.0]])
    stack.columns["gradient"][:] = gradient
    rows = slice(0, ROWS)
    norms = optimizer(stack, rows).step()
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
        norms = optimizer(stack, rows).step()
        return stack.columns["value"], norms

    (clean, _), (poisoned, norms) = run(False), run(True)
    others = [0, 1, 3]
    assert torch.equal(clean[others], poisoned[others])
    assert norms.isfinite().tolist() == [True, True, False, True]


@BOTH
def test_a_parameter_that_does_not_require_a_gradient_is_not_decayed(name):
    one = module()
    one[0].weight.requires_grad_(False)
    optimizer = partial(Updates, config=OptimizerConfig(name=name, weight_decay=0.1))
    stack = Stack(one, 2, moments=MOMENTS[name], dtype=torch.float64)
    for row in range(2):
        stack.write(row, one)
    rows = slice(0, 2)
    stack(torch.randn(2, 5, 3, dtype=torch.float64), rows).sum().backward()
    optimizer(stack, rows).step()
    for row in range(2):
        moved = stack.read(row, module())
        assert torch.equal(moved[0].weight, one[0].weight)
        assert not torch.equal(moved[2].weight, one[2].weight)


@BOTH
def test_a_parameter_that_is_fixed_in_one_row_moves_in_the_others(name):
    fixed, free = module(), module()
    fixed[0].weight.requires_grad_(False)
    config = OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5)
    optimizer = partial(Updates, config=config)
    stack = Stack(free, 2, moments=MOMENTS[name], dtype=torch.float64)
    theirs = [torch_optimizer(config, [p for p in m.parameters() if p.requires_grad]) for m in (fixed, free)]
    stack.write(0, fixed)
    stack.write(1, free)
    rows = slice(0, 2)
    for _ in range(STEPS):
        x = torch.randn(2, 5, 3, dtype=torch.float64)
        stack(x, rows).square().sum().backward()
        norms = optimizer(stack, rows).step()
        for one, batch, norm, their in zip((fixed, free), x, norms, theirs, strict=True):
            one(batch).square().sum().backward()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 0.5), rtol=1e-10, atol=1e-12)
            their.step()
            their.zero_grad()
    for row, one in enumerate((fixed, free)):
        torch.testing.assert_close(flat(stack.read(row, module())), flat(one), rtol=1e-10, atol=1e-12)


@BOTH
def test_in_float32_the_corrections_of_late_updates_are_exact(name):
    """Compare with torch in float64, after a hundred thousand updates and from the first: relative errors of rounding alone."""
    config = OptimizerConfig(name=name, lr=0.01)
    for steps in (0, 100_000):
        moved = []
        for dtype in (torch.float32, torch.float64):
            optimizer = partial(Updates, config=config)
            stack = Stack(nn.Linear(36, 1), 1, moments=MOMENTS[name], dtype=dtype)
            stack.steps[:] = steps
            stack.columns["gradient"][:] = torch.linspace(0.1, 1, 37, dtype=torch.float64).to(dtype)
            optimizer(stack, slice(0, 1)).step()
            moved.append(stack.columns["value"].double())
        torch.testing.assert_close(*moved, rtol=1e-5, atol=0)
