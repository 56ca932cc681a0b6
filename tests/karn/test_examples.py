"""Test what the closing lines say of the examples that the figures rest on."""

import pytest

from esper.karn.terminal.console import split_lines

SIZES = {"train": 540, "probe": 135, "validation": 90, "test": 135}


def test_the_size_of_a_shared_test_split_is_said_with_what_the_intervals_cover():
    (line,) = split_lines({"envs": 8, "examples": SIZES})
    assert line == (
        "test split: 135 examples, the same for every environment; intervals and ± cover the choice of starts, not of these "
        "examples"
    )


def test_of_one_environment_nothing_is_said_of_intervals():
    assert split_lines({"envs": 1, "examples": SIZES}) == ["test split: 135 examples"]


def test_the_environments_of_a_mixture_have_test_splits_of_their_own():
    (line,) = split_lines({"envs": 2, "examples": {name: [size, size + 10] for name, size in SIZES.items()}})
    assert line.startswith("test splits: 135 to 145 examples, for every environment another problem")
    assert "the choice of problems, examples and starts together" in line


@pytest.mark.parametrize(("part", "why"), [("test", "on other examples"), ("probe", "by chance")])
@pytest.mark.parametrize("shared", [True, False])
def test_a_split_of_fewer_than_30_examples_is_warned_of(part, why, shared):
    def lines(size):
        sizes = {**SIZES, part: size}
        return split_lines(
            {"envs": 2, "examples": sizes if shared else {name: [size, 500] for name, size in sizes.items()}}
        )

    assert lines(30)[1:] == []
    (warning,) = lines(29)[1:]
    assert warning.startswith(f"warning: the {part} split has only 29 examples; ")
    assert warning.endswith(why)


def test_a_summary_of_an_earlier_version_has_no_sizes():
    assert split_lines({"envs": 2}) == []
