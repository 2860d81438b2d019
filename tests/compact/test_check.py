"""Whether the gradient is the same without what is left out: which parts are tried, kept, and switched off."""

import copy
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer

from tests.compact.test_compaction import PARTS, accelerator, batch_of_rows, columns_of, split
from tests.factories.comparison import messages
from tests.factories.tiny import run, tiny_model
from tests.factories.training import partly_learnable_reward
from trl_dataeff.compact import CompactGRPOTrainer
from trl_dataeff.compact.check import CHECKED, TRIED_ROWS, Check, Outcome
from trl_dataeff.compact.exact import Parts
from trl_dataeff.compact.micro_batches import Rows
from trl_dataeff.compact.trial import GradientTrial, RandomState, as_before


class Trial:
    """
    Of a model whose gradient depends on `what`. Notes the pairs that it compares.

    Attributes:
        limit: the position from which on its gradient is another; `None`: there is none.
        counts_padding: whether its positions count the padding of a prompt.
        of_padding: whether the positions of padding count, too.
        column_limit: the column from which on its gradient is another, whatever the positions are; `None`: none.
    """

    def __init__(
        self,
        what=(),
        *,
        raises=(),
        draws="never",
        limit=None,
        counts_padding=True,
        of_padding=False,
        column_limit=None,
    ):
        self.what = what
        self.raises = raises
        self.draws = draws
        self.limit = limit
        self.counts_padding = counts_padding
        self.of_padding = of_padding
        self.column_limit = column_limit
        self.pairs = []

    compares_logps = False

    def counts_positions(self):
        return True

    def counts_columns(self):
        return self.column_limit is not None

    def compare(self, first, second, *, in_evaluation=False):
        self.pairs.append((first, second, in_evaluation))
        if "whole" in self.raises:
            raise ValueError("a few rows are too few")
        if not second:  # the gradient itself
            return Outcome(1.0 if "no_advantage" in self.what else 0.0, 0.5)
        if first[0].positions is not None or second[0].positions is not None:
            return Outcome(float(self.differs_by_position(first[0], second[0])), 0.1)
        rows = [[row for each in way for row in each.inputs["row"].tolist()] for way in (first, second)]
        together = [[each.inputs["row"].tolist() for each in way] for way in (first, second)]
        left_out = {
            "zero_rows": len(rows[1]) < len(rows[0]),
            # Rows that are left out leave the others together
            "exchange": together[1] != [[row for row in each if row in rows[1]] for each in together[0]],
            "left_padding": any(each.inputs["prompt_ids"].size(1) < 4 for each in second),
            "right_padding": any(columns_of(each.inputs) < 5 for each in second),
            "shared_prompts": any(each.shared is not None for each in second),
            "prompt_scores": any(each.scores_completions for each in second),
        }
        found = {name for name, is_left_out in left_out.items() if is_left_out}
        draws = self.draws == "always" or (self.draws == "training" and not in_evaluation)
        error = "ValueError: no" if found & set(self.raises) else ""
        return Outcome(1.0 if found & set(self.what) else 0.0, 0.1, draws, error=error)

    def differs_by_position(self, first, second):
        if first.positions is None:  # a padded prompt, and positions that count the padding
            return not self.counts_padding
        is_token = torch.cat([second.inputs["prompt_mask"], second.inputs["completion_mask"]], 1).bool()
        if self.column_limit is not None and is_token[:, self.column_limit :].any():
            return True
        if self.limit is None:
            return False
        matters = second.positions if self.of_padding else second.positions[is_token]
        return bool((matters >= self.limit).any())


def rows_with_all(seed: int = 3) -> Rows:
    """Rows of which something of each part is left out."""
    rng = np.random.default_rng(seed)
    return Rows(split(batch_of_rows(rng, 24, 0.8, False), 6), "dapo")


def resumed(check: Check) -> Check:
    """One that has gone through a checkpoint."""
    again = Check(accelerator())
    again.load_state_dict(json.loads(json.dumps(check.state_dict())))
    return again


@pytest.mark.parametrize("how", ["what", "raises"])
@pytest.mark.parametrize("part", CHECKED)
def test_a_part_that_changes_the_gradient_is_switched_off_and_the_others_stay(part, how, caplog_transformers):
    trial = Trial(**{how: (part,)})
    check = Check(accelerator(), model_name="Tiny")
    rows = rows_with_all()
    allowed = check.allowed(rows, PARTS, trial)
    others = ["shared_prompts"] if part == "prompt_scores" else []
    assert allowed == PARTS.without([part, *others])
    (line,) = messages(caplog_transformers, "switched off")
    assert ("raises ValueError: no" in line) == (how == "raises")
    pairs = len(trial.pairs)
    for later in (check, resumed(check)):
        assert later.allowed(rows, PARTS, trial) == later.passed(PARTS, rows.width) == allowed
    assert len(trial.pairs) == pairs, "what was checked is checked again"


def test_where_all_is_the_same_rows_are_compared_once_and_once_at_far_positions_and_in_a_long_sequence():
    trial = Trial()
    assert Check(accelerator()).allowed(rows_with_all(), PARTS, trial) == PARTS
    assert len(trial.pairs) == 3


def test_a_pass_that_draws_is_not_shared_and_the_rest_is_compared_in_evaluation_mode(caplog_transformers):
    trial = Trial(what=("left_padding",), draws="training")
    check = Check(accelerator())
    assert check.allowed(rows_with_all(), PARTS, trial) == PARTS.without(["shared_prompts", "left_padding"])
    assert check.draws
    assert resumed(check).draws
    assert all(in_evaluation for _, _, in_evaluation in trial.pairs[1:])
    assert len(messages(caplog_transformers, "switched off")) == 2


def test_nothing_is_left_out_of_what_draws_in_evaluation_mode_too():
    allowed = Check(accelerator()).allowed(rows_with_all(), PARTS, Trial(draws="always"))
    assert allowed == PARTS.without(CHECKED)


def test_a_trainer_that_needs_its_whole_micro_batches_computes_them(caplog_transformers):
    allowed = Check(accelerator()).allowed(rows_with_all(), PARTS, Trial(raises=("whole",)))
    assert allowed == Parts.none()
    (line,) = messages(caplog_transformers, "switched off")
    assert "ValueError: a few rows are too few" in line


def without_advantages(size: float = 0.0) -> Rows:
    """Rows without a gradient, whose advantages are of this size."""
    batch = batch_of_rows(np.random.default_rng(0), 12, 0.0, False)
    batch["advantages"] = torch.full_like(batch["advantages"], size)
    return Rows(split(batch, 6), "dapo", least_advantage=size)


def test_where_no_row_has_an_advantage_the_gradient_is_tried_and_what_is_not_checked_stays():
    trial = Trial(what=("left_padding",))
    check = Check(accelerator())
    for _ in range(2):
        assert check.allowed(without_advantages(), PARTS, trial) == PARTS.without(set(CHECKED) - {"zero_rows"})
    ((whole, without, _),) = trial.pairs
    assert sum(len(each.inputs["row"]) for each in whole) == TRIED_ROWS
    assert without == []
    assert not check.is_begun
    check.allowed(rows_with_all(), PARTS, trial)
    _, (_, without, _), *_ = trial.pairs
    assert 0 < sum(len(each.inputs["row"]) for each in without) < TRIED_ROWS, "rows are not tried among others"
    pairs = len(trial.pairs)
    for later, more in ((check, 0), (resumed(check), 1)):
        assert later.allowed(without_advantages(), PARTS, trial).zero_rows
        assert len(trial.pairs) == pairs + more
    check.begin_again()  # with another model
    check.allowed(without_advantages(), PARTS, trial)
    assert len(trial.pairs) == pairs + 2


def test_a_model_that_changes_in_every_step_is_not_tried_in_every_step(caplog_transformers):
    trial = Trial()
    check = Check(accelerator())
    rows = rows_with_all()
    tried = []
    for _ in range(50):
        check = resumed(check)  # which must not begin to count again
        check.allowed(rows, PARTS, trial)
        tried.append(len(trial.pairs))
        check.begin_again()
    assert tried[4] > tried[1], "after a change it is tried"
    assert tried[-1] == tried[20]
    assert check.allowed(rows, PARTS, trial) == Parts.none()
    (line,) = messages(caplog_transformers, "switched off")
    assert "the faster update" in line


def test_a_model_that_changes_once_in_a_run_is_tried_in_each_run():
    check = Check(accelerator())
    for _ in range(50):
        check.begin_run()
        check.begin_again()
        assert not check.is_begun
        assert check.allowed(rows_with_all(), PARTS, Trial()) == PARTS
        assert check.is_begun


def test_after_a_change_nothing_is_checked_though_a_part_is_switched_off():
    """A model may draw random numbers now, as with dropout."""
    check = Check(accelerator())
    check.allowed(rows_with_all(), PARTS, Trial(what=("shared_prompts",)))
    assert check.is_begun
    assert check.kept != Parts.all()
    check.begin_again()
    assert not check.is_begun


@pytest.mark.parametrize("is_checked", [False, True])
def test_rows_that_have_a_gradient_without_an_advantage_stay_in_all_batches(is_checked, caplog_transformers):
    """Beside that of advantages, it may be too small to be seen."""
    check = Check(accelerator())
    trial = Trial(what=("no_advantage",))
    if is_checked:
        assert check.allowed(rows_with_all(), PARTS, trial).zero_rows
    assert not check.allowed(without_advantages(), PARTS, trial).zero_rows
    assert not check.allowed(rows_with_all(), PARTS, trial).zero_rows
    (line,) = messages(caplog_transformers, "switched off")
    assert "rows without an advantage have a gradient" in line


def test_where_no_row_has_an_advantage_and_none_can_be_tried_all_stay():
    check = Check(accelerator())
    assert check.allowed(without_advantages(), PARTS, Trial(raises=("whole",))) == PARTS.without(CHECKED)
    assert check.kept == Parts.all(), "a batch with a gradient tells"


def test_rows_that_may_not_be_left_out_are_not_tried():
    trial = Trial()
    parts = PARTS.without(["zero_rows"])
    assert not Check(accelerator()).allowed(without_advantages(), parts, trial).zero_rows
    assert not trial.pairs


def test_where_log_probs_are_compared_rows_without_an_advantage_are_left_out_untried():
    trial = Trial()
    trial.compares_logps = True
    assert Check(accelerator()).allowed(without_advantages(), PARTS, trial).zero_rows
    assert not trial.pairs


def test_advantages_that_are_not_quite_0_are_not_tried():
    """Their gradient is not quite 0 either, and there is none to compare it with."""
    trial = Trial()
    allowed = Check(accelerator()).allowed(without_advantages(1e-8), PARTS, trial)
    assert allowed == PARTS.without(CHECKED)
    assert not trial.pairs


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"limit": 17}, ["left_padding", "right_padding"]),  # beyond what rows reach
        ({"limit": 12}, ["right_padding"]),  # learned positions, or queries that are scaled by them
        ({"limit": 12, "counts_padding": False}, ["left_padding", "right_padding"]),  # they come from the mask
        ({"limit": 12, "of_padding": True}, []),  # frequencies that depend on the last position of all
        ({"column_limit": 16}, ["left_padding", "right_padding"]),
        ({"column_limit": 12}, ["right_padding"]),  # queries that are scaled by columns
    ],
)
def test_positions_decide_what_is_cut(options, kept):
    """Rows are up to 9 tokens wide, so that positions up to 16 are tried."""
    allowed = Check(accelerator()).allowed(rows_with_all(), PARTS, Trial(**options))
    assert [name for name in ("left_padding", "right_padding") if getattr(allowed, name)] == kept


def wider(rows: Rows, columns: int) -> Rows:
    """The same with so many more columns of padding before the prompts."""
    batches = []
    for batch in rows.batches:
        padding = torch.zeros(len(batch["advantages"]), columns, dtype=torch.int64)
        prompts = {key: torch.cat([padding, batch[key]], 1) for key in ("prompt_ids", "prompt_mask")}
        batches.append({**batch, **prompts})
    return Rows(batches, rows.loss_type)


def test_positions_are_tried_again_when_rows_become_wider():
    rows = rows_with_all()
    trial = Trial(limit=100)
    check = Check(accelerator())
    assert check.allowed(rows, PARTS, trial) == PARTS
    assert check.allowed(wider(rows, 7), PARTS, trial) == PARTS
    assert len(trial.pairs) == 3, "16 columns were tried"
    assert not check.allowed(wider(rows, 110), PARTS, trial).left_padding


def test_another_process_may_fail_or_need_a_check():
    """What this process finds alone would leave all out."""

    def gather(own):
        """Another process has rows that matter."""
        return torch.cat([own, torch.ones_like(own)])

    one_length = batch_of_rows(np.random.default_rng(0), 4, 1.0, False)
    one_length["prompt_mask"][:] = 1
    one_length["completion_mask"][:] = 1
    trial = Trial()
    Check(accelerator(2, gather)).allowed(Rows(split(one_length, 2), "dapo"), PARTS, trial)
    assert trial.pairs


def test_processes_compute_equally_many_rows():
    """TRL gathers values by row: this process has one row with a gradient, another one three."""

    def gather(own):
        other = own.clone()
        other[:, 0] = 3  # rows with a gradient among the chosen ones
        return torch.cat([own, other])

    joined = batch_of_rows(np.random.default_rng(1), 8, 1.0, False)
    joined["advantages"][1:] = 0
    trial = Trial()
    Check(accelerator(2, gather)).allowed(Rows(split(joined, 4), "dapo"), PARTS, trial)
    first, second, _ = trial.pairs[0]
    assert sum(len(each.inputs["row"]) for each in first) == TRIED_ROWS
    assert sum(len(each.inputs["row"]) for each in second) == 3
    assert 0 in torch.cat([each.inputs["row"] for each in second])


@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    size=st.integers(1, 4),
    n=st.integers(1, 5),
)
def test_chosen_rows_show_what_is_left_out(seed, share, size, n):
    """Equally many on each process, two of a group where one has two, and padding is cut wherever it could be."""
    rows = Rows(split(batch_of_rows(np.random.default_rng(seed), size * n, share, False), size), "dapo")
    if not rows.have_gradient.any():
        return
    trial = Trial()
    Check(accelerator()).allowed(rows, PARTS, trial)
    first, second, _ = trial.pairs[0]
    chosen = torch.cat([each.inputs["row"] for each in first]).tolist()
    assert len(set(chosen)) == len(chosen) == min(TRIED_ROWS, size * n)
    computed = torch.cat([each.inputs["row"] for each in second]).tolist()
    assert computed == [row for row in chosen if rows.have_gradient[row]]
    if size * n >= TRIED_ROWS and not rows.have_gradient.all():
        assert len(computed) < len(chosen), "no row without a gradient"
    assert all(len(each.inputs["row"]) <= size for each in first), "more rows than TRL's micro-batches have"
    assert rows.have_gradient[chosen[0]]
    active = rows.have_gradient.nonzero()[:, 0].tolist()
    numbers = rows.lengths.prompt_number
    if len({numbers[row] for row in active}) < len(active):
        assert any(each.shared is not None for each in second)
    losses = [sum(float(each.inputs["ref_per_token_logps"].sum()) for each in way) for way in (first, second)]
    assert losses[0] == pytest.approx(losses[1]), "tokens were cut"


# The trial of a real trainer


def state_of(trainer) -> dict:
    of_numpy = str(np.random.get_state(legacy=False))  # noqa: NPY002
    return {
        "random": (random.getstate(), torch.get_rng_state().tolist(), of_numpy),
        "gradients": [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()],
        "metrics": copy.deepcopy(dict(trainer._metrics["train"])),
        "training": [module.training for module in trainer.model.modules()],
        "buffers": [buffer.clone() for buffer in trainer.model.buffers()],
        "hooks": [len(module._forward_pre_hooks) for module in trainer.model.modules()],
        "forwards": ["forward" in vars(module) for module in trainer.model.modules()],
        "report_to": list(trainer.args.report_to),
    }


def assert_equal(a, b) -> None:
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_trial_leaves_no_trace(tmp_path, monkeypatch, accumulated, dropout):
    """Also where gradients of the step are there already."""
    seen = []
    compare = GradientTrial.compare

    def watched(trial, *args, **kwargs):
        before = state_of(trial.trainer)
        outcome = compare(trial, *args, **kwargs)
        after = state_of(trial.trainer)
        seen.append((before, after, outcome))
        return outcome

    monkeypatch.setattr(GradientTrial, "compare", watched)
    model = tiny_model()
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    options = {"rewards": partly_learnable_reward, "max_steps": 3, "trainer": {"model": model}}
    if accumulated:
        options |= {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    run(tmp_path, CompactGRPOTrainer, **options)
    assert seen
    for before, after, _ in seen:
        assert_equal(before, after)
    assert any(outcome.draws for _, _, outcome in seen) == (dropout > 0)


def test_attributes_buffers_containers_and_generators_are_as_they_were():
    """As rotary positions have them, which depend on the longest row so far, and as a subclass counts."""
    module = torch.nn.Module()
    module.register_buffer("inv_freq", torch.ones(3))
    module.longest = 8
    owner = SimpleNamespace(steps=1, scale=torch.ones(1), calls=[1], counts={"a": 1})
    owner.generator = np.random.default_rng(0)
    owner.of_torch = torch.Generator().manual_seed(0)
    first = module.inv_freq
    expected = (np.random.default_rng(0).random(), torch.rand(1, generator=torch.Generator().manual_seed(0)))
    with as_before([module, owner]):
        module.inv_freq[1] = 5.0
        module.register_buffer("inv_freq", torch.zeros(3))
        module.longest = 9
        owner.steps = 2
        owner.scale.mul_(3)
        owner.calls.append(2)
        owner.counts["a"] = 5
        owner.counts["b"] = 6
        owner.later = 7
        owner.generator.random()
        torch.rand(1, generator=owner.of_torch)
    assert module.inv_freq is first
    assert module.inv_freq.tolist() == [1, 1, 1]
    assert (module.longest, owner.steps, owner.scale.item()) == (8, 1, 1.0)
    assert (owner.calls, owner.counts) == ([1], {"a": 1})
    assert not hasattr(owner, "later")
    assert (owner.generator.random(), torch.rand(1, generator=owner.of_torch)) == expected


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, lambda n: random.random()])
def test_what_is_drawn_is_seen_and_drawn_again(draw):
    state = RandomState(torch.device("cpu"))
    assert state.is_present()
    first = draw(1)
    assert not state.is_present()
    state.restore()
    assert draw(1) == first


def test_the_first_update_takes_little_more_than_trls(tmp_path, monkeypatch):
    """The rows that are computed for the check, both ways, are few."""
    rows = []

    def count(module, args):
        if torch.is_grad_enabled():
            rows.append(args[0].numel())

    options = {"rewards": partly_learnable_reward, "max_steps": 1, "per_device_train_batch_size": 16, "train": False}
    tokens = {}
    for trainer_class in (GRPOTrainer, CompactGRPOTrainer):
        rows.clear()
        trainer = run(tmp_path / trainer_class.__name__, trainer_class, **options)
        trainer.model.get_input_embeddings().register_forward_pre_hook(count)
        trainer.train()
        tokens[trainer_class] = sum(rows)
    assert tokens[CompactGRPOTrainer] < 1.2 * tokens[GRPOTrainer]
