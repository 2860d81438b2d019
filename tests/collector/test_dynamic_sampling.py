"""`max_rollout_rounds` above 1 in training: what is generated, what is kept, what is logged."""

import numpy as np
import pandas as pd

from tests.factories.tiny import logged
from tests.factories.training import dynamic, mixed_reward
from trl_dataeff.tracking.files import SCHEMA, about_groups


def test_every_rollout_is_counted_and_accounted_for(tmp_path):
    trainer = dynamic(tmp_path)
    logs = logged(trainer, "dataeff/rollouts_generated", "dataeff/rollouts_trained", "dataeff/rollouts_discarded")
    generated, trained, discarded = logs[-1]
    assert generated == trainer.generated
    assert trained == sum(len(t["advantages"]) for t in trainer.tensors)
    assert generated == trained + discarded + 4 * len(trainer.collector.leftover)
    table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    assert list(table.columns) == SCHEMA.names
    assert table["completions"].sum() == len(table) * 4 == generated
    dropped = table[table["disposition"] == "dropped"]
    assert len(dropped) * 4 == discarded
    assert set(dropped["kind"]) <= {"easy", "hard"}
    assert table["origin"].eq("fresh").all()
    dispositions = [b.dispositions[g] for b in trainer.batches for g in b.generated]
    assert table["disposition"].tolist() == dispositions
    assert set(dispositions) == {"trained", "leftover", "dropped"}
    assert table["tokens"].sum() == logged(trainer, "dataeff/tokens_generated")[-1][0]
    about = about_groups(tmp_path / "dataeff" / "groups.parquet")
    assert about == {"dataset": trainer.collector.dataset_hash, "reward_range": {"low": 0.0, "high": 1.0}}


def test_completions_table_holds_what_is_trained_on(tmp_path):
    def reward(prompts, completions, completion_ids, log_extra, log_metric, **kwargs):
        log_extra("echo", [f"{p}|{c}" for p, c in zip(prompts, completions)])
        log_metric("calls", 1.0)
        return mixed_reward(prompts, completion_ids)

    trainer = dynamic(tmp_path, rewards=reward, log_completions=True, num_completions_to_print=1, max_steps=4)
    assert any(b.dropped for b in trainer.batches)
    for path in sorted((tmp_path / "completions").glob("*.parquet")):
        table = pd.read_parquet(path)
        assert len(table) == 16
        assert (table["echo"] == table["prompt"] + "|" + table["completion"]).all()
        groups = table.groupby(np.arange(16) // 4)["reward"].nunique()
        assert (groups == 2).sum() >= 1
    assert all(calls == 1.0 for (calls,) in logged(trainer, "calls"))


def test_what_was_cut_off_does_not_make_a_group_effective(tmp_path):
    """With masking, a group can differ in completions that are not trained on alone: it has no gradient."""
    trainer = dynamic(tmp_path, mask_truncated_completions=True, max_rollout_rounds=8, max_completion_length=12)
    for batch, tensors in zip(trainer.batches, trainer.tensors):
        trained = tensors["completion_mask"].sum(dim=1) * tensors["advantages"].abs() > 0
        for group, rows in zip(batch.trained, trained.view(4, 4)):
            assert group.effective == bool(rows.any())
    assert any(g.effective for b in trainer.batches for g in b.generated)
    assert any(not g.effective and len(np.unique(g.rewards)) > 1 for b in trainer.batches for g in b.generated)
