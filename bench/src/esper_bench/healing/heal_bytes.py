"""Make the mixture 'heal-bytes': trained transformers that were damaged, to be repaired by a few cheap seeds and some text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.leyline.data.batches import Batch
from esper.leyline.data.task import Instance, Lengths, Mixture, Room, Split
from esper.leyline.messages import InputError
from esper.tasks.hosts import Transformer
from esper.tasks.objectives import NextByte
from esper_bench.healing.byte_damage import damage_text, damage_transformer
from esper_bench.healing.byte_hosts import HOST, LAYERS, trained_weights
from esper_bench.healing.byte_text import LENGTH, SYMBOLS, common, windows
from esper_bench.healing.closed_form import correct
from esper_bench.healing.damage import Damage, draw_damage
from esper_bench.healing.data import Subset
from esper_bench.healing.heal import BUDGET, KEYS, RANGES, with_intact
from esper_bench.healing.open_transformer import OpenTransformer

SUMMARY = "trained transformers for bytes, damaged and frozen: repair them with seeds of a few parameters"
TAUGHT = (
    "the transformers of heal-bytes together with the intact ones, from whose activations the sensor drift is measured"
)
UNFROZEN = "the transformers of heal-bytes without the freeze: training all of their weights on the healing text"
SCRATCH = "the transformers of heal-bytes drawn afresh: training them from scratch on the healing text"
EORA = "the transformers of heal-bytes with low-rank corrections from the intact weights, of 6 % of the parameters"

HOSTS = 4
"""Trained hosts of each part. A host returns with other damage and other text after this many keys."""
SIZES: Mapping[Subset, int] = MappingProxyType(
    {Subset.HOST: 128, Subset.PROBE: 32, Subset.VALIDATION: 64, Subset.TEST: 128}
)
"""Windows of an instance: healing text is of the files that the host was trained on."""

MENU = (
    "bypass-rank-1",
    "bypass-rank-2",
    "bypass-rank-4",
    "bypass-rank-8",
    "bypass-linear",
    "bypass-mlp-small",
    "bypass-mlp",
    "low-rank",
    "full-head",
    "sparse-rows",
    "sparse-head",
)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "steps": 10,
        "data": {"batch_size": 8, "batches_per_step": 4},
        "optimizer": {"lr": 0.03},
        "lifecycle": {"max_seeds": LAYERS + 2, "max_training_seeds": LAYERS + 2},
        **BUDGET,
    }
)


@dataclass(frozen=True)
class ByteFacts:
    """Says what a key stands for, without its text and its weights.

    Attributes:
        key (int): key of the instance, and of the places of its windows
        number (int): number of the trained host
        damage (Damage): what is wrong with the host or with the text
    """

    key: int
    number: int
    damage: Damage


@dataclass(frozen=True)
class DamagedTransformer:
    """Copies one trained and damaged host. The first call reads the weights, or trains them (`byte_hosts`)."""

    number: int
    damage: Damage
    frozen: bool

    @property
    def architecture(self) -> OpenTransformer:
        """The host by which a saved network names it."""
        return replace(HOST, frozen=self.frozen)

    def __call__(self) -> SegmentedHost:
        """Return a copy of the damaged host."""
        host = trained_host(self.number, self.architecture)
        damage_transformer(host, self.damage)
        return host

    def plain(self, parameters: int) -> Transformer:
        """Return a factory of untrained transformers with at least `parameters` parameters."""
        return HOST.plain(parameters)


@dataclass(frozen=True)
class CorrectedTransformer:
    """Copies one damaged host whose linear maps were corrected from the intact weights (`closed_form`).

    The inputs of the maps are those of the intact host on the healing text. The vectors of the tokens are not corrected.

    Attributes:
        facts (ByteFacts): the key, its trained host and its damage
        cap (float): parameters that the corrections may have, as a share of those of the host
    """

    facts: ByteFacts
    cap: float

    @property
    def architecture(self) -> OpenTransformer:
        """The host by which a saved network names it."""
        return replace(HOST, frozen=True)

    def __call__(self) -> SegmentedHost:
        """Return a copy of the corrected host."""
        host = DamagedTransformer(self.facts.number, self.facts.damage, frozen=True)()
        budget = int(self.cap * sum(parameter.numel() for parameter in host.parameters()))
        correct(host, trained_host(self.facts.number), _sound(self.facts, Subset.HOST).x, budget)
        return host

    def plain(self, parameters: int) -> Transformer:
        """Return a factory of untrained transformers with at least `parameters` parameters."""
        return HOST.plain(parameters)


def heal_bytes() -> Mixture:
    """Make the mixture of trained and damaged transformers with 128 windows to heal on. The host is frozen, so only seeds train.

    A host has four layers of width 32, and slots behind the embedding, behind every layer and behind the head. It was trained to
    predict the next byte of modules of Python's standard library, 32 at a time. `describe` returns what a key stands for.

    Training, validation and held-out keys have different hosts, damages and windows; HOSTS hosts serve the keys of each. No file
    of which a host or a seed is trained is read by the probe, validation or test split of any instance; these three share no file
    either. All hosts have one shape, because a layer norm cannot be padded.

    40 updates; seeds may have 6 % of the host's parameters (`governor.param_limit`). The metric is minus the bits of a byte.
    """
    return _mixture(
        "heal-bytes", SUMMARY, lambda facts: DamagedTransformer(facts.number, facts.damage, True), frozen=True
    )


def heal_bytes_taught() -> Mixture:
    """Make `heal-bytes` with the intact hosts, so that `drift` is measured: what each slot lost by the damage."""

    def intact(key: int) -> tuple[nn.Module, Batch]:
        facts = describe(key)
        return trained_host(facts.number), _sound(facts, Subset.HOST).x

    mixture = heal_bytes()
    return replace(mixture, name="heal-bytes-taught", summary=TAUGHT, sample=with_intact(mixture.sample, intact))


def heal_bytes_unfrozen() -> Mixture:
    """Make `heal-bytes` with hosts that train: the controller `never` is full fine-tuning of the damaged host."""
    mixture = _mixture(
        "heal-bytes-unfrozen",
        UNFROZEN,
        lambda facts: DamagedTransformer(facts.number, facts.damage, False),
        frozen=False,
    )
    return replace(mixture, defaults={**DEFAULTS, "optimizer": {"lr": 0.001}})


def heal_bytes_scratch() -> Mixture:
    """Make `heal-bytes` with hosts that are drawn afresh: the controller `never` is training from scratch."""
    mixture = _mixture("heal-bytes-scratch", SCRATCH, lambda facts: HOST, frozen=False)
    return replace(mixture, defaults={**DEFAULTS, "optimizer": {"lr": 0.003}})


def heal_bytes_eora(cap: float = DEFAULTS["governor"]["param_limit"]) -> Mixture:
    """Make `heal-bytes` with hosts that are corrected in closed form: `never` is that correction alone.

    `cap` is the share of the host's parameters that the corrections may have. They are part of the host and pay no rent.
    """
    return _mixture("heal-bytes-eora", EORA, lambda facts: CorrectedTransformer(facts, cap), frozen=True)


def _mixture(name: str, summary: str, host: Callable[[ByteFacts], Callable[[], nn.Module]], frozen: bool) -> Mixture:
    def sample(key: int) -> Instance:
        facts = describe(key)
        train, probe, validation = (split_of(facts, part) for part in (Subset.HOST, Subset.PROBE, Subset.VALIDATION))
        return Instance(host(facts), train, probe, validation, len(SYMBOLS))

    return Mixture(
        name=name,
        summary=summary,
        room=Room(
            replace(HOST, frozen=frozen),
            (LENGTH,),
            Lengths(probe=SIZES[Subset.PROBE], held=max(SIZES[Subset.VALIDATION], SIZES[Subset.TEST])),
        ),
        sample=sample,
        test=lambda key: split_of(describe(key), Subset.TEST),
        ranges=RANGES,
        objective=NextByte(len(SYMBOLS)),
        menu=MENU,
        defaults=DEFAULTS,
    )


def trained_host(number: int, of: OpenTransformer = HOST) -> SegmentedHost:
    """Build the trained host of a number, as the architecture `of`."""
    host = of()
    with torch.no_grad():
        for name, value in trained_weights(number).items():
            host.get_parameter(name).copy_(value)
    return host


def describe(key: int) -> ByteFacts:
    """Return what a key stands for. InputError for a key outside KEYS."""
    for keys in KEYS.values():
        if key in keys:
            return ByteFacts(key, keys.start + (key - keys.start) % HOSTS, draw_damage(key, LAYERS))
    known = ", ".join(f"{name} {part.start:,} to {part.stop - 1:,}" for name, part in KEYS.items())
    raise InputError(f"key {key:,} is not an instance of 'heal-bytes'; the keys are {known}")


def split_of(facts: ByteFacts, part: Subset) -> Split:
    """Return the windows of a part in the damaged world."""
    return damage_text(_sound(facts, part), facts.damage, common())


def _sound(facts: ByteFacts, part: Subset) -> Split:
    return windows(part, facts.key, np.arange(SIZES[part]))
