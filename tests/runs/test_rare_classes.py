"""Check that where a class is rare, a run also has figures in which every class counts alike: those of scikit-learn."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, roc_auc_score

import esper
from esper.runs.figures import class_figures
from pages import Page

CLASSES = ["common", "usual", "[rare]"]


def rows_of(counts, seed=0):
    """Draw examples of each class in clouds that overlap."""
    y = np.repeat(np.arange(len(counts)), counts)
    x = np.random.default_rng(seed).normal(size=(len(y), 4)) + 1.5 * np.eye(4)[y]
    return x.astype(np.float32), [CLASSES[each] for each in y]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rare") / "run"
    x, y = rows_of([300, 250, 40])
    task = esper.task("skewed", x, y, host=esper.mlp(4, width=4, classes=3, blocks=1))
    config = {"envs": 2, "steps": 4, "baselines": ["twin"]}
    return task, folder, esper.grow(task, config, controller="never", run=folder, progress=False)


def test_the_figures_are_those_of_scikit_learn_on_the_exported_networks(finished):
    task, folder, summary = finished
    found = summary["rare_classes"]
    assert json.loads((folder / "summary.json").read_text())["rare_classes"] == found
    assert (found["rare"], sorted(found["classes"])) == (["[rare]"], sorted(CLASSES))
    networks = [esper.load(folder / "models" / f"env-{env:03d}", host=task.host) for env in range(2)]
    truth, whole = task.test.y.numpy(), np.zeros((3, 3), int)
    for env, network in enumerate(networks):
        with torch.no_grad():
            shares = network(task.test.x).double().softmax(-1).numpy()
        predicted = shares.argmax(1)
        whole += confusion_matrix(truth, predicted)
        expected = {
            "balanced_accuracy": balanced_accuracy_score(truth, predicted),
            "f1_macro": f1_score(truth, predicted, average="macro"),
            "roc_auc": roc_auc_score(truth, shares, multi_class="ovr"),
        }
        for name, value in expected.items():
            assert found["grown"][name][env] == pytest.approx(value, abs=1e-6), name
    assert found["grown"]["confusion"] == whole.tolist()
    assert found["host"] == found["grown"], "nothing grew"


def test_the_terminal_has_the_balanced_accuracy_and_the_report_all_of_it(finished, capsys):
    task, folder, summary = finished
    esper.show(summary)
    line = " ".join(capsys.readouterr().out.split())
    tested = int((task.test.y == task.classes.index("[rare]")).sum())
    assert f"rare classes ([rare]; {tested} test examples): balanced accuracy 0." in line
    assert "; esper.task(..., class_weights='balanced') weighs them like others; F1, ROC AUC and" in line
    said = Page((folder / "report.html").read_text()).said
    assert "as some are rare ([rare])" in said
    assert "balanced accuracy F1 ROC AUC" in said
    assert "Confusion matrix, grown" in said
    assert "Confusion matrix, twin" in said


@pytest.mark.parametrize("counts", [[200, 190, 110], [300, 110]])
def test_classes_of_usual_sizes_have_no_such_figures(counts):
    x, y = rows_of(counts)
    task = esper.task("even", x, y, host=esper.mlp(4, width=4, classes=len(counts), blocks=1))
    config = {"envs": 2, "steps": 1, "baselines": [], "models": "none"}
    assert "rare_classes" not in esper.grow(task, config, controller="never", progress=False)


def test_two_classes_have_the_area_of_the_one_against_the_other():
    truth, score = np.array([0] * 9 + [1] * 3), np.random.default_rng(0).normal(size=12)
    found = class_figures(truth, np.stack([np.zeros(12), score], 1)[None])
    assert found["roc_auc"] == [pytest.approx(roc_auc_score(truth, score))]
    assert found["balanced_accuracy"] == [pytest.approx(balanced_accuracy_score(truth, score > 0))]


def test_an_output_that_is_not_finite_and_a_single_class_have_no_figures():
    outputs = np.zeros((2, 3, 2))
    outputs[0, 0, 0] = np.nan
    found = class_figures(np.array([0, 1, 1]), outputs)
    assert [value is None for value in found["f1_macro"]] == [True, False]
    assert np.sum(found["confusion"]) == 3
    assert class_figures(np.array([1, 1, 1]), np.zeros((1, 3, 2)))["roc_auc"] == [None]
