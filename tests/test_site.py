"""Check that the documentation site builds from the repository, and that a browser needs no other host to show it."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
ROOT = Path(__file__).parents[1]
SPEC = spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
site_hooks = module_from_spec(SPEC)
SPEC.loader.exec_module(site_hooks)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder], cwd=ROOT, check=True
    )
    return folder


def named(entries):
    for entry in entries:
        for value in entry.values():
            yield from named(value) if isinstance(value, list) else [value]


def test_every_page_of_the_menu_is_built(site):
    pages = list(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(pages) > 25
    for page in pages:
        built = site / page.replace("README.md", "index.md").replace(".md", ".html")
        assert "<h1" in built.read_text(encoding="utf-8"), page


def test_the_examples_are_files_of_the_site(site):
    for path in (ROOT / "examples").glob("*.py"):
        assert (site / "examples" / path.name).read_bytes() == path.read_bytes()
        assert f'href="{path.name}"' in (site / "examples" / "index.html").read_text(encoding="utf-8")


def test_the_reference_shows_docstrings_with_fields_and_parameters(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    assert 'id="esper.grow"' in text
    assert "evaluate it on the test split, and write a run folder" in text
    # a field of a record
    assert "<li><code>added_params</code> ((E,) int64): parameters of the seeds in BLENDING" in text
    assert "<li><code>width</code>: features of the stream" in text  # a line of the docstring of `mlp`


def test_no_page_loads_anything_from_another_host(site):
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(pages) > 25
    for path in pages:
        assert not site_hooks.foreign_assets(path.read_text(encoding="utf-8"), path.suffix), path


@pytest.mark.parametrize(
    ("text", "suffix", "found"),
    [
        ('<script src="https://cdn.example/a.js"></script>', ".html", ["https://cdn.example/a.js"]),
        ('<link rel="stylesheet" href="//cdn.example/a.css">', ".html", ["//cdn.example/a.css"]),
        ('<img src="http://example.org/a.png">', ".html", ["http://example.org/a.png"]),
        ("<style>p { background: url('https://example.org/a.png') }</style>", ".html", ["https://example.org/a.png"]),
        ("@import 'https://fonts.example/a.css';", ".css", ["https://fonts.example/a.css"]),
        ('<a href="https://semver.org/">a link to follow</a><img src="a.png">', ".html", []),
        ("p { background: url(data:image/png;base64,AAAA) }", ".css", []),
    ],
)
def test_what_a_browser_would_load_from_another_host_is_found(text, suffix, found):
    assert site_hooks.foreign_assets(text, suffix) == found
