"""Reads the YAML file of a recipe: its keys and values, the line of each, and what cannot be read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trl_dataeff.utils import UserError


#: Bytes of a recipe, and values in it with aliases written out: more would take long to read
LARGEST_RECIPE = 200_000
MOST_VALUES = 10_000


@dataclass
class Recipe:
    """
    What a recipe says.

    Attributes:
        path (`Path` or `None`): its file; `None` without a recipe.
        values (`dict`): value of every key.
        lines (`dict[str, int]`): line of every key that the command line does not override.
        overridden (`set[str]`): names of the options on the command line.
        problems (`list[str]`): what cannot be read in it.
        warnings (`list[str]`): what may be a mistake, and is read.
    """

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    overridden: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def at(self, name: str) -> str:
        """File and line of a key, as the beginning of a message; empty if the recipe does not give it."""
        if name not in self.lines:
            return ""
        return f"{self.path}:{self.lines[name]}: "

    def located(self, message: str) -> str:
        """
        The message, with file and line of the first field in it that the recipe gives. A message that names an option
        of the command line stays as it is: the option is what was changed last.
        """
        if self.path is not None and message.startswith(f"{self.path}:"):
            return message
        words = words_of(message)
        if not self.overridden.isdisjoint(words):
            return message
        for word in words:
            if word in self.lines:
                return self.at(word) + message
        return message

    def line_of(self, message: str) -> float:
        """The line that a message begins with; infinite for one without a line, so that it is sorted to the end."""
        _, _, rest = message.partition(f"{self.path}:")
        number, _, _ = rest.partition(":")
        return int(number) if number.isdecimal() else math.inf

    def overridden_by(self, names: set[str]) -> Recipe:
        """The recipe of a command line with these options, without the lines that they override."""
        lines = {name: line for name, line in self.lines.items() if name not in names}
        return replace(self, lines=lines, overridden=names)


def words_of(message: str) -> list[str]:
    """Return the words of a message. The names of fields are such words."""
    return re.findall(r"\w+", message)


def read_recipe(path: Path) -> Recipe:
    """
    Read a recipe.

    Args:
        path (`Path`):
            A YAML file.

    Returns:
        [`Recipe`]: What the file says. Its keys and values are not checked.

    Raises:
        UserError: If the file cannot be read or is not a YAML mapping, or is one that would take very long to read.
    """
    recipe = Recipe(path)
    loader, root = _parse_yaml(path)
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            recipe.problems.append(f"{path}:{line}: a list or a mapping is used as a field's name.")
            continue
        name = str(key_node.value)
        try:
            value = loader.construct_object(value_node, deep=True)
            repr(value)  # fails for an integer with too many digits, which hexadecimal notation gets past `int`
            repetitions = list(_repeated_keys(loader, value_node))
        # AttributeError and TypeError: of a value that does not fit its tag, such as `!!timestamp soon`
        except (yaml.YAMLError, ValueError, RecursionError, AttributeError, TypeError) as error:
            reason = " ".join(str(error).split())
            recipe.problems.append(f"{path}:{line}: `{name}` has a value that cannot be read: {reason}.")
            recipe.lines[name] = line
            continue
        if name in recipe.values:
            repetitions.append(_Repetition(name, recipe.lines[name], line, recipe.values[name] == value))
        for repetition in repetitions:
            message = (
                f"{path}:{repetition.line}: `{repetition.key}` is given twice, here and on line {repetition.first}"
            )
            if repetition.is_same:
                recipe.warnings.append(f"{message}, with one value.")
            else:
                recipe.problems.append(f"{message}.")
        recipe.values[name] = value
        recipe.lines[name] = line
        recipe.lines |= _lines_of_items(name, value_node)
    return recipe


def _parse_yaml(path: Path) -> tuple[yaml.SafeLoader, yaml.MappingNode]:
    """
    Return the nodes of a YAML file, and the loader that makes values of them.

    Args:
        path (`Path`):
            The file.

    Returns:
        `tuple[SafeLoader, MappingNode]`: The loader, and the node of the whole file.

    Raises:
        UserError: If the file is not a YAML mapping, or is too large, with aliases written out.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_RECIPE:
            raise UserError(f"{path} has {size:,} bytes; a recipe has at most {LARGEST_RECIPE:,}.")
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            root = loader.get_single_node()
        if root is not None and _num_values(root, {}) > MOST_VALUES:
            raise UserError(f"{path} has more than {MOST_VALUES:,} values, with aliases (`*name`) written out.")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read as YAML in UTF-8: {reason}. A recipe has one `key: value` a line."
        ) from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply. A recipe has one `key: value` a line.") from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}: not a recipe: it must have one `key: value` a line.")
    return loader, root


def _num_values(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """
    Count the values of a YAML node, with aliases written out: they can stand for more than memory holds.

    Args:
        node (`Node`):
            Scalar, sequence or mapping.
        known (`dict`):
            Numbers of the nodes that were counted before. This node is entered.

    Returns:
        `float`: The number; infinite for a node that contains itself.
    """
    if node not in known:
        known[node] = math.inf
        known[node] = 1 + sum(_num_values(child, known) for child in _children(node))
    return known[node]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    if isinstance(node, yaml.SequenceNode):
        return node.value
    return []


class _Repetition(NamedTuple):
    """A key that is given twice, its first and its second line, and whether both have the same value."""

    key: str
    first: int
    line: int
    is_same: bool


def _repeated_keys(loader: yaml.SafeLoader, node: yaml.Node) -> Iterator[_Repetition]:
    """
    Find keys that are given twice within a value, of which YAML keeps the last.

    Args:
        loader (`SafeLoader`):
            Makes values of nodes.
        node (`Node`):
            The value.

    Yields:
        `_Repetition`: One for each key that was given before.
    """
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, tuple[int, Any]] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            value = loader.construct_object(value_node, deep=True)
            if key in seen:
                first, first_value = seen[key]
                yield _Repetition(key, first, line, first_value == value)
            seen[key] = (line, value)
    for child in _children(node):
        yield from _repeated_keys(loader, child)


def _lines_of_items(name: str, node: yaml.Node) -> dict[str, int]:
    """Return the lines of the keys in a list of mappings, such as `datasets`, by names such as `datasets[0].path`."""
    lines = {}
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    for index, item in enumerate(items):
        if isinstance(item, yaml.MappingNode):
            for key_node, _ in item.value:
                lines[f"{name}[{index}].{key_node.value}"] = key_node.start_mark.line + 1
    return lines
