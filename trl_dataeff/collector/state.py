"""State of a [`RolloutCollector`] to a checkpoint, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_dataeff.checkpoint.state import (
    CheckpointError,
    load_generation_batch,
    load_state,
    save_generation_batch,
    save_state,
)
from trl_dataeff.collector.build import FITTED
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.rollouts.distributed import all_gather, pack_distributed, unpack_distributed
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import checked_state
from trl_dataeff.selection.estimate import under
from trl_dataeff.tracking.metrics import METRICS
from trl_dataeff.utils import __version__, hash_array, hash_each, hash_json


Arrays = dict[str, np.ndarray]


def begin_run(collector: RolloutCollector, step: int, model: str) -> None:
    """
    Begin or continue the files of a run, on the main process. Call it when training begins.

    Args:
        collector ([`RolloutCollector`]): of the run, restored if it is resumed.
        step (`int`): optimizer step at which training begins.
        model (`str`): name or path of the model.
    """
    if collector.logs is not None:
        selector = collector.settings.get("selector")
        about = {"trl_dataeff": __version__, "model": model, "selector": selector, "prompts": collector.num_prompts}
        collector.logs.begin(step, collector.dataset_hash, about)


def save_run(
    checkpoint: Path,
    collector: RolloutCollector,
    loop: dict[str, Any],
    micro_batches: list[dict[str, Any]] | None,
    *,
    writes: bool,
) -> None:
    """
    Write what decides the next generation batches. A collective.

    Args:
        checkpoint (`Path`): the `checkpoint-N` folder.
        collector ([`RolloutCollector`]): of the run.
        loop (`dict`): values of the training loop, for JSON.
        micro_batches (`list[dict]`, *optional*): what this process has yet to train on of a half-used generation batch.
        writes (`bool`): whether this process writes what all share.
    """
    if micro_batches is not None:
        save_generation_batch(checkpoint, collector.processes.rank, micro_batches)
    collector.processes.wait()
    scalars, files = collector_state(collector)
    if writes:
        save_state(checkpoint, scalars | {"loop": loop, "half_used": micro_batches is not None}, files)
    if collector.logs is not None:
        collector.logs.groups.flush(force=True)


def load_run(checkpoint: Path, collector: RolloutCollector) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """
    The inverse of [`save_run`]: restores the collector and returns `loop` and `micro_batches`.

    Args:
        checkpoint (`Path`): a checkpoint whose manifest was checked.
        collector ([`RolloutCollector`]): of a run that has just started.

    Raises:
        `CheckpointError`: a file is missing, or the selector's arguments are others and its state does not fit.
    """
    scalars, files = load_state(checkpoint)
    load_collector_state(collector, scalars, files)
    micro_batches = (
        load_generation_batch(checkpoint, collector.processes.rank, collector.processes.device)
        if scalars["half_used"]
        else None
    )
    return scalars["loop"], micro_batches


def check_agreement(collector: RolloutCollector) -> None:
    """
    Compare the processes' [`state_checksums`]. A collective if there are several processes.

    Raises:
        `RuntimeError`: they differ. It names the parts, and the processes that disagree with process 0.
    """
    if collector.processes.world_size == 1:
        return
    first, *others = all_gather(state_checksums(collector))
    differ = {
        part: [rank for rank, sums in enumerate(others, 1) if sums[part] != first[part]]
        for part in first
        if any(sums[part] != first[part] for sums in others)
    }
    if differ:
        listed = "; ".join(f"{part} (of {', '.join(map(str, ranks))})" for part, ranks in differ.items())
        raise RuntimeError(
            f"The selection state of processes differs from that of process 0: {listed}. They would train on "
            "different generation batches. Reward functions get the same rewards everywhere from TRL, so look for a callback or "
            "a selector of your own that changes this state on some processes only; the last checkpoint is not affected."
        )


def state_checksums(collector: RolloutCollector) -> dict[str, str]:
    """
    By part, a hash of the selection state that has to be the same on every process: of groups what all processes know,
    without seconds; of counters not those of faults, which a single process may see; of a selector and its random state only if
    it is `exact` (else the main process decides).
    """
    counters = {name: n for name, n in collector.counters.values.items() if not METRICS[name].fault}
    scale, checks = collector.classifier.scale, collector.reward_checks
    sums = {
        "counters": hash_json(counters, checks.scores.tolist(), checks.completions),
        "reward range": hash_json(str(scale), collector.classifier.values),
        "share of zero-variance groups": hash_json(collector.zero_share.zero, collector.zero_share.total),
        "leftover groups": _groups_checksum(collector.leftover),
        "replay buffer": _groups_checksum([] if collector.buffer is None else collector.buffer.groups),
        "random state of replay": hash_array(collector.replay_rng.get_state()),
    }
    if collector.selector is not None and collector.selector.exact:
        state = {name: hash_array(value) for name, value in checked_state(collector.selector).items()}
        sums["selector"] = hash_json(state, hash_array(collector.rng.get_state()))
    return sums


def _groups_checksum(groups: Sequence[RolloutGroup]) -> str:
    known = ([g.prompt_id, g.step, g.round, g.kind, g.owner, g.success_rate, g.rewards.tolist()] for g in groups)
    return hash_each(known)


def collector_state(collector: RolloutCollector) -> tuple[dict[str, Any], dict[str, Arrays]]:
    """
    Scalars, and named arrays by file (`arrays`, and `leftover` and `replay` where there are groups), for
    `trl_dataeff.checkpoint.state.save_state`. A collective if there are several processes.
    """
    scale = collector.classifier.scale
    scalars = {
        "counters": collector.counters.values,
        "reward_checks": collector.reward_checks.state(),
        "zero_share": [collector.zero_share.zero, collector.zero_share.total],
        "recent": collector.recent,
        "batches": collector.batches,
        "reward_scale": [scale.low, scale.high] if math.isfinite(scale.low) else None,  # JSON has no infinity
        "reward_values": collector.classifier.values,
        "dataset": {"size": collector.num_prompts, "hash": collector.dataset_hash},
        "settings": collector.settings,
    }
    arrays = {"rng": collector.rng.get_state().numpy(), "replay_rng": collector.replay_rng.get_state().numpy()}
    if collector.selector is not None:
        arrays.update({f"selector.{name}": value for name, value in checked_state(collector.selector).items()})
    files = {"arrays": arrays}
    if collector.leftover:
        files["leftover"] = pack_distributed(
            collector.leftover, collector.processes.rank, collector.processes.world_size
        )
    if collector.buffer is not None and len(collector.buffer):
        files["replay"] = collector.buffer.state_dict()
    return scalars, files


def load_collector_state(collector: RolloutCollector, scalars: dict[str, Any], files: dict[str, Arrays]) -> None:
    """The inverse of [`collector_state`], on a collector that was made with the same settings."""
    collector.counters.load(scalars["counters"])
    collector.reward_checks.load_state(scalars["reward_checks"])
    collector.zero_share.zero, collector.zero_share.total = scalars["zero_share"]
    collector.batches = scalars["batches"]
    collector.recent = [(step, prompt_ids) for step, prompt_ids in scalars.get("recent", [])]
    scale = collector.classifier.scale
    if scalars["reward_scale"] is not None and not scale.fixed:
        scale.low, scale.high = scalars["reward_scale"]
    collector.classifier.values = list(scalars["reward_values"])
    arrays = files["arrays"]
    collector.rng.set_state(torch.from_numpy(arrays["rng"]))
    collector.replay_rng.set_state(torch.from_numpy(arrays["replay_rng"]))
    saved, present = scalars["settings"], collector.settings
    if collector.selector is not None:
        try:
            collector.selector.load_state_dict(under(arrays, "selector."))
        except (LookupError, ValueError, RuntimeError) as error:
            own = str(present["selector"])
            raise CheckpointError(_mismatch(f"selection state does not fit the {own}", saved, present)) from error
    collector.leftover = []
    if "leftover" in files:
        collector.leftover = unpack_distributed(
            files["leftover"], collector.processes.rank, collector.processes.world_size
        )
    if collector.buffer is not None and "replay" in files:  # replay may be switched on or off
        collector.buffer.load_state_dict(files["replay"])


def _mismatch(what: str, saved: dict[str, Any], present: dict[str, Any]) -> str:
    """Why a part of the state is not taken: in words, since what it raised lists tensors."""
    changed = [
        f"`{name}` = {saved[name]}; now it is {present.get(name)}"
        for name in FITTED
        if name in saved and saved[name] != present.get(name)
    ]
    began = f" The run began with {', and '.join(changed)}." if changed else ""
    return (
        f"The checkpoint's {what} of this run.{began} Resume with the arguments, and the version of this package, that the run "
        "began with, or start a new run with this checkpoint's weights as the model."
    )
