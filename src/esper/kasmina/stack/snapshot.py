"""Keep snapshots of healthy networks, and divide the states of bodies and snapshots among processes. E rows, S slots.

The governor restores rows to their snapshot. It holds the host and the fossilized seeds, with their optimizer moments and
buffers. Other seeds are not restored (semantics, governor).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.lifecycle import edits, uprooted
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.plan import Indices
from esper.kasmina.stack.rows import Columns, Stack, picked_columns
from esper.kasmina.stack.wider_rows import BodyWidening
from esper.leyline.lifecycle.view import Bools, Seeds, choose
from esper.leyline.lifecycle.vocabulary import Stage
from esper.store.tensors import Picked


class _SnapshotRows(Columns):
    """Keeps rows of a stack in the order of the environments, without gradients, which are 0 between steps."""

    def __init__(self, envs: int) -> None:
        self.columns, self.steps, self._writes = {}, np.zeros(envs, np.int64), 0

    def put(self, rows: Indices, columns: dict[str, Tensor], steps: Indices) -> None:
        super().put(rows, columns, steps)
        self._writes += 1

    def save(self, stack: Stack, rows: Indices, envs: Indices) -> None:
        """Copy rows (n,) of a stack to the environments (n,) that they belong to."""
        whole = len(rows) == len(self.steps) and np.array_equal(rows, np.arange(stack.capacity))
        self.put(envs, stack.columns if whole else picked_columns(stack.columns, rows), stack.steps[rows])

    def state(self, envs: Indices) -> dict[str, Any]:
        """Return what is saved of environments (n,), in ascending order; it shares the memory."""
        columns = {name: Picked(column, envs, self._writes) for name, column in self.columns.items()}
        return {"columns": columns, "steps": self.steps[envs]}

    def load_state(self, state: dict[str, Any], stack: Stack, envs: Indices) -> None:
        """Restore what `state` returned, of rows of a stack whose own state is restored, and so is of the same module."""
        columns = {name: state["columns"][name] for name in stack.columns if name != "gradient"}
        whole = {name: each.gathered() if isinstance(each, Picked) else each for name, each in columns.items()}
        self.put(envs, {name: each.to(stack.device) for name, each in whole.items()}, state["steps"])


class Snapshot:
    """Keeps a snapshot of each row, taken at the last healthy step of the row; a `tolaria.population.Keeper`."""

    def __init__(self, body: Body, seeds: Seeds, embargo: int) -> None:
        self.seeds, self.embargo = seeds, embargo
        self.step = np.full(len(seeds.stage), -1, np.int64)  # (E,) steps taken when the row was saved
        self.begin(body)

    def begin(self, body: Body) -> None:
        """Hold nothing yet of the rows of a body, in place of another one."""
        self._body = body
        self._host, none = _SnapshotRows(len(self.step)), np.zeros(0, np.int64)
        self._host.save(body.host, none, none)  # which makes room
        self._fossils = defaultdict[tuple[int, int], _SnapshotRows](lambda: _SnapshotRows(len(self.step)))

    def widen(self, widening: BodyWidening) -> None:
        """Hold what was saved as rows of the wider body."""
        host, fossils, kept = self._host, self._fossils, self.seeds
        self.begin(widening.new)
        every = np.arange(len(self.step))
        self._host.put(every, widening.of_hosts(host.columns), host.steps)
        for (slot, form), rows in fossils.items():
            blueprint = kept.blueprint[:, slot].astype(np.int64)
            held = (kept.stage[:, slot] == Stage.FOSSILIZED) & (widening.old.layout.form_of[slot, blueprint] == form)
            columns = picked_columns(rows.columns, envs := np.flatnonzero(held))
            for to, of, wider in widening.of_seeds(slot, form, blueprint[envs], columns):
                self._fossils[slot, to].put(envs[of], wider, rows.steps[envs[of]])

    def _places(self, seeds: Seeds, rows: Bools) -> Iterator[tuple[tuple[int, int], Indices, Indices]]:
        """Yield for each stack the rows (n,) that hold fossils of the chosen environments, and those environments (n,)."""
        for (slot, form), envs in self._body.envs.items():
            here = np.flatnonzero(rows[envs] & (seeds.stage[envs, slot] == Stage.FOSSILIZED))
            if len(here):
                yield (slot, form), here, envs[here]

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        body, envs = self._body, np.flatnonzero(rows)
        if not len(envs):
            return
        self._host.save(body.host, envs, envs)
        for at, here, owners in self._places(seeds, rows):
            self._fossils[at].save(body.stacks[at], here, owners)
        self.seeds = choose(rows, seeds, self.seeds)
        self.step[rows] = step

    def put_back(self, seeds: Seeds, rows: Bools) -> Seeds:
        body, kept = self._body, uprooted(self.seeds, rows, self.embargo)
        empty = seeds._replace(stage=np.where(rows[:, None], np.int8(Stage.DORMANT), seeds.stage))
        after: Seeds = choose(rows, kept, seeds)
        for old, new in ((seeds, empty), (empty, after)):
            body.edit(edits(old, new), new, lambda env, slot: 0)  # what is drawn by that key is overwritten at once
        envs = np.flatnonzero(rows)
        body.host.put(envs, picked_columns(self._host.columns, envs), self._host.steps[envs])
        for at, here, owners in self._places(after, rows):
            fossils = self._fossils[at]
            body.stacks[at].put(here, picked_columns(fossils.columns, owners), fossils.steps[owners])
        return after

    def state(self, now: int) -> dict[str, Any]:
        # Rows that were saved at step `now` are left out, because they equal what the body holds.
        stale = np.flatnonzero(self.step != now)
        fossils = self._fossils.items() if len(stale) else ()
        return {
            "step": self.step,
            "seeds": self.seeds._asdict(),
            "stale": stale,
            "host": self._host.state(stale),
            "fossils": [{"slot": slot, "form": form, "rows": rows.state(stale)} for (slot, form), rows in fossils],
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        body, stale = self._body, state["stale"]
        self.step, self.seeds = state["step"], Seeds(**state["seeds"])
        self._fossils.clear()
        fresh = np.ones(len(self.step), bool)
        fresh[stale] = False
        if fresh.any():
            self.take(seeds, fresh, int(self.step[fresh][0]))
        self._host.load_state(state["host"], body.host, stale)
        for entry in state["fossils"]:
            at = entry["slot"], entry["form"]
            if at not in body.stacks:
                raise ValueError(f"there is no form {at[1]} at slot {at[0]}")
            self._fossils[at].load_state(entry["rows"], body.stacks[at], stale)


# States, divided by rows and joined again. A stack of seeds keeps its place in every part, also where no row of the part has such
# a seed: a snapshot may hold one.

State = Mapping[str, Any]


def picked_body(state: State, rows: Indices) -> dict[str, Any]:
    """Return the state of a body (`Body.state`) whose row i is the row rows[i] (n,) of the given one."""
    seeds = []
    for entry in state["seeds"]:
        own, chosen = np.nonzero(rows[:, None] == entry["envs"])
        chosen = chosen if len(chosen) else np.zeros(1, np.int64)  # a stack has room for one row or more
        seeds.append({**entry, "envs": own, "stack": _picked(entry["stack"], chosen)})
    widths = {name: array[rows] for name, array in state["widths"].items()}
    return {**state, "host": _picked(state["host"], rows), "widths": widths, "seeds": seeds}


def joined_bodies(states: Sequence[State], rows: Sequence[Indices]) -> dict[str, Any]:
    """Return the state of a body of all rows from those of its parts, of which part i has rows[i] (n,).

    The rows of a stack of seeds are in the order of the parts; `Body.arrange` sorts them.
    """
    order = np.argsort(np.concatenate(rows))
    entries: dict[tuple[int, int], list[tuple[Indices, State]]] = {}
    for state, own in zip(states, rows, strict=True):
        for entry in state["seeds"]:
            held = entry["envs"]
            stack = _picked(entry["stack"], np.arange(max(len(held), 1)))
            entries.setdefault((entry["slot"], entry["form"]), []).append((own[held], stack))
    seeds = []
    for (slot, form), parts in entries.items():
        # the row that keeps the place of a part without such a seed is left out, unless there is no other
        full = [(envs, stack) for envs, stack in parts if len(envs)] or parts[:1]
        envs = np.concatenate([envs for envs, _ in full])
        seeds.append({"slot": slot, "form": form, "envs": envs, "stack": _joined([stack for _, stack in full])})
    widths = {name: np.concatenate([state["widths"][name] for state in states])[order] for name in states[0]["widths"]}
    host = _picked(_joined([state["host"] for state in states]), order)
    return {**states[0], "host": host, "widths": widths, "seeds": seeds}


def picked_snapshot(state: State, rows: Indices) -> dict[str, Any]:
    """Return the state of snapshots (`Snapshot.state`) whose row i is the row rows[i] (n,) of the given one."""
    stale, chosen = np.nonzero(rows[:, None] == state["stale"])
    return {
        "step": state["step"][rows],
        "seeds": {name: array[rows] for name, array in state["seeds"].items()},
        "stale": stale,
        "host": _picked(state["host"], chosen),
        "fossils": [{**entry, "rows": _picked(entry["rows"], chosen)} for entry in state["fossils"]],
    }


def joined_snapshots(states: Sequence[State], rows: Sequence[Indices]) -> dict[str, Any]:
    """Return the state of the snapshots of all rows from those of their parts, as `joined_bodies` does."""
    order = np.argsort(np.concatenate(rows))
    stale = [own[state["stale"]] for state, own in zip(states, rows, strict=True)]
    fossils: dict[tuple[int, int], dict[int, State]] = {}
    for index, state in enumerate(states):
        for entry in state["fossils"]:
            fossils.setdefault((entry["slot"], entry["form"]), {})[index] = entry["rows"]

    def filled(found: Mapping[int, State]) -> dict[str, Any]:
        known = next(iter(found.values()))
        absent = [{**known, "columns": {}, "steps": np.zeros(len(own), np.int64)} for own in stale]
        return _joined([found.get(index, none) for index, none in enumerate(absent)])

    def whole(of: Sequence[Any]) -> Any:
        return np.concatenate(of)[order]

    return {
        "step": whole([state["step"] for state in states]),
        "seeds": {name: whole([state["seeds"][name] for state in states]) for name in states[0]["seeds"]},
        "stale": np.concatenate(stale),
        "host": _joined([state["host"] for state in states]),
        "fossils": [{"slot": slot, "form": form, "rows": filled(found)} for (slot, form), found in fossils.items()],
    }


def _picked(stack: State, rows: Indices) -> dict[str, Any]:
    """Return some rows (n,) of the state of a stack."""
    return {**stack, "columns": picked_columns(stack["columns"], rows), "steps": stack["steps"][rows]}


def _joined(stacks: Sequence[State]) -> dict[str, Any]:
    """Join the rows of states of stacks. A column that a part does not have is 0 there: no parameter of its rows is fixed."""
    known = {name: column for stack in stacks for name, column in stack["columns"].items()}

    def column(stack: State, name: str) -> Tensor:
        found: Tensor | None = stack["columns"].get(name)
        return known[name].new_zeros(len(stack["steps"]), *known[name].shape[1:]) if found is None else found

    columns = {name: torch.cat([column(stack, name) for stack in stacks]) for name in known}
    return {**stacks[0], "columns": columns, "steps": np.concatenate([stack["steps"] for stack in stacks])}
