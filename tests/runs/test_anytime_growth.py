"""Check that a network becomes wider while its loop goes on, whose length nobody knows."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.tolaria.test_widening_networks import GPT, TOKENS, Own
from torch import nn
from torch._dynamo.testing import CompileCounter

import esper
from esper.kasmina.blueprints import count
from esper.leyline.messages import GrowthWarning, InputError
from esper.runs.live import anytime
from thinning import thinned

RATIO = 0.1


def texts(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(20, (4, 9), generator=generator)


def made(**settings):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    growth = esper.AnytimeGrowth(
        model, optimizer, example=texts(0)[:, :-1], **{"ratio": RATIO, "warmup": 4, **settings}
    )
    return model, optimizer, schedule, growth


def trained(run, first, last):
    model, optimizer, schedule, growth = run
    for step in range(first, last):
        batch = texts(step)
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        growth.step(batch[:, 1:])
    return run


def test_a_network_becomes_wider_when_enough_was_seen_for_its_size_and_says_why_not_before():
    run = trained(made(), 0, 1)
    model, optimizer, _, growth = run
    size = growth.parameters
    needed = math.ceil(RATIO * size / 32)
    assert growth.why.startswith(f"32 targets were seen, and 0.1 for each of {size:,} parameters are ")
    trained(run, 1, needed - 1)
    assert (growth.growths, model.wte.embedding_dim) == ([], 8)
    trained(run, needed - 1, needed)
    (only,) = growth.growths
    assert (model.wte.embedding_dim, only["before"], only["parameters"], only["way"]) == (
        16,
        size,
        growth.parameters,
        "means",
    )
    assert only["step"] == needed
    assert growth.average.wte.embedding_dim == 16
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == {
        id(each) for each in model.parameters()
    }
    assert repr(growth).startswith(f"GPT of {size:,} -> {growth.parameters:,} parameters after")
    assert growth.summary()["growths"] == [only]


def test_each_growth_waits_for_targets_in_proportion_to_the_widths_so_far():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    growth = esper.AnytimeGrowth(model, optimizer, example=torch.ones(1, 2), most_parameters=50)
    sizes = [growth.parameters]
    while len(growth.growths) < 2:
        if growth.step(1):
            sizes.append(growth.parameters)
    assert [each["seen"] for each in growth.growths] == [30 * sizes[0], 60 * sizes[1]]
    assert not growth.step(10**6)
    assert growth.why == "82 parameters would exceed most_parameters=50"


def test_a_step_takes_the_batch_too_as_that_of_a_growth_with_seeds_and_counts_its_targets():
    *_, growth = made()
    batch = texts(0)
    growth.step(batch[:2, :-1], batch[:2, 1:])
    growth.step(batch[:, 1:])
    assert growth.seen == 16 + 32


@pytest.mark.parametrize("beginning", [0, 10, 30])
def test_rates_are_scaled_within_a_step_alone_and_not_by_growths_with_which_the_training_begins(beginning, monkeypatch):
    monkeypatch.setattr(anytime, "BEGINNING", beginning)
    run = _, optimizer, schedule, growth = made(rate_power=0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    trained(run, 0, 40)
    assert growth.growths
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    other = torch.optim.lr_scheduler.StepLR(plain, 5, 0.9)
    for used in seen[: growth.growths[0]["step"]]:
        at = seen.index(used)
        assert used == pytest.approx(plain.param_groups[0]["lr"] * min(1, (at + 1) / 5))
        plain.step()
        other.step()
    assert schedule.get_last_lr() == [pytest.approx(1e-2 * 0.9**8)]
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    last, later = growth.growths[-1], [each for each in growth.growths if each["step"] > beginning]
    assert len(later) == {0: 2, 10: 1, 30: 0}[beginning]
    assert seen[last["step"]] == pytest.approx(1e-2 * 0.9 ** (last["step"] // 5) * 2 ** (-0.5 * len(later)) / 5)
    growth.finish()
    optimizer.step()
    assert seen[-1] == pytest.approx(schedule.get_last_lr()[0])


@pytest.fixture(scope="module")
def whole():
    """Train a run of forty steps that is never stopped."""
    return trained(made(), 0, 40)


@pytest.mark.parametrize("stop", thinned([20, 5, 7, 37, 9], 2))
def test_a_resumed_run_goes_on_to_the_same_bits(stop, whole):
    first = trained(made(), 0, stop)
    saved = copy.deepcopy([each.state_dict() for each in first])
    second = model, optimizer, schedule, growth = made()
    growth.load_state_dict(saved[3])
    for part, state in zip((model, optimizer, schedule), saved, strict=False):
        part.load_state_dict(state)
    trained(second, stop, 40)
    assert len(growth.growths) == len(whole[3].growths) > 0
    for one, other in ((whole[0], model), (whole[3].average, growth.average)):
        state = other.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in one.state_dict().items())
    assert growth.summary() == whole[3].summary()


def test_a_list_of_optimizers_follows_is_resumed_to_the_same_bits_and_gets_back_its_memory():
    class Both(list):
        """Updates by two optimizers in the place of one."""

        def step(self):
            for each in self:
                each.step()

        def zero_grad(self):
            for each in self:
                each.zero_grad()

        def state_dict(self):
            return [each.state_dict() for each in self]

        def load_state_dict(self, states):
            for each, state in zip(self, states, strict=True):
                each.load_state_dict(state)

    def begun():
        torch.manual_seed(0)
        model = GPT()
        split = [[each for each in model.parameters() if (each.dim() == 2) == matrix] for matrix in (True, False)]
        both = Both([torch.optim.Muon(split[0], lr=1e-2), torch.optim.AdamW(split[1], lr=1e-2)])
        schedule = torch.optim.lr_scheduler.StepLR(both[0], 5, 0.9)
        return model, both, schedule, esper.AnytimeGrowth(model, both, example=texts(0)[:, :-1], ratio=RATIO, warmup=4)

    straight = trained(begun(), 0, 40)
    assert len(straight[3].growths) == 2
    held = [id(each) for optimizer in straight[1] for group in optimizer.param_groups for each in group["params"]]
    assert sorted(held) == sorted(map(id, straight[0].parameters()))
    half, again = trained(begun(), 0, 20), begun()
    again[3].load_state_dict(copy.deepcopy(half[3].state_dict()))
    for each, other in zip(again[:3], half[:3], strict=True):
        each.load_state_dict(copy.deepcopy(other.state_dict()))
    trained(again, 20, 40)
    assert all(torch.equal(*pair) for pair in zip(straight[0].parameters(), again[0].parameters(), strict=True))
    assert [group["lr"] for each in again[1] for group in each.param_groups] == pytest.approx([1e-2 * 0.9**8, 1e-2])
    before = copy.deepcopy(straight[1].state_dict())
    straight[3]._guard()
    trained((straight[0], *straight[1:]), 40, 41)
    with torch.no_grad():
        straight[0].wte.weight.fill_(math.nan)
    with pytest.warns(GrowthWarning, match="of step 40 again"):
        straight[3]._guard()
    for one, other in zip(straight[1].state_dict(), before, strict=True):
        for key, values in other["state"].items():
            assert all(
                torch.equal(torch.as_tensor(one["state"][key][name]), torch.as_tensor(own))
                for name, own in values.items()
            )


def test_small_batches_come_first_and_a_resumed_run_goes_on_with_the_same(monkeypatch):
    monkeypatch.setattr(anytime, "DOUBLED", 8)

    def drawn(run, first, last):
        model, optimizer, _, growth = run
        sizes = []
        for step in range(first, last):
            batch = texts(step)[: growth.batch_size(1, 3)]
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step(batch[:, 1:])
            sizes.append(len(batch))
        return sizes

    whole, half, rest = made(), made(), made()
    assert drawn(whole, 0, 60) == [1] * 8 + [2] * 8 + [3] * 44
    drawn(half, 0, 12)
    rest[3].load_state_dict(half[3].state_dict())
    for part, other in zip(rest[:2], half[:2], strict=True):
        part.load_state_dict(copy.deepcopy(other.state_dict()))
    assert drawn(rest, 12, 60) == [2] * 4 + [3] * 44
    assert rest[3].summary() == whole[3].summary()
    assert whole[3].growths[0]["step"] > 12
    assert all(torch.equal(*pair) for pair in zip(rest[0].parameters(), whole[0].parameters(), strict=True))


def test_a_snapshot_is_a_plain_module_and_disturbs_nothing():
    whole, looked = trained(made(), 0, 30), trained(made(), 0, 10)
    snapshots = [looked[3].snapshot()]
    trained(looked, 10, 30)
    snapshots.append(looked[3].snapshot())
    assert [type(each) for each in snapshots] == [GPT, GPT]
    assert snapshots[0].wte.embedding_dim < snapshots[1].wte.embedding_dim
    assert all(each.requires_grad for each in snapshots[1].parameters())
    assert all(torch.equal(*pair) for pair in zip(whole[0].parameters(), looked[0].parameters(), strict=True))


def test_the_average_weighs_about_the_last_tenth_of_the_compute():
    model = nn.Sequential(nn.Linear(1, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    growth = esper.AnytimeGrowth(model, optimizer, example=torch.randn(2, 1), ratio=1e9)
    for step in range(1, 1001):
        with torch.no_grad():
            model[0].weight.fill_(step)
        optimizer.step()
        growth.step(1)
    assert float(growth.average[0].weight[0]) == pytest.approx(1000 * 9 / 10, rel=0.01)


def test_a_compiled_network_is_compiled_once_for_each_size():
    counter = CompileCounter()
    run = model, *_, growth = made()
    compiled = torch.compile(model, backend=counter, dynamic=False)
    trained((compiled, *run[1:]), 0, 30)
    assert len(growth.growths) == 2
    assert counter.frame_count == 1 + len(growth.growths)


def test_a_limit_and_a_loss_that_does_not_fall_keep_a_network_small_and_are_named():
    *_, growth = trained(made(most_parameters=10_000), 0, 60)
    assert growth.parameters < 10_000
    assert "parameters would exceed most_parameters=10,000" in growth.why
    batch = texts(99)
    probe = [(batch[:, :-1], batch[:, 1:])]
    *_, growth = trained(made(probe=probe, loss=lambda output, y: 0 * output.square().mean((1, 2)) + 3), 0, 60)
    assert len(growth.growths) == 1  # there was no growth before the first, after which the loss could have fallen
    assert growth.why.startswith("the loss on the probe is 3, and was 3 at the last growth")


def falling(bend, power=0.15, warmup=1):
    """Make a run whose loss on the probe falls as compute^-.3, and as compute^-power from `bend` on, whatever it learns."""
    run = None

    def loss(output, target):
        compute = run[3]._compute if run else 1.0  # the probe is tried before there is a run
        return 1e3 * min(compute, bend) ** -0.3 * max(compute / bend, 1.0) ** -power + 0 * output.mean((1, 2))

    run = made(probe=[(texts(99)[:, :-1], texts(99)[:, 1:])], loss=loss, ratio=None, warmup=warmup)
    return run


def test_a_network_passes_through_the_sizes_it_is_given_and_says_that_they_end():
    run = made(sizes=[1, 4, 8], ratio=0.05)
    assert trained(run, 0, 30)[3].growths[0]["factor"] == 4
    whole = model, *_, growth = trained(run, 30, 160)
    assert [each["factor"] for each in growth.growths] == [4, 2]
    assert (model.wte.embedding_dim, growth.why) == (64, "sizes ends with 8 times the first widths")
    assert repr(growth).endswith("; not more, as sizes ends with 8 times the first widths")
    *_, resumed = made(sizes=[1, 4, 8], ratio=0.05)
    resumed.load_state_dict(growth.state_dict())
    assert resumed.summary() == growth.summary()
    *_, other = made(sizes=[1, 4], ratio=0.05)
    with pytest.raises(InputError, match=r"of sizes=\[1, 4, 8\], and this run has sizes=\[1, 4\]; give the same"):
        other.load_state_dict(whole[3].state_dict())
    *_, other = made(sizes=[1, 4, 8], ratio=0.06)
    with pytest.raises(InputError, match=r"is of ratio=0\.05, and this run has ratio=0\.06; give the same"):
        other.load_state_dict(whole[3].state_dict())
    *_, still = trained(made(sizes=[1], ratio=0.05), 0, 30)
    assert (still.growths, still.why) == ([], "sizes ends with 1 times the first widths")


def test_a_loss_on_the_probe_that_falls_more_slowly_than_it_did_makes_a_network_wider():
    run = trained(falling(math.inf), 0, 120)
    assert run[3].growths == []
    assert run[3].why.startswith("the loss on the probe went as compute^-0.30 while the compute doubled, and as")
    compute = run[3]._compute / run[3].steps
    run = trained(falling(60 * compute), 0, 90)
    (only,) = run[3].growths
    assert 60 < only["step"] < 80
    assert run[3].why == "the next growth waits until the compute is 4 times that at the last growth"


def test_targets_of_the_probe_that_the_loss_cannot_take_are_refused_before_the_training():
    batch = texts(99)
    probe = [(batch[:, :-1], batch[:, 1:]), (batch[:, :-1], batch[:2, 1:])]
    with pytest.raises(InputError, match="the loss cannot take an output and a target of the probe: ValueError"):
        made(probe=probe, loss=lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten()))


def test_moments_of_a_norm_that_are_not_finite_are_restored():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 4)
    growth = esper.AnytimeGrowth(model, optimizer, example=x)
    for step in range(100):
        if step == 50:
            model(x * math.nan)  # whose loss a loop may leave out
        if step == 99:
            with pytest.warns(
                GrowthWarning, match="moments of norms are not finite after step 100; .* of step 1 again"
            ):
                growth.step(8)
        else:
            growth.step(8)
    assert growth.rollbacks == [{"step": 100, "restored": 1}]
    assert bool(model[1].running_mean.isfinite().all())


def test_a_verdict_goes_on_where_growth_has_ended():
    compute = trained(made(), 0, 1)[3]._compute
    run = trained(falling(60 * compute), 0, 40)
    run[3].cool_down(1000)
    growth = trained(run, 40, 100)[3]
    assert (growth.growths, growth.verdict) == ([], "")  # the loss falls on
    growth = trained(falling(20 * compute, power=-0.5, warmup=10), 0, 30)
    growth[3].cool_down(1000)
    assert "has not fallen since; the loss there is " in trained(growth, 30, 90)[3].verdict


def test_a_state_keeps_its_probe_and_a_higher_limit_lets_a_network_grow_on():
    run = trained(falling(math.inf), 0, 10)
    with pytest.raises(
        InputError, match="the state is of a run with a probe, and this one has none; give probe= and loss= as there"
    ):
        made(ratio=None, warmup=1)[3].load_state_dict(run[3].state_dict())
    run = trained(made(most_parameters=10_000), 0, 60)
    assert run[3]._look_at == math.inf
    again = made(most_parameters=100_000)
    again[3].load_state_dict(copy.deepcopy(run[3].state_dict()))
    for each, other in zip(again[:3], run[:3], strict=True):
        each.load_state_dict(copy.deepcopy(other.state_dict()))
    assert len(trained(again, 60, 62)[3].growths) == len(run[3].growths) + 1
    with pytest.raises(InputError, match="parameters, above most_parameters=3,000; raise the limit"):
        made(most_parameters=3000)[3].load_state_dict(run[3].state_dict())
    with pytest.raises(InputError, match=r"cannot be copied or pickled, as its optimizer would not know the copy"):
        copy.deepcopy(again[3])


def test_a_verdict_says_whether_the_loss_on_the_probe_is_lower_since_the_network_is_larger():
    compute = trained(made(), 0, 1)[3]._compute
    run = trained(falling(60 * compute, power=0.5), 0, 90)
    assert (run[3].growths, run[3].verdict, run[3].summary()["verdict"]) == ([], "", "")
    for power, begin, end in (
        (0.15, "the lowest loss on", ", and is {:.4g} since it has {:,}"),
        (0.0, "size does not matter here: the lowest loss on", ", and {:.4g} with {:,}"),
    ):
        run = trained(falling(60 * compute, power=power), 0, 80)
        (only,) = run[3].growths
        assert "the lowest loss" not in run[3].verdict  # too early
        growth = trained(run, 80, 180)[3]
        assert growth.growths == [only]
        assert growth.verdict.startswith(f"{begin} the probe was ")
        assert f" with {only['before']:,} parameters, and " in growth.verdict
        found = end.format(growth._lowest[-1][1], only["parameters"])
        kept = f"growth.snapshot() is the network of {only['before']:,} parameters"
        before = f"; the loss on the probe was {growth._loss_before:.4g} at the last growth: until it is lower, {kept}"
        assert growth.verdict.endswith(found + before * (power == 0))
        assert count(growth.snapshot()) == only["parameters" if power else "before"]
        assert repr(growth).endswith(f"; {growth.verdict}")
        again = falling(60 * compute, power=power)[3]
        again.load_state_dict(copy.deepcopy(growth.state_dict()))
        assert again.summary() == growth.summary()
    run = trained(falling(15 * compute, power=-0.5, warmup=10), 0, 65)
    assert run[3].verdict.startswith("no larger size was tried: the loss on the probe was lowest, ")
    assert "has not fallen since, before the network was due to be wider; the loss there is " in run[3].verdict


def test_a_parameter_that_no_optimizer_holds_is_named_before_the_first_step():
    model = made()[0]
    own = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    with pytest.warns(
        GrowthWarning, match=r"requires gradients, and is none of the SGD's; if a further optimizer trains it"
    ):
        esper.AnytimeGrowth(model, torch.optim.SGD(own, 0.1), example=texts(0)[:, :-1])


def test_a_loop_keeps_the_network_with_the_lowest_loss_on_the_probe_where_data_are_few():
    losses: list[float] = []

    def loss(output, y):  # falls until the tenth look, and rises from then on
        losses.append(abs(len(losses) - 9) + 1.0)
        return torch.full((len(output),), losses[-1]) + 0 * output.mean((1, 2))

    run = made(probe=[(texts(99)[:, :-1], texts(99)[:, 1:])], loss=loss, ratio=1e9)
    losses.clear()  # the probe is tried when the object is made
    improved = []
    for step in range(150):
        trained(run, step, step + 1)
        if run[3].improved:
            improved.append(step + 1)
    assert len(improved) == 10
    assert len(losses) > 15
    said = f"the loss on the probe was lowest, 1, after {improved[-1]} steps with {run[3].parameters:,} parameters"
    assert (
        run[3].verdict
        == f"{said}; the loss there is {losses[-1]:.4g} now: keep growth.snapshot() where growth.improved"
    )
    assert run[3].verdict in repr(run[3])
    again = made(probe=[(texts(99)[:, :-1], texts(99)[:, 1:])], loss=loss, ratio=1e9)
    again[3].load_state_dict(copy.deepcopy(run[3].state_dict()))
    assert again[3].verdict == run[3].verdict


@pytest.mark.parametrize("value", [-3.0, math.nan])
def test_a_loss_on_the_probe_without_a_logarithm_is_looked_at_as_often_as_another_and_decides_nothing_else(value):
    looks = []

    def loss(output, y):
        looks.append(output)
        return torch.full((len(output),), value if len(looks) > 4 else -3.0)  # the object is made with a finite one

    run = trained(made(probe=[(texts(99)[:, :-1], texts(99)[:, 1:])], loss=loss, ratio=1e9), 0, 100)
    assert len(looks) < 50
    assert "targets were seen, and 1e+09 for each of" in run[3].why
    assert ("the loss there is nan now: keep growth.snapshot()" in run[3].verdict) == math.isnan(value)


def test_a_run_that_watches_its_loss_is_resumed_to_the_same_bits():
    straight = trained(falling(3.9e6), 0, 90)
    half = trained(falling(3.9e6), 0, 62)
    model, optimizer, schedule, growth = again = falling(3.9e6)
    growth.load_state_dict(copy.deepcopy(half[3].state_dict()))
    for each, other in zip((model, optimizer, schedule), half, strict=False):
        each.load_state_dict(copy.deepcopy(other.state_dict()))
    trained(again, 62, 90)
    assert again[3].growths == straight[3].growths
    assert straight[3].growths[0]["step"] > 62
    for one, other in zip(straight[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_with_a_cost_in_seconds_growth_waits_until_they_are_known_and_then_needs_fewer_targets_the_less_they_rise():
    run = trained(made(cost="seconds", ratio=1e-9), 0, 20)
    growth = run[3]
    assert (growth.growths, growth.why) == ([], "the seconds of a step are known after 21 steps")
    size = growth.parameters
    trained(run, 20, 21)
    (only,) = growth.growths
    assert (only["step"], only["parameters"] > size, only["slower"] >= 1.0) == (21, True, True)
    state = growth.state_dict()
    *_, resumed = made(cost="seconds", ratio=1e-9)
    resumed.load_state_dict(state)
    assert (resumed.summary(), resumed.state_dict()["progress"]) == (growth.summary(), state["progress"])
    run = trained(made(cost="seconds", ratio=1e12, most_parameters=6 * size), 0, 30)
    progress = run[3].state_dict()["progress"]
    beside, slower, elasticity = (progress[name] for name in ("_beside", "_slower", "_elasticity"))
    if run[3].growths:  # a wider step took no longer
        assert "would exceed most_parameters" in run[3].why
    else:
        assert (beside >= 0, slower > 1, 0 < elasticity <= 1) == (True, True, True)
        assert f"takes {slower:.2f} times the seconds" in run[3].why


def mlp(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


@pytest.fixture
def timed(monkeypatch):
    """Replace the seconds of passes by the test's own, longer from 32 units on; return the numbers of networks timed in turn."""
    free, numbers = count(mlp(32)), []

    def seconds(growth, *networks):
        numbers.append(len(networks))
        return [max(1.0, count(each) / free) for each in networks]

    monkeypatch.setattr(esper.AnytimeGrowth, "_seconds", seconds)
    return numbers


def from_four_units(steps, stop=None, **settings):
    """Grow a network of four units, whose loop is left and resumed at a step, and return what it has become."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 10), torch.randint(2, (64,))
    model = mlp(4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    growth = esper.AnytimeGrowth(model, optimizer, example=x, cost="seconds", **settings)
    for step in range(steps):
        if step == stop:
            state = growth.state_dict()
            growth.finish()
            growth = esper.AnytimeGrowth(model, optimizer, example=x, cost="seconds", **settings)
            growth.load_state_dict(state)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(y)
    return model, growth


@pytest.mark.parametrize(
    ("settings", "factor", "why", "turns"),
    [
        (
            {},
            8,
            "as a step of a network 2 times as wide takes",
            5,
        ),  # it waits for targets, as the next size is slower
        ({"sizes": [1, 4]}, 4, "sizes ends with 4 times the first widths", 1),
        ({"sizes": [1, 2, 6]}, 6, "sizes ends with 6 times the first widths", 2),
        ({"most_parameters": 1000}, 4, "parameters would exceed most_parameters=1,000", 2),
    ],
)
@pytest.mark.parametrize("stop", [None, 5, 20])
def test_a_network_begins_with_the_largest_size_that_is_nearly_free_by_one_growth(
    timed, settings, factor, why, turns, stop
):
    model, growth = from_four_units(25, stop, **settings)
    (only,) = growth.growths
    assert (only["step"], only["factor"], only["slower"]) == (21, factor, 1.0)
    assert growth.start == only["why"] == growth.summary()["start"]
    assert (
        f"so training starts with {factor}, the largest of these within a fifth of the smallest's seconds"
        in growth.start
    )
    assert "a step takes 1000.00, 1000.00" in growth.start
    assert growth.start in repr(growth)
    assert [each.out_features for each in model if isinstance(each, nn.Linear)] == [4 * factor, 4 * factor, 2]
    assert growth.parameters == count(mlp(4 * factor))
    assert why in growth.why
    assert timed == [2] * turns  # each copy in turn with the network, and the first that is not nearly free again


def test_where_a_large_first_growth_cannot_be_the_smaller_ones_on_the_way_are_taken(timed, monkeypatch):
    real = anytime.widen

    def widen(model, factor, **settings):
        if factor >= 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, factor, **settings)

    monkeypatch.setattr(anytime, "widen", widen)
    model, growth = from_four_units(25)
    assert [each["factor"] for each in growth.growths] == [4, 2]
    assert model[0].out_features == 32


def test_a_network_that_is_at_the_knee_stays_as_it_is_and_says_so(timed):
    torch.manual_seed(0)
    model = mlp(32)
    optimizer, x, y = torch.optim.Adam(model.parameters(), 1e-3), torch.randn(64, 10), torch.randint(2, (64,))
    growth = esper.AnytimeGrowth(model, optimizer, example=x, cost="seconds")
    for _ in range(24):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(y)
    assert growth.growths == []
    assert "ms with 1, 2 times the first widths, timed in " in growth.start
    assert "so training starts with 1, the largest" in growth.start
    assert "as a step of a network 2 times as wide takes" in growth.why


def test_a_network_a_part_of_which_would_stay_becomes_no_wider(timed, monkeypatch):
    real = anytime.widen

    def widen(model, factor, **settings):
        found = real(model, factor, **settings)
        found.left_out |= {"4": "the outputs are others"} if model[0].out_features > 4 * factor else {}
        return found

    monkeypatch.setattr(anytime, "widen", widen)
    model, growth = from_four_units(25)
    assert (model[0].out_features, len(growth.growths)) == (8, 1)
    assert growth.why == "the features of '4' would stay as they are: the outputs are others"


def test_passes_that_are_timed_draw_nothing_from_generators_of_torch_and_leave_the_network_alone():
    drawn, found = [], []
    for cost in ("parameters", "seconds"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        growth = esper.AnytimeGrowth(
            model, optimizer, example=torch.ones(4, 3), cost=cost, ratio=1e12, most_parameters=60
        )
        for _ in range(21):
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            grown = growth.step(4)
        drawn.append(torch.rand(3))
        found.append([*model.buffers(), *growth.average.buffers()] if not grown else [])
    assert torch.equal(*drawn)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=False))


def test_what_cannot_be_is_refused_in_a_sentence():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    for settings, sentence in (
        ({"factor": 1.5}, "factor is 1.5; give a whole number from 2 on"),
        ({"ratio": 0}, "ratio is 0; give a finite number above 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"fresh": 1.0}, "fresh is 1.0; give a share from 0 to below 1"),
        ({"cost": "hours"}, "cost is 'hours'; give 'parameters' or 'seconds'"),
        ({"most_parameters": "1e6"}, "most_parameters is '1e6'"),
        ({"probe": [(TOKENS, TOKENS)]}, "probe is given without loss"),
        (
            {"probe": [(torch.randn(2, 3), TOKENS)], "loss": F.cross_entropy},
            "cannot run on an input of the probe",
        ),
        (
            {"probe": [(TOKENS, TOKENS)], "loss": lambda output, y: output.mean() * math.nan},
            "on the probe is nan before",
        ),
        ({"sizes": 4}, "sizes is 4; give a list of whole numbers, as [1, 2, 4]"),
        ({"sizes": []}, "sizes is []; give a list of whole numbers"),
        ({"sizes": [1, 2.0]}, "sizes is [1, 2.0]; give a list of whole numbers"),
        ({"sizes": [8, 16]}, "sizes begins with 8; give multiples of the widths of the model, so that the first is 1"),
        ({"sizes": [1, 4, 4]}, "sizes has 4 behind 4; give a larger whole multiple of 4"),
        ({"sizes": [1, 4, 6]}, "sizes has 6 behind 4; give a larger whole multiple of 4"),
        ({"sizes": [1, 4], "factor": 3}, "factor=3 is given beside sizes=[1, 4]; leave factor out"),
        ({"sizes": [1, 4], "most_parameters": 5000}, "sizes ends with 4, at which GPT has 26,496 parameters, above"),
        ({"sizes": [1, 30_000]}, "GiB are free on cpu; give a smaller factor or size"),
        ({"shared": True}, "shared=True is for several processes, and this program has no group of them"),
    ):
        with pytest.raises(InputError) as caught:
            esper.AnytimeGrowth(model, optimizer, example=TOKENS, **settings)
        assert sentence in str(caught.value)
    own = Own()
    with pytest.raises(InputError, match="the model is an Own, which multiplies by a weight"):
        esper.AnytimeGrowth(own, torch.optim.AdamW(own.parameters()), example=torch.randn(2, 5))
    growth = esper.AnytimeGrowth(model, optimizer, example=TOKENS)
    for given in (0, "32", None, True):
        with pytest.raises(InputError, match="targets is "):
            growth.step(given)
    for batch in ((), (TOKENS, TOKENS, 32)):
        with pytest.raises(
            InputError, match=rf"^growth\.step was given {len(batch)} arguments; give the targets of the step"
        ):
            growth.step(*batch)
    for sizes, sentence in (((0, 4), "least is 0; give a whole number from 1 on"), ((8, 4), "most is 4; .* from 8 on")):
        with pytest.raises(InputError, match=sentence):
            growth.batch_size(*sizes)
    *_, growth = trained(made(cost="seconds"), 0, 20)
    with pytest.raises(
        InputError,
        match=r"example has the shape \(4, 8\), and batches of the loop have 77 targets; with cost='seconds', give a batch",
    ):
        growth.step(torch.zeros(77))
    for state, sentence in (
        ([], r"the saved state is a list; give the state as growth\.state_dict"),
        ({"format": 0}, "has format 0, where .* format 13; go on"),
        (
            {"format": 8, "made_with": {}},
            r"is that of esper\.Growth, which esper\.AnytimeGrowth cannot read; give it to",
        ),
    ):
        with pytest.raises(InputError, match=sentence):
            growth.load_state_dict(state)
    run = trained(made(), 0, 30)
    with pytest.raises(InputError, match="this run has begun already"):
        run[3].load_state_dict(run[3].state_dict())
    torch.manual_seed(0)
    wide = GPT(width=16)
    other = esper.AnytimeGrowth(wide, torch.optim.AdamW(wide.parameters()), example=TOKENS, ratio=RATIO, warmup=4)
    with pytest.raises(InputError, match="build the same model at its first size"):
        other.load_state_dict(run[3].state_dict())


def test_a_growth_that_is_pickled_and_a_model_that_was_moved_are_refused():
    model, *_, growth = trained(made(), 0, 3)
    with pytest.raises(InputError, match="cannot be copied or pickled, as its optimizer would not know the copy"):
        pickle.dumps({"model": model, "growth": growth})
    model.bfloat16()
    with pytest.raises(
        InputError, match=r"^the GPT is of torch\.bfloat16 on cpu, and growth\.average is of torch\.float32 on cpu"
    ):
        growth.step(4)
    assert growth.steps == 3


def test_a_step_that_raises_leaves_no_scaled_rate_behind():
    model, optimizer, _, growth = trained(made(), 0, 3)
    (rate,) = (group["lr"] for group in optimizer.param_groups)

    def fails():
        raise MemoryError

    for _ in range(2):
        with pytest.raises(MemoryError):
            optimizer.step(fails)
    F.cross_entropy(model(TOKENS)[:, :, :3].flatten(0, 1), TOKENS.flatten() % 3).backward()
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [rate]
    assert growth.why


def test_a_state_of_another_network_is_refused_before_anything_is_wider(whole):
    state = whole[3].state_dict()
    assert state["progress"]["growths"]
    _, _, _, growth = made()
    size, average = growth.parameters, dict(state["average"])
    del average[next(reversed(average))]
    with pytest.raises(InputError, match=r"the average of the state has no 'lm_head\.weight', which the network has"):
        growth.load_state_dict({**state, "average": average})
    assert growth.parameters == size


def test_where_the_loss_decides_weights_are_mixed_with_fresh_ones_on_the_scale_of_the_first():
    def model():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            network[0].weight.mul_(100)  # drawn on another scale than the layer's own
            network[3].weight.zero_()
        return network

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    found = []
    for fresh in (0.0, 0.25):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        growth = esper.AnytimeGrowth(network, optimizer, example=x, ratio=1e-9, fresh=fresh)
        assert growth.step(8)
        found.append([each.detach().clone() for each in network.parameters()])
    for kept, mixed in zip(*found, strict=True):
        assert kept.shape == mixed.shape
    (weight, bias, scale, *_, last, _), (new_weight, new_bias, new_scale, *_, new_last, _) = found
    drawn = (new_weight - 0.75 * weight) / 0.25
    assert 0.5 < drawn.std() / (100 / 3) < 2  # uniform between -1 / sqrt(3) and 1 / sqrt(3), a hundred times as large
    assert 0 < (new_bias - 0.75 * bias).abs().max() <= 0.25 / 3**0.5
    assert torch.equal(new_scale, torch.ones(8))
    assert torch.equal(scale, torch.ones(8))
    assert torch.equal(new_last, 0.75 * last)  # which began at 0


@pytest.mark.parametrize(("given", "power", "fresh"), [({}, 0.0, 0.5), ({"ratio": 1.0}, 0.5, 0.0)])
def test_rates_stay_and_weights_are_renewed_only_where_the_loss_on_the_probe_decides(given, power, fresh):
    batch = texts(0)
    probe = [(batch[:, :-1], batch[:, 1:])]
    *_, growth = made(probe=probe, loss=lambda output, y: output.square().mean(), **{"ratio": None, **given})
    assert (growth.rate_power, growth.fresh) == (power, fresh)


def test_a_snapshot_is_of_before_a_growth_with_fresh_weights_until_the_wider_network_is_better_on_the_probe():
    generator = torch.Generator().manual_seed(1)
    x, teacher = torch.randn(256, 6, generator=generator), torch.randn(6, 3, generator=generator)
    y, held = (x @ teacher).argmax(1), slice(192, 256)

    def run():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        given = {"ratio": 60.0, "fresh": 0.5, "probe": [(x[held], y[held])], "loss": F.cross_entropy}
        growth = esper.AnytimeGrowth(network, optimizer, example=x[:2], most_parameters=90, **given)
        return network, optimizer, growth

    def trained(run, steps):
        network, optimizer, growth = run
        for _ in range(steps):
            F.cross_entropy(network(x[:192]), y[:192]).backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step(64)
            yield growth

    whole = run()
    sizes, losses = [], []
    for growth in trained(whole, 120):
        sizes.append(count(growth.snapshot()))
        losses.append(F.cross_entropy(growth.snapshot()(x[held]), y[held]).item())
    (only,) = growth.growths
    grown_at, better_at = only["step"], sizes.index(only["parameters"]) + 1
    assert grown_at + 1 < better_at < 120
    assert losses[grown_at - 1] == losses[better_at - 2] > losses[better_at - 1]
    assert growth.verdict == ""

    first, second = run(), run()
    *_, growth = trained(first, grown_at + 1)
    said = f"until it is lower, growth.snapshot() is the network of {only['before']} parameters"
    assert growth.verdict == f"the loss on the probe was {losses[grown_at - 1]:.4g} at the last growth: {said}"
    assert growth.verdict in repr(growth)
    saved = copy.deepcopy([each.state_dict() for each in first])
    for each, state in zip(reversed(second), reversed(saved), strict=True):
        each.load_state_dict(state)
    *_, resumed = trained(second, 120 - grown_at - 1)
    assert all(
        torch.equal(own, other)
        for own, other in zip(resumed.snapshot().parameters(), whole[2].snapshot().parameters(), strict=True)
    )


def test_what_a_module_adds_to_its_state_comes_back_with_the_average():
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    def run():
        network = nn.Sequential(Counting(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return esper.AnytimeGrowth(network, torch.optim.SGD(network.parameters(), 0.1), example=torch.zeros(2, 4))

    growth, resumed = run(), run()
    growth.average[0].calls = 7
    resumed.load_state_dict(growth.state_dict())
    assert resumed.average[0].calls == 7
    assert torch.equal(resumed.average[0].weight, growth.average[0].weight)


def test_a_run_that_cools_down_lets_its_rates_fall_to_zero_grows_no_further_and_is_resumed_so():
    def rates(run, first, last):
        model, optimizer, _, growth = run
        found = []
        hook = optimizer.register_step_post_hook(lambda *_: found.append(moved(model)))
        trained(run, first, last)
        hook.remove()
        assert not growth.growths
        return found

    def moved(model):
        return [each.detach().clone() for each in model.parameters()]

    run = made(warmup=0)
    *_, growth = trained(run, 0, 2)
    with pytest.raises(InputError, match=r"^steps is 0; give a whole number from 1 on"):
        growth.cool_down(0)
    growth.cool_down(4)
    assert growth.why == "the learning rates fall to 0 until step 6"
    trained(run, 2, 4)
    state, weights = growth.state_dict(), copy.deepcopy([run[0].state_dict(), run[1].state_dict(), run[2].state_dict()])
    resumed = made(warmup=0)
    resumed[3].load_state_dict(state)
    for each, value in zip(resumed[:3], weights, strict=True):
        each.load_state_dict(value)
    ends = [rates(each, 4, 8) for each in (run, resumed)]
    for one, other in zip(*ends, strict=True):
        assert all(map(torch.equal, one, other))
    before = [weights[0][name] for name, _ in run[0].named_parameters()]
    lengths = [
        max(float((new - old).abs().max()) for new, old in zip(*pair, strict=True))
        for pair in itertools.pairwise([before, *ends[0]])
    ]
    # steps of Adam are about as long as their rate, here 2/4 and 1/4 of the loop's
    assert 0 < lengths[1] < 0.7 * lengths[0]
    assert lengths[2:] == [0, 0]


def test_a_layer_that_cannot_draw_its_weights_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def reset_parameters(self):
            raise ValueError("once only")

        def forward(self, x):
            return self.factor * x

    network = nn.Sequential(nn.Linear(3, 4), Scale(), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    said = r"^reset_parameters of '1' fails: ValueError: once only; correct it, or give fresh=0$"
    with pytest.raises(InputError, match=said):
        esper.AnytimeGrowth(network, optimizer, example=torch.randn(2, 3), fresh=0.1)
    esper.AnytimeGrowth(network, optimizer, example=torch.randn(2, 3))


def test_an_optimizer_has_one_growth_at_a_time():
    model, optimizer, _, growth = made()
    with pytest.raises(InputError, match=r"^the AdamW is used by another esper.AnytimeGrowth, which scales its rates"):
        esper.AnytimeGrowth(model, optimizer, example=texts(0)[:, :-1])
    growth.finish()
    esper.AnytimeGrowth(model, optimizer, example=texts(0)[:, :-1])


def test_a_network_that_keeps_what_it_computed_becomes_wider():
    class Keeps(nn.Sequential):
        def forward(self, x):
            self.seen = [self[0](x)]
            return self[2](self[1](self.seen[0]))

    torch.manual_seed(0)
    model = Keeps(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8)
    growth = esper.AnytimeGrowth(model, optimizer, example=x, ratio=1.0)
    for _ in range(20):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if growth.step(4):
            break
    assert model[0].out_features == 8
    assert growth.snapshot()(x).shape == (4, 2)


@pytest.mark.parametrize("most", [0, -5])
def test_a_limit_of_parameters_below_one_is_refused(most):
    with pytest.raises(InputError, match=rf"^most_parameters is {most}; give a whole number from 1 on"):
        made(most_parameters=most)
