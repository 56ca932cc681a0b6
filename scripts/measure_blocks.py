"""Measure what the blueprints `block` and `narrow-copy` bring to stacks of two blocks whose number or widths may grow.

    python scripts/measure_blocks.py digits
    python scripts/measure_blocks.py bytes --seeds 8 --steps 3000
    python scripts/measure_blocks.py heads

For each seed five networks train on the same batches, all but the static one from the same weights: as it is; grown by
`esper.Growth` with its default menu; grown with the one blueprint alone; a static one; and as it is for the seconds of the third.
'digits' is a residual network on the digits of scikit-learn and 'bytes' the byte transformer of `measure_repeat.py`, whose static
network has twice the blocks from the start. 'heads' is a byte transformer with attention heads and gated units, to which
'narrow-copy' adds some; its static network is what that grew, drawn anew. The loss is that of examples that no network was
trained on. Seconds are those of one thread of the processor.
"""

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure_repeat import BATCH, LENGTH, VOCABULARY, Decoder, loss_of
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper
from esper.leyline.intervals import t_interval
from esper.leyline.messages import GrowthWarning

BLOCKS, WIDTH, RATE, BUDGET = 2, 16, 3e-3, 2.0


class Block(nn.Module):
    """Computes a pre-norm block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


def residual(blocks: int) -> nn.Module:
    """Return a network that maps digits (B, 64) to scores of the classes (B, 10)."""
    return nn.Sequential(nn.Linear(64, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, 10))


class Heads(nn.Module):
    """Computes causal attention of two heads of 8 features, of which there may be more."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.qkv, self.out = 8, nn.Linear(32, 48), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Computes a feed-forward of 16 gated units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class HeadsBlock(nn.Module):
    """Computes a block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.second, self.mlp = nn.LayerNorm(32), Heads(), nn.LayerNorm(32), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Maps bytes (B, T) to scores of the next byte (B, T, 256)."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        self.blocks = nn.Sequential(*(HeadsBlock() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]])))


class Setting(NamedTuple):
    """Holds a network, by its number of blocks, and what it learns."""

    build: Callable[[int], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    train: tuple[Tensor, Tensor]
    probe: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int
    steps: int
    blueprint: str = "block"


def digits() -> Setting:
    """Return the residual network on digits."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = [(x[rows], y[rows]) for rows in (order[:1000], order[1000:1300], order[1300:])]
    return Setting(residual, nn.CrossEntropyLoss(reduction="none"), *parts, 64, 1500)


def texts(build: Callable[[int], nn.Module], blueprint: str) -> Setting:
    """Return a byte transformer on Python's standard library."""
    task = esper.get_task("stdlib-text")
    parts = ((part.x, part.y) for part in (task.train, task.probe, task.test))
    train, (x, y), test = parts
    return Setting(build, loss_of, train, (x[:128], y[:128]), test, BATCH, 600, blueprint)


def redrawn(network: nn.Module) -> nn.Module:
    """Return a network of the same sizes with first weights."""
    network = copy.deepcopy(network)
    for part in network.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    return network


def trained(
    model: nn.Module, setting: Setting, seed: int, steps: int, blueprints: list[str] | None, *, grow: bool
) -> tuple[nn.Module, float, str]:
    """Train a network, with growth or without; return it, the seconds, and what became of it."""
    generator = torch.Generator().manual_seed(seed)
    optimizer, growth, begin = torch.optim.AdamW(model.parameters(), lr=RATE), None, time.thread_time()
    if grow:
        probe = list(zip(setting.probe[0].split(64), setting.probe[1].split(64), strict=True))
        settings = {} if blueprints is None else {"blueprints": blueprints}
        growth = esper.Growth(
            model,
            optimizer,
            probe=probe,
            loss=setting.loss,
            budget=BUDGET,
            every=max(steps // 50, 1),
            steps=steps,
            seed=seed,
            settings=settings,
        )
    for _ in range(steps):
        rows = torch.randint(0, len(setting.train[0]), (setting.batch,), generator=generator)
        x, y = setting.train[0][rows], setting.train[1][rows]
        setting.loss(model.train()(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if growth is not None:
            growth.step(x, y)
    became = ""
    if growth is not None:
        model = growth.finish()
        became = f"{len(growth.summary()['keeps'])} kept, {growth.architecture if blueprints else '-'}"
    return model, time.thread_time() - begin, became


@torch.no_grad()
def held_out(model: nn.Module, setting: Setting) -> float:
    """Return the mean loss on the test examples."""
    pairs = zip(setting.test[0].split(64), setting.test[1].split(64), strict=True)
    return float(torch.cat([setting.loss(model.eval()(x), y) for x, y in pairs]).mean())


def main() -> None:
    """Print a table of the losses and their paired differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=("digits", "bytes", "heads"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="0 for 1500 on digits and 600 elsewhere")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GrowthWarning)
    settings = {
        "digits": digits,
        "bytes": lambda: texts(Decoder, "block"),
        "heads": lambda: texts(Transformer, "narrow-copy"),
    }
    setting = settings[options.setting]()
    steps, losses, taken = options.steps or setting.steps, [], []
    print(f"seed  plain  default menu  {setting.blueprint}  static  plain for as many seconds  seconds of each")
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        first = setting.build(BLOCKS)
        runs = [
            trained(copy.deepcopy(first), setting, seed, steps, None, grow=False),
            trained(copy.deepcopy(first), setting, seed, steps, None, grow=True),
            trained(copy.deepcopy(first), setting, seed, steps, [setting.blueprint], grow=True),
        ]
        static = redrawn(runs[2][0]) if setting.blueprint != "block" else setting.build(2 * BLOCKS)
        runs.append(trained(static, setting, seed, steps, None, grow=False))
        longer = round(steps * runs[2][1] / runs[0][1])
        runs.append(trained(copy.deepcopy(first), setting, seed, longer, None, grow=False))
        losses.append([held_out(model, setting) for model, _, _ in runs])
        taken.append([seconds for _, seconds, _ in runs])
        shown = "  ".join(f"{loss:.4f}" for loss in losses[-1])
        print(
            f"{seed:4}  {shown}  {' '.join(f'{each:.1f}' for each in taken[-1])}  {runs[1][2]}; {runs[2][2]}",
            flush=True,
        )
    for name, one, other in (
        ("the plain network", 2, 0),
        ("growth with the default menu", 2, 1),
        ("the static network", 2, 3),
        ("the plain network for as many seconds", 2, 4),
    ):
        print(
            f"loss of {setting.blueprint!r} minus that of {name}: {t_interval([each[one] - each[other] for each in losses]):+.4f}"
        )
    means = [sum(column) / len(column) for column in zip(*losses, strict=True)]
    print("means " + "  ".join(f"{each:.4f}" for each in means))


if __name__ == "__main__":
    main()
