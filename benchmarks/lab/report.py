"""`report.html`: the curves and the ratio tables in one self-contained page."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.curves import band, on_grid

from .ratios import BASELINE, HEADER, Curve, Setting, cells, methods_of, ratios


#: Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ACCURACY = "accuracy_sampled"
PANELS = (
    ("rollouts", ACCURACY, "rollouts generated", "held-out accuracy, sampled"),
    ("step", ACCURACY, "optimizer steps", "held-out accuracy, sampled"),
    ("wall_s", ACCURACY, "wall-clock seconds of training", "held-out accuracy, sampled"),
    ("cpu_s", ACCURACY, "CPU seconds of training", "held-out accuracy, sampled"),
    ("rollouts", "accuracy_greedy", "rollouts generated", "held-out accuracy, greedy"),
    ("step", "effective", "optimizer steps", "effective share of generated groups"),
)
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}code,pre{background:#f4f4f4;padding:.1em .3em}svg{max-width:100%;height:auto}"""
NOTES = """<p>Accuracy is on held-out prompts of the learnable families: the chance that a completion sampled at temperature 1
is right, computed exactly. <b>Rollouts</b> are all completions generated in training, discarded ones included. Bands are
95 % confidence intervals of the mean over seeds (Student's t); axes end at 2.5 times uniform's end. <b>Worst kind</b>: sampled
accuracy on the family of each run that has the lowest at its last evaluation, mean over seeds, and which families these are; - where
families were not told apart. <b>To reach</b>:
rollouts until the isotonic fit of a run's curve is where the uniform run of the same seed ended; <b>ratio</b>: that,
divided by what uniform needed, geometric mean over seeds, with its 95 % confidence interval; the columns after it are the same for steps and time. Time excludes
evaluation; wall-clock depends on what else the machine did.</p>"""


def series(curve: Curve, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """One run's points; the effective share belongs to the stretch before an evaluation, so it has none at step 0."""
    if y != "effective":
        return curve.column(x), curve.column(y)
    groups = curve.column("groups")
    has = groups > 0
    return curve.column(x)[has], curve.column("effective_groups")[has] / groups[has]


def pyplot():
    """Matplotlib, drawing to files that are the same for the same data."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "lab", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    )
    import matplotlib.pyplot as plt

    return plt


def draw(axis, curves: list[Curve], methods: Iterable[str], x: str, y: str) -> None:
    """Each method's mean over seeds with its 95 % band."""
    for method, colour in zip(methods, itertools.cycle(COLOURS), strict=False):
        points = [series(c, x, y) for c in curves if c.method == method]
        points = [p for p in points if len(p[0])]
        if not points:
            continue
        grid, values = on_grid(points)
        mean, half = band(values)
        axis.plot(grid, mean, color=colour, label=f"{method} ({len(points)})", linewidth=1.8)
        axis.fill_between(grid, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)


def figure(curves: list[Curve]) -> str:
    """All panels of one setting as an SVG element."""
    plt = pyplot()
    fig, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    for axis, (x, y, xlabel, ylabel) in zip(axes.flat, PANELS, strict=True):
        draw(axis, curves, methods_of(curves), x, y)
        axis.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1))
        ends = [series(c, x, y)[0].max(initial=0) for c in curves if c.method == BASELINE]
        if ends and max(ends) > 0:
            axis.set_xlim(right=min(axis.get_xlim()[1], 2.5 * max(ends)))
        axis.grid(alpha=0.25)
    axes.flat[0].legend(frameon=False, title="method (seeds)")
    text = io.StringIO()
    fig.savefig(text, format="svg", metadata={"Date": None})
    plt.close(fig)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def ratio_table(curves: list[Curve]) -> str:
    """The ratio table of one setting as an HTML element."""
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in HEADER) + "</tr>"]
    rows += ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(row)) + "</tr>" for row in ratios(curves)]
    return "<table>" + "".join(rows) + "</table>"


def write_report(settings: dict[Setting, list[Curve]], path: Path, command: str) -> None:
    """Write the page, and each figure beside it as an SVG file; `command` is what produced the runs."""
    parts = []
    for (pool, rate), curves in settings.items():
        svg = figure(curves)
        path.with_name(f"{pool}-lr{rate:g}.svg").write_text(svg)
        parts += [f"<h2>Pool {html.escape(pool)}, learning rate {rate:g}</h2>", ratio_table(curves), svg]
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>The lab</title><style>{STYLE}</style>'
        f"<h1>The lab</h1><p><code>{html.escape(command)}</code></p>{NOTES}{''.join(parts)}</html>\n"
    )
