"""Build the hosts of the built-in tasks, for vectors, images and sequences of tokens, which serve tasks of one's own too."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack import fused
from esper.kasmina.stack.layers import CausalAttention, Embedding, Linear, PositionMean, PositionNorm, Residual
from esper.leyline.config.arguments import check_integer, is_number
from esper.leyline.data.task import Room
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError
from esper.leyline.plugins import TASKS, load_plugin, plugins

# The default menus. None has a skip from the host's input, because such a seed would leave a controller nothing to decide.
VECTOR_MENU = ("bypass-linear", "bypass-mlp", "mlp-small")
MAP_MENU = ("bypass-conv-3x3", "bypass-conv-1x1", "conv-light", "squeeze-excite")
SEQUENCE_MENU = ("bypass-mlp", "mlp-small", "causal-conv", "attention")
MENUS = {
    Kind.VECTOR: VECTOR_MENU,
    Kind.MAP: MAP_MENU,
    Kind.SEQUENCE: SEQUENCE_MENU,
    Kind.VOLUME: ("bypass-conv-3x3x3", "bypass-conv-1x1x1", "conv-light", "squeeze-excite"),
}

SCALE = 0.5
"""Initial scale of the last layers of all residual blocks together, chosen on validation data (`esper docs hosts`)."""


def linear(inputs: int, outputs: int, *, variance: float) -> Linear:
    """Return a linear layer whose weights are normal with the given variance and whose biases are 0."""
    layer = Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)
    return layer


def conv(reads: int, writes: int, size: int, *, variance: float) -> nn.Conv2d:
    """Make a size x size convolution that keeps the resolution; its weights are normal with a given variance, its biases 0."""
    layer = nn.Conv2d(reads, writes, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=variance**0.5)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def checked_flags(of: str, name: str, flags: Any, blocks: int) -> tuple[bool, ...]:
    """Return one bool for each block. InputError if they are not; `of` names the host in the message."""
    if not isinstance(flags, list | tuple) or len(flags) != blocks or not all(isinstance(flag, bool) for flag in flags):
        raise InputError(f"{name} of {of} is {flags!r}; give True or False for each of its {blocks} blocks")
    return tuple(flags)  # JSON has no tuples


@dataclass(frozen=True)
class HostFactory(ABC):
    """Makes hosts from plain arguments; the base of the factories.

    Hosts have no batch normalization, so no example depends on another. Unless a class says otherwise, weights are drawn from
    torch's global generator, normal with standard deviation sqrt(2 / fan in) in front of a ReLU, and 1 / sqrt(fan in)
    elsewhere; biases are 0.
    """

    name: ClassVar[str]  # in files
    called: ClassVar[str]  # in messages

    def __post_init__(self) -> None:
        """Raise InputError if a size is not a positive integer, or a tuple of sizes does not hold these alone."""
        for each in fields(self):
            name, value = f"{each.name} of {self.called}", getattr(self, each.name)
            if each.type is int:
                check_integer(value, name)
            elif get_origin(each.type) is tuple and int in get_args(each.type):
                if not isinstance(value, list | tuple) or any(not is_number(size, int) or size < 1 for size in value):
                    raise InputError(f"{name} is {value!r}; give whole numbers from 1 on, as (8, 16)")
                object.__setattr__(self, each.name, tuple(value))  # JSON has no tuples

    @abstractmethod
    def __call__(self) -> SegmentedHost:
        """Return a freshly drawn host."""

    def plain(self, parameters: int) -> Self:
        """Return the network of the same depth, not narrow anywhere, of the least width with at least `parameters` parameters."""

        def size(width: int) -> int:
            with torch.device("meta"), drawn_with(0):  # parameters are counted without allocating them
                return count(self._even(width)())

        high = 1
        while size(high) < parameters:
            high *= 2
        return self._even(bisect_left(range(high), parameters, lo=high // 2 + 1, key=size))

    @abstractmethod
    def _even(self, width: int) -> Self:
        """Return the network of the same depth and of this width throughout."""


@dataclass(frozen=True)
class _Dense(HostFactory):
    """Makes hosts for vectors: an embedding, blocks of one hidden layer with a slot behind each, and a last layer."""

    inputs: int
    width: int
    hidden: tuple[int, ...]  # inner width of each block
    outputs: int

    residual: ClassVar[bool]  # whether a block adds to its input

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden:
            raise InputError(f"hidden of {self.called} is (); give the inner widths of its blocks, as (4, 12)")

    def __call__(self) -> SegmentedHost:
        blocks = [self._block(inner) for inner in self.hidden]
        embed = linear(self.inputs, self.width, variance=1 / self.inputs)
        head = linear(self.width, self.outputs, variance=1 / self.width)
        slots = [SlotSpec(f"block{k}", after=k + 1, width=self.width, inner=2) for k in range(len(blocks))]
        host = SegmentedHost([embed, *blocks, head], slots)
        host.stacks = True
        return host

    def room(self, others: Sequence["_Dense"] = (), outputs: int = 1) -> Room:
        """Return the layout of rows for this host and others of its class and depth, with at least `outputs` outputs.

        Widths are rounded up to multiples of 4, which aligns every row of a stack to 16 bytes. The last bit of a matrix product
        can depend on the alignment of its result, so a row's numbers would otherwise depend on its index in the population.
        """
        hosts = (self, *others)

        def up(widths: Iterable[int]) -> int:
            return -(-max(widths) // 4) * 4

        hidden = tuple(up(inner) for inner in zip(*(host.hidden for host in hosts), strict=True))
        sizes = {name: up(getattr(host, name) for host in hosts) for name in ("inputs", "width")}
        layout = replace(self, **sizes, hidden=hidden, outputs=max(outputs, *(host.outputs for host in hosts)))
        return Room(layout, (layout.inputs,))

    def _even(self, width: int) -> Self:
        return replace(self, width=width, hidden=(width,) * len(self.hidden))

    def _block(self, inner: int) -> nn.Module:
        """Return a segment of one hidden layer of `inner` units."""
        first = linear(self.width, inner, variance=2 / self.width)
        if self.residual:
            last = linear(inner, self.width, variance=SCALE**2 / (inner * len(self.hidden)))
            return Residual(first, nn.ReLU(), last)
        return nn.Sequential(first, nn.ReLU(), linear(inner, self.width, variance=1 / inner))


@dataclass(frozen=True)
class MLP(_Dense):
    """Makes multilayer perceptrons (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)     then slot "block<k>"
        last segment:   Linear(width -> outputs)

    There is no skip connection, so only a bypass can restore the information that a narrow segment loses.
    """

    name: ClassVar[str] = "mlp"
    called: ClassVar[str] = "an MLP host"
    residual: ClassVar[bool] = False


@dataclass(frozen=True)
class ResidualMLP(_Dense):
    """Makes residual networks (B, inputs) -> (B, outputs) on a stream of `width` features.

        segment 0:      Linear(inputs -> width)
        segment k + 1:  x + f(x),  f = Linear(width -> hidden[k]), ReLU, Linear(hidden[k] -> width)    then slot "block<k>"
        last segment:   Linear(width -> outputs)

    The standard deviation in the last layer of a block is SCALE / sqrt(fan in * blocks).
    """

    name: ClassVar[str] = "residual-mlp"
    called: ClassVar[str] = "a residual MLP host"
    residual: ClassVar[bool] = True


class Floor(nn.Module):
    """Computes max(z, floor), elementwise: the ReLU at floor 0, and the identity at minus infinity.

    The floor is a buffer, so the rows of one stack can have different floors. Padded units are 0 and stay 0 at both floors.
    """

    stacks = True
    fused = fused.RowFloor
    floor: Tensor  # (1, 1); stacked (E, 1, 1)

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.register_buffer("floor", torch.full((1, 1), -torch.inf if linear else 0.0))

    def forward(self, z: Tensor) -> Tensor:
        """Return (B, H) -> (B, H), or (E, B, H) -> (E, B, H)."""
        return torch.clamp(z, min=self.floor)


@dataclass(frozen=True)
class DamagedMLP(MLP):
    """Makes the networks of `MLP`, of which some blocks have no nonlinearity or are never trained.

        segment k + 1:  Linear(width -> hidden[k]), Floor(linear[k]), Linear(hidden[k] -> width)

    The parameters of block k do not require a gradient where frozen[k]. The initial weights are those of the MLP.
    """

    name: ClassVar[str] = "damaged-mlp"

    linear: tuple[bool, ...]  # blocks without a nonlinearity
    frozen: tuple[bool, ...]  # blocks that keep their initial weights

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("linear", "frozen"):
            flags = checked_flags("a damaged MLP host", name, getattr(self, name), len(self.hidden))
            object.__setattr__(self, name, flags)

    def __call__(self) -> SegmentedHost:
        host = super().__call__()
        for block, is_linear, frozen in zip(host.segments[1:-1], self.linear, self.frozen, strict=True):
            assert isinstance(block, nn.Sequential)
            block[1] = Floor(is_linear)
            block.requires_grad_(not frozen)
        return host

    def _even(self, width: int) -> MLP:  # type: ignore[override]  # a plain network is undamaged
        return MLP(self.inputs, width, (width,) * len(self.hidden), self.outputs)


@dataclass(frozen=True)
class _Convolutional(HostFactory):
    """Makes hosts for images: blocks that halve the resolution, a slot behind each, and a last layer."""

    inputs: tuple[int, int, int]  # channels, height and width of an image
    channels: tuple[int, ...]  # of the stream behind each block
    outputs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.inputs) != 3:
            raise InputError(f"inputs of {self.called} is {self.inputs!r}; give channels, height and width of an image")
        if not self.channels:
            raise InputError(f"channels of {self.called} is {self.channels!r}; give at least one block")
        if min(self.inputs[1:]) < 2 ** len(self.channels):
            raise InputError(
                f"an image of {self.inputs[1]} x {self.inputs[2]} pixels cannot be halved in {len(self.channels)} blocks; "
                "give fewer blocks or larger images"
            )

    def __call__(self) -> SegmentedHost:
        blocks = [
            self._block(k, reads, writes)
            for k, (reads, writes) in enumerate(pairwise((self.inputs[0], *self.channels)))
        ]
        last = self.channels[-1]
        head = nn.Sequential(PositionMean(), linear(last, self.outputs, variance=1 / last))
        slots = [
            SlotSpec(f"block{k}", after=k, width=width, kind=Kind.MAP, inner=3) for k, width in enumerate(self.channels)
        ]
        host = SegmentedHost([*blocks, head], slots)
        host.draws = False
        return host

    def _even(self, width: int) -> Self:
        widest = max(self.channels)  # the channels keep their proportions
        return replace(self, channels=tuple(-(-size * width // widest) for size in self.channels))

    @abstractmethod
    def _block(self, index: int, reads: int, writes: int) -> nn.Module:
        """Return a segment that halves a map of `reads` channels and returns one of `writes` channels."""


@dataclass(frozen=True)
class CNN(_Convolutional):
    """Makes convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:        Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU                  then slot "block<k>"
        with `hidden`:    Conv 3x3 (channels[k-1] -> hidden[k]), MaxPool 2, ReLU, Conv 1x1 (hidden[k] -> channels[k])
        last segment:     mean over positions, Linear(channels[-1] -> outputs)

    Block 0 reads the channels of the input. There is no skip connection, as in `MLP`.
    """

    name: ClassVar[str] = "cnn"
    called: ClassVar[str] = "a CNN host"

    hidden: tuple[int, ...] = ()  # inner channels of each block; an empty tuple leaves out the inner layers

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.hidden) not in (0, len(self.channels)):
            raise InputError(
                f"a CNN host has channels {self.channels} and hidden {self.hidden}; give either no hidden sizes or one a block"
            )

    def _even(self, width: int) -> Self:
        return replace(super()._even(width), hidden=())

    def _block(self, index: int, reads: int, writes: int) -> nn.Module:
        width = self.hidden[index] if self.hidden else writes
        layers: list[nn.Module] = [conv(reads, width, 3, variance=2 / (9 * reads)), nn.MaxPool2d(2), nn.ReLU()]
        if self.hidden:
            layers.append(conv(width, writes, 1, variance=1 / width))
        return nn.Sequential(*layers)


@dataclass(frozen=True)
class ResidualCNN(_Convolutional):
    """Makes residual convolutional networks (B, C, H, W) -> (B, outputs), whose blocks halve the resolution.

        segment k:      s(x) + f(x)                                                                    then slot "block<k>"
                        f = Conv 3x3 (channels[k-1] -> channels[k]), MaxPool 2, ReLU, Conv 3x3 (channels[k] -> channels[k])
                        s = AvgPool 2, Conv 1x1 (channels[k-1] -> channels[k])
        last segment:   mean over positions, Linear(channels[-1] -> outputs)

    Block 0 reads the channels of the input. The standard deviation in the last layer of f is SCALE / sqrt(fan in * blocks).
    """

    name: ClassVar[str] = "residual-cnn"
    called: ClassVar[str] = "a residual CNN host"

    def _block(self, index: int, reads: int, writes: int) -> nn.Module:
        branch = [
            conv(reads, writes, 3, variance=2 / (9 * reads)),
            nn.MaxPool2d(2),
            nn.ReLU(),
            conv(writes, writes, 3, variance=SCALE**2 / (9 * writes * len(self.channels))),
        ]
        return Residual(*branch, shortcut=nn.Sequential(nn.AvgPool2d(2), conv(reads, writes, 1, variance=1 / reads)))


Positions = Literal["learned", "rotary"]
"""Where a transformer has the positions of its tokens: as learned vectors beside theirs, or in its attention."""


class TransformerBlock(nn.Module):
    """Computes x + attention(norm(x)), then x + f(norm(x)) with one hidden layer f of four times the width."""

    stacks = True

    def __init__(self, width: int, heads: int, layers: int, *, rotary: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.hidden_norm = PositionNorm(width), PositionNorm(width)
        self.attention = CausalAttention(width, heads, rotary=rotary)
        self.inner = linear(width, 4 * width, variance=2 / width)
        self.out = linear(4 * width, width, variance=1 / (4 * width) / (2 * layers))
        nn.init.normal_(self.attention.read.weight, std=width**-0.5)
        nn.init.normal_(self.attention.out.weight, std=(width * 2 * layers) ** -0.5)
        nn.init.zeros_(self.attention.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, C) -> (B, L, C), or (E, B, L, C) -> (E, B, L, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.out(torch.relu(self.inner(self.hidden_norm(x))))


class TiedHead(nn.Module):
    """Computes the logit of each token: a norm, then the product with the vectors by which the tokens were embedded."""

    stacks = True

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        vocabulary, width = embedding.tokens.shape
        self.norm = PositionNorm(width)
        self.read = Linear(width, vocabulary, bias=False)
        self.read.weight = embedding.tokens

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, C) -> (B, L, vocabulary), or (E, B, L, C) -> (E, B, L, vocabulary)."""
        return self.read(self.norm(x))


@dataclass(frozen=True)
class _Sequential(HostFactory):
    """Makes hosts for tokens: an embedding, layers with a slot behind each, and a last layer."""

    vocabulary: int
    width: int = 64
    layers: int = 1

    def _even(self, width: int) -> Self:
        return replace(self, width=width)

    def _slots(self) -> list[SlotSpec]:
        return [
            SlotSpec(f"block{k}", after=k + 1, width=self.width, kind=Kind.SEQUENCE, causal=True)
            for k in range(self.layers)
        ]


@dataclass(frozen=True)
class Transformer(_Sequential):
    """Makes hosts for tokens, in one line: esper.task("mine", x, y, host=esper.transformer(vocabulary=256), classes=256).

    A call returns a decoder transformer, which predicts the next token at every position: (B, L) int64 -> (B, L, vocabulary).
    Behind each layer is a causal slot for sequences.

        segment 0:      a learned vector of each token, and with learned positions + one of each position
        segment k + 1:  x + attention(norm(x)),  then x + Linear(ReLU(Linear(norm(x)))) with 4 width units    then slot "block<k>"
        last segment:   norm, and the product with the vectors of the tokens (tied to segment 0)

    No position sees a later one. The standard deviation of initial weights is divided by sqrt(2 layers) in layers that return to
    the stream, and is .02 for the vectors of tokens and positions.

    Raises InputError if a size is not a positive integer, the heads do not divide the width, or rotary positions meet heads
    with an odd number of features.

    Attributes:
        vocabulary (int): number of tokens, which are whole numbers from 0 on
        width (int): features of every position, a multiple of `heads`; 64 by default
        layers (int): number of layers, whose slots are named "block0", "block1" and so on; 2 by default
        heads (int): heads of attention in each layer; 4 by default
        length (int): most positions of a sequence where they are learned; 128 by default
        positions ('learned' or 'rotary'): 'learned', the default, adds a learned vector of each position to that of the token.
            'rotary' rotates queries and keys by their positions (Su et al., "RoFormer", 2021), which adds no parameters and has
            no longest sequence
    """

    name: ClassVar[str] = "transformer"
    called: ClassVar[str] = "a transformer host"

    layers: int = 2
    heads: int = 4
    length: int = 128
    positions: Positions = "learned"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in get_args(Positions):
            raise InputError(f"positions of {self.called} is {self.positions!r}; give 'learned' or 'rotary'")
        if self.width % self.heads:
            raise InputError(
                f"width of {self.called} is {self.width} and heads is {self.heads}; give a width that is a multiple of heads"
            )
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise InputError(
                f"width of {self.called} is {self.width} and heads is {self.heads}, so a head has {self.width // self.heads} "
                "features, but rotary positions turn pairs of features; give a width that is an even multiple of heads"
            )

    def __call__(self) -> SegmentedHost:
        rotary = self.positions == "rotary"
        embed = Embedding(self.vocabulary, None if rotary else self.length, self.width)
        nn.init.normal_(embed.tokens, std=0.02)
        if embed.positions is not None:
            nn.init.normal_(embed.positions, std=0.02)
        blocks = [TransformerBlock(self.width, self.heads, self.layers, rotary=rotary) for _ in range(self.layers)]
        host = SegmentedHost([embed, *blocks, TiedHead(embed)], self._slots())
        host.stacks = True
        return host

    def _even(self, width: int) -> Self:
        step = self.heads * (2 if self.positions == "rotary" else 1)
        return replace(self, width=-(-width // step) * step)


class GRULayer(nn.Module):
    """Computes x + GRU(x), over the positions of each example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, C) -> (B, L, C)."""
        return x + self.recurrent(x)[0]


@dataclass(frozen=True)
class GRU(_Sequential):
    """Makes recurrent hosts for tokens, in one line: esper.task("mine", x, y, host=esper.gru(vocabulary=256), classes=256).

    A call returns a gated recurrent network (Cho et al., 2014), which predicts the next token at every position: (B, L) int64 ->
    (B, L, vocabulary). Behind each layer is a causal slot for sequences.

        segment 0:      a learned vector of each token
        segment k + 1:  x + GRU(x)                          then slot "block<k>"
        last segment:   Linear(width -> vocabulary)

    The networks of a population run one after the other, because vmap has no rule for a recurrence, so a transformer of as many
    parameters is faster where there are many. Weights of a GRU are those of torch. Raises InputError if a size is not a positive
    integer.

    Attributes:
        vocabulary (int): number of tokens, which are whole numbers from 0 on
        width (int): features of every position; 64 by default
        layers (int): number of residual GRU layers, whose slots are named "block0", "block1" and so on; 1 by default
    """

    name: ClassVar[str] = "gru"
    called: ClassVar[str] = "a GRU host"

    def __call__(self) -> SegmentedHost:
        embed = nn.Embedding(self.vocabulary, self.width)
        head = linear(self.width, self.vocabulary, variance=1 / self.width)
        host = SegmentedHost([embed, *(GRULayer(self.width) for _ in range(self.layers)), head], self._slots())
        host.draws = False
        return host


VectorHost = MLP | ResidualMLP


def mlp(
    inputs: int, width: int = 32, classes: int | None = None, *, blocks: int = 3, outputs: int | None = None
) -> ResidualMLP:
    """Return a host for vectors, in one line: esper.task("mine", x, y, host=esper.mlp(inputs=30, width=32, classes=2)).

    Returns a factory of residual networks (B, inputs) -> (B, classes), with a slot behind each of its blocks:

        Linear(inputs -> width),   `blocks` times x + Linear(ReLU(Linear(x))) at that width,   Linear(width -> classes)

    inputs: features of an example.
    width: features of the stream and of the hidden layer of a block.
    classes: number of classes. For a regression give `outputs`, the number of targets, instead.
    blocks: number of residual blocks. The slots behind them are named "block0", "block1" and so on.

    Raises InputError if a size is not a positive integer, or if both or neither of `classes` and `outputs` are given.
    """
    last = _outputs("esper.mlp", classes, outputs)
    for name, size in (("inputs", inputs), ("width", width), ("blocks", blocks)):
        check_integer(size, f"{name} of esper.mlp")
    return ResidualMLP(inputs, width, (width,) * blocks, last)


def cnn(
    inputs: tuple[int, int, int],
    width: int = 16,
    classes: int | None = None,
    *,
    blocks: int = 2,
    outputs: int | None = None,
) -> ResidualCNN:
    """Return a host for images, in one line: esper.task("mine", x, y, host=esper.cnn(inputs=(3, 32, 32), classes=10)).

    Returns a factory of residual convolutional networks (B, C, H, W) -> (B, classes), with a slot behind each of its blocks.
    The first block returns `width` channels, and every further block doubles them. Every block halves the resolution. After
    the last block come the mean over positions and a linear layer. There is no batch normalization.

    inputs: channels, height and width of an image.
    width: channels behind the first block.
    classes: number of classes. For a regression give `outputs`, the number of targets, instead.
    blocks: number of residual blocks. The slots behind them are named "block0", "block1" and so on.

    Raises InputError if a size is not a positive integer, where both or neither of `classes` and `outputs` are given, or
    where an image is too small to be halved in every block.
    """
    last = _outputs("esper.cnn", classes, outputs)
    for name, size in (("width", width), ("blocks", blocks)):
        check_integer(size, f"{name} of esper.cnn")
    return ResidualCNN(inputs, tuple(width * 2**block for block in range(blocks)), last)


def _outputs(of: str, classes: int | None, outputs: int | None) -> int:
    if (classes is None) == (outputs is None):
        raise InputError(
            f"{of} was given classes={classes!r} and outputs={outputs!r}; give one of them: classes, the number of classes, or "
            "outputs, the number of targets of a regression"
        )
    name, value = ("outputs", outputs) if classes is None else ("classes", classes)
    check_integer(value, f"{name} of {of}")
    assert value is not None
    return value


def menu_of(host: SegmentedHost) -> tuple[str, ...]:
    """Return the default menu of a host: blueprints for the kinds of stream at its slots."""
    kinds = {slot.kind for slot in host.slots}
    return tuple(dict.fromkeys(name for kind, menu in MENUS.items() if kind in kinds for name in menu))


MOST_BLOCKS, WIDEST = 1024, 2**24
"""Limits on the sizes of a host that a file names. A host that is built in Python may be larger."""

Host = MLP | ResidualMLP | DamagedMLP | CNN | ResidualCNN | Transformer | GRU
HOSTS: dict[str, Any] = {factory.name: factory for factory in get_args(Host)}
"""The host factories that a saved network can name, dataclasses whose arguments are plain. A package that adds tasks adds the
factories of their hosts as its module of tasks is imported."""


def host_from(name: str, arguments: Mapping[str, Any]) -> Callable[[], SegmentedHost]:
    """Return the host factory of this name with these JSON arguments, of which those with a default may be absent."""
    if name not in HOSTS:
        for each in plugins(TASKS):
            load_plugin(TASKS, each)
    if name not in HOSTS:
        raise InputError(f"unknown host {name!r}; the hosts that can be rebuilt by name are {', '.join(HOSTS)}")
    wanted = [field.name for field in fields(HOSTS[name])]
    needed = {field.name for field in fields(HOSTS[name]) if field.default is MISSING}
    if not needed <= set(arguments) <= set(wanted):
        raise InputError(f"host {name!r} was given the arguments {sorted(arguments)}; give exactly {wanted}")
    for argument, value in arguments.items():
        numbers = value if isinstance(value, list | tuple) else (value,)
        if len(numbers) > MOST_BLOCKS or any(isinstance(number, int) and number > WIDEST for number in numbers):
            raise InputError(
                f"{argument} of host {name!r} has a size over {WIDEST:,} or more than {MOST_BLOCKS:,} sizes; "
                "give the file of a network that was grown"
            )
    return HOSTS[name](**arguments)
