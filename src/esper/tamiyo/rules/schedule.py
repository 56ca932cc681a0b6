"""Carry out a fixed list of operations, read from YAML, in every environment. E environments, N entries.

A file is a list of entries:

    - {at: 4, op: germinate, slot: s1, blueprint: bypass-mlp, keep: true}
    - {at: 9, op: prune, slot: s0, tempo: 0}
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from esper.leyline.config.parsing import LARGEST_YAML, parse_yaml
from esper.leyline.lifecycle.masks import OPEN, allowed_of, choices_of, complete, defaults
from esper.leyline.lifecycle.view import Bools, Outcome, Space, View
from esper.leyline.lifecycle.vocabulary import (
    IN_BUDGET,
    RELEVANT,
    Actions,
    Blend,
    Head,
    Ints,
    MeantNumber,
    Op,
    Stage,
    among,
)
from esper.leyline.messages import InputError, counted
from esper.store.disk import read_named
from esper.tamiyo.rules.base import Rule


class EntryObstacle(MeantNumber):
    """Says why a pending entry was not carried out at a decision, and what to change."""

    EARLY = 1, "`at` is {at}, and the last decision of {steps} is {last}; lower `at`, or raise steps"
    BUSY = 2, "slot {slot} held a seed, or was under embargo after one; name another slot, or lower lifecycle.embargo"
    FULL = 3, "the environment held lifecycle.max_seeds seeds already; raise lifecycle.max_seeds"
    INCUBATING = 4, "lifecycle.max_training_seeds seeds were incubating; raise that key, or steps"
    NO_SEED = 5, "slot {slot} held no seed at the stage that the operation needs; plant one earlier, or raise steps"
    GATE = (
        6,
        "the gate of the seed at {slot} refused it until the last decision; lower {gate}, set gates.permissive, or raise steps",
    )
    CHOICE = 7, "the masks did not allow the choices of the entry; leave them out"
    TURN = 8, "other entries came first, and a decision carries out one; raise steps"
    REFUSED = 9, "the engine refused it; `refused` in the summary says why"


def _by_name(kind: type[IntEnum]) -> BeforeValidator:
    """Return a validator that turns names into members. The strict mode of the model refuses what is then no member."""
    return BeforeValidator(
        lambda value: kind.__members__.get(value.upper(), value) if isinstance(value, str) else value
    )


class ScheduleEntry(BaseModel):
    """Describes one entry of a schedule. A head that is left out takes its default (`masks.defaults`), or another valid one.

    Error messages quote the description of a field as the accepted values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    at: int = Field(ge=0, lt=2**63, description="a step, a whole number from 0 on")
    op: Annotated[Op, _by_name(Op)] = Field(description="one of " + ", ".join(Op.__members__))
    slot: str | None = Field(None, description="the name of a slot")
    blueprint: str | None = Field(None, description="the name of a blueprint of the menu")
    blend: Annotated[Blend, _by_name(Blend)] | None = Field(None, description="one of " + ", ".join(Blend.__members__))
    tempo: int | None = Field(None, ge=0, description="a ramp length, a whole number of steps from 0 on")
    target: float | None = Field(None, gt=0, le=1, description="an alpha above 0 and up to 1")
    keep: bool = Field(False, description="true or false")

    @pydantic.model_validator(mode="after")
    def _heads_that_matter(self) -> "ScheduleEntry":
        op = self.op.name
        for head in (Head.SLOT, *OPEN):
            name = head.name.lower()
            given = getattr(self, name) is not None
            if given and not RELEVANT[self.op, head]:
                raise ValueError(f"{op} takes no {name}; leave it out")
            if not given and RELEVANT[self.op, head] and head in (Head.SLOT, Head.BLUEPRINT):
                raise ValueError(f"{op} needs a {name}; add the name of one")
        if self.op is Op.GERMINATE and self.tempo == 0:
            raise ValueError("GERMINATE cannot take tempo 0; give a ramp of at least one step")
        if self.keep and self.op is not Op.GERMINATE:
            raise ValueError(f"keep goes with GERMINATE, not with {op}; leave it out")
        return self


class _Plan(NamedTuple):
    """Holds the entries as indices into a space. An entry is followed by those that its `keep` adds; a WAIT is the last entry."""

    at: Ints  # (N,) steps
    decisions: Ints  # (N, heads) choice of each head
    free: Bools  # (N, heads) whether the entry leaves the head out, so that any choice is accepted
    parent: Ints  # (N,) the entry after which one of a `keep` is pending; -1 for those that are pending from the start
    ends: Bools  # (N, N) whether carrying out i makes j not pending


class Schedule(Rule):
    """Carries out the same entries in every environment.

    At each decision an environment carries out the first pending entry, in list order, whose step `at` has come and which its
    masks allow. An entry that is not yet valid waits without delaying later entries. Each entry is carried out once per
    episode. An entry that the engine refuses, for example for its parameters, stays pending and is skipped at the next
    decision. `keep` adds an ADVANCE and a FOSSILIZE of the slot after a GERMINATE; they are pending from planting until
    another seed is planted in the slot.
    """

    def __init__(self, entries: Sequence[ScheduleEntry], source: str = "schedule") -> None:
        self.entries = tuple(entries)
        self.source = source  # the name of the schedule in messages
        # every entry with its number in the list, from 1; those that a `keep` adds follow with the same number
        self._rows: list[tuple[int, ScheduleEntry]] = []
        for number, entry in enumerate(self.entries, 1):
            ops = (Op.ADVANCE, Op.FOSSILIZE) if entry.keep else ()
            added = (ScheduleEntry(at=entry.at, op=op, slot=entry.slot) for op in ops)
            self._rows += [(number, each) for each in (entry, *added)]
        self._plan: _Plan | None = None
        self._pending = np.zeros((0, 0), bool)  # (E, N)
        self._refused = self._pending  # (E, N) at the last decision
        self._turn = np.zeros(0, np.int64), self._pending  # (E,) last entry, and (E, N) pending entries before it
        self._obstacle = np.zeros((0, 0), np.int8)  # (E, N) an EntryObstacle, of the last decision
        self._steps = 0

    def act(self, view: View) -> Actions:
        """Return the operation of an entry, or WAIT, per environment. InputError if the space lacks a name of an entry."""
        if self._plan is None or view.step == 0:
            self._plan = _plan(self._rows, view.space, self.source)
        plan = self._plan
        if view.step == 0 or not len(self._pending):
            self._pending = np.tile(plan.parent < 0, (len(view.masks.op), 1))
            self._refused = np.zeros_like(self._pending)
        due = self._pending & ~self._refused & (plan.at <= view.step)
        ready = due & allowed_of(view.masks, plan.decisions, plan.free)
        turn = ready.argmax(1)  # the last entry, a WAIT, is always ready
        now = np.where(ready, np.int8(EntryObstacle.TURN), _obstacles(plan, view))
        now = np.where(self._refused, np.int8(EntryObstacle.REFUSED), now)
        self._obstacle = np.where(plan.at <= view.step, now, np.int8(EntryObstacle.EARLY))
        self._steps = view.steps
        self._turn, self._refused = (turn, self._pending), np.zeros_like(self._pending)
        self._pending = (self._pending & ~plan.ends[turn]) | (plan.parent == turn[:, None])
        op, slot, *others = plan.decisions[turn].T
        return complete(view.masks, op, slot, dict(zip(OPEN, others, strict=True)))

    def store(self, outcome: Outcome) -> None:
        """Make refused entries pending again."""
        turn, before = self._turn
        refused = ~outcome.accepted[:, None]
        self._pending = np.where(refused, before, self._pending)
        self._refused = refused & (turn[:, None] == np.arange(before.shape[1]))
        self._obstacle = np.where(self._refused, np.int8(EntryObstacle.REFUSED), self._obstacle)

    def reasons(self) -> Sequence[str | None]:
        """Return for each environment the entry that planted, kept or removed a seed at the last decision; None for others."""
        names = [
            f"entry {number} of {self.source}" if entry.op in (Op.GERMINATE, Op.PRUNE, Op.FOSSILIZE) else None
            for number, entry in self._rows
        ]
        return [[*names, None][row] for row in self._turn[0].tolist()]  # None is for the WAIT at the end

    def explain(self) -> list[str]:
        """Return sentences that name the entries that were not carried out, with the causes and the numbers of environments."""
        if not len(self._pending):
            return []
        sentences = []
        gates = {
            Op.ADVANCE: "gates.gain_z or gates.min_training_steps",
            Op.FOSSILIZE: "gates.min_holding_steps, gates.min_contribution or gates.contribution_z",
        }
        known = {"steps": counted(self._steps, "step"), "last": self._steps - 1}
        for row, (number, entry) in enumerate(self._rows):
            own = {**known, "at": entry.at, "slot": entry.slot, "gate": gates.get(entry.op)}
            for cause in EntryObstacle:
                where = self._pending[:, row] & (self._obstacle[:, row] == cause)
                if where.any():
                    done = f"{entry.op.name} of entry {number} of {self.source} was not carried out"
                    envs = f"{int(where.sum())} of {counted(len(where), 'environment')}"
                    sentences.append(f"{done} in {envs}: {cause.meaning.format(**own)}")
        return sentences

    def state(self) -> dict[str, Any]:
        """Return the entries, and by environment the pending ones, those refused at the last decision, and the obstacles."""
        told = {"pending": self._pending, "refused": self._refused, "hindered": self._obstacle}
        return {"entries": self._listed(), **told, "steps": self._steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. InputError if the entries of the schedule have changed."""
        if state["entries"] != self._listed():
            raise InputError(f"{self.source} is not the schedule that the run began with; restore the old entries")
        self._plan, self._pending, self._refused = None, state["pending"], state["refused"]
        self._obstacle, self._steps = state["hindered"], state["steps"]

    def _listed(self) -> list[dict[str, Any]]:
        return [entry.model_dump(mode="json") for entry in self.entries]


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a YAML list of entries. InputError names the file and the entry that cannot be used."""
    data = read_named(Path(path), LARGEST_YAML, "a schedule is a readable YAML file")
    content = parse_yaml(data, str(path), "write one entry a line, as - {at: 4, op: WAIT}")
    if not isinstance(content, list):
        raise InputError(f"{path} is not a list of entries; write one entry a line, as - {{at: 4, op: WAIT}}")
    return Schedule([_entry(item, f"{path}, entry {i}") for i, item in enumerate(content, 1)], str(path))


def _entry(item: object, where: str) -> ScheduleEntry:
    if not isinstance(item, dict):
        raise InputError(f"{where} is {item!r}, not a mapping; write it as {{at: 4, op: WAIT}}")
    try:
        return ScheduleEntry.model_validate(item)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
    if not first["loc"]:
        raise InputError(f"{where}: {first['msg'].removeprefix('Value error, ')}")
    name = str(first["loc"][0])
    if name not in ScheduleEntry.model_fields:
        raise InputError(f"{where}: unknown key {name!r}; the keys are {', '.join(ScheduleEntry.model_fields)}")
    accepted = ScheduleEntry.model_fields[name].description
    if first["type"] == "missing":
        raise InputError(f"{where}: {name} is missing; give {accepted}")
    raise InputError(f"{where}: {name} is {first['input']!r}; give {accepted}")


def _plan(entries: Sequence[tuple[int, ScheduleEntry]], space: Space, source: str) -> _Plan:
    """Turn numbered entries into indices. InputError if an entry names what the space lacks, or a blueprint that does not fit."""
    numbers, rows = zip(*entries, (0, ScheduleEntry(at=0, op=Op.WAIT)), strict=True)
    # of the rows of one number, the first is the GERMINATE of a `keep`
    first = [numbers.index(number) for number in numbers]
    parent = np.array([-1 if row == at else at for row, at in enumerate(first)], np.int64)

    values = choices_of(space)
    usual = {Head.SLOT: 0, **defaults(space)}
    wanted = np.zeros((len(rows), len(Head)), np.int64)
    free = np.zeros((len(rows), len(Head)), bool)
    for row, entry in enumerate(rows):
        where = f"{source}, entry {numbers[row]}"
        for head, known in values.items():
            name = head.name.lower()
            value = getattr(entry, name)
            if value is not None and value not in known:
                raise InputError(
                    f"{where}: there is no {name} {value!r} here; choose one of {', '.join(map(str, known))}"
                )
            free[row, head] = value is None
            wanted[row, head] = usual[head] if value is None else known.index(value)
        fits = space.fits[wanted[row, Head.SLOT]]
        if entry.blueprint is not None and not fits[wanted[row, Head.BLUEPRINT]]:
            pairs = zip(values[Head.BLUEPRINT], fits, strict=True)
            fitting = ", ".join(name for name, fit in pairs if fit) or "another slot"
            raise InputError(f"{where}: {entry.blueprint} does not fit slot {entry.slot}; choose {fitting}")

    wanted[:, Head.OP] = op = np.array([entry.op for entry in rows], np.int64)
    slot = wanted[:, Head.SLOT]
    plants = (op == Op.GERMINATE)[:, None]
    itself = np.eye(len(rows), dtype=bool) & (np.arange(len(rows)) < len(rows) - 1)  # the last WAIT stays pending
    return _Plan(
        at=np.array([entry.at for entry in rows], np.int64),
        decisions=wanted,
        free=free,
        parent=parent,
        ends=itself | (plants & (parent >= 0) & (slot == slot[:, None])),
    )


_NEEDS = {
    Op.ADVANCE: {Stage.TRAINING},
    Op.FOSSILIZE: {Stage.HOLDING},
    Op.SET_ALPHA: {Stage.HOLDING},
    Op.PRUNE: {Stage.TRAINING, Stage.BLENDING, Stage.HOLDING},
}
"""The stages at which a seed can be the object of an operation."""


def _obstacles(plan: _Plan, view: View) -> NDArray[np.int8]:
    """Return (E, N) an EntryObstacle: what the stages of the seeds say about each entry, whatever its step."""
    stage = view.seeds.stage
    ops, here = plan.decisions[:, Head.OP], stage[:, plan.decisions[:, Head.SLOT]]  # (N,), (E, N)
    found = np.full(here.shape, EntryObstacle.CHOICE, np.int8)
    plants = ops == Op.GERMINATE
    incubates = among(stage, frozenset({Stage.GERMINATED, Stage.TRAINING})).any(1, keepdims=True)
    full = (among(stage, IN_BUDGET).sum(1) >= view.space.max_seeds)[:, None]
    found[plants & incubates] = EntryObstacle.INCUBATING
    found[plants & full] = EntryObstacle.FULL
    found[plants & (here != Stage.DORMANT)] = EntryObstacle.BUSY
    for op, stages in _NEEDS.items():
        able = among(here, frozenset(stages))
        acts = ops == op
        found[acts & able & (op in (Op.ADVANCE, Op.FOSSILIZE))] = EntryObstacle.GATE
        found[acts & ~able] = EntryObstacle.NO_SEED
    return found
