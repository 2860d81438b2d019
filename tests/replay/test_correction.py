"""The correction for rollouts of an earlier policy, against the objective written out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.factories.configurations import SHARE
from tests.factories.groups import make_group
from tests.factories.training import Checked, Watched, dynamic
from trl_dataeff.replay.correction import LossCorrection, LossOptions, behavior_ratio, correct
from trl_dataeff.replay.logprobs import behavior_tensors, groups_in_batch
from trl_dataeff.rollouts.distributed import Processes


NAN = float("nan")


def micro_batch(**fields) -> dict:
    """A replayed row and a fresh one, of three tokens."""
    return {
        "advantages": torch.tensor([2.0, -1.0]),
        "behavior_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0], [NAN, NAN, NAN]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "replayed": torch.tensor([True, False]),
        **fields,
    }


PRESENT = torch.tensor([[-1.5, -1.5, -1.0], [-0.5, -0.6, -0.7]])
CORRECTION = {"clip": "proximal", "cap": 10.0, "level": "token", "loss_type": "grpo"}


@pytest.mark.parametrize("advantages", [torch.tensor([2.0, -1.0]), torch.tensor([[2.0] * 3, [-1.0] * 3])])
@pytest.mark.parametrize("shape", [(2, 3), (2, 1)])
def test_with_vllm_replayed_rows_have_our_ratio_and_fresh_rows_trls(shape, advantages):
    """TRL's default masks a whole sequence whose ratio is far off, which would throw a paid rollout away."""
    inputs = micro_batch(importance_sampling_ratio=torch.full(shape, 0.25), advantages=advantages)
    inputs.update(correct(inputs, PRESENT, **CORRECTION).values)
    assert inputs["importance_sampling_ratio"][0].eq(1).all()
    assert inputs["importance_sampling_ratio"][1].eq(0.25).all()
    torch.testing.assert_close(inputs["advantages"][0], 2.0 * torch.tensor([-0.5, 0.5, 0.0]).exp())
    assert inputs["advantages"][1].eq(-1).all()
    # TRL's off-policy mask compares these with the present policy: for a replayed row, those of its own sampler
    expected = torch.stack([torch.tensor([-1.0, -2.0, -3.0]), PRESENT[1]])
    torch.testing.assert_close(inputs["sampling_per_token_logps"], expected)


def test_vespo_gets_the_ratio_where_it_looks_for_it():
    """It takes the sum of log ratios over the row without a mask: 1 outside of the completion."""
    inputs = micro_batch()
    inputs.update(correct(inputs, PRESENT, **{**CORRECTION, "loss_type": "vespo"}).values)
    expected = torch.tensor([[-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]).exp()
    torch.testing.assert_close(inputs["importance_sampling_ratio"], expected)
    assert inputs["advantages"].flatten().tolist() == [2.0, -1.0]


def test_a_log_prob_that_is_not_known_has_ratio_one():
    logps = [np.array([NAN], np.float32), np.array([-1.0, NAN], np.float32)]
    group = make_group(behavior_logps=logps)
    tensors = behavior_tensors(groups_in_batch([group], {group: "replayed"}), torch.zeros(2, 2))
    assert tensors["replayed"].all()
    ratio = behavior_ratio(-torch.ones(2, 2), tensors["behavior_per_token_logps"], torch.ones(2, 2), level="token")
    assert ratio.eq(1).all()
    unknown = make_group()
    with pytest.raises(RuntimeError, match="The leftover group of prompt 3 has no log-probs"):
        behavior_tensors(groups_in_batch([unknown], {unknown: "leftover"}), torch.zeros(2, 2))


OPTIONS = LossOptions(CORRECTION["loss_type"], CORRECTION["level"], epsilon=(0.2, 0.2))


def correction(**options) -> LossCorrection:
    defaults = {"clip": CORRECTION["clip"], "cap": CORRECTION["cap"], "processes": Processes()}
    return LossCorrection(**{**defaults, **options})


def test_the_loss_gets_a_copy_that_is_corrected_once_it_has_its_log_probs():
    old = torch.stack([PRESENT[0], PRESENT[1] - 0.1])
    loss, inputs = correction(cap=1.2), micro_batch(old_per_token_logps=old)
    before = dict(inputs)
    own, _ = loss.apply(inputs, PRESENT.clone().requires_grad_(), OPTIONS, has_new_ratio=False)
    assert inputs == before, "TRL uses its own again"
    torch.testing.assert_close(own["advantages"][0], 2 * torch.tensor([-0.5, 0.5, 0.0]).exp().clamp(max=1.2))
    torch.testing.assert_close(own["old_per_token_logps"], torch.stack([PRESENT[0], old[1]]))
    assert not any(own[name].requires_grad for name in ("advantages", "old_per_token_logps"))


def test_the_effective_sample_size_is_that_of_all_processes():
    other = torch.tensor([2.0, 5.0, 17.0, 1.0])  # tokens, sums of the ratio and of its square, clipped tokens
    loss = correction(processes=Processes(0, 2, gather=lambda own: torch.cat([own, other])), replays=True)
    _, metrics = loss.apply(micro_batch(), PRESENT, OPTIONS, has_new_ratio=False)
    own = torch.tensor([-0.5, 0.5]).exp()
    assert metrics["replay/ess"] == pytest.approx((own.sum().item() + 5) ** 2 / 4 / ((own**2).sum().item() + 17))
    assert metrics["replay/clipped_share"] == 1 / 4
    loss = correction(replays=True)
    _, metrics = loss.apply(micro_batch(replayed=torch.tensor([False, False])), PRESENT, OPTIONS, has_new_ratio=False)
    assert np.isnan(list(metrics.values())).all(), "without replayed tokens"


@pytest.mark.parametrize(("clip", "share"), [("proximal", 0), ("behavior", 3 / 5)])
def test_clipped_share(clip, share):
    """Of five tokens of replayed rows; pi_theta is 1.1 times pi_old everywhere. By the behavior policy, 1.43 is above
    the clip with a positive advantage, 0.55 below it with a negative one, and 1.43 above the cap.
    """
    ratio = torch.tensor([[0.9, 1.3, 1.0], [1.3, 0.5, 9.0]])  # pi_old / pi_behavior
    inputs = micro_batch(
        old_per_token_logps=PRESENT,
        behavior_per_token_logps=PRESENT - ratio.log(),
        completion_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        replayed=torch.tensor([True, True]),
    )
    loss = correction(clip=clip, cap=1.2, replays=True)
    _, metrics = loss.apply(inputs, PRESENT + np.log(1.1), OPTIONS, has_new_ratio=False)
    assert metrics["replay/clipped_share"] == pytest.approx(share)


REPLAY = {**SHARE, "max_rollout_rounds": 1}
BY_HAND = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo"]


RUNS = {
    "replayed, aligned": {**REPLAY, "steps_per_generation": 1},
    "replayed, misaligned": {**REPLAY, "steps_per_generation": 2},
    "leftover, aligned": {"rollout_margin": 3.0, "steps_per_generation": 1, "max_steps": 24},
    "leftover, misaligned": {"rollout_margin": 2.0, "steps_per_generation": 2},
}
LOSSES = {
    **{f"{loss}, {name}": {"loss_type": loss, **fields} for loss in BY_HAND for name, fields in RUNS.items()},
    "sequences": {**REPLAY, "loss_type": "grpo", "importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("clip", ["proximal", "behavior"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_by_hand(tmp_path, name, clip):
    """Aligned: pi_old is that of the loss's own forward pass. Misaligned: TRL has put it into the batch."""
    options = {"replay_clip": clip, "replay_ratio_cap": 1.1, "learning_rate": 3e-2, **LOSSES[name]}
    trainer = dynamic(tmp_path, trainer_class=Checked, **options)
    assert trainer.checked >= 1
    assert trainer.largest > 1.1, "the cap was never reached"
    if clip == "behavior" and name != "sequences":  # whose means stay below the cap
        assert trainer.held, "no ratio was held at the cap"


def reading_before(key: str, read=lambda inputs, key: inputs[key]) -> type[Watched]:
    """A trainer on a TRL whose loss reads a value of the micro-batch before its forward pass."""

    class ReadsEarly(Watched):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            if torch.is_grad_enabled():  # in the loss
                read(self._dataeff_in_loss, key)
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    return ReadsEarly


EARLY = {
    "item": lambda inputs, key: inputs[key],
    "get": lambda inputs, key: inputs.get(key),
    "in": lambda inputs, key: key in inputs,
    "a copy": lambda inputs, key: {**inputs},
}


@pytest.mark.parametrize("way", EARLY)
@pytest.mark.parametrize("key", ["advantages", "old_per_token_logps"])
def test_a_loss_that_reads_values_before_its_forward_pass_is_an_error(tmp_path, key, way):
    """The correction is put into the micro-batch when the loss has its log-probs: before, that would be too early."""
    options = {**REPLAY, "steps_per_generation": 2}
    with pytest.raises(RuntimeError, match=r"reads `\w+` before its forward pass.*super\(\)"):
        dynamic(tmp_path, trainer_class=reading_before(key, EARLY[way]), **options)


def test_what_is_not_rewritten_may_be_read_before_the_forward_pass(tmp_path):
    trainer = dynamic(tmp_path, trainer_class=reading_before("completion_ids"), **REPLAY)
    assert any(batch.replayed for batch in trainer.batches)


class Policy(torch.nn.Module):
    """Its log-probs are its parameters, so that what a loss does with a token is its gradient."""

    def __init__(self, values: torch.Tensor):
        super().__init__()
        self.values = torch.nn.Parameter(values)

    def forward(self, input_ids, **kwargs):
        return SimpleNamespace(log_probs=self.values, entropy=torch.zeros_like(self.values))


def ready(tmp_path, **options) -> Watched:
    """A trainer whose loss can be called."""
    trainer = dynamic(tmp_path, **{**REPLAY, "steps_per_generation": 1, "train": False, **options})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def rows(ids: torch.Tensor, advantages: torch.Tensor) -> dict:
    """A micro-batch of completions `ids` of one-token prompts."""
    return {
        "prompt_ids": torch.zeros(len(ids), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(ids), 1, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(ids.numel()),
    }


EVERY_LOSS = [*BY_HAND, "luspo", "sapo", "vespo"]


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", EVERY_LOSS)
def test_a_corrected_kl_term_is_weighed_by_the_whole_ratio(tmp_path, loss_type, level, corrected):
    """Without advantages TRL's loss is its KL term alone.

    It doubles where the policy that sampled was half as likely to.
    """
    options = {"loss_type": loss_type, "beta": 0.5, "use_bias_correction_kl": corrected}
    options |= {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "importance_sampling_level": level}
    trainer = ready(tmp_path, **options)
    trainer.current_gradient_accumulation_steps = 2
    logps, results = torch.tensor([[-1.0, -2.0, -0.1], [-0.5, -0.7, -3.0]]), []
    inputs = rows(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2))
    inputs |= {"completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "num_items_in_batch": torch.tensor(17)}
    inputs["ref_per_token_logps"] = logps + torch.tensor([0.3, -0.6, 0.1])
    replayed = {"replayed": torch.tensor([True, True]), "behavior_per_token_logps": logps - np.log(2)}
    for fields in ({}, replayed):
        policy = Policy(logps.clone())
        loss = trainer.compute_loss(policy, {**inputs, **fields})
        loss.backward()
        results.append(torch.cat([loss.detach().view(1), policy.values.grad.flatten()]))
    assert results[0].abs().max() > 1e-3
    torch.testing.assert_close(results[1], (1 + corrected) * results[0])


#: Of rows of two tokens: replayed ones with ratios up to 18, 1.1, 18, and a fresh one. The first and third have the
#: mean 9
RATIOS = torch.tensor([[18.0, 4.5], [1.1, 1.1], [18.0, 4.5], [1.0, 1.0]])
ADVANTAGES = torch.tensor([-1.5, -0.5, 1.5, -1.0])


def loss_and_gradient(tmp_path, *, replayed=True, ratios=RATIOS, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's loss of these rows, by row of `ratios`; without `replayed` all of them are fresh."""
    trainer = ready(tmp_path, **{"replay_clip": "behavior", "max_completion_length": 2, **options})
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -0.7], [-1.0, -2.0], [-3.0, -0.2]])
    policy = Policy(log_probs.clone())
    behavior = log_probs - ratios.log()
    inputs = rows(torch.zeros(4, 2, dtype=torch.long), ADVANTAGES)
    if replayed:
        behavior[3] = NAN
        inputs |= {"replayed": torch.tensor([True, True, True, False]), "behavior_per_token_logps": behavior}
    loss = trainer.compute_loss(policy, inputs)
    loss.backward()
    return loss.detach(), policy.values.grad


@pytest.mark.parametrize("clip", ["proximal", "behavior"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", EVERY_LOSS)
def test_rollouts_of_a_policy_equal_to_the_present_one_count_as_fresh_ones(tmp_path, loss_type, level, clip):
    options = {"loss_type": loss_type, "importance_sampling_level": level, "replay_clip": clip}
    fresh = loss_and_gradient(tmp_path, **options, replayed=False)
    replayed = loss_and_gradient(tmp_path, **options, ratios=torch.ones_like(RATIOS))
    assert all(torch.equal(a, b) for a, b in zip(fresh, replayed, strict=True))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", EVERY_LOSS)
def test_with_the_behavior_clip_the_cap_bounds_replayed_rows_of_negative_advantage_alone(tmp_path, loss_type, level):
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    options["epsilon_high"] = 20.0 if loss_type == "cispo" else 0.3
    loss, gradient = loss_and_gradient(tmp_path, **options, replay_ratio_cap=3.0)
    unbounded_loss, unbounded = loss_and_gradient(tmp_path, **options, replay_ratio_cap=1e6)
    _, fresh = loss_and_gradient(tmp_path, **options, replayed=False)
    assert torch.equal(gradient[1:], unbounded[1:])
    assert torch.equal(gradient[3], fresh[3]), "a fresh row is as in TRL"
    if loss_type == "vespo":
        assert torch.equal(gradient, unbounded)
        return
    ratio = RATIOS[0] if level == "token" else torch.tensor([9.0, 9.0])
    if loss_type == "cispo":  # which keeps the gradient, with the ratio as its weight
        torch.testing.assert_close(gradient[0], unbounded[0] * 3 / ratio)
    else:
        assert gradient[0].eq(0).all()
    if loss_type not in ("sapo", "cispo"):
        torch.testing.assert_close(unbounded[0] / fresh[0], ratio)  # without a cap, so much more than a fresh row
        # the value is that of dual-clip PPO, max(min(r A, clip(r) A), c A): less by (r - c) |A| for each token
        scale = (fresh[0] / 1.5)[0]  # weight of a token
        count = 1 if (loss_type, level) == ("luspo", "sequence") else 2
        less = (ratio - 3).sum() / 2 * count * 1.5 * (scale * 2 / count)
        assert (unbounded_loss - loss).item() == pytest.approx(less.item(), rel=1e-4)


@pytest.mark.parametrize("reuse", [{}, {"replay": "off", "max_rollout_rounds": 2}])
def test_a_kl_term_that_the_proximal_clip_cannot_correct_is_rejected(tmp_path, reuse):
    with pytest.raises(ValueError, match=r"replay_clip='proximal'.*beta=0\.5.*replay_clip='behavior'"):
        ready(tmp_path, replay_clip="proximal", beta=0.5, use_bias_correction_kl=True, **reuse)
