"""
Training on several processes (gloo, on the CPU): as on one, whole or sharded by FSDP2, and as TRL with everything off.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from filelock import FileLock
from packaging.version import Version

from tests.distributed import same_batch, sharded


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each of `n` processes of the script `name` reports, in `rank-{rank}.json` of the folder that is its
    argument. The script runs once per test run, whichever worker asks first.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base  # one for all workers

    def get(name: str, n: int) -> list[dict]:
        folder = base / f"{name}-{n}"
        files = [folder / f"rank-{rank}.json" for rank in range(n)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n)]
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                command = [*launch, Path(__file__).with_name(f"{name}.py"), folder]
                done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
                (folder / "output.txt").write_text(f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        assert all(file.exists() for file in files), (folder / "output.txt").read_text()
        return [json.loads(file.read_text()) for file in files]

    return get


# The same global batch on 1, 2 and 3 processes: the same prompts, and the same losses


@pytest.mark.parametrize("name", same_batch.RUNS)
def test_the_number_of_processes_changes_nothing(name, reports):
    runs = {n: reports("same_batch", n) for n in (1, 2, 3)}
    alone = runs[1][0][name]
    assert len(alone["whole"]["logs"]) == same_batch.STEPS
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


def test_processes_with_other_prompts_are_rejected_at_the_start(reports):
    for report in reports("same_batch", 2):
        assert "36, 35" in report["differing"]["dataset"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("replay", ['"fill"', '"off"']),
        ("max_rollout_rounds", ["1", "2"]),
        ("save_steps", ["1", "2"]),
        ("selection", ['"greso"', '"uniform"']),
        ("resume_from_checkpoint", ["false", "true"]),
    ],
)
def test_processes_with_other_settings_are_rejected_at_the_start(reports, name, values):
    """Without a check, they would wait for each other."""
    first, second = values
    for report in reports("same_batch", 2):
        assert f"`{name}` is {first} on process 0 and {second} on process 1" in report["differing"][name]


def test_a_disagreement_is_named_when_a_checkpoint_is_saved(reports):
    for report in reports("same_batch", 2):
        assert "batches (of 1)" in report["differing"]["state"]
        assert report["differing"]["checkpoints"] == []


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo"])
def test_the_default_trains_as_trl_for_every_loss_type(loss_type, reports):
    """Groups stay on their process, so that a mean by micro-batch is over the same rows."""
    for report in reports("same_batch", 2):
        assert report["losses"][f"{loss_type}, off"] == 0
        assert report["losses"][f"{loss_type}, default"] < 1e-6


@pytest.mark.parametrize("name", ["hooks", "between"])
def test_hooks_and_callbacks_may_be_on_the_main_process_alone(name, reports):
    """If processes did not agree on what they leave out, they would wait for each other."""
    for report in reports("on_main_alone", 2):
        assert any(gradient for _, gradient in report[name]["trl"])
        np.testing.assert_allclose(report[name]["ours"], report[name]["trl"], rtol=1e-4, atol=1e-6)


def test_groups_move_between_processes_where_a_callback_is_on_the_main_process_alone(reports):
    for report in reports("on_main_alone", 2):
        assert len(report["between, rounds"]["ours"]) == 8


# Weights sharded by FSDP2


@pytest.fixture
def both(reports):
    if Version(transformers.__version__) < Version("5.17"):
        pytest.skip("With Transformers 5.3, FSDP needs a GPU.")
    return list(zip(reports("sharded", 2), reports("same_batch", 2), strict=True))


@pytest.mark.parametrize("name", sharded.RUNS)
def test_weights_are_sharded(name, both):
    for report, _ in both:
        # With LoRA accelerate leaves the last norm as it is, and with some versions of TRL the head: both are frozen
        frozen = {"base_model.model.model.norm.weight", "base_model.model.lm_head.weight"} if "lora" in name else set()
        assert set(report[name]["whole"]) <= frozen, "parameters that are no DTensor"
        assert report[name]["units"] >= 4  # two layers, the embedding, and the model


@pytest.mark.parametrize("name", sharded.RUNS)
def test_they_train_as_if_they_were_whole(name, both):
    for report, whole in both:
        own, expected = report[name], whole[name]["whole"]
        assert own["generated"] == expected["generated"]
        assert own["trained"] == expected["trained"]
        np.testing.assert_allclose(own["logs"], expected["logs"], rtol=1e-4, atol=1e-5)


def test_the_update_leaves_out_as_much_as_with_whole_weights(both):
    name = "uniform, skip"
    for report, whole in both:
        assert len(report[name]["tokens"]) == same_batch.STEPS
        assert report[name]["tokens"] == whole[name]["whole"]["tokens"]


def test_a_sharded_policy_embeds_the_prompts_in_lockstep(both):
    first, second = (report["dots, fill"] for report, _ in both)
    assert first["selector"] == "DotsSelector"
    assert first["embedding_passes"] == second["embedding_passes"] > 0


@pytest.mark.parametrize("name", sharded.RESUMED)
def test_they_generate_and_a_resumed_run_goes_on_as_if_it_had_not_been_stopped(name, both):
    for report, _ in both:
        own = report[f"resumed {name}"]
        assert own["sharded"] >= 19  # all of the model's own parameters, but for the last norm with LoRA
        assert own["again"] == own["whole"]
        assert own["replayed"][0] > own["replayed"][1] > 0
        assert {"pytorch_model_fsdp.bin", "optimizer.bin", "dataeff"} <= set(own["files"])


# Against TRL, and signals


def test_off_is_grpo_on_two_processes(reports):
    for report in reports("same_batch", 2):
        assert report["grpo"] == report["off"]
        assert len(report["off"]) >= 12
        assert any(row[1] for row in report["off"]), "no gradient"


def test_the_default_is_grpo_up_to_rounding_where_processes_share_groups(reports):
    """As TRL allows: three groups of 4 on two processes."""
    for report in reports("same_batch", 2):
        trls = np.array(report["shared, grpo"])
        ours = np.array(report["shared, default"])
        np.testing.assert_array_equal(ours[:, :2], trls[:, :2], err_msg="other rollouts")
        np.testing.assert_allclose(ours[:, 2:], trls[:, 2:], rtol=1e-3, atol=1e-5)
        assert trls[:, 3].max() > 0, "no gradient"
        assert any(saved > 0 for (saved,) in report["shared, default, saved"])


def test_a_signal_to_one_process_stops_both_after_the_same_step(reports):
    first, second = (report["stopped"] for report in reports("same_batch", 2))
    assert first == second
    assert first[1:] == ["SIGTERM", 143]
    assert 4 <= first[0] < 12
    for report in reports("same_batch", 2):
        assert report["after_stop"] == report["uninterrupted"]
