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
        self.round = 0  # of `update`
        self.begun = -1  # the first round whose returns differed by the floor of advantages; -1 before it
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
        """0 until a round's returns differ, since there is nothing to settle on before; 1 in the last round.

        The learning rate, the exploration and the weight of the entropy are annealed by it.
        """
        begun = self.round if self.begun < 0 else self.begun
        return (self.round - begun) / max(self.config.rounds - 1 - begun, 1)

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
            self._rescale(data)
            for group in self.optimizer.param_groups:
                group["lr"] = anneal(config.lr, self._progress, config.lr / 10)
            given = [config.entropy_weights.get(head.name.lower(), config.entropy_weight) for head in Head]
            entropy_weights = torch.tensor([anneal(weight, self._progress, weight / 10) for weight in given])
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
                    bonus = (judged.entropy @ entropy_weights * weight).sum() / total
                    norm = self._descend(policy - bonus, config.value_weight * fit, epoch)
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
        return figures | {"kl": moved, "epochs": float(epochs), "rewarded": float(self.begun >= 0)} | _figures(data)

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
            new = data if fresh is None else data[len(data) - fresh :]
            self._rescale(new)
            for epoch in range(passes or self.config.update_epochs):
                for part in self._minibatches(data, epoch):
                    network, rollout = self.policy.network, part.rollout
                    initial = network.initial(rollout.value.shape[1])
                    encoded, value, _ = network(part.batch, initial, rollout.starts)
                    judged = judge(network, encoded, rollout.actions, rollout.valid, GREEDY)
                    alike = (judged.log_prob * part.weight).sum() / part.weight.sum().clamp(min=1)
                    fit = self._fit(part, value)
                    self._descend(-alike, self.config.value_weight * fit, epoch)
                    losses.append(torch.stack([alike, fit]).detach())
        self._update_moments(new)
        alike, fit = torch.stack(losses).mean(0).tolist()
        return {"log_likelihood": alike, "value_loss": fit} | _figures(new)

    def state(self) -> dict[str, Any]:
        """Return everything that the next update depends on, except the policy."""
        adam = self.optimizer.state_dict()
        return {
            "round": self.round,
            "begun": self.begun,
            "updates": self.updates,
            "lr": [group["lr"] for group in adam["param_groups"]],
            "moments": {str(index): deepcopy(moments) for index, moments in adam["state"].items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.round, self.updates = state["round"], state["updates"]
        self.begun = state["begun"]
        adam = self.optimizer.state_dict()
        adam["state"] = {int(index): deepcopy(moments) for index, moments in state["moments"].items()}
        for group, lr in zip(adam["param_groups"], state["lr"], strict=True):
            group["lr"] = lr
        self.optimizer.load_state_dict(adam)

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Restore the policy and the optimizer where the body raises LearningError."""
        policy, normaliser, begun = self.policy, self.policy.normaliser, self.begun
        weights, moments = deepcopy(policy.network.state_dict()), deepcopy(self.optimizer.state_dict())
        try:
            yield
        except LearningError:
            policy.network.load_state_dict(weights)
            policy.normaliser, self.begun = normaliser, begun
            self.optimizer.load_state_dict(moments)
            raise

    def _prepare(self, rollouts: Sequence[Rollout], menus: Sequence[Sequence[str]]) -> list[TrainingBatch]:
        config, gains = self.config, []
        for rollout in rollouts:
            # A critic that learns nothing would add nothing but its noise.
            critic = rollout.value if config.value_weight else torch.zeros_like(rollout.value)
            scored = (rollout.reward, critic, rollout.after, rollout.end)
            gains.append(advantages(*scored, config.gamma, config.gae_lambda, rollout.idle))
            if bad := (~torch.isfinite(gains[-1].advantage)).nonzero().tolist():
                step, env = bad[-1]
                reward, value, after = (float(field[step, env]) for field in scored[:3])
                raise LearningError(
                    f"the advantage of environment {env} is not finite at step {step}: its reward is {reward}, its value "
                    f"{value:.4g}, and the value after a truncation {after:.4g}; lower optimizer.lr, because a host has "
                    "diverged, or check the reward"
                )
        raw = [self._compared(g.advantage) for g in gains]
        weights = [(rollout.valid[Head.OP].sum(-1) > 1).float() for rollout in rollouts]
        chosen = torch.cat([a[w > 0] for a, w in zip(raw, weights, strict=True)])
        if not len(chosen):
            raise LearningError("only WAIT was valid at every step of the round; give the task slots")
        centre = chosen.mean() if self.group is None else torch.zeros(())
        # A round in which hardly anything was earned has advantages that are the error of the critic. Scaled to unit variance
        # they would lead the policy into habits before it has met a reward, so they are never scaled up from below the floor.
        spread = chosen.std(correction=0).clamp(min=config.advantage_floor)
        scaled = [(advantage - centre) / spread for advantage in raw]
        earned = torch.cat([self._compared(rollout.reward.sum(0, keepdim=True))[0] for rollout in rollouts])
        if float(earned.max() - earned.min()) <= TOLERANCE:  # of the critic alone
            scaled = [torch.zeros_like(advantage) for advantage in scaled]
        if self.begun < 0 and float(earned.std(correction=0)) >= config.advantage_floor:
            self.begun = self.round
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

    def _compared(self, values: Tensor) -> Tensor:
        """Return values (T, E) less those of the other members of each group; as they are where there are no groups."""
        return values if self.group is None else subtract_group_mean(values, self.group)

    def _descend(self, policy: Tensor, critic: Tensor, epoch: int) -> Tensor:
        """Take a step of the optimizer. Returns the norm of the gradient of the policy's loss before clipping.

        The two gradients are clipped each for itself. Otherwise a critic that meets its first reward, with an error far above
        any before, would take the whole step in which the policy should learn from it.
        """
        parameters = list(self.policy.network.parameters())
        for parameter in parameters:
            parameter.grad = None
        norms = []
        for loss in (policy, critic):
            gradients = torch.autograd.grad(loss, parameters, retain_graph=loss is policy, allow_unused=True)
            known = [gradient for gradient in gradients if gradient is not None]
            norms.append(torch.nn.utils.get_total_norm(known))
            scale = (self.config.max_grad_norm / (norms[-1] + 1e-6)).clamp(max=1)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    scaled = gradient * scale
                    parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        if not bool(torch.isfinite(torch.stack(norms)).all()):
            raise LearningError(f"the loss of the policy or its gradient is not finite in epoch {epoch}; lower ppo.lr")
        self.optimizer.step()
        return norms[0]

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
    def _rescale(self, data: Sequence[TrainingBatch]) -> None:
        """Let the moments of the critic's targets follow those of the round: at once where their spread rises, else slowly.

        A scale that lags behind the first rewards would make the loss of the critic a thousand times too large.
        """
        targets = torch.cat([part.rollout.decided(part.gains.target) for part in data])
        network = self.policy.network
        if not bool(torch.isfinite(targets.square().sum())):
            most = float(targets.abs().max())
            raise LearningError(
                f"the returns of the round reach {most:.3g}, whose square is not finite; check the reward"
            )
        mean, spread = targets.mean(), targets.std(correction=0).clamp(min=1e-3)
        rate = 1.0 if self.updates == 0 or bool(spread > network.value_scale) else 0.1
        network.rescale(torch.lerp(network.value_mean, mean, rate), torch.lerp(network.value_scale, spread, rate))

    def _update_moments(self, data: Sequence[TrainingBatch]) -> None:
        """Add the round to the moments of observations, which are then constant until the next update."""
        for part in data:
            seen = Observation(*(part.rollout.decided(field).numpy() for field in part.rollout.observation))
            self.policy.normaliser = self.policy.normaliser.including(seen)
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
        batch._replace(**{name: cut(getattr(batch, name)) for name in Batch._fields if name != "menu"}),
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
        "episodes": float(episodes),
        "explained_variance": float(explained_variance(value, returns)),
        "wait": float((op == Op.WAIT).float().mean()),
        "decisions": float((op != Op.WAIT).sum()) / max(episodes, 1),
    }
