"""Test whether units that a growth has kept can be removed again where the probe does not notice, and what the test data say.

    python bench/scripts/study_unused_units.py             # 4 seeds of 4 settings, a minute on one core

Networks grow as those of `study_narrow_places.py`. Then each unit that growth has added is removed on trial, in the order of the
loss without it: it goes if the loss on the probe, less that of the whole network, is at most its standard error over examples.
Prints the units, those that go, and the test loss before and after.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from study_narrow_places import SETTINGS, STEPS, mlp, split
from torch import Tensor, nn

import esper
from esper.kasmina.blueprints.vector import MLPSeed

Losses = Callable[[Tensor, Tensor], Tensor]


def grown_units(network: nn.Module, widened: dict[str, tuple[int, int]]) -> list[Tensor]:
    """List the outgoing weights of every unit that growth has added."""
    writes = [
        (part.out.weight, range(part.out.weight.shape[1])) for part in network.modules() if isinstance(part, MLPSeed)
    ]
    linear = [name for name, part in network.named_children() if isinstance(part, nn.Linear)]
    for layer, (before, after) in widened.items():
        behind = network.get_submodule(linear[linear.index(layer) + 1])
        writes.append((behind.weight, range(before, after)))
    return [weight.data[:, unit] for weight, units in writes for unit in units]


@torch.no_grad()
def prune(network: nn.Module, units: list[Tensor], probe: tuple[Tensor, Tensor], losses: Losses) -> int:
    """Set the outgoing weights of units to 0 as far as the probe does not notice; return the number of units that went."""
    x, y = probe
    whole = losses(network(x), y)

    def rise(removed: Tensor) -> tuple[float, float]:
        kept = removed.clone()
        removed.zero_()
        difference = losses(network(x), y) - whole
        removed.copy_(kept)
        return float(difference.mean()), float(difference.std() / len(difference) ** 0.5)

    gone = 0
    for unit in sorted(units, key=lambda each: rise(each)[0]):
        mean, error = rise(unit)
        if mean <= error:
            unit.zero_()
            gone += 1
    return gone


def study(name: str, seed: int) -> str:
    """Grow one network and prune it; returns a row of the table."""
    setting = SETTINGS[name]
    data = split(setting)
    y, numbers = data.train[1], data.train[1].is_floating_point()
    outputs = y.shape[1] if numbers else int(y.max()) + 1
    torch.manual_seed(seed)
    network: nn.Module = mlp((data.train[0].shape[1], *setting.hidden, outputs))
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    loss = nn.MSELoss() if numbers else nn.CrossEntropyLoss()
    growth = esper.Growth(network, optimizer, probe=[data.probe], loss=loss, budget=setting.budget, every=30)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batch = torch.randint(len(y), (64,), generator=batches)
        inputs, targets = (part[batch] for part in data.train)
        loss(network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(inputs, targets)
    network = growth.finish()

    def losses(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean(1) if numbers else F.cross_entropy(output, target, reduction="none")

    def on_test() -> float:
        with torch.no_grad():
            return float(losses(network(data.test[0]), data.test[1]).mean())

    before, units = on_test(), grown_units(network, growth.widened)
    gone = prune(network, units, data.probe, losses)
    return f"| {name} | {seed} | {len(units)} | {gone} | {before:.3f} | {on_test():.3f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=400)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    print("| setting | seed | units added | removed | test loss | test loss without them |")
    print("|---|---|---|---|---|---|")
    for name in ("digits, 4-32", "digits, 2-2", "classes, 2-2", "diabetes, 1"):
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            print(study(name, seed), flush=True)


if __name__ == "__main__":
    main()
