"""Let a trained policy control: its observations, its memory, and one or more decisions a step. E environments."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.lifecycle.masks import only_wait, without_blueprints
from esper.leyline.lifecycle.view import Masks, Outcome, View
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Refusal
from esper.leyline.protocols import Judgement
from esper.tamiyo.policy.controller import Policy
from esper.tamiyo.policy.network import GREEDY, SampledDecision, decide, full_precision
from esper.tamiyo.policy.observation import History, Observation, observe
from esper.tamiyo.policy.packages import Opened, package_costs, unpacked, with_packages
from esper.tamiyo.rules.base import Rule, draws


class ActorOutput(NamedTuple):
    """Holds one decision of a policy in every environment, before its outcome is known."""

    observation: Observation  # (E, ...)
    decision: SampledDecision  # one per environment
    value: Tensor  # (E,) V of the state, in units of return
    starts: NDArray[np.bool_]  # (E,) whether a sequence begins with this step
    exploration: Tensor  # (E, heads) float64, share of the uniform distribution in each head's probabilities
    idle: NDArray[np.bool_]  # (E,) whether the environment decides nothing, because its decisions of the step are over


class Learned(Rule):
    """Takes the most probable choice of every head of a trained policy.

    It holds the history of measurements and the hidden state of the network. A subclass with `greedy` False samples its choices,
    with its own `exploration`, and one that defines `carried` does something else than the policy decides.
    """

    greedy = True

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.history, self.hidden = History.empty(0), policy.network.initial(0)  # (0,) until the first decision
        self.output: ActorOutput | None = None  # the first decision of the step
        self._begins = np.zeros(0, bool)
        self._episode = -1
        self._open = np.zeros(0, bool)  # environments whose decisions of the step are not over
        self._made = np.zeros(0, np.int64)  # decisions of the step so far, of each environment
        # parameters of the smallest seed that was refused in the step; infinite where none was
        self._refused = np.zeros(0)
        self._calls = 0  # decisions of the environment with the most, and plantings of its packages
        self._opened = Opened.none(0, 0)  # packages that are not planted completely
        self._reasons: list[str | None] = []  # the packages that the last plantings belong to
        self._heard = False  # whether `further` has added the decisions of the step to the history
        self._done = Actions.wait(0)  # the last decisions, which were carried out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"

    @property
    def exploration(self) -> Mapping[Head, float]:
        """Share of the uniform distribution in the probabilities, by head."""
        return GREEDY

    def act(self, view: View) -> Actions:
        """Return one decision per environment. InputError if the policy was trained with other sensors or choices.

        The memory is empty at the first step of an episode and after `reset`.
        """
        envs = len(view.host_params)
        if view.episode != self._episode or view.step == 0 or len(self.history.op) != envs:
            self.policy.language.check(view.space)
            self.history, self.hidden = History.empty(envs), self.policy.network.initial(envs)
            self._begins, self._episode = np.ones(envs, bool), view.episode
            self._opened = Opened.none(envs, len(view.space.slots))
        self.history = self.history.measured(view.measurements)
        self._open, self._made, self._heard = np.ones(envs, bool), np.zeros(envs, np.int64), False
        self._calls, self._refused = 0, np.full(envs, np.inf)
        self.output = output = self._decide(view)
        self._begins = np.zeros(envs, bool)
        return self._unpacked(view, self.carried(view, output))

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Decide once more in the same step, where the last decision was not WAIT; None where nothing is left to do in the step.

        The decision of an environment whose decisions are over is WAIT, and its memory stays as it is. Where a seed was refused,
        no seed of as many parameters is offered again in the step: nothing that the policy observes would keep it from
        repeating the decision.
        """
        if self.policy.decisions_per_step == 1 and not self.policy.language.packages:
            return None
        done = self._done
        envs = np.flatnonzero((done.op == Op.GERMINATE) & (refused != Refusal.NONE))
        cost = np.broadcast_to(view.space.cost, view.masks.blueprint.shape)[envs, done.slot[envs], done.blueprint[envs]]
        self._refused[envs] = np.minimum(self._refused[envs], cost)
        op, accepted = np.where(self._open, done.op, self.history.op), np.asarray(refused == Refusal.NONE)
        self.history = self.history._replace(op=op, accepted=np.where(self._open, accepted, self.history.accepted))
        more = (self._made < self.policy.decisions_per_step) | self._opened.rows
        self._open, self._heard = self._open & (done.op != Op.WAIT) & more, True
        if (self._open & ~self._opened.rows).any():
            return self._unpacked(view, self.carried(view, self._decide(view)))
        if not self._opened.rows.any():
            return None
        self._calls += 1
        return self._unpacked(view, Actions.wait(len(view.masks.op)))

    def carried(self, view: View, output: ActorOutput) -> Actions:
        """Return the decisions (E,) that are carried out: those of the policy."""
        return output.decision.actions

    def _unpacked(self, view: View, chosen: Actions) -> Actions:
        """Return the actions of decisions, in which each package plants its next seed (`packages.unpacked`)."""
        names, opened = self.policy.language.packages, self._opened
        self._done, self._reasons = chosen, [None] * len(chosen.op)
        if names:
            self._done, self._opened, self._reasons = unpacked(view, chosen, names, opened)
        return self._done

    def reasons(self) -> Sequence[str | None]:
        """Return the packages that the last plantings belong to; None for other decisions."""
        return self._reasons

    def judgement(self) -> Judgement:
        """Return what the policy thought of the first decisions of the step."""
        assert self.output is not None, "act is called first"
        decision = self.output.decision
        found = (decision.probability, decision.entropy, self.output.value)
        return Judgement(*(np.asarray(tensor.numpy(), np.float64) for tensor in found))

    def masks(self, view: View) -> Masks:
        """Return the valid decisions, with the packages of the policy."""
        return with_packages(view.masks, view.space, self.policy.language.packages)

    def observe(self, view: View, history: History) -> Observation:
        """Return the observation of the policy. Its costs (E, S, K + P) are those of the menu, then those of the packages."""
        seen, names = observe(view, history), self.policy.language.packages
        if not names:
            return seen
        cost = np.concatenate([seen.cost, package_costs(view, names).astype(np.float32)], 2)
        unknown = np.full((*cost.shape[:2], len(names), seen.prospects.shape[-1]), np.nan, np.float32)
        return seen._replace(cost=cost, prospects=np.concatenate([seen.prospects, unknown], 2))

    def _decide(self, view: View) -> ActorOutput:
        """Return one decision of the environments that are open and plant no package, and WAIT in the others."""
        observation, exploration = self.observe(view, self.history), self.exploration
        idle = ~self._open | self._opened.rows
        dear = view.space.cost >= self._refused[:, None, None]
        masks = self.masks(view._replace(masks=without_blueprints(view.masks, dear)) if dear.any() else view)
        masks = only_wait(masks, idle) if idle.any() else masks
        with torch.no_grad(), full_precision(self.policy.device):
            step = Observation(**{name: field[None] for name, field in observation._asdict().items()})
            batch = self.policy.batch(step, [info.name for info in view.space.blueprints])
            encoded, value, hidden = self.policy.network(batch, self.hidden)
            drawn = None if self.greedy else draws(view, self._calls)
            decision = decide(self.policy.network, encoded, masks, drawn, exploration)
            hold = torch.from_numpy(idle).to(self.policy.device)[:, None]
            self.hidden = torch.where(hold, self.hidden[0], hidden[0]), torch.where(hold, self.hidden[1], hidden[1])
        self._made, self._calls = self._made + ~idle, self._calls + 1
        shares = torch.tensor([[exploration[head] for head in Head]], dtype=torch.float64).repeat(len(idle), 1)
        return ActorOutput(observation, decision, value[0].cpu(), self._begins, shares, idle)

    def store(self, outcome: Outcome) -> None:
        """Add the last decisions to the history, if `further` has not. The memory of a row that was rolled back is emptied."""
        if not self._heard:
            self.history = self.history.decided(outcome.actions, outcome.accepted)
        if outcome.rolled_back.any():
            self.reset(outcome.rolled_back)

    def reset(self, rows: NDArray[np.bool_]) -> None:
        """Empty the memory of the environments that are marked in `rows` (E,), which begin a new sequence."""
        keep = torch.from_numpy(~rows).to(self.policy.device)[:, None]
        self.history, self.hidden = self.history.reset(rows), (self.hidden[0] * keep, self.hidden[1] * keep)
        self._begins = self._begins | rows
        self._opened = self._opened._replace(slots=self._opened.slots & ~rows[:, None])

    def memory(self) -> dict[str, Any]:
        return {
            "episode": self._episode,
            "history": self.history._asdict(),
            "hidden": self.hidden,
            "begins": self._begins,
            "opened": self._opened._asdict(),
        }

    def load_memory(self, memory: Mapping[str, Any]) -> None:
        """Restore a `memory`. The policy is not part of it."""
        self.history, (first, second) = History(**memory["history"]), memory["hidden"]
        device = self.policy.device
        self.hidden = first.to(device), second.to(device)
        self._begins, self._episode = memory["begins"], memory["episode"]
        self._opened = Opened(memory["opened"]["slots"], Actions(*memory["opened"]["seed"]))

    def state(self) -> dict[str, Any]:
        """Return the memory and the policy. The folder of the policy may have changed when a run is resumed."""
        return {"policy": self.policy.state(), "mind": self.memory()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state(state["policy"])
        self.load_memory(state["mind"])
