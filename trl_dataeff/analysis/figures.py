"""The figures of a report, as SVG whose text and lines follow the page's colour scheme. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trl_dataeff.analysis.recorded import RecordedRun
from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import UserError


#: Okabe and Ito's colours, which colour-blind people can tell apart: a run each
COLOURS = ("#0072b2", "#d98200", "#009e73", "#b0609a", "#56b4e9", "#d55e00")
INK = "#1f2329"
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "lines.linewidth": 1.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
AXES = {"rollouts": "rollouts generated", "step": "optimizer steps"}
POINTS = 60  # of a curve: its running mean is over a 60th of it


class Figure(NamedTuple):
    """A figure of the page: what it shows, how to read it, and an SVG element."""

    title: str
    note: str
    svg: str


def figures_of(runs: Sequence[RecordedRun]) -> list[Figure]:
    """All figures for which the runs have the data. Raises a [`UserError`] if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError("A report needs matplotlib, which is not installed: pip install matplotlib.") from error
    with mpl.rc_context(STYLE):
        found = [progress(runs, "rollouts"), progress(runs, "step"), effective(runs), flow(runs)]
        found += [success_rates(run) for run in runs]
    return [figure for figure in found if figure is not None]


def progress(runs: Sequence[RecordedRun], x: str) -> Figure | None:
    """Reward in training and on held-out data."""
    if not any(len(run.series(metric, x)[0]) for run in runs for metric in ("reward", run.held_out)):
        return None
    axes = _axes(xlabel=AXES[x], ylabel="mean reward")
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        at, values = run.series("reward", x)
        axes.plot(at, running_mean(values), color=colour, label=run.name)
        if run.held_out:
            axes.plot(*run.series(run.held_out, x), color=colour, ls="--", marker="o", markersize=4)
    note = (
        "Solid: reward in training (running mean), which moves with the selection of prompts, too. Dashed: evaluations on held-out "
        "data, which compare runs."
    )
    return Figure(f"Reward by {AXES[x]}", note, svg(axes, f"progress-{x}", legend=len(runs) > 1))


def effective(runs: Sequence[RecordedRun]) -> Figure | None:
    """Share of effective groups among those generated."""
    if not any(len(run.effective_share()[0]) for run in runs):
        return None
    axes = _axes(xlabel=AXES["step"], ylabel="effective share", ylim=(0, 1))
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        steps, shares = run.effective_share()
        axes.plot(steps, running_mean(shares), color=colour, label=run.name)
    note = "Share of the generated groups whose rewards differ. Only they carry a gradient."
    return Figure("Effective groups", note, svg(axes, "effective", legend=len(runs) > 1))


def flow(runs: Sequence[RecordedRun]) -> Figure | None:
    """Where rollouts went."""
    shown = [run for run in runs if run.last.get(f"{PREFIX}rollouts_generated", 0) > 0]
    if not shown:
        return None
    table = pd.DataFrame(map(where_rollouts_went, shown), index=[run.name for run in shown])
    axes = _axes(xlabel="completions")
    left = table.cumsum(axis=1) - table
    for part, colour in zip(table, COLOURS, strict=False):
        axes.barh(table.index, table[part], left=left[part], color=colour, label=part)
    axes.set(xlim=(0, None))
    axes.invert_yaxis()
    note = "Trained on when they were generated, kept for later batches, dropped; and replayed, which takes no generation."
    return Figure("Where rollouts went", note, svg(axes, "flow", legend=True))


def where_rollouts_went(run: RecordedRun) -> dict[str, float]:
    """Completions by what became of them, from the last values of the run's counters."""
    names = ("generated", "trained", "replayed", "discarded")
    generated, trained, replayed, dropped = (run.last.get(f"{PREFIX}rollouts_{name}", 0.0) for name in names)
    fresh = trained - replayed
    kept = max(0.0, generated - fresh - dropped)
    return {"trained": fresh, "kept": kept, "dropped": dropped, "replayed": replayed}


def success_rates(run: RecordedRun) -> Figure | None:
    """Distribution of the groups' success rates over time."""
    if run.groups is None or run.groups.empty:
        return None
    known = run.groups.dropna(subset="success_rate")
    last = run.groups["step"].max()
    edges = np.linspace(0, last + 1, min(40, int(last) + 1) + 1)
    counts = np.histogram2d(known["step"], known["success_rate"], bins=(edges, np.linspace(0, 1 + 1e-9, 10)))[0]
    shares = counts.T / np.maximum(counts.sum(axis=1), 1)
    axes = _axes(xlabel=AXES["step"], ylabel="success rate")
    mesh = axes.pcolormesh(edges, np.linspace(0, 1, 10), shares, cmap="cividis", vmin=0)
    axes.figure.colorbar(mesh, ax=axes, format=lambda share, _: f"{share:.0%}")
    note = "Share of each time's groups by their success rate. At 0 and 1 no group carries a gradient."
    name = re.sub(r"\W", "_", run.name)
    return Figure(f"Success rates of {run.name}", note, svg(axes, f"success-{name}"))


def running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over a `POINTS`-th of the values `(n,)`; as long as they are."""
    window = len(values) // POINTS * 2 + 1
    return np.asarray(pd.Series(values, dtype=float).rolling(window, center=True, min_periods=1).mean())


def _axes(**settings: Any) -> Any:
    """Axes of matplotlib in a figure of their own."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(5.0, 2.9), layout="constrained").add_subplot(**settings)


def svg(axes: Any, name: str, *, legend: bool = False) -> str:
    """An SVG element of axes from [`_axes`]. Ids begin with its name; the colour of text and axes is the page's."""
    import matplotlib as mpl

    if legend:
        axes.legend(frameon=False, fontsize=8.5)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        axes.figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text).replace(INK, "currentColor")
