"""Say where a host, or any network, can grow, and what a seed may read there."""

from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from esper.leyline.lifecycle.streams import STREAMS, Kind, Stream
from esper.leyline.messages import InputError


class Tap(StrEnum):
    """Says what a seed reads.

    Attributes:
        HERE: the stream at the slot: depth
        BEFORE: the stream as it entered the segment in front of the slot, or an earlier one that the slot names: a bypass
        INPUT: the input of the host: a skip
    """

    HERE = "here"
    BEFORE = "before"
    INPUT = "input"


@dataclass(frozen=True)
class SlotSpec:
    """Describes a place between two segments of a host where a seed may be planted.

    Attributes:
        name (str): name of the slot
        after (int): index of the segment whose output the slot changes
        width (int): features of the stream at the slot; channels of a map
        kind (Kind): shape of the stream at the slot, also by its name: 'vector', 'map', 'sequence' or 'volume'
        inner (int or None): number of modules at the start of that `nn.Sequential` that make its inner features; None lets the
            host find it
        causal (bool): whether no position of a sequence may depend on later ones, so that only causal blueprints fit
        head (bool): whether the slot lies behind the last layer, so that a seed changes the outputs. Rules and trees, which
            place seeds on the stream of the blocks, leave such slots out
        around (int or None): index of the segment whose input a bypass reads. An earlier one than `after` spans all segments from
            there on, for instance a narrow place between wide streams; None is `after` itself
    """

    name: str
    after: int
    width: int
    kind: Kind = Kind.VECTOR
    inner: int | None = None
    causal: bool = False
    head: bool = False
    around: int | None = None

    if TYPE_CHECKING:  # a type checker takes the kind by its name, too

        def __init__(
            self,
            name: str,
            after: int,
            width: int,
            kind: Kind | Literal["vector", "map", "sequence", "volume"] = Kind.VECTOR,
            inner: int | None = None,
            causal: bool = False,
            head: bool = False,
            around: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"the name of a slot is {self.name!r}; give it a name in quotes, as in 'middle'")
        for name, least, given, mend in (
            ("after", 0, "slot {!r} is after segment", "the index of a segment"),
            ("width", 1, "slot {!r} has width", "the features of the segment before it"),
            ("inner", 1, "inner of slot {!r} is", "how many modules of the segment make its inner features"),
            ("around", 0, "slot {!r} is around segment", "the index of the segment whose input its bypasses read"),
        ):
            value, none = getattr(self, name), "None, or " if name in ("inner", "around") else ""
            if none and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                told = f"{given.format(self.name)} {value!r}"
                raise InputError(f"{told}; give {none}{mend}, a whole number from {least} on")
            object.__setattr__(self, name, int(value))  # of NumPy's integers too
        if self.start > self.after:
            raise InputError(
                f"slot {self.name!r} is around segment {self.around}, but it lies behind segment {self.after}; give an earlier "
                "segment, or leave around out"
            )
        if self.kind not in list(Kind):
            raise InputError(f"slot {self.name!r} is of kind {self.kind!r}; choose one of {', '.join(Kind)}")
        object.__setattr__(self, "kind", Kind(self.kind))
        if self.causal and self.kind != Kind.SEQUENCE:
            raise InputError(
                f"slot {self.name!r} is causal and of kind {str(self.kind)!r}; leave causal out, because only a sequence has "
                "earlier and later positions"
            )

    @property
    def stream(self) -> Stream:
        """The stream at the slot."""
        return STREAMS[self.kind](self.width)

    @property
    def start(self) -> int:
        """The index of the first segment that a bypass goes around; the last one is `after`."""
        return self.after if self.around is None else self.around


@dataclass(frozen=True)
class Site:
    """Describes a place in a network where a seed can be planted: the output of a submodule.

    Attributes:
        name (str): name of the site
        after (str): dotted path of the submodule whose output the seed changes
        around (str): dotted path of the submodule whose input a bypass reads
        stream (Stream): the stream at the site: `Vector`, `Map`, `Sequence` or `Volume`
        causal (bool): whether no position of the stream may depend on later ones
    """

    name: str
    after: str
    around: str
    stream: Stream
    causal: bool = False
