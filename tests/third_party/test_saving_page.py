"""Run what docs/saving.md shows of Hugging Face; a model that was grown is never saved without a word."""

import re
from pathlib import Path

import pytest

from esper.leyline.messages import GrowthWarning

PAGE = Path(__file__).parents[2] / "docs" / "saving.md"
pytestmark = pytest.mark.third_party


def test_the_python_of_the_part_on_hugging_face_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    monkeypatch.chdir(tmp_path)
    _, text = PAGE.read_text(encoding="utf-8").split("## Hugging Face")
    code, namespace = "".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)), {}
    with pytest.warns(GrowthWarning, match=r"attach\(GPT2LMHeadModel\.from_pretrained\(folder\), folder \+ '/esper'\)"):
        exec(compile(code, "Hugging Face", "exec"), namespace)
    assert namespace["growth"].summary()["keeps"]
    assert namespace["host"].config.architectures == ["GPT2LMHeadModel"]
    bare = namespace["transformers"].GPT2LMHeadModel.from_pretrained("published")
    assert not namespace["torch"].equal(
        bare(namespace["tokens"]).logits, namespace["model"](namespace["tokens"]).logits
    )
