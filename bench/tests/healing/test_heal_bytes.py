"""Test the mixture `heal-bytes`: what a key stands for, what damage does, that only seeds train, and which rows they choose."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from esper.kasmina.blueprints import drawn_with
from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.store.files import VARIABLE
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tasks.hosts import Transformer, host_from
from esper.tolaria.engine import VectorizedEngine, play
from esper_bench.controllers.placement import DriftRise
from esper_bench.controllers.plans import FULL_HEAD, SPARSE_HEAD, SPARSE_ROWS, Plan
from esper_bench.healing import byte_hosts, byte_text
from esper_bench.healing.byte_damage import Half, half_of, symbol_map
from esper_bench.healing.byte_hosts import GROUP, HOST, LAYERS, cache_folder, train_group, trained_weights
from esper_bench.healing.byte_text import SYMBOLS, common, texts, windows
from esper_bench.healing.damage import DamageKind, low_rank
from esper_bench.healing.data import Subset
from esper_bench.healing.heal_bytes import (
    DEFAULTS,
    HOSTS,
    RANGES,
    SIZES,
    CorrectedTransformer,
    DamagedTransformer,
    describe,
    heal_bytes,
    heal_bytes_eora,
    heal_bytes_scratch,
    heal_bytes_taught,
    heal_bytes_unfrozen,
    split_of,
    trained_host,
)

SPLITS = (Subset.HOST, Subset.PROBE, Subset.VALIDATION, Subset.TEST)


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.setattr(byte_hosts, "train_group", lambda numbers: train_group(numbers, updates=2))
        byte_hosts._group.cache_clear()
        yield
    byte_hosts._group.cache_clear()


def first(kind: DamageKind, half: Half | None = None) -> int:
    """Find the first training key of a damage at one site, of a half of a layer where it is given."""
    for key in range(5000):
        damage = describe(key).damage
        places = [segment for segment in damage.segments if 0 < segment <= LAYERS]
        right = half is None or [half_of(damage, place) for place in places] == [half]
        if damage.kind == kind and len(damage.segments) <= 1 and right:
            return key
    raise AssertionError(kind)


# What a key stands for.


def test_parts_share_no_key_and_no_host_and_hosts_return_with_other_damage_and_text() -> None:
    numbers = [{describe(key).number for key in part[:HOSTS]} for part in RANGES.values()]
    assert [len(each) for each in numbers] == [HOSTS] * 3
    assert len(set().union(*numbers)) == 3 * HOSTS
    one, other = describe(3), describe(3 + HOSTS)
    assert one.number == other.number
    assert one.damage != other.damage
    assert not torch.equal(split_of(one, Subset.PROBE).y, split_of(other, Subset.PROBE).y)
    with pytest.raises(
        InputError, match=r"^key -1 is not an instance of 'heal-bytes'; the keys are training 0 to 1,048,575, "
    ):
        describe(-1)


def test_no_two_parts_share_a_file_and_every_window_is_text_of_its_part_with_the_symbols_behind() -> None:
    folder = byte_text.Path(byte_text.sysconfig.get_path("stdlib"))
    files = {
        name: content for name, content in byte_text.sources(folder).items() if not content.translate(None, SYMBOLS)
    }
    whole = {part: bytes(SYMBOLS[symbol] for symbol in texts()[part].tolist()) for part in (Subset.PROBE, Subset.TEST)}
    long = [content for content in files.values() if len(content) > 20_000]
    for content in long:
        assert sum(content in text for text in whole.values()) <= 1
    assert sum(map(len, texts().values())) == sum(map(len, files.values()))
    split = windows(Subset.TEST, 5, np.arange(20))
    assert torch.equal(split.x[:, 1:], split.y[:, :-1])
    for x, y in zip(split.x.tolist(), split.y.tolist(), strict=True):
        assert bytes(SYMBOLS[symbol] for symbol in [*x, y[-1]]) in whole[Subset.TEST]


@pytest.mark.parametrize(
    "build", [heal_bytes, heal_bytes_taught, heal_bytes_unfrozen, heal_bytes_scratch, heal_bytes_eora]
)
def test_the_tasks_have_the_same_text_and_hosts_that_are_frozen_or_not(build) -> None:
    task, instance, other = build(), build().instance(5), heal_bytes().instance(5)
    assert torch.equal(instance.train.x, other.train.x)
    splits = instance.train, instance.probe, instance.validation
    assert [len(split.y) for split in splits] == [SIZES[part] for part in SPLITS[:3]]
    assert len(task.test_split(5).y) == SIZES[Subset.TEST]
    frozen = {not parameter.requires_grad for parameter in instance.host().parameters()}
    assert frozen == {build in (heal_bytes, heal_bytes_taught, heal_bytes_eora)}
    assert (instance.intact is not None) == (build is heal_bytes_taught)


# Hosts.


def test_an_open_transformer_computes_what_a_transformer_does_and_can_be_named() -> None:
    with drawn_with(1):
        host = HOST()
    with drawn_with(1):
        closed = Transformer(HOST.vocabulary, HOST.width, HOST.layers, HOST.heads, HOST.length)()
    x = windows(Subset.TEST, 1, np.arange(3)).x
    torch.testing.assert_close(host(x), closed(x))
    assert sum(p.numel() for p in host.parameters()) == sum(p.numel() for p in closed.parameters()) == 54_592
    assert [slot.name for slot in host.slots] == ["embed", *(f"block{k}" for k in range(4)), "head"]
    assert host_from("open-transformer", {**vars(HOST)}) == HOST
    with pytest.raises(InputError, match="positions 'rotary' and frozen False"):
        host_from("open-transformer", {**vars(HOST), "positions": "rotary"})


def test_hosts_are_trained_once_alike_in_every_call_and_kept_with_a_checksum() -> None:
    weights = trained_weights(1)
    assert all(torch.equal(value, trained_weights(1)[name]) for name, value in weights.items())
    (path,) = cache_folder().glob("hosts-000000.safetensors")
    assert cache_folder().name == f"heal-bytes-2-{byte_text.digest()}"
    again = train_group(range(GROUP), updates=2)
    assert all(torch.equal(again[f"1.{name}"], value) for name, value in weights.items())
    assert {name for name, _ in HOST().named_parameters()} == set(weights)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    try:
        path.write_bytes(content)
        byte_hosts._group.cache_clear()
        with pytest.raises(InputError, match="is damaged: its checksum"):
            trained_weights(1)
    finally:
        content[-5] ^= 1
        path.write_bytes(content)


# Damage.


def changed(key: int) -> dict[str, torch.Tensor]:
    """Return the parameters that the damage of a key changes, as they are afterwards."""
    facts = describe(key)
    sound = dict(trained_host(facts.number).named_parameters())
    host = DamagedTransformer(facts.number, facts.damage, frozen=True)()
    return {name: p for name, p in host.named_parameters() if not torch.equal(p, sound[name])}


@pytest.mark.parametrize(
    ("half", "names"),
    [
        (Half.ATTENTION, {"attention.out.weight"}),
        (Half.HIDDEN, {"out.weight"}),
        (Half.BOTH, {"attention.out.weight", "out.weight"}),
    ],
)
def test_pruned_units_no_longer_reach_the_stream(half: Half, names: set[str]) -> None:
    key = first(DamageKind.PRUNED, half)
    damage, after = describe(key).damage, changed(key)
    assert set(after) == {f"segments.{damage.segments[0] + 1}.{name}" for name in names}
    for weight in after.values():
        assert int((weight == 0).all(0).sum()) == int(damage.severity * weight.shape[1])


def test_a_removed_layer_is_the_identity_and_a_removed_half_leaves_the_other() -> None:
    key = first(DamageKind.REMOVED, Half.BOTH)
    facts, x = describe(key), torch.randn(2, 5, HOST.width)
    host = DamagedTransformer(facts.number, facts.damage, frozen=True)()
    assert torch.equal(host.segments[facts.damage.segments[0] + 1](x), x)
    key = first(DamageKind.REMOVED, Half.ATTENTION)
    assert all(".attention.out." in name for name in changed(key))


def test_weights_of_one_half_become_of_low_rank_and_tied_weights_are_damaged_once() -> None:
    key = first(DamageKind.LOW_RANK, Half.HIDDEN)
    facts, after = describe(key), changed(key)
    sound = dict(trained_host(facts.number).named_parameters())
    assert sorted(name.split(".", 2)[2] for name in after) == ["inner.weight", "out.weight"]
    for name, weight in after.items():
        torch.testing.assert_close(weight, low_rank(sound[name], int(facts.damage.severity)))
    outer = (k for k in range(5000) if describe(k).damage.kind == DamageKind.TERNARY)
    places = {describe(k).damage.segments: k for k in outer}
    for segments in ((0,), (5,)):
        assert set(changed(places[segments])) == {"segments.1.tokens"}


def test_a_correction_in_closed_form_restores_maps_and_leaves_the_vectors_of_the_tokens() -> None:
    facts = describe(first(DamageKind.LOW_RANK))
    x = split_of(facts, Subset.HOST).x
    intact = trained_host(facts.number)(x).detach()
    hosts = [CorrectedTransformer(facts, cap)() for cap in (0.0, 0.06, 10.0)]
    away = [float((host(x).detach() - intact).square().mean()) for host in hosts]
    assert away[2] < 1e-4 * away[0]
    assert away[2] < away[1] < away[0]
    noisy = describe(next(key for key in range(5000) if describe(key).damage.segments == (0,)))
    assert torch.equal(
        CorrectedTransformer(noisy, 1.0)().segments[1].tokens,
        DamagedTransformer(noisy.number, noisy.damage, True)().segments[1].tokens,
    )


def test_mixed_damage_rounds_every_layer_and_undamaged_hosts_are_those_of_the_cache() -> None:
    mixed = changed(next(k for k in range(5000) if describe(k).damage.kind == DamageKind.MIXED))
    assert len(mixed) == 1 + 4 * 4
    for kind in (DamageKind.NONE, DamageKind.INPUT, DamageKind.LABELS):
        assert not changed(first(kind))


def test_damage_of_the_text_changes_symbols_of_the_input_or_of_the_output_alone() -> None:
    for kind in (DamageKind.INPUT, DamageKind.LABELS):
        facts = describe(first(kind))
        symbols = symbol_map(facts.damage, common())
        moved = [a for a, b in enumerate(symbols) if a != b]
        assert sorted(symbols) == list(range(len(SYMBOLS)))
        assert 2 <= len(moved) <= 16
        sound = windows(Subset.TEST, facts.key, np.arange(SIZES[Subset.TEST]))
        split = split_of(facts, Subset.TEST)
        pairs = ((split.x, sound.x), (split.y, sound.y))
        same, other = pairs if kind == DamageKind.LABELS else pairs[::-1]
        assert torch.equal(*same)
        assert other[0].tolist() == [[symbols[s] for s in row] for row in other[1].tolist()]


# Growing.


def grown(keys: list[int], entries: list[ScheduleEntry], **settings: object) -> VectorizedEngine:
    """Play two steps of a schedule on these keys, and return the engine."""
    task = heal_bytes().sealed()
    config = build_config(
        DEFAULTS,
        {"task": task.name, "envs": len(keys), "baselines": [], "gates": {"permissive": True}, "steps": 3, **settings},
    )
    engine = VectorizedEngine(task, config)
    engine.reset(np.array(keys))
    play(engine, Schedule(entries))
    return engine


def planted(plan: Plan, slot: str, at: int = 0) -> ScheduleEntry:
    return ScheduleEntry(at=at, op=Op.GERMINATE, slot=slot, blueprint=plan.here[0], keep=True)


def test_seeds_at_both_ends_train_choose_by_gradient_and_leave_the_frozen_host_bitwise_unchanged() -> None:
    keys = [first(DamageKind.INPUT), first(DamageKind.LABELS), first(DamageKind.PRUNED)]
    engine = grown(keys, [planted(SPARSE_ROWS, "embed"), planted(SPARSE_HEAD, "head")])
    assert (engine.state.seeds.stage[:, [0, -1]] != Stage.DORMANT).any(1).all()
    body = engine.population.body
    for row, key in enumerate(keys):
        host = heal_bytes().instance(key).host()
        before = {name: value.clone() for name, value in host.state_dict().items()}
        after = body.host.read(row, host).state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        rows = body.seed_module(engine.state.seeds, row, 0).delta.chosen
        assert rows.tolist() == slow_rows(key)


def slow_rows(key: int, count: int = 8) -> list[int]:
    """Find the rows of a dense table of changes to the vectors of tokens with the largest gradient, at every second position."""
    host, (x, y) = (
        DamagedTransformer(describe(key).number, describe(key).damage, frozen=True)(),
        heal_bytes().instance(key).train,
    )
    stream = host.segments[1](host.segments[0](x)).detach().requires_grad_()
    z = stream
    for segment in host.segments[2:]:
        z = segment(z)
    torch.nn.functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum").backward()
    table = torch.zeros(len(SYMBOLS), HOST.width)
    seen = slice(1, None, 2)
    assert stream.grad is not None
    table.index_add_(0, x[:, seen].flatten(), stream.grad[:, seen].flatten(0, 1))
    return sorted(table.norm(dim=1).argsort(descending=True)[:count].tolist())


def test_a_full_head_fits_the_cap_and_its_export_is_plain_torch() -> None:
    engine = grown([3, 4], [planted(FULL_HEAD, "head")])
    share = engine.population.table.added_params(engine.state.seeds) / engine.population.host_params
    assert ((share > 0.057) & (share < 0.06)).all()
    sparse = grown([3, 4], [planted(SPARSE_HEAD, "head")])
    for each in (engine, sparse):
        metric, _ = each.evaluate([heal_bytes().test_split(key) for key in (3, 4)])
        network, _ = each.export(1)
        x, y = heal_bytes().test_split(4)
        score = heal_bytes().objective.score(network.eval()(x)[None], y[None]).mean()
        assert float(score) == pytest.approx(metric[1], rel=1e-4)
        exported = torch.export.export(network, (x[:2],), strict=False).module()
        torch.testing.assert_close(exported(x[:2]), network(x[:2]))


def test_drift_rises_where_a_transformer_is_damaged_and_names_the_input_and_the_head() -> None:
    task = heal_bytes_taught().sealed()
    keys = [first(DamageKind.REMOVED, Half.BOTH), first(DamageKind.INPUT), first(DamageKind.LABELS)]
    config = build_config(
        task.defaults, {"task": task.name, "envs": 3, "baselines": [], "probe": {"sensors_every": 1000}}
    )
    view = VectorizedEngine(task, config).reset(np.array(keys))
    index = view.space.sensors.index("drift")
    site = describe(keys[0]).damage.segments[0]
    drift = view.measurements.sensors[..., index]
    assert (drift[0, :site] < 1e-6).all()  # a network alone rounds its norms otherwise than a stack of networks
    assert drift[0, site] > 0
    assert (drift[2] < 1e-6).all()
    picks = DriftRise().pick(view)
    assert [plan.name for plan in picks.plans][2] == "low rank"
    assert view.measurements.sensors[1, 0, index + 1] > 0.1  # the input of the embedding itself
