"""A healthy moment of every row, to put it back to. E rows, S slots.

Kept are the host and the seeds that are part of it for good, with everything an optimizer or a buffer remembers of them: what
else a slot held is not put back (semantics, governor).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.lifecycle import edits
from esper.kasmina.plan import Indices
from esper.kasmina.stack import Stack
from esper.leyline.stages import Stage
from esper.leyline.view import Bools, Seeds, choose


class Rows:
    """The columns of a stack by environment instead of by its own order, without gradients, which are 0 between steps."""

    def __init__(self, stack: Stack, envs: int) -> None:
        self.columns = _room(stack, envs)
        self.steps = np.zeros(envs, np.int64)

    @torch.no_grad()
    def save(self, stack: Stack, rows: Indices, envs: Indices) -> None:
        """Copy rows (n,) of a stack to the environments (n,) that they belong to."""
        self.follow(stack)
        whole = len(envs) == len(self.steps) and np.array_equal(rows, envs)
        source, target = (torch.from_numpy(index).to(stack.device, non_blocking=True) for index in (rows, envs))
        for name, column in self.columns.items():
            if whole:
                column.copy_(stack.columns[name][: len(envs)])
            else:
                column.index_copy_(0, target, stack.columns[name].index_select(0, source))
        self.steps[envs] = stack.steps[rows]

    @torch.no_grad()
    def load(self, stack: Stack, rows: Indices, envs: Indices) -> None:
        """Copy what was saved of environments (n,) into rows (n,) of a stack."""
        self.follow(stack)
        source, target = (torch.from_numpy(index).to(stack.device, non_blocking=True) for index in (envs, rows))
        for name, column in self.columns.items():
            stack.columns[name].index_copy_(0, target, column.index_select(0, source))
        stack.columns["gradient"].index_fill_(0, target, 0)
        stack.steps[rows] = self.steps[envs]

    def follow(self, stack: Stack) -> None:
        """Room for a column that the stack has got since."""
        for name, column in _room(stack, len(self.steps)).items() if len(self.columns) < len(stack.columns) - 1 else ():
            self.columns.setdefault(name, column)


class Snapshot:
    """Of all rows, each at its own last healthy step."""

    def __init__(self, body: Body, seeds: Seeds) -> None:
        """Nothing is taken yet."""
        self._body = body
        self.seeds = seeds
        self.step = np.full(len(seeds.stage), -1, np.int64)  # (E,) steps that had been taken in the episode
        self._host = Rows(body.host, len(self.step))
        self._fossils: dict[tuple[int, int], Rows] = {}

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        """Keep some rows, (E,) bool, as they are after `step` steps."""
        body, envs = self._body, np.flatnonzero(rows)
        if not len(envs):
            return
        self._host.save(body.host, envs, envs)
        for at, here, owners in _fossils(body, seeds, rows):
            if at not in self._fossils:
                self._fossils[at] = Rows(body.stacks[at], len(self.step))
            self._fossils[at].save(body.stacks[at], here, owners)
        self.seeds = choose(rows, seeds, self.seeds)
        self.step[rows] = step

    def put_back(self, seeds: Seeds, rows: Bools, kept: Seeds) -> Seeds:
        """Make some rows, (E,) bool, what they were, bit for bit; returns the state of all, of those rows that of `kept`.

        `kept` (E, S) is `self.seeds` without the seeds that are not to come back.
        """
        body = self._body
        empty = seeds._replace(stage=np.where(rows[:, None], np.int8(Stage.DORMANT), seeds.stage))
        after: Seeds = choose(rows, kept, seeds)
        body.edit(edits(seeds, empty), empty, _unborn)
        body.edit(edits(empty, after), after, _key_of_nothing)
        envs = np.flatnonzero(rows)
        self._host.load(body.host, envs, envs)
        for at, here, owners in _fossils(body, after, rows):
            self._fossils[at].load(body.stacks[at], here, owners)
        return after

    def state(self, now: int) -> dict[str, Any]:
        """As a tree of arrays; rows that were taken at step `now` are what the body holds anyway and are left out."""
        stale = np.flatnonzero(self.step != now)
        index = torch.from_numpy(stale)
        return {
            "step": self.step,
            "seeds": self.seeds._asdict(),
            "stale": stale,
            "host": _cut(self._host, index),
            "fossils": [
                {"slot": slot, "form": form, "rows": _cut(rows, index)}
                for (slot, form), rows in (self._fossils.items() if len(stale) else ())
            ],
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Go on from what `state` gave, with a body that is as it was then. ValueError where it was another."""
        body, stale = self._body, state["stale"]
        self.step, self.seeds = state["step"], Seeds(**state["seeds"])
        self._fossils = {}
        fresh = np.ones(len(self.step), bool)
        fresh[stale] = False
        if fresh.any():
            self.take(seeds, fresh, int(self.step[fresh][0]))
        _paste(self._host, body.host, state["host"], stale)
        for entry in state["fossils"]:
            at = entry["slot"], entry["form"]
            if at not in body.stacks:
                raise ValueError(f"there is no form {at[1]} at slot {at[0]}")
            if at not in self._fossils:
                self._fossils[at] = Rows(body.stacks[at], len(self.step))
            _paste(self._fossils[at], body.stacks[at], entry["rows"], stale)


def _room(stack: Stack, envs: int) -> dict[str, Tensor]:
    return {
        name: column.new_zeros(envs, *column.shape[1:]) for name, column in stack.columns.items() if name != "gradient"
    }


def _fossils(body: Body, seeds: Seeds, rows: Bools) -> list[tuple[tuple[int, int], Indices, Indices]]:
    """By stack, the rows (n,) that hold fossils of the chosen environments, and those environments (n,)."""
    found = []
    for (slot, form), envs in body.envs.items():
        here = np.flatnonzero(rows[envs] & (seeds.stage[envs, slot] == Stage.FOSSILIZED))
        if len(here):
            found.append(((slot, form), here, envs[here]))
    return found


def _cut(rows: Rows, index: Tensor) -> dict[str, Any]:
    return {
        "columns": {name: column[index.to(column.device)] for name, column in rows.columns.items()},
        "steps": rows.steps[index.numpy()],
    }


def _paste(rows: Rows, stack: Stack, cut: dict[str, Any], envs: Indices) -> None:
    rows.follow(stack)
    index = torch.from_numpy(envs)
    for name, column in rows.columns.items():
        given = cut["columns"][name]
        if given.shape[1:] != column.shape[1:] or given.dtype != column.dtype:
            raise ValueError(f"{name} of a snapshot is {tuple(given.shape)} {given.dtype}, where another was expected")
        column[index.to(column.device)] = given.to(column.device)
    rows.steps[envs] = cut["steps"]


def _unborn(env: int, slot: int) -> int:
    raise AssertionError(f"nothing is born where rows are emptied, but a seed was at slot {slot} of row {env}")


def _key_of_nothing(env: int, slot: int) -> int:
    """What is drawn is written over at once."""
    return 0
