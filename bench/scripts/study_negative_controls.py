"""Data sets that a small host solves: the right answer is not to grow. The heuristic beside its never-grow twins.

python bench/scripts/study_negative_controls.py [--quick] [--keys N] [--page FILE]
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import esper

TASKS = ("iris-plain", "wine-plain", "breast-cancer-plain")


def main() -> None:
    """Grow, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few keys, to see that it runs")
    parser.add_argument(
        "--keys", type=int, default=100, help="environments, each with initial weights and orders of its own"
    )
    parser.add_argument("--page", type=Path, help="write the table to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keys = 4 if arguments.quick else arguments.keys
    lines = [
        "# Negative controls",
        "",
        f"`python bench/scripts/study_negative_controls.py --keys {keys}`, torch {torch.__version__}, one thread. Test accuracy "
        "of the networks of heuristic and of their never-grow twins; the interval is a 95 % bootstrap over keys. The tasks are "
        "those of iris, wine and breast-cancer on their hosts without skips.",
        "",
        "| task | never | heuristic | difference | median parameters added | networks that grew |",
        "|---|---|---|---|---|---|",
    ]
    for name in TASKS:
        summary = esper.grow(esper.get_task(name), {"envs": keys, "baselines": ["twin"]})
        host, grown = (np.array(summary["test_accuracy"][which]) for which in ("host", "grown"))
        added = np.array(summary["grown_params"]) - summary["host_params"]
        draws = np.random.default_rng(0).integers(keys, size=(4000, keys))
        low, high = np.quantile((grown - host)[draws].mean(1), [0.025, 0.975])
        lines.append(
            f"| {name} | {host.mean():.4f} | {grown.mean():.4f} | {(grown - host).mean():+.4f} [{low:+.4f}, {high:+.4f}] | "
            f"{np.median(added):.0f} | {(added > 0).mean():.0%} |"
        )
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if arguments.page:
        arguments.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
