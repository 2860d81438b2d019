"""Log-probabilities of the policy that sampled a group."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.factories.groups import make_group
from trl_dataeff.compact.sampler import SampledTokens, sampling_metrics
from trl_dataeff.replay.logprobs import (
    LogprobRecorder,
    compute_leftover_logps,
    exclude_masked,
    group_logps,
    groups_in_batch,
)
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import HARD, RolloutGroup, pack_groups, unpack_groups


NAN = float("nan")
WIDTH = 6  # tokens that completions are padded to


def group_of(*lengths: int, **fields) -> RolloutGroup:
    """A group of completions of these lengths."""
    tokens = [np.full(length, 5, dtype=np.int32) for length in lengths]
    return make_group(
        g=len(lengths), completion_tokens=tokens, rewards=np.zeros((len(lengths), 1), np.float32), **fields
    )


def fresh(*groups: RolloutGroup):
    """These groups, generated for the batch."""
    return groups_in_batch(groups, dict.fromkeys(groups, "fresh"))


def logps_of(rows: list[int]) -> torch.Tensor:
    """Log-probs `(b, WIDTH)` that tell row and token."""
    return torch.tensor(rows).view(-1, 1) + torch.arange(WIDTH) / 10


def batch_of(groups: list[RolloutGroup], **tensors: torch.Tensor) -> dict:
    rows = sum(len(group.rollouts) for group in groups)
    return {"completion_ids": torch.zeros(rows, WIDTH, dtype=torch.long), "advantages": torch.ones(rows), **tensors}


def test_effective_groups_of_this_batch_are_recorded_also_those_of_references():
    groups = [group_of(1, kind=HARD), group_of(1, is_reference=True)]
    recorder = LogprobRecorder()
    batch = batch_of(groups)
    recorder.expect(groups_in_batch(groups, {groups[0]: "fresh", groups[1]: "reference"}), batch)
    recorder.record(batch["batch_row"], logps_of([0, 1]))
    (values,) = groups[1].rollouts.behavior_logps
    np.testing.assert_array_equal(values, logps_of([1])[0, :1].numpy(), strict=True)
    assert groups[0].rollouts.behavior_logps is None


@pytest.mark.parametrize("known", [True, False], ids=["old log-probs", "those of the loss"])
@pytest.mark.parametrize("active", [[1, 1], [0, 1], [1, 0], [0, 0]])
def test_log_probs_that_the_batch_has_count_at_once_and_rows_without_an_advantage_are_not_waited_for(active, known):
    """These skip the passes, and their log-probs count nowhere."""
    groups, recorder = [group_of(2, 3)], LogprobRecorder()
    logps = torch.where(torch.tensor(active).bool()[:, None], logps_of([0, 1]), 0.0)
    batch = batch_of(groups, advantages=-torch.tensor(active).float())
    if known:
        batch["old_per_token_logps"] = logps
    recorder.expect(fresh(*groups), batch)
    assert ("batch_row" in batch) == (not known)
    for row in [row for row in (0, 1) if active[row] and not known]:
        recorder.record(batch["batch_row"][row : row + 1], logps_of([row]))
    for row, values in enumerate(groups[0].rollouts.behavior_logps):
        expected = logps_of([row])[0, : len(values)] if active[row] else np.full(len(values), np.nan)
        np.testing.assert_array_equal(values, expected)
    recorder.expect([], batch_of(groups))


@pytest.mark.parametrize("columns", [WIDTH, 3, 2, 1, 0])
def test_a_pass_over_fewer_columns_than_a_completion_has_tokens_leaves_the_others_unknown(columns):
    """Columns that are padding or masked in all rows of a micro-batch may be cut."""
    groups = [group_of(3, 1)]
    recorder = LogprobRecorder()
    batch = batch_of(groups)
    recorder.expect(fresh(*groups), batch)
    logps = logps_of([0, 1])
    recorder.record(batch["batch_row"][:1], logps[:1, :columns])
    recorder.record(batch["batch_row"][1:], logps[1:, :columns])
    expected = np.where(np.arange(WIDTH) < columns, logps, np.float32("nan"))
    for row, length in enumerate((3, 1)):
        values = groups[0].rollouts.behavior_logps[row]
        np.testing.assert_array_equal(values, expected[row, :length], strict=True)
    (stored,) = unpack_groups(pack_groups(groups))  # whose arrays are joined, and cut by the lengths of completions
    np.testing.assert_equal(stored.rollouts.behavior_logps, groups[0].rollouts.behavior_logps)


def test_a_row_that_the_loss_has_not_seen_is_an_error():
    recorder, groups = LogprobRecorder(), [group_of(1, 2)]
    batch = batch_of(groups)
    recorder.expect(fresh(*groups), batch)
    recorder.record(batch["batch_row"][:1], logps_of([0]))
    assert groups[0].rollouts.behavior_logps is None
    with pytest.raises(RuntimeError, match="1 rows of the last generation batch"):
        recorder.expect(fresh(*groups), batch)


class Forward:
    """TRL's forward pass: the log-prob of a token is its negative id. Counts its calls."""

    calls = 0

    def __call__(self, input_ids, attention_mask, length):
        self.calls += 1
        return -input_ids[:, -length:].double()

    def logps_of(self, group):
        return group_logps(group, self, 0, torch.device("cpu"))


def test_processes_make_equally_many_forward_passes_for_their_leftover_groups():
    """A sharded model's forward pass is a collective: a process without leftover groups has to take part."""
    for rank in (0, 1):
        groups = [make_group(owner=owner) for owner in (0, 0, 0, 1)]
        groups = [group if group.owner == rank else replace(group, rollouts=None) for group in groups]
        forward, padding_group = Forward(), make_group(owner=rank)
        compute_leftover_logps(groups, forward.logps_of, padding_group, Processes(rank, 2))
        assert forward.calls == 3
        assert padding_group.rollouts.behavior_logps is None
        for rollouts in [group.rollouts for group in groups if group.owner == rank]:
            for logps, tokens in zip(rollouts.behavior_logps, rollouts.completion_tokens, strict=True):
                np.testing.assert_array_equal(logps, -tokens.astype(np.float32), strict=True)


def test_a_sequence_that_the_samplers_mask_excluded_stays_out_when_it_is_replayed():
    group = make_group()
    batch = {"advantages": torch.tensor([1.0, -1.0]), "importance_sampling_ratio": torch.tensor([[0.0], [1.2]])}
    exclude_masked(fresh(group), batch)
    assert batch["advantages"].tolist() == [1, -1], "fresh rows are TRL's matter"
    assert group.rollouts.excluded == [True, False]
    (stored,) = unpack_groups(pack_groups([group]))  # as a checkpoint keeps it
    (replayed,) = groups_in_batch([stored], {stored: "replayed"})
    batch = {
        "advantages": torch.tensor([0.5, -0.5, 1.0, -1.0]),
        "importance_sampling_ratio": torch.tensor([[1.0], [0.0], [9.0], [0.0]]),  # 0: the policies are no longer alike
    }
    new = make_group()
    exclude_masked(groups_in_batch([new, stored], {new: "fresh", stored: "replayed"}), batch)
    assert batch["advantages"].tolist() == [0.5, -0.5, 0, -1]
    assert stored.rollouts.excluded == [True, False]
    stored.rollouts.excluded = None  # as of a leftover group, which no loss has met while it was fresh
    batch = {"advantages": torch.ones(2), "importance_sampling_ratio": torch.zeros(2, 1)}
    exclude_masked([replayed], batch)
    assert batch["advantages"].tolist() == [1, 1]
    without = {"advantages": torch.ones(2)}
    exclude_masked([replayed], without)
    assert without["advantages"].tolist() == [1, 1], "the sampler gave no log-probs"


def sampled(**fields) -> dict[str, float]:
    """The metrics of vLLM's log-probs of three rows, of which the second is replayed, without their prefix."""
    values = {
        "replayed": torch.tensor([False, True, False]),
        "completion_mask": torch.tensor([[1, 1], [1, 1], [1, 0]]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0], [-1.0, -1.0], [-3.0, 0.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.5, NAN], [-9.0, -9.0], [-2.0, -5.0]]),
        "importance_sampling_ratio": torch.tensor([[1.5, 1.0], [9.0, 0.0], [0.5, 7.0]]),
    }
    gather = fields.pop("gather", lambda own: own)
    metrics = sampling_metrics(values | fields, gather, is_stale=(values | fields).get("replayed"))
    return {name.removeprefix("sampling/"): value for name, value in metrics.items()}


def test_trls_metrics_of_the_sampler_cover_fresh_tokens_only():
    names = ("sampling_logp_difference/mean", "sampling_logp_difference/max")
    names += tuple(f"importance_sampling_ratio/{name}" for name in ("min", "mean", "max"))
    by_token = dict(zip(names, (0.75, 1.0, 0.5, 1.0, 1.5), strict=True))
    assert sampled() == by_token
    by_row = sampled(importance_sampling_ratio=torch.tensor([[2.0], [0.0], [1.0]]))
    assert [by_row[name] for name in names[2:]] == [1.0, 1.5, 2.0]
    no_tool = sampled(tool_mask=torch.tensor([[0, 1], [1, 1], [1, 1]]))
    assert [no_tool[name] for name in names] == [1.0, 1.0, 0.5, 0.75, 1.0]
    skipped = torch.tensor([[-1.0, -2.0], [-1.0, -1.0], [NAN, NAN]])  # the third row, by the pass for old log-probs
    assert [sampled(old_per_token_logps=skipped)[name] for name in names] == [0.5, 0.5, 1.0, 1.25, 1.5]
    nothing = torch.full((5,), NAN)  # of a process without fresh rows
    assert sampled(gather=lambda own: torch.cat([own, nothing])) == by_token
    assert all(value != value for value in sampled(replayed=torch.ones(3, dtype=torch.bool)).values())
    assert sampling_metrics({}, lambda own: own) == {}, "TRL has logged none"


def test_metrics_of_the_sampler_over_micro_batches_are_those_of_the_whole_batch():
    rng = torch.Generator().manual_seed(0)
    batch = {
        "completion_mask": (torch.rand(9, 5, generator=rng) < 0.7).long(),
        "old_per_token_logps": -torch.rand(9, 5, generator=rng),
        "sampling_per_token_logps": -torch.rand(9, 5, generator=rng),
        "importance_sampling_ratio": torch.rand(9, 5, generator=rng),
    }
    tokens = SampledTokens()
    for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):
        width = 5 - int(batch["completion_mask"][rows].flip(1).cumsum(1).eq(0).all(0).sum())  # without padding behind
        tokens.add({name: values[rows, :width] for name, values in batch.items()})
    assert tokens.metrics(lambda own: own) == pytest.approx(sampling_metrics(batch, lambda own: own))
