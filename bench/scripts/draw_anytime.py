"""Draw what growth and each width are above the width that hindsight picks for each stop, from the figures of a study.

    python bench/scripts/study_anytime.py NAME --equal-batches --json FILE    # other figures than those of bench/docs/anytime.md
    python bench/scripts/draw_anytime.py docs/benchmarks/anytime.json --out docs/assets/anytime.svg

Lines are medians over seeds, bands go from the 10th to the 90th percentile. Where the median is more than .3 bits or 3 % of error
above hindsight, nothing is drawn.
"""

import argparse
from pathlib import Path

import numpy as np
from study_anytime import SETTINGS

from esper.karn.report.drawing import Series, below_each_other, curves, paint
from esper_bench.records import load_record

NAMES = {
    "stdlib": "the sources of the standard library",
    "headers": "the C++ headers of torch",
    "python": "the Python sources of torch",
    "letter": "letter",
}
MOST = {"bits": 0.3, "% error": 3.0}
"""What is further above hindsight is not drawn."""


def main() -> None:
    """Draw one picture of all files, below each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .svg, .png or .pdf")
    asked = parser.parse_args()
    figures = []
    keys: dict[str, list[str]] = {}
    for path in asked.files:
        record = load_record(path)
        for name in (each for each in NAMES if each in record):
            setting, arms = SETTINGS[name], {arm: np.array(each) for arm, each in record[name].items()}
            hindsight = np.min([each.mean(0) for arm, each in arms.items() if arm.startswith("width")], 0)
            styles = {"grown": "grown"} | {f"width {width}": f"run{at + 2}" for at, width in enumerate(setting.widths)}
            styles["restarts"] = "run6"
            series = []
            for arm, style in styles.items():
                gap = arms[arm] - hindsight
                gap[:, np.median(gap, 0) > MOST[setting.unit]] = np.nan
                series.append(Series(arm, gap.T, style))
                keys.setdefault(style, [])
                keys[style] += [arm] if arm not in keys[style] else []
            x = [float(value) for value in np.log10(setting.stops[: len(hindsight)] / 1e9)]
            figures.append(curves(NAMES[name], x, series, "log10 of the compute [GFLOP]", setting.unit))
    picture = below_each_other(figures)._replace(keys=[(style, " or ".join(names)) for style, names in keys.items()])
    asked.out.write_bytes(paint(picture, asked.out.suffix[1:]))


if __name__ == "__main__":
    main()
