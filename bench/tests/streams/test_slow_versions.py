"""Compare every method with a slow, obvious version: one stream, one module of torch, and torch's own optimizer."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from esper.leyline.data import keys
from esper.leyline.data.keys import Purpose
from esper_bench.streams.additions import Consolidation, Replacement, Replay
from esper_bench.streams.controllers import OnAlarm, StoreAndReactivate
from esper_bench.streams.data import Change, draw_streams
from esper_bench.streams.ensemble import EnsembleLearner
from esper_bench.streams.learner import NetworkLearner
from esper_bench.streams.network import DECAYS, TrunkAndHead, Weights
from esper_bench.streams.play import Player

LR, DECAY, HEAD_RATE = 0.02, 0.05, 2.0
STREAMS = draw_streams([3, 4], [Change.SHARED, Change.NOVEL], updates=90, batch_size=16)


def module(norm=True):
    return TrunkAndHead(64, 8, 6, 2, 10, norm=norm)


def optimizer_of(net, decay=DECAY):
    parts = [{"params": net.trunk.parameters(), "lr": LR}, {"params": net.head.parameters(), "lr": LR * HEAD_RATE}]
    return torch.optim.AdamW(parts, betas=DECAYS, weight_decay=decay)


class Slow:
    """Plays one network on one stream; a subclass says what happens at an alarm and in a step."""

    decay = DECAY

    def __init__(self, n, first):
        self.n, self.net = n, first
        self.optimizer = optimizer_of(first, self.decay)
        self.losses, self.mean, self.variance, self.since = [], None, 0.0, 0
        for update in range(STREAMS.updates):
            x, y = (each[n] for each in STREAMS.batch(update))
            loss = F.cross_entropy(self.net(x), y)
            self.losses.append(loss.item())
            if self.rings(loss.item()):
                self.at_alarm(update, x, y)
            self.step(update, x, y)

    def rings(self, loss):
        above = 0 if self.mean is None else loss - self.mean
        rings = self.since >= 4 and above > max(0.6, 3 * math.sqrt(self.variance))
        self.variance = 0.0 if self.mean is None else 0.7 * (self.variance + 0.3 * above**2)
        self.mean = loss if self.mean is None else 0.7 * self.mean + 0.3 * loss
        self.since += 1
        if rings:
            self.mean, self.variance, self.since = None, 0.0, 0
        return rings

    def at_alarm(self, update, x, y):
        pass

    def step(self, update, x, y):
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(x), y).backward()
        self.before_step(update, x, y)
        self.optimizer.step()
        self.after_step(update, x, y)

    def before_step(self, update, x, y):
        pass

    def after_step(self, update, x, y):
        pass

    def forget(self):
        self.optimizer = optimizer_of(self.net, self.decay)

    def head_to_zero(self):
        with torch.no_grad():
            self.net.head.weight.zero_()
            self.net.head.bias.zero_()


def first_of(learner, row):
    return learner.rows.stack.read(row, module()).requires_grad_()


def drawn(learner, n, update):
    """Draw the fresh network that a stream draws at an update."""
    fresh, rows = module(), learner.rows
    vector = rows._drawn(np.array([n]), Weights.REDRAWN, update)[0]
    for place, parameter in zip(rows.stack.places, fresh.parameters(), strict=True):
        parameter.data.copy_(place.of(vector))
    return fresh


def assert_same_losses(learner, slow, alarms=True):
    """Play both to the end and compare the loss of every batch."""
    firsts = [first_of(learner, n) for n in range(2)]
    player = Player(STREAMS, learner)
    player.play()
    assert not alarms or player.alarms.any(0).all()
    for n, first in enumerate(firsts):
        np.testing.assert_allclose(player.loss[:, n], slow(learner, n, first).losses, rtol=0.02, atol=2e-3)


def static(rule=None, **options):
    return NetworkLearner(STREAMS, module(), rule or OnAlarm(), lr=LR, decay=DECAY, head_rate=HEAD_RATE, **options)


def test_adamw():
    assert_same_losses(static(), lambda learner, n, first: Slow(n, first))


def test_l2_init():
    class L2Init(Slow):
        decay = 0.0

        def __init__(self, n, first):
            self.first = [p.detach().clone() for p in first.parameters()]
            super().__init__(n, first)

        @torch.no_grad()
        def after_step(self, update, x, y):
            for part in self.optimizer.param_groups:
                for parameter in part["params"]:
                    first = next(f for f, p in zip(self.first, self.net.parameters(), strict=True) if p is parameter)
                    parameter += part["lr"] * DECAY * (first - parameter)

    assert_same_losses(static(to_first=True), lambda learner, n, first: L2Init(n, first))


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_shrink_and_perturb_and_a_whole_reset(keep):
    def slow(learner, n, first):
        class Shrinks(Slow):
            @torch.no_grad()
            def at_alarm(self, update, x, y):
                for own, fresh in zip(self.net.parameters(), drawn(learner, n, update).parameters(), strict=True):
                    own.copy_(keep * own + (1 - keep) * fresh)
                self.forget()

        return Shrinks(n, first)

    assert_same_losses(static(OnAlarm(keep=keep)), slow)


def test_a_reset_of_the_blocks():
    def slow(learner, n, first):
        class Resets(Slow):
            def at_alarm(self, update, x, y):
                self.net.trunk[1:].load_state_dict(drawn(learner, n, update).trunk[1:].state_dict())
                self.head_to_zero()
                self.forget()

        return Resets(n, first)

    assert_same_losses(static(OnAlarm(reset=True, new_head=True)), slow)


def test_reactivation():
    def slow(learner, n, first):
        class Reactivates(Slow):
            bank, age = [], 0

            def at_alarm(self, update, x, y):
                own = [p.detach().clone() for p in self.net.head.parameters()]
                loss = F.cross_entropy(self.net(x), y).item()
                features = self.net.trunk(x)
                each = [float(F.cross_entropy(F.linear(features, *head), y)) for head in self.bank]
                fits = [e for e in each if e < 1.6 and e < loss - 0.1]
                head = self.bank.pop(each.index(min(each))) if fits else [torch.zeros_like(p) for p in own]
                self.bank = [*self.bank, own]
                for parameter, value in zip(self.net.head.parameters(), head, strict=True):
                    parameter.data.copy_(value)
                self.forget()

            def before_step(self, update, x, y):
                if update == 20:
                    self.rate = 0.25
                self.optimizer.param_groups[0]["lr"] = LR * (0.25 if update >= 20 else 1)

        return Reactivates(n, first)

    assert_same_losses(static(StoreAndReactivate(trunk_rate=0.25, settle=20), bank=4), slow)


def test_replay():
    def slow(learner, n, first):
        class Replays(Slow):
            store, seen = [], 0

            def uniform(self, update, count):
                return keys.uniform(
                    keys.key(Purpose.STREAM, int(STREAMS.keys[n]), Weights.REPLAY, update, np.arange(count))
                )

            def step(self, update, x, y):
                places = [int(u * len(self.store)) for u in self.uniform(update, 5)] if self.store else []
                xs = torch.stack([*x, *(self.store[place][0] for place in places)])
                ys = torch.stack([*y, *(self.store[place][1] for place in places)])
                self.optimizer.zero_grad()
                F.cross_entropy(self.net(xs), ys).backward()
                self.optimizer.step()
                chance = self.uniform(update + 1, 5 + 8)[5:]
                for index in range(8):
                    byte = ((x[index] + 1.5) / 4.5 * 255).round().clamp(0, 255)
                    example = (byte / 255 * 4.5 - 1.5, y[index])
                    if len(self.store) < 20:
                        self.store = [*self.store, example]
                    elif (place := int(chance[index] * (self.seen + 1))) < 20:
                        self.store[place] = example
                    self.seen += 1

        return Replays(n, first)

    assert_same_losses(static(addition=lambda learner: Replay(learner, capacity=20, drawn=5)), slow)


def test_elastic_weight_consolidation():
    def slow(learner, n, first):
        class Consolidates(Slow):
            importance, anchor, squares = None, None, []

            def at_alarm(self, update, x, y):
                mean = [sum(each) / len(self.squares) for each in zip(*self.squares, strict=True)]
                old = self.importance or [torch.zeros_like(m) for m in mean]
                self.importance = [0.9 * before + new for before, new in zip(old, mean, strict=True)]
                self.anchor = [p.detach().clone() for p in self.net.parameters()]
                self.squares = []

            def step(self, update, x, y):
                own = list(self.net.parameters())
                loss = F.cross_entropy(self.net(x), y)
                self.squares = [*self.squares, [16 * g.square() for g in torch.autograd.grad(loss, own)]]
                loss = F.cross_entropy(self.net(x), y)
                if self.anchor is not None:
                    each = zip(self.importance, own, self.anchor, strict=True)
                    loss = loss + 3.0 / 2 * sum((f * (p - a).square()).sum() for f, p, a in each)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()

        return Consolidates(n, first)

    assert_same_losses(static(addition=lambda learner: Consolidation(learner, strength=3.0)), slow)


def test_continual_backpropagation():
    def slow(learner, n, first):
        class Replaces(Slow):
            def __init__(self, n, first):
                self.utility, self.age, self.credit = [[0.0] * 6, [0.0] * 6], [[0] * 6, [0] * 6], 0.0
                super().__init__(n, first)

            @torch.no_grad()
            def after_step(self, update, x, y):
                h, units = self.net.trunk[0](x), []
                for block in (self.net.trunk[1], self.net.trunk[2]):
                    units.append(block[1](block[0](h)).relu())
                    h = block(h)
                for b, block in enumerate((self.net.trunk[1], self.net.trunk[2])):
                    for k in range(6):
                        effect = units[b][:, k].abs().mean() * block[3].weight[:, k].abs().sum()
                        self.utility[b][k] = 0.95 * self.utility[b][k] + 0.05 * float(effect)
                        self.age[b][k] += 1
                self.credit += 0.02 * 6
                while self.credit >= 1:
                    self.credit -= 1
                    for b, block in enumerate((self.net.trunk[1], self.net.trunk[2])):
                        mature = [k for k in range(6) if self.age[b][k] > 30]
                        if mature:
                            self.replace(block, b, min(mature, key=lambda k: self.utility[b][k]), units[b], update)

            def replace(self, block, b, k, units, update):
                block[3].bias += units[:, k].mean() * block[3].weight[:, k]
                block[3].weight[:, k] = 0
                fresh = learner.addition._drawn(FakeUpdate(learner, update + 1), b, np.array([n]), np.array([k]), 8)
                block[1].weight[k], block[1].bias[k] = fresh[0], 0
                for tensor, place in ((block[3].weight, (slice(None), k)), (block[1].weight, k), (block[1].bias, k)):
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.optimizer.state[tensor][name][place] = 0
                self.utility[b][k], self.age[b][k] = 0.0, 0

        return Replaces(n, first)

    assert_same_losses(static(addition=lambda learner: Replacement(learner, rate=0.02)), slow)


class FakeUpdate:
    """Holds the rows of a learner that has played to its end, at an earlier update."""

    def __init__(self, learner, update):
        self.rows, self.update = learner.rows, update


def test_an_ensemble():
    learner = EnsembleLearner(STREAMS, module(), members=3, lr=LR, memory=0.5, decay=DECAY, head_rate=HEAD_RATE)
    nets = [[first_of(learner, 3 * n + m) for m in range(3)] for n in range(2)]
    player = Player(STREAMS, learner)
    player.play()
    for n, members in enumerate(nets):
        recent, losses = [math.log(10)] * 3, []
        optimizers = [optimizer_of(net) for net in members]
        for update in range(STREAMS.updates):
            x, y = (each[n] for each in STREAMS.batch(update))
            each = [F.cross_entropy(net(x), y) for net in members]
            losses.append(float(each[recent.index(min(recent))]))
            recent = [0.5 * e + 0.5 * float(loss) for e, loss in zip(recent, each, strict=True)]
            best = recent.index(min(recent))
            optimizers[best].zero_grad()
            each[best].backward()
            optimizers[best].step()
        np.testing.assert_allclose(player.loss[:, n], losses, rtol=0.02, atol=2e-3)
