"""The comparison of projected and measured savings: the kept runs, the page, and the generated files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import audit as benchmark
from benchmarks.audit import measured
from trl_dataeff.analysis.audit_projection import project
from trl_dataeff.tracking.completions import read_groups


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
PAGE = Path(__file__).parents[2] / "docs" / "audit.md"


def test_the_page_says_what_was_measured():
    page = PAGE.read_text(encoding="utf-8")
    for file in (benchmark.RESULT, benchmark.SCALE):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert line in page, f"{file.name} has changed: {line}"


def test_the_shares_are_those_of_the_kept_runs():
    assert benchmark.shares() in benchmark.RESULT.read_text(encoding="utf-8")


@pytest.mark.parametrize("pool", benchmark.POOLS)
def test_the_projected_saving_of_the_defaults_is_near_the_measured_one(pool):
    settings = {"default": benchmark.METHODS["default"]}
    found = project(benchmark.kept(benchmark.recorded(pool)[0]), settings=settings, predictability=0.9, seeds=1)
    assert found.of("default").rollouts == pytest.approx(measured(pool)["default"]["rollouts_ratio"], abs=0.15)


def test_kept_groups_are_those_that_were_read(tmp_path):
    files = benchmark.write_files(tmp_path, completions=2048, prompts=64)
    read = [read_groups([path]) for path in files.values()]
    assert [len(groups) for groups in read] == [256, 256]
    assert read[0].kind.tolist() == read[1].kind.tolist()
    assert read[0].success.tolist() == read[1].success.tolist()
    benchmark.keep(read[0], tmp_path / "kept.parquet")
    again = benchmark.kept(tmp_path / "kept.parquet")
    for name in ("step", "kind", "success", "tokens"):
        assert getattr(again, name).tolist() == pytest.approx(getattr(read[0], name).tolist())
    assert [again.texts[i] for i in again.prompt] == [read[0].texts[i] for i in read[0].prompt]
