"""Run what docs/saving.md shows of plain PyTorch and ONNX; tests/third_party/test_saving_page.py runs the rest."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "saving.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch about its own exporter
@pytest.mark.slow
def test_the_python_of_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx.reference", reason="onnx is not installed: pip install onnx onnxscript")
    monkeypatch.chdir(tmp_path)
    text, _ = PAGE.read_text(encoding="utf-8").split("## Hugging Face")
    namespace = {}
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
        exec(compile(block, f"saving.md, block {index}", "exec"), namespace)
    x, network = namespace["x"], namespace["network"]
    served = onnx.ReferenceEvaluator("network.onnx")
    (found,) = served.run(None, {served.input_names[0]: x.numpy()})
    np.testing.assert_allclose(found, network(x).detach().numpy(), atol=1e-4)
    assert any(".esper." in name for name in network.state_dict())
