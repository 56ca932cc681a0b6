"""The card of a version of `shipped`, in Markdown, from the facts that scripts/make_shipped.py measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from confirm_shipped import NAMES

RULE = "heuristic"
LEFT_OUT = ("data", "damage")
ADVICE = {
    "better": "Take `shipped` where it beats the rule",
    "level": "Either will do where they are level",
    "worse": "Take the rule where `shipped` loses to it",
}
AXES = {"seen": "every family trained on", "data": "its data family left out", "damage": "its kind of damage left out"}


def card(facts: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = _short(facts)
    short = "\n".join(f"| {hosts} | `{rule}` | {_points(row)} | **{_verdict(row)}** |" for hosts, rule, row in rows)
    advice = "\n".join(
        f"- {words}: {'; '.join(found)}."
        for verdict, words in ADVICE.items()
        if (found := [hosts for hosts, _, row in rows if _verdict(row) == verdict])
    )
    known = {"short": short, "advice": advice, "defaults": _defaults(facts), "nowhere": _nowhere(facts)}
    parts = [HEAD.format(**facts, **known)]
    parts += [_confirmed(facts["confirmed"]), *(_kind(kind) for kind in facts["kinds"]), _losses(facts)]
    return "\n".join([*parts, TAIL.format(**facts)])


def _short(facts: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, float]]]:
    """Hosts, rule and gain: of all that was confirmed, and of every kind the worse figure with families left out."""
    rows = []
    for each in facts["confirmed"]:
        rows.append(
            (f"untrained, damaged MLPs of `{each['source']}` with `skip-mlp` in the menu", RULE, _row(each, RULE))
        )
    for kind in facts["kinds"]:
        worst = min((kind["rivals"][kind["rule"]][axis] for axis in LEFT_OUT), key=lambda row: float(row["gain"]))
        rows.append((kind["hosts"], kind["rule"], worst))
    return rows


def _row(confirmed: Mapping[str, Any], other: str) -> Mapping[str, float]:
    return dict(zip(("gain", "low", "high"), confirmed["over"][other], strict=True))


def _verdict(row: Mapping[str, float]) -> str:
    return "better" if row["low"] > 0 else "worse" if row["high"] < 0 else "level"


def _nowhere(facts: Mapping[str, Any]) -> str:
    found = [kind["hosts"] for kind in facts["kinds"] if _default(facts, kind) == facts["version"]]
    return f"It is the default on {'; '.join(found)}." if found else "**In this version it is the default nowhere.**"


def _defaults(facts: Mapping[str, Any]) -> str:
    rows = [
        f"| {kind['hosts']} | {', '.join(f'`{name}`' for name in kind['needs'])} | `{kind['rule']}` | "
        + "".join(f"{_points(kind['rivals'][kind['rule']][axis])} | " for axis in LEFT_OUT)
        + f"{'yes' if kind['recognised'] else 'no'} | `{_default(facts, kind)}` |"
        for kind in facts["kinds"]
    ]
    rows.append("| any other | | | not measured | not measured | | `heuristic` |")
    return "\n".join(rows)


def _default(facts: Mapping[str, Any], kind: Mapping[str, Any]) -> str:
    if not kind["recognised"]:
        return "heuristic"
    return str(facts["version"] if kind["wins"] else kind["rule"])


def _points(row: Mapping[str, Any]) -> str:
    return f"{100 * row['gain']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"


def _confirmed(facts: Sequence[Mapping[str, Any]]) -> str:
    """The figures on hosts that were looked at once, with the full menu."""
    lines = [CONFIRMED]
    for each in facts:
        first, last, cases = each["keys"]
        lines += [
            f"{cases} hosts of `{each['source']}`, keys {first:,} to {last:,}. "
            f"J of `shipped`: {each['objective']['shipped']:.3f}.",
            "",
            "| the other network | its J | `shipped` gains, points of J [95 %] | `shipped` is |",
            "|---|---|---|---|",
        ]
        for name, words in NAMES.items():
            row = _row(each, name)
            lines.append(f"| {words} | {each['objective'][name]:.3f} | {_points(row)} | {_verdict(row)} |")
        lines.append("")
    return "\n".join(lines)


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
    return "\n".join([*lines, ""])


def _losses(facts: Mapping[str, Any]) -> str:
    """Where the interval of a family or a rival lies below 0 or reaches it."""
    lines = ["## Where it loses", ""]
    for each in facts["confirmed"]:
        rows = {words: _row(each, name) for name, words in NAMES.items()}
        worse = [f"{words} ({_points(row)})" for words, row in rows.items() if _verdict(row) == "worse"]
        level = [f"{words} ({_points(row)})" for words, row in rows.items() if _verdict(row) == "level"]
        lines.append(
            f"- On hosts of `{each['source']}` with `skip-mlp` in the menu: worse than {'; '.join(worse) or 'none'}. "
            f"Level with {'; '.join(level) or 'none'}."
        )
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

CONFIRMED = """## Untrained, damaged MLPs with the full menu

These hosts have random weights and a defect: layers that are too narrow, linear or frozen. They and what is planted train
together. Where `skip-mlp` is in the menu, `shipped` plants one at the last slot in the first step, and does nothing else. That
is also the best fixed plan of the training hosts, so `shipped` is no better than that plan. The keys were chosen once, when
no page, study or test had grown their hosts, and the figures were looked at once. Nothing was chosen by them.
"""

HEAD = """# The shipped controller

`{version}` is a [controller](glossary.md#controller) that comes with Esper. A controller decides where a network, the *host*,
grows, and by which seeds. Use it with `esper grow TASK --controller shipped`, or as `esper.get_controller("shipped")`.
`esper controller shipped` prints this page.

## In short

*J* is the accuracy of the network on the test split less a rent for the parameters that it has grown (.1 for as many as the
host has). One *point* is .01 of J. The *rule* is the simple controller that is the best known one for such hosts.
The interval is the 95 % interval of the mean difference on the same hosts. Where families of data or kinds of damage were
left out of the training, this table has the worse of the two figures.

| hosts | the rule | `shipped` gains, points of J [95 %] | `shipped` is |
|---|---|---|---|
{short}

{advice}
- Where a sound network can be trained from the start, train that instead of growing a damaged one.

## What it does

It reads the host once, before the first step, plants all its seeds in that step, and keeps them. It takes the first of these
cases that holds:

1. The menu and the budget allow a `skip-mlp` at the last slot: it plants that. In cross-validation on 320 training cases of
   `repair`, fitted trees gained +0.0 [-0.4, +0.5] points over it, and lost 1.0 [0.3, 1.8] with data families left out.
2. They allow a `bypass-linear` or a `bypass-mlp`: fitted trees choose the plan and the slot, or nothing.
3. The budget is small: it does what the rule [`collapse`](hosts.md#controllers) does, unless the trees expect {margin:g} more
   in J of another plan.

The trees are a file of {bytes:,} bytes that holds arrays only. What they read are shares, ratios and ranks within the host, so
hosts may have any width and depth. It does not look again after some steps; that was not tried.

## When it is the default

{nowhere} `esper grow` without `--controller` prints which
controller it took and why, and reads that from the facts of the version, not from code. `shipped` is the default on a kind
of hosts if two conditions hold. First, with whole families left out of its training, the interval of its gain over the rule
lies above 0, for families of data and for kinds of damage. Second, a run can recognise such hosts. It cannot tell a damaged
MLP that trains from a sound one, where nothing should be planted. On hosts that train, the default is therefore `heuristic`.

| hosts | needs in the menu | the rule | gain, data left out | gain, damage left out | recognisable | default |
|---|---|---|---|---|---|---|
{defaults}
"""

TAIL = """## Streams

Streams of changing data have a controller of the same name, 18 numbers that are fitted by a script of its own and 2 set by hand,
which a search of all 20 did not improve:
`esper stream shipped` ([streams](streams.md), [figures](benchmarks/streams.md)). On new streams it is above the strongest
opponent, an ensemble that recognises contexts by their inputs too, by +.0060 [.0038, .0085] where contexts over a shared
trunk return. Over a mixture of seven changes it is above resetting the blocks by +.0169 [.0159, .0180], and below it in a
drift (-.0049 [-.0083, -.0021]). Where no context returns, resetting with a falling rate is better by .0018 [.0009, .0030].
It shares no arrays with this one. `--streams` of the command below fits it too.

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
its trees were chosen on training keys (`--margins`). The fresh keys of `repair` and `repair-tables` in the section without
`skip-mlp` are not untouched: three forms of the controller were measured there, after which the trees are no longer
asked where `skip-mlp` may be planted. Figures with the full menu are from other keys.
"""
