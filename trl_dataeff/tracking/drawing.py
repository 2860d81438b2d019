"""
How figures are drawn, with matplotlib (the extra `report`): as SVG whose colours are CSS variables, or as PNG.

Sizes are chosen for a phone: a figure is 5 inches wide with text of 9 to 10 points, so that nothing shrinks on a screen of
360 pixels. Labels stand beside what they name; legends are not used where that is possible.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_dataeff.tracking.recorded import AXES
from trl_dataeff.utils import UserError


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which colour-blind people can tell apart. A page replaces each by a CSS variable of this name.
COLOURS = {
    "blue": "#0072b2",
    "orange": "#d98200",
    "green": "#009e73",
    "red": "#d55e00",
    "purple": "#b0609a",
    "sky": "#56b4e9",
    "grey": "#8c939b",
    "ink": "#1f2329",
    "faint": "#d9dce1",
    "paper": "#fdfdfe",
}
AXIS_NAMES = {"rollouts": "rollouts", "tokens": "tokens", "step": "steps", "seconds": "time"}
SERIES = ("blue", "orange", "green", "purple", "sky", "red")
WIDTH = 5.0  # inches
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # wider than what browsers show: labels have room
    "font.size": 9.5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names and values of a dataset may contain "$"
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["grey"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": COLOURS["faint"],
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.8,
}


class FiguresMissing(UserError, ImportError):
    """The plotting library is not installed."""


@dataclass(frozen=True)
class Plot:
    """
    A figure to draw.

    Attributes:
        name (`str`): of its file and its element.
        title (`str`): what is shown, with what it says of this run where that can be said.
        note (`str`): how to read it.
        draw (`Callable`): draws into a matplotlib figure.
        height (`float`): in inches.
        group (`str`): figures of one group are alternatives: a page shows one of them at a time.
        label (`str`): names it among the alternatives.
    """

    name: str
    title: str
    note: str
    draw: Callable[[Figure], None]
    height: float = 2.9
    group: str = ""
    label: str = ""


def svg(plot: Plot) -> str:
    """The figure as an SVG element: text is text, colours are `var(--NAME)`, and ids begin with the figure's name."""
    import matplotlib as mpl

    buffer = io.StringIO()
    style: Any = {**_STYLE, "svg.hashsalt": plot.name}
    # A character that the font lacks: the browser has it
    with mpl.rc_context(style), warnings.catch_warnings(action="ignore", category=UserWarning):
        _drawn(plot).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{plot.name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{plot.name}-", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    title = _escaped(plot.title)
    return re.sub(r'<svg ([^>]*?)width="[^"]*"', rf'<svg role="img" aria-label="{title}" \1', text, count=1).replace(
        'height="', 'data-height="', 1
    )


def save_png(plot: Plot, path: Path | io.BytesIO) -> None:
    """Write the figure with its title as PNG, on white."""
    import matplotlib as mpl

    style: Any = {**_STYLE, "figure.facecolor": "white"}
    with mpl.rc_context(style):
        figure = _drawn(plot)
        figure.suptitle(_wrapped(plot.title), x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        figure.savefig(path, dpi=200)


def pixels(plot: Plot) -> np.ndarray:
    """The figure of [`save_png`], uint8, `(height, width, 3)`."""
    from PIL import Image

    buffer = io.BytesIO()
    save_png(plot, buffer)
    return np.asarray(Image.open(buffer).convert("RGB"))


def _drawn(plot: Plot) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, plot.height), layout="constrained")
    plot.draw(figure)
    return figure


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;").replace("\\", "")


def _wrapped(text: str, width: int = 54) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def check_library() -> None:
    """Raise [`FiguresMissing`] if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FiguresMissing(
            "Figures are drawn with matplotlib, which is not installed: pip install matplotlib."
        ) from error


# Parts of figures


def count(value: float, _: Any = None) -> str:
    """`12,800` as `12.8k`."""
    value = float(f"{value:.3g}")  # 999.9999 is 1k
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float, _: Any = None) -> str:
    """Seconds in the unit in which a person would say them."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def percent_text(value: float, _: Any = None) -> str:
    return f"{value:.0%}"


def axis(axes: Axes, x: str = "step", *, unit: str = "", top: float | None = None, percent: bool = False) -> None:
    """Labels and ticks: the unit of y stands above the axis."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("time of training" if x == "seconds" else AXES.get(x, x))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=x != "seconds"))
    axes.xaxis.set_major_formatter(duration if x == "seconds" else count)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(percent_text if percent else count)
    if unit:
        axes.set_title(unit, loc="left", fontsize=9, color=COLOURS["ink"], pad=7)
    if top is not None:
        axes.set_ylim(0, top)
    axes.tick_params(length=0)


def labels(axes: Axes, entries: Sequence[tuple[float, str, str]], gap: float = 0.085) -> None:
    """
    Names at the right edge, beside the ends of what they name, moved apart where they would overlap.

    Args:
        entries: height in data units, text and colour of each.
        gap (`float`): least distance, as a share of the height of the axes.
    """
    if not entries:
        return
    low, high = axes.get_ylim()
    order = sorted(entries, key=lambda entry: entry[0])
    places = [float(np.clip((y - low) / (high - low), 0, 1)) for y, *_ in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    shift = max(0.0, places[-1] - 1)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], 1 - (len(places) - 1 - i) * gap if shift else places[i])
    place_at: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "va": "center",
        "fontsize": 9,
    }
    for place, (_, text, colour) in zip(places, order, strict=True):
        axes.annotate("■", (1, place), xytext=(4, 0), color=colour, annotation_clip=False, **place_at)
        axes.annotate(text, (1, place), xytext=(14, 0), annotation_clip=False, **place_at)


def smooth(values: np.ndarray, points: int = 60) -> np.ndarray:
    """Centred running mean over a `points`-th of the values."""
    width = max(1, len(values) // points * 2 + 1)
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def line(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, *, dots: bool = False) -> float:
    """A curve; a noisy one as faint points with its running mean. Returns its height at the end."""
    means = smooth(y)
    if len(y) > 60:
        axes.plot(x, y, ".", color=colour, alpha=0.25, markersize=3, markeredgewidth=0)
    axes.plot(x, means, color=colour, marker="o" if dots or len(y) == 1 else None, markersize=4)
    return float(means[-1])


def stack(axes: Axes, x: np.ndarray, bands: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Bands on top of each other, each named at its right end; those that end at nothing in a legend above."""
    values = np.stack(list(bands.values()))
    if len(x) == 1:
        x, values = np.array([x[0] - 0.5, x[0] + 0.5]), np.repeat(values, 2, axis=1)
    tops = np.cumsum(values, axis=0)
    axes.stackplot(x, values, colors=[COLOURS[colours[name]] for name in bands], edgecolor=COLOURS["paper"], lw=0.6)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(0, max(float(tops[-1].max()), 1e-9))
    middles = tops[:, -1] - values[:, -1] / 2
    axes.set_xmargin(0)
    labels(axes, [(m, name, COLOURS[colours[name]]) for m, name in zip(middles, bands, strict=True)])
