"""List the seeds that were planted, kept and removed in an episode, with the reasons. E environments, S slots.

A decision can take effect later than it is made: a PRUNE with a ramp removes the seed at the end of the ramp. The basis of a
decision is therefore recorded when it is made, and listed when it takes effect.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import GatesConfig
from esper.leyline.lifecycle.actions import Op
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.stages import IN_BUDGET, Stage, among
from esper.leyline.lifecycle.verdicts import Vital
from esper.leyline.lifecycle.view import Bools, Measurements, Seeds, Space, Transitions
from esper.leyline.text import counted
from esper.nissa.events import Basis

GATES = {Stage.TRAINING: "advance", Stage.HOLDING: "fossilize"}
"""The gate that a seed must pass next, by its stage."""


class SeedHistory:
    """Lists of the seeds that were planted, kept and removed, in order.

    The entries have the keys env, slot, blueprint, step and reason. `bases` holds the bases of decisions that have not taken
    effect, by environment and slot. `most` is how many entries of each list stay, the last ones; None keeps all. `unlisted`
    counts the others.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        self.unlisted = {"plantings": 0, "keeps": 0, "prunes": 0}
        self.plantings: list[dict[str, Any]] = []
        self.keeps: list[dict[str, Any]] = []
        self.prunes: list[dict[str, Any]] = []
        self.bases: dict[tuple[int, int], Basis] = {}

    def note(
        self,
        op: NDArray[np.int64],
        slot: NDArray[np.int64],
        accepted: Bools,
        seeds: Seeds,
        measurements: Measurements,
        config: GatesConfig,
        reasons: Sequence[str | None] | None,
    ) -> None:
        """Record the bases of accepted decisions to plant, keep or remove seeds.

        op, slot, accepted: (E,). seeds, measurements: those before the decisions. reasons: those that the controller gives.
        """
        for env in np.flatnonzero(accepted & (op == Op.GERMINATE)).tolist():
            own = reasons[env] if reasons is not None else None
            self.bases[env, int(slot[env])] = Basis(why=own or _chose(Op.GERMINATE))
        chosen = np.flatnonzero(accepted & ((op == Op.PRUNE) | (op == Op.FOSSILIZE)))
        if not len(chosen):
            return
        gates = judge(seeds, measurements, config)
        for env in chosen.tolist():
            at = int(slot[env])
            if seeds.doomed[env, at]:  # the decision shortens a ramp down whose basis is recorded
                continue
            stage = Stage(int(seeds.stage[env, at]))
            gate = getattr(gates, GATES[stage]).reason(env, at) if stage in GATES else None
            own = reasons[env] if reasons is not None else None
            figures: dict[str, float | None] = {}
            parts = [own or _chose(op[env]), f"after {counted(int(seeds.age[env, at]), 'step')} of {stage.name}"]
            for name, estimate in (("contribution", measurements.contribution), ("gain", measurements.gain)):
                mean, se = (None if np.isnan(part[env, at]) else float(part[env, at]) for part in estimate[:2])
                figures |= {f"{name}_mean": mean, f"{name}_se": se}
                if (
                    mean is not None and se is not None and name not in (own or "")
                ):  # the controller's reason may have it
                    parts.append(f"{name} {mean:+.4f} ± {se:.4f}")
            if op[env] == Op.FOSSILIZE and (level := measurements.certificate[env, at]) > 0:
                parts.append(f"certified on fresh examples at level {level:.2g}")
            if gate is not None and op[env] == Op.PRUNE:
                parts.append(f"gate to {GATES[stage].upper()}: {gate}")
            self.bases[env, at] = Basis(why="; ".join(parts), gate_checks=gate, **figures)

    def transit(
        self, changes: Transitions, before: Seeds, after: Seeds, space: Space, step: int
    ) -> dict[tuple[int, int], Basis]:
        """List the seeds that were planted, kept or removed between two states. Returns the bases by environment and slot."""
        lists = {Stage.GERMINATED: "plantings", Stage.FOSSILIZED: "keeps", Stage.PRUNED: "prunes"}
        bases = {}
        for env, slot, _, target in np.stack(changes, 1).tolist():
            if target not in lists or (env, slot) not in self.bases:
                continue
            basis = bases[env, slot] = self.bases.pop((env, slot))
            seeds = after if target == Stage.GERMINATED else before
            self._add(lists[Stage(target)], _entry(env, slot, seeds, space, step, basis.why))
        return bases

    def roll_back(self, found: NDArray[np.int8], before: Seeds, after: Seeds, space: Space, step: int) -> None:
        """List the seeds that a rollback removed. found: (E,) a `Vital`; before, after: the seeds around the rollback."""
        for env in np.flatnonzero(found != Vital.GOOD).tolist():
            gone = among(before.stage[env], IN_BUDGET) & ~among(after.stage[env], IN_BUDGET)
            name = Vital(int(found[env])).name.lower()
            for slot in np.flatnonzero(gone).tolist():
                why = f"rolled back by the governor ({name}), which removes seeds that were not kept"
                self._add("prunes", _entry(env, slot, before, space, step, why))
            self.bases = {key: basis for key, basis in self.bases.items() if key[0] != env}

    def lists(self) -> dict[str, list[dict[str, Any]]]:
        return {"plantings": self.plantings, "keeps": self.keeps, "prunes": self.prunes}

    def state(self) -> dict[str, Any]:
        unlisted = {"unlisted": dict(self.unlisted)} if any(self.unlisted.values()) else {}
        return {**self.lists(), "bases": [[*key, basis._asdict()] for key, basis in self.bases.items()], **unlisted}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.plantings, self.keeps, self.prunes = (
            [dict(entry) for entry in state[name]] for name in ("plantings", "keeps", "prunes")
        )
        self.bases = {(int(env), int(slot)): Basis(**basis) for env, slot, basis in state["bases"]}
        self.unlisted |= state.get("unlisted", dict.fromkeys(self.unlisted, 0))

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        """Add an entry to a list, in place of the first one where the list is full."""
        entries = self.lists()[name]
        entries.append(entry)
        if self.most is not None and len(entries) > self.most:
            del entries[0]
            self.unlisted[name] += 1


def _entry(env: int, slot: int, seeds: Seeds, space: Space, step: int, reason: str) -> dict[str, Any]:
    blueprint = space.blueprints[int(seeds.blueprint[env, slot])].name
    return {"env": env, "slot": space.slots[slot], "blueprint": blueprint, "step": step, "reason": reason}


def _chose(op: int) -> str:
    return f"the controller chose {Op(int(op)).name}"
