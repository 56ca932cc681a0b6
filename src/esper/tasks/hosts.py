"""The hosts that Esper's own tasks grow, and those that a saved network can name."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from esper.leyline.errors import InputError
from esper.leyline.task import Room
from esper.tasks.convolutional import CNN as CNN
from esper.tasks.convolutional import ResidualCNN as ResidualCNN
from esper.tasks.dense import MLP as MLP
from esper.tasks.dense import DamagedMLP as DamagedMLP
from esper.tasks.dense import ResidualMLP as ResidualMLP

VECTOR_MENU = ("bypass-linear", "bypass-mlp", "mlp-small")
"""The default menu where the stream is a vector. A skip from the input is not in it: it leaves nothing to decide."""
MAP_MENU = ("bypass-conv-3x3", "bypass-conv-1x1", "conv-light", "squeeze-excite")
"""The default menu where the stream is a map."""


def roomy(host: MLP | ResidualMLP) -> Room:
    """The layout of rows for a host whose widths are rounded up to multiples of 4.

    The last bit of a product can depend on whether a row's result lies on a multiple of 16 bytes, so on where the row stands
    in the population. With such widths every row does, and a row is bitwise the same wherever it stands.
    """

    def up(width: int) -> int:
        return -(-width // 4) * 4

    layout = replace(host, inputs=up(host.inputs), width=up(host.width), hidden=tuple(map(up, host.hidden)))
    return Room(layout, (layout.inputs,))


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
