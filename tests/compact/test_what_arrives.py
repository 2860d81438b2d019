"""
What reaches the model, the loss and the batch is looked at: the update is TRL's where something else does than what
TRL makes, and a line says what is off.
"""

import copy
import math
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoHaConfig, LoKrConfig, LoraConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Ministral3Config,
    OPTConfig,
    TrainerCallback,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import GRPOTrainer

from tests.compact.test_compaction import assert_same_weights
from tests.compact.test_models import GPT2_SIZES, NO_DROPOUT, SIZES, prompts_of_many_lengths, reward
from tests.factories.comparison import messages
from tests.factories.tiny import logged, run, tiny_tokenizer
from tests.factories.training import SHARES_PROMPTS
from trl_dataeff import DataEfficientGRPOTrainer


def model_of(config_class, **fields):
    tokenizer = tiny_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(vocab_size=len(tokenizer), **fields, **ends))


def llama():
    return model_of(LlamaConfig, **SIZES)


def both(folder, make_model=llama, pattern=None, *, before=lambda trainer: None, arguments=None, **options):
    """A run of plain TRL, and one of ours."""
    trainers = []
    defaults = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4}
    defaults |= {"max_completion_length": 16, "optim": "sgd", "learning_rate": 0.05, "max_steps": 3, "rewards": reward}
    for base in (GRPOTrainer, DataEfficientGRPOTrainer):
        trainer_class = base if pattern is None else type("Own", (pattern, base), {})
        ours = {"compact_update": True} if base is DataEfficientGRPOTrainer else {}
        trainer = {"model": make_model(), "train_dataset": prompts_of_many_lengths(), **(arguments or {})}
        fields = {**defaults, **options, **ours}
        made = run(folder / base.__name__, trainer_class, trainer=trainer, train=False, **fields)
        before(made)
        made.train()
        trainers.append(made)
    return trainers


def positions_of(attention_mask):
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def add_positions(module, args, kwargs):
    if torch.is_grad_enabled():  # in the loss
        kwargs["position_ids"] = positions_of(kwargs["attention_mask"])
    return args, kwargs


def embed(module, args, kwargs):
    """Tokens reach the layers as embeddings."""
    ids = kwargs.pop("input_ids", None)
    if ids is not None:
        kwargs["inputs_embeds"] = module.embed_tokens(ids)
    return args, kwargs


def with_positions_by_a_hook(config_class=LlamaConfig, **fields):
    model = model_of(config_class, **(fields or SIZES))
    model.register_forward_pre_hook(add_positions, with_kwargs=True)
    return model


def with_positions_in_the_backbone():
    model = llama()
    model.model.register_forward_pre_hook(add_positions, with_kwargs=True)
    return model


def with_embeddings_by_a_hook():
    model = llama()
    model.model.register_forward_pre_hook(embed, with_kwargs=True)
    return model


def checkpointed_by_a_wrapper():
    model = llama()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    return model


def checkpointed_by_hand():
    model = llama()
    for layer in model.model.layers:

        def again(*args, _forward=layer.forward, **kwargs):
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        layer.forward = again
    return model


def with_queries_scaled_by_position():
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    fields = {**SIZES, "head_dim": 8, "max_position_embeddings": 512}
    return model_of(Ministral3Config, **fields, rope_parameters={**rope, "original_max_position_embeddings": 40})


def with_a_flat_position_table():
    model = model_of(GPT2Config, **GPT2_SIZES, **NO_DROPOUT)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    return model


def draw_nothing(module, args):
    """In Transformers 5.17, OPT's decoder draws a number for each layer in training, also where none is dropped."""
    module.training = False


def with_learned_positions_from_the_mask():
    fields = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.2}
    model = model_of(OPTConfig, **fields, word_embed_proj_dim=32, max_position_embeddings=256, dropout=0.0)
    model.model.decoder.register_forward_pre_hook(draw_nothing)
    return model


class OwnContext:
    """Rows with an odd sum do not see the first tokens of their prompt."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if torch.is_grad_enabled():
            attention_mask = attention_mask.clone()
            prompt_mask = attention_mask[:, :-logits_to_keep]
            for row, ids in enumerate(input_ids[:, -logits_to_keep:]):
                if int(ids.sum()) % 2:
                    prompt_mask[row][prompt_mask[row].nonzero().flatten()[:3]] = 0
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )


class InChunks:
    def _get_per_token_logps_and_entropies(self, *args, batch_size=None, **kwargs):
        return super()._get_per_token_logps_and_entropies(*args, batch_size=2, **kwargs)


class RowByRow:
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, kept, batch_size=None, **kwargs):
        rows = [
            super(RowByRow, self)._get_per_token_logps_and_entropies(model, ids[None], mask[None], kept, **kwargs)
            for ids, mask in zip(input_ids, attention_mask)
        ]
        entropies = None if rows[0][1] is None else torch.cat([row[1] for row in rows])
        return torch.cat([row[0] for row in rows]), entropies, None


class Shuffled:
    """Rows in another order."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(
            model, input_ids.flip(0), attention_mask.flip(0), *args, **kwargs
        )
        return tuple(None if values is None else values.flip(0) for values in outputs)


class OwnPositions:
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        def with_positions(**inputs):
            return model(**inputs, position_ids=positions_of(attention_mask))

        return super()._get_per_token_logps_and_entropies(with_positions, input_ids, attention_mask, *args, **kwargs)


class Masks4d:
    """The mask of each pair of tokens."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        def with_pairs(attention_mask, **inputs):
            width = attention_mask.size(1)
            sees = torch.ones(width, width).tril().bool() & attention_mask[:, None, None].bool()
            return model(attention_mask=torch.where(sees, 0.0, -1e9), **inputs)

        return super()._get_per_token_logps_and_entropies(with_pairs, input_ids, attention_mask, *args, **kwargs)


class GoldAnswers:
    """Tokens of reference answers, as wide as completions may be."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["gold_ids"] = torch.full((len(inputs), self.max_completion_length), 5)
        return output


class AddedTerm:
    """The log-probs of all rows are raised."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if output[0].requires_grad:
            self.logps = output[0]
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"]
        return loss - 0.5 * (self.logps * mask).sum() / mask.sum() / self.current_gradient_accumulation_steps


class AddedOutside:
    """The same, around the method that the Trainer calls, and by rows alone."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if output[0].requires_grad:
            self.logps = output[0].sum(1)
        return output

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        weights = torch.arange(len(inputs["advantages"])) + 1.0
        return loss - 1e-3 * (self.logps * weights).sum()


class ByWidth:
    """Log-probs are weighted by the columns that the model gets."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        logps, *others = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
        return logps * (1 + 0.01 * input_ids.size(1)), *others


LONG = {"max_completion_length": 80}  # so that some completions end before
SHARING = "leaving out repeated prompts"
CASES = {
    "a context of its own": ({"pattern": OwnContext}, [f"{SHARING}.*another `attention_mask`"]),
    "in chunks": ({"pattern": InChunks}, [f"{SHARING}.*another `input_ids`"]),
    "row by row": ({"pattern": RowByRow}, [f"{SHARING}.*another `input_ids`"]),
    "shuffled": ({"pattern": Shuffled}, [f"{SHARING}.*another `input_ids`"]),
    "positions by a subclass": ({"pattern": OwnPositions}, [f"{SHARING}.*`position_ids`"]),
    "masks of pairs": ({"pattern": Masks4d}, [f"{SHARING}.*another `attention_mask`"]),
    "positions by a hook": ({"make_model": with_positions_by_a_hook}, [f"{SHARING}.*`position_ids`"]),
    "learned positions by a hook": (
        {"make_model": lambda: with_positions_by_a_hook(GPT2Config, **GPT2_SIZES, **NO_DROPOUT)},
        [f"{SHARING}.*`position_ids`"],
    ),
    "positions in the backbone": ({"make_model": with_positions_in_the_backbone}, [f"{SHARING}.*`position_ids`"]),
    "embeddings by a hook": ({"make_model": with_embeddings_by_a_hook}, [f"{SHARING}.*no `input_ids`"]),
    "layers in a wrapper": ({"make_model": checkpointed_by_a_wrapper}, []),
    "layers again by hand": ({"make_model": checkpointed_by_hand}, []),
    "queries scaled by position": ({"make_model": with_queries_scaled_by_position}, ["padding of prompts.*positions"]),
    "a flat position table": ({"make_model": with_a_flat_position_table}, ["padding of prompts.*gradient"]),
    "positions from the mask": (
        {"make_model": with_learned_positions_from_the_mask},
        ["repeated prompts.*(gradient|positions in the mask)"],  # the latter is said below TRL 1.15, too
    ),
    "tensors of its own": ({"pattern": GoldAnswers}, ["padding stays.*gold_ids"]),
    "a term added": ({"pattern": AddedTerm, **LONG}, ["loss of its own"]),
    "a term added outside": ({"pattern": AddedOutside}, ["loss of its own"]),
    "by width": ({"pattern": ByWidth, **LONG}, ["padding of prompts", "padding of completions"]),
    "lokr": (
        {"arguments": {"peft_config": LoKrConfig(r=4, target_modules=["q_proj", "v_proj"])}},
        ["repeated differs"],
    ),
    "loha": (
        {"arguments": {"peft_config": LoHaConfig(r=4, target_modules=["q_proj", "v_proj"])}},
        ["repeated differs"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_trls_and_a_line_says_what_is_off(name, tmp_path, caplog_transformers):
    options, lines = CASES[name]
    if not SHARES_PROMPTS:
        lines = [line for line in lines if SHARING not in line]
    options = {**options, "arguments": copy.deepcopy(options.get("arguments"))}
    plain, ours = both(tmp_path, **options)
    assert_same_weights(plain, ours, 1e-5)
    said = messages(caplog_transformers, "`compact_update`")
    assert len(said) == len(lines)
    for line, text in zip(lines, said, strict=True):
        assert re.search(line, text), text


def step_in_the_backward_pass(trainer):
    """Weights are updated as soon as they have a gradient, as by an optimizer for each layer."""

    def step(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.05)
        parameter.grad = None

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def test_an_optimizer_that_steps_in_the_backward_pass_is_not_triggered_by_the_check(tmp_path, caplog_transformers):
    options = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    plain, ours = both(tmp_path, before=step_in_the_backward_pass, **options)
    start = llama()
    for first, a, b in zip(*(trainer.parameters() for trainer in (start, plain.model, ours.model)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
        assert not torch.equal(first, a)
    assert max(logged(ours, "dataeff/update/tokens_saved"))[0] > 0.2
    assert messages(caplog_transformers, "log-probs are compared")


class Schedule(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        args.gradient_accumulation_steps = 1 + state.global_step % 3


SCHEDULES = {
    "set before training": lambda trainer: setattr(trainer.args, "gradient_accumulation_steps", 1),
    "by a callback": lambda trainer: trainer.add_callback(Schedule()),
}


@pytest.mark.parametrize("batches", [4, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_length_of_a_step_may_change(name, batches, tmp_path):
    """Rows are exchanged within the step that TRL makes."""
    options = {"steps_per_generation": batches, "max_steps": 7, "num_iterations": 2}
    assert_same_weights(*both(tmp_path, before=SCHEDULES[name], **options))


@pytest.mark.parametrize("lora", [False, True])
def test_without_any_effective_group_the_policy_stays_the_reference(lora, tmp_path):
    """Adam makes full steps of a gradient that is rounding. TRL's is 0, since both are equal to the bit."""
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian") if lora else None
    llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    model = llama() if lora else str(tmp_path / "model")
    trainer = {"model": model, "train_dataset": prompts_of_many_lengths(), "peft_config": config}
    options = {"beta": 0.04, "optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.0, "max_steps": 3}
    options |= {"rewards": lambda completions, **columns: [0.0] * len(completions), "compact_update": True}
    ours = run(tmp_path / "run", trainer=trainer, train=False, num_generations=4, **options)
    before = [parameter.detach().clone() for parameter in ours.model.parameters()]
    ours.train()
    for old, new in zip(before, ours.model.parameters(), strict=True):
        assert torch.equal(old, new)


METRICS = {
    "vespo": ({"loss_type": "vespo"}, ["vespo/phi_seq_mean"]),
    "sequences": (
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        ["clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/low_min"],
    ),
    "tokens, rows of a length": ({"loss_type": "grpo"}, ["clip_ratio/region_mean", "clip_ratio/low_min"]),
    "cispo": ({"loss_type": "cispo"}, ["cispo_clip_ratio"]),
}


def of_equal_length(prompts, completion_ids, **columns):
    """A quarter of the groups has a gradient."""
    return [float(ids[0] % 2) if int(p[:2]) % 2 else 1.0 for p, ids in zip(prompts, completion_ids)]


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_those_of_all_rows(name, tmp_path):
    """Rows that are left out count as what TRL has for them: not clipped. Here all have equally many tokens."""
    fields, names = METRICS[name]
    options = {"num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.02, "max_steps": 4, "learning_rate": 0.1}
    options |= {"rewards": of_equal_length, "loss_type": "dapo", **fields, "max_completion_length": 2}

    def never_end(trainer):
        trainer.model.generation_config.eos_token_id = trainer.generation_config.eos_token_id = None

    plain, ours = both(tmp_path, before=never_end, **options)
    expected, found = (np.array(logged(trainer, *names)) for trainer in (plain, ours))
    if name == "vespo":  # where the policy has not moved since rows were sampled
        expected = expected[::2]
        found = found[::2]
    else:
        assert (expected[:, 0] != 0).any()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert max(logged(ours, "dataeff/update/tokens_saved"))[0] > 0.2, "no rows were left out"


def test_no_metric_is_missing_where_a_micro_batch_has_no_row_with_tokens(tmp_path):
    """TRL logs 0 there."""
    options = {"mask_truncated_completions": True, "max_steps": 4}
    plain, ours = both(tmp_path, **options)
    for metric in ("clip_ratio/low_min", "clip_ratio/high_max"):
        known = [not math.isnan(value) for (value,) in logged(plain, metric)]
        assert [not math.isnan(value) for (value,) in logged(ours, metric)] >= known


def test_the_entropy_is_a_mean_however_generation_batches_lie_in_steps(tmp_path):
    options = {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 6}
    _, ours = both(tmp_path, **options)
    entropies = [value for (value,) in logged(ours, "entropy")]
    assert 0 < max(entropies) < math.log(len(tiny_tokenizer()))


class NotesAdvantages:
    advantages = ()

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.advantages = (*self.advantages, *output["advantages"].tolist())
        return output


def test_what_rounding_leaves_of_an_advantage_of_0_is_no_gradient(tmp_path):
    def by_prompt(prompts, **columns):
        return [0.1 * int(p[:2]) for p in prompts]

    options = {"multi_objective_aggregation": "normalize_then_sum", "rewards": [reward, by_prompt], "max_steps": 5}
    plain, ours = both(tmp_path, pattern=NotesAdvantages, **options)
    assert any(0 < abs(advantage) < 1e-6 for advantage in plain.advantages), "TRL leaves exact zeros"
    assert_same_weights(plain, ours)
    saved = [share for (share,) in logged(ours, "dataeff/update/tokens_saved")]
    zeros = np.abs(plain.advantages).reshape(5, -1) < 1e-6
    assert all(share >= part for share, part in zip(saved, zeros.mean(1), strict=True))


class MixesRows:
    """Tokens below the median entropy of the micro-batch have no gradient."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, entropies, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if entropies is not None:
            logps = torch.where(entropies < entropies.median(), logps.detach(), logps)
        return logps, entropies, *others


def test_a_loss_that_mixes_rows_keeps_all_of_them_in_their_micro_batch(tmp_path, caplog_transformers):
    plain, ours = both(tmp_path, pattern=MixesRows)
    assert_same_weights(plain, ours)
    said = messages(caplog_transformers, "switched off, because it changes the gradient")
    assert "rows without a gradient" in said[0]
    assert "exchanging rows" in said[1]


def test_a_loss_below_ours_keeps_all_rows(tmp_path, caplog_transformers):
    class Term(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + 0.1 * sum(p.square().sum() for p in model.parameters())

    class Ours(DataEfficientGRPOTrainer, Term):
        pass

    options = {"rewards": reward, "max_steps": 2, "num_generations": 4, "learning_rate": 0.01, "optim": "sgd"}
    trainers = []
    for name, trainer_class in (("plain", Term), ("ours", Ours)):
        trainer = {"model": llama(), "train_dataset": prompts_of_many_lengths()}
        ours = {"compact_update": True} if trainer_class is Ours else {}
        trainers.append(run(tmp_path / name, trainer_class, trainer=trainer, **options, **ours))
    assert_same_weights(*trainers)
    assert messages(caplog_transformers, "has a loss of its own")


def clamp_gradients(trainer):
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def test_hooks_of_parameters_see_the_gradient_of_trls_micro_batches(tmp_path):
    plain, ours = both(tmp_path, before=clamp_gradients)
    assert_same_weights(plain, ours)
    assert max(logged(ours, "dataeff/update/tokens_saved"))[0] > 0.2


def short_first(n: int = 24):
    """The prompts of the first generation batch are short."""
    return Dataset.from_dict({"prompt": [f"{i:02d}:" + "1+" * (0 if i < 4 else i % 9 * 3) + "2=" for i in range(n)]})


def with_frequencies_by_the_last_position():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return model_of(LlamaConfig, **SIZES, max_position_embeddings=40, rope_parameters=rope)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make_model", [with_frequencies_by_the_last_position, with_queries_scaled_by_position])
@pytest.mark.parametrize("fields", [{}, {"steps_per_generation": 4, "max_steps": 6}, {"beta": 0.1}], ids=str)
def test_later_batches_may_reach_further(fields, make_model, checkpointing, tmp_path):
    """Also in the passes before the loss, and where prompts are shared."""
    options = {"shuffle_dataset": False, "gradient_checkpointing": checkpointing, "max_steps": 4, **fields}
    # With a reference model, which is the model without an adapter
    config = LoraConfig(r=4, target_modules="all-linear") if "beta" in fields else None
    arguments = {"train_dataset": short_first(), "peft_config": config}
    assert_same_weights(*both(tmp_path, make_model, arguments=arguments, **options), 1e-5)


class Counts:
    """Every third loss counts double, by a number in a container, and one draws from a generator of its own."""

    def __init__(self, *args, **kwargs):
        self.seen = {"losses": 0}
        self.generator = np.random.default_rng(0)
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        self.seen["losses"] += 1
        factor = (1 + (self.seen["losses"] % 3 == 0)) * (1 + self.generator.random())
        return super()._compute_loss(model, inputs) * factor


def test_what_a_subclass_counts_and_draws_is_not_changed_by_the_check(tmp_path):
    assert_same_weights(*both(tmp_path, pattern=Counts))


class LateDropout(TrainerCallback):
    """As a schedule of dropout."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1


def test_a_model_that_changes_is_tried_again(tmp_path, caplog_transformers):
    both(tmp_path, before=lambda trainer: trainer.add_callback(LateDropout()))
    assert messages(caplog_transformers, "repeated differs")
