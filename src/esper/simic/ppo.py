"""Proximal policy optimisation on whole sequences (Schulman et al., 2017). T steps, E environments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import RELEVANT, Head, Op
from esper.leyline.config import PPOConfig
from esper.leyline.errors import LearningError
from esper.leyline.keys import Purpose, key, permutations
from esper.simic.advantages import Advantages, advantages, subtract_group_mean
from esper.simic.rollout import Rollout, take
from esper.tamiyo.controller import Policy
from esper.tamiyo.network import Batch
from esper.tamiyo.observation import Observation
from esper.tamiyo.policy import GREEDY, Judged, judge

TOLERANCE = 1e-5
"""Largest difference between the log-probabilities of a rollout and those recomputed with the same weights [nats]."""


class TrainingBatch(NamedTuple):
    """A rollout of one cohort, or rows of it, with the inputs and the targets of the network. Idle entries are at the end."""

    rollout: Rollout
    gains: Advantages
    advantage: Tensor  # (T, E) normalised over all cohorts
    weight: Tensor  # (T, E) 1 where there was a choice, 0 where only WAIT was valid
    batch: Batch  # (T, E, ...)


class Losses(NamedTuple):
    """Scalars of one minibatch, attached to the graph."""

    policy: Tensor
    value: Tensor
    entropy: Tensor  # summed over the heads of a decision
    kl: Tensor  # of the old policy from the new one
    clipped: Tensor  # share of the decisions whose ratio was clipped
    heads: Tensor  # (heads,) mean entropy of each head over the decisions that use it; 0 where none does


def policy_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, clip: float) -> Tensor:
    """-mean min(r A, clip(r, 1 - c, 1 + c) A) with r = exp(log_prob - old), over steps of weight 1 (2017, equation 7).

    All are (T, E); weights are not all 0.
    """
    ratio = (log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(gain * weight).sum() / weight.sum()


def value_loss(value: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Half the mean squared error in units of the return's standard deviation; value and target are (T, E)."""
    return 0.5 * ((value - target) / scale).square().mean()


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """1 - Var(returns - value) / Var(returns); nan where the returns are constant."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - value).var(correction=0) / variance, torch.nan)


def anneal(start: float, progress: float, end: float) -> float:
    """Linear interpolation from `start` at progress 0 to `end` at progress 1."""
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
        with self._restored_on_failure():
            data = self._prepare(rollouts, menus)
            figures = self._learn(data)
        self._update_moments(data)
        self.round += 1
        return figures | _figures(data)

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
        """Everything that the next update depends on, except the policy."""
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
        gains = [self._advantages(rollout) for rollout in rollouts]
        raw = [g.advantage if self.group is None else subtract_group_mean(g.advantage, self.group) for g in gains]
        weights = [(rollout.valid[Head.OP].sum(-1) > 1).float() for rollout in rollouts]
        chosen = torch.cat([a[w > 0] for a, w in zip(raw, weights, strict=True)])
        if not len(chosen):
            raise LearningError("only WAIT was valid at every step of the round; give the task slots")
        centre = chosen.mean() if self.group is None else torch.zeros(())
        # A spread under a thousandth of that of returns is rounding error, which normalisation must not amplify.
        spread = chosen.std(correction=0).clamp(min=1e-3 * float(self.policy.network.value_scale))
        scaled = [(advantage - centre) / spread for advantage in raw]
        return [self._batch(*part) for part in zip(rollouts, gains, scaled, weights, menus, strict=True)]

    def _batch(
        self, rollout: Rollout, gains: Advantages, advantage: Tensor, weight: Tensor, menu: Sequence[str]
    ) -> TrainingBatch:
        """One cohort, with the idle entries of each row at its end, where they no longer interrupt the recurrence."""
        if rollout.idle.any():
            order = rollout.packing()
            rollout, gains = rollout.taken(order), Advantages(*(take(x, order) for x in gains))
            advantage, weight = take(advantage, order), take(weight, order)
        inputs = self.policy.batch(self.policy.normalised(rollout.observations()), menu)
        return TrainingBatch(rollout, gains, advantage, weight, inputs)

    def _advantages(self, rollout: Rollout) -> Advantages:
        config = self.config
        scored = (rollout.reward, rollout.value, rollout.after, rollout.end)
        gains = advantages(*scored, config.gamma, config.gae_lambda, rollout.idle)
        bad = (~torch.isfinite(gains.advantage)).nonzero().tolist()
        if bad:
            step, env = bad[-1]
            reward, value, after = (float(x[step, env]) for x in (rollout.reward, rollout.value, rollout.after))
            raise LearningError(
                f"the advantage of environment {env} is not finite at step {step}: its reward is {reward}, its value "
                f"{value:.4g}, and the value after a truncation {after:.4g}; lower optimizer.lr, because a host has diverged, or "
                "check the reward"
            )
        return gains

    def _learn(self, data: Sequence[TrainingBatch]) -> dict[str, float]:
        """Epochs over minibatches of sequences, until the KL divergence exceeds its target. One device read per epoch."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = anneal(config.lr, self._progress, config.lr / 10)
        self._check(data)
        steps: list[tuple[Losses, Tensor]] = []
        moved, epochs = 0.0, 0
        for epoch in range(config.update_epochs):
            begin = len(steps)
            for part in self._minibatches(data, epoch):
                losses = self._losses(part)
                loss = losses.policy + config.value_weight * losses.value - self._entropy_weight() * losses.entropy
                steps.append((losses, self._descend(loss, epoch)))
            epochs += 1
            moved = float(torch.stack([losses.kl.detach() for losses, _ in steps[begin:]]).mean())
            if moved > config.target_kl:
                break
        rows = [torch.cat([torch.stack([*losses[:-1], norm]), losses.heads]).detach() for losses, norm in steps]
        names = ["policy_loss", "value_loss", "entropy", "kl_mean", "clip_fraction", "gradient_norm"]
        names += [f"entropy_{head.name.lower()}" for head in Head]
        figures = dict(zip(names, torch.stack(rows).mean(0).tolist(), strict=True))
        return figures | {"kl": moved, "epochs": float(epochs)}

    def _descend(self, loss: Tensor, epoch: int) -> Tensor:
        """One step of the optimizer. Returns the norm of the gradient before clipping."""
        network = self.policy.network
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), self.config.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise LearningError(f"the loss of the policy or its gradient is not finite in epoch {epoch}; lower ppo.lr")
        self.optimizer.step()
        return norm

    def _entropy_weight(self) -> float:
        return anneal(self.config.entropy_weight, self._progress, self.config.entropy_weight / 10)

    def _judge(self, rollout: Rollout, batch: Batch) -> tuple[Judged, Tensor]:
        network = self.policy.network
        encoded, value, _ = network(batch, network.initial(rollout.value.shape[1]), rollout.starts)
        shares = {
            head: rollout.exploration[..., head, None] for head in Head
        }  # as they were when the actions were drawn
        return judge(network, encoded, rollout.actions, rollout.valid, shares), value

    def _losses(self, part: TrainingBatch) -> Losses:
        rollout, config = part.rollout, self.config
        judged, value = self._judge(rollout, part.batch)
        change = judged.log_prob - rollout.log_prob
        total = part.weight.sum().clamp(min=1)

        def mean(values: Tensor) -> Tensor:
            return (values * part.weight).sum() / total

        return Losses(
            policy=policy_loss(judged.log_prob, rollout.log_prob, part.advantage, part.weight, config.clip_range)
            if bool(part.weight.any())
            else judged.log_prob.sum() * 0,
            value=self._fit(part, value),
            entropy=mean(judged.entropy.sum(-1)),
            kl=mean(change.exp() - 1 - change),  # http://joschu.net/blog/kl-approx.html, k3
            clipped=mean(((change.exp() - 1).abs() > config.clip_range).float()),
            heads=_by_head(judged.entropy, rollout.actions[Head.OP], part.weight),
        )

    def _fit(self, part: TrainingBatch, value: Tensor) -> Tensor:
        """The critic's loss over the entries at which a row was not idle."""
        decided = part.rollout.decided
        return value_loss(decided(value), decided(part.gains.target), self.policy.network.value_scale)

    @torch.no_grad()
    def _check(self, data: Sequence[TrainingBatch]) -> None:
        """Raise LearningError if the current weights do not reproduce the log-probabilities of the rollout."""
        for part in data:
            judged, _ = self._judge(part.rollout, part.batch)
            off = float((judged.log_prob - part.rollout.log_prob).abs().max())
            if not off <= TOLERANCE:
                raise LearningError(
                    f"log-probabilities of the rollout are off by {off:.2g} nats at unchanged weights, more than "
                    f"{TOLERANCE:g}: the rollout was made by another policy, or a feature is not finite"
                )

    def _minibatches(self, data: Sequence[TrainingBatch], epoch: int) -> list[TrainingBatch]:
        """Random minibatches of whole sequences. A minibatch holds sequences of one cohort."""
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
    """A random order of `count` sequences, keyed by the seed, the update, the epoch and what is ordered."""
    keys = key(parts[0], Purpose.MINIBATCH, *parts[1:])
    return permutations(keys, np.array([count]), torch.device("cpu"))[0]


def _rows(full: TrainingBatch, index: Tensor) -> TrainingBatch:
    """The rows of `index`, up to the last entry at which one of them decides."""
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


@torch.no_grad()
def _by_head(entropy: Tensor, op: Tensor, weight: Tensor) -> Tensor:
    """(T, E, heads) -> (heads,): mean over the decisions that use a head."""
    relevant = torch.from_numpy(RELEVANT.copy())[op] & (weight > 0).unsqueeze(-1)
    return (entropy * relevant).sum((0, 1)) / relevant.sum((0, 1)).clamp(min=1)


def _figures(data: Sequence[TrainingBatch]) -> dict[str, float]:
    """Statistics of the round over all cohorts."""
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
