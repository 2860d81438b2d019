"""What a run left behind, and whether two runs are the same."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch


OFF = {"selection": "uniform", "replay": "off", "compact_update": False}


def is_time(name: str) -> bool:
    return "time" in name or "second" in name or name.startswith("profiling/")


def history(log_history: list[dict]) -> list[dict]:
    """Every metric of every log but seconds and the last log; NaN as a string, since it is not equal to itself."""
    return [
        {k: "nan" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items() if not is_time(k)}
        for row in log_history
        if "train_runtime" not in row
    ]


def groups_since(folder: Path, step: int) -> pd.DataFrame:
    """Groups generated at `step` or later: prompts, rounds, kinds, dispositions."""
    table = pd.read_parquet(folder / "dataeff" / "groups.parquet").drop(columns="seconds")
    return table[table["step"] >= step].reset_index(drop=True)


def assert_identical(reference, ours, *, least: int = 100, has_gradient: bool = True):
    """
    All that TRL logs is equal to the last bit, and so are the trained weights. At least so many values are compared,
    and the run has a gradient unless `has_gradient` is false.
    """
    assert len(reference.state.log_history) == len(ours.state.log_history)
    compared = 0
    for expected, got in zip(reference.state.log_history, ours.state.log_history):
        for name, value in expected.items():
            if not is_time(name):
                assert got[name] == value, f"{name} at step {expected['step']}"
                compared += 1
    assert compared > least
    norms = [log["grad_norm"] for log in reference.state.log_history if "grad_norm" in log]
    assert any(norms) or not has_gradient, "a run without gradients shows nothing"
    for (name, a), (_, b) in zip(reference.model.named_parameters(), ours.model.named_parameters()):
        assert (a == b).all(), name


def assert_close(reference, ours, tolerance: float = 1e-5) -> None:
    """The weights are equal up to rounding. For runs with plain SGD: Adam would make much of a rounding."""
    assert reference.state.global_step == ours.state.global_step
    for (name, a), (_, b) in zip(reference.model.named_parameters(), ours.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_end(a, b) -> None:
    """Two trainers that ended with the same weights, optimizer and selection state."""
    for (name, x), (_, y) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.equal(x, y), name
    states = [trainer.optimizer.state_dict()["state"] for trainer in (a, b)]
    assert states[0].keys() == states[1].keys()
    for key, values in states[0].items():
        for name, value in values.items():
            assert torch.equal(value, states[1][key][name]), (key, name)
    assert (a.collector is None) == (b.collector is None)
    if a.collector is not None:
        np.testing.assert_equal(a.collector.state_dict(), b.collector.state_dict())


def checkpoint_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if "checkpoint" in path.name}


def messages(caplog, text: str = "") -> list[str]:
    return [record.message for record in caplog.records if text in record.message]


def all_finite(trainer) -> bool:
    return all(p.isfinite().all() for p in trainer.model.parameters())
