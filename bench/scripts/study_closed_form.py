"""Measure the correction in closed form on the held-out cases of `bench/docs/heal-images.md`, beside the damaged hosts.

    python bench/scripts/study_closed_form.py

J of the cases of that page, at a cap of 6 % and rent .1. Differences have 95 % bootstrap intervals over hosts, each with all of
its cases.
"""

import numpy as np
import torch
from collect_healing import SOURCES
from study_heal import STUDIES, difference
from torch import nn

from esper_bench.healing.data import Subset
from esper_bench.healing.heal import DEFAULTS, CorrectedHost, DamagedHost, HealCase, split_of

TASK = "heal-images"


@torch.no_grad()
def accuracy(host: nn.Module, of: HealCase) -> float:
    """Return the accuracy of a host on the test split."""
    x, y = split_of(of, Subset.TEST)
    return float((host(x)[:, : of.problem.classes].argmax(-1) == y).float().mean())


def damaged(of: HealCase) -> float:
    """Return J of the damaged host."""
    return accuracy(DamagedHost(of.number, of.damage, True, of.hosts)(), of)


def corrected(of: HealCase) -> float:
    """Return J of the corrected host, which pays rent for the parameters that the correction stores."""
    host, spent = CorrectedHost(of, DEFAULTS["governor"]["param_limit"]).corrected()
    size = sum(parameter.numel() for parameter in host.parameters())
    return accuracy(host, of) - DEFAULTS["reward"]["rent"] * spent / size


def main() -> None:
    torch.set_num_threads(1)
    study = STUDIES[TASK]
    facts: list[HealCase] = SOURCES[TASK].cases(study.part, study.cases)
    never, ours = (np.array([of(each) for each in facts]) for of in (damaged, corrected))
    host, kind = (
        np.array(column) for column in zip(*((each.number, str(each.damage.kind)) for each in facts), strict=True)
    )
    print(
        f"keys {facts[0].key:,} to {facts[-1].key:,}\n\n| damage | cases | never | closed form (taught) |\n|---|---|---|---|"
    )
    for name in ("all", *sorted(set(kind))):
        at = np.full(len(kind), True) if name == "all" else kind == name
        print(f"| {name} | {at.sum()} | {never[at].mean():.3f} | {ours[at].mean():.3f} |")
    print(f"\nover never, points: {difference(ours[:, None], never[:, None], host)}")


if __name__ == "__main__":
    main()
