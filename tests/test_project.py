"""Check what the repository says about itself."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from esper.leyline.distribution import EXTRAS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted((ROOT / "src" / "esper").rglob("*.py"))
DESCRIBED = [
    path
    for root in ("src", "scripts", "tests", "examples", "bench/src", "bench/scripts", "bench/tests")
    for path in sorted((ROOT / root).rglob("*.py"))
]
"""Files whose docstrings all begin with a verb."""
DISTRIBUTIONS = {"PIL": "pillow"}
"""Of modules that have another name than what pip installs."""
VERBS = """
add advance anneal answer append apply ask attach attend attribute average be begin blend bound break build cache call
carry certify change check choose classify clip close collect combine compare compile complete compute concatenate
connect consolidate continue convert convolve copy correct count create credit cut damage decide decode define derive
describe detect differentiate digest divide do draw drop edit emit empty end enter estimate evaluate examine exchange
expand explain export fail fill find finish fit flatten flip flush fold follow forget format frame free freeze fuse
give go group grow handle hash heal hear help hold ignore imitate import incubate interpolate issue iterate join judge
keep kill learn leave let list load lock look make map mark measure merge mix move multiply name normalise note notice
number observe offer open order pack pad pair parse pass pay pick pickle place plan plant play predict print probe
profile propose pull put queue raise rank reactivate read rebuild receive recognise record refuse register release
remove reorder repair repeat replace report restore resume return reward rewrite roll round run sample save say scale
score search seed select send separate serve set shard share shift shorten show shrink simulate skip sort split spread
stack start stop store subtract sum summarise tabulate take tell test time track train transform transpose treat try
turn unpack update wait warn watch widen wrap write yield
"""


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in requirements}


def test_doctor_knows_every_extra_and_what_it_brings():
    extras = {name: distributions(needs) for name, needs in PROJECT["project"]["optional-dependencies"].items()}
    del extras["dev"], extras["docs"]  # for those who work on Esper itself
    assert {name: {DISTRIBUTIONS.get(m, m) for m in modules} for name, modules in EXTRAS.items()} == extras


def test_the_import_contracts_speak_of_every_package():
    layers = next(each["layers"] for each in PROJECT["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    spoken = {module.strip() for layer in layers for module in layer.split("|")}
    packages = {f"esper.{path.parent.name}" for path in (ROOT / "src" / "esper").glob("*/__init__.py")}
    modules = {f"esper.{path.stem}" for path in (ROOT / "src" / "esper").glob("*.py") if not path.stem.startswith("__")}
    assert spoken == packages | modules


def test_the_version_is_in_the_changelog_or_unreleased():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{PROJECT['project']['version']}]" in changelog


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.name == "__init__.py"], ids=lambda path: path.parent.name
)
def test_every_package_says_what_it_is_in_one_line(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith('"""')


def test_the_docstring_of_every_module_class_and_function_begins_with_a_verb():
    """Check that a class does something, and a function is told to. Nouns name the arguments of a constructor, and properties."""
    verbs = set(VERBS.split())
    for path in DESCRIBED:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = getattr(node, "name", path.stem)
            decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", ())))
            docstring = ast.get_docstring(node)
            if docstring is None or name == "__init__" or "property" in decorators:
                continue
            first, second, *_ = [*docstring.split(), ""]
            word = first.strip(",").lower()
            does = {word[:-1], word[:-2], word[:-3] + "y"} & verbs if word.endswith("s") else set()
            told, is_class = word in verbs, isinstance(node, ast.ClassDef)
            right = does if is_class else told or (does and isinstance(node, ast.Module))
            assert right, f"{path}: {name}: {docstring}"
            assert second != "of", f"{path}: {name} begins with a noun: {docstring}"


def run(code):
    """Run lines of Python in a process of its own, in which nothing is imported yet."""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_every_module_and_public_name_can_be_imported_without_an_extra_or_a_module_names_it():
    names = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if path.name != "__main__.py"
    ]
    block = [module for modules in EXTRAS.values() for module in modules if module != "PIL"]  # torch may look for it
    run(
        f"import sys, importlib\nsys.modules.update(dict.fromkeys({block}))\n"
        "import esper\nfrom esper.leyline.messages import InputError\n"
        "for name in esper.__all__: getattr(esper, name)\n"
        f"for name in {names}:\n    try: importlib.import_module(name)\n"
        "    except InputError as error: assert 'pip install' in str(error), error"
    )


def test_what_needs_no_torch_and_what_reads_run_folders_does_not_load_it():
    run(
        "import sys, importlib\nfrom esper.cli import main\n"
        "for arguments in ['--help'], ['config'], ['--version']:\n"
        "    try: main(arguments)\n    except SystemExit as end: assert not end.code, end.code\n"
        "    assert 'torch' not in sys.modules, arguments\n"
        "for name in 'terminal.watch', 'serve.app', 'report.page', 'comparison', 'reader':\n"
        "    importlib.import_module(f'esper.karn.{name}')\n"
        "    assert 'torch' not in sys.modules, name"
    )
