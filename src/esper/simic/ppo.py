"""Proximal policy optimisation over whole sequences (Schulman et al., 2017). T steps, E environments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import RELEVANT, Head, Op
from esper.leyline.config import PPOConfig
from esper.leyline.errors import LearningError
from esper.leyline.keys import Purpose, key, permutations
from esper.simic.advantages import Advantages, advantages, less_group
from esper.simic.rollout import Rollout
from esper.tamiyo.controller import Policy
from esper.tamiyo.network import Batch
from esper.tamiyo.policy import GREEDY, Judged, judge

TOLERANCE = 1e-5
"""How far a rollout's log-probabilities may be from those of the same weights [nats]."""


class Batched(NamedTuple):
    """A rollout of one cohort and what it is learnt with."""

    rollout: Rollout
    gains: Advantages
    advantage: Tensor  # (T, E) of the decisions, normalised over all cohorts
    weight: Tensor  # (T, E) 1 where there was a choice, 0 where only WAIT was valid
    batch: Batch  # (T, E, ...)


class Losses(NamedTuple):
    """Scalars of one minibatch, on the graph."""

    policy: Tensor
    value: Tensor
    entropy: Tensor  # summed over the heads of a decision
    kl: Tensor  # of the old policy from the new
    clipped: Tensor  # share of decisions whose ratio was clipped
    heads: Tensor  # (heads,) entropy of each where it mattered; 0 where it never did


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
    """1 - Var(returns - value) / Var(returns); nan where the returns do not vary."""
    varies = returns.var(correction=0)
    return torch.where(varies > 0, 1 - (returns - value).var(correction=0) / varies, torch.nan)


def anneal(start: float, progress: float, end: float) -> float:
    """Linear from `start` at progress 0 to `end` at progress 1."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


class PPO:
    """Updates a policy from rounds of rollouts; everything it remembers between rounds is in `state`."""

    def __init__(self, policy: Policy, config: PPOConfig, seed: int, group: int | None = None) -> None:
        """`group`: environments in a row share an instance, and their mean is the baseline of the advantage; None: no."""
        self.policy, self.config, self.seed, self.group = policy, config, seed, group
        self.round = 0  # of learning; it anneals
        self.updates = 0  # of either kind
        # fused Adam: one call for all parameters, which are many and small
        self.optimizer = torch.optim.Adam(policy.network.parameters(), lr=config.lr, eps=1e-5, fused=True)

    @property
    def exploration(self) -> dict[Head, float]:
        """Share of the uniform in this round's decisions, by head."""
        config = self.config
        shares = {head: config.op_exploration if head is Head.OP else config.exploration for head in Head}
        return {head: anneal(share, self._progress, 0.0) for head, share in shares.items()}

    @property
    def _progress(self) -> float:
        """0 in the first round, 1 in the last."""
        return self.round / max(self.config.rounds - 1, 1)

    def update(self, rollouts: Sequence[Rollout], menus: Sequence[Sequence[str]]) -> dict[str, float]:
        """Learn from a round: one rollout and the menu's names per cohort. Returns figures of health.

        Raises LearningError, with the weights of before, where an advantage or a loss is not finite or the rollout's
        log-probabilities are not those of these weights.
        """
        with self._kept():
            data = self._prepare(rollouts, menus)
            figures = self._learn(data)
        self._follow(data)
        self.round += 1
        return figures | _figures(data)

    def imitate(
        self, rollouts: Sequence[Rollout], menus: Sequence[Sequence[str]], fresh: int | None = None
    ) -> dict[str, float]:
        """Learn to decide as the rollouts' actions say, whoever took them, and what their returns are. Raises as `update`.

        The last `fresh` rollouts are new, all where it is None; older ones were counted into the moments before.
        """
        found: list[Tensor] = []
        with self._kept():
            data = self._prepare(rollouts, menus)
            for epoch in range(self.config.update_epochs):
                for part in self._minibatches(data, epoch):
                    network, rollout = self.policy.network, part.rollout
                    encoded, value, _ = network(part.batch, network.initial(rollout.value.shape[1]), rollout.starts)
                    judged = judge(network, encoded, rollout.actions, rollout.valid, GREEDY)
                    alike = (judged.log_prob * part.weight).sum() / part.weight.sum().clamp(min=1)
                    fit = value_loss(value, part.gains.target, network.value_scale)
                    self._descend(-alike + self.config.value_weight * fit, epoch)
                    found.append(torch.stack([alike, fit]).detach())
        new = data if fresh is None else data[len(data) - fresh :]
        self._follow(new)
        alike, fit = torch.stack(found).mean(0).tolist()
        return {"log_likelihood": alike, "value_loss": fit} | _figures(new)

    def state(self) -> dict[str, Any]:
        """Everything but the policy that the next update depends on."""
        kept = self.optimizer.state_dict()
        return {
            "round": self.round,
            "updates": self.updates,
            "lr": [group["lr"] for group in kept["param_groups"]],
            "moments": {str(index): _copy(moments) for index, moments in kept["state"].items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.round, self.updates = state["round"], state["updates"]
        kept = self.optimizer.state_dict()
        kept["state"] = {int(index): _copy(moments) for index, moments in state["moments"].items()}
        for group, lr in zip(kept["param_groups"], state["lr"], strict=True):
            group["lr"] = lr
        self.optimizer.load_state_dict(kept)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """What fails inside leaves the policy and the optimizer as they were."""
        policy, normaliser = self.policy, self.policy.normaliser
        weights, moments = _copy(policy.network.state_dict()), _copy(self.optimizer.state_dict())
        try:
            yield
        except LearningError:
            policy.network.load_state_dict(weights)
            policy.normaliser = normaliser
            self.optimizer.load_state_dict(moments)
            raise

    def _prepare(self, rollouts: Sequence[Rollout], menus: Sequence[Sequence[str]]) -> list[Batched]:
        config, found = self.config, []
        for rollout in rollouts:
            gains = advantages(
                rollout.reward, rollout.value, rollout.after, rollout.end, config.gamma, config.gae_lambda
            )
            if not bool(torch.isfinite(gains.advantage).all()):
                where = (~torch.isfinite(gains.advantage)).nonzero()[-1].tolist()
                raise LearningError(
                    f"the advantage of environment {where[1]} is not finite at step {where[0]}: its reward is "
                    f"{float(rollout.reward[tuple(where)])}, its value {float(rollout.value[tuple(where)]):.4g}, that of "
                    f"the state behind a cut {float(rollout.after[tuple(where)]):.4g}; "
                    "lower optimizer.lr, as a host has diverged, or look at the reward"
                )
            found.append((rollout, gains))
        raw = [g.advantage if self.group is None else less_group(g.advantage, self.group) for _, g in found]
        weights = [(rollout.valid[Head.OP].sum(-1) > 1).float() for rollout in rollouts]
        chosen = torch.cat([a[w > 0] for a, w in zip(raw, weights, strict=True)])
        if not len(chosen):
            raise LearningError("no step of the round had anything to decide: only WAIT was valid; give the task slots")
        centre = chosen.mean() if self.group is None else torch.zeros(())
        # a thousandth of what returns vary by is luck of rounding, and must not be blown up to a lesson
        spread = chosen.std(correction=0).clamp(min=1e-3 * float(self.policy.network.value_scale))
        return [
            Batched(rollout, gains, (advantage - centre) / spread, weight, self._batch(rollout, menu))
            for (rollout, gains), advantage, weight, menu in zip(found, raw, weights, menus, strict=True)
        ]

    def _batch(self, rollout: Rollout, menu: Sequence[str]) -> Batch:
        return self.policy.batch(self.policy.normalised(rollout.observations()), menu)

    def _learn(self, data: Sequence[Batched]) -> dict[str, float]:
        """Epochs over minibatches of sequences, until the policy has moved far enough. One read at the end, one an epoch."""
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
        """One step of the optimizer; the norm of the gradient before it was clipped."""
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
        shares = {head: rollout.exploration[..., head, None] for head in Head}  # those of then, not of the config
        return judge(network, encoded, rollout.actions, rollout.valid, shares), value

    def _losses(self, part: Batched) -> Losses:
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
            value=value_loss(value, part.gains.target, self.policy.network.value_scale),
            entropy=mean(judged.entropy.sum(-1)),
            kl=mean(change.exp() - 1 - change),  # http://joschu.net/blog/kl-approx.html, k3
            clipped=mean(((change.exp() - 1).abs() > config.clip_range).float()),
            heads=_by_head(judged.entropy, rollout.actions[Head.OP], part.weight),
        )

    @torch.no_grad()
    def _check(self, data: Sequence[Batched]) -> None:
        """The same weights must give the rollout's own log-probabilities, or the ratio means nothing."""
        for part in data:
            judged, _ = self._judge(part.rollout, part.batch)
            off = float((judged.log_prob - part.rollout.log_prob).abs().max())
            if not off <= TOLERANCE:
                raise LearningError(
                    f"log-probabilities of the rollout are off by {off:.2g} nats at unchanged weights, more than "
                    f"{TOLERANCE:g}: the rollout was made by another policy, or a feature is not finite"
                )

    def _minibatches(self, data: Sequence[Batched], epoch: int) -> list[Batched]:
        """Whole sequences, dealt anew every epoch; a minibatch is of one cohort."""
        parts = []
        for cohort, full in enumerate(data):
            envs = full.weight.shape[1]
            keys = key(self.seed, Purpose.MINIBATCH, self.updates, epoch, cohort)
            order = permutations(keys, np.array([envs]), torch.device("cpu"))[0]
            for index in order.tensor_split(min(self.config.minibatches, envs)):
                parts.append(_rows(full, index))
        if len(data) > 1:  # cohorts take turns, so that no step of the optimizer is the last word of one
            keys = key(self.seed, Purpose.MINIBATCH, self.updates, epoch, len(data))
            parts = [parts[i] for i in permutations(keys, np.array([len(parts)]), torch.device("cpu"))[0].tolist()]
        return parts

    @torch.no_grad()
    def _follow(self, data: Sequence[Batched]) -> None:
        """Take the round into the moments of observations and returns, which stay as they are until the next update."""
        for part in data:
            self.policy.normaliser = self.policy.normaliser.including(part.rollout.observations())
        returns = torch.cat([part.gains.target.flatten() for part in data])
        network = self.policy.network
        rate = 1.0 if self.updates == 0 else 0.1
        mean = torch.lerp(network.value_mean, returns.mean(), rate)
        scale = torch.lerp(network.value_scale, returns.std(correction=0).clamp(min=1e-3), rate)
        network.rescale(mean, scale)
        self.updates += 1


def _rows(full: Batched, index: Tensor) -> Batched:
    batch = full.batch
    return Batched(
        full.rollout.rows(index),
        Advantages(*(x[:, index] for x in full.gains)),
        full.advantage[:, index],
        full.weight[:, index],
        Batch(batch.env[:, index], batch.slot[:, index], batch.blueprint[:, index], batch.cost[:, index], batch.menu),
    )


@torch.no_grad()
def _by_head(entropy: Tensor, op: Tensor, weight: Tensor) -> Tensor:
    """(T, E, heads) -> (heads,): mean over the decisions in which a head mattered."""
    mattered = torch.from_numpy(RELEVANT.copy())[op] & (weight > 0).unsqueeze(-1)
    return (entropy * mattered).sum((0, 1)) / mattered.sum((0, 1)).clamp(min=1)


def _figures(data: Sequence[Batched]) -> dict[str, float]:
    """What the round was like, over all cohorts."""
    value = torch.cat([part.rollout.value.flatten() for part in data])
    returns = torch.cat([part.gains.returns.flatten() for part in data])
    op = torch.cat([part.rollout.actions[Head.OP].flatten() for part in data])
    episodes = sum(int(part.rollout.end.sum()) for part in data)
    total = torch.cat([part.rollout.reward.sum(0) for part in data])
    return {
        "return": float(total.mean()),
        "explained_variance": float(explained_variance(value, returns)),
        "wait": float((op == Op.WAIT).float().mean()),
        "decisions": float((op != Op.WAIT).sum()) / max(episodes, 1),
    }


def _copy(state: Mapping[str, object]) -> dict[str, object]:
    """A state dict in memory of its own."""
    return {
        name: value.clone() if isinstance(value, Tensor) else _copy(value) if isinstance(value, dict) else value
        for name, value in state.items()
    }
