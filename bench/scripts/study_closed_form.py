"""The correction in closed form on the held-out cases of `bench/docs/heal-images.md`, beside the damaged hosts.

    python bench/scripts/study_closed_form.py

J of plain hosts with one damaged site, the first 150 from the first fresh key on, at a cap of 6 % and rent .1. Differences have
95 % bootstrap intervals over hosts, each with all of its cases.
"""

from itertools import islice

import numpy as np
import torch
from collect_healing import FIRST, concentrated
from study_heal import difference
from study_heal_settings import corrected

from esper_bench.healing.data import Part
from esper_bench.healing.heal import DEFAULTS, DamagedHost, Facts, describe, split_of
from esper_bench.healing.images import IMAGES

CASES = 150


@torch.no_grad()
def damaged(of: Facts) -> float:
    """Test accuracy of the damaged host."""
    x, y = split_of(of, Part.TEST)
    return float((DamagedHost(of.number, of.damage, True, of.hosts)()(x).argmax(-1) == y).float().mean())


def main() -> None:
    torch.set_num_threads(1)
    every = (describe(key, IMAGES) for key in range(FIRST["fresh"], FIRST["fresh"] + 2**16))
    facts = list(islice((each for each in every if each.plain and concentrated(each)), CASES))
    never = np.array([damaged(each) for each in facts])
    ours = corrected(facts, DEFAULTS["governor"]["param_limit"], DEFAULTS["reward"]["rent"]).objective[:, 0]
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
