"""What growing costs a training loop: between decisions, at a decision, and while a seed incubates.

    python scripts/benchmark_growth.py                 # a transformer of 1 million parameters
    python scripts/benchmark_growth.py --layers 2 5 10

Steps of the plain and of the grafted models alternate. Each is compared with the plain one beside it, and the median
over `--steps` of these is shown. A decision measures the network on `--probe` batches of the size of a training batch.
"""

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.leyline.actions import Actions, Op

VOCABULARY, LENGTH, WIDTH, HEADS = 256, 64, 128, 4


class Block(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, C) -> (B, L, C)."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Reads tokens and scores the next one at each position."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) int64 -> (B, L, V)."""
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Plants:
    """A controller that plants one seed at its first decision where it is told to, and waits."""

    def __init__(self, plants: bool) -> None:
        self.plants = plants

    def act(self, view: esper.View) -> Actions:
        """GERMINATE at the first slot, or WAIT."""
        actions = Actions.wait(1)
        if self.plants and view.step == 0:
            actions.op[:], actions.blueprint[:] = Op.GERMINATE, int(view.masks.blueprint[0, 0].argmax())
            actions.tempo[:], actions.target[:] = 1, 3
        return actions

    def store(self, outcome: esper.Outcome) -> None:
        """Nothing is remembered."""

    def update(self) -> dict[str, float]:
        """Nothing is learned."""
        return {}


class Trainer:
    """A model with its optimizer, and a clock."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.growth: esper.Growth | None = None
        self.seconds: list[float] = []

    def step(self, shadow: bool = False) -> None:
        """One training step, growth included."""
        ids = torch.randint(0, VOCABULARY, (self.batch, LENGTH + 1))
        begin = time.perf_counter()
        loss(self.model(ids[:, :-1]), ids[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.growth is not None:
            self.growth.step(*((ids[:, :-1], ids[:, 1:]) if shadow else ()))
        self.seconds.append(time.perf_counter() - begin)


def ratio(trainer: Trainer, base: Trainer) -> float:
    """Median over steps of how many times as long a step takes; the first five warm up."""
    return statistics.median(one / other for one, other in zip(trainer.seconds[5:], base.seconds[5:], strict=False))


def grown(plain: nn.Module, batch: int, probe: int, *, every: int, plants: bool = False) -> Trainer:
    """A trainer of a grafted copy of a model."""
    trainer = Trainer(copy.deepcopy(plain), batch)
    ids = torch.randint(0, VOCABULARY, (probe, batch, LENGTH + 1))
    batches = [(each[:, :-1], each[:, 1:]) for each in ids]
    trainer.growth = esper.Growth(
        trainer.model, trainer.optimizer, probe=batches, loss=loss, controller=Plants(plants), every=every, budget=1.0
    )
    return trainer


def measure(layers: int, batch: int, steps: int, probe: int) -> None:
    """Print the figures of a model with so many layers."""
    plain = Decoder(layers)
    size = sum(parameter.numel() for parameter in plain.parameters())
    trainers = {
        "plain": Trainer(copy.deepcopy(plain), batch),
        "idle": grown(plain, batch, probe, every=10**6),
        "straight-through": grown(plain, batch, probe, every=10**6, plants=True),
        "shadow": grown(plain, batch, probe, every=10**6, plants=True),
        "decision": grown(plain, batch, probe, every=1),
    }
    for name in ("straight-through", "shadow"):
        growth = trainers[name].growth
        assert growth is not None
        growth.engine.close()  # the seed has germinated, and incubates from here on
        growth.engine.apply(Actions.wait(1))
    for step in range(steps + 5):
        for name, trainer in trainers.items():
            if name != "decision" or step < 25:
                trainer.step(shadow=name == "shadow")
    base = trainers["plain"]
    growth = trainers["idle"].growth
    assert growth is not None
    print(f"{layers} layers, {size:,} parameters, {len(growth.population.sites)} sites")
    print(f"  a training step              {1e3 * statistics.median(base.seconds[5:]):8.2f} ms")
    for name, words in (
        ("idle", "grafted, between decisions"),
        ("straight-through", "with a seed, straight-through"),
        ("shadow", "with a seed, shadow"),
    ):
        print(f"  {words:<30} {ratio(trainers[name], base) - 1:+8.1%}")
    print(f"  a decision on {probe} batches {ratio(trainers['decision'], base) - 1:17.2f} training steps")


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[5], help="layers of each model (default: 5)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a batch (default: 8)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each kind (default: 100)")
    parser.add_argument("--probe", type=int, default=4, help="batches of the probe (default: 4)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for layers in arguments.layers:
        measure(layers, arguments.batch, arguments.steps, arguments.probe)


if __name__ == "__main__":
    main()
