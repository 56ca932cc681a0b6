"""The hosts that Esper's own tasks grow, and those that a saved network can name."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from esper.kasmina.host import SegmentedHost
from esper.leyline.errors import InputError
from esper.leyline.slots import Kind
from esper.tasks.convolutional import CNN as CNN
from esper.tasks.convolutional import ResidualCNN as ResidualCNN
from esper.tasks.dense import MLP as MLP
from esper.tasks.dense import DamagedMLP as DamagedMLP
from esper.tasks.dense import ResidualMLP as ResidualMLP
from esper.tasks.dense import roomy as roomy
from esper.tasks.sizes import check_sizes

VECTOR_MENU = ("bypass-linear", "bypass-mlp", "mlp-small")
"""The default menu where the stream is a vector. A skip from the input is not in it: it leaves nothing to decide."""
MAP_MENU = ("bypass-conv-3x3", "bypass-conv-1x1", "conv-light", "squeeze-excite")
"""The default menu where the stream is a map."""


VectorHost = MLP | ResidualMLP


def mlp(
    inputs: int, width: int = 32, classes: int | None = None, *, blocks: int = 3, outputs: int | None = None
) -> ResidualMLP:
    """A host for vectors, in one line: esper.task("mine", x, y, host=esper.mlp(inputs=30, width=32, classes=2)).

    Returns a factory of residual networks (B, inputs) -> (B, classes), with a slot behind each of its blocks:

        Linear(inputs -> width),   `blocks` times x + Linear(ReLU(Linear(x))) at that width,   Linear(width -> classes)

    inputs: features of an example.
    width: features of the stream and of the hidden layer of a block.
    classes: how many there are to tell apart. A regression gives `outputs` in its place, the number of targets.
    blocks: residual blocks, each of which is followed by a slot "block0", "block1" and so on.

    Raises InputError where a size is no whole number from 1 on, or not one of `classes` and `outputs` is given.
    """
    last = _outputs("esper.mlp", classes, outputs)
    check_sizes("esper.mlp", {"inputs": inputs, "width": width, "blocks": blocks})
    return ResidualMLP(inputs, width, (width,) * blocks, last)


def cnn(
    inputs: tuple[int, int, int],
    width: int = 16,
    classes: int | None = None,
    *,
    blocks: int = 2,
    outputs: int | None = None,
) -> ResidualCNN:
    """A host for images, in one line: esper.task("mine", x, y, host=esper.cnn(inputs=(3, 32, 32), classes=10)).

    Returns a factory of residual convolutional networks (B, C, H, W) -> (B, classes), with a slot behind each of its blocks.
    A block halves the resolution and doubles the channels, of which the first has `width`; nothing is normalised over the
    batch. After the last block come the mean over positions and a linear layer.

    inputs: channels, height and width of an image.
    width: channels behind the first block.
    classes: how many there are to tell apart. A regression gives `outputs` in its place, the number of targets.
    blocks: residual blocks, each of which is followed by a slot "block0", "block1" and so on.

    Raises InputError where a size is no whole number from 1 on, not one of `classes` and `outputs` is given, or an image is
    too small to be halved so often.
    """
    last = _outputs("esper.cnn", classes, outputs)
    check_sizes("esper.cnn", {"width": width, "blocks": blocks})
    return ResidualCNN(inputs, tuple(width * 2**block for block in range(blocks)), last)


def _outputs(of: str, classes: int | None, outputs: int | None) -> int:
    if (classes is None) == (outputs is None):
        raise InputError(
            f"{of} was given classes={classes!r} and outputs={outputs!r}; give one of them: the number of classes, or that "
            "of the targets of a regression"
        )
    name, value = ("outputs", outputs) if classes is None else ("classes", classes)
    check_sizes(of, {name: value})
    assert value is not None
    return value


def menu_of(host: SegmentedHost) -> tuple[str, ...]:
    """The default menu of a host: blueprints for every kind of stream at its slots."""
    kinds = {slot.kind for slot in host.slots}
    return tuple(
        name for kind, menu in {Kind.VECTOR: VECTOR_MENU, Kind.MAP: MAP_MENU}.items() if kind in kinds for name in menu
    )


MOST_BLOCKS, WIDEST = 1024, 2**24
"""What a file may ask of a host that it names; one that is built from Python may be larger."""

Host = MLP | ResidualMLP | DamagedMLP | CNN | ResidualCNN
HOSTS: Mapping[str, type[Host]] = MappingProxyType(
    {factory.name: factory for factory in (MLP, ResidualMLP, DamagedMLP, CNN, ResidualCNN)}
)
"""The hosts that a saved network can name; their arguments are what `dataclasses.asdict` gives."""


def host_from(name: str, arguments: Mapping[str, Any]) -> Host:
    """The host factory that a saved network names, from its JSON arguments. InputError where either is not known."""
    if name not in HOSTS:
        raise InputError(f"unknown host {name!r}; the hosts that can be rebuilt by name are {', '.join(HOSTS)}")
    wanted = [field.name for field in fields(HOSTS[name])]
    if set(arguments) != set(wanted):
        raise InputError(f"host {name!r} was given the arguments {sorted(arguments)}; give exactly {wanted}")
    for argument, value in arguments.items():
        numbers = value if isinstance(value, list | tuple) else (value,)
        if len(numbers) > MOST_BLOCKS or any(isinstance(number, int) and number > WIDEST for number in numbers):
            raise InputError(
                f"{argument} of host {name!r} asks for a size over {WIDEST:,} or more than {MOST_BLOCKS:,} of them; "
                "give the file of a network that was grown"
            )
    return HOSTS[name](**arguments)
