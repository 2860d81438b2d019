"""The figures of a run, each with a title that says what it shows of this run, and a note on how to read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trl_dataeff.tracking import summaries
from trl_dataeff.tracking.drawing import (
    AXIS_NAMES,
    COLOURS,
    Plot,
    axis,
    count,
    labels,
    line,
    percent_text,
    smooth,
    stack,
)
from trl_dataeff.tracking.recorded import AXES, RecordedRun


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
            ends.append((line(axes, at, values, COLOURS[colour], dots=text == "held out"), text, COLOURS[colour]))
        axis(axes, x, unit="mean reward")
        labels(axes, ends)

    changes = [f"{text} {smooth(values)[0]:.2f} to {smooth(values)[-1]:.2f}" for _, values, text, _ in curves]
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
        axis(axes, unit="completions per step")
        stack(axes, x, flows, colours)

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
        axis(axes, unit="share of generated groups", percent=True)
        bands = dict(zip(("effective", "hard", "easy"), shares[[0, 2, 1]], strict=True))
        stack(axes, x, bands, {"effective": "green", "easy": "sky", "hard": "purple"})
        axes.set_ylim(0, 1)

    third = max(1, len(x) // 3)
    first, last = shares[0, :third].mean(), shares[0, -third:].mean()
    title = f"Effective groups: {first:.0%} in the first third, {last:.0%} in the last"
    tracked = run.argument("advantage_baseline") == "tracked"
    which = "Effective groups, and others that were not predicted," if tracked else "Only effective groups"
    note = (
        f"{which} carry a gradient. Easy: every completion has the highest reward. Hard: all rewards are equal "
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
        bar = figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.04, format=percent_text)
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
        axes.xaxis.set_major_formatter(percent_text)
        axes.yaxis.set_major_formatter(percent_text)
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
            line(axes, x, y, COLOURS[colour])
            axis(axes, unit=text, top=top, percent=top is not None)
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
        axis(axes, unit="seconds per step")
        running_means = {name: smooth(values) for name, values in bands.items()}
        stack(axes, x, running_means, {"generation": "blue", "training": "orange", "selection": "green"})

    shares = ", ".join(f"{name} {values.sum() / total:.0%}" for name, values in bands.items())
    note = "On the main process; generation includes scoring, training is the rest of the step. Running means."
    return Plot("times", f"Time of a step: {shares}", note, draw)


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
