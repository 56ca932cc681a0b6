"""Write docs/config.md from the configuration tree, the one source of every key."""

from pathlib import Path

from esper.leyline.config.tree import reference

HEAD = """# Configuration

A YAML file (`--config FILE`), `--set key=value` and `esper.build_config` take the same keys. The file overrides the
defaults of a task, `--set` overrides the file, and the long options of the command override both. `esper config`
prints this page's table, `esper config --yaml` a file to start from. The [glossary](glossary.md) explains the words.

The keys before `task` are those of growing alone. `esper.Growth(settings=...)` takes them, and no others.

| key | default | type | meaning |
|---|---|---|---|
"""


def main() -> None:
    rows = [
        f"| `{key}` | `{default}` | {kind.replace('|', 'or')} | {text} |" for key, kind, default, text in reference()
    ]
    page = Path(__file__).parents[1] / "docs" / "config.md"
    page.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
