"""Growth sensors: whether a seed at a slot could learn anything. E rows, S slots, N examples, F sensors.

Everything is measured on a fixed sample of the train split, what a seed could explain also on held-out examples; the
positions of a map are examples. A feature beyond a row's true width is exactly 0 and changes nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.keys import Purpose, key, uniform


class SensorInfo(NamedTuple):
    """What one column of a sensor table holds."""

    name: str
    unit: str
    meaning: str


SENSORS: tuple[SensorInfo, ...] = (
    SensorInfo("participation", "1", "participation ratio of the stream / its width; 0 where it is constant"),
    SensorInfo("participation_inner", "1", "likewise of the inner features of the segment in front of the slot"),
    SensorInfo("dead", "1", "share of the segment's inner units that are active on under 1 % of examples"),
    SensorInfo("unsaturated", "1", "share of the segment's inner units that are active on over 99 % of examples"),
    SensorInfo("stream_rms", "stream", "root mean square over examples of |h|"),
    SensorInfo("gradient_rms", "loss / stream", "root mean square over examples of |g|"),
    SensorInfo("map_gradient_here", "loss / weight", "gradient norm of a zero linear map that reads the stream"),
    SensorInfo("map_gradient_before", "loss / weight", "likewise of one that reads what entered the segment"),
    SensorInfo("map_gradient_input", "loss / weight", "likewise of one that reads the host's input"),
    SensorInfo("explained_here_linear", "(loss / stream)^2", "energy of g that a linear map of the stream explains"),
    SensorInfo("explained_here_relu", "(loss / stream)^2", "likewise one hidden layer on the stream"),
    SensorInfo("explained_before_linear", "(loss / stream)^2", "likewise a linear map of what entered the segment"),
    SensorInfo("explained_before_relu", "(loss / stream)^2", "likewise one hidden layer on what entered the segment"),
    SensorInfo("explained_input_relu", "(loss / stream)^2", "likewise one hidden layer on the host's input"),
    SensorInfo("heldout_here_linear", "(loss / stream)^2", "what the same map explains of held-out examples"),
    SensorInfo("heldout_here_relu", "(loss / stream)^2", "likewise"),
    SensorInfo("heldout_before_linear", "(loss / stream)^2", "likewise"),
    SensorInfo("heldout_before_relu", "(loss / stream)^2", "likewise"),
    SensorInfo("heldout_input_relu", "(loss / stream)^2", "likewise"),
)
"""The columns of `growth_sensors`. Those without a unit are in [0, 1]; the others span decades, and none is negative but
the held-out ones."""


class Sample(NamedTuple):
    """What one slot sees of some examples."""

    stream: Tensor  # (E, N, D) at the slot, in front of any seed
    before: Tensor  # (E, N, Db) as it entered the segment in front of the slot
    input: Tensor  # (E, N, Di) of the host
    inner: Tensor | None  # (E, N, R) features inside that segment; None where the host does not offer them
    gradient: Tensor  # (E, N, D) of the sum over examples of the loss, by the stream: one loss gradient an example
    real: Tensor | None  # (E, N) bool, False where a row has no such example; None when all are real


class Widths(NamedTuple):
    """True widths at one slot, in the dtype of the samples; features beyond them are 0."""

    stream: Tensor  # (E,)
    before: Tensor  # (E,)
    input: Tensor  # (E,)
    inner: Tensor  # (E,) 0 where there are none


@torch.no_grad()
def growth_sensors(fit: Sequence[Sample], held: Sequence[Sample], widths: Sequence[Widths]) -> Tensor:
    """Every sensor of every row and slot: a sample to measure on and one held out, one of each a slot -> (E, S, F).

    Slots that are given one and the same `input` tensor share what is worked out from it. A quantity is nan where it does
    not exist, as those of inner features where there are none, or where what it is made of is not finite.
    """
    table = []
    source: _Reading | None = None
    for slot, (train, other, width) in enumerate(zip(fit, held, widths, strict=True)):
        counts = _count(train), _count(other)
        g, g_held = (_aligned(_only(sample.gradient, sample.real)) for sample in (train, other))
        here = _read(train.stream, other.stream, width.stream, train.real, other.real)
        before = _read(train.before, other.before, width.before, train.real, other.real)
        if source is None or train.input is not fit[slot - 1].input or other.input is not held[slot - 1].input:
            source = _read(train.input, other.input, width.input, train.real, other.real)
        found = {
            "participation": participation_ratio(train.stream, width.stream, train.real),
            "stream_rms": here.rms * width.stream.sqrt(),
            "gradient_rms": (g.square().sum((1, 2)) / counts[0]).sqrt(),
        }
        found |= _of_inner_features(train, width.inner)
        for name, tap in (("here", here), ("before", before), ("input", source)):
            found[f"map_gradient_{name}"] = _map_gradient(tap, g, counts[0])
            found |= _pair(f"{name}_relu", explained(tap.relu, g, tap.relu_held, g_held, RELU_UNITS, *counts))
        for name, tap, read in (("here", here, width.stream), ("before", before, width.before)):
            found |= _pair(f"{name}_linear", explained(tap.linear, g, tap.linear_held, g_held, read, *counts))
        table.append(torch.stack([found[sensor.name] for sensor in SENSORS], 1))
    return torch.stack(table, 1)


def participation_ratio(h: Tensor, width: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """tr(S)^2 / tr(S^2) of the covariance S of features, divided by their number: h (E, N, D) -> (E,) in [0, 1].

    1 when the features are uncorrelated and equally large, 1 / D when they lie on a line (Gao et al., "A theory of
    multineuronal dimensionality", 2017, equation 4), and 0 when they are constant up to rounding: no direction is left.
    `width` (E,) is the true number of features, `real` (E, N) bool which examples count; all where they are not given.
    """
    count = h.shape[1] if real is None else real.sum(1)[:, None, None]
    mean = _only(h, real).sum(1, keepdim=True) / count
    centred = _aligned(_only(h - mean, real))
    scatter = centred.mT @ centred
    trace = scatter.diagonal(dim1=1, dim2=2).sum(1)
    # Relative to the trace, so that neither a tiny nor a huge stream leaves the range of float32.
    dimension = (scatter / trace[:, None, None]).square().sum((1, 2)).reciprocal()
    rounding = (count * mean.square()).sum((1, 2)) * (32 * torch.finfo(h.dtype).eps) ** 2
    return torch.where(trace <= rounding, 0, dimension / (h.shape[2] if width is None else width))


def activity(z: Tensor, width: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Shares (E,) of dead units, z > 0 on under 1 % of examples, and of unsaturated ones, on over 99 %: z (E, N, R).

    A unit of the first kind passes nothing on, one of the second is linear: either way the segment computes less than
    its width. `width` (E,) is the true number of units; a padded one is 0 and not counted. nan where features are not
    finite or there are none.
    """
    active = ((z > 0) if real is None else (z > 0) & real[:, :, None]).sum(1)
    count = z.shape[1] if real is None else real.sum(1, keepdim=True)
    there = torch.arange(z.shape[2], device=z.device) < width[:, None]
    dead, unsaturated = (100 * active < count) & there, (100 * active > 99 * count) & there
    # nan > 0 is False, which would pass for a dead unit.
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
    """Energy of the loss gradient that a ridge map of features explains: on the sample it is fitted to, and held out.

        W = argmin_W  mean |g - F W|^2 + lambda |W|^2,     lambda = 1e-2 * mean of the diagonal of F^T F / N + 1e-6
        e = mean |g|^2 - mean |g - F W|^2

    features (E, N, f) with a column of ones, gradient (E, N, D); likewise held out (E, M, .); width the number of true
    features but the ones, counts (E,) of real examples, beyond which features and gradients are 0. Returns (E,), (E,).
    The second is negative where the map fits noise. A step of a new layer can lower the loss to first order by what its
    features explain of g, so this is the expressivity that the network lacks and the seed offers (Verbockhaven et al.,
    "Growing Tiny Networks: Spotting Expressivity Bottlenecks and Fixing Them Optimally", TMLR 2024).

    With (A + lambda) W = B the first energy is tr(W^T B) + lambda |W|^2, a sum of what is not negative. The condition of
    A + lambda is at most 100 (f + 1), so that float32 is enough: within 1e-6 of float64 also where features have rank one.
    """
    moments = torch.cat([features.mT @ features, features.mT @ gradient], 2) / count[:, None, None]
    f = features.shape[2]
    square, cross = moments[..., :f], moments[..., f:]
    ridge = 1e-2 * square.diagonal(dim1=1, dim2=2).sum(1) / (width + 1) + 1e-6
    penalty = ridge[:, None, None] * torch.eye(f, dtype=square.dtype, device=square.device)
    # The checked form of the factorisation reads the device. It fails only where it is given nan, which then stays nan.
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
    """A fixed random hidden layer over [1, u] with u of mean square 1: (1 + width, 1 + RELU_UNITS), the first unit 1.

    Weights are normal with standard deviation 2, to be divided by the root of the true width, biases with 1/2. Every
    weight has a key of its own, so that a wider layer begins with the narrower one. The normal draws are those of Box
    and Muller ("A note on the generation of random normal deviates", 1958).
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
    """What a tap offers a seed. Features are divided by their rms on the fit sample; column 0 is 1 on real examples.

    Behind what the shapes say there are columns of 0, as `_aligned` adds them.
    """

    linear: Tensor  # (E, N, 1 + W)
    linear_held: Tensor  # (E, M, 1 + W)
    relu: Tensor  # (E, N, 1 + RELU_UNITS)
    relu_held: Tensor  # (E, M, 1 + RELU_UNITS)
    rms: Tensor  # (E,)


def _read(u: Tensor, held: Tensor, width: Tensor, real: Tensor | None, real_held: Tensor | None) -> _Reading:
    """u (E, N, W), held (E, M, W), width (E,), real (E, N) and (E, M)."""
    u = _only(u, real)
    count = u.shape[1] if real is None else real.sum(1)
    rms = (u.square().sum((1, 2)) / (count * width)).sqrt()
    scale = (rms + 1e-6).reciprocal()[:, None, None]
    linear, linear_held = _design(u * scale, real), _design(_only(held, real_held) * scale, real_held)
    layer = torch.from_numpy(relu_expansion(u.shape[2])).to(u.device, u.dtype, non_blocking=True)
    layer = torch.cat([layer[:1].expand(len(u), 1, -1), layer[1:] / width.sqrt()[:, None, None]], 1)
    layer = F.pad(_aligned(layer), (0, 0, 0, linear.shape[2] - layer.shape[1]))
    # One product a row: in one product over all rows, a row's rounding would depend on how many there are.
    return _Reading(linear, linear_held, torch.bmm(linear, layer).relu_(), torch.bmm(linear_held, layer).relu_(), rms)


def _design(u: Tensor, real: Tensor | None) -> Tensor:
    """[1, u], all 0 where an example is not real: (E, N, W) -> (E, N, 1 + W), and the columns of `_aligned`."""
    one = u.new_ones(*u.shape[:2], 1) if real is None else real[:, :, None].to(u.dtype)
    return torch.cat([one, u, u.new_zeros(*u.shape[:2], -(1 + u.shape[2]) % 4)], 2)


def _map_gradient(tap: _Reading, gradient: Tensor, count: Tensor) -> Tensor:
    """|| F^T g / N ||, the gradient norm of a linear map from the tap that is 0 now: (E,).

    The larger, the faster a seed whose last map starts at 0 lowers the loss (Evci et al., "GradMax: Growing Neural
    Networks using Gradient Information", ICLR 2022).
    """
    norm: Tensor = torch.linalg.vector_norm(tap.linear[:, :, 1:].mT @ gradient, dim=(1, 2))
    return norm * (tap.rms + 1e-6) / count


def _of_inner_features(sample: Sample, width: Tensor) -> dict[str, Tensor]:
    z = sample.inner
    if z is None:
        absent = torch.full_like(width, torch.nan)
        return {"participation_inner": absent, "dead": absent, "unsaturated": absent}
    dead, unsaturated = activity(z, width, sample.real)
    ratio = torch.where(width > 0, participation_ratio(z, width, sample.real), torch.nan)
    return {"participation_inner": ratio, "dead": dead, "unsaturated": unsaturated}


def _pair(name: str, energies: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {f"explained_{name}": energies[0], f"heldout_{name}": energies[1]}


def _count(sample: Sample) -> Tensor:
    """(E,) real examples."""
    h = sample.stream
    return sample.real.sum(1) if sample.real is not None else torch.full_like(h[:, 0, 0], h.shape[1])


def _only(values: Tensor, real: Tensor | None) -> Tensor:
    """(E, N, W) with every example that is not real at 0, whatever it held."""
    return values if real is None else values.masked_fill(~real[:, :, None], 0)


def _aligned(values: Tensor) -> Tensor:
    """(E, N, W) with columns of 0 behind it, so that W is a multiple of 4.

    A batch of products rounds a row by where in memory its result lies, unless every result has a whole number of the
    processor's words: without this, a row would depend on how many are in front of it.
    """
    spare = -values.shape[2] % 4
    return F.pad(values, (0, spare)) if spare else values
