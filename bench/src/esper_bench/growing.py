"""Play the game `grow-unknown`: healthy networks train from scratch and are stopped at a compute that nobody knows before.

    J = sum over computes c of P(stop at c) * (metric(c) - rent * ln(1 + added(c) / host))

A controller decides where a network is widened or deepened, by how much, and when. E environments.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import RewardConfig
from esper.leyline.data.keys import Purpose, uniform
from esper.leyline.data.keys import key as keyed
from esper.leyline.data.objective import objective
from esper.leyline.data.task import Instance, Lengths, Mixture, Split
from esper.leyline.lifecycle.view import Floats, Outcome, View
from esper.leyline.lifecycle.vocabulary import ADDED, Stage, among
from esper.leyline.messages import InputError
from esper.simic.rewards import Components
from esper.tasks.hosts import MLP
from esper.tasks.objectives import Classification
from esper.tolaria.engine import Observer, Step, VectorizedEngine
from esper_bench.healing.data import CLASSES, INPUTS, SIZES, Problem, Subset, examples, one_of, problem
from esper_bench.healing.unknown import KEYS as KEYS_BEFORE

BLOCKS = 5
WIDTHS = (16, 20, 24)  # of the stream
HIDDEN = (4, 8)  # inner width of a block that is not narrow
NARROW = (1, 2)  # inner width of a narrow block
NARROW_BLOCKS = (0, 0, 1, 1, 2)
"""Numbers of narrow blocks, each entry as probable as the others."""
EXAMPLES = (100, 300, 900)
"""Numbers of training examples, each as probable as the others."""
STEPS, FIRST_STOP = 24, 3.0
"""The last and the first compute of a stop, in training steps of the host. A longer episode would show no further stop."""

_FIRST = KEYS_BEFORE["heldout"].stop
KEYS: Mapping[str, range] = MappingProxyType(
    {
        "training": range(_FIRST, _FIRST + 2**17),
        "validation": range(_FIRST + 2**17, _FIRST + 2**17 + 2**16),
        "heldout": range(_FIRST + 2**17 + 2**16, _FIRST + 2**18),
    }
)
"""Keys behind those of every other task. Every key has a host and a problem of its own."""


class _Draw(IntEnum):
    """Names the draws of a key, beside those of its problem. The values are part of keys."""

    WIDTH = 200
    HIDDEN = 201
    NARROW_BLOCKS = 202
    PLACE = 203
    NARROW = 204
    EXAMPLES = 205


class GrowingCase(NamedTuple):
    """Says what a key stands for.

    Attributes:
        problem (Problem): the problem, of any family of `healing.data`
        host (MLP): factory of the hosts, without skip connections
        narrow (ints): the blocks that are narrow
        examples (int): number of training examples
    """

    problem: Problem
    host: MLP
    narrow: tuple[int, ...]
    examples: int


def describe(key: int) -> GrowingCase:
    """Return what a key stands for. InputError for a key outside KEYS."""
    if not any(key in keys for keys in KEYS.values()):
        known = ", ".join(f"{name} {part.start:,} to {part.stop - 1:,}" for name, part in KEYS.items())
        raise InputError(f"key {key:,} is not an instance of 'grow-unknown'; the keys are {known}")

    def drawn(draw: _Draw, *index: NDArray[np.int64]) -> Floats:
        return uniform(keyed(Purpose.HEALING, key, draw, *index))

    def once(draw: _Draw) -> float:
        return float(drawn(draw)[0])

    of, count = problem(key), one_of(NARROW_BLOCKS, once(_Draw.NARROW_BLOCKS))
    narrow = sorted(drawn(_Draw.PLACE, np.arange(BLOCKS)).argsort()[:count].tolist())
    usual, few = one_of(HIDDEN, once(_Draw.HIDDEN)), one_of(NARROW, once(_Draw.NARROW))
    hidden = tuple(few if block in narrow else usual for block in range(BLOCKS))
    host = MLP(of.inputs, one_of(WIDTHS, once(_Draw.WIDTH)), hidden, of.classes)
    return GrowingCase(of, host, tuple(narrow), one_of(EXAMPLES, once(_Draw.EXAMPLES)))


def sample(key: int) -> Instance:
    """Return the instance of a key, without its test split."""
    facts = describe(key)
    probe, validation = (examples(facts.problem, part) for part in (Subset.PROBE, Subset.VALIDATION))
    train = examples(facts.problem, Subset.HOST, facts.examples)
    return Instance(facts.host, train, probe, validation, facts.problem.classes)


def grow_unknown() -> Mixture:
    """Sample networks with blocks of unequal width that train from scratch, to be stopped at an unknown compute."""
    room = MLP(INPUTS, max(WIDTHS), (max(HIDDEN),) * BLOCKS, CLASSES).room()
    return Mixture(
        name="grow-unknown",
        summary="networks with narrow blocks that train from scratch to an unknown stop: where, how much and when to grow",
        room=room._replace(lengths=Lengths(SIZES[Subset.PROBE], max(SIZES[Subset.VALIDATION], SIZES[Subset.TEST]))),
        sample=sample,
        test=lambda key: examples(describe(key).problem, Subset.TEST),
        ranges=KEYS,
        objective=Classification(CLASSES),
        menu=("bypass-mlp-2", "bypass-mlp-8", "mlp-small"),
        defaults={
            "steps": STEPS,
            "data": {"batch_size": 32, "batches_per_step": 8},
            "optimizer": {"lr": 1e-2},
            "governor": {"param_limit": 2.0},
            "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0},
            "lifecycle": {
                "direct": True,
                "auto_advance": True,
                "max_seeds": BLOCKS,
                "max_training_seeds": BLOCKS,
                "min_prune_age": STEPS,
                "tempos": (0, 1),
                "targets": (1.0,),
            },
            "reward": {"rent": 0.2},
        },
    )


def stop_share(begin: Floats, end: Floats) -> Floats:
    """Return the probability that a network is stopped from one compute on and before another, both (E,) [steps of the host].

        P(begin <= c < end) = ln(end / begin) / ln(STEPS / FIRST_STOP),   with both clipped to [FIRST_STOP, STEPS]

    The compute of a stop is log-uniform: a stop within any doubling is as probable as within any other.
    """
    begin, end = (np.clip(compute, FIRST_STOP, STEPS) for compute in (begin, end))
    return np.asarray(np.log(end / begin) / np.log(STEPS / FIRST_STOP))


def at_stop(outcome: Outcome, metric: Floats, config: RewardConfig) -> Components:
    """Return what a step adds to J, by component (E,): the network before it, if the stop comes within the step.

    One training step of a host takes 1 of compute, and a / h more with seeds of a parameters beside a host of h. metric: (E,) of
    the networks before the step. InputError if the episode has another length than the game.
    """
    if outcome.terminal != (outcome.step + 1 == STEPS):
        raise InputError(f"the game grow-unknown has {STEPS} steps, and its stops are among them; leave steps as it is")
    assert outcome.compute is not None, "the engine counts compute"
    begin, end = (
        outcome.step + done + STEPS * share
        for done, share in enumerate((outcome.compute.before, outcome.compute.after))
    )
    weight = stop_share(begin, end)
    rent = objective(0.0, outcome.before.added_params, outcome.host_params, config.rent, config.rent_size)
    return {"metric": weight * metric, "rent": weight * rent}


class AtStops:
    """Rewards so that the sum over an episode is J on the probe split: `--reward esper_bench.growing:AtStops`."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def __call__(self, outcome: Outcome) -> Components:
        """Return the components of the step, each (E,)."""
        return at_stop(outcome, outcome.before.metric, self.config)


class StopScores(Observer):
    """Sums J over an episode, on the probe split and on other splits of the instances.

    Seeds that act count as kept, because a network is stopped as it is.

    Attributes:
        probe ((E,) array): J on the probe split
        given ((E,) array): J on the splits that were given
    """

    def __init__(self, engine: VectorizedEngine, splits: Sequence[Split]) -> None:
        self.engine, self.splits, self.config = engine, splits, engine.config.reward
        self.probe = self.given = np.zeros(engine.config.envs)
        self._metric = self.given

    def going(self, view: View) -> bool:
        """Measure the networks before the step."""
        seeds = self.engine.state.seeds
        kept = np.where(among(seeds.stage, ADDED), np.int8(Stage.FOSSILIZED), seeds.stage)
        metric, _ = self.engine.population.evaluate(seeds._replace(stage=kept), self.splits)
        self._metric = metric[: len(self.given)]
        return True

    def stepped(self, step: Step) -> None:
        """Add what the step contributes to J."""
        probe, given = (
            at_stop(step.outcome, metric, self.config) for metric in (step.outcome.before.metric, self._metric)
        )
        self.probe, self.given = self.probe + sum(probe.values()), self.given + sum(given.values())
