"""Write docs/config.md from the configuration tree, the one source of every key."""

from pathlib import Path

from esper.leyline.config_text import reference

HEAD = """# Configuration

The same keys in a YAML file (`--config FILE`), in `--set key=value` and in `esper.build_config`. A task's own defaults give
way to the file, that to `--set`, and that to the long options of the command. `esper config` prints this page's table,
`esper config --yaml` a file to start from. The [glossary](glossary.md) explains the words.

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
