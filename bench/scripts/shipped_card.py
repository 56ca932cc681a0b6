"""Write the card of a version of `shipped`, in Markdown, from the facts that bench/scripts/make_shipped.py measured."""

from collections.abc import Mapping
from typing import Any

from confirm_full_menu import RULE as FULL_RULE
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
    """Return the whole page."""
    rows = _short(facts)
    short = "\n".join(f"| {hosts} | `{rule}` | {_points(row)} | **{_verdict(row)}** |" for hosts, rule, row in rows)
    advice = "\n".join(
        f"- {words}: {'; '.join(found)}."
        for verdict, words in ADVICE.items()
        if (found := [hosts for hosts, _, row in rows if _verdict(row) == verdict])
    )
    tried = {
        f"tried_{menu}_{axis}": _points(row) for menu, rows in facts["tried"].items() for axis, row in rows.items()
    }
    known = {"short": short, "advice": advice, "defaults": _defaults(facts), "nowhere": _nowhere(facts)}
    parts = [HEAD.format(**facts, **known, **tried)]
    parts += [_confirmed(facts), *(_kind(kind) for kind in facts["kinds"]), _full_menu(facts), _losses(facts)]
    return "\n".join([*parts, TAIL.format(**facts)])


def _short(facts: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, float]]]:
    """List hosts, rule and gain: of all that was confirmed, and of every kind the worse figure with families left out."""
    rows = []
    for each in facts["confirmed"]:
        rows.append((f"untrained MLPs of {_hosts(each)} in the menu", RULE, _row(each, RULE)))
    for kind in [kind for kind in facts["kinds"] if kind["frozen"]]:
        worst = min((kind["rivals"][kind["rule"]][axis] for axis in LEFT_OUT), key=lambda row: float(row["gain"]))
        rows.append((kind["hosts"], kind["rule"], worst))
    full = [each for each in facts["full_menu"] if each["task"] == "heal-full"]
    rows += [(f"trained, frozen {each['hosts']}, full menu", FULL_RULE, _row(each, f"`{FULL_RULE}`")) for each in full]
    return rows


def _hosts(confirmed: Mapping[str, Any]) -> str:
    return f"`{confirmed['source']}` {'with' if confirmed['skip'] else 'without'} `skip-mlp`"


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


def _confirmed(facts: Mapping[str, Any]) -> str:
    """Return the figures on hosts that were looked at once."""
    lines = [CONFIRMED.format(**facts)]
    for each in facts["confirmed"]:
        first, last, cases = each["keys"]
        lines += [
            f"{cases} hosts of {_hosts(each)} in the menu, keys {first:,} to {last:,}. "
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


def _full_menu(facts: Mapping[str, Any]) -> str:
    """Return the figures on frozen hosts whose menu has larger seeds, and on residual ones with the small menu."""
    lines = [FULL_MENU.format(rule=FULL_RULE, **facts)]
    for each in facts["full_menu"]:
        first, last, cases = each["keys"]
        lines += [
            f"{cases} cases, {each['hosts']}, keys {first:,} to {last:,}, on {each['networks']} hosts. J of `shipped`: "
            f"{each['objective']['shipped']:.3f}. It plants otherwise than `collapse` in {each['otherwise']} of them, at "
            f"several damaged blocks in {each['several']}.",
            "",
            "| compared with | its J | `shipped` gains, points of J [95 %] | `shipped` is |",
            "|---|---|---|---|",
        ]
        for name in each["over"]:
            row = _row(each, name)
            lines.append(f"| {name} | {each['objective'][name]:.3f} | {_points(row)} | {_verdict(row)} |")
        lines.append("")
    return "\n".join(lines)


def _kind(kind: Mapping[str, Any]) -> str:
    lines = [f"## {kind['hosts'][0].upper()}{kind['hosts'][1:]}", ""]
    for part, word in (("training", "Trained on"), ("fresh", "Measured on")):
        each = [f"{cases} cases of `{name}`, keys {a:,} to {b:,}" for name, (a, b, cases) in kind[part].items()]
        lines.append(f"{word} {' and '.join(each)}.")
    if kind["frozen"]:
        lines += [
            f"{kind['plans']} plans were grown on each case. The best fixed plan on training cases is "
            f"`{kind['best_fixed_plan']}`. `best` takes the best plan of each case by the same figures, so it is above what any "
            "controller can expect.",
        ]
    else:
        waits = ", ".join(f"{value:.4f} with {wait}" for wait, value in kind["waits"].items())
        lines += [f"What was chosen there is the number of steps before the skip. Mean J on training cases: {waits}."]
    lines += [
        "",
        "| | " + " | ".join(f"`{name}`" for name in kind["objective"]) + " |",
        "|---|" + "---|" * len(kind["objective"]),
        "| J | " + " | ".join(f"{value:.3f}" for value in kind["objective"].values()) + " |",
        "",
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
    """List where the interval of a family or a rival lies below 0 or reaches it."""
    lines = ["## Where it loses", ""]
    for each in facts["confirmed"]:
        rows = {words: _row(each, name) for name, words in NAMES.items() if name in each["over"]}
        worse = [f"{words} ({_points(row)})" for words, row in rows.items() if _verdict(row) == "worse"]
        level = [f"{words} ({_points(row)})" for words, row in rows.items() if _verdict(row) == "level"]
        lines.append(
            f"- On hosts of {_hosts(each)} in the menu: worse than {'; '.join(worse) or 'none'}. "
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
    for each in facts["full_menu"]:
        worse = [f"{name} ({_points(row)})" for name in each["over"] if _verdict(row := _row(each, name)) == "worse"]
        level = [f"{name} ({_points(row)})" for name in each["over"] if _verdict(row := _row(each, name)) == "level"]
        lines.append(
            f"- On frozen {each['hosts']} (`{each['task']}`): worse than {'; '.join(worse) or 'none'}. "
            f"Level with {'; '.join(level) or 'none'}."
        )
    return "\n".join([*lines, *LOSSES, ""])


LOSSES = (
    "- It was not measured on maps, on sequences, on regressions, or on hosts that are trained and still train. On frozen\n"
    "  networks of maps (`heal-images`) it decides by case 1. On the others it does what `heuristic` does, on `heal-bytes` too,\n"
    "  and where it plants a skip as well, nothing is known of how well.",
    "- Where a skip may be planted, it waits. A run whose length in updates differs much from 384 may need another wait.",
    "- On untrained hosts of `repair` a plain network without the damage, as large as the host, is better than what grows\n"
    "  ([headroom](headroom.md)).",
)

FULL_MENU = """## Trained, frozen networks with the full menu

[`heal-full`](tasks.md#the-full-menu-heal-full) has the networks of `heal`, a slot behind the head as well, and a menu with larger
seeds. `shipped` plants there what it plants on `heal`, by trees that were fitted on `heal`. The table at the top compares it
with `{rule}`, the best controller there on [earlier cases](heal.md#the-full-menu). The cases are fresh, with two
starts, and nothing was chosen by their figures. This was committed before one of them was grown:

> {expected_full}

{found_full}

    python bench/scripts/confirm_full_menu.py FOLDER/full-menu
"""

CONFIRMED = """## Untrained, damaged MLPs

These hosts have random weights, and four in five have a defect: layers that are too narrow, linear or frozen. They and what is
planted train together. The keys were chosen once, when no page, study or test had grown their hosts. Nothing was chosen by
their figures. This was committed before they were read:

> {expected}

{found}
"""

HEAD = """# The shipped controller

`{version}` is a [controller](../../docs/glossary.md#controller) that comes with Esper.
A controller decides where a network, the *host*, grows, and by which seeds.
Use it with `esper grow TASK --controller shipped`, or as `esper.get_controller("shipped")`.
`esper controller shipped` prints this page.

## In short

*J* is the accuracy of the network on the test split less a rent for the parameters that it has grown (.1 for as many as the
host has). One *point* is .01 of J. The *rule* is the simple controller that is the best known one for such hosts, and with the
full menu the trees of `--controller tree`, which were the best known controller there.
The interval is the 95 % interval of the mean difference on the same hosts. Where families of data or kinds of damage were
left out of the training, this table has the worse of the two figures.

| hosts | the rule | `shipped` gains, points of J [95 %] | `shipped` is |
|---|---|---|---|
{short}

{advice}
- Where a sound network can be trained from the start, train that instead of growing a damaged one.

## What it does

It takes the first of these cases that holds for a host before the first step:

1. A bypass of rank 1 to 8 or a `low-rank` may be planted, and none of the larger seeds `bypass-linear`, `bypass-mlp` and
   `skip-mlp`, as on `heal`. Where no parameter of the host trains, which the engine says (`Space.frozen`), larger seeds in
   the menu change nothing, as on `heal-full`; but the share of dead units must be measured, which transformers and networks in
   a loop of your own do not have. It plants what the rule
   [`collapse`](tasks.md#controllers) plants, unless fitted trees expect {margin:g} more in J of another plan. Where the rule
   [`sites`](tasks.md#controllers) names several damaged blocks, it plants what that rule does. All seeds are planted in the
   first step and kept.
2. A `skip-mlp` may be planted at the last slot. It waits {skip_after} steps. If the metric has then covered less than
   `heuristic.plant_below` of the way to a perfect one (.94), it plants the skip. After that it does what
   [`heuristic`](heuristic.md) does, which judges the skip like its own seeds: it removes one
   that contributes less than half of its rent, and may plant bypasses beside it.
3. In all other cases it does what `heuristic` does, in every step.

The trees are a file of {bytes:,} bytes that holds arrays only, the same as those of version 1 for such hosts. What they read
are shares, ratios and ranks within the host, so hosts may have any width and depth.

Trees were tried in cases 2 and 3 too, on 480 training cases. Where they expect .01 more in J of another plan, they replaced what
the controller does. With data families left out they added {tried_with_data} in case 2 and {tried_without_data} in case 3; with
kinds of damage left out, {tried_with_damage} and {tried_without_damage}. The trees are therefore asked in case 1 alone.

A run with this controller sets `gates.permissive`, so that what case 1 plants is kept. In the cases of `heuristic` the
controller applies the gates of the config itself: its decisions are those of a run with `--controller heuristic`, bit for bit.
Sensors are measured every 4 steps where `heuristic` reads them, and once in a run of which all hosts are of case 1.

## When it is the default

{nowhere} The first line of the result of `esper grow` names the controller. Without
`--controller` the run reads it from the facts of the version, not from code, and says why where it takes `shipped`.
`shipped` is the default on a kind of hosts if two conditions hold.
First, with whole families left out of what was chosen on training cases, the interval of its
gain over the rule lies above 0, for families of data and for kinds of damage. Second, a run can recognise such hosts. It cannot
tell an untrained MLP of four blocks from other hosts of vectors that train, on which the skip was not measured. The default
there is therefore `heuristic`.

| hosts | needs in the menu | the rule | gain, data left out | gain, damage left out | recognisable | default |
|---|---|---|---|---|---|---|
{defaults}
"""

TAIL = """## Several damaged blocks

On cases of `heal` whose hosts and problems no choice was made on, two starts each
([`bench/scripts/study_two_sites.py`](heal.md#within-the-shipped-controller)):

| damaged sites | cases | J | over `uniform`, points of J [95 %] | over `collapse` | over `shipped-1` |
|---|---|---|---|---|---|
| two | 96, keys 1,179,652 to 1,180,808 | 0.781 | +4.6 [+2.1, +7.1] | +8.0 [+4.8, +11.5] | +8.2 [+5.0, +11.6] |
| one | 96, keys 1,179,649 to 1,179,846 | 0.863 | +4.2 [+2.7, +5.9] | +1.1 [+0.1, +2.3] | -0.1 [-0.1, +0.0] |

Fine-tuning whose dead units were drawn anew is above it on both: by 5.3 points [3.8, 6.8] with two sites and 1.6 [.4, 2.8]
with one.

The figures of trained, frozen networks above are those of version 1 with one damaged site: version 2 plants otherwise in 3 of
their 320 cases.

## Streams

Streams of changing data have a controller of the same name, 18 numbers that are fitted by a script of its own and 2 set by hand,
which a search of all 20 did not improve:
`esper stream shipped` ([streams](streams.md), [figures](streams.md)). On new streams it is above the strongest
opponent, an ensemble that recognises contexts by their inputs too, by +.0060 [.0038, .0085] where contexts over a shared
trunk return. Over a mixture of seven changes it is above resetting the blocks by +.0169 [.0159, .0180], and below it in a
drift (-.0049 [-.0083, -.0021]). Where no context returns, resetting with a falling rate is better by .0018 [.0009, .0030].
It shares no arrays with this one. `--streams` of the command below fits it too.

## Versions

A run stores the name of the version in its config and the SHA-256 of the arrays in its summary (`controller_digest`) and
its checkpoints. A resumed run takes the version of its config. A version that the installed Esper does not have is refused,
and so is a checkpoint that was decided by other arrays. The digest of {version} is
`{digest}`.

`shipped-1` decides by version 1: it plants a skip wherever it may and does nothing else, and without one it takes a fixed plan
from trees. On frozen hosts it plants what version 2 does, but for those with several damaged blocks.
`esper controller shipped-1` prints its card.

No release of Esper has version 2 yet. In earlier revisions it did what `heuristic` does on frozen hosts whose menu has larger
seeds, such as `heal-full`; its arrays are the same. An episode that was begun so goes on so, because a checkpoint holds
which environments `heuristic` decides for. After a release, such a change makes another version.

## How it is made

    python bench/scripts/make_shipped.py FOLDER

grows what FOLDER does not hold, fits the trees, measures them on fresh keys with each family left out, and writes the
arrays, the facts and this page. Figures are from two shared cores of an AMD EPYC virtual machine, torch 2.13.0+cpu, one
thread, one start a case (two with the full menu); other programs ran beside it, which changes no figure on this page. Intervals
are paired 95 % bootstrap intervals over cases. The fresh keys of `heal` were chosen once and looked at once, for version 1; the
margin and the sizes of its trees were chosen on training keys (`--margins`).

The command was run from an empty folder at revision `572f474`, without `--streams`: half an hour of one core, with the hosts of
`heal` in the cache. Since revision `c54a5b6`, sums of the engine differ in their last bits, and with them .18 % of the figures
that the trees are fitted on. The new trees (SHA-256 `6cf572fb...`) plant otherwise in 17 of the 320 fresh cases of `heal` and
are .05 points [.00, .11] below those of the package; with kinds of damage left out, the figures of all cases differ by .1
point, those of pruned units by .3. No default changes, so the package keeps its arrays. The figures on fresh cases that do not
depend on new trees came out as they stand here.
"""
