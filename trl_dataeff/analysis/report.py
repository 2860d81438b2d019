"""The report of one or several runs: a page of figures and a table of facts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trl_dataeff.analysis.figures import figures_of
from trl_dataeff.analysis.recorded import RecordedRun
from trl_dataeff.tracking.card import methods_used
from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import __version__


def make_page(runs: Sequence[RecordedRun]) -> str:
    """A self-contained HTML page. Names and texts of a run are escaped by the template."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("trl_dataeff.analysis", "templates"), autoescape=True, trim_blocks=True
    )
    template = environment.get_template("page.html.j2")
    return template.render(
        title=" and ".join(run.name for run in runs),
        names=[run.name for run in runs],
        facts=facts(runs),
        figures=figures_of(runs),
        version=__version__,
    )


def facts(runs: Sequence[RecordedRun]) -> dict[str, list[str]]:
    """What happened in each run, in words, by what it is about; facts that no run knows are left out."""
    table = {
        "model": [str(run.about.get("model", "")) for run in runs],
        "method": [", ".join(methods_used(run.about, run.last)) for run in runs],
        "prompts": [_count(run.about.get("prompts", math.nan)) for run in runs],
        "optimizer steps": [_count(max(line["step"] for line in run.lines)) for run in runs],
        "rollouts generated": [_count(run.last("rollouts")) for run in runs],
        "rollouts replayed": [_count(run.last(f"{PREFIX}rollouts_replayed")) for run in runs],
        "effective groups": [_mean(run.effective_share()[1].tolist()) for run in runs],
        "reward in training, first and last": [_ends(run, "reward") for run in runs],
        "held-out reward, first and last": [_ends(run, run.held_out) for run in runs],
        "hours": [_hours(run) for run in runs],
    }
    return {name: values for name, values in table.items() if any(values)}


def summary(runs: Sequence[RecordedRun]) -> str:
    """The table of facts for a terminal."""
    rows = {"run": [run.name for run in runs], **facts(runs)}
    widths = [max(len(values[i]) for values in rows.values()) for i in range(len(runs))]
    lines = [
        "  ".join(
            [f"{name:<36}", *(f"{value:<{width}}" for value, width in zip(values, widths, strict=True))]
        ).rstrip()
        for name, values in rows.items()
    ]
    return "\n".join(lines)


def _count(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.0%}" if len(values) else ""


def _ends(run: RecordedRun, metric: str | None) -> str:
    """Means of the first and the last tenth of a metric."""
    values = run.series(metric)[1] if metric else ()
    tenth = max(1, len(values) // 10)
    return f"{sum(values[:tenth]) / tenth:.3f}, {sum(values[-tenth:]) / tenth:.3f}" if len(values) else ""


def _hours(run: RecordedRun) -> str:
    """Of the whole run, which for plain TRL is the sum of its steps' times."""
    seconds = run.last("seconds")
    if math.isnan(seconds):
        steps, times = run.series("step_time")
        seconds = float(times.mean() * steps[-1]) if len(steps) else math.nan
    return "" if math.isnan(seconds) else f"{seconds / 3600:.2f}"
