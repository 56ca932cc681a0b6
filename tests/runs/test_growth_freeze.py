"""Test hosts that are frozen while a network grows: what stays bit for bit, what trains, and what is refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, planted_at
from esper.leyline.data.objective import objective
from esper.leyline.lifecycle.slots import Map, Site
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import GrowthWarning, InputError
from esper.runs.live.growth import Growth
from populations import Script

TOKENS, LENGTH, WIDTH = 11, 6, 8
GATES = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}
LIFE = {  # nothing for a while, then a seed that is kept, one that is removed, and one that incubates
    (1, 0): (Op.GERMINATE, 1, 0, 0, 1, 3),
    (3, 0): (Op.ADVANCE, 1),
    (5, 0): (Op.FOSSILIZE, 1),
    (6, 0): (Op.GERMINATE, 0, 0, 0, 1, 3),
    (8, 0): (Op.ADVANCE, 0),
    (9, 0): (Op.PRUNE, 0),
    (11, 0): (Op.GERMINATE, 2, 0, 0, 1, 3),
}


class Decoder(nn.Module):
    """Predicts the next token at each position, as a small language model."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x).cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
        return self.head(x)


def language(key, examples=8):
    with drawn_with(key):
        ids = torch.randint(0, TOKENS, (examples, 1)) + torch.arange(LENGTH + 1)
    return ids[:, :-1] % TOKENS, ids[:, 1:] % TOKENS


def next_token(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def decoder():
    with drawn_with(0):
        return Decoder()


def convolutions():
    with drawn_with(0):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16, 3)
        )  # fmt: skip


def images(key):
    with drawn_with(key):
        return torch.randn(8, 1, 6, 6), torch.arange(8) % 3


def grown(model, data, loss, blueprints, *, steps=28, script=LIFE, **options):
    """Train a model that grows, under an optimizer that holds all of it and decays its weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    settings = {"gates": GATES, "blueprints": blueprints, "lifecycle": {"embargo": 1}}
    growth = Growth(
        model, optimizer, probe=[data(1), data(2)], loss=loss, controller=Script(script), every=2, budget=9.0,
        settings=settings, **options,
    )  # fmt: skip
    for step in range(steps):
        model.train()
        x, y = data(10 + step)
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    return growth, optimizer


def host_of(model):
    return {name: value.clone() for name, value in model.state_dict().items() if ".esper." not in name}


@pytest.mark.parametrize(
    ("build", "data", "loss", "blueprints"),
    [(decoder, language, next_token, ["bypass-mlp"]), (convolutions, images, F.cross_entropy, ["bypass-conv-1x1"])],
    ids=["transformer", "batch norm"],
)
def test_with_a_frozen_host_only_seeds_train_and_the_host_keeps_every_bit(build, data, loss, blueprints):
    model = build()
    if build is convolutions:
        graft(model, {name: Site(name, path, path, Map(4)) for name, path in (("a", "0"), ("b", "3"), ("c", "4"))})
    before = host_of(model)
    growth, optimizer = grown(model, data, loss, blueprints, freeze="host")
    assert [len(growth.summary()[name]) for name in ("plantings", "keeps", "prunes")] == [3, 1, 1]
    host = dict(host_of(model))
    assert host.keys() == before.keys()
    assert all(torch.equal(host[name], value) for name, value in before.items())
    kept, incubates = growth.summary()["keeps"][0]["site"], growth.summary()["plantings"][2]["site"]
    own = {id(p) for name in (kept, incubates) for p in planted_at(model, name).parameters()}
    assert {id(parameter) for parameter in optimizer.state} == own
    assert growth.summary()["trained_params"] == sum(p.numel() for p in model.parameters() if id(p) in own)
    assert all(part.training != isinstance(part, nn.BatchNorm2d) for part in model.modules())
    x, _ = data(3)
    finished = growth.finish()
    finished.eval()
    assert all(parameter.requires_grad for parameter in finished.parameters())
    assert not torch.equal(finished(x), build().eval()(x))
    finished.train()
    assert all(part.training for part in finished.modules())
    assert len(dict(finished.named_modules())[model_path(growth, kept)].state_dict()) > 2, "the seed was kept"


def model_path(growth, name):
    return next(site.after for site in growth.population.sites if site.name == name)


@pytest.mark.parametrize(("freeze", "frozen"), [("none", False), (["blocks.*"], False), ("host", True)])
@pytest.mark.parametrize("mode", ["live", "reserve"])
def test_the_controller_sees_whether_the_host_is_frozen(freeze, frozen, mode):
    growth, _ = grown(decoder(), language, next_token, ["bypass-mlp"], steps=0, freeze=freeze, mode=mode)
    assert growth.engine.view().space.frozen.tolist() == [frozen]


def test_names_freeze_what_they_match_and_the_rest_trains():
    model = decoder()
    model.head.bias.requires_grad_(False)
    before = host_of(model)
    growth, _ = grown(model, language, next_token, ["bypass-mlp"], freeze=["blocks.[01]*", "tokens.weight"])
    after = host_of(model)
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    named = {name for name in before if name.startswith(("blocks.0.", "blocks.1.", "tokens"))}
    assert still == named | {"head.bias"}
    growth.finish()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]


def test_a_frozen_network_without_a_seed_runs_backward_also_when_it_is_compiled():
    model = decoder()
    data = language(1)
    torch.compiler.reset()
    growth, _ = grown(model, language, next_token, ["bypass-mlp"], steps=0, script={}, freeze="host")
    model.eval()
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        output = run(data[0])
        next_token(output, data[1]).backward()
        assert torch.equal(output, decoder().eval()(data[0]))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not copy.deepcopy(model)(data[0]).is_leaf
    growth.finish()


def test_a_buffer_that_a_frozen_host_writes_is_named():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Decoder()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, ids):
            if self.training:
                self.passes += 1
            return self.body(ids)

    with pytest.warns(GrowthWarning, match="its buffer 'passes' was written to since the last decision"):
        grown(Counts(), language, next_token, ["bypass-mlp"], steps=4, freeze="host")


@pytest.mark.parametrize(
    ("freeze", "said"),
    [
        (
            ["blocs.1"],
            "freeze has 'blocs.1', which matches no submodule with parameters .*; did you mean 'blocks.1'",
        ),
        (["blocks.0.3"], "freeze has 'blocks.0.3', which matches no submodule with parameters"),
        ("blocks", "freeze is 'blocks'; give 'host', 'none', or a list of names"),
        (True, "freeze is True"),
    ],
)
def test_a_freeze_that_cannot_be_is_refused(freeze, said):
    with pytest.raises(InputError, match=said):
        grown(decoder(), language, next_token, ["bypass-mlp"], steps=0, freeze=freeze)


def test_j_of_a_language_model_is_in_the_unit_of_its_loss():
    """Check bits per token, as one number for a batch or as one for each position."""

    def bits(output, target):
        return next_token(output, target) / math.log(2)

    def bits_of_each(output, target):
        return F.cross_entropy(output.transpose(1, 2), target, reduction="none") / math.log(2)

    found = []
    for loss in (bits, bits_of_each):
        model = decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        settings = {"gates": GATES, "blueprints": ["bypass-mlp"], "reward": {"rent": 0.5, "rent_size": 1}}
        script = {(0, 0): (Op.GERMINATE, 1, 0, 0, 1, 3), (2, 0): (Op.ADVANCE, 1)}
        growth = Growth(
            model, optimizer, probe=[language(1), language(2)], loss=loss, controller=Script(script), every=1,
            budget=9.0, settings=settings,
        )  # fmt: skip
        for step in range(4):
            x, y = language(10 + step)
            with drawn_with(100 + step):
                loss(model(x), y).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step(x, y)
        summary = growth.summary()
        assert summary["added_params"] > 0
        model.eval()
        parts = [bits(model(x), y).item() for x, y in (language(1), language(2))]
        assert summary["loss"] == pytest.approx(sum(parts) / 2, rel=1e-5)
        expected = objective(-summary["loss"], summary["added_params"], summary["host_params"], 0.5, 1)
        assert summary["objective"] == pytest.approx(float(expected))
        assert summary["objective"] < -summary["loss"] - 0.01
        gain = growth.engine.state.measurements.contribution
        found.append((growth.population.probe_batches.way, gain.mean[0, 1], gain.se[0, 1]))
    assert [way for way, _, _ in found] == ["mapped", "given"]
    assert found[0][1:] == pytest.approx(found[1][1:], rel=1e-4)


def test_a_wrapper_that_would_wait_for_gradients_of_a_frozen_host_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for waits in (True, False):
            model = graft(decoder(), example=language(1)[0])
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=not waits)
            if waits:
                with pytest.raises(InputError, match="make it with find_unused_parameters=True"):
                    grown(wrapped, language, next_token, ["bypass-mlp"], freeze="host")
            else:
                growth, _ = grown(wrapped, language, next_token, ["bypass-mlp"], freeze="host", steps=12)
                assert growth.summary()["keeps"]
    finally:
        torch.distributed.destroy_process_group()
