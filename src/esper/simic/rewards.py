"""What a grown network is worth, and what a controller is paid for growing it. E environments, S slots.

A reward is a sum of named components, each (E,):

    metric   change of the metric, or of minus the loss          budget   change of the penalty above `param_budget`
    rent     change of the rent for added parameters             fees     minus the price of the accepted operation
    twin     minus the change of the twin's worth                escrow   what the accounts of kept seeds pay out
    governor minus the penalty of a step that was rolled back (`paid`)

`twin` is there where `baseline` is twin, `escrow` in the reward of that name. The baseline `group` belongs to the advantage
and leaves the reward alone. What was not measured is nan, and so is every component that needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Op
from esper.leyline.config import RewardConfig
from esper.leyline.errors import InputError
from esper.leyline.objective import growth_of
from esper.leyline.objective import objective as objective
from esper.leyline.protocols import Reward
from esper.leyline.stages import IN_BUDGET, LIVE, Stage, among
from esper.leyline.view import Bools, Floats, Outcome, Scores

Components = dict[str, Floats]
"""Parts of a worth or of a reward by name, each (E,)."""


def worth(scores: Scores, host_params: NDArray[np.int64], config: RewardConfig) -> Components:
    """J less the penalty of a soft cap, in parts: metric - rent * ln(1 + s) - weight * max(r - budget, 0).

    r = added / host,   s = added / max(host, rent_size).
    Without a `param_budget` nothing is above it.
    """
    growth = growth_of(scores.added_params, host_params)
    cap = np.inf if config.param_budget is None else config.param_budget
    return {
        "metric": scores.metric if config.objective == "metric" else -scores.loss,
        "rent": objective(0.0, scores.added_params, host_params, config.rent, config.rent_size),
        "budget": -config.param_penalty_weight * np.maximum(growth - cap, 0.0),
    }


def worths(outcome: Outcome, config: RewardConfig) -> tuple[Components, Components]:
    """What the networks were worth before a step and after it; at the end of an episode, those that would be exported.

    With the twin as baseline it is what they were worth beyond the twin. InputError where there are no twins then.
    """
    final = outcome.after if outcome.exported is None else outcome.exported
    before, after = (worth(scores, outcome.host_params, config) for scores in (outcome.before, final))
    if config.relative_to == "twin":
        if outcome.twin is None:
            raise InputError(
                "reward.relative_to is twin, but no twins are trained; set twin to true, or reward.relative_to to none"
            )
        twins = (total(worth(scores, outcome.host_params, config)) for scores in outcome.twin)
        before["twin"], after["twin"] = (-value for value in twins)
    return before, after


def fees(outcome: Outcome, config: RewardConfig) -> Floats:
    """(E,) minus the price of each accepted operation; one that was refused, or undone by a rollback, is free."""
    prices = np.zeros(len(Op))
    for name, price in config.fees.items():
        prices[Op[name.upper()]] = price
    paid = np.zeros(len(outcome.accepted))
    charged = outcome.accepted & ~outcome.rolled_back
    paid[charged] -= prices[outcome.actions.op[charged]]  # a refused one may be no Op at all
    return paid


def delta(outcome: Outcome, config: RewardConfig) -> Components:
    """r_t = J_{t+1} - J_t - fee(action_t), in parts; sums to J_T - J_0 - fees over an episode."""
    return _rise(*worths(outcome, config)) | {"fees": fees(outcome, config)}


def paid(reward: Reward, outcome: Outcome, penalty: float) -> Components:
    """The reward of a step and, where it was rolled back, minus the penalty.

    In a failed step `outcome.after` is the network that was restored, so J_after - J_before takes back every rise since the
    snapshot, which was paid when it came. The next step of such a row begins a new sequence of a `StatefulReward`.
    """
    failed = outcome.rolled_back
    components = dict(reward(outcome))
    if failed.any() and isinstance(reward, StatefulReward):
        reward.restart(failed)
    return components | {"governor": np.where(failed, -penalty, 0.0)}


def total(components: Mapping[str, Floats]) -> Floats:
    """(E,) the sum of all components."""
    summed: Floats = np.sum(list(components.values()), axis=0)
    return summed


class Account(NamedTuple):
    """What is held in escrow. Every seed has an account from its germination until it is kept or gone."""

    credit: Floats  # (E, S) the last measured contribution of the seed; 0 where none was measured or no account is open
    entry: Floats  # (E, S) worth before the seed germinated; nan where no account is open
    paid_up: Floats  # (E,) no rise below this worth is paid for again; at first the worth at the start, nan before that

    @classmethod
    def empty(cls, envs: int, slots: int) -> "Account":
        """No account is open."""
        return cls(np.zeros((envs, slots)), np.full((envs, slots), np.nan), np.full(envs, np.nan))


class Flows(NamedTuple):
    """What one step moved. Over the life of an account, credited = paid + returned."""

    credited: Floats  # (E, S) into the account, negative where the contribution fell
    paid: Floats  # (E, S) to the controller
    returned: Floats  # (E, S) to nobody


def escrow_step(
    account: Account, stage: NDArray[np.int8], contribution: Floats, before: Floats, after: Floats, *, terminal: bool
) -> tuple[Account, Flows]:
    """Credit live seeds, pay for those that were kept, return the credit of those that are gone.

        pay = min(credit, max(J_after - max(J_entry, paid_up), 0)),   then paid_up = max(J_entry, paid_up) + pay

    stage (E, S) and contribution (E, S) are those after the step, before and after (E,) what the network was worth. A seed
    that was kept is no longer measured, so its credit is what it was in its last step on trial; a live seed that was not
    measured keeps its credit. Credit below 0 is paid in full: keeping what harms costs. At the end all credit is returned.

    No two seeds are paid for one rise of J, nor one for a rise that only makes up for a fall: all pay above 0 together is at
    most the largest J so far less the first. Otherwise seeds planted together would each sell the same rise, and a network
    that is first damaged and then healed would sell it twice.
    """
    assert stage.shape == contribution.shape == account.credit.shape, (stage.shape, contribution.shape)
    kept, present = stage == Stage.FOSSILIZED, among(stage, IN_BUDGET)
    was_open = ~np.isnan(account.entry)
    entry = np.where(~was_open & present & ~kept, before[:, None], account.entry)
    paid_up = np.where(np.isnan(account.paid_up), before, account.paid_up)
    credit = np.where(among(stage, LIVE) & ~np.isnan(contribution), contribution, account.credit)

    paid = np.zeros_like(credit)
    for slot in range(stage.shape[1]):  # one after the other, as they draw on one rise
        base = np.maximum(entry[:, slot], paid_up)
        pay = np.minimum(credit[:, slot], np.maximum(after - base, 0.0))
        paid[:, slot] = np.where(was_open[:, slot] & kept[:, slot], pay, 0.0)
        paid_up = np.where(paid[:, slot] > 0, base + paid[:, slot], paid_up)

    closed = kept | ~present | terminal
    moved = Flows(credit - account.credit, paid, np.where(closed, credit - paid, 0.0))
    return Account(np.where(closed, 0.0, credit), np.where(closed, np.nan, entry), paid_up), moved


@runtime_checkable
class StatefulReward(Reward, Protocol):
    """A reward that depends on earlier steps. It begins anew with step 0 of an episode."""

    def restart(self, rows: Bools) -> None:
        """Forget the steps so far of some environments, (E,): their next step is the first of a new sequence."""
        ...

    def state(self) -> dict[str, NDArray[np.float64]]:
        """All that it remembers, as arrays with a leading environment axis; empty before the first step."""
        ...

    def load_state(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from what `state` gave."""
        ...


@dataclass(frozen=True)
class Delta:
    """r_t = J_{t+1} - J_t - fee(action_t); remembers nothing."""

    config: RewardConfig

    def __call__(self, outcome: Outcome) -> Components:
        """Components of the step, each (E,)."""
        return delta(outcome, self.config)


class Sparse:
    """sparse_reward_scale * (J_T - J_0) at the end of a sequence and 0 before it, where J_0 is J when the sequence began.

    A sequence ends with the episode or with a rollback, where J_T is that of the restored network, with which the next one
    begins. Fees are charged at once and are not scaled.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._rise: Components = {}  # J now - J_0, by component

    def __call__(self, outcome: Outcome) -> Components:
        """Components of the step, each (E,)."""
        step = delta(outcome, self.config)
        charged = step.pop("fees")
        if outcome.step == 0 or not self._rise:
            self._rise = {name: np.zeros_like(rise) for name, rise in step.items()}
        self._rise = {name: self._rise[name] + rise for name, rise in step.items()}
        scale = self.config.sparse_reward_scale
        paid = {name: np.where(outcome.ended, scale * rise, 0.0) for name, rise in self._rise.items()}
        return paid | {"fees": charged}

    def restart(self, rows: Bools) -> None:
        """Measure J_0 of some environments, (E,), again before their next step."""
        self._rise = {name: np.where(rows, 0.0, rise) for name, rise in self._rise.items()}

    def state(self) -> dict[str, NDArray[np.float64]]:
        """The rise so far of every component, (E,)."""
        return {name: rise.copy() for name, rise in self._rise.items()}

    def load_state(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from what `state` gave."""
        self._rise = {name: rise.copy() for name, rise in state.items()}


class Escrow:
    """delta, and for a seed that is kept what its account pays: its contribution, at most the rise of J that it came with.

    Credit is no reward until it is paid. A credit that were shown to the controller at once and taken back later would leave
    it with something for waiting wherever returns are discounted or a sequence is cut short. An episode comes to
    J_T - J_0 - fees + paid. A rollback closes every account of its row without pay, and what was paid before stays paid: no
    later seed is paid for the same rise.

    Experimental: what a seed brought is measured when it is kept, so that keeping it late may pay more than keeping it early
    (docs/benchmarks/exploits.md).
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._account: Account | None = None

    def __call__(self, outcome: Outcome) -> Components:
        """Components of the step, each (E,)."""
        stage = outcome.seeds.stage
        measured = outcome.contribution if self.config.objective == "metric" else outcome.contribution_loss
        if outcome.step == 0 or self._account is None:
            self._account = Account.empty(*stage.shape)
        before, after = worths(outcome, self.config)
        self._account, flows = escrow_step(
            self._account, stage, measured.mean, total(before), total(after), terminal=outcome.terminal
        )
        return _rise(before, after) | {"fees": fees(outcome, self.config), "escrow": flows.paid.sum(1)}

    def restart(self, rows: Bools) -> None:
        """Close the accounts of some environments, (E,); the rise up to which they were paid stays."""
        if self._account is not None:
            credit, entry, paid_up = self._account
            column = rows[:, None]
            self._account = Account(np.where(column, 0.0, credit), np.where(column, np.nan, entry), paid_up)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """The fields of `Account`."""
        return {} if self._account is None else {name: field.copy() for name, field in self._account._asdict().items()}

    def load_state(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from what `state` gave."""
        self._account = Account(**{name: field.copy() for name, field in state.items()}) if state else None


def get_reward(config: RewardConfig) -> Reward:
    """A fresh reward of the kind that the config names."""
    match config.name:
        case "delta":
            return Delta(config)
        case "sparse":
            return Sparse(config)
        case "escrow":
            return Escrow(config)


def _rise(before: Components, after: Components) -> Components:
    return {name: after[name] - before[name] for name in before}
