"""The state of a trainer's update: what was checked, and the generation batch that is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from transformers.utils import logging

from trl_dataeff.compact.check import Check, LogprobsOf
from trl_dataeff.compact.dealing import Deal
from trl_dataeff.compact.exact import Parts
from trl_dataeff.compact.micro_batches import MicroBatch, MicroBatchCompactor
from trl_dataeff.compact.present_batch import Circumstances, PresentBatch


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Found:
    """
    What a micro-batch of TRL's is computed as.

    Attributes:
        micro_batch: the compacted one; `None`: it is computed TRL's way.
        metrics: of the generation batch, if it was compacted now.
    """

    micro_batch: MicroBatch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class CompactUpdate:
    """
    Compacts the generation batches of a trainer, each when the loss gets the first micro-batch of it.

    Args:
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
        check ([`Check`]): compares the model's log-probs.
        multiple (`int`, *optional*): TRL's `pad_to_multiple_of`.

    Attributes:
        passes_by_length (`bool`): whether passes without gradient for log-probs are computed by length now.
        delays_next_pass (`bool`): whether the next of them waits until TRL's method has run.
    """

    def __init__(self, accelerator: Accelerator, check: Check, multiple: int | None = None):
        self.accelerator = accelerator
        self.check = check
        self.multiple = multiple
        self.compactor = MicroBatchCompactor(accelerator, check, multiple)
        self.passes_by_length = False
        self.delays_next_pass = False
        self._delayed: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._present: PresentBatch | None = None
        self._resumed: tuple[tuple[list[Deal], Parts], Circumstances] | None = None  # of a half-used batch
        self._advised_on_checkpointing = False
        self._met_loss = False  # whether our loss has got a micro-batch of this run
        self._warned: set[str] = set()

    # The generation batch

    def note(self, buffered: list[dict[str, Any]], trainer_name: str) -> None:
        """
        Note the micro-batches that TRL has made. Later calls with the same ones do nothing. Warns if no loss of the
        run has got one yet, though some had a gradient.
        """
        if self._present is not None and self._present.buffered is buffered:
            return
        has_gradient = self._present is not None and self._present.has_gradient
        if has_gradient and not self._met_loss:
            self._warn_once(
                f"`compact_update`: the loss of {trainer_name} does not call `CompactGRPOTrainer._compute_loss`, so "
                "that the update is TRL's. If a subclass overrides the loss, let it call `super()._compute_loss`."
            )
        self._present = PresentBatch(buffered)

    def micro_batch(
        self,
        inputs: Mapping[str, Any],
        parts_now: Callable[[], Parts],
        loss_type: str,
        accumulated: int,
        logps_of: LogprobsOf | None,
    ) -> Found:
        """
        What is computed in the place of one of TRL's micro-batches. A collective if there are several processes.

        Args:
            inputs (`Mapping`): what the loss gets.
            parts_now (`Callable`): what may be left out, by the loss and the model as they are now.
            loss_type (`str`): TRL's loss type.
            accumulated (`int`): micro-batches of an optimizer step.
            logps_of (`LogprobsOf`, *optional*): the policy's log-probs. Without it nothing is checked.
        """
        self._met_loss = True
        present = self._present
        if present is None:
            self._warn_of_other_micro_batches()
            return Found()
        place = present.place_of(inputs)
        is_known = place is not None
        position = present.next_position if place is None else place
        present.position = position
        metrics: dict[str, float] = {}
        if not present.is_within_segment(position):
            metrics = self._begin_segment(present, is_known, parts_now, loss_type, accumulated, logps_of)
        elif present.compacted is not None and not is_known:
            raise RuntimeError(
                "The loss got a micro-batch that was changed since TRL made it, after rows of it were exchanged with "
                "another micro-batch of the optimizer step. Let a subclass change all micro-batches of a step, or "
                "none, or set `compact_update=False`."
            )
        if present.compacted is None:
            return Found()
        return Found(present.compacted.micro_batches[position], metrics)

    def _begin_segment(
        self,
        present: PresentBatch,
        is_known: bool,
        parts_now: Callable[[], Parts],
        loss_type: str,
        accumulated: int,
        logps_of: LogprobsOf | None,
    ) -> dict[str, float]:
        """
        Decide how the next micro-batches are computed, up to the last that may exchange rows with them. Returns the
        metrics of the generation batch, if it is compacted now.
        """
        circumstances = Circumstances(parts_now(), loss_type, accumulated)
        changed = torch.tensor([not is_known], device=self.accelerator.device)
        if self.accelerator.gather(changed).any():
            self._warn_of_other_micro_batches()
            present.compacted = None
            present.circumstances = circumstances
            return {}
        if present.compacted is not None and present.circumstances == circumstances:
            return {}
        dealt = None
        if self._resumed is not None and self._resumed[1] == circumstances:
            dealt = self._resumed[0]
        self._resumed = None
        is_first = present.circumstances is None
        present.compacted = self.compactor.compact(
            present.buffered, circumstances.parts, loss_type, accumulated, logps_of, dealt
        )
        present.circumstances = circumstances
        if not is_first or dealt is not None:
            return {}
        tokens = present.compacted.tokens
        return {"update/tokens": tokens, "update/tokens_saved": 1 - tokens / present.compacted.tokens_of_trl}

    def advise_on_checkpointing(self, parts: Callable[[], Parts]) -> None:
        """
        Say once how much more would be left out without gradient checkpointing, if that is much. A collective.

        Args:
            parts (`Callable`): what could be left out then.
        """
        present = self._present
        if self._advised_on_checkpointing or present is None:
            return
        if present.compacted is None or present.circumstances is None:
            return
        self._advised_on_checkpointing = self.compactor.advise_on_checkpointing(
            present.buffered, parts(), present.circumstances.accumulated, present.compacted
        )

    def _warn_of_other_micro_batches(self) -> None:
        self._warn_once(
            "`compact_update`: the loss gets micro-batches that are not as TRL has made them, such as those that a "
            "subclass has changed before. Their update is TRL's."
        )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and self.accelerator.is_main_process:
            logger.warning(message)
        self._warned.add(message)

    # A pass for old log-probs that waits until TRL's method has run

    def delay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a pass, after `model`."""
        self.delays_next_pass = False
        self._delayed = (args, kwargs)

    def take_delayed_pass(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the pass that waits; `None` if none does."""
        self.delays_next_pass = False
        delayed = self._delayed
        self._delayed = None
        return delayed

    # State

    def begin_run(self) -> None:
        """Forget the generation batch of an earlier run."""
        self._present = None
        self._resumed = None
        self._met_loss = False

    def state_dict(self) -> dict[str, Any]:
        """What was checked, and how the present generation batch was dealt, as JSON values."""
        state: dict[str, Any] = {"check": self.check.state_dict(), "present": None}
        present = self._present
        if present is not None and present.compacted is not None and present.circumstances is not None:
            parts, loss_type, accumulated = present.circumstances
            state["present"] = {
                "deals": [asdict(deal) for deal in present.compacted.deals],
                "left_out": asdict(present.compacted.parts),
                "parts": asdict(parts),
                "loss_type": loss_type,
                "accumulated": accumulated,
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned. The next generation batch is that of the checkpoint."""
        self.check.load_state_dict(state["check"])
        saved = state["present"]
        if saved is None:
            return
        deals = [Deal(**deal) for deal in saved["deals"]]
        circumstances = Circumstances(Parts(**saved["parts"]), saved["loss_type"], saved["accumulated"])
        self._resumed = ((deals, Parts(**saved["left_out"])), circumstances)
