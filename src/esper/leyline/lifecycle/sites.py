"""Sites: the places of a network where seeds can be planted, and what a seed can read there."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from esper.leyline.lifecycle.streams import Stream

Flow = TypeVar("Flow")
"""What runs through a network: a tensor (B, ...), or whatever a caller passes through it."""


@dataclass(frozen=True)
class Site:
    """A place in a network where a seed can be planted: the output of a submodule.

    Attributes:
        name (str): name of the site
        after (str): dotted path of the submodule whose output the seed changes
        around (str): dotted path of the submodule whose input a bypass reads
        stream (Stream): the stream at the site: `Vector`, `Map` or `Sequence`
        causal (bool): whether no position of the stream may depend on later ones
    """

    name: str
    after: str
    around: str
    stream: Stream
    causal: bool = False


class Taps(NamedTuple, Generic[Flow]):
    """What a seed at a site can read."""

    here: Flow  # the output of the submodule `Site.after`
    before: Flow  # the input of the submodule `Site.around`
    input: Flow  # the input of the network
