"""Training with prompts that DOTS selects."""

import pandas as pd
import pytest
import torch
from trl import GRPOConfig

from tests.factories import Watched, even_length_reward, last_logged, make_trainer, plain_dataset, run, train_briefly
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.difficulty.loading import LogisticDifficultyPredictor, save_predictor


@pytest.mark.parametrize("replay", ["off", "share"])
def test_the_papers_reference_set(tmp_path, replay):
    trainer = run(
        Watched,
        DataEfficientGRPOConfig,
        tmp_path,
        selection="dots_paper",
        selector_args={"reference_size": 6, "predictor": "logistic"},
        replay=replay,
        replay_max_age=None,
        steps_per_generation=2,
        max_steps=16,
    )
    table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    assert table["predicted"].notna().all()
    references = table[table["origin"] == "reference"]
    assert references.groupby("step").size().to_dict() == {0: 6, 4: 6, 8: 6, 12: 6}
    assert (table.groupby("step")["prompt_id"].nunique() == table.groupby("step").size()).all()
    fresh = [set(ids) for _, ids in table[table["origin"] == "fresh"].groupby("step")["prompt_id"]]
    for first, second in zip(fresh[::2], fresh[1::2], strict=True):  # drawn together
        assert not first & second
    if replay == "share":  # of each prompt the newest group, reference rollouts included
        newest = {g.prompt_id: g for b in trainer.batches for g in b.generated}
        stored = {id(g) for g in newest.values() if g.effective}
        assert {id(g) for g in trainer.collector.buffer.groups} == stored
    for batch in trainer.batches:
        references_now = [g for g in batch.generated if batch.origins[id(g)] == "reference"]
        effective = [g for g in references_now if g.effective]
        trained = [g for g in batch.trained if batch.origins[id(g)] == "reference"]
        assert {batch.dispositions[id(g)] for g in references_now if not g.effective} <= {"dropped"}
        assert all(g in effective for g in batch.dropped if g.effective)
        if replay == "share":  # no effective one is thrown away
            assert not trained
            assert {id(g) for g in effective} == {id(g) for g in batch.leftover}
            assert not any(g.effective for g in batch.dropped)
        else:  # they make up at most half of a batch
            assert len(trained) == min(len(effective), 2)
            assert not batch.leftover


def test_a_predictor_of_another_width_or_none_at_all_is_refused(tmp_path):
    predictor = LogisticDifficultyPredictor()
    predictor.fit(torch.randn(40, 9), torch.rand(40))
    save_predictor(predictor, tmp_path / "predictor")
    with pytest.raises(ValueError, match=r"width 9.*width 32"):
        train_briefly(tmp_path, "dots", selector_args={"predictor": str(tmp_path / "predictor")})
    for wrong in ("nowhere", (1, 2)):
        with pytest.raises(ValueError, match=r"(nowhere|tuple).*logistic"):
            make_trainer(tmp_path, "dots", selector_args={"predictor": wrong})


def test_what_changing_one_import_gives(tmp_path):
    """A plain `GRPOConfig` on text prompts: DOTS, and stored groups in places without a gradient; a stream: neither."""
    trainer = run(DataEfficientGRPOTrainer, GRPOConfig, tmp_path, rewards=even_length_reward, steps_per_generation=2)
    assert trainer.selector.name == "dots"
    assert last_logged(trainer, "rollouts_replayed") > 0
    stream = {"train_dataset": plain_dataset().to_iterable_dataset()}
    streaming = run(DataEfficientGRPOTrainer, GRPOConfig, tmp_path, max_steps=1, trainer=stream)
    assert streaming.selector.name == "uniform"
    assert streaming.collector.selector is None
