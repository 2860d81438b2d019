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


def test_both_processes_decide_the_same(two_processes):
    first, second = (report["dynamic"] for report in two_processes)
    assert first["decisions"] == second["decisions"]
    assert any(d["rounds"] > 1 for d in first["decisions"])
    assert any(d["leftover"] for d in first["decisions"])
    assert any(d["moved"] for d in first["decisions"]), "no group was redistributed"


def test_groups_are_whole_and_rows_constant_on_each_process(two_processes):
    for report in two_processes:
        for batch in report["dynamic"]["trained_on"]:
            assert len(batch["prompts"]) == 8  # per_device_train_batch_size 4 x steps_per_generation 2
            assert batch["prompts"][0:4] == [batch["prompts"][0]] * 4
            assert batch["prompts"][4:8] == [batch["prompts"][4]] * 4


def test_each_process_trains_on_its_part_of_the_generation_batch(two_processes):
    first, second = (report["dynamic"] for report in two_processes)
    for decision, a, b in zip(first["decisions"], first["trained_on"], second["trained_on"]):
        assert sorted(a["prompts"][::4] + b["prompts"][::4]) == sorted(decision["trained"])


def test_tokens_and_rewards_belong_together(two_processes):
    """The reward is a function of the tokens: recomputed from what each process trains on, the advantages agree."""
    for report in two_processes:
        for batch in report["dynamic"]["trained_on"]:
            for start in (0, 4):
                rewards = np.array(batch["rewards"][start : start + 4])
                expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                np.testing.assert_allclose(batch["advantages"][start : start + 4], expected, atol=1e-4)


def test_leftover_groups_are_marked_as_sampled_by_an_earlier_policy(two_processes):
    assert any(any(batch["replayed"]) for report in two_processes for batch in report["dynamic"]["trained_on"])


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


def test_resume_on_two_processes_gives_the_same_losses(two_processes):
    for report in two_processes:
        assert report["resumed"] == report["uninterrupted"]


def test_replay_on_two_processes(two_processes):
    """Both hold the same buffer, each the rollouts that it owns; sampled groups are spread evenly, with their ratio."""
    first, second = (report["replay"] for report in two_processes)
    assert first["decisions"] == second["decisions"]
    assert [len(d["replayed"]) for d in first["decisions"]][-3:] == [4, 4, 4]
    assert all(not set(d["replayed"]) & set(d["generated"]) for d in first["decisions"])
    assert any(d["moved"] for d in first["decisions"]), "no group was redistributed"
    assert [row[:2] for row in first["stored"]] == [row[:2] for row in second["stored"]]
    for rank, report in enumerate((first, second)):
        assert all(held == (owner == rank) for _, owner, held in report["stored"])
        assert any(row[3] for row in report["logs"])
    for decision, a, b in zip(first["decisions"], first["trained_on"], second["trained_on"], strict=True):
        assert sum(a["replayed"] + b["replayed"]) == 4 * len(decision["replayed"])
        assert sorted(a["prompts"][::4] + b["prompts"][::4]) == sorted(decision["trained"])


def test_replay_resumes_on_two_processes(two_processes):
    for report in two_processes:
        assert report["replay"]["resumed"] == report["replay"]["logs"]


def test_a_signal_to_one_process_stops_both_after_the_same_step(two_processes):
    first, second = (report["stopped"] for report in two_processes)
    assert first == second
    assert first[1] == "SIGTERM"
    assert first[3] == 143
    assert 4 <= first[0] < 12
    for report in two_processes:
        assert report["after_stop"] == report["uninterrupted"]
