"""How the seconds of a step are split, by a clock that is moved by hand."""

import pytest

from trl_dataeff.tracking import timing
from trl_dataeff.tracking.timing import StepTimer


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` lets time pass."""
    now = [1000.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


def parts(timer: StepTimer, seconds: float) -> tuple[float, float, float]:
    """Selection, generation and training."""
    values = timer.step(seconds)
    assert list(values) == ["time/selection_s", "time/generation_s", "time/training_s"]
    return tuple(values.values())


def test_a_step_without_selection_is_training(clock):
    assert parts(StepTimer(), 5.0) == (0.0, 0.0, 5.0)


def test_generation_within_selection_is_not_selection(clock):
    timer = StepTimer()
    with timer.selection():
        clock(1.0)  # proposes
        clock(8.0)  # a round, which says how long it took
        timer.add_generation(8.0)
        clock(0.5)  # classifies
        clock(4.0)  # a second round
        timer.add_generation(4.0)
        clock(0.25)
    clock(2.0)
    assert parts(timer, 15.75) == (1.75, 12.0, 2.0)


def test_generation_outside_of_selection(clock):
    """As in a single pass: selection before and after, generation between."""
    timer = StepTimer()
    with timer.selection():
        clock(1.0)
    clock(8.0)
    timer.add_generation(8.0)
    with timer.selection():
        clock(0.5)
    clock(3.0)
    assert parts(timer, 12.5) == (1.5, 8.0, 3.0)


def test_each_step_begins_at_0(clock):
    timer = StepTimer()
    with timer.selection():
        clock(1.0)
        timer.add_generation(0.25)
    assert parts(timer, 2.0) == (0.75, 0.25, 1.0)
    assert parts(timer, 3.0) == (0.0, 0.0, 3.0)
    with timer.selection():
        clock(0.5)
    assert parts(timer, 1.0) == (0.5, 0.0, 0.5)


def test_the_parts_add_up_to_the_step(clock):
    timer = StepTimer()
    for i in range(5):
        with timer.selection():
            clock(0.1 * i)
            timer.add_generation(0.05 * i)
        assert sum(parts(timer, 1.0 + i)) == pytest.approx(1.0 + i)
