"""The log of a real run, draws from it, and the tables."""

import numpy as np
import pytest

from benchmarks.real_log import __main__ as command
from benchmarks.real_log.__main__ import SETTINGS, auc, main
from benchmarks.real_log.methods import METHODS
from benchmarks.real_log.replaying import Setting, read, replay


LOG = read()
SHORT = Setting(prompts=16, passes=1.0, span=1.0)


def test_the_log_is_that_of_its_readme():
    assert LOG.success.shape == (1209, 57)
    assert LOG.visits.mean() == pytest.approx(53, abs=1)
    assert np.isfinite(LOG.other_model).sum() == 926
    eighths = LOG.success[np.isfinite(LOG.success)] * 8
    np.testing.assert_allclose(eighths, eighths.round(), atol=1e-3)
    np.testing.assert_array_equal(LOG.at(0.0), LOG.success[:, 0])
    last = [row[np.isfinite(row)][-1] for row in LOG.success]
    np.testing.assert_array_equal(LOG.at(1.0), last)
    assert np.bincount(LOG.kinds()).tolist() == [303, 302, 302, 302]


def test_uniform_draws_take_each_prompt_once_a_pass_with_its_outcome_of_that_time():
    drawn = replay(METHODS["uniform"], LOG, SHORT, seed=3)
    batches, prompts = drawn.ids.shape
    whole = len(LOG) // prompts  # batches of a pass; the rest of it is dropped
    assert len(np.unique(drawn.ids[:whole])) == whole * prompts
    for batch in (0, batches // 2, batches - 1):
        outcome = LOG.at(batch / batches)[drawn.ids[batch]]
        np.testing.assert_array_equal(drawn.effective[batch], (outcome > 0) & (outcome < 1))
    assert drawn.different(len(LOG)) == pytest.approx(1, abs=0.02)
    shares = np.bincount(LOG.bands()) / len(LOG)
    assert drawn.drawn_by_band(LOG.bands()) @ shares == pytest.approx(1)


def test_a_seed_gives_the_same_draws_and_another_gives_others():
    first, again, other = (replay(METHODS["dots"], LOG, Setting(16, 0.2, 0.1), seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.ids, again.ids)
    assert (first.ids != other.ids).any()


def test_kinds_keep_their_shares():
    drawn = replay(METHODS["kinds"], LOG, SHORT, seed=0)
    counts = np.bincount(LOG.kinds()[drawn.ids].ravel())
    assert np.ptp(counts) <= 4


def test_the_picture_has_a_line_for_each_method_and_is_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PREDICTED", Setting(prompts=64, passes=1.0, span=0.2))
    pictures = []
    for folder in (tmp_path / "first", tmp_path / "again"):
        folder.mkdir()
        command.draw(folder / "log.svg", LOG, seeds=(0,))
        pictures.append((folder / "log.svg").read_text(encoding="utf-8"))
    for name, colour in command.COLOURS.items():
        assert METHODS[name].title in pictures[0]
        assert colour.lower() in pictures[0].lower()
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize(("scores", "expected"), [([1, 2, 3, 4], 0.75), ([1, 1, 1, 1], 0.5), ([4, 1, 3, 2], 0.0)])
def test_auc_by_pairs(scores, expected):
    assert auc(np.array(scores), np.array([False, True, False, True])) == expected


def test_selection_on_the_log_finds_what_it_is_said_to_find(capsys, monkeypatch):
    """Far more than uniform draws and GRESO over several passes; with a column from the first half pass on."""
    monkeypatch.setattr(command, "SETTINGS", (SETTINGS[0], SETTINGS[3]))
    main(["--methods", "uniform", "greso", "dots", "column", "--seeds", "11"])
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    half, several = [[float(cell.split(" ")[0]) for cell in row] for row in rows[2:4]]
    uniform, greso, dots, column = several[2:]
    assert greso > 0.65
    assert dots > greso + 0.02
    assert dots > uniform + 0.2
    assert column > 0.75
    assert half[5] > half[2] + 0.1
