"""Test controllers of streams with fitted numbers."""

import json

import numpy as np
import pytest

from esper.leyline.messages import InputError
from esper_bench.streams.controllers import Adaptive
from esper_bench.streams.data import Change, draw_streams
from esper_bench.streams.fitted import NUMBERS, RATES, SHIPPED, Fitted, read_numbers, to_file
from esper_bench.streams.methods import build_fitted, build_learner, full_settings
from esper_bench.streams.play import Player
from stream_views import NONE, done, view_of

START = {name: number.start for name, number in NUMBERS.items()}


def fitted(**numbers):
    return Fitted(1, {**START, **numbers})


def test_fitted_decides_as_adaptive_with_its_numbers():
    numbers = {"memory": 1.0, "keep": 0.0, "settle": 60, "trunk_rate": 0.1, "reset_rate": 1.0}
    random = np.random.default_rng(7)
    for _ in range(20):
        one, other = fitted(**numbers), Adaptive(1)
        for _ in range(8):
            stored = (NONE, NONE) if other.resets[0] else tuple(random.choice([NONE, 0.3, 1.0, 2.5], 2))
            view = view_of(stored, loss=random.uniform(0.7, 4), shift=random.choice([1.0, 9.0]), classes=10)
            assert done(one.act(view)) == done(other.act(view))


def test_a_head_whose_loss_is_below_keep_stays_where_none_fits():
    assert done(fitted(keep=1.0).act(view_of((2.0, NONE), loss=0.9))) == set()
    assert done(fitted(keep=1.0).act(view_of((0.2, NONE), loss=0.9))) == {"STORE", "ACTIVATE"}


def test_a_balance_that_fades_forgives_old_misses():
    forgets = fitted(memory=0.5, patience=2.5)
    assert all(done(forgets.act(view_of())) == {"STORE", "NEW"} for _ in range(9))
    assert done(fitted(memory=1.0, patience=1.0).act(view_of())) == {"NEW", "RESET"}


def test_streams_with_numbers_of_their_own_are_played_as_alone():
    """Check what lets candidates of a search be played side by side."""
    table = {name: np.array([value, value]) for name, value in START.items()}
    table["lr"], table["halving"] = np.array([0.01, 0.02]), np.array([10.0, 40.0])
    both = draw_streams([5, 5], [Change.SHARED] * 2, updates=60, batch_size=16)
    among = Player(both, build_fitted(both, {"norm": True, "decay": 0.01, **table}))
    among.play()
    for n in range(2):
        one = draw_streams([5], [Change.SHARED], updates=60, batch_size=16)
        own = {name: float(value[n]) for name, value in table.items()}
        alone = Player(one, build_fitted(one, {"norm": True, "decay": 0.01, **own}))
        alone.play()
        assert np.array_equal(alone.loss[:, 0], among.loss[:, n])


def test_a_path_is_the_method_of_its_numbers(tmp_path):
    file = tmp_path / "own.json"
    file.write_bytes(to_file({**START, "fits": 1.25}))
    assert full_settings(str(file), {})["fits"] == 1.25
    assert full_settings("shipped", {"soon": -0.5})["soon"] == -0.5
    with pytest.raises(InputError, match=r"shipped.soon is -9; give a number from -2 to 5"):
        full_settings("shipped", {"soon": -9})
    streams = draw_streams([5], [Change.SHARED], updates=3)
    assert build_learner(str(file), streams).controller.numbers["fits"] == 1.25
    assert set(RATES) < set(read_numbers(SHIPPED)) == set(NUMBERS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory; give a file that bench/scripts/fit_streams.py wrote"),
        ("[", "is not a file of a controller of streams; give a file that bench/scripts/fit_streams.py wrote"),
        ("[]", "is not a file of a controller of streams"),
        (json.dumps({"numbers": {"fits": 1}}), "differ in the number 'away'"),
        (json.dumps({"numbers": {**START, "lr": 7}}), "lr is 7 in .*; give a number from 0.001 to 0.1"),
        (json.dumps({"numbers": {**START, "lr": None}}), "lr is None in"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, content, said):
    file = tmp_path / "own.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=said):
        full_settings(str(file), {})
