"""Test what a run came to, printed from Python."""

import pytest

import esper
from populations import small_config


def test_show_prints_the_closing_table_of_a_summary(capsys):
    config = small_config(task="iris", envs=2, steps=1, data={"batch_size": 16}, baselines=["twin"])
    summary = esper.grow(esper.get_task("iris"), config, controller="never")
    capsys.readouterr()
    esper.show(summary)
    out = capsys.readouterr().out
    assert out.startswith("iris, never: 2 environments, 1 of 1 step ")
    assert all(words in out for words in ("grown", "twin", "grew: nothing", f"\n{summary['verdict']}\n"))


@pytest.mark.parametrize("value", [5, {}, {"status": "finished"}])
def test_show_refuses_what_is_no_summary(value):
    with pytest.raises(esper.InputError, match=r"that is not a summary; give what esper\.grow"):
        esper.show(value)
