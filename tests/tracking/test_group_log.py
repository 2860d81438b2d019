"""The table of all groups that a run writes."""

import errno
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.factories import history, make_group, messages, mixed_reward, run, train
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.rollouts.group import HARD
from trl_dataeff.tracking import group_log


def test_groups_table_goes_on_where_the_checkpoint_was(tmp_path):
    options = {"dynamic_sampling": True, "rewards": mixed_reward, "save_strategy": "steps", "save_steps": 5}
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **options)
    path = tmp_path / "dataeff" / "groups.parquet"
    before = pd.read_parquet(path).drop(columns="seconds")
    again = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, train=False, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    pd.testing.assert_frame_equal(pd.read_parquet(path).drop(columns="seconds"), before)
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **{**options, "max_steps": 1})
    assert len(pd.read_parquet(path)) < len(before), "a new run starts a new table"


def test_the_table_of_groups_waits_for_room(tmp_path, monkeypatch, caplog_transformers):
    whole = train(tmp_path / "whole", max_steps=4, save_steps=1)
    calls = []
    write = group_log.pq.write_table

    def sometimes_full(table, path, **options):
        calls.append(len(table))
        if len(calls) in (2, 3):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(table, path, **options)

    monkeypatch.setattr(group_log.pq, "write_table", sometimes_full)
    trainer = train(tmp_path / "full", max_steps=4, save_steps=1)
    assert len(calls) >= 4
    assert sum("groups.parquet could not be written" in m for m in messages(caplog_transformers)) == 1
    tables = [pd.read_parquet(tmp_path / n / "dataeff" / "groups.parquet") for n in ("whole", "full")]
    pd.testing.assert_frame_equal(*(table.drop(columns="seconds") for table in tables))
    assert history(trainer.state.log_history) == history(whole.state.log_history)
    assert {path.name for path in (tmp_path / "full" / "dataeff").iterdir()} == {
        "groups.parquet",
        "metrics.jsonl",
        "prompts.parquet",
        "run.json",
    }


def test_a_corrupt_table_of_groups_is_renamed(tmp_path, caplog_transformers):
    train(tmp_path, max_steps=2)
    (tmp_path / "dataeff" / "groups.parquet").write_bytes(b"PAR1 no more")
    train(tmp_path, max_steps=4, resume=True)
    assert any("cannot be read" in m and "groups.corrupt.parquet" in m for m in messages(caplog_transformers))
    assert (tmp_path / "dataeff" / "groups.corrupt.parquet").read_bytes() == b"PAR1 no more"
    assert pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")["step"].min() >= 2


def test_a_table_of_other_columns_is_renamed(tmp_path, caplog_transformers):
    """As another version may have written it."""
    path = tmp_path / "groups.parquet"
    former = pd.DataFrame({"step": [0, 1], "source": ["fresh", "fresh"], "dropped": [False, True]})
    table = pa.Table.from_pandas(former, preserve_index=False).replace_schema_metadata({group_log.RUN: "run"})
    pq.write_table(table, path)
    log = group_log.GroupLog(path)
    log.begin("run", 2)
    assert any(
        "groups.corrupt.parquet" in m and "training is not affected" in m for m in messages(caplog_transformers)
    )
    log.add([make_group()], np.ones(1))
    log.flush(force=True)
    assert len(pd.read_parquet(path)) == 1
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "groups.corrupt.parquet"), former)


def test_a_row_by_hand(tmp_path):
    log = group_log.GroupLog(tmp_path / "groups.parquet")
    log.add(
        [
            make_group(origin="reference", disposition="leftover", predicted=0.25),
            make_group(
                prompt_id=-1,
                rewards=np.float32([[np.nan], [np.nan]]),
                success_rate=float("nan"),
                kind=HARD,
                disposition="dropped",
            ),
        ],
        np.float32([2.0]),
    )
    log.flush(force=True)
    table = pd.read_parquet(tmp_path / "groups.parquet").replace({np.nan: None})
    assert table.columns.tolist() == group_log.SCHEMA.names
    common = {"step": 4, "round": 1, "completions": 2, "tokens": 3, "seconds": pytest.approx(0.1)}
    first, second = table.to_dict("records")
    assert first == {
        **common, "prompt_id": 3, "success_rate": 0.5, "reward": 1.0, "kind": "effective", "predicted": 0.25,
        "explored": False, "origin": "reference", "disposition": "leftover",
    }  # fmt: skip
    assert second == {
        **common, "prompt_id": -1, "success_rate": None, "reward": None, "kind": "hard", "predicted": None,
        "explored": False, "origin": "fresh", "disposition": "dropped",
    }  # fmt: skip
