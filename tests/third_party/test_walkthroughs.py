"""Run the walk-through page on a model of Hugging Face's transformers."""

import pytest

from walkthroughs import PAGES, grows, runs

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
pytestmark = pytest.mark.third_party


def test_the_page_runs_and_grows():
    names = runs("huggingface", 10)
    assert grows(names)
    assert f"{names['summary']['host_params']:,} parameters" in (PAGES / "huggingface.md").read_text(encoding="utf-8")
