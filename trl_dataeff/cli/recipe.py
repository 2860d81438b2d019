"""Recipes: YAML files of fields, with the line of each key. Which there are, and how one is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trl_dataeff.utils import UserError, closest


@dataclass
class Recipe:
    """Value and line of every key of a recipe, and `repeated` keys: each with its line, and that where it stood before."""

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    repeated: list[tuple[str, int, int]] = field(default_factory=list)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; a file that is missing, is not YAML or not a mapping is a [`UserError`]."""
    try:
        text = path.read_text(encoding="utf-8")
        node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file. A recipe is a YAML file in UTF-8.") from error
    except OSError as error:
        raise UserError(f"The recipe {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or str(error)
        raise UserError(f"{where}: not YAML: {reason}. A recipe has one `key: value` a line.") from error
    if not isinstance(node, yaml.MappingNode):
        found = "empty; write" if values is None else f"a {type(values).__name__}; it must be a mapping:"
        raise UserError(
            f"{path}: the recipe is {found} one `key: value` a line. `trl-dataeff recipes show NAME` prints one to start from."
        )
    recipe = Recipe(path, {str(key): value for key, value in values.items()})
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in recipe.lines:
            recipe.repeated.append((key.value, line, recipe.lines[key.value]))
        recipe.lines[key.value] = line
    return recipe


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given as a file or by the name that `trl-dataeff recipes list` prints."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    wanted = name.removesuffix(".yaml")
    if wanted in shipped:
        return shipped[wanted]
    if path.is_dir():
        raise UserError(f"The recipe {name!r} is a folder; name one of the files in it.")
    raise UserError(
        f"The recipe {name!r} does not exist: there is no such file, and no recipe of that name comes with the package "
        f"(`trl-dataeff recipes list`).{closest(name, [*map(str, path.parent.glob('*.yaml')), *shipped])}"
    )


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with the package: in the wheel, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package by their names, `<model>/<task>/<method>`, in alphabetical order."""
    folder = recipes_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.glob("*/*/*.yaml"))}
