"""The tables of the runs on the pretrained model: what runs share, which are compared, and where they end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from benchmarks import tables
from benchmarks.lab.ratios import ACCURACY, BASELINE, TIME, Curve, cost, curves_of
from benchmarks.lab.store import RunFile


GREEDY = "accuracy_greedy"
POOLS = {  # in the order of the tables
    "mixed": "a third unsolvable",
    "gym": "reasoning-gym",
    "unsolvable": "70 % unsolvable",
    "learnable": "all learnable",
}
METHODS = (BASELINE, "skip", "selection", "default")  # in this order, and before all others
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
    longer: int  # minus the rollouts that were planned
    place: int  # in `METHODS`
    method: str

    @classmethod
    def of(cls, run: Curve) -> Setting:
        """A run ends about where it reaches the rollouts of its plan; with a plan of your own, those that it made count."""
        end, method = run.rows[-1], run.method
        made = end["rollouts"]
        near = [rollouts for rollouts in PLANS if 0.8 * rollouts <= made < 1.3 * rollouts]
        planned = min(near, key=lambda rollouts: abs(rollouts - made), default=made)
        place = METHODS.index(method) if method in METHODS else len(METHODS)
        return cls(list(POOLS).index(run.pool), end.get("prompts", GROUPS), run.learning_rate, -planned, place, method)


Settings: TypeAlias = dict[Setting, list[Curve]]


def finished(folder: Path) -> list[Curve]:
    """The finished runs in a folder."""
    files = [RunFile(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))]
    return curves_of(row for file in files if file.finished() for row in file.rows())


def settings_of(runs: Iterable[Curve]) -> Settings:
    """
    Runs by what they share, in the order of the tables.

    Raises:
        `ValueError`: two runs have the same seed, too.
    """
    found: Settings = {}
    for run in sorted(runs, key=lambda run: (Setting.of(run), run.seed)):
        own = found.setdefault(Setting.of(run), [])
        if own and own[-1].seed == run.seed:
            names = " and ".join(other.rows[0]["run"] for other in (own[-1], run))
            raise ValueError(f"Runs with the same seed, made with other settings: keep one of {names}.")
        own.append(run)
    return found


def rival(setting: Setting, settings: Settings, method: str = BASELINE) -> Setting | None:
    """The setting of `method` to compare with: the same pool and groups a step, and the same rate and plan or else the next."""

    def unlike(other: Setting) -> tuple[bool, int]:
        return other.rate != setting.rate, abs(other.longer - setting.longer)

    found = [other for other in settings if other[:2] == setting[:2] and other.method == method]
    return min(found, key=unlike, default=None) if setting.method != method else None


def best_of_baseline(settings: Settings) -> dict[tuple[int, int, int], Setting]:
    """
    Of each pool, number of groups a step and plan, plain GRPO's setting at its best rate: of two rates, that at which runs with
    the same seeds end higher, in the mean.
    """
    best: dict[tuple[int, int, int], Setting] = {}
    for setting, runs in settings.items():
        if setting.method == BASELINE:
            place = setting.pool, setting.groups, setting.longer
            if sum(above(runs, settings[best.setdefault(place, setting)])) > 0:
                best[place] = setting
    return best


def at_best_rate(settings: Settings, method: str = "default") -> list[tuple[list[Curve], list[Curve]]]:
    """Runs of plain GRPO at its best rate, and those of `method` at the same rate and plan, if there are."""
    best = best_of_baseline(settings)
    pairs = [(base, base._replace(place=METHODS.index(method), method=method)) for base in sorted(best.values())]
    return [(settings[base], settings[own]) for base, own in pairs if own in settings]


def ends(runs: Sequence[Curve], name: str = ACCURACY) -> list[float]:
    return [run.rows[-1][name] for run in runs]


def above(own: Sequence[Curve], other: Sequence[Curve], name: str = ACCURACY) -> list[float]:
    """Differences of the ends of runs to those of `other` with the same seeds."""
    base = dict(zip((run.seed for run in other), ends(other, name), strict=True))
    return [end - base[run.seed] for run, end in zip(own, ends(own, name), strict=True) if run.seed in base]


def times(own: Sequence[Curve], other: Sequence[Curve]) -> str:
    """
    CPU time of whole runs, as a share of that of the runs `other` with the same seeds, made on the same machines; of `own`
    themselves, or if no two are from one machine, in seconds.
    """
    base = {(run.seed, run.machine()): run.rows[-1][TIME] for run in other if own is not other and run.machine()}
    shares = [run.rows[-1][TIME] / base[key] for run in own if (key := (run.seed, run.machine())) in base]
    return tables.ratio(shares) if shares else f"{tables.mean(ends(own, TIME), 0)} s"


def costs(own: Sequence[Curve], base: Sequence[Curve], x: str) -> str:
    """What runs need of `x` to plain GRPO's end, as a share of what that needed; `-` if they were evaluated too rarely."""
    return "-" if any(len(run.rows) < FEWEST_EVALUATIONS for run in [*own, *base]) else cost(own, base, x)


def effective(runs: Sequence[Curve]) -> str:
    return tables.mean([run.effective_share() for run in runs], 2)


def questions(runs: Sequence[Curve]) -> str:
    """What the runs of a setting train on, and how many groups a step has if these are not the usual ones."""
    one = Setting.of(runs[0])
    return list(POOLS.values())[one.pool] + (f", {one.groups} groups a step" if one.groups != GROUPS else "")


def mean_leads(pairs: Sequence[tuple[list[Curve], list[Curve]]]) -> list[list[float]]:
    """
    For each seed that all runs have, by how much the first of a pair end above the second, at temperature 1 and with greedy
    decoding: mean over the pairs. Nothing without such a seed.
    """
    seeds = set.intersection(*({run.seed for run in runs} for pair in pairs for runs in pair))
    common = [([run for run in own if run.seed in seeds], base) for own, base in pairs]
    gaps = [np.mean([above(own, base, name) for own, base in common], axis=0).tolist() for name in (ACCURACY, GREEDY)]
    return gaps if seeds else []


def mean_over_pools(settings: Settings) -> list[list[float]]:
    """
    [`mean_leads`] of the default over plain GRPO at its best rate, of each pool's longest runs with the usual number of groups.
    Nothing with fewer than two pools.
    """
    longest: dict[int, tuple[list[Curve], list[Curve]]] = {}
    for base, own in sorted(at_best_rate(settings), key=lambda pair: Setting.of(pair[0][0]).longer):
        one = Setting.of(own[0])
        if one.groups == GROUPS:
            longest.setdefault(one.pool, (own, base))
    return mean_leads(list(longest.values())) if len(longest) > 1 else []


def rivals_table(settings: Settings) -> str:
    """
    [`mean_leads`] of the default over each other method, over the pools on which both were run: with the usual number of groups, at
    the rate and length for which there are most methods, of these at plain GRPO's best rate.
    """
    best = {one[:4] for one in best_of_baseline(settings).values()}
    places: dict[tuple[int, ...], dict[str, list[Curve]]] = {}
    for one, runs in settings.items():
        if one.groups == GROUPS:
            places.setdefault(one[:4], {})[one.method] = runs
    last = {place[0]: place for place in sorted(places, key=lambda place: (len(places[place]), place in best))}
    pairs: dict[str, list[tuple[list[Curve], list[Curve]]]] = {}
    for pool in sorted(last):
        methods = places[last[pool]]
        default = methods.pop("default", [])
        for method in methods if default else ():
            pairs.setdefault(method, []).append((default, methods[method]))
    rows = []
    for method, own in pairs.items():
        if leads := mean_leads(own):
            rows.append([tables.title(method), str(len(own)), str(len(leads[0])), *map(tables.difference, leads)])
    return tables.markdown(["method", "kinds of questions", "seeds", "default's lead", "greedy lead"], rows)


def claims_table(settings: Settings) -> str:
    """Plain GRPO at its best rate, and the default at the same rate, for each length of runs: what a reader has to know."""
    rows = []
    for base, own in at_best_rate(settings):
        row = [questions(own), tables.mean(ends(own, "step"), 0), str(len(own)), effective(base)]
        row += [tables.mean(ends(base)), tables.mean(ends(own)), tables.difference(above(own, base))]
        row += [tables.difference(above(own, base, GREEDY)), costs(own, base, "rollouts"), times(own, base)]
        rows.append(row)
    if means := mean_over_pools(settings):
        rows.append([OVER_POOLS, "-", str(len(means[0])), "-", "-", "-", *map(tables.difference, means), "-", "-"])
    header = ["questions", "steps", "seeds", "effective groups", "plain GRPO", "default", "difference"]
    return tables.markdown([*header, "greedy difference", "rollouts and steps", "CPU time of the run"], rows)


def readme_table(settings: Settings) -> str:
    """The main columns of the table of the claims."""
    rows = []
    for base, own in at_best_rate(settings):
        means = tables.mean(ends(base)), tables.mean(ends(own))
        cells = str(len(own)), tables.mean(ends(own, "step"), 0)
        rows.append([questions(own), *cells, *means, tables.difference(above(own, base))])
    if gains := mean_over_pools(settings):
        rows.append([OVER_POOLS, str(len(gains[0])), "-", "-", "-", tables.difference(gains[0])])
    header = ["questions", "seeds", "steps", "plain GRPO", "default", "difference"]
    return tables.markdown(header, rows)


def full_table(settings: Settings) -> str:
    """Every setting: where its runs end, what they take, and paired differences. † marks a rival with another rate or plan."""
    rows = []
    for one, own in settings.items():
        other, alone = rival(one, settings), rival(one, settings, "selection") if one.method == "default" else None
        base = settings[other] if other else []
        like = other is not None and (other.rate, other.longer) == (one.rate, one.longer)
        mark = "" if like or not base else " †"
        selection = settings[alone] if alone and (alone.rate, alone.longer) == (one.rate, one.longer) else []
        rows.append(
            [
                *(list(POOLS)[one.pool], str(one.groups), f"{one.rate:g}", tables.mean(ends(own, "step"), 0)),
                *(tables.title(one.method), str(len(own)), tables.mean(ends(own)), tables.mean(ends(own, GREEDY))),
                *(effective(own), times(own, base if like else own), tables.difference(above(own, base)) + mark),
                *(tables.difference(above(own, base, GREEDY)) + mark, tables.difference(above(own, selection))),
                *((costs(own, base, x) if like else "-") for x in ("rollouts", TIME)),
            ]
        )
    header = ["pool", "groups a step", "learning rate", "steps", "method", "seeds", "success", "greedy"]
    header += ["effective groups", "CPU time of the run", "difference from plain GRPO", "greedy difference"]
    return tables.markdown(
        [*header, "from selection alone", "rollouts and steps", "CPU time to plain GRPO's end"], rows
    )


def runs_table(settings: Settings) -> str:
    """Where each run ended, by setting and seed."""
    rows = []
    for one, own in settings.items():
        for run in own:
            end = run.rows[-1]
            row = [list(POOLS)[one.pool], str(one.groups), f"{one.rate:g}", str(end["step"]), f"{end['rollouts']:,}"]
            row += [
                tables.title(one.method),
                str(run.seed),
                tables.mean(ends([run])),
                tables.mean(ends([run], GREEDY)),
            ]
            rows.append(row)
    header = ["pool", "groups a step", "learning rate", "steps", "rollouts", "method", "seed", "success", "greedy"]
    return tables.markdown(header, rows)


def kinds_table(settings: Settings) -> str:
    """By how much the default ends above plain GRPO at its best rate: for each kind of question, and in entropy (nats)."""
    columns = {}
    for base, own in at_best_rate(settings):
        if base[0].pool != "gym":  # whose tasks are others
            flat = [
                [replace(run, rows=[run.rows[-1] | run.rows[-1]["accuracy_by_kind"]]) for run in runs]
                for runs in (own, base)
            ]
            kinds = sorted(base[0].rows[-1]["accuracy_by_kind"])
            name = f"{questions(own)}, {tables.mean(ends(own, 'step'), 0)} steps"
            columns[name] = [tables.difference(above(*flat, kind)) for kind in [*kinds, "entropy_held_out"]]
    rows = zip([*kinds, "*entropy*"], *columns.values(), strict=True) if columns else []
    return tables.markdown(["questions", *columns], [list(row) for row in rows])


def trials_table(settings: Settings) -> str:
    """Where single runs ended, by learning rate."""
    rows = []
    for one, own in settings.items():
        row = [list(POOLS)[one.pool], str(one.groups), tables.mean(ends(own, "step"), 0), tables.title(one.method)]
        rows.append([*row, f"{one.rate:g}", tables.mean(ends(own)), tables.mean(ends(own, GREEDY)), effective(own)])
    header = ["pool", "groups a step", "steps", "method", "learning rate", "success", "greedy", "effective groups"]
    return tables.markdown(header, rows)
