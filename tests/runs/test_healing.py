"""Test `esper.heal`: places, data, the comparison, what is written, and input that cannot be healed."""

import copy
import io
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from torch import nn
from torch.nn.utils import parametrize, prune

import esper
from esper.cli import main
from esper.kasmina.blueprints import drawn_with
from esper.leyline.messages import DataWarning, InputError
from esper.runs.healing.heal import UNFROZEN, _permanent, dead_units, directions, drift, ranked
from esper.runs.healing.training import (
    RIDGE,
    Case,
    adapters,
    all_weights,
    bias_and_scale,
    distilled,
    examples_of,
    head,
    probe_loss,
    redraw_dead,
    refit,
    regrown,
    split,
    usual_loss,
)
from esper.store.lock import Lock


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), *[Block(12) for _ in range(3)], nn.Linear(12, 3))


def broken(value):
    network = build()
    with torch.no_grad():
        network[1].up.weight[0, 0] = value
    return network


def examples(count=240):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, :3] * x[:, 3:]).argmax(1)


def damaged(intact):
    model = copy.deepcopy(intact)
    for part in (model[2].up, model[2].down):
        prune.l1_unstructured(part, "weight", amount=0.8)
    return model


REMEDIES = [
    "nothing",
    "grown",
    "refit",
    "uniform adapters",
    "adapters where damaged",
    "adapters where participation falls",
    "bias and scale",
    "head",
    "regrown",
    "refit and trained",
    "distilled",
    "distilled and trained",
    *UNFROZEN,
]


@pytest.fixture(scope="module")
def healed():
    """Heal a damaged network; return the intact one, the damaged one, and what healing gave."""
    intact = build()
    x, y = examples(600)
    optimizer = torch.optim.Adam(intact.parameters(), lr=1e-2)
    for _ in range(150):
        nn.functional.cross_entropy(intact(x), y).backward()
        optimizer.step(), optimizer.zero_grad()
    model = damaged(intact)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    result = esper.heal(model, (x, y), intact=intact, budget=0.3, steps=96)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return intact, model, result


def test_healing_lowers_the_loss_with_seeds_within_the_budget_and_leaves_the_network_as_it_is(healed):
    _, model, result = healed
    grown = result.row("grown")
    assert grown.gain > grown.half_width > 0
    assert result.planted
    assert grown.trained == sum(seed.parameters for seed in result.planted) <= 0.3 * result.host_params
    after = dict(result.networks["grown"].named_parameters())
    for path in ("1.up", "2.up", "3.down"):
        assert torch.equal(after[f"{path}.weight"], model.get_submodule(path).weight)
    assert "drifts" in result.planted[0].why
    assert result.planted[0].site.startswith("2")


def test_the_table_has_every_remedy_and_the_verdict_says_which_is_better(healed):
    result = healed[2]
    assert [row.network for row in result.table] == REMEDIES
    assert result.row("all weights").trained == result.host_params
    gap = (result.losses["grown"] - result.losses["all weights"]).mean()
    assert gap == pytest.approx(result.row("grown").loss - result.row("all weights").loss)
    assert set(result.ranked) < set(REMEDIES)
    for name in ("nothing", result.ranked[1], "all weights"):
        assert f"that of {name}" in result.verdict
    assert "lower by [95 %]" in repr(result)
    assert result._repr_html_().count("<tr>") == 1 + len(REMEDIES)


def test_the_intervals_are_over_the_examples_that_were_held_back(healed):
    result = healed[2]
    less = result.losses["nothing"] - result.losses["grown"]
    low, high = stats.t.interval(0.95, 89, less.mean(), stats.sem(less))
    assert less.shape == (90,)
    assert result.row("grown").half_width == pytest.approx((high - low) / 2)


def test_a_loss_that_knows_no_examples_is_measured_on_twenty_batches():
    def spread(output, y):
        return (output - output.mean(0) - nn.functional.one_hot(y, 3)).square().mean()

    result = esper.heal(build(), examples(200), budget=0.1, steps=24, loss=spread)
    assert {len(losses) for losses in result.losses.values()} == {20}


def test_the_usual_loss_is_one_number_for_each_example_and_leaves_out_ignored_positions():
    generator = torch.Generator().manual_seed(2)
    output, y = torch.randn(4, 5, 3, generator=generator), torch.randint(3, (4, 5), generator=generator)
    y[1, 2:] = y[2] = -100
    expected = [nn.functional.cross_entropy(*pair) for pair in zip(output, y, strict=True)]
    expected[2] = torch.tensor(0.0)
    torch.testing.assert_close(usual_loss(output, y), torch.stack(expected))
    target = torch.randn(4, 15, generator=generator)
    torch.testing.assert_close(usual_loss(output, target), (output.flatten(1) - target).square().mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


def test_a_transformer_encoder_is_healed_at_its_layers_and_lora_adapts_its_attention():
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(60, 4, 8, generator=generator), torch.randint(3, (60,), generator=generator)
    with drawn_with(1):
        model = Encoder().eval()
    result = esper.heal(model, data, budget=0.3, steps=24)
    assert all(seed.site.startswith("body.layers.") for seed in result.planted)
    case = Case(model, {}, split(examples_of(data), 0), usual_loss, 2, 16, 0)
    adapted = adapters(case, 1e-2, ["body.layers"], 100).network.body.layers[0]
    assert parametrize.is_parametrized(adapted.self_attn, "in_proj_weight")
    assert parametrize.is_parametrized(adapted.linear1, "weight")


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(6, 8, batch_first=True), nn.LSTM(8, 3, batch_first=True)

    def forward(self, x):
        return self.head(self.body(x)[0])[0][:, -1]


def test_where_units_are_dead_all_weights_are_also_trained_after_these_were_drawn_anew():
    x, y = examples()
    model = build()
    prune.ln_structured(model[2].up, "weight", amount=0.75, n=2, dim=0)
    dead = ~model[2].up.weight.any(1)
    result = esper.heal(model, (x, y), budget=0.3, steps=24)
    assert [row.network for row in result.table][-2:] == ["all weights", "all weights, dead units drawn anew"]
    kept, drawn = (result.networks[row.network].get_submodule("2.up").weight for row in result.table[-2:])
    assert not kept[dead].any()
    assert drawn[dead].any(1).all()
    assert result.row("all weights, dead units drawn anew").trained == result.host_params
    assert result.best not in UNFROZEN


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


@pytest.fixture
def small():
    """Make a case of a small network."""
    with drawn_with(0):
        host, x = Small().eval(), torch.randn(120, 6)
    return Case(host, {}, split(examples_of((x, x[:, :3].argmax(1))), 0), usual_loss, 20, 16, 0)


def test_the_head_is_trained_alone_or_gets_lora_where_it_is_too_large(small):
    tuned = head(small, 1e-2, 60)
    assert tuned.learned == 51
    own = dict(small.host.named_parameters())
    assert [name for name, new in tuned.network.named_parameters() if not torch.equal(new, own[name])] == [
        "last.weight",
        "last.bias",
    ]
    assert head(small, 1e-2, 30).learned <= 30


@pytest.mark.parametrize("norm", [None, nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_head_is_the_layer_that_is_called_last_wherever_it_is_defined_and_however_its_weight_is_computed(
    small, norm
):
    last = small.host._modules.pop("last")
    small.host._modules = {"last": last if norm is None else norm(last), **small.host._modules}
    own, tuned = dict(small.host.named_parameters()), head(small, 1e-2, 60)
    changed = {name for name, new in tuned.network.named_parameters() if not torch.equal(new, own[name])}
    assert {name.split(".")[0] for name in changed} == {"last"}
    assert tuned.learned == sum(each.numel() for each in last.parameters())


def test_pruned_units_are_regrown_within_the_size_and_the_others_stay(small):
    assert regrown(small, 1e-2, 50, []) is None  # no weight is 0
    with torch.no_grad():
        small.host.second.weight[:12] = small.host.second.bias[:12] = 0
    grown = regrown(small, 1e-2, 3 * 16 + 2, ["second"])
    assert grown.learned == 3 * 16
    assert grown.network.second.weight.any(1).sum() == 4 + 3
    assert torch.equal(grown.network.second.weight[12:], small.host.second.weight[12:])


def test_a_unit_is_regrown_where_one_weight_alone_is_left_to_be_as_wide_as(small):
    host = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        host[0].weight[1:] = 0
    x, y = small.parts.train
    parts = split(examples_of((x[:, :1], y)), 0)
    for network in (regrown(small._replace(host=host, parts=parts), 1e-2, 3, ["0"]).network, copy.deepcopy(host)):
        redraw_dead(network)
        assert network[0].weight.isfinite().all()
        assert network[0].weight.all()


def test_the_weights_that_read_a_regrown_unit_are_regrown_with_it_where_they_were_cut_too(small):
    with torch.no_grad():
        small.host.first.weight[:12], small.host.first.bias[:12], small.host.second.weight[:, :12] = 0, 0, 0
    grown = regrown(small, 1e-2, 3 * (6 + 16), ["first"])
    assert grown.learned == 3 * (6 + 16)
    assert grown.network.first.weight.any(1).sum() == 7
    assert grown.network.second.weight.any(0).sum() == 7
    assert torch.equal(grown.network.second.weight[:, 12:], small.host.second.weight[:, 12:])


def test_units_of_a_weight_that_two_layers_share_are_trained_and_counted_once(small):
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    layers[4].weight = layers[2].weight
    with torch.no_grad():
        layers[2].weight[:4] = layers[2].weight[:, :3] = 0
    case = small._replace(host=nn.Sequential(*layers).eval())
    slow, fast = regrown(case, 1e-9, 400, []), regrown(case, 1e-2, 400, [])
    apart = slow.network[2].weight != fast.network[2].weight
    assert fast.learned == 4 * 16 + 12 * 3
    assert apart[:4].any(1).all()
    assert not apart[4:, 3:].any()


def test_units_of_a_transposed_convolution_are_its_outputs(small):
    host = nn.Sequential(
        nn.Unflatten(1, (6, 1)), nn.ConvTranspose1d(6, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).eval()
    with torch.no_grad():
        host[1].weight[:, :3] = 0
    grown = regrown(small._replace(host=host), 1e-2, 3 * 6, [])
    assert grown.learned == 3 * 6
    assert grown.network[1].weight[:, :3].all()
    assert redraw_dead(copy.deepcopy(host)) == 3


def test_no_more_entries_are_regrown_than_the_size_allows_where_gradients_are_equal(small):
    x, y = small.parts.train
    with torch.no_grad():
        small.host.first.weight[:, 1:] = 0
    case = small._replace(parts=split(examples_of((x[:, :1].repeat(1, 6), y)), 0))
    assert regrown(case, 1e-2, 7, []).learned == 7


def test_all_entries_of_a_layer_that_regrew_move_in_a_later_training(small):
    with torch.no_grad():
        small.host.second.weight[:12] = 0
    network = regrown(small, 1e-2, 3 * 16, []).network.requires_grad_(True)
    network(torch.randn(64, 6)).square().sum().backward()
    assert network.second.weight.grad[12:].any(1).all()


def test_single_entries_are_regrown_where_their_gradients_are_largest(small):
    prune.l1_unstructured(small.host.second, "weight", 0.5)
    prune.remove(small.host.second, "weight")
    entries = regrown(small, 1e-2, 10, [])
    changed = entries.network.second.weight != small.host.second.weight
    assert entries.learned == changed.sum() == 10
    assert not small.host.second.weight[changed].any()


def test_a_network_without_a_weight_for_lora_has_no_row_of_adapters():
    x, y = examples(60)
    result = esper.heal(Reader(), (x[:, None].repeat(1, 3, 1), torch.zeros_like(y)), budget=0.3, steps=24)
    assert [row.network for row in result.table] == ["nothing", "grown", "bias and scale", "head", "all weights"]
    assert result.row("head").trained == sum(each.numel() for each in Reader().head.parameters())
    smaller = esper.heal(Reader(), (x[:, None].repeat(1, 3, 1), torch.zeros_like(y)), budget=0.2, steps=24)
    assert any(
        sentence.startswith("head: absent: no layer has a weight, or the last") for sentence in smaller.explanations
    )
    assert "uniform adapters: absent" in repr(result)
    assert "every target that was held back is 0" in repr(result)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch about its own graphs
def test_pruning_within_an_exported_graph_is_kept(healed):
    x, y = examples(40)
    model = damaged(healed[0])
    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.export.export(model.eval(), (x[:4],), dynamic_shapes=(batch,))
    host, masks = _permanent(torch.export.unflatten(program))
    name = "2.up.weight_orig"
    assert torch.equal(masks[name], model[2].up.weight_mask)
    torch.testing.assert_close(host(x), model(x))
    case = Case(host, masks, split(examples_of((x, y)), 0), usual_loss, 3, 16, 0)
    weight = all_weights(case, 1e-2).network.get_parameter(name)
    assert not weight[masks[name] == 0].any()
    assert not torch.equal(weight, host.get_parameter(name))


def test_the_folder_gives_the_same_network_back_with_and_without_esper(healed, tmp_path):
    intact, _, result = healed
    assert result.save(tmp_path / "out").endswith("adapter, network.pt2, healing.json")
    x = examples(7)[0]
    expected = result.networks["grown"](x)
    host = damaged(intact)
    for part in (host[2].up, host[2].down):
        prune.remove(part, "weight")
    torch.testing.assert_close(esper.attach(host, tmp_path / "out" / "adapter").eval()(x), expected)
    torch.testing.assert_close(torch.export.load(tmp_path / "out" / "network.pt2").module()(x), result.network(x))
    taught = replace(result, ranked=("distilled and trained",))
    taught.save(tmp_path / "taught")
    torch.testing.assert_close(torch.export.load(tmp_path / "taught" / "network.pt2").module()(x), taught.network(x))
    assert json.loads((tmp_path / "out" / "healing.json").read_text())["verdict"] == result.verdict


def test_training_all_weights_keeps_what_was_pruned_at_zero_and_adapters_leave_the_host_alone():
    host, (x, y) = build(), examples()
    mask = (torch.rand(24, 12) > 0.5).float()
    with torch.no_grad():
        host[1].up.weight.mul_(mask)
    parts = split(examples_of((x, y)), 0)
    case = Case(host, {"1.up.weight": mask}, parts, nn.functional.cross_entropy, 5, 16, 0)
    whole = all_weights(case, 1e-2).network
    assert not whole[1].up.weight[mask == 0].any()
    assert not torch.equal(whole[2].up.weight, host[2].up.weight)
    adapted = adapters(case, 1e-2, [""], 500)
    assert 250 < adapted.learned <= 500
    assert torch.equal(adapted.network[1].up.parametrizations.weight.original, host[1].up.weight)


def test_the_network_that_is_returned_has_the_least_loss_on_the_probe_of_those_that_keep_the_weights_and_the_budget(
    healed,
):
    _, model, result = healed
    probe = split(examples_of(examples(600)), 0).probe
    able = [row.network for row in result.table[:-1] if row.trained <= 0.3 * result.host_params]
    with torch.no_grad():
        losses = {name: float(usual_loss(result.networks[name](probe.x), probe.y).mean()) for name in able}
    assert result.best == min(losses, key=losses.get)
    assert result.network is result.networks[result.best]
    assert f"within the budget: {result.best}. Its held-out loss is lower than that of nothing (by " in result.verdict
    state = result.network.state_dict()
    if result.best != "grown":
        assert torch.equal(state["2.up.parametrizations.weight.original"], model[2].up.weight)


def test_biases_and_scales_leave_the_weights_as_they_are():
    case = Case(build(), {}, split(examples_of(examples()), 0), usual_loss, 3, 16, 0)
    tuned = bias_and_scale(case, 1e-2)
    layer, own = tuned.network[1].up, case.host[1].up
    assert torch.equal(layer.parametrizations.weight.original, own.weight)
    scale = layer.parametrizations.weight[0].scale
    torch.testing.assert_close(layer.weight, own.weight * scale)
    assert not torch.equal(layer.bias, own.bias)
    outputs = sum(len(part.weight) for part in case.host.modules() if isinstance(part, nn.Linear))
    assert tuned.learned == 2 * outputs


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Conv2d(4, 3, (2, 1))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).mean((2, 3))


@pytest.mark.parametrize("kind", [build, Convolutions])
def test_a_refit_of_every_rank_gives_the_outputs_of_the_intact_network_back(kind, monkeypatch):
    monkeypatch.setattr("esper.runs.healing.training.RIDGE", 1e-9)
    with drawn_with(2):
        intact = kind()
        x = torch.randn(200, 6) if kind is build else torch.randn(200, 2, 6, 5)
    model = copy.deepcopy(intact)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand(len(parameter), *[1] * (parameter.dim() - 1)) > 0.5)
    case = Case(model, {}, split(examples_of((x, torch.zeros(200).long())), 0), usual_loss, 1, 16, 0)
    whole = refit(case, intact, 10**6)
    with torch.no_grad():
        assert (model(x) - intact(x)).abs().max() > 0.1
        torch.testing.assert_close(whole.network(x), intact(x), atol=1e-3, rtol=1e-3)
    few = refit(case, intact, 60)
    assert 0 < few.learned <= 60
    assert refit(case, intact, 1) is None


def test_a_refit_is_the_reduced_rank_regression_of_the_errors_on_what_the_damaged_layer_reads():
    torch.manual_seed(3)
    intact, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(100, 6)
    model = copy.deepcopy(intact)
    with torch.no_grad():
        model[0].weight[:3] = 0
    case = Case(model, {}, split(examples_of((x, torch.zeros(100).long())), 0), usual_loss, 1, 16, 0)
    added = refit(case, intact, 11).network[0].weight - model[0].weight
    read = case.parts.train.x.double()
    error = read @ (intact[0].weight - model[0].weight).double().T
    ridge = RIDGE * read.square().sum() / 6
    fitted = torch.linalg.inv(read.T @ read + ridge * torch.eye(6)) @ read.T @ error
    first = torch.linalg.svd(read @ fitted)[2][0]
    torch.testing.assert_close(added, (fitted @ torch.outer(first, first)).T.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [build, Convolutions, Encoder])
def test_distillation_brings_layers_next_to_those_of_the_intact_network_and_reads_no_label(kind):
    with drawn_with(2):
        intact = kind().train()
        x = torch.randn(200, *{build: (6,), Convolutions: (2, 6, 5), Encoder: (4, 8)}[kind])
    host = copy.deepcopy(intact).eval()
    with torch.no_grad():
        for path, parameter in host.named_parameters():
            if parameter.dim() > 1 and not path.startswith("0."):
                parameter.mul_(torch.rand(len(parameter), *[1] * (parameter.dim() - 1)) > 0.3)
    cases = [
        Case(host, {}, split(examples_of((x, labels)), 0), usual_loss, 40, 16, 0)
        for labels in (torch.zeros(200).long(), torch.arange(200) % 3)
    ]
    taught, other = (adapters(case, 1e-2, [""], 200, partial(distilled, intact)) for case in cases)
    assert intact.training
    assert not any(part._forward_hooks for network in (taught.network, intact) for part in network.modules())
    held = cases[0].parts.held.x
    intact.eval()
    with torch.no_grad():
        assert drift(taught.network(held), intact(held)) < 0.9 * drift(host(held), intact(held))
        torch.testing.assert_close(taught.network(held), other.network(held), atol=0, rtol=0)
    for case, network in zip(cases, (taught, other), strict=True):
        assert network.probe == pytest.approx(probe_loss(network.network, case))


def test_distillation_leaves_a_network_that_is_intact_as_it_is_and_needs_layers_of_the_same_names():
    intact = build()
    case = Case(intact, {}, split(examples_of(examples()), 0), usual_loss, 5, 16, 0)
    same = adapters(case, 1e-2, [""], 200, partial(distilled, intact))
    x = case.parts.held.x
    assert torch.equal(same.network(x), intact(x))
    assert adapters(case, 1e-2, [""], 200, partial(distilled, nn.Sequential(nn.ReLU(), build()))) is None


class Renamed(nn.Module):
    """Gives the streams of another network from other layers."""

    def __init__(self, network):
        super().__init__()
        for path, part in network.named_children():
            self.add_module(path, nn.Sequential(nn.Identity(), part))

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def test_where_no_layer_has_the_name_of_one_of_the_intact_network_the_result_says_so():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3)])
    result = esper.heal(model, examples(60), Renamed(model), budget=0.5, steps=24)
    assert not {"refit", "distilled", "distilled and trained"} & {row.network for row in result.table}
    assert "distilled: absent: no layer has the name and the number of outputs of one in intact" in result.explanations
    assert any(sentence.startswith("refit: absent: ") for sentence in result.explanations)


def test_places_are_ranked_by_the_rise_of_the_drift():
    intact = build()
    model = copy.deepcopy(intact)
    with torch.no_grad():
        model[2].down.weight.zero_()
    x = examples(50)[0]
    places = ranked(model, esper.find_sites(model, x[:2]), x, intact)
    assert places[0].site == "2.down"
    before, here = intact[:2](x), intact[:3](x)
    there, in_front = drift(model[:3](x), here), drift(model[:2](x), before)
    (why,) = [place.why for place in places if place.site == "2"]
    assert why == f"the stream drifts {there:.0%} from the intact network's there, and {in_front:.0%} in front"
    assert drift(here, here) == 0


def test_without_the_intact_network_places_are_ranked_by_dead_units_then_by_the_directions_that_a_stream_loses():
    model, x = build(), examples(50)[0]
    sites = esper.find_sites(model, x[:2])
    with torch.no_grad():
        model[2].down.weight.copy_(100 * model[2].down.weight[:1].expand_as(model[2].down.weight))
    places = ranked(model, sites, x, None)
    kind, before, here = type(sites["2"].stream), model[:2](x), model[:3](x)
    shares = f"{directions(here, kind):.0%} of its directions there, and {directions(before, kind):.0%} in front"
    assert places[0] == ("2", f"the stream uses {shares}")
    with torch.no_grad():
        model[1].up.bias[: len(model[1].up.bias) * 9 // 10] = -100.0
    dead = dead_units(model[1].up(model[:1](x)))
    assert dead > 0.8
    assert ranked(model, sites, x, None)[0] == ("1", f"only {1 - dead:.0%} of the units in front of it are active")


def test_data_are_read_alike_from_arrays_batches_and_files(tmp_path):
    x, y = examples(40)
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    torch.save({"x": x, "y": y}, tmp_path / "data.pt")
    save_file({"x": x, "y": y}, tmp_path / "data.safetensors")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    files = [tmp_path / f"data.{suffix}" for suffix in ("npz", "pt", "safetensors")]
    for given in ((x.numpy(), y.numpy()), loader, [(x[:30], y[:30]), (x[30:], y[30:])], *files):
        found = examples_of(given)
        assert torch.equal(found.x, x)
        assert torch.equal(found.y, y)


def test_the_parts_share_no_example():
    parts = split(examples_of((torch.arange(100.0)[:, None], torch.zeros(100))), 0)
    assert [len(part) for part in parts] == [70, 15, 15]
    assert sorted(torch.cat([part.x for part in parts]).flatten().tolist()) == list(range(100))


X, Y = examples()
REFUSED = {
    "no stream": (
        lambda: (nn.Linear(6, 3), (X, Y)),
        {},
        "it has no submodule with parameters; give a network",
    ),
    "another shape": (lambda: (build(), (X, Y)), {"intact": nn.Linear(6, 3)}, "intact is of another shape: it has no"),
    "another width": (
        lambda: (build(), (X, Y)),
        {"intact": nn.Sequential(nn.Linear(6, 8), *[Block(8) for _ in range(3)], nn.Linear(8, 3))},
        "intact is of another shape: at 1",
    ),
    "no data": (lambda: (build(), []), {}, "data has no batches"),
    "few data": (lambda: (build(), (X[:9], Y[:9])), {}, "data has 9 examples; healing needs 20"),
    "no pair": (lambda: (build(), 3), {}, "data is an int"),
    "lengths": (
        lambda: (build(), (X, Y[:50])),
        {},
        "x holds 240 examples and y 50; give one label or target per example",
    ),
    "a file that is not there": (lambda: (build(), "absent.npz"), {}, "there is no file absent.npz"),
    "a small budget": (lambda: (build(), (X, Y)), {"budget": 0.001}, "the smallest seed has"),
    "few steps": (lambda: (build(), (X, Y)), {"steps": 3}, "steps is 3; give a whole number of 24 or more"),
    "no module": (lambda: (3, (X, Y)), {}, "model is an int; give an nn.Module"),
    "a label that is no class": (lambda: (build(), (X, Y + 2)), {"steps": 24}, "y holds the label "),
    "nan in x": (lambda: (build(), (X.where(X < 2, torch.nan), Y)), {}, "x holds NaN or infinite values, in examples "),
    "nan in y": (lambda: (build(), (X, X.log())), {}, "y holds NaN or infinite values, in examples "),
    "one output": (
        lambda: (nn.Sequential(build(), nn.ReLU(), nn.Linear(3, 1)), (X, Y)),
        {"steps": 24},
        "the model has one output; give floating",
    ),
    "lists": (lambda: (build(), (X.tolist(), Y.tolist())), {}, "data holds no arrays; give x and y as tensors"),
    "a script": (lambda: (torch.jit.script(build()), (X, Y)), {}, "is a torch.jit module, whose code is fixed"),
    "no parameters": (lambda: (nn.Identity(), (X, Y)), {}, "Identity has no parameters"),
    "a folder of data": (lambda: (build(), "."), {}, ". is a folder; give healing data"),
    "nan in the weights": (lambda: (broken(torch.nan), (X, Y)), {}, "1.up.weight of the model holds NaN; give"),
    "nan in the intact weights": (
        lambda: (build(), (X, Y)),
        {"intact": broken(torch.nan)},
        "1.up.weight of intact holds NaN; give",
    ),
    "an infinite input that trains": (
        lambda: (build(), (torch.cat([X, X.new_full((1, 6), torch.inf)]), torch.cat([Y, Y[:1]]))),
        {"seed": 0},
        "the loss of the model is not finite on 1 of 241 examples; leave out",
    ),
    "batches of two shapes": (
        lambda: (build(), [(X, Y), (X[:, :4], Y)]),
        {},
        "batch 1 of data has examples of another shape than batch 0",
    ),
    "a large seed": (lambda: (build(), (X, Y)), {"seed": 2**63}, "seed is 9223372036854775808; give a whole number"),
    "text": (
        lambda: (build(), (X.numpy(), np.array(["a"] * len(X)))),
        {},
        "y holds text, such as 'a'; give numbers, for",
    ),
    "targets of another kind": (lambda: (build(), (X, X)), {"steps": 24}, "or from Python loss(output, target)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_healed_is_refused_in_one_sentence(name):
    make, given, sentence = REFUSED[name]
    model, data = make()
    with pytest.raises(InputError) as caught:
        esper.heal(model, data, **given)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_of_another_precision_is_healed_in_it(dtype):
    healed = esper.heal(build().to(dtype), examples(60), budget=0.3, steps=24)
    assert {parameter.dtype for parameter in healed.network.parameters()} == {dtype}
    assert healed.planted or healed.explanations


def test_a_network_of_integers_is_refused_by_name():
    network = torch.nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    network[0].weight = nn.Parameter(network[0].weight.to(torch.int8), requires_grad=False)
    with pytest.raises(InputError, match=r"0\.weight of Sequential is quantised"):
        esper.heal(network, (X, Y))


@pytest.fixture(scope="module")
def exported():
    """Return the content of a file of torch.export."""
    batch, file = {0: torch.export.Dim("batch", min=1)}, io.BytesIO()
    torch.export.save(torch.export.export(build(), (X[:4],), dynamic_shapes=(batch,)), file)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch, exported):
    """Make a folder with an exported network, its code and its data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "network.pt2").write_bytes(exported)
    np.savez("data.npz", x=X.numpy(), y=Y.numpy())
    (tmp_path / "mine_data.py").write_text(
        "import numpy as np\ndef pair():\n    a = np.load('data.npz')\n    return a['x'], a['y']\ndef nothing():\n    pass\n"
    )
    return tmp_path


def code_of(*arguments):
    """Return the exit code of `esper` with these arguments."""
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    return left.value.code


def test_one_command_heals_an_exported_network_and_prints_a_table_or_json(folder, capsys):
    heal = ("heal", "network.pt2", "--data", "mine_data.py:pair", "--budget", 0.3, "--steps", 24, "--out", "out")
    assert not code_of(*heal)
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()[:3]] == ["network", "nothing", "grown"]
    assert "all weights" in out
    assert "healing.json" in out
    assert (folder / "out" / "network.pt2").is_file()
    assert code_of(*heal) == 2
    assert "out holds a healing; give --overwrite" in capsys.readouterr().err
    (folder / "out" / "notes.txt").write_text("mine")
    assert code_of(*heal, "--overwrite") == 2
    assert "out holds 'notes.txt', which is no file of a healing; name another folder" in capsys.readouterr().err
    (folder / "out" / "notes.txt").unlink()
    assert not code_of(*heal, "--overwrite", "--json")
    assert json.loads(capsys.readouterr().out)["planted"]
    assert code_of(*heal[:-1], folder) == 2
    assert "holds other files and no healing; name a new or an empty folder with --out" in capsys.readouterr().err


def test_a_saved_healing_leaves_nothing_of_an_earlier_one(healed, tmp_path):
    _, _, result = healed
    result.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "network.pt2", "healing.json"}
    assert replace(result, adapter={}).save(tmp_path).endswith(": network.pt2, healing.json")
    assert {path.name for path in tmp_path.iterdir()} == {"network.pt2", "healing.json"}


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        ("absent.pt2", "data.npz", "there is no file absent.pt2"),
        ("data.npz", "data.npz", "'data.npz' is no model; give a .pt2 file"),
        ("network.pt2", "absent.npz", "there is no file absent.npz"),
        ("damaged.pt2", "data.npz", "damaged.pt2 cannot be read as torch.export's: "),
        ("mine_data.py:nothing", "data.npz", "mine_data.py:nothing returned a NoneType; return an nn.Module"),
        (".", "data.npz", "'.' is a folder; give a .pt2 file"),
        ("mine_data.py:absent", "data.npz", "mine_data.py has no function 'absent'"),
        ("mine_data.py:pair", "data.npz", "mine_data.py:pair returned a tuple; return an nn.Module"),
    ],
)
def test_the_command_refuses_bad_input_with_code_2(folder, capsys, model, data, sentence):
    (folder / "damaged.pt2").write_text("no archive")
    assert code_of("heal", model, "--data", data) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_an_interrupt_ends_the_command_with_a_sentence_and_code_130(folder, capsys, monkeypatch):
    def interrupted(*arguments, **settings):
        settings["watch"]("training the grown network")
        raise KeyboardInterrupt

    monkeypatch.setattr("esper.runs.healing.heal.heal", interrupted)
    assert code_of("heal", "network.pt2", "--data", "data.npz", "--out", "out") == 130
    said = capsys.readouterr().err.splitlines()
    assert said == ["training the grown network", "interrupted; nothing was written, and the same command begins anew"]
    assert torch.get_num_threads() == 1
    assert not (folder / "out").exists()


@pytest.fixture(scope="module")
def quick():
    """Heal in few steps."""
    return esper.heal(damaged(build()), examples(), intact=build(), budget=0.3, steps=24)


@pytest.fixture
def ready(folder, quick, exported, monkeypatch):
    """Return the command whose trainings, and whose export, which takes most of the time to write, have been done already."""
    monkeypatch.setattr("esper.runs.healing.heal.heal", lambda *arguments, **settings: quick)
    monkeypatch.setattr("esper.runs.healing.healed.program_of", lambda *arguments: exported)
    return ("heal", "network.pt2", "--data", "data.npz", "--out", "out")


@pytest.mark.campaign
@pytest.mark.parametrize("written", ["adapter.safetensors", "network.pt2", "healing.json"])
@pytest.mark.parametrize("earlier", [False, True])
def test_on_a_full_disk_the_table_is_printed_and_the_folder_stays_as_it_was(
    ready, folder, capsys, monkeypatch, full, written, earlier
):
    if earlier:
        assert not code_of(*ready)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr("esper.store.disk.PATIENCE", 0.01)
    full(written, times=10**9)
    capsys.readouterr()
    assert code_of(*ready, "--overwrite") == 1
    said = capsys.readouterr()
    assert "all weights" in said.out
    assert (
        "error: cannot write out: No space left on device; make room there, and give the same command again" in said.err
    )
    assert "Traceback" not in said.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    monkeypatch.undo()


@pytest.mark.campaign
def test_a_healing_waits_for_room(ready, folder, capsys, monkeypatch, full):
    monkeypatch.setattr("esper.store.disk.EVERY", 0.001)
    full(r"network\.pt2$")
    assert not code_of(*ready)
    assert "out is written; the run goes on" in capsys.readouterr().err
    assert {path.name for path in (folder / "out").iterdir()} == {"adapter", "network.pt2", "healing.json"}


@pytest.mark.campaign
@pytest.mark.parametrize("renames", [0, 1, 2])
@pytest.mark.parametrize("earlier", [False, True])
def test_what_a_kill_left_of_a_healing_is_replaced(ready, quick, folder, monkeypatch, renames, earlier):
    if earlier:
        quick.save("out")
    rename, left = os.rename, [renames]

    def killed(source, target):
        if Path(target).parent == Path("out"):
            left[0] -= 1
            if left[0] < 0:
                raise BrokenPipeError  # nothing is done after it
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(BrokenPipeError):
        quick.save("out")
    monkeypatch.setattr(os, "rename", rename)
    assert not (folder / "out" / "healing.json").exists()
    assert not code_of(*ready)
    assert {path.name for path in (folder / "out").iterdir()} == {"adapter", "network.pt2", "healing.json"}


def test_a_network_of_ones_own_under_the_name_of_the_result_is_not_replaced(folder, capsys, monkeypatch):
    monkeypatch.setattr("esper.runs.healing.heal.heal", pytest.fail)  # it is refused before any training
    (folder / "out").mkdir()
    (folder / "out" / "network.pt2").write_text("mine")
    assert code_of("heal", "network.pt2", "--data", "data.npz", "--out", "out") == 2
    assert "out holds other files and no healing" in capsys.readouterr().err
    assert (folder / "out" / "network.pt2").read_text() == "mine"


@pytest.mark.campaign
def test_of_two_healings_into_one_folder_the_second_is_refused_before_its_trainings(ready, folder, capsys):
    (folder / "out").mkdir()
    lock = Lock(folder / "out", pytest.fail)
    lock.take()
    assert code_of(*ready) == 2
    said = capsys.readouterr().err
    assert f"error: process {os.getpid()} on " in said
    assert "writes to out; wait for its end, or end it first" in said
    assert said.count("\n") == 1
    lock.release()
    assert not code_of(*ready)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64"])
def test_labels_without_a_sign_are_those_with_one(kind):
    x, y = examples()
    found = examples_of((x, y.numpy().astype(kind)))
    assert torch.equal(found.y, y)
    assert torch.equal(usual_loss(build()(x), found.y), usual_loss(build()(x), y))


def test_a_label_above_all_whole_numbers_of_torch_is_named():
    x, y = examples()
    with pytest.raises(
        InputError, match=r"y holds 18,446,744,073,709,551,615; give whole numbers below 9,223,372,036,854,775,808"
    ):
        examples_of((x, y.numpy().astype("uint64") - 3))


def test_a_healing_writes_nothing_to_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    x, y = examples()
    assert esper.heal(damaged(build()), (x, y), budget=0.3, steps=24).table


def test_the_rank_of_adapters_is_at_most_that_of_their_matrices():
    parts = split(examples_of(examples(60)), 0)
    case = Case(build(), {}, parts, usual_loss, 1, 8, 0)
    adapted = adapters(case, 1e-3, [""], 10**30)
    assert adapted is not None
    assert adapted.learned < 10**5


def test_copies_in_the_parts_of_a_healing_and_few_that_are_held_back_are_told(healed):
    _, model, _ = healed
    x, y = examples(30)
    with pytest.warns(DataWarning) as told:
        result = esper.heal(model, (x.repeat(4, 1), y.repeat(4)), steps=24)
    sentences = [str(warning.message) for warning in told]
    assert len(sentences) == 1
    assert (
        "of 18 that are held back for the table, are equal in x and y to examples that train or choose" in sentences[0]
    )
    few = "what was held back for the table has 18 examples, so a single example moves figures by up to 6%; bring 30 or more"
    assert few in result.explanations
