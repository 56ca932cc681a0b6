"""Compare one run of a growing estimator with a search over sizes, on tables and images.

    python bench/scripts/study_estimators.py                    # 8 seeds of 8 settings, about an hour on one core
    python bench/scripts/study_estimators.py --seeds 2 digits moons
    python bench/scripts/study_estimators.py --plans digits     # the first two rows alone

Rows of a setting: `GrowingClassifier` or `GrowingRegressor` with its defaults; the same with plan="anytime"; networks of one
width that the same class trains alike; the one of the first three with the lowest loss on the examples that are held back, for
the seconds of the three; and scikit-learn's own estimators with their defaults. Every row of a seed has the same training and
test examples. Scores are accuracies, or R2. `letter` and `fashion` need the Debian packages r-cran-mlbench (with `rdata`) and
dataset-fashion-mnist. Prints a table in Markdown.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    make_classification,
    make_friedman1,
    make_moons,
)
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import esper
from esper.leyline.intervals import t_interval
from esper_bench.public_sets import fashion_mnist, letter_recognition

WIDTHS = (16, 64, 256)
"""Those of the search: the sizes that the growing network has by default."""
BEYOND = 1024
"""A width that it does not reach by default."""
Data = tuple[NDArray[Any], NDArray[Any]]


def fashion() -> Data:
    """Return the 70,000 images as rows of pixels, and their labels."""
    parts = fashion_mnist()
    return np.concatenate([x.reshape(len(x), -1) for x, _ in parts]), np.concatenate([y for _, y in parts])


SETTINGS: Mapping[str, Callable[[], Data]] = {
    "digits": lambda: load_digits(return_X_y=True),
    "breast-cancer": lambda: load_breast_cancer(return_X_y=True),
    "moons": lambda: make_moons(2000, noise=0.25, random_state=0),
    "classes": lambda: make_classification(
        4000, 20, n_informative=12, n_classes=6, n_clusters_per_class=3, random_state=0
    ),
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "friedman": lambda: make_friedman1(3000, noise=0.5, random_state=0),
    "letter": letter_recognition,
    "fashion": fashion,
}


class Fit(NamedTuple):
    """Holds what a row of one seed reached."""

    score: float
    seconds: float
    loss: float
    units: int


def fit(model: Any, data: list[NDArray[Any]]) -> Fit:
    """Fit an estimator, and score it on the test examples."""
    x, x_test, y, y_test = data
    begun = time.process_time()
    model.fit(x, y)
    seconds = time.process_time() - begun
    looks = getattr(model, "looks_", ())
    loss = min((look.loss for look in looks), default=float("nan"))
    return Fit(float(model.score(x_test, y_test)), seconds, loss, getattr(model, "units_", 0))


def study(name: str, seeds: int, plans: bool) -> str:
    """Run all rows of a setting, or those of the two plans alone; returns their lines."""
    x, y = SETTINGS[name]()
    classes = y.dtype.kind in "iu" and name not in ("diabetes", "friedman")
    growing = esper.GrowingClassifier if classes else esper.GrowingRegressor
    mlp, trees = (
        (MLPClassifier, HistGradientBoostingClassifier) if classes else (MLPRegressor, HistGradientBoostingRegressor)
    )
    rows: dict[str, list[Fit]] = {}
    for seed in range(seeds):
        data = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y if classes else None)
        found = {
            "growing": fit(growing(random_state=seed), data),
            "growing, anytime": fit(growing(plan="anytime", random_state=seed), data),
        }
        if not plans:
            for width in WIDTHS:
                found[f"{width} units"] = fit(growing(units=width, most_units=width, random_state=seed), data)
            each = [found[f"{width} units"] for width in WIDTHS]
            found["the best of these"] = min(each, key=lambda one: one.loss)._replace(
                seconds=sum(e.seconds for e in each)
            )
            found[f"{BEYOND} units"] = fit(growing(units=BEYOND, most_units=BEYOND, random_state=seed), data)
            found["MLP of scikit-learn"] = fit(make_pipeline(StandardScaler(), mlp(random_state=seed)), data)
            found["gradient boosting"] = fit(trees(random_state=seed), data)
        for row, one in found.items():
            rows.setdefault(row, []).append(one)
    lines = []
    for row, fits in rows.items():
        units = sorted({one.units for one in fits} - {0})
        shown = [name, row, f"{np.mean([one.score for one in fits]):.4f}"]
        pairs = list(zip(rows["growing"], fits, strict=True))
        if row == "growing" or seeds < 2:
            shown += ["", "1.0"]
        else:
            gain = t_interval([mine.score - other.score for mine, other in pairs])
            shown.append(f"{gain:+.4f}")
            shown.append(f"{np.median([other.seconds / mine.seconds for mine, other in pairs]):.1f}")
        shown.append(f"{np.mean([one.seconds for one in fits]):.1f}")
        shown.append(", ".join(map(str, units)))
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"names: {', '.join(SETTINGS)}; all")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--plans", action="store_true", help="the rows of the two plans alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| setting | row | score | growing is better by | times the seconds | seconds | units |")
    print("|---|---|---|---|---|---|---|")
    for name in SETTINGS:
        if not asked.settings or name in asked.settings:
            print(study(name, asked.seeds, asked.plans), flush=True)


if __name__ == "__main__":
    main()
