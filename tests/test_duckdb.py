"""Run the SQL of docs/duckdb.md on the events of a run, as they are and exported."""

import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "duckdb.md"


@pytest.mark.slow
def test_the_sql_of_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch, capfd):
    pytest.importorskip("duckdb", reason="the extra dev installs DuckDB")
    monkeypatch.chdir(tmp_path)
    blocks = PAGE.read_text(encoding="utf-8").split("```python\n")[1:]
    (tmp_path / "page.py").write_text("\n".join(block.split("```")[0] for block in blocks))
    namespace = runpy.run_path(str(tmp_path / "page.py"))
    assert namespace["summary"]["status"] == "finished"
    assert "GERMINATE" in capfd.readouterr().out
