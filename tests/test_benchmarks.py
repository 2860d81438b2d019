"""The benchmarks that the docs quote run, and say what the committed figures say."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import greso, manifest, overhead, predictor, replay, selection_scale, theorem
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_greso_needs_fewer_rollouts_than_dynamic_sampling_on_simulated_prompts():
    results = greso.compare(n=256, dead=0.7, drift=2e-4, passes=8, seeds=1)
    assert results["GRESO"][0] < 0.75 * results["dynamic sampling"][0]
    # 8 completions a group, of which about a fifth is effective: what dynamic sampling drops was paid for
    assert results["dynamic sampling"][0] == pytest.approx(results["uniform"][0], rel=0.2)


def test_proposals_from_a_million_prompts_take_milliseconds():
    assert greso.time_proposals(n=1_000_000) < 0.2


def test_overhead_times_each_step_after_the_warm_up(tmp_path):
    seconds = overhead.run_steps(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, steps=1, folder=str(tmp_path))
    assert len(seconds) == 1
    assert seconds[0] > 0


def test_figures_in_the_docs_are_those_of_the_committed_tables():
    page = (RESULTS.parents[1] / "docs" / "greso.md").read_text()
    for line in (RESULTS / "greso.txt").read_text().splitlines()[2:8]:
        dead, passes, uniform, dynamic, ours, ratio, _ = line.split()
        assert f"| {float(dead):.0%} | {passes} | {uniform} | {dynamic} | {ours} | {ratio} |" in page
    for method, value in greso.lab_rollouts_per_effective_group(greso.LAB).items():
        assert f"{value:.1f}" in page, method
    for method, value in greso.lab_accuracy_at(greso.LAB, 12_800).items():
        assert f"{value:.3f}" in page, method


def test_refreshes_agree_with_the_published_way_and_are_timed():
    ours, published = selection_scale.compare(size=600, turns=1)  # raises if their predictions differ
    assert 0 < ours.seconds < published.seconds
    for kind in selection_scale.KINDS:
        assert selection_scale.measure(kind, size=600, turns=1).seconds > 0


def test_the_pages_of_dots_and_replay_say_what_the_data_say():
    docs = RESULTS.parents[1] / "docs"
    page, dots = (docs / "replay.md").read_text(), (docs / "dots.md").read_text()
    readme = (RESULTS.parents[1] / "README.md").read_text()
    for line in [*replay.lab_table(replay.LAB).splitlines(), *(RESULTS / "replay.txt").read_text().splitlines()]:
        assert line in page
    for rollouts in (3000, 6400):
        accuracy = greso.lab_accuracy_at(replay.LAB, rollouts)
        for method in ("uniform", "dots", "dots_greso", "dots_paper", "dots_greso_replay50_age20", "oracle"):
            (line,) = [text for text in dots.splitlines() if text.startswith(f"| `{method}` |")]
            assert f"{accuracy[method]:.3f}" in line
    for method in ("uniform", "dots", "dots_greso_replay50_age20", "oracle"):
        assert f"{accuracy[method]:.3f}" in readme
    shares = {name: share for name, share in replay.selection_shares(replay.LAB).items() if "dots" in name}
    assert f"Selection took {100 * min(shares.values()):.1f} to {max(shares.values()):.1%}".replace("%", " %") in dots
    rows = json.loads((RESULTS / "predictor.json").read_text())
    for line in predictor.table(rows, [10, 20, 40, 60, 80]).splitlines():
        assert line in dots
    for line in (RESULTS / "selection_scale.txt").read_text().splitlines():
        assert line in dots


def test_replay_shrinks_generation(tmp_path):
    steps = replay.run_steps(0.5, steps=1, folder=str(tmp_path))
    assert len(steps) == 1
    assert all(seconds > 0 for seconds in steps[0].values())


def test_the_theorem_holds_where_it_is_measured():
    ratio, error = theorem.measure(0.3, 8, 2000, np.random.default_rng(1))
    assert ratio == pytest.approx(1, abs=5 * error)
    assert error < 0.03


def test_the_cost_of_a_manifest_is_measured_on_files_that_it_lists(tmp_path):
    assert min(manifest.measure(tmp_path, megabytes=4, files=2, turns=1)) > 0
    assert len(json.loads((tmp_path / "dataeff" / "manifest.json").read_text())["files"]) == 2
