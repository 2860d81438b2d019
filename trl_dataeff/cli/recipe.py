"""A recipe as data: read from YAML, every key and every value's type checked, before anything is made of it."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from trl_dataeff.cli.errors import UserError, closest
from trl_dataeff.cli.values import WrongEntry, WrongType, fit, got


#: What TRL's documentation allows beyond the annotation of its field.
ALSO_ALLOWED: dict[str, Any] = {
    "scale_rewards": bool,
    "lora_target_modules": str,
    "lora_target_parameters": str,
    "resume_from_checkpoint": bool,
}


@dataclass
class Recipe:
    """
    What a recipe says.

    Args:
        path (`Path`):
            Where it was read.
        values (`dict[str, Any]`):
            Key and value of every training field.
        lines (`dict[str, int]`):
            Line of each key in the file.
        env (`dict[str, str]`):
            Environment variables to set.
        launch (`list[str]`):
            Options of `accelerate launch`, as on a command line.
        problems (`list[str]`):
            Keys that are given twice, and what [`check_recipe`] has found.
        refused (`set[str]`):
            Fields with a wrong value, and those that an unknown key may stand for.
    """

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]
    env: dict[str, str] = field(default_factory=dict)
    launch: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def at(self, key: str) -> str:
        """Return `file:line` of a key."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else str(self.path)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; a file that is missing, is not YAML or not a mapping is a [`UserError`]."""
    text = _read_text(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or str(error)
        raise UserError(f"{where}: not YAML: {reason}. A recipe has one `key: value` a line.") from error
    if values is None:
        raise UserError(f"{path}: the recipe is empty. `trl-dataeff recipes show NAME` prints one to start from.")
    if not isinstance(values, dict):
        raise UserError(f"{path}: the recipe is {got(values)}, but it must be a mapping: one `key: value` a line.")
    lines, problems = _lines(path, node)
    return Recipe(path, values, lines, problems=problems)


def check_recipe(recipe: Recipe, dataclass_types: Iterable[type]) -> list[str]:
    """
    Check keys and types of `recipe`, convert its values, and take `env`, launch options and what is wrong out of them.

    Returns:
        `list[str]`:
            One message per problem, with file and line.
    """
    hints, defaults = _known_fields(dataclass_types)
    problems = recipe.problems
    if "env" in recipe.values:
        problems += _take_env(recipe)
    unknown = [key for key in recipe.values if key not in hints]
    if unknown:
        problems += _take_launch_options(recipe, unknown, hints)
    for key, value in list(recipe.values.items()):
        if value is None and defaults[key] is None:
            continue
        try:
            recipe.values[key] = fit(value, hints[key])
            continue
        except WrongEntry as error:
            problems.append(f"{recipe.at(key)}: `{key}` {error}")
        except WrongType as error:
            problems.append(f"{recipe.at(key)}: `{key}` is {got(value)}; it takes {error}.")
        del recipe.values[key]
        recipe.refused.add(key)
    return problems


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given as a file or by the name that `trl-dataeff recipes list` prints."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = {recipe_name(p): p for p in shipped_recipes()}
    wanted = name.removesuffix(".yaml")
    if wanted in shipped:
        return shipped[wanted]
    if path.is_dir():
        raise UserError(f"The recipe {name!r} is a folder; name one of the files in it.")
    nearby = difflib.get_close_matches(path.name, _yaml_files(path.parent), n=1)
    hint = f" Did you mean `{path.parent / nearby[0]}`?" if nearby else closest(wanted, shipped)
    raise UserError(
        f"The recipe {name!r} does not exist: there is no such file, and no recipe of that name comes with the package "
        f"(`trl-dataeff recipes list`).{hint}"
    )


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with the package: in the wheel, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> list[Path]:
    """Return the paths of the recipes that come with the package, `<model>/<task>/<method>.yaml`."""
    return sorted(recipes_folder().glob("*/*/*.yaml"))


def recipe_name(path: Path) -> str:
    """Return the name of a recipe that comes with the package: `<model>/<task>/<method>`."""
    return path.relative_to(recipes_folder()).with_suffix("").as_posix()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8, so it is no recipe.") from error
    except OSError as error:
        raise UserError(f"The recipe {str(path)!r} cannot be read: {error.strerror or error}.") from error


def _lines(path: Path, node: yaml.Node | None) -> tuple[dict[str, int], list[str]]:
    """The line of each key, and a message for each key that is given twice."""
    lines: dict[str, int] = {}
    problems = []
    assert isinstance(node, yaml.MappingNode)
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            problems.append(
                f"{path}:{line}: `{key.value}` is given twice, here and on line {lines[key.value]}. Keep one of them."
            )
        lines[key.value] = line
    return lines, problems


def _known_fields(dataclass_types: Iterable[type]) -> tuple[dict[str, Any], dict[str, Any]]:
    hints: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for dataclass_type in dataclass_types:
        resolved = typing.get_type_hints(dataclass_type)
        for f in fields(dataclass_type):
            if not f.init:
                continue
            hints[f.name] = resolved[f.name]
            if f.name in ALSO_ALLOWED:
                hints[f.name] = hints[f.name] | ALSO_ALLOWED[f.name]
            if "choices" in f.metadata:
                hints[f.name] = typing.Literal[tuple(f.metadata["choices"])]
            defaults[f.name] = f.default
    return hints, defaults


def _take_env(recipe: Recipe) -> list[str]:
    env = recipe.values.pop("env")
    if not isinstance(env, dict):
        return [f"{recipe.at('env')}: `env` is {got(env)}; it takes a mapping of environment variables."]
    recipe.env = {str(key): str(value) for key, value in env.items()}
    return []


def _take_launch_options(recipe: Recipe, keys: list[str], known: Iterable[str]) -> list[str]:
    from trl_dataeff.cli.launch import launch_option, launch_options

    problems = []
    for key in keys:
        value = recipe.values.pop(key)
        tokens = launch_option(str(key), value)
        if tokens is None:
            hint = closest(str(key), [*known, "env", *(option for option in launch_options() if "-" not in option)])
            problems.append(f"{recipe.at(key)}: `{key}` is no field of `trl-dataeff grpo`.{hint}")
            meant = difflib.get_close_matches(str(key), list(known))
            recipe.refused.update(name for name in meant if name not in recipe.lines)
        else:
            recipe.launch += tokens
    return problems


def _yaml_files(folder: Path) -> list[str]:
    return [p.name for p in folder.glob("*.yaml")] if folder.is_dir() else []
