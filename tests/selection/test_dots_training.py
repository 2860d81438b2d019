"""Training with prompts that DOTS selects."""

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig

import trl_dataeff.trainer as trainer_module
from tests.factories import Watched, chat_dataset, even_length_reward, logged, mixed_reward, plain_dataset, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.difficulty import save_predictor
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor


def dots(tmp_path, trainer_class=Watched, rewards=mixed_reward, **options):
    options = {"selection": "dots", "steps_per_generation": 2, "replay": "off", **options}
    return run(trainer_class, DataEfficientGRPOConfig, tmp_path, rewards=rewards, **options)


def test_predictions_are_made_before_the_rollout(tmp_path):
    """By an estimate taken when prompts are proposed, which cannot know what they will give."""
    before = []

    class Asked(Watched):
        def _roll_out(self, ids):
            before.extend(self.collector.selector.predict(ids))
            return super()._roll_out(ids)

    trainer = dots(tmp_path, trainer_class=Asked, max_rollout_rounds=4, max_steps=16)
    np.testing.assert_array_equal([g.predicted for b in trainer.batches for g in b.generated], before)
    table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    first = table["step"] == 0
    assert table["predicted"][first].isna().all()
    assert table["predicted"][~first].between(0, 1).all()


@pytest.mark.parametrize("replay", ["off", "share"])
def test_the_papers_reference_set(tmp_path, replay):
    options = {
        "replay_max_age": None,
        "selection": "dots_paper",
        "selector_args": {"reference_size": 6, "predictor": "logistic"},
        "max_steps": 16,
    }
    trainer = dots(tmp_path, rewards=even_length_reward, replay=replay, **options)
    table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
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
    assert table["predicted"].notna().all()


SETTINGS = {
    "dots": {},
    "replay": {"replay": "share"},
    "replay and dynamic sampling": {"replay": "share", "max_rollout_rounds": 4},
    "as published": {"selection": "dots_paper", "selector_args": {"reference_size": 6, "predictor": "logistic"}},
    "attention": {"selector_args": {"predictor": "attention"}},
    "conversational": {"trainer": {"train_dataset": chat_dataset()}},
    "lora": {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_train(setting, tmp_path):
    trainer = dots(tmp_path, **SETTINGS[setting])
    assert trainer.state.global_step == 12
    assert all(np.isfinite(loss) for (loss,) in logged(trainer, "loss"))
    proposed = [{g.prompt_id for g in b.generated} for b in trainer.batches]
    assert len(set.union(*proposed)) > 4


@pytest.mark.parametrize("setting", ["replay", "attention", "as published"])
def test_resume_is_exact(tmp_path, setting):
    options = {**SETTINGS[setting], "save_strategy": "steps", "save_steps": 5, "max_steps": 14}
    whole = dots(tmp_path / "whole", trainer_class=DataEfficientGRPOTrainer, **options)
    resumed = dots(tmp_path / "resumed", trainer_class=DataEfficientGRPOTrainer, train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    names = (
        "loss",
        "grad_norm",
        "reward",
        "dataeff/rollouts_generated",
        "dataeff/effective_ratio",
    )
    assert logged(whole, *names) == logged(resumed, *names)


def test_other_embeddings_on_resume_are_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog_transformers):
    options = {"save_strategy": "steps", "save_steps": 5, "max_steps": 8}
    dots(tmp_path / "whole", **options)

    embed = trainer_module.embed_for
    monkeypatch.setattr(trainer_module, "embed_for", lambda *a, **kw: embed(*a, **kw)[:] * np.float16(1.01))
    resumed = dots(tmp_path / "resumed", train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert resumed.state.global_step == 8
    assert any("embeddings differ from those of the run" in r.message for r in caplog_transformers.records)


def test_a_predictor_of_another_width_or_none_at_all_is_refused(tmp_path):
    predictor = LogisticDifficultyPredictor()
    predictor.fit(torch.randn(40, 9), torch.rand(40))
    save_predictor(predictor, tmp_path / "predictor")
    with pytest.raises(ValueError, match=r"width 9.*width 32"):
        dots(tmp_path, selector_args={"predictor": str(tmp_path / "predictor")})
    with pytest.raises(ValueError, match="There is no predictor 'nowhere'"):
        dots(tmp_path, selector_args={"predictor": "nowhere"}, train=False)


def test_what_changing_one_import_gives(tmp_path):
    """A plain `GRPOConfig` on text prompts: DOTS, and half of each batch replayed; a stream: neither."""
    trainer = run(DataEfficientGRPOTrainer, GRPOConfig, tmp_path, rewards=even_length_reward, steps_per_generation=2)
    assert trainer.selector.name == "dots"
    assert logged(trainer, "dataeff/rollouts_replayed")[-1][0] > 0
    stream = {"train_dataset": plain_dataset().to_iterable_dataset()}
    streaming = run(DataEfficientGRPOTrainer, GRPOConfig, tmp_path, max_steps=1, trainer=stream)
    assert streaming.selector.name == "uniform"
    assert streaming.collector.selector is None
