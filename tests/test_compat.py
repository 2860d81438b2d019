"""What is checked of TRL when the trainer is imported, and trainers whose loss does not pass through ours."""

import inspect
import re
import sys
import warnings

import pytest
import torch
import trl
from trl import GRPOTrainer

import trl_dataeff.trainer
from tests.factories.comparison import all_finite, messages
from tests.factories.configurations import SHARE
from tests.factories.other_trl import load
from tests.factories.tiny import logged, run
from tests.factories.training import partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer, compat


# What is checked of TRL

RETURN = "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images"
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
    "return value shortened": (f"{RETURN}, tool_images", RETURN, "`_generate` returns 7 values, and not 8"),
    "attribute renamed": ("self._step", "self._micro_step", "no method uses `self._step`$"),
}


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """TRL's trainer with a replacement in its source."""

    def change(old, new):
        source = inspect.getsource(sys.modules[GRPOTrainer.__module__])
        assert old in source
        return load(monkeypatch, "trl.trainer.changed", source.replace(old, new), tmp_path / "changed.py").GRPOTrainer

    return change


@pytest.mark.parametrize("change", CHANGES)
def test_another_trl_is_an_error_that_names_the_difference_and_the_versions(change, changed, monkeypatch):
    old, new, said = CHANGES[change]
    other = changed(old, new)
    monkeypatch.setattr(compat, "version", {"trl": "1.17.0", "transformers": "6.0.0"}.get)
    with pytest.raises(ImportError, match=r"trl 1\.17\.0 and transformers 6\.0\.0: ") as raised:
        compat.check(other)
    found = str(raised.value).split("6.0.0: ")[1].split(". Install")[0]
    assert found.count(";") == 0
    assert re.search(said, found), found


def test_it_is_checked_when_the_trainer_is_imported(changed, ours_on):
    with pytest.raises(ImportError, match="returns 7 values"):
        ours_on(changed(*CHANGES["return value shortened"][:2]))


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
        return sum(p.square().sum() for p in model.parameters())


class OwnComputeLoss(DataEfficientGRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(p.square().sum() for p in model.parameters())


class OwnLogps(DataEfficientGRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return GRPOTrainer.__dict__["_get_per_token" + "_logps_and_entropies"](self, *args, **kwargs)


class MoreLoss(DataEfficientGRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + 0.0


@pytest.fixture
def ours_on(monkeypatch, tmp_path):
    """Our trainer as it is when another class stands in the place of TRL's while it is imported."""

    def make(base):
        monkeypatch.setattr(trl, "GRPOTrainer", base)
        source, path = inspect.getsource(trl_dataeff.trainer), tmp_path / "ours.py"
        return load(monkeypatch, f"trl_dataeff.on_{base.__name__}", source, path).DataEfficientGRPOTrainer

    return make


REUSE = {**SHARE, "selection": "dots", "compact_update": True, "max_steps": 6}


def test_on_unsloths_trainer_selection_works_and_nothing_is_reused(ours_on, tmp_path, caplog_transformers):
    trainer = run(tmp_path, ours_on(UnslothGRPOTrainer), **REUSE)
    assert len(messages(caplog_transformers, "is that of `GRPOTrainer` and each batch is one round")) == 1
    assert type(trainer.selector).__name__ == "DotsSelector"
    assert trainer.collector.buffer is None
    assert trainer.collector.counters["rollouts_generated"] == 6 * 8
    assert any(norm > 0 for (norm,) in logged(trainer, "grad_norm"))
    assert all_finite(trainer)


@pytest.mark.parametrize("trainer_class", [OwnLoss, OwnComputeLoss, OwnLogps])
def test_a_subclass_that_overrides_the_loss_reuses_nothing(trainer_class, tmp_path, caplog_transformers):
    trainer = run(tmp_path, trainer_class, **{**REUSE, "max_steps": 2})
    assert len(messages(caplog_transformers, "is that of `GRPOTrainer` and each batch is one round")) == 1
    assert trainer.collector.buffer is None
    assert not any("dataeff/update/tokens" in log for log in trainer.state.log_history)


@pytest.mark.parametrize("compact_update", [True, False])
def test_a_faster_update_that_is_lost_is_said(compact_update, tmp_path, caplog_transformers):
    run(tmp_path, OwnLoss, train=False, compact_update=compact_update)
    assert len(messages(caplog_transformers, "is that of `GRPOTrainer`. ")) == compact_update


def test_a_subclass_that_calls_super_reuses(tmp_path, caplog_transformers):
    trainer = run(tmp_path, MoreLoss, **REUSE)
    assert not messages(caplog_transformers, "is that of `GRPOTrainer` and each batch is one round")
    assert logged(trainer, "dataeff/replay/ess")


@pytest.mark.parametrize("base", [UnslothGRPOTrainer, None])
@pytest.mark.parametrize("accumulated", [{}, {"steps_per_generation": 2, "num_iterations": 2}])
def test_a_loss_that_is_not_seen_through_is_found_out_before_its_first_update(
    base, accumulated, ours_on, tmp_path, monkeypatch
):
    ours = OwnComputeLoss if base is None else ours_on(base)
    monkeypatch.setattr(compat, "corrects_loss", lambda *classes: True)
    trainer = run(tmp_path, ours, train=False, **REUSE, **accumulated)
    stale, plain = [], trainer.collector.collect

    def collect(*args):
        batch = plain(*args)
        stale.append(bool(batch.trained_stale))
        return batch

    trainer.collector.collect = collect
    with pytest.raises(RuntimeError, match="without their correction"):
        trainer.train()
    assert not any(stale[:-1]), "a replayed batch has updated the model"


def test_a_loss_that_calls_itself_within_is_scaled_once(ours_on, tmp_path):
    options = {**REUSE, "loss_type": "grpo", "rewards": partly_learnable_reward}
    once = run(tmp_path / "a", **options)
    twice = run(tmp_path / "b", ours_on(AgainWithin), **options)
    assert logged(once, "loss", "grad_norm") == logged(twice, "loss", "grad_norm")
    assert any(norm for (norm,) in logged(once, "grad_norm"))
