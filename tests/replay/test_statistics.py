"""Statistics of the ratio, by hand."""

import numpy as np
import pytest
import torch

from trl_dataeff.replay.statistics import ratio_statistics, summarize


def test_statistics_cover_replayed_tokens_only():
    inputs = {
        "replayed": torch.tensor([True, False, True]),
        "completion_mask": torch.tensor([[1, 1], [1, 1], [1, 0]]),
    }
    ratio = torch.tensor([[2.0, 0.5], [9.0, 9.0], [1.0, 7.0]])
    capped, clipped = ratio > 1.5, ratio < 1.5
    first = ratio_statistics(ratio, capped, clipped, inputs)
    assert first.tolist() == [3.0, 3.5, 5.25, 2.0, 1.0, 2.0]
    by_row = ratio_statistics(ratio, (ratio > 1.5)[:, :1], clipped[:, :1], inputs)
    assert by_row.tolist() == [3.0, 3.5, 5.25, 2.0, 2.0, 1.0]
    no_tool = inputs | {"tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1]])}
    assert ratio_statistics(ratio, capped, clipped, no_tool).tolist() == [2.0, 3.0, 5.0, 2.0, 1.0, 1.0]
    nothing = ratio_statistics(ratio, capped, clipped, inputs | {"replayed": torch.zeros(3, dtype=torch.bool)})
    metrics = summarize(torch.cat([first, nothing]))
    assert metrics == pytest.approx(
        {
            "replay/ratio_mean": 3.5 / 3,
            "replay/ratio_max": 2.0,
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
