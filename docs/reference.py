"""
The table of all fields on docs/configuration.md, from the fields themselves, and that of all recipes on docs/recipes.md.

    python docs/reference.py            # prints the page of the fields
    python docs/reference.py --write    # writes both
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, Field, fields
from inspect import getsource
from pathlib import Path

from trl_dataeff.cli.recipes import description_of
from trl_dataeff.fields import RANGES
from trl_dataeff.options import DataEfficientOptions


PAGE = Path(__file__).with_name("configuration.md")
RECIPES = Path(__file__).with_name("recipes.md")
TITLES = {  # by the comments of options.py
    "which prompts are rolled out": "Selection and dynamic sampling",
    "advantages": "Advantages",
    "fault tolerance, each off by default": "Fault tolerance",
    "rollout replay": "Rollout replay",
    "DOTS": "DOTS",
    "GRESO": "GRESO",
}


def page() -> str:
    """The whole page, as Markdown."""
    parts = [
        "# Configuration",
        "This page lists the fields that `DataEfficientGRPOConfig` adds to TRL's `GRPOConfig`. Each is also a flag of `trl-dataeff grpo` and a key "
        "of a recipe. Values are checked when the configuration is created, before a model is loaded. `docs/reference.py` writes this page.",
    ]
    own = {field.name: field for field in fields(DataEfficientOptions)}
    for title, names in _groups().items():
        rows = [f"| `{name}` | {_help(own[name])} | {_default(own[name])} | {_type(own[name])} |" for name in names]
        parts.append(
            "\n".join([f"## {title}\n", "| field | what it does | default | values |", "|---|---|---|---|", *rows])
        )
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


def _groups() -> dict[str, list[str]]:
    """Names of the fields under their titles, in the order of options.py."""
    groups: dict[str, list[str]] = {}
    for line in getsource(DataEfficientOptions).splitlines():
        if comment := re.match(r"    # Parameters that control (.+)", line):
            groups[TITLES[comment[1]]] = names = []
        elif name := re.match(r"    (\w+): .* = field\(", line):
            names.append(name[1])
    return groups


def _type(field: Field) -> str:
    annotation = DataEfficientOptions.__annotations__[field.name]  # a parser replaces `field.type` by the type itself
    choices = re.match(r"Literal\[(.+)\]$", annotation)
    if choices:
        return ", ".join(f"`{choice.strip()}`" for choice in choices[1].replace('"', "").split(","))
    allowed = RANGES.get(field.name)
    kind = annotation.replace(" | None", " or none").replace("|", "or")
    return f"{kind} {allowed}" if allowed else kind


def _default(field: Field) -> str:
    if field.default is MISSING:
        return f"`{field.default_factory()!r}`"
    return f"{field.default:.3g}" if isinstance(field.default, float) else f"`{field.default!r}`"


def _help(field: Field) -> str:
    return field.metadata["help"].replace("|", "\\|")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        RECIPES.write_text(recipes_page(RECIPES.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(page(), end="")
