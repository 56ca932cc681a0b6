"""The card of a version of `shipped`, in Markdown, from the facts that scripts/make_shipped.py measured."""

from collections.abc import Mapping
from typing import Any

AXES = {"seen": "every family trained on", "data": "its data family left out", "damage": "its kind of damage left out"}


def card(facts: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [HEAD.format(**facts, defaults=_defaults(facts)), *(_kind(kind) for kind in facts["kinds"])]
    return "\n".join([*parts, _losses(facts), TAIL.format(**facts)])


def _defaults(facts: Mapping[str, Any]) -> str:
    rows = [
        f"| {kind['hosts']} | {', '.join(f'`{name}`' for name in kind['needs'])} | `{kind['rule']}` | "
        f"`{_default(facts, kind)}` |"
        for kind in facts["kinds"]
    ]
    rows.append("| any other | | not measured | `heuristic` |")
    return "\n".join(rows)


def _default(facts: Mapping[str, Any], kind: Mapping[str, Any]) -> str:
    if not kind["recognised"]:
        return "heuristic"
    return str(facts["version"] if kind["wins"] else kind["rule"])


def _points(row: Mapping[str, Any]) -> str:
    return f"{100 * row['gain']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"


def _kind(kind: Mapping[str, Any]) -> str:
    lines = [f"## {kind['hosts'][0].upper()}{kind['hosts'][1:]}", ""]
    for part, word in (("training", "Trained on"), ("fresh", "Measured on")):
        each = [f"{cases} cases of `{name}`, keys {a:,} to {b:,}" for name, (a, b, cases) in kind[part].items()]
        lines.append(f"{word} {' and '.join(each)}.")
    lines += [
        f"{kind['plans']} plans were grown on each case. The best fixed plan on training cases is `{kind['best_fixed_plan']}`.",
        "",
        "| | " + " | ".join(f"`{name}`" for name in kind["objective"]) + " |",
        "|---|" + "---|" * len(kind["objective"]),
        "| J | " + " | ".join(f"{value:.3f}" for value in kind["objective"].values()) + " |",
        "",
        "`best` takes the best plan of each case by the same figures, so it is above what any controller can expect.",
        "Gain of `shipped`, points of J [95 %]:",
        "",
        "| over | " + " | ".join(AXES.values()) + " |",
        "|---|" + "---|" * len(AXES),
    ]
    lines += [
        f"| `{name}` | {' | '.join(_points(own[axis]) for axis in AXES)} |" for name, own in kind["rivals"].items()
    ]
    lines += [
        "",
        f"By the family that was left out, over `{kind['rule']}`:",
        "",
        "| left out | cases | points [95 %] |",
        "|---|---|---|",
    ]
    for axis, rows in kind["families"].items():
        lines += [f"| {axis}: {row['name']} | {row['cases']} | {_points(row)} |" for row in rows]
    if kind["skip"]:
        lines += [
            "",
            f"With `skip-mlp` in the menu, `shipped` plants it at the last slot: {_points(kind['skip'])} points over ",
        ]
        lines[-1] += f"`{kind['rule']}`, which has the menu without it."
    return "\n".join([*lines, ""])


def _losses(facts: Mapping[str, Any]) -> str:
    """Where the interval of a family or a rival lies below 0 or reaches it."""
    lines = ["## Where it loses", ""]
    for kind in facts["kinds"]:
        families = {f"{axis} {row['name']}": row for axis, rows in kind["families"].items() for row in rows}
        rivals = {f"`{name}`, {AXES[axis]}": own[axis] for name, own in kind["rivals"].items() for axis in AXES}
        for where, rows in ((f"left-out families against `{kind['rule']}`", families), ("all cases against", rivals)):
            worse = [f"{name} ({_points(row)})" for name, row in rows.items() if row["high"] < 0]
            level = [f"{name} ({_points(row)})" for name, row in rows.items() if row["low"] <= 0 <= row["high"]]
            lines.append(
                f"- On {kind['hosts']}, {where}: worse on {'; '.join(worse) or 'none'}. Level on {'; '.join(level) or 'none'}."
            )
    return "\n".join([*lines, *LOSSES, ""])


LOSSES = (
    "- It was not measured on residual hosts, on maps, on sequences, on frozen hosts with a menu of larger seeds, on\n"
    "  regressions, or on hosts that are trained and still train. There it decides, but nothing is known of how well.",
    "- On untrained hosts a plain network without the damage is better than anything that grows\n"
    "  ([headroom](benchmarks/headroom.md)).",
)

HEAD = """# The shipped controller

`{version}` is a [controller](glossary.md#controller) that comes with Esper: `esper grow TASK --controller shipped`,
`esper.get_controller("shipped")`. It is a rule and a file of {bytes:,} bytes that holds arrays only.
`esper controller shipped` prints this page.

It reads the host once, before the first step, plants all its seeds in that step, and keeps them. On hosts with a small
budget it does what the rule [`collapse`](hosts.md#controllers) does, unless fitted trees expect {margin:g} more in J of
another plan. Where the menu and the budget allow a `skip-mlp` at the last slot, it plants that and asks no trees: in
cross-validation on 320 training cases of `repair`, trees gained +0.0 [-0.4, +0.5] points over it, and lost 1.0 [0.3, 1.8]
with data families left out. Else, where they allow a `bypass-linear` or a `bypass-mlp`, the trees choose alone. The features
are shares, ratios and ranks within the host, so hosts may have any width and depth. It does not look again after some
steps; that was not tried.

## When it is the default

`esper grow` without `--controller` takes it where the table below says so, and prints which controller it took and why.
The table is read from the facts of the version, not from code. It is the default on hosts where, with whole families left
out of its training, the 95 % interval of its gain over the rule lies above 0, for families of data and for kinds of damage.
Else the rule that it was compared with is. A run cannot tell a damaged MLP from a sound one, where nothing should be
planted. So neither is the default on hosts that train: there it is `heuristic`.

| hosts | needs in the menu | compared with | default |
|---|---|---|---|
{defaults}
"""

TAIL = """## Streams

Streams of changing data have a controller of the same name, 18 numbers that are fitted by a script of its own:
`esper stream shipped` ([streams](streams.md), [figures](benchmarks/streams.md)). On fresh streams it is above resetting the
blocks by +.0097 [.0089, .0104] over a mixture of seven changes, and below it in a drift (-.0104) and on novel contexts
(-.0017). It shares no arrays with this one. `--streams` of the command below fits it too.

## Versions

A run stores the name of the version in its config and the SHA-256 of the arrays in its summary (`controller_digest`) and
its checkpoints. A resumed run takes the version of its config. A version that the installed Esper does not have is refused,
and so is a checkpoint that was decided by other arrays. The digest of {version} is
`{digest}`.

## How it is made

    python scripts/make_shipped.py FOLDER --version 1

grows what FOLDER does not hold, fits the trees, measures them on fresh keys with each family left out, and writes the
arrays, the facts and this page. Figures are from two shared cores of an AMD EPYC virtual machine, torch 2.13.0+cpu, one
thread, one start a case; other programs ran beside it, which changes no figure on this page. Intervals are paired 95 %
bootstrap intervals over cases. The fresh keys of `heal` were chosen once and looked at once; the margin and the sizes of
its trees were chosen on training keys (`--margins`). **The fresh keys of `repair` are not untouched**: three forms of the
controller were measured there, and that no trees are asked where `skip-mlp` may be planted was decided after that look
and by cross-validation on training keys. Its gain over `heuristic` needs new keys to be confirmed.
"""
