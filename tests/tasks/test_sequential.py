"""Test hosts for tokens: what they compute, one by one and stacked, and that no position sees a later one."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import esper
from bodies import empty, set_seed
from esper.kasmina.blueprints import count, drawn_with, get_blueprint
from esper.kasmina.host import check_host
from esper.kasmina.lifecycle import doses
from esper.kasmina.network.export import grown_network, load_network, save_network
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.invariance import segments_that_vary
from esper.kasmina.stack.layers import rotated
from esper.kasmina.stack.rows import Stack
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Interface
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.tasks.hosts import GRU, SEQUENCE_MENU, Transformer, TransformerBlock, host_from, menu_of
from esper.tasks.objectives import Classification
from esper.tolaria.engine import VectorizedEngine
from populations import Script

TRANSFORMER = Transformer(vocabulary=11, width=8, layers=2, heads=2, length=9)
ROTARY = replace(TRANSFORMER, positions="rotary")
RECURRENT = GRU(vocabulary=11, width=8, layers=2)
HOSTS = pytest.mark.parametrize("factory", [TRANSFORMER, ROTARY, RECURRENT], ids=["transformer", "rotary", "gru"])


def tokens(*shape, seed=0):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


def made(factory, key=0, dtype=torch.float64):
    with drawn_with(key):
        return factory().to(dtype)


@HOSTS
@pytest.mark.parametrize("length", [1, 5, 9])
def test_a_host_returns_logits_of_the_next_token_at_every_position(factory, length):
    assert made(factory)(tokens(3, length)).shape == (3, length, 11)


@HOSTS
def test_a_later_token_leaves_the_logits_of_earlier_positions_exactly_alone(factory):
    host, x, other = made(factory), tokens(4, 9), tokens(4, 9, seed=1)
    y = host(x)
    for first in range(1, 9):
        changed = torch.cat([x[:, :first], other[:, first:]], 1)
        assert torch.equal(host(changed)[:, :first], y[:, :first])
    assert all(slot.causal and slot.kind == Kind.SEQUENCE and slot.width == 8 for slot in host.slots)
    assert menu_of(host) == SEQUENCE_MENU


def test_a_block_is_the_transformer_layer_of_torch_with_the_norm_in_front():
    with drawn_with(1):
        block = TransformerBlock(8, 2, 1).double()
        for parameter in block.parameters():
            nn.init.normal_(parameter)
    layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, batch_first=True, norm_first=True).double()
    attention = layer.self_attn
    with torch.no_grad():
        attention.in_proj_weight.copy_(block.attention.read.weight)
        attention.in_proj_bias.zero_()
        pairs = [(attention.out_proj, block.attention.out), (layer.linear1, block.inner), (layer.linear2, block.out)]
        for theirs, ours in pairs:
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
        for theirs, ours in ((layer.norm1, block.attention_norm), (layer.norm2, block.hidden_norm)):
            theirs.weight.copy_(ours.scale.flatten())
            theirs.bias.copy_(ours.shift.flatten())
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(block(x), layer(x, src_mask=mask))


def test_rotated_queries_and_keys_depend_on_their_distance_alone_and_keep_their_lengths():
    q, k = torch.randn(2, 6, dtype=torch.float64).unbind(0)
    queries, keys = rotated(q.expand(12, 6)), rotated(k.expand(12, 6))
    products = queries @ keys.T
    for distance in range(-11, 12):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(queries[0], q)
    torch.testing.assert_close(queries.norm(dim=-1), q.norm().expand(12))
    pairs = torch.complex(q[:3], q[3:]) * torch.exp(1j * 7 * torch.tensor([1, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3)]))
    torch.testing.assert_close(queries[7], torch.cat([pairs.real, pairs.imag]), rtol=1e-6, atol=1e-6)


def test_rotary_positions_have_no_parameters_and_no_longest_sequence():
    host = made(ROTARY)
    assert count(host) == count(TRANSFORMER()) - 9 * 8
    assert host(tokens(2, 40)).shape == (2, 40, 11)
    back = host(tokens(1, 9).flip(1))
    assert not torch.allclose(host(tokens(1, 9)).mean(1), back.mean(1)), "the order of the tokens matters"


def test_a_saved_transformer_of_an_earlier_version_has_learned_positions():
    arguments = {"vocabulary": 11, "width": 8, "layers": 2, "heads": 2, "length": 9}
    assert host_from("transformer", arguments) == TRANSFORMER


SMALLEST, LARGEST = Transformer(256, 32, 1, 2, 16), Transformer(256, 256, 8, 8, 16, "rotary")
CORNERS = [
    (SMALLEST, "auto"),
    (replace(SMALLEST, positions="rotary"), "vmap"),
    (SMALLEST, "loop"),
    pytest.param(LARGEST, "auto", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("factory", "mapping"), CORNERS, ids=["stacked", "vmapped", "looped", "largest"])
def test_the_smallest_and_the_largest_transformer_train_in_a_population(factory, mapping):
    x = torch.arange(40 * 17).reshape(40, 17) % 7
    task = esper.task("corner", x[:, :-1], x[:, 1:], host=factory, classes=256)
    settings = {
        "envs": 2, "steps": 24, "data": {"batch_size": 2, "batches_per_step": 1}, "mapping": mapping, "baselines": [],
        "early_stopping": {"enabled": False}, "probe": {"sensors_every": 0},
    }  # fmt: skip
    engine = VectorizedEngine(task, build_config(settings))
    engine.reset()
    assert engine.space.slots == tuple(f"block{k}" for k in range(factory.layers))
    script = Script({(0, env): (Op.GERMINATE, factory.layers - 1, 1, 0, 2, 3) for env in range(2)})
    _, outcome = engine.step(script.act(engine.view()))
    assert outcome.accepted.all()
    assert np.isfinite(outcome.after.loss).all()


def test_the_head_of_a_transformer_is_its_embedding_and_counts_once():
    host = made(TRANSFORMER)
    assert host.segments[-1].read.weight is host.segments[0].tokens
    width, layer = 8, 4 * 8 + 3 * 8 * 8 + 8 * 9 + 32 * 9 + 8 * 33
    assert count(host) == (11 + 9) * width + 2 * layer + 2 * width


@HOSTS
def test_a_stack_of_hosts_computes_what_each_does_by_itself_gradients_of_shared_weights_included(factory):
    hosts, x = [made(factory, key) for key in range(3)], tokens(3, 5, 9)
    stack = Stack(hosts[0], 3, dtype=torch.float64)
    for row, host in enumerate(hosts):
        stack.write(row, host)
    h = x
    for index in range(len(hosts[0].segments)):
        h = stack(h, slice(0, 3), part=f"segments.{index}", keys=np.arange(3))
    h.square().sum().backward()
    for row, host in enumerate(hosts):
        y = host(x[row])
        y.square().sum().backward()
        torch.testing.assert_close(h[row], y)
        for name, parameter in host.named_parameters():
            torch.testing.assert_close(stack.parameter(name, "gradient")[row], parameter.grad)


@HOSTS
def test_no_segment_of_a_host_depends_on_neighbours(factory):
    assert segments_that_vary(factory, tokens(64, 5)) == {}


@HOSTS
def test_plain_is_the_smallest_network_of_as_many_layers_with_so_many_parameters(factory):
    wanted = 3 * count(factory())
    plain = factory.plain(wanted)
    assert plain.layers == factory.layers
    assert (
        count(plain())
        >= wanted
        > count(factory._even(plain.width - {TRANSFORMER: 2, ROTARY: 4, RECURRENT: 1}[factory])())
    )


@HOSTS
def test_a_factory_can_be_pickled_and_made_again_from_its_name_and_arguments(factory):
    assert pickle.loads(pickle.dumps(factory)) == factory
    assert host_from(factory.name, dict(vars(factory))) == factory


@pytest.mark.parametrize(
    "factory",
    [TRANSFORMER, pytest.param(ROTARY, marks=pytest.mark.slow), pytest.param(RECURRENT, marks=pytest.mark.slow)],
    ids=["transformer", "rotary", "gru"],
)
def test_seeds_on_a_host_for_tokens_are_grown_saved_and_loaded(factory, tmp_path):
    menu, x = [get_blueprint(name, Kind.SEQUENCE) for name in SEQUENCE_MENU], tokens(5, 9)
    body = Body(factory, menu, 2, x[:2])
    for row in range(2):
        body.plant_host([row], made(factory, row, torch.float32), x[:2], 11)
    seeds = empty(body)
    for slot in range(2):
        seeds = set_seed(body, seeds, 1, slot, 2 + slot, stage=Stage.FOSSILIZED)
    rows = body.run(x.expand(2, *x.shape), body.route(doses(seeds), seeds)).output
    network, topology = grown_network(factory, body, seeds, 1, Interface((9,), classes=tuple(range(11)), target=(9,)))
    torch.testing.assert_close(network(x), rows[1], rtol=1e-5, atol=1e-5)
    assert save_network(tmp_path / "network", network, topology, x[:2]) is None
    loaded = load_network(tmp_path / "network", factory)
    assert torch.equal(loaded(x), network(x))
    program = torch.export.load(tmp_path / "network" / "model.pt2").module()
    torch.testing.assert_close(program(x), network(x), rtol=1e-5, atol=1e-5)


def test_one_line_makes_a_host_for_tokens():
    assert esper.transformer(256) == Transformer(256, 64, 2, 4, 128, "learned")
    assert esper.gru(256, 32) == GRU(256, 32, 1)
    for host in (esper.transformer(11, 8, 1, heads=2, length=9), esper.gru(11, 8)):
        check_host(host(), tokens(3, 9), 11, y=tokens(3, 9), objective=Classification(11))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: esper.transformer(256, 30),
            "width of a transformer host is 30 and heads is 4; give a width that is a multiple",
        ),
        (lambda: esper.transformer(0), "vocabulary of a transformer host is 0; give a whole number from 1 on"),
        (
            lambda: esper.transformer(9, positions="sine"),
            "positions of a transformer host is 'sine'; give 'learned' or 'rotary'",
        ),
        (
            lambda: esper.transformer(9, 12, heads=4, positions="rotary"),
            "width of a transformer host is 12 and heads is 4, so a head has 3 features, but rotary positions turn pairs",
        ),
        (lambda: esper.gru(256, 8, 1.5), "layers of a GRU host is 1.5; give a whole number from 1 on"),
    ],
)
def test_sizes_that_make_no_host_are_refused(make, reason):
    with pytest.raises(InputError, match=reason):
        make()
