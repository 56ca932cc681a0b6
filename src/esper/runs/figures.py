"""Compute the final figures of a run: its networks on the test and validation splits, and their sizes."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.network.grown_network import RegrownHost
from esper.kasmina.stack.wider_rows import wider_hosts
from esper.leyline.config.tree import Config
from esper.leyline.data.objective import objective_of
from esper.leyline.data.task import AnyTask, Instance, Mixture, Split, Task, nonfinite
from esper.leyline.lifecycle.view import Floats, Scores
from esper.tolaria.engine import TaskEngine
from esper.tolaria.measure.bounds import constant_metric

T = TypeVar("T")

Summary = dict[str, Any]
"""The final figures as in summary.json: strict JSON, with null for a quantity that was not measured."""


Status = Literal["finished", "interrupted", "failed"]
"""The status of a run that has ended: failed if every environment was rolled back in every step."""

Pair = dict[str, Any]
"""One quantity over environments: of the twins that do not grow as `host`, None without twins, and of the `grown` networks."""


def final_figures(engine: TaskEngine[Any], task: AnyTask, config: Config) -> Summary:
    """Evaluate every twin and grown network on the test and validation splits. No other function of a run reads test data."""
    name, host_params = task.objective.metric, engine.population.host_params[: config.envs].tolist()
    test = _evaluate(engine, config, name, test_splits(engine, task))
    validation = _evaluate(engine, config, name, engine.population.validation_splits())
    reward = config.reward
    worth = name if reward.objective == "metric" else "- loss"
    host = f"max(host parameters, {reward.rent_size:,})" if min(host_params) < reward.rent_size else "host parameters"
    charged = (
        f" - {reward.compute_price:g} * compute beyond the host's / that of the host" if reward.compute_price else ""
    )
    figures: Summary = {
        "metric": name,
        "objective_formula": f"{worth} - {reward.rent:g} * ln(1 + added parameters / {host}){charged}",
        "regrown": isinstance(task, Task) and isinstance(task.host, RegrownHost),
        "examples": split_sizes(task, engine.space.instance.tolist()),
        "host_params": host_params[0] if len(set(host_params)) == 1 else host_params,
        "grown_params": engine.exported_params()[: config.envs].tolist(),
        **{f"test_{name}": pair for name, pair in test.items()},
        **{f"validation_{name}": pair for name, pair in validation.items()},
        **_constant(task, engine.space.instance.tolist(), name),
        **_rare_classes(engine, task, config),
    }
    # The network with the best validation score by the key `select`. A network without a score is the worst.
    values = validation[name if config.select == "metric" else "objective"]["grown"]
    env = max(range(config.envs), key=lambda env: (values[env] is not None, values[env] or 0.0))
    return figures | {"best": {"env": env, "select": config.select, "validation": values[env]}}


def test_splits(engine: TaskEngine[Any], task: AnyTask) -> list[Split]:
    """Return the test split of every environment."""
    return [split for key in engine.space.instance.tolist() if (split := task.test_split(key)) is not None]


def split_sizes(task: AnyTask, instance: Sequence[int]) -> Summary:
    """Return the finite examples of each split: one number where all environments share it, and E numbers for a mixture."""

    def sizes(problem: Instance, test: Split) -> Summary:
        splits = {"train": problem.train, "probe": problem.probe, "validation": problem.validation, "test": test}
        found = {part: int((~nonfinite(split)).sum()) for part, split in splits.items()}
        return found if problem.source is None else {**found, "train": len(problem.source)}

    every = _by_instance(task, instance, sizes)
    return {part: [each[part] for each in every] for part in every[0]} if isinstance(task, Mixture) else every[0]


def _by_instance(task: AnyTask, instance: Sequence[int], compute: Callable[[Instance, Split], T]) -> list[T]:
    """Compute a value for each of E keys from the instance and its test split, once where environments share these."""
    keys = instance if isinstance(task, Mixture) else [instance[0]] * len(instance)
    values: dict[int, T] = {}
    for key in dict.fromkeys(keys):
        test = task.test_split(key)
        assert test is not None, "a run must have a test split"
        values[key] = compute(task.instance(key), test)
    return [values[key] for key in keys]


def _evaluate(engine: TaskEngine[Any], config: Config, name: str, splits: Sequence[Split]) -> dict[str, Pair]:
    """Return the metric, under its name, the loss and the objective J of every twin and grown network on its split."""
    metric, loss = engine.evaluate(splits)
    worth = exported_objective(engine, metric, loss)
    return {name: _pair(metric, config), "loss": _pair(loss, config), "objective": _pair(worth, config)}


def exported_objective(engine: TaskEngine[Any], metric: Floats, loss: Floats) -> Floats:
    """Return J (rows,) of the networks of an engine as exported, from their metric and loss on a split."""
    config = engine.config
    host_params = np.tile(engine.population.host_params[: config.envs], engine.rows // config.envs)
    added = engine.exported_params() - host_params
    return objective_of(Scores(metric, loss, added), host_params, config.reward) - engine.state.compute.price(config)


def _constant(task: AnyTask, instance: Sequence[int], name: str) -> Summary:
    """Return what the most frequent class, or the mean target, of train splits comes to on test splits, where one can."""

    def value(problem: Instance, test: Split) -> float | None:
        fitted, held = (split.y[~nonfinite(split)] for split in (problem.train, test))
        metric = constant_metric(task.objective, fitted, Split(held, held), problem.target_scaling)
        return None if np.isnan(metric) else metric

    constant = _by_instance(task, instance, value)
    return {"constant": {f"test_{name}": constant}} if set(constant) != {None} else {}


RARE = 0.5
"""A class is rare if it has less than this part of the examples that it would have if all classes were of one size."""
CONFUSED = 64
"""Largest number of classes of which the summary holds a confusion matrix."""


def _rare_classes(engine: TaskEngine[Any], task: AnyTask, config: Config) -> Summary:
    """Return figures that rare classes do not vanish in, of every network, where a class is `RARE` outside of the test split.

    Nothing for a mixture, whose environments have classes of their own, and where an example has several labels or none
    that is a class.
    """
    if isinstance(task, Mixture):
        return {}
    problem, test = task.instance(int(engine.space.instance[0])), task.test
    assert test is not None
    known = torch.cat(
        [split.y[~nonfinite(split)].cpu() for split in (problem.train, problem.probe, problem.validation)]
    )
    if known.is_floating_point() or known.dim() != 1 or known.min() < 0 or known.max() >= problem.outputs:
        return {}
    counts = known.bincount(minlength=problem.outputs).numpy()
    occurring = counts > 0
    rare = np.flatnonzero(occurring & (counts * occurring.sum() < RARE * len(known)))
    if not len(rare):
        return {}
    outputs, truth = engine.outputs(test), test.y[~nonfinite(test)].cpu().numpy()
    if outputs.shape[1:] != (len(truth), problem.outputs):  # an objective of one's own, whose outputs are no classes
        return {}
    names = [*(problem.classes or range(problem.outputs))]
    return {
        "rare_classes": {
            "classes": names,
            "rare": [names[index] for index in rare.tolist()],
            "examples": np.bincount(truth, minlength=problem.outputs)[rare].tolist(),
            "weighted": getattr(task.objective, "class_weights", None) is not None,
            "grown": class_figures(truth, outputs[: config.envs]),
            "host": class_figures(truth, outputs[config.envs :]) if config.twin else None,
        }
    }


def class_figures(truth: NDArray[np.int64], outputs: Floats) -> Summary:
    """Return what networks (E,) with outputs (E, N, C) come to when every class counts alike, however rare it is.

    `balanced_accuracy`, `f1_macro` and `roc_auc` have E values each: the means over the classes of `truth` (N,) of recall, of F1
    and of the area under the curve of the class against the others; None where an output is not finite, and without a second
    class. `confusion` (C, C) counts the examples of all networks, by their classes and by the predicted ones; None for more than
    `CONFUSED` classes.
    """
    from sklearn.metrics import confusion_matrix, f1_score, recall_score, roc_auc_score  # takes 1 s

    classes, found = outputs.shape[2], np.unique(truth)
    figures: Summary = {"balanced_accuracy": [], "f1_macro": [], "roc_auc": []}
    confused = np.zeros((classes, classes), np.int64)
    for output in outputs:
        if len(found) < 2 or not np.isfinite(output).all():
            for values in figures.values():
                values.append(None)
            continue
        predicted, odds = output.argmax(1), np.exp(output - output.max(1, keepdims=True))
        shares = odds / odds.sum(1, keepdims=True)
        areas = [roc_auc_score(truth == each, shares[:, each]) for each in found.tolist()]
        recall = recall_score(truth, predicted, labels=found, average="macro", zero_division=0)
        f1 = f1_score(truth, predicted, labels=found, average="macro", zero_division=0)
        for values, value in zip(figures.values(), (recall, f1, np.mean(areas)), strict=True):
            values.append(float(value))
        confused += confusion_matrix(truth, predicted, labels=np.arange(classes))
    return {**figures, "confusion": confused.tolist() if classes <= CONFUSED else None}


def _pair(values: Floats, config: Config) -> Pair:
    """Make a pair from values over rows, environments first and then their twins, with None for nan."""
    plain = [None if np.isnan(value) else float(value) for value in values]
    return {"host": plain[config.envs :] if config.twin else None, "grown": plain[: config.envs]}


def host_sizes(engine: TaskEngine[Any], task: AnyTask) -> list[int]:
    """Return the parameters of a host at first, and after each time that all networks became wider (`widen.at`)."""
    hosts, population = task.instance(int(engine.space.instance[0])).host, engine.population
    with drawn_with(0):
        return [count(wider_hosts(hosts, population.widenings[:many])()) for many in range(population.widened + 1)]


def widening_figures(engine: TaskEngine[Any], task: AnyTask) -> Summary:
    """Return the sizes over time of networks that became wider together, and the steps of `widen.at` that were not reached."""
    at, population = engine.config.widen.at, engine.population
    figures: Summary = {"widen_ahead": list(ahead)} if (ahead := at[population.widened :]) else {}
    if population.widened:
        sizes = pairwise(host_sizes(engine, task))
        figures["widened"] = [
            {
                "step": step,
                "host_params_before": before,
                "host_params": after,
                "widths": {name: list(each) for name, each in wider.widths.items()},
                "left_out": wider.left_out,
            }
            for step, wider, (before, after) in zip(at, population.widenings, sizes, strict=False)
        ]
    return figures


def effort_figures(engine: TaskEngine[Any]) -> Summary:
    """Return what torch.compile did, if the run asked for it; the updates that were skipped, if they were in float16; and the
    compute beyond that of the hosts, where it has a price or candidates were tried.

    Steps are those of one row of the host, summed over the environments; the share is of all that the hosts took.
    """
    population, config, envs = engine.population, engine.config, slice(0, engine.config.envs)
    figures: Summary = {} if population.compiled is None else {"compiled": population.compiled}
    if population.overflowed is not None:
        skipped = population.overflowed[: engine.rows].tolist()
        figures["skipped_updates"] = {
            "updates": engine.state.step * config.data.batches_per_step // config.optimizer.accumulation_steps,
            "host": skipped[config.envs :] if config.twin else None,
            "grown": skipped[envs],
        }
    compute, hosts = engine.state.compute, config.envs * engine.state.step
    seeds, forks = float(compute.seeds[envs].sum()), float(compute.forks[envs].sum())
    if config.reward.compute_price or forks:
        figures["compute"] = {
            "host_row_steps": hosts,
            "seed_row_steps": round(seeds, 3),
            "trial_row_steps": round(forks, 3),
            "share": round((seeds + forks) / max(hosts, 1), 6),
            "price": config.reward.compute_price,
            "paid": [round(each, 9) for each in compute.price(config)[envs].tolist()],
        }
    return figures
