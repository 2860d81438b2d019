"""Two processes whose weights are sharded by FSDP2 (gloo, on the CPU) train as two that hold them whole."""

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.sharded import RESUMED, RUNS
from tests.factories import launched


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What `sharded.py` and `same_batch.py` report from each of two processes."""
    folder = Path(__file__).parent
    sharded = launched(folder / "sharded.py", 2, tmp_path_factory)
    return list(zip(sharded, launched(folder / "same_batch.py", 2, tmp_path_factory, "quick", timeout=3000)))


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_sharded(name, reports):
    for report, _ in reports:
        # With LoRA accelerate leaves the last norm, which is frozen, as it is
        frozen = ["base_model.model.model.norm.weight"] if "lora" in name else []
        assert report[name]["whole"] == frozen, "parameters that are no DTensor"
        assert report[name]["units"] >= 4  # two layers, the embedding, and the model


@pytest.mark.parametrize("name", RUNS)
def test_they_train_as_if_they_were_whole(name, reports):
    for report, whole in reports:
        own, expected = report[name], whole[name]["whole"]
        assert own["generated"] == expected["generated"]
        assert own["trained"] == expected["trained"]
        np.testing.assert_allclose(own["logs"], expected["logs"], rtol=1e-4, atol=1e-5)


def test_rows_that_are_skipped_change_nothing(reports):
    for report, whole in reports:
        plain = whole["uniform"]["whole"]["logs"]
        for own in (report["uniform, skip"]["logs"], whole["uniform, skip"]["whole"]["logs"]):
            np.testing.assert_allclose(own, plain, rtol=1e-4, atol=1e-5)


def test_a_sharded_policy_embeds_the_prompts_in_lockstep(reports):
    first, second = (report["dots, fill"] for report, _ in reports)
    assert first["selector"] == "DotsSelector"
    assert first["embedding_passes"] == second["embedding_passes"] > 0


@pytest.mark.parametrize("name", RESUMED)
def test_they_generate_and_a_resumed_run_goes_on_as_if_it_had_not_been_stopped(name, reports):
    for report, _ in reports:
        own = report[f"resumed {name}"]
        assert own["sharded"] >= 19  # all of the model's own parameters, but for the last norm with LoRA
        assert own["again"] == own["whole"]
        assert own["replayed"][0] > own["replayed"][1] > 0
        assert {"pytorch_model_fsdp.bin", "optimizer.bin", "dataeff"} <= set(own["files"])
