"""Seeds that are a further block of a stack: born as nothing, faded in from front to back, and then members of the stack."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.runs.test_growth_hosts import HOSTS, VOCABULARY, Decoder, positions, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.graft.grafted import graft, planted_at
from esper.kasmina.network.saving import load_grown
from esper.leyline.lifecycle.vocabulary import Actions, Blend, Op, Refusal, Stage
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from lives import SETTINGS, Host, live
from thinning import thinned

LARGE = {"budget": 1e3, "budget_passes": None, "every": 1}


class Encoder(nn.Module):
    """Runs an nn.TransformerEncoder whose norms stand in front of the layers."""

    def __init__(self, norm_first=True):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.tokens(ids), mask=mask, is_causal=True))


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Residual(nn.Module):
    """Runs residual blocks over vectors, and says how many it has."""

    def __init__(self, blocks=3, dropout=0.0):
        super().__init__()
        self.n_blocks = blocks
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(blocks)))

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def vectors(key, count=16):
    with drawn_with(key):
        x = torch.randn(count, 5, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


SIMPLE = Host(Residual, lambda: vectors(0), F.cross_entropy)


def planting(*sites, **options):
    """Make a growth that plants a block behind each of these blocks of a residual network and keeps them, and nothing else."""
    with drawn_with(0):
        model = options.pop("model", None) or Residual(**options.pop("sizes", {})).double()
    at = options.pop("at", {})
    chosen = {"blueprint": "block", "tempo": 1, "target": 1.0, "keep": True} | options.pop("chosen", {})
    entries = [ScheduleEntry(at=at.get(site, 1), op=Op.GERMINATE, slot=site, **chosen) for site in sites]
    settings = {**SETTINGS, "blueprints": ["block"]} | options.pop("settings", {})
    optimizer = options.pop("optimizer", lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))(model)
    return Growth(
        model,
        optimizer,
        probe=[vectors(1), vectors(2)],
        loss=F.cross_entropy,
        controller=Schedule(entries),
        settings=settings,
        **LARGE | options,
    )


def run_on(growth, steps, *, batch=False):
    optimizer = growth.population.groups.optimizer
    for number in range(growth.calls, growth.calls + steps):
        x, y = vectors(100 + number)
        with drawn_with(number):
            F.cross_entropy(growth.model.train()(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(*((x, y) if batch else ()))
    return growth


def first_two(_, sites):
    first, second, *_ = (name for name in sites if " blocks of " in sites.why[name])
    return {first: ("block", Blend.ADD), second: ("block", Blend.ADD)}


STACKS = {
    name: HOSTS[name]
    for name in (
        "decoder transformer, head tied",
        "decoder transformer, checkpointed",
        "residual CNN",
        "blocks that return mappings",
        "TCN, `nn.Conv1d` padded in front",
        "blocks with channels last",
        "residual network over volumes, `nn.Conv3d`",
    )
} | {"nn.TransformerEncoder, norms in front": Host(Encoder, tokens, positions)}


@pytest.mark.parametrize("name", thinned(STACKS, 3))
def test_blocks_live_through_a_whole_growth_and_become_members_of_their_stack(name):
    life = live(STACKS[name], first_two)
    assert set(life.kept.values()) == {"block"}
    assert life.folded == list(life.kept)


@pytest.mark.parametrize("training", [False, True])
def test_a_block_in_the_stack_computes_what_it_did_beside_it(training):
    growth = run_on(planting("blocks.0", "blocks.2", sizes={"dropout": 0.2}), 12)
    beside = copy.deepcopy(growth.model).train(training)
    network = growth.finish().train(training)
    assert not any(".esper." in name for name in network.state_dict())
    x, _ = vectors(7)
    outputs = []
    for each in (beside, network):
        each.zero_grad()
        with drawn_with(3):
            output = each(x)
        output.square().sum().backward()
        outputs.append(output)
    assert torch.allclose(*outputs, rtol=0, atol=1e-9)
    assert torch.allclose(beside.stem.weight.grad, network.stem.weight.grad, rtol=0, atol=1e-9)
    mine, theirs = network.blocks[1].up.weight.grad, beside.blocks[0].esper.seed.delta.block.up.weight.grad
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)
    assert mine.any()


def test_a_network_that_is_built_with_the_blocks_loads_the_state():
    growth = run_on(planting("blocks.0", "blocks.2"), 12)
    blocks = [growth.model.blocks[0], None, growth.model.blocks[1], growth.model.blocks[2], None]
    new = [planted_at(growth.model, name).seed.delta.block for name in ("blocks.0", "blocks.2")]
    network = growth.finish()
    assert growth.architecture == "blocks 3 -> 5"
    assert growth.summary()["deepened"] == {"blocks": [3, 5]}
    assert type(network) is Residual
    assert network.n_blocks == 5
    assert all(
        own is (block or new[at // 4]) for at, (own, block) in enumerate(zip(network.blocks, blocks, strict=True))
    )
    other = Residual(network.n_blocks).double()
    other.load_state_dict(network.state_dict())
    x, _ = vectors(7)
    assert torch.equal(other(x), network(x))


def test_a_block_is_nothing_at_birth_and_learns_with_its_dose_at_zero():
    growth = run_on(planting("blocks.1"), 1)
    x, _ = vectors(7)
    seed = planted_at(growth.model, "blocks.1")
    h = growth.model.blocks[1](growth.model.blocks[0](growth.model.stem(x)))
    block = seed.seed.delta.block
    assert torch.equal(block(h), h)
    assert torch.equal(block.up.weight, growth.model.blocks[1].up.weight)
    assert growth.population.space.cost[0, growth.population.space.slots.index("blocks.1"), 0] == 228
    run_on(growth, 3)
    assert not torch.equal(block(h), h)


def test_options_and_moments_of_a_block_are_those_of_the_block_that_it_is_a_copy_of():
    def optimizer(model):
        named = dict(model.named_parameters())
        up = [own for name, own in named.items() if name.endswith("up.weight")]
        others = [own for name, own in named.items() if not name.endswith("up.weight")]
        return torch.optim.AdamW([{"params": others}, {"params": up, "weight_decay": 0.5}], lr=0.01)

    growth = run_on(planting("blocks.0", "blocks.1", optimizer=optimizer), 12)
    own = growth.population.groups.optimizer
    moments = {id(p): state["exp_avg"].clone() for p, state in own.state.items()}
    network = growth.finish()
    assert [group["weight_decay"] for group in own.param_groups] == [0.01, 0.5]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    held = [{names[id(parameter)] for parameter in group["params"]} for group in own.param_groups]
    assert held[1] == {f"blocks.{place}.up.weight" for place in range(5)}
    assert held[0] | held[1] == set(names.values())
    assert all(torch.equal(own.state[p]["exp_avg"], moments[id(p)]) for p in network.parameters())


def test_a_moving_average_gets_the_blocks_too():
    with drawn_with(0):
        model = Residual().double()
    graft(model, example=vectors(1)[0])
    average = AveragedModel(model)
    growth = planting("blocks.0", "blocks.1", model=model, ema=average)
    for _ in range(12):
        run_on(growth, 1)
        average.update_parameters(model)
    x, _ = vectors(7)
    before = average(x)
    growth.finish()
    assert average.module.n_blocks == 5
    assert torch.allclose(average(x), before, rtol=0, atol=1e-9)
    assert average.module.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("stop", thinned([5, 3, 8], 3))
def test_a_growth_of_blocks_goes_on_from_its_state_bit_for_bit(stop):
    whole = run_on(planting("blocks.0", "blocks.2"), 12, batch=True)
    half = run_on(planting("blocks.0", "blocks.2"), stop, batch=True)
    resumed = planting("blocks.0", "blocks.2")
    resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    run_on(resumed, 12 - stop, batch=True)
    for network in (lambda growth: growth.model, lambda growth: growth.finish()):
        mine, theirs = (network(growth).state_dict() for growth in (resumed, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_blocks_of_one_stack_are_faded_in_from_front_to_back():
    growth = planting(settings={**SETTINGS, "lifecycle": {"max_training_seeds": 3}, "blueprints": ["block"]})
    engine, space = growth.engine, growth.population.space
    front, back = (space.slots.index(name) for name in ("blocks.0", "blocks.2"))

    def act(op, slot):
        heads = [int(op), slot, 0, int(Blend.ADD), space.tempos.index(1), len(space.targets) - 1]
        return engine.carry_out(Actions(*(np.array([each]) for each in heads)))[0]

    assert act(Op.GERMINATE, back) == act(Op.GERMINATE, front) == Refusal.NONE
    run_on(growth, 2)
    view = engine.view()
    assert (view.seeds.stage[0, [front, back]] == Stage.TRAINING).all()
    assert view.masks.slot[0, Op.ADVANCE, [front, back]].tolist() == [True, False]
    act(Op.ADVANCE, front)
    assert not engine.view().masks.slot[0, Op.ADVANCE, back], "the one in front blends"
    run_on(growth, 2)
    assert engine.view().seeds.stage[0, front] == Stage.HOLDING
    assert engine.view().masks.slot[0, Op.ADVANCE, back]


def test_what_is_kept_behind_a_new_block_has_its_new_name(tmp_path):
    with drawn_with(0):
        model = Residual().double()
    entries = [
        ScheduleEntry(at=1, op=Op.GERMINATE, slot=slot, blueprint=name, tempo=1, target=1.0, keep=True)
        for slot, name in (("blocks.0", "block"), ("blocks.1", "gated"))
    ]
    growth = Growth(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        probe=[vectors(1), vectors(2)],
        loss=F.cross_entropy,
        controller=Schedule(entries),
        settings={**SETTINGS, "blueprints": ["block", "gated"]},
        **LARGE,
    )
    run_on(growth, 14)
    network = growth.finish()
    assert growth.beside == {"blocks.2": "gated"}
    assert hasattr(network.blocks[2], "esper")
    growth.save(tmp_path)
    fresh, gathered = load_grown(tmp_path, Residual().double()), growth.gather(Residual().double())
    x, _ = vectors(7)
    assert torch.equal(fresh.eval()(x), network.eval()(x))
    assert torch.equal(gathered.eval()(x), network(x))
    assert fresh.n_blocks == 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"chosen": {"target": 0.5}}, "it acts at dose 0.5, and a block of a stack at 1"),
        ({"chosen": {"blend": Blend.GATE}}, "by the blend GATE what it adds depends on the stream"),
        ({"freeze": "host"}, "the block that it is behind is frozen"),
    ],
)
def test_a_block_that_cannot_be_a_member_stays_beside_with_a_reason(options, why, tmp_path):
    growth = run_on(planting("blocks.1", **options), 12)
    x, _ = vectors(7)
    before = growth.model.eval()(x)
    network = growth.finish()
    assert growth.why_beside == {"blocks.1": why}
    assert growth.architecture == f"block at 'blocks.1' stays beside: {why}"
    growth.save(tmp_path)
    assert torch.equal(network(x), before)
    assert torch.equal(load_grown(tmp_path, Residual().double()).eval()(x), before)


class Fixed(nn.Module):
    """Runs two blocks by their places, however many there are."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](self.stem(x))))


def test_a_block_that_no_pass_would_run_stays_beside():
    with drawn_with(0):
        model = Fixed().double()
    growth = run_on(planting("blocks.1", model=model), 12)
    network = growth.finish()
    assert growth.why_beside == {"blocks.1": "the forward pass does not run a further block of 'blocks'"}
    assert len(network.blocks) == 2


def decoder(build, **options):
    with drawn_with(0):
        model = build()
    settings = {**SETTINGS, "blueprints": ["block"]} | options.pop("settings", {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Growth(model, optimizer, probe=[tokens(), tokens()], loss=positions, settings=settings, **LARGE | options)


def test_what_can_have_no_further_block_says_so():
    with pytest.raises(
        InputError, match=r"at 'body\.layers\.0', for one, a copy of it cannot begin as one that changes noth"
    ):
        decoder(lambda: Encoder(norm_first=False))
    with pytest.raises(
        InputError, match="mode='reserve' runs all that can be planted in every pass, and 'block' would run"
    ):
        decoder(Decoder, mode="reserve")
    with pytest.raises(InputError, match=r"settings sets lifecycle\.absorb, by which layers of a block become wider"):
        decoder(Decoder, settings={"lifecycle": {"absorb": True}})
    with pytest.raises(InputError, match="blueprint 'block' copies the submodule of a site, which no population has"):
        get_blueprint("block")


def test_a_misspelled_name_of_it_is_named():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(InputError, match="did you mean 'block'"):
        Growth(
            model,
            torch.optim.AdamW(model.parameters()),
            probe=[(torch.randn(8, 8), torch.arange(8) % 3)],
            loss=nn.CrossEntropyLoss(),
            steps=10,
            settings={"blueprints": ["blok"]},
        )


def in_each_process(rank, folder):
    """Train a residual network by two processes with other batches, add a block, train on, and write what it became."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    with drawn_with(0):
        model = DistributedDataParallel(Residual().double())
    growth = planting("blocks.1", model=model)
    optimizer = growth.population.groups.optimizer
    for number in range(16):
        x, y = vectors(2 * number + rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number < 12:
            growth.step(x, y)
        elif not growth.finished:
            growth.finish()
    torch.save((growth.deepened, growth.model.state_dict()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.campaign
def test_several_processes_add_a_block_alike_and_train_it_on(tmp_path):
    torch.multiprocessing.spawn(in_each_process, (str(tmp_path),), nprocs=2)
    (deepened, one), (_, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert deepened == {"blocks": (3, 4)}
    assert "blocks.3.up.weight" in one
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
