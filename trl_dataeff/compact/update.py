"""The state of a trainer's update: what was checked, and the micro-batches that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from transformers.utils import logging

from trl_dataeff.compact.check import CHECKED, Check, Trial
from trl_dataeff.compact.exact import Parts
from trl_dataeff.compact.micro_batches import Compacted, MicroBatch, Rows, compact
from trl_dataeff.compact.padding import other_tensors
from trl_dataeff.compact.present_batch import PresentBatch


logger = logging.get_logger(__name__)
_WORDS = {
    "zero_rows": "rows without a gradient",
    "left_padding": "padding of prompts",
    "right_padding": "padding of completions",
    "shared_prompts": "repeated prompts",
    "prompt_scores": "logits of prompt tokens",
}
_BOTH_PADDINGS = (_WORDS["left_padding"], _WORDS["right_padding"])


class Situation(NamedTuple):
    """
    What decides how micro-batches are computed, beside their rows. A callback may change it between two steps.

    Attributes:
        parts: what may be left out by what is known of the trainer's loss and model.
        loss_type: TRL's loss type.
        has_kl_term: whether rows without an advantage have a gradient.
        least_advantage: advantages up to this size are 0, but for rounding.
        multiple: TRL's `pad_to_multiple_of`.
        model_seen: the modules of the model and how they compute: a number that changes with these.
    """

    parts: Parts
    loss_type: str
    has_kl_term: bool
    least_advantage: float
    multiple: int | None
    model_seen: int = 0


@dataclass
class _Segment:
    """
    Micro-batches that follow one another in an optimizer step, and that may have exchanged rows.

    Attributes:
        start: place of the first in the generation batch.
        length: how many there are.
        compacted: what is computed in their place; `None`: they are computed TRL's way.
        parts: what that leaves out.
        intended: what may be left out where it matters, unless a check fails.
        last: place of the last one that was computed.
    """

    start: int
    length: int
    compacted: Compacted | None
    parts: Parts
    intended: Parts
    last: int

    def continues_at(self, place: int, may_repeat: bool) -> bool:
        """Whether the micro-batch at this place is the next one, or, if that may be, the last one again."""
        places = (self.last, self.last + 1) if may_repeat else (self.last + 1,)
        return place in places and self.start <= place < self.start + self.length


@dataclass
class Counts:
    """
    What updates take: of an optimizer step, or of a run.

    Attributes:
        micro_batches: losses that were computed.
        tokens: tokens of them, with padding, of all processes.
        tokens_of_trl: tokens that TRL's would have.
        seconds: of their forward and backward passes, of this process.
        making_seconds: of generation, rewards and TRL's passes before, of this process.
    """

    micro_batches: int = 0
    tokens: int = 0
    tokens_of_trl: int = 0
    seconds: float = 0.0
    making_seconds: float = 0.0

    def add(self, other: Counts) -> None:
        """Count these as well."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class CompactUpdate:
    """
    Compacts the micro-batches of an optimizer step when the loss gets the first of them.

    Args:
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
        check ([`Check`]): compares gradients.

    Attributes:
        parts_of_passes ([`Parts`]): what passes without gradient for log-probs may leave out of the present generation
            batch, on all processes.
        passes_by_length (`bool`): whether these passes are computed by length now.
        delays_next_pass (`bool`): whether the next of them waits until TRL's method has run.
        step (`Counts`): of the present optimizer step.
        run (`Counts`): of the run so far, without the present step.
        has_learned (`bool`): whether an update of the run had a gradient.
        accumulated (`int` or `None`): micro-batches of the run's first optimizer step.
        keeps_micro_batches (`bool`): whether that number has changed, so that rows keep their micro-batch.
    """

    def __init__(self, accelerator: Accelerator, check: Check):
        self.accelerator = accelerator
        self.check = check
        self.parts_of_passes = Parts.none()
        self.passes_by_length = False
        self.delays_next_pass = False
        self.step = Counts()
        self.run = Counts()
        self.has_learned = False
        self.accumulated: int | None = None
        self.keeps_micro_batches = False
        self._delayed: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._present: PresentBatch | None = None
        self._segment: _Segment | None = None
        self._met_loss = False  # whether our loss has got a micro-batch of this run
        self._may_repeat = False  # whether the loss may ask for its last micro-batch again
        self._model_seen: int | None = None
        self._has_said_what = False
        self._said: set[str] = set()

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
            self.say_once(
                f"`compact_update`: the loss of {trainer_name} does not call `CompactGRPOTrainer._compute_loss`, so "
                "that the update is TRL's. If a subclass overrides the loss, let it call `super()._compute_loss`."
            )
        self._present = PresentBatch(buffered)
        self._segment = None

    def micro_batch(
        self, inputs: Mapping[str, Any], situation: Callable[[], Situation], remaining: int, trial: Trial
    ) -> MicroBatch | None:
        """
        What is computed in the place of one of TRL's micro-batches; `None`: it is computed TRL's way. A collective if
        there are several processes.

        Args:
            inputs (`Mapping`): what the loss gets.
            situation (`Callable`): what decides how it is computed.
            remaining (`int`): micro-batches of the optimizer step that are not computed yet, with this one.
            trial ([`Trial`]): computes both ways.
        """
        self._met_loss = True
        self.step.micro_batches += 1
        present = self._present
        if present is None:
            self._say_of_other_micro_batches()
            return None
        place = present.place_of(inputs)
        segment = self._segment
        may_repeat = self._may_repeat
        self._may_repeat = True
        if segment is not None and place is not None and segment.continues_at(place, may_repeat):
            segment.last = place
        elif segment is not None and segment.parts.exchange and segment.last < segment.start + segment.length - 1:
            raise RuntimeError(
                "The loss got a micro-batch that was changed since TRL made it, or another one than the next, after "
                "rows of it were exchanged with another micro-batch of the optimizer step. Let a subclass change all "
                "micro-batches of a step, or none, or switch the faster update off: `compact_update=False`, or TRL's "
                "own trainer in the place of `CompactGRPOTrainer`."
            )
        else:
            segment = self._begin_segment(present, inputs, place, situation(), remaining, trial)
        if segment.compacted is None:
            return None
        return segment.compacted.micro_batches[segment.last - segment.start]

    def _begin_segment(
        self,
        present: PresentBatch,
        inputs: Mapping[str, Any],
        place: int | None,
        situation: Situation,
        remaining: int,
        trial: Trial,
    ) -> _Segment:
        """Decide how the next micro-batches are computed, up to the last that may exchange rows with this one."""
        model_seen = situation.model_seen
        start = 0 if place is None else place
        holds_list = any(isinstance(value, list) for value in present.buffered[start].values())
        # As with images, which are not by row
        keeps_all = holds_list or any("token_type_ids" in key for key in present.buffered[start])
        own_tokens = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        has_changed = self._model_seen is not None and self._model_seen != model_seen
        self._model_seen = model_seen
        # As `agreed`, without another collective
        objections = [not may for may in astuple(self.check.kept & situation.parts)]
        own = torch.tensor(
            [[place is None, keeps_all, has_changed, own_tokens, *objections]], device=self.accelerator.device
        )
        of_processes = self.accelerator.gather(own).sum(0).tolist()
        some_unknown, some_keep_all, some_changed, tokens, *objections = of_processes
        parts_of_processes = Parts(*[count == 0 for count in objections])
        situation = situation._replace(parts=parts_of_processes)
        if some_unknown:
            self._say_of_other_micro_batches()
        if some_keep_all:
            self.say_once("`compact_update`: the batch has lists, such as images, so that the update is TRL's.")
        if some_changed:
            self.check.begin_again()
        exchanges = (self.check.kept & parts_of_processes).exchange
        length = max(min(remaining, len(present.buffered) - start), 1) if exchanges else 1
        batches = present.buffered[start : start + length]
        compacted = None
        parts = intended = Parts.none()
        if not (some_unknown or some_keep_all):
            compacted, parts, intended = self._compact(batches, situation, trial)
        if not parts.exchange:
            length = 1
        self._segment = _Segment(start, length, compacted, parts, intended, last=start)
        self.step.tokens += tokens if compacted is None else compacted.tokens
        self.step.tokens_of_trl += tokens if compacted is None else compacted.tokens_of_trl
        return self._segment

    def _compact(
        self, batches: list[dict[str, Any]], situation: Situation, trial: Trial
    ) -> tuple[Compacted | None, Parts, Parts]:
        """
        Micro-batches as they are computed, what that leaves out, and what may be left out where it matters. `None`:
        they are computed TRL's way.
        """
        rows = Rows(batches, situation.loss_type, situation.least_advantage)
        own = rows.have_gradient.any().view(1).to(self.accelerator.device)
        has_gradient = bool(self.accelerator.gather(own).any())
        self.has_learned = self.has_learned or has_gradient
        intended = situation.parts
        others = other_tensors(rows.joined)
        if self.accelerator.gather(torch.tensor([bool(others)], device=self.accelerator.device)).any():
            intended = intended.without(["left_padding", "right_padding"])
            names = ", ".join(others) or "on another process"
            self.say_once(
                f"`compact_update`: padding stays, because the batch has tensors of a subclass ({names}), which may "
                "be by token."
            )
        if situation.has_kl_term and not has_gradient:
            # Where the policy still is the reference, TRL's gradient is 0 to the bit
            return None, Parts.none(), intended
        could_exchange = (self.check.kept & intended).exchange
        parts = self.check.allowed(rows, intended, trial, situation.multiple)
        if could_exchange and not parts.exchange and len(batches) > 1:
            return self._compact(batches[:1], situation, trial)
        return compact(rows, parts, self.accelerator, situation.multiple), parts, intended

    def end_micro_step(self) -> None:
        """The loss will not ask for its last micro-batch again, but as the next one, as in a further iteration."""
        self._may_repeat = False

    def end_step(self) -> dict[str, float]:
        """Begin to count the next optimizer step. Returns the metrics of the one that has ended."""
        step = self.step
        self.step = Counts()
        self._segment = None
        self.run.add(step)
        if step.tokens_of_trl == 0:
            return {}
        return {
            "update/seconds": step.seconds,
            "update/tokens": step.tokens,
            "update/tokens_saved": 1 - step.tokens / step.tokens_of_trl,
        }

    def say_what_is_left_out(
        self, obstacles_now: Callable[[], Mapping[str, str]], leaves_out_old_logps: Callable[[], bool]
    ) -> None:
        """
        Say once, when the model was checked, what the update leaves out, and what not.

        Args:
            obstacles_now (`Callable`): why parts are not left out, by what is known of the trainer.
            leaves_out_old_logps (`Callable`): whether TRL's pass for old log-probs is left out, too.
        """
        if self._has_said_what or self._segment is None:
            return
        obstacles = obstacles_now()
        if not (self.check.seconds > 0 or self.check.is_begun or set(CHECKED) <= set(obstacles)):
            return
        self._has_said_what = True
        left_out: list[str] = []
        others: dict[str, list[str]] = {}
        for name, words in _WORDS.items():
            reason = obstacles.get(name)
            if reason is not None:
                others.setdefault(reason, []).append(words)
            elif not getattr(self.check.kept, name):  # of which a line was said
                others.setdefault("switched off", []).append(words)
            elif getattr(self._segment.intended, name):
                left_out.append(words)
        of_padding = [words for words in left_out if words in _BOTH_PADDINGS]
        if len(of_padding) == len(_BOTH_PADDINGS):
            left_out = [words for words in left_out if words not in _BOTH_PADDINGS]
            left_out.insert(1, "padding")
        if leaves_out_old_logps():
            left_out.append("TRL's pass for old log-probs")
        text = f"leaves out {', '.join(left_out)}" if left_out else "is TRL's"
        text += "".join(f"; not {', '.join(words)} ({reason})" for reason, words in others.items())
        took = f"{self.check.seconds:.1f}"
        tried = "" if took == "0.0" else f" To try this took {took} s."
        self.say_once(f"The update {text}.{tried}")

    def say_what_was_saved(self, seconds: float) -> None:
        """
        Say at the end of a run what its updates took.

        Args:
            seconds (`float`): of the run.
        """
        if self.run.tokens_of_trl == 0 or not self.accelerator.is_main_process:
            return
        computed = self.run.tokens / self.run.tokens_of_trl
        logger.warning(
            f"The updates computed {computed:.0%} of the tokens that TRL's would, in {self.run.seconds:,.0f} of the "
            f"run's {seconds:,.0f} s. Generation and rewards took {self.run.making_seconds:,.0f} s."
        )

    def _say_of_other_micro_batches(self) -> None:
        self.say_once(
            "`compact_update`: the loss gets micro-batches that are not as TRL has made them, such as those that a "
            "subclass has changed before. Their update is TRL's."
        )

    def say_once(self, message: str) -> None:
        """Log a line on the main process, if it was not logged yet."""
        if message not in self._said and self.accelerator.is_main_process:
            logger.warning(message)
        self._said.add(message)

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
        self._segment = None
        self.step = Counts()
        self.run = Counts()
        self._has_said_what = False
        self.has_learned = False
        self.accumulated = None
        self.keeps_micro_batches = False
        self._met_loss = False
        self.check.begin_run()

    def state_dict(self) -> dict[str, Any]:
        """What was checked, as JSON values."""
        return {"check": self.check.state_dict(), "has_learned": self.has_learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned."""
        self.check.load_state_dict(state["check"])
        self.has_learned = state["has_learned"]
