"""
What programs write of the documentation: the page of the configuration, from its docstring, and the tables of recipes and metrics,
between `<!-- NAME -->` and `<!-- end -->` on their pages.

    python docs/reference.py            # prints the page of the configuration
    python docs/reference.py --write    # writes all
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.cli.recipes import description_of
from trl_dataeff.tracking.metrics import METRICS, PREFIX


DOCS = Path(__file__).parent
ENTRY = re.compile(r"^    (\w+) \((.+?)\):\n((?:        .+\n)+)", re.M)
MARKED = re.compile(r"(?s)<!-- (recipes|metrics) -->\n.*?<!-- end -->")


def configuration() -> str:
    """The whole page, as Markdown, from the docstring of the configuration."""
    parameters = inspect.getdoc(DataEfficientGRPOConfig).split("Parameters:\n")[1] + "\n"
    parts = [
        "# Configuration",
        "The fields that `DataEfficientGRPOConfig` adds to TRL's `GRPOConfig`. Each is also a flag of `trl-dataeff grpo` and a key of a recipe. "
        "Values are checked when the configuration is created; names and arguments of selectors, when the trainer is. `docs/reference.py` writes this page.",
        "B is the number of groups of a generation batch, G is `num_generations`. Arguments of the selectors are on the page of the [API](api.md).",
    ]
    for section in parameters.split("    > Parameters that control ")[1:]:
        title, _, entries = section.partition("\n")
        rows = [[f"`{name}`", _type(kind), _text(text)] for name, kind, text in ENTRY.findall(entries)]
        parts += [f"## {title.capitalize()}", _table(["field", "type and default", "what it does"], rows)]
    return "\n\n".join(parts) + "\n"


def filled(page: str) -> str:
    """A page with its marked tables as the package has them."""
    tables = {"recipes": recipes, "metrics": metrics}
    return MARKED.sub(lambda found: f"<!-- {found[1]} -->\n\n{tables[found[1]]()}\n\n<!-- end -->", page)


def recipes() -> str:
    root = DOCS.parent / "recipes"
    paths = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.glob("**/*.yaml")}
    # Without the model, which is in the name
    rows = [[f"`{name}`", description_of(path).partition(" on ")[2]] for name, path in sorted(paths.items())]
    return _table(["recipe", "what it is"], rows)


def metrics() -> str:
    rows = [
        [f"`{PREFIX}{name}`", metric.unit + (", cumulative" if metric.is_cumulative else ""), metric.meaning]
        for name, metric in METRICS.items()
    ]
    return _table(["metric", "unit", "meaning"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _type(kind: str) -> str:
    return kind.replace(", *optional*", "").replace(", defaults to ", ", ")


def _text(text: str) -> str:
    """One line of Markdown; a reference to a class becomes its name."""
    return re.sub(
        r"\[`~?([\w.]+)`\]|\[\w+\]\[`\w+`\]",
        lambda found: f"`{found[1]}`" if found[1] else "registered",
        " ".join(text.split()),
    )


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
