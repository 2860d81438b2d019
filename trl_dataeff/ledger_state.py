"""What a checkpoint holds of a [`RolloutLedger`], and back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_dataeff.checkpoint.state import check_fingerprint, check_layout
from trl_dataeff.rollouts.distributed import all_gather
from trl_dataeff.rollouts.group import RolloutGroup, pack_groups, unpack_groups


if TYPE_CHECKING:
    from trl_dataeff.ledger import RolloutLedger


def ledger_state(ledger: RolloutLedger) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """
    Scalars and named arrays, for `trl_dataeff.checkpoint.state.save_state`. A collective where groups are carried: they are
    spread over the processes.
    """
    scalars: dict[str, Any] = {
        "counters": ledger.counters.values,
        "windows": ledger.windows,
        "zero_share": [ledger.zero_share.zero, ledger.zero_share.total],
        # JSON has no infinity
        "reward_scale": [ledger.scale.low, ledger.scale.high] if math.isfinite(ledger.scale.low) else None,
        "dataset_size": len(ledger.pool) if ledger.pool is not None else None,
        "fingerprint": ledger.pool.fingerprint if ledger.pool is not None else None,
        "layout": _layout(ledger),
    }
    arrays = {"rng": ledger.rng.get_state().numpy(), "replay_rng": ledger.replay_rng.get_state().numpy()}
    if ledger.pool is not None:
        arrays.update({f"pool.{name}": value for name, value in ledger.pool.state_dict().items()})
    if ledger.selector is not None:
        arrays.update({f"selector.{name}": value for name, value in ledger.selector.state_dict().items()})
    files = {"arrays": arrays}
    for name, groups in (("surplus", ledger.carried), ("replay", ledger.buffer.groups if ledger.buffer else [])):
        if groups:
            mine = {i: group.rollouts for i, group in enumerate(groups) if group.owner == ledger.rank}
            held = {i: value for part in all_gather(mine) for i, value in part.items()}
            files[name] = pack_groups([replace(group, rollouts=held[i]) for i, group in enumerate(groups)])
    return scalars, files


def _layout(ledger: RolloutLedger) -> dict[str, Any]:
    """The settings on which what a checkpoint holds depends."""
    config = ledger.config
    return {
        "selector": type(ledger.selector).__name__,
        "num_generations": config.num_generations,
        "reward_functions": ledger.reward_names,
        "use_vllm": config.use_vllm,
        "number of processes": ledger.world_size,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "steps_per_generation": config.steps_per_generation,
        "num_iterations": config.num_iterations,
    }


def restore_ledger(
    ledger: RolloutLedger, scalars: dict[str, Any], files: dict[str, dict[str, np.ndarray]], step: int, path: Path
) -> None:
    """The inverse of [`ledger_state`]; `step` is the optimizer step at which training goes on, `path` for errors."""
    if ledger.pool is not None:
        check_fingerprint(
            path, scalars["fingerprint"], ledger.pool.fingerprint, scalars["dataset_size"], len(ledger.pool)
        )
    present, saved = _layout(ledger), scalars["layout"]
    check_layout(path, saved, present, ["selector"], "the selection state")
    if "surplus" in files or "replay" in files:
        check_layout(path, saved, present, ["num_generations", "reward_functions", "use_vllm"], "rollouts")
    if scalars["half_used_window"]:
        check_layout(path, saved, present, list(present), "a half-used batch")
    ledger.counters.values.update(scalars["counters"])
    ledger.windows = scalars["windows"]
    ledger.zero_share.zero, ledger.zero_share.total = scalars["zero_share"]
    if scalars["reward_scale"] is not None and not ledger.scale.fixed:
        ledger.scale.low, ledger.scale.high = scalars["reward_scale"]
    arrays = files["arrays"]
    ledger.rng.set_state(torch.from_numpy(arrays["rng"]))
    ledger.replay_rng.set_state(torch.from_numpy(arrays["replay_rng"]))
    for prefix, part in (("pool.", ledger.pool), ("selector.", ledger.selector)):
        if part is not None:
            part.load_state_dict({k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})
    ledger.carried = _unpack(ledger, files, "surplus")
    if ledger.buffer is not None:
        ledger.buffer.add(_unpack(ledger, files, "replay"))
    if ledger.group_log is not None:
        ledger.group_log.resume(step)


def _unpack(ledger: RolloutLedger, files: dict[str, dict[str, np.ndarray]], name: str) -> list[RolloutGroup]:
    """The groups of a file, each with its rollouts on the process that owns it."""
    groups = unpack_groups(files[name]) if name in files else []
    for group in groups:
        group.owner = group.owner % ledger.world_size
        group.rollouts = group.rollouts if group.owner == ledger.rank else None
    return groups
