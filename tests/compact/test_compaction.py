"""The update computes what has a gradient, and that once: training is TRL's, with fewer rows and tokens in it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import pad

from tests.factories.comparison import OFF, all_finite, messages
from tests.factories.configurations import DYNAMIC, SHARE
from tests.factories.tiny import (
    chat_dataset,
    even_length_reward,
    logged,
    plain_dataset,
    run,
    tiny_model,
    tiny_tokenizer,
)
from tests.factories.tools import scripted_tool_calls, tool_arguments
from tests.factories.training import CountedRows, Watched, partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.compact.check import MOST_CHANGES
from trl_dataeff.compact.exact import (
    OVER_BATCH,
    OVER_ROWS,
    OVER_TOKENS,
    Parts,
    exact_parts,
    has_gradient,
    token_mask,
)
from trl_dataeff.compact.micro_batches import Compacted, MicroBatch, Rows, compact
from trl_dataeff.compact.padding import RowLengths, forward_by_length, rows_with_gradient
from trl_dataeff.compact.prompts import Expected, completions_alone


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


OF_OLDER_POLICY = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "rewards": even_length_reward}


def test_where_nothing_is_left_out_passes_without_gradient_are_trls_too(tmp_path):
    """NEFTune draws noise in them, and would draw another in another order of rows."""
    plain, ours = both(tmp_path, **OF_OLDER_POLICY, neftune_noise_alpha=5.0, entropy_coef=0.01)
    assert_same_weights(plain, ours, 0.0)


class Changes(TrainerCallback):
    """A module changes in each step, and has dropout at the end."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        attention = model.model.layers[0].self_attn
        attention.some_number = float(state.global_step)
        if state.global_step >= MOST_CHANGES + 2:
            attention.attention_dropout = 0.5


def test_passes_without_gradient_are_trls_after_a_model_has_changed_too_often(tmp_path):
    options = {**OF_OLDER_POLICY, "max_steps": MOST_CHANGES + 6, "learning_rate": 0.1}
    runs = [
        run(tmp_path / name, trainer_class, **options, optim="sgd", trainer={"callbacks": [Changes()]}, **fields)
        for name, trainer_class, fields in (("a", GRPOTrainer, {}), ("b", CountedRows, {"compact_update": True}))
    ]
    assert_same_weights(*runs, 1e-5)


def test_tokens_of_all_iterations_are_counted(tmp_path):
    """Two iterations over a generation batch that is one micro-batch are one optimizer step."""
    options = {"compact_update": True, "steps_per_generation": 1, "max_steps": 3, "learning_rate": 0.0}
    once = run(tmp_path / "a", **options)
    twice = run(tmp_path / "b", **options, gradient_accumulation_steps=2, num_iterations=2)
    tokens = [np.array(logged(trainer, "dataeff/update/tokens")) for trainer in (once, twice)]
    assert tokens[0].min() > 0
    np.testing.assert_array_equal(2 * tokens[0], tokens[1])


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


def test_rows_keep_their_micro_batch_where_a_callback_acts_between(tmp_path):
    def with_callback(base):
        def init(self, *args, **kwargs):
            base.__init__(self, *args, **kwargs)
            callback = ChangesBuffered()
            callback.trainer = self
            self.add_callback(callback)

        return type("Own", (base,), {"__init__": init})

    assert_same_weights(*both(tmp_path, with_callback, **ACCUMULATED))


def test_a_micro_batch_that_was_changed_after_its_rows_were_exchanged_is_an_error(tmp_path):
    trainer = run(tmp_path, train=False, rewards=partly_learnable_reward, compact_update=True, **ACCUMULATED)

    def change(module, args):
        if torch.is_grad_enabled() and trainer._dataeff_trial is None:
            trainer._buffered_inputs[1]["advantages"] *= 2

    trainer.model.register_forward_pre_hook(change)
    with pytest.raises(RuntimeError, match=r"was changed since TRL made it.*compact_update=False"):
        trainer.train()


class WithoutOurs:
    """The loss is TRL's, without `super()`."""

    def _compute_loss(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)


@pytest.mark.parametrize(
    ("mixin", "warnings"),
    [
        (Copies, ["has a loss of its own"]),
        (Scaled, ["has a loss of its own", "not as TRL has made them"]),
        (WithoutOurs, ["the loss of Own does not call"]),
    ],
)
def test_an_update_that_is_trls_is_warned_of(tmp_path, mixin, warnings, caplog_transformers):
    trainer_class = type("Own", (mixin, DataEfficientGRPOTrainer), {})
    run(tmp_path, trainer_class, rewards=partly_learnable_reward, compact_update=True, max_steps=3, **ACCUMULATED)
    found = messages(caplog_transformers, "`compact_update`")
    assert len(found) == len(warnings)
    assert all(warning in text for warning, text in zip(warnings, found, strict=True))


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
        without_gradient: rows of each pass for old log-probs.
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
        return trainer

    def _count(self, module, args, kwargs):
        is_tried = self.trainer._dataeff_trial is not None  # a few rows are computed several ways
        is_for_logps = "labels" in kwargs or kwargs.get("use_cache") is False  # the latter below TRL 1.15
        if is_for_logps and not is_tried:
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
    # At first all, as nothing was checked yet
    assert sum(passes.without_gradient) == len(active[0]) + sum(max(int(rows.sum()), 1) for rows in active[1:])


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
    has_own_loss = method in ("training_step", "compute_loss", "_compute_loss")
    assert (sum(passes.in_loss) == 32) == has_own_loss


@pytest.mark.parametrize(
    "fields",
    [{"beta": 0.1}, {"entropy_coef": 0.01}, {"use_adaptive_entropy": True}, {"top_entropy_quantile": 0.5}],
    ids=lambda fields: next(iter(fields)),
)
def test_nothing_is_skipped_where_a_row_without_an_advantage_counts(tmp_path, fields):
    plain, ours = both(tmp_path, **ACCUMULATED, **fields)
    assert_same_weights(plain, ours)
    assert set(ours.in_loss) == {4}


def test_reasons_not_to_skip(tmp_path):
    """An unknown loss type may count rows as it likes, and the loss of a router counts all of them."""
    trainer = run(tmp_path, train=False)
    for loss_type in LOSSES:
        trainer.loss_type = loss_type
        assert exact_parts(trainer).zero_rows, loss_type
    for name, value in {"loss_type": "ours", "aux_loss_enabled": True}.items():
        trainer.loss_type = "dapo"
        setattr(trainer, name, value)
        assert not exact_parts(trainer).zero_rows, name
        assert not exact_parts(trainer).exchange, name


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
        "ref_per_token_logps": loss,
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


def compacted_of(batches, parts, loss_type="dapo", *, processes=None) -> Compacted:
    """Micro-batches of an optimizer step as the update computes them."""
    return compact(Rows(batches, loss_type), parts, processes or accelerator())


def loss_of(batch: dict, loss_type: str) -> float:
    """TRL's loss of a micro-batch: a mean over its rows or tokens, or over `num_items_in_batch`."""
    used = batch["completion_mask"] * batch.get("tool_mask", 1)
    each = (batch["ref_per_token_logps"] * used).sum(1)
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
    """Tokens that a pass computes: padded rows, or each prompt once and completions, from first to last token."""
    inputs = micro_batch.inputs
    if micro_batch.shared is None:
        return inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
    prompts = inputs["prompt_mask"][micro_batch.shared.first_rows]
    return span(prompts.flip(1)) + span(inputs["completion_mask"])


def span(masks: torch.Tensor) -> int:
    """Columns up to the last 1 of each row, of all rows."""
    return sum(max((i + 1 for i, value in enumerate(row) if value), default=0) for row in masks.tolist())


def largest(batches: list[dict]) -> int:
    """Rows times columns of the largest micro-batch."""
    return max(len(batch["row"]) * (batch["prompt_ids"].size(1) + columns_of(batch)) for batch in batches)


@given(
    loss_type=st.sampled_from(LOSSES),
    parts=st.integers(1, 6),
    size=st.integers(1, 4),
    share=st.sampled_from([0, 0.2, 0.7, 1]),
    seed=st.integers(0, 10**6),
    masked=st.booleans(),
    kept=st.sampled_from([[], ["zero_rows"], ["exchange"], ["left_padding"], ["right_padding"], ["shared_prompts"]]),
    other=st.none() | st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_any_micro_batches(loss_type, parts, size, share, seed, masked, kept, other):
    """
    The losses of a step add up to what they were, every row with a gradient is there once, what is cut is padding,
    no micro-batch is larger than TRL's, and processes keep step.
    """
    joined = batch_of_rows(np.random.default_rng(seed), parts * size, share, masked)
    batches = split(joined, size)
    before = [dict(batch) for batch in batches]
    allowed = PARTS.without([*kept, *(["exchange"] if loss_type in OVER_TOKENS else [])])
    width = parts if allowed.exchange else 1  # micro-batches that exchange rows
    peak = [min(n, size) for n in other[:parts]] if other else [0] * parts
    peak = [sum(peak[i : i + width]) for i in range(0, parts, width)]

    def gather(own):
        """With what another process has: rows of each step, or tokens."""
        if other is None:
            return own
        return torch.cat([own, torch.tensor(peak) if own.dim() == 1 else own])

    compacted = compacted_of(batches, allowed, loss_type, processes=accelerator(1 + bool(other), gather))
    for batch, unchanged in zip(batches, before, strict=True):
        assert batch.keys() == unchanged.keys()
        assert all(batch[key] is value for key, value in unchanged.items()), "TRL's own are not changed"
    found = [micro_batch.inputs for micro_batch in compacted.micro_batches]
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
    for micro_batch in compacted.micro_batches:
        assert allowed.shared_prompts or micro_batch.shared is None
        assert micro_batch.scores_completions == allowed.prompt_scores
        check_cut(micro_batch, joined, allowed)
    check_metric_weights(compacted.micro_batches, batches)
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


def check_metric_weights(micro_batches: list[MicroBatch], batches: list[dict]) -> None:
    """The plain mean over the micro-batches of weighted means is one over the tokens, or the rows, of the step."""
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in ("row", "completion_mask", "advantages")}
    used = torch.cat([token_mask(batch) for batch in batches]).sum(1).double()
    value = torch.where(joined["advantages"] != 0, joined["row"] + 1.0, 0.0).double()  # as what is clipped
    tokens = {"computed_tokens": [], "tokens": [], "rows": []}
    for each in micro_batches:
        rows = each.inputs["row"]
        of_tokens = float((value[rows] * used[rows]).sum() / used[rows].sum().clamp(min=1))
        tokens["computed_tokens"].append(of_tokens * each.weights.computed_tokens)
        tokens["tokens"].append(of_tokens * each.weights.tokens)
        tokens["rows"].append(float(value[rows].mean()) * each.weights.rows)
    computed = torch.cat([each.inputs["row"] for each in micro_batches])
    weighted = (value * used).sum()
    assert np.mean(tokens["tokens"]) == pytest.approx(float(weighted / used.sum().clamp(min=1)))
    assert np.mean(tokens["rows"]) == pytest.approx(float(value.mean()))
    assert np.mean(tokens["computed_tokens"]) == pytest.approx(float(weighted / used[computed].sum().clamp(min=1)))
    for each, batch in zip(micro_batches, batches, strict=True):
        assert each.weights.leaves_out <= bool((batch["advantages"] == 0).any())


def columns_of(batch: dict) -> int:
    return batch["completion_ids"].size(1)


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


def fail_within_completions_alone(model):
    ids = torch.ones(1, 8, dtype=torch.int64)
    with completions_alone(model, Expected(ids, ids, 4)):
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
    options = {"pad_to_multiple_of": 8, "max_completion_length": 80, "steps_per_generation": 4, "max_steps": 3}
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

    have_gradient = has_gradient({"advantages": torch.tensor(advantages).float()})
    found = rows_with_gradient(have_gradient, accelerator(2, gather))
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
    prompts = Dataset.from_dict({"prompt": [f"{i:02d}:" + "1+" * (i % 5) + "2=" for i in range(24)]})
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 4}
    options |= {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e9, "rewards": partly_learnable_reward}
    options |= {"trainer": {"train_dataset": prompts}}
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
