"""The time of selection: every generation batch after the warm-up is timed, and any pool and width can be."""

from benchmarks.selection import BATCHES, seconds_per_batch


def test_each_batch_has_a_time():
    seconds = seconds_per_batch(num_prompts=64, width=8)
    assert len(seconds) == BATCHES
    assert min(seconds) > 0
