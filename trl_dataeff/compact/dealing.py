"""
Which rows share a micro-batch: rows of similar length, or of the same prompt, so that the update computes few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from trl_dataeff.compact.exact import Parts
from trl_dataeff.compact.padding import RowLengths, rounded_up


MOST_PROMPTS_IN_A_BLOCK = 8
LARGEST_MULTIPLE = 4  # most rows of a micro-batch, by those that each would have if all had the same number


@dataclass(frozen=True)
class Deal:
    """
    Rows for a micro-batch.

    Attributes:
        rows: which rows of the joined micro-batches, in their order.
        prompt_width: columns of the prompts.
        completion_width: columns of the completions.
        packs: whether its tokens are one sequence, without padding, and with prompts that are equal once.
        tokens: tokens that the forward pass computes.
        multiple: TRL's `pad_to_multiple_of`, a multiple of which the sequence is.
    """

    rows: list[int]
    prompt_width: int
    completion_width: int
    packs: bool
    tokens: int
    multiple: int | None = None

    @property
    def padded_tokens(self) -> int:
        """Tokens and padding of all rows, as if no prompts were shared."""
        return len(self.rows) * (self.prompt_width + self.completion_width)


@dataclass(frozen=True)
class Limits:
    """
    What a micro-batch holds at most, so that it needs no more memory than TRL's largest.

    Attributes:
        padded_tokens: rows times the columns of prompt and completion. Layers keep activations of them.
        completion_tokens: tokens of completions, without padding. The model's head scores them.
    """

    padded_tokens: int
    completion_tokens: int

    @classmethod
    def of_trl(cls, lengths: RowLengths, rows_of_batches: Sequence[Sequence[int]]) -> Limits:
        """The limits of TRL's micro-batches, which hold these rows in full width."""
        width = lengths.prompt_width + lengths.completion_width
        return cls(
            padded_tokens=max(len(rows) for rows in rows_of_batches) * width,
            completion_tokens=max(sum(lengths.completion[row] for row in rows) for rows in rows_of_batches),
        )


@dataclass(frozen=True)
class _Costs:
    """
    What rows cost together.

    Attributes:
        prompt: columns of the prompt that each row needs, `(rows,)`.
        completion: columns of the completion that each row needs, `(rows,)`.
        prompt_tokens: tokens of each prompt, `(rows,)`.
        completion_tokens: tokens of each completion, `(rows,)`.
        prompt_number: equal for rows with equal prompts, `(rows,)`.
        packs: whether the tokens of a micro-batch are one sequence.
        multiple: TRL's `pad_to_multiple_of`.
    """

    prompt: np.ndarray
    completion: np.ndarray
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    prompt_number: np.ndarray
    packs: bool
    multiple: int | None

    @classmethod
    def of(cls, lengths: RowLengths, parts: Parts, multiple: int | None) -> _Costs:
        num_rows = len(lengths.prompt)
        prompt = [lengths.prompt_width] * num_rows
        if parts.left_padding:
            prompt = [rounded_up(length, multiple, lengths.prompt_width) for length in lengths.prompt]
        completion = [lengths.completion_width] * num_rows
        if parts.right_padding:
            completion = [rounded_up(length, multiple, lengths.completion_width) for length in lengths.completion]
        return cls(
            prompt=np.array(prompt),
            completion=np.array(completion),
            prompt_tokens=np.array(lengths.prompt),
            completion_tokens=np.array(lengths.completion),
            prompt_number=np.array(lengths.prompt_number),
            packs=parts.shared_prompts,
            multiple=multiple,
        )

    def deal(self, rows: Sequence[int]) -> Deal:
        """The micro-batch of these rows."""
        own = list(rows)
        prompt_width = int(self.prompt[own].max())
        completion_width = int(self.completion[own].max())
        tokens = len(own) * (prompt_width + completion_width)
        if self.packs:
            _, first_places = np.unique(self.prompt_number[own], return_index=True)
            tokens = int(self.prompt_tokens[own][first_places].sum() + self.completion_tokens[own].sum())
            tokens = self._rounded_up(tokens)
        return Deal(own, prompt_width, completion_width, self.packs, tokens, self.multiple)

    def _rounded_up(self, tokens: Any) -> Any:
        """Tokens of a sequence, or of several, with what completes a multiple."""
        return tokens if self.multiple is None else -(-tokens // self.multiple) * self.multiple

    def of_neighbors(self, order: Sequence[int], most_rows: int, limits: Limits) -> np.ndarray:
        """
        Tokens of every micro-batch of neighbors in an order.

        Returns:
            `np.ndarray` of shape `(len(order) + 1, most_rows)`: at `[end, n - 1]` the tokens of the `n` rows before
            place `end`; infinite where there are fewer rows before it, and beyond the limits.
        """
        num_rows = len(order)
        prompt = self.prompt[list(order)]
        completion = self.completion[list(order)]
        prompt_tokens = self.prompt_tokens[list(order)]
        completion_tokens = self.completion_tokens[list(order)]
        last_place = _places_before(self.prompt_number[list(order)])
        costs = np.full((num_rows + 1, most_rows), np.inf)
        # By first row, of micro-batches that grow by a row
        prompt_width = np.zeros(num_rows, dtype=np.int64)
        completion_width = np.zeros(num_rows, dtype=np.int64)
        scored = np.zeros(num_rows, dtype=np.int64)
        of_prompts = np.zeros(num_rows, dtype=np.int64)  # tokens of different prompts
        for n in range(1, most_rows + 1):
            firsts = slice(0, num_rows - n + 1)
            added = slice(n - 1, num_rows)
            prompt_width = np.maximum(prompt_width[firsts], prompt[added])
            completion_width = np.maximum(completion_width[firsts], completion[added])
            scored = scored[firsts] + completion_tokens[added]
            is_new_prompt = last_place[added] < np.arange(num_rows - n + 1)
            of_prompts = of_prompts[firsts] + np.where(is_new_prompt, prompt_tokens[added], 0)
            padded = n * (prompt_width + completion_width)
            tokens = self._rounded_up(of_prompts + scored) if self.packs else padded
            fits = padded <= limits.padded_tokens
            fits &= scored <= limits.completion_tokens
            costs[n:, n - 1] = np.where(fits, tokens, np.inf)
        return costs


def _places_before(numbers: np.ndarray) -> np.ndarray:
    """The last place before each one that has the same number, or -1."""
    last: dict[int, int] = {}
    places = []
    for place, number in enumerate(numbers.tolist()):
        places.append(last.get(number, -1))
        last[number] = place
    return np.array(places)


def deal_rows(
    rows: Sequence[int],
    num_batches: int,
    lengths: RowLengths,
    parts: Parts,
    *,
    multiple: int | None = None,
    limits: Limits | None = None,
) -> list[Deal]:
    """
    Deal rows to the micro-batches of an optimizer step so that few tokens are computed.

    Several orders are considered: by length; by length of the completion; and, where prompts are shared, by length of
    the completion within blocks of 1 to 8 prompts. A micro-batch gets rows that are neighbors in an order. The order
    in which fewest tokens are computed is taken.

    Args:
        rows (`Sequence[int]`): rows of the joined micro-batches, at least `num_batches`.
        num_batches (`int`): micro-batches of the step.
        lengths ([`RowLengths`]): of all rows.
        parts ([`Parts`]): what may be left out. Without `exchange` there is one micro-batch.
        multiple (`int`, *optional*): TRL's `pad_to_multiple_of`, a multiple of which each width is.
        limits ([`Limits`], *optional*): what a micro-batch holds at most. It then has as many rows as lets the step
            compute the fewest tokens. Where no order keeps to both limits, only `padded_tokens` holds. By default the
            numbers of rows differ by at most 1.

    Returns:
        `list[Deal]`: the largest first, so that memory is at its peak at the start.
    """
    costs = _Costs.of(lengths, parts, multiple)
    orders = _orders(rows, lengths, parts)
    if limits is None:
        sizes = even_sizes(len(rows), num_batches)
        candidates = [_split(order, sizes, costs) for order in orders]
    else:
        candidates = _cheapest_splits(orders, num_batches, costs, limits)
        if not candidates:
            # Equal numbers of rows keep to this one, so that there is a candidate
            only_padded = replace(limits, completion_tokens=sum(lengths.completion[row] for row in rows))
            candidates = _cheapest_splits(orders, num_batches, costs, only_padded)
    fewest = min(candidates, key=lambda deals: sum(deal.tokens for deal in deals))
    return sorted(fewest, key=lambda deal: -deal.padded_tokens)


def _cheapest_splits(
    orders: Sequence[Sequence[int]], num_batches: int, costs: _Costs, limits: Limits
) -> list[list[Deal]]:
    """Of each order that keeps to the limits, the micro-batches that compute the fewest tokens."""
    splits = []
    for order in orders:
        sizes = _cheapest_sizes(order, num_batches, costs, limits)
        if sizes is not None:
            splits.append(_split(order, sizes, costs))
    return splits


def _split(order: Sequence[int], sizes: Sequence[int], costs: _Costs) -> list[Deal]:
    """Micro-batches of these numbers of rows."""
    deals = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        deals.append(costs.deal(order[end - size : end]))
    return deals


def _cheapest_sizes(order: Sequence[int], num_batches: int, costs: _Costs, limits: Limits) -> list[int] | None:
    """
    The numbers of rows with which micro-batches of neighbors compute the fewest tokens within the limits; `None` if
    there are none. Found by dynamic programming over the micro-batches.
    """
    num_rows = len(order)
    most_rows = min(num_rows, LARGEST_MULTIPLE * -(-num_rows // num_batches))
    costs_by_end = costs.of_neighbors(order, most_rows, limits)
    # Before a micro-batch of n rows that ends at a place; where there are fewer rows, its costs are infinite
    starts = np.arange(num_rows + 1)[:, None] - np.arange(1, most_rows + 1)
    starts = starts.clip(min=0)
    fewest = np.full(num_rows + 1, np.inf)  # tokens of all micro-batches so far, by their end
    fewest[0] = 0
    best_sizes = []
    for _ in range(num_batches):
        tokens = fewest[starts] + costs_by_end
        best_sizes.append(tokens.argmin(axis=1) + 1)
        fewest = tokens.min(axis=1)
    if np.isinf(fewest[-1]):
        return None
    sizes: list[int] = []
    end = num_rows
    for best in reversed(best_sizes):
        sizes.append(int(best[end]))
        end -= sizes[-1]
    return sizes[::-1]


def _orders(rows: Sequence[int], lengths: RowLengths, parts: Parts) -> list[list[int]]:
    """The orders of rows that are considered, each with the longest first where rows may be exchanged."""
    if not parts.exchange:
        return [list(rows)]
    by_length = sorted(rows, key=lambda row: -lengths.prompt[row] - lengths.completion[row])
    by_completion = sorted(rows, key=lambda row: (-lengths.completion[row], -lengths.prompt[row]))
    orders = [by_length, by_completion]
    if parts.shared_prompts:
        orders += _orders_by_prompt(rows, lengths)
    return orders


def _orders_by_prompt(rows: Sequence[int], lengths: RowLengths) -> list[list[int]]:
    """Rows by the length of their completion within blocks of prompts, for blocks of several sizes."""
    rows_of_prompt: dict[int, list[int]] = {}
    for row in rows:
        rows_of_prompt.setdefault(lengths.prompt_number[row], []).append(row)

    def longest(rows_with_prompt: list[int]) -> int:
        return max(lengths.prompt[row] + lengths.completion[row] for row in rows_with_prompt)

    longest_first = sorted(rows_of_prompt.values(), key=longest, reverse=True)
    orders = []
    for size in range(1, min(len(longest_first), MOST_PROMPTS_IN_A_BLOCK) + 1):
        order: list[int] = []
        for start in range(0, len(longest_first), size):
            block = [row for rows_with_prompt in longest_first[start : start + size] for row in rows_with_prompt]
            order += sorted(block, key=lambda row: -lengths.completion[row])
        orders.append(order)
    return orders


def even_sizes(total: int, parts: int) -> list[int]:
    """`parts` sizes that add up to `total` and differ by at most 1, the larger ones first."""
    quotient, remainder = divmod(total, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)
