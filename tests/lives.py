"""Let a network of any kind live through a whole growth beside a plain copy, for tests: born, blended, kept, finished."""

import copy
import pickle
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from esper.kasmina.blueprints import BLUEPRINTS, drawn_with
from esper.kasmina.graft.find_sites import FoundSites, find_sites
from esper.kasmina.graft.grafted import graft, planted_at, ungraft
from esper.kasmina.graft.planted import Mode
from esper.kasmina.graft.recording import call, floats
from esper.kasmina.network.saving import attach, load_grown
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.lifecycle.vocabulary import Blend, Op, Stage
from esper.runs.live.growth import Growth
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry

SETTINGS = {"gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0}}
UNTOUCHED = 5
"""Steps without a seed, and then with one that incubates: straight through from step 1, in passes of its own from step 3."""
KINDS = {
    Kind.VECTOR: ("gated", "bypass-mlp"),
    Kind.MAP: ("squeeze-excite", "bypass-conv-3x3"),
    Kind.SEQUENCE: ("attention", "causal-conv"),
    Kind.VOLUME: ("squeeze-excite", "bypass-conv-3x3x3"),
}
"""Blueprints of the first and of the last site of a kind."""
FOLDS = {Kind.MAP: "bypass-conv-1x1", Kind.VOLUME: "bypass-conv-1x1x1"}
"""Blueprints of a linear seed at each position, where it is not 'bypass-linear'."""


class Host(NamedTuple):
    """Describes a network build(), an input and target batch(), and loss(output, target), one number or one for each example."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any], torch.Tensor]


class Life(NamedTuple):
    """Holds the sites found, the blueprints of the seeds kept, by site, and the sites whose seed was folded."""

    sites: FoundSites
    kept: dict[str, str]
    folded: list[str]


Planned = dict[str, tuple[str, Blend]]
"""Blueprint and blend of the seed at each site."""


def usual_plan(model: nn.Module, sites: FoundSites) -> Planned:
    """Choose what to plant where: at the first and last site, and a linear seed at an nn.Linear, or else in the middle."""
    names = list(sites)
    first, *_, last = names if len(names) > 1 else names * 2
    linear = [name for name in names if isinstance(model.get_submodule(sites[name].after), nn.Linear)]
    chosen = {}
    for name, blend in ((first, Blend.GATE), (last, Blend.MULTIPLY)):
        chosen[name] = KINDS[sites[name].stream.kind][name == last], blend
    middle = (linear or names)[len(linear or names) // 2]
    kind = sites[middle].stream.kind
    fitting = BLUEPRINTS[kind, FOLDS.get(kind, "bypass-linear")]
    chosen[middle] = fitting.name, Blend.ADD
    return chosen


def train(model, optimizer, host, number):
    """Do one step of a loop, and return its batch."""
    model.train()
    with drawn_with(100 + number):
        x, y = host.batch()
        host.loss(call(model, x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return x, y


def equal(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Return whether two outputs of any structure have the same numbers, up to a share of the largest."""
    mine, theirs = list(floats(one)), list(floats(other))
    return len(mine) == len(theirs) > 0 and all(
        a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1))
        for a, b in zip(mine, theirs, strict=True)
    )


def assert_untouched(model, plain, host):
    """Check that outputs in both modes, gradients and buffers of the host are those of the plain network, bit for bit."""
    mine = {name: value for name, value in model.state_dict().items() if ".esper." not in f".{name}"}
    theirs = plain.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    gradients = []
    for each in copy.deepcopy([model, plain]):
        with drawn_with(7):
            x, y = host.batch()
            evaluated = call(each.eval(), x)
            output = call(each.train(), x)
            host.loss(output, y).mean().backward()
        found = {name: p.grad for name, p in each.named_parameters() if ".esper." not in f".{name}"}
        gradients.append((evaluated, output, found))
    (evaluated, output, mine), (others, other, theirs) = gradients
    assert equal(evaluated, others)
    assert equal(output, other)
    for name, gradient in theirs.items():
        assert (gradient is None) == (mine[name] is None), name
        assert gradient is None or torch.equal(gradient, mine[name]), name


def live(
    host: Host,
    plan: Callable[[nn.Module, FoundSites], Planned] = usual_plan,
    span: tuple[str, str] | None = None,
    at: str = "auto",
) -> Life:
    """Let a network grow from birth to the end, and check what must hold on the way.

    span: the one pair of `FoundSites.spans` that is grafted, in place of all sites. at: as for `graft`.
    """
    with drawn_with(0):
        model, probe = host.build(), [host.batch(), host.batch()]
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (model, plain))
    sites = find_sites(model, probe[0][0])
    if span is None:
        sites = graft(model, at, example=probe[0][0]).sites
    else:
        graft(model, {span[1]: sites.spans[span].site})
    names = list(model.sites)
    planted = plan(model, sites)
    first, *_ = planted
    entries = [ScheduleEntry(at=UNTOUCHED + 1, op=op, slot=first) for op in (Op.ADVANCE, Op.FOSSILIZE)]
    for name, (blueprint, blend) in planted.items():
        chosen = {"blueprint": blueprint, "blend": blend, "tempo": 1, "target": 1.0}
        at = 1 if name == first else UNTOUCHED + 1
        entries.append(ScheduleEntry(at=at, op=Op.GERMINATE, slot=name, keep=name != first, **chosen))
    settings = {**SETTINGS, "blueprints": list(dict.fromkeys(blueprint for blueprint, _ in planted.values()))}
    growth = Growth(
        model,
        optimizer,
        probe=probe,
        loss=host.loss,
        controller=Schedule(entries),
        every=1,
        budget=1e4,
        budget_passes=None,
        settings=settings,
    )
    slots = [names.index(name) for name in planted]
    born = None
    for number in range(UNTOUCHED):
        if number in (1, 3):
            assert_untouched(model, plain, host)
        x, y = train(model, optimizer, host, number)
        train(plain, other, host, number)
        growth.step(*((x, y) if number >= 3 else ()))
        seed = planted_at(model, first)
        if seed is not None and born is None:
            born = copy.deepcopy(seed.state_dict())
    assert_untouched(model, plain, host)
    assert growth.engine.state.seeds.stage[0, slots[0]] == Stage.TRAINING
    assert not equal(born, seed.state_dict()), "it was trained"
    for number in range(UNTOUCHED, 40):
        growth.step(*train(model, optimizer, host, number))
        if (growth.engine.state.seeds.stage[0, slots] == Stage.FOSSILIZED).all():
            break
    kept = {name: blueprint for name, (blueprint, _) in planted.items() if float(planted_at(model, name).alpha) == 1}
    assert list(kept) == list(planted)
    return Life(sites, kept, finished(growth, host, kept))


def finished(growth: Growth, host: Host, kept: Mapping[str, str]) -> list[str]:
    """Finish a growth and check what is left; returns the sites whose seed became part of a layer."""
    model, optimizer = growth.model.eval(), growth.population.groups.optimizer
    with drawn_with(1), torch.no_grad():
        x, _ = host.batch()
        grown = call(model, x)
        alone = copy.deepcopy(model)
        for name in kept:
            planted_at(alone, name).mode = Mode.OFF
        assert not equal(call(alone, x), grown, 1e-5), "the seeds act"
        sites = dict(model.sites)
        with tempfile.TemporaryDirectory() as folder:
            growth.save_adapter(folder)
            attached = attach(ungraft(copy.deepcopy(model)), folder)
        assert equal(call(attached, x), grown)
        network = growth.finish()
        summary = growth.summary()
        for entries in (summary["plantings"], summary["keeps"]):
            assert {entry["site"]: entry["blueprint"] for entry in entries} == kept
        folded = [name for name in kept if not hasattr(network.get_submodule(sites[name].after), "esper")]
        arguments = ((), dict(x)) if isinstance(x, Mapping) else (x if isinstance(x, tuple) else (x,), {})
        exported = torch.export.export(network, *arguments).module()
        with tempfile.TemporaryDirectory() as folder:
            growth.save(folder)
            loaded = load_grown(folder, host.build()).eval()
        for each in (network, copy.deepcopy(network), pickle.loads(pickle.dumps(network)), exported, loaded):
            assert equal(call(each, x), grown, 1e-6)
    assert len(optimizer.param_groups) == 1 + len(kept) - len(folded)
    train(network, optimizer, host, 99)
    return folded


def row(name: str, life: Life) -> str:
    """Write the row of docs/sites.md for a network that lived through a growth."""
    orders = {stream: stream.order if stream.permutation else "" for stream in (s.stream for s in life.sites.values())}
    streams = ", ".join(
        dict.fromkeys(f"`{type(stream).__name__}`{f' {order}' * bool(order)}" for stream, order in orders.items())
    )
    seeds = ", ".join(f"{blueprint} at `{site}`" for site, blueprint in life.kept.items())
    folded = f"{len(life.folded)} of {len(life.kept)}"
    return f"| {name} | {len(life.sites)} | {streams} | {seeds} | {folded} |"
