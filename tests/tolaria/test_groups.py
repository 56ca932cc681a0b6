"""Test parameters that come to an optimizer late, under every scheduler of torch."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from esper.leyline.messages import InputError
from esper.tolaria.live.groups import Groups

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 6], 0.1),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, 6),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 8),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, 1e-4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=True),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, 12),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=[1e-3] * len(o.param_groups)),
    "warmup, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 8)], [3]
    ),
    "constant, then lambda": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 5), lr_scheduler.LambdaLR(o, lambda step: 0.8**step)], [5]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
STEPS = 11


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)


def sgd(model):
    """Make an SGD of two groups with rates of their own."""
    groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.second.parameters(), "lr": 0.04}]
    return torch.optim.SGD(groups, momentum=0.8)


def tick(optimizer, scheduler, step):
    optimizer.step()
    scheduler.step(*([float(max(step, 4))] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()))


def rates(optimizer):
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("birth", [0, 2, 6])
def test_a_late_group_has_the_rates_of_the_group_beside_it_and_disturbs_none(name, birth):
    model, plain = Pair(), Pair()
    optimizer, control = sgd(model), sgd(plain)
    scheduler, kept = SCHEDULERS[name](optimizer), SCHEDULERS[name](control)
    groups = Groups(optimizer, scheduler, model)
    late = [("weight", nn.Parameter(torch.zeros(2)))]
    for step in range(STEPS):
        if step == birth:
            groups.add("a", late, list(model.second.named_parameters()))
        if step == 9:
            assert groups.names() == ["a"]
            groups.remove("a")
        tick(optimizer, scheduler, step)
        tick(control, kept, step)
        assert rates(optimizer)[:2] == rates(control)
        assert rates(optimizer)[2:] == rates(control)[1:] * (birth <= step < 9)
    assert scheduler.state_dict().keys() == kept.state_dict().keys()


def test_parameters_join_the_group_of_their_own_sort_under_every_kind_of_scheduler():
    model = Pair()
    parts = [[model.first.bias, model.second.bias], [model.second.weight], [model.first.weight]]
    optimizer = torch.optim.AdamW([{"params": part, "weight_decay": 0.1 * i} for i, part in enumerate(parts)], lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda step, i=i: (1 + i) ** -step for i in range(3)])
    groups = Groups(optimizer, scheduler, model)
    shapes = {"weight": (3, 3), "bias": (3,), "out.weight": (1, 3), "norm.scale": (1, 1, 3), "norm.shift": (1, 1, 3)}
    late = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    groups.add("a", list(late.items()), list(model.first.named_parameters()))
    assert groups.names() == ["a"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 1, 2, 3]
    assert optimizer.param_groups[3]["params"][1] is late["out.weight"]
    optimizer.step()
    scheduler.step()
    for key in ("lr", "weight_decay"):
        assert [group[key] for group in optimizer.param_groups[3:]] == [optimizer.param_groups[i][key] for i in (2, 0)]
    groups.remove("a")
    assert len(optimizer.param_groups) == len(scheduler.base_lrs) == len(scheduler.lr_lambdas) == 3


def test_a_removed_group_leaves_nothing_behind():
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = Groups(optimizer, None, model)
    late = nn.Parameter(torch.ones(2))
    groups.add("a", [("weight", late)], list(model.named_parameters()))
    late.grad = torch.ones(2)
    optimizer.step()
    assert late in optimizer.state
    groups.remove("a")
    assert late not in optimizer.state
    assert len(optimizer.param_groups) == 1


def test_named_parameters_keep_their_names():
    model, late = Pair(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    groups = Groups(optimizer, None, model)
    groups.add("a", [("weight", late)], list(model.named_parameters()))
    names = {parameter: name for name, parameter in model.named_parameters()} | {late: "late"}
    state = groups.state(names)
    state["groups"][0]["names"].reverse()
    groups.load_state(state, names)
    assert optimizer.param_groups[0]["param_names"] == [names[p] for p in optimizer.param_groups[0]["params"]]
    assert optimizer.param_groups[0]["param_names"][0] == "second.bias"
    assert optimizer.param_groups[1]["param_names"] == ["a.0"]


def test_the_groups_of_one_seed_are_stepped_alone():
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = Groups(optimizer, None, model)
    late = nn.Parameter(torch.ones(2))
    groups.add("a", [("weight", late)], list(model.named_parameters()))
    before = copy.deepcopy(model.state_dict())
    for parameter in (*model.parameters(), late):
        parameter.grad = torch.ones_like(parameter)
    groups.step(["a"])
    assert (late != 1).all()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_seed_on_a_cpu_is_stepped_to_the_same_weights_by_the_fused_kernel_and_by_the_one_that_a_person_chose(kind):
    reached = []
    for chosen in ({}, {"foreach": False}):
        model, draw = Pair().double(), torch.Generator().manual_seed(0)
        optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, **chosen)
        groups = Groups(optimizer, None, model)
        late = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
        groups.add("a", [("weight", late)], list(model.named_parameters()))
        assert [group["fused"] for group in optimizer.param_groups] == ([None, True] if not chosen else [None, None])
        for _ in range(20):
            late.grad = torch.randn(3, 2, dtype=torch.float64, generator=draw)
            optimizer.step()
        reached.append(late)
    torch.testing.assert_close(*reached, rtol=1e-12, atol=1e-12)


def test_the_kernel_that_steps_a_seed_is_that_of_its_device_and_not_that_of_a_saved_optimizer():
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = Groups(optimizer, None, model)
    late = nn.Parameter(torch.zeros(5))
    groups.add("a", [("weight", late)], list(model.named_parameters()))
    names = {parameter: name for name, parameter in model.named_parameters()} | {late: "late"}
    state = groups.state(names)
    state["groups"][1] |= {"fused": None, "lr": 0.5}  # as of a training on another device
    groups.load_state(state, names)
    assert (optimizer.param_groups[1]["fused"], optimizer.param_groups[1]["lr"]) == (True, 0.5)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_saved_optimizer_is_taken_up_by_names_in_any_order_of_groups(swapped):
    def build(swap):
        torch.manual_seed(0)
        model = Pair()
        parts = [("second", 0.3), ("first", 0.1)] if swap else [("first", 0.1), ("second", 0.3)]
        optimizer = torch.optim.AdamW([{"params": getattr(model, part).parameters(), "lr": lr} for part, lr in parts])
        scheduler = lr_scheduler.LambdaLR(
            optimizer, [lambda step, part=part: 0.9**step if part == "first" else 1.0 for part, _ in parts]
        )
        late = [nn.Parameter(torch.zeros(5))]
        groups = Groups(optimizer, scheduler, model)
        groups.add("a", [("weight", late[0])], list(model.second.named_parameters()))
        names = {parameter: name for name, parameter in model.named_parameters()} | {late[0]: "late"}
        return model, optimizer, scheduler, groups, names

    def train(model, optimizer, scheduler, names, steps):
        for step in range(steps):
            for index, parameter in enumerate(sorted(names, key=names.get)):
                parameter.grad = torch.full_like(parameter, 0.1 * index + step)
            optimizer.step()
            scheduler.step()

    model, optimizer, scheduler, groups, names = build(False)
    train(model, optimizer, scheduler, names, 4)
    state, values = groups.state(names), {names[p]: p.detach().clone() for p in names}
    train(model, optimizer, scheduler, names, 4)

    other, optimizer_2, scheduler_2, groups_2, names_2 = build(swapped)
    with torch.no_grad():
        for parameter, name in names_2.items():
            parameter.copy_(values[name])
    groups_2.load_state(state, names_2)
    train(other, optimizer_2, scheduler_2, names_2, 4)
    ends = {name: parameter for parameter, name in names.items()}
    assert all(torch.equal(parameter, ends[name]) for parameter, name in names_2.items())
    assert [group["lr"] for group in optimizer_2.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_a_saved_optimizer_of_other_groups_is_refused():
    model = Pair()
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = Groups(sgd(model), None, model).state(names)
    whole = Groups(torch.optim.SGD(model.parameters()), None, model)
    with pytest.raises(InputError, match=r"no group of 4 parameters that begins with 'first.bias'"):
        whole.check(state, names, lambda _: False)


class Own(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def test_what_cannot_be_kept_in_step_is_refused_in_a_sentence():
    model = Pair()
    optimizer = sgd(model)
    with pytest.raises(InputError, match="Own is not a scheduler whose rates for a new group"):
        Groups(optimizer, Own(optimizer), model)
    with pytest.raises(InputError, match="that Growth was not given"):
        Groups(optimizer, None, model)
    with pytest.raises(InputError, match="schedules another optimizer"):
        Groups(sgd(model), lr_scheduler.StepLR(optimizer, 3), model)
    with pytest.raises(InputError, match="holds no parameter of the model"):
        Groups(torch.optim.SGD(nn.Linear(2, 2).parameters()), None, model)
    with pytest.raises(InputError, match="LBFGS"):
        Groups(torch.optim.LBFGS(model.parameters()), None, model)
    with pytest.raises(InputError, match=r"is a list; give a torch\.optim\.Optimizer"):
        Groups([], None, model)
