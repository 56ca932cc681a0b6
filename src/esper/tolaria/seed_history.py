"""List the seeds that were planted, kept and removed in an episode, with the reasons. E environments, S slots.

A decision can take effect later than it is made: a PRUNE with a ramp removes the seed at the end of the ramp. The basis of a
decision is therefore recorded when it is made, and listed when it takes effect.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import GatesConfig
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.view import Bools, Measurements, Seeds, Space, Transitions
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Actions, Op, Stage, Vital, among
from esper.leyline.messages import counted

GATES = {Stage.TRAINING: "advance", Stage.HOLDING: "fossilize"}
"""The gate that a seed must pass next, by its stage."""


class SeedHistory:
    """Lists the seeds that were planted, kept and removed, in order.

    The entries of `lists` have the keys env, slot, blueprint, step and reason. `bases` holds the bases of decisions that have not
    taken effect, by environment and slot. `most` is how many entries of each list stay, the last ones; None keeps all. `unlisted`
    counts the others.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        self.lists: dict[str, list[dict[str, Any]]] = {"plantings": [], "keeps": [], "prunes": []}
        self.unlisted = dict.fromkeys(self.lists, 0)
        # the reason and the measurements of a decision, as fields of `LifecycleRow`; None for what was not measured
        self.bases: dict[tuple[int, int], dict[str, Any]] = {}

    def note(
        self,
        actions: Actions,
        accepted: Bools,
        seeds: Seeds,
        measured: Measurements,
        config: GatesConfig,
        reasons: Sequence[str | None] | None,
    ) -> None:
        """Record the bases of accepted decisions (E,) to plant, keep or remove seeds, as of the state before the decisions.

        reasons: those that the controller gives.
        """
        gates = None
        for env in np.flatnonzero(accepted & (actions.op != Op.WAIT)).tolist():
            op, slot = Op(int(actions.op[env])), int(actions.slot[env])
            own = (reasons[env] if reasons is not None else None) or ""
            why = own or f"the controller chose {op.name}"
            if op == Op.GERMINATE:
                self.bases[env, slot] = {"why": why}
            # The PRUNE of a doomed seed shortens a ramp down whose basis is recorded.
            if op not in (Op.PRUNE, Op.FOSSILIZE) or seeds.doomed[env, slot]:
                continue
            gates = gates or judge(seeds, measured, config)
            stage = Stage(int(seeds.stage[env, slot]))
            gate = getattr(gates, GATES[stage]).reason(env, slot) if stage in GATES else None
            figures: dict[str, float | None] = {}
            parts = [why, f"after {counted(int(seeds.age[env, slot]), 'step')} of {stage.name}"]
            for name, estimate in (("contribution", measured.contribution), ("gain", measured.gain)):
                mean, se = (None if np.isnan(part[env, slot]) else float(part[env, slot]) for part in estimate[:2])
                figures |= {f"{name}_mean": mean, f"{name}_se": se}
                if mean is not None and se is not None and name not in own:  # the controller's reason may have it
                    parts.append(f"{name} {mean:+.4f} ± {se:.4f}")
            if op == Op.FOSSILIZE and (level := measured.certificate[env, slot]) > 0:
                parts.append(f"certified on fresh examples at level {level:.2g}")
            if gate is not None and op == Op.PRUNE:
                parts.append(f"gate to {GATES[stage].upper()}: {gate}")
            self.bases[env, slot] = {"why": "; ".join(parts), **figures, "gate_checks": gate}

    def transit(
        self, changes: Transitions, before: Seeds, after: Seeds, space: Space, step: int
    ) -> dict[tuple[int, int], dict[str, Any]]:
        """List the seeds that were planted, kept or removed between two states. Returns the bases by environment and slot."""
        lists = {Stage.FOSSILIZED: "keeps", Stage.PRUNED: "prunes"}
        bases = {}
        for env, slot, source, target in np.stack(changes, 1).tolist():
            planted = source == Stage.DORMANT
            if not (planted or target in lists) or (env, slot) not in self.bases:
                continue
            basis = bases[env, slot] = self.bases.pop((env, slot))
            name, seeds = ("plantings", after) if planted else (lists[Stage(target)], before)
            self._add(name, env, slot, seeds, space, step, basis["why"])
        return bases

    def roll_back(self, found: NDArray[np.int8], before: Seeds, after: Seeds, space: Space, step: int) -> None:
        """List the seeds that a rollback removed. found: (E,) a `Vital`; before, after: the seeds around the rollback."""
        for env in np.flatnonzero(found != Vital.GOOD).tolist():
            gone = among(before.stage[env], IN_BUDGET) & ~among(after.stage[env], IN_BUDGET)
            name = Vital(int(found[env])).name.lower()
            for slot in np.flatnonzero(gone).tolist():
                why = f"rolled back by the governor ({name}), which removes seeds that were not kept"
                self._add("prunes", env, slot, before, space, step, why)
            self.bases = {key: basis for key, basis in self.bases.items() if key[0] != env}

    def state(self) -> dict[str, Any]:
        bases = [[*key, basis] for key, basis in self.bases.items()]
        return {**self.lists, "bases": bases, "unlisted": dict(self.unlisted)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.lists = {name: [dict(entry) for entry in state[name]] for name in self.lists}
        self.bases = {(int(env), int(slot)): dict(basis) for env, slot, basis in state["bases"]}
        self.unlisted = dict(state["unlisted"])

    def _add(self, name: str, env: int, slot: int, seeds: Seeds, space: Space, step: int, reason: str) -> None:
        """Add an entry to a list, in place of the first one where the list is full."""
        entries, blueprint = self.lists[name], space.blueprints[int(seeds.blueprint[env, slot])].name
        entries.append({"env": env, "slot": space.slots[slot], "blueprint": blueprint, "step": step, "reason": reason})
        if self.most is not None and len(entries) > self.most:
            del entries[0]
            self.unlisted[name] += 1
