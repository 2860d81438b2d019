"""Every figure of a recorded run as SVG and as PNG."""

import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tests.factories import RUNS
from trl_dataeff.tracking import drawing, figures
from trl_dataeff.tracking.recorded import AXES, read_run


pytest.importorskip("matplotlib")
ALL = {f"progress-{x}" for x in ("rollouts", "tokens", "step", "seconds")} | {
    "kinds", "flow", "heat-task", "heat", "calibration", "replay", "times",
}  # fmt: skip


@pytest.fixture(scope="module")
def plots():
    return figures.plots_of(read_run(RUNS / "dots-0"), ["task"])


def test_all_figures_of_a_run_of_ours(plots):
    assert {plot.name for plot in plots} == ALL
    assert [plot.name for plot in plots if not plot.title or not plot.note] == []


def test_a_run_of_plain_trl_has_those_that_its_logs_allow():
    run = read_run(RUNS / "plain", rollouts_per_step=64)
    assert {plot.name for plot in figures.plots_of(run)} == {f"progress-{x}" for x in AXES}


def test_svg_has_text_as_text_and_colours_as_variables(plots):
    identities = []
    for plot in plots:
        text = drawing.svg(plot)
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img"
        assert root.get("viewBox").startswith("0 0 360 ")
        assert [node.text for node in root.iter() if node.tag.endswith("}text")]
        assert "var(--ink)" in text
        assert not [colour for colour in drawing.COLOURS.values() if colour in text]
        identities += re.findall(r'\bid="([^"]+)"', text)
        assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', text)) <= set(identities)
    assert len(identities) == len(set(identities)), "ids are those of one page"


def test_a_figure_is_the_same_each_time(plots):
    assert drawing.svg(plots[0]) == drawing.svg(plots[0])


def test_names_from_a_run_are_escaped():
    run = read_run(RUNS / "dots-0")
    column = run.prompts.column_names.index("task")
    values = [f"<b>$x$ & {value}" for value in run.prompts["task"].to_pylist()]
    run.prompts = run.prompts.set_column(column, "task", [values])
    text = drawing.svg(figures.heat(run, "task"))
    ElementTree.fromstring(text)
    assert "<b>" not in text
    assert "$x$" in text, "no formula is made of it"


def test_png(plots, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for plot in plots:
        drawing.save_png(plot, tmp_path / f"{plot.name}.png")
        with image.open(tmp_path / f"{plot.name}.png") as picture:
            assert picture.width == 1000
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, "something is drawn"


def test_a_single_log_is_drawn(tmp_path):
    run = read_run(RUNS / "dots-0")
    run.lines, run.groups = run.lines[:2], run.groups.slice(0, 3)
    for plot in figures.plots_of(run, ["task"]):
        drawing.svg(plot)


def test_labels_do_not_overlap():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set_ylim(0, 1)
    drawing.labels(axes, [(y, str(y), "black") for y in (0.5, 0.5, 0.51, 0.99, 1.0)])
    heights = sorted({text.xy[1] for text in axes.texts})
    assert len(heights) == 5
    assert min(b - a for a, b in pairwise(heights)) > 0.08
    assert heights[-1] <= 1


def test_without_matplotlib_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(drawing.FiguresMissing, match=r"pip install matplotlib"):
        drawing.check_library()


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (999, "999"), (12_800, "12.8k"), (3.2e6, "3.2M")])
def test_counts(value, text):
    assert drawing.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(1.5, "1.5 s"), (119, "119 s"), (180, "3 min"), (8640, "2.4 h")])
def test_durations(value, text):
    assert drawing.duration(value) == text
