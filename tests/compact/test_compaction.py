"""The update computes what has a gradient, and that once: training is TRL's, with fewer rows and tokens in it."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import pad

from tests.factories.comparison import OFF, all_finite, messages
from tests.factories.configurations import DYNAMIC, SHARE
from tests.factories.tiny import chat_dataset, logged, plain_dataset, run, tiny_model, tiny_tokenizer
from tests.factories.tools import scripted_tool_calls, tool_arguments
from tests.factories.training import CountedRows, Watched, partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.compact.check import Check
from trl_dataeff.compact.exact import OVER_BATCH, OVER_ROWS, OVER_TOKENS, Parts, can_skip_rows, exact_parts
from trl_dataeff.compact.micro_batches import Compacted, MicroBatch, MicroBatchCompactor
from trl_dataeff.compact.padding import RowLengths, forward_by_length, rows_with_gradient
from trl_dataeff.compact.prompts import completions_alone


LOSSES = (*OVER_ROWS, *OVER_TOKENS, *OVER_BATCH)
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
MISALIGNED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3}


def both(folder, wrap=lambda trainer_class: trainer_class, **options):
    """A run of plain TRL, and one that skips rows."""
    defaults = {"rewards": partly_learnable_reward, "max_steps": 5, "per_device_train_batch_size": 16}
    defaults |= {"optim": "sgd", "learning_rate": 0.5}  # Adam would hide a factor on the gradient
    options = {**defaults, **options}
    plain = run(folder / "a", wrap(GRPOTrainer), **options)
    return plain, run(folder / "b", wrap(CountedRows), **options, compact_update=True)


def assert_same_weights(plain, ours, tolerance: float = 2e-6) -> None:
    norms = [np.array(logged(trainer, "grad_norm")) for trainer in (plain, ours)]
    assert norms[0].max() > 1e-3
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4, atol=1e-6)
    for (name, a), (_, b) in zip(plain.model.named_parameters(), ours.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def changing_reward(prompts, completion_ids, **kwargs):
    """Changes what it gets, and depends on that: TRL gives each completion its own objects."""
    rewards = partly_learnable_reward([prompt[0]["content"] for prompt in prompts], completion_ids)
    for prompt, ids in zip(prompts, completion_ids):
        prompt.append(ids.pop())
    return [reward * len(prompt) for reward, prompt in zip(rewards, prompts)]


BATCHES = {"one pass": {}, "accumulated": ACCUMULATED, "misaligned": {**MISALIGNED, "num_iterations": 2}}
SETTINGS = {
    **{f"{loss}, {name}": {"loss_type": loss, **batches} for loss in LOSSES for name, batches in BATCHES.items()},
    "adamw": {"optim": "adamw_torch", "learning_rate": 1e-2},
    "scale_rewards none": {"scale_rewards": "none", "loss_type": "dr_grpo", **ACCUMULATED},
    "scale_rewards batch": {"scale_rewards": "batch", **ACCUMULATED},
    "lora": {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}, **ACCUMULATED},
    "masked": {"mask_truncated_completions": True, "max_completion_length": 12, "loss_type": "bnpo", **ACCUMULATED},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo", **BATCHES["misaligned"]},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, **BATCHES["misaligned"]},
    "delta": {"delta": 1.1, "loss_type": "bnpo", **BATCHES["misaligned"]},
    "several generation batches a step": {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    "a stream": {"trainer": {"train_dataset": plain_dataset().to_iterable_dataset()}, **ACCUMULATED},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "a reward that changes what it gets": {"rewards": changing_reward, "trainer": {"train_dataset": chat_dataset()}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_those_of_plain_grpo(tmp_path, name):
    plain, ours = both(tmp_path, **SETTINGS[name])
    assert_same_weights(plain, ours, 1e-5 if name == "adamw" else 2e-6)
    assert sum(ours.in_loss) < 0.9 * sum(len(tensors["advantages"]) for tensors in ours.tensors) * ours.num_iterations


class LateKl:
    """The KL term begins at the third step."""

    def _generate_and_score_completions(self, inputs):
        self.beta = 0.1 * (self.state.global_step > 1)
        return super()._generate_and_score_completions(inputs)


class Copies:
    """The first micro-batch of each step is a copy."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs if self._step % 4 else dict(inputs))


class Scaled:
    """Advantages are doubled within the loss, in place."""

    def _compute_loss(self, model, inputs):
        inputs["advantages"] = inputs["advantages"] * 2
        return super()._compute_loss(model, inputs)


class Entropic:
    """A part of the reward is the entropy of the completion, from TRL's forward pass."""

    def _calculate_rewards(self, inputs, prompts, completions, ids):
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
        tokens = pad([torch.tensor([1, *row]) for row in ids], 0, "right")
        with torch.no_grad():
            outputs = self._get_per_token_logps_and_entropies(
                self.model, tokens, torch.ones_like(tokens), tokens.size(1) - 1, batch_size=4, compute_entropy=True
            )
        return rewards + 0.1 * outputs[1].mean(1, keepdim=True)


class Shaped:
    """Rewards are those of the functions, which get the length too, less a share of it."""

    def _calculate_rewards(self, inputs, prompts, completions, ids):
        inputs = [row | {"length": len(i)} for row, i in zip(inputs, ids, strict=True)]
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
        return rewards - 0.01 * rewards.new_tensor([[len(i)] for i in ids])


@pytest.mark.parametrize("mixin", [LateKl, Copies, Scaled, Entropic, Shaped])
def test_what_a_subclass_changes(tmp_path, mixin):
    options = {"rewards": lambda length, **row: partly_learnable_reward(**row)} if mixin is Shaped else {}
    iterations = 1 if mixin is Scaled else 2  # in place: a second pass would double them again
    options |= {"num_iterations": iterations, "max_steps": 6, **SETTINGS["lora"]}
    plain, ours = both(tmp_path, lambda base: type("Own", (mixin, base), {}), **options)
    assert_same_weights(plain, ours)


class ChangesSecond:
    """The second micro-batch of each step gets other advantages."""

    def _compute_loss(self, model, inputs):
        if self._step % 4 == 1:
            inputs = {**inputs, "advantages": inputs["advantages"] * 2}
        return super()._compute_loss(model, inputs)


class ChangesBuffered(TrainerCallback):
    def on_substep_end(self, *args, **kwargs):
        self.trainer._buffered_inputs[1]["advantages"] *= 2


def test_a_micro_batch_that_was_changed_after_its_rows_were_exchanged_is_an_error(tmp_path):
    callback = ChangesBuffered()
    options = {"rewards": partly_learnable_reward, "compact_update": True, **ACCUMULATED}
    callback.trainer = run(tmp_path, train=False, trainer={"callbacks": [callback]}, **options)
    with pytest.raises(RuntimeError, match=r"was changed since TRL made it.*compact_update=False"):
        callback.trainer.train()


class WithoutOurs:
    """The loss is TRL's, without `super()`."""

    def _compute_loss(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)


@pytest.mark.parametrize(
    ("mixin", "warning"),
    [(Copies, None), (Scaled, "not as TRL has made them"), (WithoutOurs, "the loss of Own does not call")],
)
def test_an_update_that_is_trls_is_warned_of(tmp_path, mixin, warning, caplog_transformers):
    trainer_class = type("Own", (mixin, DataEfficientGRPOTrainer), {})
    run(tmp_path, trainer_class, rewards=partly_learnable_reward, compact_update=True, max_steps=3, **ACCUMULATED)
    found = messages(caplog_transformers, "`compact_update`")
    assert len(found) == (warning is not None)
    assert all(warning in text for text in found)


def test_with_tools(tmp_path):
    def reward(completions, **kwargs):
        return [float(len(completion) > 1) for completion in completions]

    options = {"max_completion_length": 100, "loss_type": "bnpo", "max_steps": 2, "per_device_train_batch_size": 8}
    plain, ours = both(tmp_path, scripted_tool_calls, rewards=reward, trainer=tool_arguments(), **options)
    assert_same_weights(plain, ours)
    assert sum(ours.in_loss) < sum(len(tensors["advantages"]) for tensors in ours.tensors)
    assert all((tensors["tool_mask"] < tensors["completion_mask"]).any() for tensors in ours.tensors)


class Passes(TrainerCallback):
    """
    Notes what a trainer without methods of its own computes: a subclass's might read what is left out.

    Attributes:
        advantages: those of each generation batch, `(rows,)`.
        in_loss: rows of each pass of the loss.
        without_gradient: rows of each pass for old log-probs, and of those that check a micro-batch.
    """

    def __init__(self):
        self.buffered = None
        self.advantages = []
        self.in_loss = []
        self.without_gradient = []

    def watch(self, trainer):
        self.trainer = trainer
        trainer.add_callback(self)
        trainer.model.register_forward_pre_hook(self._count, with_kwargs=True)
        check = trainer._dataeff_update.check
        compare = check._compare

        def uncounted(*args):
            before = list(self.without_gradient)
            result = compare(*args)
            self.without_gradient = before
            return result

        check._compare = uncounted
        return trainer

    def _count(self, module, args, kwargs):
        if "labels" in kwargs or kwargs.get("use_cache") is False:  # the latter below TRL 1.15
            passes = self.in_loss if torch.is_grad_enabled() else self.without_gradient
            passes.append(len(kwargs["input_ids"]))

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._buffered_inputs is not self.buffered:
            self.buffered = self.trainer._buffered_inputs
            self.advantages.append(torch.cat([batch["advantages"] for batch in self.buffered]))


@pytest.mark.parametrize("replay", ["off", "fill"])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_rows_of_the_passes(tmp_path, loss_type, replay):
    """In the loss and before it. A row is skipped for its advantage, also in a group that has a gradient."""
    options = {"loss_type": loss_type, "replay": replay, "compact_update": True, **ACCUMULATED, "max_steps": 6}
    passes = Passes()
    options |= {"rewards": partly_learnable_reward, "num_iterations": 2, "train": False}
    passes.watch(run(tmp_path, **options)).train()
    active = [advantages != 0 for advantages in passes.advantages]
    assert any(0 < rows.sum() < 4 for batch in active for rows in batch.view(-1, 4)), "whole groups alone are skipped"
    in_loss = np.array(passes.in_loss).reshape(3, 2, 4)  # batches, iterations, micro-batches
    for counts, rows in zip(in_loss, active, strict=True):
        n = int(rows.sum())
        assert counts[0].tolist() == counts[1].tolist()
        assert n <= counts[0].sum() <= n + 4  # of each micro-batch one row at least
        assert counts.min() >= 1
    assert sum(passes.without_gradient) == sum(max(int(rows.sum()), 1) for rows in active)


@pytest.mark.parametrize(
    "method",
    [
        "_generate_and_score_completions",
        "_prepare_inputs",
        "training_step",
        "compute_loss",
        "_compute_loss",
        "_get_per_token_logps_and_entropies",
    ],
)
def test_a_subclass_that_may_read_old_log_probs_finds_those_of_all_rows(tmp_path, method):
    def pass_on(self, *args, **kwargs):
        return getattr(super(Own, self), method)(*args, **kwargs)

    pass_on.__module__ = "elsewhere"
    Own = type("Own", (DataEfficientGRPOTrainer,), {method: pass_on})
    passes = Passes()
    options = {"compact_update": True, "num_iterations": 2, "max_steps": 2, **ACCUMULATED}
    passes.watch(run(tmp_path, Own, rewards=partly_learnable_reward, train=False, **options)).train()
    assert sum(passes.without_gradient) == sum(map(len, passes.advantages)) == 16
    assert sum(passes.in_loss) < 32


@pytest.mark.parametrize(
    "fields",
    [{"beta": 0.1}, {"entropy_coef": 0.01}, {"use_adaptive_entropy": True}, {"top_entropy_quantile": 0.5}],
    ids=lambda fields: next(iter(fields)),
)
def test_nothing_is_skipped_where_a_row_without_an_advantage_counts(tmp_path, fields):
    plain, ours = both(tmp_path, **ACCUMULATED, **fields)
    assert_same_weights(plain, ours)
    assert set(ours.in_loss) == {4}


def test_reasons_not_to_skip():
    """An unknown loss type may count rows as it likes, and the loss of a router counts all of them."""
    exact = {"beta": 0.0, "_entropy_bonus_enabled": False, "aux_loss_enabled": False, "top_entropy_quantile": 1.0}
    assert {can_skip_rows(SimpleNamespace(**exact, loss_type=name)) for name in LOSSES} == {True}
    for name, value in {"loss_type": "ours", "aux_loss_enabled": True}.items():
        assert not can_skip_rows(SimpleNamespace(**{"loss_type": "dapo", **exact, name: value}))


PARTS = Parts(
    zero_rows=True, exchange=True, left_padding=True, right_padding=True, shared_prompts=True, prompt_scores=True
)
NUM_TOKENS = 3  # numbers of tokens that prompts are made of, so that some are equal


def batch_of_rows(rng: np.random.Generator, rows: int, share: float, masked: bool) -> dict[str, torch.Tensor]:
    """TRL's batch of rows with random lengths, and the `loss` of each token; a `share` of the rows has a gradient."""
    prompt_lengths = rng.integers(1, 5, rows)
    completion_lengths = rng.integers(0, 6, rows)  # 0: a truncated completion that is masked
    prompt_mask = torch.from_numpy(np.arange(4, 0, -1) <= prompt_lengths[:, None]).long()
    completion_mask = torch.from_numpy(np.arange(5) < completion_lengths[:, None]).long()
    has_gradient = torch.from_numpy(rng.random(rows) < share)
    loss = torch.from_numpy(rng.normal(size=(rows, 5))) * completion_mask * has_gradient[:, None]
    batch = {
        "row": torch.arange(rows),
        "prompt_ids": torch.from_numpy(rng.integers(1, 1 + NUM_TOKENS, (rows, 4))) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.from_numpy(rng.integers(1, 9, (rows, 5))),
        "completion_mask": completion_mask,
        "advantages": has_gradient.double() * torch.from_numpy(rng.normal(size=rows)),
        "loss": loss,
        "by_row": torch.arange(rows)[:, None],
        "num_items_in_batch": torch.tensor(7),
        "none": None,
    }
    if masked:
        batch["tool_mask"] = torch.from_numpy(rng.integers(0, 2, (rows, 5)))
    return batch


def split(joined: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Micro-batches of so many rows."""
    batches = []
    for start in range(0, len(joined["advantages"]), size):
        batch = {}
        for key, value in joined.items():
            is_by_row = isinstance(value, torch.Tensor) and value.dim() > 0
            batch[key] = value[start : start + size] if is_by_row else value
        batches.append(batch)
    return batches


def accelerator(num_processes: int = 1, gather=lambda own: own) -> SimpleNamespace:
    """That of the first of so many processes."""
    device = torch.device("cpu")
    return SimpleNamespace(device=device, gather=gather, num_processes=num_processes, is_main_process=True)


def compact(
    batches, parts, loss_type="dapo", accumulated=1, logps_of=None, *, check=None, processes=None, dealt=None
) -> Compacted:
    """A generation batch as the update computes it."""
    processes = processes or accelerator()
    compactor = MicroBatchCompactor(processes, check or Check(processes))
    return compactor.compact(batches, parts, loss_type, accumulated, logps_of, dealt)


def loss_of(batch: dict, loss_type: str) -> float:
    """TRL's loss of a micro-batch: a mean over its rows or tokens, or over `num_items_in_batch`."""
    used = batch["completion_mask"] * batch.get("tool_mask", 1)
    each = (batch["loss"] * used).sum(1)
    if loss_type in OVER_BATCH:
        value = each.sum() / batch["num_items_in_batch"]
    elif loss_type in OVER_TOKENS:
        value = each.sum() / used.sum().clamp(min=1)
    elif loss_type in ("grpo", "sapo"):
        value = (each / used.sum(1).clamp(min=1)).mean()
    else:
        value = each.mean()
    return float(value)


def tokens_of(micro_batch: MicroBatch) -> int:
    """Tokens that a pass computes."""
    inputs = micro_batch.inputs
    num_prompts = len(inputs["prompt_ids"]) if micro_batch.shared is None else len(micro_batch.shared.first_rows)
    return num_prompts * inputs["prompt_ids"].size(1) + inputs["completion_ids"].numel()


def largest(batches: list[dict]) -> int:
    """Rows times columns of the largest micro-batch."""
    return max(len(batch["row"]) * (batch["prompt_ids"].size(1) + columns_of(batch)) for batch in batches)


@given(
    loss_type=st.sampled_from(LOSSES),
    parts=st.integers(1, 6),
    size=st.integers(1, 4),
    accumulated=st.integers(1, 6),
    share=st.sampled_from([0, 0.2, 0.7, 1]),
    seed=st.integers(0, 10**6),
    masked=st.booleans(),
    kept=st.sampled_from([[], ["zero_rows"], ["exchange"], ["left_padding"], ["right_padding"], ["shared_prompts"]]),
    other=st.none() | st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_any_micro_batches(loss_type, parts, size, accumulated, share, seed, masked, kept, other):
    """
    The losses of a step add up to what they were, every row with a gradient is there once, what is cut is padding,
    no micro-batch is larger than TRL's, and processes keep step.
    """
    joined = batch_of_rows(np.random.default_rng(seed), parts * size, share, masked)
    batches = split(joined, size)
    before = [dict(batch) for batch in batches]
    allowed = PARTS.without([*kept, *(["exchange"] if loss_type in OVER_TOKENS else [])])
    if not allowed.prompt_scores:
        allowed = allowed.without(["shared_prompts"])
    width = min(accumulated, parts)  # of an optimizer step, within which rows are exchanged
    if parts % width or accumulated % width or not allowed.exchange:
        width = 1
    peak = [min(n, size) for n in other[:parts]] if other else [0] * parts
    peak = [sum(peak[i : i + width]) for i in range(0, parts, width)]

    def gather(own):
        """With what another process has: rows of each step, or tokens."""
        if other is None:
            return own
        return torch.cat([own, torch.tensor(peak) if own.dim() == 1 else own])

    compacted = compact(batches, allowed, loss_type, accumulated, processes=accelerator(1 + bool(other), gather))
    for batch, unchanged in zip(batches, before, strict=True):
        assert batch.keys() == unchanged.keys()
        assert all(batch[key] is value for key, value in unchanged.items()), "TRL's own are not changed"
    found = [micro_batch.inputs for micro_batch in compacted.micro_batches]
    assert compacted.parts == allowed
    assert len(found) == parts
    for start in range(0, parts, width):
        own = slice(start, start + width)
        seen = torch.cat([batch["row"] for batch in found[own]]).tolist()
        all_rows = torch.cat([batch["row"] for batch in batches[own]]).tolist()
        needed = [row for row in all_rows if joined["advantages"][row] != 0 or not allowed.zero_rows]
        assert len(set(seen)) == len(seen)
        assert set(needed) <= set(seen) <= set(all_rows)
        assert len(seen) == max(len(needed), peak[start // width], width)
        sizes = [len(batch["row"]) for batch in found[own]]
        assert other is None or max(sizes) - min(sizes) <= 1
        assert largest(found[own]) <= largest(batches[own])
        expected = sum(loss_of(batch, loss_type) for batch in batches[own])
        losses = [loss_of(each.inputs, loss_type) * float(each.factor) for each in compacted.micro_batches[own]]
        assert sum(losses) == pytest.approx(expected, abs=1e-5)
    for micro_batch, deal in zip(compacted.micro_batches, compacted.deals, strict=True):
        assert micro_batch.inputs["row"].tolist() == deal.rows
        assert (micro_batch.shared is not None) == deal.shares <= allowed.shared_prompts
        check_cut(micro_batch, joined, allowed)
    check_metric_weights(compacted.micro_batches, accumulated)
    # As after a checkpoint within the generation batch
    resumed = compact(batches, PARTS, loss_type, accumulated, dealt=(compacted.deals, compacted.parts))
    assert [each.inputs["row"].tolist() for each in resumed.micro_batches] == [deal.rows for deal in compacted.deals]
    assert [each.factor for each in resumed.micro_batches] == [each.factor for each in compacted.micro_batches]
    processes = 1 if other is None else 2
    assert compacted.tokens == processes * sum(tokens_of(each) for each in compacted.micro_batches)
    assert compacted.tokens_of_trl == processes * parts * size * 9


def check_cut(micro_batch: MicroBatch, joined: dict, allowed: Parts) -> None:
    """Its tensors are those of its rows, what is cut is padding, and rows that share a prompt have the same."""
    batch = micro_batch.inputs
    rows = batch["row"]
    assert batch.keys() == joined.keys()
    assert batch["num_items_in_batch"] == 7
    assert batch["none"] is None
    for key, value in joined.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        expected = value[rows]
        if value.dim() > 1:
            columns = batch[key].size(-1)
            expected = expected[:, -columns:] if key.startswith("prompt_") else expected[:, :columns]
        assert torch.equal(batch[key], expected), key
    assert batch["prompt_mask"].sum() == joined["prompt_mask"][rows].sum(), "tokens of prompts were cut"
    assert batch["completion_mask"].sum() == joined["completion_mask"][rows].sum(), "tokens were cut"
    assert not allowed.left_padding or batch["prompt_mask"][:, 0].any()
    assert not allowed.right_padding or batch["completion_mask"][:, -1].any() or columns_of(batch) == 1
    shared = micro_batch.shared
    if shared is not None:
        prompts = torch.cat([batch["prompt_ids"], batch["prompt_mask"]], 1)
        assert torch.equal(prompts[shared.first_rows][shared.prompt_of_row], prompts)


def check_metric_weights(micro_batches: list[MicroBatch], accumulated: int) -> None:
    """TRL's plain mean over the micro-batches of a step is one over its tokens."""
    length = min(accumulated, len(micro_batches))
    for start in range(0, len(micro_batches), length):
        of_step = micro_batches[start : start + length]
        tokens = [int((each.inputs["completion_mask"] * each.inputs.get("tool_mask", 1)).sum()) for each in of_step]
        values = np.arange(1.0, 1.0 + len(of_step))  # a mean over the tokens of each
        found = np.mean([value * float(each.metric_weight) for value, each in zip(values, of_step, strict=True)])
        assert found == pytest.approx(np.average(values, weights=tokens) if any(tokens) else values.mean(), rel=1e-6)


def columns_of(batch: dict) -> int:
    return batch["completion_ids"].size(1)


class Model:
    """
    A model whose log-probs depend on `what` of a micro-batch, and on how it rounds. Notes the micro-batches that it is
    asked about.
    """

    def __init__(self, what: str, effect_of_rounding: float = 0.0, size: float = 1.0):
        self.what = what
        self.size = size
        self.effect_of_rounding = effect_of_rounding
        self.asked = []

    def logps_of(
        self, batch: dict, /, *, scores_completions: bool = False, shared=None, rounds_otherwise: bool = False
    ) -> torch.Tensor:
        self.asked.append(batch)
        logps = batch["completion_ids"].double() + self.effect_of_rounding * rounds_otherwise
        if self.what == "left_padding":  # as with learned positions
            return logps + batch["prompt_ids"].size(1)
        if self.what == "right_padding":
            return logps + batch["completion_ids"].size(1)
        if self.what == "shared_prompts":
            return logps + self.size * (shared is not None)
        if self.what == "prompt_scores":
            return logps + (scores_completions and shared is None)
        return logps + 1e-6 * torch.rand(logps.shape)


@pytest.mark.parametrize("what", ["left_padding", "right_padding", "shared_prompts", "prompt_scores", "nothing"])
def test_a_part_that_changes_log_probs_is_switched_off_when_it_matters(what, caplog_transformers):
    """Also where it matters in one micro-batch alone. Parts are checked until enough tokens were compared."""
    rng = np.random.default_rng(1)
    model = Model(what)
    check = Check(accelerator(), model_name="Tiny")
    asked_before = []
    for _ in range(40):
        asked_before.append(len(model.asked))
        batches = split(batch_of_rows(rng, 12, 0.7, False), 3)
        compacted = compact(batches, PARTS, "dapo", 4, model.logps_of, check=check)
        found = compacted.micro_batches
        widths = {(each.inputs["prompt_ids"].size(1), columns_of(each.inputs)) for each in found}
        if what == "left_padding":
            assert {prompt for prompt, _ in widths} == {4}
        if what == "right_padding":
            assert {completion for _, completion in widths} == {5}
        if what == "shared_prompts":
            assert all(each.shared is None for each in found)
        if what == "prompt_scores":
            assert not any(each.scores_completions for each in found)
    assert asked_before[10] > 0
    assert asked_before[-1] == asked_before[-10], "parts are checked at each update"
    warnings = messages(caplog_transformers, "of Tiny by")
    assert len(warnings) == (what != "nothing")
    assert not check.is_due
    assert check.passed(PARTS) == (PARTS if what == "nothing" else PARTS.without([what]))
    assert resumed_check(check).passed(PARTS) == check.passed(PARTS)


def resumed_check(check: Check) -> Check:
    """One that has gone through a checkpoint."""
    resumed = Check(accelerator())
    resumed.load_state_dict(json.loads(json.dumps(check.state_dict())))
    return resumed


def check_sharing(model: Model, updates: int = 1, **options) -> Check:
    """The check of a model in so many updates, with 36 tokens of completions that share a prompt in each."""
    check = Check(accelerator(), **options)
    batches = micro_batches([8, 8, 2, 2], [18, 18, 9, 9], [1, 1, 2, 3])
    for _ in range(updates):
        compact(batches, IN_ORDER, logps_of=model.logps_of, check=check)
    return check


@pytest.mark.parametrize(
    ("effect_of_rounding", "computed_in", "is_kept"),
    [
        (0.001, torch.float32, False),
        (0.19, torch.float32, False),
        (0.21, torch.float32, True),
        (3.0, torch.float32, False),  # so much is no rounding
        # Where it cannot be measured
        (0.0, torch.bfloat16, False),
        (math.inf, torch.float32, False),
        (math.nan, torch.bfloat16, False),
    ],
)
def test_what_counts_as_rounding_is_measured_on_the_model(
    effect_of_rounding, computed_in, is_kept, caplog_transformers
):
    """Sharing prompts changes the log-probs by 0.4 here, or by 1 where rounding does as much."""
    size = 0.4 if effect_of_rounding < 1 else 1.0
    model = Model("shared_prompts", effect_of_rounding, size)
    check = check_sharing(model, 2, computed_in=computed_in)
    assert check.kept.shared_prompts == is_kept
    assert bool(messages(caplog_transformers, "switched off")) == (not is_kept)


def test_a_difference_that_is_not_clear_needs_more_tokens(caplog_transformers):
    model = Model("shared_prompts", effect_of_rounding=0.1, size=0.3)
    check = check_sharing(model, 1)
    assert check.kept.shared_prompts
    assert not check.passed(PARTS).shared_prompts
    assert not messages(caplog_transformers, "switched off")
    resumed = resumed_check(check)
    batches = micro_batches([8, 8, 2, 2], [18, 18, 9, 9], [1, 1, 2, 3])
    compacted = compact(batches, IN_ORDER, logps_of=model.logps_of, check=resumed)
    assert not resumed.kept.shared_prompts
    assert all(each.shared is None for each in compacted.micro_batches)


def test_widths_of_passes_are_multiples_of_what_trl_pads_to():
    mask = torch.ones(2, 16 + 8, dtype=torch.int64)
    mask[:, :12] = 0  # prompts of 4 tokens
    mask[:, 19:] = 0  # completions of 3
    widths = []

    def forward(ids, mask, kept):
        widths.append((ids.size(1) - kept, kept))
        return torch.ones(len(ids), kept), None, None

    options = {"batch_size": 2, "rows": None, "cuts_left": True, "cuts_right": True, "multiple": 8}
    logps, _, _ = forward_by_length(forward, mask, mask, 8, **options)
    assert widths == [(8, 8)]
    assert logps.shape == (2, 8)


def test_prompts_that_differ_in_a_first_token_of_number_0_are_not_equal():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 1]])
    ids = torch.tensor([[9, 0, 5], [9, 9, 5], [9, 0, 5]])
    batch = {"prompt_ids": ids, "prompt_mask": mask, "completion_mask": torch.ones(3, 2, dtype=torch.int64)}
    assert RowLengths.of(batch).prompt_number == [0, 1, 1]


def micro_batches(prompt_lengths, completion_lengths, prompts, size=2) -> list[dict[str, torch.Tensor]]:
    """TRL's micro-batches of rows that all have a gradient."""
    prompt_widths = torch.arange(8, 0, -1)
    prompt_mask = (prompt_widths <= torch.tensor(prompt_lengths)[:, None]).long()
    completion_mask = (torch.arange(32) < torch.tensor(completion_lengths)[:, None]).long()
    joined = {
        "prompt_ids": torch.tensor(prompts)[:, None] * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "advantages": torch.ones(len(prompts)),
    }
    return split(joined, size)


IN_ORDER = PARTS.without(["exchange"])


def logps_by_width(batch, /, *, shared=None, **how):
    """Those of a model whose log-probs depend on the padding of prompts, and on whether prompts are shared."""
    value = batch["prompt_ids"].size(1) + 100.0 * (shared is not None)
    return torch.full(batch["completion_ids"].shape, value)


@pytest.mark.parametrize(
    ("part", "batches"),
    [
        # The micro-batch with the longest prompt saves most, by its completions
        ("left_padding", micro_batches([8, 8, 2, 2], [1, 1, 31, 32], [1, 2, 3, 4])),
        # One whose prompts are all different saves more than the one that shares its prompt
        ("shared_prompts", micro_batches([8, 8, 1, 1], [32, 32, 1, 1], [1, 1, 2, 3])),
        # One whose completions are all masked saves most
        ("left_padding", micro_batches([8, 8, 7, 7, 1, 1], [32, 9, 8, 7, 0, 0], [1, 2, 3, 4, 5, 6])),
    ],
)
def test_each_part_is_checked_where_it_changes_what_is_computed(part, batches):
    others = {"left_padding", "shared_prompts"} - {part}
    check = Check(accelerator())
    compacted = compact(batches, PARTS.without(["exchange", *others]), logps_of=logps_by_width, check=check)
    assert not getattr(check.kept, part)
    assert not getattr(compacted.parts, part)
    assert all(each.inputs["prompt_ids"].size(1) == 8 for each in compacted.micro_batches)
    assert all(each.shared is None for each in compacted.micro_batches)


def test_nothing_counts_as_checked_where_all_completions_are_masked():
    check = Check(accelerator())
    masked = micro_batches([8, 8, 2, 2], [0, 0, 0, 0], [1, 1, 2, 3])
    compact(masked, IN_ORDER, "bnpo", logps_of=logps_by_width, check=check)
    assert len(check.state_dict()["unchecked"]) == 4
    whole = micro_batches([8, 8, 2, 2], [9, 9, 9, 9], [1, 1, 2, 3])
    compact(whole, IN_ORDER, "bnpo", logps_of=logps_by_width, check=check)
    assert not check.kept.left_padding
    assert not check.kept.shared_prompts


def test_what_was_checked_and_switched_off_survives_a_checkpoint():
    check = Check(accelerator())
    batches = micro_batches([8, 8, 2, 2], [9, 9, 9, 9], [1, 1, 2, 3])
    compact(batches, IN_ORDER, "bnpo", logps_of=logps_by_width, check=check)
    resumed = resumed_check(check)
    assert resumed.kept == check.kept != PARTS
    assert resumed.passed(PARTS) == check.passed(PARTS)


def fail_within_completions_alone(model):
    with completions_alone(model, 4):
        assert "forward" in vars(model.base_model)
        raise KeyError


def test_a_model_is_as_it_was_after_a_failure_in_the_loss():
    model = tiny_model()
    with pytest.raises(KeyError):
        fail_within_completions_alone(model)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.base_model)


def test_micro_batches_keep_to_what_trl_pads_to(tmp_path):
    """Also the passes over prompts that are computed once."""
    options = {"pad_to_multiple_of": 8, "max_completion_length": 24, "steps_per_generation": 4, "max_steps": 3}
    options |= {"compact_update": True, "rewards": partly_learnable_reward, "train": False}
    trainer = run(tmp_path, **options)
    widths = set()

    def note(module, args):
        if torch.is_grad_enabled():
            widths.add(args[0].size(1))

    trainer.model.get_input_embeddings().register_forward_pre_hook(note)
    trainer.train()
    assert len(widths) > 1, "nothing was cut"
    assert all(width % 8 == 0 for width in widths)


def test_lists_such_as_images_keep_all_rows_here_and_on_the_processes_that_wait_for_this_one():
    gathered = []

    def gather(own):
        gathered.append(own)
        return torch.cat([own, own])

    joined = batch_of_rows(np.random.default_rng(0), 4, 0.5, False)
    batches = [batch | {"num_images": [1, 1]} for batch in split(joined, 2)]
    compacted = compact(batches, PARTS, "dapo", 2, processes=accelerator(2, gather))
    assert gathered[1].tolist() == [2, 2]
    assert compacted.tokens == compacted.tokens_of_trl == 2 * 4 * 9
    for before, after in zip(batches, compacted.micro_batches, strict=True):
        assert after.factor == 1
        assert after.shared is None
        assert not after.scores_completions
        assert all(after.inputs[key] is value for key, value in before.items())


@pytest.mark.parametrize(
    ("advantages", "of_other", "rows"),
    [
        ([0, 1, 0, -1], 0, [1, 3]),
        ([0, 0, 0, 0], 0, [0]),  # a pass has a row
        ([0, 1, 0, 0], 3, [0, 1, 2]),  # as many as another process has
        ([[0, 0], [0, 1], [1, 1]], 1, [1, 2]),  # by token
    ],
)
def test_rows_with_a_gradient(advantages, of_other, rows):
    def gather(own):
        return torch.cat([own, torch.tensor([of_other])])

    found = rows_with_gradient(torch.tensor(advantages).float(), accelerator(2, gather))
    assert found.tolist() == rows


def experts_model(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    fields = {"router_aux_loss_coef": 0.1, "initializer_range": 0.2, "vocab_size": len(tokenizer)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **fields, **ends))


def test_mixture_of_experts(tmp_path):
    tokenizer = tiny_tokenizer()

    def train(folder, trainer_class, **options):
        trainer = {"model": experts_model(tokenizer), "processing_class": tokenizer}
        return run(tmp_path / folder, trainer_class, trainer=trainer, **{"max_steps": 6, **options})

    reference = train("a", GRPOTrainer)
    ours = train("b", CountedRows, **{**OFF, "compact_update": True})
    assert_same_weights(reference, ours)
    assert set(ours.in_loss) == {8}, "the loss of the router counts every row"
    assert all(value > 0 for (value,) in logged(ours, "aux_loss"))
    replaying = train("c", Watched, **SHARE, **DYNAMIC, per_device_train_batch_size=16)
    assert any(batch.replayed for batch in replaying.batches)
    assert all(value > 0 for (value,) in logged(replaying, "aux_loss"))
    assert all_finite(replaying)


class SkipsMicroBatches:
    """Computes no loss of a micro-batch without a gradient, and weighs the others by their rewards."""

    def _compute_loss(self, model, inputs):
        if not inputs["advantages"].any():
            return sum(p.sum() for p in model.parameters()) * 0
        return super()._compute_loss(model, inputs) * (1 + inputs["advantages"].abs().sum())


class ComputesTwice:
    """Throws a batch away, and makes another."""

    def _generate_and_score_completions(self, inputs):
        super()._generate_and_score_completions(inputs)
        return super()._generate_and_score_completions(inputs)


@pytest.mark.parametrize("pattern", [SkipsMicroBatches, ComputesTwice, ChangesSecond])
def test_a_subclass_that_decides_by_micro_batch_trains_as_in_trl(pattern, tmp_path, caplog_transformers):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 4}
    options |= {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e9, "rewards": partly_learnable_reward}
    plain = run(tmp_path / "a", type("Plain", (pattern, GRPOTrainer), {}), **options)
    ours = run(tmp_path / "b", type("Ours", (pattern, DataEfficientGRPOTrainer), {}), compact_update=True, **options)
    assert_same_weights(plain, ours)
    assert any(log.get("dataeff/update/tokens_saved", 0) > 0 for log in ours.state.log_history)
    assert not messages(caplog_transformers, "does not call `CompactGRPOTrainer")


def test_nothing_is_left_out_of_a_loss_that_is_not_known(tmp_path):
    trainer = run(tmp_path, train=False, compact_update=True)
    assert exact_parts(trainer) != Parts.none()
    trainer.loss_type = "of a later version"
    assert exact_parts(trainer) == Parts.none()
