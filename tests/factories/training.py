"""Short training runs whose decisions can be looked at."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import torch

from tests.factories.tiny import run, text_of
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.collector import GenerationBatch


def number(prompt) -> int:
    """The two digits with which the prompts of `plain_dataset` and `tool_dataset` begin."""
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


def as_it_is(batch: GenerationBatch) -> SimpleNamespace:
    """
    The lists of a generation batch as they are now, with `origins` and `dispositions` by `id` of its groups: a group that is
    used again gets others.
    """
    names = ("trained", "leftover", "generated", "dropped", "trained_stale", "leftover_now")
    lists = {name: list(getattr(batch, name)) for name in names}
    groups = {id(group): group for groups in lists.values() for group in groups}.items()
    return SimpleNamespace(
        **lists,
        replayed=[group for group in batch.trained if group.origin == "replayed"],
        rounds=batch.rounds,
        metrics=batch.metrics,
        selector_metrics=batch.selector_metrics,
        origins={i: group.origin for i, group in groups},
        dispositions={i: group.disposition for i, group in groups},
    )


class Watched(DataEfficientGRPOTrainer):
    """
    Notes what is generated.

    Attributes:
        generated: number of completions generated in training.
        batches: each generation batch, as it was when it was collected (see `as_it_is`).
        weights: those of the policy that sampled each generation batch, by parameter.
        tensors: TRL's tensors of each generation batch.
    """

    def __init__(self, *args, **kwargs):
        self.generated, self.batches, self.weights, self.tensors = 0, [], [], []
        super().__init__(*args, **kwargs)
        self.collector.collect = partial(self._noted, self.collector.collect)

    def _noted(self, collect, *args):
        self.weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        batch = collect(*args)
        self.batches.append(as_it_is(batch))
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
    Counts the rows of each of the model's forward passes but those that generate.

    Attributes:
        in_loss: of passes of the loss.
        old_logps_rows: of passes for old log-probs.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.in_loss, self.old_logps_rows = [], []
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        if "labels" in kwargs:
            (self.in_loss if torch.is_grad_enabled() else self.old_logps_rows).append(len(kwargs["input_ids"]))


def logp_differences(trainer) -> list[float]:
    """By generation batch, how far log-probs of sampler and training are apart at most, over fresh rows with an advantage."""
    largest = []
    for tensors in trainer.tensors:
        mask = tensors["completion_mask"] * tensors.get("tool_mask", 1)
        fresh = tensors["advantages"] != 0
        fresh = fresh & ~tensors["replayed"] if "replayed" in tensors else fresh
        apart = (tensors["old_per_token_logps"] - tensors["sampling_per_token_logps"]).abs() * mask
        largest.append((apart * fresh[:, None]).max().item())
    return largest


def dynamic(tmp_path, trainer_class=Watched, rewards=mixed_reward, **options):
    """A short run with dynamic sampling, each generation batch of two steps."""
    options = {"max_rollout_rounds": 4, "steps_per_generation": 2, **options}
    return run(trainer_class, DataEfficientGRPOConfig, tmp_path, rewards=rewards, **options)
