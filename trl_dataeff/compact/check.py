"""
Whether the gradient is the same without what is left out: that of a few rows is computed both ways, at the first
update in which it matters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from transformers.utils import logging

from trl_dataeff.compact.dealing import Deal
from trl_dataeff.compact.exact import Parts
from trl_dataeff.compact.micro_batches import MicroBatch, Rows
from trl_dataeff.compact.padding import rounded_up


logger = logging.get_logger(__name__)
TRIED_ROWS = 4  # that are computed both ways
MOST_CHANGES = 8  # of a model, after which nothing is left out
#: Columns of padding behind the row that is moved to other positions
PADDING_COLUMNS = 4
_WORDS = {
    "zero_rows": "leaving out rows without a gradient",
    "exchange": "exchanging rows between micro-batches",
    "left_padding": "leaving out padding of prompts",
    "right_padding": "leaving out padding of completions",
    "prompt_scores": "leaving out logits of prompt tokens",
    "shared_prompts": "leaving out repeated prompts",  # which needs the last one
}
CHECKED = tuple(_WORDS)  # by parts that need none of those behind them
_OF_ROWS = ("zero_rows", "exchange")
_BY_POSITION = ("left_padding", "right_padding", "shared_prompts")  # tokens at other positions, or without later ones


class Outcome(NamedTuple):
    """
    What two ways to compute the same rows have shown.

    Attributes:
        difference: relative difference of the gradients; infinite where it is not a number.
        tolerance: up to which it counts as rounding.
        draws: whether the first way has drawn random numbers.
        other_inputs: what else than the micro-batch reaches the model, in words; empty if nothing does.
        error: the exception of the second way, in words; empty if there was none.
    """

    difference: float
    tolerance: float
    draws: bool = False
    other_inputs: str = ""
    error: str = ""

    @property
    def is_same(self) -> bool:
        """Whether the difference is within the tolerance, and nothing was raised."""
        return not self.error and self.difference <= self.tolerance


class Trial(Protocol):
    """Computes the gradient of rows in two ways, with the trainer's loss, and without a trace of it."""

    def compare(
        self, first: Sequence[MicroBatch], second: Sequence[MicroBatch], *, in_evaluation: bool = False
    ) -> Outcome:
        """
        A collective: processes give equally many micro-batches, of equally many rows.

        Args:
            first (`Sequence[MicroBatch]`): the rows in TRL's way.
            second (`Sequence[MicroBatch]`): the same rows in another way.
            in_evaluation (`bool`, *optional*, defaults to `False`): whether the model's modules are in evaluation
                mode, without dropout.

        Raises:
            Exception: what the first way raises.
        """

    def counts_positions(self) -> bool:
        """Whether the model takes positions as an argument."""

    def counts_columns(self) -> bool:
        """Whether the model may compute from the columns of tokens, too, whatever their positions are."""

    @property
    def compares_logps(self) -> bool:
        """
        Whether log-probs are compared instead of gradients. They do not tell of rows that are left out. A collective.
        """


class Check:
    """
    Whether the gradient depends on what is left out. A few rows are computed TRL's way and the compact one, with the
    trainer's loss and methods. Where the difference is more than rounding, or an exception is raised, one part after
    the other is tried, and those that fail are switched off, with a line.

    A pass that draws random numbers, as with dropout, cannot be shared by rows. The other parts are then compared in
    evaluation mode.

    Cutting padding moves tokens to other positions. So a row is computed at its own positions and far behind them as
    well, and the longest rows in one sequence; once more when batches become wider than what was tried.

    Args:
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
        model_name (`str`, *optional*): the model's class, for the line.

    Attributes:
        kept ([`Parts`]): all parts but those that were switched off.
        draws (`bool`): whether a pass in training mode draws random numbers.
        seconds (`float`): that the check took so far.
    """

    def __init__(self, accelerator: Accelerator, *, model_name: str = "the model"):
        self.accelerator = accelerator
        self.model_name = model_name
        self.kept = Parts.all()
        self.draws = False
        self.seconds = 0.0
        self._changes = 0  # of the model
        self._unchecked = set(CHECKED)
        self._reach = 0  # positions up to which the model was tried
        # Whether rows have no gradient where none has an advantage; `None`: not tried
        self._found_no_gradient: bool | None = None

    @property
    def is_begun(self) -> bool:
        """Whether rows were computed both ways with the model as it is, and something can be left out."""
        return len(self._unchecked) < sum(getattr(self.kept, name) for name in CHECKED)

    def passed(self, parts: Parts, width: int) -> Parts:
        """The parts of `parts` that were checked, for rows of so many columns, and make no difference."""
        by_position = _BY_POSITION if width > self._reach else ()
        return (self.kept & parts).without([*self._unchecked, *by_position])

    def begin_run(self) -> None:
        """Count the model's changes of another run."""
        self._changes = 0

    def begin_again(self) -> None:
        """
        Forget all, because the model has changed. What was switched off stays so. A model that changes in every step
        would be checked in every step: after some changes, all is switched off.
        """
        self._changes += 1
        if self._changes == MOST_CHANGES:
            self._switch_off(CHECKED, f"the model's modules, or numbers in them, have changed {MOST_CHANGES} times")
        self._unchecked = {name for name in CHECKED if getattr(self.kept, name)}
        self._reach = 0
        self._found_no_gradient = None

    def allowed(self, rows: Rows, parts: Parts, trial: Trial, multiple: int | None = None) -> Parts:
        """
        What may be left out of rows. Compares what is not checked yet and matters here. A collective.

        Args:
            rows ([`Rows`]): those of TRL's micro-batches that are about to be trained on.
            parts ([`Parts`]): what may be left out by what is known of the trainer.
            trial ([`Trial`]): computes both ways.
            multiple (`int`, *optional*): TRL's `pad_to_multiple_of`.
        """
        parts = _consistent(self.kept & parts)
        chosen = _Chosen(rows, multiple)
        some_advantage = int(rows.joined["advantages"].any())
        own = [chosen.num_computed, some_advantage, rows.width]
        own += [int(chosen.matters(name, parts)) for name in CHECKED]
        on_processes = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device))
        chosen.num_computed, some_advantage, width, *matters = on_processes.amax(0).tolist()
        due = [name for name, is_on in zip(CHECKED, matters, strict=True) if is_on and name in self._unchecked]
        moves = width > self._reach and any(getattr(parts, name) for name in _BY_POSITION)
        if chosen.num_computed and (due or moves):
            started = time.perf_counter()
            if trial.compares_logps:
                self._unchecked -= set(_OF_ROWS)
                due = [name for name in due if name not in _OF_ROWS]
            if due:
                self._compare(chosen, due, parts, trial)
            if moves:
                self._reach = 1 << (width - 1).bit_length()  # not again for each batch that is a little wider
                if trial.counts_positions():
                    self._move(chosen, trial)
                if (self.kept & parts).shared_prompts:
                    self._pack_longest(chosen, trial)
            self.seconds += time.perf_counter() - started
        allowed = self.passed(parts, width)
        if not some_advantage and parts.zero_rows:
            allowed = replace(allowed, zero_rows=self._have_no_gradient(chosen, trial))
        return _consistent(allowed)

    def _have_no_gradient(self, chosen: _Chosen, trial: Trial) -> bool:
        """
        Whether the gradient of rows is 0 where no row of any process has an advantage. There, a gradient of another
        source is seen that is small beside that of an advantage. A collective.
        """
        if self._found_no_gradient is None and not trial.compares_logps:
            started = time.perf_counter()
            try:
                # Of no rows, the gradient is 0
                self._found_no_gradient = trial.compare(chosen.whole(), []).is_same
                if not self._found_no_gradient:
                    self._switch_off(["zero_rows"], "rows without an advantage have a gradient")
            except Exception:  # of TRL's own way, of which a batch with a gradient will tell
                self._found_no_gradient = False
            self.seconds += time.perf_counter() - started
        return self._found_no_gradient is not False

    def _compare(self, chosen: _Chosen, due: Sequence[str], parts: Parts, trial: Trial) -> None:
        """Compute rows with and without all parts that are due; where that differs, add one part after the other."""
        whole = chosen.whole()
        try:
            outcome = trial.compare(whole, chosen.without(due, parts))
        except Exception as error:  # of TRL's own way: a few rows alone are too few for this trainer
            self._switch_off(CHECKED, f"a few rows alone raise {in_words(error)}")
            return
        in_evaluation = outcome.draws
        self.draws = outcome.draws
        if outcome.draws:
            self._switch_off(["shared_prompts"], "a pass that is repeated differs, as with dropout")
            due = [name for name in due if name in self._unchecked]
            outcome = trial.compare(whole, chosen.without(due, parts), in_evaluation=True)
            if outcome.draws:
                self._switch_off(due, "a pass that is repeated differs in evaluation mode, too")
                return
        if outcome.other_inputs:
            self.note_other_inputs(outcome.other_inputs)
            due = [name for name in due if name in self._unchecked]
            outcome = trial.compare(whole, chosen.without(due, parts), in_evaluation=in_evaluation)
        if not outcome.is_same:
            passed: list[str] = []
            for name in due:
                if name not in self._unchecked:  # as it needs another one
                    continue
                outcome = trial.compare(whole, chosen.without([*passed, name], parts), in_evaluation=in_evaluation)
                if outcome.is_same:
                    passed.append(name)
                else:
                    self._switch_off([name], self._reason(outcome))
        self._unchecked -= set(due)

    def _move(self, chosen: _Chosen, trial: Trial) -> None:
        """Compute a row at its own positions, and as far behind as rows of the run may be."""

        def is_same(first: MicroBatch, second: MicroBatch) -> bool:
            return trial.compare([first], [second], in_evaluation=self.draws).is_same

        near, far, far_padding = chosen.moved(self._reach)
        reason = f"positions up to {self._reach} change the gradient of {self.model_name}"
        try:
            tries_columns = self.kept.left_padding and trial.counts_columns()
            if tries_columns and not is_same(near, chosen.behind_padding(self._reach)):
                self._switch_off(["left_padding", "shared_prompts"], reason)
            if is_same(near, far):
                return
            if not is_same(near, far_padding):
                # What comes later changes what was before, as where frequencies depend on the last position
                self._switch_off(["right_padding", "shared_prompts"], reason)
            if is_same(*chosen.padded()):
                self._switch_off(["left_padding"], reason)
            else:
                self._switch_off(["shared_prompts"], f"{self.model_name} finds positions in the mask")
        except Exception as error:
            self._switch_off(_BY_POSITION, f"{self.model_name} with other positions raises {in_words(error)}")

    def _pack_longest(self, chosen: _Chosen, trial: Trial) -> None:
        """Compute the longest rows with and without one sequence of all tokens: layers may mix tokens far apart."""
        try:
            outcome = trial.compare(*chosen.longest(), in_evaluation=self.draws)
        except Exception as error:  # of TRL's own way
            self._switch_off(["shared_prompts"], f"long rows alone raise {in_words(error)}")
            return
        if not outcome.is_same:
            self._switch_off(["shared_prompts"], f"with long rows, {self._reason(outcome)}")

    def note_other_inputs(self, what: str) -> None:
        """Switch off what relies on the ids and masks that reach the model, because something else does."""
        self._switch_off(["shared_prompts", "prompt_scores"], f"{self.model_name} gets {what}")

    def _reason(self, outcome: Outcome) -> str:
        if outcome.error:
            return f"it raises {outcome.error}"
        return f"it changes the gradient by {outcome.difference:.2g}; up to {outcome.tolerance:.2g} counts as rounding"

    def _switch_off(self, names: Sequence[str], reason: str) -> None:
        named = [name for name in names if getattr(self.kept, name)]
        self.kept = self.kept.without(names)
        self._unchecked -= set(names)
        if "prompt_scores" in names:  # without which no prompts are shared
            self.kept = self.kept.without(["shared_prompts"])
            self._unchecked.discard("shared_prompts")
        words = [_WORDS[name] for name in named]
        if words and self.accelerator.is_main_process:
            words = ["the faster update"] if len(names) == len(CHECKED) else words
            verb = "is" if len(words) == 1 else "are"
            logger.warning(f"`compact_update`: {' and '.join(words)} {verb} switched off, because {reason}.")

    def state_dict(self) -> dict[str, object]:
        """What is not checked yet, and what was switched off, for JSON: a run that is resumed computes the same."""
        switched_off = [field.name for field in fields(Parts) if not getattr(self.kept, field.name)]
        return {
            "unchecked": sorted(self._unchecked),
            "switched_off": switched_off,
            "draws": self.draws,
            "reach": self._reach,
            "changes": self._changes,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what [`state_dict`] returned."""
        self._unchecked = set(state["unchecked"])  # type: ignore[call-overload]
        self.kept = Parts.all().without(state["switched_off"])  # type: ignore[arg-type]
        self.draws = bool(state["draws"])
        self._found_no_gradient = None
        self._reach = int(state["reach"])  # type: ignore[call-overload]
        self._changes = int(state.get("changes", 0))  # type: ignore[call-overload]


class _Chosen:
    """
    A few rows that show most of what is left out: two of a group that shares its prompt, one with a longer prompt, and
    one without a gradient, with short completions of unequal lengths.
    """

    def __init__(self, rows: Rows, multiple: int | None):
        self.all_rows = rows
        self.multiple = multiple
        self.lengths = rows.lengths
        self.rows = _few_rows(rows)
        self.prompt_width = self._width([self.lengths.prompt[row] for row in self.rows], self.lengths.prompt_width)
        completions = [self.lengths.completion[row] for row in self.rows]
        self.completion_width = self._width(completions, self.lengths.completion_width)
        # Rows that are computed where those without a gradient are left out: as many on each process
        self.num_computed = sum(bool(rows.have_gradient[row]) for row in self.rows)

    def _width(self, lengths: Sequence[int], full: int) -> int:
        return rounded_up(max(lengths), self.multiple, full)

    def matters(self, name: str, parts: Parts) -> bool:
        """Whether a part changes what is computed of these rows."""
        if not getattr(parts, name):
            return False
        if name == "zero_rows":
            return self.num_computed < len(self.rows)
        if name == "exchange":
            return len(self.all_rows.batches) > 1 and len(self.rows) > 1
        if name == "left_padding":
            return self.prompt_width < self.lengths.prompt_width
        if name == "right_padding":
            return self.completion_width < self.lengths.completion_width
        return True

    def whole(self) -> list[MicroBatch]:
        """The rows in TRL's way, at most as many at once as in TRL's micro-batches."""
        return self._micro_batches(Parts.none())

    def without(self, names: Sequence[str], parts: Parts) -> list[MicroBatch]:
        """The rows without what these parts leave out, and with what they need."""
        needed = [*names, "prompt_scores"] if "shared_prompts" in names else names
        others = [field.name for field in fields(Parts) if field.name not in needed]
        return self._micro_batches(parts.without(others))

    def _computed_rows(self) -> list[int]:
        """The rows with a gradient, and as many of the others as another process has more."""
        gradient_first = sorted(self.rows, key=lambda row: not self.all_rows.have_gradient[row])
        computed = gradient_first[: self.num_computed]
        return [row for row in self.rows if row in computed]

    def _micro_batches(self, parts: Parts) -> list[MicroBatch]:
        rows = self._computed_rows() if parts.zero_rows else self.rows
        size = min(self.all_rows.per_batch, len(self.rows))
        if parts.exchange:
            # Rows that are together in TRL's micro-batches are not here, and the other way round
            size = 2 if size != 2 else 3
        return [self._micro_batch(rows[start : start + size], parts) for start in range(0, len(rows), size)]

    def _micro_batch(self, rows: Sequence[int], parts: Parts, factor: torch.Tensor | None = None) -> MicroBatch:
        deal = Deal(
            list(rows),
            self.prompt_width if parts.left_padding else self.lengths.prompt_width,
            self.completion_width if parts.right_padding else self.lengths.completion_width,
            packs=parts.shared_prompts,
            tokens=0,
            multiple=self.multiple,
        )
        if factor is None:
            factor = self.all_rows.share(rows, self.rows)
        micro_batch = self.all_rows.micro_batch(deal, factor, scores_completions=parts.prompt_scores)
        in_full = replace(deal, prompt_width=self.lengths.prompt_width, completion_width=self.lengths.completion_width)
        return replace(micro_batch, in_full=self.all_rows.micro_batch(in_full, factor).inputs)

    def moved(self, width: int) -> tuple[MicroBatch, MicroBatch, MicroBatch]:
        """The first row at positions from 0 on, at the last ones of `width`, and with its padding alone at these."""
        row = self.rows[0]
        completion = self.lengths.completion[row]
        prompt_width = self._width([self.lengths.prompt[row]], self.lengths.prompt_width)
        completion_width = self._width([completion + PADDING_COLUMNS], self.lengths.completion_width)
        near = torch.arange(prompt_width + completion_width)
        offset = max(width - len(near), 0)
        far_padding = near + offset * (near >= prompt_width + max(completion, 1))
        ways = [self._at(row, prompt_width, completion_width, each) for each in (near, near + offset, far_padding)]
        return ways[0], ways[1], ways[2]

    def behind_padding(self, width: int) -> MicroBatch:
        """The first row at positions from 0 on, and in the last columns of `width`."""
        row = self.rows[0]
        prompt_width = self._width([self.lengths.prompt[row]], self.lengths.prompt_width)
        completions = [self.lengths.completion[row] + PADDING_COLUMNS]
        completion_width = self._width(completions, self.lengths.completion_width)
        padding = max(width - prompt_width - completion_width, 0)
        columns = torch.arange(padding + prompt_width + completion_width)
        positions = (columns - padding).clamp(min=0)
        return self._at(row, prompt_width, completion_width, positions, more_padding=padding)

    def padded(self) -> tuple[MicroBatch, MicroBatch]:
        """The first row with its padding and a column more, and with positions that count this padding."""
        row = self.rows[0]
        prompt_width = self.lengths.prompt_width
        completion_width = self._width([self.lengths.completion[row]], self.lengths.completion_width)
        positions = torch.arange(prompt_width + 1 + completion_width)
        ways = [self._at(row, prompt_width, completion_width, each, more_padding=1) for each in (None, positions)]
        return ways[0], ways[1]

    def _at(
        self, row: int, prompt: int, completion: int, positions: torch.Tensor | None, more_padding: int = 0
    ) -> MicroBatch:
        deal = Deal([row], prompt, completion, packs=False, tokens=0)
        micro_batch = self.all_rows.micro_batch(deal, self.all_rows.share([row], [row]))
        inputs = dict(micro_batch.inputs)
        for name in ("prompt_ids", "prompt_mask"):
            inputs[name] = torch.nn.functional.pad(inputs[name], (more_padding, 0))
        if positions is not None:
            positions = positions.unsqueeze(0).to(inputs["prompt_ids"].device)
        return replace(micro_batch, inputs=inputs, positions=positions, in_full=inputs)

    def longest(self) -> tuple[list[MicroBatch], list[MicroBatch]]:
        """
        The longest row with a gradient, and others of its prompt or as long, in TRL's way and in one sequence. As many
        on each process.
        """
        lengths = self.lengths
        has_gradient = self.all_rows.have_gradient.tolist()

        def size(row: int) -> int:
            return lengths.prompt[row] + lengths.completion[row]

        rows = range(len(has_gradient))
        first = max(rows, key=lambda row: (has_gradient[row], size(row)))
        number = lengths.prompt_number[first]
        order = sorted(rows, key=lambda row: (has_gradient[row], lengths.prompt_number[row] == number, size(row)))
        most = min(TRIED_ROWS, self.all_rows.per_batch, max(len(rows) // 8, 2))  # a small part of an update
        chosen = order[::-1][:most]
        packed = replace(Parts.none(), shared_prompts=True, prompt_scores=True)
        factor = self.all_rows.share(chosen, chosen)
        return [self._micro_batch(chosen, Parts.none(), factor)], [self._micro_batch(chosen, packed, factor)]


def _few_rows(rows: Rows) -> list[int]:
    """
    Rows with a gradient if there are enough, else others as well: equally many on each process. The first two have the
    same prompt if any have.
    """
    lengths = rows.lengths
    number = min(TRIED_ROWS, len(lengths.prompt))
    prompt_number = np.array(lengths.prompt_number)
    # By prompt, short prompts and short completions first, those without a gradient last
    keys = (np.array(lengths.completion), prompt_number, np.array(lengths.prompt), ~rows.have_gradient.numpy())
    order = np.lexsort(keys)
    of_gradient = [row for row in order.tolist() if rows.have_gradient[row]]
    counts = np.bincount(prompt_number[of_gradient], minlength=1) if of_gradient else np.zeros(1)
    groups = [row for row in of_gradient if counts[prompt_number[row]] > 1] or of_gradient
    if not groups:
        return sorted(order[:number].tolist())
    first = groups[0]
    mates = [row for row in groups[1:] if prompt_number[row] == prompt_number[first]]
    unequal = [row for row in mates if lengths.completion[row] != lengths.completion[first]]
    chosen = [first, *(unequal or mates)[:1]]
    others = [row for row in order.tolist() if row not in chosen]
    # With a longer prompt that is not the longest, so that padding is cut, and some is left
    longer = [row for row in others if lengths.prompt[first] < lengths.prompt[row] < lengths.prompt_width]
    chosen += [row for row in longer if rows.have_gradient[row]][:1]
    others.sort(key=lambda row: (lengths.prompt[row], lengths.completion[row]))
    chosen += [row for row in others if not rows.have_gradient[row]][:1]
    return [*chosen, *[row for row in others if row not in chosen]][:number]


def _consistent(parts: Parts) -> Parts:
    """The parts without those that need another: prompts are shared where completions alone are scored."""
    return parts if parts.prompt_scores else parts.without(["shared_prompts"])


def in_words(error: BaseException) -> str:
    text = str(error).strip().split("\n", maxsplit=1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
