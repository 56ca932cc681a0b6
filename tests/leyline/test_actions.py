import numpy as np
import pytest
import torch

from esper.leyline.lifecycle.vocabulary import Actions, checked_actions
from esper.leyline.messages import InputError
from esper.leyline.protocols import Controller
from esper.runs.grow import grow
from populations import blobs, small_config

ENVS = 3
FIELDS = "op, slot, blueprint, blend, tempo, target"


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_whole_numbers_of_any_kind_are_taken_as_int64(kind):
    found = checked_actions(Actions.wait(ENVS)._replace(op=np.array([0, 1, 5], kind), slot=[0, 1, 0]), ENVS)
    assert [field.dtype for field in found] == [np.int64] * 6
    assert found.op.tolist() == [0, 1, 5]
    assert checked_actions(Actions.wait(ENVS)._replace(op=torch.tensor([2, 0, 0])), ENVS).op.tolist() == [2, 0, 0]


BAD = {
    "nan": (np.array([0, np.nan, 0]), "op as float64, not finite in environment 1"),
    "float": (np.zeros(ENVS), "op as float64; give one whole number for each environment, int64 of shape \\(3,\\)"),
    "bool": (np.zeros(ENVS, bool), "op as bool"),
    "text": (["wait"] * ENVS, "op as <U4"),
    "none": ([None] * ENVS, "op as object"),
    "short": (np.zeros(2, int), r"op of shape \(2,\)"),
    "scalar": (0, r"op of shape \(\)"),
    "ragged": ([[0], [0, 1], 2], "op as a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_decision_that_is_no_array_of_whole_numbers_is_one_sentence_with_its_field(name):
    value, words = BAD[name]
    with pytest.raises(InputError, match=f"act of the controller returned {words}") as refused:
        checked_actions(Actions.wait(ENVS)._replace(op=value), ENVS)
    assert "\n" not in str(refused.value)


def test_a_decision_that_is_no_actions_is_told_the_fields():
    with pytest.raises(InputError, match=rf"returned a dict; return esper.Actions with the fields {FIELDS}"):
        checked_actions({"op": [0]}, ENVS)


class Broken(Controller):
    """Decides by an op that is NaN from a step on."""

    def __init__(self, since):
        self.since = since

    def act(self, view):
        waiting = Actions.wait(ENVS)
        return waiting if view.step < self.since else waiting._replace(op=np.full(ENVS, np.nan))


@pytest.mark.parametrize("since", [0, 2])
def test_a_controller_whose_op_is_nan_is_named_with_the_field(since, tmp_path):
    with pytest.raises(InputError, match="returned op as float64, not finite in environment 0"):
        grow(blobs(), small_config(envs=ENVS), Broken(since), tmp_path / "run")
    assert (tmp_path / "run").exists() == (since > 0), (
        "what is known at the first decision is said before anything is written"
    )
