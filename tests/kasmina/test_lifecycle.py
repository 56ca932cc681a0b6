"""Test the lifecycle of a whole population beside the obvious machine of one slot, and the time line step by step."""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.lifecycle import apply, dormant, edits, legal, ramp, tick, transitions
from esper.leyline.config.tree import GatesConfig, LifecycleConfig
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.masks import allowed
from esper.leyline.lifecycle.view import Estimate, Measurements, Seeds, Space
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, RELEVANT, Actions, Blend, Head, Op, Stage

EDGES: frozenset[tuple[Stage, Stage]] = frozenset(
    {
        (Stage.DORMANT, Stage.GERMINATED),
        (Stage.GERMINATED, Stage.TRAINING),
        (Stage.TRAINING, Stage.BLENDING),
        (Stage.TRAINING, Stage.PRUNED),
        (Stage.BLENDING, Stage.HOLDING),
        (Stage.BLENDING, Stage.PRUNED),
        (Stage.HOLDING, Stage.BLENDING),
        (Stage.HOLDING, Stage.FOSSILIZED),
        (Stage.HOLDING, Stage.PRUNED),
        (Stage.PRUNED, Stage.EMBARGOED),
        (Stage.PRUNED, Stage.DORMANT),  # only with an embargo of 0 steps
        (Stage.EMBARGOED, Stage.DORMANT),
    }
)
"""Every transition. HOLDING -> BLENDING is the start of a new ramp, by SET_ALPHA or by a PRUNE along a ramp."""


TEMPOS, TARGETS = (0, 1, 2, 4, 8), (0.25, 0.5, 0.75, 1.0)
FITS = ((True, True), (False, True), (True, False), (False, False))  # slot by blueprint; the last slot takes nothing


# The obvious machine: one slot, if-statements, and the rules as they are written down.


class Decision(NamedTuple):
    op: int = Op.WAIT
    slot: int = 0
    blueprint: int = 0
    blend: int = 0
    tempo: int = 2
    target: int = 3


class Rules(NamedTuple):
    """Holds both sections of the config that the machine has to know, and the slots."""

    lifecycle: LifecycleConfig
    gates: GatesConfig
    fits: tuple[tuple[bool, ...], ...]
    tempos: tuple[int, ...] = TEMPOS
    targets: tuple[float, ...] = TARGETS


class Evidence(NamedTuple):
    """Holds what was measured of one slot; None where nothing was."""

    gain: float | None
    finite: bool
    contribution: float | None


class Machine:
    """Runs the lifecycle of one slot."""

    def __init__(self, rules: Rules, index: int) -> None:
        self.rules, self.index = rules, index
        self.age = 0
        self.leave(Stage.DORMANT)

    def leave(self, stage: Stage) -> None:
        self.stage = stage
        self.life, self.blueprint, self.blend, self.alpha, self.doomed = 0, -1, 0, 0.0, False
        self.start, self.end, self.length, self.step_of_ramp = 0.0, 0.0, 0, 0

    def in_budget(self) -> bool:
        return self.stage.name in ("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")

    def ready_to_advance(self, evidence: Evidence) -> bool:
        if self.stage != Stage.TRAINING or self.age < self.rules.gates.min_training_steps:
            return False
        return evidence.finite and evidence.gain is not None and evidence.gain > 0

    def ready_to_fossilize(self, evidence: Evidence) -> bool:
        if self.stage != Stage.HOLDING or self.age < self.rules.gates.min_holding_steps:
            return False
        return evidence.contribution is not None and evidence.contribution > 0

    def may(self, d: Decision, others: "list[Machine]", evidence: Evidence) -> bool:
        """Return whether a decision may be made; `others` are all slots of the environment."""
        rules = self.rules
        if d.op == Op.GERMINATE:
            if self.stage != Stage.DORMANT:
                return False
            if sum(m.in_budget() for m in others) >= rules.lifecycle.max_seeds:
                return False
            incubating = sum(m.stage in (Stage.GERMINATED, Stage.TRAINING) for m in others)
            if incubating >= rules.lifecycle.max_training_seeds:
                return False
            if not 0 <= d.blueprint < len(rules.fits[self.index]) or not rules.fits[self.index][d.blueprint]:
                return False
            if d.blend not in (0, 1, 2) or not 0 <= d.target < len(rules.targets):
                return False
            return 0 <= d.tempo < len(rules.tempos) and rules.tempos[d.tempo] > 0
        if d.op == Op.ADVANCE:
            return self.ready_to_advance(evidence)
        if d.op == Op.SET_ALPHA:
            if not 0 <= d.tempo < len(rules.tempos) or not 0 <= d.target < len(rules.targets):
                return False
            return self.stage == Stage.HOLDING
        if d.op == Op.PRUNE:
            if not 0 <= d.tempo < len(rules.tempos):
                return False
            if self.stage not in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING):
                return False
            if self.doomed and rules.tempos[d.tempo] != 0:
                return False
            return self.life >= rules.lifecycle.min_prune_age
        if d.op == Op.FOSSILIZE:
            return self.ready_to_fossilize(evidence)
        return False

    def act(self, d: Decision) -> None:
        self.age = 0
        if d.op == Op.GERMINATE:
            self.stage, self.life, self.blueprint, self.blend = Stage.GERMINATED, 0, d.blueprint, d.blend
            self.end, self.length = self.rules.targets[d.target], self.rules.tempos[d.tempo]
        elif d.op == Op.ADVANCE:
            self.begin_ramp(self.end, self.length)
        elif d.op == Op.SET_ALPHA:
            self.begin_ramp(self.rules.targets[d.target], self.rules.tempos[d.tempo])
        elif d.op == Op.FOSSILIZE:
            self.stage = Stage.FOSSILIZED
        elif d.op == Op.PRUNE:
            at_once = self.stage in (Stage.GERMINATED, Stage.TRAINING) or self.rules.tempos[d.tempo] == 0
            if at_once:
                self.leave(Stage.PRUNED)
            else:
                self.begin_ramp(0.0, self.rules.tempos[d.tempo])
                self.doomed = True

    def begin_ramp(self, end: float, length: int) -> None:
        self.stage, self.start, self.end, self.length, self.step_of_ramp = Stage.BLENDING, self.alpha, end, length, 1
        self.follow_ramp()

    def follow_ramp(self) -> None:
        if self.step_of_ramp >= self.length:
            self.alpha = self.end
        else:
            path = obvious_ramp(self.step_of_ramp / self.length, self.rules.lifecycle.ramp)
            self.alpha = self.start + (self.end - self.start) * path

    def tick(self, evidence: Evidence) -> None:
        lifecycle, ready = self.rules.lifecycle, self.ready_to_advance(evidence)
        self.age += 1
        if self.in_budget():
            self.life += 1
        if self.stage == Stage.GERMINATED:
            self.stage, self.age = Stage.TRAINING, 0
        elif self.stage == Stage.TRAINING:
            if lifecycle.auto_advance and ready:
                self.begin_ramp(self.end, self.length)
                self.age = 0
        elif self.stage == Stage.BLENDING:
            if self.step_of_ramp < self.length:
                self.step_of_ramp += 1
                self.follow_ramp()
            elif self.doomed:
                self.rest()
            else:
                self.stage, self.age = Stage.HOLDING, 0
        elif self.stage == Stage.PRUNED:
            self.rest()
        elif self.stage == Stage.EMBARGOED and self.age >= lifecycle.embargo:
            self.stage, self.age = Stage.DORMANT, 0

    def rest(self) -> None:
        self.leave(Stage.EMBARGOED if self.rules.lifecycle.embargo > 0 else Stage.DORMANT)
        self.age = 0


def obvious_ramp(p: float, shape: str) -> float:
    if shape == "linear":
        return p
    if shape == "cosine":
        return (1 - math.cos(math.pi * p)) / 2
    logistic = [1 / (1 + math.exp(-10 * (q - 0.5))) for q in (0, p, 1)]
    return (logistic[1] - logistic[0]) / (logistic[2] - logistic[0])


# A population under random actions.


def make_space(slots: int, config: LifecycleConfig, fits=FITS, tempos=TEMPOS, targets=TARGETS) -> Space:
    """Make what the lifecycle reads of a space, and nothing else."""
    known = {"tempos": tempos, "targets": targets, "fits": np.array(fits[:slots]), "max_seeds": config.max_seeds}
    return Space(**dict.fromkeys(Space._fields) | {"blends": np.ones(len(Blend), bool)} | known)


def measure(evidence: "list[list[Evidence]]") -> Measurements:
    """Put the evidence of every slot into the arrays that gates read, and nothing else."""

    def estimate(values) -> Estimate:
        mean = np.array([[np.nan if v is None else v for v in row] for row in values], np.float64)
        return Estimate(mean, np.where(np.isnan(mean), np.nan, 0.0), ~np.isnan(mean))

    found = {
        "contribution": estimate([[e.contribution for e in row] for row in evidence]),
        "gain": estimate([[e.gain for e in row] for row in evidence]),
        "seed_gradient_finite": np.array([[e.finite for e in row] for row in evidence]),
    }
    return Measurements(**dict.fromkeys(Measurements._fields) | found)


def as_actions(decisions: "list[Decision]") -> Actions:
    return Actions(*(np.array(head, np.int64) for head in zip(*decisions, strict=True)))


class Moment(NamedTuple):
    """Records one phase of one step, of the population and of every slot's machine."""

    phase: str  # "apply" or "tick"
    before: Seeds
    after: Seeds
    machines: "list[list[Machine]]"
    decisions: "list[Decision]"
    accepted: np.ndarray  # (E,)
    expected: "list[bool]"
    edits: object


def play(rules: Rules, envs: int, slots: int, steps: int, seed: int):
    """Yield every phase of an episode in which three decisions of four are valid, where there are valid ones."""
    random = np.random.default_rng(seed)
    space = make_space(slots, rules.lifecycle)
    machines = [[Machine(rules, s) for s in range(slots)] for _ in range(envs)]
    seeds = dormant(envs, slots)

    def any_decision(op=None, slot=None, slack=1) -> Decision:
        sizes = len(Op), slots, 2, len(Blend), len(TEMPOS), len(TARGETS)
        drawn = [int(random.integers(-slack, size + slack)) for size in sizes]
        return Decision(drawn[0] if op is None else op, drawn[1] if slot is None else slot, *drawn[2:])

    for _ in range(steps):
        evidence = [
            [
                Evidence(*(random.choice([None, -1.0, 1.0], p=[0.1, 0.1, 0.8]), random.random() < 0.9, 1.0))
                if random.random() < 0.7
                else Evidence(1.0, True, random.choice([None, -1.0]))
                for _ in range(slots)
            ]
            for _ in range(envs)
        ]
        measurements = measure(evidence)
        decisions, expected = [], []
        for row, seen in zip(machines, evidence, strict=True):
            candidates = [any_decision(op, s, slack=0) for op in Op for s in range(slots)]
            valid = [d for d in candidates if d.op != Op.WAIT and row[d.slot].may(d, row, seen[d.slot])]
            choose = valid and random.random() < 0.75
            chosen = valid[random.integers(len(valid))] if choose else any_decision()
            decisions.append(chosen)
            expected.append(
                chosen.op == Op.WAIT
                or (
                    0 <= chosen.slot < slots
                    and 0 <= chosen.op < len(Op)
                    and row[chosen.slot].may(chosen, row, seen[chosen.slot])
                )
            )
        before = seeds
        masks = legal(seeds, judge(seeds, measurements, rules.gates), space, rules.lifecycle)
        seeds, changes, accepted = apply(seeds, as_actions(decisions), masks, space, rules.lifecycle)
        for row, chosen, yes in zip(machines, decisions, expected, strict=True):
            if yes and chosen.op != Op.WAIT:
                row[chosen.slot].act(chosen)
        yield Moment("apply", before, seeds, machines, decisions, accepted, expected, changes)
        before = seeds
        seeds = tick(seeds, judge(seeds, measurements, rules.gates), rules.lifecycle)
        for row, seen in zip(machines, evidence, strict=True):
            for machine, one in zip(row, seen, strict=True):
                machine.tick(one)
        yield Moment("tick", before, seeds, machines, decisions, accepted, expected, edits(before, seeds))


@st.composite
def rules(draw):
    lifecycle = LifecycleConfig(
        max_seeds=draw(st.integers(0, 3)),
        max_training_seeds=draw(st.integers(1, 3)),
        embargo=draw(st.integers(0, 3)),
        min_prune_age=draw(st.integers(0, 4)),
        auto_advance=draw(st.booleans()),
        ramp=draw(st.sampled_from(["linear", "cosine", "sigmoid"])),
    )
    gates = GatesConfig(min_training_steps=draw(st.integers(0, 3)), min_holding_steps=draw(st.integers(0, 3)))
    return Rules(lifecycle, gates, FITS)


episodes = given(rules=rules(), envs=st.integers(1, 4), slots=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
STEPS = 30


@settings(max_examples=60, deadline=None)
@episodes
def test_every_slot_does_what_its_machine_does_and_the_rules_of_the_lifecycle_hold_after_every_phase(
    rules, envs, slots, seed
):
    modules, kept = set(), None
    for moment in play(rules, envs, slots, STEPS, seed):
        before, after = moment.before, moment.after
        for e, s in itertools.product(range(envs), range(slots)):
            machine = moment.machines[e][s]
            found = [field[e, s].item() for field in (after.stage, after.age, after.life, after.blueprint, after.blend)]
            assert found == [machine.stage, machine.age, machine.life, machine.blueprint, machine.blend]
            assert after.doomed[e, s] == machine.doomed
            assert after.alpha[e, s] == pytest.approx(machine.alpha, abs=1e-6)

        # Exactly what the machine allows is accepted, and a verb changes none of the arrays that it is given.
        assert moment.accepted.tolist() == moment.expected
        assert kept is None or same(kept, before)
        kept = copied(after)

        # Edges are legal, and lead from the stage before to the stage after.
        stage = before.stage.copy()
        for e, s, source, target in zip(*transitions(before, after), strict=True):
            assert (Stage(source), Stage(target)) in EDGES
            assert stage[e, s] == source
            stage[e, s] = target
        assert np.array_equal(stage, after.stage)

        # A slot has a module exactly when it is in the budget.
        born, freed = ({tuple(pair) for pair in rows.tolist()} for rows in moment.edits)
        assert not born & modules
        assert freed <= modules
        modules = (modules | born) - freed
        assert modules == {tuple(pair) for pair in np.argwhere(np.isin(stage, list(IN_BUDGET))).tolist()}

        # A controller never observes these two, and neither limit is exceeded.
        if moment.phase == "tick":
            assert not np.isin(stage, [Stage.GERMINATED, Stage.PRUNED]).any()
        assert (np.isin(stage, list(IN_BUDGET)).sum(1) <= rules.lifecycle.max_seeds).all()
        assert (np.isin(stage, [Stage.GERMINATED, Stage.TRAINING]).sum(1) <= rules.lifecycle.max_training_seeds).all()


def test_random_episodes_take_every_edge_there_is():
    seen = set()
    for seed in range(12):
        lifecycle = LifecycleConfig(max_seeds=3, max_training_seeds=2, embargo=seed % 2)
        known = Rules(lifecycle, GatesConfig(min_training_steps=1, min_holding_steps=1), FITS)
        for moment in play(known, 4, 3, STEPS, seed):
            seen |= set(edges(moment.before, moment.after))
    assert seen == EDGES


def copied(seeds: Seeds) -> Seeds:
    return Seeds(*(field.copy() for field in seeds))


def same(one: Seeds, other: Seeds) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


# The time line, step by step, of one slot.


GOOD = Evidence(1.0, True, 1.0)


class Slot:
    """Runs one environment of one slot, whose measurements are always good."""

    def __init__(self, min_training=2, min_holding=2, evidence=GOOD, **lifecycle) -> None:
        self.config = LifecycleConfig(**lifecycle)
        self.gates = GatesConfig(min_training_steps=min_training, min_holding_steps=min_holding)
        self.space = make_space(1, self.config)
        self.measurements = measure([[evidence]])
        self.seeds = dormant(1, 1)

    def judged(self):
        return judge(self.seeds, self.measurements, self.gates)

    def valid(self, op: Op) -> bool:
        return bool(legal(self.seeds, self.judged(), self.space, self.config).op[0, op])

    def tempos(self, op: Op) -> list[int]:
        masks = legal(self.seeds, self.judged(), self.space, self.config)
        return [TEMPOS[t] for t in np.flatnonzero(masks.tempo[0, op, 0])]

    def decide(self, op: Op, tempo=2, target=1.0, *, refused=False) -> list[tuple[Stage, Stage]]:
        """apply, alone; the edges that it takes."""
        decision = Decision(op, tempo=TEMPOS.index(tempo), target=TARGETS.index(target))
        masks = legal(self.seeds, self.judged(), self.space, self.config)
        before = self.seeds
        self.seeds, _, accepted = apply(before, as_actions([decision]), masks, self.space, self.config)
        assert accepted[0] != refused
        return edges(before, self.seeds)

    def tick(self) -> list[tuple[Stage, Stage]]:
        before = self.seeds
        self.seeds = tick(before, self.judged(), self.config)
        return edges(before, self.seeds)

    def step(self, op=Op.WAIT, **choices) -> float:
        """Do one whole step, and return the alpha of its training."""
        self.decide(op, **choices)
        alpha = self.alpha
        self.tick()
        return alpha

    @property
    def stage(self) -> Stage:
        return Stage(self.seeds.stage[0, 0])

    @property
    def alpha(self) -> float:
        return self.seeds.alpha[0, 0].item()

    def to_training(self) -> "Slot":
        self.step(Op.GERMINATE)
        while not self.valid(Op.ADVANCE):
            self.step()
        return self

    def to_holding(self, target=1.0) -> "Slot":
        self.step(Op.GERMINATE, target=target)
        while not self.valid(Op.ADVANCE):
            self.step()
        self.step(Op.ADVANCE)
        while self.stage != Stage.HOLDING:
            self.step()
        return self

    def steps_until(self, op: Op) -> int:
        steps = 0
        while not self.valid(op):
            self.step()
            steps += 1
            assert steps < 50
        return steps


def edges(before: Seeds, after: Seeds) -> list[tuple[Stage, Stage]]:
    named = transitions(before, after)
    return [(Stage(a), Stage(b)) for a, b in zip(named.source, named.target, strict=True)]


def test_germinate_builds_in_apply_and_trains_after_the_tick():
    slot = Slot()
    assert slot.decide(Op.GERMINATE) == [(Stage.DORMANT, Stage.GERMINATED)]
    assert slot.tick() == [(Stage.GERMINATED, Stage.TRAINING)]
    assert (slot.alpha, slot.seeds.age[0, 0], slot.seeds.life[0, 0]) == (0, 0, 1)


@pytest.mark.parametrize("min_training", range(5))
def test_advance_is_first_valid_min_training_steps_after_the_step_of_the_birth(min_training):
    slot = Slot(min_training=min_training)
    slot.step(Op.GERMINATE)
    assert slot.steps_until(Op.ADVANCE) == min_training


@pytest.mark.parametrize("min_holding", range(5))
def test_fossilize_is_first_valid_after_min_holding_steps_of_holding(min_holding):
    slot = Slot(min_holding=min_holding).to_holding()
    assert slot.steps_until(Op.FOSSILIZE) == min_holding


@pytest.mark.parametrize("shape", ["linear", "cosine", "sigmoid"])
@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_the_kth_step_of_a_ramp_of_n_trains_at_ramp_of_k_over_n(length, shape):
    slot = Slot(min_training=0, ramp=shape)
    slot.step(Op.GERMINATE, tempo=length, target=0.75)
    alphas = [slot.step(Op.ADVANCE if k == 0 else Op.WAIT) for k in range(length)]
    expected = [0.75 * obvious_ramp(k / length, shape) for k in range(1, length)] + [0.75]
    assert alphas == pytest.approx(expected, abs=1e-7)
    assert alphas[-1] == 0.75


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_a_ramp_holds_after_the_tick_of_its_last_step_and_not_before(length):
    slot = Slot(min_training=0)
    slot.step(Op.GERMINATE, tempo=length)
    stages = []
    for k in range(length):
        slot.step(Op.ADVANCE if k == 0 else Op.WAIT)
        stages.append(slot.stage)
    assert stages == [Stage.BLENDING] * (length - 1) + [Stage.HOLDING]


def test_set_alpha_is_valid_in_holding_only():
    slot = Slot(min_training=1)
    seen = {slot.stage: slot.valid(Op.SET_ALPHA)}
    for op in (Op.GERMINATE, Op.WAIT, Op.ADVANCE, Op.WAIT, Op.WAIT, Op.WAIT, Op.FOSSILIZE):
        slot.step(op)
        seen[slot.stage] = slot.valid(Op.SET_ALPHA)
    assert len(seen) == 5
    assert [stage for stage, valid in seen.items() if valid] == [Stage.HOLDING]


def test_set_alpha_with_tempo_0_trains_at_the_target_at_once_and_holds_after_the_tick():
    slot = Slot().to_holding()
    assert slot.decide(Op.SET_ALPHA, tempo=0, target=0.25) == [(Stage.HOLDING, Stage.BLENDING)]
    assert slot.alpha == 0.25
    assert slot.tick() == [(Stage.BLENDING, Stage.HOLDING)]
    assert (slot.alpha, slot.seeds.age[0, 0]) == (0.25, 0)


def test_set_alpha_with_a_tempo_ramps_from_the_alpha_of_now():
    slot = Slot().to_holding()
    alphas = [slot.step(Op.SET_ALPHA if k == 0 else Op.WAIT, tempo=4, target=0.5) for k in range(4)]
    assert alphas == [0.875, 0.75, 0.625, 0.5]
    assert slot.stage == Stage.HOLDING


def test_a_changed_alpha_starts_the_trial_again():
    slot = Slot(min_holding=3).to_holding()
    slot.steps_until(Op.FOSSILIZE)
    slot.step(Op.SET_ALPHA, tempo=0, target=0.5)
    assert slot.steps_until(Op.FOSSILIZE) == 3


def test_a_fossil_keeps_its_alpha_and_can_only_wait():
    slot = Slot().to_holding(target=0.5)
    slot.steps_until(Op.FOSSILIZE)
    slot.step(Op.FOSSILIZE)
    for _ in range(5):
        assert (slot.stage, slot.alpha) == (Stage.FOSSILIZED, 0.5)
        assert [op for op in Op if slot.valid(op)] == [Op.WAIT]
        slot.step()


@pytest.mark.parametrize("embargo", range(4))
@pytest.mark.parametrize("reach", [Slot.to_training, Slot.to_holding])
def test_a_prune_at_once_is_pruned_in_apply_and_rests_exactly_the_embargo(reach, embargo):
    slot = reach(Slot(embargo=embargo))
    before = slot.stage
    assert slot.decide(Op.PRUNE, tempo=0) == [(before, Stage.PRUNED)]
    after = Stage.EMBARGOED if embargo else Stage.DORMANT
    assert slot.tick() == [(Stage.PRUNED, after)]
    assert slot.steps_until(Op.GERMINATE) == embargo


@pytest.mark.parametrize("tempo", TEMPOS)
def test_a_prune_of_an_incubating_seed_does_not_read_the_tempo(tempo):
    slot = Slot().to_training()
    slot.decide(Op.PRUNE, tempo=tempo)
    assert slot.stage == Stage.PRUNED


@pytest.mark.parametrize("tempo", TEMPOS)
def test_a_pruned_slot_is_as_empty_as_a_new_one(tempo):
    slot = Slot(embargo=0).to_holding()
    slot.step(Op.PRUNE, tempo=tempo)
    slot.steps_until(Op.GERMINATE)
    fresh = dormant(1, 1)
    assert same(slot.seeds._replace(age=fresh.age), fresh)


@pytest.mark.parametrize("tempo", [1, 2, 4, 8])
def test_a_prune_that_takes_its_time_ramps_to_0_and_rests_after(tempo):
    slot = Slot(embargo=3).to_holding(target=0.5)
    alphas = [slot.step(Op.PRUNE if k == 0 else Op.WAIT, tempo=tempo) for k in range(tempo)]
    assert alphas == pytest.approx([0.5 * (1 - k / tempo) for k in range(1, tempo + 1)], abs=1e-7)
    assert alphas[-1] == 0
    assert slot.stage == Stage.EMBARGOED
    assert slot.steps_until(Op.GERMINATE) == 3


@pytest.mark.parametrize(("embargo", "after"), [(0, Stage.DORMANT), (2, Stage.EMBARGOED)])
def test_a_doomed_seed_passes_through_pruned_within_the_tick_in_which_it_arrives(embargo, after):
    slot = Slot(embargo=embargo).to_holding()
    assert slot.decide(Op.PRUNE, tempo=2) == [(Stage.HOLDING, Stage.BLENDING)]
    assert slot.tick() == []
    assert slot.tick() == [(Stage.BLENDING, Stage.PRUNED), (Stage.PRUNED, after)]


def test_a_ramp_can_be_turned_round_by_a_prune():
    slot = Slot(min_training=0)
    slot.step(Op.GERMINATE, tempo=4)
    slot.step(Op.ADVANCE)
    slot.step()
    alphas = [slot.step(Op.PRUNE if k == 0 else Op.WAIT, tempo=2) for k in range(2)]
    assert alphas == [0.375, 0.0]  # from the .75 of the third step, which the tick has set


def test_nothing_but_a_prune_at_once_is_valid_on_a_doomed_slot():
    slot = Slot().to_holding()
    slot.step(Op.PRUNE, tempo=8)
    while slot.stage == Stage.BLENDING:
        assert [op for op in Op if slot.valid(op)] == [Op.WAIT, Op.PRUNE]
        assert slot.tempos(Op.PRUNE) == [0]
        slot.step()


def test_a_doomed_seed_can_be_pruned_at_once():
    slot = Slot(embargo=2).to_holding()
    slot.step(Op.PRUNE, tempo=8)
    assert slot.decide(Op.PRUNE, tempo=0) == [(Stage.BLENDING, Stage.PRUNED)]
    slot.tick()
    assert slot.steps_until(Op.GERMINATE) == 2


@pytest.mark.parametrize("age", range(5))
def test_a_seed_may_be_pruned_from_its_minimum_age_on(age):
    slot = Slot(min_prune_age=age)
    slot.step(Op.GERMINATE)
    assert slot.steps_until(Op.PRUNE) == max(0, age - 1)  # the step of the birth is the first of its life


def test_automatic_advance_needs_no_action():
    slot = Slot(min_training=2, auto_advance=True)
    slot.step(Op.GERMINATE, tempo=2)
    alphas = [slot.step() for _ in range(6)]
    assert alphas == [0, 0, 0, 0.5, 1, 1]
    assert slot.stage == Stage.HOLDING


def test_automatic_advance_waits_for_the_gate():
    slot = Slot(min_training=0, auto_advance=True, evidence=Evidence(-1.0, True, None))
    slot.step(Op.GERMINATE)
    for _ in range(10):
        slot.step()
    assert slot.stage == Stage.TRAINING


def test_ramps_of_length_0_are_for_prune_and_set_alpha_alone():
    slot = Slot()
    assert slot.tempos(Op.GERMINATE) == [1, 2, 4, 8]
    slot.to_holding()
    assert slot.tempos(Op.SET_ALPHA) == slot.tempos(Op.PRUNE) == list(TEMPOS)


# Mask-valid if and only if accepted.


SMALL = {"tempos": (0, 2), "targets": (0.5, 1.0)}
SMALL_FITS = ((True, True), (False, True))


def reached_states() -> dict[str, Seeds]:
    """Return states of one environment of two slots, reached by valid decisions with good measurements."""
    config = LifecycleConfig(max_seeds=2, max_training_seeds=1, min_prune_age=2, embargo=2, **SMALL)
    space = make_space(2, config, SMALL_FITS, **SMALL)
    gates = GatesConfig(min_training_steps=1, min_holding_steps=1)
    measurements = measure([[GOOD, GOOD]])
    germinate = [Decision(Op.GERMINATE, s, 1, Blend.GATE, 1, 1) for s in (0, 1)]
    wait, slow = Decision(), {"tempo": 1, "target": 0}
    first = [germinate[0], wait, Decision(Op.ADVANCE, 0)]  # BLENDING, half way
    scripts = {
        "empty": [],
        "a newborn": [germinate[0]],
        "incubating, ready": [germinate[0], wait],
        "blending beside an empty slot": first,
        "blending beside a newborn": [*first, germinate[1]],
        "holding beside an incubating seed": [*first, germinate[1], wait],
        "fossilized beside an incubating seed": [*first, germinate[1], wait, Decision(Op.FOSSILIZE, 0)],
        "both holding": [*first, germinate[1], wait, Decision(Op.ADVANCE, 1), wait, wait],
        "moving to another alpha": [*first, germinate[1], wait, Decision(Op.SET_ALPHA, 0, **slow)],
        "doomed": [*first, germinate[1], wait, Decision(Op.PRUNE, 0, **slow)],
        "embargoed": [germinate[0], wait, Decision(Op.PRUNE, 0, tempo=0)],
    }
    states = {}
    for name, script in scripts.items():
        seeds = dormant(1, 2)
        for decision in script:
            masks = legal(seeds, judge(seeds, measurements, gates), space, config)
            seeds, _, accepted = apply(seeds, as_actions([decision]), masks, space, config)
            assert accepted.all(), (name, decision)
            seeds = tick(seeds, judge(seeds, measurements, gates), config)
        states[name] = seeds
    return states


STATES = reached_states()
MEASURED = {"good": GOOD, "bad": Evidence(-1.0, True, -1.0), "absent": Evidence(None, False, None)}
EVERY = [
    Decision(*choice)
    for choice in itertools.product(
        range(-1, len(Op) + 1), range(-1, 3), range(-1, 3), range(-1, len(Blend) + 1), range(-1, 3), range(-1, 3)
    )
]

EVERY_ACTION = as_actions(EVERY)


@pytest.fixture(scope="module", params=[(state, seen) for state in STATES for seen in MEASURED], ids="-".join)
def enumerated(request):
    """Apply every decision there is, each in an environment of its own that is in the same state."""
    name, seen = request.param
    config = LifecycleConfig(max_seeds=2, max_training_seeds=1, min_prune_age=2, embargo=2, **SMALL)
    space = make_space(2, config, SMALL_FITS, **SMALL)
    gates = GatesConfig(min_training_steps=1, min_holding_steps=1)
    seeds = Seeds(*(np.repeat(field, len(EVERY), 0) for field in STATES[name]))
    one = legal(STATES[name], judge(STATES[name], measure([[MEASURED[seen]] * 2]), gates), space, config)
    masks = type(one)(*(np.repeat(field, len(EVERY), 0) for field in one))
    after, changes, accepted = apply(seeds, EVERY_ACTION, masks, space, config)
    return name, MEASURED[seen], seeds, masks, after, changes, accepted


def test_a_decision_is_accepted_if_and_only_if_every_mask_that_matters_allows_it(enumerated):
    _, _, _, masks, _, _, accepted = enumerated
    op, slot, blueprint, blend, tempo, target = (field[0].tolist() for field in masks)

    def allows(d: Decision) -> bool:
        if not 0 <= d.op < len(Op) or not op[d.op]:
            return False
        if d.op == Op.WAIT:
            return True
        if not 0 <= d.slot < 2 or not slot[d.op][d.slot]:
            return False
        asked = [(Head.BLUEPRINT, blueprint[d.slot]), (Head.BLEND, blend[d.slot])]
        asked += [(Head.TEMPO, tempo[d.op][d.slot]), (Head.TARGET, target[d.op][d.slot])]
        return all(0 <= d[h] < len(mask) and mask[d[h]] for h, mask in asked if RELEVANT[d.op, h])

    wrong = [d for d, yes in zip(EVERY, accepted.tolist(), strict=True) if yes != allows(d)]
    assert not wrong


def test_a_decision_is_accepted_if_and_only_if_the_machine_allows_it(enumerated):
    name, evidence, _, _, _, _, accepted = enumerated
    lifecycle = LifecycleConfig(max_seeds=2, max_training_seeds=1, min_prune_age=2, embargo=2, **SMALL)
    rules = Rules(lifecycle, GatesConfig(min_training_steps=1, min_holding_steps=1), SMALL_FITS, **SMALL)
    row = [Machine(rules, 0), Machine(rules, 1)]
    for s, machine in enumerate(row):
        state = STATES[name]
        machine.stage, machine.age = Stage(state.stage[0, s]), int(state.age[0, s])
        machine.life, machine.doomed = int(state.life[0, s]), bool(state.doomed[0, s])

    def allows(d: Decision) -> bool:
        return d.op == Op.WAIT or (0 <= d.slot < 2 and row[d.slot].may(d, row, evidence))

    wrong = [d for d, yes in zip(EVERY, accepted.tolist(), strict=True) if yes != allows(d)]
    assert not wrong


def test_a_refused_action_changes_nothing_at_all(enumerated):
    _, _, before, _, after, changes, accepted = enumerated
    assert (~accepted).any()
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[~accepted], new[~accepted])
    assert accepted[changes.born[:, 0]].all()
    assert accepted[changes.freed[:, 0]].all()


def test_an_accepted_action_other_than_wait_changes_its_slot_and_no_other(enumerated):
    _, _, before, _, after, _, accepted = enumerated
    changed = np.zeros(before.stage.shape, bool)
    for old, new in zip(before, after, strict=True):
        changed |= (old != new).reshape(*changed.shape, -1).any(2)
    for e, d in enumerate(EVERY):
        if accepted[e] and d.op != Op.WAIT:
            assert not changed[e, 1 - d.slot]
            assert changed[e, d.slot]
        else:
            assert not changed[e].any()


def test_wait_is_always_valid(enumerated):
    _, _, _, masks, _, _, accepted = enumerated
    assert masks.op[:, Op.WAIT].all()
    assert all(yes for d, yes in zip(EVERY, accepted.tolist(), strict=True) if d.op == Op.WAIT)


def test_an_operation_is_valid_exactly_where_some_slot_allows_it(enumerated):
    _, _, _, masks, _, _, _ = enumerated
    assert np.array_equal(masks.op[:, 1:], masks.slot[:, 1:].any(2))


def test_every_slot_that_is_allowed_leaves_a_choice_in_each_head_that_matters(enumerated):
    _, _, _, masks, _, _, _ = enumerated
    heads = {Head.TEMPO: masks.tempo.any(3), Head.TARGET: masks.target.any(3)}
    for head, some in heads.items():
        for op in np.flatnonzero(RELEVANT[:, head]):
            assert (some[:, op] >= masks.slot[:, op]).all()
    for some in (masks.blueprint.any(2), masks.blend.any(2)):
        assert np.array_equal(some, masks.slot[:, Op.GERMINATE])


def test_the_states_that_are_enumerated_hold_every_stage_that_can_be_observed():
    seen = {Stage(stage) for seeds in STATES.values() for stage in seeds.stage.flat}
    assert seen == set(Stage) - {Stage.GERMINATED, Stage.PRUNED}


def test_allowed_reads_nothing_but_the_masks():
    config = LifecycleConfig()
    seeds, space = dormant(1, 1), make_space(1, config)
    masks = legal(seeds, judge(seeds, measure([[GOOD]]), GatesConfig()), space, config)
    decision = as_actions([Decision(Op.GERMINATE)])
    assert allowed(masks, decision).all()
    assert not allowed(masks._replace(blend=masks.blend & False), decision).any()


# Ramps and the table of heads.


SHAPES = pytest.mark.parametrize("shape", ["linear", "cosine", "sigmoid"])


@SHAPES
def test_a_ramp_is_exact_at_both_ends(shape):
    assert ramp(np.array([0.0, 1.0]), shape).tolist() == [0.0, 1.0]


@SHAPES
@settings(max_examples=100, deadline=None)
@given(progress=st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_a_ramp_is_monotone(shape, progress):
    path = ramp(np.sort(np.array(progress)), shape)
    assert (np.diff(path) >= 0).all()
    assert (path >= 0).all()
    assert (path <= 1).all()


@SHAPES
@given(p=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_a_ramp_is_symmetric_about_its_middle(shape, p):
    assert ramp(np.array([p]), shape)[0] == pytest.approx(1 - ramp(np.array([1 - p]), shape)[0], abs=1e-12)


@SHAPES
@given(p=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_a_ramp_follows_its_formula(shape, p):
    assert ramp(np.array([p]), shape)[0] == pytest.approx(obvious_ramp(p, shape), abs=1e-12)


def test_the_heads_that_matter_for_an_operation_are_those_of_the_table():
    table = {
        Op.WAIT: [],
        Op.GERMINATE: [Head.SLOT, Head.BLUEPRINT, Head.BLEND, Head.TEMPO, Head.TARGET],
        Op.ADVANCE: [Head.SLOT],
        Op.SET_ALPHA: [Head.SLOT, Head.TEMPO, Head.TARGET],
        Op.PRUNE: [Head.SLOT, Head.TEMPO],
        Op.FOSSILIZE: [Head.SLOT],
    }
    assert {op: [head for head in Head if RELEVANT[op, head]] for op in Op} == {
        op: [Head.OP, *heads] for op, heads in table.items()
    }
