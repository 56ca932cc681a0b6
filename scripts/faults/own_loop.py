"""Run a loop of one's own that grows a network with a moving average, and goes on from its file after a kill.

    python scripts/faults/own_loop.py --out DIR

DIR/state.pt is the state after the last whole round, DIR/final.pt what the loop came to.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper

STEPS, ROUND = 400, 20
"""Steps of the optimizer, and steps between two saves."""


def main() -> None:
    """Train to the end, from the state that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    folder = parser.parse_args().out
    folder.mkdir(exist_ok=True)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 10))
    esper.graft(model, ["0", "2"], example=x[:2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    probe = [(x[:256], y[:256]), (x[256:512], y[256:512])]
    growth = esper.Growth(
        model,
        optimizer,
        ema=average,
        probe=probe,
        loss=nn.functional.cross_entropy,
        every=ROUND,
        steps=STEPS,
        budget=0.5,
    )
    done = 0
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt", weights_only=True)
        growth.load_state_dict(state["growth"])
        done = state["done"]
    while done < STEPS:
        batch = torch.randint(512, len(x), (32,), generator=torch.Generator().manual_seed(done))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        average.update_parameters(model)
        growth.step()
        done += 1
        if done % ROUND == 0:
            save(folder / "state.pt", {"growth": growth.state_dict(), "done": done})
    growth.finish()
    with torch.no_grad():
        said = {"average": average(x), "outputs": model(x), "count": average.n_averaged}
    save(folder / "final.pt", {**said, "model": model.state_dict(), "kept": len(growth.summary()["keeps"])})
    (folder / "state.pt").unlink()


def save(path: Path, content: object) -> None:
    """Write a file beside and rename it, so that a kill leaves the earlier one or this one."""
    torch.save(content, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    main()
