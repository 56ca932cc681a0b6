"""Judge a growth, in one line: whether the grown networks beat those that one has without growth. E environments.

What a seed contributes is not asked here: that is the network less the seed, which trained beside it, and a network that never
had the seed may be as good.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from esper.leyline.config.tree import RewardConfig
from esper.leyline.data.objective import objective_of
from esper.leyline.intervals import differences, mean_and_error, t_interval
from esper.leyline.lifecycle.view import Scores
from esper.leyline.messages import counted, rounded
from esper.runs.baselines import Absent, BaselineResult

RIVALS: Mapping[str, str] = {
    "twin": "the host as it is (twin)",
    "plain": "a network of this size from the start (plain)",
    "same-size": "the grown one from the start (same-size)",
}
"""The static networks that one could have without growth, in the order of the line. Skips are another host, and no rival."""


def compared_networks(
    grown: Sequence[float | None],
    static: Mapping[str, BaselineResult | Absent],
    host_params: NDArray[Any],
    reward: RewardConfig,
) -> dict[str, dict[str, Any]]:
    """Compare J of the grown networks (E,) on the test split with that of each rival that was trained, by environment.

    Returns the E values of J of each, and the mean and the 95 % t interval of the differences; None without one.
    """
    found = {}
    for name in RIVALS:
        trained = static.get(name)
        if trained is None or isinstance(trained, Absent):
            continue
        scores = Scores(trained.metric, trained.loss, trained.params - host_params)
        worth = objective_of(scores, host_params, reward)
        theirs = [None if each != each else each for each in worth.tolist()]
        gain = t_interval(differences(grown, theirs))
        ends = [None if end != end else end for end in gain[:3]]
        found[name] = {"test_objective": theirs, **dict(zip(("difference", "low", "high"), ends, strict=True))}
    return found


def verdict(summary: Mapping[str, Any], reward: RewardConfig) -> str:
    """Say in one line whether growth paid, from the figures of a summary with its `compared` networks.

    It paid if J of the grown networks is above J of the twin and of the plain networks, each with its whole interval, and not
    below J of the same-size networks. It did not pay if no seed was kept, if one of the three is above the grown networks with
    its whole interval, or if they are not resolved from the twin and the mean of the twin or of the plain networks is at least
    theirs: the host as it is costs nothing. Everything else is not resolved.
    """
    if summary["status"] == "failed":
        return "No verdict: the run failed, so its figures do not say whether growth pays."
    envs, kept = summary["envs"], sum(map(bool, summary["grown"]))
    many = counted(envs, "environment")
    grown, metric = summary["test_objective"]["grown"], f"test_{summary['metric']}"
    rivals = {
        name: t_interval(differences(grown, each["test_objective"])) for name, each in summary["compared"].items()
    }
    cut = f"interrupted after {summary['steps_done']} of {counted(summary['steps'], 'step')}"
    interrupted = summary["status"] == "interrupted"
    if not kept and interrupted:
        return f"Not resolved whether growth pays: {cut}, and no seed is kept yet."
    if not kept:
        name = summary["metric"]
        own = rounded(mean_and_error(summary[metric]["grown"])[0], ".3f")
        nothing = "no seed was planted"
        if planted := len(summary["plantings"]):
            # a reason begins with the condition; the figures of this seed follow a semicolon
            reasons = Counter(entry["reason"].partition(";")[0] for entry in summary["prunes"]).most_common(1)
            most = "".join(f" ({times} removed: {reason})" for reason, times in reasons)
            nothing = f"no seed was kept of {planted} planted{most}"
        clauses = [f"{nothing}, so the grown network is the host alone, with {name} {own}"]
        for rival in ("twin", "plain"):  # a seed that acted and was pruned has changed how the host trained
            values = summary["baselines"].get(rival, {}).get(metric)
            if values is not None and values != summary[metric]["grown"]:
                clauses.append(f"{RIVALS[rival]} has {rounded(mean_and_error(values)[0], '.3f')}")
        return f"Growth did not pay here: {'; '.join(clauses)}."
    seeds = f"{kept} of {many} kept a seed"
    if not rivals:
        return (
            f"Not resolved whether growth paid: {seeds}, and no network without growth was trained beside them; "
            "--baselines twin,same-size,plain (baselines in Python) trains some."
        )
    worth = summary["metric"] if reward.objective == "metric" else "minus the loss"
    prices = [name for name, price in (("rent", reward.rent), ("compute", reward.compute_price)) if price]
    if prices:
        worth = f"J ({worth} less {' and '.join(prices)})"
    others = (
        f"{RIVALS[name]} has {rounded(mean_and_error(summary['compared'][name]['test_objective'])[0], '.3f')} "
        f"(growth {gain:+.3f})"
        for name, gain in rivals.items()
    )
    clauses = [", ".join([f"{worth} is {rounded(mean_and_error(grown)[0], '.3f')} with growth", *others])]
    twin, plain = rivals.get("twin"), rivals.get("plain")
    unresolved = twin is not None and twin.size > 1 and not twin.above
    as_good = unresolved and any(gain.mean <= 0 for gain in (twin, plain) if gain is not None)
    if as_good or any(gain.below for gain in rivals.values()):
        head = "Growth did not pay here"
    elif twin is not None and twin.above and (plain is None or plain.above):
        head = "Growth paid"
    else:
        head = f"Not resolved by {many} whether growth paid"
    if twin is not None and not twin.above:
        equal = "is as good" if twin.size > 1 and twin.mean <= 0 else "may be as good"
        without = "is better" if twin.below else equal
        clauses.append(f"{seeds}, yet the host without it {without}")
        gap = t_interval(differences(summary[metric]["grown"], summary["baselines"]["twin"][metric]))
        if gap.above and reward.objective == "metric":
            clauses.append(f"what the seeds add to {summary['metric']}, {gap:+.3f}, is not worth their rent")
    else:
        clauses.append(seeds)
    if twin is None:
        clauses.append("the host as it is was not trained beside them (--baselines twin)")
    if plain is None and head == "Growth paid":
        clauses.append(f"not compared with {RIVALS['plain']}")
    if interrupted:
        clauses.append(cut)
    if envs == 1:
        clauses.append("one environment gives no interval (--envs 16, envs=16 in Python)")
    return f"{head}: {'; '.join(clauses)}."


def verdict_of_loop(kept: int, added: int, host: int, *, finished: bool, outlook: str = "") -> str:
    """Say in one line what is known of a growth in a loop of a person's own, beside which no network without growth is trained.

    kept: seeds that were kept, with `added` parameters together. host: parameters of the model. outlook: what training on and
    another seed promise.
    """
    if not kept:
        if not finished:
            return "Not resolved whether growth pays: no seed is kept yet."
        return (
            "Growth did not pay here: no seed was kept, so the network is the model alone, as the loop trained it"
            + (f"; {outlook}." if outlook else ".")
        )
    size = f"{counted(kept, 'seed')} with {counted(added, 'parameter')}, {added / host:.1%} of the model's"
    return (
        f"Not resolved whether growth paid: {size}, {'is' if kept == 1 else 'are'} kept, but no network without growth was "
        f"trained beside this one. To know, train the model without esper.Growth, and one of {host + added:,} parameters from "
        "the start, on the same batches, and compare all three on examples that none of them has seen."
    )
