"""The measurement of whole training steps of the pretrained model."""

import json
from types import SimpleNamespace

from benchmarks.lab.rewards import Tally
from benchmarks.smollm2 import step
from benchmarks.smollm2.step import StepMeter, Steps, append_rows, measure_pool, row_of, table


class Clock:
    """Stand-in for `time`, of which a test decides how it passes."""

    def __init__(self):
        self.now = 0.0

    def process_time(self):
        return self.now


class FakeTrainer:
    """Counts as the trainers of the benchmark do; a generation takes three seconds."""

    def __init__(self, clock):
        self.clock = clock
        self.rollouts_generated = 0
        self.tokens_generated = 0
        self.effective_trained = 0

    def _generate_single_turn(self):
        self.clock.now += 3
        self.rollouts_generated += 64
        self.tokens_generated += 640


def reward(completions, **columns):
    return [0.0] * len(completions)


def test_steps_after_the_warm_up_are_measured(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step, "time", clock)
    trainer = FakeTrainer(clock)
    tally = Tally(reward, 8)
    meter = StepMeter(1, tally)
    meter.watch(trainer)
    clock.now += 5  # prompts are embedded
    for i, update in enumerate((100, 7, 9)):
        state = SimpleNamespace(global_step=i)
        meter.on_step_begin(None, state, None)
        trainer._generate_single_turn()
        clock.now += update
        tally.groups += 8
        tally.effective += 2
        trainer.effective_trained += 3
        meter.on_step_end(None, state, None)
        clock.now += 50  # between steps
    assert meter.result() == Steps(
        seconds=22,
        generation_s=6,
        before_s=5,
        rollouts=128,
        tokens=1280,
        groups=16,
        effective=4,
        effective_trained=6,
    )


def steps_of(seconds):
    return Steps(seconds, seconds / 2, 1.0, rollouts=64, tokens=640, groups=8, effective=2, effective_trained=2)


def test_ratios_are_those_of_the_same_turn(tmp_path):
    settings = {"pool": "mixed", "prompts": 1, "steps": 1, "warm_up": 1, "learning_rate": 1e-3}
    baseline = [steps_of(10.0), steps_of(20.0), steps_of(40.0)]
    own = [steps_of(5.0), steps_of(15.0), steps_of(40.0)]
    row = row_of("default", settings, own, baseline)
    assert (row["ratio"], row["ratio_least"], row["ratio_largest"]) == (0.75, 0.5, 1.0)
    assert row["seconds"] == [5.0, 15.0, 40.0]
    cells = [cell.strip() for cell in table([row]).splitlines()[-1].split("|")[1:-1]]
    assert cells == ["mixed", "default", "3", "0.25", "10", "20.0", "10.0", "0.75 (0.50-1.00)"]
    path = tmp_path / "new" / "step.jsonl"
    append_rows(path, [row])
    append_rows(path, [row])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row, row]


def test_methods_take_turns_with_the_same_seeds(monkeypatch, tmp_path):
    measured = []

    def measure_run(spec, warm_up, weights, folder):
        measured.append((spec.method, spec.seed))
        assert (spec.prompts, spec.steps, spec.max_rollouts) == (4, 4, None)
        assert (spec.schedule, warm_up) == ("constant", 1)
        return steps_of(10.0)

    monkeypatch.setattr(step, "measure_run", measure_run)
    rows = measure_pool(
        "mixed",
        ["uniform", "compact"],
        prompts=4,
        steps=3,
        warm_up=1,
        turns=2,
        learning_rate=1e-3,
        weights=tmp_path,
    )
    assert measured == [("uniform", 100), ("compact", 100), ("compact", 101), ("uniform", 101)]
    assert [row["method"] for row in rows] == ["uniform", "compact"]
    assert {"commit", "trl", "torch", "machine"} <= rows[0].keys()
