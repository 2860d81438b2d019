"""The report of one or several runs: a page of figures and a table of facts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_dataeff.analysis.figures import figures_of
from trl_dataeff.analysis.recorded import RecordedRun
from trl_dataeff.tracking.card import methods_used
from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import __version__


def make_page(runs: Sequence[RecordedRun]) -> str:
    """A self-contained HTML page. Names and texts of a run are escaped by the template."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("trl_dataeff.analysis"), autoescape=True, trim_blocks=True)
    template = environment.get_template("page.html.j2")
    return template.render(runs=runs, facts=facts(runs), figures=figures_of(runs), version=__version__)


def facts(runs: Sequence[RecordedRun]) -> dict[str, list[str]]:
    """What happened in each run, in words, by what it is about; facts that no run knows are left out."""
    table = {
        "model": [str(run.about.get("model", "")) for run in runs],
        "method": [", ".join(methods_used(run.about, run.last)) for run in runs],
        "prompts": [_text(run.about.get("prompts"), ",.0f") for run in runs],
        "optimizer steps": [_text(run.logs["step"].max(), ",.0f") for run in runs],
        "rollouts generated": [_text(run.last.get("rollouts"), ",.0f") for run in runs],
        "rollouts replayed": [_text(run.last.get(f"{PREFIX}rollouts_replayed"), ",.0f") for run in runs],
        "effective groups": [_text(_mean(run.effective_share()[1]), ".0%") for run in runs],
        "reward in training, first and last": [_ends(run, "reward") for run in runs],
        "held-out reward, first and last": [_ends(run, run.held_out) for run in runs],
        "hours": [_text(_hours(run), ".2f") for run in runs],
    }
    return {name: values for name, values in table.items() if any(values)}


def summary(runs: Sequence[RecordedRun]) -> str:
    """The table of facts for a terminal."""
    rows = {"run": [run.name for run in runs], **facts(runs)}
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    cells = ([f"{name:<36}", *map(str.ljust, values, widths)] for name, values in rows.items())
    return "\n".join("  ".join(row).rstrip() for row in cells)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _ends(run: RecordedRun, metric: str) -> str:
    """Means of the first and the last tenth of a metric."""
    values = run.series(metric)[1]
    tenth = max(1, len(values) // 10)
    return f"{values[:tenth].mean():.3f}, {values[-tenth:].mean():.3f}" if len(values) else ""


def _hours(run: RecordedRun) -> float | None:
    """Of the whole run, which for plain TRL is the sum of its steps' times."""
    steps, times = run.series("step_time")
    seconds = run.last.get("seconds", times.mean() * steps[-1] if len(steps) else None)
    return None if seconds is None else seconds / 3600
