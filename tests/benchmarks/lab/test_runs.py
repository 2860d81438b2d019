"""Runs: what is counted, that they repeat, and that a killed series goes on where it stopped."""

import dataclasses
import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest
from datasets import Dataset

from benchmarks.lab import runs, train
from benchmarks.lab.counting import counting
from benchmarks.lab.methods import METHODS, find
from benchmarks.lab.store import append_run, read_runs
from benchmarks.lab.studies import STUDIES, specs_of
from benchmarks.lab.train import RunSpec


pytestmark = pytest.mark.usefixtures("tiny_bounds")
SPEC = RunSpec("uniform", 0, "first", "tiny", steps=3, eval_every=2, prompts=4, group_size=4)
#: One of each kind: the others differ in a setting
EACH_KIND = (
    "uniform",
    "compact",
    "dynamic",
    "greso",
    "selection",
    "fill",
    "share",
    "replay",
    "dots_paper",
    "oracle",
)
TIMES = ("wall_s", "cpu_s", "selection_s", "generation_s", "update_s")


def rows_of(spec, start):
    rows = []
    train.run(spec, start, rows.append)
    return rows


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def trainer_of(method: str, start, tmp_path, model, tokenizer):
    """A trainer of `method` on eight prompts, with a reward of 0 and 1 that is common."""
    trainer_class, config_class = METHODS[method].classes()
    spec = dataclasses.replace(SPEC, method=method)
    arguments = {**train.config_options(spec, str(tmp_path)), **METHODS[method].options}
    data = Dataset.from_list([{"prompt": f"S:{a}{b}=", "answer": a} for a in "abcd" for b in "xy"])

    def reward(completion_ids, **columns):
        return [float(sum(ids) % 2 == 0) for ids in completion_ids]

    return counting(trainer_class)(
        model=model,
        reward_funcs=reward,
        args=config_class(**arguments),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("method", EACH_KIND)
def test_the_counter_is_right_by_hand(method, start, tmp_path, model, tokenizer, monkeypatch):
    """The rows that leave the model's own `generate`, and their tokens up to the end token."""
    by_hand = {"train": [0, 0], "eval": [0, 0]}
    generate = model.generate
    mode = "train"

    def counted(input_ids, **kwargs):
        output = generate(input_ids=input_ids, **kwargs)
        prompt_width = input_ids.shape[1]
        for completion in output[:, prompt_width:].tolist():
            length = len(completion)
            if tokenizer.eos_token_id in completion:
                length = completion.index(tokenizer.eos_token_id) + 1
            by_hand[mode][0] += 1
            by_hand[mode][1] += length
        return output

    monkeypatch.setattr(model, "generate", counted)
    trainer = trainer_of(method, start, tmp_path, model, tokenizer)
    trainer.train()
    mode = "eval"
    trainer.evaluate()
    assert by_hand["eval"][0] > 0
    assert [trainer.rollouts_generated, trainer.tokens_generated] == by_hand["train"]
    assert trainer.groups_trained == SPEC.steps * SPEC.prompts
    rollouts = SPEC.steps * SPEC.prompts * SPEC.group_size
    if method == "share":
        assert rollouts / 2 <= trainer.rollouts_generated < rollouts
    elif method not in ("dynamic", "dots_paper"):  # these generate further groups: rounds, references
        assert trainer.rollouts_generated == rollouts


@pytest.mark.parametrize("method", EACH_KIND)
def test_equal_seeds_give_equal_runs(method, start):
    spec = dataclasses.replace(SPEC, method=method)
    one = rows_of(spec, start)
    assert without_times(one) == without_times(rows_of(spec, start))
    assert [row["step"] for row in one] == [0, 2, 3]
    assert one[0]["rollouts"] == 0
    other = rows_of(dataclasses.replace(spec, seed=1), start)
    assert other[0]["accuracy_sampled"] == one[0]["accuracy_sampled"]
    assert other[-1]["accuracy_sampled"] != one[-1]["accuracy_sampled"]


def test_a_method_may_carry_changes():
    method = find("fill,replay=off,sharpness=0.5,replay_max_age=null")
    assert method.options == {
        "selection": "dots",
        "replay": "off",
        "selector_args": {"sharpness": 0.5},
        "replay_max_age": None,
    }
    assert method.classes() == METHODS["fill"].classes()
    for wrong in ("nothing", "fill,replay", "fill,repaly=fill", "uniform,replay=fill"):
        with pytest.raises(ValueError, match=r"is not (one of|name=value)"):
            find(wrong)


def test_a_table_has_what_is_finished_and_nothing_that_was_made_with_other_settings(tmp_path):
    path = tmp_path / "runs.jsonl"
    uniform = RunSpec("uniform", 0, "first", "x")
    oracle = RunSpec("oracle", 0, "first", "x")
    unfinished = RunSpec("dynamic", 0, "first", "x")
    for name, value in ((oracle.name, 5), ("with former settings", 3), (uniform.name, 2)):
        append_run(path, [{"run": name, "value": value}])
    assert [row["value"] for row in runs.rows_of([uniform, oracle, unfinished], path)] == [2, 5]


def test_the_studies_have_each_run_once_seed_by_seed():
    expected = {
        "trials": 32,
        "time": 60,
        "again": 10,
        "groups": 30,
        "conditions": 100,
        "text": 20,
    }
    assert STUDIES.keys() == expected.keys()
    for name, n in expected.items():
        specs = specs_of(name, "key")
        assert len({spec.name for spec in specs}) == len(specs) == n
        assert [spec.seed for spec in specs] == sorted(spec.seed for spec in specs)


def test_a_run_that_a_signal_stops_is_not_finished(start, tmp_path, monkeypatch):
    """
    With `save_on_signal` the package's trainer ends a run in good order when it is told to stop; that is no result.
    """
    real = train.Evaluations.on_step_end

    def signalled(self, args, state, control, **kwargs):
        if self.spec.method != "uniform" and state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, args, state, control, **kwargs)

    monkeypatch.setattr(train.Evaluations, "on_step_end", signalled)
    whole = dataclasses.replace(SPEC, steps=2)
    stopped = dataclasses.replace(SPEC, method="compact,save_on_signal=true", steps=5)
    path = tmp_path / "runs.jsonl"
    with pytest.raises(SystemExit) as raised:
        runs.run_all([whole, stopped], start, path, workers=0)
    assert raised.value.code == 143
    assert list(read_runs(path)) == [whole.name]


def killed_if_fill(spec, start, sink):
    """Trains nothing. The process is killed, as one is that needs too much memory, if the method is `fill`."""
    if spec.method == "fill":
        os.kill(os.getpid(), signal.SIGKILL)
    sink({"run": spec.name, "step": 0, "rollouts": 0, "accuracy_sampled": 0.0})


def test_a_process_that_is_killed_is_an_error(tmp_path):
    path = tmp_path / "runs.jsonl"
    specs = [dataclasses.replace(SPEC, method=method) for method in ("uniform", "fill", "compact")]
    with pytest.raises(BrokenProcessPool):
        runs.run_all(specs, tmp_path, path, workers=1, train=killed_if_fill)
    assert list(read_runs(path)) == [specs[0].name]
