"""Where a host can grow, and what a seed may read there."""

from dataclasses import dataclass
from enum import StrEnum

from esper.leyline.errors import InputError


class Kind(StrEnum):
    """The shape of the stream at a slot, after the batch axis."""

    VECTOR = "vector"  # (D,)
    MAP = "map"  # (C, H, W)


class Tap(StrEnum):
    """What a seed reads."""

    HERE = "here"  # the stream at the slot: depth
    BEFORE = "before"  # the stream as it entered the segment in front of the slot: a bypass
    INPUT = "input"  # the input of the host: a skip


@dataclass(frozen=True)
class SlotSpec:
    """A place between two segments of a host where a seed may be planted."""

    name: str
    after: int  # index of the segment whose output the slot changes
    width: int  # features of the stream at the slot; channels of a map
    kind: Kind = Kind.VECTOR
    inner: int | None = None  # how many modules of that nn.Sequential make its inner features, for sensors; None: none

    def __post_init__(self) -> None:
        if self.kind not in list(Kind):
            raise InputError(f"slot {self.name!r} is of kind {self.kind!r}; choose one of {', '.join(Kind)}")
        object.__setattr__(self, "kind", Kind(self.kind))
