"""The sandbox: growth by formula, with the engine's surface and a known optimum. E environments, S slots, K blueprints.

    sandbox = Sandbox(GROWTH, {"envs": 48, "seed": 1})
    view = sandbox.reset()
    view, outcome = sandbox.step(actions)

Stages, masks, gates and rewards are the real ones; only what a network scores is a formula of its seeds. A learner that is
at home here needs no network to be trained, and `solve` says what it should have reached.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.gates import judge
from esper.kasmina.lifecycle import apply, dormant, legal, tick
from esper.leyline.actions import RELEVANT, Actions, Blend, Head, Ints, Op
from esper.leyline.config import Config, build_config
from esper.leyline.keys import Purpose, key, uniform
from esper.leyline.protocols import PolicyClient
from esper.leyline.stages import ADDED, LIVE, Stage, among
from esper.leyline.verdicts import Refusal, Vital
from esper.leyline.view import (
    BlueprintInfo,
    Bools,
    CoalitionValues,
    Estimate,
    Floats,
    Masks,
    Measurements,
    Outcome,
    Scores,
    Seeds,
    Space,
    View,
    read_only,
    take,
)
from esper.simic.rewards import delta, total, worth
from esper.tamiyo.baselines import Rule
from esper.tolaria.training import doses

HOST_PARAMS = 1000
WIDTH = 16
"""Features of the stream at every slot."""


class Draw(NamedTuple):
    """What is drawn for an episode of some environments."""

    kind: Ints  # (E,) which of the problems of the process, the instance modulo their number
    key: Ints  # (E,) of every other draw


@dataclass(frozen=True)
class Process:
    """A growth process: its slots, its menu, and the formulas for what is measured."""

    name: str
    kinds: int  # problems that differ in what is best
    slots: tuple[str, ...]
    menu: tuple[BlueprintInfo, ...]
    cost: tuple[int, ...]  # (K,) parameters of each blueprint, at every slot
    sensors: tuple[str, ...]
    settings: Mapping[str, Any]  # the first layer of the config
    metric: Callable[[Draw, int, Seeds, Floats], Floats]  # draw, steps taken, seeds, doses (E, S) -> (E,)
    sense: Callable[[Draw], tuple[Floats, Floats]]  # draw -> participation (E, S), sensors (E, S, F)


@dataclass
class State:
    """All state of a sandbox between two steps."""

    draw: Draw
    seeds: Seeds  # (E, S)
    measurements: Measurements
    coalitions: CoalitionValues | None
    scores: Scores  # (E,)
    masks: Masks
    episode: int
    step: int  # steps taken in the episode


class Sandbox:
    """A process played by E environments at once, with `reset` and `step` as of `VectorizedEngine`."""

    def __init__(self, process: Process, *layers: Mapping[str, Any]) -> None:
        """`layers` of config come over those of the process. Raises InputError where a key or a value is none."""
        self.process = process
        self.config = config = build_config(process.settings, *layers)
        shape = (config.envs, len(process.slots))
        self.space = Space(
            slots=process.slots,
            blueprints=process.menu,
            tempos=config.lifecycle.tempos,
            targets=config.lifecycle.targets,
            cost=np.broadcast_to(np.array(process.cost), (*shape, len(process.menu))).copy(),
            fits=np.ones((shape[1], len(process.menu)), bool),
            width=np.full(shape, WIDTH),
            sensors=process.sensors,
            max_seeds=config.lifecycle.max_seeds,
            seed=config.seed,
            instance=config.first_instance + np.arange(config.envs),
            floor=np.full(config.envs, np.nan),
            ceiling=np.full(config.envs, np.nan),
            objective=config.reward.objective,
            rent=config.reward.rent,
            rent_size=config.reward.rent_size,
        )
        self.state: State | None = None  # until `reset`

    def reset(self, instance: NDArray[np.int64] | None = None) -> View:
        """Begin an episode; `instance` (E,) names the instances from now on."""
        if instance is not None:
            assert instance.shape == (self.config.envs,), instance.shape
            self.space = self.space._replace(instance=np.asarray(instance, np.int64))
        episode = 0 if self.state is None else self.state.episode + 1
        named = self.space.instance
        draw = Draw(named % self.process.kinds, key(self.config.seed, Purpose.INSTANCE, named, episode))
        self.state = self._probed(draw, dormant(self.config.envs, len(self.space.slots)), episode, 0)
        return self._view(self.state)

    def step(self, actions: Actions) -> tuple[View, Outcome]:
        """apply -> tick -> measure, for one decision per environment (E,)."""
        config, state = self.config, self.state
        assert state is not None, "reset() begins an episode"
        assert state.step < config.steps, "the episode is over; reset() begins the next"
        assert all(np.shape(head) == (config.envs,) for head in actions), "one decision per environment"
        applied, _, accepted = apply(state.seeds, actions, state.masks, self.space, config.lifecycle)
        seeds = tick(applied, judge(applied, state.measurements, config.gates), config.lifecycle)
        self.state = after = self._probed(state.draw, seeds, state.episode, state.step + 1)
        if after.coalitions is None:
            after.coalitions = state.coalitions
        view = self._view(after)
        terminal = after.step == config.steps
        twins = tuple(never(self.process, state.draw, step) for step in (state.step, after.step))
        outcome = Outcome(
            episode=state.episode,
            step=state.step,
            actions=actions,
            refused=np.where(accepted, Refusal.NONE, Refusal.MASKED).astype(np.int8),
            found=np.full(config.envs, Vital.GOOD, np.int8),
            before=state.scores,
            after=after.scores,
            host_params=view.host_params,
            terminal=terminal,
            exported=exported(self.process, state.draw, after.step, seeds) if terminal else None,
            seeds=view.seeds,
            contribution=view.measurements.contribution,
            contribution_loss=view.measurements.contribution_loss,
            twin=(twins[0], twins[1]) if config.twin else None,
        )
        return view, outcome

    def _probed(self, draw: Draw, seeds: Seeds, episode: int, step: int) -> State:
        process, config = self.process, self.config
        measured = measure(process, draw, step, seeds)
        due = step % config.probe.coalitions_every == 0 or step == config.steps
        return State(
            draw=draw,
            seeds=seeds,
            measurements=measured,
            coalitions=coalitions(process, draw, step, seeds) if due else None,
            scores=Scores(measured.metric, measured.loss, added_params(process, seeds, ADDED)),
            masks=permitted(seeds, measured, self.space, config),
            episode=episode,
            step=step,
        )

    def _view(self, state: State) -> View:
        view: View = read_only(
            View(
                space=self.space,
                episode=state.episode,
                step=state.step,
                steps=self.config.steps,
                seeds=state.seeds,
                masks=state.masks,
                measurements=state.measurements,
                coalitions=state.coalitions,
                host_params=np.full(self.config.envs, HOST_PARAMS),
                added_params=state.scores.added_params,
            )
        )
        return view


def play(sandbox: Sandbox, client: PolicyClient) -> Floats:
    """(E,) returns of one episode under the reward `delta`. The client is told outcomes and not asked to learn."""
    view = sandbox.reset()
    returns = np.zeros(sandbox.config.envs)
    while view.step < view.steps:
        view, outcome = sandbox.step(client.act(view))
        client.store(outcome)
        returns += total(delta(outcome, sandbox.config.reward))
    return returns


# What is measured, and what may be done.


def measure(process: Process, draw: Draw, step: int, seeds: Seeds) -> Measurements:
    """What a probe would say after `step` steps. Formulas have no sampling error, so every standard error is 0.

    The loss is 1 - metric, as that of R2. Gradient norms only tell what there is left to learn.
    """
    dose = doses(seeds).astype(np.float64)

    def at(slot: int, alone: float) -> Floats:
        changed = dose.copy()
        changed[:, slot] = alone
        return process.metric(draw, step, seeds, changed)

    slots = range(dose.shape[1])
    metric = process.metric(draw, step, seeds, dose)
    live = among(seeds.stage, LIVE) & (dose > 0)
    contribution = _exact(np.stack([metric - at(slot, 0) for slot in slots], 1), live)
    gain = _exact(np.stack([at(slot, 1) - metric for slot in slots], 1), seeds.stage == Stage.TRAINING)
    trained = trained_steps(seeds)
    training = (trained > 0) & ~seeds.doomed
    participation, sensors = process.sense(draw)
    begun = np.where(step > 0, 1 - metric, np.nan)
    return Measurements(
        metric=metric,
        loss=1 - metric,
        train_loss=begun,
        gradient_norm=begun,
        contribution=contribution,
        contribution_loss=contribution,
        gain=gain,
        gain_metric=gain,
        seed_gradient_norm=np.where(training, 1 / (1 + trained), np.nan),
        seed_gradient_finite=training,
        participation=participation,
        sensors=sensors,
        sensor_age=0,
    )


def trained_steps(seeds: Seeds) -> Ints:
    """(E, S) steps that each seed has been trained: all of its life but the step of its germination and those doomed."""
    frozen = 1 + np.where(seeds.doomed, seeds.age, 0)
    steps: Ints = np.maximum(seeds.life.astype(np.int64) - frozen, 0)
    return steps


def coalitions(process: Process, draw: Draw, step: int, seeds: Seeds) -> CoalitionValues:
    """Every subset of the live seeds, each once."""
    dose = doses(seeds).astype(np.float64)
    live = among(seeds.stage, LIVE) & (dose > 0)
    slots = live.shape[1]
    members: Bools = np.not_equal(np.arange(2**slots)[:, None] >> np.arange(slots) & 1, 0)
    within: Bools = ~np.logical_or.reduce(members & ~live[:, None], axis=2)
    within[~live.any(1)] = False
    env, mask = np.nonzero(within)
    table = np.full((len(live), len(members)), np.nan)
    for subset in np.unique(mask).tolist():
        table[:, subset] = process.metric(draw, step, seeds, np.where(live & ~members[subset], 0, dose))
    metric = table[env, mask]
    return CoalitionValues(step, 0, live, env, mask, metric, 1 - metric)


def added_params(process: Process, seeds: Seeds, stages: frozenset[Stage]) -> NDArray[np.int64]:
    """(E,) parameters of the seeds in some stages."""
    cost = np.array([*process.cost, 0])[seeds.blueprint]  # an empty slot has blueprint -1, which costs nothing
    added: NDArray[np.int64] = np.where(among(seeds.stage, stages), cost, 0).sum(1)
    return added


def exported(process: Process, draw: Draw, step: int, seeds: Seeds) -> Scores:
    """The network that would be exported: every seed that is not FOSSILIZED at dose 0."""
    dose = np.where(seeds.stage == Stage.FOSSILIZED, seeds.alpha.astype(np.float64), 0)
    metric = process.metric(draw, step, seeds, dose)
    return Scores(metric, 1 - metric, added_params(process, seeds, frozenset({Stage.FOSSILIZED})))


def never(process: Process, draw: Draw, step: int) -> Scores:
    """The network that nothing was ever planted in."""
    return exported(process, draw, step, dormant(len(draw.kind), len(process.slots)))


def permitted(seeds: Seeds, measurements: Measurements, space: Space, config: Config) -> Masks:
    """What the lifecycle allows, blended by ADD alone: the formulas know no other blend."""
    masks = legal(seeds, judge(seeds, measurements, config.gates), space, config.lifecycle)
    return masks._replace(blend=masks.blend & (np.arange(len(Blend)) == Blend.ADD))


def blindfolded(view: View) -> View:
    """The view without anything that was measured: what is left does not tell one kind of network from another."""
    envs = len(view.host_params)
    shape = view.seeds.stage.shape
    nothing, absent = np.full(envs, np.nan), Estimate.absent(*shape)
    return view._replace(
        space=view.space._replace(instance=np.zeros(envs, np.int64)),
        measurements=Measurements(
            metric=nothing,
            loss=nothing,
            train_loss=nothing,
            gradient_norm=nothing,
            contribution=absent,
            contribution_loss=absent,
            gain=absent,
            gain_metric=absent,
            seed_gradient_norm=np.full(shape, np.nan),
            seed_gradient_finite=np.zeros(shape, bool),
            participation=np.full(shape, np.nan),
            sensors=np.full((*shape, len(view.space.sensors)), np.nan),
            sensor_age=0,
        ),
        coalitions=None,
    )


def _exact(mean: Floats, measured: Bools) -> Estimate:
    return Estimate(np.where(measured, mean, np.nan), np.where(measured, 0.0, np.nan), measured)


class Blindfolded:
    """A client that is shown blindfolded views, and is otherwise asked and told as it would be."""

    def __init__(self, client: PolicyClient) -> None:
        self.client = client

    def act(self, view: View) -> Actions:
        """What the client decides without measurements."""
        return self.client.act(blindfolded(view))

    def store(self, outcome: Outcome) -> None:
        """The outcome as it is: a learner must be paid. What a client decides may depend on its actions and refusals alone."""
        self.client.store(outcome)

    def update(self) -> Mapping[str, float]:
        """What the client learns."""
        return self.client.update()


LEARNER: Mapping[str, Any] = {"lr": 3e-3, "entropy": 0.05}
"""Faster and less soon settled than the defaults, under which some seeds of `growth` plant the dearer blueprint everywhere."""


# The growth process.

CHANCE, TOP = 0.1, 0.95
"""The metric of a network that has learnt nothing, and of one that lets everything through and has learnt all."""
HOST_STEPS, SEED_STEPS = 4.0, 2.0
"""Time constants of the learning curves of a host and of a seed [steps]."""

KINDS: tuple[str, ...] = ("adequate", "first", "last", "both", "nonlinear", "brittle")
"""What is wrong with a network: nothing; a bottleneck at the first slot, the last, or both, that a linear bypass repairs; one
in the middle that only an MLP repairs; one in the middle that nothing repairs and every seed worsens."""
NEED = np.array([(0, 0, 0), (0.4, 0, 0), (0, 0, 0.4), (0.4, 0, 0.4), (0, 0.4, 0), (0, 0.4, 0)])
"""(kinds, S) share of the signal that each slot loses."""
LIFT = np.full((len(KINDS), 3, 2), -0.08)
"""(kinds, S, K) share that a trained seed gives back; one that is not needed disturbs."""
LIFT[1, 0] = LIFT[2, 2] = LIFT[3, 0] = LIFT[3, 2] = (0.34, 0.36)
LIFT[4, 1] = (0.02, 0.38)


def _grown(draw: Draw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    """metric = c + (TOP - CHANCE) * learnt(step) * product over slots of (1 - need + lift * dose * learnt(trained)).

    learnt(t) = 1 - exp(-t / time constant), where a host is one step old when the episode begins; c is CHANCE, up or down by
    .02 from episode to episode. Slots come one after the other, so two bottlenecks must both be repaired.
    """
    host = 1 - np.exp(-(step + 1) / HOST_STEPS)
    ripe = 1 - np.exp(-trained_steps(seeds) / SEED_STEPS)
    slots = np.arange(dose.shape[1])
    lift = LIFT[draw.kind[:, None], slots, np.maximum(seeds.blueprint, 0)]
    passed = 1 - NEED[draw.kind] + lift * dose * ripe
    metric: Floats = CHANCE + 0.04 * (uniform(draw.key) - 0.5) + (TOP - CHANCE) * host * passed.prod(1)
    return metric


def _grown_sensors(draw: Draw) -> tuple[Floats, Floats]:
    """The stream is thin where signal is lost; a tap explains much where its blueprint would repair it."""
    index = np.arange(NEED.shape[1])
    jitter = 0.9 + 0.2 * uniform(key(draw.key[:, None, None], index[:, None], np.arange(3)))
    thin, helps = NEED[draw.kind] > 0, LIFT[draw.kind] > 0.1
    participation = np.where(thin, 0.12, 0.6) * jitter[..., 0]
    return participation, np.where(helps, 0.5, 0.02) * jitter[..., 1:]


GROWTH = Process(
    name="growth",
    kinds=len(KINDS),
    slots=("s0", "s1", "s2"),
    menu=(BlueprintInfo("bypass-linear", "before"), BlueprintInfo("bypass-mlp", "before")),
    cost=(300, 1000),
    sensors=("explained_before_linear", "explained_before_relu"),
    settings={
        "steps": 10,
        "envs": 96,
        "ppo": {**LEARNER, "rounds": 60},
        "baselines": [],
        "lifecycle": {"max_seeds": 2, "max_training": 2, "embargo": 1, "tempos": [0, 1, 2], "targets": [1.0]},
        "gates": {"permissive": True, "min_training": 1, "min_holding": 1},
    },
    metric=_grown,
    sense=_grown_sensors,
)
"""Six kinds of network with different best decisions, which only measurements tell apart."""


# The bandit and the chain: a planted seed is all there is to it, it can be neither advanced nor removed.

_PLANT_ONLY: Mapping[str, Any] = {
    "baselines": [],
    "envs": 384,
    "ppo": {**LEARNER, "rounds": 30},
    "reward": {"rent": 0.0},
    "lifecycle": {"tempos": [0, 1], "targets": [1.0], "min_prune_age": 10**6},
    "gates": {"min_training": 10**6},
}


def _planting(
    name: str,
    slots: int,
    steps: int,
    metric: Callable[[Draw, int, Seeds, Floats], Floats],
    *,
    sensors: tuple[str, ...] = (),
    **lifecycle: int,
) -> Process:
    """One blueprint and nothing to do but to plant it. `sensors`: none, or one a slot, which is 1 there and 0 elsewhere."""
    return Process(
        name=name,
        kinds=1,
        slots=tuple(f"s{slot}" for slot in range(slots)),
        menu=(BlueprintInfo("bypass-linear", "before"),),
        cost=(100,),
        sensors=sensors,
        settings={**_PLANT_ONLY, "steps": steps, "lifecycle": {**_PLANT_ONLY["lifecycle"], **lifecycle}},
        metric=metric,
        sense=partial(_named, np.eye(slots)[:, : len(sensors)]),
    )


def _named(names: Floats, draw: Draw) -> tuple[Floats, Floats]:
    """Nothing measured tells more than which slot it is, and that where names (S, F) do."""
    envs = len(draw.kind)
    return np.full((envs, len(names)), 0.5), np.broadcast_to(names, (envs, *names.shape)).copy()


ARMS = 7
"""Of a bandit: WAIT, and GERMINATE in each of six slots."""


def bandit(best: int) -> Process:
    """One step, seven arms, each pays 1 or 0: arm `best` with probability .8, the others with .1 to .6, in order.

    Arm 0 is WAIT, arm 1 + s plants slot s. The payoff is the metric of the exported network. A sensor names each slot: by
    their depth alone neighbours look alike, and payoffs that rise with depth but for one arm are a trap for any smooth policy.
    """
    assert 0 <= best < ARMS, best
    payoff = np.insert(np.arange(1, ARMS) / 10, best, 0.8)
    return _planting(
        "bandit", ARMS - 1, 1, partial(_paid, payoff), sensors=tuple(f"is_s{slot}" for slot in range(ARMS - 1))
    )


def arms(actions: Actions) -> Ints:
    """(E,) arm that each decision at a bandit pulls."""
    pulled: Ints = np.where(actions.op == Op.GERMINATE, 1 + actions.slot, 0)
    return pulled


def _paid(payoff: Floats, draw: Draw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    planted = seeds.stage != Stage.DORMANT
    arm = np.where(planted.any(1), 1 + planted.argmax(1), 0)
    return np.where(step > 0, (uniform(draw.key) < payoff[arm]).astype(np.float64), 0.0)


CHAIN_STEPS = 8
PLANTINGS = (0, 2, 5)
"""The step at which each slot of the chain must be planted; WAIT is right at the steps between."""


def _completed(draw: Draw, step: int, seeds: Seeds, dose: Floats) -> Floats:
    """1 at the end of the episode if every slot was planted at its step, else 0."""
    right = (seeds.life == CHAIN_STEPS - np.array(PLANTINGS)).all(1)
    return np.where(step == CHAIN_STEPS, right.astype(np.float64), 0.0)


CHAIN = _planting("chain", len(PLANTINGS), CHAIN_STEPS, _completed, max_seeds=3, max_training=3)
"""Six decisions must all be right and nothing is paid before the last step. Uniform choice among what is valid, op by op and
slot by slot, succeeds once in 2^6 * 3! = 384 episodes."""


# The optimum.


class Plan(NamedTuple):
    """What to do at one step, in each of n states that can be reached."""

    code: Ints  # (n,) ascending, of the state
    best: Ints  # (n, kinds + 1) index into `Solution.decisions`; the last column is the blind choice


class Solution(NamedTuple):
    """The best that can be done, as returns under the reward `delta`."""

    decisions: Actions  # (D,) every decision there is
    plans: tuple[Plan, ...]  # one a step
    never: Floats  # (kinds,) of WAIT alone
    optimum: Floats  # (kinds,)
    blind: float  # best mean over kinds of controllers that cannot tell the kinds apart

    def score(self, returns: Floats, kind: Ints) -> float:
        """0 for what `never` gets on these environments, 1 for the optimum. returns, kind: (E,)."""
        floor = self.never[kind]
        return float((returns - floor).sum() / (self.optimum[kind] - floor).sum())


class Optimal(Rule):
    """Plays a solution; blind, it plays the one best sequence of decisions for all kinds."""

    def __init__(self, sandbox: Sandbox, solution: Solution, *, blind: bool = False) -> None:
        self.solution = solution
        self.blind = blind
        self._sandbox = sandbox

    def act(self, view: View) -> Actions:
        """The best decision of each environment. Reads the instance, which no learner may."""
        plan = self.solution.plans[view.step]
        code = encode(canonical(view.seeds, self._sandbox.config))
        place = np.searchsorted(plan.code, code).clip(max=len(plan.code) - 1)
        assert (plan.code[place] == code).all(), "a state that the solution does not know"
        kinds = self._sandbox.process.kinds
        kind = np.full(len(code), kinds) if self.blind else view.space.instance % kinds
        return _pick(self.solution.decisions, plan.best[place, kind])


class _Edges(NamedTuple):
    """What can be done at one step; every field but `code` is (m,), in order of the state."""

    code: Ints  # (n,) ascending, of the states that can be reached
    state: Ints  # index of the state in which a decision is made
    decision: Ints  # index into `every_decision`
    target: Ints  # index of the state that it leads to, among those of the next step


def solve(sandbox: Sandbox) -> Solution:
    """The optimum by dynamic programming over the states x of one environment.

        V_T(x, kind) = J_T(x, kind) - J_0(kind),     V_t(x, kind) = max over valid a of V_{t+1}(f(x, a), kind)

    Rewards `delta` add up to J_T - J_0, so nothing in between counts; what is drawn for an episode must not change it, as it
    does a bandit's. Under permissive gates neither f nor what is valid depends on the kind: one expansion serves all, and
    the best *blind* controller, which cannot tell kinds apart, is a fixed sequence of decisions, whose worth is the same
    recursion on the mean of V_T over kinds.
    """
    process, config = sandbox.process, sandbox.config
    assert config.gates.permissive or config.gates.min_training > config.steps, "gates must not depend on the kind"
    assert (config.reward.name, config.reward.baseline, dict(config.reward.fees)) == ("delta", "none", {})
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
            winners = np.flatnonzero(offers[:, column] == value[state, column])[::-1]  # of equals the first
            best[state[winners], column] = decision[winners]
        plans.append(Plan(code, best))
    waiting = np.concatenate([_rise(sandbox, kind, dormant(1, len(process.slots))) for kind in kinds])
    plans.reverse()
    return Solution(every_decision(sandbox.space), tuple(plans), waiting, value[0, :-1], float(value[0, -1]))


def _expand(sandbox: Sandbox) -> tuple[list[_Edges], Seeds]:
    """Every state that can be reached, step by step, and the states at the end; each step is one population."""
    process, space, config = sandbox.process, sandbox.space, sandbox.config
    decisions = every_decision(space)
    states, code, _ = _merged(dormant(1, len(space.slots)), config)
    steps = []
    for step in range(config.steps):
        measured = measure(process, _one_kind(0, len(code)), step, states)
        masks = permitted(states, measured, space, config)
        rows: Any
        rows, chosen = np.nonzero(_valid(masks, decisions))
        applied, _, _ = apply(take(states, rows), _pick(decisions, chosen), take(masks, rows), space, config.lifecycle)
        gates = judge(applied, take(measured, rows), config.gates)
        states, following, target = _merged(tick(applied, gates, config.lifecycle), config)
        steps.append(_Edges(code, rows, chosen, target))
        code = following
    return steps, states


def every_decision(space: Space) -> Actions:
    """(D,) every decision there is, WAIT first; heads that do not matter are 0, and the blend is ADD."""
    sizes = [len(Op), len(space.slots), len(space.blueprints), 1, len(space.tempos), len(space.targets)]
    heads = np.indices(sizes).reshape(len(Head), -1)
    once = ((heads.T == 0) | RELEVANT[heads[Head.OP]]).all(1)
    return Actions(*heads[:, once])


def _valid(masks: Masks, decisions: Actions) -> Bools:
    """(E, D): whether each environment's masks allow each decision."""
    op, slot, blueprint, blend, tempo, target = decisions
    allowed = [
        masks.op[:, op],
        masks.slot[:, op, slot],
        masks.blueprint[:, slot, blueprint],
        masks.blend[:, slot, blend],
        masks.tempo[:, op, slot, tempo],
        masks.target[:, op, slot, target],
    ]
    valid: Bools = np.logical_and.reduce([mask | ~RELEVANT[op, head] for head, mask in zip(Head, allowed, strict=True)])
    return valid


def canonical(seeds: Seeds, config: Config) -> Seeds:
    """The representative of all states that have the same future: what no verb and no export will read again is dropped.

    An age counts up to what its gate asks for, a ramp until it is done, and of a doomed seed only when it is gone.
    """
    stage = seeds.stage
    limit = np.zeros(len(Stage), np.int32)
    limit[Stage.TRAINING], limit[Stage.HOLDING] = config.gates.min_training, config.gates.min_holding
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
    """(E,) a hash of each environment's state."""
    floats = np.concatenate([seeds.alpha[..., None], seeds.ramp], 2).view(np.int32)
    whole = np.stack([seeds.stage, seeds.age, seeds.life, seeds.blueprint, seeds.blend, seeds.doomed], 2)
    parts = np.concatenate([whole, floats], 2).reshape(len(seeds.stage), -1)
    return key(*parts.T)


def _merged(seeds: Seeds, config: Config) -> tuple[Seeds, Ints, Ints]:
    """The distinct states, (n, S), their codes, ascending, and which of them each given one is."""
    seeds = canonical(seeds, config)
    first: Any
    which: Any
    code, first, which = np.unique(encode(seeds), return_index=True, return_inverse=True)
    distinct: Seeds = take(seeds, first)
    fields: Any = zip(take(distinct, which), seeds, strict=True)
    assert all(np.array_equal(again, given) for again, given in fields), "two states have one code"
    return distinct, code, which


def _rise(sandbox: Sandbox, kind: int, seeds: Seeds) -> Floats:
    """(E,) J_T - J_0 of networks of one kind that end with these seeds."""
    process, config, draw = sandbox.process, sandbox.config, _one_kind(kind, len(seeds.stage))
    ends = never(process, draw, 0), exported(process, draw, config.steps, seeds)
    start, end = (total(worth(scores, np.full(len(draw.kind), HOST_PARAMS), config.reward)) for scores in ends)
    return end - start


def _one_kind(kind: int, envs: int) -> Draw:
    return Draw(np.full(envs, kind), np.zeros(envs, np.int64))


def _pick(decisions: Actions, index: Ints) -> Actions:
    return Actions(*(head[index] for head in decisions))
