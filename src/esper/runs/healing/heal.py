"""Healing: seeds in a network that was pruned, quantised or truncated, where it was hurt, compared with the usual remedies."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from esper.kasmina.graft.find_sites import NoSiteError, find_sites
from esper.kasmina.graft.grafted import free_sites, graft
from esper.kasmina.network.saving import adapter_files, attach_files
from esper.leyline.data.duplicates import example_digests, repeated
from esper.leyline.errors import DataWarning, InputError, typed_line, warn
from esper.leyline.lifecycle.actions import Actions, Head, Op
from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.slots import Site
from esper.leyline.lifecycle.stages import Stage
from esper.leyline.lifecycle.streams import Kind
from esper.leyline.lifecycle.view import Space, View
from esper.runs.explanations import few_examples
from esper.runs.healing.healed import Healed, HealingSeed
from esper.runs.healing.places import Place, check_weights, ranked
from esper.runs.healing.training import (
    Case,
    TrainedNetwork,
    all_weights,
    examples_of,
    losses_of,
    rank,
    settled,
    split,
    table,
    train,
    uniform_adapters,
    usual_loss,
)
from esper.runs.live.growth import Growth
from esper.tamiyo.rules.baselines import Rule
from esper.tolaria.live.probe import Loss

MENU: Mapping[Kind, tuple[str, ...]] = {
    Kind.VECTOR: ("bypass-linear", "bypass-mlp", "bypass-rank-4", "bypass-rank-2", "bypass-rank-1"),
    Kind.MAP: ("bypass-conv-3x3", "bypass-conv-1x1", "conv-light", "bottleneck", "squeeze-excite"),
    Kind.SEQUENCE: ("bypass-linear", "bypass-mlp", "low-rank", "mlp-small"),
}
"""Blueprints of each kind, the one to prefer first where the budget allows it."""
SEEDS = 6
"""Most seeds that are planted."""
RATES = {"adapters": (3e-3, 1e-2), "all weights": (3e-4, 1e-3)}
"""Learning rates that are tried; the loss on the probe chooses."""
DECISIONS = 24
"""Decisions in a growth."""


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

    The network itself stays bit for bit what it is. Places are ranked by how much the stream drifts from that of the intact
    network, or without one by how many directions it loses; seeds are planted in that order until the budget is used, and kept
    where the gates of `esper.Growth` allow. The result is compared, on examples that were held back, with the network as it
    is, with LoRA of the same size at every layer, and with training all weights, each with the same updates and the better of
    two learning rates.

    Args:
        model: the damaged module. It is not changed. Pruning by torch.nn.utils.prune is made permanent in the copies.
        data: (x, y), batches of them (a DataLoader), or the path of a .npz, .pt or .safetensors file with x and y. An x that is a
            tuple or a mapping is the arguments of the model; floating-point inputs get the dtype of its parameters. 20 examples
            or more.
        intact: the network before the damage, which has the same submodules at the places that are ranked.
        budget: most parameters of all seeds / parameters of the model.
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
        raise InputError(f"model is a {type(model).__name__}; give an nn.Module")
    for name, value, least in (("steps", steps, DECISIONS), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            why = f", so that a growth has {DECISIONS} decisions" if name == "steps" else ""
            raise InputError(f"{name} is {value!r}; give a whole number of {least} or more{why}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"seed is {seed!r}; give a whole number of at least 0 and below {2**63}")
    check_weights(model, "the model")
    parts = split(examples_of(data).like(model), seed)
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
    case = settled(Case(host, masks, parts, loss or usual_loss, steps, min(batch_size, len(parts.train)), seed))
    places = ranked(host, sites, parts.probe.at(slice(512)).x, intact)

    def rates(name: str, kind: str) -> Iterator[float]:
        for rate in RATES[kind]:
            if watch is not None:
                watch(f"training {name} at learning rate {rate:g}")
            yield rate

    grown = [_grown(case, sites, places, budget, rate) for rate in rates("the grown network", "adapters")]
    best, planted, explained, adapter = min(grown, key=lambda each: rank(each[0]))
    size = best.learned or int(budget * _size(host))
    adapted = [
        uniform_adapters(case, rate, list(sites.values()), size) for rate in rates("uniform adapters", "adapters")
    ]
    whole = [all_weights(case, rate) for rate in rates("all weights", "all weights")]
    rivals = {"uniform adapters": [each for each in adapted if each is not None], "all weights": whole}
    networks = {"nothing": TrainedNetwork(host, 0.0, 0, 0.0, 0.0), "grown": best}
    networks |= {name: min(trained, key=rank) for name, trained in rivals.items() if trained}
    rows, losses = table(case, networks)
    remarks, y = few_examples({"what was held back for the table": len(parts.held)}), parts.held.y
    if "uniform adapters" not in networks:
        remarks.append("uniform adapters: absent: no layer at or in a site has a weight that LoRA can be added to")
    if isinstance(y, Tensor) and not y.is_floating_point() and len(y.unique()) == 1:
        label = int(y.flatten()[0])
        remarks.append(f"every target that was held back is {label}: the table says nothing about other labels")
    reasons, shown = (*explained, *remarks), parts.held.at(slice(2)).x
    return Healed(best.network, rows, planted, reasons, adapter, losses, _size(host), shown)


def _grown(
    case: Case, sites: Mapping[str, Site], places: list[Place], budget: float, rate: float
) -> tuple[TrainedNetwork, tuple[HealingSeed, ...], list[str], Mapping[str, bytes]]:
    """Grow a copy of the host, and attach the seeds that were kept to another, so that none is folded into a damaged weight.

    Returns that network, the seeds, sentences about the others, and the files of the adapter.
    """
    begin = time.perf_counter()
    network = graft(copy.deepcopy(case.host), dict(sites))
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    controller = InOrder(())
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
    space = growth.population.space
    controller.plantings = plan(
        space, {name: MENU[site.stream.kind] for name, site in sites.items()}, places, budget * _size(case.host)
    )
    train(network, optimizer, case, growth.step, still=True)
    summary = growth.summary()
    healed = copy.deepcopy(case.host)
    adapter = dict[str, bytes]()
    if summary["keeps"]:
        adapter = adapter_files(
            network, growth.population.grafts.kept(growth.engine.state.seeds), [site.after for site in sites.values()]
        )
        healed = attach_files(healed, adapter, Path("adapter"))
    names, menu = list(space.slots), [entry.name for entry in space.blueprints]
    kept = {each["site"]: each["reason"] for each in summary["keeps"]}
    planted = tuple(
        HealingSeed(
            each["site"],
            each["blueprint"],
            int(space.cost[0, names.index(each["site"]), menu.index(each["blueprint"])]),
            each["reason"],
            kept[each["site"]],
        )
        for each in summary["plantings"]
        if each["site"] in kept
    )
    growth.finish()
    removed = [f"{each['blueprint']} at {each['site']} was removed: {each['reason']}" for each in summary["prunes"]]
    seconds = time.perf_counter() - begin
    score = float(losses_of(healed, case.parts.probe, case).mean())
    trained = TrainedNetwork(healed, score, sum(each.parameters for each in planted), rate, seconds)
    return trained, planted, [*removed, *growth.summary()["explanations"]], adapter


class Planting(NamedTuple):
    """A seed to plant: the name of a slot, the name of a blueprint, and the reason in words."""

    slot: str
    blueprint: str
    why: str


class InOrder(Rule):
    """Plants each seed of a list once, as soon as it may; keeps it as soon as its gate allows, and else removes it.

    patience: steps for which a gate may refuse a seed before the seed is removed.
    """

    def __init__(self, plantings: Sequence[Planting], patience: int = 4) -> None:
        self.plantings, self.patience = tuple(plantings), patience
        self.planted = 0
        self._why: str | None = None

    def act(self, view: View) -> Actions:
        """FOSSILIZE before ADVANCE before PRUNE before GERMINATE, at the first slot where it is valid."""
        self._why = None
        seeds, valid = view.seeds, view.masks.slot[0]
        stuck = (seeds.stage == Stage.TRAINING) | ((seeds.stage == Stage.HOLDING) & ~seeds.doomed)
        old = stuck[0] & (seeds.age[0] > self.patience)
        choices = defaults(view.space)
        late = (Op.PRUNE, old, f"it did not pass its gate in {self.patience} decisions")
        for op, where, why in ((Op.FOSSILIZE, True, "it passed its gates"), (Op.ADVANCE, True, None), late):
            able = valid[op] & where
            if able.any():
                self._why = why
                return complete(view.masks, np.array([op]), np.array([able.argmax()]), choices)
        if self.planted < len(self.plantings):
            slot, blueprint, why = self.plantings[self.planted]
            at, kind = (view.space.slots.index(slot), [entry.name for entry in view.space.blueprints].index(blueprint))
            if valid[Op.GERMINATE, at] and view.masks.blueprint[0, at, kind]:
                self.planted, self._why = self.planted + 1, why
                return complete(view.masks, np.array([Op.GERMINATE]), np.array([at]), {**choices, Head.BLUEPRINT: kind})
        return Actions.wait(1)

    def reasons(self) -> list[str | None]:
        """Why the last decision planted, kept or removed a seed; None if it did none of these."""
        return [self._why]

    def explain(self) -> list[str]:
        """What was not planted."""
        left = self.plantings[self.planted :]
        return [f"{seed.blueprint} was not planted at {seed.slot}: no decision was left" for seed in left]

    def state(self) -> dict[str, Any]:
        """How many seeds were planted."""
        return {"planted": self.planted}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.planted = state["planted"]


def plan(space: Space, menu: Mapping[str, tuple[str, ...]], places: list[Place], room: float) -> tuple[Planting, ...]:
    """What to plant, in the order of the places: at each, the first blueprint of its menu that two thirds of the room can take.

    menu: names of blueprints by site. room: parameters that all seeds may have. At least one seed is planned if any fits.
    """
    names, left = [entry.name for entry in space.blueprints], room
    found: list[Planting] = []
    for place in places:
        slot = space.slots.index(place.site)
        costs = {
            name: int(space.cost[0, slot, names.index(name)])
            for name in menu[place.site]
            if name in names and space.fits[slot, names.index(name)]
        }
        most = min(left, room * 2 / 3)
        chosen = next((name for name, cost in costs.items() if cost <= most), None)
        if chosen is None and not found:
            chosen = min((name for name, cost in costs.items() if cost <= room), key=costs.__getitem__, default=None)
        if chosen is not None and len(found) < SEEDS:
            found.append(Planting(place.site, chosen, place.why))
            left -= costs[chosen]
    return tuple(found)


def _permanent(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy whose pruning is part of its weights, and the masks. InputError if the module cannot be copied.

    An exported graph multiplies by the mask itself: there the masked weight takes the place of the other, and the mask is 1.
    """
    memo: dict[int, Any] = {}
    for part in model.modules():  # what the pruning hooks computed has a history, which copy refuses
        for value in list(vars(part).values()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    # What tracing noted in graphs of torch.fx holds tensors without numbers, which copy.deepcopy refuses.
    graphs = [graph for part in model.modules() if isinstance(graph := vars(part).get("graph"), torch.fx.Graph)]
    notes = [(node, node.meta) for graph in graphs for node in graph.nodes]
    try:
        for node, _ in notes:
            node.meta = {}
        host = copy.deepcopy(model, memo)
    except Exception as error:  # whatever a person's module raises
        raise InputError(
            f"the model cannot be copied: {typed_line(error)}; give a module that copy.deepcopy takes"
        ) from error
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


def _size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
