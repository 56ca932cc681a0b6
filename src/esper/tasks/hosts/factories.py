"""List the hosts of the built-in tasks, those that a user builds in one line, and those that a saved network can name."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args

from esper.kasmina.host import SegmentedHost
from esper.leyline.config.arguments import check_integer
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.messages import InputError
from esper.leyline.plugins import TASKS, load_plugin, plugins
from esper.tasks.hosts.feedforward import CNN as CNN
from esper.tasks.hosts.feedforward import MLP as MLP
from esper.tasks.hosts.feedforward import DamagedMLP as DamagedMLP
from esper.tasks.hosts.feedforward import ResidualCNN as ResidualCNN
from esper.tasks.hosts.feedforward import ResidualMLP as ResidualMLP
from esper.tasks.hosts.sequential import GRU as GRU
from esper.tasks.hosts.sequential import Transformer as Transformer

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
