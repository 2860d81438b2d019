"""The pool of prompts: streaks, state and fingerprint."""

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.factories import chat_dataset, plain_dataset, visit
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection.pool import PromptPool, dataset_fingerprint


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([EFFECTIVE, EASY, HARD])), max_size=12), max_size=6)
)
def test_history_against_a_loop_over_visits(rounds):
    """Streaks by hand: the trailing visits of one zero-variance kind, per prompt, in the order of visits."""
    pool = PromptPool(5)
    visits = {i: [] for i in range(5)}
    for step, groups in enumerate(rounds):
        pool.observe([visit(i, kind, step, rate=kind / 2) for i, kind in groups])
        for i, kind in groups:
            visits[i].append((kind, step))
    for i, seen in visits.items():
        streak = 0
        for kind, _ in reversed(seen):
            if kind == EFFECTIVE or kind != seen[-1][0]:
                break
            streak += 1
        assert pool.visits[i] == len(seen)
        assert pool.streak[i] == streak
        if seen:
            assert pool.streak_kind[i] == seen[-1][0]
            assert pool.last_step[i] == seen[-1][1]
            assert pool.last_success_rate[i] == seen[-1][0] / 2
        else:
            assert pool.last_step[i] == -1
            assert np.isnan(pool.last_success_rate[i])


def test_memory_stays_below_64_bytes_a_prompt():
    pool = PromptPool(100_000)
    assert sum(values.nbytes for values in pool.state_dict().values()) <= 64 * len(pool)


def test_state_round_trip_and_mismatch():
    pool = PromptPool(4)
    pool.observe([visit(1, HARD, 3), visit(1, HARD, 3), visit(2, EFFECTIVE, 3, 0.25)])
    other = PromptPool(4)
    other.load_state_dict(pool.state_dict())
    for name, values in pool.state_dict().items():
        np.testing.assert_array_equal(values, other.state_dict()[name])
    with pytest.raises(ValueError, match="4 prompts does not fit a pool of 5"):
        PromptPool(5).load_state_dict(pool.state_dict())


def test_fingerprint_does_not_run_transforms_or_read_addresses():
    """The stored bytes count: an image has another address each time it is decoded."""
    picture = Image.new("RGB", (4, 4), "red")
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}], "image": picture}] * 3)
    assert dataset_fingerprint(rows) == dataset_fingerprint(Dataset.from_list(rows.to_list(), features=rows.features))
    made = Dataset.from_dict({"question": ["a", "b"]})
    made.set_transform(lambda batch: {"prompt": [object() for _ in batch["question"]]})
    other = Dataset.from_dict({"question": ["a", "c"]})
    assert dataset_fingerprint(made) == dataset_fingerprint(made)
    assert dataset_fingerprint(made) != dataset_fingerprint(other)


def test_fingerprint_knows_prompts_order_and_length():
    base = dataset_fingerprint(plain_dataset(20))
    assert base == dataset_fingerprint(Dataset.from_list(plain_dataset(20).to_list()))
    assert base == dataset_fingerprint(plain_dataset(20).remove_columns("answer"))
    different = [plain_dataset(21), plain_dataset(20).shuffle(seed=1), chat_dataset(20), plain_dataset(20).select([0])]
    assert len({base, *map(dataset_fingerprint, different)}) == 5
