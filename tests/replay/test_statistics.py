"""Statistics of the ratio, by hand."""

import numpy as np
import pytest
import torch

from trl_dataeff.replay.statistics import ratio_statistics, sampling_statistics, summarize, summarize_sampling


def test_statistics_cover_replayed_tokens_only():
    inputs = {
        "replayed": torch.tensor([True, False, True]),
        "completion_mask": torch.tensor([[1, 1], [1, 1], [1, 0]]),
    }
    ratio = torch.tensor([[2.0, 0.5], [9.0, 9.0], [1.0, 7.0]])
    capped, clipped = ratio > 1.5, ratio < 1.5
    first = ratio_statistics(ratio, capped, clipped, inputs)
    assert first.tolist() == pytest.approx([3.0, 3.5, 5.25, 2.0, 1.0, 2.0, 2 * np.log(2)])
    by_row = ratio_statistics(ratio, (ratio > 1.5)[:, :1], clipped[:, :1], inputs)
    assert by_row.tolist() == pytest.approx([3.0, 3.5, 5.25, 2.0, 2.0, 1.0, 2 * np.log(2)])
    no_tool = inputs | {"tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1]])}
    without = ratio_statistics(ratio, capped, clipped, no_tool)
    assert without.tolist() == pytest.approx([2.0, 3.0, 5.0, 2.0, 1.0, 1.0, np.log(2)])
    nothing = ratio_statistics(ratio, capped, clipped, inputs | {"replayed": torch.zeros(3, dtype=torch.bool)})
    metrics = summarize(torch.cat([first, nothing]))
    assert metrics == pytest.approx(
        {
            "replay/ratio_mean": 3.5 / 3,
            "replay/ratio_max": 2.0,
            "replay/movement": 2 * np.log(2) / 3,
            "replay/ess": 3.5**2 / 3 / 5.25,
            "replay/capped_share": 1 / 3,
            "replay/clipped_share": 2 / 3,
        }
    )
    assert np.isnan(list(summarize(nothing).values())).all()
    assert summarize(nothing).keys() == metrics.keys()


@pytest.mark.parametrize(
    ("ratios", "share"), [([2.0] * 5, 1.0), ([1e6, 1e-6, 1e-6, 1e-6], 0.25), ([1.0, 3.0], 16 / 2 / 10)]
)
def test_effective_sample_size(ratios, share):
    ratio = torch.tensor(ratios)[:, None]
    inputs = {"replayed": torch.ones(len(ratios), dtype=torch.bool), "completion_mask": torch.ones(len(ratios), 4)}
    none = torch.zeros_like(ratio, dtype=torch.bool)
    assert summarize(ratio_statistics(ratio, none, none, inputs))["replay/ess"] == pytest.approx(share, rel=1e-4)


def sampling_batch(**fields):
    nan = float("nan")
    values = {
        "replayed": torch.tensor([False, True, False]),
        "completion_mask": torch.tensor([[1, 1], [1, 1], [1, 0]]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0], [-1.0, -1.0], [-3.0, 0.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.5, nan], [-9.0, -9.0], [-2.0, -5.0]]),
        "importance_sampling_ratio": torch.tensor([[1.5, 1.0], [9.0, 0.0], [0.5, 7.0]]),
    }
    return values | fields


def test_the_samplers_statistics_cover_fresh_tokens_only():
    statistics = sampling_statistics(sampling_batch())
    assert statistics.tolist() == [2.0, 1.5, 1.0, 3.0, 3.0, 0.5, 1.5]
    by_row = sampling_statistics(sampling_batch(importance_sampling_ratio=torch.tensor([[2.0], [0.0], [1.0]])))
    assert by_row.tolist()[3:] == [2.0, 3.0, 1.0, 2.0]
    no_tool = sampling_statistics(sampling_batch(tool_mask=torch.tensor([[0, 1], [1, 1], [1, 1]])))
    assert no_tool.tolist() == [1.0, 1.0, 1.0, 2.0, 1.5, 0.5, 1.0]


def test_a_process_without_fresh_rows_adds_nothing():
    nothing = sampling_statistics(sampling_batch(replayed=torch.ones(3, dtype=torch.bool)))
    alone = summarize_sampling(sampling_statistics(sampling_batch()))
    both = summarize_sampling(torch.cat([nothing, sampling_statistics(sampling_batch())]))
    assert both == alone
    assert alone["sampling/sampling_logp_difference/mean"] == 0.75
    assert alone["sampling/importance_sampling_ratio/min"] == 0.5
    assert alone["sampling/importance_sampling_ratio/mean"] == 1.0
    assert all(value != value for value in summarize_sampling(nothing).values())
