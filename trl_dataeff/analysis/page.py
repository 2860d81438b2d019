"""
A self-contained HTML page: figures, sortable tables, warnings. It loads nothing, and opens from a disk.

All texts of a run (prompts, completions, names, settings) are escaped by the template: nobody has checked them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_dataeff.analysis.advice import Advice
from trl_dataeff.tracking.drawing import COLOURS, Plot, svg
from trl_dataeff.version import __version__


#: Of the dark scheme: the same hues, lighter
DARK = {
    "blue": "#4aa8e8",
    "orange": "#f0a93a",
    "green": "#2fc39a",
    "red": "#f2803c",
    "purple": "#d58cc0",
    "sky": "#8fd0f5",
    "grey": "#838c98",
    "ink": "#e6e9ee",
    "faint": "#333a44",
    "paper": "#1b1f26",
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, what it is sorted by (by default its text), and what opens below it: labels and texts."""

    text: str
    value: float | None = None
    more: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Column:
    """Title of a column, and whether it holds numbers."""

    title: str
    number: bool = False


@dataclass(frozen=True)
class Table:
    """A table that a reader can sort."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass
class Page:
    """
    What a page shows, from top to bottom; what is empty is left out.

    Attributes:
        title, subtitle (`str`): of the page.
        tiles (`list[tuple[str, str]]`): values and what they are.
        advice (`Sequence[Advice]`): what to act on.
        missing (`Sequence[str]`): what is not shown, and why.
        lead (`Sequence[Table]`): tables above the figures.
        plots (`Sequence[Plot]`): figures; those of one group share a place.
        tables (`Sequence[Table]`): tables below the figures.
        command (`str`): that started the run.
        settings (`dict`): `all` and `changed`, values by name.
    """

    title: str
    subtitle: str = ""
    tiles: Sequence[tuple[str, str]] = ()
    advice: Sequence[Advice] = ()
    missing: Sequence[str] = ()
    lead: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    command: str = ""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def html(self) -> str:
        """The page."""
        from jinja2 import Environment, PackageLoader
        from markupsafe import Markup, escape

        loader = PackageLoader("trl_dataeff.analysis", "templates")
        environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
        environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
        table = environment.get_template("table.html.j2")
        groups: dict[str, list[Any]] = {}
        for plot in self.plots:
            # matplotlib escapes the texts in a figure
            groups.setdefault(plot.group or plot.name, []).append({"plot": plot, "svg": Markup(svg(plot))})
        return environment.get_template("page.html.j2").render(
            **vars(self) | {"tiles": [{"value": value, "label": label} for value, label in self.tiles]},
            figures=[{"name": name if len(plots) > 1 else "", "plots": plots} for name, plots in groups.items()],
            light=COLOURS,
            dark=DARK,
            version=__version__,
            render=lambda one: Markup(table.render(table=one)),
        )
