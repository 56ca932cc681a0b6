"""Test growth sensors: against one network at a time written plainly, what padding changes, and the cases one can foretell."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from esper.leyline.config.tree import SENSOR_FAMILIES
from esper.tolaria.measure import sensors
from esper.tolaria.measure.sensors import (
    RELU_UNITS,
    SENSORS,
    Sample,
    TrueWidths,
    activity,
    participation_ratio,
    relu_expansion,
)

E, S, N, M = 5, 3, 60, 40
NAMES = [sensor.name for sensor in SENSORS if not sensor.name.startswith("drift")]
BLIND = [index for index, sensor in enumerate(SENSORS) if sensor.name in NAMES]


def growth_sensors(*parts):
    """Compute the sensors that need no intact network."""
    return sensors.growth_sensors(*parts)[..., BLIND]


WIDTHS = {
    "stream": [[6, 5, 6, 4, 2]] * S,
    "before": [[6, 5, 3, 4, 2], [6, 5, 6, 4, 2], [6, 5, 6, 4, 1]],
    "input": [[9, 4, 9, 7, 3]] * S,
    "inner": [[7, 2, 3, 7, 1], [7, 7, 1, 7, 5], [2, 7, 7, 7, 1]],
}
REAL = [N, 37, N, 50, 22], [M, 33, 20, M, 31]


def normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw(seed, examples, dtype=torch.float64):
    """Draw what the slots of one network see of some examples; a feature beyond its width is 0."""
    weight, noise = normal(0), normal(seed)

    def true(name, s, values):
        return values * (torch.arange(values.shape[2]) < torch.tensor(WIDTHS[name][s])[:, None, None])

    x = true("input", 0, noise(E, examples, 9))
    before, samples = x @ weight(9, 6) / 3 + 0.5, []
    for s in range(S):
        before = true("before", s, before)
        inner = true("inner", s, (before @ weight(6, 7) / 2 + 0.3).relu())
        stream = true("stream", s, inner @ weight(7, 6) / 3 + 1)
        gradient = true("stream", s, 0.1 * (stream @ weight(6, 6)).tanh() + 0.05 * noise(E, examples, 6))
        samples.append(Sample(*(t.to(dtype) for t in (stream, before, x, inner, gradient)), None))
        samples[-1] = samples[-1]._replace(input=samples[0].input)
        before = stream
    return samples


def truth(dtype=torch.float64):
    return [TrueWidths(*(torch.tensor(WIDTHS[name][s], dtype=dtype) for name in TrueWidths._fields)) for s in range(S)]


@pytest.fixture
def samples():
    """Draw two samples of every slot, without and with rows that have fewer examples."""
    return draw(1, N), draw(2, M)


FIELDS = Sample._fields[:5]


def each(sample, change):
    """Change every tensor of a sample."""
    return sample._replace(**{field: change(getattr(sample, field)) for field in FIELDS})


def with_padding(samples, counts, fill=0.0):
    """Return the same samples, of which only the first examples of each row are real."""
    real = torch.arange(samples[0].stream.shape[1]) < torch.tensor(counts)[:, None]
    return [each(s, lambda values: torch.where(real[..., None], values, fill))._replace(real=real) for s in samples]


def plain_ridge(f, g, f_held, g_held):
    """Fit least squares with one row of the ridge for each feature; the energy is taken from the residuals."""
    f, f_held = (np.concatenate([np.ones((len(a), 1)), a], 1) for a in (f, f_held))
    n, width = f.shape
    ridge = 1e-2 * np.mean([np.mean(f[:, i] ** 2) for i in range(width)]) + 1e-6
    rows = np.concatenate([f, np.sqrt(ridge * n) * np.eye(width)])
    targets = np.concatenate([g, np.zeros((width, g.shape[1]))])
    w = np.linalg.lstsq(rows, targets, rcond=None)[0]
    return [np.mean(np.sum(y**2, 1) - np.sum((y - a @ w) ** 2, 1)) for a, y in ((f, g), (f_held, g_held))]


def plain_participation(h):
    values = np.linalg.eigvalsh(np.cov(h.T).reshape(h.shape[1], h.shape[1]))
    return values.sum() ** 2 / (values**2).sum() / h.shape[1] if h.std() > 1e-12 else 0.0


def plain(train, held, row, s, counts):
    """Compute the sensors of one slot of one network, cut to what is real of it."""

    def cut(sample, name, count):
        return getattr(sample, name)[row, :count].double().numpy()[:, : WIDTHS[name][s][row]]

    h, before, x, z = (cut(train, name, counts[0]) for name in ("stream", "before", "input", "inner"))
    h_held, before_held, x_held = (cut(held, name, counts[1]) for name in ("stream", "before", "input"))
    width = WIDTHS["stream"][s][row]
    g, g_held = (t.gradient[row, :n].double().numpy()[:, :width] for t, n in ((train, counts[0]), (held, counts[1])))
    found = {"participation": plain_participation(h), "participation_inner": plain_participation(z)}
    found["participation_before"] = plain_participation(before)
    dead = unsaturated = 0
    for unit in range(z.shape[1]):
        active = sum(value > 0 for value in z[:, unit]) / len(z)
        dead, unsaturated = dead + (active < 0.01), unsaturated + (active > 0.99)
    found |= {"dead": dead / z.shape[1], "unsaturated": unsaturated / z.shape[1]}
    found["stream_rms"] = np.sqrt(np.mean([vector @ vector for vector in h]))
    found["gradient_rms"] = np.sqrt(np.mean([vector @ vector for vector in g]))
    for name, tap, tap_held in (("here", h, h_held), ("before", before, before_held), ("input", x, x_held)):
        whole = np.zeros((tap.shape[1], g.shape[1]))
        for vector, gradient in zip(tap, g, strict=True):
            whole += np.outer(vector, gradient) / len(g)
        found[f"map_gradient_{name}"] = np.linalg.norm(whole)
        unit = np.sqrt(np.mean(tap**2)) + 1e-6
        layer = relu_expansion(tap.shape[1])
        hidden = [
            np.maximum(a / unit @ (layer[1:, 1:] / np.sqrt(tap.shape[1])) + layer[0, 1:], 0) for a in (tap, tap_held)
        ]
        for kind, (a, b) in {"linear": (tap / unit, tap_held / unit), "relu": hidden}.items():
            energies = plain_ridge(a, g, b, g_held)
            found[f"explained_{name}_{kind}"], found[f"heldout_{name}_{kind}"] = energies
    return found


@pytest.mark.parametrize("counts", [None, REAL])
def test_every_sensor_is_that_of_one_network_written_plainly(samples, counts):
    train, held = samples
    if counts is not None:
        train, held = with_padding(train, counts[0]), with_padding(held, counts[1])
    found = growth_sensors(train, held, truth()).numpy()
    real = ([N] * E, [M] * E) if counts is None else counts
    for row in range(E):
        for s in range(S):
            alone = plain(train[s], held[s], row, s, (real[0][row], real[1][row]))
            for name, value in zip(NAMES, found[row, s], strict=True):
                assert value == pytest.approx(alone[name], rel=1e-9, abs=1e-12), (name, row, s)


def test_in_float32_every_sensor_is_within_rounding_of_float64(samples):
    exact = growth_sensors(*samples, truth())
    cast = [[each(s, torch.Tensor.float) for s in part] for part in samples]
    found = growth_sensors(*cast, truth(torch.float32))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-7)


def test_features_that_are_padding_change_nothing(samples):
    wider = [[each(s, lambda values: pad(values, (0, 3))) for s in part] for part in samples]
    found = growth_sensors(*wider, truth())
    torch.testing.assert_close(found, growth_sensors(*samples, truth()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fill", [0.0, 7.0, float("nan")])
def test_examples_that_are_padding_change_nothing_whatever_they_hold(samples, fill):
    found = growth_sensors(with_padding(samples[0], REAL[0], fill), with_padding(samples[1], REAL[1], fill), truth())
    for row in range(E):
        rows = [row, row]  # one row alone would take other kernels
        short = [
            [each(s, lambda values: values[rows, : counts[row]]) for s in part]  # noqa: B023
            for part, counts in zip(samples, REAL, strict=True)
        ]
        alone = growth_sensors(*short, [TrueWidths(*(w[rows] for w in width)) for width in truth()])
        torch.testing.assert_close(found[row], alone[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_do_not_touch(dtype, padded):
    parts = draw(1, N, dtype), draw(2, M, dtype)
    if padded:
        parts = tuple(with_padding(part, counts) for part, counts in zip(parts, REAL, strict=True))
    whole = growth_sensors(*parts, truth(dtype))
    for rows in ([0, 1], [3, 2], [4, 0, 2], [1, 1, 1, 3]):
        some = [[Sample(*(f[rows] if f is not None else None for f in s)) for s in part] for part in parts]
        found = growth_sensors(*some, [TrueWidths(*(w[rows] for w in width)) for width in truth(dtype)])
        assert torch.equal(found, whole[rows])


def test_a_row_that_is_not_finite_is_nan_and_leaves_the_others_as_they_are(samples):
    exact = growth_sensors(*samples, truth())
    hurt = (torch.arange(E) == 1)[:, None, None] & (torch.arange(N) == 4)[:, None]
    train = [each(s, lambda values: values.masked_fill(hurt, torch.nan)) for s in samples[0]]
    found = growth_sensors(train, samples[1], truth())
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3, 4]], exact[[0, 2, 3, 4]])


def test_slots_share_what_one_input_tensor_gives_and_do_not_mix_up_two(samples):
    train, held = samples
    copied = [s._replace(input=s.input.clone()) for s in train]
    assert torch.equal(growth_sensors(train, held, truth()), growth_sensors(copied, held, truth()))
    other = [*train[:2], train[2]._replace(input=train[2].input.flip(1))]
    found = growth_sensors(other, held, truth())
    assert torch.equal(found[:, :2], growth_sensors(train, held, truth())[:, :2])
    assert (found[:, 2] != growth_sensors(train, held, truth())[:, 2]).any()


def test_without_inner_features_their_sensors_are_absent_and_the_others_stay(samples):
    train = [s._replace(inner=None) for s in samples[0]]
    found, whole = growth_sensors(train, samples[1], truth()), growth_sensors(*samples, truth())
    inner = torch.tensor(["inner" in n or n in ("dead", "unsaturated") for n in NAMES])
    assert found[..., inner].isnan().all()
    assert torch.equal(found[..., ~inner], whole[..., ~inner])


def test_in_a_row_whose_host_offers_no_inner_features_their_sensors_are_absent(samples):
    width = [w._replace(inner=torch.where(torch.arange(E) == 2, 0, w.inner)) for w in truth()]
    train = [s._replace(inner=s.inner * (torch.arange(E) != 2)[:, None, None]) for s in samples[0]]
    found, whole = growth_sensors(train, samples[1], width), growth_sensors(*samples, truth())
    inner = [NAMES.index(name) for name in ("participation_inner", "dead", "unsaturated")]
    assert found[2][:, inner].isnan().all()
    rest = [0, 1, 3, 4]
    assert torch.equal(found[rest], whole[rest])


def test_drift_is_the_change_relative_to_the_intact_network_and_absent_without_one(samples):
    train, held = samples
    other = draw(3, N)
    taught = [sensors.IntactStreams(s.stream, s.before) for s in other]
    found = sensors.growth_sensors(train, held, truth(), taught)
    names = [sensor.name for sensor in SENSORS]
    for s, (mine, intact) in enumerate(zip(train, other, strict=True)):
        for name, field in (("drift", "stream"), ("drift_before", "before")):
            h, h0 = (getattr(of, field).numpy() for of in (mine, intact))
            expected = [np.linalg.norm(h[row] - h0[row]) / np.linalg.norm(h0[row]) for row in range(E)]
            np.testing.assert_allclose(found[:, s, names.index(name)], expected, rtol=1e-12)
    absent = sensors.growth_sensors(train, held, truth())
    assert absent[..., [names.index("drift"), names.index("drift_before")]].isnan().all()
    assert torch.equal(absent[..., BLIND], found[..., BLIND])


@pytest.mark.parametrize("family", SENSOR_FAMILIES)
def test_a_family_alone_has_the_figures_that_it_has_among_all(samples, family):
    train, held = samples
    taught = [sensors.IntactStreams(s.stream, s.before) for s in draw(3, N)]
    whole = sensors.growth_sensors(train, held, truth(), taught)
    bare = [s._replace(gradient=s.gradient if family in ("gradient", "explained") else None) for s in train]
    alone = sensors.growth_sensors(bare, held if family == "explained" else [], truth(), taught, (family,))
    own = [index for index, sensor in enumerate(SENSORS) if sensor.family == family]
    assert own
    assert torch.equal(alone[..., own], whole[..., own])
    assert alone[..., [index for index in range(len(SENSORS)) if index not in own]].isnan().all()


def test_the_segment_that_is_a_bottleneck_has_the_lowest_participation():
    noise = normal(1)
    for narrow in range(4):
        h, ratios = noise(2, 300, 16), []
        for segment in range(4):
            inner = 2 if segment == narrow else 16
            h = (h @ noise(16, inner) / 4).relu() @ noise(inner, 16) / inner**0.5
            ratios.append(participation_ratio(h)[0].item())
        assert min(range(4), key=ratios.__getitem__) >= narrow
        assert all(ratio > 1.5 * ratios[narrow] for ratio in ratios[:narrow])
        assert ratios[narrow] <= 2 / 16


def test_participation_is_1_for_white_features_1_over_the_width_on_a_line_and_0_where_nothing_varies():
    white = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    line = torch.randn(50, 1) * torch.tensor([1.0, 2, -3, 0.1])
    constant = torch.full((77, 5), 0.1) * torch.arange(5)
    assert participation_ratio(torch.stack([white] * 2)) == pytest.approx(1)
    assert participation_ratio(torch.stack([line, line + 9])) == pytest.approx(1 / 4)
    assert participation_ratio(torch.stack([constant] * 2)).tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_participation_does_not_depend_on_the_scale(scale):
    h = torch.randn(2, 50, 6)
    torch.testing.assert_close(participation_ratio(h * scale), participation_ratio(h))


def test_dead_units_are_active_on_under_1_percent_of_examples_and_unsaturated_ones_on_over_99():
    active = torch.tensor([0, 1, 2, 3, 100, 197, 198, 199, 200])  # of 200 examples
    z = (torch.arange(200)[:, None] < active).double()
    dead, unsaturated = activity(pad(z, (0, 4)).expand(2, -1, -1), torch.tensor([9.0, 9.0]))
    assert dead.tolist() == [2 / 9, 2 / 9]
    assert unsaturated.tolist() == [2 / 9, 2 / 9]


def test_a_gradient_that_is_linear_in_what_a_tap_offers_is_explained_whole_and_holds():
    stream, held = torch.randn(2, 2, 500, 6, dtype=torch.float64)
    weight = torch.randn(6, 6, dtype=torch.float64)
    found = only_stream(stream, stream @ weight, held, held @ weight)
    energy = (stream @ weight).square().sum(2).mean(1)
    torch.testing.assert_close(found["explained_here_linear"], energy, rtol=1e-3, atol=0)
    held_energy = (held @ weight).square().sum(2).mean(1)
    torch.testing.assert_close(found["heldout_here_linear"], held_energy, rtol=1e-3, atol=0)
    torch.testing.assert_close(found["gradient_rms"].square(), energy)


def test_a_gradient_of_noise_is_explained_as_far_as_it_is_fitted_and_not_held_out():
    stream, held, noise, noise_held = torch.randn(4, 2, 4000, 6, dtype=torch.float64)
    found = only_stream(stream, noise, held, noise_held)
    for name, features in (("here_linear", 7), ("here_relu", 1 + RELU_UNITS)):
        fitted = found[f"explained_{name}"] / 6  # of an energy of 1 for each of 6 outputs
        assert ((fitted > 0) & (fitted < 2 * features / 4000)).all()
        assert (found[f"heldout_{name}"].abs() / 6 < 2 * features / 4000).all()


def test_a_gradient_that_is_0_has_nothing_to_explain(samples):
    train, held = ([s._replace(gradient=torch.zeros_like(s.gradient)) for s in part] for part in samples)
    found = growth_sensors(train, held, truth())
    assert (found[..., NAMES.index("gradient_rms") :] == 0).all()


def only_stream(stream, gradient, held, gradient_held):
    samples = [[Sample(h, h, h, None, g, None)] for h, g in ((stream, gradient), (held, gradient_held))]
    width = torch.full(stream.shape[:1], stream.shape[2], dtype=stream.dtype)
    found = growth_sensors(*samples, [TrueWidths(width, width, width, width)])
    return dict(zip(NAMES, found[:, 0].unbind(1), strict=True))


def test_a_wider_random_layer_begins_with_the_narrower_one_and_its_first_unit_is_1():
    wide, narrow = relu_expansion(40), relu_expansion(7)
    np.testing.assert_array_equal(wide[:8], narrow)
    np.testing.assert_array_equal(wide[:, 0], np.eye(41)[0])


def test_the_random_layer_is_drawn_from_normals_of_2_and_its_biases_of_one_half():
    layer = relu_expansion(2000)
    weights = layer[1:, 1:] / 2
    assert abs(weights.mean()) < 0.02  # five standard errors of 48,000 draws
    assert weights.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(weights) < 1).mean() == pytest.approx(0.6827, abs=0.01)
    assert np.abs(layer[0, 1:]).max() < 2
