"""
The table of all fields on docs/configuration.md, from the fields themselves, and that of all recipes on docs/recipes.md.

    python docs/reference.py            # prints the page of the fields
    python docs/reference.py --write    # writes both
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.cli.recipes import description_of


PAGE = Path(__file__).with_name("configuration.md")
RECIPES = Path(__file__).with_name("recipes.md")
ENTRY = re.compile(r"^    (\w+) \((.+?)\):\n((?:        .+\n)+)", re.M)


def page() -> str:
    """The whole page, as Markdown, from the docstring of the configuration."""
    parameters = inspect.getdoc(DataEfficientGRPOConfig).split("Parameters:\n")[1] + "\n"
    parts = [
        "# Configuration",
        "The fields that `DataEfficientGRPOConfig` adds to TRL's `GRPOConfig`. Each is also a flag of `trl-dataeff grpo` and a key of a recipe. "
        "Values are checked when the configuration is created. `docs/reference.py` writes this page.",
        "B is the number of groups of a generation batch, G is `num_generations`. Arguments of the selectors are on the page of the [API](api.md).",
    ]
    for section in parameters.split("    > Parameters that control ")[1:]:
        title, _, entries = section.partition("\n")
        rows = [f"| `{name}` | {_type(kind)} | {_text(text)} |" for name, kind, text in ENTRY.findall(entries)]
        parts.append(f"## {title.capitalize()}")
        parts.append("\n".join(["| field | type and default | what it does |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def recipes_page(text: str) -> str:
    """The page of the recipes with its table as the files have it, sorted by model."""
    root = Path(__file__).parents[1] / "recipes"
    paths = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.glob("**/*.yaml")}
    rows = [f"| `{name}` | {description_of(path)} |" for name, path in sorted(paths.items())]
    table = "\n".join(["| recipe | what it is |", "|---|---|", *rows])
    return re.sub(
        r"(?s)(<!-- recipes -->\n).*(<!-- end -->)", lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text
    )


def _type(kind: str) -> str:
    return kind.replace(", *optional*", "").replace(", defaults to ", ", ")


def _text(text: str) -> str:
    """One line of Markdown; a reference to a class becomes its name."""
    line = " ".join(text.split()).replace("|", "\\|")
    return re.sub(
        r"\[`~?([\w.]+)`\]|\[\w+\]\[`\w+`\]", lambda found: f"`{found[1]}`" if found[1] else "registered", line
    )


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        RECIPES.write_text(recipes_page(RECIPES.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(page(), end="")
