"""What `trl-dataeff simulate` prints: a table of settings, and which of them to use."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from trl_dataeff.analysis.simulate import BASELINE, PATIENCE, PREDICTABILITY, Outcome, best


SATURATED = 0.97  # success rate of the learnable prompts beyond which the comparison is about their rests
CAVEAT = """\
An estimate: how much a batch contributes, and how much a replayed group adds, was fitted to runs of one small model on one synthetic task.
Larger models have not been measured."""


def report(
    args: argparse.Namespace,
    source: str,
    outcomes: dict[str, Outcome],
    settings: dict[str, dict[str, Any]],
    by_predictability: Mapping[float, dict[str, Outcome]],
) -> str:
    """
    Return the table and the advice, in Markdown.

    Args:
        args (`argparse.Namespace`):
            Options of the command.
        source (`str`):
            The prompts, in words.
        outcomes (`dict[str, Outcome]`):
            By setting.
        settings (`dict[str, dict]`):
            Fields of the configuration, by setting.
        by_predictability (`dict[float, dict[str, Outcome]]`):
            Outcomes, where embeddings say less or more, of the settings that predict; may be empty.
    """
    base = outcomes[BASELINE]
    runs = f"{args.seeds} simulated run{'s' * (args.seeds > 1)} each"
    head = [
        f"{source}; {args.groups_per_step} groups of {args.num_generations} a step.",
        f"Until each setting has learned what uniform sampling learns in {args.max_steps:,} steps: the others' success is "
        f"then {base.success:.0%} ({runs}; never: not in {PATIENCE:g} times uniform's time).",
        f"Predictability {PREDICTABILITY if args.predictability is None else args.predictability:g}"
        + (f"; rollouts/uniform also at {_words(by_predictability)}." if by_predictability else "."),
        "",
    ]
    advice = ["", *_advice(args, outcomes, settings, by_predictability), "", CAVEAT]
    return "\n".join([*head, *_table(outcomes, args.seconds_per_rollout is not None, by_predictability), *advice])


def _table(
    outcomes: dict[str, Outcome], timed: bool, by_predictability: Mapping[float, dict[str, Outcome]]
) -> list[str]:
    base = outcomes[BASELINE]
    body = [
        (
            *("setting", "steps", "rollouts", "rollouts/uniform", *(f"at {value:g}" for value in by_predictability)),
            *("effective", *(("time", "time/uniform") * timed)),
        )
    ]
    for name, o in sorted(outcomes.items(), key=lambda item: item[1].seconds):
        there = math.isfinite(o.rollouts)
        body.append(
            (
                name,
                f"{o.steps:,.0f}" if there else "never",
                f"{o.rollouts:,.0f}" if there else "never",
                *(_ratio(by.get(name, o)) for by in (outcomes, *by_predictability.values())),
                f"{o.effective:.0%}",
                *((_duration(o.seconds), f"{o.seconds / base.seconds:.2f}") if there else ("-", "-")) * timed,
            )
        )
    widths = [max(len(line[i]) for line in body) for i in range(len(body[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in body]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def _ratio(outcome: Outcome) -> str:
    return f"{outcome.ratio:.2f}" if math.isfinite(outcome.ratio) else "never"


def _share(outcome: Outcome) -> str:
    return f"{outcome.ratio:.0%}" if math.isfinite(outcome.ratio) else "never"


def _words(values: Iterable[float]) -> str:
    return " and ".join(f"{value:g}" for value in values)


def _advice(
    args: argparse.Namespace,
    outcomes: dict[str, Outcome],
    settings: dict[str, dict[str, Any]],
    by_predictability: Mapping[float, dict[str, Outcome]],
) -> list[str]:
    """Which setting to use, what to write into the recipe, and whether that hangs on predictability."""
    base, chosen = outcomes[BASELINE], best(outcomes)
    advice = []
    if base.success > SATURATED:
        advice += [
            f"By then nearly everything is learned: the savings are those of the last few per cent. Fewer --max_steps than "
            f"{args.max_steps:,} would do, and say more.",
            "",
        ]
    if chosen == BASELINE:
        advice.append("Little is to be saved here: nothing is faster than uniform sampling by more than 5 %.")
    else:
        o = outcomes[chosen]
        timed = f" and {o.seconds / base.seconds:.0%} of the time" * (args.seconds_per_rollout is not None)
        shares = [
            f"{_share(by[chosen])} at predictability {at:g}" for at, by in by_predictability.items() if chosen in by
        ]
        spread = f" ({', '.join(shares)})" if shares else ""
        advice.append(f"Take {chosen!r}: about {_share(o)} of the rollouts{spread}{timed}.")
    for value, others in by_predictability.items():
        there = best({**outcomes, **others})
        if there != chosen:
            advice.append(f"At predictability {value:g} that would be {there!r}.")
    if chosen != BASELINE and not settings[chosen]:
        advice.append("That is what the package does by default.")
    elif chosen != BASELINE:
        recipe = yaml.safe_dump(settings[chosen], sort_keys=False).splitlines()
        advice += ["In the recipe:", "", *(f"    {line}" for line in recipe)]
    return advice


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
