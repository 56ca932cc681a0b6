"""Combine a rule and fitted trees in `shipped`, in versions with a card each. E environments, S slots, O options."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import Config
from esper.leyline.lifecycle.view import Bools, Floats, View, sensor
from esper.leyline.messages import InputError
from esper.tamiyo.policy.packages import indices, inner_slots
from esper_bench.controllers.forest import load_forests
from esper_bench.controllers.handover import HANDED, Handover, SkipWhereWeak
from esper_bench.controllers.healing_features import FEATURES, slot_features, table
from esper_bench.controllers.placement import Collapse, Picks, padded
from esper_bench.controllers.plans import HERE, LARGER, NONE, PLACED, SEVERAL, SKIP, UNIFORM, Plan, stream_slots
from esper_bench.controllers.several import Sites

NAME = "shipped"
FOLDER = Path(__file__).parent / "cards"
"""For each version: arrays (.safetensors), facts (.json), and the card (.md)."""
SMALL, LARGE = "small", "large"
GROUPS: Mapping[str, tuple[Plan, ...]] = {SMALL: (UNIFORM, *PLACED), LARGE: (NONE, *LARGER)}
"""The plans of each group. For each but the first the file has a model GROUP/PLAN: its gain in J over the first."""
CASES = ("skip_after", "several", "frozen")
"""The facts of a version that say in which cases of hosts something else than the trees decides. A version may lack them."""
MARGIN = 0.02
"""The trees replace the choice of the rule where they expect so much more in J. It was chosen on training cases."""


class Option(NamedTuple):
    """Names a plan at a slot; -1 for one that has no slot."""

    plan: Plan
    slot: int = -1


@lru_cache
def facts_of(version: str) -> Mapping[str, Any]:
    """Read the facts of a version: what it was trained on, where it was measured, and the digest of its arrays."""
    facts: Mapping[str, Any] = json.loads((FOLDER / f"{version}.json").read_text(encoding="utf-8"))
    return facts


def deciding_facts(version: str) -> str:
    """Return what decides in a version beside its code, as JSON: the digest of its arrays, and which cases it has."""
    return json.dumps({name: facts_of(version).get(name) for name in ("digest", *CASES)})


def card_of(version: str) -> str:
    """Read the card of a version, as Markdown."""
    return (FOLDER / f"{version}.md").read_text(encoding="utf-8")


def versions() -> list[str]:
    """List the versions in this package, the oldest first."""
    return sorted((path.stem for path in FOLDER.glob(f"{NAME}-*.json")), key=lambda name: int(name.rpartition("-")[2]))


def resolved(name: str) -> str:
    """Return the latest version for `shipped`, and any other name as it is. InputError for a version that this package lacks."""
    known = versions()
    if name == NAME:
        return known[-1]
    if re.fullmatch(rf"{NAME}-\d+", name) and name not in known and not Path(name).exists():
        raise InputError(
            f"this version of Esper has no controller {name!r}, only {', '.join(known)}; install the version that has it, or "
            f"start a new run with {known[-1]}"
        )
    return name


def episodes_of_version(version: str) -> int:
    """Count the networks grown to choose a version: the training cases of each kind of hosts, each with every plan or wait."""
    found = 0
    for kind in facts_of(version)["kinds"]:
        cases = sum(count for _, _, count in kind["training"].values())
        found += cases * (kind["plans"] if "plans" in kind else len(kind["waits"]))
    return found


def is_shipped(name: str) -> bool:
    """Return whether a name is `shipped` or one of its versions."""
    return name == NAME or name in versions()


class Shipped(Handover):
    """Plants what the rule `collapse` does, unless trees expect clearly more of another plan.

    That is so where the budget is small: the trees may replace what the rule plants by another plan, if they expect MARGIN more
    of it in J; they do not replace a bypass at one slot by bypasses around every block. Where the menu and the budget allow a
    `skip-mlp` at the last slot, or a plan of LARGER, the version decides. By its facts it leaves such hosts, and those that none
    of its plans fits, to `SkipWhereWeak` (`skip_after`), and where the budget is small, it does what `Sites` does in hosts of
    which that names several damaged blocks (`several`). Version 1 does neither: where a skip may be planted it plants that,
    elsewhere what the trees expect most of.

    Since version 2, larger seeds in the menu change nothing on a host that is frozen, as on `heal-full`, where the shares of dead
    units are measured, which the rule reads.
    """

    def __init__(self, name: str = NAME, config: Config | None = None) -> None:
        """config: settings of the rule `heuristic`; None takes the defaults."""
        self.version = resolved(name)
        facts, config = facts_of(self.version), config or Config()
        wait, self.several = facts.get("skip_after"), bool(facts.get("several"))
        self.ignores_larger = bool(facts.get("frozen"))  # on hosts that are frozen
        super().__init__(None if wait is None else SkipWhereWeak(config.heuristic, config.gates, wait))
        self._asked = config.probe.sensors_every is not None  # by the config, and not only as often as this needs them
        path = FOLDER / f"{self.version}.safetensors"
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if self.digest != facts_of(self.version)["digest"]:
            raise InputError(f"{path} is not the file of {self.version}: its checksum differs; install Esper again")
        self.forests = load_forests(path, FEATURES)

    def pick(self, view: View) -> Picks:
        """Pick from all growth sensors; `drift` is read by the rule for several blocks alone, where it is measured."""
        known, small = self.gains(view, SMALL)
        rule, several = Collapse().pick(view), self._several(view)
        slots = stream_slots(view.space)
        skip = plantable(view, Option(SKIP, slots - 1))
        large = np.logical_or.reduce(
            [plantable(view, option) for option in options(LARGE, slots) if option.plan != NONE]
        )
        others = [at for at, option in enumerate(known) if option.plan != NONE]
        fits = np.isfinite(small[:, others]).any(1) & (self._only_small(view) | ~(skip | large))
        if self.rule is None:
            more = self.gains(view, LARGE)
        choices: list[tuple[Plan, tuple[int, ...], str]] = []
        for env in range(len(view.masks.op)):
            if fits[env] and env in several:
                choices.append(several[env])
            elif fits[env]:
                own = Option(rule.plans[env], int(rule.slot[env]))
                choices.append(self._guarded(known, small, env, own, rule.reasons[env]))
            elif self.rule is not None:
                choices.append((HANDED, (-1,), ""))
            elif skip[env]:
                choices.append(
                    (SKIP, (slots - 1,), f"{self.version} plants a skip from the input at the last slot where it may")
                )
            elif large[env]:
                choices.append(self._best(*more, env))
            else:
                choices.append(
                    (NONE, (-1,), f"no plan of {self.version} has a blueprint that may be planted in this host")
                )
        plans, at, reasons = zip(*choices, strict=True)
        return Picks(plans, padded(at), reasons)

    def sensing(self) -> bool:
        """Return what `Handover` does, or True if the config says how often sensors are measured."""
        return self._asked or super().sensing()

    def gains(self, view: View, group: str) -> tuple[list[Option], Floats]:
        """Return the options of a group, and what the trees expect of them in J over the first, (E, O).

        Minus infinity where an option cannot be planted.
        """
        x = table(slot_features(view, taught=False), self.forests.features)
        found = options(group, x.shape[1])
        models = self.forests.models
        expected = {plan: models[f"{group}/{plan.name}"].predict(x) for plan in GROUPS[group][1:]}
        columns = [np.zeros(len(x)), *(expected[plan][:, slot] for plan, slot in found[1:])]
        allowed = np.stack([plantable(view, option) for option in found], 1)
        return found, np.where(allowed, np.stack(columns, 1), -np.inf)

    def state(self) -> dict[str, Any]:
        """Return what is to be planted, and by which arrays it was chosen."""
        return {**super().state(), "version": self.version, "digest": self.digest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. InputError if another version, or other arrays, made it."""
        if state.get("digest", self.digest) != self.digest:
            raise InputError(
                f"the run was decided by other arrays than those of {self.version} in this version of Esper; continue it with "
                "the version of Esper that began it (environment.json), or start a new run"
            )
        super().load_state(state)

    def _only_small(self, view: View) -> Bools:
        """Return (E,) whether only small seeds are planted, whatever else the menu has."""
        measured = np.isfinite(sensor(view, "dead")) & inner_slots(view.space)
        return np.asarray(view.space.frozen & measured.any(1) & self.ignores_larger)

    def _several(self, view: View) -> dict[int, tuple[Plan, tuple[int, ...], str]]:
        """Return what `Sites` plants in the environments where it names several damaged blocks, in versions that ask it."""
        if not self.several:
            return {}
        plans, slots, reasons = Sites().pick(view)
        return {
            env: (plan, tuple(int(slot) for slot in slots[env] if slot >= 0), reasons[env])
            for env, plan in enumerate(plans)
            if plan == SEVERAL
        }

    def _best(self, found: Sequence[Option], gains: Floats, env: int) -> tuple[Plan, tuple[int, ...], str]:
        best = int(gains[env].argmax())
        possible = int(np.isfinite(gains[env]).sum())
        why = f"the trees of {self.version} expect the most in J of {found[best].plan.name!r} among {possible} options"
        return found[best].plan, (found[best].slot,), why

    def _guarded(
        self, found: Sequence[Option], gains: Floats, env: int, own: Option, reason: str
    ) -> tuple[Plan, tuple[int, ...], str]:
        at, best = choose(found, gains[env : env + 1], [own])
        if best[0] == at[0]:
            return own.plan, (own.slot,), reason
        chosen, more = found[best[0]], gains[env, best[0]] - gains[env, at[0]]
        why = f"the trees of {self.version} expect {more:+.3f} in J over the plan of the rule, {own.plan.name!r}"
        return chosen.plan, (chosen.slot,), why


def options(group: str, slots: int) -> list[Option]:
    """List what a group may plant in a host with `slots` in front of the last layer."""
    found = []
    for plan in GROUPS[group]:
        found += (
            [Option(plan)]
            if plan in (UNIFORM, NONE)
            else [Option(plan, slot) for slot in range(slots - 1 if plan == HERE else 0, slots)]
        )
    return found


def plantable(view: View, option: Option) -> Bools:
    """Return (E,) whether a blueprint of the plan may be planted at its slot, or at any where it has none."""
    if option.plan == NONE:
        return np.ones(len(view.masks.op), bool)
    allowed: Bools = np.asarray(view.masks.blueprint[..., indices(view.space, option.plan.here)].any(2))
    return np.asarray(allowed.any(1)) if option.slot < 0 else allowed[:, option.slot]


def choose(
    found: Sequence[Option], gains: Floats, rule: Sequence[Option], margin: float = MARGIN
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices (E,) of what the rule plants, and of what is planted.

    They differ where another option is expected to be better by more than the margin. It is not UNIFORM, option 0.
    """
    at, rows = np.array([found.index(option) for option in rule]), np.arange(len(rule))
    own, others = gains[rows, at], gains.copy()
    others[at != 0, 0] = -np.inf
    best = others.argmax(1)
    better = others[rows, best] > np.where(np.isfinite(own), own, -np.inf) + margin
    return at, np.where(better, best, at)
