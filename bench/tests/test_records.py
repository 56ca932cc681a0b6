"""Test that records of figures carry the version of the suite, and those of another version are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.messages import InputError
from esper_bench import records

BENCH = Path(__file__).parents[1]


def test_figures_and_records_come_back_as_they_were_written(tmp_path):
    records.save_figures(tmp_path / "new" / "x.npz", objective=np.arange(3.0), names=np.array(["a", "b"]))
    found = records.load_figures(tmp_path / "new" / "x.npz")
    assert found.keys() == {"objective", "names"}
    assert found["objective"].tolist() == [0, 1, 2]
    records.save_record(tmp_path / "r.json", {"rows": [1, 2]})
    assert records.load_record(tmp_path / "r.json") == {"rows": [1, 2]}
    assert json.loads((tmp_path / "r.json").read_text())["suite"] == records.SUITE


@pytest.mark.parametrize("version", [None, records.SUITE - 1])
def test_files_of_another_version_of_the_suite_are_refused_by_name(tmp_path, version):
    given = {} if version is None else {"suite": version}
    np.savez(tmp_path / "x.npz", objective=np.zeros(2), **given)
    (tmp_path / "r.json").write_text(json.dumps({"rows": [], **given}))
    of = "no version" if version is None else f"version {version}"
    for load, name in ((records.load_figures, "x.npz"), (records.load_record, "r.json")):
        with pytest.raises(InputError, match=rf"{name} is of {of} of the suite, and figures of version") as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"{", b"[1]"])
def test_files_of_another_format_or_cut_short_are_refused_by_name(tmp_path, content):
    for load, name in ((records.load_figures, "x.npz"), (records.load_record, "r.json")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name} holds no (figures|record) of a study; delete it"):
            load(tmp_path / name)


def test_no_table_is_made_of_records_of_another_version(tmp_path, script):
    (tmp_path / "letters, 2 bits.json").write_text(json.dumps({"suite": records.SUITE + 1, "network": "letters"}))
    code, _, err = script(BENCH / "scripts/study_real_networks.py", "--tables", "--out", str(tmp_path))
    assert code == 2
    assert "letters, 2 bits.json is of version" in err
    assert len(err.splitlines()) == 1


def test_the_readme_of_the_bench_names_the_version_of_its_figures():
    assert f"version {records.SUITE} of the suite" in (BENCH / "README.md").read_text(encoding="utf-8")
