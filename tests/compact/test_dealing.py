"""Which rows share a micro-batch."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.compact.dealing import Limits, deal_rows
from trl_dataeff.compact.exact import Parts
from trl_dataeff.compact.padding import RowLengths


PARTS = Parts(
    zero_rows=True, exchange=True, left_padding=True, right_padding=True, shared_prompts=True, prompt_scores=True
)
APART = PARTS.without(["shared_prompts"])


def test_rows_are_dealt_so_that_few_tokens_are_computed():
    """By hand: four rows of two prompts, in micro-batches of two."""
    lengths = RowLengths([9, 1, 9, 1], [1, 9, 9, 1], [0, 1, 0, 1], prompt_width=9, completion_width=9)
    deals = deal_rows(range(4), 2, lengths, APART)
    # By length: rows 2 and 0 (2 * (9 + 9)), 1 and 3 (2 * (1 + 9)). By completion: 2 and 1, 0 and 3: 2 * 18 + 2 * 10
    assert [(deal.rows, deal.tokens) for deal in deals] == [([2, 0], 36), ([1, 3], 20)]
    shared = deal_rows(range(4), 2, lengths, PARTS)
    # In one sequence: each prompt with its completions of 1 and 9 tokens
    assert [(sorted(deal.rows), deal.packs, deal.tokens) for deal in shared] == [
        ([0, 2], True, 19),
        ([1, 3], True, 11),
    ]
    alone = deal_rows(range(4), 2, lengths, APART.without(["left_padding", "right_padding"]))
    assert sum(deal.tokens for deal in alone) == 4 * 18


def test_widths_are_multiples_of_what_trl_pads_to():
    lengths = RowLengths([3, 9], [5, 2], [0, 1], prompt_width=16, completion_width=8)
    (deal,) = deal_rows(range(2), 1, lengths, PARTS, multiple=8)
    assert (deal.prompt_width, deal.completion_width) == (16, 8)


def tokens_by_hand(rows, lengths: RowLengths, share: bool) -> int:
    """Tokens that a micro-batch computes: padded, or each prompt once and no padding."""
    if share:
        prompts = {lengths.prompt_number[row]: lengths.prompt[row] for row in rows}
        return sum(prompts.values()) + sum(lengths.completion[row] for row in rows)
    prompt = max(1, *(lengths.prompt[row] for row in rows))
    completion = max(1, *(lengths.completion[row] for row in rows))
    return len(rows) * (prompt + completion)


def keeps_to(limits: Limits, rows, lengths: RowLengths) -> bool:
    padded = tokens_by_hand(rows, lengths, share=False)
    scored = sum(lengths.completion[row] for row in rows)
    return padded <= limits.padded_tokens and scored <= limits.completion_tokens


def partitions(order, parts: int):
    """Every way to cut an order into so many parts that are not empty."""
    for cuts in itertools.combinations(range(1, len(order)), parts - 1):
        bounds = [0, *cuts, len(order)]
        yield [order[start:end] for start, end in itertools.pairwise(bounds)]


@st.composite
def rows_of_groups(draw):
    """Micro-batches of up to three rows of up to three prompts each, and the rows that have a gradient."""
    size = draw(st.integers(1, 3))
    num_batches = draw(st.integers(1, 3))
    num_rows = size * num_batches
    of_prompts = draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))
    number = draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    completion = draw(st.lists(st.integers(0, 9), min_size=num_rows, max_size=num_rows))
    prompt = [of_prompts[i] for i in number]
    lengths = RowLengths(prompt, completion, number, max(prompt), max(1, *completion))
    kept = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    rows = [row for row in range(num_rows) if kept[row]]
    if len(rows) < num_batches:
        rows = list(range(num_rows))
    return lengths, size, num_batches, rows


@given(rows_of_groups(), st.booleans())
def test_no_order_of_rows_within_the_limits_computes_fewer_tokens(case, share):
    """Against every way to cut the orders by length and by completion."""
    lengths, size, num_batches, rows = case
    parts = PARTS if share else APART
    of_trl = [range(start, start + size) for start in range(0, size * num_batches, size)]
    limits = Limits.of_trl(lengths, of_trl)
    deals = deal_rows(rows, num_batches, lengths, parts, limits=limits)
    assert sorted(row for deal in deals for row in deal.rows) == sorted(rows)
    assert len(deals) == num_batches
    assert all(deal.rows for deal in deals)
    found = sum(tokens_by_hand(deal.rows, lengths, share) for deal in deals)
    assert found == sum(deal.tokens for deal in deals)
    by_length = sorted(rows, key=lambda row: -lengths.prompt[row] - lengths.completion[row])
    by_completion = sorted(rows, key=lambda row: (-lengths.completion[row], -lengths.prompt[row]))
    possible = []
    for order in (by_length, by_completion):
        for cut in partitions(order, num_batches):
            if all(keeps_to(limits, chunk, lengths) for chunk in cut):
                possible.append(sum(tokens_by_hand(chunk, lengths, share) for chunk in cut))
    if not possible:
        return
    assert found <= min(possible)
    assert all(keeps_to(limits, deal.rows, lengths) for deal in deals)


def test_a_micro_batch_of_long_completions_has_fewer_rows():
    """
    Each of TRL's two micro-batches has a long completion. With both in one of three rows, the model's head would
    score 50 tokens at a time, instead of TRL's 40.
    """
    lengths = RowLengths([2] * 6, [20, 10, 10, 20, 10, 10], list(range(6)), prompt_width=2, completion_width=20)
    limits = Limits.of_trl(lengths, [[0, 1, 2], [3, 4, 5]])
    assert limits == Limits(padded_tokens=66, completion_tokens=40)
    deals = deal_rows(range(6), 2, lengths, APART, limits=limits)
    assert [(sorted(deal.rows), deal.tokens) for deal in deals] == [([1, 2, 4, 5], 48), ([0, 3], 44)]
    even = deal_rows(range(6), 2, lengths, APART)
    assert [len(deal.rows) for deal in even] == [3, 3]


def test_where_long_completions_cannot_be_apart_the_columns_are_still_limited():
    """Either both long completions share a micro-batch, or a long one has all short ones with it."""
    lengths = RowLengths([2] * 6, [20, 2, 2, 20, 2, 2], list(range(6)), prompt_width=2, completion_width=20)
    limits = Limits.of_trl(lengths, [[0, 1, 2], [3, 4, 5]])
    assert limits == Limits(padded_tokens=66, completion_tokens=24)
    deals = deal_rows(range(6), 2, lengths, APART, limits=limits)
    assert [(sorted(deal.rows), deal.tokens) for deal in deals] == [([0, 3], 44), ([1, 2, 4, 5], 16)]


def test_many_rows_are_dealt_in_little_time():
    """A generation batch of 2,048 rows in micro-batches of 8."""
    completion = [(37 * row) % 1024 + 1 for row in range(2048)]
    number = [row // 8 for row in range(2048)]
    lengths = RowLengths([100] * 2048, completion, number, prompt_width=100, completion_width=1024)
    of_trl = [range(start, start + 8) for start in range(0, 2048, 8)]
    deals = deal_rows(range(2048), 256, lengths, PARTS, limits=Limits.of_trl(lengths, of_trl))
    assert sum(len(deal.rows) for deal in deals) == 2048
