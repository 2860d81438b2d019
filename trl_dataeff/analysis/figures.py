"""
The figure of `trl-dataeff report --figure`: panels that compare runs, for a paper or a pull request. Needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trl_dataeff.analysis.recorded import RecordedRun, unit_of_time
from trl_dataeff.utils import PREFIX, UserError


#: Okabe and Ito's colours, which colour-blind people can tell apart: one per run, `C0`, `C1`, ...
COLOURS = ["#0072b2", "#d98200", "#009e73", "#b0609a", "#56b4e9", "#d55e00"]
TOKENS_SAVED = f"{PREFIX}update/tokens_saved"
#: What became of rollouts, with colours that differ from those of runs
DESTINATIONS = {"trained": "#333333", "kept": "#f0e442", "dropped": "#bbbbbb"}
#: Limits of the axis of a share, beyond [0, 1], because the frame would hide a line at its edge
SHARE_LIMITS = (-0.03, 1.03)
STYLE: Any = {"axes.prop_cycle": f"cycler('color', {COLOURS})", "font.size": 9, "text.parse_math": False}
AXES = {"step": "optimizer steps", "rollouts": "rollouts generated", "time": "time of training"}
#: Parts of a step, with the line of each
PARTS_OF_STEP = {f"{PREFIX}time/generation_s": "--", f"{PREFIX}update/seconds": "-"}
#: A curve of n logs is drawn as running means over n // POINTS * 2 + 1 of them
POINTS = 60
#: Two axes give one picture if no point is further from its place on the other axis than this share of the axis
SAME_WITHIN = 0.02
#: Success rates of a heat map that have a tick each
MOST_TICKS = 8
#: Columns of a heat map at most
COLUMNS = 40


def check_figure(path: Path) -> None:
    """
    Check that a figure can be drawn and saved, before runs are read.

    Args:
        path (`Path`): its file, whose ending names its format.

    Raises:
        [`UserError`]: matplotlib is not installed, or does not know the ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("A figure needs matplotlib, which is not installed: pip install matplotlib.") from error
    known = [f".{ending}" for ending in Figure().canvas.get_supported_filetypes()]
    if path.suffix.lower() not in known:
        raise UserError(
            f"{str(path)!r} has no ending of a figure. Known are {', '.join(sorted(known))}. Name a file such as "
            "runs.png."
        )


def save_figure(runs: Sequence[RecordedRun], path: Path) -> None:
    """
    Draw every panel for which the runs have data into one figure, and save it.

    Args:
        runs (`Sequence[RecordedRun]`): the runs to compare.
        path (`Path`): the file, of which [`check_figure`] has found nothing wrong.

    Raises:
        [`UserError`]: the runs have no data, or the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = panels_of(runs)
    if not panels:
        raise UserError("There is nothing to draw: these runs have logged neither rewards nor groups.")
    num_rows = (len(panels) + 1) // 2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3 * num_rows), layout="constrained")
        for place, draw_panel in enumerate(panels, start=1):
            draw_panel(figure.add_subplot(num_rows, 2, place))
        if len(runs) > 1:
            lines = [Line2D([], [], color=f"C{i}") for i in range(len(runs))]
            names = [_label(run) for run in runs]
            figure.legend(lines, names, loc="outside upper center", ncols=min(len(runs), 4), frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UserError(f"{str(path)!r} cannot be written: {error}. Name another file.") from error


def panels_of(runs: Sequence[RecordedRun]) -> list[Callable[[Any], None]]:
    """
    List the panels for which runs have data.

    Args:
        runs (`Sequence[RecordedRun]`): the runs to compare.

    Returns:
        `list[Callable]`: functions that draw a panel into matplotlib `Axes`.
    """
    panels: list[Callable[[Any], None]] = []
    for x in _axes_that_differ(runs):
        if any(_has_points(run.series("reward", x)) for run in runs):
            panels.append(partial(rewards, runs, x))
    if any(_has_points(run.effective_share()) for run in runs):
        panels.append(partial(effective, runs))
    if any(_has_points(run.series(TOKENS_SAVED)) for run in runs):
        panels.append(partial(tokens_computed, runs))
    if any(_has_points(run.series(part)) for run in runs for part in PARTS_OF_STEP):
        panels.append(partial(time_of_step, runs))
    own_runs = [run for run in runs if f"{PREFIX}rollouts_generated" in run.logs]
    if any(_chose_rollouts(run) for run in own_runs):
        panels.append(partial(flow, own_runs))
    for run in runs:
        if run.groups is not None and run.groups["success_rate"].notna().any():
            panels.append(partial(success_rates, run))
    return panels


def _axes_that_differ(runs: Sequence[RecordedRun]) -> list[str]:
    """The axes of `AXES` that give a picture of their own: rollouts give that of steps if each step has as many."""
    positions = pd.concat([run.logs.reindex(columns=list(AXES)) for run in runs])
    places = positions / positions.max()
    axes: list[str] = []
    for x in AXES:
        distances = [(places[x] - places[other]).abs() for other in axes]
        # Not the same where positions are not known
        is_same = any((distance <= SAME_WITHIN).all() for distance in distances)
        if not is_same:
            axes.append(x)
    return axes


def _chose_rollouts(run: RecordedRun) -> bool:
    """Whether something else became of rollouts than to be trained on in their own batch."""
    went = where_rollouts_went(run)
    return any(went[name] > 0 for name in went if name != "trained")


def _label(run: RecordedRun) -> str:
    return run.name.lstrip("_")  # matplotlib hides labels that begin with it


def _has_points(curve: tuple[np.ndarray, np.ndarray]) -> bool:
    positions, _ = curve
    return len(positions) > 0


def rewards(runs: Sequence[RecordedRun], x: str, axes: Any) -> None:
    """Draw the reward in training as a running mean, and the reward on held-out data, over an axis `x` of `AXES`."""
    label, unit = _unit_of_axis(runs, x)
    for i, run in enumerate(runs):
        colour = f"C{i}"
        positions, values = run.series("reward", x)
        axes.plot(positions / unit, running_mean(values), color=colour)
        if run.held_out:
            positions, values = run.series(run.held_out, x)
            axes.plot(positions / unit, values, color=colour, ls="--", marker="o", markersize=4)
    held_out = " (dashed: held-out data)" if any(run.held_out for run in runs) else ""
    absent = [run.name for run in runs if x not in run.logs]
    without = f"\nnot known: {', '.join(absent)}" if absent else ""
    axes.set(title=f"Reward by {AXES[x]}", xlabel=label + without, ylabel=f"mean reward{held_out}")


def _unit_of_axis(runs: Sequence[RecordedRun], x: str) -> tuple[str, int]:
    """The label of an axis, and by what its positions are divided."""
    if x != "time":
        return AXES[x], 1
    longest = max(run.logs[x].max() for run in runs if x in run.logs)
    name, seconds = unit_of_time(longest)
    return f"{AXES[x]} ({name})", seconds


def effective(runs: Sequence[RecordedRun], axes: Any) -> None:
    """Draw the share of effective groups among those generated."""
    for i, run in enumerate(runs):
        steps, shares = run.effective_share()
        axes.plot(steps, running_mean(shares), color=f"C{i}")
    axes.set(title="Effective groups", xlabel=AXES["step"], ylabel="share of generated groups", ylim=SHARE_LIMITS)


def tokens_computed(runs: Sequence[RecordedRun], axes: Any) -> None:
    """Draw the share of TRL's tokens that updates computed."""
    for i, run in enumerate(runs):
        steps, saved = run.series(TOKENS_SAVED)
        axes.plot(steps, running_mean(1 - saved), color=f"C{i}")
    axes.set(title="Tokens of the update", xlabel=AXES["step"], ylabel="share of TRL's tokens", ylim=SHARE_LIMITS)


def time_of_step(runs: Sequence[RecordedRun], axes: Any) -> None:
    """Draw what generation, with rewards, and the update take in a step."""
    for i, run in enumerate(runs):
        for part, line in PARTS_OF_STEP.items():
            steps, seconds = run.series(part)
            axes.plot(steps, running_mean(seconds), color=f"C{i}", ls=line)
    axes.set(
        title="Time of a step",
        xlabel=AXES["step"],
        ylabel="seconds (dashed: generation\nand rewards; solid: the update)",
        ylim=(0, None),
    )


def flow(runs: Sequence[RecordedRun], axes: Any) -> None:
    """
    Draw a bar of the completions that each run generated, by what became of them, and below it a hatched bar of those
    that were trained on again.
    """
    table = pd.DataFrame([where_rollouts_went(run) for run in runs])
    destinations = table[list(DESTINATIONS)]
    left_ends = destinations.cumsum(axis=1) - destinations
    for name, colour in DESTINATIONS.items():
        if table[name].any():
            axes.barh(table.index, table[name], height=0.5, left=left_ends[name], label=name, color=colour)
    if table["replayed"].any():
        below = table.index + 0.36
        hatched = {"color": "white", "edgecolor": "#333333", "hatch": "/////"}
        axes.barh(below, table["replayed"], height=0.18, label="trained on again", **hatched)
    axes.set_yticks(table.index, [run.name for run in runs])
    axes.set(title="Where rollouts went", xlabel="completions")
    axes.invert_yaxis()
    # Below the bars, of which some are as dark as its letters
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(DESTINATIONS) + 1)


def where_rollouts_went(run: RecordedRun) -> dict[str, float]:
    """
    Count the completions of a run by what became of them.

    Args:
        run ([`RecordedRun`]): a run of this package.

    Returns:
        `dict[str, float]`: those that were `trained` on or `dropped` in their own batch, those `kept` for later
        batches, and those `replayed` there.
    """
    last = run.last
    generated = last.get(f"{PREFIX}rollouts_generated", 0.0)
    trained = last.get(f"{PREFIX}rollouts_trained", 0.0)
    replayed = last.get(f"{PREFIX}rollouts_replayed", 0.0)
    dropped = last.get(f"{PREFIX}rollouts_discarded", 0.0)
    trained_in_own_batch = trained - replayed
    kept = max(0.0, generated - trained_in_own_batch - dropped)
    return {"trained": trained_in_own_batch, "kept": kept, "dropped": dropped, "replayed": replayed}


def success_rates(run: RecordedRun, axes: Any) -> None:
    """
    Draw the distribution of the groups' success rates over time.

    A column of the heat map has the groups of one or several generation batches. A row has one of the rates k / G, for
    G completions a group, and what is nearer to it than to others.

    Args:
        run ([`RecordedRun`]): a run with at least one success rate.
        axes (`matplotlib.axes.Axes`): where to draw.
    """
    assert run.groups is not None
    known = run.groups.dropna(subset="success_rate")
    batches = np.unique(known["step"])
    batches_per_column = math.ceil(len(batches) / COLUMNS)
    end = max(batches[-1] + 1, run.logs["step"].max())
    step_edges = [*batches[::batches_per_column], end]
    group_size = int(known["completions"].max())
    rate_edges = (np.arange(group_size + 2) - 0.5) / group_size
    counts, _, _ = np.histogram2d(known["step"], known["success_rate"], bins=(step_edges, rate_edges))
    groups_by_time = np.maximum(counts.sum(axis=1), 1)
    mesh = axes.pcolormesh(step_edges, rate_edges, counts.T / groups_by_time, cmap="cividis", vmin=0)
    axes.figure.colorbar(mesh, ax=axes, label="share of groups")
    if group_size <= MOST_TICKS:
        axes.set_yticks(np.arange(group_size + 1) / group_size)
    axes.set(title=f"Success rates of {run.name}", xlabel=AXES["step"], ylabel="success rate")


def running_mean(values: np.ndarray) -> np.ndarray:
    """
    Smooth a curve.

    Args:
        values (`np.ndarray` of shape `(n,)`): its values.

    Returns:
        `np.ndarray` of shape `(n,)`: centred means over about a thirtieth of the values; the values themselves, if
        they are fewer than `POINTS`.
    """
    width = len(values) // POINTS * 2 + 1
    rolling = pd.Series(values, dtype=float).rolling(width, center=True, min_periods=1)
    return np.asarray(rolling.mean())
