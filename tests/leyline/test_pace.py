import pytest

from esper.leyline.messages import duration
from esper.leyline.progress import Pace


def test_the_first_part_says_how_long_the_others_take():
    said = []
    pace = Pace(3_000, "networks", said.append)
    pace.add(100, None)
    assert said == []
    pace.add(200, 14.0)
    assert said == ["200 of 3,000 networks took 14 seconds; about 3 minutes for the others"]
    pace.add(200, 100.0)
    assert len(said) == 1


def test_nothing_is_said_where_nothing_is_left():
    said = []
    Pace(8, "rounds", said.append).add(8, 1.0)
    assert said == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.123, "0.12 seconds"),
        (14.4, "14 seconds"),
        (89, "89 seconds"),
        (90, "2 minutes"),
        (5399, "90 minutes"),
        (9000, "2.5 hours"),
    ],
)
def test_a_time_is_given_in_the_unit_that_a_person_would_take(seconds, words):
    assert duration(seconds) == words
