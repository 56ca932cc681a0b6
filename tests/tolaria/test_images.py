"""Test populations of image hosts: the feed of bytes, positions as examples, and rows that do not depend on each other."""

import numpy as np
import pytest
import torch
from device_reads import counted_reads
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import Linear, PositionMean
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Pixels
from esper.leyline.lifecycle.slots import Kind, Map, SlotSpec, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.store.tensors import flatten, unflatten
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.hosts import CNN
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.probe import for_positions
from esper.tolaria.stacked.data import Format, SharedBatchIterator, draws, stack_splits, varied
from pictures import HOST, INPUTS, PIXELS, drawn, pictures
from populations import Script, small_config

CPU = torch.device("cpu")
VARIED = Pixels((100.0, 120.0), (50.0, 60.0), pad=2, flip=True)


def feed(instance, pixels=PIXELS, batch=12):
    split = drawn(40)
    made = SharedBatchIterator(
        [split],
        np.zeros(len(instance), np.int64),
        np.asarray(instance, np.int64),
        0,
        batch,
        Format(INPUTS, CPU, pixels=pixels),
    )
    made.reset(0)
    return made


# Bytes.


def test_bytes_are_read_as_deviations_from_the_mean_with_channels_last():
    x = drawn(5).x
    read = PIXELS.read(x)
    for channel in range(2):
        expected = (x[:, channel].float() - PIXELS.mean[channel]) / PIXELS.deviation[channel]
        torch.testing.assert_close(read[:, channel], expected)
    assert read.is_contiguous(memory_format=torch.channels_last)


def test_images_stay_bytes_on_the_device_and_a_batch_is_their_reading():
    made, split = feed([0, 1]), drawn(40)
    assert made.x.dtype == torch.uint8
    x, y = next(made)
    assert x.shape == (2, 12, *INPUTS)
    for row in range(2):
        index = made._index[row]
        assert torch.equal(x[row], PIXELS.read(split.x[index]))
        assert torch.equal(y[row], split.y[index])
        assert x[row].is_contiguous(memory_format=torch.channels_last)


def test_the_batch_of_a_part_is_that_part_of_the_batch():
    made = feed([0, 1, 2], VARIED)
    x, y = next(made)
    for part in (slice(0, 1), slice(1, 3)):
        for whole, piece in zip((x, y), made.of(part), strict=True):
            assert torch.equal(piece, whole[part])


def test_examples_that_measure_are_bytes_until_they_are_read_and_are_never_varied():
    split = drawn(10)
    examples = stack_splits([split], np.zeros(3, np.int64), Format(INPUTS, CPU, pixels=VARIED))
    assert examples.x.dtype == torch.uint8
    read = examples.read(slice(2, 6))
    assert read.shape == (3, 4, *INPUTS)
    assert all(torch.equal(row, VARIED.read(split.x[2:6])) for row in read)


# Crop and flip.


def obvious(image, draw, pixels):
    """Compute one image (H, W, C), pixel by pixel."""
    height, width, _ = image.shape
    down, right, mirror = ((draw >> bits & 0x7FF) % (2 * pixels.pad + 1) - pixels.pad for bits in (32, 43, 54))
    mirror = pixels.flip and draw >> 54 & 1
    made = torch.empty_like(image)
    for i in range(height):
        for j in range(width):
            source = i + down, (width - 1 - j if mirror else j) + right
            inside = 0 <= source[0] < height and 0 <= source[1] < width
            made[i, j] = image[source] if inside else torch.tensor(pixels.mean).round().to(torch.uint8)
    return made


@pytest.mark.parametrize(
    "pixels", [VARIED, Pixels((7.0, 9.0), (1.0, 1.0), pad=3), Pixels((7.0, 9.0), (1.0, 1.0), flip=True)]
)
def test_an_image_is_shifted_and_mirrored_as_its_draw_says(pixels):
    images = drawn(20).x.movedim(1, -1).contiguous()
    draw = draws(np.array([5]), 20, CPU)[0]
    found = varied(images, draw, pixels, torch.tensor(pixels.mean).round().to(torch.uint8))
    for image, number, got in zip(images, draw.tolist(), found, strict=True):
        assert torch.equal(got, obvious(image, number, pixels))


def test_every_shift_and_both_mirrors_are_drawn_about_equally_often():
    draw = draws(np.arange(50), 200, CPU).flatten()
    for bits, places in ((32, 9), (43, 9), (54, 2)):
        share = torch.bincount((draw >> bits & (0x7FF if places == 9 else 1)) % places) / len(draw)
        assert (share - 1 / places).abs().max() < 0.02


def test_rows_of_one_instance_share_their_crops_and_no_row_depends_on_how_many_there_are():
    together, alone = feed([3, 4, 3], VARIED), feed([4], VARIED)
    for _ in range(7):
        (x, _), (own, _) = next(together), next(alone)
        assert torch.equal(x[0], x[2])
        assert not torch.equal(x[0], x[1])
        assert torch.equal(x[1], own[0])


def test_a_feed_that_is_set_to_a_position_draws_the_same_crops():
    straight, resumed = feed([0, 1], VARIED), feed([0, 1], VARIED)
    for _ in range(4):
        next(straight)
    resumed.batch = 4
    assert torch.equal(next(resumed)[0], next(straight)[0])


# Positions.


def test_positions_are_an_even_grid_of_examples():
    stream = torch.arange(2 * 3 * 5 * 8 * 8).view(2, 3, 5, 8, 8)
    found = Map.positions(stream)
    assert found.shape == (2, 3 * 16, 5)
    expected = [stream[1, 2, :, i, j] for i in (1, 3, 5, 7) for j in (1, 3, 5, 7)]
    assert torch.equal(found[1, 32:], torch.stack(expected))


def test_a_small_map_gives_all_its_positions_and_a_vector_itself():
    stream = torch.randn(2, 3, 5, 2, 3)
    assert torch.equal(Map.positions(stream), stream.movedim(2, -1).flatten(1, 3))
    assert torch.equal(Vector.positions(stream[..., 0, 0]), stream[..., 0, 0])
    assert Map.positions(torch.randn(2, 3, 4, 9, 9), stream).shape == (2, 3 * 6, 4)


def test_a_position_is_real_where_its_example_is():
    real = torch.tensor([[True, False, True]])
    assert for_positions(real, torch.zeros(1, 6, 2)).tolist() == [[True, True, False, False, True, True]]
    assert for_positions(real, torch.zeros(1, 3, 2)) is real


# Whole steps.

GROW = {
    (0, 0): (Op.GERMINATE, 0, 0, 0, 2, 3),
    (2, 0): (Op.ADVANCE, 0),
    (0, 1): (Op.GERMINATE, 1, 2, 1, 1, 3),
    (2, 1): (Op.ADVANCE, 1),
    (4, 1): (Op.PRUNE, 1, 0, 0, 2, 0),
    (5, 0): (Op.FOSSILIZE, 0),
}


def run(envs, task=None, *layers, **top):
    script = Script({at: decision for at, decision in GROW.items() if at[1] < envs})
    engine = VectorizedEngine(
        task or pictures(pixels=VARIED), small_config({"probe": {"sensors_every": 3}}, *layers, envs=envs, **top)
    )
    engine.run(script)
    return engine, script.outcomes


@pytest.mark.parametrize(("twin", "incubation"), [(False, "shadow"), (True, "ste")])
def test_an_environment_is_bitwise_the_same_in_any_company(twin, incubation):
    # on a GPU the kernels of convolutions are chosen by the number of images
    lifecycle = {"lifecycle": {"incubation": incubation, "max_training_seeds": 2}, "device": "cpu"}
    whole, outcomes = run(4, None, lifecycle, twin=twin)
    for envs in (1, 2):
        part, others = run(envs, None, lifecycle, twin=twin)
        for name in ("value", "first_moment"):
            found, expected = part.population.body.host.columns[name], whole.population.body.host.columns[name]
            assert torch.equal(found[:envs], expected[:envs])
        for one, other in zip(others, outcomes, strict=True):
            assert np.array_equal(one.after.loss, other.after.loss[:envs])
        sensors = part.state.measurements.sensors[:envs], whole.state.measurements.sensors[:envs]
        assert np.array_equal(*sensors, equal_nan=True)


def test_a_step_reads_the_device_once():
    task = pictures(pixels=VARIED)
    engine = VectorizedEngine(task, small_config({"probe": {"sensors_every": 1}}, envs=3))
    view, script = engine.reset(), Script(GROW)
    for _ in range(6):
        actions = script.act(view)
        with counted_reads() as reads:
            view, _ = engine.step(actions)
        assert [read.site for read in reads] == ["runtime.py:read_packet"]


def floats(dtype):
    """Make a task of floating-point images."""
    split = drawn(160)
    return task_from(
        "floats",
        PIXELS.read(split.x).to(dtype),
        split.y,
        host=lambda: CNN(inputs=INPUTS, channels=(3, 5), outputs=3)().to(dtype),
        menu=("bypass-conv-3x3", "conv-light", "norm"),
    )


def test_the_mappings_agree_over_whole_episodes():
    task, found = floats(torch.float64), []
    for mapping in ("loop", "vmap"):
        engine, outcomes = run(3, task, mapping=mapping)
        found.append((engine.population.body.host.columns["value"], [outcome.after.loss for outcome in outcomes]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-9)


def test_the_sensors_of_maps_are_measured_and_tell_of_every_slot():
    engine, _ = run(2)
    sensors = engine.state.measurements.sensors
    taught = np.array(["drift" in name for name in engine.space.sensors])  # where there is an intact network
    assert np.isfinite(sensors[..., ~taught]).all()
    assert np.isnan(sensors[..., taught]).all()
    assert (sensors[..., :4] >= 0).all()
    assert (sensors[..., :4] <= 1 + 1e-6).all()


@pytest.mark.parametrize("inner", [None, 1], ids=["no inner features", "inner features are maps"])
def test_what_a_vector_slot_of_an_image_host_cannot_read_is_absent(inner):
    def host():
        behind = nn.Sequential(nn.Conv2d(3, 4, 3), PositionMean(), Linear(4, 5))
        slots = [SlotSpec("map", 0, 3, Kind.MAP), SlotSpec("vector", 1, 5, inner=inner)]
        return SegmentedHost([nn.Conv2d(2, 3, 3), behind, Linear(5, 3)], slots)

    task = pictures(host=host, menu=("conv-light", "mlp-small"))
    engine = VectorizedEngine(task, small_config({"probe": {"sensors_every": 1}}, envs=2, steps=1))
    view = engine.reset()
    of_vector = dict(zip(view.space.sensors, view.measurements.sensors[:, 1].T, strict=True))
    for name, values in of_vector.items():
        absent = any(part in name for part in ("before", "input", "inner", "dead", "unsaturated", "drift"))
        here = name == "participation_before" or not absent
        assert np.isfinite(values).all() if here else np.isnan(values).all(), name


def test_an_episode_ends_in_a_network_that_computes_what_the_probe_saw():
    task = pictures(pixels=VARIED)
    engine, outcomes = run(2, task)
    network, topology = engine.export(0)
    assert [seed["blueprint"] for seed in topology["seeds"]] == ["bypass-conv-3x3"]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(network(task.probe.x), task.probe.y)
    assert float(loss) == pytest.approx(outcomes[-1].exported.loss[0], rel=1e-5)


def test_more_images_than_a_pass_takes_are_measured_in_pieces(monkeypatch):
    engine, _ = run(2)
    whole = engine.evaluate(drawn(30, seed=30))
    monkeypatch.setattr("esper.tolaria.measure.probe.IMAGES", 7)
    for piece, one in zip(engine.evaluate(drawn(30, seed=30)), whole, strict=True):
        np.testing.assert_allclose(piece, one, rtol=1e-6)


def test_training_lowers_the_loss():
    engine = VectorizedEngine(
        pictures(host=HOST),
        build_config({"envs": 2, "steps": 12, "twin": False, "data": {"batch_size": 16, "batches_per_step": 6}}),
    )
    script = Script({})
    engine.run(script)
    assert (script.outcomes[-1].after.loss < script.outcomes[0].before.loss - 0.1).all()


def both_kinds():
    """Build a host whose first slot holds maps and whose second holds vectors."""
    first = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU())
    second = nn.Sequential(PositionMean(), Linear(3, 6), nn.ReLU(), Linear(6, 4))
    slots = [SlotSpec("maps", 0, 3, Kind.MAP), SlotSpec("vectors", 1, 4)]
    return SegmentedHost([first, second, Linear(4, 3)], slots)


@pytest.mark.parametrize("mapping", ["auto", "vmap"])
def test_a_host_may_have_slots_of_both_kinds(mapping):
    task = pictures(host=both_kinds, menu=("conv-light", "affine"))
    config = small_config({"lifecycle": {"max_training_seeds": 2}}, envs=2, mapping=mapping)
    engine = VectorizedEngine(task, config)
    assert engine.space.fits.tolist() == [[True, False], [False, True]]
    script = Script(
        {
            (0, 0): (Op.GERMINATE, 0, 0, 0, 2, 3),
            (1, 0): (Op.GERMINATE, 1, 1, 0, 2, 3),
            (2, 0): (Op.ADVANCE, 0),
            (3, 0): (Op.ADVANCE, 1),
            (6, 0): (Op.FOSSILIZE, 0),
            (7, 0): (Op.FOSSILIZE, 1),
        }
    )
    engine.run(script)
    network, topology = engine.export(0)
    assert [seed["blueprint"] for seed in topology["seeds"]] == ["conv-light", "affine"]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(network(task.probe.x), task.probe.y)
    assert float(loss) == pytest.approx(script.outcomes[-1].after.loss[0], rel=1e-4)


class Drawing(nn.Module):
    """Draws without being a dropout layer of torch, which vmap cannot map, and remembers in a buffer."""

    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.norm(self.inner(x))
        return y * (torch.rand(y.shape[0], 1, 1, 1, device=y.device) < 0.7) if self.training else y


def drawing_host():
    return SegmentedHost(
        [nn.Sequential(nn.Conv2d(2, 3, 3), Drawing(3)), nn.Sequential(PositionMean(), Linear(3, 3))],
        [SlotSpec("s", 0, 3, Kind.MAP)],
    )


@pytest.mark.parametrize("host", [HOST, drawing_host])
def test_images_go_on_from_a_snapshot_as_if_they_had_not_stopped(host):
    config = small_config(envs=2, steps=7, lifecycle={"min_prune_age": 0}, mapping="auto")
    task = pictures(host=host, pixels=VARIED)
    straight, client = VectorizedEngine(task, config), RandomValid()
    view, snapshots = straight.reset(), []
    while view.step < 7:
        snapshots.append(flatten(straight.snapshot()))
        view, _ = straight.step(client.act(view))
    final, plain = flatten(straight.snapshot())
    for snapshot in snapshots[::3]:
        resumed = VectorizedEngine(task, config)
        view = resumed.restore(unflatten(*snapshot))
        while view.step < 7:
            view, _ = resumed.step(client.act(view))
        found, found_plain = flatten(resumed.snapshot())
        assert found_plain == plain
        assert all(found[name].numpy().tobytes() == final[name].numpy().tobytes() for name in final)
