r"""
The correction of the loss for rollouts of an earlier policy.

With \(\pi_\theta\) the policy, \(\pi_{old}\) the policy at the start of the generation batch and \(\pi_b\) the one that
sampled the rollout, \(w = \pi_\theta / \pi_{old}\) and \(\rho = \pi_{old} / \pi_b > 0\):

    rho min(w A, clip(w, 1 - eps, 1 + eps) A) = min(rho w A, clip(rho w, rho (1 - eps), rho (1 + eps)) A)

so the objective with the clip centred on \(\pi_{old}\) (`"proximal"`) is TRL's own loss with advantages multiplied by
\(\rho\), whatever the loss type. The objective as printed in arXiv 2506.05316, clip(pi_theta / pi_b, 1 - eps, 1 + eps)
(`"behavior"`), is TRL's own loss with \(\pi_b\) in the place of \(\pi_{old}\).

The cap: the clip bounds \(r = \pi_\theta / \pi_b\) from above only where A > 0. With a cap c the objective is, for A < 0, that of
dual-clip PPO (Ye et al. 2020, arXiv 1912.09729): max(min(r A, clip(r) A), c A), whose gradient is 0 beyond c. It is TRL's own loss
with \(\pi_\theta / c\), gradient included, in the place of \(\pi_{old}\) ([`hold_at_cap`]): the ratio is then the constant c, for
every loss type, and only for rows that an earlier policy sampled. CISPO keeps its gradient, with the weight c. VESPO's weight of a
sequence vanishes by itself as the ratio grows, and needs no cap. With the clip `"proximal"` the cap truncates \(\rho\).

A log-probability that is not known is NaN, and its ratio is 1: a row that was generated for this batch is all NaN.

The KL term: with `use_bias_correction_kl` TRL weighs it by \(\pi_\theta / \pi_{old}\), which has to be \(\pi_\theta / \pi_b\) for a
rollout of an earlier policy. The clip `"behavior"` makes it so; with `"proximal"` that option is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.replay.logprobs import LogprobRecorder, behavior_tensors, exclude_masked, sampling_metrics
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rollouts.skipping import token_mask


@dataclass(eq=False, repr=False)
class LossCorrection:
    """
    Corrects TRL's loss of a micro-batch when the loss has its log-probs ([`on_logps`]), before it reads its advantages.

    Args:
        clip (`str`), cap (`float`): `replay_clip` and `replay_ratio_cap`.
        level (`str`), loss_type (`str`): TRL's `importance_sampling_level` and `loss_type`.
        epsilon (`tuple[float, float]`): TRL's lower and upper `epsilon`.
        masks_sequences (`bool`): whether TRL's importance-sampling mask (vLLM) excludes whole sequences.
        buffer ([`ReplayBuffer`], *optional*): whose groups need log-probs; without it, metrics of replay are left out.
    """

    clip: str
    cap: float
    level: str
    loss_type: str
    epsilon: tuple[float, float]
    processes: Processes
    masks_sequences: bool = False
    buffer: ReplayBuffer | None = None

    def __post_init__(self) -> None:
        self._inputs: dict[str, Any] | None = None  # the micro-batch that is in the loss
        self.begin()

    @classmethod
    def of(
        cls, trainer: GRPOTrainer, config: DataEfficientGRPOConfig, buffer: ReplayBuffer | None, processes: Processes
    ) -> LossCorrection:
        """The correction of a trainer's loss. Raises a `ValueError` if the weight of the KL term cannot be corrected."""
        reuses = buffer is not None or config.max_rollout_rounds > 1
        if reuses and config.replay_clip == "proximal" and trainer.beta and config.use_bias_correction_kl:
            raise ValueError(
                f"`replay_clip='proximal'` cannot correct the KL term (`beta={trainer.beta}`) with `use_bias_correction_kl=True`. Use "
                "`replay_clip='behavior'`, or `use_bias_correction_kl=False`."
            )
        return cls(
            clip=config.replay_clip,
            cap=config.replay_ratio_cap or math.inf,
            level=trainer.importance_sampling_level,
            loss_type=trainer.loss_type,
            epsilon=(trainer.epsilon_low, trainer.epsilon_high),
            masks_sequences=config.vllm_importance_sampling_mode == "sequence_mask",
            processes=processes,
            buffer=buffer,
        )

    def prepare(
        self, batch: dict[str, Any], groups: Sequence[RolloutGroup], *, stale: bool, skipped: bool
    ) -> dict[str, float]:
        """
        Put what the loss needs into TRL's batch of this process's `groups`, in place. `stale`: whether a process has groups of an
        earlier policy. `skipped`: whether rows skipped the pass for old log-probs. Returns metrics that replace TRL's over all rows.
        """
        if self.masks_sequences:
            exclude_masked(groups, batch)
        if stale:
            batch.update(behavior_tensors(groups, batch["completion_ids"]))
            # A row that had no gradient when it was new has no log-probs, and gets none now, even if reward weights have changed
            unknown = batch["replayed"] & batch["behavior_per_token_logps"].isnan().all(1)
            batch["advantages"][unknown] = 0.0
        metrics = sampling_metrics(batch, self.processes) if stale or skipped else {}
        # Rows that skipped the pass for old log-probs have NaN: 1, which no log-prob is, until the loss has its own
        if (old_logps := batch.get("old_per_token_logps")) is not None:
            batch["old_per_token_logps"] = old_logps.masked_fill(old_logps.isnan(), 1.0)
        if self.buffer is not None:
            self.recorder.expect(groups, batch)
        self._awaited = stale or "batch_row" in batch
        return metrics

    def begin(self) -> None:
        """Begin a run: rows of an earlier one that was interrupted are not waited for."""
        self.recorder = LogprobRecorder()
        self._awaited = False  # whether the loss has yet to pass its log-probs of the generation batch

    def check_applied(self) -> None:
        """Raise a `RuntimeError` before an optimizer step whose loss has not passed its log-probs to [`on_logps`]."""
        if self._awaited:
            raise RuntimeError(
                "Replayed rollouts would be trained on without their correction: the loss did not call "
                "`DataEfficientGRPOTrainer._compute_loss`, or got no log-probs from `_get_per_token_logps_and_entropies`. Call "
                "`super()` there, or set `replay='off'` and `max_rollout_rounds=1`."
            )

    @contextmanager
    def micro_batch(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Within this context, the loss gets the copy of `inputs` that this yields: TRL uses `inputs` again."""
        self._inputs = dict(inputs)
        try:
            yield self._inputs
        finally:
            self._inputs = None

    def on_logps(self, logps: torch.Tensor | None) -> dict[str, float]:
        """
        Record and correct, once the loss has its log-probs `(B, T)`, with gradient. Returns metrics of the ratio, if there are
        replayed rows on a process. Outside of [`micro_batch`] nothing happens.
        """
        inputs = self._inputs
        if inputs is None or logps is None:  # see `check_applied`
            return {}
        self._awaited = False
        if (old_logps := inputs.get("old_per_token_logps")) is not None:  # 1 in rows that have none
            inputs["old_per_token_logps"] = torch.where(old_logps == 1, logps.detach(), old_logps)
        if "batch_row" in inputs:
            self.recorder.record(inputs["batch_row"], logps.detach())
        if "replayed" not in inputs:
            return {}
        options = {"level": self.level, "loss_type": self.loss_type}
        ratio = correct_inputs(inputs, logps, clip=self.clip, cap=self.cap, **options)
        if self.buffer is None:  # rows are leftover ones: what is logged is about replay
            return {}
        clipped = is_clipped(inputs, logps.detach(), self.epsilon, **options)
        if self.clip == "behavior" and self.loss_type not in ("cispo", "vespo"):
            clipped = clipped | inputs["replay_capped"]
        return summarize(self.processes.gather(ratio_statistics(ratio, clipped, inputs)))


def behavior_ratio(
    old_logps: torch.Tensor, behavior_logps: torch.Tensor, mask: torch.Tensor, *, level: str
) -> torch.Tensor:
    r"""
    \(\pi_{old} / \pi_b\), not truncated: `(B, T)` for tokens, 1 where `mask` is 0, or `(B, 1)` for sequences.

    Args:
        old_logps (`torch.Tensor` of shape `(B, T)`): log-probs under the policy at the start of the generation batch.
        behavior_logps (`torch.Tensor` of shape `(B, T)`): log-probs under the policy that sampled; NaN: ratio 1.
        mask (`torch.Tensor` of shape `(B, T)`): 1 for the tokens that are trained on.
        level (`str`): `"token"`, or `"sequence"` for the geometric mean over a completion's tokens (GSPO).
    """
    log_ratio = torch.nan_to_num(old_logps - behavior_logps, nan=0.0) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def correct_inputs(
    inputs: dict[str, Any], per_token_logps: torch.Tensor, *, clip: str, cap: float, level: str, loss_type: str
) -> torch.Tensor:
    """
    Put the correction into a micro-batch of TRL's loss, in place, once the loss has its log-probs.

    Args:
        inputs (`dict`): the micro-batch, with `advantages` (B,), `behavior_per_token_logps` (B, T), and `old_per_token_logps` (B, T)
            where TRL has it; its tensors are replaced, not changed.
        per_token_logps (`torch.Tensor` of shape `(B, T)`): the loss's own log-probs, with gradient. Where generation and
            optimization are aligned they are those of the policy at the start of the generation batch.
        clip (`str`): `"proximal"` or `"behavior"`.
        cap (`float`): bound of the ratio: of pi_old / pi_behavior for `"proximal"`, and of pi_theta / pi_behavior where the
            advantage is negative for `"behavior"`.
        level (`str`): see [`behavior_ratio`].
        loss_type (`str`): TRL's loss type.

    Returns:
        `torch.Tensor`: pi_old / pi_behavior, `(B, T)` or `(B, 1)`, not truncated. With `"behavior"`, where the cap holds the ratio
        is in `inputs["replay_capped"]`; VESPO has none.
    """
    behavior_logps = inputs["behavior_per_token_logps"]
    mask = token_mask(inputs)
    inputs["advantages"] = inputs["advantages"].view(len(mask), -1)  # (B, T) where a subclass gives them by token
    old_logps = inputs.get("old_per_token_logps")
    old_logps = per_token_logps.detach() if old_logps is None else old_logps
    if loss_type == "vespo":
        level = "token"  # it sums the log ratios over the sequence itself
    full_ratio = behavior_ratio(old_logps, behavior_logps, mask, level=level)
    ratio = full_ratio.clamp(max=cap) if clip == "proximal" else full_ratio
    known = ~torch.isnan(behavior_logps)
    # The off-policy sequence mask measures the divergence from the policy that sampled
    sampled_logps = inputs.get("sampling_per_token_logps", old_logps)
    inputs["sampling_per_token_logps"] = torch.where(known, behavior_logps, sampled_logps)
    if "importance_sampling_ratio" in inputs:  # vLLM: TRL's pi_old / sampler, over which replayed rows have their own
        replayed = inputs["replayed"].unsqueeze(1)
        inputs["importance_sampling_ratio"] = inputs["importance_sampling_ratio"].masked_fill(replayed, 1.0)
    if clip == "behavior":
        inputs["old_per_token_logps"] = torch.where(known, behavior_logps, old_logps)
        if loss_type != "vespo":
            hold_at_cap(inputs, per_token_logps, mask, cap=cap, level=level)
    elif loss_type == "vespo":
        # VESPO reshapes the sequence's ratio; this is its slot for rho
        inputs["importance_sampling_ratio"] = ratio * inputs.get("importance_sampling_ratio", 1.0)
    else:
        inputs["advantages"] = inputs["advantages"] * ratio
    return full_ratio


def hold_at_cap(
    inputs: dict[str, Any], per_token_logps: torch.Tensor, mask: torch.Tensor, *, cap: float, level: str
) -> None:
    """
    Make the ratio of the loss the constant `cap`, without gradient, where it is above: in replayed rows with a negative
    advantage, by token or, for sequences, by row. Replaces `old_per_token_logps` (B, T) and `replay_capped` of `inputs`. See
    [`correct_inputs`] for the arguments.
    """
    old_logps = inputs["old_per_token_logps"]
    ratio = behavior_ratio(per_token_logps.detach(), old_logps, mask, level=level)
    negative = inputs["replayed"].unsqueeze(1) & (inputs["advantages"] < 0)
    capped = negative & (ratio > cap)
    inputs["old_per_token_logps"] = torch.where(capped, per_token_logps - math.log(cap), old_logps)
    inputs["replay_capped"] = capped


def is_clipped(
    inputs: dict[str, Any], per_token_logps: torch.Tensor, epsilon: tuple[float, float], *, level: str, loss_type: str
) -> torch.Tensor:
    """
    Where the clip of TRL's loss, with its lower and upper `epsilon`, removes the gradient in a corrected micro-batch: bool, `(B, T)`
    or `(B, 1)`. Nowhere for CISPO, SAPO and VESPO. `per_token_logps` `(B, T)` are the loss's own, detached.
    """
    old_logps = inputs.get("old_per_token_logps")
    old_logps = per_token_logps if old_logps is None else old_logps.detach()
    ratio = behavior_ratio(per_token_logps, old_logps, token_mask(inputs), level=level)
    if loss_type in ("cispo", "sapo", "vespo"):
        return torch.zeros_like(ratio, dtype=torch.bool)
    advantages: torch.Tensor = inputs["advantages"]
    low, high = 1 - epsilon[0], 1 + epsilon[1]
    return ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))


def ratio_statistics(ratio: torch.Tensor, clipped: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """
    Sums over the tokens (or sequences) of replayed rows: count, sum and sum of squares of `ratio`, and sum of `clipped` (bool),
    `(4,)`. Both are `(B, T)` or `(B, 1)`.
    """
    chosen = inputs["replayed"].unsqueeze(1).expand_as(ratio)
    if ratio.size(1) > 1:
        chosen = chosen & token_mask(inputs).bool()
    values = ratio[chosen].float()
    count = values.new_tensor(float(values.numel()))
    return torch.stack([count, values.sum(), (values**2).sum(), clipped.expand_as(ratio)[chosen].float().sum()])


def summarize(gathered: torch.Tensor) -> dict[str, float]:
    r"""
    The metrics of a micro-batch from all processes' [`ratio_statistics`]. NaN, which TRL leaves out, if there are no tokens.

    - `replay/ess`: effective sample size of the ratios w as a share, \((\sum w)^2 / (n \sum w^2)\): 1 where all are equal,
      1/n where one outweighs all others;
    - `replay/clipped_share`: whose gradient the clip removes.
    """
    count, total, squares, clipped = gathered.reshape(-1, 4).cpu().double().sum(0).tolist()  # MPS has no float64
    return {
        "replay/ess": total**2 / (count * squares) if squares else math.nan,
        "replay/clipped_share": clipped / count if count else math.nan,
    }


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether a model has dropout in training, as a module or as the attribute of attention that calls a function."""
    modules = list(model.modules())
    layers = [module.p for module in modules if isinstance(module, torch.nn.modules.dropout._DropoutNd)]
    attention = [getattr(module, "attention_dropout", 0.0) for module in modules]
    return any(isinstance(p, float) and p > 0 for p in [*layers, *attention])
