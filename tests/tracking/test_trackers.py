"""What reaches wandb (offline, read from its file), TensorBoard (its events) and trackio (its local database)."""

import json
import struct
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from transformers.integrations import TensorBoardCallback

from tests.factories import messages, mixed_reward, plain_dataset, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.tracking import trackers
from trl_dataeff.tracking.trackers import COLUMNS, FIGURES, HISTOGRAM, TABLE


@pytest.fixture(autouse=True)
def every_four_steps(monkeypatch):
    monkeypatch.setattr(trackers, "EVERY", 4)


def train(folder, tracker: str):
    options = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 6, "run_name": "made"}
    trainer = {"eval_dataset": plain_dataset(4)}
    given = {"rewards": mixed_reward, "report_to": tracker, "trainer": trainer, **options}
    return run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, folder, **given)


def groups_of(trainer) -> list[dict]:
    return trainer.collector.logs.groups.since(0).to_pylist()


def test_logs_of_evaluations_say_what_was_generated(tmp_path):
    trainer = train(tmp_path, "none")
    lines = [json.loads(line) for line in (tmp_path / "dataeff" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval_reward" in line]
    assert [line["dataeff/rollouts_generated"] for line in evaluations] == [line["rollouts"] for line in evaluations]
    assert not any("dataeff" in name for name in trainer.evaluate()), "outside of training nothing is added"


def test_a_tracker_that_fails_does_not_stop_training(tmp_path, monkeypatch, caplog_transformers):
    tensorboard = pytest.importorskip("tensorboard")
    assert tensorboard

    def fails(*args):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(trackers, "SENDERS", {TensorBoardCallback: (fails, fails)})
    assert train(tmp_path, "tensorboard").state.global_step == 6
    assert messages(caplog_transformers, "did not take the groups (ConnectionError")
    assert messages(caplog_transformers, "did not take the figures (ConnectionError")


def records(content: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file, which is a LevelDB log: parts with a header of 7 bytes, in blocks of 32 KiB."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # too little for a header: padding
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = train(tmp_path, "wandb")
    wandb.finish()
    wandb.teardown()  # the process that writes the file ends
    defined, history = set(), []
    for data in records(next(tmp_path.rglob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "metric":
            defined.add(record.metric.name)
        elif record.WhichOneof("record_type") == "history":
            history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    assert {"train/dataeff/rollouts_generated", "train/dataeff/tokens_generated"} <= defined
    evaluations = [row for row in history if "eval/reward" in row]
    assert len(evaluations) == 2
    assert all(row["train/dataeff/rollouts_generated"] > 0 for row in evaluations), "in one row, so that it is an axis"
    sent = [row for row in history if any(name.startswith(TABLE) for name in row)]
    assert [row["train/global_step"] for row in sent] == [4, 6]
    assert all(any(name.startswith(HISTOGRAM) for name in row) for row in sent)
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    assert {tuple(table["columns"]) for table in tables} == {COLUMNS}
    assert sum(len(table["data"]) for table in tables) == len(groups_of(trainer))
    assert any(name.startswith(FIGURES) for row in history for name in row)


def test_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = train(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"histograms": 0}).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"train/dataeff/rollouts_generated", "train/dataeff/effective_ratio", "eval/reward"} <= scalars
    rollouts = {event.step: event.value for event in events.Scalars("train/dataeff/rollouts_generated")}
    assert rollouts[6] == trainer.collector.generated()["rollouts_generated"]
    histograms = events.Histograms(HISTOGRAM)
    assert [event.step for event in histograms] == [4, 6]
    rates = [row["success_rate"] for row in groups_of(trainer)]
    assert sum(event.histogram_value.num for event in histograms) == len(rates)
    assert sum(event.histogram_value.sum for event in histograms) == pytest.approx(np.sum(rates), rel=1e-5)
    assert {FIGURES + "progress-rollouts", FIGURES + "kinds"} <= set(events.Tags()["images"])
    assert events.Images(FIGURES + "kinds")[0].width == 1000


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage as storage

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    trainer = train(tmp_path, "trackio")
    project = trainer.args.project
    (name,) = storage.SQLiteStorage.get_runs(project)
    logs = storage.SQLiteStorage.get_logs(project, name)
    names = {key for row in logs for key in row}
    assert {"train/dataeff/rollouts_generated", "eval/reward", TABLE, HISTOGRAM, FIGURES + "kinds"} <= names
    evaluations = [row for row in logs if "eval/reward" in row]
    assert all(row["train/dataeff/rollouts_generated"] > 0 for row in evaluations)
