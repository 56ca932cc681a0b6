"""Test the mixture `heal-images`: convolutional hosts, what damage does to them, and that only seeds train."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import quick_healing as healing
from esper.cli import app
from esper.kasmina.blueprints import drawn_with, get_blueprint
from esper.kasmina.host import SegmentedHost, check_host
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Split
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.lifecycle.view import sensor
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.tamiyo.policy.packages import inner_slots
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tasks.hosts import host_from
from esper.tolaria.engine import VectorizedEngine, play
from esper_bench.controllers.placement import DriftRise
from esper_bench.controllers.plans import MIXED
from esper_bench.healing.bridged import Bridged, BridgedCNN
from esper_bench.healing.damage import Damage, DamageKind, damage_split, input_group, prune_units
from esper_bench.healing.data import HEALING, SIZES, Subset
from esper_bench.healing.heal import (
    MENU,
    RANGES,
    CorrectedHost,
    DamagedHost,
    describe,
    heal,
    heal_eora,
    heal_scratch,
    heal_taught,
    heal_unfrozen,
    split_of,
    trained_host,
)
from esper_bench.healing.hosts import cache_folder, trained_weights
from esper_bench.healing.images import IMAGES
from quick_healing import quick_hosts

BLOCKS = 3
PLAIN = BridgedCNN((1, 8, 8), 5, (6, 4, 6), 4, (False,) * BLOCKS)
RESIDUAL = replace(PLAIN, skips=(True,) * BLOCKS)
PARTS = [RANGES["training"], RANGES["validation"], RANGES["heldout"]]


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


def damaged(kind: DamageKind, segments: tuple[int, ...], severity: float, like: BridgedCNN = PLAIN) -> SegmentedHost:
    return healing.damaged(like, kind, segments, severity)


def sound(like: BridgedCNN = PLAIN) -> SegmentedHost:
    return damaged(DamageKind.NONE, (), 0.0, like)


def kernels(segment: nn.Module) -> list[Tensor]:
    """List the weights of the convolutions of a segment, (outputs, inputs) each."""
    return [part.weight.detach().flatten(1) for part in segment.modules() if isinstance(part, nn.Conv2d)]


def first(kind: DamageKind, plain: bool = True) -> int:
    """Find the first training key of a damage at one site."""
    found = (describe(key, IMAGES) for key in range(5000))
    return next(f.key for f in found if f.damage.kind == kind and len(f.damage.segments) <= 1 and f.plain == plain)


# Hosts.


@pytest.mark.parametrize("like", [PLAIN, RESIDUAL])
def test_a_bridged_cnn_keeps_one_resolution_and_is_rebuilt_by_name(like: BridgedCNN) -> None:
    host, x = like(), torch.randn(6, 1, 8, 8)
    check_host(host, x, 4)
    assert [slot.name for slot in host.slots] == ["embed", "block0", "block1", "block2"]
    assert {tuple(segment.shape[1:]) for segment in streams(host, x)} == {(5, 4, 4)}
    again = host_from("bridged-cnn", {**vars(like), "skips": list(like.skips)})()
    again.load_state_dict(host.state_dict())
    assert torch.equal(again(x), host(x))
    assert len(list(like.plain(2000)().parameters())) == len(list(host.parameters()))


def streams(host: SegmentedHost, x: Tensor) -> list[Tensor]:
    found = []
    for segment in host.segments[:-1]:
        found.append(x := segment(x))
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skips": (True,)}, "skips of a bridged CNN host is (True,); give True or False for each of its 3 blocks"),
        ({"frozen": 1}, "frozen of a bridged CNN host is 1; give True or False"),
        ({"hidden": ()}, "hidden of a bridged CNN host is (); give at least one block"),
        (
            {"inputs": (1, 1, 8)},
            "inputs of a bridged CNN host is (1, 1, 8); give channels, height and width of an image",
        ),
    ],
)
def test_a_bridged_cnn_refuses_what_does_not_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as refused:
        replace(PLAIN, **change)  # type: ignore[arg-type]
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("name", MENU)
def test_a_seed_of_the_menu_is_that_for_vectors_at_each_position(name: str) -> None:
    for_maps, for_vectors = (get_blueprint(name, kind) for kind in (Kind.MAP, Kind.VECTOR))
    with drawn_with(1):
        seed = for_maps.build(5, 5)
        for parameter in seed.parameters():
            nn.init.normal_(parameter)
    vector = for_vectors.build(5, 5)
    vector.load_state_dict({key.removeprefix("seed."): value for key, value in seed.state_dict().items()})
    u = torch.randn(3, 5, 4, 2)
    by_position = torch.stack([vector(u[:, :, i, j]) for i in range(4) for j in range(2)], -1).view(3, 5, 4, 2)
    torch.testing.assert_close(seed(u), by_position)
    assert for_maps.parameters(5, 5) == for_vectors.parameters(5, 5)


# Damage.


@pytest.mark.parametrize("like", [PLAIN, RESIDUAL])
@pytest.mark.parametrize("segment", [1, 2, 3])
def test_a_network_with_a_removed_block_is_the_network_without_it(like: BridgedCNN, segment: int) -> None:
    host, whole, x = damaged(DamageKind.REMOVED, (segment,), 0.0, like), sound(like), torch.randn(7, 1, 8, 8)
    without = nn.Sequential(*(part for index, part in enumerate(whole.segments) if index != segment))
    assert torch.equal(host(x), without(x))
    assert not torch.allclose(host(x), whole(x))


def test_pruned_channels_do_not_contribute_and_the_others_are_unchanged() -> None:
    block = sound().segments[1]
    assert isinstance(block, Bridged)
    one, last = block[0], block[2]
    assert isinstance(one, nn.Conv2d)
    assert isinstance(last, nn.Conv2d)
    kept, x = [0, 2, 3, 5], torch.randn(7, 5, 4, 4)
    with torch.no_grad():
        inner = nn.functional.conv2d(x, one.weight[kept], one.bias[kept], padding=1).relu()  # type: ignore[index]
        smaller = nn.functional.conv2d(inner, last.weight[:, kept], last.bias)
    prune_units(block, [1, 4])
    torch.testing.assert_close(block(x), smaller)


@pytest.mark.parametrize(("severity", "pruned"), [(0.8, 4), (1.0, 6), (0.01, 1)])
def test_the_share_of_pruned_channels_is_the_severity(severity: float, pruned: int) -> None:
    weight = kernels(damaged(DamageKind.PRUNED, (1,), severity).segments[1])[0]
    assert int((weight == 0).all(1).sum()) == pruned


@pytest.mark.parametrize("rank", [1, 2])
def test_kernels_of_a_low_rank_are_of_that_rank(rank: int) -> None:
    for weight in kernels(damaged(DamageKind.LOW_RANK, (2,), float(rank)).segments[2]):
        assert torch.linalg.matrix_rank(weight, atol=1e-5) == rank


def test_kernels_are_rounded_for_each_output_channel() -> None:
    for weight in kernels(damaged(DamageKind.QUANTISED, (2,), 3.0).segments[2]):
        steps = weight / (weight.abs().amax(1, keepdim=True) / 3)
        torch.testing.assert_close(steps, steps.round())
    for weight in kernels(damaged(DamageKind.TERNARY, (2,), 0.0).segments[2]):
        assert all(len(row.abs().unique()) <= 2 for row in weight)


@pytest.mark.parametrize("kind", [DamageKind.PRUNED, DamageKind.LOW_RANK, DamageKind.NOISE, DamageKind.MIXED])
def test_a_damage_changes_the_segments_that_it_names_and_no_other(kind: DamageKind) -> None:
    host, whole = damaged(kind, (1, 3), 3.0 if kind == DamageKind.MIXED else 1.0), sound()
    changed = {
        index
        for index, (one, other) in enumerate(zip(host.segments, whole.segments, strict=True))
        if any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    }
    assert changed == (set(range(BLOCKS + 2)) if kind == DamageKind.MIXED else {1, 3})


def test_lines_of_an_image_are_damaged_in_every_example() -> None:
    damage, split = Damage(DamageKind.INPUT, (), -1.0, 11), Split(torch.randn(20, 1, 8, 8), torch.zeros(20).long())
    x, lines = damage_split(split, damage, 4).x, input_group(damage, 8)
    assert isinstance(x, Tensor)
    assert isinstance(split.x, Tensor)
    others = sorted(set(range(8)) - set(lines))
    assert torch.equal(x[:, :, lines], -split.x[:, :, lines])
    assert torch.equal(x[:, :, others], split.x[:, :, others])


# What a key stands for.


def test_parts_share_no_key_and_no_host() -> None:
    numbers = [{describe(key, IMAGES).number for key in part[: IMAGES.count]} for part in PARTS]
    assert [len(each) for each in numbers] == [IMAGES.count] * 3
    assert len(set().union(*numbers)) == 3 * IMAGES.count


def test_the_examples_that_train_and_heal_a_host_are_in_no_other_split() -> None:
    for kind in (DamageKind.PRUNED, DamageKind.LABELS):
        facts = describe(first(kind), IMAGES)
        instance, test = heal(IMAGES).instance(facts.key), heal(IMAGES).test_split(facts.key)
        assert test is not None
        own = IMAGES.examples(facts.problem, Subset.HOST, None).x
        assert isinstance(own, Tensor)
        assert torch.equal(instance.train.x, own[:HEALING])  # type: ignore[arg-type]
        seen = {tuple(row.flatten().tolist()) for row in own}
        held = (instance.probe, instance.validation, test)
        assert [len(split.y) for split in held] == [
            SIZES[part] for part in (Subset.PROBE, Subset.VALIDATION, Subset.TEST)
        ]
        for split in held:
            assert not seen & {tuple(row.flatten().tolist()) for row in split.x}


def test_a_key_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match=r"^key -1 is not an instance of 'heal-images'; the keys are training 0 to "):
        describe(-1, IMAGES)


def test_the_reference_tasks_have_the_same_data_and_hosts_that_train() -> None:
    frozen, unfrozen, scratch = (build(IMAGES).instance(5) for build in (heal, heal_unfrozen, heal_scratch))
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(frozen.train.x, unfrozen.train.x)  # type: ignore[arg-type]
    assert torch.equal(frozen.host()(x), unfrozen.host()(x))
    assert not any(parameter.requires_grad for parameter in frozen.host().parameters())
    for instance in (unfrozen, scratch):
        assert all(parameter.requires_grad for parameter in instance.host().parameters())


def test_a_correction_in_closed_form_restores_pruned_channels() -> None:
    facts = describe(first(DamageKind.PRUNED), IMAGES)
    x = split_of(facts, Subset.HOST).x
    with torch.no_grad():
        intact = trained_host(facts.number, of=IMAGES)(x)
        away = [float((CorrectedHost(facts, cap)()(x) - intact).square().mean()) for cap in (0.0, 0.06, 10.0)]
    assert away[2] < 1e-6 < away[1] < away[0]
    assert torch.equal(heal_eora(IMAGES).instance(facts.key).train.x, x)  # type: ignore[arg-type]


def test_a_removed_block_is_named_as_a_skip_so_that_a_saved_network_can_be_rebuilt() -> None:
    facts = describe(first(DamageKind.REMOVED), IMAGES)
    factory = DamagedHost(facts.number, facts.damage, True, IMAGES)
    host, rebuilt, x = factory(), factory.architecture(), torch.randn(4, 1, 8, 8)
    rebuilt.load_state_dict(host.state_dict())
    assert torch.equal(host(x), rebuilt(x))


def test_a_damaged_file_of_hosts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_weights(0, IMAGES)
    name = "hosts-000000.safetensors"
    content = bytearray((cache_folder(IMAGES) / name).read_bytes())
    content[-5] ^= 1
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))
    path = cache_folder(IMAGES) / name
    assert path.parent == tmp_path / "heal-images-1"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged: its checksum is not that of its content; delete it"):
        trained_weights(0, IMAGES)


# Growing.


def engine_of(keys: list[int], taught: bool = False) -> VectorizedEngine:
    task = (heal_taught if taught else heal)(IMAGES).sealed()
    settings = {"task": task.name, "envs": len(keys), "baselines": [], "gates": {"permissive": True}, "steps": 8}
    engine = VectorizedEngine(task, build_config(task.defaults, settings, {"probe": {"sensors_every": 1000}}))
    engine.reset(np.array(keys), episode=0)
    return engine


def test_a_grown_episode_leaves_every_frozen_host_bitwise_unchanged() -> None:
    keys = [first(kind) for kind in (DamageKind.PRUNED, DamageKind.REMOVED, DamageKind.INPUT)]
    engine = engine_of(keys)
    entries = [
        ScheduleEntry(at=0, op=Op.GERMINATE, slot=s, blueprint="bypass-rank-1", keep=True) for s in ("embed", "block3")
    ]
    play(engine, Schedule(entries))
    assert (engine.state.seeds.stage == Stage.FOSSILIZED).sum(1).tolist() == [2, 2, 2]
    body = engine.population.body  # type: ignore[attr-defined]
    for row, key in enumerate(keys):
        host = heal(IMAGES).instance(key).host()
        before = {name: value.clone() for name, value in host.state_dict().items()}
        after = body.host.read(row, heal(IMAGES).instance(key).host()).state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_drift_rises_at_the_damaged_block_and_the_rule_plants_there() -> None:
    facts = describe(first(DamageKind.PRUNED), IMAGES)
    engine = engine_of([facts.key], taught=True)
    view = engine.view()
    (segment,) = facts.damage.segments
    drift = sensor(view, "drift")[0]
    assert (drift[:segment] < 1e-5).all()  # slot s lies behind segment s
    assert drift[segment] > 0.3
    assert inner_slots(view.space)[0].tolist() == [False] + [True] * 5
    picks = DriftRise().pick(view)
    assert picks.plans[0] == MIXED
    assert picks.slot.tolist() == [segment]
    assert np.isnan(sensor(engine_of([facts.key]).view(), "drift")).all()


def test_the_intact_network_of_an_instance_is_its_host_before_the_damage() -> None:
    key = first(DamageKind.LOW_RANK)
    instance = heal_taught(IMAGES).instance(key)
    assert instance.intact is not None
    host, x = instance.intact()
    assert isinstance(x, Tensor)
    assert torch.equal(host(x), trained_host(describe(key, IMAGES).number, of=IMAGES)(x))
    assert not torch.allclose(host(x), instance.host()(x))


def test_the_command_grows_it_with_a_rule(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["grow", "heal-images", "--envs", "4", "--controller", "uniform", "--steps", "2", "--run", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--set", "baselines=[]", "--set", "report=false"])
    assert result.exit_code == 0, result.output
    assert (out / "summary.json").exists()
