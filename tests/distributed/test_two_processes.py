"""Training with two processes (gloo, on the CPU)."""

from pathlib import Path

import numpy as np
import pytest

from tests.factories import launched


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What `two_processes.py` reports from each of two processes."""
    return launched(Path(__file__).with_name("two_processes.py"), 2, tmp_path_factory, timeout=600)


def test_off_is_grpo_on_two_processes(two_processes):
    for report in two_processes:
        assert report["grpo"] == report["off"]
        assert len(report["off"]) >= 12
        assert any(row[1] for row in report["off"]), "no gradient"


def test_both_processes_skip_as_many_rows_and_train_as_plain_grpo(two_processes):
    first, second = (report["skipping"] for report in two_processes)
    assert first["rows"] == second["rows"], "passes are collectives"
    expected = []
    for actives in zip(first["active"], second["active"], strict=True):  # of a step: two micro-batches of four rows
        expected += 2 * [min(max(*actives, 1), 4), max(*actives, 5) - 4]  # two iterations
    assert first["rows"] == expected[: len(first["rows"])]
    assert sum(expected) < 0.8 * 8 * len(expected) / 2
    assert any(a != b for a, b in zip(first["active"], second["active"]))
    for report in (first, second):
        assert report["apart"] < 2e-6
        assert max(norm for (norm,) in report["grad_norms"][0]) > 1e-3
        np.testing.assert_allclose(*report["grad_norms"], rtol=1e-4, atol=1e-6)


def test_a_signal_to_one_process_stops_both_after_the_same_step(two_processes):
    first, second = (report["stopped"] for report in two_processes)
    assert first == second
    assert first[1] == "SIGTERM"
    assert first[3] == 143
    assert 4 <= first[0] < 12
    for report in two_processes:
        assert report["after_stop"] == report["uninterrupted"]
