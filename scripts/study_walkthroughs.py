"""Compare growth on the pages in docs/walkthroughs with static networks: same data, batches, steps and optimizer.

The code of a page is what runs. A static network runs the same code without its lines of Esper, from the same weights where it
has the same host, and on the same batches. Learning rates are chosen on the seeds `TUNING`, which are not reported.

    python scripts/study_walkthroughs.py gpt                    # runs the study, and prints its table
    python scripts/study_walkthroughs.py gpt --tune             # prints the score at each learning rate
    python scripts/study_walkthroughs.py gpt --table            # prints the table of the results that are kept

Results are kept in docs/walkthroughs/PAGE.json, one seed at a time, and are not made again.
"""

import argparse
import copy
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.utils import parametrize

import esper
from esper.leyline.lifecycle.vocabulary import Blend

PAGES = Path(__file__).parents[1] / "docs" / "walkthroughs"
TUNING = (100, 101)
KEY = 10**6
"""Key by which the seeds of the static networks are drawn."""
USUAL = ("bypass-mlp", "bypass-conv-3x3")
"""The blueprints that the heuristic plants, by kind of stream."""

Prepare = Callable[[nn.Module, torch.optim.Optimizer, Mapping[str, Any]], None]
"""Changes the host of a page in front of its training: the host, its optimizer, and the names that the page defines."""


class Page(NamedTuple):
    """Describes what is particular to a page.

    host: the name of the function or class that builds its host; its first argument is the width of the hidden layers.
    hidden: that width on the page.
    score: a key of `SCORES`.
    rates: learning rates to choose among.
    chosen: the learning rates of the static networks that do not take that of the page.
    """

    host: str
    hidden: int
    score: str
    rates: tuple[float, ...]
    chosen: Mapping[str, float]


STUDIED = {
    "resnet": Page("resnet", 8, "accuracy", (0.03, 0.1), {}),
    "gpt": Page("GPT", 64, "bits", (3e-3, 1e-2, 3e-2), {}),
    "huggingface": Page("gpt2", 64, "bits", (1e-3, 3e-3, 1e-2), {}),
    "adapt": Page("build", 64, "bits", (1e-3, 3e-3, 1e-2, 3e-2), {"lora": 1e-2, "full": 3e-3, "as-large-full": 3e-3}),
}
SCORES: Mapping[str, tuple[str, float]] = {"bits": ("bits per byte", -1.0), "accuracy": ("accuracy", 1.0)}
"""The name of each score, and whether more is better."""
ARMS = {
    "grown": "grown",
    "never": "the host, trained without growth",
    "frozen": "the frozen host",
    "all-sites": "a seed at every site from the start",
    "final-size": "the seeds that were kept, from the start",
    "as-large": "a host with wider hidden layers, as large as the grown one",
    "lora": "LoRA at every linear layer of the blocks, as large as what grew",
    "full": "the host, all parameters trained",
    "as-large-full": "a host with wider hidden layers, as large as the grown one, pretrained alike, all parameters trained",
}


class Code(NamedTuple):
    """Holds the Python of a page."""

    definitions: str
    pretraining: str  # empty where the page has none
    training: str

    def changed(self, seed: int, scale: int, rate: float | None = None) -> "Code":
        """Return the code with another seed, 1 / `scale` of its steps and, unless None, another learning rate in the training."""

        def shorter(match: re.Match[str]) -> str:
            steps, every = (max(int(figure) // scale, 1) for figure in match.groups())
            return f"seed, steps, every = {seed}, {steps}, {every}"

        line = re.compile(r"^seed, steps, every = \d+, (\d+), (\d+)", re.MULTILINE)
        assert line.search(self.pretraining + self.training), "a page names its seed, its steps and those of a decision"
        before, after = (line.sub(shorter, code) for code in (self.pretraining, self.training))
        return Code(self.definitions, before, after if rate is None else re.sub(r"lr=[\d.e-]+", f"lr={rate}", after))

    def static(self) -> "Code":
        """Return the code with a call of `prepare` in place of growth."""
        lines = [
            "prepare(model, optimizer)" if line.startswith("growth = ") else line
            for line in self.training.replace(", growth.step)", ")").splitlines()
            if line.startswith("growth = ") or "growth." not in line
        ]
        return self._replace(training="\n".join(lines))


def code_of(name: str) -> Code:
    """Read the Python of a page: what it defines, its pretraining where there is one, and its training."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    first, *between, last = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return Code(first, "\n".join(between), last)


class Result(NamedTuple):
    """Holds one network's score, its trained parameters, the processor seconds of the training, and the seeds that were kept."""

    score: float
    params: int
    seconds: float
    kept: list[list[str]]


# Static networks.


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[str, Any]) -> None:
    """Leave the host as it is."""


def planting(places: Sequence[Sequence[str]] | None, freeze: str) -> Prepare:
    """Return a function that plants seeds at full dose from the first step on: (site, blueprint) each, or None for every site."""

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[str, Any]) -> None:
        data = {"probe": names["probe"], "loss": names["loss"], "scheduler": names.get("scheduler")}
        growth = esper.Growth(model, optimizer, controller="never", budget=100.0, freeze=freeze, **data)
        population = growth.population
        sites = [site.name for site in population.sites]
        menu = [entry.name for entry in population.menu]
        usual = [name for name in USUAL if name in menu]
        for site, blueprint in places if places is not None else itertools.product(sites, usual):
            slot, number = sites.index(site), menu.index(blueprint)
            if population.space.fits[slot, number]:
                population.add(slot, number, Blend.ADD, KEY + slot)
        population.act_at(np.ones(len(sites), np.float32))

    return prepare


class LowRank(nn.Module):
    """Adds LoRA (arXiv 2106.09685, section 4.1): W + B A with B zero at first; the learning rate takes the place of its scale."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / math.sqrt(weight.shape[1]))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Map weights (out, in) to (out, in)."""
        return weight + self.b @ self.a


def adapting(added: int) -> Prepare:
    """Return a function that freezes the host and gives its blocks LoRA of one rank at each linear layer, `added` in all."""

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[str, Any]) -> None:
        model.requires_grad_(False)
        blocks = [part for part in model.modules() if isinstance(part, names["Block"])]
        linear = [part for block in blocks for part in block.modules() if isinstance(part, nn.Linear)]
        rank = max(round(added / sum(sum(part.weight.shape) for part in linear)), 1)
        with torch.random.fork_rng():
            torch.manual_seed(KEY)
            for part in linear:
                parametrize.register_parametrization(part, "weight", LowRank(part.weight, rank))
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})

    return prepare


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def widened(build: Callable[..., nn.Module], hidden: int, wanted: int) -> Callable[[], nn.Module]:
    """Return a builder of hosts whose hidden layers have the width at which they come closest to so many parameters.

    The size of a host is linear in that width. Behind such a host the random numbers go on as behind the host of the page.
    """
    with torch.random.fork_rng():
        own, wider = size(build()), size(build(hidden + 1))
    width = hidden + round((wanted - own) / (wider - own))

    def make() -> nn.Module:
        with torch.random.fork_rng():
            model = build(width)
        build()
        return model

    return make


# The study.


class Study:
    """Trains the networks of a page with one seed, for 1 / `scale` of the steps of the page."""

    def __init__(self, name: str, seed: int, scale: int) -> None:
        self.page, self.seed, self.scale, self.code = STUDIED[name], seed, scale, code_of(name)
        self.defined: dict[str, Any] = {}
        exec(compile(self.code.definitions, f"{name}.md", "exec"), self.defined)
        self.build = self.defined[self.page.host]

    def pretrained(self, build: Callable[..., nn.Module]) -> dict[str, Any]:
        """Return what the page defines, with the network that its pretraining makes of a host."""
        names = {**self.defined, self.page.host: build}
        exec(self.code.changed(self.seed, self.scale).pretraining, names)
        return names

    def train(self, names: Mapping[str, Any], prepare: Prepare | None = None, rate: float | None = None) -> Result:
        """Run the training of the page, with `prepare` in place of growth where it is given."""
        own = dict(names)
        code = self.code.changed(self.seed, self.scale, rate)
        if prepare is not None:
            code = code.static()
            own["prepare"] = lambda model, optimizer: prepare(model, optimizer, own)
        frozen = 0
        if "model" in own:
            own["model"] = copy.deepcopy(own["model"])
            frozen = size(own["model"])
            torch.manual_seed(self.seed)
        begin = time.process_time()
        exec(compile(code.training, "walkthrough", "exec"), own)
        seconds = time.process_time() - begin
        kept = [[each["site"], each["blueprint"]] for each in own["summary"]["keeps"]] if prepare is None else []
        trained = size(own["model"]) - (0 if prepare is nothing else frozen)
        return Result(self.score(own), trained, seconds, kept)

    def score(self, names: Mapping[str, Any]) -> float:
        """Return the score of the page's network on its test data."""
        model = names["model"].eval()
        outputs = []
        with torch.no_grad():
            for x, y in names["test"]:
                outputs.append((model(**x) if isinstance(x, dict) else model(x), y))
            if self.page.score == "accuracy":
                return float(torch.cat([output.argmax(1) == y for output, y in outputs]).double().mean())
            return statistics.fmean(float(names["loss"](output, y)) for output, y in outputs) / math.log(2)

    def run(self) -> dict[str, Result]:
        """Train every network of the page."""
        if self.code.pretraining:
            return self._adapt()
        names = self.defined
        grown = self.train(names)
        wide = {**names, self.page.host: widened(self.build, self.page.hidden, grown.params)}
        return {
            "grown": grown,
            "never": self.train(names, nothing),
            "all-sites": self.train(names, planting(None, "none")),
            "final-size": self.train(names, planting(grown.kept, "none")),
            "as-large": self.train(wide, nothing),
        }

    def _adapt(self) -> dict[str, Result]:
        """Train the networks of a page that has a pretraining; the seconds of the pretraining are not counted."""
        names, chosen = self.pretrained(self.build), self.page.chosen
        grown = self.train(names)
        wider = widened(self.build, self.page.hidden, size(names["model"]) + grown.params)
        return {
            "grown": grown,
            "frozen": Result(self.score(names), 0, 0.0, []),
            "all-sites": self.train(names, planting(None, "host")),
            "final-size": self.train(names, planting(grown.kept, "host")),
            "lora": self.train(names, adapting(grown.params), chosen["lora"]),
            "full": self.train(names, nothing, chosen["full"]),
            "as-large-full": self.train(self.pretrained(wider), nothing, chosen["as-large-full"]),
        }

    def tune(self, rate: float) -> dict[str, Result]:
        """Train the networks whose learning rates are chosen, at a rate."""
        if not self.code.pretraining:
            alone, full = (self.train(self.defined, prepare, rate) for prepare in (nothing, planting(None, "none")))
            return {"never": alone, "all-sites": full}
        names = self.pretrained(self.build)
        grown = self.train(names, None, rate)
        lora = self.train(names, adapting(grown.params), rate)
        return {"grown": grown, "lora": lora, "full": self.train(names, nothing, rate)}


def study(name: str, seeds: int, scale: int, path: Path) -> None:
    """Train the networks of a page with every seed whose results are not kept."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    for seed in range(seeds):
        if str(seed) not in kept:
            results = Study(name, seed, scale).run()
            kept[str(seed)] = {arm: result._asdict() for arm, result in results.items()}
            print(seed, {arm: round(result.score, 4) for arm, result in results.items()}, flush=True)
            path.write_text(json.dumps(kept, indent=1) + "\n")


def tune(name: str, scale: int) -> None:
    """Print the scores at every learning rate; each is the mean over the seeds that are not reported."""
    for rate in STUDIED[name].rates:
        found = [Study(name, seed, scale).tune(rate) for seed in TUNING]
        means = {arm: statistics.fmean(results[arm].score for results in found) for arm in found[0]}
        print(f"{rate:g}: {', '.join(f'{arm} {mean:.4f}' for arm, mean in means.items())}", flush=True)


def interval(values: Sequence[float]) -> str:
    """Format the mean over seeds with its 95 % interval by Student's t."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stdtrit(len(values) - 1, 0.975)) * error
    middle = statistics.fmean(values)
    return f"{middle:+.3f} [{middle - reach:+.3f}, {middle + reach:+.3f}]"


def table(name: str, kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of a page. The difference is positive where the network is better than the grown one."""
    words, sign = SCORES[STUDIED[name].score]
    trained = "trained parameters" if code_of(name).pretraining else "parameters"
    lines = [
        f"| network | {words} | better than the grown one by [95 %] | {trained} | seconds |",
        "|---|---|---|---|---|",
    ]
    for arm in next(iter(kept.values())):
        rows = [results[arm] for results in kept.values()]
        better = [sign * (results[arm]["score"] - results["grown"]["score"]) for results in kept.values()]
        means = [statistics.fmean(row[figure] for row in rows) for figure in ("score", "params", "seconds")]
        difference = "" if arm == "grown" else interval(better)
        lines.append(f"| {ARMS[arm]} | {means[0]:.3f} | {difference} | {means[1]:,.0f} | {means[2]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=STUDIED)
    parser.add_argument("--seeds", type=int, default=8, help="seeds of each network (default: 8)")
    parser.add_argument("--quick", action="store_true", help="two seeds and a tenth of the steps")
    parser.add_argument("--tune", action="store_true", help="compare learning rates")
    parser.add_argument("--table", action="store_true", help="print the table of the results that are kept")
    parser.add_argument("--out", type=Path, help="file of the results (default: docs/walkthroughs/PAGE.json)")
    arguments = parser.parse_args()
    path = arguments.out or PAGES / f"{arguments.page}.json"
    seeds, scale = (2, 10) if arguments.quick else (arguments.seeds, 1)
    if arguments.tune:
        tune(arguments.page, scale)
        return
    if not arguments.table:
        study(arguments.page, seeds, scale, path)
    print(table(arguments.page, json.loads(path.read_text())))


if __name__ == "__main__":
    main()
