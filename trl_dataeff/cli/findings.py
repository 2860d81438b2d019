"""What is wrong with a command and its recipe, collected until all of it can be said at once, with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from trl_dataeff.cli.recipe import Recipe
from trl_dataeff.fields import Problem


class Findings:
    """
    Problems, each at its line of the recipe.

    Args:
        recipe ([`Recipe`], *optional*):
            Where values come from that the command line does not give.
        on_command_line (`set[str]`, *optional*):
            Fields that the command line gives.

    Attributes:
        messages (`list[str]`):
            What was found.
        refused (`set[str]`):
            Fields whose values are wrong. What else is said of them would follow from that, and is left out.
    """

    def __init__(self, recipe: Recipe | None = None, on_command_line: Iterable[str] = ()):
        self.recipe = recipe
        self.on_command_line = set(on_command_line)
        self.messages: list[str] = list(recipe.problems) if recipe else []
        self.refused: set[str] = set(recipe.refused) if recipe else set()

    def extend(self, problems: Iterable[Problem]) -> None:
        """Enter problems that were found together."""
        before = set(self.refused)
        for problem in problems:
            if before.isdisjoint(problem.fields):
                self.messages.append(self._place(problem) + problem.message)
                self.refused.update(problem.fields)

    def note(self, *messages: str, fields: Iterable[str] = ()) -> None:
        """Enter what is wrong with the command line itself."""
        self.messages.extend(messages)
        self.refused.update(fields)

    def sorted(self) -> list[str]:
        """The messages in the order of the file."""
        return sorted(self.messages, key=_line_of)

    def _place(self, problem: Problem) -> str:
        lines = self.recipe.lines if self.recipe else {}
        given = [name for name in problem.fields if name in lines or name in self.on_command_line]
        if self.recipe is None or (given and given[0] in self.on_command_line):
            return ""
        return f"{self.recipe.at(given[0]) if given else self.recipe.path}: "


def mentioned(message: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a message mentions, in its order."""
    found = {name: re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names}
    places = {name: match.start() for name, match in found.items() if match}
    return tuple(sorted(places, key=places.__getitem__))


def _line_of(message: str) -> int:
    number = message.split(": ", 1)[0].rpartition(":")[2]
    return int(number) if number.isdigit() else 0
