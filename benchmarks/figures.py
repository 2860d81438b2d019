"""Figures of the pages: SVG without background, legible on white and on black."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


INK = "#7A7A7A"  # of text and axes
#: Colours of methods, which colour-blind readers can tell apart
GREY = "#808080"
ORANGE = "#D55E00"
BLUE = "#2F8FD8"
GREEN = "#009E73"


@contextmanager
def axis_of(path: Path) -> Iterator[Any]:
    """
    The axis of a new figure, which is written when the context ends. The same picture is the same file.

    Args:
        path (`Path`): where the SVG goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
        "svg.hashsalt": path.stem,
    }
    with matplotlib.rc_context(style):
        figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
        axis.grid(color=INK, alpha=0.25)
        yield axis
        figure.savefig(path, format="svg", metadata={"Date": None}, transparent=True)
        plt.close(figure)
