"""Test text for a terminal: numbers with their nouns, and what a misspelt name was meant to be."""

import pytest

from esper.leyline.messages import counted, did_you_mean, kind_of, with_article


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (12_345, "12,345 rows"), (-1, "-1 rows")]
)
def test_a_noun_is_in_the_singular_for_one_alone(number, expected):
    assert counted(number, "row") == expected


def test_a_noun_may_bring_its_own_plural():
    assert [counted(number, "loss", "losses") for number in (1, 2)] == ["1 loss", "2 losses"]


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ("digit", {}, "did you mean 'digits'?"),
        ("digit", {"most": 3}, "did you mean 'digits', 'digital' or 'dig'?"),
        ("digit", {"first": ["a", "b"]}, "did you mean 'a' or 'b'?"),
        ("spiral", {}, ""),
        (7, {}, ""),
    ],
)
def test_a_misspelt_name_is_answered_with_the_names_that_are_most_similar(given, arguments, expected):
    assert did_you_mean(given, ["digits", "digital", "dig", "wave"], **arguments) == expected


def test_a_type_has_the_article_that_is_said_in_front_of_it():
    assert [kind_of(value) for value in (3, "x", {})] == ["an int", "a str", "a dict"]
    names = ["Embedding", "LSTM", "GRU", "RMSNorm", "ndarray", "UserDict", "Linear", "NoneType"]
    assert [with_article(name).split()[0] for name in names] == ["an", "an", "a", "an", "an", "a", "a", "a"]
