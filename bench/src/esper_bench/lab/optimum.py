"""Find the optimum of a sandbox, by dynamic programming over the states of its seeds. E environments, S slots, K blueprints."""

from typing import Any, NamedTuple

import numpy as np

from esper.kasmina.lifecycle import apply, dormant, legal, tick
from esper.leyline.config.tree import Config
from esper.leyline.data.keys import key
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.masks import allowed_of, every_decision
from esper.leyline.lifecycle.view import Floats, Scores, Seeds, Space, View, take
from esper.leyline.lifecycle.vocabulary import Actions, Head, Ints, Stage
from esper.simic.rewards import total, worth
from esper.tamiyo.rules.base import Rule
from esper.tolaria.measure.measuring import measure, unmeasured
from esper_bench.lab.formula import FormulaPopulation
from esper_bench.lab.sandbox import Sandbox


class OptimalDecisions(NamedTuple):
    """Holds the best decisions at one step, in each of n reachable states."""

    code: Ints  # (n,) ascending codes of the states
    best: Ints  # (n, kinds + 1) index into `Solution.decisions`; the last column is the blind choice


class Solution(NamedTuple):
    """Holds the best decisions and the best returns under the reward `delta`."""

    decisions: Ints  # (D, 6) all decisions whose blend is ADD
    plans: tuple[OptimalDecisions, ...]  # one per step
    never: Floats  # (kinds,) best return of WAIT alone
    optimum: Floats  # (kinds,)
    blind: float  # best mean return, over kinds, of a policy that does not know the kind

    def score(self, returns: Floats, kind: Ints) -> float:
        """Return a score: 0 for the returns of `never` in these environments, 1 for the optimum. returns, kind: (E,)."""
        floor = self.never[kind]
        return float((returns - floor).sum() / (self.optimum[kind] - floor).sum())


class Optimal(Rule):
    """Plays a solution; with `blind`, the one sequence of decisions that is best on average over kinds."""

    def __init__(self, sandbox: Sandbox, solution: Solution, *, blind: bool = False) -> None:
        self.solution = solution
        self.blind = blind
        self._sandbox = sandbox

    def act(self, view: View) -> Actions:
        """Return the best decision of each environment. Reads the instance, which a learner must not."""
        plan = self.solution.plans[view.step]
        code = encode(canonical(view.seeds, self._sandbox.config))
        place = np.searchsorted(plan.code, code).clip(max=len(plan.code) - 1)
        assert (plan.code[place] == code).all(), "the state must be one that the solution knows"
        kinds = self._sandbox.process.kinds
        kind = np.full(len(code), kinds) if self.blind else view.space.instance % kinds
        return _pick(self.solution.decisions, plan.best[place, kind])


class _Edges(NamedTuple):
    """Lists the m possible decisions at one step, ordered by state; every field but `code` is (m,)."""

    code: Ints  # (n,) ascending codes of the states that can be reached
    state: Ints  # index of the state in which a decision is made
    decision: Ints  # index into `Solution.decisions`
    target: Ints  # index of the state that it leads to, among those of the next step


def solve(sandbox: Sandbox) -> Solution:
    """Compute the optimum by dynamic programming over the states x of one environment.

        V_T(x, kind) = J_T(x, kind) - J_0(kind),     V_t(x, kind) = max over valid a of V_{t+1}(f(x, a), kind)

    The rewards `delta` add up to J_T - J_0, so only the last state counts. J must not depend on the draws of an
    episode, which excludes the bandit. With permissive gates neither f nor the valid decisions depend on the kind, so
    one expansion serves all kinds. The best blind policy, which does not know the kind, is a fixed sequence of
    decisions; its value follows from the same recursion with the mean of V_T over kinds.
    """
    process, config = sandbox.process, sandbox.config
    assert config.gates.permissive or config.gates.min_training_steps > config.steps, (
        "gates must not depend on the kind"
    )
    assert (config.reward.name, config.reward.relative_to, dict(config.reward.fees)) == ("delta", "none", {})
    steps, final = _expand(sandbox)
    kinds = range(process.kinds)
    value = np.stack([_rise(sandbox, kind, final) for kind in kinds], 1)
    value = np.concatenate([value, value.mean(1, keepdims=True)], 1)
    plans = []
    for code, state, decision, target in reversed(steps):
        offers = value[target]
        value = np.maximum.reduceat(offers, np.searchsorted(state, np.arange(len(code))))
        best = np.zeros(value.shape, np.int64)
        for column in range(value.shape[1]):
            winners = np.flatnonzero(offers[:, column] == value[state, column])[::-1]  # the first of equal values
            best[state[winners], column] = decision[winners]
        plans.append(OptimalDecisions(code, best))
    waiting = np.concatenate([_rise(sandbox, kind, dormant(1, len(process.slots))) for kind in kinds])
    plans.reverse()
    return Solution(decisions_of(sandbox.space), tuple(plans), waiting, value[0, :-1], float(value[0, -1]))


def _expand(sandbox: Sandbox) -> tuple[list[_Edges], Seeds]:
    """Return all reachable states, step by step, and the states at the end. Each step uses one population with a row
    per state.
    """
    space, config = sandbox.space, sandbox.config
    decisions = decisions_of(space)
    states, code, _ = _merged(dormant(1, len(space.slots)), config)
    steps = []
    for step in range(config.steps):
        population = _of_one_kind(sandbox, 0, len(code), step)
        nothing = unmeasured(len(code), len(space.slots), len(space.sensors))
        measured = measure(population, states, nothing, step).measurements
        masks = legal(states, judge(states, measured, config.gates), space, config.lifecycle)
        rows: Any
        rows, chosen = np.nonzero(allowed_of(masks, decisions))
        applied, _, _ = apply(take(states, rows), _pick(decisions, chosen), take(masks, rows), space, config.lifecycle)
        gates = judge(applied, take(measured, rows), config.gates)
        states, following, target = _merged(tick(applied, gates, config.lifecycle), config)
        steps.append(_Edges(code, rows, chosen, target))
        code = following
    return steps, states


def decisions_of(space: Space) -> Ints:
    """Return (D, 6) all decisions whose blend is ADD; no formula reads the blend."""
    return every_decision(space, [head for head in Head if head != Head.BLEND])


def canonical(seeds: Seeds, config: Config) -> Seeds:
    """Return one representative of all states with the same future: values that are not read again become 0 or a limit.

    An age is capped at the steps that its gate requires, and a finished ramp and the blueprint of a doomed seed are set
    to 0.
    """
    stage = seeds.stage
    limit = np.zeros(len(Stage), np.int32)
    limit[Stage.TRAINING], limit[Stage.HOLDING] = config.gates.min_training_steps, config.gates.min_holding_steps
    limit[[Stage.BLENDING, Stage.EMBARGOED]] = config.steps
    settled = (stage == Stage.HOLDING) | (stage == Stage.FOSSILIZED)
    doomed_life = np.minimum(seeds.life, config.lifecycle.min_prune_age)
    return seeds._replace(
        age=np.minimum(seeds.age, limit[stage]),
        life=np.where(seeds.doomed, doomed_life, seeds.life),
        blueprint=np.where(seeds.doomed, np.int16(0), seeds.blueprint),
        ramp=np.where(settled[..., None], np.float32(0), seeds.ramp),
    )


def encode(seeds: Seeds) -> Ints:
    """Return (E,) the hash of the state of each environment."""
    floats = np.concatenate([seeds.alpha[..., None], seeds.ramp], 2).view(np.int32)
    whole = np.stack([seeds.stage, seeds.age, seeds.life, seeds.blueprint, seeds.blend, seeds.doomed], 2)
    parts = np.concatenate([whole, floats], 2).reshape(len(seeds.stage), -1)
    return key(*parts.T)


def _merged(seeds: Seeds, config: Config) -> tuple[Seeds, Ints, Ints]:
    """Return the n distinct states (n, S), their codes in ascending order, and the index of each given state among them."""
    seeds = canonical(seeds, config)
    first: Any
    which: Any
    code, first, which = np.unique(encode(seeds), return_index=True, return_inverse=True)
    distinct: Seeds = take(seeds, first)
    fields: Any = zip(take(distinct, which), seeds, strict=True)
    assert all(np.array_equal(again, given) for again, given in fields), "two states must not have the same code"
    return distinct, code, which


def _rise(sandbox: Sandbox, kind: int, seeds: Seeds) -> Floats:
    """Return (E,) J_T - J_0 of networks of one kind that have these seeds at the end."""
    config, envs = sandbox.config, len(seeds.stage)
    worths = []
    for step, held in ((0, dormant(*seeds.stage.shape)), (config.steps, seeds)):
        population = _of_one_kind(sandbox, kind, envs, step)
        scores = Scores(*population.final(held), population.table.added_params(held, frozenset({Stage.FOSSILIZED})))
        worths.append(total(worth(scores, population.host_params, config.reward)))
    return worths[1] - worths[0]


def _of_one_kind(sandbox: Sandbox, kind: int, rows: int, step: int) -> FormulaPopulation:
    """Make a population of rows of one instance after `step` steps."""
    population = FormulaPopulation(sandbox.process, sandbox.config, np.full(rows, kind))
    population.step = step
    return population


def _pick(decisions: Ints, index: Ints) -> Actions:
    return Actions(*decisions[index].T)
