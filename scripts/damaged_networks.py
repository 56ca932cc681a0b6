"""Make two networks that are trained on digits and damaged by torch's own utilities, for `esper heal`.

cd scripts
esper heal damaged_networks.py:pruned_cnn --intact damaged_networks.py:cnn --data damaged_networks.py:images
esper heal damaged_networks.py:quantised_transformer --intact damaged_networks.py:transformer --data damaged_networks.py:rows

Run as a script, it prints the loss and the accuracy of the intact networks on the digits that a heal of seed 0 holds back.
"""

import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import prune

from esper.runs.healing.training import examples_of, split, usual_loss

BITS = 2
HALF = 898
"""The networks are trained on the first so many digits; the healing data are the others."""


class ConvBlock(nn.Module):
    """Computes a convolution, its normalisation and a ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return torch.relu(self.norm(self.conv(x)))


class Layer(nn.Module):
    """Computes a layer of a transformer, normalised first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, C) to (B, L, C)."""
        h = self.first(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.second(x))))


class Rows(nn.Module):
    """Reads a digit as eight rows of eight pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(torch.zeros(8, 32))
        self.layers, self.head = nn.ModuleList(Layer(32) for _ in range(4)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 8, 8) to logits (B, 10)."""
        h = self.embed(x) + self.place
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


def images() -> tuple[Tensor, Tensor]:
    """Return digits that the networks were not trained on, as images (899, 1, 8, 8)."""
    x, y = digits()
    return x[HALF:], y[HALF:]


def rows() -> tuple[Tensor, Tensor]:
    """Return the same digits as sequences of rows (899, 8, 8)."""
    x, y = images()
    return x[:, 0], y


def cnn() -> nn.Module:
    """Train a CNN of three convolutional blocks of 24 channels."""
    torch.manual_seed(0)
    blocks = [ConvBlock(24) for _ in range(3)]
    ends = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)
    return trained(nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), *blocks, *ends), digits()[0][:HALF])


def pruned_cnn() -> nn.Module:
    """Return the CNN without 60 % of the output channels of each block, by torch.nn.utils.prune.ln_structured."""
    model = cnn()
    for block in model.children():
        if isinstance(block, ConvBlock):
            prune.ln_structured(block.conv, "weight", amount=0.6, n=2, dim=0)
    return model


def transformer() -> nn.Module:
    """Train a transformer of four layers of width 32."""
    torch.manual_seed(0)
    return trained(Rows(), digits()[0][:HALF, 0])


def quantised_transformer() -> nn.Module:
    """Return the transformer with linear weights of three layers at 2 bits, by torch.fake_quantize_per_channel_affine."""
    model = transformer()
    for layer in list(model.layers)[:3]:
        for linear in (layer.up, layer.down, layer.attention.out_proj):
            quantise(linear.weight)
    return model


@torch.no_grad()
def quantise(weight: Tensor) -> None:
    """Round the weights (O, I) of each output to the values that BITS bits have, in place."""
    top = 2 ** (BITS - 1) - 1
    scale, zero = weight.abs().amax(1) / top, torch.zeros(len(weight), dtype=torch.int32)
    weight.copy_(torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -top - 1, top))


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return all digits of scikit-learn as images (1797, 1, 8, 8) in [0, 1], and their labels."""
    data = load_digits()
    return torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target)


def trained(model: nn.Module, x: Tensor, steps: int = 600) -> nn.Module:
    """Train a model with AdamW on the first digits, and return it."""
    optimizer, y = torch.optim.AdamW(model.parameters(), lr=3e-3), digits()[1]
    for _ in range(steps):
        at = torch.randint(len(x), (64,))
        nn.functional.cross_entropy(model(x[at]), y[at]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main() -> None:
    """Print the loss and the accuracy of the intact networks."""
    torch.set_num_threads(1)
    for build, data in ((cnn, images), (transformer, rows)):
        network, held = build(), split(examples_of(data()), 0).held
        with torch.no_grad():
            output = network(held.x)
        right = (output.argmax(-1) == held.y).float().mean()
        print(
            f"{build.__name__}: loss {usual_loss(output, held.y).mean():.4f}, accuracy {right:.4f}, {len(held)} digits"
        )


if __name__ == "__main__":
    main()
