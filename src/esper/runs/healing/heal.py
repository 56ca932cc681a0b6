"""Heal a network that was pruned, quantised or truncated, by seeds where it was hurt; compare that with the usual remedies."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from esper.kasmina.blueprints import count
from esper.kasmina.graft.find_sites import NoSiteError, find_sites
from esper.kasmina.graft.grafted import copied, free_sites, graft, undisturbed
from esper.kasmina.graft.grown import stream_of
from esper.kasmina.graft.recording import call, floats
from esper.kasmina.network.saving import adapter_files, attach_files
from esper.leyline.config.arguments import check_integer
from esper.leyline.data.duplicates import example_digests, repeated
from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.slots import Kind, Site, Stream
from esper.leyline.lifecycle.view import Space, View
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Stage
from esper.leyline.messages import DataWarning, InputError, in_words, kind_of, warn
from esper.runs.healing import training
from esper.runs.healing.healed import Healed, HealingSeed
from esper.runs.healing.training import Case, LowRankAdapter, TrainedNetwork
from esper.runs.live.growth import Growth
from esper.runs.verdict import few_examples
from esper.tamiyo.rules.base import Rule
from esper.tolaria.live.probe import Loss
from esper.tolaria.measure.sensors import participation_ratio

MENU: Mapping[Kind, tuple[str, ...]] = {
    Kind.VECTOR: ("bypass-linear", "bypass-mlp", "bypass-rank-4", "bypass-rank-2", "bypass-rank-1"),
    Kind.MAP: ("bypass-conv-3x3", "bypass-conv-1x1", "conv-light", "bottleneck", "squeeze-excite"),
    Kind.SEQUENCE: ("bypass-linear", "bypass-mlp", "low-rank", "mlp-small"),
    Kind.VOLUME: ("bypass-conv-3x3x3", "bypass-conv-1x1x1", "conv-light", "bottleneck", "squeeze-excite"),
}
"""Blueprints of each kind, the one to prefer first where the budget allows it."""
SEEDS = 6
"""Most seeds that are planted."""
RATES = {"adapters": (3e-3, 1e-2), "all weights": (3e-4, 1e-3)}
"""Learning rates that are tried; the loss on the probe chooses."""
UNFROZEN = ("all weights", "all weights, dead units drawn anew")
"""Remedies that keep no weight, with which the others are compared and which are not chosen."""
DECISIONS = 24
"""Decisions in a growth."""
PATIENCE = 4
"""Decisions for which a gate may refuse a seed before the seed is removed."""
CUT = 0.7
"""Where more than this share of the units within a segment is dead, the segment is taken to be damaged."""


def heal(
    model: nn.Module,
    data: Any,
    intact: nn.Module | None = None,
    budget: float = 0.06,
    *,
    loss: Loss | None = None,
    steps: int = 480,
    batch_size: int = 64,
    seed: int = 0,
    watch: Callable[[str], None] | None = None,
) -> Healed:
    """Repair a network that was pruned, quantised or truncated, by seeds in the places that were hurt.

    The model itself stays bit for bit what it is. Places are ranked by how much the stream drifts from that of the intact
    network, or without one by how many directions it loses; seeds are planted in that order until the budget is used, and kept
    where the gates of `esper.Growth` allow. The result is compared, on examples that were held back, with the network as it
    is, with LoRA at every layer and where the damage is, with training biases and scales, the last layer, or pruned weights that
    are drawn anew, with layers that are refitted to those of the intact network or taught what those return, and with training
    all weights, where units are dead also after they were drawn anew, each with the same updates and the better of two learning
    rates. The one with the least loss on the probe, of those that train or add no more than the budget, is the network that is
    returned.

    Args:
        model: the damaged module. It is not changed. Pruning by torch.nn.utils.prune is made permanent in the copies.
        data: (x, y), batches of them (a DataLoader), or the path of a .npz, .pt or .safetensors file with x and y. An x that is a
            tuple or a mapping is the arguments of the model; floating-point inputs get the dtype of its parameters. 20 examples
            or more.
        intact: the network before the damage, which has the same submodules at the places that are ranked.
        budget: most parameters that a remedy adds or trains with frozen weights / parameters of the model.
        loss: loss(output, target) of a batch; by default the cross-entropy for whole numbers, and else the squared error.
        steps: steps of the optimizer for each of the networks that are trained.
        batch_size: examples in a step.
        seed: seed of the split, the batches and the seeds' weights.
        watch: is told of each training as it begins, in a line of text.

    Raises:
        InputError: in one sentence, if the model has no place for a seed, a weight or a loss is not finite, the intact network is
            of another shape, the data are too few, or the budget is under the smallest seed
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {kind_of(model)}; give an nn.Module")
    enough = f"a whole number of {DECISIONS} or more, so that a growth has {DECISIONS} decisions"
    check_integer(steps, "steps", DECISIONS, enough)
    check_integer(batch_size, "batch_size", mend="a whole number of 1 or more")
    check_integer(seed, "seed", 0, f"a whole number of at least 0 and below {2**63}", below=2**63)
    check_weights(model, "the model")
    parts = training.split(training.examples_of(data).like(model), seed)
    probed, held = repeated([example_digests(*part) for part in parts])
    if probed or held:
        warn(
            f"{probed} of {len(parts.probe)} examples that choose rates and open gates, and {held} of {len(parts.held)} that are "
            "held back for the table, are equal in x and y to examples that train or choose, so the table also rewards what was "
            "learnt by heart; leave the copies out of data",
            DataWarning,
        )
    host, masks = _permanent(model)
    few = parts.train.at(slice(2)).x
    try:
        found = free_sites(host, find_sites(host, few))
    except NoSiteError as error:
        streams = "(B, C), (B, C, H, W) or (B, L, C)"
        raise InputError(f"{error.found}; give a network with submodules that return {streams} to others") from error
    # Damage is found by comparing the two ends of a segment, which a whole network is not.
    sites = {name: site for name, site in found.items() if site.around}
    case = training.settled(
        Case(host, masks, parts, loss or training.usual_loss, steps, min(batch_size, len(parts.train)), seed)
    )
    seen = parts.probe.at(slice(512)).x
    places = ranked(host, sites, seen, intact)

    def rates(name: str) -> Iterator[float]:
        for rate in RATES["all weights" if name in UNFROZEN else "adapters"]:
            if watch is not None:
                watch(f"training {name} at learning rate {rate:g}")
            yield rate

    grown = [_grown(case, sites, places, budget, rate) for rate in rates("the grown network")]
    best, planted, explained, adapter = min(grown, key=lambda each: each[0].probe)
    room = int(budget * count(host))
    corrected = None if intact is None else training.refit(case, intact, room)
    # What the damaged network shows by itself ranks places too where the intact one is at hand.
    falls = [sites[place.site].around for place in (places if intact is None else ranked(host, sites, seen, None))]
    within = {"uniform adapters": "", "adapters where damaged": (first := sites[places[0].site].around)}
    if falls[0] != first:
        within["adapters where participation falls"] = falls[0]
    remedies: dict[str, Callable[[float], TrainedNetwork | None]] = {
        **{name: partial(training.adapters, case, within=[path], size=room) for name, path in within.items()},
        "bias and scale": partial(training.bias_and_scale, case),
        "head": partial(training.head, case, size=room),
        "regrown": partial(training.regrown, case, size=room, places=falls),
    }
    if intact is not None:
        remedies["refit and trained"] = partial(further, case, corrected)
        for name, way in (("distilled", training.distilled), ("distilled and trained", training.distilled_and_trained)):
            remedies[name] = partial(training.adapters, case, within=[""], size=room, way=partial(way, intact))
    remedies |= {UNFROZEN[0]: partial(training.all_weights, case), UNFROZEN[1]: partial(training.revived, case)}
    networks = {"nothing": TrainedNetwork(host, training.probe_loss(host, case), 0, 0.0, 0.0), "grown": best}
    if corrected is not None:
        networks["refit"] = corrected
    for name, remedy in remedies.items():
        if there := [network for rate in rates(name) if (network := remedy(rate)) is not None]:
            networks[name] = min(there, key=lambda each: each.probe)
    within_budget = [name for name, each in networks.items() if each.learned <= room and name not in UNFROZEN]
    best_first = tuple(sorted(within_budget, key=lambda name: networks[name].probe))
    rows, losses = training.table(case, networks)
    remarks, y = few_examples({"what was held back for the table": len(parts.held)}), parts.held.y
    reasons = {
        "uniform adapters": "no layer has a weight that LoRA can be added to",
        "head": "no layer has a weight, or the last one has more parameters than the budget and none that LoRA can be added to",
        "regrown": "no weight is 0, or none of these can be trained within the budget: a single one needs a gradient, and a dead "
        "unit a living one in its layer",
    }
    if intact is not None:
        reasons["refit"] = (
            "no nn.Linear or nn.Conv2d differs from that of its name and shape in intact, or the budget is too small"
        )
        if falls[0] == first:
            reasons["adapters where participation falls"] = f"that is at {first}, where the stream drifts most too"
        reasons["distilled"] = "no layer has the name and the number of outputs of one in intact"
    remarks += [f"{name}: absent: {reason}" for name, reason in reasons.items() if name not in networks]
    if isinstance(y, Tensor) and not y.is_floating_point() and len(y.unique()) == 1:
        label = int(y.flatten()[0])
        remarks.append(f"every target that was held back is {label}: the table says nothing about other labels")
    modules, shown = {name: each.network for name, each in networks.items()}, parts.held.at(slice(2)).x
    return Healed(modules, best_first, rows, planted, (*explained, *remarks), adapter, losses, count(host), shown)


def further(case: Case, corrected: TrainedNetwork | None, rate: float) -> TrainedNetwork | None:
    """Return a copy of a network that `refit` corrected, whose corrections are trained; None if it corrected none."""
    if corrected is None:
        return None
    network = copy.deepcopy(corrected.network)
    for part in network.modules():
        if isinstance(part, LowRankAdapter):
            part.requires_grad_(True)
    return training.trained(network, case, rate)


def _grown(
    case: Case, sites: Mapping[str, Site], places: Sequence["Place"], budget: float, rate: float
) -> tuple[TrainedNetwork, tuple[HealingSeed, ...], list[str], Mapping[str, bytes]]:
    """Grow a copy of the host, and attach the seeds that were kept to another, so that none is folded into a damaged weight.

    Returns that network, the seeds, sentences about the others, and the files of the adapter.
    """
    begin = time.perf_counter()
    network = graft(copy.deepcopy(case.host), dict(sites))
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    controller = InOrder()
    kinds = {site.stream.kind for site in sites.values()}
    growth = Growth(
        network,
        optimizer,
        controller=controller,
        budget=budget,
        probe=case.batches(case.parts.probe),
        loss=case.loss,
        freeze="host",
        every=max(case.steps // DECISIONS, 1),
        steps=case.steps,
        seed=case.seed,
        settings={
            "blueprints": list(dict.fromkeys(name for kind in kinds for name in MENU[kind])),
            "lifecycle": {"max_seeds": SEEDS, "max_training_seeds": SEEDS},
        },
    )
    growth.overlap = None  # the examples of all parts were compared before
    controller.plantings = plan(growth.population.space, sites, places, budget * count(case.host))
    training.train(network, optimizer, case, growth.step, still=True)
    summary = growth.summary()
    healed = copy.deepcopy(case.host)
    adapter = dict[str, bytes]()
    if summary["keeps"]:
        adapter = adapter_files(
            network, growth.population.kept(growth.engine.state.seeds), [site.after for site in sites.values()]
        )
        healed = attach_files(healed, adapter, Path("adapter"))
    kept = {each["site"]: each["reason"] for each in summary["keeps"]}
    planted = tuple(each._replace(kept=kept[each.site]) for each in controller.plantings if each.site in kept)
    growth.finish()
    removed = [f"{each['blueprint']} at {each['site']} was removed: {each['reason']}" for each in summary["prunes"]]
    seconds = time.perf_counter() - begin
    size = sum(each.parameters for each in planted)
    result = TrainedNetwork(healed, training.probe_loss(healed, case), size, rate, seconds)
    return result, planted, [*removed, *growth.summary()["explanations"]], adapter


class InOrder(Rule):
    """Plants each of `plantings` once, as soon as it may; keeps it as soon as its gate allows, and else removes it."""

    def __init__(self) -> None:
        self.plantings: list[HealingSeed] = []
        self.planted = 0
        self._why: str | None = None

    def act(self, view: View) -> Actions:
        """Decide FOSSILIZE before ADVANCE before PRUNE before GERMINATE, at the first slot where it is valid."""
        self._why = None
        seeds, valid = view.seeds, view.masks.slot[0]
        stuck = (seeds.stage == Stage.TRAINING) | ((seeds.stage == Stage.HOLDING) & ~seeds.doomed)
        old = stuck[0] & (seeds.age[0] > PATIENCE)
        choices = defaults(view.space)
        late = (Op.PRUNE, old, f"it did not pass its gate in {PATIENCE} decisions")
        for op, where, why in ((Op.FOSSILIZE, True, "it passed its gates"), (Op.ADVANCE, True, None), late):
            able = valid[op] & where
            if able.any():
                self._why = why
                return complete(view.masks, np.array([op]), np.array([able.argmax()]), choices)
        if self.planted < len(self.plantings):
            seed, space = self.plantings[self.planted], view.space
            at, kind = space.slots.index(seed.site), [entry.name for entry in space.blueprints].index(seed.blueprint)
            if valid[Op.GERMINATE, at] and view.masks.blueprint[0, at, kind]:
                self.planted, self._why = self.planted + 1, seed.why
                return complete(view.masks, np.array([Op.GERMINATE]), np.array([at]), {**choices, Head.BLUEPRINT: kind})
        return Actions.wait(1)

    def reasons(self) -> list[str | None]:
        """Return why the last decision planted, kept or removed a seed; None if it did none of these."""
        return [self._why]

    def explain(self) -> list[str]:
        """Return what was not planted."""
        left = self.plantings[self.planted :]
        return [f"{seed.blueprint} was not planted at {seed.site}: no decision was left" for seed in left]


def plan(space: Space, sites: Mapping[str, Site], places: Sequence["Place"], room: float) -> list[HealingSeed]:
    """Return what to plant, in the order of the places: at each, the first of `MENU` that two thirds of the room can take.

    room: parameters that all seeds may have. At least one seed is planned if any fits.
    """
    names, left = [entry.name for entry in space.blueprints], room
    found: list[HealingSeed] = []
    for place in places:
        slot = space.slots.index(place.site)
        costs = {
            name: int(space.cost[0, slot, names.index(name)])
            for name in MENU[sites[place.site].stream.kind]
            if name in names and space.fits[slot, names.index(name)]
        }
        most = min(left, room * 2 / 3)
        chosen = next((name for name, cost in costs.items() if cost <= most), None)
        if chosen is None and not found:
            chosen = min((name for name, cost in costs.items() if cost <= room), key=costs.__getitem__, default=None)
        if chosen is not None and len(found) < SEEDS:
            found.append(HealingSeed(place.site, chosen, costs[chosen], place.why))
            left -= costs[chosen]
    return found


def _permanent(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy whose pruning is part of its weights, and the masks, which an exported graph multiplies by itself.

    There the masked weight takes the place of the other, and the mask is 1.
    """
    # What tracing noted in graphs of torch.fx holds tensors without numbers, which copy.deepcopy refuses.
    graphs = [graph for part in model.modules() if isinstance(graph := vars(part).get("graph"), torch.fx.Graph)]
    notes = [(node, node.meta) for graph in graphs for node in graph.nodes]
    try:
        for node, _ in notes:
            node.meta = {}
        with in_words("the model cannot be copied", "give a module that copy.deepcopy takes"):
            host = copied(model)
    finally:
        for node, meta in notes:
            node.meta = meta
    masks = {}
    for path, part in host.named_modules():
        for name in [
            each.removesuffix("_mask")
            for each, _ in part.named_buffers(recurse=False)
            if each.endswith("_mask") and hasattr(part, each.removesuffix("_mask") + "_orig")
        ]:
            mask = part.get_buffer(f"{name}_mask")
            hooked = any(getattr(hook, "_tensor_name", None) == name for hook in part._forward_pre_hooks.values())
            held = name if hooked else f"{name}_orig"
            masks[f"{path}.{held}" if path else held] = mask.clone()
            if hooked:
                prune.remove(part, name)
            else:
                with torch.no_grad():
                    part.get_parameter(held).mul_(mask)
                    mask.fill_(1)
    return host, masks


# Where the network was hurt.


class Place(NamedTuple):
    """Names a site, and says what its stream lost there."""

    site: str
    why: str


def ranked(network: nn.Module, sites: Mapping[str, Site], x: Any, intact: nn.Module | None) -> list[Place]:
    """Rank sites by the rise of the drift behind each segment, or without an intact network by dead units and lost directions.

    Segments with more than CUT dead units come first. Then come those behind which the share of directions in use falls most, as
    a ratio; a segment that changes the width of its stream comes last, since its shares cannot be compared. On damaged networks
    that were held back, this rule regains 85 % of the lost accuracy, and differences of shares 75 % (the page "Where esper heal
    should plant" of esper-bench).

    x: inputs (N, ...). The drift of a stream h is |h - h0| / |h0|, with h0 in the intact network. Raises InputError if the intact
    network has other submodules or streams of another shape at the sites.
    """
    own, ranks = _recorded(network, sites, x), dict[Place, tuple[float, ...]]()
    if intact is None:
        for name, (before, here, inner) in own.items():
            kind = type(sites[name].stream)
            there = in_front = directions(here, kind)
            comparable = before is not None and before.dim() == here.dim()
            if before is not None and comparable:
                in_front = directions(before, kind)
                comparable = kind.positions(before[None]).shape[-1] == kind.positions(here[None]).shape[-1]
            dead = max((dead_units(z) for z in inner), default=0.0)
            why = f"the stream uses {there:.0%} of its directions there, and {in_front:.0%} in front"
            if dead > CUT:
                why = f"only {1 - dead:.0%} of the units in front of it are active"
            rank = (-dead if dead > CUT else 0.0, not comparable, there / max(in_front, 1e-9))
            ranks[Place(name, why)] = rank
        return sorted(ranks, key=ranks.__getitem__)
    if not isinstance(intact, nn.Module):
        raise InputError(f"intact is {kind_of(intact)}; give an nn.Module, or leave it out")
    check_weights(intact, "intact")
    other, mend = "intact is of another shape", "give the network before the damage"
    paths = dict(intact.named_modules())
    for path in (path for site in sites.values() for path in (site.after, site.around)):
        if path not in paths:
            raise InputError(f"{other}: it has no submodule {path!r}; {mend}, or leave it out")
    with in_words("intact cannot run on the data", mend):
        sound = _recorded(intact, sites, x)
    for name, (before, here, _) in own.items():
        sound_before, sound_here, _ = sound.get(name, (None, None, []))
        if sound_here is None or sound_here.shape != here.shape:
            theirs = None if sound_here is None else tuple(sound_here.shape[1:])
            raise InputError(
                f"{other}: at {name} its stream is {theirs}, and that of the model is {tuple(here.shape[1:])}; {mend}, or leave "
                "it out"
            )
        there, in_front = drift(here, sound_here), 0.0
        if before is not None and sound_before is not None and before.shape == sound_before.shape:
            in_front = drift(before, sound_before)
        why = f"the stream drifts {there:.0%} from the intact network's there, and {in_front:.0%} in front"
        ranks[Place(name, why)] = (in_front - there,)
    return sorted(ranks, key=ranks.__getitem__)


def check_weights(network: nn.Module, name: str) -> None:
    """Raise InputError if a parameter holds NaN. Infinite ones may be masks."""
    for path, parameter in network.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and parameter.isnan().any():
            raise InputError(f"{path} of {name} holds NaN; give a network whose weights are numbers")


@torch.no_grad()
def drift(h: Tensor, intact: Tensor) -> float:
    """Compute |h - h0| / |h0| of features of one shape."""
    return float(torch.linalg.vector_norm(h - intact) / torch.linalg.vector_norm(intact).clamp_min(1e-30))


@torch.no_grad()
def directions(h: Tensor, kind: type[Stream]) -> float:
    """Return the participation ratio of a stream (N, ...), in [0, 1] (`tolaria/measure/sensors.py::participation_ratio`)."""
    return float(participation_ratio(kind.positions(h[None]))[0])


@torch.no_grad()
def dead_units(z: Tensor) -> float:
    """Return the share of units that are above 0 on under 1 % of examples and positions; z (N, ..., units)."""
    return float(((z.flatten(0, -2) > 0).double().mean(0) < 0.01).double().mean())


@torch.no_grad()
def _recorded(
    network: nn.Module, sites: Mapping[str, Site], x: Any
) -> dict[str, tuple[Tensor | None, Tensor, list[Tensor]]]:
    """Record for each site what its segment reads and writes, and what its inner layers compute before activation.

    These are of the first call of each, in the order in which the network runs them.
    """
    before: dict[str, Tensor | None] = {}
    here: dict[str, Tensor] = {}
    inner: dict[str, list[Tensor]] = {}

    def entering(name: str, _: nn.Module, arguments: Any, named: Any) -> None:
        given = next(floats((arguments, named)), None)
        before.setdefault(name, None if given is None else given.clone().float())

    def leaving(name: str, _: nn.Module, given: Any, output: Any) -> None:
        if isinstance(stream := stream_of(output), Tensor):
            here.setdefault(name, stream.clone())

    def computed(layer: nn.Module, given: Any, output: Tensor) -> None:
        units = output if isinstance(layer, nn.Linear) else output.movedim(1, -1)
        for name in before.keys() - here.keys():
            inner.setdefault(name, []).append(units.float())

    with ExitStack() as hooks, undisturbed(network):
        for part in network.modules():
            if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                hooks.enter_context(part.register_forward_hook(computed))
        for name, site in sites.items():
            around, after = network.get_submodule(site.around), network.get_submodule(site.after)
            hooks.enter_context(around.register_forward_pre_hook(partial(entering, name), with_kwargs=True))
            hooks.enter_context(after.register_forward_hook(partial(leaving, name)))
        call(network, x)
    # The last layer within a segment computes the stream itself.
    found = {}
    for name, h in here.items():
        stream, given = sites[name].stream, before.get(name)
        if given is not None and given.dim() == h.dim():
            given = stream.arranged(given)
        found[name] = given, stream.arranged(h.float()), inner.get(name, [])[:-1]
    return found
