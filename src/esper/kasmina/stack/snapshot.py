"""Snapshots of healthy networks, to which the governor restores rows. E rows, S slots.

A snapshot holds the host and the fossilized seeds, with their optimizer moments and buffers. Other seeds are not restored
(semantics, governor).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.lifecycle import edits
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.plan import Indices
from esper.kasmina.stack.rows import Stack
from esper.leyline.lifecycle.stages import Stage
from esper.leyline.lifecycle.view import Bools, Seeds, choose


class Rows:
    """The columns of a stack in the order of the environments, without gradients, which are 0 between steps."""

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
        """Copy the saved columns of environments (n,) into rows (n,) of a stack."""
        self.follow(stack)
        source, target = (torch.from_numpy(index).to(stack.device, non_blocking=True) for index in (envs, rows))
        for name, column in self.columns.items():
            stack.columns[name].index_copy_(0, target, column.index_select(0, source))
        stack.columns["gradient"].index_fill_(0, target, 0)
        stack.steps[rows] = self.steps[envs]

    def follow(self, stack: Stack) -> None:
        """Make room for a column that the stack has added since."""
        for name, column in _room(stack, len(self.steps)).items() if len(self.columns) < len(stack.columns) - 1 else ():
            self.columns.setdefault(name, column)


class Snapshot:
    """Snapshots of all rows, each taken at the last healthy step of its row."""

    def __init__(self, body: Body, seeds: Seeds) -> None:
        self._body = body
        self.seeds = seeds
        self.step = np.full(len(seeds.stage), -1, np.int64)  # (E,) steps taken when the row was saved
        self._host = Rows(body.host, len(self.step))
        self._fossils: dict[tuple[int, int], Rows] = {}

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        """Save some rows, (E,) bool, as they are after `step` steps."""
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
        """Restore some rows, (E,) bool, to their snapshots, bit for bit; return the state of all, with that of `kept`
        for these rows.

        `kept` (E, S) is `self.seeds` without the seeds that are not to be restored.
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
        """Return the snapshots as a tree of arrays.

        Rows that were saved at step `now` are left out, because they equal what the body holds.
        """
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
        """Restore what `state` returned, with a body that is restored already. Raises ValueError if it came from another body."""
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
    """Yield for each stack the rows (n,) that hold fossils of the chosen environments, and those environments (n,)."""
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
    raise AssertionError(f"no seed is planted while rows are emptied, but a seed was at slot {slot} of row {env}")


def _key_of_nothing(env: int, slot: int) -> int:
    """Return any key: the values that are drawn with it are overwritten at once."""
    return 0
