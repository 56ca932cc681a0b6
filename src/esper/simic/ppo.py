"""Update a policy by proximal policy optimisation on whole sequences (Schulman et al., 2017). T steps, E environments.

Each worker computes the gradients of its own shards, and the sums over all shards are the same in every worker, as in DD-PPO
(Wijmans et al., 2020, arXiv 1911.00357). All workers therefore hold the same weights and the same state of the optimizer.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import reduce
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.leyline.config.tree import PPOConfig
from esper.leyline.data.keys import Purpose, key, permutations
from esper.leyline.lifecycle.vocabulary import RELEVANT, Head, Op
from esper.leyline.messages import LearningError
from esper.simic.exchange import Exchange, ExchangeError
from esper.simic.rollout import Rollout, ShardedRollout, take
from esper.tamiyo.policy.controller import Policy
from esper.tamiyo.policy.network import GREEDY, Batch, Judged, full_precision, judge
from esper.tamiyo.policy.observation import Moments, Normaliser, Observation

TOLERANCE = 1e-5
"""Largest difference between the log-probabilities of a rollout and those recomputed with the same weights [nats]."""


class Advantages(NamedTuple):
    """Holds the targets of the policy and of the critic, each (T, E) float32."""

    advantage: Tensor  # advantage of the decision at step t
    target: Tensor  # lambda-return, the target of the critic
    returns: Tensor  # discounted sum of the rewards from step t to the end of the sequence


def advantages(
    reward: Tensor, value: Tensor, end: Tensor, gamma: float, lam: float, idle: Tensor | None = None
) -> Advantages:
    """Compute advantages by GAE (Schulman et al., "High-dimensional continuous control using GAE", 2016, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,      A_t = delta_t + gamma lam (1 - end_t) A_{t+1}

    All arguments are (T, E). `end` marks the last step of a sequence, behind which V is 0: an episode is played to its end, and a
    rollback is a terminal. The last step of a rollout must end every sequence. lam = 1 gives the Monte Carlo advantage.

    idle: (T, E) bool, entries at which a row decided nothing. Its sequence is that of its other entries, and an idle one has the
    advantage and the returns of the next.
    """
    assert reward.shape == value.shape == end.shape, (reward.shape, value.shape, end.shape)
    idle = torch.zeros_like(end) if idle is None else idle
    assert bool((end | idle)[-1].all()), "the last step of a rollout ends every sequence"
    if idle.any():
        value = value.clone()
        for t in reversed(range(len(value) - 1)):
            value[t] = torch.where(idle[t], value[t + 1], value[t])
    next_value = torch.where(end, 0.0, value.roll(-1, 0))
    delta = reward + gamma * next_value - value
    discount = gamma * (~end).to(reward.dtype)
    advantage, returns = torch.empty_like(reward), torch.empty_like(reward)
    next_advantage, next_return = torch.zeros_like(reward[0]), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        own = delta[t] + lam * discount[t] * next_advantage
        next_advantage = torch.where(idle[t], next_advantage, own)
        earned = reward[t] + torch.where(end[t], 0.0, gamma * next_return)
        next_return = torch.where(idle[t], next_return, earned)
        advantage[t], returns[t] = next_advantage, next_return
    return Advantages(advantage, advantage + value, returns)


def subtract_group_mean(advantage: Tensor, group: int) -> Tensor:
    """Compute A_i - mean over the other members j of the group of A_j, at each step: (T, E) -> (T, E).

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
    """Holds the rollout of a shard, or rows of it, with inputs and targets of the network. Idle entries are at the end."""

    rollout: Rollout
    gains: Advantages
    advantage: Tensor  # (T, E) less those of the group; normalised over all shards in `update`
    weight: Tensor  # (T, E) 1 where there was a choice, 0 where only WAIT was valid
    batch: Batch  # (T, E, ...)


def policy_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, clip: float) -> Tensor:
    """Return -sum min(r A, clip(r, 1 - c, 1 + c) A) with r = exp(log_prob - old), over steps of weight 1 (2017, equation 7).

    All are (T, E). The mean over the steps of a minibatch is taken when the sums of all of its shards are known.
    """
    ratio = (log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(gain * weight).sum()


def value_loss(value: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Return half the sum of squared errors in units of the return's standard deviation; value and target are (T, E)."""
    return 0.5 * ((value - target) / scale).square().sum()


MEASURED = ("advantage", "target", "returns", "residual", "wait", "total", "earned", "ends")
"""The quantities whose moments a round has. Over decisions: the advantage where there was a choice, the target of the critic, the
return, the return less the value, and whether it is WAIT. Over environments: the total reward, that less those of the group, and
the number of ends of sequences."""


class Statistics(NamedTuple):
    """Holds what is known of a round over all of its shards."""

    number: Mapping[str, float]  # of values, for each of the `MEASURED`
    mean: Mapping[str, float]  # of these values
    spread: Mapping[str, float]  # standard deviation of these values
    seen: Normaliser  # moments of the observations
    range: float  # from the lowest to the highest `earned`
    reach: float  # largest magnitude of a target of the critic
    off: float  # largest difference between a log-probability of the rollouts and that of the present weights [nats]

    def figures(self) -> dict[str, float]:
        """Return the figures of the round."""
        episodes, spread = self.mean["ends"] * self.number["ends"], self.spread["returns"]
        return {
            "return": self.mean["total"],
            "episodes": episodes,
            "explained_variance": 1 - (self.spread["residual"] / spread) ** 2 if spread > 0 else float("nan"),
            "wait": self.mean["wait"],
            "decisions": (1 - self.mean["wait"]) * self.number["wait"] / max(episodes, 1),
        }


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
        self.exchange = Exchange()  # alone, until it is given one with other workers, which do the same
        self.round = 0  # of `update`
        self.begun = -1  # the first round whose returns differed by the floor of advantages; -1 before it
        self.updates = 0  # calls of `update` and `imitate`
        self.computing = 0.0  # seconds in which all workers computed the gradients of the last update
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

    def update(self, played: Sequence[ShardedRollout]) -> dict[str, float]:
        """Update the policy from a round, and return diagnostics by name. All workers call this, each with its own shards.

        played: the rollout of each task.

        Raises LearningError, and restores the weights, where an advantage or a loss is not finite, or the rollouts were made
        with other weights; ExchangeError, and restores them too, where another worker is lost.
        """
        config, device = self.config, self.policy.device
        names = ["policy_loss", "value_loss", "entropy", "kl_mean", "clip_fraction"]
        names += [f"entropy_{head.name.lower()}" for head in Head]
        with self._restored_on_failure():
            data = self._prepare(played)
            statistics = self._statistics(played, data, judging=True)
            if not statistics.off <= TOLERANCE:
                raise LearningError(
                    f"log-probabilities of the rollout are off by {statistics.off:.2g} nats at unchanged weights, more than "
                    f"{TOLERANCE:g}: the rollout was made by another policy, or a feature is not finite"
                )
            self._rescale(statistics)
            scaled = self._placed(self._scaled(data, statistics))
            for group in self.optimizer.param_groups:
                group["lr"] = anneal(config.lr, self._progress, config.lr / 10)
            given = [config.entropy_weights.get(head.name.lower(), config.entropy_weight) for head in Head]
            entropy_weights = torch.tensor([anneal(weight, self._progress, weight / 10) for weight in given]).to(device)
            relevant = torch.from_numpy(RELEVANT.copy()).to(device)

            def losses(part: TrainingBatch) -> tuple[Tensor, Tensor, list[Tensor]]:
                judged, value = self._judge(part)
                weight, old = part.weight, part.rollout.log_prob
                change = judged.log_prob - old
                policy = policy_loss(judged.log_prob, old, part.advantage, weight, config.clip_range)
                bonus = (judged.entropy @ entropy_weights * weight).sum()
                kl = ((change.exp() - 1 - change) * weight).sum()  # http://joschu.net/blog/kl-approx.html, k3
                clipped = (((change.exp() - 1).abs() > config.clip_range).float() * weight).sum()
                # The entropy of each head is averaged over the decisions that use it.
                used = relevant[part.rollout.actions[Head.OP]] & (weight > 0).unsqueeze(-1)
                heads = [(judged.entropy * used).sum((0, 1)), used.sum((0, 1))]
                sums = torch.stack([policy, (judged.entropy.sum(-1) * weight).sum(), kl, clipped])
                return policy - bonus, self._fit(part, value), [sums, *heads]

            rows: list[Tensor] = []  # (names,) of each minibatch
            norms: list[Tensor] = []
            moved, epochs = 0.0, 0
            for epoch in range(config.update_epochs):
                begin = len(rows)
                for place, shards, index in self._minibatches(played, epoch):
                    norm, fit, choices, sums = self._descend(
                        losses, scaled[place], shards, index, 4 + 2 * len(Head), epoch
                    )
                    means, (entropies, uses) = sums[:4] / choices, sums[4:].view(2, len(Head))
                    rows.append(torch.cat([means[:1], fit, means[1:], entropies / uses.clamp(min=1)]))
                    norms.append(norm)
                epochs += 1
                moved = float(torch.stack([row[names.index("kl_mean")] for row in rows[begin:]]).mean())
                if moved > config.target_kl:
                    break
            figures = dict(zip(names, torch.stack(rows).mean(0).tolist(), strict=True))
            figures["gradient_norm"] = float(torch.stack(norms).mean())
        self._update_moments(statistics)
        self.round += 1
        known = {"kl": moved, "epochs": float(epochs), "rewarded": float(self.begun >= 0)}
        return figures | known | statistics.figures()

    def imitate(
        self, played: Sequence[ShardedRollout], fresh: int | None = None, passes: int | None = None
    ) -> dict[str, float]:
        """Fit the policy to the actions of the rollouts, and the critic to their returns. Raises as `update`.

        fresh: number of rollouts, at the end, that are new; None is all. Only these enter the moments of observations and
        returns. passes: over the rollouts; None is `update_epochs` of the config.
        """

        def losses(part: TrainingBatch) -> tuple[Tensor, Tensor, list[Tensor]]:
            judged, value = self._judge(part, GREEDY)
            alike = (judged.log_prob * part.weight).sum()
            return -alike, self._fit(part, value), [alike.unsqueeze(0)]

        rows: list[Tensor] = []
        with self._restored_on_failure():
            data = self._prepare(played)
            since = 0 if fresh is None else len(data) - fresh
            statistics = self._statistics(played[since:], data[since:])
            self._rescale(statistics)
            data = self._placed(data)
            for epoch in range(passes or self.config.update_epochs):
                for place, shards, index in self._minibatches(played, epoch):
                    _, fit, choices, sums = self._descend(losses, data[place], shards, index, 1, epoch)
                    rows.append(torch.cat([sums / choices, fit]))
        self._update_moments(statistics)
        alike, fit = torch.stack(rows).mean(0).tolist()
        return {"log_likelihood": alike, "value_loss": fit} | statistics.figures()

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
        self.round, self.updates = state["round"], state["updates"]
        self.begun = state["begun"]
        adam = self.optimizer.state_dict()
        adam["state"] = {int(index): deepcopy(moments) for index, moments in state["moments"].items()}
        for group, lr in zip(adam["param_groups"], state["lr"], strict=True):
            group["lr"] = lr
        self.optimizer.load_state_dict(adam)

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Restore the policy and the optimizer where the body raises LearningError or ExchangeError."""
        policy, own = deepcopy(self.policy.state()), self.state()
        self.computing = 0.0
        try:
            with full_precision(self.policy.device):
                yield
        except (LearningError, ExchangeError):
            self.policy.load_state(policy)
            self.load_state(own)
            raise

    def _prepare(self, played: Sequence[ShardedRollout]) -> list[dict[int, TrainingBatch]]:
        """Return the batches of this worker's shards, for each of the rollouts."""
        return [{shard: self._batch(rollout, each.menu) for shard, rollout in each.rollouts.items()} for each in played]

    def _batch(self, rollout: Rollout, menu: Sequence[str]) -> TrainingBatch:
        config = self.config
        # A critic that learns nothing would add nothing but its noise.
        critic = rollout.value if config.value_weight else torch.zeros_like(rollout.value)
        scored = (rollout.reward, critic, rollout.end)
        gains = advantages(*scored, config.gamma, config.gae_lambda, rollout.idle)
        if bad := (~torch.isfinite(gains.advantage)).nonzero().tolist():
            step, env = bad[-1]
            reward, value = (float(field[step, env]) for field in scored[:2])
            raise LearningError(
                f"the advantage of environment {env} is not finite at step {step}: its reward is {reward} and its value "
                f"{value:.4g}; lower optimizer.lr, because a host has "
                "diverged, or check the reward"
            )
        advantage = subtract_group_mean(gains.advantage, self.group or 1)
        weight = (rollout.valid[Head.OP].sum(-1) > 1).float()
        if rollout.idle.any():  # idle entries of a row go to its end, where they do not interrupt the recurrence
            most = int((~rollout.idle).sum(0).max())
            order = rollout.idle.byte().argsort(stable=True, dim=0)[:most]
            entries = rollout, gains, advantage, weight
            rollout, gains, advantage, weight = pytree.tree_map(lambda values: take(values, order), entries)
        inputs = self.policy.batch(rollout.observations(), menu)
        return TrainingBatch(rollout, gains, advantage, weight, inputs)

    def _statistics(
        self, played: Sequence[ShardedRollout], data: Sequence[Mapping[int, TrainingBatch]], *, judging: bool = False
    ) -> Statistics:
        """Exchange the statistics of each shard. judging: whether log-probabilities are compared with those of the rollouts."""
        own = list[list[Any]]()
        for shard, part in ((shard, part) for parts in data for shard, part in parts.items()):
            rollout, decided = part.rollout, part.rollout.decided
            target, returns, total = decided(part.gains.target), decided(part.gains.returns), rollout.reward.sum(0)
            earned = subtract_group_mean(total.unsqueeze(0), self.group or 1)[0]
            waits = decided(rollout.actions[Head.OP]) == Op.WAIT
            residual, ends = returns - decided(rollout.value), rollout.end.sum(0)
            measured = (part.advantage[part.weight > 0], target, returns, residual, waits, total, earned, ends)
            seen = Normaliser.of(Observation(*(decided(field).numpy() for field in rollout.observation)))
            moments = [*(Moments.of(values.unsqueeze(-1).numpy()) for values in measured), *seen]
            off = 0.0
            if judging:
                with torch.no_grad():
                    judged, _ = self._judge(self._placed(part))
                    off = float((judged.log_prob.cpu() - rollout.log_prob).abs().max())
            extremes = np.array([float(earned.max()), -float(earned.min()), float(target.abs().max()), off])
            own.append([shard, [list(each) for each in moments], extremes])
        found = self.exchange.gather({"shards": own})
        every = sorted((each for worker in found for each in worker["shards"]), key=itemgetter(0))
        whole = [
            reduce(Moments.merged, (Moments(*each) for each in parts), Moments.prior([0.0] * len(parts[0][0])))
            for parts in zip(*(moments for _, moments, _ in every), strict=True)
        ]
        known = dict(zip(MEASURED, whole, strict=False))
        mean, var, number = ({name: float(each[at][0]) for name, each in known.items()} for at in range(3))
        highest, lowest, reach, off = np.max([extremes for _, _, extremes in every], 0).tolist()
        spread = {name: value**0.5 for name, value in var.items()}
        return Statistics(number, mean, spread, Normaliser(*whole[len(MEASURED) :]), highest + lowest, reach, off)

    def _scaled(
        self, data: Sequence[Mapping[int, TrainingBatch]], statistics: Statistics
    ) -> list[dict[int, TrainingBatch]]:
        """Return the batches with normalised advantages."""
        centre = statistics.mean["advantage"] if self.group is None else 0.0
        # A round in which hardly anything was earned has advantages that are the error of the critic. Scaled to unit variance
        # they would lead the policy into habits before it has met a reward, so they are never scaled up from below the floor.
        spread = max(statistics.spread["advantage"], self.config.advantage_floor)
        rate = 1 / spread if statistics.range > TOLERANCE else 0.0  # otherwise they are the error of the critic alone
        return [
            {shard: part._replace(advantage=(part.advantage - centre) * rate) for shard, part in parts.items()}
            for parts in data
        ]

    def _placed(self, batches: Any) -> Any:
        """Return batches on the device of the policy. Rollouts are played, stored and measured on the CPU."""
        return pytree.tree_map(lambda values: values.to(self.policy.device), batches)

    def _descend(
        self,
        losses: Callable[[TrainingBatch], tuple[Tensor, Tensor, list[Tensor]]],
        parts: Mapping[int, TrainingBatch],
        shards: Sequence[int],
        rows: Mapping[int, Tensor],
        sums: int,
        epoch: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take a step of the optimizer on a minibatch.

        losses: from rows of a shard to the sums of the loss of the policy over decisions with a choice and of that of the critic
        over all decisions, and to further sums, `sums` numbers. parts, rows: of this worker's shards. shards: all that have rows.

        Returns the norm of the gradient of the policy's loss before clipping, the mean loss of the critic (1,), the number of
        decisions with a choice, and the further sums over all shards.
        """
        parameters = list(self.policy.network.parameters())
        vectors, length = dict[int, Tensor](), sum(parameter.numel() for parameter in parameters)
        for shard, index in rows.items():
            begin, part = time.perf_counter(), _rows(parts[shard], index.to(self.policy.device))
            policy, critic, further = losses(part)
            vector = [
                parameter.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
                for loss in (policy, critic)
                for parameter, gradient in zip(
                    parameters,
                    torch.autograd.grad(loss, parameters, retain_graph=loss is policy, allow_unused=True),
                    strict=True,
                )
            ]
            counts = torch.stack([critic.detach(), (~part.rollout.idle).sum(), part.weight.sum()])
            vector += [counts, *(each.detach() for each in further)]
            # Gloo reads the memory of the CPU. A worker that is alone sums there too.
            vectors[shard] = torch.cat([*vector, counts.new_zeros(1)]).to(self.exchange.device)
            if self.exchange.device.type == "cuda":
                torch.cuda.synchronize(self.exchange.device)  # for the seconds
            vectors[shard][-1] = time.perf_counter() - begin
        total = self.exchange.sum(vectors, shards, 2 * length + 3 + sums + 1)
        error, decisions, choices = total[2 * length : 2 * length + 3]
        choices = choices.clamp(min=1)  # without any choice the loss of the policy is 0
        gradients = total[: 2 * length].view(2, length)
        gradients = gradients * torch.stack([1 / choices, self.config.value_weight / decisions]).unsqueeze(1)
        norms = gradients.norm(dim=1)
        if not bool(torch.isfinite(norms).all()):
            raise LearningError(f"the loss of the policy or its gradient is not finite in epoch {epoch}; lower ppo.lr")
        clipped = self._clipped(gradients, norms)
        for parameter, gradient in zip(
            parameters, clipped.to(self.policy.device).split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        self.computing += float(total[-1])
        return norms[0], (error / decisions).unsqueeze(0), choices, total[2 * length + 3 : -1]

    def _judge(self, part: TrainingBatch, shares: Mapping[Head, float] | None = None) -> tuple[Judged, Tensor]:
        """Return what the network thinks of decisions. shares: of exploration; None takes those with which they were drawn."""
        network, rollout = self.policy.network, part.rollout
        encoded, value, _ = network(part.batch, network.initial(rollout.value.shape[1]), rollout.starts)
        drawn = {head: rollout.exploration[..., head, None] for head in Head}
        return judge(network, encoded, rollout.actions, rollout.valid, shares or drawn), value

    def _fit(self, part: TrainingBatch, value: Tensor) -> Tensor:
        """Return the loss of the critic over the entries at which a row was not idle."""
        decided = part.rollout.decided
        return value_loss(decided(value), decided(part.gains.target), self.policy.network.value_scale)

    def _minibatches(
        self, played: Sequence[ShardedRollout], epoch: int
    ) -> Iterator[tuple[int, list[int], dict[int, Tensor]]]:
        """Yield random minibatches of whole sequences of one rollout: its place, the shards that have some, and the indices of
        those of this worker.

        Each shard draws an order of its own sequences and deals them out, and begins where the shard before it has ended. All
        minibatches of a rollout are therefore of the same size, up to one sequence.
        """
        steps: list[tuple[int, int, int]] = []
        orders: list[dict[int, Tensor]] = []
        for place, each in enumerate(played):
            count = min(self.config.minibatches, sum(each.envs.values()))
            steps += [(place, number, count) for number in range(count)]
            keys = (self.seed, self.updates, epoch, place)
            orders.append({shard: _permutation(each.envs[shard], *keys, shard) for shard in each.rollouts})
        if len(played) > 1:  # shuffled, so that the last rollout has no larger influence
            steps = [steps[i] for i in _permutation(len(steps), self.seed, self.updates, epoch, len(played)).tolist()]
        for place, number, count in steps:
            shards, index, before = list[int](), dict[int, Tensor](), 0
            for shard, envs in played[place].envs.items():
                first = (number - before) % count
                before += envs
                if first < envs:
                    shards.append(shard)
                    if shard in orders[place]:
                        index[shard] = orders[place][shard][first::count]
            yield place, shards, index

    def _clipped(self, gradients: Tensor, norms: Tensor) -> Tensor:
        """Return the sum (n,) of the gradients (2, n) of policy and critic, each scaled down where its own norm is too large.

        With a common norm, a critic that meets its first reward, with an error far above any before, would take the whole step in
        which the policy should learn from it.
        """
        return (gradients * (self.config.max_grad_norm / (norms + 1e-6)).clamp(max=1).unsqueeze(1)).sum(0)

    @torch.no_grad()
    def _rescale(self, statistics: Statistics) -> None:
        """Let the moments of the critic's targets follow those of the round: at once where their spread rises, else slowly.

        A scale that lags behind the first rewards would make the loss of the critic a thousand times too large.
        """
        if not statistics.number["advantage"]:
            raise LearningError("only WAIT was valid at every step of the round; give the task slots")
        if self.begun < 0 and statistics.spread["earned"] >= self.config.advantage_floor:
            self.begun = self.round
        network, reach = self.policy.network, statistics.reach
        if not reach**2 <= torch.finfo(torch.float32).max:
            raise LearningError(
                f"the returns of the round reach {reach:.3g}, whose square is not finite; check the reward"
            )
        before, scale = network.value_mean.cpu(), network.value_scale.cpu()
        mean = torch.tensor(statistics.mean["target"])
        spread = torch.tensor(statistics.spread["target"]).clamp(min=1e-3)
        rate = 1.0 if self.updates == 0 or bool(spread > scale) else 0.1
        network.rescale(torch.lerp(before, mean, rate), torch.lerp(scale, spread, rate))

    def _update_moments(self, statistics: Statistics) -> None:
        """Add the round to the moments of observations, which are then constant until the next update."""
        self.policy.normaliser = self.policy.normaliser.merged(statistics.seen)
        self.updates += 1


def _permutation(count: int, *parts: int) -> Tensor:
    """Draw a random order of `count` sequences, keyed by the seed, the update, the epoch and what is ordered."""
    keys = key(parts[0], Purpose.MINIBATCH, *parts[1:])
    return permutations(keys, np.array([count]), torch.device("cpu"))[0]


def _rows(full: TrainingBatch, index: Tensor) -> TrainingBatch:
    """Return the rows of `index`, up to the last entry at which one of them decides."""
    stop = int((~full.rollout.idle[:, index]).sum(0).max())
    # The menu alone has one axis, and is that of all rows.
    return pytree.tree_map(lambda values: values if values.dim() == 1 else values[:stop, index], full)


ROUNDS = 10
"""Rounds in a row in which some conditions must hold."""
CLIPPED, VALUE_LOSS = 0.5, 10.0
"""Share of clipped decisions, and loss of the critic in units of the variance of returns, that are out of range."""
MENDS: Mapping[str, str] = {
    "entropy_collapsed": "raise ppo.entropy_weight or ppo.exploration, or imitate a rule first (ppo.imitation_rounds)",
    "value_loss_exploded": "the rewards changed or have outliers; check the reward, or lower ppo.lr",
    "ratios_out_of_range": "lower ppo.lr or ppo.update_epochs",
    "kl_stopped": "lower ppo.lr, or raise ppo.minibatches",
    "critic_blind": "raise ppo.value_weight, or set it to 0 where groups give the baseline",
    "nothing_kept": "raise steps, so that a seed can pass its gates, or loosen them (`esper docs lifecycle`)",
    "return_unchanged": "nothing that the policy does is rewarded; check the reward and the gates, or raise ppo.exploration",
}
"""What can be wrong, by name, and what mends it."""


def learning_anomalies(
    rounds: Sequence[Mapping[str, float]], first_entropy: float, config: PPOConfig
) -> dict[str, str]:
    """Return what is wrong after the last of some rounds of learning: a sentence by its name in `MENDS`.

    rounds: figures of the last rounds (`esper docs training`), the newest at the end. first_entropy: of the first round [nats].
    """
    newest, found = rounds[-1], {}
    entropy, loss, clipped = newest["entropy"], newest["value_loss"], newest["clip_fraction"]
    if newest["rewarded"] == 0 and entropy < 0.5 * first_entropy:
        found["entropy_collapsed"] = (
            f"the entropy fell from {first_entropy:.2f} to {entropy:.2f} nats before any round had returns that differ by "
            f"ppo.advantage_floor, {config.advantage_floor:g}: the policy has stopped exploring without a reward"
        )
    if config.value_weight and loss > VALUE_LOSS:
        found["value_loss_exploded"] = (
            f"the loss of the critic is {loss:.3g} times the variance of returns, above {VALUE_LOSS:g}: returns are far from "
            "all that it expected"
        )
    if clipped > CLIPPED:
        found["ratios_out_of_range"] = (
            f"the probability of {clipped:.0%} of the decisions was changed beyond ppo.clip_range, {config.clip_range:g}"
        )
    last = rounds[-ROUNDS:]
    returns = [each["return"] for each in last]
    # A training may be shorter than that; of a single round nothing can be said.
    enough = len(last) >= max(min(ROUNDS, config.rounds), 2)
    if enough and all(map(math.isfinite, returns)) and max(returns) - min(returns) <= 1e-6:
        episodes = int(sum(each["episodes"] for each in last))
        found["return_unchanged"] = (
            f"the mean return was {returns[-1]:.4g} in each of {len(last)} rounds, {episodes:,} episodes"
        )
    if len(last) < ROUNDS:
        return found
    if config.update_epochs > 1 and all(each["epochs"] == 1 for each in last):
        found["kl_stopped"] = (
            f"each of the last {ROUNDS} updates ended after its first pass, which moved the policy by more than "
            f"ppo.target_kl, {config.target_kl:g}"
        )
    if config.value_weight and all(each["explained_variance"] <= 0 for each in last):
        found["critic_blind"] = f"the critic has explained none of the variance of returns in {ROUNDS} rounds"
    if all(each["kept"] == 0 for each in last):
        found["nothing_kept"] = f"no seed was kept in {ROUNDS} rounds, so that no network grew"
    return found
