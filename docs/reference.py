"""
What programs write of the documentation: the page of the configuration, from the help of its fields, and the tables of
recipes and metrics, between `<!-- NAME -->` and `<!-- end -->` on their pages.

    python docs/reference.py            # prints the page of the configuration
    python docs/reference.py --write    # writes all
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.cli.recipes import description_of
from trl_dataeff.tracking.metrics import METRICS
from trl_dataeff.utils import PREFIX


DOCS = Path(__file__).parent
#: Sections of the page of the configuration, by the first field of each
SECTIONS = {
    "selection": "Which prompts are rolled out",
    "replay": "Rollout replay",
    "compact_update": "The update",
    "save_on_signal": "How a run ends",
}
MARKED = re.compile(r"(?s)<!-- (recipes|metrics) -->\n.*?<!-- end -->")


def configuration() -> str:
    """The whole page, as Markdown, from the fields of the configuration."""
    parts = [
        "# Configuration",
        "The fields that `DataEfficientGRPOConfig` adds to TRL's `GRPOConfig`. Each is also a flag of "
        "`trl-dataeff grpo` and a key of a recipe. The [glossary](how_it_works.md#glossary) explains the terms, and "
        "[API](api.md#selectors) has the arguments of the selectors.",
    ]
    for title, rows in _sections().items():
        parts.append(f"## {title}")
        parts.append(_table(["field, type and default", "what it does"], rows))
    return "\n\n".join(parts) + "\n"


def _sections() -> dict[str, list[list[str]]]:
    """Rows of the tables of the configuration's fields, by the title of their section."""
    own_types = inspect.get_annotations(DataEfficientGRPOConfig)  # as they are written, without the inherited ones
    sections: dict[str, list[list[str]]] = {}
    title = ""
    for field in fields(DataEfficientGRPOConfig):
        if field.name not in own_types:
            continue
        title = SECTIONS.get(field.name, title)
        text = field.metadata["help"].replace("%%", "%")  # as argparse prints it
        row = [f"`{field.name}`<br>{_type(own_types[field.name], field.default)}", text]
        sections.setdefault(title, []).append(row)
    return sections


def _type(annotation: str, default: object) -> str:
    """A type as it is annotated, and the default unless it is `None`: "`float`, `1.0`"."""
    if annotation.startswith("Literal"):
        annotation = "str"
    kinds = [f"`{kind}`" for kind in annotation.split(" | ") if kind != "None"]
    text = " or ".join(kinds)
    if default is None:
        return text
    shown = f'"{default}"' if isinstance(default, str) else default
    return f"{text}, `{shown}`"


def filled(page: str) -> str:
    """A page with its marked tables as the package has them."""
    tables = {"recipes": recipes, "metrics": metrics}
    return MARKED.sub(lambda found: f"<!-- {found[1]} -->\n\n{tables[found[1]]()}\n\n<!-- end -->", page)


def recipes() -> str:
    root = DOCS.parent / "recipes"
    paths = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.glob("**/*.yaml")}
    rows = []
    for name, path in sorted(paths.items()):
        without_model = description_of(path).partition(" on ")[2]  # the model is in the name
        rows.append([f"`{name}`", without_model])
    return _table(["recipe", "what it is"], rows)


def metrics() -> str:
    rows = []
    for name, metric in METRICS.items():
        unit = f"{metric.unit}, cumulative" if metric.is_cumulative else metric.unit
        rows.append([f"`{PREFIX}{name}`<br>{unit}", metric.meaning])
    return _table(["metric and unit", "meaning"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    for row in rows:
        lines.append([cell.replace("|", "\\|") for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(configuration(), end="")
        return
    (DOCS / "configuration.md").write_text(configuration(), encoding="utf-8")
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            path.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
