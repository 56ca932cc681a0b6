"""Test the growth of one network in a loop of one's own: what stays as it was, what comes back, and what is refused."""

import copy
import functools
import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, is_grafted, planted_at
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from loops import LIFE as KEPT_AND_REMOVED
from loops import equal, repeatable, stages
from populations import Script
from thinning import crossed

WIDTH, EVERY = 6, 2
SITES = {name: Site(name, path, path, Vector(WIDTH)) for name, path in (("stem", "0"), ("one", "2"), ("two", "5"))}
GATES = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}
LIFE = KEPT_AND_REMOVED | {  # and one is still blending at the end
    (13, 0): (Op.GERMINATE, 2, 0, 2, 2, 1),
    (15, 0): (Op.ADVANCE, 2),
}
DECISIONS = 18


def host(dropout=0.2, dtype=torch.float32):
    with drawn_with(0):
        return nn.Sequential(
            nn.Linear(4, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Dropout(dropout),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, 3),
        ).to(dtype)


def data(key, examples=12, dtype=torch.float32):
    with drawn_with(key):
        x = torch.randn(examples, 4)
        return x.to(dtype), (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


class Loop(NamedTuple):
    """Holds a training loop of somebody's own."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    ema: Any
    growth: Growth | None

    def run(self, first, last, *, batch=False, clip=0.5, accumulate=1):
        """Do steps of the optimizer, whose draws are keyed by their number."""
        grown = []
        for step in range(first, last):
            self.model.train()
            with drawn_with(1000 + step):
                for part in range(accumulate):
                    x, y = data(100 + step + 7 * part)
                    (F.cross_entropy(self.model(x), y) / accumulate).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
            if self.ema is not None:
                self.ema.update_parameters(self.model)
            if self.growth is not None:
                grown.append(self.growth.step(*((x, y) if batch else ())))
        return grown


def loop(script=None, *, grown=True, averaged=False, scheduled=True, ema=None, **options):
    """Make a loop with a script as its controller."""
    model = host()
    if grown:
        graft(model, SITES)
    if averaged:
        ema = functools.partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema = ema and ema(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, 80) if scheduled else None
    growth = None
    if grown:
        settings = {"gates": GATES, "lifecycle": {"embargo": 2}, **options.pop("settings", {})}
        usual = {
            "probe": [data(1), data(2)],
            "loss": F.cross_entropy,
            "every": EVERY,
            "budget": 9.0,
            "budget_passes": None,
        }
        controller = Script(LIFE if script is None else script)
        growth = Growth(
            model, optimizer, scheduler, ema, **{"controller": controller, "settings": settings, **usual, **options}
        )
    return Loop(model, optimizer, scheduler, ema, growth)


def host_of(model):
    return {name: value for name, value in model.state_dict().items() if ".esper." not in name}


# The host is untouched.


@pytest.mark.parametrize("batch", [False, True], ids=["straight-through", "shadow"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_host_behind_which_seeds_incubate_is_bit_for_bit_what_it_is_alone(batch, accumulate):
    plain = loop(grown=False)
    growing = loop(
        {(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3), (3, 0): (Op.GERMINATE, 2, 2, 1, 1, 3), (6, 0): (Op.PRUNE, 0)},
        settings={"lifecycle": {"max_training_seeds": 2}},
    )
    seeds = growing.growth.population.planted()
    assert list(seeds) == ["stem"]
    before = copy.deepcopy(planted_at(growing.model, "stem").state_dict())
    for each in (plain, growing):
        each.run(0, 9, batch=batch, accumulate=accumulate)
    assert stages(growing.growth) == ["TRAINING", "DORMANT", "TRAINING"]
    assert not equal(before, planted_at(growing.model, "stem").state_dict()), "it was trained"
    for each in (plain, growing):
        each.run(9, 16, batch=batch, accumulate=accumulate)
    assert stages(growing.growth)[0] == "EMBARGOED"
    assert equal(host_of(growing.model), plain.model.state_dict())
    mine = growing.optimizer.state_dict()["state"]
    assert all(equal(moments, mine[index]) for index, moments in plain.optimizer.state_dict()["state"].items())
    assert growing.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert all(parameter.grad is None for parameter in growing.model.parameters())


def test_a_network_that_never_grows_trains_bit_for_bit_as_without_growth():
    plain, growing = loop(grown=False), loop(controller="never")
    before = torch.get_rng_state()
    growing.run(0, 10)
    assert torch.equal(torch.get_rng_state(), before)
    plain.run(0, 10)
    assert equal(growing.model.state_dict(), plain.model.state_dict())


def test_a_decision_leaves_modes_gradients_and_doses_as_they_are():
    growing = loop()
    growing.run(0, 11)
    growing.model[3].eval()
    x, y = data(5)
    F.cross_entropy(growing.model(x), y).backward()
    gradients = {name: p.grad.clone() for name, p in growing.model.named_parameters() if p.grad is not None}
    seed = planted_at(growing.model, "stem")
    doses = seed.mode, seed.alpha.clone()
    assert growing.growth.step()
    assert growing.model.training
    assert not growing.model[3].training
    assert (seed.mode, seed.alpha) == doses
    assert len(gradients) == 14
    named = dict(growing.model.named_parameters())
    assert all(torch.equal(named[name].grad, gradient) for name, gradient in gradients.items())


# The lifecycle.


def test_a_life_passes_through_its_stages_at_the_decisions_of_the_script():
    growing, seen, doses = loop(), [], []
    for step in range(EVERY * DECISIONS):
        (decided,) = growing.run(step, step + 1)
        assert decided == (step % EVERY == EVERY - 1)
        if decided:
            seen.append(stages(growing.growth))
            doses.append([float(seed.alpha) if (seed := planted_at(growing.model, name)) else None for name in SITES])
    first, second, third = zip(*seen, strict=True)
    # Each row is behind the decision that follows the measurement.
    assert first[:4] == ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")
    assert second[4:9] == ("GERMINATED", "TRAINING", "BLENDING", "BLENDING", "HOLDING")
    assert second[9:14] == ("BLENDING", "BLENDING", "EMBARGOED", "EMBARGOED", "DORMANT")
    assert third[12:17] == ("GERMINATED", "TRAINING", "BLENDING", "BLENDING", "HOLDING")
    assert [row[1] for row in doses[6:12]] == [0.5, 1.0, 1.0, 0.5, 0.0, None]
    summary = growing.growth.summary()
    assert [entry["site"] for entry in summary["plantings"]] == ["stem", "one", "two"]
    assert [entry["site"] for entry in summary["keeps"]] == ["stem"]
    assert [entry["site"] for entry in summary["prunes"]] == ["one"]
    assert summary["status"] == "growing"
    assert list(summary["seconds"]) == ["setup", "incubation", "probe", "folds", "decisions", "rest"]
    assert min(summary["seconds"].values()) > 0
    params = sum(parameter.numel() for parameter in planted_at(growing.model, "stem").parameters())
    assert summary["verdict"].startswith(f"Not resolved whether growth paid: 1 seed with {params:,} parameters, ")
    assert "no network without growth was trained beside this one" in summary["verdict"]


def test_a_controller_reads_what_a_kept_seed_contributed_in_the_step_of_fossilize_and_ever_after():
    growing = loop()
    growing.run(0, EVERY * 8)
    outcomes = growing.growth.controller.outcomes
    kept = [step for step, outcome in enumerate(outcomes) if outcome.seeds.stage[0, 0] == Stage.FOSSILIZED]
    trial = outcomes[kept[0] - 1].contribution_loss.mean[0, 0]
    assert np.isfinite(trial)
    assert outcomes[kept[0]].actions.op[0] == Op.FOSSILIZE
    assert [outcomes[step].contribution_loss.mean[0, 0] for step in kept] == [trial] * len(kept)
    assert [outcomes[step].contribution_age[0, 0] for step in kept] == list(range(1, len(kept) + 1))


def test_a_seed_that_acts_is_trained_by_the_loop_and_a_doomed_one_is_not():
    growing = loop()
    growing.run(0, EVERY * 8)
    fossil, live = (planted_at(growing.model, name) for name in ("stem", "one"))
    before = copy.deepcopy([fossil.state_dict(), live.state_dict()])
    growing.run(EVERY * 8, EVERY * 10)
    assert not equal(before[0], fossil.state_dict())
    assert not equal(before[1], live.state_dict())
    doomed = copy.deepcopy(live.seed.state_dict())
    growing.run(EVERY * 10, EVERY * 10 + 1)
    assert equal(doomed, live.seed.state_dict())
    assert all(not parameter.requires_grad for parameter in live.parameters())


def test_the_gain_and_the_contribution_are_paired_differences_of_the_loss():
    growing = loop(scheduled=False)
    growing.run(0, EVERY)
    population, seeds = growing.growth.population, growing.growth.engine.state.seeds
    x, y = (torch.cat(parts) for parts in zip(data(1), data(2), strict=True))
    seed = planted_at(growing.model, "stem")

    def losses(mode, alpha):
        old = seed.mode, seed.alpha.clone()
        seed.mode, _ = type(seed.mode)(mode), seed.alpha.fill_(alpha)
        growing.model.eval()
        with torch.no_grad():
            found = F.cross_entropy(growing.model(x), y, reduction="none").double()
        growing.model.train()
        seed.mode, _ = old[0], seed.alpha.copy_(old[1])
        return found

    gain = growing.growth.engine.state.measurements.gain
    difference = losses("off", 0) - losses("on", 1)
    assert gain.mean[0, 0] == pytest.approx(float(difference.mean()), rel=1e-5)
    assert gain.se[0, 0] == pytest.approx(float(difference.std() / len(x) ** 0.5), rel=1e-5)
    assert growing.growth.engine.state.scores.loss[0] == pytest.approx(float(losses("off", 0).mean()), rel=1e-6)
    assert population.table.added_params(seeds)[0] == 0
    growing.run(EVERY, EVERY * 3)
    contribution = growing.growth.engine.state.measurements.contribution
    difference = losses("off", 0) - losses("on", float(seed.alpha))
    assert contribution.mean[0, 0] == pytest.approx(float(difference.mean()), rel=1e-5)


# Resume.


@pytest.mark.parametrize(("settings", "rollbacks"), [({}, {}), ({"governor": {"loss_rise_z": 8.0}}, {"rise": 1})])
def test_a_network_that_gets_worse_on_the_probe_is_put_back_only_where_that_was_asked_for(settings, rollbacks):
    growing = loop(settings=settings)
    growing.run(0, EVERY * 6)
    before = growing.growth.engine.state.scores.loss[0]
    with torch.no_grad():
        growing.model[-1].weight *= 400
    growing.run(EVERY * 6, EVERY * 9)
    assert growing.growth.summary()["rollbacks"] == rollbacks
    assert (growing.growth.engine.state.scores.loss[0] > 2 * before) == (not rollbacks)


STOPS = [1, 6, 14, 19, 25]
FURTHER_STOPS = [5, 9, 15, 17, 22, 29, 32]


@pytest.fixture(scope="module")
def straight():
    """Return a function that trains without a stop, and returns the loop and its growth, as a file, behind some steps."""

    @functools.cache
    def trained(batch):
        made, files, done = loop(averaged=True), {}, 0
        for stop in sorted(STOPS + FURTHER_STOPS):
            made.run(done, stop, batch=batch)
            torch.save(made.growth.state_dict(), file := io.BytesIO())
            files[stop], done = file.getvalue(), stop
        made.run(done, EVERY * DECISIONS, batch=batch)
        return made, files

    return trained


@pytest.mark.parametrize(
    ("stop", "batch"),
    [
        *crossed(STOPS, [False, True]),
        *(pytest.param(stop, batch, marks=pytest.mark.slow) for stop in FURTHER_STOPS for batch in (False, True)),
    ],
)
def test_a_training_resumed_in_any_stage_is_the_one_that_was_never_stopped(straight, stop, batch):
    whole, files = straight(batch)
    resumed = loop(averaged=True)
    resumed.growth.load_state_dict(torch.load(io.BytesIO(files[stop])))
    resumed.run(stop, EVERY * DECISIONS, batch=batch)
    assert equal(resumed.model.state_dict(), whole.model.state_dict())
    assert equal(resumed.ema.state_dict(), whole.ema.state_dict())
    assert equal(resumed.growth.state_dict(), whole.growth.state_dict())
    assert repeatable(resumed.growth) == repeatable(whole.growth)


class Warm(nn.Module):
    """Averages with a decay that rises with a number, and remembers its last decay in a tensor, as a class of somebody's own."""

    def __init__(self, model):
        super().__init__()
        self.module, self.updates, self.last = copy.deepcopy(model), 0, None
        self.register_buffer("total", torch.zeros(()), persistent=False)

    @torch.no_grad()
    def update_parameters(self, model):
        self.updates += 1
        self.last = torch.tensor(0.9 * (1 - 0.5**self.updates))
        self.total += self.last
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - float(self.last))


@pytest.mark.parametrize("stop", [5, 25])
def test_a_resumed_moving_average_of_an_own_class_goes_on_with_what_it_counts(stop):
    straight = loop(ema=Warm)
    straight.run(0, stop)
    file = io.BytesIO()
    torch.save(straight.growth.state_dict(), file)
    straight.run(stop, EVERY * DECISIONS)
    file.seek(0)
    resumed = loop(ema=Warm)
    resumed.growth.load_state_dict(torch.load(file))
    assert (resumed.ema.updates, float(resumed.ema.total) > 0) == (stop, True)
    resumed.run(stop, EVERY * DECISIONS)
    assert equal(resumed.ema.state_dict(), straight.ema.state_dict())
    for name in ("updates", "last", "total"):
        assert getattr(resumed.ema, name) == getattr(straight.ema, name)


def test_a_network_that_is_put_back_has_the_moving_average_and_the_count_of_then():
    growing = loop(ema=Warm)
    growing.run(0, EVERY * 2)
    with torch.no_grad():
        growing.model[-1].weight.fill_(torch.nan)
    growing.run(EVERY * 2, EVERY * 3)
    assert growing.growth.summary()["rollbacks"]
    assert (growing.ema.updates, growing.ema.last) == (EVERY * 2, torch.tensor(0.9 * (1 - 0.5 ** (EVERY * 2))))
    assert all(parameter.isfinite().all() for parameter in growing.ema.parameters())


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        ("average", None, "the saved state has ema 'given', where this one has None; make Growth as it was then"),
        (None, "average", "the saved state has ema None, where this one has 'given'"),
        ("average", "own", "ema lacks 'avg_fn', which the moving average of the saved state has"),
    ],
)
def test_a_saved_state_with_another_moving_average_is_refused(saved, given, said):
    averages = {None: None, "average": AveragedModel, "own": Warm}
    state = loop(ema=averages[saved]).growth.state_dict()
    with pytest.raises(InputError, match=said):
        loop(ema=averages[given]).growth.load_state_dict(state)


def test_a_saved_state_of_another_model_is_refused_by_name():
    growing = loop()
    state = growing.growth.state_dict()
    other = loop(every=5)
    with pytest.raises(InputError, match="saved state has every 2, where this one has 5"):
        other.growth.load_state_dict(state)
    state["tensors"]["0.weight"] = torch.zeros(2, 2)
    with pytest.raises(InputError, match=r"'0.weight' as \(2, 2\), where the model has \(6, 4\)"):
        loop().growth.load_state_dict(state)


# The end.


def test_what_is_finished_computes_what_the_kept_seeds_do_and_is_plain_otherwise():
    growing = loop(averaged=True)
    growing.run(0, EVERY * DECISIONS)
    model = growing.model.eval()
    for name in ("one", "two"):
        seed = planted_at(model, name)
        if seed is not None:
            seed.mode = type(seed.mode).OFF
    x, _ = data(7)
    expected = model(x)
    network = growing.growth.finish()
    assert network is model
    assert not is_grafted(network)
    assert torch.allclose(network(x), expected, atol=1e-6)
    assert [type(part).__name__ for part in network] == ["GrownLinear", *(type(part).__name__ for part in host()[1:])]
    assert type(network) is nn.Sequential
    assert len(growing.optimizer.param_groups) == 2
    names = [name for name in network.state_dict() if ".esper." in name]
    assert names == [name for name in growing.ema.module.state_dict() if ".esper." in name]
    assert names
    assert growing.growth.summary()["status"] == "finished"
    assert growing.growth.finish() is network
    with pytest.raises(InputError, match="finished"):
        growing.growth.step()
    again = pickle.loads(pickle.dumps(network))
    assert torch.equal(again(x), network(x))
    exported = torch.export.export(network, (x,)).module()
    assert torch.allclose(exported(x), network(x), atol=1e-6)
    Loop(growing.model, growing.optimizer, growing.scheduler, growing.ema, None).run(40, 42)


FOLDED = {(0, 0): (Op.GERMINATE, 1, 0, 0, 1, 2), (2, 0): (Op.ADVANCE, 1), (4, 0): (Op.FOSSILIZE, 1)}


@pytest.mark.parametrize("blueprint", ["bypass-linear", "low-rank"])
@pytest.mark.parametrize("site", [0, 2])
def test_a_linear_seed_is_folded_into_its_layer(blueprint, site):
    script = {(0, 0): (Op.GERMINATE, site, 0, 0, 1, 2), (2, 0): (Op.ADVANCE, site), (4, 0): (Op.FOSSILIZE, site)}
    growing = loop(script, settings={"blueprints": [blueprint]}, averaged=True)
    growing.ema.requires_grad_(site == 0)  # as a loop sets it; the average is written to all the same
    growing.run(0, EVERY * 6)
    model = growing.model.eval()
    x, _ = data(7)
    expected, without = model(x), host().eval()
    without.load_state_dict(host_of(model))
    assert not torch.allclose(expected, without(x), atol=1e-4)
    average = growing.ema.module.eval()(x)
    network = growing.growth.finish()
    assert [type(part) for part in network] == [type(part) for part in host()]
    assert list(network.state_dict()) == list(host().state_dict())
    assert torch.allclose(network(x), expected, atol=1e-6)
    assert torch.allclose(growing.ema.module(x), average, atol=1e-6)
    assert len(growing.optimizer.param_groups) == 1


# What else is in a loop.


def test_a_moving_average_gets_every_seed_and_loses_it_with_the_network():
    growing = loop(averaged=True)
    growing.run(0, EVERY * 4)
    assert planted_at(growing.ema.module, "stem") is not None
    mine, average = (dict(each.named_parameters()) for each in (growing.model, growing.ema.module))
    assert mine.keys() == average.keys()
    assert all(not torch.equal(mine[name], average[name]) for name in mine)
    growing.run(EVERY * 4, EVERY * 12)
    assert planted_at(growing.ema.module, "one") is None
    growing.ema.module.eval()
    growing.ema.module(data(3)[0])


@pytest.mark.parametrize("grown", [False, True])
def test_a_scaler_scales_what_it_did(grown):
    """Check in float16 with a loss scale; an incubating seed learns by unscaled gradients."""
    models, changes = [], []
    for scaled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=scaled)
        model = graft(host(dropout=0.0), SITES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        script = {(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)} | ({(3, 0): (Op.ADVANCE, 0)} if grown else {})
        growth = Growth(
            model, optimizer, controller=Script(script), probe=[data(1)], loss=F.cross_entropy, every=EVERY, budget=9.0,
            scaler=scaler, settings={"gates": GATES},
        )  # fmt: skip
        for step in range(12):
            x, y = data(100 + step)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            growth.step()
        models.append(model.state_dict())
        changes.append(planted_at(model, "stem").seed.delta.out.weight.detach().clone())
    assert changes[0].abs().max() > 1e-3
    assert all(torch.allclose(models[0][name], models[1][name], rtol=1e-4, atol=1e-6) for name in models[0])


def test_a_scaler_skips_a_step_of_a_seed_whose_gradients_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    model = graft(host(dropout=0.0), SITES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = Growth(
        model, optimizer, controller=Script({(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)}), probe=[data(1)],
        loss=F.cross_entropy, every=EVERY, budget=9.0, scaler=scaler, settings={"gates": GATES},
    )  # fmt: skip
    for step in range(4):
        x, y = data(100 + step)
        factor = torch.inf if step == 3 else 1.0
        before = copy.deepcopy(model.state_dict())
        (scaler.scale(F.cross_entropy(model(x), y)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        growth.step()
    seeds = {name: value for name, value in model.state_dict().items() if ".seed." in name}
    assert seeds
    assert all(torch.equal(value, before[name]) for name, value in seeds.items())


def test_a_network_whose_loss_is_no_number_is_put_back_with_its_optimizer():
    growing = loop(averaged=True)
    growing.run(0, EVERY * 8)
    healthy = copy.deepcopy(
        (host_of(growing.model), growing.optimizer.state_dict()["state"], growing.ema.module.state_dict())
    )
    assert stages(growing.growth)[:2] == ["FOSSILIZED", "BLENDING"]
    growing.run(EVERY * 8, EVERY * 9 - 1)
    with torch.no_grad():
        growing.model[2].weight.fill_(torch.nan)
    growing.growth.step()
    assert growing.growth.summary()["rollbacks"] == {"loss": 1}
    assert stages(growing.growth)[:2] == ["FOSSILIZED", "EMBARGOED"]
    assert equal(host_of(growing.model), healthy[0])
    assert planted_at(growing.model, "stem") is not None
    assert planted_at(growing.model, "one") is None
    for index, moments in growing.optimizer.state_dict()["state"].items():
        assert equal(moments, healthy[1][index])
    growing.run(EVERY * 9, EVERY * 12)
    assert np.isfinite(growing.growth.engine.state.scores.loss[0])


def test_a_compiled_host_is_bit_for_bit_what_it_is_alone_while_a_seed_incubates():
    torch.compiler.reset()
    hosts = []
    for grown in (True, False):
        model = host(dropout=0.0)
        if grown:
            graft(model, SITES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        growth = None
        if grown:
            script = Script({(0, 0): (Op.GERMINATE, 0, 1, 1, 1, 3)})
            growth = Growth(
                run, optimizer, controller=script, probe=[data(1)], loss=F.cross_entropy, every=EVERY, budget=9.0
            )
            before = copy.deepcopy(planted_at(model, "stem").state_dict())
        Loop(run, optimizer, None, None, growth).run(0, 10)
        hosts.append(host_of(model))
        if grown:
            assert not equal(before, planted_at(model, "stem").state_dict()), "it was trained"
    assert equal(*hosts)


def test_a_model_in_training_can_be_copied_and_saved_while_a_seed_incubates():
    growing = loop()
    growing.run(0, 3)
    assert stages(growing.growth)[0] == "TRAINING"
    for other in (copy.deepcopy(growing.model), pickle.loads(pickle.dumps(growing.model))):
        assert equal(other.state_dict(), growing.model.state_dict())
        x, y = data(3)
        F.cross_entropy(other(x), y).backward()
        assert all(parameter.grad is None for parameter in planted_at(growing.model, "stem").parameters())


def test_the_ways_to_the_loss_of_an_example_agree():
    found = []
    for loss in (F.cross_entropy, lambda output, y: F.cross_entropy(output, y, reduction="none")):
        growing = loop(loss=loss)
        growing.run(0, EVERY)
        found.append((growing.growth.population.probe_batches.way, growing.growth.engine.state.measurements.gain))
    assert [way for way, _ in found] == ["mapped", "given"]
    assert found[0][1].mean[0, 0] == pytest.approx(found[1][1].mean[0, 0], rel=1e-5)
    assert found[0][1].se[0, 0] == pytest.approx(found[1][1].se[0, 0], rel=1e-5)
    whole = loop(loss=lambda output, y: (output.mean(0) - F.one_hot(y, 3).float().mean(0)).square().sum())
    assert whole.growth.population.probe_batches.way == "whole"
    own = loop(loss=lambda output, y: whole.growth.model[0].weight.square().mean())  # as one that a model returns
    assert own.growth.population.probe_batches.way == "whole"


def test_inputs_and_outputs_may_have_any_structure():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, WIDTH)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, *, x, scale):
            return {"features": (h := self.body(x)), "logits": scale * self.head(torch.relu(h))}

    with drawn_with(0):
        model = graft(Named(), {"body": Site("body", "body", "body", Vector(WIDTH))})
    x, y = data(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = Growth(
        model, optimizer, controller=Script({(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)}),
        probe=lambda: [({"x": x, "scale": 2.0}, {"label": y})], budget=9.0, every=1, settings={"gates": GATES},
        loss=lambda output, target: F.cross_entropy(output["logits"], target["label"]),
    )  # fmt: skip
    assert growth.population.probe_batches.way == "mapped"
    before = copy.deepcopy(planted_at(model, "body").state_dict())
    for _ in range(2):
        optimizer.step()
        growth.step({"x": x, "scale": 2.0}, {"label": y})
    assert not equal(before, planted_at(model, "body").state_dict())


def test_the_budget_holds():
    growing = loop(
        script={(step, 0): (Op.GERMINATE, step % 3, 2, 0, 1, 3) for step in range(6)},
        budget=0.7,
        settings={"lifecycle": {"max_training_seeds": 3}},
    )
    growing.run(0, EVERY * 6)
    planted = sum(parameter.numel() for name, parameter in growing.model.named_parameters() if ".esper." in name)
    host_params = sum(parameter.numel() for parameter in host().parameters())
    assert 0 < planted <= 0.7 * host_params
    assert growing.growth.engine.governor.record.counts()["refused"]["param_budget"] > 0


def test_a_trained_length_ends_the_decisions():
    growing = loop(steps=EVERY * 4, script={(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)})
    decided = growing.run(0, EVERY * 6)
    assert sum(decided) == 4
    assert growing.growth.engine.over


@pytest.mark.parametrize("mode", ["live", "reserve"])
@pytest.mark.parametrize("where", ["model", "average"])
def test_a_seed_whose_fold_would_change_an_output_stays_beside_in_the_model_and_its_average(where, mode):
    growing = loop(FOLDED, settings={"blueprints": ["bypass-linear"]}, averaged=True, mode=mode)
    growing.run(0, EVERY * 6)
    networks = {"model": growing.model, "average": growing.ema.module}
    networks[where].register_forward_hook(lambda network, given, output: F.linear(output, network[2].weight[:3, :3]))
    x, _ = data(7)
    expected = [network.eval()(x) for network in networks.values()]
    before = [host_of(network) for network in networks.values()]
    growing.growth.finish()
    for network, output, host in zip(networks.values(), expected, before, strict=True):
        assert hasattr(network[2], "esper")
        assert all(torch.equal(host_of(network)[name], value) for name, value in host.items() if ".esper" not in name)
        assert torch.allclose(network(x), output, atol=1e-6)
    assert len(growing.optimizer.param_groups) == 2


def test_no_fold_moves_a_frozen_bias():
    growing = loop(FOLDED, settings={"blueprints": ["bypass-linear"]}, freeze=["*.bias"])
    before = host_of(growing.model)
    growing.run(0, EVERY * 6)
    network = growing.growth.finish()
    assert hasattr(network[2], "esper")
    assert all(torch.equal(value, before[name]) for name, value in host_of(network).items() if name.endswith("bias"))


def test_a_network_whose_output_holds_no_number_is_compared_by_its_loss():
    class Spread(nn.Sequential):
        def forward(self, x):
            return torch.distributions.Categorical(logits=super().forward(x))

    model = Spread(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    graft(model, {name: Site(name, name, name, Vector(WIDTH)) for name in ("0", "2")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"gates": GATES, "blueprints": ["bypass-linear"]}
    growth = Growth(model, optimizer, probe=[data(1)], loss=lambda output, y: -output.log_prob(y), every=1, budget=9.0,
                    controller=Script(FOLDED), settings=settings)  # fmt: skip
    for step in range(8):
        x, y = data(100 + step)
        (-model(x).log_prob(y)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    x, _ = data(7)
    expected = model(x).logits
    assert not hasattr(growth.finish()[2], "esper")
    assert torch.allclose(model(x).logits, expected, atol=1e-5)
