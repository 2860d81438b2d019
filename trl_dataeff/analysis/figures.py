"""The figure of `trl-dataeff report --figure`: panels that compare runs, for a paper or a pull request. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trl_dataeff.analysis.recorded import RecordedRun
from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import UserError


#: Okabe and Ito's colours, which colour-blind people can tell apart: one per run, `C0`, `C1`, ...
COLOURS = ["#0072b2", "#d98200", "#009e73", "#b0609a", "#56b4e9", "#d55e00"]
GREYS = ("0.2", "0.45", "0.85", "0.65")
STYLE: Any = {"axes.prop_cycle": f"cycler('color', {COLOURS})", "font.size": 9, "text.parse_math": False}
AXES = {"rollouts": "rollouts generated", "step": "optimizer steps"}
POINTS = 60  # of a curve: its running mean is over a 60th of it


def save_figure(runs: Sequence[RecordedRun], path: Path) -> None:
    """
    Draw every panel for which the runs have data into one figure and save it; the file's ending (.png, .svg, .pdf) names its
    format. Raises a [`UserError`] if matplotlib is not installed, the runs have no data, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("A figure needs matplotlib, which is not installed: pip install matplotlib.") from error
    panels = panels_of(runs)
    if not panels:
        raise UserError("There is nothing to draw: these runs have logged neither rewards nor groups.")
    rows = (len(panels) + 1) // 2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3 * rows), layout="constrained")
        for place, panel in enumerate(panels, start=1):
            panel(figure.add_subplot(rows, 2, place))
        if len(runs) > 1:
            figure.axes[0].legend(frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
            raise UserError(f"{str(path)!r} cannot be written: {error}. Name another file.") from error


def panels_of(runs: Sequence[RecordedRun]) -> list[Callable[[Any], None]]:
    """Functions that draw a panel into matplotlib `Axes`, of all panels for which the runs have data."""
    found: list[Callable[[Any], None]] = [
        partial(rewards, runs, x) for x in AXES if any(len(run.series("reward", x)[0]) for run in runs)
    ]
    if any(len(run.effective_share()[0]) for run in runs):
        found.append(partial(effective, runs))
    if ours := [run for run in runs if f"{PREFIX}rollouts_generated" in run.logs]:
        found.append(partial(flow, ours))
    return found + [partial(success_rates, run) for run in runs if run.groups is not None]


def rewards(runs: Sequence[RecordedRun], x: str, axes: Any) -> None:
    """Reward in training as a running mean, and on held-out data."""
    for i, run in enumerate(runs):
        at, values = run.series("reward", x)
        axes.plot(at, running_mean(values), color=f"C{i}", label=run.name.lstrip("_"))  # matplotlib hides such labels
        if run.held_out:
            axes.plot(*run.series(run.held_out, x), color=f"C{i}", ls="--", marker="o", markersize=4)
    held_out = " (dashed: held-out data)" if any(run.held_out for run in runs) else ""
    axes.set(title=f"Reward by {AXES[x]}", xlabel=AXES[x], ylabel=f"mean reward{held_out}")


def effective(runs: Sequence[RecordedRun], axes: Any) -> None:
    """Share of effective groups among those generated."""
    for i, run in enumerate(runs):
        steps, shares = run.effective_share()
        axes.plot(steps, running_mean(shares), color=f"C{i}")
    axes.set(title="Effective groups", xlabel=AXES["step"], ylabel="share of generated groups", ylim=(0, 1))


def flow(runs: Sequence[RecordedRun], axes: Any) -> None:
    """A bar of completions for each run, by what became of them."""
    table = pd.DataFrame([where_rollouts_went(run) for run in runs])
    left = table.cumsum(axis=1) - table
    for part, grey in zip(table, GREYS, strict=True):  # colours stand for runs
        axes.barh(table.index, table[part], left=left[part], label=part, color=grey)
    axes.set_yticks(table.index, [run.name for run in runs])
    axes.set(title="Where rollouts went", xlabel="completions")
    axes.invert_yaxis()
    axes.legend(frameon=False)


def where_rollouts_went(run: RecordedRun) -> dict[str, float]:
    """Completions of a run by what became of them: in their own batch, or `kept` for later ones; and those `replayed`."""
    names = ("generated", "trained", "replayed", "discarded")
    generated, trained, replayed, dropped = (run.last.get(f"{PREFIX}rollouts_{name}", 0.0) for name in names)
    fresh = trained - replayed
    kept = max(0.0, generated - fresh - dropped)
    return {"trained": fresh, "kept": kept, "dropped": dropped, "replayed": replayed}


def success_rates(run: RecordedRun, axes: Any) -> None:
    """Distribution of the groups' success rates over time."""
    assert run.groups is not None
    known = run.groups.dropna(subset="success_rate")
    end = int(run.groups["step"].max()) + 1
    edges = np.linspace(0, end, min(40, end) + 1), np.linspace(0, 1, 10)
    counts = np.histogram2d(known["step"], known["success_rate"], bins=edges)[0]
    shares = counts.T / np.maximum(counts.sum(axis=1), 1)
    mesh = axes.pcolormesh(*edges, shares, cmap="cividis", vmin=0)
    axes.figure.colorbar(mesh, ax=axes, label="share of groups")
    axes.set(title=f"Success rates of {run.name}", xlabel=AXES["step"], ylabel="success rate")


def running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over a `POINTS`-th of the values `(n,)`; as long as they are."""
    window = len(values) // POINTS * 2 + 1
    return np.asarray(pd.Series(values, dtype=float).rolling(window, center=True, min_periods=1).mean())
