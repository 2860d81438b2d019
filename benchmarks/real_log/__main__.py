"""
What selection finds in the log of a real GRPO run.

    python -m benchmarks.real_log                             # every method, in a few minutes on one core
    python -m benchmarks.real_log --methods dots greso --seeds 3 4 --prompts odd
    python -m benchmarks.real_log --draw                      # only docs/img/real_log.svg

Prints Markdown tables: the share of groups with a gradient, how often prompts of each band were drawn, and how well
success was predicted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import tables
from benchmarks.figures import BLUE, GREEN, GREY, ORANGE, axis_of
from benchmarks.real_log.methods import METHODS
from benchmarks.real_log.replaying import BANDS, FIRST_VISITS, Log, Replayed, Setting, read, replay


SETTINGS = (
    Setting(prompts=8, passes=0.5, span=0.1),
    Setting(prompts=16, passes=1.0, span=0.2),
    Setting(prompts=16, passes=2.0, span=0.4),
    Setting(prompts=16, passes=3.8, span=1.0),
    Setting(prompts=32, passes=4.0, span=1.0),
    Setting(prompts=64, passes=5.0, span=0.5),
)
PREDICTED = SETTINGS[3]
SEEDS = (0, 1, 2)
PARTS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}

COLOURS = {"uniform": GREY, "greso": ORANGE, "dots": BLUE, "column": GREEN}
PICTURE = Path(__file__).parents[2] / "docs" / "img" / "real_log.svg"

Runs = dict[tuple[str, Setting], list[Replayed]]


def run(methods: Sequence[str], log: Log, seeds: Sequence[int]) -> Runs:
    """Each method in each setting, with each seed."""
    return {
        (name, setting): [replay(METHODS[name], log, setting, seed) for seed in seeds]
        for setting in SETTINGS
        for name in methods
    }


def effective_table(methods: Sequence[str], runs: Runs) -> str:
    """Shares of groups with a gradient."""
    rows = []
    for setting in SETTINGS:
        cells = [_of_seeds([own.effective.mean() for own in runs[name, setting]]) for name in methods]
        rows.append([*_about(setting), *cells])
    return tables.markdown(["prompts a batch", "passes", *_titles(methods)], rows)


def _of_seeds(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.2f}-{max(values):.2f})"


def _about(setting: Setting) -> list[str]:
    return [str(setting.prompts), f"{setting.passes:g}"]


def _titles(methods: Sequence[str]) -> list[str]:
    return [METHODS[name].title for name in methods]


def drawn_table(methods: Sequence[str], runs: Runs, log: Log) -> str:
    """How often prompts were drawn, by band, and how many different ones."""
    bands = log.bands()
    rows = []
    for setting in SETTINGS:
        for name in methods:
            own = runs[name, setting]
            drawn = np.mean([replayed.drawn_by_band(bands) for replayed in own], axis=0)
            different = np.mean([replayed.different(len(log)) for replayed in own])
            cells = [f"{times:.2f}" for times in (*drawn, different)]
            rows.append([*_about(setting), METHODS[name].title, *cells])
    return tables.markdown(["prompts a batch", "passes", "method", *BANDS, "different prompts in a pass"], rows)


def prediction_table(methods: Sequence[str], runs: Runs) -> str:
    """How well the outcomes of all prompts were predicted, in each pass of one setting."""
    rows = []
    for name in methods:
        own = runs[name, PREDICTED]
        if np.isnan(own[0].chances[-1]).all():
            continue
        for number in range(round(PREDICTED.passes)):
            measured = np.array([_quality(replayed, number) for replayed in own])
            rows.append([METHODS[name].title, str(number + 1), *(f"{x:.2f}" for x in np.nanmean(measured, axis=0))])
    header = ["method", "pass", "Pearson, success", "AUC, gradient", "predicted share", "observed share"]
    return tables.markdown(header, rows)


def _quality(replayed: Replayed, number: int) -> tuple[float, float, float, float]:
    """
    Of a pass: correlation of predicted and observed success rates; AUC of the estimated chances of a gradient; mean
    chance, and share of groups with a gradient, of all prompts.
    """
    passes = np.array_split(np.arange(len(replayed.observed)), round(PREDICTED.passes))
    batches = passes[number][:: max(1, len(passes[number]) // 10)]  # ten of them
    observed = replayed.observed[batches].ravel()
    rates = replayed.rates[batches].ravel()
    chances = replayed.chances[batches].ravel()
    is_effective = (observed > 0) & (observed < 1)
    known = ~np.isnan(rates)
    correlation = np.corrcoef(rates[known], observed[known])[0, 1] if np.ptp(rates[known]) else float("nan")
    known = ~np.isnan(chances)
    area = auc(chances[known], is_effective[known])
    return correlation, area, chances[known].mean(), is_effective[known].mean()


def draw(path: Path, log: Log, seeds: Sequence[int]) -> None:
    """
    Draw the share of groups with a gradient over the passes of one setting: means over seeds, and over half a pass
    before each point.
    """
    width = round(0.5 * len(log) / PREDICTED.prompts)  # batches
    with axis_of(path) as axis:
        for name, colour in COLOURS.items():
            of_seeds = [replay(METHODS[name], log, PREDICTED, seed).effective.mean(axis=1) for seed in seeds]
            shares = np.convolve(np.mean(of_seeds, axis=0), np.full(width, 1 / width), mode="valid")
            passes = np.arange(width, width + len(shares)) * PREDICTED.prompts / len(log)
            axis.plot(passes, shares, color=colour, linewidth=2, label=METHODS[name].title)
        axis.set(xlabel="passes over the prompts", ylabel="groups with a gradient", xlim=(0, None), ylim=(0, 1))
        axis.legend(frameon=False, loc="lower right")


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """
    The chance that a positive has a higher score than a negative, ties counting half.

    Args:
        scores (`np.ndarray` of shape `(n,)`): float.
        positive (`np.ndarray` of shape `(n,)`): bool.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2  # of equal scores, from 1 on
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    above = mean_rank[inverse][positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_log", description=__doc__.split("\n\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--prompts", choices=PARTS, default="all", help="settings were chosen on the even ones")
    parser.add_argument("--draw", action="store_true", help=f"draw {PICTURE.name}, and print nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    torch.set_num_threads(1)
    log = read(PARTS[given.prompts])
    if given.draw:
        draw(PICTURE, log, given.seeds)
        return
    shares = np.bincount(log.bands(), minlength=len(BANDS)) / len(log)
    runs = run(given.methods, log, given.seeds)
    known = np.isfinite(log.other_model)
    early = np.nanmean(log.success[:, :FIRST_VISITS], axis=1)
    correlation = np.corrcoef(log.other_model[known], early[known])[0, 1]
    print(f"Correlation of the column with success in the first three visits: {correlation:.2f}\n")
    print("Share of groups with a gradient, mean and range of seeds\n")
    print(effective_table(given.methods, runs))
    named = ", ".join(f"{name} ({share:.0%})" for name, share in zip(BANDS, shares, strict=True))
    print(f"\nHow often prompts were drawn, 1 being evenly, by their success in their first three visits: {named}\n")
    print(drawn_table(given.methods, runs, log))
    print(f"\nPrediction for all prompts, {PREDICTED.prompts} prompts a batch\n")
    print(prediction_table(given.methods, runs))


if __name__ == "__main__":
    main()
