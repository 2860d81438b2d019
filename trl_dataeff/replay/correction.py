r"""
The correction of the loss for rollouts of an earlier policy.

With \(\pi_\theta\) the policy, \(\pi_{old}\) the policy at the start of the generation batch and \(\pi_b\) the one
that sampled the rollout, \(w = \pi_\theta / \pi_{old}\) and \(\rho = \pi_{old} / \pi_b > 0\):

    rho min(w A, clip(w, 1 - eps, 1 + eps) A) = min(rho w A, clip(rho w, rho (1 - eps), rho (1 + eps)) A)

so the objective with the clip centred on \(\pi_{old}\) (`"proximal"`) is TRL's own loss with advantages multiplied by
\(\rho\), whatever the loss type. The objective as printed in arXiv 2506.05316, clip(pi_theta / pi_b, 1 - eps, 1 + eps)
(`"behavior"`), is TRL's own loss with \(\pi_b\) in the place of \(\pi_{old}\).

The cap: the clip bounds \(r = \pi_\theta / \pi_b\) from above only where A > 0. Where A < 0, the objective with a cap
c is that of dual-clip PPO (Ye et al. 2020, arXiv 1912.09729): max(min(r A, clip(r) A), c A), whose gradient is 0
beyond c. It is TRL's own loss with \(\pi_\theta / c\), gradient included, in the place of \(\pi_{old}\)
([`apply_dual_clip`]): the ratio is then the constant c, for every loss type, and only for rows that an earlier policy
sampled. CISPO keeps its gradient, with the weight c. VESPO's weight of a sequence vanishes by itself as the ratio
grows, and needs no cap. With the clip `"proximal"` the cap truncates \(\rho\).

A log-probability that is not known is NaN, and its ratio is 1: a row that was generated for this batch is all NaN.

The KL term: with `use_bias_correction_kl` TRL weighs it by \(\pi_\theta / \pi_{old}\). For a rollout of an earlier
policy the weight has to be \(\pi_\theta / \pi_b\). The clip `"behavior"` makes it so; with `"proximal"` that option is
rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from trl import GRPOTrainer

from trl_dataeff.compact.exact import token_mask
from trl_dataeff.compact.sampler import SamplerRatio, sampling_metrics
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.replay.logprobs import (
    STALE,
    ExclusionRecorder,
    GroupInBatch,
    LogprobRecorder,
    behavior_tensors,
    exclude_masked,
)
from trl_dataeff.rollouts.distributed import Processes


UNCLIPPED_LOSSES = ("cispo", "sapo", "vespo")


class LossOptions(NamedTuple):
    """
    TRL's options on which the correction of a loss depends.

    Attributes:
        loss_type: TRL's `loss_type`.
        level: TRL's `importance_sampling_level`.
        epsilon: TRL's lower and upper `epsilon`.
    """

    loss_type: str
    level: str
    epsilon: tuple[float, float]

    @classmethod
    def of(cls, trainer: GRPOTrainer) -> LossOptions:
        """Those of a trainer now; a callback may change them."""
        return cls(trainer.loss_type, trainer.importance_sampling_level, (trainer.epsilon_low, trainer.epsilon_high))


class LossCorrection:
    """
    Corrects TRL's loss of a micro-batch when the loss has its log-probs, before it reads its advantages.

    Args:
        clip (`str`): `replay_clip`.
        cap (`float`): `replay_ratio_cap`, infinite without one.
        processes ([`Processes`]): of the run.
        sampler_ratio ([`SamplerRatio`], *optional*): TRL's importance-sampling ratio, with vLLM.
        replays (`bool`, *optional*, defaults to `False`): whether groups are stored, and need log-probs; without it,
            metrics of replay are left out.
    """

    def __init__(
        self,
        *,
        clip: str,
        cap: float,
        processes: Processes,
        sampler_ratio: SamplerRatio | None = None,
        replays: bool = False,
    ):
        self.clip = clip
        self.cap = cap
        self.processes = processes
        self.sampler_ratio = sampler_ratio
        self.replays = replays
        self.begin()

    @classmethod
    def of(
        cls,
        trainer: GRPOTrainer,
        config: DataEfficientGRPOConfig,
        processes: Processes,
        *,
        replays: bool,
        max_rounds: int,
    ) -> LossCorrection:
        """
        The correction of a trainer's loss.

        Args:
            trainer ([`~trl.GRPOTrainer`]): whose loss it is.
            config ([`DataEfficientGRPOConfig`]): of the trainer.
            processes ([`Processes`]): of the run.
            replays (`bool`): whether groups are replayed.
            max_rounds (`int`): rounds of rollouts per generation batch; above 1, groups may be left over.

        Raises:
            `ValueError`: the weight of the KL term cannot be corrected.
        """
        reuses = replays or max_rounds > 1
        weighs_kl_term = trainer.beta != 0.0 and config.use_bias_correction_kl
        if reuses and config.replay_clip == "proximal" and weighs_kl_term:
            raise ValueError(
                f"`replay_clip='proximal'` cannot correct the KL term (`beta={trainer.beta}`) with "
                "`use_bias_correction_kl=True`. Use `replay_clip='behavior'`, or `use_bias_correction_kl=False`."
            )
        return cls(
            clip=config.replay_clip,
            cap=math.inf if config.replay_ratio_cap is None else config.replay_ratio_cap,
            processes=processes,
            sampler_ratio=SamplerRatio.of(trainer),
            replays=replays,
        )

    def begin(self) -> None:
        """Begin a run: rows of an earlier one that was interrupted are not waited for."""
        self.recorder = LogprobRecorder()
        self.exclusions = ExclusionRecorder()
        self._awaits_logps = False  # whether the loss has yet to pass its log-probs of the generation batch

    def prepare(
        self,
        batch: dict[str, Any],
        groups: Sequence[GroupInBatch],
        *,
        any_stale: bool,
        least_advantage: float,
    ) -> dict[str, float]:
        """
        Put what the loss needs into TRL's batch, in place.

        Args:
            batch (`dict`): TRL's batch.
            groups (`Sequence[GroupInBatch]`): this process's groups.
            any_stale (`bool`): whether any process has groups of an earlier policy, since collectives follow.
            least_advantage (`float`): advantages up to this size are 0, but for rounding, and may never meet the loss.

        Returns:
            `dict[str, float]`: metrics that replace TRL's over all rows.
        """
        if self.sampler_ratio is not None and self.sampler_ratio.masks_sequences:
            exclude_masked(groups, batch)
            loss_computes_ratio = "importance_sampling_ratio" not in batch
            if loss_computes_ratio and self.replays:
                self.exclusions.expect(groups, batch)
        metrics = {}
        if any_stale:
            batch.update(behavior_tensors(groups, batch["completion_ids"]))
            # A row that had no gradient when it was new has no log-probs. It gets no gradient now either, even if a
            # callback has changed the reward weights since
            is_unknown = batch[STALE] & batch["behavior_per_token_logps"].isnan().all(1)
            batch["advantages"][is_unknown] = 0.0
            metrics = sampling_metrics(batch, self.processes.gather, is_stale=batch[STALE])
        if self.replays:
            self.recorder.expect(groups, batch, least_advantage=least_advantage)
        self._awaits_logps = any_stale or "batch_row" in batch
        return metrics

    def check_applied(self) -> None:
        """Raise a `RuntimeError` before an optimizer step whose loss has not passed its log-probs to [`apply`]."""
        if self._awaits_logps:
            raise RuntimeError(
                "Replayed rollouts would be trained on without their correction: the loss did not call "
                "`DataEfficientGRPOTrainer._compute_loss`, or got no log-probs from "
                "`_get_per_token_logps_and_entropies`. Call `super()` there, or set `replay='off'` and "
                "`max_rollout_rounds=1`."
            )

    def awaits_logps_of(self, inputs: Mapping[str, Any]) -> bool:
        """Whether [`apply`] has to be called for a micro-batch."""
        return STALE in inputs or "batch_row" in inputs

    def rewrites(self, inputs: Mapping[str, Any]) -> bool:
        """Whether [`apply`] changes values of a micro-batch."""
        return STALE in inputs

    def apply(
        self, values: dict[str, Any], logps: torch.Tensor, options: LossOptions, *, has_new_ratio: bool
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """
        Record and correct a micro-batch, once the loss has its log-probs.

        Args:
            values (`dict`): the micro-batch.
            logps (`torch.Tensor` of shape `(B, T)`): with gradient.
            options ([`LossOptions`]): of the loss.
            has_new_ratio (`bool`): whether TRL's importance-sampling ratio was computed in this loss.

        Returns:
            `tuple`: the micro-batch for the loss, and metrics of the ratio, if there are stale rows on a process.
        """
        self._awaits_logps = False
        if "batch_row" in values:
            self.recorder.record(values["batch_row"], logps.detach())
            if has_new_ratio and self.sampler_ratio is not None and self.sampler_ratio.masks_sequences:
                self.exclusions.record(values["batch_row"], values["importance_sampling_ratio"] == 0)
        if STALE not in values:
            return values, {}
        correction = correct(
            values, logps, clip=self.clip, cap=self.cap, level=options.level, loss_type=options.loss_type
        )
        values = {**values, **correction.values}
        if not self.replays:  # stale rows are leftover ones: what is logged is about replay
            return values, {}
        clipped = is_clipped(values, logps.detach(), options.epsilon, level=options.level, loss_type=options.loss_type)
        if options.loss_type != "cispo":  # whose gradient stays
            clipped = clipped | correction.capped
        statistics = ratio_statistics(correction.ratio, clipped, values)
        return values, summarize(self.processes.gather(statistics))


class Correction(NamedTuple):
    """
    What corrects a micro-batch.

    Attributes:
        values: values of the micro-batch that take the place of its own, by key.
        ratio: pi_old / pi_behavior, not truncated, `(B, T)` or, for sequences, `(B, 1)`.
        capped: where the cap holds the ratio of the loss, bool, of the same shape.
    """

    values: dict[str, torch.Tensor]
    ratio: torch.Tensor
    capped: torch.Tensor


def correct(
    inputs: Mapping[str, Any], per_token_logps: torch.Tensor, *, clip: str, cap: float, level: str, loss_type: str
) -> Correction:
    """
    The correction of a micro-batch of TRL's loss, once the loss has its log-probs.

    Args:
        inputs (`Mapping`): the micro-batch, with `advantages` (B,), `behavior_per_token_logps` (B, T), `STALE` (B,),
            and `old_per_token_logps` (B, T) where TRL has it.
        per_token_logps (`torch.Tensor` of shape `(B, T)`): the loss's own log-probs, with gradient. Where generation
            and optimization are aligned they are those of the policy at the start of the generation batch.
        clip (`str`): `"proximal"` or `"behavior"`.
        cap (`float`): bound of the ratio: of pi_old / pi_behavior for `"proximal"`, and of pi_theta / pi_behavior
            where the advantage is negative for `"behavior"`.
        level (`str`): see [`behavior_ratio`].
        loss_type (`str`): TRL's loss type.
    """
    if loss_type == "vespo":
        level = "token"  # it sums the log ratios over the sequence itself
    mask = token_mask(inputs)
    stale = inputs[STALE].unsqueeze(1)  # (B, 1)
    advantages = inputs["advantages"].view(len(mask), -1)  # (B, 1); (B, T) where a subclass gives them by token
    behavior_logps = inputs["behavior_per_token_logps"]
    is_known = ~torch.isnan(behavior_logps)
    old_logps = inputs.get("old_per_token_logps")
    if old_logps is None:
        old_logps = per_token_logps.detach()
    ratio = behavior_ratio(old_logps, behavior_logps, mask, level=level)

    values = {"advantages": advantages}
    # The off-policy sequence mask measures the divergence from the policy that sampled
    sampling_logps = inputs.get("sampling_per_token_logps", old_logps)
    values["sampling_per_token_logps"] = torch.where(is_known, behavior_logps, sampling_logps)
    trls_ratio = inputs.get("importance_sampling_ratio")
    if trls_ratio is not None:  # vLLM: pi_old / sampler, in the place of which stale rows have their own
        trls_ratio = trls_ratio.masked_fill(stale, 1.0)
        values["importance_sampling_ratio"] = trls_ratio

    capped = torch.zeros_like(ratio, dtype=torch.bool)
    if clip == "behavior":
        behavior_or_old = torch.where(is_known, behavior_logps, old_logps)
        if loss_type != "vespo":
            may_be_capped = stale & (advantages < 0)
            behavior_or_old, capped = apply_dual_clip(
                behavior_or_old, per_token_logps, mask, may_be_capped, cap=cap, level=level
            )
        values["old_per_token_logps"] = behavior_or_old
    else:
        truncated = ratio.clamp(max=cap)
        if loss_type != "vespo":
            values["advantages"] = advantages * truncated
        elif trls_ratio is None:  # VESPO reshapes the sequence's ratio; this is its slot for rho
            values["importance_sampling_ratio"] = truncated
        else:
            values["importance_sampling_ratio"] = truncated * trls_ratio
    return Correction(values, ratio, capped)


def behavior_ratio(
    old_logps: torch.Tensor, behavior_logps: torch.Tensor, mask: torch.Tensor, *, level: str
) -> torch.Tensor:
    r"""
    \(\pi_{old} / \pi_b\), not truncated.

    Args:
        old_logps (`torch.Tensor` of shape `(B, T)`): log-probs under the policy at the start of the generation batch.
        behavior_logps (`torch.Tensor` of shape `(B, T)`): log-probs under the policy that sampled; NaN: ratio 1.
        mask (`torch.Tensor` of shape `(B, T)`): 1 for the tokens that are trained on.
        level (`str`): `"token"`, or `"sequence"` for the geometric mean over a completion's tokens (GSPO).

    Returns:
        `torch.Tensor`: `(B, T)` for tokens, 1 where `mask` is 0; `(B, 1)` for sequences.
    """
    log_ratio = torch.nan_to_num(old_logps - behavior_logps, nan=0.0) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def apply_dual_clip(
    old_logps: torch.Tensor,
    per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    may_be_capped: torch.Tensor,
    *,
    cap: float,
    level: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Make the ratio of the loss the constant `cap`, without gradient, where it is above.

    Args:
        old_logps (`torch.Tensor` of shape `(B, T)`): log-probs by which the loss divides.
        per_token_logps (`torch.Tensor` of shape `(B, T)`): the loss's own, with gradient.
        mask (`torch.Tensor` of shape `(B, T)`): 1 for the tokens that are trained on.
        may_be_capped (`torch.Tensor` of shape `(B, 1)` or `(B, T)`): stale rows with a negative advantage, bool.
        cap (`float`): the bound of the ratio.
        level (`str`): see [`behavior_ratio`]: the cap is one of tokens, or of rows.

    Returns:
        The log-probs `(B, T)` to divide by, and where the cap holds the ratio, bool, `(B, T)` or `(B, 1)`.
    """
    ratio = behavior_ratio(per_token_logps.detach(), old_logps, mask, level=level)
    capped = may_be_capped & (ratio > cap)
    return torch.where(capped, per_token_logps - math.log(cap), old_logps), capped


def is_clipped(
    inputs: Mapping[str, Any],
    per_token_logps: torch.Tensor,
    epsilon: tuple[float, float],
    *,
    level: str,
    loss_type: str,
) -> torch.Tensor:
    """
    Where the clip of TRL's loss removes the gradient in a corrected micro-batch. Nowhere for CISPO, SAPO and VESPO.

    Args:
        inputs (`Mapping`): the corrected micro-batch.
        per_token_logps (`torch.Tensor` of shape `(B, T)`): the loss's own, detached.
        epsilon (`tuple[float, float]`): TRL's lower and upper `epsilon`.
        level (`str`): see [`behavior_ratio`].
        loss_type (`str`): TRL's loss type.

    Returns:
        `torch.Tensor`: bool, `(B, T)` or `(B, 1)`.
    """
    old_logps = inputs.get("old_per_token_logps")
    old_logps = per_token_logps if old_logps is None else old_logps.detach()
    ratio = behavior_ratio(per_token_logps, old_logps, token_mask(inputs), level=level)
    if loss_type in UNCLIPPED_LOSSES:
        return torch.zeros_like(ratio, dtype=torch.bool)
    advantages: torch.Tensor = inputs["advantages"]
    is_low = (ratio < 1 - epsilon[0]) & (advantages < 0)
    is_high = (ratio > 1 + epsilon[1]) & (advantages > 0)
    return is_low | is_high


# Metrics


def ratio_statistics(ratio: torch.Tensor, clipped: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    """
    Sums over the tokens (or sequences) of stale rows.

    Args:
        ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): see [`behavior_ratio`].
        clipped (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): bool, those without a gradient.
        inputs (`Mapping`): the micro-batch.

    Returns:
        `torch.Tensor` of shape `(4,)`: count, sum and sum of squares of the ratio, and number of clipped ones.
    """
    chosen = inputs[STALE].unsqueeze(1).expand_as(ratio)
    if ratio.size(1) > 1:
        chosen = chosen & token_mask(inputs).bool()
    values = ratio[chosen].float()
    count = values.new_tensor(float(values.numel()))
    num_clipped = clipped.expand_as(ratio)[chosen].float().sum()
    return torch.stack([count, values.sum(), (values**2).sum(), num_clipped])


def summarize(gathered: torch.Tensor) -> dict[str, float]:
    r"""
    The metrics of a micro-batch from all processes' [`ratio_statistics`]. NaN, which TRL leaves out, if there are no
    tokens.

    Args:
        gathered (`torch.Tensor`): the statistics of all processes, one after the other, `(processes * 4,)`.

    Returns:
        `dict[str, float]`:

        - `replay/ess`: effective sample size of the ratios w as a share, \((\sum w)^2 / (n \sum w^2)\): 1 where all
          are equal, 1/n where one outweighs all others;
        - `replay/clipped_share`: share of the tokens (or sequences) whose gradient the clip removes.
    """
    by_process = gathered.reshape(-1, 4).cpu().double()  # on the CPU, because MPS has no float64
    count, total, squares, clipped = by_process.sum(0).tolist()
    return {
        "replay/ess": total**2 / (count * squares) if squares else math.nan,
        "replay/clipped_share": clipped / count if count else math.nan,
    }
