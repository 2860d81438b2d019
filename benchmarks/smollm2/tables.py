"""The tables of the runs on the pretrained model: what runs share, which are compared, and where they end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from benchmarks import tables
from benchmarks.curves import band
from benchmarks.lab.ratios import ACCURACY, BASELINE, TIME, Curve, cost, curves_of
from benchmarks.lab.store import read_rows
from benchmarks.smollm2 import EARLIER_RUNS


GREEDY = "accuracy_greedy"
POOLS = {  # in the order of the tables
    "mixed": "a third unsolvable",
    "gym": "reasoning-gym",
    "unsolvable": "70 % unsolvable",
    "learnable": "all learnable",
    "worked": "worked solutions",
}
METHODS = (BASELINE, "skip", "compact", "selection", "default")  # in this order, and before all others
PLANS = (512, 1024, 1664, 2400, 4800, 6720, 9600)  # rollouts
FIRST_SEED = 31  # of the tables; settings were chosen on lower ones
GROUPS = 8  # a step, unless a run says otherwise
OVER_POOLS = "mean over kinds, longest runs"
FEWEST_EVALUATIONS = 3  # of a curve that says when it reached something


class Setting(NamedTuple):
    """What runs share that differ in the seed alone. They sort in the order of the tables."""

    pool: int  # place in `POOLS`
    groups: int  # a step
    rate: float
    longer: int  # minus the rollouts that were planned, so that longer runs come first
    place: int  # in `METHODS`
    method: str

    @classmethod
    def of(cls, run: Curve) -> Setting:
        """The setting of a run."""
        end = run.rows[-1]
        # A run ends about where it reaches the rollouts of its plan. With another plan, those that it generated count
        generated = end["rollouts"]
        near = [rollouts for rollouts in PLANS if 0.8 * rollouts <= generated < 1.3 * rollouts]
        planned = min(near, key=lambda rollouts: abs(rollouts - generated), default=generated)
        return cls(
            pool=list(POOLS).index(run.pool),
            groups=end.get("prompts", GROUPS),
            rate=run.learning_rate,
            longer=-planned,
            place=METHODS.index(run.method) if run.method in METHODS else len(METHODS),
            method=run.method,
        )

    @property
    def pool_name(self) -> str:
        return list(POOLS)[self.pool]

    @property
    def place_in_study(self) -> tuple[int, int, float, int]:
        """What the methods share that are compared: the pool, the groups a step, the rate and the length."""
        return self.pool, self.groups, self.rate, self.longer

    def like(self, other: Setting) -> bool:
        """Whether both have the same rate and plan."""
        return (self.rate, self.longer) == (other.rate, other.longer)


Settings: TypeAlias = dict[Setting, list[Curve]]


class Pair(NamedTuple):
    """Runs of the default, and those of another method that they are compared with."""

    default: list[Curve]
    other: list[Curve]


def committed_runs() -> list[Curve]:
    """The committed runs on the pretrained model."""
    return curves_of(read_rows(EARLIER_RUNS))


def settings_of(runs: Iterable[Curve]) -> Settings:
    """Runs by what they share, in the order of the tables.

    Raises:
        ValueError: If two runs have the same seed, too.
    """
    found: Settings = {}
    for run in sorted(runs, key=lambda run: (Setting.of(run), run.seed)):
        own = found.setdefault(Setting.of(run), [])
        if own and own[-1].seed == run.seed:
            names = f"{own[-1].rows[0]['run']} and {run.rows[0]['run']}"
            raise ValueError(f"Runs with the same seed, made with other settings: keep one of {names}.")
        own.append(run)
    return found


# Which runs are compared


def rival_of(setting: Setting, settings: Settings, method: str = BASELINE) -> Setting | None:
    """The setting of another method to compare with, if there is one.

    It has the same pool and groups a step, and the same rate and plan or else the next.
    """
    if setting.method == method:
        return None

    def distance(other: Setting) -> tuple[bool, int]:
        return other.rate != setting.rate, abs(other.longer - setting.longer)

    found = []
    for other in settings:
        if other.method == method and (other.pool, other.groups) == (setting.pool, setting.groups):
            found.append(other)
    return min(found, key=distance, default=None)


def best_of_baseline(settings: Settings) -> dict[tuple[int, int, int], Setting]:
    """Plain GRPO's setting at its best rate, by pool, number of groups a step and plan.

    Of two rates, the better is that at which runs with the same seeds end higher, in the mean.
    """
    best: dict[tuple[int, int, int], Setting] = {}
    for setting, runs in settings.items():
        if setting.method != BASELINE:
            continue
        place = (setting.pool, setting.groups, setting.longer)
        former = best.setdefault(place, setting)
        if sum(above(runs, settings[former])) > 0:
            best[place] = setting
    return best


def at_best_rate(settings: Settings) -> list[Pair]:
    """The default, where it was run at plain GRPO's best rate, and plain GRPO at the same rate and plan."""
    pairs = []
    for baseline in sorted(best_of_baseline(settings).values()):
        default = baseline._replace(place=METHODS.index("default"), method="default")
        if default in settings:
            pairs.append(Pair(settings[default], settings[baseline]))
    return pairs


# Cells


def ends(runs: Sequence[Curve], name: str = ACCURACY) -> list[float]:
    return [run.rows[-1][name] for run in runs]


def above(own: Sequence[Curve], other: Sequence[Curve], name: str = ACCURACY) -> list[float]:
    """Differences of the ends of runs to those of `other` with the same seeds."""
    end_of = {run.seed: run.rows[-1][name] for run in other}
    return [run.rows[-1][name] - end_of[run.seed] for run in own if run.seed in end_of]


def times(own: Sequence[Curve], other: Sequence[Curve]) -> str:
    """CPU time of whole runs.

    It is a share of that of the runs `other` with the same seeds, made on the same machines. If there are none, it is
    in seconds.
    """
    time_of = {(run.seed, run.machine()): run.rows[-1][TIME] for run in other if run.machine()}
    shares = []
    for run in own:
        key = (run.seed, run.machine())
        if key in time_of:
            shares.append(run.rows[-1][TIME] / time_of[key])
    if shares:
        return tables.ratio(shares)
    return f"{tables.mean(ends(own, TIME), 0)} s"


def costs(own: Sequence[Curve], baseline: Sequence[Curve], x: str) -> str:
    """What runs need of `x` to reach plain GRPO's end, as a share of what that needed.

    `-` if they were evaluated too rarely to tell.
    """
    if any(len(run.rows) < FEWEST_EVALUATIONS for run in [*own, *baseline]):
        return "-"
    return cost(own, baseline, x)


def effective(runs: Sequence[Curve]) -> str:
    return tables.mean([run.effective_share() for run in runs], 2)


def steps(runs: Sequence[Curve]) -> str:
    return tables.mean(ends(runs, "step"), 0)


def questions(runs: Sequence[Curve]) -> str:
    """What the runs of a setting train on, and how many groups a step has if these are not the usual ones."""
    setting = Setting.of(runs[0])
    text = POOLS[setting.pool_name]
    if setting.groups != GROUPS:
        text += f", {setting.groups} groups a step"
    return text


def mean_leads(pairs: Sequence[Pair]) -> list[list[float]]:
    """By how much the default ends above the other method, as a mean over the pairs.

    Args:
        pairs (`Sequence[Pair]`): The runs that are compared.

    Returns:
        A value for each seed that all runs have: at temperature 1, and with greedy decoding. Nothing without such a
        seed.
    """
    seeds = {run.seed for run in pairs[0].default}
    for pair in pairs:
        seeds &= {run.seed for run in pair.default}
        seeds &= {run.seed for run in pair.other}
    if not seeds:
        return []
    leads = []
    for name in (ACCURACY, GREEDY):
        leads_by_pair = []
        for default, other in pairs:
            common = [run for run in default if run.seed in seeds]
            leads_by_pair.append(above(common, other, name))
        leads.append(np.mean(leads_by_pair, axis=0).tolist())
    return leads


def longest_at_best_rate(settings: Settings) -> list[Pair]:
    """[`at_best_rate`], of each pool its longest runs with the usual number of groups, in the order of the tables."""
    longest: dict[int, Pair] = {}
    for pair in sorted(at_best_rate(settings), key=lambda pair: Setting.of(pair.other[0]).longer):
        setting = Setting.of(pair.default[0])
        if setting.groups == GROUPS:
            longest.setdefault(setting.pool, pair)
    return [longest[pool] for pool in sorted(longest)]


def mean_over_pools(settings: Settings) -> list[list[float]]:
    """[`mean_leads`] over [`longest_at_best_rate`]. Nothing with fewer than two pools."""
    pairs = longest_at_best_rate(settings)
    if len(pairs) < 2:
        return []
    return mean_leads(pairs)


# Tables


def rivals_table(settings: Settings) -> str:
    """[`mean_leads`] of the default over each other method, over the pools on which both were run.

    Of each pool it has the runs with the usual number of groups, at the rate and length for which there are most
    methods; of these, at plain GRPO's best rate.
    """
    best = {setting.place_in_study for setting in best_of_baseline(settings).values()}
    methods_at: dict[tuple, dict[str, list[Curve]]] = {}
    for setting, runs in settings.items():
        if setting.groups == GROUPS:
            methods_at.setdefault(setting.place_in_study, {})[setting.method] = runs
    chosen: dict[int, tuple] = {}
    for place in sorted(methods_at, key=lambda place: (len(methods_at[place]), place in best)):
        pool = place[0]
        chosen[pool] = place

    pairs: dict[str, list[Pair]] = {}
    for pool in sorted(chosen):
        methods = methods_at[chosen[pool]]
        if "default" in methods:
            default = methods.pop("default")
            for method, runs in methods.items():
                pairs.setdefault(method, []).append(Pair(default, runs))
    rows = []
    for method, own in pairs.items():
        leads = mean_leads(own)
        if leads:
            cells = [tables.difference(lead) for lead in leads]
            rows.append([tables.title(method), str(len(own)), str(len(leads[0])), *cells])
    return tables.markdown(["method", "kinds of questions", "seeds", "default's lead", "greedy lead"], rows)


def claims_table(settings: Settings) -> str:
    """What a reader has to know: plain GRPO at its best rate and the default at the same rate, by length of runs."""
    rows = []
    for default, baseline in at_best_rate(settings):
        rows.append(
            [
                questions(default),
                steps(default),
                str(len(default)),
                effective(baseline),
                tables.mean(ends(baseline)),
                tables.mean(ends(default)),
                tables.difference(above(default, baseline)),
                tables.difference(above(default, baseline, GREEDY)),
            ]
        )
    means = mean_over_pools(settings)
    if means:
        cells = [tables.difference(mean) for mean in means]
        rows.append([OVER_POOLS, "-", str(len(means[0])), "-", "-", "-", *cells])
    header = [
        "questions",
        "steps",
        "seeds",
        "effective groups",
        "plain GRPO",
        "default",
        "difference",
        "greedy difference",
    ]
    return tables.markdown(header, rows)


def readme_table(settings: Settings) -> str:
    """For readers in a hurry: of each pool the longest runs, in percent, and the mean lead in points."""
    rows = []
    pairs = longest_at_best_rate(settings)
    for default, baseline in pairs:
        rows.append(
            [
                questions(default),
                steps(default),
                str(len(default)),
                percent(ends(baseline)),
                percent(ends(default)),
            ]
        )
    if len(pairs) > 1:
        at_temperature_1, _ = mean_leads(pairs)
        rows.append(["mean lead, with its 95 % interval", "", "", "", points(at_temperature_1)])
    return tables.markdown(["questions", "steps", "seeds", "`GRPOTrainer`", "`trl_dataeff`"], rows)


def percent(values: Sequence[float]) -> str:
    """The mean of shares."""
    return f"{100 * np.mean(values):.1f} %"


def points(paired: Sequence[float]) -> str:
    """Mean and 95 % interval of differences between shares; the mean alone of one or two."""
    (lead,), (half_width,) = band(100 * np.array(paired, dtype=float)[:, None])
    if len(paired) < tables.FEWEST_FOR_AN_INTERVAL:
        return f"{lead:+.1f} points"
    return f"{lead:+.1f} points ({lead - half_width:.1f} to {lead + half_width:.1f})"


def full_table(settings: Settings) -> str:
    """Every setting: where its runs end, what they take, and paired differences.

    † marks a rival with another rate or plan.
    """
    rows = [_row_of_setting(setting, settings) for setting in settings]
    header = [
        "pool",
        "groups a step",
        "learning rate",
        "steps",
        "method",
        "seeds",
        "success",
        "greedy",
        "effective groups",
        "CPU time of the run",
        "difference from plain GRPO",
        "greedy difference",
        "from selection alone",
        "rollouts and steps",
        "CPU time to plain GRPO's end",
    ]
    return tables.markdown(header, rows)


def _row_of_setting(setting: Setting, settings: Settings) -> list[str]:
    own = settings[setting]
    rival = rival_of(setting, settings)
    baseline = settings[rival] if rival else []
    comparable = rival is not None and rival.like(setting)
    mark = " †" if baseline and not comparable else ""
    selection: list[Curve] = []
    if setting.method == "default":
        alone = rival_of(setting, settings, "selection")
        if alone and alone.like(setting):
            selection = settings[alone]
    return [
        setting.pool_name,
        str(setting.groups),
        f"{setting.rate:g}",
        steps(own),
        tables.title(setting.method),
        str(len(own)),
        tables.mean(ends(own)),
        tables.mean(ends(own, GREEDY)),
        effective(own),
        times(own, baseline if comparable else []),
        tables.difference(above(own, baseline)) + mark,
        tables.difference(above(own, baseline, GREEDY)) + mark,
        tables.difference(above(own, selection)),
        costs(own, baseline, "rollouts") if comparable else "-",
        costs(own, baseline, TIME) if comparable else "-",
    ]


def runs_table(settings: Settings) -> str:
    """Where each run ended, by setting and seed."""
    rows = []
    for setting, own in settings.items():
        for run in own:
            end = run.rows[-1]
            rows.append(
                [
                    setting.pool_name,
                    str(setting.groups),
                    f"{setting.rate:g}",
                    str(end["step"]),
                    f"{end['rollouts']:,}",
                    tables.title(setting.method),
                    str(run.seed),
                    tables.mean([end[ACCURACY]]),
                    tables.mean([end[GREEDY]]),
                ]
            )
    header = ["pool", "groups a step", "learning rate", "steps", "rollouts", "method", "seed", "success", "greedy"]
    return tables.markdown(header, rows)


def kinds_table(settings: Settings) -> str:
    """
    By how much the default ends above plain GRPO at its best rate: for each kind of question, and in entropy (nats).
    """
    # The tasks of the other pools are others
    pairs = [pair for pair in at_best_rate(settings) if pair.default[0].pool not in ("gym", "worked")]
    if not pairs:
        return tables.markdown(["questions"], [])
    any_end = pairs[0].default[0].rows[-1]
    kinds = sorted(any_end["accuracy_by_kind"])
    columns: dict[str, list[str]] = {}
    for default, baseline in pairs:
        default_ends = [_end_by_kind(run) for run in default]
        baseline_ends = [_end_by_kind(run) for run in baseline]
        cells = []
        for name in [*kinds, "entropy_held_out"]:
            cells.append(tables.difference(above(default_ends, baseline_ends, name)))
        columns[f"{questions(default)}, {steps(default)} steps"] = cells
    rows = [list(row) for row in zip([*kinds, "*entropy*"], *columns.values(), strict=True)]
    return tables.markdown(["questions", *columns], rows)


def _end_by_kind(run: Curve) -> Curve:
    """The end of a run, whose accuracies by kind are columns too."""
    end = run.rows[-1]
    return replace(run, rows=[{**end, **end["accuracy_by_kind"]}])


def trials_table(settings: Settings) -> str:
    """Where single runs ended, by learning rate."""
    rows = []
    for setting, own in settings.items():
        rows.append(
            [
                setting.pool_name,
                str(setting.groups),
                steps(own),
                tables.title(setting.method),
                f"{setting.rate:g}",
                tables.mean(ends(own)),
                tables.mean(ends(own, GREEDY)),
                effective(own),
            ]
        )
    header = ["pool", "groups a step", "steps", "method", "learning rate", "success", "greedy", "effective groups"]
    return tables.markdown(header, rows)
