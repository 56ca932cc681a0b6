"""Measure what `repeat` brings to a small byte transformer, whose blocks may run again with their own weights.

    python scripts/measure_repeat.py
    python scripts/measure_repeat.py --seeds 8 --steps 3000

For each seed three networks begin with the same weights. One trains as it is; one grows by `esper.Growth` with the blueprint
'repeat' alone, under a budget of one parameter a block; the third is the first one that trains for as many seconds as the second
took. The loss is that of bytes of files that no training batch is from. Seconds are those of one thread of the processor.
"""

import argparse
import copy
import time
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.leyline.intervals import t_interval
from esper.leyline.messages import GrowthWarning

VOCABULARY, LENGTH, WIDTH, BATCH, RATE = 256, 64, 32, 16, 3e-3


class Block(nn.Module):
    """Computes a pre-norm block with causal attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Maps bytes (B, L) to scores of the next byte (B, L, 256)."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over the bytes of each sequence, (B,)."""
    return F.cross_entropy(output.mT, y, reduction="none").mean(1)


def trained(
    model: nn.Module, task: esper.Task, seed: int, *, steps: int, repeats: bool = False, seconds: float = 0.0
) -> tuple[nn.Module, float, int]:
    """Train for a number of steps, or for seconds if there are more of them; returns the network, the seconds and the keeps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    growth, begin, number = None, time.thread_time(), 0
    if repeats:
        probe = [(task.probe.x[k : k + 32], task.probe.y[k : k + 32]) for k in range(0, 128, 32)]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        growth = esper.Growth(
            model,
            optimizer,
            probe=probe,
            loss=loss_of,
            budget=len(model.blocks) / parameters,
            every=max(steps // 40, 1),
            steps=steps,
            seed=seed,
            settings={"blueprints": ["repeat"]},
        )
    while number < steps or time.thread_time() - begin < seconds:
        rows = torch.randint(0, len(task.train.x), (BATCH,), generator=generator)
        loss_of(model.train()(task.train.x[rows]), task.train.y[rows]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if growth is not None:
            growth.step()
    kept = 0
    if growth is not None:
        model, kept = growth.finish(), len(growth.summary()["keeps"])
    return model, time.thread_time() - begin, kept


@torch.no_grad()
def held_out(model: nn.Module, task: esper.Task) -> float:
    """Return the mean loss on sequences of the test split."""
    return float(
        torch.cat(
            [loss_of(model.eval()(x), y) for x, y in zip(task.test.x.split(64), task.test.y.split(64), strict=True)]
        ).mean()
    )


def main() -> None:
    """Print a table of the losses and their paired differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GrowthWarning)
    task, losses = esper.get_task("stdlib-text"), []
    print("seed  plain  repeat  plain, equal seconds  kept  seconds: plain  repeat")
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        first = Decoder(options.blocks)
        plain, own, _ = trained(copy.deepcopy(first), task, seed, steps=options.steps)
        grown, taken, kept = trained(copy.deepcopy(first), task, seed, steps=options.steps, repeats=True)
        longer, _, _ = trained(copy.deepcopy(first), task, seed, steps=options.steps, seconds=taken)
        losses.append([held_out(each, task) for each in (plain, grown, longer)])
        one, two, three = losses[-1]
        print(f"{seed:4}  {one:.4f}  {two:.4f}  {three:.4f}  {kept}  {own:.1f}  {taken:.1f}", flush=True)
    for name, other in (("as many steps", 0), ("as many seconds", 2)):
        gain = t_interval([each[other] - each[1] for each in losses])
        print(f"lower loss than the plain network with {name}: {gain:+.4f}")


if __name__ == "__main__":
    main()
