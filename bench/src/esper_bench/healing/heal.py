"""Make the mixture 'heal': trained networks that were damaged, to be repaired by a few cheap seeds and a little data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.leyline.data.batches import Batch
from esper.leyline.data.task import Instance, Lengths, Mixture, Room, Split
from esper.leyline.messages import InputError
from esper.runs.healing.training import redraw_dead
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification
from esper_bench.healing.bridged import BridgedCNN
from esper_bench.healing.closed_form import correct
from esper_bench.healing.damage import (
    OTHER_PROBABILITIES,
    PROBABILITIES,
    TWO_SITES,
    Damage,
    DamageKind,
    damage_host,
    damage_split,
    draw_damage,
)
from esper_bench.healing.data import CLASSES, FINAL, HEALING, OTHER, SIZES, Problem, Subset
from esper_bench.healing.hosts import BLOCKS, VECTORS, BridgedHost, HostSet, trained_weights

FROZEN = "{0.summary}, damaged and frozen: repair them with seeds of a few parameters"
UNFROZEN = "the networks of {0.name} without the freeze: training all of their weights on the healing examples"
REDRAWN = "the networks of {0.name} without the freeze, their dead units drawn anew: training all of their weights"
SCRATCH = "the networks of {0.name} drawn afresh: training them from scratch on the healing examples"
TAUGHT = "the networks of {0.name} together with the intact ones, from whose activations the sensor drift is measured"
EORA = "the networks of {0.name} with low-rank corrections in closed form, from the intact weights, within the cap of seeds"

RANGES: Mapping[str, range] = MappingProxyType(
    {
        "training": range(2**20),
        "validation": range(2**20, 2**20 + 2**16),
        "heldout": range(2**20 + 2**16, 2**20 + 2**17),
    }
)
KEYS: Mapping[str, range] = MappingProxyType({**RANGES, "final": FINAL, "other": OTHER})
"""All keys that stand for an instance; `final` and `other` are for the tables of pages."""
MENU = (
    "bypass-rank-1",
    "bypass-rank-2",
    "bypass-rank-4",
    "bypass-rank-8",
    "bypass-mlp-small",
    "low-rank",
    "mlp-small",
)
BUDGET: Mapping[str, Any] = MappingProxyType(
    {
        "governor": {"param_limit": 0.06},
        "reward": {"rent": 0.1},
        "gates": {
            "min_training_steps": 1,
            "min_holding_steps": 1,
            "gain_z": -1.0,
            "contribution_z": 0.0,
            "min_contribution": -0.02,
        },
        "heuristic": {
            "narrow_blueprints": ("bypass-rank-4", "bypass-rank-2"),
            "weak_blueprints": ("bypass-rank-4", "bypass-rank-2"),
        },
    }
)
"""Settings of every trained host with damage: seeds of few parameters, which are kept unless they do harm."""
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "steps": 40,
        "data": {"batch_size": 32, "batches_per_step": 2},
        "optimizer": {"lr": 0.02},
        "lifecycle": {"max_seeds": BLOCKS + 1, "max_training_seeds": BLOCKS + 1},
        **BUDGET,
        "ppo": {"teacher": "tree", "decisions_per_step": 8, "imitation_passes": 24},
    }
)


@dataclass(frozen=True)
class HealCase:
    """Says what a key stands for, without its data and its weights.

    Attributes:
        key (int): key of the instance
        number (int): number of the trained host
        problem (Problem): what the host was trained on
        architecture (BridgedMLP or BridgedCNN): the host before the damage
        damage (Damage): what is wrong with the host or with the data
        hosts (HostSet): the set that the number is of
    """

    key: int
    number: int
    problem: Problem
    architecture: BridgedHost
    damage: Damage
    hosts: HostSet

    @property
    def plain(self) -> bool:
        """Whether the host has no skip connections."""
        return not any(self.architecture.skips)


@dataclass(frozen=True)
class DamagedHost:
    """Copies one trained and damaged host. The first call reads the weights, or trains them (`healing_hosts`).

    With `redrawn`, dead units are drawn anew, from torch's generator.
    """

    number: int
    damage: Damage
    frozen: bool
    hosts: HostSet = VECTORS
    redrawn: bool = False

    @property
    def architecture(self) -> BridgedHost:
        """The host by which a saved network names it. A removed block has a skip."""
        sound = self.hosts.architecture(self.number)
        removed = self.damage.segments if self.damage.kind == DamageKind.REMOVED else ()
        skips = tuple(skip or k + 1 in removed for k, skip in enumerate(sound.skips))
        return replace(sound, skips=skips, frozen=self.frozen)

    def __call__(self) -> SegmentedHost:
        """Return a copy of the damaged host."""
        host = trained_host(self.number, self.architecture, self.hosts)
        damage_host(host, self.damage)
        if self.redrawn:
            redraw_dead(host)
        return host

    def plain(self, parameters: int) -> MLP | BridgedCNN:
        """Return a factory of untrained plain networks with at least `parameters` parameters."""
        return self.architecture.plain(parameters)


@dataclass(frozen=True)
class CorrectedHost:
    """Copies one damaged host whose maps were corrected from the intact weights (`closed_form`).

    The inputs of the maps are those of the intact host on the healing examples. A removed block has no map to correct.

    Attributes:
        facts (HealCase): the key, its trained host and its damage
        cap (float): parameters that the corrections may have, as a share of those of the host
    """

    facts: HealCase
    cap: float

    @property
    def architecture(self) -> BridgedHost:
        """The host by which a saved network names it."""
        return self._damaged.architecture

    def __call__(self) -> SegmentedHost:
        """Return a copy of the corrected host."""
        return self.corrected()[0]

    def corrected(self) -> tuple[SegmentedHost, int]:
        """Return a copy of the corrected host, and the parameters that its corrections would store."""
        host, damage = self._damaged(), self.facts.damage
        if damage.kind == DamageKind.REMOVED:
            return host, 0
        budget = int(self.cap * sum(parameter.numel() for parameter in host.parameters()))
        x = self.facts.hosts.examples(self.facts.problem, Subset.HOST, HEALING).x
        return host, correct(host, trained_host(self.facts.number, of=self.facts.hosts), x, budget)

    def plain(self, parameters: int) -> MLP | BridgedCNN:
        """Return a factory of untrained plain networks with at least `parameters` parameters."""
        return self.architecture.plain(parameters)

    @property
    def _damaged(self) -> DamagedHost:
        return DamagedHost(self.facts.number, self.facts.damage, frozen=True, hosts=self.facts.hosts)


def heal(hosts: HostSet = VECTORS) -> Mixture:
    """Make the mixture of trained and damaged networks with 128 examples to heal on. The host is frozen, so only seeds train.

    A host has five blocks on a stream of 16, 20 or 24 features, and a slot behind each block. It was trained on 900 examples of
    scikit-learn's digits or of one of five synthetic families, and was sound before the damage. Two thirds of the hosts are
    plain, and one third is residual: a control, because damage to a residual network can be repaired anywhere. `describe`
    returns what a key stands for. The hosts of another set, such as `healing_images.IMAGES`, are described there. Those of
    `healing_hosts.FULL` are the same networks with a slot behind the head and a larger menu: `heal-full`.

    The hosts and problems of training, validation, held-out and final keys are different. The healing examples are some of those
    that the host was trained on. The probe, validation and test splits share no example with them; those of digits come from
    disjoint sets of digits, which are the same for all instances of a part. Digits that test final keys test no other.

    80 updates; seeds may have 6 % of the host's parameters (`governor.param_limit`).
    """
    return _mixture(hosts, "", FROZEN, hosts.rates[0], _damaged(frozen=True), frozen=True)


def heal_taught(hosts: HostSet = VECTORS) -> Mixture:
    """Make `heal` with the intact networks, so that `drift` is measured: what each slot lost by the damage."""

    def intact(key: int) -> tuple[nn.Module, Batch]:
        facts = describe(key, hosts)
        return trained_host(facts.number, of=hosts), hosts.examples(facts.problem, Subset.HOST, HEALING).x

    mixture = _mixture(hosts, "-taught", TAUGHT, hosts.rates[0], _damaged(frozen=True), frozen=True)
    return replace(mixture, sample=with_intact(mixture.sample, intact))


def heal_unfrozen(hosts: HostSet = VECTORS) -> Mixture:
    """Make `heal` with hosts that train: the controller `never` is full fine-tuning of the damaged host."""
    return _mixture(hosts, "-unfrozen", UNFROZEN, hosts.rates[1], _damaged(frozen=False), frozen=False)


def heal_redrawn(hosts: HostSet = VECTORS) -> Mixture:
    """Make `heal-unfrozen` with dead units drawn anew, which have no gradient otherwise."""

    def redrawn(facts: HealCase) -> DamagedHost:
        return DamagedHost(facts.number, facts.damage, frozen=False, hosts=facts.hosts, redrawn=True)

    return _mixture(hosts, "-redrawn", REDRAWN, hosts.rates[1], redrawn, frozen=False)


def heal_scratch(hosts: HostSet = VECTORS) -> Mixture:
    """Make `heal` with hosts that are drawn afresh: the controller `never` is training from scratch."""
    return _mixture(hosts, "-scratch", SCRATCH, hosts.rates[2], lambda facts: facts.architecture, frozen=False)


def heal_eora(hosts: HostSet = VECTORS, cap: float | None = None) -> Mixture:
    """Make `heal` with hosts that are corrected in closed form: the controller `never` is that correction alone.

    `cap` is the share of the host's parameters that the corrections may have; None takes that of seeds. They are part of the host
    and pay no rent.
    """
    share: float = {**DEFAULTS, **hosts.settings}["governor"]["param_limit"] if cap is None else cap
    return _mixture(hosts, "-eora", EORA, hosts.rates[0], lambda facts: CorrectedHost(facts, share), frozen=True)


def with_intact(
    sample: Callable[[int], Instance], intact: Callable[[int], tuple[nn.Module, Batch]]
) -> Callable[[int], Instance]:
    """Add to the instances of `sample` an intact network and inputs (N, ...) of it, which `intact` returns for a key."""
    return lambda key: replace(sample(key), intact=partial(intact, key))


Build = Callable[[HealCase], Callable[[], nn.Module]]


def _damaged(frozen: bool) -> Build:
    return lambda facts: DamagedHost(facts.number, facts.damage, frozen, facts.hosts)


def _mixture(hosts: HostSet, suffix: str, summary: str, lr: float, host: Build, frozen: bool) -> Mixture:
    def sample(key: int) -> Instance:
        facts = describe(key, hosts)
        train, probe, validation = (split_of(facts, part) for part in (Subset.HOST, Subset.PROBE, Subset.VALIDATION))
        return Instance(host(facts), train, probe, validation, facts.problem.classes)

    return Mixture(
        name=hosts.name + suffix,
        summary=summary.format(hosts),
        room=Room(
            replace(hosts.largest(), frozen=frozen),
            hosts.inputs,
            Lengths(probe=SIZES[Subset.PROBE], held=max(SIZES[Subset.VALIDATION], SIZES[Subset.TEST])),
        ),
        sample=sample,
        test=lambda key: split_of(describe(key, hosts), Subset.TEST),
        ranges={part: (hosts.keys or KEYS)[part] for part in RANGES},
        objective=Classification(CLASSES),
        menu=(*MENU, *hosts.menu),
        defaults={
            **DEFAULTS,
            "optimizer": {"lr": lr},
            "lifecycle": {"max_seeds": hosts.slots, "max_training_seeds": hosts.slots},
            "mapping": hosts.mapping,
            **hosts.settings,
        },
    )


def trained_host(number: int, architecture: BridgedHost | None = None, of: HostSet = VECTORS) -> SegmentedHost:
    """Build the trained host of a number, as an architecture where it is given."""
    host = (architecture or of.architecture(number))()
    with torch.no_grad():
        for name, value in trained_weights(number, of).items():
            host.get_parameter(name).copy_(value)
    return host


def describe(key: int, of: HostSet = VECTORS) -> HealCase:
    """Return what a key stands for. InputError for a key outside those of the set."""
    ranges = of.keys or KEYS
    for keys in ranges.values():
        if key in keys:
            number = keys.start + (key - keys.start) % of.count
            kinds = OTHER_PROBABILITIES if keys == OTHER else PROBABILITIES
            damage = of.damage(key) if of.damage else draw_damage(key, BLOCKS, TWO_SITES, kinds)
            return HealCase(key, number, of.problem(number), of.architecture(number), damage, of)
    known = ", ".join(f"{name} {part.start:,} to {part.stop - 1:,}" for name, part in ranges.items())
    raise InputError(f"key {key:,} is not an instance of {of.name!r}; the keys are {known}")


def split_of(facts: HealCase, part: Subset) -> Split:
    """Return the examples of a part in the damaged world; of those that the host was trained on, the first HEALING."""
    count = HEALING if part == Subset.HOST else None
    return damage_split(facts.hosts.examples(facts.problem, part, count), facts.damage, facts.problem.classes)
