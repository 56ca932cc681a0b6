"""Divide the states of bodies and of snapshots by rows, and join them again, so that rows may be in several processes. R rows.

A stack of seeds keeps its place in every part, also where no row of the part has such a seed: a snapshot may hold one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.stack.plan import Indices
from esper.kasmina.stack.rows import picked_columns

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
