"""Short training runs whose decisions can be looked at."""

import re
from functools import partial

import torch

from tests.factories.tiny import run, text_of
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.collector import GenerationBatch
from trl_dataeff.compact.exact import has_fused_head


#: Whether the update computes a group's prompt once, where nothing else is in its way: not below TRL 1.15
SHARES_PROMPTS = has_fused_head()


def number(prompt) -> int:
    """The two digits with which the prompts of these datasets begin."""
    return int(re.search(r"\d\d", text_of(prompt)).group())


def mixed_reward(prompts, completion_ids, **kwargs):
    """One prompt of four can be learned, one is always solved, two never are."""
    return [
        float(sum(ids) % 2 == 0) if number(p) % 4 == 0 else float(number(p) % 4 == 1)
        for p, ids in zip(prompts, completion_ids)
    ]


def partly_learnable_reward(prompts, completion_ids, **kwargs):
    """Two prompts of three can be learned, and rewards of 0, 1 and 2 often give a completion its group's mean."""
    return [float(sum(ids) % 3) if number(p) % 3 else 1.0 for p, ids in zip(prompts, completion_ids)]


class Watched(DataEfficientGRPOTrainer):
    """
    Notes what is generated.

    Attributes:
        generated: number of completions generated in training.
        batches: each generation batch.
        weights: those of the policy that sampled each generation batch, by parameter.
        tensors: TRL's tensors of each generation batch.
    """

    def __init__(self, *args, **kwargs):
        self.generated = 0
        self.batches: list[GenerationBatch] = []
        self.weights = []
        self.tensors = []
        super().__init__(*args, **kwargs)
        if self.collector is not None:
            self.collector.collect = partial(self._noted, self.collector.collect)

    def _noted(self, collect, *args):
        self.weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        batch = collect(*args)
        self.batches.append(batch)
        return batch

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.generated += len(prompt_ids) if self.model.training else 0
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        tensors = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.tensors.append(tensors)
        return tensors


class CountedRows(Watched):
    """
    Counts what the model's forward passes compute, but for those that generate.

    Attributes:
        in_loss: rows of each pass of the loss.
        old_logps_rows: rows of each pass for old log-probs.
        tokens_in_loss: tokens, padding included, that each pass of the loss computes.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.in_loss = []
        self.old_logps_rows = []
        self.tokens_in_loss = []
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.model.get_input_embeddings().register_forward_pre_hook(self._count_tokens)

    def _count(self, module, args, kwargs):
        is_for_logps = "labels" in kwargs or kwargs.get("use_cache") is False  # the latter below TRL 1.15
        if not is_for_logps or self._dataeff_trial is not None:  # a few rows are computed several ways
            return
        if torch.is_grad_enabled():
            self.in_loss.append(len(kwargs["input_ids"]))
            self.tokens_in_loss.append(0)
        else:
            self.old_logps_rows.append(len(kwargs["input_ids"]))

    def _count_tokens(self, module, args):
        if torch.is_grad_enabled() and self.tokens_in_loss and self._dataeff_trial is None:
            self.tokens_in_loss[-1] += args[0].numel()


class Checked(Watched):
    """Computes the loss of every micro-batch with replayed rows by hand, with its gradient, and compares it with the
    trainer's.

    Attributes:
        checked: number of such micro-batches.
        held: number of tokens whose ratio was held at the cap.
        largest: the largest pi_old / pi_behavior.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.checked = self.held = 0
        self.largest = 0.0

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if "replayed" in inputs and inputs["replayed"].any():
            expected = self.loss_by_hand(model, inputs)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
            parameters = [p for p in model.parameters() if p.requires_grad]
            ours = torch.autograd.grad(loss, parameters, retain_graph=True)
            for a, b in zip(ours, torch.autograd.grad(expected, parameters)):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            self.checked += 1
        return loss

    def loss_by_hand(self, model, inputs):
        """The objectives of arXiv 2506.05316 and of the loss types, from plain logits."""
        args, mask = self.args, inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
        t = mask.size(1)
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -t - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, -t:, None])[..., 0]
        advantages = inputs["advantages"][:, None]
        behavior = inputs["behavior_per_token_logps"]
        old = inputs.get("old_per_token_logps", logps.detach())
        known = ~behavior.isnan()
        assert (known.any(dim=1) == inputs["replayed"]).all()
        sampled = torch.where(known, behavior, old)
        self.largest = max(self.largest, (old - sampled)[mask.bool()].exp().max().item())
        of = [logps, old, sampled]
        if args.importance_sampling_level == "sequence":
            of = [(values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True) for values in of]
        w, rho = (of[0] - of[1]).exp(), (of[1] - of[2]).exp().clamp(max=args.replay_ratio_cap)
        held = torch.zeros_like(w, dtype=torch.bool)
        if args.replay_clip == "behavior":
            w, rho = (of[0] - of[2]).exp(), torch.ones(())
            held = inputs["replayed"][:, None] & (advantages < 0) & (w > args.replay_ratio_cap)
        self.held += int((held & mask.bool()).sum())
        w = torch.where(held, args.replay_ratio_cap, w)
        if args.loss_type == "cispo":
            per_token = -rho * w.clamp(max=args.epsilon).detach() * advantages * logps
        else:
            clipped = w.clamp(1 - args.epsilon, 1 + args.epsilon)
            per_token = -rho * torch.where(
                held, args.replay_ratio_cap * advantages, torch.min(w * advantages, clipped * advantages)
            )
        trls_ratio = inputs.get("importance_sampling_ratio", torch.ones(()))  # vLLM's, of fresh rows alone
        per_token = per_token * mask * torch.where(inputs["replayed"][:, None], 1.0, trls_ratio)
        accumulation = self.current_gradient_accumulation_steps
        if args.loss_type == "grpo":
            return (per_token.sum(1) / mask.sum(1)).mean() / accumulation
        if args.loss_type == "bnpo":
            return per_token.sum() / mask.sum() / accumulation
        if args.loss_type == "dr_grpo":
            return per_token.sum() / (len(mask) * self.max_completion_length) / accumulation
        return per_token.sum() / (inputs["num_items_in_batch"] * accumulation / args.steps_per_generation)


def logp_differences(trainer) -> list[float]:
    """
    By generation batch, how far log-probs of sampler and training are apart at most, over fresh rows with an
    advantage.
    """
    largest = []
    for tensors in trainer.tensors:
        mask = tensors["completion_mask"] * tensors.get("tool_mask", 1)
        fresh = tensors["advantages"] != 0
        fresh = fresh & ~tensors["replayed"] if "replayed" in tensors else fresh
        apart = (tensors["old_per_token_logps"] - tensors["sampling_per_token_logps"]).abs() * mask
        largest.append(apart.where(fresh[:, None], 0).max().item())
    return largest


def dynamic(tmp_path, trainer_class=Watched, rewards=mixed_reward, **options):
    """A short run with dynamic sampling, each generation batch of two steps."""
    options = {"max_rollout_rounds": 4, "steps_per_generation": 2, **options}
    return run(tmp_path, trainer_class, rewards=rewards, **options)


def before_reward(trainer, step: int | None, act) -> None:
    """
    Have `act()` called once, as the reward function is called after `step` steps, or without one in the first
    evaluation.
    """
    (plain,), pending = trainer.reward_funcs, [act]

    def reward(*args, **kwargs):
        now = not trainer.model.training if step is None else trainer.state.global_step == step
        if now and pending:  # once: a step may take several rounds
            pending.pop()()
        return plain(*args, **kwargs)

    trainer.reward_funcs = [reward]
