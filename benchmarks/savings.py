"""
What methods need to reach plain GRPO's end, and where they are after plain GRPO's time, each at its own learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np

from benchmarks import tables
from benchmarks.curves import final, geometric_mean, reach
from benchmarks.lab.ratios import ACCURACY, BASELINE, TIME, Curve, cost, ratios


HEADER = [
    "method",
    "learning rate",
    "seeds",
    "CPU time",
    "rollouts",
    "after the same CPU time",
    "at the end",
    "effective groups",
]


#: Methods of the summary, in its order
SUMMARIZED = ("compact", "selection", "fill", "share")
#: Methods whose steps are compared: each has as many groups in a step
STEPS_OF = (BASELINE, "compact", "selection", "fill")


class Setting(NamedTuple):
    """What runs share that differ in the seed alone."""

    pool: str
    prompts: int  # groups a step
    group_size: int
    method: str
    rate: float

    @classmethod
    def of(cls, run: Curve) -> Setting:
        """The setting of a run."""
        first = run.rows[0]
        return cls(run.pool, first["prompts"], first["group_size"], run.method, run.learning_rate)

    @property
    def suite(self) -> tuple[str, int, int]:
        """What settings share that are compared."""
        return self.pool, self.prompts, self.group_size


Settings: TypeAlias = dict[Setting, list[Curve]]


def by_setting(runs: Iterable[Curve]) -> Settings:
    """Runs by what they share, in the order in which they stand.

    Raises:
        ValueError: If two runs of a setting have the same seed.
    """
    settings: Settings = {}
    for run in runs:
        own = settings.setdefault(Setting.of(run), [])
        if any(other.seed == run.seed for other in own):
            raise ValueError(f"Two runs of {Setting.of(run)} have the seed {run.seed}: keep one of them.")
        own.append(run)
    return settings


def best_of(method: str, settings: Settings) -> list[Curve]:
    """The runs of a method at the rate at which they end highest, in the mean.

    Raises:
        ValueError: If there are none.
    """
    candidates = [runs for setting, runs in settings.items() if setting.method == method]
    if not candidates:
        raise ValueError(f"There is no run of {method!r}.")
    return max(candidates, key=lambda runs: np.mean([final(run.column(ACCURACY)) for run in runs]))


def after_same_time(runs: Sequence[Curve], baseline: Sequence[Curve]) -> list[float]:
    """By how much runs are above the end of plain GRPO's run with their seed, after as much CPU time as that took.

    Args:
        runs (`Sequence[Curve]`): The runs. Of one that ended earlier, the end counts.
        baseline (`Sequence[Curve]`): The runs of plain GRPO, made on the same machines.
    """
    baseline_of = {(run.seed, run.machine()): run for run in baseline}
    differences = []
    for run in runs:
        other = baseline_of.get((run.seed, run.machine()))
        if other is None:
            continue
        own = np.interp(other.column(TIME)[-1], run.column(TIME), run.column(ACCURACY))
        differences.append(float(own - other.column(ACCURACY)[-1]))
    return differences


def savings_table(settings: Settings, baseline_method: str = BASELINE) -> str:
    """A table with a row for each setting of a suite.

    Args:
        settings (`Settings`): Runs of one suite, see [`by_setting`].
        baseline_method (`str`, *optional*, defaults to plain GRPO): Others are compared with its runs at its best
            rate.

    Returns:
        The CPU time and the rollouts that a method needs to reach the baseline's end, as a share of what that needed;
        its lead after the CPU time of the baseline's run, and at the end. Paired by seed, with 95 % intervals.
    """
    baseline = best_of(baseline_method, settings)
    rows = []
    for setting, runs in settings.items():
        rows.append(
            [
                tables.title(setting.method),
                f"{setting.rate:g}",
                str(len(runs)),
                cost(runs, baseline, TIME),
                cost(runs, baseline, "rollouts"),
                tables.difference(after_same_time(runs, baseline)),
                tables.mean([run.column(ACCURACY)[-1] for run in runs]),
                tables.mean([run.effective_share() for run in runs], digits=2),
            ]
        )
    return tables.markdown(HEADER, rows)


def summary_table(suites: Mapping[str, Settings], x: str) -> str:
    """A table with a row for each method, and a column for each suite.

    Args:
        suites (`Mapping`): By what a suite is called, its runs, see [`by_setting`].
        x (`str`): The column to compare: rollouts or seconds.

    Returns:
        What a method needs of `x` to reach plain GRPO's end, each at its best rate, in percent of what that needed.
    """
    rows = []
    for method in SUMMARIZED:
        cells = [percent(list(shares_of(method, own, x).values())) for own in suites.values()]
        rows.append([tables.title(method), *cells])
    return tables.markdown(["method", *suites], rows)


def shares_of(method: str, settings: Settings, x: str) -> dict[int, float]:
    """
    By seed, what the runs of a method at its best rate need of `x` to reach plain GRPO's end, as a share of what that
    needed. Empty if the method was not run in this suite.
    """
    if all(setting.method != method for setting in settings):
        return {}
    baseline = best_of(BASELINE, settings)
    return {run.seed: share for run in best_of(method, settings) for share in ratios([run], baseline, x)}


def decision_table(suites: Mapping[str, Settings]) -> str:
    """A table by which the default is chosen: the CPU time of each method to plain GRPO's end, at its best rate.

    Args:
        suites (`Mapping`): By what a suite is called, its runs, see [`by_setting`].

    Returns:
        A row for each method, with the median over seeds in each suite, as a share of what plain GRPO needed, and the
        geometric mean of these medians. A run that does not arrive needs infinite time. A method that was not run in
        every suite has no such mean.
    """
    rows = []
    for method in SUMMARIZED:
        medians = []
        for own in suites.values():
            shares = shares_of(method, own, TIME)
            medians.append(median(shares.values()) if shares else math.nan)
        over_suites = math.exp(sum(math.log(value) for value in medians) / len(medians))
        rows.append([tables.title(method), *(share_cell(value) for value in [*medians, over_suites])])
    return tables.markdown(["method", *suites, "geometric mean"], rows)


def sooner_table(suites: Mapping[str, Settings]) -> str:
    """A table with a row for each pair of methods, the simpler one first: which of them needs less time.

    Args:
        suites (`Mapping`): By what a suite is called, its runs, see [`by_setting`].

    Returns:
        Of the seeds of a suite, with how many the second method reaches plain GRPO's end in less CPU time than the
        first one, each at its best rate. One that does not arrive is not sooner than any.
    """
    rows = []
    for simpler, method in combinations(SUMMARIZED, 2):
        cells = []
        for own in suites.values():
            shares = shares_of(method, own, TIME)
            others = shares_of(simpler, own, TIME)
            both = shares.keys() & others.keys()
            sooner = sum(shares[seed] < others[seed] for seed in both)
            cells.append(f"{sooner} of {len(both)}" if both else "-")
        rows.append([tables.title(method), tables.title(simpler), *cells])
    return tables.markdown(["sooner", "than", *suites], rows)


def share_cell(share: float) -> str:
    """A share of what plain GRPO needed, if it is known and finite."""
    if math.isnan(share):
        return "-"
    if math.isinf(share):
        return "not reached"
    return f"{share:.2f}"


def steps_table(suites: Mapping[str, Settings]) -> str:
    """A table with a row for each suite and method: what a whole training step takes.

    Args:
        suites (`Mapping`): By what a suite is called, its runs, see [`by_setting`].

    Returns:
        The CPU seconds of a step and their ratio to plain GRPO's, paired by seed, with the 95 % interval: a run's CPU
        time over its steps. The seconds of generation are not known of TRL's own trainer.
    """
    rows = []
    for suite, settings in suites.items():
        baseline_of = {run.seed: run for run in best_of(BASELINE, settings)}
        for method in STEPS_OF:
            runs = best_of(method, settings)
            shares = [seconds_of_step(run) / seconds_of_step(baseline_of[run.seed]) for run in runs]
            rows.append(
                [
                    suite,
                    tables.title(method),
                    tables.mean([run.effective_share() for run in runs], digits=2),
                    tables.mean([run.column("tokens")[-1] / run.column("rollouts")[-1] for run in runs], digits=0),
                    tables.mean([seconds_of_step(run) for run in runs], digits=1),
                    tables.mean([generation_of_step(run) for run in runs], digits=1),
                    tables.ratio(shares),
                ]
            )
    header = [
        "suite",
        "method",
        "effective groups",
        "tokens of a completion",
        "seconds of a step",
        "of them generation",
        "ratio to plain GRPO",
    ]
    return tables.markdown(header, rows)


def seconds_of_step(run: Curve) -> float:
    """Mean CPU time of a step. What comes before the first one, such as embedding the prompts, is spread over all."""
    return float(run.column(TIME)[-1] / run.column("step")[-1])


def generation_of_step(run: Curve) -> float:
    """Mean seconds in which a step generates; NaN if that was not recorded."""
    if "generation_s" not in run.rows[0]:
        return math.nan
    steps = np.diff(run.column("step"))
    return float(np.average(run.column("generation_s")[1:], weights=steps))


def percent(shares: Sequence[float]) -> str:
    """
    The geometric mean of shares with its 95 % interval. Where runs did not arrive: the median, and how many did; the
    latter alone if that is not half of them.
    """
    if not shares:
        return "-"
    late = sum(math.isinf(share) for share in shares)
    if late:
        arrived = f"{len(shares) - late} of {len(shares)} runs"
        middle = median(shares)
        return arrived if math.isinf(middle) else f"{100 * middle:.0f} % ({arrived})"
    middle, low, high = geometric_mean([100 * share for share in shares])
    if len(shares) < tables.FEWEST_FOR_AN_INTERVAL:
        return f"{middle:.0f} %"
    return f"{middle:.0f} % ({low:.0f} to {high:.0f})"


def kinds_table(settings: Settings, methods: Sequence[str]) -> str:
    """A table with a row for each kind of question: whether a method neglects some.

    Args:
        settings (`Settings`): Runs of one suite, see [`by_setting`]. Their first row is of the initial model.
        methods (`Sequence[str]`): They are compared with plain GRPO with the faster update, each at its best rate.

    Returns:
        The success of a kind at the start and where plain GRPO ends, and by how much each method ends above that,
        paired by seed, with 95 % intervals. Kinds are sorted by the former.
    """
    baseline = best_of("compact", settings)
    kinds = baseline[0].rows[0]["accuracy_by_kind"]
    rows = []
    for kind in sorted(kinds, key=lambda kind: kinds[kind]):
        end_of = {run.seed: run.rows[-1]["accuracy_by_kind"][kind] for run in baseline}
        row = [kind, f"{kinds[kind]:.3f}", tables.mean(list(end_of.values()))]
        for method in methods:
            leads = []
            for run in best_of(method, settings):
                leads.append(run.rows[-1]["accuracy_by_kind"][kind] - end_of[run.seed])
            row.append(tables.difference(leads))
        rows.append(row)
    header = ["kind", "at the start", tables.title("compact"), *(tables.title(method) for method in methods)]
    return tables.markdown(header, rows)


def group_sizes_table(settings: Settings, target: float) -> str:
    """A table with a row for each size of a group.

    Args:
        settings (`Settings`): Runs of plain GRPO, and with selection and replay, each at one rate, with equally many
            rollouts a step, see [`by_setting`].
        target (`float`): An accuracy.

    Returns:
        The rollouts until the accuracy is reached, and the accuracy at the end, of both methods.
    """
    runs_of: dict[tuple[int, int], dict[str, list[Curve]]] = {}
    for setting, runs in settings.items():
        runs_of.setdefault((setting.group_size, setting.prompts), {})[setting.method] = runs
    rows = []
    for (group_size, prompts), runs in sorted(runs_of.items()):
        row = [str(group_size), str(prompts), str(len(runs[BASELINE]))]
        for method in (BASELINE, "fill"):
            needs = [reach(run.column("rollouts"), run.column(ACCURACY), target) for run in runs[method]]
            row.append(rollouts_cell(needs))
        for method in (BASELINE, "fill"):
            row.append(tables.mean([run.column(ACCURACY)[-1] for run in runs[method]]))
        rows.append(row)
    header = [
        "completions of a group",
        "groups a step",
        "seeds",
        f"plain GRPO: rollouts to accuracy {target:g}",
        f"selection and replay: rollouts to accuracy {target:g}",
        "plain GRPO: end",
        "selection and replay: end",
    ]
    return tables.markdown(header, rows)


def rollouts_cell(needs: Sequence[float]) -> str:
    """The geometric mean of numbers of rollouts with its 95 % interval; or how many of the runs did not arrive."""
    late = sum(math.isinf(need) for need in needs)
    if late:
        return f"not in {late} of {len(needs)}"
    middle, low, high = geometric_mean(needs)
    if len(needs) < tables.FEWEST_FOR_AN_INTERVAL:
        return f"{middle:,.0f}"
    return f"{middle:,.0f} ({low:,.0f}-{high:,.0f})"
