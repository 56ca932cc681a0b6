"""Actors: processes that play the parts of a round. The learner sends weights and parts, and gets rollouts and rows back.

A part's result depends on the part and the weights alone. It is therefore the same from any actor, and the part of an actor
that was lost is played again by another. How actors are started and reached is the matter of a `Crew`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from esper.leyline.errors import ActorError, DataFault, InputError, LearningError, OutOfMemory, UserCodeError
from esper.leyline.text import counted
from esper.store.checkpoint import Tree
from esper.store.wire import pack, unpack

TRIES = 3
"""Number of times that a part is played, or an actor is started, before the run stops."""

WAIT = 0.5
"""Longest time until an interrupt is seen [seconds]."""

_ERRORS = {kind.__name__: kind for kind in (DataFault, InputError, LearningError, OutOfMemory, UserCodeError)}


class Stop(Exception):
    """An interrupt ended a round early."""


class Crew(Protocol):
    """Actors of one kind, numbered from 0. Each answers messages one by one, and says `{"ready": ...}` when it has started."""

    size: int

    def start(self, actor: int) -> None:
        """Start an actor; one of the same number must have been lost."""
        ...

    def send(self, actor: int, message: bytes) -> None:
        """Send a message to an actor that is not busy. If the actor is lost, `receive` says so."""
        ...

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers at most so long; return actors with their answers, None of an actor that was lost."""
        ...

    def close(self) -> None:
        """End all actors."""
        ...


class Actors:
    """The actors of a run. Parts are given to actors as these become free."""

    def __init__(
        self,
        crew: Crew,
        note: Callable[[str], None],
        check: Callable[[Any], None] = lambda ready: None,
        mend: str = "give fewer workers",
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the actors, and wait until all are ready. `check` gets what an actor says about itself.

        mend: what to do if actors are lost for good. Raises InputError if an actor cannot start, and KeyboardInterrupt once
        `asked` says so.
        """
        self.crew, self.note, self._check, self._mend = crew, note, check, mend
        self.lost = 0  # actors that were lost and started again
        self.waiting = 0.0  # seconds that actors did not play in, over all rounds and actors
        self.sent = self.received = 0  # bytes
        self._weights = -1  # number of the present weights
        self._idle: set[int] = set()
        self._known: dict[int, int] = {}  # number of the weights that an actor has
        self._failures = dict.fromkeys(range(crew.size), 0)  # starts in a row that failed
        try:
            for actor in range(crew.size):
                crew.start(actor)
            while len(self._idle) < crew.size:
                if asked():
                    raise KeyboardInterrupt("interrupted while the actors were started")
                for actor, message in crew.receive(WAIT):
                    if message is None:
                        raise InputError(
                            f"actor {actor} ended while it was started, and its own output above says why; a script that calls "
                            "Esper with workers needs its calls under if __name__ == '__main__':"
                        )
                    self._started(actor, unpack(message))
        except BaseException:
            crew.close()
            raise

    @property
    def size(self) -> int:
        """Number of actors."""
        return self.crew.size

    def play(
        self,
        weights: Tree,
        parts: Sequence[Tree],
        asked: Callable[[], bool] = lambda: False,
        done: Callable[[int, dict[str, Any]], None] = lambda place, result: None,
    ) -> list[dict[str, Any]]:
        """Return the results of parts played with weights, in the order of the parts.

        `done` is called with the place of a part and its result as soon as there is one. A part whose actor is lost is played
        again. Raises Stop once `asked` says so, ActorError if TRIES actors were lost by a part, and the error of the actor if
        its code failed.
        """
        self._weights += 1
        message, results = pack({"weights": weights}), dict[int, Any]()
        left, busy, tries = deque(range(len(parts))), dict[int, int](), [0] * len(parts)
        while len(results) < len(parts):
            if asked():
                self.crew.close()
                raise Stop
            for actor in sorted(self._idle) if left else ():
                if not left:
                    break
                own = next(
                    (place for place in left if place % self.size == actor), left[0]
                )  # it may still have its population
                left.remove(own)
                busy[actor] = own
                tries[own] += 1
                self._idle.discard(actor)
                if self._known.get(actor) != self._weights:
                    self._send(actor, message)
                    self._known[actor] = self._weights
                self._send(actor, pack({"part": parts[own]}))
            for actor, answer in self.crew.receive(WAIT):
                if answer is None:
                    again = busy.pop(actor, None)
                    self._replace(actor, again, 0 if again is None else tries[again])
                    if again is not None:
                        left.appendleft(again)
                    continue
                self.received += len(answer)
                if actor not in busy:  # it was started again
                    self._started(actor, unpack(answer))
                    continue
                place = busy.pop(actor)
                results[place] = _checked(unpack(answer))["result"]
                self._idle.add(actor)
                done(place, results[place])
        return [results[place] for place in range(len(parts))]

    def waited(self, seconds: float, playing: float) -> float:
        """Add and return the time that all actors lost in waiting, of a time of which they played `playing` together [s]."""
        lost = max(self.size * seconds - playing, 0.0)
        self.waiting += lost
        return lost

    def summary(self) -> dict[str, Any]:
        """Return the number of actors, how many were lost and replaced, and the seconds that they waited."""
        return {"workers": self.size, "lost": self.lost, "waiting_seconds": round(self.waiting, 3)}

    def close(self) -> None:
        """End all actors."""
        self.crew.close()

    def _send(self, actor: int, message: bytes) -> None:
        self.sent += len(message)
        self.crew.send(actor, message)

    def _started(self, actor: int, tree: Mapping[str, Any]) -> None:
        if "error" in tree and tree["error"]["type"] != OutOfMemory.__name__:
            error = tree["error"]
            said = error["message"] if error["type"] == InputError.__name__ else f"{error['type']}: {error['message']}"
            raise InputError(
                f"actor {actor} could not be started: {said}; an actor is a process of its own, which must be able to import "
                "the task"
            )
        self._check(_checked(tree)["ready"])
        self._failures[actor] = 0
        self._known.pop(actor, None)
        self._idle.add(actor)

    def _replace(self, actor: int, part: int | None, tried: int) -> None:
        """Start another actor for one that was lost. Raises ActorError after too many attempts."""
        self.lost += 1
        self._idle.discard(actor)
        self._failures[actor] += 1
        if tried >= TRIES or self._failures[actor] >= TRIES:
            what = "it could not be started again" if part is None else f"part {part} was lost with each"
            raise ActorError(
                f"actor {actor} was lost {counted(max(tried, self._failures[actor]), 'time')}, because something ended its "
                f"process, such as a lack of memory, and {what}; {self._mend}"
            )
        self.crew.start(actor)
        self.note(
            f"actor {actor} was lost; another is started{'' if part is None else ', and its part is played again'}"
        )


def _checked(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer of an actor. Raises the error that it contains, if any."""
    if "error" in tree:
        kind, message, trace = tree["error"]["type"], tree["error"]["message"], tree["error"]["trace"]
        error = _ERRORS.get(kind, ActorError)(message if kind in _ERRORS else f"an actor failed: {kind}: {message}")
        if trace:
            error.add_note(trace)
        raise error
    return tree
