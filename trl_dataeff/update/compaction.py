"""The update computes what has a gradient, and that once: rows whose advantage is exactly 0, padding, and further
rows of a prompt's computation are left out of the forward and backward pass of TRL's micro-batches. This changes
rounding alone, once the loss is divided by the rows or tokens of the whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_dataeff.compat import has_fused_head
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.update.dealing import Deal, Limits, deal_rows
from trl_dataeff.update.padding import RowLengths, rows_of
from trl_dataeff.update.parts import Parts
from trl_dataeff.update.prompts import SharedPrompts, can_share_prompts
from trl_dataeff.update.rounding import tolerance_of


logger = logging.get_logger(__name__)
#: TRL's loss types, by what they average over: the rows or the tokens of a micro-batch, or `num_items_in_batch`
OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
OVER_TOKENS = ("bnpo",)
OVER_BATCH = ("cispo", "dapo", "vespo")
WORTH_MENTIONING = 0.1  # share of the update's tokens
ENOUGH_TOKENS = 64  # whose log-probs were compared, for a lasting verdict on a part
CLEAR = 10.0  # times the tolerance: a difference that needs no further evidence
# Keys of a micro-batch
FACTOR = "skip_factor"  # factor on its loss
FIRST_ROWS = "shared_first_rows"  # see `SharedPrompts`
PROMPT_OF_ROW = "shared_prompt_of_row"
WEIGHT = "metric_weight"  # of its means over tokens, among the micro-batches of an optimizer step
#: TRL's metrics of the loss that are means over the tokens of a micro-batch
TOKEN_MEANS = ("entropy", "kl")
#: TRL's metrics that are means over tokens with `importance_sampling_level="token"` only
TOKEN_MEANS_OF_RATIOS = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)


class LogprobsOf(Protocol):
    """Gives the log-probs `(rows, T)` of a micro-batch under the policy, without gradient."""

    def __call__(
        self, batch: dict[str, Any], /, *, scores_completions: bool = False, rounds_otherwise: bool = False
    ) -> torch.Tensor:
        """
        Args:
            batch (`dict`): the micro-batch.
            scores_completions (`bool`, *optional*, defaults to `False`): whether prompt tokens get no scores.
            rounds_otherwise (`bool`, *optional*, defaults to `False`): whether it is computed with other rounding, see
                [`embeddings_rounded_otherwise`]. Not together with `scores_completions`.
        """


# What is exact


def exact_parts(
    trainer: GRPOTrainer, model: torch.nn.Module, *, has_dropout: bool, gradient_checkpointing: bool
) -> Parts:
    """What the update may leave out in a trainer's loss, by what is known of the loss and the model. Whether the
    model computes the same is checked as well, at the first update (see [`UpdateCompactor`]).

    Args:
        trainer ([`~trl.GRPOTrainer`]): whose loss it is.
        model (`torch.nn.Module`): the policy, without PEFT's or accelerate's wrapping.
        has_dropout (`bool`): whether the policy has dropout.
        gradient_checkpointing (`bool`): whether its layers are computed again in the backward pass.
    """
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    splits_sequences = parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)
    # New shapes recompile a compiled model; sequences that are split over processes have equal widths on all of them
    keeps_widths = trainer.args.torch_compile or splits_sequences or trainer._is_vlm
    cuts_columns = not (keeps_widths or positions_depend_on_width(model))
    # Sharded models need equally many passes of each layer on every process
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    is_known = isinstance(model, PreTrainedModel) and has_fused_head()
    scores_completions = is_known and not (keeps_widths or is_sharded)
    # Gradient checkpointing excludes the cache. The check would not see that, because it computes without gradient.
    # The loss of a router counts the tokens of a single pass
    excludes_sharing = has_dropout or gradient_checkpointing or trainer.aux_loss_enabled or _adapts_whole_rows(trainer)
    return Parts(
        zero_rows=can_skip_rows(trainer),
        exchange=can_exchange_rows(trainer),
        left_padding=cuts_columns,
        right_padding=cuts_columns,
        shared_prompts=scores_completions and cuts_columns and not excludes_sharing and can_share_prompts(model),
        prompt_scores=scores_completions,
    )


def positions_depend_on_width(model: torch.nn.Module) -> bool:
    """
    Whether the frequencies of a model's rotary positions depend on the width of what it computes: those of
    Transformers' `"dynamic"` and `"longrope"` do, beyond the length of its pretraining. The check may miss it, as
    the first batches may be short.
    """
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)
        if isinstance(rope_types, str):
            rope_types = {"": rope_types}
        if not isinstance(rope_types, Mapping):  # by type of layer
            continue
        if any("dynamic" in rope_type or rope_type == "longrope" for rope_type in rope_types.values()):
            return True
    return False


def _adapts_whole_rows(trainer: GRPOTrainer) -> bool:
    """Whether an adapter of PEFT works on whole rows: on learned tokens before each prompt, which the model gets as
    embeddings or as a cache, or from a place in the row on (activated LoRA).
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(policy):
        return False
    for config in policy.peft_config.values():
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
            return True
    return False


def uses_checkpointing(trainer: GRPOTrainer, model: torch.nn.Module) -> bool:
    """Whether layers are computed again in the backward pass, by a trainer's option or by the model's own."""
    of_model = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return trainer.args.gradient_checkpointing or of_model


def can_skip_rows(trainer: GRPOTrainer) -> bool:
    """Whether rows with an advantage of 0 have no gradient in a trainer's loss, so that skipping them is exact."""
    has_kl_term = trainer.beta != 0.0
    return _averages_as_known(trainer) and not has_kl_term


def can_exchange_rows(trainer: GRPOTrainer) -> bool:
    """Whether the gradient of an optimizer step does not depend on which rows share a micro-batch."""
    return _averages_as_known(trainer) and trainer.loss_type not in OVER_TOKENS


def _averages_as_known(trainer: GRPOTrainer) -> bool:
    """Whether a trainer's loss is a mean of losses of rows or tokens, without terms of another kind."""
    known_loss = trainer.loss_type in OVER_ROWS + OVER_TOKENS + OVER_BATCH
    router_counts_rows = trainer.aux_loss_enabled  # of a mixture of experts
    selects_tokens = trainer.top_entropy_quantile != 1.0
    return known_loss and not (trainer._entropy_bonus_enabled or router_counts_rows or selects_tokens)


def has_gradient(batch: Mapping[str, Any]) -> torch.Tensor:
    """Rows of a batch whose advantage is not 0, bool `(rows,)`."""
    advantages: torch.Tensor = batch["advantages"]  # (rows,), or (rows, T) where a subclass gives them by token
    return (advantages != 0).view(len(advantages), -1).any(1)


def token_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """1 for the tokens of a batch that are trained on, `(rows, T)`."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


# Micro-batches


@dataclass(frozen=True)
class Compacted:
    """
    The micro-batches of a generation batch as the update computes them.

    Attributes:
        batches: with the factor on the loss of each under `FACTOR`, the weight of its metrics under `WEIGHT`, and its
            [`SharedPrompts`] under `FIRST_ROWS` and `PROMPT_OF_ROW` where prompts are shared.
        tokens: tokens that a pass over them computes, of all processes.
        tokens_of_trl: tokens that TRL's pass would compute.
    """

    batches: list[dict[str, Any]]
    tokens: int
    tokens_of_trl: int


class Evidence(NamedTuple):
    """What tells whether a part changes log-probs by more than rounding explains: sums over tokens, of all processes.

    Attributes:
        difference: absolute differences of log-probs that the part makes.
        rounding: those that other rounding makes.
        tokens: how many were compared.
    """

    difference: float
    rounding: float
    tokens: float

    def plus(self, other: Evidence) -> Evidence:
        """The evidence of both."""
        return Evidence(self.difference + other.difference, self.rounding + other.rounding, self.tokens + other.tokens)


class UpdateCompactor:
    """Leaves out of the micro-batches of a generation batch what does not change the gradient. Each micro-batch has at
    least one row. On several processes it has the same number of rows on each, because TRL gathers values by row;
    their widths may differ.

    Whether a model's log-probs depend on padding, or on whether a prompt is computed with its completions, is checked
    at the first update in which it matters: one micro-batch is computed both ways, without gradient, and once more to
    see what rounding does to it. What changes them by more than rounding explains is switched off, with a warning.
    While too few tokens were compared, the next update is checked as well.

    Args:
        accumulated (`int`): micro-batches of an optimizer step.
        processes ([`Processes`]): of the run.
        multiple (`int`, *optional*): TRL's `pad_to_multiple_of`.
        computed_in (`torch.dtype`, *optional*, defaults to `torch.float32`): the type in which the policy is computed.
        model_name (`str`, *optional*): the model's class, for the warning.
    """

    def __init__(
        self,
        accumulated: int,
        processes: Processes,
        *,
        multiple: int | None = None,
        computed_in: torch.dtype = torch.float32,
        model_name: str = "the model",
    ):
        self.kept = Parts(*[True] * len(fields(Parts)))  # but for what a check has switched off
        self.accumulated = accumulated
        self.processes = processes
        self.multiple = multiple
        self.computed_in = computed_in
        self.model_name = model_name
        self._evidence: dict[str, Evidence] = {}  # on parts that are not checked yet
        self._unchecked = {"left_padding", "right_padding", "shared_prompts", "prompt_scores"}

    def compact(
        self,
        batches: Sequence[dict[str, Any]],
        parts: Parts,
        loss_type: str,
        logps_of: LogprobsOf | None = None,
    ) -> Compacted:
        """
        The micro-batches without what may be left out. A collective if there are several processes.

        Args:
            batches (`Sequence[dict]`): the micro-batches of a generation batch. If those of one process hold a list,
                as with images, all processes keep all of their rows, and nothing is cut.
            parts ([`Parts`]): what may be left out.
            loss_type (`str`): TRL's loss type.
            logps_of (`LogprobsOf`, *optional*): the policy's log-probs. Without it nothing is checked.
        """
        allowed = self.kept & parts
        holds_list = any(isinstance(value, list) for value in batches[0].values())
        if holds_list or "token_type_ids" in batches[0] or "mm_token_type_ids" in batches[0]:
            allowed = Parts(*[False] * len(fields(Parts)))
        joined = batches[0] if holds_list else join(batches)
        lengths = None if holds_list else RowLengths.of(joined)
        deals = self._deal(batches, joined, lengths, allowed)
        if logps_of is not None and self._unchecked:
            failed = self._check(joined, lengths, deals, allowed, logps_of)
            if failed:
                allowed = allowed.without(failed)
                deals = self._deal(batches, joined, lengths, allowed)
        if lengths is None:
            result = [{**batch, FACTOR: torch.ones((), dtype=torch.float32)} for batch in batches]
        else:
            result = [self._micro_batch(joined, lengths, deal, len(batches), loss_type) for deal in deals]
        widths = batches[0]["prompt_ids"].size(1) + batches[0]["completion_ids"].size(1)
        tokens_of_trl = sum(len(batch["advantages"]) for batch in batches) * widths
        tokens = tokens_of_trl if lengths is None else sum(deal.tokens for deal in deals)
        trained_tokens = [int(token_mask(batch).sum()) for batch in result]
        own = [tokens, tokens_of_trl, *trained_tokens]
        counted = torch.tensor([own], dtype=torch.int64, device=self.processes.device)
        tokens, tokens_of_trl, *trained_tokens = self.processes.gather(counted).sum(0).tolist()
        for batch, weight in zip(result, self._weights(trained_tokens), strict=True):
            batch[WEIGHT] = torch.tensor(weight, dtype=torch.float32)
        return Compacted(result, tokens, tokens_of_trl)

    def _weights(self, trained_tokens: Sequence[int]) -> list[float]:
        """
        Weights of the metrics of micro-batches, by the tokens of each that all processes train on. TRL logs the plain
        mean of the micro-batches' means over tokens. With these weights it is the mean over all tokens of an
        optimizer step, whichever micro-batch a row is in.
        """
        length = min(self.accumulated, len(trained_tokens))
        weights = []
        for start in range(0, len(trained_tokens), length):
            of_step = trained_tokens[start : start + length]
            mean = sum(of_step) / len(of_step)
            weights += [tokens / mean if mean else 1.0 for tokens in of_step]
        return weights

    def state_dict(self) -> dict[str, Any]:
        """What is not checked yet, and what was switched off, for JSON: a run that is resumed computes the same."""
        switched_off = [field.name for field in fields(Parts) if not getattr(self.kept, field.name)]
        evidence = {name: list(found) for name, found in self._evidence.items()}
        return {"unchecked": sorted(self._unchecked), "evidence": evidence, "switched_off": switched_off}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned."""
        self._unchecked = set(state["unchecked"])
        self._evidence = {name: Evidence(*found) for name, found in state["evidence"].items()}
        self.kept = self.kept.without(state["switched_off"])

    def checked(self, parts: Parts) -> Parts:
        """The parts of `parts` that passed the check, which computes a micro-batch both ways."""
        return (self.kept & parts).without(sorted(self._unchecked))

    def advise_on_checkpointing(self, batches: Sequence[dict[str, Any]], parts: Parts, compacted: Compacted) -> bool:
        """
        Say how much more would be left out without gradient checkpointing, if that is much. A collective.

        Args:
            batches (`Sequence[dict]`): TRL's micro-batches of a generation batch.
            parts ([`Parts`]): what could be left out then.
            compacted ([`Compacted`]): what is computed of these micro-batches with it.

        Returns:
            `bool`: whether these micro-batches tell. They do not where no rows with a gradient have the same prompt.
        """
        if not parts.shared_prompts:
            return True
        joined = join(batches)
        deals = self._deal(batches, joined, RowLengths.of(joined), self.kept & parts)
        own = sum(deal.tokens for deal in deals)
        counted = torch.tensor([own], dtype=torch.int64, device=self.processes.device)
        tokens = int(self.processes.gather(counted).sum())
        share = 1 - tokens / compacted.tokens
        if share >= WORTH_MENTIONING and self.processes.is_main:
            logger.warning(
                f"`gradient_checkpointing=False` would save a further {share:.0%} of the update's tokens: the prompt "
                "of a group could be computed once. It needs more memory for activations."
            )
        return tokens < compacted.tokens

    def _deal(
        self, batches: Sequence[dict[str, Any]], joined: dict[str, Any], lengths: RowLengths | None, parts: Parts
    ) -> list[Deal]:
        """The rows and the width of each micro-batch. A collective."""
        num_batches = len(batches)
        rows_per_batch = len(batches[0]["advantages"])
        # A generation batch lies within one optimizer step, or holds whole ones; else no rows are exchanged
        length = min(self.accumulated, num_batches)
        holds_steps = num_batches % length == 0 and self.accumulated % length == 0
        if not (parts.exchange and holds_steps):
            length = 1
            parts = parts.without(["exchange"])
        if lengths is None:
            needed = torch.ones(num_batches * rows_per_batch, dtype=torch.bool)
        elif parts.zero_rows:
            needed = has_gradient(joined).cpu()
        else:
            needed = torch.ones(len(joined["advantages"]), dtype=torch.bool)
        needed_by_segment = needed.view(-1, length * rows_per_batch)  # a segment: micro-batches that exchange rows
        counts = needed_by_segment.sum(1).to(self.processes.device)
        most = self.processes.gather(counts).view(-1, len(counts)).amax(0).clamp(min=length).tolist()
        if lengths is None:
            return []
        deals = []
        for segment, (is_needed, total) in enumerate(zip(needed_by_segment, most, strict=True)):
            start = segment * length * rows_per_batch
            rows = [start + row for row in torch.argsort(~is_needed, stable=True).tolist()]
            num_needed = int(is_needed.sum())
            # Other processes may need more rows: the shortest of those without a gradient complete them
            others = sorted(rows[num_needed:], key=lambda row: lengths.prompt[row] + lengths.completion[row])
            chosen = sorted([*rows[:num_needed], *others[: total - num_needed]])
            limits = None
            if self.processes.world_size == 1:
                starts = range(start, start + length * rows_per_batch, rows_per_batch)
                limits = Limits.of_trl(lengths, [range(first, first + rows_per_batch) for first in starts])
            deals += deal_rows(chosen, length, lengths, parts, multiple=self.multiple, limits=limits)
        return deals

    def _micro_batch(
        self, joined: dict[str, Any], lengths: RowLengths, deal: Deal, num_batches: int, loss_type: str
    ) -> dict[str, Any]:
        """A micro-batch as it was dealt, with the factor on its loss."""
        device = joined["advantages"].device
        result = rows_of(
            joined,
            torch.tensor(deal.rows, dtype=torch.int64, device=device),
            prompt_width=deal.prompt_width,
            completion_width=deal.completion_width,
        )
        if deal.shares:
            result.update(_shared_keys(deal, lengths, device))
        rows_per_batch = len(joined["advantages"]) // num_batches
        if loss_type in OVER_TOKENS:
            # Rows keep their micro-batch
            start = min(deal.rows) // rows_per_batch * rows_per_batch
            tokens_of_batch = token_mask(joined)[start : start + rows_per_batch].sum().clamp(min=1)
            result[FACTOR] = token_mask(result).sum().float() / tokens_of_batch
        elif loss_type in OVER_ROWS:
            result[FACTOR] = torch.tensor(len(deal.rows) / rows_per_batch, dtype=torch.float32, device=device)
        else:
            result[FACTOR] = torch.tensor(1.0, dtype=torch.float32, device=device)
        return result

    def _check(
        self,
        joined: dict[str, Any],
        lengths: RowLengths | None,
        deals: Sequence[Deal],
        parts: Parts,
        logps_of: LogprobsOf,
    ) -> list[str]:
        """
        Compute a micro-batch both ways for each part, and switch off what changes its log-probs. A collective.

        Returns:
            `list[str]`: the parts that this update may not leave out.
        """
        names = sorted(self._unchecked)
        own_matters = [_matters(name, deals, lengths, parts) for name in names]
        matters = torch.tensor(own_matters, dtype=torch.bool, device=self.processes.device)
        on_any = self.processes.gather(matters.unsqueeze(0)).any(0).tolist()
        checked = [name for name, is_on in zip(names, on_any, strict=True) if is_on]
        if not checked or lengths is None:
            return []
        own = [self._compare(name, joined, lengths, deals, parts, logps_of) for name in checked]
        of_processes = self.processes.gather(torch.stack(own).unsqueeze(0))  # (processes, checked, 3)
        sums = of_processes.sum(0).tolist()
        return [name for name, found in zip(checked, sums, strict=True) if not self._passes(name, Evidence(*found))]

    def _compare(
        self,
        name: str,
        joined: dict[str, Any],
        lengths: RowLengths,
        deals: Sequence[Deal],
        parts: Parts,
        logps_of: LogprobsOf,
    ) -> torch.Tensor:
        """This process's [`Evidence`] on a part, `(3,)`. Processes make equally many passes for it."""
        deal = max(deals, key=lambda deal: _shows_difference(name, deal, lengths))
        rows = torch.tensor(deal.rows, dtype=torch.int64, device=joined["advantages"].device)
        whole = rows_of(joined, rows)
        # Also where it is computed for another part
        expected = logps_of(whole)
        otherwise_rounded = logps_of(whole, rounds_otherwise=True)
        changed = whole
        if name == "left_padding":
            changed = rows_of(joined, rows, prompt_width=deal.prompt_width)
        elif name == "right_padding":
            changed = rows_of(joined, rows, completion_width=deal.completion_width)
        elif name == "shared_prompts" and deal.shares:
            changed = {**whole, **_shared_keys(deal, lengths, rows.device)}
        scores_completions = name in ("shared_prompts", "prompt_scores") and parts.prompt_scores
        found = logps_of(changed, scores_completions=scores_completions)
        is_token = whole["completion_mask"] != 0
        if _shows_difference(name, deal, lengths) == 0:
            is_token = torch.zeros_like(is_token)
        return _evidence_of(found, otherwise_rounded, expected, is_token)

    def _passes(self, name: str, found: Evidence) -> bool:
        """Whether this update may leave a part out, by all evidence so far. If that suffices, the verdict lasts."""
        evidence = self._evidence.get(name, Evidence(0.0, 0.0, 0.0)).plus(found)
        self._evidence[name] = evidence
        # Where all completions are masked, there is neither a gradient nor something to compare
        if evidence.tokens == 0:
            return True
        difference = evidence.difference / evidence.tokens
        tolerance = tolerance_of(evidence.rounding / evidence.tokens, self.computed_in)
        is_rounding = difference <= tolerance
        if evidence.tokens >= ENOUGH_TOKENS or difference > CLEAR * tolerance:
            self._unchecked.remove(name)
            del self._evidence[name]
            if not is_rounding:
                self._switch_off(name, difference, tolerance)
        return is_rounding

    def _switch_off(self, name: str, difference: float, tolerance: float) -> None:
        """Leave a part out no more, and say so."""
        self.kept = self.kept.without([name])
        if self.processes.is_main:
            logger.warning(
                f"`compact_update`: {_WORDS[name]} is switched off, because it changes the log-probs of "
                f"{self.model_name} by {difference:.2g} in the mean; up to {tolerance:.2g} counts as rounding. "
                "Training is exact."
            )


def _evidence_of(
    found: torch.Tensor, otherwise_rounded: torch.Tensor, expected: torch.Tensor, is_token: torch.Tensor
) -> torch.Tensor:
    """
    The numbers of an [`Evidence`], float32 `(3,)`. What is not a number counts as infinite.

    Args:
        found (`torch.Tensor`): log-probs `(rows, T)` with a part left out, or without their last columns.
        otherwise_rounded (`torch.Tensor`): those without it and with other rounding, `(rows, T)`.
        expected (`torch.Tensor`): those without it, `(rows, T)`.
        is_token (`torch.Tensor`): the tokens that are compared, bool `(rows, T)`.
    """
    width = found.size(1)
    is_token = is_token[:, :width]
    expected = expected[:, :width].float()
    difference = (found.float() - expected).abs()[is_token].sum()
    rounding = (otherwise_rounded[:, :width].float() - expected).abs()[is_token].sum()
    sums = torch.stack([difference, rounding, is_token.sum().float()])
    return sums.nan_to_num(nan=torch.inf, posinf=torch.inf)


_WORDS = {
    "left_padding": "leaving out padding of prompts",
    "right_padding": "leaving out padding of completions",
    "shared_prompts": "computing the prompt of a group once",
    "prompt_scores": "scoring completion tokens alone",
}


def _matters(name: str, deals: Sequence[Deal], lengths: RowLengths | None, parts: Parts) -> bool:
    """Whether a part changes what is computed of these micro-batches."""
    if lengths is None:
        return False
    if name == "left_padding":
        return any(deal.prompt_width < lengths.prompt_width for deal in deals)
    if name == "right_padding":
        return any(deal.completion_width < lengths.completion_width for deal in deals)
    if name == "shared_prompts":
        return any(deal.shares for deal in deals)
    return parts.prompt_scores


def _shows_difference(name: str, deal: Deal, lengths: RowLengths) -> int:
    """How much a part leaves out of a micro-batch, times the tokens whose log-probs would show a difference."""
    tokens = sum(lengths.completion[row] for row in deal.rows)
    if name == "left_padding":
        return (lengths.prompt_width - deal.prompt_width) * tokens
    if name == "right_padding":
        return (lengths.completion_width - deal.completion_width) * tokens
    if name == "shared_prompts":
        return tokens if deal.shares else 0
    return tokens


def _shared_keys(deal: Deal, lengths: RowLengths, device: torch.device) -> dict[str, torch.Tensor]:
    shared = SharedPrompts.of([lengths.prompt_number[row] for row in deal.rows], device)
    assert shared is not None
    return {FIRST_ROWS: shared.first_rows, PROMPT_OF_ROW: shared.prompt_of_row}


def shared_prompts_of(batch: Mapping[str, Any]) -> SharedPrompts | None:
    """The shared prompts of a micro-batch; `None` if it shares none."""
    if FIRST_ROWS not in batch:
        return None
    return SharedPrompts(batch[FIRST_ROWS], batch[PROMPT_OF_ROW])


def join(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Micro-batches joined along their rows."""
    joined = {}
    for key, value in batches[0].items():
        is_by_row = isinstance(value, torch.Tensor) and value.dim() > 0
        joined[key] = torch.cat([batch[key] for batch in batches]) if is_by_row else value
    return joined


# The pass for old log-probs


def rows_for_old_logps(
    rewards: np.ndarray, weights: torch.Tensor, group_size: int, processes: Processes
) -> torch.Tensor:
    """
    Rows of this process whose old log-probs count: all but those whose advantage will be 0. Each process makes the
    pass over as many rows.

    Args:
        rewards (`np.ndarray` of shape `(n, F)`): of all processes' completions, in the order of ranks, NaN where a
            function gave no score.
        weights (`torch.Tensor` of shape `(F,)`): weights of the reward functions, whose weighted sum is the reward.
        group_size (`int`): G, completions per group.
        processes ([`Processes`]): of the run.

    Returns:
        `torch.Tensor` of shape `(rows,)`, int64, in ascending order: at least one.
    """
    all_rewards = torch.from_numpy(rewards).to(processes.device)
    is_zero = zero_advantage(all_rewards, weights, group_size).view(processes.world_size, -1)
    size = max(int((~is_zero).sum(1).max()), 1)
    gradient_first_order = torch.argsort(is_zero[processes.rank], stable=True)
    return torch.sort(gradient_first_order[:size]).values


def zero_advantage(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    Completions whose advantage will be exactly 0 in TRL: those whose total reward is the mean of their group's, by the
    same operations.

    Args:
        rewards (`torch.Tensor` of shape `(n, F)`): NaN where a function gave no score.
        weights (`torch.Tensor` of shape `(F,)`): weights of the reward functions.
        group_size (`int`): G, which divides n.

    Returns:
        `torch.Tensor` of shape `(n,)`, bool: true also for completions that no function scored.
    """
    totals = (rewards * weights.to(rewards).unsqueeze(0)).nansum(dim=1)
    totals[rewards.isnan().all(dim=1)] = torch.nan
    means = totals.view(-1, group_size).nanmean(dim=1).repeat_interleave(group_size)
    has_advantage = (totals - means).abs() > 0  # false for NaN
    return ~has_advantage
