"""The same global batch on 1, 2 and 3 processes (gloo, on the CPU): the same prompts, and the same losses."""

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.same_batch import FULL, QUICK, STEPS
from tests.factories import launched


PROCESSES = (1, 2, 3)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """By number of processes, what `same_batch.py` reports from each."""
    script = Path(__file__).with_name("same_batch.py")
    return lambda extent: {n: launched(script, n, tmp_path_factory, extent, timeout=3000) for n in PROCESSES}


def check(runs: dict[int, list[dict]], name: str) -> None:
    alone = runs[1][0][name]
    assert len(alone["whole"]["logs"]) == STEPS
    assert any(row[1] for row in alone["whole"]["logs"]), "no gradient"
    for processes, by_rank in runs.items():
        for report in by_rank:
            for kind in ("whole", "resumed"):
                own, expected = report[name][kind], alone[kind]
                assert own["generated"] == expected["generated"], (processes, kind)
                assert own["trained"] == expected["trained"], (processes, kind)
            assert report[name]["resumed"]["logs"] == report[name]["whole"]["logs"]
        logs = np.array(by_rank[0][name]["whole"]["logs"])
        np.testing.assert_allclose(logs, alone["whole"]["logs"], rtol=1e-4, atol=1e-5, err_msg=str(processes))


@pytest.mark.parametrize("name", QUICK)
def test_the_number_of_processes_changes_nothing(name, reports):
    check(reports("quick"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_the_number_of_processes_changes_nothing_with_any_selection(name, reports):
    check(reports("full"), name)


def test_processes_with_other_prompts_are_rejected_at_the_start(reports):
    for report in reports("quick")[2]:
        message = report["differing"]["dataset"]
        assert "`train_dataset` differs between processes: that of 1 is not that of process 0" in message
        assert "36, 35" in message


def test_a_disagreement_is_named_when_a_checkpoint_is_saved(reports):
    for report in reports("quick")[2]:
        assert "differs from that of process 0: counters (of 1)." in report["differing"]["state"]
        assert report["differing"]["checkpoints"] == []
