"""What `trl-dataeff audit` prints."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import yaml


if TYPE_CHECKING:
    from trl_dataeff.analysis.audit import Audit, Chance
    from trl_dataeff.analysis.audit_projection import Projection, Saving
    from trl_dataeff.tracking.completions import RecordedGroups

WIDTH = 100
BAR = 20
WORTH = 0.9  # of the run's rollouts; a setting that needs more is not advised
FEW_PAIRS = 20
CAVEAT = (
    "An estimate: the package's own selection on simulated prompts that are fitted to these groups; ranges cover the "
    "draws and how well a prompt's text tells its difficulty, not the model behind it (docs/audit.md has its errors). "
    "Try it in a run of some fifty steps before you rely on it."
)


def report(path: str, groups: RecordedGroups, found: Audit, projection: Projection | None, missing: str) -> str:
    """
    Return the whole text.

    Args:
        path (`str`):
            What was audited.
        groups ([`RecordedGroups`]):
            The groups.
        found ([`Audit`]):
            What they say.
        projection ([`Projection`], *optional*):
            What would have been saved.
        missing (`str`):
            Why there is no projection; may be empty.
    """
    blocks = [
        _head(path, groups, found),
        _shares(found),
        _periods(groups, found),
        _persistence(found),
        _cost(groups, found),
        _savings(found, projection, missing),
        _notes(groups, found),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(path: str, groups: RecordedGroups, found: Audit) -> list[str]:
    size = f" of {groups.group_size} completions" if groups.group_size else ""
    files = f", {groups.files} files" if groups.files > 1 else ""
    steps = f"{_several(found.steps, 'step')}, " if groups.has_steps else ""
    return [
        f"{path}  ({groups.format}{files})",
        f"{steps}{_several(found.overall.groups, 'group')}{size}, {_several(found.prompts, 'prompt')}",
    ]


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _shares(found: Audit) -> list[str]:
    zero = found.overall.easy + found.overall.hard
    return _wrapped(
        f"{zero:.0%} of the groups carried no gradient: all completions of a prompt got the same reward, so that none "
        f"is better than the others (zero variance). {found.overall.easy:.0%} were easy (all at the top reward) and "
        f"{found.overall.hard:.0%} hard (all below it)."
    )


def _periods(groups: RecordedGroups, found: Audit) -> list[str]:
    title = "steps" if groups.has_steps else "groups"
    lines = [f"  {title:>13}  effective   easy   hard  success"]
    for period in found.periods:
        filled = round(BAR * period.effective), round(BAR * period.easy)
        bar = "█" * filled[0] + "▒" * filled[1] + "·" * (BAR - sum(filled))
        success = "-" if math.isnan(period.success) else f"{period.success:.0%}"
        steps = f"{period.first:,}" + f"-{period.last:,}" * (period.last > period.first)
        lines.append(
            f"  {steps:>13}  {period.effective:>9.0%}  {period.easy:>5.0%}  {period.hard:>5.0%}  {success:>7}  {bar}"
        )
    return [*lines, f"  {'':>13}  {'':>9}  {'':>5}  {'':>5}  {'':>7}  █ effective  ▒ easy  · hard"]


def _persistence(found: Audit) -> list[str]:
    it = found.persistence
    if it.again.cases + it.after_effective.cases == 0:
        return ["Does a prompt stay that way? Not known: every prompt occurs once. A run of several epochs shows it."]
    lines = ["Does a prompt stay that way?"]
    for words, chance in (
        ("after a zero-variance group, the prompt's next one has zero variance", it.again),
        ("after an effective group, the prompt's next one has zero variance", it.after_effective),
    ):
        lines.append(f"  {_share(chance):>4}  {words} ({chance.hits:,} of {chance.cases:,})")
    if it.again.cases >= FEW_PAIRS and it.again.share > 0.5:
        lines.append("  What a prompt did last says much about what it will do: such prompts can be skipped.")
    return lines


def _cost(groups: RecordedGroups, found: Audit) -> list[str]:
    cost = found.cost
    lines = [
        "What zero-variance groups cost"
        + (f" (in the steps recorded, one of {found.every})" if found.every > 1 else "")
    ]
    unit = "rollouts" if groups.group_size else "groups (their size is not known: --num_generations)"
    lines.append(f"  {cost.wasted_rollouts:,} of {cost.rollouts:,} {unit}")
    if cost.tokens == cost.tokens:
        about = "about " if groups.estimated_tokens else ""
        note = " (characters / 4)" if groups.estimated_tokens else ""
        lines.append(f"  {about}{_count(cost.wasted_tokens)} of {_count(cost.tokens)} tokens{note}")
    if cost.hours == cost.hours:
        kind = (
            "of generation" if math.isfinite(float(groups.seconds.sum())) and math.isnan(groups.step_seconds) else ""
        )
        lines.append(f"  {_hours(cost.wasted_hours)} of {_hours(cost.hours)} {kind}".rstrip())
    else:
        lines.append("  hours: not known; give --seconds_per_step")
    return lines


def _savings(found: Audit, projection: Projection | None, missing: str) -> list[str]:
    if projection is None:
        return [f"What selection would have saved: not projected, {missing}."] if missing else []
    hours = found.cost.run_hours
    timed = hours == hours and found.cost.rollouts > 0
    lines = ["What would have sufficed to learn as much (projected)", f"  {'':<18}rollouts   range     effective"]
    lines.append(f"  {'this run':<18}{'100%':>8}   {'':<9}{found.overall.effective:>9.0%}")
    lines += [
        f"  {saving.name:<18}{_ratio(saving.rollouts):>8}   {f'{_ratio(saving.low)}-{_ratio(saving.high)}':<9}"
        f" {saving.effective:>8.0%}"
        for saving in projection.savings
    ]
    best = projection.savings[0]
    lines.append("")
    if best.rollouts > WORTH:
        lines += _wrapped("Little is to be saved here: plain GRPO is fine for this model and these prompts.")
    else:
        saved = f"{1 - best.rollouts:.0%} of the rollouts"
        saved += f", up to {_hours(hours * (1 - best.rollouts))}" if timed else ""
        lines += [*_wrapped(f"{best.name} would save about {saved}. In a recipe of `trl-dataeff grpo`:"), ""]
        lines += [f"    {line}" for line in recipe(best).splitlines()]
    lines += ["", *_wrapped(CAVEAT)]
    if not projection.learned:
        lines += _wrapped("The recorded groups do not show that the policy improved; a usual speed is assumed.")
    gap = abs(projection.simulated - found.overall.effective)
    if gap > 0.1:
        lines += _wrapped(
            f"The simulated plain run has {projection.simulated:.0%} effective groups, this run "
            f"{found.overall.effective:.0%}: the projection fits it badly."
        )
    if found.persistence.prompts_seen_once > 0.5 * found.prompts:
        lines += _wrapped("Most prompts occur once. If the dataset has more of them, give --prompts N.")
    return lines


def recipe(saving: Saving) -> str:
    """The lines of a recipe that make a setting, the package's defaults included."""
    fields = {"selection": "dots", "replay_fraction": 0.5, **saving.fields}
    return yaml.safe_dump(fields, sort_keys=False).strip()


def _notes(groups: RecordedGroups, found: Audit) -> list[str]:
    notes = list(groups.notes)
    if not groups.has_steps:
        notes.append("No step is recorded: what is shown over time is in the order of the file (--map step=COLUMN).")
    if found.every > 1:
        notes.append(f"One step of {found.every} is recorded; with `logging_steps=1` TRL records all.")
    return ["Notes", *(line for note in notes for line in _wrapped(note, "  - "))] if notes else []


def _wrapped(text: str, begin: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False)


def _share(chance: Chance) -> str:
    return f"{chance.share:.0%}" if chance.cases else "-"


def _ratio(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "never"


def _count(value: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:,.0f}"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{hours * 60:.1f} minutes"
