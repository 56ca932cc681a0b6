"""Check that the list of mutations fits the code."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_mutation_has_its_place():
    mutations = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))["MUTATIONS"]
    assert len(mutations) == 46
    for file, old, new, tests in mutations:
        assert (ROOT / "src" / "esper" / file).read_text(encoding="utf-8").count(old) == 1, (file, old)
        assert old != new
        assert all((ROOT / "tests" / name).exists() for name in tests.split()), tests
