"""Run the pages of docs/walkthroughs, as scripts/study_walkthroughs.py reads them."""

import math
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "walkthroughs"
STUDY = runpy.run_path(str(ROOT / "scripts" / "study_walkthroughs.py"))


def runs(name, scale):
    """Run all code of a page with 1 / scale of its steps, and return its names."""
    code = STUDY["code_of"](name).changed(0, scale)
    names = {}
    for part in code:
        exec(compile(part, f"{name}.md", "exec"), names)
    return names


def grows(names):
    """Return whether a page ended with a network that has grown, and that gives a number on its test data."""
    summary, (x, y) = names["summary"], names["test"][0]
    network = names["network"].eval()
    output = network(**x) if isinstance(x, dict) else network(x)
    planted = {each["site"] for each in summary["plantings"]}
    kept = {name.split(".esper.")[0] for name in network.state_dict() if ".esper." in name}
    return (
        summary["status"] == "finished"
        and planted
        and kept == {each["site"] for each in summary["keeps"]}
        and math.isfinite(names["loss"](output, y).item())
    )
