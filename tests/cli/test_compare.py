"""`trl-dataeff compare`: what runs needed to reach the same accuracy."""

import json
import math

import pytest

from tests.factories import RUNS, in_browser, needs_chromium
from trl_dataeff.analysis.compare import NothingToCompare, compare, methods_of
from trl_dataeff.cli.main import main
from trl_dataeff.tracking.recorded import RecordedRun, read_run


ALL = [str(RUNS / name) for name in ("uniform-0", "uniform-1", "dots-0", "dots-1", "plain")]


def made(
    tmp_path, name: str, accuracy: list[float], per_step: int, seed: int | None = None, **arguments
) -> RecordedRun:
    lines = [
        {"step": i, "rollouts": per_step * i, "tokens": 10 * per_step * i, "seconds": 2.0 * i, "eval_reward": value}
        for i, value in enumerate(accuracy)
    ]
    about = {} if seed is None else {"arguments": {"seed": seed, **arguments}, "changed": ["seed", *arguments]}
    return RecordedRun(tmp_path / name, name, about, lines)


def test_by_hand(tmp_path):
    slow = made(tmp_path, "slow", [0.0, 0.1, 0.2, 0.3, 0.4], 100)
    fast = made(tmp_path, "fast", [0.0, 0.2, 0.4, 0.6, 0.8], 50)
    result = compare([slow, fast])
    assert result.target == pytest.approx(0.4), "the best that both reach"
    slow_needs, fast_needs = result.needs
    assert (slow_needs["rollouts"].mean, fast_needs["rollouts"].mean) == (pytest.approx(400), pytest.approx(100))
    assert fast_needs["rollouts"].ratio == pytest.approx(0.25)
    assert [fast_needs[x].ratio for x in ("step", "seconds")] == [pytest.approx(0.5)] * 2
    assert math.isnan(fast_needs["rollouts"].low), "no interval from one run"
    never = compare([slow, fast], target=0.6)
    assert math.isinf(never.needs[0]["rollouts"].mean)
    assert never.needs[1]["rollouts"].mean == pytest.approx(150)
    assert any("No run reaches 0.9" in note for note in compare([slow, fast], target=0.9).notes)


def test_runs_that_differ_in_the_seed_alone_are_taken_together(tmp_path):
    options = {"selection": "dots"}
    runs = [made(tmp_path, f"ours-{seed}", [0.0, 0.5, 1.0], 10 + seed, seed, **options) for seed in (0, 1)]
    others = [made(tmp_path, f"base-{seed}", [0.0, 0.25, 0.5], 10 + seed, seed) for seed in (0, 1)]
    assert [(method.name, len(method.runs)) for method in methods_of([*others, *runs])] == [("base", 2), ("ours", 2)]
    need = compare([*others, *runs], target=0.5).needs[1]["rollouts"]
    assert need.ratio == pytest.approx(0.5)
    assert (need.ratio_low, need.ratio_high) == (pytest.approx(0.5), pytest.approx(0.5)), "paired by seed"
    assert need.low < need.mean < need.high
    plain = [made(tmp_path, name, [0.0, 1.0], 10) for name in ("trl_seed0", "trl_seed1", "other")]
    assert [(method.name, len(method.runs)) for method in methods_of(plain)] == [("trl", 2), ("other", 1)]


def test_runs_are_not_paired_where_a_seed_comes_up_twice(tmp_path):
    base = [made(tmp_path, f"a-{i}", [0.0, 0.5], rollouts, 42) for i, rollouts in enumerate((2000, 7000))]
    ours = [made(tmp_path, f"b-{i}", [0.0, 0.5], 1000, 42, selection="dots") for i in range(2)]
    for order in (base, base[::-1]):
        need = compare([*order, *ours], target=0.5).needs[1]["rollouts"]
        assert need.ratio == pytest.approx(1000 / math.sqrt(2000 * 7000))
        assert math.isnan(need.ratio_low)


def test_what_makes_two_runs_one_method(tmp_path):
    def about(**changes):
        run = made(tmp_path, "run", [0.0, 0.5], 10, seed=changes.pop("seed", 0), **changes.pop("arguments", {}))
        run.about |= {"dataset": {"size": 10}, "settings": {"reward_functions": ["a"], "number of processes": 1}}
        for part, values in changes.items():
            run.about[part] = run.about[part] | values
        return run

    base = about()
    for same in (about(seed=1), about(arguments={"resume_from_checkpoint": "last"})):
        assert len(methods_of([base, same])) == 1
    for other in (
        about(dataset={"size": 5}),
        about(settings={"reward_functions": ["a", "b"]}),
        about(settings={"number of processes": 2}),
    ):
        assert len(methods_of([base, other])) == 2


def test_time_is_that_of_steps_where_a_run_is_of_plain_trl(tmp_path):
    """One run, as our logs have it and as those of the Trainer: nothing differs, though our clock counts all that happens."""
    ours = read_run(RUNS / "dots-0")
    history = [{k: v for k, v in line.items() if k not in ("rollouts", "tokens", "seconds")} for line in ours.lines]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    result = compare([read_run(tmp_path / "plain"), ours], target=0.4)
    assert result.needs[1]["seconds"].ratio == pytest.approx(1)
    assert any("Time is that of optimizer steps alone" in note for note in result.notes)


def test_without_evaluation_the_training_reward_is_compared_and_it_says_so(tmp_path):
    run = RecordedRun(tmp_path, "a", {}, [{"step": i, "reward": i / 4} for i in range(4)])
    result = compare([run, run])
    assert result.metric == "reward"
    assert any("favours selection" in note for note in result.notes)
    assert list(result.needs[0]) == ["step"], "rollouts, tokens and seconds are not known"


def test_a_metric_that_a_run_lacks(tmp_path):
    with pytest.raises(
        NothingToCompare, match=r"a never logged a number as `eval_accuracy`\. All runs have: eval_reward"
    ):
        compare([made(tmp_path, "a", [0.0, 1.0], 10)], metric="eval_accuracy")


def test_recorded_runs(capsys):
    assert main(["compare", *ALL, "--rollouts_per_step", "64", "--target", "0.45"]) == 0
    out = capsys.readouterr().out
    for text in (
        "uniform (2 runs)",
        "dots (2 runs)",
        "plain (1 run)",
        "rollouts to 0.45",
        "steps to 0.45",
        "time to 0.45",
    ):
        assert text in out


def test_markdown(capsys):
    assert main(["compare", *ALL[:4], "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
    assert "| uniform | 2 |" in table[2]


@needs_chromium
def test_the_page_in_a_browser(tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "compare.html"
    argv = ["compare", *ALL, "--rollouts_per_step", "64", "--output", str(page), "--png", str(tmp_path / "png")]
    assert main(argv) == 0
    script = 'seen.plots = document.querySelectorAll(".plot svg").length; seen.rows = document.querySelectorAll("tbody tr").length;'
    seen, console = in_browser(page, tmp_path, script)
    assert (seen["errors"], console) == ([], "")
    assert (seen["plots"], seen["rows"]) == (4, 3)
    assert len(list((tmp_path / "png").iterdir())) == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([ALL[0], "--metric", "eval_rewards"], "uniform-0 never logged a number as `eval_rewards`. All runs have: "),
        ([ALL[0], "--target", "nan"], "`--target` is nan"),
    ],
)
def test_wrong_input_is_said_in_a_sentence(capsys, argv, message):
    assert main(["compare", *argv]) == 2
    assert message in capsys.readouterr().err
