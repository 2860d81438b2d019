"""Statistics of the ratio, by hand."""

import numpy as np
import pytest
import torch

from trl_dataeff.replay.statistics import ratio_statistics, summarize


def test_statistics_cover_replayed_tokens_only():
    inputs = {
        "replayed": torch.tensor([True, False, True]),
        "completion_mask": torch.tensor([[1, 1], [1, 1], [1, 0]]),
        "behavior_per_token_logps": torch.tensor([[0.5, 0.75], [0.25, 0.25], [0.9, 0.125]]).log(),
    }
    ratio = torch.tensor([[2.0, 0.5], [9.0, 9.0], [1.0, 7.0]])
    capped, clipped = ratio > 1.5, ratio < 1.5
    first = ratio_statistics(ratio, capped, clipped, inputs)
    assert first.tolist() == pytest.approx([3.0, 3.5, 5.25, 2.0, 1.0, 2.0, 0.5 + 0.25 + 0.1, 0.25 + 0.1])
    by_row = ratio_statistics(ratio, (ratio > 1.5)[:, :1], clipped[:, :1], inputs)
    assert by_row.tolist() == pytest.approx([3.0, 3.5, 5.25, 2.0, 2.0, 1.0, 0.75 + 0.1, 0.1])
    no_tool = inputs | {"tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1]])}
    without_tools = ratio_statistics(ratio, capped, clipped, no_tool).tolist()
    assert without_tools == pytest.approx([2.0, 3.0, 5.0, 2.0, 1.0, 1.0, 0.5 + 0.1, 0.1])
    unknown = inputs | {"behavior_per_token_logps": torch.tensor([[np.nan, 0.75], [0.25, 0.25], [0.0, np.nan]]).log()}
    masses = ratio_statistics(ratio, capped, clipped, unknown)
    assert masses[6:].tolist() == pytest.approx([1.25, 1.25]), "log 0 is a token of no probability; NaN is not known"
    nothing = ratio_statistics(ratio, capped, clipped, inputs | {"replayed": torch.zeros(3, dtype=torch.bool)})
    metrics = summarize(torch.cat([first, nothing]))
    assert metrics == pytest.approx(
        {
            "replay/ratio_mean": 3.5 / 3,
            "replay/ratio_max": 2.0,
            "replay/ess": 3.5**2 / 3 / 5.25,
            "replay/capped_share": 1 / 3,
            "replay/clipped_share": 2 / 3,
            "replay/clipped_mass": 0.35 / 0.85,
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
    inputs["behavior_per_token_logps"] = torch.full((len(ratios), 4), -1.0)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    assert summarize(ratio_statistics(ratio, none, none, inputs))["replay/ess"] == pytest.approx(share, rel=1e-4)
