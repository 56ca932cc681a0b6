"""Advance the lifecycle of every slot of every environment by pure functions over arrays. E environments, S slots.

`tick` advances the state by one step, `legal` gives the operations that are allowed, and `apply` carries decisions out
and refuses those that are not allowed. Each takes a handful of array operations for any E and S. None of them touches a
module; `Body.edit` makes and frees modules as the `Edits` say.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import LifecycleConfig
from esper.leyline.lifecycle.gates import Gates
from esper.leyline.lifecycle.masks import allowed
from esper.leyline.lifecycle.view import Bools, Masks, Seeds, Space, Transitions
from esper.leyline.lifecycle.vocabulary import ADDED, IN_BUDGET, RELEVANT, Actions, Head, Ints, Op, Stage, among


class Edits(NamedTuple):
    """Lists modules to make and modules to free, as rows of (environment, slot); derived from two states of `Seeds`."""

    born: Ints  # (n, 2)
    freed: Ints  # (n, 2)


def dormant(envs: int, slots: int) -> Seeds:
    """Return the state of a new population, in which every slot is empty."""
    shape = (envs, slots)
    return Seeds(
        stage=np.zeros(shape, np.int8),
        age=np.zeros(shape, np.int32),
        life=np.zeros(shape, np.int32),
        blueprint=np.full(shape, -1, np.int16),
        blend=np.zeros(shape, np.int8),
        alpha=np.zeros(shape, np.float32),
        ramp=np.zeros((*shape, 3), np.float32),
        doomed=np.zeros(shape, bool),
    )


Shape = Literal["linear", "cosine", "sigmoid"]


def ramp(progress: NDArray[Any], shape: Shape) -> NDArray[np.float64]:
    """Compute the path from 0 to 1 of a ramp; progress in [0, 1], any shape. 0 maps to 0 and 1 to 1 exactly, monotone.

    linear p;  cosine (1 - cos(pi p)) / 2;  sigmoid (s(p) - s(0)) / (s(1) - s(0)) with s(p) = 1 / (1 + exp(-10 (p - 1/2))).
    """
    p = np.asarray(progress, np.float64)
    if shape == "linear":
        path = p
    elif shape == "cosine":
        path = (1 - np.cos(np.pi * p)) / 2
    else:
        low, high = 1 / (1 + np.exp(5.0)), 1 / (1 + np.exp(-5.0))
        path = (1 / (1 + np.exp(-10 * (p - 0.5))) - low) / (high - low)
    return np.where(p <= 0, 0.0, np.where(p >= 1, 1.0, path))


def copied(seeds: Seeds) -> Seeds:
    """Return the same state in arrays of its own."""
    return Seeds(*(field.copy() for field in seeds))  # type: ignore[arg-type]


def tick(seeds: Seeds, gates: Gates, config: LifecycleConfig) -> Seeds:
    """Advance by one step: every age grows by 1, then every slot whose condition holds changes its stage.

    A doomed seed whose ramp has ended passes through PRUNED within this call, so a controller never observes PRUNED;
    `transitions` reports it.
    """
    stage, age = seeds.stage, seeds.age + np.int32(1)
    life = np.where(among(stage, IN_BUDGET), seeds.life + np.int32(1), seeds.life)

    blending = stage == Stage.BLENDING
    arrived = blending & (age >= seeds.ramp[..., 2])
    sprouted = stage == Stage.GERMINATED
    advanced = (stage == Stage.TRAINING) & gates.advance.passed() & config.auto_advance
    pruned = (stage == Stage.PRUNED) | (arrived & seeds.doomed)
    rested = (stage == Stage.EMBARGOED) & (age >= config.embargo)

    after = stage.copy()
    after[sprouted] = Stage.TRAINING
    after[advanced] = Stage.BLENDING
    after[arrived] = Stage.HOLDING
    after[pruned] = Stage.EMBARGOED if config.embargo else Stage.DORMANT
    after[rested] = Stage.DORMANT
    moved = copied(seeds)._replace(stage=after, age=np.where(after != stage, np.int32(0), age), life=life)
    ramping = after == Stage.BLENDING
    moved.alpha[ramping] = _alpha_of_next_step(moved, config.ramp)[ramping]
    _clear(moved, pruned)
    return moved


def legal(seeds: Seeds, gates: Gates, space: Space, config: LifecycleConfig) -> Masks:
    """Return the operations that each environment may carry out now; WAIT is always among them."""
    stage = seeds.stage
    envs, slots = stage.shape
    tempos = np.asarray(space.tempos)

    seeds_left = among(stage, IN_BUDGET).sum(1) < config.max_seeds
    incubating = (stage == Stage.TRAINING) | (stage == Stage.GERMINATED)
    room = seeds_left & (incubating.sum(1) < config.max_training_seeds)
    old_enough = seeds.life >= config.min_prune_age

    slot = np.zeros((envs, len(Op), slots), bool)
    slot[:, Op.GERMINATE] = (stage == Stage.DORMANT) & room[:, None] & space.fits.any(1)
    slot[:, Op.ADVANCE] = (stage == Stage.TRAINING) & gates.advance.passed()
    slot[:, Op.SET_ALPHA] = stage == Stage.HOLDING
    slot[:, Op.PRUNE] = (incubating | (stage == Stage.BLENDING) | (stage == Stage.HOLDING)) & old_enough
    slot[:, Op.FOSSILIZE] = (stage == Stage.HOLDING) & gates.fossilize.passed()

    tempo = slot[..., None] & RELEVANT[:, Head.TEMPO, None, None] & np.ones(len(tempos), bool)
    tempo[:, Op.GERMINATE] &= (tempos > 0) | config.direct
    tempo[:, Op.PRUNE] &= ~seeds.doomed[..., None] | (tempos == 0)
    target = slot[..., None] & RELEVANT[:, Head.TARGET, None, None] & np.ones(len(space.targets), bool)

    op: Bools = np.logical_or.reduce(slot, axis=2)
    op[:, Op.WAIT] = True
    germinable = slot[:, Op.GERMINATE, :, None]
    return Masks(op, slot, germinable & space.fits, germinable & space.blends, tempo, target)


def apply(
    seeds: Seeds, actions: Actions, masks: Masks, space: Space, config: LifecycleConfig
) -> tuple[Seeds, Edits, Bools]:
    """Carry out one decision per environment that the masks allow: the new state, its edits, and which were accepted (E,)."""
    accepted = allowed(masks, actions)
    after = copied(seeds)
    tempos, targets = np.asarray(space.tempos), np.asarray(space.targets)

    def at(op: Op) -> tuple[Ints, Ints]:
        envs = np.flatnonzero(accepted & (actions.op == op))
        return envs, actions.slot[envs]

    e, s = at(Op.GERMINATE)
    after.stage[e, s] = Stage.GERMINATED
    after.blueprint[e, s] = actions.blueprint[e]
    after.blend[e, s] = actions.blend[e]
    after.ramp[e, s, 1] = targets[actions.target[e]]
    after.ramp[e, s, 2] = tempos[actions.tempo[e]]
    e, s = (each[tempos[actions.tempo[e]] == 0] for each in (e, s))  # what a seed adds is 0 at first, at any dose
    after.stage[e, s], after.alpha[e, s] = Stage.HOLDING, after.ramp[e, s, 1]

    after.stage[at(Op.ADVANCE)] = Stage.BLENDING
    after.stage[at(Op.FOSSILIZE)] = Stage.FOSSILIZED

    e, s = at(Op.SET_ALPHA)
    after.stage[e, s] = Stage.BLENDING
    after.ramp[e, s] = np.stack([seeds.alpha[e, s], targets[actions.target[e]], tempos[actions.tempo[e]]], 1)

    e, s = at(Op.PRUNE)
    dosed = (seeds.stage[e, s] == Stage.BLENDING) | (seeds.stage[e, s] == Stage.HOLDING)
    slow = dosed & (tempos[actions.tempo[e]] > 0)
    gone = np.zeros(seeds.stage.shape, bool)
    gone[e[~slow], s[~slow]] = True
    after.stage[gone] = Stage.PRUNED
    e, s = e[slow], s[slow]
    after.stage[e, s] = Stage.BLENDING
    after.doomed[e, s] = True
    after.ramp[e, s] = np.stack([seeds.alpha[e, s], np.zeros(len(e)), tempos[actions.tempo[e]]], 1)

    touched = np.zeros(seeds.stage.shape, bool)
    acting = np.flatnonzero(accepted & (actions.op != Op.WAIT))
    touched[acting, actions.slot[acting]] = True
    after.age[touched] = 0
    ramping = touched & (after.stage == Stage.BLENDING)
    after.alpha[ramping] = _alpha_of_next_step(after, config.ramp)[ramping]
    _clear(after, gone)
    return after, edits(seeds, after), accepted


def doses(seeds: Seeds) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return (E, S) the dose at which every slot acts on its network now."""
    return np.where(among(seeds.stage, ADDED), seeds.alpha, np.float32(0))


def uprooted(seeds: Seeds, rows: Bools, embargo: int) -> Seeds:
    """Return the state without the seeds of some rows, (E,) bool, that are not fossilized; their slots rest."""
    gone = rows[:, None] & among(seeds.stage, IN_BUDGET) & (seeds.stage != Stage.FOSSILIZED)
    return emptied(seeds, gone, Stage.EMBARGOED if embargo else Stage.DORMANT)


def emptied(seeds: Seeds, gone: Bools, stage: Stage = Stage.DORMANT) -> Seeds:
    """Return the state in which some slots, (E, S) bool, are empty and at a stage."""
    after = copied(seeds)
    after.stage[gone], after.age[gone] = stage, 0
    _clear(after, gone)
    return after


def exported(seeds: Seeds) -> Seeds:
    """Return the state in which exactly the seeds that an export keeps act."""
    fossil = seeds.stage == Stage.FOSSILIZED
    return seeds._replace(stage=np.where(fossil, seeds.stage, np.int8(Stage.DORMANT)))


def edits(before: Seeds, after: Seeds) -> Edits:
    """Return which modules came and which went between two states."""
    had, has = among(before.stage, IN_BUDGET), among(after.stage, IN_BUDGET)
    return Edits(np.argwhere(has & ~had), np.argwhere(had & ~has))


def transitions(before: Seeds, after: Seeds) -> Transitions:
    """Return every change of stage between two states, including the pass of a doomed seed through PRUNED."""
    env, slot = np.nonzero(before.stage != after.stage)
    source, target = before.stage[env, slot], after.stage[env, slot]
    through = (source == Stage.BLENDING) & ((target == Stage.EMBARGOED) | (target == Stage.DORMANT))
    hops = 1 + through.astype(np.int64)
    env, slot, source, target = env.repeat(hops), slot.repeat(hops), source.repeat(hops), target.repeat(hops)
    second = np.cumsum(hops)[through] - 1
    target[second - 1] = Stage.PRUNED
    source[second] = Stage.PRUNED
    return Transitions(env, slot, source, target)


def _alpha_of_next_step(seeds: Seeds, shape: Shape) -> NDArray[np.float32]:
    """Compute alpha = start + (end - start) * ramp(k / n) in the k-th step of a ramp of n; k - 1 steps have passed."""
    start, end, length = (seeds.ramp[..., i].astype(np.float64) for i in range(3))
    path = ramp((seeds.age + 1) / np.maximum(length, 1), shape)
    path = np.where(length == 0, 1.0, path)
    alpha = np.where(path == 1, end, start + (end - start) * path)
    return alpha.astype(np.float32)


def _clear(seeds: Seeds, gone: Bools) -> None:
    """Empty the fields of slots whose seed is gone; the field `stage` is kept."""
    for field, empty in ((seeds.life, 0), (seeds.blueprint, -1), (seeds.blend, 0), (seeds.alpha, 0), (seeds.ramp, 0)):
        field[gone] = empty
    seeds.doomed[gone] = False
