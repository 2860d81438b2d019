"""`trl-dataeff report`: the page in a browser, the summary, and what it says of input that it cannot show."""

import json
import re
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.factories import RUNS, in_browser, needs_chromium
from trl_dataeff.cli.main import main


pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", str(RUNS / "dots-0"), "--output", str(path)]) == 0
    return path


@pytest.fixture
def copy(tmp_path):
    return lambda name: shutil.copytree(RUNS / name, tmp_path / name)


def report(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["report", *argv])
    return code, *capsys.readouterr()


def test_the_page_loads_nothing(page):
    html = page.read_text(encoding="utf-8")
    outside = re.findall(r'(?:src|href|action)="([^"#]+)"|url\((?!#)([^)]+)\)|@import', html)
    assert all((a or b).startswith("data:") for a, b in outside)
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", html)


LOOK = """
const buttons = [...document.querySelectorAll("[data-show]")];
buttons.forEach(button => button.click());
document.querySelectorAll(".plot").forEach(plot => { plot.hidden = false; });
seen.plots = [...document.querySelectorAll(".plot")].map(plot => {
  const svg = plot.querySelector("svg"), box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll("path")].filter(p => p.getBoundingClientRect().width > 8).length;
  const small = Math.min(...[...svg.querySelectorAll("text")].map(t => parseFloat(getComputedStyle(t).fontSize) * box.width / 360));
  return {name: plot.id, width: box.width, height: box.height, drawn, texts: svg.querySelectorAll("text").length, small};
});
seen.wide = document.documentElement.scrollWidth;
const table = document.querySelector("table.sortable");
const column = [...table.querySelectorAll("th")].findIndex(th => th.textContent === "groups");
const values = () => [...table.tBodies[0].rows].map(row => Number(row.cells[column].dataset.value));
table.querySelectorAll("th button")[column].click(); seen.up = values();
table.querySelectorAll("th button")[column].click(); seen.down = values();
const look = () => { const s = getComputedStyle(document.body), t = getComputedStyle(document.querySelector("svg text")); return [s.backgroundColor, s.color, t.fill]; };
seen.first = look();
document.getElementById("theme").click(); seen.second = look();
document.getElementById("theme").click(); seen.third = look();
"""


@needs_chromium
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_in_a_browser(page, tmp_path, width):
    seen, console = in_browser(page, tmp_path, LOOK, width)
    assert seen["errors"] == []
    assert console == ""
    assert len(seen["plots"]) >= 13
    for plot in seen["plots"]:
        assert plot["width"] > 300
        assert plot["height"] > 100
        assert plot["drawn"] >= 3, plot
        assert plot["texts"] >= 5
        assert plot["small"] >= 8.5, "legible"
    assert seen["wide"] <= width, "nothing is scrolled sideways"
    assert seen["up"] == sorted(seen["down"])
    assert seen["up"][0] < seen["up"][-1]
    assert seen["down"] == sorted(seen["down"], reverse=True)
    assert seen["first"] == seen["third"]
    assert all(a != b for a, b in zip(seen["first"], seen["second"])), "the other colours"


def test_untrusted_texts_are_escaped(copy, tmp_path):
    folder = copy("dots-0")
    attack = '<script>alert(1)</script><img src=x onerror=alert(2)>"'
    prompts = pq.read_table(folder / "dataeff" / "prompts.parquet").to_pylist()
    for row in prompts:
        row["prompt"], row["task"] = attack, attack[:25]
    pq.write_table(pa.Table.from_pylist(prompts), folder / "dataeff" / "prompts.parquet")
    about = json.loads((folder / "dataeff" / "run.json").read_text())
    about["command"] = about["model"] = about["arguments"]["seed"] = attack
    (folder / "dataeff" / "run.json").write_text(json.dumps(about))
    completions = pq.read_table(next(iter((folder / "completions").glob("*.parquet")))).to_pylist()
    for row in completions:
        row["prompt"] = row["completion"] = attack
    for path in (folder / "completions").glob("*.parquet"):
        pq.write_table(pa.Table.from_pylist(completions), path)
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--output", str(page)]) == 0
    html = page.read_text()
    assert "<script>alert" not in html
    assert "<img" not in html
    assert html.count("&lt;script&gt;alert") > 10


def test_the_summary(capsys, tmp_path):
    code, out, err = report(capsys, str(RUNS / "dots-0"), "--output", str(tmp_path / "r.html"))
    assert (code, err) == (0, "")
    assert "DOTS + replay of 50% · 360 prompts" in out
    assert re.search(r"5\.\d+k  rollouts generated", out)
    assert "held-out reward" in out
    assert re.search(r"prompts: \d+ always solved, \d+ never solved, \d+ became solvable", out)
    assert "! " in out
    assert out.endswith(f"Report: {tmp_path / 'r.html'}\n")


def test_the_effective_share_is_that_of_all_groups(capsys, tmp_path):
    for name in ("dots-0", "dapo"):
        kinds = pq.read_table(RUNS / name / "dataeff" / "groups.parquet")["kind"].to_pylist()
        _, out, _ = report(capsys, str(RUNS / name), "--output", str(tmp_path / "r.html"))
        assert f"{kinds.count('effective') / len(kinds):.0%}  of the groups effective" in out


def test_values_that_look_like_formulas_are_drawn_as_they_are(copy, tmp_path):
    folder = copy("dots-0")
    path = folder / "dataeff" / "prompts.parquet"
    prompts = pq.read_table(path)
    values = pa.array([r"$\frac$ of" if i % 2 else "$1 and $2" for i in range(len(prompts))])
    pq.write_table(prompts.append_column("shape", values), path)
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--output", str(page), "--by", "shape"]) == 0
    assert r"$\frac$ of" in page.read_text()


def test_by_default_the_page_is_in_the_folder_of_the_run(copy, capsys):
    folder = copy("uniform-0")
    assert report(capsys, str(folder))[0] == 0
    assert (folder / "dataeff" / "report.html").exists()


def test_figures_as_png_by_the_columns_that_were_asked_for(capsys, tmp_path):
    argv = [
        str(RUNS / "dots-0"),
        "--output",
        str(tmp_path / "r.html"),
        "--png",
        str(tmp_path / "png"),
        "--by",
        "source",
    ]
    assert report(capsys, *argv)[0] == 0
    names = {path.stem for path in (tmp_path / "png").iterdir()}
    assert {"heat-source", "progress-rollouts", "flow"} <= names
    assert "heat-task" not in names


def test_a_run_of_plain_trl(capsys, tmp_path):
    code, out, _ = report(capsys, str(RUNS / "plain"), "--output", str(tmp_path / "r.html"))
    assert code == 0
    assert "held-out reward" in out
    assert "--rollouts_per_step" in out
    assert "there is no `dataeff/groups.parquet`" in out
    code, out, _ = report(
        capsys, str(RUNS / "plain"), "--output", str(tmp_path / "r.html"), "--rollouts_per_step", "64"
    )
    assert "7.68k  rollouts generated" in out


def test_a_checkpoint_of_another_trainer_stays_as_it_is(copy, capsys):
    """A folder `dataeff` in it would make it look like an unfinished one of ours, which a resume sets aside."""
    (checkpoint,) = copy("plain").glob("checkpoint-*")
    before = sorted(checkpoint.rglob("*"))
    code, out, _ = report(capsys, str(checkpoint))
    assert code == 0
    assert out.endswith(f"Report: {checkpoint.parent / 'dataeff' / f'report-{checkpoint.name}.html'}\n")
    assert sorted(checkpoint.rglob("*")) == before


def test_home_directories(copy, capsys, monkeypatch):
    folder = copy("uniform-0")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert report(capsys, "~/uniform-0")[0] == 0


def test_a_run_without_any_group(copy, capsys):
    folder = copy("dots-0")
    table = pq.read_table(folder / "dataeff" / "groups.parquet")
    pq.write_table(table.slice(0, 0), folder / "dataeff" / "groups.parquet")
    code, out, _ = report(capsys, str(folder))
    assert code == 0
    assert "`dataeff/groups.parquet` is empty" in out


def test_a_run_with_groups_alone(copy, capsys):
    folder = copy("dots-0")
    (folder / "dataeff" / "metrics.jsonl").unlink()
    (folder / "dataeff" / "run.json").unlink()
    code, out, _ = report(capsys, str(folder))
    assert code == 0
    assert "of the groups effective" in out
    assert "there is no `dataeff/metrics.jsonl`" in out
    table = pq.read_table(folder / "dataeff" / "groups.parquet")
    sizes = [4 if i % 2 else 8 for i in range(len(table))]  # some were stopped halfway
    pq.write_table(table.append_column("completions", [sizes]), folder / "dataeff" / "groups.parquet")
    _, out, _ = report(capsys, str(folder))
    assert f"{sum(sizes) / 1000:.3g}k  rollouts generated" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "nowhere does not exist. Give the `output_dir` of a run."),
        (
            [str(RUNS / "dots-0"), "--by", "tasks"],
            "the dataset has no such column. Did you mean `task`? It has `task`",
        ),
        ([str(RUNS / "plain"), "--by", "task"], "`--by` needs `dataeff/prompts.parquet`"),
        ([str(RUNS / "plain"), "--rollouts_per_step", "0"], "it takes an integer >= 1"),
        ([str(RUNS / "dots-0"), "--output", "/proc/no/file.html"], "cannot be written"),
    ],
)
def test_wrong_input_is_said_in_a_sentence(capsys, argv, message):
    code, _, err = report(capsys, *argv)
    assert code == 2
    assert message in err
    assert err.startswith("trl-dataeff: error: ")
    assert err.count("\n") == 1


def test_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = report(capsys, str(RUNS / "dots-0"), "--output", str(tmp_path / "r.html"))
    assert code == 2
    assert "pip install matplotlib" in err
