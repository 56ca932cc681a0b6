"""Compute the worth of a grown network, and the rewards of a controller. E environments, S slots.

A reward is a sum of named components, each (E,):

    metric   change of the metric, or of minus the loss          budget   change of the penalty above `param_budget`
    rent     change of the rent for added parameters             fees     minus the price of the accepted operation
    twin     minus the change of the twin's worth                escrow   payments for kept seeds
    governor minus the penalty of a step that was rolled back (`paid`)
    compute  minus the price of the compute of seeds and trials

The component `twin` exists where `relative_to` is twin, `compute` where `compute_price` is above 0, and `escrow` in the reward of
that name. With `relative_to` group the advantage changes, and not the reward. A component is nan where a quantity that it needs
was not measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.arguments import takes_one_argument
from esper.leyline.config.tree import RewardConfig
from esper.leyline.data.objective import growth_of
from esper.leyline.data.objective import objective as objective
from esper.leyline.lifecycle.view import Bools, Floats, Outcome, Scores
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, LIVE, Op, Stage, among
from esper.leyline.messages import InputError, kind_of
from esper.leyline.protocols import Reward
from esper.leyline.reference import find_reference

Components = dict[str, Floats]
"""The components of a worth or of a reward by name, each (E,) float64."""


def worth(scores: Scores, host_params: NDArray[np.int64], config: RewardConfig) -> Components:
    """Return the components of the worth J = metric - rent * ln(1 + s) - weight * max(r - budget, 0).

    r = added / host,   s = added / max(host, rent_size).
    Without a `param_budget` the last term is 0.
    """
    growth = growth_of(scores.added_params, host_params)
    cap = np.inf if config.param_budget is None else config.param_budget
    return {
        "metric": scores.metric if config.objective == "metric" else -scores.loss,
        "rent": objective(0.0, scores.added_params, host_params, config.rent, config.rent_size),
        "budget": -config.param_penalty_weight * np.maximum(growth - cap, 0.0),
    }


def worths(outcome: Outcome, config: RewardConfig) -> tuple[Components, Components]:
    """Return the worth before a step and after it. At the end of an episode, the worth after it is that of the exported network.

    Where `relative_to` is twin, the worth of the twin is subtracted. Raises InputError if no twins are trained.
    """
    final = outcome.after if outcome.exported is None else outcome.exported
    before, after = (worth(scores, outcome.host_params, config) for scores in (outcome.before, final))
    if config.compute_price:
        assert outcome.compute is not None, "the engine counts compute"
        before["compute"], after["compute"] = (-config.compute_price * share for share in outcome.compute)
    if config.relative_to == "twin":
        if outcome.twin is None:
            raise InputError(
                "reward.relative_to is twin, but no twins are trained; set twin to true, or reward.relative_to to none"
            )
        twins = (total(worth(scores, outcome.host_params, config)) for scores in outcome.twin)
        before["twin"], after["twin"] = (-value for value in twins)
    return before, after


def fees(outcome: Outcome, config: RewardConfig) -> Floats:
    """Return (E,) minus the price of each accepted operation. Operations that were refused or rolled back are free."""
    prices = np.zeros(len(Op))
    for name, price in config.fees.items():
        prices[Op[name.upper()]] = price
    paid = np.zeros(len(outcome.accepted))
    charged = outcome.accepted & ~outcome.rolled_back
    paid[charged] -= prices[outcome.actions.op[charged]]  # the op of a refused action may be out of range
    return paid


def delta(outcome: Outcome, config: RewardConfig) -> Components:
    """Return the components of r_t = J_{t+1} - J_t - fee(action_t), which sums to J_T - J_0 - fees over an episode."""
    return _rise(*worths(outcome, config)) | {"fees": fees(outcome, config)}


def paid(reward: Reward, outcome: Outcome, penalty: float) -> Components:
    """Return the reward of a step, with minus the penalty in the rows that were rolled back.

    In a row that was rolled back `outcome.after` is the restored network, so J_after - J_before subtracts the rewards since
    the snapshot. The next step of the row begins a new sequence of a `StatefulReward`.
    """
    failed = outcome.rolled_back
    components = reward(outcome)
    components = (
        dict(components) if isinstance(reward, Delta | Sparse | Escrow) else _checked(components, reward, outcome)
    )
    if failed.any() and isinstance(reward, StatefulReward):
        reward.restart(failed)
    return components | {"governor": np.where(failed, -penalty, 0.0)}


def total(components: Mapping[str, Floats]) -> Floats:
    """Return (E,) the sum of all components."""
    return np.sum(list(components.values()), axis=0)


@runtime_checkable
class StatefulReward(Reward, Protocol):
    """Rewards by earlier steps too. Step 0 of an episode resets it."""

    def restart(self, rows: Bools) -> None:
        """Begin a new sequence in the environments that are marked in `rows` (E,)."""

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Return the state as arrays with a leading axis E; empty before the first step."""

    def load_state(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Restore a `state`."""


@dataclass(frozen=True)
class Delta:
    """Computes r_t = J_{t+1} - J_t - fee(action_t), without state."""

    config: RewardConfig

    def __call__(self, outcome: Outcome) -> Components:
        return delta(outcome, self.config)


class _Remembering:
    """Keeps arrays (E, ...) of a sequence by name, none before its first step."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._kept: Components = {}

    def state(self) -> dict[str, NDArray[np.float64]]:
        return {name: array.copy() for name, array in self._kept.items()}

    def load_state(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        self._kept = {name: array.copy() for name, array in state.items()}


class Sparse(_Remembering):
    """Pays sparse_reward_scale * (J_T - J_0) at the end of a sequence, and 0 before it, where J_0 is the worth at its start.

    A sequence ends with the episode or with a rollback. After a rollback J_T is the worth of the restored network, and the J_0
    of the next sequence. Fees are charged at every step and are not scaled. Kept is J now - J_0, by component.
    """

    def __call__(self, outcome: Outcome) -> Components:
        step = delta(outcome, self.config)
        charged = step.pop("fees")
        if outcome.step == 0 or not self._kept:
            self._kept = {name: np.zeros_like(rise) for name, rise in step.items()}
        self._kept = {name: self._kept[name] + rise for name, rise in step.items()}
        scale = self.config.sparse_reward_scale
        paid = {name: np.where(outcome.ended, scale * rise, 0.0) for name, rise in self._kept.items()}
        return paid | {"fees": charged}

    def restart(self, rows: Bools) -> None:
        """Set J_0 of the environments that are marked in `rows` (E,) to their worth before the next step."""
        self._kept = {name: np.where(rows, 0.0, rise) for name, rise in self._kept.items()}


_ACCOUNT = ("credit", "entry", "paid_up")


class Escrow(_Remembering):
    """Pays `Delta`, and for every kept seed its contribution, at most the increase of J since it germinated.

    A contribution is paid when the seed is kept. If it were paid at once and taken back later, waiting would pay wherever
    returns are discounted or a sequence is truncated. The rewards of an episode sum to J_T - J_0 - fees + paid. A rollback
    closes the accounts of its row without payment. Earlier payments stay, and no later seed is paid for the same increase.

    A seed has an account from its germination until it is kept or removed. Kept are its `credit` (E, S), the last contribution
    that was measured on trial, 0 where there is none or no account is open; its `entry` (E, S), the worth before it germinated,
    nan where no account is open; and `paid_up` (E,), the worth up to which increases were paid for, at first that at the start.

    Experimental: the contribution is measured when a seed is kept, so keeping it late may pay more than keeping it early
    (the page "Exploits" of esper-bench).
    """

    def __call__(self, outcome: Outcome) -> Components:
        measured = outcome.contribution if self.config.objective == "metric" else outcome.contribution_loss
        before, after = worths(outcome, self.config)
        if outcome.step == 0:
            self._kept = {}
        pays = self.pay(outcome.seeds.stage, measured.mean, total(before), total(after), terminal=outcome.terminal)
        return _rise(before, after) | {"fees": fees(outcome, self.config), "escrow": pays.sum(1)}

    def pay(
        self, stage: NDArray[np.int8], contribution: Floats, before: Floats, after: Floats, *, terminal: bool
    ) -> Floats:
        """Credit live seeds, pay the credit of kept seeds, and let the credit of removed seeds expire. Returns (E, S) the pay.

            pay = min(credit, max(J_after - max(J_entry, paid_up), 0)),   then paid_up = max(J_entry, paid_up) + pay

        stage (E, S) and contribution (E, S) are those after the step; before and after (E,) are the worth J. A negative credit is
        paid in full, so keeping a harmful seed costs. At the end of the episode all credit expires.

        Every increase of J is paid for once: the sum of positive payments is at most max_t J_t - J_0. Without this bound, seeds
        that are planted together would all be paid for the same increase, and so would the repair of an earlier decrease.
        """
        nothing = np.zeros(stage.shape), np.full(stage.shape, np.nan), np.full(len(stage), np.nan)
        credit, entry, paid_up = (self._kept[name] for name in _ACCOUNT) if self._kept else nothing
        assert stage.shape == contribution.shape == credit.shape, (stage.shape, contribution.shape)
        kept, present, was_open = stage == Stage.FOSSILIZED, among(stage, IN_BUDGET), ~np.isnan(entry)
        entry = np.where(~was_open & present & ~kept, before[:, None], entry)
        paid_up = np.where(np.isnan(paid_up), before, paid_up)
        credit = np.where(among(stage, LIVE) & ~np.isnan(contribution), contribution, credit)

        paid = np.zeros_like(credit)
        for slot in range(stage.shape[1]):  # in sequence, because a payment raises paid_up for the next slot
            base = np.maximum(entry[:, slot], paid_up)
            pay = np.minimum(credit[:, slot], np.maximum(after - base, 0.0))
            paid[:, slot] = np.where(was_open[:, slot] & kept[:, slot], pay, 0.0)
            paid_up = np.where(paid[:, slot] > 0, base + paid[:, slot], paid_up)

        self._kept = dict(zip(_ACCOUNT, (credit, entry, paid_up), strict=True))
        self._close(kept | ~present | terminal)
        return paid

    def restart(self, rows: Bools) -> None:
        """Close the accounts of the environments that are marked in `rows` (E,). `paid_up` stays."""
        if self._kept:
            self._close(rows[:, None])

    def _close(self, where: Bools) -> None:
        """Close the accounts where `where`, which broadcasts to (E, S), is true."""
        for name, closed in (("credit", 0.0), ("entry", np.nan)):
            self._kept[name] = np.where(where, closed, self._kept[name])


def get_reward(config: RewardConfig) -> Reward:
    """Return a new reward of the name in the config."""
    rewards: dict[str, Callable[[RewardConfig], Reward]] = {"delta": Delta, "sparse": Sparse, "escrow": Escrow}
    return rewards[config.name](config)


@dataclass(frozen=True)
class OwnReward:
    """Makes rewards by a function at `path.py:function` or `module:function`. Workers get the reference, and import it there."""

    reference: str

    def __call__(self, config: RewardConfig) -> Reward:
        """Return a new reward. UserCodeError if the referenced file raises an error."""
        return find_reference(self.reference, "reward")(config)


def load_reward(reference: str) -> OwnReward:
    """Import a reward by reference. InputError if there is none, or if it does not take a `RewardConfig` alone."""
    _check_maker(find_reference(reference, "reward"), reference)
    return OwnReward(reference)


def make_reward(make: Callable[[RewardConfig], Reward], config: RewardConfig) -> Reward:
    """Make a reward.

    InputError if the user's function does not take a config alone, returns what cannot be called, or is a reward itself.
    """
    _check_maker(make, name_of_reward(make))
    try:
        made = make(config)
    except AttributeError as error:
        if error.obj is not config or not hasattr(Outcome, str(error.name)):
            raise
        raise InputError(
            f"the reward {name_of_reward(make)} reads {error.name!r} of its argument, as a reward does of an esper.Outcome, but "
            "it is called with an esper.RewardConfig; give the function that makes the reward, f in place of f(config)"
        ) from error
    if not callable(made):
        raise InputError(
            f"the reward {name_of_reward(make)} returned {kind_of(made)} for an esper.RewardConfig; return a function "
            "from an esper.Outcome to named components"
        )
    return made


def _check_maker(make: Any, name: str) -> None:
    """Raise InputError if what should make a reward cannot be called with one argument."""
    if not callable(make) or not takes_one_argument(make):
        what = "cannot be called with one argument" if callable(make) else f"is {kind_of(make)}"
        raise InputError(
            f"the reward {name} {what}; give a function that takes an esper.RewardConfig and returns the reward, itself a "
            "function from an esper.Outcome to named components"
        )


def name_of_reward(make: Callable[..., Any]) -> str:
    """Return the name of what makes a reward: its reference, or the name of the function or class that was given in Python."""
    return make.reference if isinstance(make, OwnReward) else str(getattr(make, "__name__", type(make).__name__))


def _checked(components: Any, reward: Reward, outcome: Outcome) -> Components:
    """Return the components of a user's own reward, each (E,) float64. InputError if they are anything else, or not finite."""
    envs = len(outcome.accepted)
    who = f"the reward {getattr(reward, '__qualname__', type(reward).__qualname__)}"
    mend = f"return a dict from names to arrays of shape ({envs},), one finite number for each environment"
    if not isinstance(components, Mapping) or not components or not all(isinstance(name, str) for name in components):
        empty = isinstance(components, Mapping) and not components
        raise InputError(f"{who} returned {'no components' if empty else f'{kind_of(components)}'}; {mend}")
    if "governor" in components:
        raise InputError(
            f"{who} returned a component 'governor', the name of the penalty for a rollback; give it another name"
        )
    checked = {}
    for name, value in components.items():
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):  # a ragged list, text, or a tensor of another device
            raise InputError(f"{who} returned {name!r} as {kind_of(value)}; {mend}") from None
        if array.shape != (envs,):
            raise InputError(f"{who} returned {name!r} of shape {array.shape}; {mend}")
        if not np.isfinite(array).all():
            env = int(np.argmin(np.isfinite(array)))
            raise InputError(
                f"{who} returned {name!r} as {array[env]:g} for environment {env} at step {outcome.step}; {mend}"
            )
        checked[name] = array
    return checked


def _rise(before: Components, after: Components) -> Components:
    return {name: after[name] - before[name] for name in before}
