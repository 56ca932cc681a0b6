"""Damage to trained networks: every generator does what it says."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

import quick_healing as healing
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.stack.layers import Residual
from esper.kasmina.stack.rows import Stack
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError
from esper.runs.healing.training import redraw_dead
from esper.tasks.hosts import MLP, host_from
from esper_bench.healing.bridged import Bridged, BridgedMLP
from esper_bench.healing.damage import (
    INPUT_FACTORS,
    OTHER_PROBABILITIES,
    PROBABILITIES,
    TWO_SITES,
    Damage,
    DamageKind,
    damage_host,
    damage_split,
    draw_damage,
    input_group,
    label_map,
    low_rank,
    prune_units,
    quantised,
    remove_block,
    ternary,
)

BLOCKS = 3
PLAIN = BridgedMLP(6, 8, (12, 10, 12), 4, (False,) * BLOCKS)
RESIDUAL = BridgedMLP(6, 8, (12, 10, 12), 4, (True,) * BLOCKS)
WEIGHTS = [kind for kind in DamageKind if kind not in (DamageKind.INPUT, DamageKind.LABELS, DamageKind.NONE)]


def damaged(kind: DamageKind, segments: tuple[int, ...], severity: float, like: BridgedMLP = PLAIN) -> SegmentedHost:
    return healing.damaged(like, kind, segments, severity)


def sound(like: BridgedMLP = PLAIN) -> SegmentedHost:
    return damaged(DamageKind.NONE, (), 0.0, like)


def changed(host: SegmentedHost) -> set[int]:
    """Find the segments whose parameters or skips differ from those of the sound network."""
    return {
        index
        for index, (one, other) in enumerate(zip(host.segments, sound().segments, strict=True))
        if any(
            not torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        )
    }


# Hosts.


def test_a_bridged_block_without_a_skip_is_the_block_of_an_mlp_and_with_one_is_residual() -> None:
    x = torch.randn(5, 8)
    layers = (nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8))
    assert torch.equal(Bridged(*layers, skip=False)(x), nn.Sequential(*layers)(x))
    assert torch.equal(Bridged(*layers, skip=True)(x), Residual(*layers)(x))


def test_a_host_with_a_slot_behind_its_head_computes_what_it_did_and_can_be_named() -> None:
    closed = BridgedMLP(6, 4, (3, 5), 3, (False, True), entry=True)
    opened = host_from("bridged-mlp", {**vars(closed), "exit": True})
    hosts = []
    for factory in (closed, opened):
        with drawn_with(1):
            hosts.append(factory())
    x = torch.randn(4, 6)
    assert torch.equal(hosts[0](x), hosts[1](x))
    assert [(slot.name, slot.head) for slot in hosts[1].slots[-2:]] == [("block1", False), ("head", True)]
    assert hosts[1].slots[:-1] == hosts[0].slots
    assert {name: value.shape for name, value in hosts[1].state_dict().items()} == {
        name: value.shape for name, value in hosts[0].state_dict().items()
    }
    check_host(hosts[1], x, 3)
    with pytest.raises(InputError, match="exit of a bridged MLP host is 1; give True or False"):
        BridgedMLP(6, 4, (3,), 3, (False,), exit=1)  # type: ignore[arg-type]


def test_a_bridged_mlp_without_skips_is_an_mlp_of_the_same_draw() -> None:
    torch.manual_seed(5)
    bridged = PLAIN()
    torch.manual_seed(5)
    mlp = MLP(6, 8, (12, 10, 12), 4)()
    x = torch.randn(9, 6)
    assert torch.equal(bridged(x), mlp(x))
    check_host(bridged, x, 4)


def test_hosts_with_and_without_skips_and_frozen_ones_run_in_one_stack() -> None:
    hosts = [BridgedMLP(6, 8, (12, 10, 12), 4, skips, frozen=True)() for skips in ((False, True, False), (True,) * 3)]
    stack, x = Stack(hosts[0], 2), torch.randn(2, 9, 6)
    for row, host in enumerate(hosts):
        stack.write(row, host)
    together = stack(x, slice(0, 2))
    for row, host in enumerate(hosts):
        torch.testing.assert_close(together[row], host(x[row]))
    assert stack.trained == 0


@pytest.mark.parametrize("skips", [(True,), (True, False, 1), None])
def test_skips_that_are_not_one_bool_for_each_block_are_refused(skips: object) -> None:
    with pytest.raises(
        InputError, match=r"^skips of a bridged MLP host is .*; give True or False for each of its 3 blocks$"
    ):
        BridgedMLP(6, 8, (12, 10, 12), 4, skips)  # type: ignore[arg-type]


# Damage of weights.


@pytest.mark.parametrize("like", [PLAIN, RESIDUAL])
@pytest.mark.parametrize("segment", [1, 2, 3])
def test_a_network_with_a_removed_block_is_the_network_without_it(like: BridgedMLP, segment: int) -> None:
    host, whole, x = damaged(DamageKind.REMOVED, (segment,), 0.0, like), sound(like), torch.randn(11, 6)
    without = nn.Sequential(*(part for index, part in enumerate(whole.segments) if index != segment))
    assert torch.equal(host(x), without(x))
    assert not torch.allclose(host(x), whole(x))


def test_pruned_units_do_not_contribute_and_the_others_are_unchanged() -> None:
    torch.manual_seed(0)
    block = Bridged(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8), skip=False)
    smaller = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8))
    kept = [0, 2, 3]
    first, last = block[0], block[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        smaller[0].weight.copy_(first.weight[kept])
        smaller[0].bias.copy_(first.bias[kept])
        smaller[2].weight.copy_(last.weight[:, kept])
        smaller[2].bias.copy_(last.bias)
    prune_units(block, [1, 4])
    x = torch.randn(7, 8)
    torch.testing.assert_close(block(x), smaller(x))


@pytest.mark.parametrize(("severity", "pruned"), [(0.8, 9), (1.0, 12), (0.01, 1)])
def test_the_share_of_pruned_units_is_the_severity(severity: float, pruned: int) -> None:
    first = damaged(DamageKind.PRUNED, (1,), severity).segments[1][0]  # type: ignore[index]
    assert int((first.weight == 0).all(1).sum()) == pruned


@pytest.mark.parametrize("rank", [1, 2])
def test_a_low_rank_is_that_rank_and_the_nearest_one(rank: int) -> None:
    weight = torch.randn(8, 12)
    nearest = low_rank(weight, rank)
    assert torch.linalg.matrix_rank(nearest) == rank
    rest = torch.linalg.svdvals(weight)[rank:].square().sum()
    torch.testing.assert_close((weight - nearest).square().sum(), rest)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_quantised_weights_have_as_many_values_as_the_bits_allow(bits: int) -> None:
    weight = torch.randn(6, 500)
    rounded = quantised(weight, bits)
    levels = 2 ** (bits - 1) - 1
    step = weight.abs().amax(1, keepdim=True) / levels
    assert set((rounded / step).round().flatten().tolist()) == set(range(-levels, levels + 1))
    torch.testing.assert_close(rounded / step, (rounded / step).round())
    torch.testing.assert_close(rounded.abs().amax(1), weight.abs().amax(1))
    assert ((rounded - weight).abs() <= step / 2 + 1e-6).all()


def test_ternary_weights_have_one_magnitude_for_each_output_and_keep_their_signs() -> None:
    weight = torch.randn(6, 40)
    rounded = ternary(weight)
    for own, row in zip(weight, rounded, strict=True):
        stays = row != 0
        assert len(row.abs().unique()) == 2
        assert torch.equal(row[stays].sign(), own[stays].sign())
        torch.testing.assert_close(row.abs().max(), own[stays].abs().mean())
        assert own[stays].abs().min() > 0.7 * own.abs().mean() > own[~stays].abs().max()


@pytest.mark.parametrize("level", [1.0, 2.0])
def test_noise_has_the_standard_deviation_of_its_level(level: float) -> None:
    weight = sound().segments[1][0].weight.detach()  # type: ignore[index]
    noise = damaged(DamageKind.NOISE, (1,), level).segments[1][0].weight.detach() - weight  # type: ignore[index]
    assert noise.std() == pytest.approx(level * weight.std().item(), rel=0.25)


def test_further_kinds_do_what_their_names_say() -> None:
    before = sound().requires_grad_(False).segments[1][0]  # type: ignore[index]

    def after(kind: DamageKind, severity: float) -> nn.Linear:
        return damaged(kind, (1,), severity).requires_grad_(False).segments[1][0]  # type: ignore[index, return-value]

    assert all(len(row.unique()) <= 15 for row in after(DamageKind.INT4, 0.0).weight)
    sparse = after(DamageKind.SPARSE, 0.75).weight
    assert (sparse == 0).sum() == 72
    assert sparse.abs()[sparse != 0].min() > before.weight.abs()[sparse == 0].max()
    shuffled = after(DamageKind.SHUFFLED, 0.0).weight
    assert sorted(map(tuple, shuffled.tolist())) == sorted(map(tuple, before.weight.tolist()))
    offset = after(DamageKind.OFFSET, 1.0)
    assert torch.equal(offset.weight, before.weight)
    assert (offset.bias != before.bias).all()
    flipped = (after(DamageKind.FLIPPED, 0.25).weight / before.weight).round()
    assert set(flipped.flatten().tolist()) == {-1.0, 1.0}
    assert 0.1 < (flipped < 0).double().mean() < 0.4
    gain = after(DamageKind.GAIN, 1.0).weight / before.weight
    torch.testing.assert_close(gain, gain[:, :1].expand_as(gain))
    assert (gain > 0).all()
    assert gain[:, 0].log().std() == pytest.approx(1, abs=0.5)


def test_dead_units_drawn_anew_change_nothing_at_first_and_then_learn() -> None:
    host, again = (damaged(DamageKind.PRUNED, (1,), 0.8) for _ in range(2))
    redraw_dead(host, torch.Generator().manual_seed(0))
    first, before = (network.requires_grad_(False).segments[1][0] for network in (host, again))  # type: ignore[index]
    dead = ~before.weight.any(1)
    assert first.weight[dead].all()
    assert first.weight[dead].std() == pytest.approx(before.weight[~dead].std().item(), rel=0.3)
    assert torch.equal(first.weight[~dead], before.weight[~dead])
    x = torch.randn(20, 6)
    assert torch.equal(host(x), again(x))
    for network, learns in ((host, True), (again, False)):
        network.requires_grad_(True)
        network(x).square().sum().backward()
        assert network.segments[1][2].weight.grad[:, dead].any() == learns  # type: ignore[index]


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_damage_changes_the_segments_that_it_names_and_no_other(kind: DamageKind) -> None:
    host = damaged(kind, (1, 3), 1.0 if kind != DamageKind.QUANTISED else 2.0)
    assert changed(host) == (set(range(BLOCKS + 2)) if kind == DamageKind.MIXED else {1, 3})


def test_mixed_precision_is_ternary_at_its_segments_and_of_more_bits_elsewhere() -> None:
    host = damaged(DamageKind.MIXED, (2,), 3.0)
    for index, segment in enumerate(host.segments):
        for layer in (part for part in segment.modules() if isinstance(part, nn.Linear)):
            most = max(len(row.abs().unique()) for row in layer.weight)
            assert most == 2 if index == 2 else 2 < most <= 8


def test_no_damage_changes_nothing() -> None:
    torch.manual_seed(3)
    host = PLAIN()
    before = {name: value.clone() for name, value in host.state_dict().items()}
    damage_host(host, Damage(DamageKind.NONE, (), 0.0, 1))
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())


def test_a_removed_block_that_has_no_skip_of_its_own_gets_one() -> None:
    block = Bridged(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8), skip=False)
    remove_block(block)
    x = torch.randn(7, 8)
    assert torch.equal(block(x), x)


# Damage of data.


@pytest.mark.parametrize("factor", sorted(set(INPUT_FACTORS)))
def test_a_group_of_inputs_is_dead_flipped_or_rescaled_in_every_example(factor: float) -> None:
    damage, split = (
        Damage(DamageKind.INPUT, (), factor, 11),
        Split(torch.randn(20, 30), torch.zeros(20, dtype=torch.int64)),
    )
    x, group = damage_split(split, damage, 4).x, input_group(damage, 30)
    others = sorted(set(range(30)) - set(group))
    assert torch.equal(x[:, group], split.x[:, group] * factor)  # type: ignore[call-overload]
    assert torch.equal(x[:, others], split.x[:, others])  # type: ignore[call-overload]
    assert 0.15 * 30 - 1 <= len(group) <= 0.5 * 30


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_swapped_labels_exchange_one_or_two_pairs_of_classes(classes: int) -> None:
    counts = set()
    for key in range(40):
        labels = label_map(Damage(DamageKind.LABELS, (), 0.0, key), classes)
        assert [labels[label] for label in labels] == list(range(classes))  # an exchange undoes itself
        counts.add(sum(label != place for place, label in enumerate(labels)))
    assert counts == ({2, 4} if classes >= 4 else {2})


def test_labels_are_swapped_in_the_examples() -> None:
    damage, y = Damage(DamageKind.LABELS, (), 0.0, 3), torch.arange(5)
    assert damage_split(Split(torch.randn(5, 2), y), damage, 5).y.tolist() == label_map(damage, 5)


# What a key decides.


def test_kinds_are_drawn_as_often_as_they_say_and_all_at_the_places_that_they_can_damage() -> None:
    drawn = [draw_damage(key, 5) for key in range(4000)]
    counts = Counter(damage.kind for damage in drawn)
    assert sum(PROBABILITIES.values()) == pytest.approx(1)
    for kind, p in PROBABILITIES.items():
        assert abs(counts[kind] - 4000 * p) < 4 * math.sqrt(4000 * p * (1 - p)), kind
    for kind in (kind for kind in WEIGHTS if kind in PROBABILITIES):
        places = {segment for damage in drawn if damage.kind == kind for segment in damage.segments}
        outer = {0, 6} if kind in (DamageKind.NOISE, DamageKind.QUANTISED, DamageKind.TERNARY) else set()
        assert places == {1, 2, 3, 4, 5} | outer
    two = [len(damage.segments) == 2 for damage in drawn if damage.kind in WEIGHTS]
    assert sum(two) / len(two) == pytest.approx(TWO_SITES, abs=0.03)
    assert all(not damage.segments for damage in drawn if damage.kind not in WEIGHTS)


def test_further_kinds_are_drawn_where_they_are_asked_for_alone() -> None:
    drawn = {draw_damage(key, 5, probabilities=OTHER_PROBABILITIES).kind for key in range(200)}
    assert drawn == set(OTHER_PROBABILITIES) == set(DamageKind) - set(PROBABILITIES)


def test_one_site_is_one_segment_and_the_same_key_is_the_same_damage() -> None:
    for key in range(200):
        assert len(draw_damage(key, 5, two_sites=0.0).segments) <= 1
        assert draw_damage(key, 5) == draw_damage(key, 5)


def test_the_same_damage_changes_the_same_weights() -> None:
    for kind in WEIGHTS:
        one, other = (damaged(kind, (1,), 2.0).state_dict() for _ in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one)
