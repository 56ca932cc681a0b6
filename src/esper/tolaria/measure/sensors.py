"""Estimate what a seed at a slot could learn, by growth sensors. E rows, S slots, N examples, F sensors.

Sensors are measured on a fixed sample of the train split, and the explained energies also on held-out examples. The positions
of a map count as examples. A feature beyond the true width of a row is exactly 0 and has no effect. A family of sensors is
computed where it is asked for: those of activations take a forward pass, `gradient` and `explained` a backward pass as well.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.config.tree import SENSOR_FAMILIES
from esper.leyline.data.keys import Purpose, key, uniform


class SensorInfo(NamedTuple):
    """Describes a column of the table of sensors."""

    name: str
    family: str
    unit: str
    meaning: str


_SLOPE, _ENERGY = ("gradient", "loss / weight"), ("explained", "(loss / stream)^2")
_ROWS = (
    ("participation", "participation", "1", "participation ratio of the stream / its width; 0 where it is constant"),
    ("participation_before", "participation", "1", "participation ratio of what a bypass reads / its width"),
    (
        "participation_inner",
        "inner",
        "1",
        "participation ratio of the inner features of the segment before the slot / width",
    ),
    ("dead", "dead", "1", "share of the segment's inner units that are active on under 1 % of examples"),
    ("unsaturated", "dead", "1", "share of the segment's inner units that are active on over 99 % of examples"),
    ("drift", "drift", "1", "|h - h0| / |h0| of the stream h, with h0 in the intact network, where the task has one"),
    ("drift_before", "drift", "1", "the same of what a bypass reads"),
    ("stream_rms", "gradient", "stream", "root mean square over examples of |h|"),
    ("gradient_rms", "gradient", "loss / stream", "root mean square over examples of |g|"),
    ("map_gradient_here", *_SLOPE, "gradient norm of a zero linear map that reads the stream"),
    ("map_gradient_before", *_SLOPE, "gradient norm of a zero linear map that reads what a bypass reads"),
    ("map_gradient_input", *_SLOPE, "gradient norm of a zero linear map that reads the host's input"),
    ("explained_here_linear", *_ENERGY, "energy of g explained by a linear map of the stream"),
    ("explained_here_relu", *_ENERGY, "energy of g explained by a hidden layer on the stream"),
    ("explained_before_linear", *_ENERGY, "energy of g explained by a linear map of what a bypass reads"),
    ("explained_before_relu", *_ENERGY, "energy of g explained by a hidden layer on what a bypass reads"),
    ("explained_input_relu", *_ENERGY, "energy of g explained by a hidden layer on the host's input"),
    ("heldout_here_linear", *_ENERGY, "explained_here_linear on held-out examples, with the same map"),
    ("heldout_here_relu", *_ENERGY, "explained_here_relu on held-out examples, with the same map"),
    ("heldout_before_linear", *_ENERGY, "explained_before_linear on held-out examples, with the same map"),
    ("heldout_before_relu", *_ENERGY, "explained_before_relu on held-out examples, with the same map"),
    ("heldout_input_relu", *_ENERGY, "explained_input_relu on held-out examples, with the same map"),
)
SENSORS = tuple(SensorInfo(*row) for row in _ROWS)
"""The columns of `growth_sensors`. Sensors of unit 1 are in [0, 1]; the drifts have no upper bound. The others span orders of
magnitude, and only the held-out ones can be negative."""


class Sample(NamedTuple):
    """Holds the activations at one slot for some examples."""

    stream: Tensor  # (E, N, D) stream at the slot, before any seed
    before: Tensor  # (E, N, Db) what a bypass reads
    input: Tensor  # (E, N, Di) input of the host
    inner: Tensor | None  # (E, N, R) inner features of that segment; None where the host does not provide them
    gradient: Tensor | None  # (E, N, D) gradient of each example's loss with respect to the stream; None if not taken
    real: Tensor | None  # (E, N) bool, False for padding; None where every example is real


class IntactStreams(NamedTuple):
    """Holds what flows at one slot of the intact networks for the fitted examples; 0 for padding, nan in rows without one."""

    stream: Tensor  # (E, N, D) stream at the slot
    before: Tensor  # (E, N, Db) what a bypass reads


class TrueWidths(NamedTuple):
    """Holds true widths at one slot, (E,) each, in the dtype of the samples. Features beyond are 0; `inner` 0 means none."""

    stream: Tensor
    before: Tensor
    input: Tensor
    inner: Tensor


@torch.no_grad()
def growth_sensors(
    fit: Sequence[Sample],
    held: Sequence[Sample],
    widths: Sequence[TrueWidths],
    taught: Sequence[IntactStreams] = (),
    families: Collection[str] = SENSOR_FAMILIES,
) -> Tensor:
    """Compute the sensors of some families, (E, S, F) in the order of `SENSORS`; those of other families are nan.

    fit, held, widths: one entry per slot; `fit` is the sample that is measured, `held` the held-out sample, which the family
    `explained` alone needs. taught: the same examples in the intact networks, one entry per slot, or none.

    Consecutive slots with the same `input` tensor share its factorisation. A sensor is nan where it does not exist, for
    example without inner features, and where its inputs are not finite.
    """
    table: list[Tensor] = []
    source: _Reading | None = None
    for slot, (train, width) in enumerate(zip(fit, widths, strict=True)):
        other = held[slot] if "explained" in families else None
        found: dict[str, Tensor] = {}
        if "participation" in families:
            found["participation"] = participation_ratio(train.stream, width.stream, train.real)
            found["participation_before"] = participation_ratio(train.before, width.before, train.real)
        if "inner" in families and train.inner is not None:
            ratio = participation_ratio(train.inner, width.inner, train.real)
            found["participation_inner"] = torch.where(width.inner > 0, ratio, torch.nan)
        if "dead" in families and train.inner is not None:
            found["dead"], found["unsaturated"] = activity(train.inner, width.inner, train.real)
        if "drift" in families and taught:
            found["drift"] = drift(_only(train.stream, train.real), taught[slot].stream)
            found["drift_before"] = drift(_only(train.before, train.real), taught[slot].before)
        if "gradient" in families or other is not None:
            shared = slot > 0 and train.input is fit[slot - 1].input
            if source is None or not shared or (other is not None and other.input is not held[slot - 1].input):
                source = _read("input", train, other, width)
            found |= _of_gradients(train, other, width, source)
        absent = torch.full_like(train.stream[:, 0, 0], torch.nan)
        columns = [found.get(sensor.name, absent) if sensor.family in families else absent for sensor in SENSORS]
        table.append(torch.stack(columns, 1))
    return torch.stack(table, 1)


def participation_ratio(h: Tensor, width: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """Compute tr(S)^2 / tr(S^2) of the covariance S of features, divided by their number: h (E, N, D) -> (E,) in [0, 1].

    The ratio is 1 for uncorrelated features of equal variance, 1 / D for features on a line (Gao et al., "A theory of
    multineuronal dimensionality", 2017, equation 4), and 0 for features that are constant up to rounding.

    width: (E,) true number of features; None is D. real: (E, N) bool, the examples that count; None is all.
    """
    count = h.shape[1] if real is None else real.sum(1)[:, None, None]
    kept = _only(h, real)
    mean = kept.sum(1, keepdim=True) / count
    # Multiplying by 1 and 0 takes a fifth of the time of filling by a mask, and the mean is finite if the row is.
    gap = kept - mean if real is None else torch.addcmul(kept, mean, real[:, :, None].to(h.dtype), value=-1)
    centred = _aligned(gap)
    scatter = centred.mT @ centred
    trace = scatter.diagonal(dim1=1, dim2=2).sum(1)
    # Division by the trace keeps very small and very large streams within the range of float32.
    dimension = (scatter / trace[:, None, None]).square().sum((1, 2)).reciprocal()
    rounding = (count * mean.square()).sum((1, 2)) * (32 * torch.finfo(h.dtype).eps) ** 2
    return torch.where(trace <= rounding, 0, dimension / (h.shape[2] if width is None else width))


def activity(z: Tensor, width: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the shares (E,) of dead units, z > 0 on under 1 % of examples, and of unsaturated units, z > 0 on over 99 %.

    A dead unit passes on nothing, and an unsaturated unit is linear; both reduce what the segment can compute.

    z: (E, N, R). width: (E,) true number of units; padded units are not counted. real: as in `participation_ratio`. The
    shares are nan where z is not finite, and where there are no units.
    """
    active = ((z > 0) if real is None else (z > 0) & real[:, :, None]).sum(1)
    count = z.shape[1] if real is None else real.sum(1, keepdim=True)
    there = torch.arange(z.shape[2], device=z.device) < width[:, None]
    dead, unsaturated = (100 * active < count) & there, (100 * active > 99 * count) & there
    # nan > 0 is False, so a unit of nan would count as dead.
    total = torch.where(_only(z, real).sum((1, 2)).isfinite(), width, torch.nan).to(z.dtype)
    return dead.sum(1) / total, unsaturated.sum(1) / total


def explained(
    features: Tensor,
    gradient: Tensor,
    features_held: Tensor,
    gradient_held: Tensor,
    width: Tensor | int,
    count: Tensor,
    count_held: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the energy of the loss gradient that a ridge regression on features explains, on the fitted and held-out sample.

        W = argmin_W  mean |g - F W|^2 + lambda |W|^2,     lambda = 1e-2 * mean of the diagonal of F^T F / N + 1e-6
        e = mean |g|^2 - mean |g - F W|^2

    features: (E, N, f), with a column of ones. gradient: (E, N, D). The held-out tensors have M examples in place of N.
    width: number of true features without the column of ones. count, count_held: (E,) real examples; padding is 0.

    Returns two tensors (E,). The second is negative where the regression fits noise. To first order, a step of a new
    layer can lower the loss by the energy that its features explain, so the energy measures the expressivity that the
    network lacks and the seed offers (Verbockhaven et al., "Growing Tiny Networks: Spotting Expressivity Bottlenecks and
    Fixing Them Optimally", TMLR 2024).

    With (A + lambda) W = B the first energy is tr(W^T B) + lambda |W|^2, a sum of nonnegative terms. The condition number
    of A + lambda is at most 100 (f + 1), so the error in float32 is under 1e-6, also for features of rank one.
    """
    moments = torch.cat([features.mT @ features, features.mT @ gradient], 2) / count[:, None, None]
    f = features.shape[2]
    square, cross = moments[..., :f], moments[..., f:]
    ridge = 1e-2 * square.diagonal(dim1=1, dim2=2).sum(1) / (width + 1) + 1e-6
    penalty = ridge[:, None, None] * torch.eye(f, dtype=square.dtype, device=square.device)
    # `cholesky` would read the device to check for failure. `cholesky_ex` fails only for nan, which stays nan.
    factor, _ = torch.linalg.cholesky_ex(square + penalty)
    halfway = torch.linalg.solve_triangular(factor, cross, upper=False)
    w = torch.linalg.solve_triangular(factor.mT, halfway, upper=True)
    energy = (w * cross).sum((1, 2)) + ridge * w.square().sum((1, 2))
    predicted = features_held @ w
    held = (predicted * (2 * gradient_held - predicted)).sum((1, 2)) / count_held
    return energy, held


RELU_UNITS = 24


@lru_cache
def relu_expansion(width: int) -> NDArray[np.float64]:
    """Return a fixed random hidden layer on [1, u] for u of mean square 1, as a matrix (1 + width, 1 + RELU_UNITS).

    The first unit is the constant 1. Weights are normal with standard deviation 2, and the caller divides them by the root of
    the true width. Biases are normal with standard deviation 1/2. Every weight has its own key, so the first rows of a wider
    layer are those of a narrower one. Normal draws are made by the method of Box and Muller ("A note on the generation of
    random normal deviates", 1958).
    """
    keys = key(Purpose.SENSOR, np.arange(1 + width)[:, None], np.arange(RELU_UNITS))
    radius, angle = uniform(keys), uniform(key(keys, 1))
    normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
    layer = np.zeros((1 + width, 1 + RELU_UNITS))
    layer[0, 0] = 1
    layer[0, 1:] = normal[0] / 2
    layer[1:, 1:] = normal[1:] * 2
    return layer


class _Reading(NamedTuple):
    """Holds the features that a seed reads at a tap, divided by their rms on the fitted sample. Column 0 is 1 on real examples.

    The features have additional columns of 0, from `_aligned`.
    """

    linear: Tensor  # (E, N, 1 + W)
    rms: Tensor  # (E,)
    # `linear` (E, M, 1 + W) on held-out examples, and a hidden layer on both samples
    held: tuple[Tensor, Tensor, Tensor] | None


def _read(tap: Literal["stream", "before", "input"], fit: Sample, held: Sample | None, widths: TrueWidths) -> _Reading:
    u: Tensor = _only(getattr(fit, tap), fit.real)
    width: Tensor = getattr(widths, tap)
    count = u.shape[1] if fit.real is None else fit.real.sum(1)
    rms = (u.square().sum((1, 2)) / (count * width)).sqrt()
    scale = (rms + 1e-6).reciprocal()[:, None, None]
    linear = _design(u * scale, fit.real)
    if held is None:
        return _Reading(linear, rms, None)
    linear_held = _design(_only(getattr(held, tap), held.real) * scale, held.real)
    layer = torch.from_numpy(relu_expansion(u.shape[2])).to(u.device, u.dtype, non_blocking=True)
    layer = torch.cat([layer[:1].expand(len(u), 1, -1), layer[1:] / width.sqrt()[:, None, None]], 1)
    layer = F.pad(_aligned(layer), (0, 0, 0, linear.shape[2] - layer.shape[1]))
    # One product per row, because the rounding in a single product over all rows depends on the number of rows.
    hidden, hidden_held = (torch.bmm(features, layer).relu_() for features in (linear, linear_held))
    return _Reading(linear, rms, (linear_held, hidden, hidden_held))


def _of_gradients(fit: Sample, held: Sample | None, width: TrueWidths, source: _Reading) -> dict[str, Tensor]:
    """Return the sensors of the family `gradient`, and with a held-out sample those of `explained`. source: the tap `input`."""
    counts, g = _count(fit), _gradient(fit)
    here, before = _read("stream", fit, held, width), _read("before", fit, held, width)
    found = {"stream_rms": here.rms * width.stream.sqrt(), "gradient_rms": (g.square().sum((1, 2)) / counts).sqrt()}
    for name, tap, read in (("here", here, width.stream), ("before", before, width.before), ("input", source, None)):
        # A larger norm means that a seed whose last map starts at 0 lowers the loss faster (Evci et al., "GradMax: Growing
        # Neural Networks using Gradient Information", ICLR 2022): || F^T g / N || of a linear map whose weights are 0.
        norm = torch.linalg.vector_norm(tap.linear[:, :, 1:].mT @ g, dim=(1, 2))
        found[f"map_gradient_{name}"] = norm * (tap.rms + 1e-6) / counts
        if held is None:
            continue
        assert tap.held is not None, "every tap is read with the held-out sample"
        g_held, counts_held = _gradient(held), _count(held)
        linear_held, hidden, hidden_held = tap.held
        pairs: dict[str, tuple[Tensor, Tensor, Tensor | int]] = {"relu": (hidden, hidden_held, RELU_UNITS)}
        if read is not None:
            pairs["linear"] = (tap.linear, linear_held, read)
        for kind, (features, features_held, size) in pairs.items():
            found[f"explained_{name}_{kind}"], found[f"heldout_{name}_{kind}"] = explained(
                features, g, features_held, g_held, size, counts, counts_held
            )
    return found


def _gradient(sample: Sample) -> Tensor:
    assert sample.gradient is not None, "the families `gradient` and `explained` need a backward pass"
    return _aligned(_only(sample.gradient, sample.real))


def _design(u: Tensor, real: Tensor | None) -> Tensor:
    """Return [1, u], with 0 for padding: (E, N, W) -> (E, N, 1 + W), and the columns of `_aligned`."""
    one = u.new_ones(*u.shape[:2], 1) if real is None else real[:, :, None].to(u.dtype)
    return torch.cat([one, u, u.new_zeros(*u.shape[:2], -(1 + u.shape[2]) % 4)], 2)


def drift(h: Tensor, intact: Tensor) -> Tensor:
    """Compute |h - h0| / |h0| (E,) of activations h (E, N, D) and the intact network's, normed over examples and features."""
    size = torch.linalg.vector_norm(intact, dim=(1, 2))
    change: Tensor = torch.linalg.vector_norm(h - intact, dim=(1, 2))
    return change / size.clamp_min(torch.finfo(h.dtype).tiny)


def _count(sample: Sample) -> Tensor:
    h = sample.stream
    return sample.real.sum(1) if sample.real is not None else torch.full_like(h[:, 0, 0], h.shape[1])


def _only(values: Tensor, real: Tensor | None) -> Tensor:
    """Return (E, N, W) with 0 in place of padding."""
    return values if real is None else values.masked_fill(~real[:, :, None], 0)


def _aligned(values: Tensor) -> Tensor:
    """Pad (E, N, W) with columns of 0 to a multiple of 4 columns.

    The rounding of a batched product depends on the alignment of each result in memory. Without the padding, a row would
    depend on the number of rows before it.
    """
    spare = -values.shape[2] % 4
    return F.pad(values, (0, spare)) if spare else values
