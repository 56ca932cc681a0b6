from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from esper.leyline.lifecycle.view import BlueprintInfo, Estimate, Masks, Measurements, Seeds, Space, View
from esper.leyline.lifecycle.vocabulary import RELEVANT, Actions, Blend, Head, Op, Stage

MENU = ("bypass-linear", "bypass-mlp", "mlp-small")


def build_space(envs: int, slots: int, **fields: Any) -> Space:
    space = Space(
        slots=tuple(f"s{i}" for i in range(slots)),
        blueprints=tuple(BlueprintInfo(name, "before") for name in MENU),
        tempos=(0, 1, 2, 4, 8),
        targets=(0.25, 0.5, 0.75, 1.0),
        cost=np.full((slots, len(MENU)), 100),
        fits=np.ones((slots, len(MENU)), bool),
        width=np.full((envs, slots), 16),
        sensors=(),
        max_seeds=slots,
        seed=3,
        number=np.arange(envs),
        instance=np.arange(envs),
        floor=np.zeros(envs),
        ceiling=np.ones(envs),
        objective="metric",
        rent=0.0,
        rent_size=0,
        frozen=np.zeros(envs, bool),
    )
    return space._replace(**fields)


def build_masks(slot: np.ndarray, space: Space, doomed: np.ndarray) -> Masks:
    """Build masks from (E, O, S), the slots that each operation may use."""
    tempos = np.asarray(space.tempos)
    tempo = slot[..., None] & RELEVANT[:, Head.TEMPO, None, None] & np.ones(len(tempos), bool)
    tempo[:, Op.GERMINATE] &= tempos > 0
    tempo[:, Op.PRUNE] &= ~doomed[..., None] | (tempos == 0)
    target = slot[..., None] & RELEVANT[:, Head.TARGET, None, None] & np.ones(len(space.targets), bool)
    op = slot.any(2)
    op[:, Op.WAIT] = True
    germinable = slot[:, Op.GERMINATE, :, None]
    return Masks(op, slot, germinable & space.fits, germinable & np.ones(len(Blend), bool), tempo, target)


def build_view(
    stages: Any = ((Stage.DORMANT,) * 3,),
    may: Mapping[Op, Any] | None = None,
    *,
    step: int = 5,
    steps: int = 24,
    episode: int = 0,
    age: Any = 0,
    doomed: Any = False,
    metric: Any = 0.5,
    participation: Any = 0.1,
    contribution: Any = np.nan,
    contribution_se: Any = 0.01,
    gain: Any = np.nan,
    inner: Any = None,
    **space_fields: Any,
) -> View:
    """Build a view written down by hand: stages (E, S), and for each operation the slots that may be used, (E, S) or (S,)."""
    stage = np.array(stages, np.int8)
    envs, slots = shape = stage.shape

    def full(value: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, np.float64), shape).copy()

    def estimate(mean: Any, se: Any) -> Estimate:
        known = ~np.isnan(full(mean))
        return Estimate(full(mean), np.where(known, full(se), np.nan), known)

    if inner is not None:
        space_fields["sensors"] = ("dead", "participation_inner")
    space = build_space(envs, slots, **space_fields)
    slot = np.zeros((envs, len(Op), slots), bool)
    for op, where in (may or {}).items():
        slot[:, op] = where
    doomed = np.broadcast_to(np.asarray(doomed, bool), shape).copy()
    return View(
        space=space,
        episode=episode,
        step=step,
        steps=steps,
        seeds=Seeds(
            stage=stage,
            age=full(age).astype(np.int32),
            life=full(age).astype(np.int32),
            blueprint=np.where(stage == Stage.DORMANT, -1, 0).astype(np.int16),
            blend=np.zeros(shape, np.int8),
            alpha=np.zeros(shape, np.float32),
            ramp=np.zeros((*shape, 3), np.float32),
            doomed=doomed,
        ),
        masks=build_masks(slot, space, doomed),
        measurements=Measurements(
            metric=np.broadcast_to(np.asarray(metric, np.float64), envs).copy(),
            loss=np.ones(envs),
            train_loss=np.ones(envs),
            gradient_norm=np.ones(envs),
            contribution=estimate(contribution, contribution_se),
            contribution_loss=estimate(np.nan, np.nan),
            gain=estimate(gain, 0.01),
            gain_metric=estimate(np.nan, np.nan),
            seed_gradient_norm=full(np.nan),
            seed_gradient_finite=np.zeros(shape, bool),
            participation=full(participation),
            sensors=np.zeros((*shape, 0)) if inner is None else np.stack([full(0.5), full(inner)], 2),
            sensor_age=0,
            certificate=full(np.nan),
            level=np.full(envs, np.nan),
        ),
        coalitions=None,
        host_params=np.full(envs, 1000),
        added_params=np.zeros(envs, np.int64),
    )


def is_allowed(masks: Masks, actions: Actions) -> bool:
    """Return whether every environment's decision is valid, one environment and head at a time."""
    for e, (op, slot, blueprint, blend, tempo, target) in enumerate(zip(*actions, strict=True)):
        valid = {
            Head.OP: masks.op[e, op],
            Head.SLOT: masks.slot[e, op, slot],
            Head.BLUEPRINT: masks.blueprint[e, slot, blueprint],
            Head.BLEND: masks.blend[e, slot, blend],
            Head.TEMPO: masks.tempo[e, op, slot, tempo],
            Head.TARGET: masks.target[e, op, slot, target],
        }
        if not all(valid[head] for head in Head if RELEVANT[op, head]):
            return False
    return True


@pytest.fixture
def view() -> Callable[..., View]:
    return build_view


@pytest.fixture
def allowed() -> Callable[[Masks, Actions], bool]:
    return is_allowed


@pytest.fixture
def random_view() -> Callable[..., View]:
    """Return a function that draws views: every valid slot has some valid choice of each head that matters, often not all."""

    def draw(envs: int, seed: int) -> View:
        rng = np.random.default_rng(seed)
        base = build_view(np.zeros((envs, 4)), step=seed % 24, instance=np.arange(envs) * 7)

        def some(*shape: int) -> np.ndarray:
            mask = rng.random(shape) < 0.4
            np.put_along_axis(mask, rng.integers(shape[-1], size=(*shape[:-1], 1)), True, axis=-1)
            return mask

        slot = rng.random((envs, len(Op), 4)) < 0.4
        slot[:, Op.WAIT] = False
        op = slot.any(2)
        op[:, Op.WAIT] = True
        plantable = slot[:, Op.GERMINATE, :, None]
        masks = Masks(
            op,
            slot,
            plantable & some(envs, 4, len(MENU)),
            plantable & some(envs, 4, len(Blend)),
            slot[..., None] & some(envs, len(Op), 4, 5),
            slot[..., None] & some(envs, len(Op), 4, 4),
        )
        return base._replace(masks=masks)

    return draw
