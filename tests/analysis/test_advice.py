"""What a run's owner is told to act on."""

import pytest

from tests.factories import RUNS
from trl_dataeff.analysis.advice import advice_of
from trl_dataeff.tracking.recorded import RecordedRun, read_run


REPLAY = {"replay_fraction": 0.5, "num_generations": 8, "per_device_train_batch_size": 16, "steps_per_generation": 1}


def said(tmp_path, *lines: dict, **arguments) -> list[str]:
    own = [{"step": i + 1, "eval_reward": 0.5, **line} for i, line in enumerate(lines)]
    return [item.what for item in advice_of(RecordedRun(tmp_path, "made", {"arguments": arguments}, own))]


@pytest.mark.parametrize(
    ("metrics", "arguments", "expected"),
    [
        ({"replay/ess": 0.9, "rollouts_replayed": 8}, REPLAY, None),
        ({"rollouts_replayed": 0}, REPLAY, "Replay had no effect: no stored group"),
        ({"rollouts_replayed": 0}, REPLAY | {"per_device_train_batch_size": 8}, "one group per generation batch"),
        ({"rollouts_replayed": 0}, {}, None),
        ({"replay/ess": 0.3, "rollouts_replayed": 8}, REPLAY, "effective sample size is 30%"),
        ({"replay/clipped_share": 0.5, "rollouts_replayed": 8}, REPLAY, "50% of the replayed tokens have no gradient"),
        ({"replay/capped_share": 0.2, "rollouts_replayed": 8}, REPLAY, "held at `replay_ratio_cap`"),
        ({"reward_faults": 3}, {}, "3 rewards were non-numeric"),
        ({"steps_skipped": 2}, {}, "2 optimizer steps were skipped"),
        ({"unscorable_ratio": 0.2}, {}, "20% of the completions got no score"),
        ({"padded_groups": 2.5}, {}, "Rounds of dynamic sampling ran out: 2.5"),
        ({"effective_ratio": 0.1, "easy_ratio": 0.8, "hard_ratio": 0.1}, {}, "80% are solved by every completion"),
        ({"effective_ratio": 0.1, "easy_ratio": 0.1, "hard_ratio": 0.8}, {}, "80% are solved by no completion"),
    ],
)
def test_what_is_said(tmp_path, metrics, arguments, expected):
    line = {f"dataeff/{name}": value for name, value in metrics.items()}
    texts = said(tmp_path, line, line, line, **arguments)
    assert ([] if expected is None else [expected]) == [expected for text in texts if expected and expected in text]
    assert len(texts) == (expected is not None)


def test_a_run_without_evaluation(tmp_path):
    run = RecordedRun(tmp_path, "made", {}, [{"step": 1, "reward": 0.5}])
    assert ["no evaluation" in item.what for item in advice_of(run)] == [True]


def test_completions_that_are_cut_off(tmp_path):
    assert "40% of the completions are cut off" in said(tmp_path, {"completions/clipped_ratio": 0.4})[0]


def test_of_a_recorded_run_everything_has_a_remedy():
    found = advice_of(read_run(RUNS / "dots-0"))
    assert found
    assert all(item.what.endswith(".") and item.do.endswith(".") for item in found)
