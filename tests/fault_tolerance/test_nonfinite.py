"""Steps whose log-probabilities are not finite."""

import pytest

from tests.factories import all_finite, make_trainer, messages


def spoil(trainer, steps, value=float("nan")):
    """Make the log-probabilities of the micro-batches of `steps` not finite."""
    plain = trainer._get_per_token_logps_and_entropies

    def spoiled(*args, **kwargs):
        logps, *rest = plain(*args, **kwargs)
        return (logps * value if trainer.state.global_step in steps else logps, *rest)

    trainer._get_per_token_logps_and_entropies = spoiled


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_log_probabilities_that_are_not_finite_cost_a_step_not_the_model(tmp_path, caplog_transformers, value):
    trainer = make_trainer(tmp_path, "off", max_steps=6, save_strategy="no")
    spoil(trainer, {2, 3}, value)
    trainer.train()
    assert all_finite(trainer)
    skipped = [log["dataeff/steps_skipped"] for log in trainer.state.log_history if "dataeff/rounds" in log]
    assert skipped[-1] == 2
    (message,) = messages(caplog_transformers, "is not finite")
    assert message.startswith("The gradient of step 3 is not finite")


def test_without_end_it_is_an_error(tmp_path):
    trainer = make_trainer(tmp_path, "off", max_steps=100, save_steps=2)
    spoil(trainer, range(3, 100))
    with pytest.raises(FloatingPointError, match="not finite in 10 steps in a row"):
        trainer.train()
    assert all_finite(trainer)
