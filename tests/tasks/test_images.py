"""Test image tasks and their host: digits as images, and the CNN that grows on them."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import esper
from esper.kasmina.blueprints import count, drawn_with
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.messages import InputError
from esper.tasks.hosts import CNN, ResidualCNN, host_from
from esper.tasks.images import digits_image, digits_image_narrow, standardizing
from esper.tasks.small import digits


def test_digits_image_holds_the_examples_of_digits_in_the_same_splits():
    images, vectors = digits_image(), digits()
    for name in ("train", "probe", "validation", "test"):
        ours, theirs = getattr(images, name), getattr(vectors, name)
        assert torch.equal(ours.y, theirs.y)
        assert ours.x.shape == (len(theirs.y), 1, 8, 8)
        assert ours.x.dtype == torch.uint8
    centred = images.train.x[:, 0, 3, 4].double()
    centred = (centred - centred.mean()) / centred.std(correction=0)
    torch.testing.assert_close(centred.float(), vectors.read(vectors.train.x)[:, 3 * 8 + 4], rtol=1e-4, atol=1e-5)


def test_digits_are_read_with_mean_0_and_deviation_1_and_never_varied():
    task = digits_image()
    read = task.read(task.train.x)
    assert float(read.mean()) == pytest.approx(0, abs=1e-4)
    assert float(read.std()) == pytest.approx(1, abs=1e-3)
    assert not task.pixels.varies


def test_a_channel_that_is_constant_is_only_centred_as_far_as_that_goes():
    pixels = standardizing(torch.full((4, 1, 2, 2), 9, dtype=torch.uint8))
    assert not pixels.read(torch.full((4, 1, 2, 2), 9, dtype=torch.uint8)).count_nonzero()


SIZES = {"inputs": (3, 16, 12), "channels": (4, 6), "outputs": 5}


@pytest.mark.parametrize("factory", [CNN(**SIZES), CNN(**SIZES, hidden=(2, 3)), ResidualCNN(**SIZES)], ids=str)
def test_a_cnn_halves_its_map_in_every_block_and_names_a_slot_behind_each(factory):
    host = factory()
    h, shapes = torch.randn(2, 3, 16, 12), []
    for segment in host.segments:
        h = segment(h)
        shapes.append(tuple(h.shape[1:]))
    assert shapes == [(4, 8, 6), (6, 4, 3), (5,)]
    assert [(slot.name, slot.after, slot.width, slot.kind) for slot in host.slots] == [
        ("block0", 0, 4, Kind.MAP),
        ("block1", 1, 6, Kind.MAP),
    ]


def test_the_cnn_of_32_x_32_has_as_many_parameters_as_its_formula_says():
    host = CNN(inputs=(3, 32, 32), channels=(8, 16, 32), outputs=10)()
    assert count(host) == 8 * (27 + 1) + 16 * (72 + 1) + 32 * (144 + 1) + 10 * 33


@pytest.mark.parametrize("factory", [CNN(**SIZES, hidden=(2, 3)), ResidualCNN(**SIZES)], ids=str)
@pytest.mark.parametrize("parameters", [1, 500, 20_000])
def test_a_plain_cnn_is_the_smallest_scaled_one_of_so_many_parameters(factory, parameters):
    plain = factory.plain(parameters)
    assert count(plain()) >= parameters
    narrow, wide = plain.channels
    assert narrow == -(-4 * wide // 6)
    if wide > 1:
        assert count(replace(plain, channels=(-(-4 * (wide - 1) // 6), wide - 1))()) < parameters


@pytest.mark.parametrize("kind", [CNN, ResidualCNN])
def test_the_streams_of_a_fresh_cnn_keep_their_scale(kind):
    with drawn_with(0):
        host = kind(inputs=(3, 32, 32), channels=(16, 32, 32), outputs=10)()
    h = torch.randn(64, 3, 32, 32)
    for segment in host.segments[:-1]:
        h = segment(h)
        assert 0.3 < h.square().mean().sqrt().item() < 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"channels": (0,)}, r"channels of a CNN host is \(0,\)"),
        ({"channels": ()}, "at least one block"),
        ({"channels": "88"}, "channels of a CNN host is '88'"),
        ({"hidden": (2,)}, "no hidden sizes or one a block"),
        ({"inputs": (3, 32)}, "give channels, height and width"),
        ({"inputs": (3, 2, 8)}, "2 x 8 pixels cannot be halved in 2 blocks"),
        ({"outputs": 0}, "outputs of a CNN host is 0"),
        ({"outputs": True}, "outputs of a CNN host is True"),
    ],
)
def test_a_cnn_of_impossible_sizes_is_refused(arguments, reason):
    with pytest.raises(InputError, match=reason):
        CNN(**{"inputs": (3, 8, 8), "channels": (4, 6), "outputs": 10} | arguments)


def test_a_cnn_is_rebuilt_by_name_from_json():
    host = CNN(inputs=(3, 8, 8), channels=(4, 6), hidden=(2, 2), outputs=10)
    arguments = json.loads(json.dumps({"inputs": [3, 8, 8], "channels": [4, 6], "hidden": [2, 2], "outputs": 10}))
    assert host_from("cnn", arguments) == host


def test_a_residual_cnn_is_rebuilt_by_name_from_json():
    host = ResidualCNN(inputs=(3, 8, 8), channels=(4, 6), outputs=10)
    assert host_from("residual-cnn", json.loads(json.dumps(asdict(host)))) == host


def test_an_image_host_given_vectors_is_refused():
    x, y = torch.randn(60, 64), torch.arange(60) % 3
    with pytest.raises(InputError, match=r"reads images, but an example of the task has shape \(64,\)"):
        esper.task("mine", x, y, host=CNN(inputs=(1, 8, 8), channels=(2,), outputs=3), menu=["conv-light"])


def test_images_of_ones_own_grow_are_exported_and_loaded_with_the_same_outputs(tmp_path):
    task = digits_image_narrow()
    schedule = [
        {"at": 0, "op": "germinate", "slot": "block0", "blueprint": "bypass-conv-3x3", "blend": "gate", "keep": True},
        {
            "at": 0,
            "op": "germinate",
            "slot": "block1",
            "blueprint": "squeeze-excite",
            "blend": "multiply",
            "keep": True,
        },
    ]
    (tmp_path / "schedule.yaml").write_text(json.dumps(schedule))
    settings = {
        "envs": 1, "steps": 10, "data": {"batches_per_step": 4}, "lifecycle": {"max_training_seeds": 2},
        "gates": {"permissive": True},
    }  # fmt: skip
    summary = esper.grow(task, settings, controller=str(tmp_path / "schedule.yaml"), run=tmp_path / "run")
    assert summary["grown"] == [{"block0": "bypass-conv-3x3", "block1": "squeeze-excite"}]
    folder, x = tmp_path / "run" / "models" / "env-000", task.probe.x
    network, program = esper.load(folder), torch.export.load(folder / "model.pt2").module()
    with torch.no_grad():
        expected = network(x)
        torch.testing.assert_close(program(x), expected, rtol=1e-5, atol=1e-5)
        test = network(task.test.x).argmax(1) == task.test.y
    assert float(test.double().mean()) == pytest.approx(summary["test_accuracy"]["grown"][0], abs=1e-6)
    assert np.isfinite(expected.numpy()).all()
