"""What methods learn, and what they need for it, compared with plain GRPO: tables of runs that are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from benchmarks import tables
from benchmarks.curves import band, final, geometric_mean, reach
from benchmarks.lab.ratios import ACCURACY, BASELINE, TIME, Curve, above, cost, ends, ratios


#: Groups a step of most runs of the pretrained model
USUAL_PROMPTS = 8
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
                cost(runs, baseline, TIME),
                cost(runs, baseline, "rollouts"),
                tables.difference(after_same_time(runs, baseline)),
                tables.mean([run.column(ACCURACY)[-1] for run in runs]),
                tables.mean([run.effective_share() for run in runs], digits=2),
            ]
        )
    header = ["method", "learning rate", "CPU time", "rollouts", "at equal time", "success", "effective groups"]
    return tables.markdown(header, rows)


def costs_table(settings: Settings) -> str:
    """A table with a row for each setting of a suite: what a step takes.

    Args:
        settings (`Settings`): Runs of one suite, see [`by_setting`].

    Returns:
        The CPU seconds of a step, which part of them is generation and which the update, its rollouts, and the share
        of effective groups. Times are means over the seeds whose runs were all made on one machine.
    """
    comparable = seeds_on_one_machine(settings)
    rows = []
    for setting, runs in settings.items():
        timed = [run for run in runs if run.seed in comparable]
        rows.append(
            [
                in_words(setting),
                tables.mean([seconds_of_step(run) for run in timed], digits=1),
                tables.mean([part_of_step(run, "generation_s") for run in timed], digits=1),
                tables.mean([part_of_step(run, "update_s") for run in timed], digits=1),
                tables.mean([run.column("rollouts")[-1] / run.column("step")[-1] for run in runs], digits=0),
                tables.mean([run.effective_share() for run in runs], digits=2),
            ]
        )
    header = ["method", "seconds a step", "generation", "update", "rollouts a step", "effective groups"]
    return tables.markdown(header, rows)


def seeds_on_one_machine(settings: Settings) -> set[int]:
    """The seeds whose runs of all settings were made on one machine, so that their times can be compared."""
    machines: dict[int, set[str | None]] = {}
    for runs in settings.values():
        for run in runs:
            machines.setdefault(run.seed, set()).add(run.machine())
    return {seed for seed, of_seed in machines.items() if len(of_seed) == 1}


def learning_table(settings: Settings) -> str:
    """A table with a row for each setting of a suite: what is learned.

    Args:
        settings (`Settings`): Runs of one suite, see [`by_setting`]. Some are of plain GRPO with the faster update.

    Returns:
        The success at the end, and its difference from plain GRPO's: after half of the steps, after all, and after the
        CPU time of plain GRPO. If all runs reach plain GRPO's end, also the CPU time and the rollouts that they need
        for it, as a share of what that needed. Paired by seed, with 95 % intervals.
    """
    baseline = best_of("compact", settings)
    all_arrive = True
    rows = []
    for setting, runs in settings.items():
        compared = ["-"] * 5
        if runs is not baseline:
            all_arrive = all_arrive and arrive(runs, baseline)
            compared = [
                tables.difference(after_half(runs, baseline)),
                tables.difference(above(runs, baseline)),
                tables.difference(after_same_time(runs, baseline)),
                cost(runs, baseline, TIME),
                cost(runs, baseline, "rollouts"),
            ]
        rows.append([in_words(setting), str(len(runs)), tables.mean(ends(runs)), *compared])
    header = ["method", "seeds", "success", "halfway", "at equal steps", "at equal time", "CPU time", "rollouts"]
    if not all_arrive:
        header = header[:-2]
        rows = [row[:-2] for row in rows]
    return tables.markdown(header, rows)


def arrive(runs: Sequence[Curve], baseline: Sequence[Curve]) -> bool:
    """Whether each run reaches the success at which plain GRPO's run with its seed ends, by the fits of both."""
    return all(map(math.isfinite, ratios(runs, baseline, "rollouts")))


def after_half(runs: Sequence[Curve], baseline: Sequence[Curve]) -> list[float]:
    """By how much runs are above plain GRPO's run with their seed after half of the steps."""
    half_of = {run.seed: success_after_half(run) for run in baseline}
    return [success_after_half(run) - half_of[run.seed] for run in runs]


def success_after_half(run: Curve) -> float:
    """Success after half of a run's steps, between the evaluations around them."""
    steps = run.column("step")
    return float(np.interp(steps[-1] / 2, steps, run.column(ACCURACY)))


def rates_table(settings: Settings) -> str:
    """A table with a row for each setting of a suite: whether a learning rate lasts.

    Args:
        settings (`Settings`): Runs, see [`by_setting`].

    Returns:
        The share of effective groups in the first fifth of a run, in the middle one and in the last one, and success.
    """
    rows = []
    for setting, runs in settings.items():
        shares = np.mean([shares_of_fifths(run) for run in runs], axis=0)
        cells = [f"{shares[fifth]:.2f}" for fifth in (0, 2, 4)]
        rows.append([in_words(setting), f"{setting.rate:g}", *cells, tables.mean(ends(runs))])
    return tables.markdown(
        ["method", "learning rate", "effective groups at first", "in the middle", "at the end", "success"], rows
    )


def shares_of_fifths(run: Curve) -> list[float]:
    """The share of effective groups in each fifth of a run, by its evaluations."""
    effective = np.array_split(run.column("effective_groups")[1:], 5)
    groups = np.array_split(run.column("groups")[1:], 5)
    return [float(sum(some) / sum(all_)) for some, all_ in zip(effective, groups, strict=True)]


def in_words(setting: Setting) -> str:
    """The method of a setting, and how many prompts a step has, if that is unusual."""
    method = tables.title(setting.method)
    if setting.prompts == USUAL_PROMPTS:
        return method
    return f"{method}, {setting.prompts} prompts a step"


def short_runs_table(suites: Mapping[str, Settings]) -> str:
    """A table with a row for each suite of runs with less than one pass.

    Args:
        suites (`Mapping`): By what a suite is called, its runs, see [`by_setting`].

    Returns:
        The success at which plain GRPO ends, and by how much methods end above it, paired by seed, with 95 %
        intervals, each at its best rate.
    """
    methods = ("selection", "fill", "share")
    rows = []
    for suite, settings in suites.items():
        baseline = best_of("compact", settings)
        row = [suite, str(len(baseline)), tables.mean(ends(baseline))]
        rows.append(row + [tables.difference(above(best_of(method, settings), baseline)) for method in methods])
    return tables.markdown(["suite", "seeds", tables.title("compact"), *map(tables.title, methods)], rows)


def steps_table(suites: Mapping[str, Settings]) -> str:
    """A table with a row for each suite and method: what a whole training step takes.

    Args:
        suites (`Mapping`): By what a suite is called, its runs, see [`by_setting`].

    Returns:
        The CPU seconds of a step and their ratio to plain GRPO's, paired by seed, with the 95 % interval: a run's CPU
        time over its steps. Generation is not known of TRL's own trainer.
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
                    tables.mean([part_of_step(run, "generation_s") for run in runs], digits=1),
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


def part_of_step(run: Curve, column: str) -> float:
    """
    Mean CPU seconds that a part of a step takes, which is measured in elapsed seconds; NaN if it was not recorded.
    """
    if column not in run.rows[0]:
        return math.nan
    of_evaluation = run.column(column)[1:]  # mean of its steps
    elapsed = float(np.average(of_evaluation, weights=np.diff(run.column("step"))))
    end = run.rows[-1]
    return elapsed * float(end[TIME]) / float(end["wall_s"])


def kinds_table(settings: Settings, methods: Sequence[str], only_notable: bool = False) -> str:
    """A table with a row for each kind of question: whether a method neglects some.

    Args:
        settings (`Settings`): Runs of one suite, see [`by_setting`]. Their first row is of the initial model.
        methods (`Sequence[str]`): They are compared with plain GRPO with the faster update, each at its best rate.
        only_notable (`bool`, *optional*, defaults to `False`): Whether the table has only the hardest kind, and those
            of which a method ends lower by more than its interval.

    Returns:
        The success of a kind at the start and where plain GRPO ends, and by how much each method ends above that,
        paired by seed, with 95 % intervals. Kinds are sorted by the former.
    """
    baseline = best_of("compact", settings)
    at_start = baseline[0].rows[0]["accuracy_by_kind"]
    hardest = min(at_start, key=at_start.__getitem__)
    rows = []
    for kind in sorted(at_start, key=at_start.__getitem__):
        end_of = {run.seed: run.rows[-1]["accuracy_by_kind"][kind] for run in baseline}
        leads = []
        for method in methods:
            runs = best_of(method, settings)
            leads.append([run.rows[-1]["accuracy_by_kind"][kind] - end_of[run.seed] for run in runs])
        if not only_notable or kind == hardest or any(map(is_below_zero, leads)):
            cells = map(tables.difference, leads)
            rows.append([kind, f"{at_start[kind]:.3f}", tables.mean(list(end_of.values())), *cells])
    header = ["kind", "at the start", tables.title("compact"), *(tables.title(method) for method in methods)]
    return tables.markdown(header, rows)


def is_below_zero(differences: Sequence[float]) -> bool:
    """Whether the 95 % interval of paired differences is below 0."""
    (mean,), (half_width,) = band(np.array(differences, dtype=float)[:, None])
    return bool(mean + half_width < 0)


def group_sizes_table(settings: Settings, target: float) -> str:
    """A table with a row for each size of a group.

    Args:
        settings (`Settings`): Runs of plain GRPO, and with selection and replay, each at one rate, with equally many
            rollouts a step, see [`by_setting`].
        target (`float`): A success.

    Returns:
        The rollouts until the success is reached, and the success at the end, of both methods.
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
        f"plain GRPO: rollouts to success {target:g}",
        f"selection and replay: rollouts to success {target:g}",
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
