"""The figure of a comparison: curves of several methods against one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trl_dataeff.tracking.drawing import COLOURS, SERIES, Plot, axis, labels
from trl_dataeff.tracking.recorded import AXES


if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        axis(axes, x, unit=metric)
        labels(axes, ends)

    bands = " Bands are 95 % confidence intervals over runs." if any(c.half_width is not None for c in curves) else ""
    title = f"{metric[:1].upper()}{metric[1:]} against {'time of training' if x == 'seconds' else AXES[x]}"
    note = f"Means over the runs of a method, up to where its shortest run ends.{bands}"
    return Plot(f"compare-{x}", title, note, draw, 3.1)
