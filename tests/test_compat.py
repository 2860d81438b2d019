"""What is checked of TRL when the trainer is imported, and trainers whose loss does not pass through ours."""

import re
import warnings

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from tests.factories.comparison import all_finite, assert_close, assert_identical, messages
from tests.factories.configurations import SHARE
from tests.factories.other_trl import changed_trl, ours_on
from tests.factories.tiny import even_length_reward, logged, run
from tests.factories.training import partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer, compat


# What is checked of TRL

#: What another version of TRL might have, as replacements in its source, and what is said of it
CHANGES = {
    "method renamed": ("def _calculate_rewards(", "def _score(", "`_calculate_rewards` does not exist"),
    "parameter added": (
        "def _generate(self, prompts: list)",
        "def _generate(self, prompts: list, images=None)",
        r"`_generate` takes \(self, prompts: list, images=None\), and not \(prompts\)",
    ),
    "parameter renamed": (
        "def _compute_loss(self, model, inputs)",
        "def _compute_loss(self, model, batch)",
        r"`_compute_loss` takes \(self, model, batch\), and not \(model, inputs\)",
    ),
    "parameter required": (
        "def _log_completion_extra(self, column: str",
        "def _log_completion_extra(self, mode, column: str",
        r"`_log_completion_extra` takes \(self, mode, column: str.*\), and not \(column, values, ...\)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_trl_is_an_error_that_names_the_difference_and_the_versions(change, monkeypatch, tmp_path):
    old, new, said = CHANGES[change]
    other = changed_trl(monkeypatch, tmp_path, old, new)
    monkeypatch.setattr(compat, "version", {"trl": "1.17.0", "transformers": "6.0.0"}.get)
    with pytest.raises(ImportError, match=r"trl 1\.17\.0 and transformers 6\.0\.0: ") as raised:
        compat.check(other)
    found = str(raised.value).split("6.0.0: ")[1].split(". Install")[0]
    assert found.count(";") == 0
    assert re.search(said, found), found


def test_it_is_checked_when_the_trainer_is_imported(monkeypatch, tmp_path):
    other = changed_trl(monkeypatch, tmp_path, *CHANGES["parameter added"][:2])
    with pytest.raises(ImportError, match="`_generate` takes"):
        ours_on(monkeypatch, tmp_path, other)


@pytest.mark.parametrize(("version", "warned"), [("1.99.0", 1), ("1.14.1", 1), ("1.16.3", 0), ("1.14.2", 0)])
def test_an_untested_trl_that_fits_is_one_warning(version, warned, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda name: version)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compat.check(GRPOTrainer)
    assert [f"not with trl {version}" in str(w.message) for w in seen] == [True] * warned


# A loss that does not pass through ours


class UnslothGRPOTrainer(GRPOTrainer):
    """As Unsloth changes TRL's trainer: `compute_loss` is its own, and asks for log-probs that it does not get."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if args[6:]:  # a further parameter, `compute_efficient`
            return None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].size(1)
        logps = self._get_per_token_logps_and_entropies(model, ids, mask, length, None, False, True)[0]
        assert logps is None
        logps = super()._get_per_token_logps_and_entropies(model, ids, mask, length)[0]
        ratio = (logps - inputs.get("old_per_token_logps", logps.detach())).exp()
        return -(ratio * inputs["advantages"][:, None] * inputs["completion_mask"]).mean()


class AgainWithin(GRPOTrainer):
    """As Liger makes TRL 1.14 and 1.15: the loss calls itself once more, on the model that it has unwrapped."""

    is_within = False

    def _compute_loss(self, model, inputs):
        if self.is_within:
            return super()._compute_loss(model, inputs)
        self.is_within = True
        loss = self._compute_loss(model, inputs)
        self.is_within = False
        return loss


class OwnLoss(DataEfficientGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return inputs["advantages"].square().sum() * sum(p.square().sum() for p in model.parameters())


class OwnComputeLoss(DataEfficientGRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(p.square().sum() for p in model.parameters())


class OwnLogps(DataEfficientGRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return GRPOTrainer.__dict__["_get_per_token" + "_logps_and_entropies"](self, *args, **kwargs)


class OwnInputs(DataEfficientGRPOTrainer):
    """Changes micro-batches on their way to TRL's loss."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * 2})


class MoreLoss(DataEfficientGRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + 0.0


REUSE = {**SHARE, "selection": "dots", "compact_update": True, "max_steps": 6}


NOT_REACHED = "does not call `CompactGRPOTrainer._compute_loss`"
OTHERS = "not as TRL has made them"


def in_trl(pattern: type) -> type:
    """A subclass of ours as one of TRL's trainer."""
    return type(f"Trl{pattern.__name__}", (GRPOTrainer,), {k: v for k, v in vars(pattern).items() if k[:2] != "__"})


class TrlOwnInputs(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * 2})


UPDATE = {"rewards": partly_learnable_reward, "max_steps": 5, "optim": "sgd", "learning_rate": 0.01}


@pytest.mark.parametrize("pattern", [OwnLoss, OwnComputeLoss])
def test_a_loss_that_does_not_reach_ours_trains_as_in_trl_and_is_warned_of_once(
    pattern, tmp_path, caplog_transformers
):
    reference = run(tmp_path / "a", in_trl(pattern), **UPDATE)
    ours = run(tmp_path / "b", pattern, **UPDATE, compact_update=True)
    assert_identical(reference, ours, least=50)
    (found,) = messages(caplog_transformers, NOT_REACHED)
    assert pattern.__name__ in found
    assert not logged(ours, "dataeff/update/tokens_saved")


def test_it_is_warned_of_when_a_generation_batch_with_a_gradient_has_ended(tmp_path, caplog_transformers):
    def reward(completion_ids, **kwargs):
        return [float(i % 2) for i in range(len(completion_ids))]

    options = {**UPDATE, "rewards": reward, "compact_update": True}
    run(tmp_path / "a", OwnLoss, **{**options, "max_steps": 1})
    assert not messages(caplog_transformers, NOT_REACHED)
    run(tmp_path / "b", OwnLoss, **{**options, "max_steps": 2})
    assert len(messages(caplog_transformers, NOT_REACHED)) == 1


@pytest.mark.parametrize("trainer_class", [OwnLoss, OwnComputeLoss, OwnInputs])
def test_nothing_is_said_where_there_is_no_faster_update(trainer_class, tmp_path, caplog_transformers):
    run(tmp_path, trainer_class, **UPDATE, compact_update=False)
    assert not messages(caplog_transformers, "compact_update")


@pytest.mark.parametrize("accumulated", [{}, {"gradient_accumulation_steps": 2}])
def test_micro_batches_that_a_subclass_changes_are_computed_trls_way(accumulated, tmp_path, caplog_transformers):
    reference = run(tmp_path / "a", TrlOwnInputs, **UPDATE, **accumulated)
    ours = run(tmp_path / "b", OwnInputs, **UPDATE, **accumulated, compact_update=True)
    assert_identical(reference, ours, least=50)
    assert len(messages(caplog_transformers, OTHERS)) == 1
    assert not messages(caplog_transformers, NOT_REACHED)
    assert {saved for (saved,) in logged(ours, "dataeff/update/tokens_saved")} == {0}


def test_log_probs_of_a_subclass_are_those_of_the_loss(tmp_path, caplog_transformers):
    """The update is ours, as only the forward pass is the subclass's."""
    reference = run(tmp_path / "a", GRPOTrainer, **UPDATE)
    ours = run(tmp_path / "b", OwnLogps, **UPDATE, compact_update=True)
    assert_close(reference, ours)
    assert logged(ours, "dataeff/update/tokens_saved")
    assert not messages(caplog_transformers, "compact_update")


def test_on_unsloths_trainer_selection_works_and_the_update_is_its_own(monkeypatch, tmp_path, caplog_transformers):
    options = {"selection": "dots", "compact_update": True, "max_steps": 6, "rewards": even_length_reward}
    trainer = run(tmp_path, ours_on(monkeypatch, tmp_path, UnslothGRPOTrainer), **options)
    assert len(messages(caplog_transformers, NOT_REACHED)) == 1
    assert type(trainer.selector).__name__ == "DotsSelector"
    assert trainer._dataeff_observer.counters["rollouts_generated"] == 6 * 8
    assert any(norm > 0 for (norm,) in logged(trainer, "grad_norm"))
    assert all_finite(trainer)


def test_a_subclass_that_calls_super_reuses(tmp_path, caplog_transformers):
    trainer = run(tmp_path, MoreLoss, **REUSE)
    (said,) = messages(caplog_transformers, "compact_update")
    assert "MoreLoss has a loss of its own" in said
    assert logged(trainer, "dataeff/replay/ess")
    assert logged(trainer, "dataeff/update/tokens_saved")


@pytest.mark.parametrize("base", ["Unsloth's", OwnComputeLoss, OwnLoss, OwnLogps])
@pytest.mark.parametrize("accumulated", [{}, {"steps_per_generation": 2, "num_iterations": 2}])
def test_a_loss_without_the_correction_is_found_out_before_its_first_update(base, accumulated, monkeypatch, tmp_path):
    ours = ours_on(monkeypatch, tmp_path, UnslothGRPOTrainer) if base == "Unsloth's" else base
    trainer = run(tmp_path, ours, train=False, **REUSE, **accumulated)
    stale, plain = [], trainer.collector.collect

    def collect(*args):
        batch = plain(*args)
        stale.append(bool(batch.trained_stale))
        return batch

    trainer.collector.collect = collect
    with pytest.raises(RuntimeError, match=r"without their correction|not corrected yet"):
        trainer.train()
    assert not any(stale[:-1]), "a replayed batch has updated the model"


def test_a_loss_that_calls_itself_within_is_scaled_once(monkeypatch, tmp_path):
    options = {**REUSE, "loss_type": "grpo", "rewards": partly_learnable_reward}
    once = run(tmp_path / "a", **options)
    twice = run(tmp_path / "b", ours_on(monkeypatch, tmp_path, AgainWithin), **options)
    # The second computes rows without a gradient, too, which changes rounding
    names = ("loss", "grad_norm")
    np.testing.assert_allclose(logged(twice, *names), logged(once, *names), rtol=1e-5, atol=1e-7)
    assert any(norm for (norm,) in logged(once, "grad_norm"))
