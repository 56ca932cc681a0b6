"""Check that what the documents show runs, and that what they list is what there is."""

import ast
import itertools
import re
import runpy
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import esper
from esper.kasmina.blueprints import BLUEPRINTS
from esper.kasmina.network import export, saving
from esper.leyline.config.tree import reference
from esper.leyline.lifecycle.slots import Tap
from esper.leyline.lifecycle.vocabulary import Blend, Head, Op, Stage
from esper.nissa.rows import SCHEMA
from esper.runs.live import anytime, growth_state
from esper.store import checkpoint
from esper.tamiyo.policy import controller
from esper.tamiyo.rules.schedule import load_schedule

ROOT = Path(__file__).parents[1]
WALKTHROUGHS = sorted((ROOT / "docs" / "walkthroughs").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *WALKTHROUGHS,
]
LINKING = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


RUN_ELSEWHERE = [
    "README.md",
    "add-a-layer.md",
    "duckdb.md",
    "exporters.md",
    "gym.md",
    "how-wide.md",
    "lora-ranks.md",
    "more-data.md",
    "pruned-or-quantised.md",
    "saving.md",
    "sites.md",
    "trainers.md",
    "widening.md",
    *(page.name for page in WALKTHROUGHS),
]
"""Pages whose own test runs their python: it compares what they print, takes fewer steps, needs an extra, or is not slow."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.name not in RUN_ELSEWHERE],
    ids=lambda page: page.name,
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esper.kasmina.blueprints.catalog.BLUEPRINTS", BLUEPRINTS)
    known = dict(BLUEPRINTS)
    namespace = {}
    try:
        for index, block in enumerate(blocks(page, "python")):
            exec(compile(block, f"{page.name}, block {index}", "exec"), namespace)
        if "record" in namespace:
            assert namespace["record"]["tasks"]
        else:
            assert namespace["summary"]["status"] == "finished"
    finally:
        BLUEPRINTS.clear()
        BLUEPRINTS.update(known)


def test_the_schedule_of_the_page_on_the_command_is_valid(tmp_path):
    (block,) = blocks(ROOT / "docs" / "command.md", "yaml")
    (tmp_path / "schedule.yaml").write_text(block)
    assert len(load_schedule(tmp_path / "schedule.yaml").entries) == len(yaml.safe_load(block)) == 2


def test_an_own_task_takes_under_twenty_lines():
    block, *_ = [block for block in blocks(ROOT / "README.md", "python") if "esper.task(" in block]
    assert len([line for line in block.splitlines() if line.strip()]) < 20


def test_the_config_page_lists_every_key_with_its_default_and_meaning():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    rows = [
        f"| `{key}` | `{default}` | {kind.replace('|', 'or')} | {text} |" for key, kind, default, text in reference()
    ]
    listed = [line for line in page.splitlines() if line.startswith("| `")]
    assert listed == rows, "run python scripts/write_config_page.py"


def test_every_test_that_the_page_on_determinism_names_is_there():
    page = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page)
    assert len(named) > 10
    for path, name in named:
        assert f"\ndef {name}" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def anchors(page):
    """Return the names by which the headings of a page are linked."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    words = (re.sub(r"\]\([^)]*\)|[^\w\- ]", "", heading.lower()) for heading in headings)
    return {"-".join(heading.split(" ")) for heading in words} | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_python_reference_is_that_of_the_table_of_public_names():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### esper\.(\w+)$", page, re.MULTILINE)) == esper.__all__
    assert ":::" not in page
    written = runpy.run_path(str(ROOT / "scripts" / "write_reference_page.py"))["page"]()
    assert page == written, "run python scripts/write_reference_page.py"


GLOSSARY = ROOT / "docs" / "glossary.md"


def test_the_glossary_explains_every_stage_operation_head_and_tap():
    text = GLOSSARY.read_text(encoding="utf-8")
    terms = re.findall(r"^<a id=\"([^\"]+)\"></a>\*\*([^*]+)\*\*: \S", text, re.MULTILINE)
    assert len(terms) == len(dict(terms)) > 60
    assert all(anchor == re.sub(r"[ _]", "-", term.lower()) for anchor, term in terms)
    words = {term for _, term in terms}
    assert {stage.name for stage in Stage} <= words
    assert {op.name for op in Op} - {"WAIT"} <= words
    assert {head.name.lower() for head in Head} - {"op"} <= words
    assert all(f"`{name}`" in text for name in [*Tap, *(blend.name for blend in Blend)])


def test_no_entry_of_the_glossary_is_longer_than_two_sentences():
    entries = re.split(r"^<a id=.*?\*\*: ", GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for entry in entries:
        text = re.split(r"\n\n", entry)[0].replace("\n", " ")
        assert len(re.findall(r"[^.]\.(?=\s|$)", text)) in (1, 2), text


@pytest.mark.parametrize("page", [page for page in PAGES if page != GLOSSARY], ids=lambda page: page.name)
def test_every_page_leads_to_the_glossary(page):
    assert re.search(r"\]\((docs/|\.\./)?glossary\.md", page.read_text(encoding="utf-8"))


def test_every_program_that_a_page_runs_is_there():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md"), *ROOT.glob("examples/*.md")]
    named = {
        (page.relative_to(ROOT).as_posix(), path)
        for page in pages
        for path in re.findall(r"python (?:-m pytest )?([\w./]+\.py)\b", page.read_text(encoding="utf-8"))
        if path.partition("/")[0] in ("scripts", "tests", "examples", "bench")
    }
    assert len(named) > 50
    assert not [each for each in named if not (ROOT / each[1]).exists()]


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/names.md", "CONTRIBUTING.md"])
def test_every_place_in_the_code_that_a_page_names_is_there(name):
    named = re.findall(r"`([\w/]+\.py)(?:::([\w.]+))?`", (ROOT / name).read_text(encoding="utf-8"))
    assert len(named) > 10
    for path, place in named:
        file = next(folder / path for folder in (ROOT / "src" / "esper", ROOT) if (folder / path).exists())
        body = ast.parse(file.read_text(encoding="utf-8")).body
        for part in place.split(".") if place else ():
            found = [node for node in body if part in names_of(node)]
            assert found, f"{path}::{place}"
            body = getattr(found[0], "body", [])


def test_every_name_of_the_founding_design_leads_to_a_place_in_the_code_or_to_a_config_key():
    lines = (ROOT / "docs" / "names.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "name there"]
    assert len(rows) > 50
    assert all(len(row) == 3 and all(row) for row in rows)
    keys = {key for key, *_ in reference()}
    for _, here, _ in rows:
        named = here.split(", ")
        assert all(each.startswith("`") and each.endswith("`") for each in named), here
        # the test above looks the places up
        assert all(".py::" in each or each.strip("`") in keys for each in named), here


def names_of(node):
    """Return what a statement defines."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign():
            return {node.target.id} if isinstance(node.target, ast.Name) else set()
    return set()


def test_the_picture_of_the_layers_shows_every_package_in_its_place():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    drawn = {}
    for box in ElementTree.parse(ROOT / "docs" / "assets" / "layers.svg").iterfind(".//{*}text[@font-weight='bold']"):
        drawn[box.text.removeprefix("esper.")] = float(box.get("y"))
    listed = [[name.strip().removeprefix("esper.") for name in layer.split("|")] for layer in layers]
    assert sorted(drawn) == sorted(itertools.chain(*listed))
    heights = [{drawn[name] for name in layer} for layer in listed]
    assert all(len(layer) == 1 for layer in heights)
    assert all(min(above) < min(below) for above, below in itertools.pairwise(heights))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_config_key_that_a_page_names_is_one(page):
    keys = {key for key, *_ in reference()}
    sections = {key.split(".")[0] for key in keys if "." in key}
    named = re.findall(r"`(?:--set )?([a-z_]+)\.([a-z_]+)(?:=[^`]*)?`", page.read_text(encoding="utf-8"))
    assert not {f"{part}.{key}" for part, key in named if part in sections} - keys


def test_the_page_on_versions_has_the_number_of_every_format():
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    now = {files.strip("`"): int(number) for files, _, number, _ in rows}
    formats = {
        "checkpoints/": checkpoint.FORMAT,
        "models/env-000/": export.FORMATS[-1],
        "controller/": controller.VERSION,
        "grown.json": saving.NETWORK_FORMAT,
        "adapter.json": saving.ADAPTER_FORMAT,
        "Growth.state_dict()": growth_state.FORMAT,
        "AnytimeGrowth.state_dict()": anytime.FORMAT,
    }
    assert now == formats | {"events.jsonl": SCHEMA}


def test_the_menu_of_the_site_leads_to_every_page():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    beside = {"index.md", "contributing.md", "security.md", "changelog.md", "bench/index.md", "examples/index.md"}
    benches = {f"bench/{page.name}" for page in (ROOT / "bench" / "docs").glob("*.md")}
    assert set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)) == pages | beside | benches
