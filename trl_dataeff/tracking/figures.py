"""
The figures of a run, drawn with matplotlib (the extra `report`): as SVG whose colours are CSS variables, or as PNG.

Sizes are chosen for a phone: a figure is 5 inches wide with text of 9 to 10 points, so that nothing shrinks on a screen of
360 pixels. Labels stand beside what they name; legends are not used where that is possible.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trl_dataeff.tracking import summaries
from trl_dataeff.tracking.recorded import AXES, RecordedRun


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


class FiguresMissing(ImportError):
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
    with mpl.rc_context(style):
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


def save_png(plot: Plot, path: Path) -> None:
    """Write the figure with its title as PNG, on white."""
    import matplotlib as mpl

    style: Any = {**_STYLE, "figure.facecolor": "white"}
    with mpl.rc_context(style):
        figure = _drawn(plot)
        figure.suptitle(_wrapped(plot.title), x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        figure.savefig(path, dpi=200)


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
            "Figures are drawn with matplotlib, which is not installed: pip install 'trl-dataeff[report]'."
        ) from error


# Parts of figures


def count(value: float, _: Any = None) -> str:
    """`12,800` as `12.8k`."""
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


def _percent(value: float, _: Any = None) -> str:
    return f"{value:.0%}"


def _axis(axes: Axes, x: str = "step", *, unit: str = "", top: float | None = None, percent: bool = False) -> None:
    """Labels and ticks: the unit of y stands above the axis."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("time of training" if x == "seconds" else AXES.get(x, x))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=x != "seconds"))
    axes.xaxis.set_major_formatter(duration if x == "seconds" else count)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(_percent if percent else count)
    if unit:
        axes.set_title(unit, loc="left", fontsize=9, color=COLOURS["ink"], pad=7)
    if top is not None:
        axes.set_ylim(0, top)
    axes.tick_params(length=0)


def _labels(axes: Axes, entries: Sequence[tuple[float, str, str]], gap: float = 0.085) -> None:
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


def _smooth(values: np.ndarray, points: int = 60) -> np.ndarray:
    """Centred running mean over a `points`-th of the values."""
    width = max(1, len(values) // points * 2 + 1)
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, *, dots: bool = False) -> float:
    """A curve; a noisy one as faint points with its running mean. Returns its height at the end."""
    smooth = _smooth(y)
    if len(y) > 60:
        axes.plot(x, y, ".", color=colour, alpha=0.25, markersize=3, markeredgewidth=0)
    axes.plot(x, smooth, color=colour, marker="o" if dots or len(y) == 1 else None, markersize=4)
    return float(smooth[-1])


def _stack(axes: Axes, x: np.ndarray, bands: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
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
    _labels(axes, [(m, name, COLOURS[colours[name]]) for m, name in zip(middles, bands, strict=True)])


# Figures of a run


def progress(run: RecordedRun, x: str) -> Plot | None:
    """Reward in training and on held-out data."""
    curves = []
    held_out = run.held_out
    for name, text, colour in (("reward", "training", "blue"), (held_out, "held out", "orange")):
        if name is not None:
            at, values = run.series(name, x)
            if len(at):
                curves.append((at, values, text, colour))
    if not curves:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        ends = []
        for at, values, text, colour in curves:
            ends.append((_line(axes, at, values, COLOURS[colour], dots=text == "held out"), text, COLOURS[colour]))
        _axis(axes, x, unit="mean reward")
        _labels(axes, ends)

    changes = [f"{text} {_smooth(values)[0]:.2f} to {_smooth(values)[-1]:.2f}" for _, values, text, _ in curves]
    note = (
        "Training: on the prompts that were selected, so the curve moves with the selection, too. "
        + ("Held out: the evaluation dataset, which compares runs." if held_out else "This run has no evaluation.")
        + " Points are single logs, lines their running mean."
    )
    return Plot(f"progress-{x}", f"Reward: {', '.join(changes)}", note, draw, group="progress", label=AXIS_NAMES[x])


def flow(run: RecordedRun) -> Plot | None:
    """Where rollouts went."""
    x, flows, width = summaries.flow(run)
    if not flows:
        return None
    colours = {"trained": "blue", "leftover": "sky", "dropped": "red", "replayed": "green", "skipped": "grey"}
    generated = sum(float(flows[name].sum()) for name in ("trained", "leftover", "dropped") if name in flows)
    trained = float(flows.get("trained", np.zeros(1)).sum() + flows.get("replayed", np.zeros(1)).sum())

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        _axis(axes, unit="completions per step")
        _stack(axes, x, flows, colours)

    title = f"Where rollouts went: {trained / generated:.2f} completions trained on per completion generated"
    note = (
        "Generated completions were trained on at once, left over for a later batch, or dropped. Replayed ones were trained on "
        "again without being generated; skipped ones were not generated because the selector left their prompt out. "
        f"Means over {width} step{'s' * (width > 1)}."
    )
    return Plot("flow", title, note, draw)


def kinds(run: RecordedRun) -> Plot | None:
    """Effective, easy and hard groups."""
    x, shares = summaries.kind_shares(run)
    if not len(x):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        _axis(axes, unit="share of generated groups", percent=True)
        bands = dict(zip(("effective", "hard", "easy"), shares[[0, 2, 1]], strict=True))
        _stack(axes, x, bands, {"effective": "green", "easy": "sky", "hard": "purple"})
        axes.set_ylim(0, 1)

    third = max(1, len(x) // 3)
    first, last = shares[0, :third].mean(), shares[0, -third:].mean()
    title = f"Effective groups: {first:.0%} in the first third, {last:.0%} in the last"
    note = (
        "Only effective groups carry a gradient. Easy: every completion has the highest reward. Hard: all rewards are equal "
        "and lower, mostly because no completion succeeds."
    )
    return Plot("kinds", title, note, draw)


def heat(run: RecordedRun, column: str | None) -> Plot | None:
    """Success rates over time by a column of the dataset; without one, their distribution."""
    if run.groups is None or not len(run.groups):
        return None
    table = summaries.by_rate(run) if column is None else summaries.by_column(run, column)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        step = table.centres[1] - table.centres[0] if len(table.centres) > 1 else 1.0
        edges = np.append(table.centres - step / 2, table.centres[-1] + step / 2)
        mesh = axes.pcolormesh(
            edges,
            np.arange(len(table.rows) + 1),
            np.ma.masked_invalid(table.values),
            cmap="cividis",
            vmin=0,
            vmax=1 if column is not None else None,
            edgecolors="face",
            linewidth=0.2,
        )
        if column is not None and (table.groups == 0).any():
            for row, at in np.argwhere(table.groups == 0):
                axes.plot(table.centres[at], row + 0.5, "x", color=COLOURS["grey"], markersize=3, markeredgewidth=0.8)
        names = [name if len(name) <= 18 else f"{name[:17]}…" for name in table.rows]
        axes.set_yticks(np.arange(len(names)) + 0.5, names)
        _axis_of_heat(axes)
        if column is not None:
            axes.invert_yaxis()
        bar = figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.04, format=_percent)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=8.5)

    height = 1.1 + 0.24 * len(table.rows)
    if column is None:
        note = "Share of the groups of each time, by the success rate of the group. 0 is hard, 1 is easy; the rest carries a gradient."
        return Plot("heat", "How success rates of the groups moved", note, draw, height, "heat", "all groups")
    neglected = [
        name for name, groups in zip(table.rows, table.groups, strict=True) if not groups[-len(groups) // 3 :].any()
    ]
    title = f"Success rate by “{column}” over time"
    if neglected:
        title += f": no groups of {', '.join(neglected[:3])}{' and others' * (len(neglected) > 3)} in the last third"
    note = "Mean success rate of the groups that were generated. A cross marks a time without any group of this kind: it was neglected."
    return Plot(f"heat-{_slug(column)}", title, note, draw, height, "heat", column)


def _axis_of_heat(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(AXES["step"])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(count)
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _slug(text: str) -> str:
    return re.sub(r"\W+", "_", text)


def calibration(run: RecordedRun) -> Plot | None:
    """Predicted against observed success rates."""
    table = summaries.calibration(run)
    if table is None:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=COLOURS["grey"], lw=1, ls=(0, (4, 3)))
        half = np.nan_to_num(table.half_width)
        axes.errorbar(table.predicted, table.observed, half, fmt="none", ecolor=COLOURS["sky"], elinewidth=1.6)
        size = 12 + 120 * table.groups / table.groups.max()
        axes.scatter(table.predicted, table.observed, size, color=COLOURS["blue"], zorder=3, linewidths=0)
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        axes.set_xlabel("predicted success rate")
        axes.set_title("observed success rate", loc="left", fontsize=9, pad=7)
        axes.xaxis.set_major_formatter(_percent)
        axes.yaxis.set_major_formatter(_percent)
        axes.tick_params(length=0)
        text = f"dashed: as predicted\ncorrelation {table.correlation:.2f}\n{int(table.groups.sum()):,} groups"
        axes.annotate(text, (0.98, 0.04), xycoords="axes fraction", ha="right", fontsize=9)

    of = "prompts drawn uniformly" if table.explored else "selected prompts"
    title = f"Predictions on {of}: correlation {table.correlation:.2f} with what was observed"
    note = (
        "Each point is a tenth of the range of predictions, made before the rollouts; its area is its number of groups, its bar the 95 % "
        "confidence interval. Above the line, prompts were easier than predicted."
        + ("" if table.explored else " Selection narrows the range of predictions, and with it the correlation.")
    )
    return Plot("calibration", title, note, draw, 3.2)


REPLAY = (
    ("replay/age_mean", "age in steps", "blue", None),
    ("replay/ess", "effective sample size", "green", 1.0),
    ("replay/clipped_share", "clipped share of tokens", "red", 1.0),
)


def replay(run: RecordedRun) -> Plot | None:
    """Age, effective sample size and clipped share of replayed groups."""
    panels = [(*run.own(name), text, colour, top) for name, text, colour, top in REPLAY]
    panels = [panel for panel in panels if len(panel[0])]
    if not panels:
        return None

    def draw(figure: Figure) -> None:
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (x, y, text, colour, top) in zip(all_axes, panels, strict=True):
            _line(axes, x, y, COLOURS[colour])
            _axis(axes, unit=text, top=top, percent=top is not None)
            axes.yaxis.get_major_locator().set_params(nbins=3)
            axes.set_ylim(bottom=0)
        for axes in all_axes[:-1]:
            axes.set_xlabel("")

    parts = []
    for _, y, text, _, top in panels:
        value = float(np.mean(y[-max(1, len(y) // 3) :]))
        parts.append(f"{text} {value:.0%}" if top else f"{text.split()[0]} {value:.1f} steps")
    note = (
        "Of the replayed groups. An effective sample size near 100 % says that their tokens count alike; a clipped token has no gradient. "
        "A falling size or a growing clipped share says that the stored rollouts are too old: lower `replay_max_age`."
    )
    return Plot("replay", f"Replay in the last third: {', '.join(parts)}", note, draw, 1.0 + 1.05 * len(panels))


def times(run: RecordedRun) -> Plot | None:
    """Where the time went."""
    names = ("generation", "training", "selection")
    series = {name: run.own(f"time/{name}_s") for name in names}
    series = {name: values for name, values in series.items() if len(values[0])}
    if not series or len({len(x) for x, _ in series.values()}) > 1:
        return None
    x = next(iter(series.values()))[0]
    bands = {name: np.maximum(values, 0) for name, (_, values) in series.items()}
    total = sum(float(values.sum()) for values in bands.values()) or 1.0

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        _axis(axes, unit="seconds per step")
        smooth = {name: _smooth(values) for name, values in bands.items()}
        _stack(axes, x, smooth, {"generation": "blue", "training": "orange", "selection": "green"})

    shares = ", ".join(f"{name} {values.sum() / total:.0%}" for name, values in bands.items())
    note = "On the main process; generation includes scoring, training is the rest of the step. Running means."
    return Plot("times", f"Time of a step: {shares}", note, draw)


class Curve(NamedTuple):
    """
    A curve of a comparison.

    Attributes:
        name (`str`): of the method.
        x, y (`np.ndarray`): `(n,)`.
        half_width (`np.ndarray` or `None`): of the 95 % confidence interval of `y`; `None` for a single run.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    half_width: np.ndarray | None = None


def comparison(curves: Sequence[Curve], x: str, metric: str, target: float | None) -> Plot:
    """Curves of several methods against one axis."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        ends = []
        for i, curve in enumerate(curves):
            colour, dash = COLOURS[SERIES[i % len(SERIES)]], ("-", (0, (5, 2)), (0, (1, 1.5)))[i // len(SERIES) % 3]
            axes.plot(curve.x, curve.y, color=colour, ls=dash)
            if curve.half_width is not None:
                low, high = curve.y - curve.half_width, curve.y + curve.half_width
                axes.fill_between(curve.x, low, high, color=colour, alpha=0.16, lw=0)
            ends.append((float(curve.y[-1]), curve.name if len(curve.name) <= 18 else f"{curve.name[:17]}…", colour))
        if target is not None:
            axes.axhline(target, color=COLOURS["grey"], lw=1, ls=(0, (4, 3)))
            axes.annotate(
                f"target {target:.3g}", (0.01, target), xycoords=("axes fraction", "data"), va="bottom", fontsize=8.5
            )
        everything = np.concatenate([curve.y for curve in curves])
        room = 0.12 * (everything.max() - everything.min() or 1)
        axes.set_ylim(everything.min() - room, everything.max() + room)
        _axis(axes, x, unit=metric)
        _labels(axes, ends)

    bands = " Bands are 95 % confidence intervals over runs." if any(c.half_width is not None for c in curves) else ""
    title = f"{metric[:1].upper()}{metric[1:]} against {'time of training' if x == 'seconds' else AXES[x]}"
    note = f"Means over the runs of a method, up to where its shortest run ends.{bands}"
    return Plot(f"compare-{x}", title, note, draw, 3.1)


def plots_of(run: RecordedRun, by: Sequence[str] = ()) -> list[Plot]:
    """
    All figures that can be drawn of a run, in the order of a page.

    Args:
        run ([`RecordedRun`]): the run.
        by (`Sequence[str]`): columns of the dataset for heat maps.
    """
    candidates = [
        *(progress(run, x) for x in AXES),
        kinds(run),
        flow(run),
        *(heat(run, column) for column in by),
        heat(run, None),
        calibration(run),
        replay(run),
        times(run),
    ]
    return [plot for plot in candidates if plot is not None]
