"""Add pages and examples beside docs/ to the site, and refuse what it would load from another host (hooks of mkdocs.yml)."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench/index.md",
    "examples/README.md": "examples/index.md",
}
"""Pages beside docs/, and what they are called in the site."""

BENCH = "bench/docs"
"""The pages of the benchmarks, which the site has under bench/."""

LOADING = {
    "script": ["src"],
    "img": ["src", "srcset"],
    "iframe": ["src"],
    "source": ["src", "srcset"],
    "object": ["data"],
}
LOADED_RELATIONS = {
    "stylesheet",
    "icon",
    "shortcut",
    "preload",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
LAYOUT = """
pre, code { font-size: 85%; }
.rst-content .highlight pre { border: 0; margin: 0; }
.rst-content .highlight pre code { border: 0; padding: 10px 14px; }
details { margin-bottom: 24px; }
.wy-nav-content { max-width: 1100px; }
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root of the repository, the examples that they link to, and the style sheet of the code."""
    root = Path(config.config_file_path).parent
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=from_root((root / name).read_text(encoding="utf-8"))))
    for example in sorted((root / "examples").glob("*.py")):
        files.append(File(f"examples/{example.name}", str(root), config.site_dir, use_directory_urls=False))
    for page in sorted((root / BENCH).glob("*.md")):
        files.append(File.generated(config, f"bench/{page.name}", content=page.read_text(encoding="utf-8")))
    style = HtmlFormatter(style="default").get_style_defs(".highlight") + LAYOUT
    files.append(File.generated(config, "assets/site.css", content=style))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that lead to pages outside docs/ so that they lead to their pages of the site."""
    if page.file.src_uri.startswith(("bench/", "examples/")):
        markdown = re.sub(r"\]\((?:\.\./)?\.\./docs/", "](../", markdown)
        return markdown.replace("](../README.md)", "](index.md)" if page.file.name != "index" else "](../index.md)")
    markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{BENCH}/", r"](\1bench/", markdown)
    up = os.path.relpath(".", Path(page.file.src_uri).parent)  # from the folder of the page to the top of the site
    for name, target in ROOT_PAGES.items():
        outside = re.escape(os.path.normpath(os.path.join(up, "..", name)))
        markdown = re.sub(rf"\]\({outside}(#[^)]*)?\)", rf"]({os.path.normpath(os.path.join(up, target))}\1)", markdown)
    return markdown


def on_post_build(config: Any) -> None:
    """Refuse a site that would load something from another host."""
    found = [
        f"{path.relative_to(config.site_dir)}: {asset}"
        for path in sorted(Path(config.site_dir).rglob("*"))
        if path.suffix in (".html", ".css")
        for asset in foreign_assets(path.read_text(encoding="utf-8"), path.suffix)
    ]
    if found:
        raise PluginError(f"the site would load from other hosts: {'; '.join(found)}")


def from_root(markdown: str) -> str:
    """Rewrite the links of a page that stands beside docs/ as they are from within docs/."""
    markdown = re.sub(r"\]\(docs/benchmarks/?\)", "](benchmarks/README.md)", markdown)
    markdown = re.sub(r"\]\(docs/", "](", markdown)
    markdown = re.sub(rf"\]\({BENCH}/", "](bench/", markdown)
    for name, page in ROOT_PAGES.items():
        markdown = re.sub(rf"\]\({re.escape(name)}(#[^)]*)?\)", rf"]({page}\1)", markdown)
    return markdown


def foreign_assets(text: str, suffix: str) -> list[str]:
    """List the addresses at other hosts that a browser would load with a page (.html) or a style sheet (.css)."""
    styles = [text] if suffix == ".css" else []
    found = []
    if suffix == ".html":
        reader = _Assets()
        reader.feed(text)
        found, styles = reader.addresses, reader.styles
    for style in styles:
        found += re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", style)
    return [address for address in found if re.match(r"(?:[a-z]+:)?//", address)]


class _Assets(HTMLParser):
    """Collects what a page loads, and its inline styles; a link that a person may follow is not loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.styles: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.styles.append(given.get("style", ""))
        self.addresses += [given[name] for name in LOADING.get(tag, []) if name in given]
        if tag == "link" and LOADED_RELATIONS & set(given.get("rel", "").split()):
            self.addresses.append(given.get("href", ""))

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
