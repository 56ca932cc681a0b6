"""Text for a terminal: numbers with their nouns."""

import pytest

from esper.leyline.text import counted


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (12_345, "12,345 rows"), (-1, "-1 rows")]
)
def test_a_noun_is_in_the_singular_for_one_alone(number, expected):
    assert counted(number, "row") == expected


def test_a_noun_may_bring_its_own_plural():
    assert [counted(number, "loss", "losses") for number in (1, 2)] == ["1 loss", "2 losses"]
