"""Update a policy by proximal policy optimisation on whole sequences (Schulman et al., 2017). T steps, E environments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.config.tree import PPOConfig
from esper.leyline.data.keys import Purpose, key, permutations
from esper.leyline.errors import LearningError
from esper.leyline.lifecycle.actions import RELEVANT, Head, Op
from esper.simic.rollout import Rollout, take
from esper.tamiyo.policy.controller import Policy
from esper.tamiyo.policy.distribution import GREEDY, Judged, judge
from esper.tamiyo.policy.network import Batch
from esper.tamiyo.policy.observation import Observation

TOLERANCE = 1e-5
"""Largest difference between the log-probabilities of a rollout and those recomputed with the same weights [nats]."""


class Advantages(NamedTuple):
    """The targets of the policy and of the critic, each (T, E) float32.

    Attributes:
        advantage (tensor): advantage of the decision at step t
        target (tensor): lambda-return, the target of the critic
        returns (tensor): discounted sum of the rewards from step t on, bootstrapped where a sequence was truncated
    """

    advantage: Tensor
    target: Tensor
    returns: Tensor


def advantages(
    reward: Tensor, value: Tensor, after: Tensor, end: Tensor, gamma: float, lam: float, idle: Tensor | None = None
) -> Advantages:
    """Generalised advantage estimation (Schulman et al., "High-dimensional continuous control using GAE", 2016, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,      A_t = delta_t + gamma lam (1 - end_t) A_{t+1}

    All arguments are (T, E). `end` marks the last step of a sequence. There V_{t+1} is `after`: 0 at a terminal state, V of
    the last observation where the sequence was truncated. Elsewhere V_{t+1} is the next row of `value`, and `after` is not
    read. The last step of a rollout must end every sequence. lam = 1 gives the Monte Carlo advantage.

    idle: (T, E) bool, entries at which a row decided nothing. Its sequence is that of its other entries, and an idle one has the
    advantage and the returns of the next.
    """
    assert reward.shape == value.shape == after.shape == end.shape, (reward.shape, value.shape, after.shape, end.shape)
    idle = torch.zeros_like(end) if idle is None else idle
    assert bool((end | idle)[-1].all()), "the last step of a rollout ends every sequence"
    if idle.any():
        value = value.clone()
        for t in reversed(range(len(value) - 1)):
            value[t] = torch.where(idle[t], value[t + 1], value[t])
    next_value = torch.where(end, after, torch.cat([value[1:], after[-1:]]))
    delta = reward + gamma * next_value - value
    discount = gamma * (~end).to(reward.dtype)
    advantage, returns = torch.empty_like(reward), torch.empty_like(reward)
    next_advantage, next_return = torch.zeros_like(reward[0]), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        own = delta[t] + lam * discount[t] * next_advantage
        next_advantage = torch.where(idle[t], next_advantage, own)
        earned = reward[t] + torch.where(end[t], gamma * after[t], gamma * next_return)
        next_return = torch.where(idle[t], next_return, earned)
        advantage[t], returns[t] = next_advantage, next_return
    return Advantages(advantage, advantage + value, returns)


def subtract_group_mean(advantage: Tensor, group: int) -> Tensor:
    """A_i - mean over the other members j of the group of A_j, at each step: (T, E) -> (T, E).

    A group is `group` consecutive environments with the same host and data, whose random effects cancel. The baseline of an
    environment does not depend on its own decisions, so the gradient is unbiased (Kool, van Hoof and Welling, "Buy 4 REINFORCE
    samples, get a baseline for free!", 2019). E must be a multiple of `group`. A group of one keeps its advantage.
    """
    steps, envs = advantage.shape
    assert envs % group == 0, (envs, group)
    if group == 1:
        return advantage
    members = advantage.view(steps, envs // group, group)
    others = (members.sum(2, keepdim=True) - members) / (group - 1)
    return (members - others).view(steps, envs)


class TrainingBatch(NamedTuple):
    """A rollout of one cohort, or rows of it, with the inputs and the targets of the network. Idle entries are at the end."""

    rollout: Rollout
    gains: Advantages
    advantage: Tensor  # (T, E) normalised over all cohorts
    weight: Tensor  # (T, E) 1 where there was a choice, 0 where only WAIT was valid
    batch: Batch  # (T, E, ...)


def policy_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, clip: float) -> Tensor:
    """Return -mean min(r A, clip(r, 1 - c, 1 + c) A) with r = exp(log_prob - old), over steps of weight 1 (2017, equation 7).

    All are (T, E); weights are not all 0.
    """
    ratio = (log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(gain * weight).sum() / weight.sum()


def value_loss(value: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Return half the mean squared error in units of the return's standard deviation; value and target are (T, E)."""
    return 0.5 * ((value - target) / scale).square().mean()


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - Var(returns - value) / Var(returns); nan where the returns are constant."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - value).var(correction=0) / variance, torch.nan)


def anneal(start: float, progress: float, end: float) -> float:
    """Interpolate linearly from `start` at progress 0 to `end` at progress 1."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


class PPO:
    """Updates a policy from the rollouts of a round. `state` holds everything that persists between rounds."""

    def __init__(self, policy: Policy, config: PPOConfig, seed: int, group: int | None = None) -> None:
        """group: number of consecutive environments that share an instance and form the baseline of each other's advantages;
        None uses no such baseline.
        """
        self.policy, self.config, self.seed, self.group = policy, config, seed, group
        self.round = 0  # of `update`; learning rate, exploration and entropy weight depend on it
        self.updates = 0  # calls of `update` and `imitate`
        # The parameters are many and small, and fused Adam updates them in one call.
        self.optimizer = torch.optim.Adam(policy.network.parameters(), lr=config.lr, eps=1e-5, fused=True)

    @property
    def exploration(self) -> dict[Head, float]:
        """Share of the uniform distribution in the probabilities of this round, by head."""
        config = self.config
        shares = {head: config.op_exploration if head is Head.OP else config.exploration for head in Head}
        return {head: anneal(share, self._progress, 0.0) for head, share in shares.items()}

    @property
    def _progress(self) -> float:
        """0 in the first round, 1 in the last."""
        return self.round / max(self.config.rounds - 1, 1)

    def update(self, rollouts: Sequence[Rollout], menus: Sequence[Sequence[str]]) -> dict[str, float]:
        """Update the policy from a round, and return diagnostics by name.

        rollouts, menus: a rollout and the names of the blueprints of each cohort.

        Raises LearningError, and restores the weights, where an advantage or a loss is not finite, or the rollouts were made
        with other weights.
        """
        config = self.config
        names = ["policy_loss", "value_loss", "entropy", "kl_mean", "clip_fraction", "gradient_norm"]
        names += [f"entropy_{head.name.lower()}" for head in Head]
        with self._restored_on_failure():
            data = self._prepare(rollouts, menus)
            for group in self.optimizer.param_groups:
                group["lr"] = anneal(config.lr, self._progress, config.lr / 10)
            entropy_weight = anneal(config.entropy_weight, self._progress, config.entropy_weight / 10)
            for part in data:
                with torch.no_grad():
                    off = float((self._judge(part)[0].log_prob - part.rollout.log_prob).abs().max())
                if not off <= TOLERANCE:
                    raise LearningError(
                        f"log-probabilities of the rollout are off by {off:.2g} nats at unchanged weights, more than "
                        f"{TOLERANCE:g}: the rollout was made by another policy, or a feature is not finite"
                    )
            rows: list[Tensor] = []  # (names,) of each minibatch
            moved, epochs = 0.0, 0
            for epoch in range(config.update_epochs):
                begin = len(rows)
                for part in self._minibatches(data, epoch):
                    judged, value = self._judge(part)
                    weight, old = part.weight, part.rollout.log_prob
                    total = weight.sum().clamp(min=1)
                    change = judged.log_prob - old
                    # Without any choice the mean over choices is 0 / 0; the loss is then 0, and attached to the graph.
                    policy = judged.log_prob.sum() * 0
                    if bool(weight.any()):
                        policy = policy_loss(judged.log_prob, old, part.advantage, weight, config.clip_range)
                    fit = self._fit(part, value)
                    entropy = (judged.entropy.sum(-1) * weight).sum() / total
                    kl = (
                        (change.exp() - 1 - change) * weight
                    ).sum() / total  # http://joschu.net/blog/kl-approx.html, k3
                    clipped = (((change.exp() - 1).abs() > config.clip_range).float() * weight).sum() / total
                    norm = self._descend(policy + config.value_weight * fit - entropy_weight * entropy, epoch)
                    # The entropy of each head is averaged over the decisions that use it.
                    used = torch.from_numpy(RELEVANT.copy())[part.rollout.actions[Head.OP]] & (weight > 0).unsqueeze(-1)
                    heads = (judged.entropy * used).sum((0, 1)) / used.sum((0, 1)).clamp(min=1)
                    rows.append(torch.cat([torch.stack([policy, fit, entropy, kl, clipped, norm]), heads]).detach())
                epochs += 1
                moved = float(torch.stack([row[names.index("kl_mean")] for row in rows[begin:]]).mean())
                if moved > config.target_kl:
                    break
            figures = dict(zip(names, torch.stack(rows).mean(0).tolist(), strict=True))
        self._update_moments(data)
        self.round += 1
        return figures | {"kl": moved, "epochs": float(epochs)} | _figures(data)

    def imitate(
        self,
        rollouts: Sequence[Rollout],
        menus: Sequence[Sequence[str]],
        fresh: int | None = None,
        passes: int | None = None,
    ) -> dict[str, float]:
        """Fit the policy to the actions of the rollouts, and the critic to their returns. Raises as `update`.

        fresh: number of rollouts, at the end, that are new; None is all. Only these enter the moments of observations and
        returns. passes: over the rollouts; None is `update_epochs` of the config.
        """
        losses: list[Tensor] = []
        with self._restored_on_failure():
            data = self._prepare(rollouts, menus)
            for epoch in range(passes or self.config.update_epochs):
                for part in self._minibatches(data, epoch):
                    network, rollout = self.policy.network, part.rollout
                    initial = network.initial(rollout.value.shape[1])
                    encoded, value, _ = network(part.batch, initial, rollout.starts)
                    judged = judge(network, encoded, rollout.actions, rollout.valid, GREEDY)
                    alike = (judged.log_prob * part.weight).sum() / part.weight.sum().clamp(min=1)
                    fit = self._fit(part, value)
                    self._descend(-alike + self.config.value_weight * fit, epoch)
                    losses.append(torch.stack([alike, fit]).detach())
        new = data if fresh is None else data[len(data) - fresh :]
        self._update_moments(new)
        alike, fit = torch.stack(losses).mean(0).tolist()
        return {"log_likelihood": alike, "value_loss": fit} | _figures(new)

    def state(self) -> dict[str, Any]:
        """Return everything that the next update depends on, except the policy."""
        adam = self.optimizer.state_dict()
        return {
            "round": self.round,
            "updates": self.updates,
            "lr": [group["lr"] for group in adam["param_groups"]],
            "moments": {str(index): deepcopy(moments) for index, moments in adam["state"].items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.round, self.updates = state["round"], state["updates"]
        adam = self.optimizer.state_dict()
        adam["state"] = {int(index): deepcopy(moments) for index, moments in state["moments"].items()}
        for group, lr in zip(adam["param_groups"], state["lr"], strict=True):
            group["lr"] = lr
        self.optimizer.load_state_dict(adam)

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Restore the policy and the optimizer where the body raises LearningError."""
        policy, normaliser = self.policy, self.policy.normaliser
        weights, moments = deepcopy(policy.network.state_dict()), deepcopy(self.optimizer.state_dict())
        try:
            yield
        except LearningError:
            policy.network.load_state_dict(weights)
            policy.normaliser = normaliser
            self.optimizer.load_state_dict(moments)
            raise

    def _prepare(self, rollouts: Sequence[Rollout], menus: Sequence[Sequence[str]]) -> list[TrainingBatch]:
        config, gains = self.config, []
        for rollout in rollouts:
            scored = (rollout.reward, rollout.value, rollout.after, rollout.end)
            gains.append(advantages(*scored, config.gamma, config.gae_lambda, rollout.idle))
            if bad := (~torch.isfinite(gains[-1].advantage)).nonzero().tolist():
                step, env = bad[-1]
                reward, value, after = (float(field[step, env]) for field in scored[:3])
                raise LearningError(
                    f"the advantage of environment {env} is not finite at step {step}: its reward is {reward}, its value "
                    f"{value:.4g}, and the value after a truncation {after:.4g}; lower optimizer.lr, because a host has "
                    "diverged, or check the reward"
                )
        raw = [g.advantage if self.group is None else subtract_group_mean(g.advantage, self.group) for g in gains]
        weights = [(rollout.valid[Head.OP].sum(-1) > 1).float() for rollout in rollouts]
        chosen = torch.cat([a[w > 0] for a, w in zip(raw, weights, strict=True)])
        if not len(chosen):
            raise LearningError("only WAIT was valid at every step of the round; give the task slots")
        centre = chosen.mean() if self.group is None else torch.zeros(())
        # A spread under a thousandth of that of returns is rounding error, which normalisation must not amplify.
        spread = chosen.std(correction=0).clamp(min=1e-3 * float(self.policy.network.value_scale))
        scaled = [(advantage - centre) / spread for advantage in raw]
        data = []
        for rollout, gain, advantage, weight, menu in zip(rollouts, gains, scaled, weights, menus, strict=True):
            if rollout.idle.any():  # idle entries of a row go to its end, where they do not interrupt the recurrence
                most = int((~rollout.idle).sum(0).max())
                order = rollout.idle.byte().argsort(stable=True, dim=0)[:most]
                rollout, gain = rollout.taken(order), Advantages(*(take(x, order) for x in gain))
                advantage, weight = take(advantage, order), take(weight, order)
            inputs = self.policy.batch(self.policy.normalised(rollout.observations()), menu)
            data.append(TrainingBatch(rollout, gain, advantage, weight, inputs))
        return data

    def _descend(self, loss: Tensor, epoch: int) -> Tensor:
        """Take a step of the optimizer. Returns the norm of the gradient before clipping."""
        network = self.policy.network
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), self.config.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise LearningError(f"the loss of the policy or its gradient is not finite in epoch {epoch}; lower ppo.lr")
        self.optimizer.step()
        return norm

    def _judge(self, part: TrainingBatch) -> tuple[Judged, Tensor]:
        network, rollout = self.policy.network, part.rollout
        encoded, value, _ = network(part.batch, network.initial(rollout.value.shape[1]), rollout.starts)
        shares = {head: rollout.exploration[..., head, None] for head in Head}  # as when the actions were drawn
        return judge(network, encoded, rollout.actions, rollout.valid, shares), value

    def _fit(self, part: TrainingBatch, value: Tensor) -> Tensor:
        """Return the loss of the critic over the entries at which a row was not idle."""
        decided = part.rollout.decided
        return value_loss(decided(value), decided(part.gains.target), self.policy.network.value_scale)

    def _minibatches(self, data: Sequence[TrainingBatch], epoch: int) -> list[TrainingBatch]:
        """Draw random minibatches of whole sequences. A minibatch holds sequences of one cohort."""
        parts = []
        for cohort, full in enumerate(data):
            envs = full.weight.shape[1]
            for index in _permutation(envs, self.seed, self.updates, epoch, cohort).tensor_split(
                min(self.config.minibatches, envs)
            ):
                parts.append(_rows(full, index))
        if len(data) > 1:  # shuffled, so that the last cohort has no larger influence
            parts = [parts[i] for i in _permutation(len(parts), self.seed, self.updates, epoch, len(data)).tolist()]
        return parts

    @torch.no_grad()
    def _update_moments(self, data: Sequence[TrainingBatch]) -> None:
        """Add the round to the moments of observations and returns, which are then constant until the next update."""
        for part in data:
            seen = Observation(*(part.rollout.decided(field).numpy() for field in part.rollout.observation))
            self.policy.normaliser = self.policy.normaliser.including(seen)
        returns = torch.cat([part.rollout.decided(part.gains.target) for part in data])
        network = self.policy.network
        rate = 1.0 if self.updates == 0 else 0.1
        mean = torch.lerp(network.value_mean, returns.mean(), rate)
        scale = torch.lerp(network.value_scale, returns.std(correction=0).clamp(min=1e-3), rate)
        network.rescale(mean, scale)
        self.updates += 1


def _permutation(count: int, *parts: int) -> Tensor:
    """Draw a random order of `count` sequences, keyed by the seed, the update, the epoch and what is ordered."""
    keys = key(parts[0], Purpose.MINIBATCH, *parts[1:])
    return permutations(keys, np.array([count]), torch.device("cpu"))[0]


def _rows(full: TrainingBatch, index: Tensor) -> TrainingBatch:
    """Return the rows of `index`, up to the last entry at which one of them decides."""
    rollout, batch = full.rollout.rows(index), full.batch
    stop = int((~rollout.idle).sum(0).max())

    def cut(values: Tensor) -> Tensor:
        return values[:stop, index]

    return TrainingBatch(
        rollout.steps(stop),
        Advantages(*map(cut, full.gains)),
        cut(full.advantage),
        cut(full.weight),
        Batch(cut(batch.env), cut(batch.slot), cut(batch.blueprint), cut(batch.cost), batch.menu),
    )


def _figures(data: Sequence[TrainingBatch]) -> dict[str, float]:
    """Return the statistics of the round over all cohorts."""
    value = torch.cat([part.rollout.decided(part.rollout.value) for part in data])
    returns = torch.cat([part.rollout.decided(part.gains.returns) for part in data])
    op = torch.cat([part.rollout.decided(part.rollout.actions[Head.OP]) for part in data])
    episodes = sum(int(part.rollout.end.sum()) for part in data)
    total = torch.cat([part.rollout.reward.sum(0) for part in data])
    return {
        "return": float(total.mean()),
        "explained_variance": float(explained_variance(value, returns)),
        "wait": float((op == Op.WAIT).float().mean()),
        "decisions": float((op != Op.WAIT).sum()) / max(episodes, 1),
    }
