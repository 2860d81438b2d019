"""
Whether a model computes the same without what is left out: a micro-batch is computed both ways, at the first update in
which it matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from transformers.utils import logging

from trl_dataeff.compact.dealing import Deal
from trl_dataeff.compact.exact import Parts
from trl_dataeff.compact.padding import RowLengths, rows_of
from trl_dataeff.compact.prompts import SharedPrompts
from trl_dataeff.compact.rounding import tolerance_of


logger = logging.get_logger(__name__)
ENOUGH_TOKENS = 64  # whose log-probs were compared, for a lasting verdict on a part
CLEAR = 10.0  # times the tolerance: a difference that needs no further evidence
_CHECKED = ("left_padding", "prompt_scores", "right_padding", "shared_prompts")
_WORDS = {
    "left_padding": "leaving out padding of prompts",
    "right_padding": "leaving out padding of completions",
    "shared_prompts": "computing the prompt of a group once",
    "prompt_scores": "scoring completion tokens alone",
}


class LogprobsOf(Protocol):
    """Gives the log-probs `(rows, T)` of rows under the policy, without gradient."""

    def __call__(
        self,
        batch: dict[str, Any],
        /,
        *,
        scores_completions: bool = False,
        shared: SharedPrompts | None = None,
        rounds_otherwise: bool = False,
    ) -> torch.Tensor:
        """
        Args:
            batch (`dict`): the rows.
            scores_completions (`bool`, *optional*, defaults to `False`): whether prompt tokens get no scores.
            shared ([`SharedPrompts`], *optional*): with `scores_completions`, prompts that are computed once.
            rounds_otherwise (`bool`, *optional*, defaults to `False`): whether it is computed with other rounding, see
                [`embeddings_rounded_otherwise`]. Not together with `scores_completions`.
        """


class Evidence(NamedTuple):
    """
    What tells whether a part changes log-probs by more than rounding explains: sums over tokens, of all processes.

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


class Check:
    """
    Whether a model's log-probs depend on padding, or on whether a prompt is computed with its completions. One
    micro-batch is computed both ways, without gradient, and once more to see what rounding does to it. What changes
    log-probs by more than rounding explains is switched off, with a warning. While too few tokens were compared, the
    next update is checked as well.

    Args:
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
        computed_in (`torch.dtype`, *optional*, defaults to `torch.float32`): the type in which the policy is computed.
        model_name (`str`, *optional*): the model's class, for the warning.

    Attributes:
        kept ([`Parts`]): all parts but those that were switched off.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        computed_in: torch.dtype = torch.float32,
        model_name: str = "the model",
    ):
        self.kept = Parts.all()
        self.accelerator = accelerator
        self.computed_in = computed_in
        self.model_name = model_name
        self._evidence: dict[str, Evidence] = {}  # on parts that are not checked yet
        self._unchecked = set(_CHECKED)

    @property
    def is_due(self) -> bool:
        """Whether there are parts that are not checked yet."""
        return bool(self._unchecked)

    def passed(self, parts: Parts) -> Parts:
        """The parts of `parts` that were checked, and make no difference."""
        return (self.kept & parts).without(sorted(self._unchecked))

    def failed(
        self,
        joined: dict[str, Any],
        lengths: RowLengths | None,
        deals: Sequence[Deal],
        parts: Parts,
        logps_of: LogprobsOf,
    ) -> list[str]:
        """
        Compute a micro-batch both ways for each part that is not checked yet. A collective.

        Args:
            joined (`dict`): the rows of all micro-batches.
            lengths ([`RowLengths`], *optional*): their lengths; `None` if nothing is left out of them.
            deals (`Sequence[Deal]`): the micro-batches as they would be computed.
            parts ([`Parts`]): what these leave out.
            logps_of (`LogprobsOf`): the policy's log-probs.

        Returns:
            `list[str]`: the parts that this update may not leave out.
        """
        names = sorted(self._unchecked)
        own_matters = [_matters(name, deals, lengths, parts) for name in names]
        matters = torch.tensor(own_matters, dtype=torch.bool, device=self.accelerator.device)
        on_any = self.accelerator.gather(matters.unsqueeze(0)).any(0).tolist()
        checked = [name for name, is_on in zip(names, on_any, strict=True) if is_on]
        if not checked or lengths is None:
            return []
        own = [self._compare(name, joined, lengths, deals, parts, logps_of) for name in checked]
        of_processes = self.accelerator.gather(torch.stack(own).unsqueeze(0))  # (processes, checked, 3)
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
        shared = None
        if name == "left_padding":
            changed = rows_of(joined, rows, prompt_width=deal.prompt_width)
        elif name == "right_padding":
            changed = rows_of(joined, rows, completion_width=deal.completion_width)
        elif name == "shared_prompts" and deal.shares:
            shared = SharedPrompts.of([lengths.prompt_number[row] for row in deal.rows], rows.device)
        scores_completions = name in ("shared_prompts", "prompt_scores") and parts.prompt_scores
        found = logps_of(changed, scores_completions=scores_completions, shared=shared)
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
            self._unchecked.discard(name)
            del self._evidence[name]
            if not is_rounding:
                self._switch_off(name, difference, tolerance)
        return is_rounding

    def _switch_off(self, name: str, difference: float, tolerance: float) -> None:
        self.kept = self.kept.without([name])
        if name == "prompt_scores":  # without which no prompts are shared
            self._unchecked.discard("shared_prompts")
        if self.accelerator.is_main_process:
            logger.warning(
                f"`compact_update`: {_WORDS[name]} is switched off, because it changes the log-probs of "
                f"{self.model_name} by {difference:.2g} in the mean; up to {tolerance:.2g} counts as rounding. "
                "Training is exact."
            )

    def state_dict(self) -> dict[str, Any]:
        """What is not checked yet, and what was switched off, for JSON: a run that is resumed computes the same."""
        switched_off = [field.name for field in fields(Parts) if not getattr(self.kept, field.name)]
        evidence = {name: list(found) for name, found in self._evidence.items()}
        return {"unchecked": sorted(self._unchecked), "evidence": evidence, "switched_off": switched_off}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned."""
        self._unchecked = set(state["unchecked"])
        self._evidence = {name: Evidence(*found) for name, found in state["evidence"].items()}
        self.kept = Parts.all().without(state["switched_off"])


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
