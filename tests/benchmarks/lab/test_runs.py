"""Runs: what is counted, that they repeat, and that a killed series goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from benchmarks import predictor
from benchmarks.lab import runs, train
from benchmarks.lab.counting import counting
from benchmarks.lab.methods import METHODS, find
from benchmarks.lab.ratios import as_text, curves_by_setting, ratios
from benchmarks.lab.store import RunFile
from benchmarks.lab.studies import STUDIES
from benchmarks.lab.train import RunSpec


pytestmark = pytest.mark.usefixtures("tiny_bounds")
SPEC = RunSpec("uniform", 0, "first", "tiny", steps=3, eval_every=2, prompts=4, group_size=4)
#: One of each kind: the others differ in a setting
EACH_KIND = (
    "uniform", "dynamic", "greso", "greso_dynamic", "replay50", "dots", "default", "dots_paper", "oracle",
)  # fmt: skip
TIMES = ("wall_s", "cpu_s", "selection_s", "generation_s", "training_s")


def rows_of(spec, start):
    rows = []
    train.run(spec, start, rows.append)
    return rows


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def trainer_of(method: str, start, tmp_path, model, tokenizer, **options):
    """A trainer of `method` on eight prompts, with a reward of 0 and 1 that is common."""
    from datasets import Dataset

    trainer_class, config_class = METHODS[method].classes()
    spec = dataclasses.replace(SPEC, method=method)
    arguments = {**train.config_options(spec, str(tmp_path)), **METHODS[method].options, **options}
    data = Dataset.from_list([{"prompt": f"S:{a}{b}=", "answer": a} for a in "abcd" for b in "xy"])
    return counting(trainer_class)(
        model=model,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 2 == 0) for ids in completion_ids],
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
        for row in output[:, input_ids.shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            by_hand[mode][0] += 1
            by_hand[mode][1] += end
        return output

    monkeypatch.setattr(model, "generate", counted)
    trainer = trainer_of(method, start, tmp_path, model, tokenizer)
    trainer.train()
    mode = "eval"
    trainer.evaluate()
    assert by_hand["eval"][0] > 0
    assert [trainer.rollouts_generated, trainer.tokens_generated] == by_hand["train"]
    assert trainer.groups_trained == SPEC.steps * SPEC.prompts
    options, rollouts = METHODS[method].settings(), SPEC.steps * SPEC.prompts * SPEC.group_size
    if options.get("dynamic_sampling") or (options.get("selector_args") or {}).get("reference") == "paper":
        assert trainer.rollouts_generated >= rollouts * (1 - options.get("replay_fraction", 0))
    elif options.get("replay_fraction"):
        assert (1 - options["replay_fraction"]) * rollouts <= trainer.rollouts_generated < rollouts
    else:
        assert trainer.rollouts_generated == rollouts


def test_the_published_method_has_the_papers_proportions():
    """Of a batch: half are references, every two batches; the buffer holds from half of one to one; half is replayed."""
    settings = METHODS["dots_paper"].settings()
    batch = {f.name: f.default for f in dataclasses.fields(RunSpec)}["prompts"]
    arguments = settings["selector_args"]
    assert (arguments["reference_size"], arguments["refresh_batches"]) == (batch / 2, 2)
    assert batch / 2 <= settings["replay_capacity"] <= batch
    assert (settings["replay_fraction"], settings["replay_max_age"], arguments["exploration"]) == (0.5, None, 0.0)
    assert tuple(arguments[name] for name in ("objective", "target", "temperature")) == ("target", 0.5, 1e-3)
    assert arguments["history_prior"] >= 1e6, "our own additions are off"
    assert settings["replay_ratio_cap"] is None


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
    method = find("default,replay_fraction=0.25,objective=target,replay_max_age=null")
    assert method.options == {
        "replay_fraction": 0.25,
        "selector_args": {"objective": "target"},
        "replay_max_age": None,
    }
    assert method.classes() == METHODS["default"].classes()
    for wrong in ("nothing", "default,replay_fraction", "default,replay_fractoin=0.5", "uniform,replay_fraction=0"):
        with pytest.raises(ValueError, match=r"is not (one of|name=value)"):
            find(wrong)


def test_a_table_grows_by_what_is_finished_and_loses_what_was_made_with_other_settings(tmp_path):
    specs = [RunSpec(method, seed, "first", "x") for seed in (0, 1) for method in ("uniform", "oracle", "dynamic")]

    def row(method, seed, run, value):
        return {"pool": "first", "method": method, "learning_rate": 1e-4, "seed": seed, "run": run, "value": value}

    uniform, oracle, unfinished = specs[0], specs[1], specs[2]
    table = [
        row("dots", 0, "of another study", 1),
        row("uniform", 0, uniform.name, 2),
        row("oracle", 1, "with former settings", 3),
        row("dynamic", 0, "also with former settings", 4),
    ]
    for spec, value in ((oracle, 5), (unfinished, 6)):
        file = RunFile(tmp_path, spec.name)
        file.begin()
        file.append(row(spec.method, spec.seed, spec.name, value))
    RunFile(tmp_path, oracle.name).end()
    rows = runs.merged(specs, table, tmp_path)
    assert [r["value"] for r in rows] == [1, 4, 2, 5]


@pytest.mark.parametrize("name", STUDIES)
def test_the_studies_name_methods_that_there_are(name):
    specs = STUDIES[name].specs("key")
    assert len({spec.name for spec in specs}) == len(specs)
    assert "uniform" in {spec.method for spec in specs} or name not in ("first", "second", "third")


def test_a_run_that_a_signal_stops_is_not_finished(start, tmp_path, monkeypatch):
    """With `save_on_signal` the package's trainer ends a run in good order when it is told to stop; that is no result."""
    real = train.Evaluations.on_step_end

    def signalled(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, args, state, control, **kwargs)

    monkeypatch.setattr(train.Evaluations, "on_step_end", signalled)
    specs = [dataclasses.replace(SPEC, method="default,save_on_signal=true", steps=5)]
    with pytest.raises(SystemExit) as raised:
        runs.run_all(specs, start, tmp_path, workers=1)
    assert raised.value.code == 143
    file = RunFile(tmp_path, specs[0].name)
    assert [row["step"] for row in file.rows()] == [0, 2]
    assert not file.finished()


def made_up_rows():
    """Two seeds; the oracle is four times as fast as uniform in rollouts, `idle` never moves."""
    rows = []
    for seed in (0, 1):
        for method, speed in (("uniform", 1), ("oracle", 4), ("idle", 0)):
            for step in range(0, 101, 10):
                accuracy = min(0.9, 0.1 + speed * step / 200)
                rows.append(
                    {
                        "pool": "first", "method": method, "seed": seed, "learning_rate": 1e-4, "step": step,
                        "rollouts": 128 * step, "tokens": 0, "wall_s": 2.0 * step, "cpu_s": 1.0 * step,
                        "accuracy_sampled": accuracy, "accuracy_greedy": accuracy, "groups": 16 * (step > 0),
                        "effective_groups": 4 * (step > 0), "groups_trained": 16 * (step > 0),
                        "effective_groups_trained": 4 * (step > 0), "start": "x", "run": f"{method}-{seed}",
                    }
                )  # fmt: skip
    return rows


def test_the_ratio_table_by_hand():
    table = {row["method"]: row for row in ratios(curves_by_setting(made_up_rows())["first", 1e-4])}
    assert table["uniform"]["rollouts_ratio"] == pytest.approx(1)
    assert table["uniform"]["reach"] == pytest.approx(12800)
    assert table["oracle"]["rollouts_ratio"] == pytest.approx(0.25)
    assert table["oracle"]["wall_s_ratio"] == pytest.approx(0.25)
    assert table["idle"]["rollouts_ratio"] == float("inf")
    assert table["uniform"]["effective"] == pytest.approx(0.25)
    # Seed 1's oracle twice as slow: the geometric mean of 1/4 and 1/2, the interval by Student's t for two values
    slower = [
        row | {"rollouts": row["rollouts"] * (2 if row["method"] == "oracle" and row["seed"] == 1 else 1)}
        for row in made_up_rows()
    ]
    oracle = ratios(curves_by_setting(slower)["first", 1e-4])[1]
    assert oracle["rollouts_ratio"] == pytest.approx(8**-0.5)
    half = 12.71 * np.log(2) / 2  # t times the standard error of the two logarithms
    assert oracle["rollouts_high"] == pytest.approx(8**-0.5 * np.exp(half))
    # The target is what uniform had at half time: 0.35, at 6,400 rollouts; the oracle has it after 1,600
    early = {row["method"]: row for row in ratios(curves_by_setting(made_up_rows())["first", 1e-4], at_step=50)}
    assert early["oracle"]["reach"] == pytest.approx(1600)
    assert early["oracle"]["rollouts_ratio"] == pytest.approx(0.25)
    assert early["uniform"]["rollouts_ratio"] == pytest.approx(1)
    text = as_text(curves_by_setting(made_up_rows()))
    assert "never" in text
    assert "0.25" in text


def test_the_predictor_benchmark_records_every_group_and_compares_what_the_committed_rows_hold(start):
    run = predictor.record_run(0, steps=2, every=1, start=start)
    assert run["windows"].tolist() == [1] * 16 + [2] * 16
    assert run["at"].tolist() == [1, 2]
    assert set(run["ids"]) <= set(range(len(run["pool"])))
    committed = json.loads(predictor.OUT.read_text())
    rows = predictor.compare(run, 0)
    assert [row["window"] for row in rows] == [1, 2]
    assert {tuple(row) for row in rows} == {tuple(row) for row in committed}
