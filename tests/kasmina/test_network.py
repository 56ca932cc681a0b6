"""Test what a grown network takes and returns: raw features in, the task's own labels out, in memory and from a file."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch

import esper
from esper.kasmina.network.export import MODEL, PROGRAM, TOPOLOGY
from esper.leyline.messages import InputError
from esper.tasks.hosts import MLP
from populations import Script, small_config

N = 120
SPECIES = np.array(["setosa", "virginica"])
KEEP = [
    {"at": 1, "op": "germinate", "slot": "block0", "blueprint": "skip-mlp", "keep": True},
    {"at": 1, "op": "germinate", "slot": "block1", "blueprint": "bypass-mlp", "keep": True},
]


def flowers(**options):
    """Make features far from mean 0 and deviation 1, as measurements are, labels by name, and their task."""
    x = np.random.default_rng(0).normal([500.0, -3.0, 0.02], [80.0, 1.0, 0.004], (N, 3))
    y = SPECIES[((x[:, 0] - 500) / 80 > (x[:, 1] + 3)).astype(int)]
    host = MLP(inputs=3, width=8, hidden=(3, 5), outputs=2)
    return x, y, esper.task("flowers", x, y, host=host, standardize=True, menu=["skip-mlp", "bypass-mlp"], **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Grow a network with a seed that reads the input: (task, x, y, summary, folder of the network)."""
    x, y, task = flowers()
    folder = tmp_path_factory.mktemp("flowers")
    (folder / "schedule.yaml").write_text(json.dumps(KEEP))
    settings = {
        "envs": 1, "steps": 12, "data": {"batch_size": 24, "batches_per_step": 6}, "gates": {"permissive": True},
        "lifecycle": {"max_training_seeds": 2}, "early_stopping": {"enabled": False},
    }  # fmt: skip
    summary = esper.grow(task, settings, controller=str(folder / "schedule.yaml"), run=folder / "run")
    assert summary["grown"] == [{"block0": "skip-mlp", "block1": "bypass-mlp"}]
    return task, x, y, summary, folder / "run" / "models" / "env-000"


def test_the_network_reads_raw_features_and_names_the_classes(run):
    task, x, y, summary, folder = run
    network = esper.load(folder)
    assert network.classes == ("setosa", "virginica")
    predicted = network.predict(x)
    assert set(predicted.tolist()) == set(SPECIES)
    assert (predicted == y).mean() > 0.9
    where = [np.flatnonzero((x.astype(np.float32) == row.numpy()).all(1))[0] for row in task.test.x]
    accuracy = (predicted[where] == y[where]).mean()
    assert accuracy == pytest.approx(summary["test_accuracy"]["grown"][0], abs=1e-6)


def test_the_mean_and_the_deviation_of_the_train_split_are_in_the_file_of_weights(run):
    task, *_, folder = run
    with esper.kasmina.network.export.safe_open(folder / MODEL, "pt") as file:
        assert torch.equal(file.get_tensor("standardize.mean"), task.train.x.mean(0))
        assert torch.equal(file.get_tensor("standardize.deviation"), task.train.x.std(0, correction=0))


def test_the_program_takes_raw_features_too(run):
    *_, x, _, _, folder = run
    x = torch.from_numpy(x).float()
    network, program = esper.load(folder), torch.export.load(folder / PROGRAM).module()
    with torch.no_grad():
        torch.testing.assert_close(program(x), network(x), rtol=1e-5, atol=1e-5)


def test_tensors_arrays_lists_and_frames_are_predicted_alike(run):
    *_, x, _, _, folder = run
    network = esper.load(folder)
    expected, shares = network.predict(x), network.predict_proba(x)
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    assert shares.shape == (N, 2)
    np.testing.assert_array_equal(SPECIES[shares.argmax(1)], expected)
    for other in (torch.from_numpy(x), torch.from_numpy(x).float(), x.tolist(), pd.DataFrame(x), x.astype(object)):
        np.testing.assert_array_equal(network.predict(other), expected)


@pytest.fixture(scope="module")
def framed(tmp_path_factory):
    """Grow a network on a frame whose columns have names: (frame, labels, folder)."""
    x, y, _ = flowers()
    frame = pd.DataFrame(x, columns=["length", "angle", "weight"])
    task = esper.task("flowers", frame, y, host=MLP(3, 8, (3,), 2), standardize=True)
    assert task.columns == ("length", "angle", "weight")
    folder = tmp_path_factory.mktemp("framed") / "run"
    esper.grow(task, {"envs": 1, "steps": 4, "data": {"batch_size": 24, "batches_per_step": 6}}, run=folder)
    return frame, y, folder / "models" / "env-000"


def test_columns_of_a_frame_are_taken_by_their_names(framed):
    frame, y, folder = framed
    network = esper.load(folder)
    expected = network.predict(frame.to_numpy())
    np.testing.assert_array_equal(network.predict(frame), expected)
    np.testing.assert_array_equal(network.predict(frame[["weight", "length", "angle"]].assign(species=y)), expected)
    with pytest.raises(InputError, match=r"^x lacks the column 'angle'; give the 3 columns length, angle, weight$"):
        network.predict(frame[["length", "weight"]])


def test_the_columns_of_splits_are_taken_by_the_names_of_the_train_split(framed):
    frame, y, _ = framed
    parts = dict(zip(["train", "probe", "validation", "test"], np.split(np.arange(N), [60, 80, 100]), strict=True))
    pairs = {name: (frame.iloc[part], y[part]) for name, part in parts.items()}
    turned = pairs | {"test": (pairs["test"][0][["weight", "angle", "length"]], pairs["test"][1])}
    host = MLP(3, 8, (3,), 2)
    tasks = [esper.task("flowers", host=host, splits=given) for given in (pairs, turned)]
    assert torch.equal(tasks[0].test.x, tasks[1].test.x)
    assert tasks[0].columns == ("length", "angle", "weight")


def test_predicting_leaves_the_network_in_its_mode_and_without_gradients(run):
    *_, x, _, _, folder = run
    network = esper.load(folder).train()
    network.seeds[0].eval()
    before = [module.training for module in network.modules()]
    network.predict(x)
    assert [module.training for module in network.modules()] == before
    assert all(parameter.grad is None for parameter in network.parameters())


def test_many_examples_are_predicted_in_parts(run, monkeypatch):
    *_, x, _, _, folder = run
    network = esper.load(folder)
    whole = network.predict(x)
    monkeypatch.setattr("esper.kasmina.network.grown_network.CHUNK", 7)
    np.testing.assert_array_equal(network.predict(x), whole)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (np.zeros(3), "x has shape (3,), which is one example and not a batch; give a batch of one, as predict([x])"),
        (np.zeros((0, 3)), "x has shape (0, 3), but the network takes examples of (3,); give at least one example"),
        (np.zeros((2, 4)), "x has shape (2, 4), but the network takes examples of (3,); give at least one"),
        (np.array([[1, 2, np.nan]]), "x holds NaN or infinite values, in example 0 (1 of 1); fill them in"),
        ([["a", "b", "c"]], "x holds text, such as 'a'; give numbers alone"),
        (None, "x is a NoneType that cannot be read as an array of numbers; give a tensor or an array"),
    ],
)
def test_features_that_do_not_fit_are_refused_in_a_sentence(run, x, sentence):
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        esper.load(run[-1]).predict(x)


@pytest.mark.parametrize("targets", [(), (1,), (2,)])
def test_a_regression_predicts_values_in_the_shape_of_y(targets):
    x = torch.randn(N, 3)
    y = x[:, : targets[0]] if targets else x[:, 0]
    task = esper.task("line", x, y, host=MLP(3, 8, (3,), max(y[0].numel(), 1)), standardize=True)
    engine = esper.VectorizedEngine(task, small_config(steps=2))
    engine.run(Script({}))
    network, topology = engine.export(0)
    assert network.predict(x).shape == ((N,) if targets in ((), (1,)) else (N, 2))
    assert (network.classes, topology["classes"]) == (None, None)
    np.testing.assert_array_equal(network.predict(x).reshape(N, -1), network(x).detach().numpy())
    with pytest.raises(InputError, match=r"^the network predicts values, which have no probabilities; use predict"):
        network.predict_proba(x)


def test_a_network_of_images_that_are_kept_as_bytes_takes_bytes():
    task = esper.get_task("digits-image")
    engine = esper.VectorizedEngine(task, small_config(envs=1, steps=1))
    engine.run(Script({}))
    network, topology = engine.export(0)
    assert (topology["input"], topology["standardize"]) == ([1, 8, 8], [1, 1, 1])
    x = task.probe.x
    correct = (network.predict(x) == task.probe.y.numpy()).mean()
    metric, _ = engine.evaluate(task.probe)
    assert correct == pytest.approx(metric[0], abs=0.02)
    np.testing.assert_array_equal(network.predict(x), network.predict(x.float()))


def test_the_tasks_of_esper_take_raw_features_and_name_their_classes():
    from sklearn.datasets import load_iris

    task, data = esper.get_task("iris"), load_iris()
    assert task.classes == ("setosa", "versicolor", "virginica")
    engine = esper.VectorizedEngine(
        task, small_config(envs=1, steps=8, data={"batch_size": 16, "batches_per_step": 16})
    )
    engine.run(Script({}))
    network = engine.export(0)[0]
    assert (network.predict(data.data) == data.target_names[data.target]).mean() > 0.9


# Files that are damaged.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": ["a"]}, "is damaged at 'classes'"),
        ({"classes": ["a", "a"]}, "is damaged at 'classes'"),
        ({"classes": ["a", 1]}, "is damaged at 'classes'"),
        ({"classes": [["a"], ["b"]]}, "is damaged at 'classes"),
        ({"classes": "ab"}, "is damaged at 'classes"),
        ({"standardize": [5]}, "has a mean of shape [5] for inputs of shape [3]"),
        ({"standardize": [1, 1]}, "has a mean of shape [1, 1] for inputs of shape [3]"),
        ({"standardize": [10**12], "input": [10**12]}, "does not fit the network of topology.json: it holds"),
        ({"standardize": None}, "does not fit the network of topology.json"),
        ({"input": [0]}, "is damaged at 'input"),
        ({"target": "x"}, "is damaged at 'target'"),
        ({"format": 1}, "has format 1, but this version of Esper reads the formats 2, 3, 4"),
        ({"input": [[3], [2]]}, "has examples of shape [[3], [2]] and dtype float32"),
        (
            {"input": {"a": [3]}, "example": {"b": "float32"}},
            "has examples of shape {'a': [3]} and dtype {'b': 'float32'}",
        ),
        ({"input": {"a": [3]}, "example": {"a": "float32"}}, "has a mean of shape [3] for inputs of shape {'a': [3]}"),
    ],
)
def test_a_topology_with_names_or_shapes_that_cannot_be_is_refused(run, tmp_path, change, words):
    for name in (MODEL, TOPOLOGY):
        (tmp_path / name).write_bytes((run[-1] / name).read_bytes())
    topology = json.loads((tmp_path / TOPOLOGY).read_text())
    (tmp_path / TOPOLOGY).write_text(json.dumps(topology | change))
    with pytest.raises(InputError) as error:
        esper.load(tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_more_classes_than_outputs_are_noticed_when_they_are_asked_for(run, tmp_path):
    for name in (MODEL, TOPOLOGY):
        (tmp_path / name).write_bytes((run[-1] / name).read_bytes())
    topology = json.loads((tmp_path / TOPOLOGY).read_text())
    (tmp_path / TOPOLOGY).write_text(json.dumps(topology | {"classes": ["a", "b", "c"]}))
    with pytest.raises(InputError, match=r"^the network has outputs of shape \(2,\), but 3 classes; export it again"):
        esper.load(tmp_path).predict(run[1])
